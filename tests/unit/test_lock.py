"""One run at a time per directory: others are refused or wait, dead runs are replaced, suspended ones lose the lock."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError, LockError
from mpisparse.owner import Owner, start_of, this_process
from mpisparse.runtime import lock as module
from mpisparse.runtime.lock import RunLock, StoppedWaitingError, take

TIMEOUT = 600.0


class Asked:
    """A stand-in for StopRequest."""

    asked = False


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    made = Exchange()
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten heartbeats and time-outs."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "GRACE_SECONDS", 1.0)


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def elsewhere(held: RunLock) -> None:
    """Make a lock's owner look like one on another host."""
    held.me = dataclasses.replace(held.me, host="elsewhere", kernel="0" * 16)
    held._beats += 1
    held.path.write_bytes(held._text())


def test_an_owner_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "run"), RunLock(tmp_path / "run")
    assert first.attempt()
    record = json.loads((tmp_path / "run" / "lock").read_text())
    assert record["owner"]["pid"] == os.getpid()
    assert not second.attempt()
    assert second.alive
    assert f"process {os.getpid()} on {record['owner']['host']}" in second.owner_name
    first.release()
    assert not (tmp_path / "run").exists(), "a directory made for the lock goes with it"
    assert second.attempt()
    assert second.taken_from == ""
    (tmp_path / "run" / "metrics.jsonl").touch()
    second.release()
    second.release()
    assert left(tmp_path / "run") == ["metrics.jsonl"]


def test_the_second_is_refused_with_the_owners_name(tmp_path: Path, exchange: Exchange) -> None:
    held = take(tmp_path, exchange, Asked(), wait=False)
    assert held is not None
    with pytest.raises(LockError, match=rf"in use by process {os.getpid()} on .*--wait-for-lock") as refused:
        take(tmp_path, exchange, Asked(), wait=False)
    assert refused.value.exit_code == 75
    assert isinstance(refused.value, ConfigurationError)
    held.release()
    assert left(tmp_path) == []


def test_the_second_waits_if_asked_to(tmp_path: Path, exchange: Exchange, quick: None) -> None:
    held = RunLock(tmp_path)
    assert held.attempt()
    ending = threading.Timer(0.5, held.release)
    ending.start()
    second = take(tmp_path, exchange, Asked(), wait=True)
    ending.join()
    assert second is not None
    assert second.taken_from == ""
    second.release()


def test_a_signal_ends_the_waiting(tmp_path: Path, exchange: Exchange, quick: None) -> None:
    held = RunLock(tmp_path)
    assert held.attempt()
    stop = Asked()
    asking = threading.Timer(0.3, lambda: setattr(stop, "asked", True))
    asking.start()
    with pytest.raises(StoppedWaitingError, match="asked to stop while it waited") as stopped:
        take(tmp_path, exchange, stop, wait=True)
    asking.join()
    assert stopped.value.exit_code == 85
    held.release()


OWNER = """
import sys
from pathlib import Path
from mpisparse.runtime.lock import RunLock
print(RunLock(Path(sys.argv[1])).attempt(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock and does nothing else."""
    command = [sys.executable, "-c", OWNER, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_owner_is_dead_at_once_and_a_suspended_one_lives(tmp_path: Path, quick: None) -> None:
    with another_process(tmp_path) as process:
        lock = RunLock(tmp_path)
        os.kill(process.pid, signal.SIGSTOP)
        until = time.monotonic() + 3 * module.GRACE_SECONDS
        while time.monotonic() < until:
            assert not lock.attempt(), "its process is there, even if it does not beat"
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: start_of(process.pid) is None)  # it stays as a zombie, which is not alive
        assert lock.attempt()
    assert f"process {process.pid}" in lock.taken_from
    lock.release()


def test_a_later_process_of_the_same_number_is_another() -> None:
    me = this_process()
    assert me.runs() is True
    assert dataclasses.replace(me, start=me.start + 1).runs() is False
    assert dataclasses.replace(me, kernel="another").runs() is None


def test_a_process_of_another_user_that_is_not_shown_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    unseen = dataclasses.replace(this_process(), pid=2**30)  # more than any process has
    assert unseen.runs() is False
    monkeypatch.setattr(os, "kill", kill)
    assert unseen.runs() is None


def test_an_owner_on_another_host_is_alive_when_it_beats(tmp_path: Path, exchange: Exchange, quick: None) -> None:
    held = RunLock(tmp_path)
    assert held.attempt()
    elsewhere(held)
    with pytest.raises(LockError, match=f"in use by process {os.getpid()} on elsewhere"):
        take(tmp_path, exchange, Asked(), wait=False)
    held.release()


def test_an_owner_on_another_host_that_stands_still_is_dead_and_notices_when_it_comes_back(
    tmp_path: Path, exchange: Exchange, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "BEAT_SECONDS", TIMEOUT)
        held = RunLock(tmp_path)
        assert held.attempt()
    elsewhere(held)
    assert held.loss() is None
    taken = take(tmp_path, exchange, Asked(), wait=False)
    assert taken is not None
    assert "on elsewhere" in taken.taken_from
    lost = held.loss()
    assert lost is not None
    assert f"was taken over by process {os.getpid()}" in str(lost)
    assert held.lost
    held._ended.set()
    held.release()
    assert taken.loss() is None, "who lost a lock does not remove the new owner's"
    taken.release()
    assert left(tmp_path) == []


def test_of_many_takers_of_a_dead_owners_lock_one_gets_it(tmp_path: Path) -> None:
    dead = dataclasses.replace(this_process(), start=1)
    for _ in range(20):
        stale = RunLock(tmp_path)
        stale.me = dead
        (tmp_path / "lock").write_bytes(stale._text())
        takers = [RunLock(tmp_path) for _ in range(6)]
        together = threading.Barrier(len(takers))
        got = []

        def run(taker: RunLock, together: threading.Barrier = together, got: list[RunLock] = got) -> None:
            together.wait()
            for _ in range(50):
                if taker.attempt():
                    got.append(taker)
                    return

        threads = [threading.Thread(target=run, args=(taker,)) for taker in takers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        assert got[0].loss() is None
        got[0].release()
        assert left(tmp_path) == []


@pytest.mark.parametrize(
    "content", [b"", b"half", b"[1]", b"[" * 60_000, b'{"token": "../a", "owner": {"pid": "1"}}'], ids=len
)
def test_a_lock_that_cannot_be_read_is_watched_and_then_taken_over(
    tmp_path: Path, exchange: Exchange, quick: None, content: bytes
) -> None:
    (tmp_path / "lock").write_bytes(content)
    assert not RunLock(tmp_path).attempt()
    taken = take(tmp_path, exchange, Asked(), wait=False)
    assert taken is not None
    taken.release()
    assert left(tmp_path) == []


def test_a_claim_whose_holder_was_killed_is_broken(tmp_path: Path, exchange: Exchange, quick: None) -> None:
    stale = RunLock(tmp_path)
    stale.me = dataclasses.replace(stale.me, start=1)
    (tmp_path / "lock").write_bytes(stale._text())
    (tmp_path / f".lock-claim-{stale.token}").touch()
    taken = take(tmp_path, exchange, Asked(), wait=False)
    assert taken is not None
    taken.release()
    assert left(tmp_path) == []


def test_a_lock_removed_by_hand_comes_back(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    assert held.attempt()
    (tmp_path / "lock").unlink()
    assert held.loss() is None
    assert not RunLock(tmp_path).attempt()
    held.release()
    assert left(tmp_path) == []


def test_without_hard_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    assert first.attempt()
    assert not second.attempt()
    first.release()
    assert second.attempt()
    second.release()
    assert left(tmp_path) == []


def test_a_requeued_job_waits_for_its_predecessor(
    tmp_path: Path, exchange: Exchange, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    held = RunLock(tmp_path)
    assert held.attempt()
    with pytest.raises(LockError, match="Slurm job 77"):
        take(tmp_path, exchange, Asked(), wait=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ending = threading.Timer(0.5, held.release)
    ending.start()
    second = take(tmp_path, exchange, Asked(), wait=False)
    ending.join()
    assert second is not None
    second.release()


def test_only_an_earlier_start_of_the_same_job_precedes() -> None:
    first = Owner("a", "k", 1, 2, "Slurm job 7", 0)
    assert first.precedes(dataclasses.replace(first, restart=1))
    assert not first.precedes(first)
    assert not first.precedes(dataclasses.replace(first, job="Slurm job 8", restart=1))
    assert not dataclasses.replace(first, job="").precedes(dataclasses.replace(first, job="", restart=1))


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path, exchange: Exchange, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ConfigurationError, match="lock is not a regular file; remove it"):
        take(tmp_path, exchange, Asked(), wait=True)


def test_a_refused_start_leaves_no_directory(tmp_path: Path, exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mpisparse.runtime.lock.write_new", no_room)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        take(tmp_path / "run", exchange, Asked(), wait=False)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, exchange: Exchange) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot write to .*file"):
        take(tmp_path / "file" / "run", exchange, Asked(), wait=False)
    with pytest.raises(ConfigurationError, match=r"cannot write to .*file"):
        take(tmp_path / "file", exchange, Asked(), wait=False)
