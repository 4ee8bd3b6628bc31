"""Slurm support without Slurm: scripts, times, variables of jobs, output of ranks."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpisparse import stopping
from mpisparse.comm import world
from mpisparse.errors import ConfigurationError
from mpisparse.runtime import cli, launcher, slurm
from mpisparse.runtime.cli import main, parser
from mpisparse.runtime.flags import resolve
from mpisparse.runtime.output import RankOutput

FOLDER = Path(__file__).parents[2] / "slurm"
COMMON = "--nodes 4 --time 12:00:00 --account ACCOUNT --setup '. ~/mpisparse/.venv/bin/activate  # where mpisparse is'"
CPU = f"{COMMON} --ranks-per-node 2 --cpus-per-rank 16"
TRAIN = "-- train --model resnet18 --density 0.001 --epochs 10 --checkpoint-every 500"
TEMPLATES = {  # what `mpisparse slurm` prints for these words is what the folder slurm holds
    "cpu-openmpi": f"{CPU} --mpi openmpi --launcher srun {TRAIN}",
    "cpu-mpich": f"{CPU} --mpi mpich --launcher srun {TRAIN}",
    "gpu": f"{COMMON} --gpus-per-node 4 --cpus-per-rank 8 --mpi openmpi --launcher srun {TRAIN}",
    "mpirun": f"{CPU} --mpi openmpi --launcher mpirun {TRAIN}",
    "array": f"{CPU} --mpi openmpi --launcher srun --sweep slurm/sweep.txt {TRAIN}",
    "apptainer": f"{CPU} --mpi openmpi --launcher srun --container mpisparse.sif {TRAIN}",
}


def printed(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the script that `mpisparse slurm` prints."""
    assert main(["slurm", *shlex.split(words)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make a directory the only one on PATH, in an environment without a job."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "CRAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    """Create a program in a folder that prints a text."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# Scripts


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_what_the_command_prints(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER.parent)
    assert (FOLDER / f"{name}.sbatch").read_text() == printed(TEMPLATES[name], capsys)


def test_there_are_no_other_templates() -> None:
    assert {path.stem for path in FOLDER.glob("*.sbatch")} == set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_has_all_it_needs_and_is_shell(name: str) -> None:
    text = (FOLDER / f"{name}.sbatch").read_text()
    for part in ("--signal=", "--requeue", "--open-mode=append", "--output=%x-%j", "OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK"):
        assert part in text
    for part in (
        "kill-on-bad-exit=1",
        "-ne 85",
        "scontrol requeue",
        "SLURM_RESTART_COUNT",
        "training is done",
        "# Launcher: ",
    ):
        assert part in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert max(map(len, text.splitlines())) < 160


def test_mpirun_gets_usr1_for_term() -> None:
    text = (FOLDER / "mpirun.sbatch").read_text()
    assert "trap 'kill -USR1 $pid; " in text
    assert "--signal=B:USR1@" in text
    assert "|| code=85" in text, "mpirun returns 0 when Slurm ends its daemons"


def test_a_gpu_script_leaves_gpu_memory_to_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    """Open MPI's variables end in MPI_Init where it was built without CUDA, Cray's where its GPU library is not linked."""
    for kind in launcher.MPI_NAMES:
        text = printed(f"--gpus-per-node 2 --mpi {kind} --launcher srun -- train", capsys)
        assert not re.search(r"^[^#]*\b(OMPI_|PRTE_|MPIR_|MPICH_)", text, re.MULTILINE), text
        assert ("# export MPICH_GPU_SUPPORT_ENABLED=1" in text) == (kind == "cray")


def test_a_script_is_filled_in(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        "--nodes 3 --gpus-per-node 2 --time 20 --account abc --partition p --job-name j --restarts 4 "
        "-- train --data 'my data.txt' --model lstm",
        capsys,
    )
    for line in ("--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=20", "--account=abc", "--partition=p"):
        assert f"#SBATCH {line}" in text
    assert "--job-name=j" in text
    assert "USR1@120" in text
    assert "$restarts -ge 4" in text
    assert (
        "mpisparse train --data 'my data.txt' --model lstm --device cuda \\\n  --out \"runs/$SLURM_JOB_NAME-$SLURM_JOB_ID\""
        in text
    )
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in text


@pytest.mark.parametrize("given", ["--out runs/x", "--out=runs/x"])
def test_an_out_that_is_given_is_kept(capsys: pytest.CaptureFixture[str], given: str) -> None:
    assert f'train {given} --wait-for-lock "$@"' in printed(f"-- train {given}", capsys)


@pytest.mark.parametrize("given", ["--wait-for-lock", "--no-wait-for-lock"])
def test_whether_a_job_waits_for_the_lock_can_be_said(capsys: pytest.CaptureFixture[str], given: str) -> None:
    assert printed(f"-- train {given}", capsys).count("wait-for-lock") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-- bench sync", "a job trains: end with -- train"),
        ("-- trian --seed 1", "there is no program 'trian' here; did you mean 'train'?"),
        ("--time tomorrow -- train", "--time is MINUTES"),
        ("--time 0:30 -- train", "at least one minute"),
        ("--gpus-per-node 4 --ranks-per-node 2 -- train", "each rank needs one GPU: got 2 ranks and 4 GPUs"),
        ("--sweep /nowhere -- train", "cannot read the settings in /nowhere"),
        ("-- train --density 2", "density must be in (0, 1]"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    assert main(["slurm", *shlex.split(words)]) == 2
    assert says in capsys.readouterr().err


def test_settings_of_a_sweep_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep"
    file.write_text("--seed 1\n--seed 2 --lr 0.1\n")
    assert "--array=1-2" in printed(f"--sweep {file} -- train", capsys)
    file.write_text("--seed 1\n\n--seed 2\n")
    assert main(["slurm", "--sweep", str(file), "--", "train"]) == 2
    file.write_text("--sed 1\n")
    with pytest.raises(SystemExit):
        main(["slurm", "--sweep", str(file), "--", "train"])


def test_needs_no_mpi_and_no_torch(tmp_path: Path) -> None:
    check = "import sys\nfrom mpisparse.runtime.cli import main\nmain(['slurm', '--', 'train'])\n"
    check += "assert not {'mpi4py.MPI', 'torch'} & set(sys.modules), 'imported'"
    environment = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def exported(script: str, folder: Path) -> dict[str, str]:
    """Return the changes that a script's export and unset lines make to this environment."""
    program(folder, "squeue", "2030-01-01T00:00:00")
    lines = [line for line in script.splitlines() if line.startswith(("export ", "unset "))]
    before = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", "-ec", "\n".join([*lines, "env -0"])], env=before, capture_output=True, text=True, check=True
    )
    after = dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)
    return {name: value for name, value in after.items() if before.get(name) != value and name != "_"}


def test_mpi_starts_with_what_each_script_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Includes GPU scripts for every MPI. Scripts with the same exports are started once."""
    scripts = {path.name: path.read_text() for path in FOLDER.glob("*.sbatch")}
    for kind in launcher.MPI_NAMES:
        words = f"{COMMON} --gpus-per-node 2 --mpi {kind} --launcher srun {TRAIN}"
        scripts[f"GPUs, {kind}"] = printed(words, capsys)
    named: dict[frozenset[tuple[str, str]], list[str]] = {}
    for name, text in scripts.items():
        named.setdefault(frozenset(exported(text, tmp_path).items()), []).append(name)
    assert len(named) > 1, "nothing is exported, or it was not found"
    pythons = [sys.executable, *filter(None, [os.environ.get("MPISPARSE_MPICH_PYTHON")])]
    check = "from mpi4py import MPI; world = MPI.COMM_WORLD; n = world.allreduce(1); world.rank or print(f'{n} ranks')"
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    for variables, names in named.items():
        for python in pythons:
            words = [str(Path(python).with_name("mpirun")), "-n", "2", python, "-c", check]
            environment = {**os.environ, **allowed, **dict(variables)}
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)
            said = f"{python} with the environment of {', '.join(names)}: {done.stdout + done.stderr}"
            assert done.returncode == 0, said
            assert "2 ranks" in done.stdout, said


# The launcher


@pytest.mark.parametrize(
    ("version", "kinds", "starts", "why"),
    [
        (
            "mpirun (Open MPI) 4.1.4",
            "pmix_v4\n\tpmix\n\tpmi2",
            "srun --mpi=pmix",
            "with --mpi=pmix, which this Slurm offers",
        ),
        ("HYDRA build details:", "pmix\n\tpmi2", "srun --mpi=pmi2", "MPICH's; srun starts it with --mpi=pmi2"),
        ("mpirun (Open MPI) 5.0.1", "none\n\tpmi2", "mpirun -n", "it needs srun --mpi=pmix, which this Slurm lacks"),
        ("Intel(R) MPI Library for Linux", "pmi2", "srun --mpi=pmi2", "Intel MPI's"),
        (None, None, "srun --mpi=pmix", "no MPI was found here: Open MPI is assumed"),
        ("HYDRA build details:", None, "srun --mpi=pmi2", "not checked: no Slurm here"),
    ],
)
def test_the_launcher_fits_what_is_found(
    no_slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    version: str | None, kinds: str | None, starts: str, why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "executable", str(no_slurm / "python"))
    if version is not None:
        program(no_slurm, "mpirun", version)
    if kinds is not None:
        program(no_slurm, "srun", f"MPI plugin types are...\n\t{kinds}")
    text = printed("-- train", capsys)
    assert re.search(f"^{starts}", text, re.MULTILINE)
    assert why in next(line for line in text.splitlines() if line.startswith("# Launcher"))


def test_cray_is_known_by_its_variable(no_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAY_MPICH_VERSION", "8.1.25")
    assert launcher.choose_launcher().command == "srun --mpi=cray_shasta"


# Time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("12:00:00", 43200),
        ("5:30", 330),
        ("0:07", 7),
        ("45", 45),
        ("2-3", 183600),
        ("2-3:30", 185400),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_times_are_read(text: str, seconds: int | None) -> None:
    assert stopping.parse_time(text) == seconds


def test_a_limit_of_one_number_is_minutes() -> None:
    assert stopping.parse_time("45", left=False) == 2700
    assert stopping.parse_time("45:30", left=False) == 2730


def test_the_end_is_known_by_variable_then_by_squeue(no_slurm: Path) -> None:
    assert stopping.end_time({}) is None
    assert stopping.end_time({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1234"}) == 1234.0
    assert stopping.end_time({"SLURM_JOB_ID": "7"}) is None, "there is no squeue"
    program(no_slurm, "squeue", "1:00:00")
    assert stopping.end_time({"SLURM_JOB_ID": "7"}) == pytest.approx(time.time() + 3600, abs=5)
    program(no_slurm, "squeue", "UNLIMITED")
    assert stopping.end_time({"SLURM_JOB_ID": "7"}) is None


def test_a_deadline_leaves_time_for_a_step_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(slurm.time, "time", lambda: now)
    deadline = stopping.Deadline(2000.0, 60.0)
    while not deadline.near():
        now += 10.0
    assert now == 2000.0 - 60.0 - 2 * 10.0
    now = 1000.0
    assert stopping.Deadline(1100.0, 60.0).margin == pytest.approx(10.0)
    assert not stopping.Deadline(None, 60.0).near()


def test_training_stops_before_the_limit(
    no_slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 4))
    monkeypatch.setenv("MPISPARSE_PROGRESS", "plain")
    out = no_slurm / "run"
    assert main(["train", "--out", str(out), "--steps", "1000000", "--batch-size", "4"]) == 85
    assert "the job's time limit is near" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 1))
    assert main(["train", "--out", str(no_slurm / "other"), "--steps", "2", "--stop-before", "0"]) == 0


# Tasks that do not see each other

SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_MPI_TYPE": "none",
}
DAEMON = {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_PROCID": "2"}


def test_singletons_are_told_what_to_change() -> None:
    for library, kind in (("Open MPI", "pmix"), ("MPICH", "pmi2"), ("Cray MPICH", "cray_shasta")):
        problem = world.separate_worlds(1, library, SRUN)
        assert problem is not None
        for part in (
            "srun --mpi=none started 8 tasks",
            f"{library} sees 1 of them",
            f"srun --mpi={kind}",
            "mpirun inside sbatch",
        ):
            assert part in problem
    assert "does not use it" in str(world.separate_worlds(1, "Open MPI", {**SRUN, "SLURM_MPI_TYPE": "pmix"}))
    assert world.separate_worlds(2, "MPICH", SRUN) is not None


@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (8, SRUN),
        (1, {}),
        (1, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),  # alone in a batch script
        (8, {**DAEMON, "OMPI_COMM_WORLD_SIZE": "8"}),
        (2, {**DAEMON, "OMPI_COMM_WORLD_SIZE": "2"}),
        (1, {**DAEMON, "MPI_LOCALNRANKS": "1", "PMI_SIZE": "1"}),
        (1, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}),
        (16, SRUN),  # a heterogeneous job
    ],
)
def test_no_false_alarm(size: int, environ: dict[str, str]) -> None:
    assert world.separate_worlds(size, "Open MPI", environ) is None


def test_train_refuses_singletons(
    no_slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*world.MPIRUN_VARIABLES, "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "PATIENCE", 0.1)
    for task in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", task)
        assert main(["train", "--out", str(no_slurm / "run"), "--steps", "1"]) == 2
        assert "srun --mpi=none started 8 tasks" in capsys.readouterr().err
    assert not (no_slurm / "run").exists()


def test_kinds_of_pmi() -> None:
    assert slurm.pmi({}) == "none"
    assert slurm.pmi({**SRUN, "PMI_FD": "11", "PMI_RANK": "0"}) == "pmi2"
    assert slurm.pmi({"PMIX_NAMESPACE": "slurm.pmix.5.0", "PMIX_VERSION": "4.2.2"}) == "pmix 4.2.2"
    assert world.started_by({**DAEMON, "MPI_LOCALNRANKS": "2"}) == "mpirun"
    assert world.started_by(SRUN) == "srun"


# Output


RANK = """
import os, sys
from pathlib import Path
from mpisparse.runtime.output import RankOutput
with RankOutput(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None):
    print("printed", flush=True)
    os.write(1, b"from C\\n")
    print("an error", file=sys.stderr)
print("after", flush=True)
if sys.argv[2:]:
    with RankOutput(int(sys.argv[1]), Path(sys.argv[2])):
        raise OSError("gone")
"""


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("logs", [False, True])
def test_output_of_ranks_goes_to_its_place(tmp_path: Path, rank: int, logs: bool) -> None:
    words = [sys.executable, "-c", RANK, str(rank), *([str(tmp_path / "logs")] if logs else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == ("printed\nfrom C\n" if rank == 0 else "") + "after\n"
    assert "an error" in done.stderr
    if logs:
        assert "OSError: gone" in done.stderr
        log = (tmp_path / "logs" / f"rank-{rank:04}.log").read_text()
        for part in (f"rank {rank} on ", "printed", "an error", "OSError: gone"):
            assert part in log
        assert ("from C" in log) == (rank == 3)


def test_a_log_of_the_only_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), "--steps", "2", "--log-ranks"]) == 0
    log = (out / "logs" / "rank-0000.log").read_text()
    assert "r0 | start: 1 ranks" in log
    assert "r0 | end: 2 steps" in log
    assert "r0 | end: 2 steps" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["train", "--out", str(tmp_path / "file"), "--steps", "2", "--log-ranks"]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_settings_of_jobs() -> None:
    settings = resolve(vars(parser().parse_args(["train", "--log-ranks", "--stop-before", "5"])))
    assert (settings.log_ranks, settings.stop_before) == (True, 5.0)
    with pytest.raises(ConfigurationError, match="stop_before must be at least 0"):
        resolve(vars(parser().parse_args(["train", "--stop-before", "-1"])))
    with pytest.raises(FileExistsError):
        RankOutput(0, Path(__file__))
