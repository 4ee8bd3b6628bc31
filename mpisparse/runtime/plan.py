"""mpisparse plan: what each exchange would cost here, or on links that are asked about. Nothing is trained.

Importing this needs neither torch nor MPI.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

from mpisparse.errors import ConfigurationError
from mpisparse.plan import candidates
from mpisparse.runtime.argument_types import count, delay, rate, slowdown
from mpisparse.runtime.flags import add_arguments
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.table import show

if TYPE_CHECKING:
    import torch

    from mpisparse.comm.exchange import Exchange
    from mpisparse.plan.messages import Selections
    from mpisparse.plan.predict import Measured, Prediction, Question
    from mpisparse.runtime.workloads import Data, Task

SETTINGS = ("model", "data", "batch_size", "accumulation", "seed", "bf16", "imports", "optimizer")
COLUMNS = {"exchange": "", "way": "", "bytes": ".4f", "exchange_ms": ".3f", "step_ms": ".3f", "of_computation": ".2f"}
FIRST, STEPS = 2, 6  # steps of computation that are not timed, and those that are


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_arguments(command, keep=SETTINGS)
    group = command.add_argument_group("what would be")
    group.add_argument(
        "--link", type=rate, metavar="RATE", help="the link of each node, such as 1gbit; default: as measured"
    )
    group.add_argument("--delay", type=delay, default=0.0, metavar="TIME", help="of that link, such as 50us (default 0)")
    group.add_argument("--ranks", type=count, metavar="N", help="how many there would be (default: as many as were started)")
    group.add_argument("--ranks-per-node", type=count, default=1, metavar="N", help="ranks that share a link (default 1)")
    command.add_argument(
        "--slowdown", type=slowdown, default=1.1, metavar="FACTOR",
        help="how long a step may take with its exchange, as a multiple of its computation (default 1.1)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON record per line")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure and print on rank 0; collective."""
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.transport import end_job_on_uncaught_exception
    from mpisparse.plan import measure
    from mpisparse.plan.predict import supposed
    from mpisparse.plan.selected import selections
    from mpisparse.runtime.setup import build_together, make_optimizer
    from mpisparse.schemes.optimizers import is_adaptive

    end_job_on_uncaught_exception()
    exchange = Exchange()
    question = _question(args, exchange)
    model, data, task = build_together(settings)
    optimizer = make_optimizer(model, settings)
    known = list(candidates.suiting(adaptive=is_adaptive(optimizer)))
    measured = _measure(exchange, model, data, task, optimizer, settings, known)
    if question is not None:
        near = measured.inside or (measured.links if measured.ranks > 1 else measure.near())
        measured = supposed(measured, near, question)
    if exchange.rank == 0:
        with exchange.place.exempt("simulating"):
            sizes = measured.ranks, measured.ranks // measured.ranks_a_node
            found = selections(known, measured.elements, sizes)
        _print(args, settings, measured, known, found)
    exchange.close()
    return 0


def _question(args: argparse.Namespace, exchange: Exchange) -> Question | None:
    """What the flags ask for; None: what is here. Collective."""
    from mpisparse.plan.predict import Question

    if args.link is not None:
        return Question(args.link, args.delay, args.ranks or exchange.size, args.ranks_per_node)
    if args.ranks is not None or args.delay or args.ranks_per_node != 1:
        raise ConfigurationError("--ranks, --ranks-per-node and --delay go with --link: pass the rate of the link, too")
    return None


def _measure(
    exchange: Exchange, model: torch.nn.Module, data: Data, task: Task, optimizer: torch.optim.Optimizer,
    settings: Settings, known: list[candidates.Candidate],
) -> Measured:  # fmt: skip
    """Measure computation, passes and links; collective."""
    from mpisparse.comm.hierarchy import find_nodes
    from mpisparse.names import NODE
    from mpisparse.plan import measure
    from mpisparse.plan.predict import Measured

    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    computing, backward = _computation(exchange, model, data, task, optimizer, settings)
    each_step = dict.fromkeys(each.each_step for each in known)  # rarer exchanges have the same passes
    passes = {each.name: measure.slowest(exchange, measure.passes(each, elements)) for each in each_step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where nodes cannot sum first, that way is left out
        nodes = find_nodes(exchange, NODE, elements, memory=False)
    links = measure.all_links(exchange, nodes)
    if nodes is not None:
        nodes.close()
    return Measured(exchange.size, elements, computing, passes=passes, backward=backward, **links)


def _computation(
    exchange: Exchange, model: torch.nn.Module, data: Data, task: Task, optimizer: torch.optim.Optimizer, settings: Settings
) -> tuple[float, float]:
    """Seconds of a step without exchange on the slowest rank, and the share of backward in it; collective."""
    import numpy as np
    import torch

    from mpisparse.plan.measure import slowest

    share = settings.batch_size * settings.accumulation
    if len(data.train) < share:
        raise ConfigurationError(
            f"a step needs {share} examples per rank, the data has {len(data.train)}; lower --batch-size"
        )
    rows = []
    model.train()
    for turn in range(FIRST + STEPS):
        exchange.allgather(np.zeros(1, dtype=np.uint8))  # ranks compute at the same time
        start, back = time.perf_counter(), 0.0
        optimizer.zero_grad()
        at = (turn * exchange.size + exchange.rank) * share
        for indices in np.split((at + np.arange(share)) % len(data.train), settings.accumulation):
            inputs, targets = data.train.batch(indices, seed=settings.seed, epoch=0, train=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.bf16):
                loss = task.loss(model(inputs), targets) / settings.accumulation
            before = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            back += time.perf_counter() - before
        optimizer.step()
        rows.append((time.perf_counter() - start, back))
    computing, back = (statistics.median(column) for column in zip(*rows[FIRST:], strict=True))
    return slowest(exchange, computing), back / computing


def _print(
    args: argparse.Namespace, settings: Settings, measured: Measured, known: list[candidates.Candidate], found: Selections
) -> None:
    """Print the table, and what would be chosen."""
    from mpisparse.plan.predict import choose, predict, reason, ways

    told = [sorted((predict(each, measured, found) for each in ways(one, measured)), key=lambda p: p.step) for one in known]
    every = [each for rows in told for each in rows]
    records = [_record(each, measured, found) for each in every]
    best = choose(every, measured.computing, args.slowdown)
    if args.json:
        show([{**each, "chosen": each == _record(best, measured, found)} for each in records], COLUMNS, as_json=True)
        return
    links = measured.links
    print(
        f"{settings.model}, {measured.elements:,} parameters, {settings.optimizer}, {measured.ranks} ranks, "
        f"{measured.ranks_a_node} on a node; computation {1e3 * measured.computing:.3g} ms"
    )
    if measured.ranks > 1:
        print(f"links: {1e6 * links.latency:.3g} us a round, {links.bandwidth / 1e6:.3g} MB/s a rank")
    show(records, COLUMNS, as_json=False)
    options = {"scheme": best.candidate.scheme, **best.candidate.options}
    words = ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in options.items())
    print(f"{best.candidate.flat.name}, {best.candidate.way}: {reason(best, measured.computing, args.slowdown)}")
    print(f"GradientSync(model, {words})")


def _record(prediction: Prediction, measured: Measured, found: Selections) -> dict[str, Any]:
    from mpisparse.plan.messages import EVEN, received_per_element

    candidate, ranks = prediction.candidate, measured.ranks
    return {
        "exchange": candidate.flat.name, "way": candidate.way,
        "bytes": received_per_element(candidate, measured.elements, ranks, found.get((candidate.flat.name, ranks), EVEN)),
        "exchange_ms": 1e3 * prediction.exchange, "step_ms": 1e3 * prediction.step,
        "of_computation": prediction.step / measured.computing,
    }  # fmt: skip
