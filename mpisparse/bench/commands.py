"""The command line of `mpisparse bench`. Benchmarks are imported when they run, so that help needs no MPI or torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mpisparse.names import BLENDED, CODECS, SCHEMES
from mpisparse.runtime.argument_types import above_one, count, density, elements, positive, steps
from mpisparse.runtime.flags import add_arguments, add_list, resolve
from mpisparse.runtime.settings_file import read_file

CASE_SETTINGS = ("model", "data", "scheme", "density", "codec", "options", "resume", "log_every", "log_ranks")
SPARSE_MODELS = ("pruned", "embeddings", "experts")  # for bench sparse-models
CONVERGE_SETTINGS = (
    "model", "data", "steps", "batch_size", "seed", "optimizer", "lr", "momentum", "beta2", "weight_decay", "schedule",
    "warmup", "drop_at", "clip", "validation", "imports",
)  # fmt: skip
OFTEN = {"diloco": "diloco:every=4", "sparseloco": "sparseloco:every=4"}
MEMORY_CASES = tuple(OFTEN.get(name, name) for name in SCHEMES if name != "auto")  # for bench memory
GROUPS = ("partitions", "threshold", "blocks", "feedback", "codecs")  # for bench ablation


def add_commands(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of every benchmark."""
    sync = benches.add_parser("sync", help="a whole step against dense all-reduce over MPI and gloo; run under mpirun")
    _add_common(sync)
    sync.add_argument("--density", type=density, default=0.001, help="share of elements selected (default %(default)s)")
    sync.add_argument(
        "--scheme", nargs="+", default=["exdyna"], metavar="NAME", help=f"of {', '.join(SCHEMES)}; default exdyna"
    )
    plain = ", ".join(name for name in CODECS if not name.startswith(BLENDED))
    sync.add_argument("--codec", help=f"of {plain} (default: the scheme's); momentum uses momentum-CODEC")
    add_list(sync, "imports")
    sync.add_argument("--path", nargs="+", choices=("step", "backward"), default=["step", "backward"], help="default: both")
    _add_gradients(sync)
    sync.add_argument("--no-gloo", action="store_true", help="do not measure gloo")
    saving = benches.add_parser("checkpoint", help="write a checkpoint, against a plain write of the same bytes")
    _add_common(saving)
    saving.add_argument("--directory", type=Path, help="the file system to measure (default: that of temporary files)")
    train = benches.add_parser("train", help="compare schemes in real training; run under mpirun")
    train.add_argument("--models", nargs="+", default=["digits-cnn"], metavar="NAME[=DATA]", help="default digits-cnn")
    train.add_argument(
        "--cases", nargs="+", default=["dense", "exdyna"], metavar="SCHEME[:NAME=VALUE,...]", help="default dense exdyna"
    )
    train.add_argument("--seeds", type=count, default=3, help="number of seeds, from --seed on (default %(default)s)")
    train.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    add_arguments(train, leave_out=CASE_SETTINGS)
    ddp = benches.add_parser("ddp", help="whole training steps against torch's DDP with gloo; run under mpirun")
    ddp.add_argument(
        "--cases", nargs="+", default=["exdyna", "exdyna:density=0.01"], metavar="SCHEME[:NAME=VALUE,...]",
        help="default: exdyna at two densities",
    )  # fmt: skip
    ddp.add_argument("--powersgd-rank", type=count, default=4, help="rank of DDP's PowerSGD hook (default %(default)s)")
    ddp.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    ddp.add_argument("--out", type=Path, metavar="FILE.jsonl", help="also write the records here, for mpisparse report")
    add_arguments(ddp, keep=("model", "data", "steps", "batch_size", "seed", "optimizer", "lr", "momentum", "weight_decay"))
    sparse = benches.add_parser("sparse-models", help="models with sparse gradients or weights; run under mpirun")
    sparse.add_argument("--models", nargs="+", choices=SPARSE_MODELS, default=list(SPARSE_MODELS), help="default: all")
    sparse.add_argument(
        "--cases", nargs="+", metavar="SCHEME[:NAME=VALUE,...]", help="default: dense, and exdyna at two densities",
        default=["dense", "exdyna:density=0.01", "exdyna:density=0.1"],
    )  # fmt: skip
    sparse.add_argument("--seeds", type=count, default=3, help="number of seeds, from --seed on (default %(default)s)")
    sparse.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    add_arguments(sparse, leave_out=CASE_SETTINGS)
    _add_scaling(benches.add_parser("scaling", help="real ranks, then up to thousands of simulated ones; run under mpirun"))
    _add_ablation(benches.add_parser("ablation", help="exdyna with its parts changed one by one; run under mpirun"))
    _add_converge(
        benches.add_parser(
            "converge", help="loss against bytes, each case at its best learning rate; virtual workers or mpirun"
        )
    )
    overlap = benches.add_parser("overlap", help="scheme speculative against computation without exchange; run under mpirun")
    overlap.add_argument("--batch-size", type=count, default=64, help="examples per rank and step (default %(default)s)")
    overlap.add_argument("--density", type=density, default=0.2, help="share of elements to send (default %(default)s)")
    overlap.add_argument("--rounds", type=count, default=8, help="interleaved rounds of steps (default %(default)s)")
    overlap.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    nodes = benches.add_parser(
        "nodes", help="steps between all ranks and by nodes, in turn; run under mpirun on equal hosts"
    )
    nodes.add_argument("--elements", type=elements, default=12_000_000, help="float32 elements (default %(default)s)")
    nodes.add_argument(
        "--cases", nargs="+", default=["dense:codec=int4", "exdyna:density=0.01"], metavar="SCHEME[:NAME=VALUE,...]",
        help="default: dense in int4, and exdyna at density 0.01",
    )  # fmt: skip
    nodes.add_argument("--steps", type=count, default=12, help="steps of each way (default %(default)s)")
    nodes.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    nodes.add_argument("--out", type=Path, metavar="FILE.jsonl", help="also write the records here")
    memory = benches.add_parser("memory", help="what each scheme keeps beside model and gradient, by part; run under mpirun")
    memory.add_argument("--elements", type=elements, default=4_000_000, help="float32 elements (default %(default)s)")
    memory.add_argument("--density", type=density, default=0.01, help="share of elements selected (default %(default)s)")
    memory.add_argument(
        "--cases", nargs="+", default=list(MEMORY_CASES), metavar="SCHEME[:NAME=VALUE,...]", help="default: every scheme"
    )
    memory.add_argument("--steps", type=steps, default=12, help="steps of each (default %(default)s)")
    memory.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    memory.add_argument("--out", type=Path, metavar="FILE.jsonl", help="also write the records here")
    kernels = benches.add_parser("kernels", help="native kernels against plain memory passes over the same elements")
    _add_common(kernels)
    kernels.add_argument("--density", type=density, default=0.001, help="share of elements selected (default %(default)s)")


def _add_scaling(scaling: argparse.ArgumentParser) -> None:
    scaling.add_argument("--elements", type=elements, default=4_000_000, help="float32 elements (default %(default)s)")
    scaling.add_argument("--density", type=density, default=0.001, help="share of elements selected (default %(default)s)")
    scaling.add_argument(
        "--cases", nargs="+", default=["exdyna", "topk", "dense"], metavar="SCHEME[:NAME=VALUE,...]",
        help="schemes exdyna, topk, cltk, dense (with codec, overlap and hierarchy); default exdyna topk dense",
    )  # fmt: skip
    scaling.add_argument("--steps", type=steps, default=8, help="steps of each (default %(default)s)")
    scaling.add_argument(
        "--workers", nargs="*", type=count, default=[32, 64, 256, 1024, 4096], metavar="N", help="simulated ranks"
    )
    scaling.add_argument("--latency", type=positive, metavar="SECONDS", help="of a message (default: measured)")
    scaling.add_argument("--bandwidth", type=positive, metavar="BYTES/S", help="of a link (default: measured)")
    scaling.add_argument(
        "--backward", type=positive, default=0.0, metavar="SECONDS", help="of a backward, which real ranks sleep (default 0)"
    )
    scaling.add_argument(
        "--ranks-a-node", type=count, default=1, metavar="K", help="simulated ranks on a host, with one link (default 1)"
    )
    scaling.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    _add_gradients(scaling)


def _add_ablation(ablation: argparse.ArgumentParser) -> None:
    ablation.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    ablation.add_argument("--elements", type=elements, default=4_000_000, help="float32 elements (default %(default)s)")
    ablation.add_argument("--density", type=density, default=0.001, help="share of elements selected (default %(default)s)")
    ablation.add_argument("--steps", type=steps, default=40, help="steps of each variant (default %(default)s)")
    ablation.add_argument("--train", metavar="MODEL[=DATA]", help="also train this model with every variant")
    ablation.add_argument("--train-steps", type=count, default=200, help="training steps of each (default %(default)s)")
    ablation.add_argument("--train-out", type=Path, default=Path("runs/ablation"), help="where (default %(default)s)")
    ablation.add_argument("--config", type=Path, metavar="FILE.toml", help="settings of these runs")
    ablation.add_argument("--seeds", type=count, default=1, help="runs of each (default %(default)s)")
    ablation.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    _add_gradients(ablation)


def _add_converge(converge: argparse.ArgumentParser) -> None:
    converge.description = (
        "Train with one worker alone, with dense exchange and with each case, every one at its own best learning rate. "
        "How to train follows the model, whatever defaults stand below: a GPT of 0.8 million parameters, 300 steps, AdamW "
        "(0.9, 0.99, decay 0.1), clipping at 1, 40 steps of warm-up, then a cosine; lstm and image models with SGD."
    )
    converge.add_argument(
        "--case", dest="case_texts", action="append", default=[], metavar="'NAME: OPTION=VALUE ...'",
        help="a way to exchange, by options of GradientSync; may be repeated. alone and dense are always there",
    )  # fmt: skip
    converge.add_argument("--cases", dest="case_file", type=Path, metavar="FILE.toml", help="more cases, as tables [[case]]")
    converge.add_argument("--workers", type=count, help="virtual workers (default 4; under mpirun the ranks)")
    converge.add_argument("--jobs", type=count, default=1, help="processes side by side (default %(default)s)")
    converge.add_argument("--seeds", type=count, default=3, help="number of seeds, from --seed on (default %(default)s)")
    converge.add_argument("--tuning-seeds", type=count, help="seeds that pick the learning rate (default: all)")
    converge.add_argument(
        "--lr-factor", type=above_one, default=1.5, help="between neighbouring learning rates (default %(default)s)"
    )
    converge.add_argument("--rates", type=count, default=3, help="learning rates to begin with (default %(default)s)")
    converge.add_argument(
        "--stability", action="store_true",
        help="run every seed at each of --rates learning rates, and count those that diverge instead of picking a rate",
    )  # fmt: skip
    converge.add_argument("--most-rates", type=count, default=12, help="rates of a case at most (default %(default)s)")
    converge.add_argument(
        "--give-up", type=float, default=0.0, metavar="SHARE",
        help="run no further seeds of a learning rate whose validation loss is worse than the best by this share, as in "
        "0.03 (default: run all)",
    )  # fmt: skip
    converge.add_argument(
        "--eval-examples", type=count, default=1024, help="validation and test examples at the end (default %(default)s)"
    )
    converge.add_argument("--out", type=Path, default=Path("runs/converge"), help="results (default %(default)s)")
    converge.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")
    add_arguments(converge, keep=CONVERGE_SETTINGS)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--elements", type=elements, default=25_000_000, help="float32 elements (default %(default)s)")
    command.add_argument("--rounds", type=count, default=15, help="interleaved; results are medians (default %(default)s)")
    command.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")


def _add_gradients(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gradients", type=Path, metavar="RUN", help="replay what train --record-gradients wrote (default: synthetic)"
    )
    command.add_argument("--out", type=Path, metavar="FILE.jsonl", help="also write the records here, for mpisparse report")


def run_command(args: argparse.Namespace) -> int:
    """Run the benchmark that was chosen; return the exit code. Collective."""
    if args.bench == "kernels":
        from mpisparse.bench.kernels import run as run_kernels

        return run_kernels(args.elements, args.density, args.rounds, as_json=args.json)
    if args.bench == "memory":
        from mpisparse.bench import memory as bench_memory

        return bench_memory.run(
            bench_memory.MemoryPlan(
                args.elements, args.density, args.cases, args.steps, as_json=args.json, out=args.out
            )
        )  # fmt: skip
    if args.bench == "overlap":
        from mpisparse.bench.overlap import run as run_overlap

        return run_overlap(args.batch_size, args.density, args.rounds, as_json=args.json)
    if args.bench == "nodes":
        from mpisparse.bench import nodes

        plan = nodes.NodesPlan(args.elements, args.cases, args.steps, as_json=args.json, out=args.out)
        return nodes.run(plan)
    if args.bench == "checkpoint":
        from mpisparse.bench.checkpoint import run as run_checkpoint

        return run_checkpoint(args.elements, args.rounds, args.directory, as_json=args.json)
    if args.bench == "train":
        settings = resolve(vars(args))
        from mpisparse.bench.train import run as run_train

        return run_train(settings, args.models, args.cases, args.seeds, as_json=args.json)
    if args.bench == "sparse-models":
        settings = resolve(vars(args))
        from mpisparse.bench.sparse import run as run_sparse

        return run_sparse(settings, args.models, args.cases, args.seeds, as_json=args.json)
    if args.bench == "ddp":
        given = {key: value for key, value in vars(args).items() if key != "out"}
        settings = resolve(given, model="lstm-large", steps=30, batch_size=1)
        from mpisparse.bench import ddp as bench_ddp

        ddp = bench_ddp.DdpPlan(settings, args.cases, args.powersgd_rank, as_json=args.json, out=args.out)
        return bench_ddp.run(ddp)
    if args.bench == "ablation":
        return _ablation(args)
    if args.bench == "converge":
        return _converge(args)
    if args.bench == "scaling":
        from mpisparse.bench import scaling as bench_scaling

        return bench_scaling.run(
            bench_scaling.ScalingPlan(
                args.elements, args.density, args.cases, args.steps, args.workers, args.gradients, args.latency,
                args.bandwidth, args.backward, args.ranks_a_node, as_json=args.json, out=args.out,
            )
        )  # fmt: skip
    from mpisparse.bench.sync import SyncPlan
    from mpisparse.bench.sync import run as run_sync

    return run_sync(
        SyncPlan(
            args.elements, args.density, args.scheme, args.codec, args.rounds, args.path, args.gradients,
            gloo=not args.no_gloo, as_json=args.json, out=args.out,
        )
    )  # fmt: skip


def _ablation(args: argparse.Namespace) -> int:
    given = {"config": args.config, "steps": args.train_steps, "out": str(args.train_out)}
    training = resolve(given) if args.train else None
    from mpisparse.bench import ablation as bench_ablation

    return bench_ablation.run(
        bench_ablation.AblationPlan(
            args.groups, args.elements, args.density, args.steps, args.gradients, args.train, training, args.seeds,
            as_json=args.json, out=args.out,
        )
    )  # fmt: skip


def _converge(args: argparse.Namespace) -> int:
    given = {key: value for key, value in vars(args).items() if key != "out"}
    file = read_file(args.config) if args.config is not None else {}
    settings = resolve(given, **_converge_defaults(given.get("model") or file.get("model") or "gpt-nano"))
    from mpisparse.bench import converge as bench_converge
    from mpisparse.bench.converge.cases import all_cases
    from mpisparse.bench.converge.plan import ConvergePlan
    from mpisparse.bench.converge.rates import Grid

    return bench_converge.run(
        ConvergePlan(
            settings, all_cases(args.case_texts, args.case_file),
            Grid(settings.lr, args.lr_factor, args.rates, max(args.rates, args.most_rates)), args.out, args.seeds,
            min(args.tuning_seeds or args.seeds, args.seeds), args.workers or bench_converge.workers_here(),
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
