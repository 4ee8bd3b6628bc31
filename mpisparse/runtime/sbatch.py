"""Scripts for sbatch that train and requeue themselves until training is done: by mpisparse train, or a user's program.

No MPI, no torch.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.launcher import MPI_NAMES, JobLauncher, choose_launcher
from mpisparse.stopping import INTERRUPTED, parse_time

# Export nothing for GPUs: an MPI built for them uses GPU memory by itself, another may abort in MPI_Init if asked to.
GPU_MEMORY = (
    "# A CUDA-aware MPI uses GPU memory directly; otherwise selected values go through host memory (see mpisparse doctor)"
)
CRAY_GPU_MEMORY = "# export MPICH_GPU_SUPPORT_ENABLED=1  # only if mpi4py was built with craype-accel-*, else MPI_Init fails"
OTHER_COMMANDS = ("bench", "doctor", "export", "inspect", "plan", "report", "slurm")  # of mpisparse, which are no jobs
SIGNAL_SECONDS = (30, 300)  # before the time limit: minimum, maximum


@dataclass(frozen=True)
class Request:
    """What a script does. `words` is the command that trains: train and its flags, or a user's own program."""

    launcher: JobLauncher
    words: Sequence[str]
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    time: str = "1:00:00"
    account: str | None = None
    partition: str | None = None
    job_name: str = "mpisparse"
    restarts: int = 20
    setup: Sequence[str] = field(default_factory=tuple)
    sweep: str | None = None
    settings_in_sweep: int = 0
    container: str | None = None

    @property
    def own(self) -> bool:
        """Whether a program of the user's trains."""
        return self.words[0] != "train"


def script(request: Request) -> str:
    """Return a script for sbatch that trains, restarts after preemption and the time limit, and reports how it ended."""
    parts = [_head(request), _environment(request), _start(request), _ending(request)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(request: Request) -> list[str]:
    limit = parse_time(request.time, left=False)
    if limit is None or limit < 60:
        raise ConfigurationError(f"--time is MINUTES, HH:MM:SS or DAYS-HH:MM:SS, at least one minute; got {request.time!r}")
    ahead = min(max(limit // 10, SIGNAL_SECONDS[0]), SIGNAL_SECONDS[1])
    by_mpirun = request.launcher.command == "mpirun"
    array = request.sweep is not None
    options = [
        (f"--job-name={request.job_name}", ""),
        (f"--account={request.account}" if request.account else "", ""),
        (f"--partition={request.partition}" if request.partition else "", ""),
        (f"--array=1-{request.settings_in_sweep}" if array else "", "one task per line of settings"),
        (f"--nodes={request.nodes}", ""),
        (f"--ntasks-per-node={request.ranks_per_node}", "ranks per node"),
        (f"--cpus-per-task={request.cpus_per_rank}", "threads per rank"),
        (f"--gpus-per-node={request.gpus_per_node}" if request.gpus_per_node else "", "one per rank"),
        (f"--time={request.time}", ""),
        (
            f"--signal={'B:' if by_mpirun else ''}USR1@{ahead}",
            f"{'this shell' if by_mpirun else 'all ranks'}: checkpoint and exit",
        ),
        ("--requeue", "after preemption and a lost node"),
        ("--open-mode=append", "a restarted job appends to its log"),
        (f"--output=%x-%j{'-%a' if array else ''}.log", ""),
    ]
    lines = [f"#SBATCH {option:<28}# {text}" if text else f"#SBATCH {option}" for option, text in options if option]
    ranks = request.nodes * request.ranks_per_node
    what = f"{ranks} ranks on {request.nodes} nodes" + (", one GPU each" if request.gpus_per_node else "")
    return [
        "#!/bin/bash",
        f"# mpisparse: {what}. {'Arguments' if request.own else 'Settings'} after the script's name are added: "
        "sbatch SCRIPT --seed 7",
        *lines,
    ]


def _environment(request: Request) -> list[str]:
    lines = [*request.setup] or [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
    lines.append("export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}")
    if request.launcher.command == "mpirun":
        lines.append(
            "export SLURM_KILL_BAD_EXIT=1             # --kill-on-bad-exit=1 for the srun that starts mpirun's daemons"
        )
        lines.append("unset SLURM_NTASKS_PER_NODE              # which that srun would use as the number of daemons")
    else:
        lines.append("export SRUN_CPUS_PER_TASK=$OMP_NUM_THREADS  # since Slurm 22.05 srun does not inherit it from sbatch")
    if request.gpus_per_node:
        lines += [GPU_MEMORY, *([CRAY_GPU_MEMORY] if request.launcher.mpi == "cray" else [])]
    if request.container is not None:
        lines.append("# There is no squeue inside the container: pass the end of the job")
        lines.append(
            'export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s)}'
        )
    return lines


def _start(request: Request) -> list[str]:
    words = [shlex.quote(word) for word in request.words] if request.own else _train_words(request)
    lines = [f"# Launcher: {request.launcher.why}."]
    if request.sweep is not None:
        lines.append(f'read -ra settings < <(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {shlex.quote(request.sweep)})')
    if request.own and request.sweep is not None:
        words.append('\\\n  "${settings[@]}"')
    words.append('"$@"')
    if request.container is not None:
        gpus = "--nv " if request.gpus_per_node else ""
        lines.append("# The MPI in the container must be of the same family and use the same PMI as the launcher")
        words.insert(0, f'apptainer exec {gpus}--bind "$PWD" {shlex.quote(request.container)} \\\n ')
    command = "\\\n  " + " ".join(words)
    if request.launcher.command == "mpirun":
        return [
            *lines,
            f'mpirun -n "$SLURM_NTASKS" {command} &',
            "pid=$!",
            "# mpirun kills its ranks on TERM but forwards USR1; a second signal would kill them, so forward it once",
            "trap 'kill -USR1 $pid; again=1; trap again=1 TERM USR1' TERM USR1",
            "again=1",
            "while [ $again ]; do again=; wait $pid; code=$?; done  # a trap interrupts wait",
        ]
    bind = "--gpu-bind=single:1 " if request.gpus_per_node else ""
    lines.append("trap : TERM  # ranks get it too; this shell must survive to see how they end")
    return [*lines, f"{request.launcher.command} --kill-on-bad-exit=1 {bind}{command}", "code=$?"]


def _train_words(request: Request) -> list[str]:
    """Return the command of mpisparse train, with what a job needs and the user did not give."""
    words = ["mpisparse", *(shlex.quote(word) for word in request.words)]
    given = {word.partition("=")[0] for word in request.words}
    if request.gpus_per_node and not given & {"--device", "--config"}:
        words += ["--device", "cuda"]
    if request.sweep is not None:
        words += ['\\\n  "${settings[@]}"', "--out", '"runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID"']
    elif not given & {"--out", "--config"}:
        words += ["\\\n  --out", '"runs/$SLURM_JOB_NAME-$SLURM_JOB_ID"']
    if not given & {"--wait-for-lock", "--no-wait-for-lock"}:
        words.append("--wait-for-lock")  # a requeued job may overlap with the end of its predecessor
    return words


def _ending(request: Request) -> list[str]:
    array, most = request.sweep is not None, request.restarts
    same = "" if request.own else " with the same --out"
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID"
    stopped = (
        f'[[ $state != *" PreemptTime="[0-9]* ]] || code={INTERRUPTED}  # mpirun returns 0 when preemption kills its daemons'
    )
    return [
        f"# {INTERRUPTED}: stopped after a checkpoint. A preempted job that wrote none continues from an earlier one.",
        f"job={job} restarts=${{SLURM_RESTART_COUNT:-0}}",
        'state=$(scontrol show job --oneliner "$job")',
        *([stopped] if request.launcher.command == "mpirun" else []),
        "if [ $code -eq 0 ]; then",
        '  echo "mpisparse: training is done, after $restarts restarts"',
        f'elif [ $code -ne {INTERRUPTED} ] && [[ $state != *" PreemptTime="[0-9]* ]]; then',
        '  echo "mpisparse: training failed with exit code $code" >&2',
        'elif [[ $state != *" JobState=RUNNING "* ]]; then',
        f'  echo "mpisparse: stopped by Slurm; if the job does not come back, submit it again{same}" >&2',
        f"elif [ $restarts -ge {most} ]; then",
        f'  echo "mpisparse: stopped after {most} restarts; to continue, submit it again{same}" >&2',
        "else",
        '  echo "mpisparse: stopped before the end; requeued, restart $((restarts + 1))"',
        '  scontrol requeue "$job" && exit 0',
        "fi",
        "exit $code",
    ]


def read_sweep(path: str) -> list[list[str]]:
    """Read the settings of a sweep, one list of flags per line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"cannot read the settings in {path}: {error.strerror}") from error
    if not lines or not all(line.strip() for line in lines):
        raise ConfigurationError(f"{path} must have settings on every line")
    return [line.split() for line in lines]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `mpisparse slurm`."""
    command.add_argument("--nodes", type=_count, default=1, help="default %(default)s")
    command.add_argument("--ranks-per-node", type=_count, help="default: 1, or one per GPU")
    command.add_argument("--cpus-per-rank", type=_count, default=1, help="threads per rank (default %(default)s)")
    command.add_argument("--gpus-per-node", type=_count, help="one per rank (default: none)")
    command.add_argument("--time", default="1:00:00", help="time limit of each start of the job (default %(default)s)")
    command.add_argument("--account", help="account to charge (default: your own)")
    command.add_argument("--partition", help="partition to run in (default: the site's)")
    command.add_argument("--job-name", default="mpisparse", help="default %(default)s")
    command.add_argument("--restarts", type=_count, default=20, help="limit of automatic requeues (default %(default)s)")
    command.add_argument("--mpi", choices=["auto", *MPI_NAMES], default="auto", help="default: the one found here")
    command.add_argument(
        "--launcher", choices=["auto", "srun", "mpirun"], default="auto", help="default: what the MPI needs"
    )
    command.add_argument(
        "--setup", action="append", default=[], metavar="LINE",
        help="a line such as 'module load openmpi'; may be repeated (default: put this environment on PATH)",
    )  # fmt: skip
    command.add_argument("--sweep", metavar="FILE", help="a job array: one task per line of the file, with its settings")
    command.add_argument("--container", metavar="IMAGE", help="train inside an Apptainer image")
    command.add_argument(
        "words",
        nargs="+",
        metavar="COMMAND",
        help="after --: train and its settings, or your program: python mine.py ...",
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def run(args: argparse.Namespace, check: Callable[[Sequence[str]], object]) -> int:
    """Print the script; `check` raises for an invalid command line of train."""
    words = args.words[1:] if args.words[:2] == ["mpisparse", "train"] else args.words
    if words[0] in (*OTHER_COMMANDS, "mpisparse"):
        raise ConfigurationError(
            f"a job trains: end with -- train ..., or with your own program, -- python mine.py ...; got {shlex.join(words)}"
        )
    if words[0] != "train" and difflib.get_close_matches(words[0], ["train"]) and not shutil.which(words[0]):
        raise ConfigurationError(f"there is no program {words[0]!r} here; did you mean 'train'?")
    if words[0] == "train" and any(word.startswith("--dry-run") for word in words):
        raise ConfigurationError("--dry-run trains nothing: leave it out of a job, or run mpisparse train --dry-run here")
    lines = read_sweep(args.sweep) if args.sweep else []
    for settings in (lines or [[]]) if words[0] == "train" else []:
        check([*words, *settings])
    gpus = args.gpus_per_node or 0
    ranks = args.ranks_per_node or gpus or 1
    if gpus and ranks != gpus:
        raise ConfigurationError(f"each rank needs one GPU: got {ranks} ranks and {gpus} GPUs per node; pass equal numbers")
    request = Request(
        launcher=choose_launcher(args.mpi, args.launcher), words=words, nodes=args.nodes, ranks_per_node=ranks,
        cpus_per_rank=args.cpus_per_rank, gpus_per_node=gpus, time=args.time, account=args.account,
        partition=args.partition, job_name=args.job_name, restarts=args.restarts, setup=args.setup, sweep=args.sweep,
        settings_in_sweep=len(lines), container=args.container,
    )  # fmt: skip
    print(script(request), end="")
    return 0
