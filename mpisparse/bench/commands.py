"""The command line of `mpisparse bench`. Benchmarks are imported when they run, so that help needs no MPI or torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from mpisparse.bench import parsers
from mpisparse.runtime.flags import resolve
from mpisparse.runtime.settings_file import read_file


def add_commands(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of every benchmark."""
    for name, bench in BENCHES.items():
        bench.add_arguments(benches.add_parser(name, help=bench.help))


def run_command(args: argparse.Namespace) -> int:
    """Run the benchmark that was chosen; return the exit code. Collective."""
    return BENCHES[args.bench].run(args)


def _sync(args: argparse.Namespace) -> int:
    from mpisparse.bench import sync

    return sync.run(
        sync.SyncPlan(
            args.elements, args.density, args.scheme, args.codec, args.rounds, args.path, args.gradients,
            gloo=not args.no_gloo, as_json=args.json, out=args.out,
        )
    )  # fmt: skip


def _checkpoint(args: argparse.Namespace) -> int:
    from mpisparse.bench import checkpoint

    return checkpoint.run(args.elements, args.rounds, args.directory, as_json=args.json)


def _train(args: argparse.Namespace) -> int:
    settings = resolve(vars(args))
    from mpisparse.bench import train

    return train.run(settings, args.models, args.cases, args.seeds, as_json=args.json)


def _ddp(args: argparse.Namespace) -> int:
    given = {key: value for key, value in vars(args).items() if key != "out"}
    settings = resolve(given, model="lstm-large", steps=30, batch_size=1)
    from mpisparse.bench import ddp

    return ddp.run(ddp.DdpPlan(settings, args.cases, args.powersgd_rank, as_json=args.json, out=args.out))


def _sparse_models(args: argparse.Namespace) -> int:
    settings = resolve(vars(args))
    from mpisparse.bench import sparse

    return sparse.run(settings, args.models, args.cases, args.seeds, as_json=args.json)


def _scaling(args: argparse.Namespace) -> int:
    from mpisparse.bench import scaling

    return scaling.run(
        scaling.ScalingPlan(
            args.elements, args.density, args.cases, args.steps, args.workers, args.gradients, args.latency,
            args.bandwidth, args.backward, args.ranks_a_node, as_json=args.json, out=args.out,
        )
    )  # fmt: skip


def _ablation(args: argparse.Namespace) -> int:
    given = {"config": args.config, "steps": args.train_steps, "out": str(args.train_out)}
    training = resolve(given) if args.train else None
    from mpisparse.bench import ablation

    return ablation.run(
        ablation.AblationPlan(
            args.groups, args.elements, args.density, args.steps, args.gradients, args.train, training, args.seeds,
            as_json=args.json, out=args.out,
        )
    )  # fmt: skip


def _converge(args: argparse.Namespace) -> int:
    given = {key: value for key, value in vars(args).items() if key != "out"}
    file = read_file(args.config) if args.config is not None else {}
    settings = resolve(given, **_converge_defaults(given.get("model") or file.get("model") or "gpt-nano"))
    from mpisparse.bench import converge
    from mpisparse.bench.converge.cases import all_cases
    from mpisparse.bench.converge.plan import ConvergePlan
    from mpisparse.bench.converge.rates import Grid

    return converge.run(
        ConvergePlan(
            settings, all_cases(args.case_texts, args.case_file),
            Grid(settings.lr, args.lr_factor, args.rates, max(args.rates, args.most_rates)), args.out, args.seeds,
            min(args.tuning_seeds or args.seeds, args.seeds), args.workers or converge.workers_here(),
            args.eval_examples, args.jobs, args.give_up, args.stability, as_json=args.json,
        )
    )  # fmt: skip


def _converge_defaults(model: str) -> dict[str, Any]:
    """Return the usual settings of a workload: AdamW for transformers, else SGD with momentum."""
    common = {"model": model, "steps": 300, "schedule": "cosine", "warmup": 40, "validation": 1 / 19}  # a text: 90, 5, 5 %
    if model.startswith(("gpt", "bert")):
        adamw = {"optimizer": "adamw", "beta2": 0.99, "weight_decay": 0.1, "clip": 1.0}
        return {**common, **adamw, "batch_size": 8, "lr": 3e-3}
    if model.startswith("lstm"):
        return {**common, "batch_size": 16, "lr": 1.0, "clip": 1.0}
    return {**common, "batch_size": 32, "lr": 0.05}


def _overlap(args: argparse.Namespace) -> int:
    from mpisparse.bench import overlap

    return overlap.run(args.batch_size, args.density, args.rounds, as_json=args.json)


def _nodes(args: argparse.Namespace) -> int:
    from mpisparse.bench import nodes

    return nodes.run(nodes.NodesPlan(args.elements, args.cases, args.steps, as_json=args.json, out=args.out))


def _memory(args: argparse.Namespace) -> int:
    from mpisparse.bench import memory

    return memory.run(
        memory.MemoryPlan(args.elements, args.density, args.cases, args.steps, as_json=args.json, out=args.out)
    )


def _kernels(args: argparse.Namespace) -> int:
    from mpisparse.bench import kernels

    return kernels.run(args.elements, args.density, args.rounds, as_json=args.json)


class Bench(NamedTuple):
    """A benchmark: its line of help, what adds its flags to a parser, and what runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


BENCHES = {
    "sync": Bench("a whole step against dense all-reduce over MPI and gloo; run under mpirun", parsers.add_sync, _sync),
    "checkpoint": Bench("write a checkpoint, against a plain write of the same bytes", parsers.add_checkpoint, _checkpoint),
    "train": Bench("compare schemes in real training; run under mpirun", parsers.add_train, _train),
    "ddp": Bench("whole training steps against torch's DDP with gloo; run under mpirun", parsers.add_ddp, _ddp),
    "sparse-models": Bench(
        "models with sparse gradients or weights; run under mpirun", parsers.add_sparse_models, _sparse_models
    ),
    "scaling": Bench("real ranks, then up to thousands of simulated ones; run under mpirun", parsers.add_scaling, _scaling),
    "ablation": Bench("exdyna with its parts changed one by one; run under mpirun", parsers.add_ablation, _ablation),
    "converge": Bench(
        "loss against bytes, each case at its best learning rate; virtual workers or mpirun", parsers.add_converge, _converge
    ),
    "overlap": Bench(
        "scheme speculative against computation without exchange; run under mpirun", parsers.add_overlap, _overlap
    ),
    "nodes": Bench(
        "steps between all ranks and by nodes, in turn; run under mpirun on equal hosts", parsers.add_nodes, _nodes
    ),
    "memory": Bench(
        "what each scheme keeps beside model and gradient, by part; run under mpirun", parsers.add_memory, _memory
    ),
    "kernels": Bench("native kernels against plain memory passes over the same elements", parsers.add_kernels, _kernels),
}
