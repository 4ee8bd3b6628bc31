"""Faults: each is a function(job, draw) that disturbs a running job once. `FAULTS` has them with their weights.

A fault returns a function that tells whether an exit code is allowed after it. A fault that comes too late, after the
job has ended, raises MissedError.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from mpisparse.checkpoint import store
from tests.soak.job import Job

STOPPED = 85  # the exit code of a run that was asked to stop

Ends = Callable[[int], bool]


class MissedError(Exception):
    """The job ended before the fault."""


def some_time(job: Job, draw: random.Random) -> None:
    """Wait for a random moment: during the start, or some milliseconds after a random new step."""
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0.0, 0.8))
    else:
        step = job.last_step() + draw.randint(1, 6)
        while job.last_step() < step and job.running:
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.04))


def ranks_of(job: Job) -> list[int]:
    """Return the ranks to be disturbed; raises MissedError if there are none."""
    pids = job.ranks()
    if not pids or not job.running:
        raise MissedError
    return pids


def kill_rank(job: Job, draw: random.Random) -> Ends:
    """SIGKILL to one rank."""
    some_time(job, draw)
    os.kill(draw.choice(ranks_of(job)), signal.SIGKILL)
    return lambda code: code != 0


def kill_job(job: Job, draw: random.Random) -> Ends:
    """SIGKILL to all ranks and mpirun."""
    some_time(job, draw)
    for pid in [*ranks_of(job), job.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return lambda code: code != 0


def kill_in_write(job: Job, draw: random.Random) -> Ends:
    """SIGKILL to one rank or all while a checkpoint is half written."""
    while job.running and not any((job.out / "checkpoints").glob(f"{store.UNFINISHED}*")):
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.01))
    pids = ranks_of(job)
    for pid in draw.choice([[draw.choice(pids)], [*pids, job.pid]]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return lambda code: code != 0


def stop_and_continue(job: Job, draw: random.Random) -> Ends:
    """SIGSTOP to a rank for up to a second; it must not matter."""
    some_time(job, draw)
    pid = draw.choice(ranks_of(job))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(draw.uniform(0.01, 1.0))
    os.kill(pid, signal.SIGCONT)
    return lambda code: code == 0


def ask_to_stop(job: Job, draw: random.Random) -> Ends:
    """SIGTERM or SIGUSR1 to one rank, as preemption and a time limit send them: all write a checkpoint and stop."""
    some_time(job, draw)
    if job.last_step() == 0:
        raise MissedError  # before its first step a rank may not have its handler yet
    os.kill(draw.choice(ranks_of(job)), draw.choice([signal.SIGTERM, signal.SIGUSR1]))
    return lambda code: code in (0, STOPPED)


def fill_disk(job: Job, draw: random.Random) -> Ends:
    """Leave no room on the run's file system for a while: metrics and checkpoints are lost, the run goes on."""
    some_time(job, draw)
    ranks_of(job)
    filler = job.out.parent / "filler"
    with open(filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    time.sleep(draw.uniform(0.05, 0.6))
    filler.unlink()
    return lambda code: code in (0, 1)  # 1: the last checkpoint was not written; a resumed run writes it


def damage_checkpoint(job: Job, draw: random.Random) -> Ends:
    """Kill the job, then flip, cut or remove a part of its newest checkpoint; the one before must serve."""
    ends = kill_job(job, draw)
    job.wait()
    found = store.found(job.out / "checkpoints")
    if len(found) > 1:
        damage(draw.choice(sorted(p for p in found[0].rglob("*") if p.is_file())), draw)
        job.damaged = True
    return ends


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit of a file, cut it, or remove it."""
    how, data = draw.choice(["flip", "cut", "remove"]), bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    elif how == "cut" or not data:
        path.write_bytes(data[: draw.randrange(max(1, len(data)))])
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)


Fault = Callable[[Job, random.Random], Ends]
FAULTS: dict[str, tuple[Fault, int]] = {
    "kill a rank": (kill_rank, 9),
    "kill the job": (kill_job, 8),
    "kill inside a write": (kill_in_write, 7),
    "stop and continue a rank": (stop_and_continue, 1),
    "ask to stop": (ask_to_stop, 2),
    "fill the disk": (fill_disk, 1),
    "damage a checkpoint": (damage_checkpoint, 3),
}
KILLS = ("kill a rank", "kill the job", "kill inside a write", "damage a checkpoint")


def mounted(place: Path, size: str) -> bool:
    """Mount a small file system in memory; False where that is not allowed."""
    place.mkdir(parents=True, exist_ok=True)
    return (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True).returncode == 0
    )
