"""bench ddp: whole training steps of a real model, against torch's DistributedDataParallel with gloo and its hooks.

All contenders train the same model on the same batches with the same dropout, one step each in turn. "computation alone"
exchanges nothing, so it is a lower bound; of_alone is its time over a contender's. DDP's hooks are torch's own: fp16 and
bf16 compression, and PowerSGD with error feedback.
A case with overlap=true has a twin that sends the same buckets in step(): what that takes is the exchange by itself, so
that max(computation, exchange) + the last bucket is what overlap can reach.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import mpisparse
from mpisparse.bench.sync import moves_weights, start_gloo
from mpisparse.bench.train import Case
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.core.buckets import Bucketed
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.schedule import Order, Position
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.setup import build_together, make_optimizer
from mpisparse.runtime.table import save, show
from mpisparse.runtime.workloads import Data, Task

COLUMNS = {
    "what": "", "ms": ".1f", "times_ddp": ".2f", "of_alone": ".2f", "exchange_ms": ".1f", "received_MB": ".3f",
    "density": ".4f", "loss": ".4f", "loss_of_ddp": ".4f", "of_bound": ".2f",
}  # fmt: skip
WARM_UP = 3
TWIN = ", in step()"
UNUSED = ("accumulation", "schedule", "warmup", "clip", "bf16", "density_warmup")
ONE_BUCKET = 1 << 14  # MB: PowerSGD's hook may mix up messages of several buckets over gloo, so it gets one bucket
ALONE, DDP = "computation alone", "DDP"


@dataclass(frozen=True)
class DdpPlan:
    """Training settings, and the schemes that compete with DDP."""

    settings: Settings
    cases: list[str]
    powersgd_rank: int
    as_json: bool = False
    out: Path | None = None


def run(plan: DdpPlan) -> int:
    """Train all contenders and print on rank 0; collective."""
    end_job_on_uncaught_exception()
    comm = MPI.COMM_WORLD
    _check(plan.settings)
    reason = start_gloo(comm)
    if reason is not None:
        raise ConfigurationError(f"DDP needs torch with gloo between all ranks: {reason}")
    try:
        contenders = _race(plan, comm)
    finally:
        torch.distributed.destroy_process_group()
    if comm.rank == 0:
        parameters = sum(p.numel() for p in contenders[0].model.parameters())
        _publish(plan, comm.size, parameters, contenders)
    return 0


def _race(plan: DdpPlan, comm: MPI.Intracomm) -> list[_Contender]:
    """Train all contenders, one step each in turn; collective."""
    model, data, task = build_together(plan.settings)
    contenders = _contenders(plan, model, task)
    order, position = Order(len(data.train), plan.settings.seed), Position()
    for step in range(plan.settings.steps or 1):
        batch = _batch(data, order, position, plan.settings, comm)
        for contender in contenders:
            torch.manual_seed(1_000_003 * step + comm.rank)  # the same dropout for all contenders
            contender.step(comm, *batch)
    for contender in contenders:
        if contender.sync is not None:
            contender.sync.close()
    comm.Barrier()
    return contenders


def _check(settings: Settings) -> None:
    """Raise ConfigurationError for settings that this benchmark would ignore; they may come from a file."""
    if (settings.steps or 0) <= WARM_UP:
        raise ConfigurationError(
            f"--steps must be at least {WARM_UP + 1}, because the first {WARM_UP} are warm-up, got {settings.steps}"
        )
    usual = Settings()
    unused = [name for name in UNUSED if getattr(settings, name) != getattr(usual, name)]
    if unused:
        raise ConfigurationError(f"bench ddp does not support {', '.join(unused)}; remove them from its settings")


def _batch(
    data: Data, order: Order, position: Position, settings: Settings, comm: MPI.Intracomm
) -> tuple[torch.Tensor, torch.Tensor]:
    indices, epoch = order.take(position, settings.batch_size, comm.rank, comm.size)
    return data.train.batch(indices, seed=settings.seed, epoch=epoch, train=True)


class _Contender:
    """A copy of the model with its optimizer, and the exchange between backward and the optimizer's step."""

    def __init__(
        self, what: str, model: torch.nn.Module, plan: DdpPlan, task: Task, exchange: Callable[[], Any] = lambda: None
    ) -> None:
        self.what = what
        self.model = model
        self.task = task
        self.optimizer = make_optimizer(model, plan.settings)
        self.exchange = exchange
        self.sync: mpisparse.GradientSync | None = None
        self.seconds: list[float] = []
        self.exchanging: list[float] = []
        self.losses: list[float] = []
        self.received: list[int] = []
        self.densities: list[float] = []

    def step(self, comm: MPI.Intracomm, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Train one step, timed from a common start until the slowest rank is done; collective."""
        comm.Barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        done = time.perf_counter()
        self.exchange()
        exchanging = time.perf_counter() - done
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.seconds.append(comm.allreduce(seconds, MPI.MAX))
        self.losses.append(comm.allreduce(loss.item()) / comm.size)
        if self.sync is not None:
            inside = _inside(self.sync)
            self.exchanging.append(sum(self.sync.stats.seconds.values()) if inside else exchanging)
            self.received.append(self.sync.stats.bytes_received)
            self.densities.append(self.sync.stats.density)


def _inside(sync: mpisparse.GradientSync) -> bool:
    """Tell whether the exchange is inside the step of an attached optimizer, or behind it."""
    return moves_weights(sync) or sync.options.of_weights


def _contenders(plan: DdpPlan, model: torch.nn.Module, task: Task) -> list[_Contender]:
    """Create all contenders, each with a copy of the same model; collective."""
    for p in model.parameters():
        torch.distributed.broadcast(p.data, 0)
    contenders = [_Contender(ALONE, copy.deepcopy(model), plan, task)]
    rank = plan.powersgd_rank
    groups = [torch.distributed.new_group() for _ in range(4)]
    power = powerSGD_hook.PowerSGDState(groups[3], matrix_approximation_rank=rank, start_powerSGD_iter=2)
    in_bf16 = lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)  # noqa: E731 - DDP refuses it by name
    hooks: dict[str, tuple[Any, Any] | None] = {
        DDP: None,
        "DDP, fp16": (groups[1], default_hooks.fp16_compress_hook),
        "DDP, bf16": (groups[2], in_bf16),
        f"DDP, PowerSGD rank {rank}": (power, powerSGD_hook.powerSGD_hook),
    }
    for (what, hook), group in zip(hooks.items(), groups, strict=True):
        bucket = ONE_BUCKET if hook is not None and hook[0] is power else None
        wrapped = DistributedDataParallel(copy.deepcopy(model), process_group=group, bucket_cap_mb=bucket)
        if hook is not None:
            wrapped.register_comm_hook(*hook)
        contenders.append(_Contender(what, wrapped, plan, task))
    twins = [text + TWIN for text in plan.cases if Case.parse(text).values.get("overlap")]
    for text in [*plan.cases, *twins]:
        case, own = Case.parse(text.removesuffix(TWIN)), copy.deepcopy(model)
        sync = mpisparse.GradientSync(own, scheme=case.scheme, **case.values)
        contender = _Contender(text, own, plan, task)
        if text.endswith(TWIN):
            _aggregator_of(sync).in_step = True
        contender.sync = sync
        if _inside(sync):
            mpisparse.attach(contender.optimizer, sync)
        else:
            contender.exchange = sync.step
        contenders.append(contender)
    return contenders


def _aggregator_of(sync: mpisparse.GradientSync) -> Bucketed:
    aggregator = sync._aggregator
    assert isinstance(aggregator, Bucketed)
    return aggregator


def _of_bound(contender: _Contender, twin: _Contender, alone: _Contender) -> float:
    """The time of an overlapped step over max(computation, exchange) + the last bucket; the median of steps."""
    assert contender.sync is not None
    aggregator = _aggregator_of(contender.sync)
    last = aggregator.buckets[aggregator.order[-1]]
    share = (last.hi - last.lo) / aggregator.buckets[-1].hi
    steps = zip(contender.seconds, twin.exchanging, alone.seconds, strict=True)
    return statistics.median([ours / (max(computing, wire) + share * wire) for ours, wire, computing in steps][WARM_UP:])


def _publish(plan: DdpPlan, ranks: int, parameters: int, contenders: list[_Contender]) -> None:
    by_name = {contender.what: contender for contender in contenders}
    ddp, lower = by_name[DDP], by_name[ALONE].seconds[WARM_UP:]
    alone = statistics.median(lower)
    tail = max(1, len(ddp.losses) // 10)
    final = statistics.mean(ddp.losses[-tail:])
    records = []
    for c in contenders:
        ratios = [theirs / ours for theirs, ours in zip(ddp.seconds[WARM_UP:], c.seconds[WARM_UP:], strict=True)]
        record: dict[str, Any] = {
            "what": c.what, "ms": 1e3 * statistics.median(c.seconds[WARM_UP:]), "times_ddp": statistics.median(ratios),
            "of_alone": statistics.median(a / b for a, b in zip(lower, c.seconds[WARM_UP:], strict=True)),
            "parameters": parameters, "ranks": ranks, "steps": len(c.losses), "batch_size": plan.settings.batch_size,
        }  # fmt: skip
        if c.what != ALONE:
            loss = statistics.mean(c.losses[-tail:])
            record |= {"loss": loss, "loss_of_ddp": loss / final, "loss_by_step": c.losses}
        if c.sync is not None:
            record |= {
                "exchange_ms": 1e3 * statistics.median(c.exchanging[WARM_UP:]),
                "received_MB": statistics.mean(c.received) / 1e6,
                "density": statistics.mean(c.densities),
            }
        if c.what + TWIN in by_name:
            record["of_bound"] = _of_bound(c, by_name[c.what + TWIN], by_name[ALONE])
        records.append(record)
    if not plan.as_json:
        print(f"{plan.settings.model}, {parameters:,} parameters, {ranks} ranks, {len(ddp.losses)} steps; medians of steps")
    show(records, COLUMNS, as_json=plan.as_json)
    if not plan.as_json:
        synchronising = statistics.median(ddp.seconds[WARM_UP:]) - alone
        bound = statistics.median(ddp.seconds[WARM_UP:]) / alone
        share = alone / synchronising
        print(
            f"bound: computation alone is {bound:.2f} times as fast as DDP and takes {share:.2f} times what DDP adds to it"
        )
        print(f"loss: mean over ranks and the last {tail} steps")
    save("ddp", records, plan.out)
