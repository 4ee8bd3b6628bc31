"""The command line. Help and bad options need neither MPI nor torch: commands import what they use when they run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpisparse import __version__
from mpisparse.errors import ConfigurationError
from mpisparse.names import BLENDED, CODECS, SCHEMES
from mpisparse.runtime import sbatch, slurm
from mpisparse.runtime.settings import add_arguments, add_list, import_modules, resolve
from mpisparse.runtime.signals import StopRequest, ignore

PATIENCE = 3.0  # seconds
CASE_SETTINGS = ("model", "data", "scheme", "density", "codec", "options", "resume", "log_every", "log_ranks")
SPARSE_MODELS = ("pruned", "embeddings", "experts")  # of bench sparse-models
GROUPS = ("partitions", "threshold", "blocks", "feedback", "codecs")  # of bench ablation


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="mpisparse", description="Sparse, error-compensated gradient exchange over MPI for torch models."
    )
    top.add_argument("--version", action="version", version=f"mpisparse {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a built-in workload or any torch model; run it under mpirun or srun")
    add_arguments(train)
    sbatch.add_arguments(commands.add_parser("slurm", help="print a script for sbatch that runs train; needs no MPI"))
    report = commands.add_parser("report", help="plots and a page from run directories, or from records of bench")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory, or a FILE.jsonl of bench")
    report.add_argument("--pictures", type=Path, metavar="DIR", help="of records: every picture as an SVG file too")
    report.add_argument("--out", type=Path, metavar="FILE.html", help="where to write (default: in the run's directory)")
    inspect = commands.add_parser("inspect", help="what is inside a checkpoint")
    inspect.add_argument("directory", type=Path, help="a checkpoint, a directory of checkpoints, or a run's directory")
    inspect.add_argument("--verify", action="store_true", help="read everything and check all digests")
    inspect.add_argument("--json", action="store_true", help="print one JSON record a checkpoint")
    add_list(inspect, "imports")
    doctor = commands.add_parser("doctor", help="what MPI, kernels, GPUs and Slurm are here")
    doctor.add_argument("--json", action="store_true", help="print one JSON record")
    bench = commands.add_parser("bench", help="measure the exchange and its kernels")
    _add_benches(bench.add_subparsers(dest="bench", required=True, metavar="WHAT"))
    return top


def _add_benches(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sync = benches.add_parser("sync", help="a whole step against dense all-reduce over MPI and gloo; run it under mpirun")
    _add_common(sync)
    sync.add_argument("--density", type=_density, default=0.001, help="share of elements selected (default %(default)s)")
    sync.add_argument(
        "--scheme", nargs="+", default=["exdyna"], metavar="NAME", help=f"of {', '.join(SCHEMES)}; default exdyna"
    )
    plain = ", ".join(name for name in CODECS if not name.startswith(BLENDED))
    sync.add_argument("--codec", help=f"of {plain} (default: the scheme's); momentum sends momentum-CODEC")
    add_list(sync, "imports")
    sync.add_argument("--path", nargs="+", choices=("step", "backward"), default=["step", "backward"], help="default: both")
    _add_gradients(sync)
    sync.add_argument("--no-gloo", action="store_true", help="leave the gloo peer out")
    saving = benches.add_parser("checkpoint", help="writing a checkpoint against a plain write of the same bytes")
    _add_common(saving)
    saving.add_argument("--directory", type=Path, help="the file system to measure (default: that of temporary files)")
    train = benches.add_parser("train", help="schemes beside each other on real training; run it under mpirun")
    train.add_argument("--models", nargs="+", default=["digits-cnn"], metavar="NAME[=DATA]", help="default digits-cnn")
    train.add_argument(
        "--cases", nargs="+", default=["dense", "exdyna"], metavar="SCHEME[:NAME=VALUE,...]", help="default dense exdyna"
    )
    train.add_argument("--seeds", type=_count, default=3, help="runs of each, from --seed on (default %(default)s)")
    train.add_argument("--json", action="store_true", help="one JSON record a line instead of a table")
    add_arguments(train, leave_out=CASE_SETTINGS)
    ddp = benches.add_parser("ddp", help="whole training steps against torch's DDP with gloo; run it under mpirun")
    ddp.add_argument(
        "--cases", nargs="+", default=["exdyna", "exdyna:density=0.01"], metavar="SCHEME[:NAME=VALUE,...]",
        help="default exdyna with two densities",
    )  # fmt: skip
    ddp.add_argument("--powersgd-rank", type=_count, default=4, help="of DDP's PowerSGD hook (default %(default)s)")
    ddp.add_argument("--json", action="store_true", help="one JSON record a line instead of a table")
    ddp.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write the records there too, for mpisparse report")
    add_arguments(ddp, keep=("model", "data", "steps", "batch_size", "seed", "optimizer", "lr", "momentum", "weight_decay"))
    sparse = benches.add_parser("sparse-models", help="models that are sparse themselves; run it under mpirun")
    sparse.add_argument("--models", nargs="+", choices=SPARSE_MODELS, default=list(SPARSE_MODELS), help="default: all")
    sparse.add_argument(
        "--cases", nargs="+", metavar="SCHEME[:NAME=VALUE,...]", help="default dense, exdyna with two densities",
        default=["dense", "exdyna:density=0.01", "exdyna:density=0.1"],
    )  # fmt: skip
    sparse.add_argument("--seeds", type=_count, default=3, help="runs of each, from --seed on (default %(default)s)")
    sparse.add_argument("--json", action="store_true", help="one JSON record a line instead of a table")
    add_arguments(sparse, leave_out=CASE_SETTINGS)
    _add_scaling(benches.add_parser("scaling", help="real ranks, then simulated ones up to thousands; run it under mpirun"))
    _add_ablation(benches.add_parser("ablation", help="exdyna with its parts changed one by one; run it under mpirun"))
    overlap = benches.add_parser("overlap", help="scheme speculative against computing alone; run it under mpirun")
    overlap.add_argument("--batch-size", type=_count, default=64, help="examples a step (default %(default)s)")
    overlap.add_argument("--density", type=_density, default=0.2, help="share of elements sent (default %(default)s)")
    overlap.add_argument("--rounds", type=_count, default=8, help="blocks of steps that take turns (default %(default)s)")
    overlap.add_argument("--json", action="store_true", help="print one record a line instead of a table")
    kernels = benches.add_parser("kernels", help="native kernels against plain memory passes of the same elements")
    _add_common(kernels)
    kernels.add_argument("--density", type=_density, default=0.001, help="share of elements selected (default %(default)s)")


def _add_scaling(scaling: argparse.ArgumentParser) -> None:
    scaling.add_argument("--elements", type=_elements, default=4_000_000, help="float32 elements (default %(default)s)")
    scaling.add_argument("--density", type=_density, default=0.001, help="share of elements selected (default %(default)s)")
    scaling.add_argument(
        "--cases", nargs="+", default=["exdyna", "topk", "dense"], metavar="SCHEME[:NAME=VALUE,...]",
        help="of exdyna, topk, cltk, dense; default exdyna topk dense",
    )  # fmt: skip
    scaling.add_argument("--steps", type=_steps, default=8, help="steps of each (default %(default)s)")
    scaling.add_argument(
        "--workers", nargs="*", type=_count, default=[32, 64, 256, 1024, 4096], metavar="N", help="virtual ones"
    )
    scaling.add_argument("--latency", type=_positive, metavar="SECONDS", help="of a cluster's messages (default: measured)")
    scaling.add_argument("--bandwidth", type=_positive, metavar="BYTES/S", help="of a cluster's links (default: measured)")
    scaling.add_argument("--json", action="store_true", help="print one record a line instead of a table")
    _add_gradients(scaling)


def _add_ablation(ablation: argparse.ArgumentParser) -> None:
    ablation.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    ablation.add_argument("--elements", type=_elements, default=4_000_000, help="float32 elements (default %(default)s)")
    ablation.add_argument("--density", type=_density, default=0.001, help="share of elements selected (default %(default)s)")
    ablation.add_argument("--steps", type=_steps, default=40, help="steps of each variant (default %(default)s)")
    ablation.add_argument("--train", metavar="MODEL[=DATA]", help="train every variant on this too")
    ablation.add_argument("--train-steps", type=_count, default=200, help="so long (default %(default)s)")
    ablation.add_argument("--train-out", type=Path, default=Path("runs/ablation"), help="into there (default %(default)s)")
    ablation.add_argument("--config", type=Path, metavar="FILE.toml", help="with these settings")
    ablation.add_argument("--seeds", type=_count, default=1, help="runs of each (default %(default)s)")
    ablation.add_argument("--json", action="store_true", help="print one record a line instead of a table")
    _add_gradients(ablation)


def _ablation(args: argparse.Namespace) -> int:
    given = {"config": args.config, "steps": args.train_steps, "out": str(args.train_out)}
    training = resolve(given) if args.train else None
    from mpisparse.bench import ablation as bench_ablation

    return bench_ablation.run(
        bench_ablation.Plan(
            args.groups, args.elements, args.density, args.steps, args.gradients, args.train, training, args.seeds,
            as_json=args.json, out=args.out,
        )
    )  # fmt: skip


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--elements", type=_elements, default=25_000_000, help="float32 elements (default %(default)s)")
    command.add_argument("--rounds", type=_count, default=15, help="interleaved rounds, of which medians are taken")
    command.add_argument("--json", action="store_true", help="print one record a line instead of a table")


def _add_gradients(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gradients", type=Path, metavar="RUN", help="replay what train --record-gradients wrote (default: synthetic ones)"
    )
    command.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write the records there too, for mpisparse report")


def _count(text: str) -> int:
    try:
        value = int(float(text)) if "e" in text.lower() else int(text.replace("_", ""))
    except (ValueError, OverflowError):
        value = 0
    if not 1 <= value < 2**53:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1 and below 2^53, got {text[:40]!r}")
    return value


def _elements(text: str) -> int:
    value = _count(text)
    if value > 2**36:
        raise argparse.ArgumentTypeError(f"expected at most 2^36 elements, 256 GiB, got {text!r}")
    return value


def _steps(text: str) -> int:
    value = _count(text)
    if value < 4:
        raise argparse.ArgumentTypeError(f"expected at least 4 steps, because the first two are not judged, got {text!r}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _density(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    code = 1
    try:
        import_modules(getattr(args, "imports", ()))
        code = COMMANDS[args.command](args)
    except ConfigurationError as error:
        if not _said_by_another(error):
            print(f"mpisparse {args.command}: {error}", file=sys.stderr)
        code = error.exit_code
    finally:
        if argv is None and code:
            ignore()  # srun and mpirun end all ranks when the first one leaves so: each is to leave with its own exit code
    return code


def _said_by_another(error: ConfigurationError) -> bool:
    """Whether another rank says the same. Tasks of srun wait for the first to say it, and for srun to end all after that."""
    if error.repeated or slurm.first_task():
        return error.repeated
    stop = StopRequest()
    until = time.monotonic() + PATIENCE
    while not stop.asked and time.monotonic() < until:
        time.sleep(0.05)
    stop.restore()
    return stop.asked


def _train(args: argparse.Namespace) -> int:
    settings = resolve(vars(args))
    stop = StopRequest()  # before the imports that take seconds: a signal must not find the default handler
    from mpisparse.runtime.train import run

    try:
        return run(settings, stop)
    finally:
        stop.restore()


def _slurm(args: argparse.Namespace) -> int:
    return sbatch.run(args, lambda words: resolve(vars(parser().parse_args(words))))


def _report(args: argparse.Namespace) -> int:
    from mpisparse.runtime.report import write

    print(f"report: {write(args.runs, args.out, args.pictures)}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from mpisparse.runtime.inspect import run

    return run(args.directory, verify=args.verify, as_json=args.json)


def _doctor(args: argparse.Namespace) -> int:
    from mpisparse.runtime.doctor import run

    return run(as_json=args.json)


def _bench(args: argparse.Namespace) -> int:
    if args.bench == "kernels":
        from mpisparse.bench.kernels import run as run_kernels

        return run_kernels(args.elements, args.density, args.rounds, as_json=args.json)
    if args.bench == "overlap":
        from mpisparse.bench.overlap import run as run_overlap

        return run_overlap(args.batch_size, args.density, args.rounds, as_json=args.json)
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

        plan = bench_ddp.Plan(settings, args.cases, args.powersgd_rank, as_json=args.json, out=args.out)
        return bench_ddp.run(plan)
    if args.bench == "ablation":
        return _ablation(args)
    if args.bench == "scaling":
        from mpisparse.bench import scaling as bench_scaling

        return bench_scaling.run(
            bench_scaling.Plan(
                args.elements, args.density, args.cases, args.steps, args.workers, args.gradients, args.latency,
                args.bandwidth, as_json=args.json, out=args.out,
            )
        )  # fmt: skip
    from mpisparse.bench.sync import Plan
    from mpisparse.bench.sync import run as run_sync

    return run_sync(
        Plan(
            args.elements, args.density, args.scheme, args.codec, args.rounds, args.path, args.gradients,
            gloo=not args.no_gloo, as_json=args.json, out=args.out,
        )
    )  # fmt: skip


COMMANDS = {"train": _train, "slurm": _slurm, "report": _report, "inspect": _inspect, "doctor": _doctor, "bench": _bench}


if __name__ == "__main__":
    sys.exit(main())
