"""The command line. Commands import what they need when they run, so that help and usage errors need no MPI or torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpisparse.bench import commands as bench_commands
from mpisparse.comm.world import first_task
from mpisparse.errors import ConfigurationError
from mpisparse.runtime import plan, sbatch
from mpisparse.runtime.argument_types import count
from mpisparse.runtime.command_parser import CommandParser
from mpisparse.runtime.flags import add_arguments, add_list, resolve
from mpisparse.runtime.settings import import_modules
from mpisparse.stopping import StopRequest, ignore
from mpisparse.version import __version__

PATIENCE = 3.0  # seconds that tasks of srun wait for the first one to print an error
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it first allocates: passes over gradients in huge pages are faster


EXAMPLES = {
    "": [
        "mpirun -n 4 mpisparse train --density 0.01 --out runs/first",
        "mpisparse report runs/first",
        "mpisparse COMMAND --help",
    ],
    "train": [
        "mpirun -n 4 mpisparse train --model digits-cnn --density 0.01 --out runs/first",
        "mpirun -n 4 mpisparse train --scheme drift --codec int4 --option every=4 --steps 1000",
        "mpisparse train --model gpt-nano --dry-run 8           # settings, memory and bytes of 8 ranks; trains nothing",
        "mpirun -n 4 mpisparse train --config runs/first/config.toml --out runs/again",
    ],
    "slurm": [
        "mpisparse slurm --nodes 4 --time 12:00:00 -- train --model resnet18 > job.sbatch",
        "mpisparse slurm --nodes 4 -- python mine.py > job.sbatch",
    ],
    "plan": [
        "mpirun -n 4 mpisparse plan --model gpt-nano --optimizer adamw",
        "mpisparse plan --model gpt-nano --link 1gbit --delay 50us --ranks 64 --ranks-per-node 8",
    ],
    "report": ["mpisparse report runs/first", "mpisparse report runs/first runs/second --out both.html"],
    "inspect": ["mpisparse inspect runs/first --verify"],
    "export": ["mpisparse export runs/first model.safetensors", "mpisparse export runs/first model.pt --overwrite"],
    "doctor": ["mpirun -n 2 mpisparse doctor"],
    "bench": ["mpirun -n 2 mpisparse bench sync", "mpisparse bench sync --help"],
}


def parser() -> CommandParser:
    """Build the parser for all commands."""
    top = CommandParser(
        prog="mpisparse", description="Sparse, error-compensated gradient exchange over MPI for torch models.",
        examples=EXAMPLES[""],
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"mpisparse {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)

    def add(name: str, text: str, **options: Any) -> CommandParser:
        return commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", examples=EXAMPLES[name], **options
        )

    train = add(
        "train", "train a built-in or your own torch model; run under mpirun or srun",
        usage="mpisparse train [--config FILE.toml] [--dry-run [RANKS]] [settings]   (mpisparse train --help lists them)",
    )  # fmt: skip
    train.add_argument(
        "--dry-run", type=count, nargs="?", const=0, default=None, metavar="RANKS",
        help="print the resolved settings, memory per rank and bytes per step of so many ranks, and train nothing",
    )  # fmt: skip
    add_arguments(train)
    sbatch.add_arguments(add("slurm", "print an sbatch script that runs train or your own program; needs no MPI"))
    plan.add_flags(add("plan", "measure computation and links, and predict the step of each exchange; trains nothing"))
    report = add("report", "write an HTML page of charts, from runs or from records of bench")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory, or a FILE.jsonl of bench")
    report.add_argument("--pictures", type=Path, metavar="DIR", help="also write each chart of bench records as an SVG file")
    report.add_argument("--out", type=Path, metavar="FILE.html", help="the page to write (default: in the run's directory)")
    report.add_argument("--serve", action="store_true", help="write no file; show runs in a browser while they go on")
    report.add_argument("--port", type=int, metavar="N", help="with --serve: the port on this host (default 8765; 0: any)")
    inspect = add("inspect", "show the contents of a checkpoint")
    inspect.add_argument("directory", type=Path, help="a checkpoint, a directory of checkpoints, or a run's directory")
    inspect.add_argument("--verify", action="store_true", help="read everything and check all digests")
    inspect.add_argument("--json", action="store_true", help="print one JSON record per checkpoint")
    add_list(inspect, "imports")
    export = add("export", "write the model of a run to a file for inference; needs no MPI")
    export.add_argument("source", type=Path, metavar="RUN", help="a run's directory, or a checkpoint")
    export.add_argument("target", type=Path, metavar="FILE", help="model.safetensors, or model.pt for a plain state_dict")
    export.add_argument("--overwrite", action="store_true", help="replace an existing file")
    doctor = add("doctor", "show which MPI, kernels, GPUs and Slurm are here")
    doctor.add_argument("--json", action="store_true", help="print one JSON record")
    doctor.add_argument(
        "--gpu",
        type=Path,
        metavar="FILE",
        help="check the GPU's kernels bit by bit, measure their bandwidths, and write both to a file; needs no MPI",
    )
    bench = add("bench", "measure the exchange and its kernels")
    bench_commands.add_commands(
        bench.add_subparsers(dest="bench", required=True, metavar="WHAT", parser_class=CommandParser)
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    os.environ.setdefault(HUGE_PAGES, "1")
    known = parser()
    if "_ARGCOMPLETE" in os.environ:
        complete(known)
    args = known.parse_args(argv)
    code = 1
    try:
        import_modules(getattr(args, "imports", ()))
        code = COMMANDS[args.command](args)
    except ConfigurationError as error:
        if not _printed_by_another(error):
            print(f"mpisparse {args.command}: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:  # as `| head` does; the rest, and what Python flushes at its end, goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if argv is None and code:
            ignore()  # srun and mpirun kill all ranks when the first one fails; let each exit with its own code
    return code


def _printed_by_another(error: ConfigurationError) -> bool:
    """Return whether another rank prints this error. Tasks of srun wait for the first one to print it and to end the job."""
    if error.repeated or first_task():
        return error.repeated
    stop = StopRequest()
    until = time.monotonic() + PATIENCE
    while not stop.asked and time.monotonic() < until:
        time.sleep(0.05)
    stop.restore()
    return stop.asked


def complete(known: CommandParser) -> None:
    """Answer a shell that completes a command, if the extra is installed; that ends the process."""
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(known)


def _train(args: argparse.Namespace) -> int:
    settings = resolve(vars(args))
    if args.dry_run is not None:
        from mpisparse.runtime import dry_run

        return dry_run.run(settings, args.dry_run or None)
    stop = StopRequest()  # before the slow imports, during which a signal must not kill the process
    from mpisparse.runtime.train import run

    try:
        return run(settings, stop)
    finally:
        stop.restore()


def _slurm(args: argparse.Namespace) -> int:
    return sbatch.run(args, lambda words: resolve(vars(parser().parse_args(words))))


def _plan(args: argparse.Namespace) -> int:
    return plan.run(args, resolve({name: value for name, value in vars(args).items() if name in (*plan.SETTINGS, "config")}))


def _report(args: argparse.Namespace) -> int:
    if args.serve:
        return _serve(args)
    if args.port is not None:
        raise ConfigurationError("--port needs --serve; add it, or leave --port out")
    from mpisparse.runtime.report import write

    print(f"report: {write(args.runs, args.out, args.pictures)}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    if args.out is not None or args.pictures is not None:
        raise ConfigurationError("--serve writes no file, got --out or --pictures; leave them out, or --serve")
    from mpisparse.runtime.report.serve import PORT, serve

    serve(args.runs, PORT if args.port is None else args.port)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from mpisparse.runtime.inspect import run

    return run(args.directory, verify=args.verify, as_json=args.json)


def _export(args: argparse.Namespace) -> int:
    from mpisparse.checkpoint import export
    from mpisparse.errors import CheckpointError

    try:
        saved = export(args.source, args.target, overwrite=args.overwrite)
    except CheckpointError as error:
        print(f"mpisparse export: {error}", file=sys.stderr)
        return 1
    print(f"export: {args.target}, {len(saved.tensors)} tensors of step {saved.step}, from {saved.path}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.gpu is not None:
        from mpisparse.runtime import gpu_report

        return gpu_report.run(args.gpu)
    from mpisparse.runtime.doctor import run

    return run(as_json=args.json)


COMMANDS = {
    "train": _train,
    "slurm": _slurm,
    "plan": _plan,
    "report": _report,
    "inspect": _inspect,
    "export": _export,
    "doctor": _doctor,
    "bench": bench_commands.run_command,
}


if __name__ == "__main__":
    sys.exit(main())
