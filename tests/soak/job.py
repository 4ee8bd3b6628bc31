"""A training under mpirun whose ranks a nursery forks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENCE = 300.0  # seconds after which a job that has not ended counts as hung; one takes some


class HangError(Exception):
    """A job did not end."""


class Nursery:
    """The process that forks ranks; see warm.py."""

    def __init__(self, place: Path) -> None:
        self.socket = place / "nursery"
        self.socket.unlink(missing_ok=True)
        modules = ("mpisparse.runtime.train", "mpisparse.bench.commands")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.nursery", str(self.socket), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        )  # fmt: skip
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            sys.exit("bin/soak: the process that forks ranks did not start")

    def close(self) -> None:
        """End it and its ranks."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Job:
    """One start of a run."""

    def __init__(self, nursery: Nursery, out: Path, ranks: int, options: list[str]) -> None:
        self.out, self.damaged = out, False
        self.log = out.parent / "log"
        mpirun = Path(sys.executable).with_name("mpirun")
        stub = [sys.executable, "-I", "-S", str(HERE / "warm.py"), str(nursery.socket), "mpisparse.runtime.cli"]
        fast = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]  # MPI starts in a tenth of the time
        command = [str(mpirun), *fast, "-n", str(ranks), *stub, "train", "--out", str(out), *options]
        self._nursery = nursery.process.pid
        sessions = out.parent / "mpirun"  # else one of the same process number fails to start after this one was killed
        shutil.rmtree(sessions, ignore_errors=True)
        sessions.mkdir()
        with open(self.log, "w") as sink:
            self._mpirun = subprocess.Popen(
                command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
                env={**os.environ, "MPISPARSE_PROGRESS": "plain", "PRTE_MCA_prte_tmpdir_base": str(sessions)},
            )  # fmt: skip
        self.pid = self._mpirun.pid

    @property
    def running(self) -> bool:
        return self._mpirun.poll() is None

    def ranks(self) -> list[int]:
        """Return the process ids of the live ranks."""
        text = Path(f"/proc/{self._nursery}/task/{self._nursery}/children").read_text()
        return [pid for pid in map(int, text.split()) if self._alive(pid)]

    def _alive(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    def last_step(self) -> int:
        """Return the step of the last complete line of the run's metrics."""
        return last_step(self.out)

    def wait(self) -> int:
        """Wait for the end of mpirun and all ranks; raises HangError, after ending them."""
        until = time.monotonic() + PATIENCE
        try:
            code = self._mpirun.wait(PATIENCE)
            while self.ranks():
                if time.monotonic() > until:
                    raise HangError
                time.sleep(0.002)
            return code
        except (subprocess.TimeoutExpired, HangError) as error:
            raise HangError(f"not ended after {PATIENCE:g} s") from error
        finally:
            for pid in [*self.ranks(), *([self.pid] if self.running else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._mpirun.wait()


def last_step(out: Path) -> int:
    """Return the step of the last complete line of a run's metrics; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    return 0
