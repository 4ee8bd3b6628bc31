"""A progress bar on a terminal, plain lines elsewhere; under mpirun its output decides, not the rank's."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from mpisparse.runtime import progress
from mpisparse.runtime.progress import compared_with_dense, step_facts
from mpisparse.runtime.terminal import LAUNCHED, LAUNCHERS

MPIRUN = Path(sys.executable).with_name("mpirun")
TIMEOUT = 900.0  # seconds, for a job that takes a few
ESCAPE = "\x1b"
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1",
}  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """Return this environment without variables of jobs and overrides."""
    kept = {name: value for name, value in os.environ.items() if name not in (*LAUNCHED, "MPISPARSE_PROGRESS")}
    return {**kept, **ALLOWED, **more}


def on_a_terminal(command: list[str]) -> str:
    """Return what a command prints to a pseudo-terminal; it must succeed."""
    ours, theirs = pty.openpty()
    job = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.STDOUT)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # EIO: nobody has it open any more
        pass
    finally:
        os.close(ours)
    assert job.wait(TIMEOUT) == 0, shown.decode()
    return shown.decode()


def training(ranks: int, out: Path) -> list[str]:
    words = ["-m", "mpisparse", "train", "--steps", "3", "--batch-size", "4", "--out", str(out)]
    return [str(MPIRUN), "-n", str(ranks), sys.executable, *words]


@pytest.mark.skipif(not MPIRUN.exists(), reason=f"there is no mpirun beside {sys.executable}")
def test_mpirun_to_a_pipe_prints_plain_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        training(2, tmp_path), env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ESCAPE not in done.stdout + done.stderr
    assert "r0 | step 3/3  loss" in done.stdout


@pytest.mark.skipif(not MPIRUN.exists(), reason=f"there is no mpirun beside {sys.executable}")
def test_mpirun_on_a_terminal_shows_the_bar(tmp_path: Path) -> None:
    shown = on_a_terminal(training(1, tmp_path))
    assert ESCAPE in shown
    assert "3/3" in shown


# A process on a pseudo-terminal tells what it finds, below a launcher of this name whose own output goes elsewhere
FOUND = (
    "import sys; from mpisparse.runtime.terminal import reaches_terminal as found; print(found(sys.stdout), file=sys.stderr)"
)


def found(folder: Path, launcher: str, output: str, *words: str, **variables: str) -> bool:
    ours, theirs = pty.openpty()
    script = folder / launcher
    script.write_text(f'#!/bin/bash\n"{sys.executable}" -c "{FOUND}" >&{theirs}\nexit $?\n')
    script.chmod(0o755)
    targets = {"terminal": theirs, "pipe": subprocess.PIPE, "null": subprocess.DEVNULL}
    with subprocess.Popen(
        [str(script), *words], env=environment(**variables), stdout=targets[output], stderr=subprocess.PIPE, text=True,
        pass_fds=(theirs,),
    ) as job:  # fmt: skip
        _, errors = job.communicate(timeout=TIMEOUT)
    os.close(ours)
    os.close(theirs)
    assert errors in ("True\n", "False\n"), errors
    return errors == "True\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_output_of_the_launcher_decides(tmp_path: Path, launcher: str) -> None:
    assert found(tmp_path, launcher, "terminal", OMPI_COMM_WORLD_SIZE="1")
    assert not found(tmp_path, launcher, "pipe", OMPI_COMM_WORLD_SIZE="1")


def test_in_doubt_no_terminal(tmp_path: Path) -> None:
    assert found(tmp_path, "make", "pipe"), "it was not launched by anything: its own output decides"
    assert not found(tmp_path, "mpirun", "null"), "a device, but no terminal"
    assert not found(tmp_path, "mpirun", "terminal", "--output", "tag"), "words before each line"
    assert found(tmp_path, "mpirun", "terminal", "--out", "runs/x"), "an option of the program"
    assert not found(tmp_path, "prted", "terminal"), "a daemon: mpirun is on another host"
    assert not found(tmp_path, "unheard-of", "terminal", PMI_RANK="0"), "launched, but by whom is not known"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_variable_overrides_what_is_found(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(progress, "reaches_terminal", lambda stream: terminal)
    for wanted, kind in (("bar", progress.Bar), ("plain", progress.Plain)):
        monkeypatch.setenv("MPISPARSE_PROGRESS", wanted)
        shown = progress.make_progress(0, 3, 0)
        shown.close()
        assert isinstance(shown, kind)
    monkeypatch.delenv("MPISPARSE_PROGRESS")
    shown = progress.make_progress(0, 3, 0)
    shown.close()
    assert isinstance(shown, progress.Bar if terminal else progress.Plain)


def test_more_bytes_than_dense_are_said_in_words() -> None:
    assert compared_with_dense(25.0, 100.0) == "75.0 % less than a dense all-reduce"
    assert compared_with_dense(100.5, 100.0) == "as much as a dense all-reduce", "as scheme dense does, and its messages"
    assert compared_with_dense(156.0, 100.0) == (
        "1.6 times the bytes of a dense all-reduce (more than dense: this model is too small, or the density too high)"
    )
    fields = {name: {"mean": 156.0} for name in ("bytes_received", "loss")}
    fields |= {"density": 0.1, "seconds": {"compute": {"mean": 0.1}}}
    assert step_facts(fields, 100.0)["saved"] == "none, more than dense"
    assert step_facts(fields, 200.0)["saved"] == "22.0 %"
