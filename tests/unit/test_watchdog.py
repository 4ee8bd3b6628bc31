"""The watchdog with all ranks in one process: real threads, sockets and files; the end of the job is only recorded."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from mpi4py import MPI

import mpisparse
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.place import Place, Wait
from mpisparse.comm.watchdog import beat, transport, watching
from mpisparse.comm.watchdog.beat import Beat
from mpisparse.comm.watchdog.transport import Files, LastBeat
from mpisparse.comm.watchdog.words import rank_table
from mpisparse.runtime.cli import main

KEY = bytes(range(32))
BEAT = Beat(2, 7, 120, beat.RUNS, "loop.py:31 in train", 0.0, "node-3", 4711)


class Rank:
    """What a watchdog sees of an exchange."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.place = rank, size, Place()
        self.spot = self.place.spot()
        self.comm = None  # nothing to end: the tests have an end_job of their own


@contextlib.contextmanager
def waiting(rank: Rank, call: str) -> Iterator[None]:
    """Mark a call as Exchange does."""
    rank.spot.wait = call, time.monotonic(), threading.get_ident()
    try:
        yield
    finally:
        rank.spot.wait = None


class Job:
    """The watchdogs of a few ranks; `ended` records which of them ended the job, and how."""

    def __init__(self, size: int, timeout: float, directory: Path | None = None, *, sockets: bool = True) -> None:
        self.ranks = [Rank(rank, size) for rank in range(size)]
        self.ended: list[tuple[int, int]] = []
        self.over = threading.Event()
        mine = [transport.open_socket() if sockets else None for _ in self.ranks]
        port = mine[0].getsockname()[1] if mine[0] is not None else None
        agreed = {"key": KEY.hex(), "names": ["127.0.0.1"], "port": port, "directory": directory and str(directory)}
        self.dogs = [watching.Watchdog(rank, timeout, made, agreed) for rank, made in zip(self.ranks, mine, strict=True)]
        for dog in self.dogs:
            dog.end_job = lambda code, rank=dog.rank: self._end(rank, code)

    def _end(self, rank: int, code: int) -> None:
        """Block like MPI's Abort until the test is over."""
        self.ended.append((rank, code))
        self.over.wait()

    def start(self) -> Job:
        for dog in self.dogs:
            dog.start()
        return self

    def close(self) -> None:
        self.over.set()
        for dog in self.dogs:
            dog.close()
        for dog in self.dogs:
            if dog.thread.ident is not None:
                dog.thread.join(600)
                assert not dog.thread.is_alive()
            elif dog.mail is not None:
                dog.mail.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def made(*args: object, **options: object) -> Job:
        jobs.append(Job(*args, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield made
    for job in jobs:
        job.close()


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < until, "waited for ten minutes"
        time.sleep(0.01)


# Ending the job


def test_a_rank_that_closed_early_is_named_and_the_others_show_where_they_are(
    make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make(4, 0.5).start()
    for rank in job.ranks:
        rank.place.steps = 120
    job.dogs[3].close()
    with waiting(job.ranks[1], "Allgather"), waiting(job.ranks[2], "Allgather"):
        wait_until(lambda: job.ended)
    assert job.ended == [(0, 87)]
    told = capsys.readouterr().err
    for rank in (1, 2):
        assert f"r{rank} | watchdog: waits in Allgather since " in told
        assert f"r{rank} |     wait_until(lambda: job.ended)" in told
    assert "r0 | watchdog: does not wait for other ranks, after 120 steps; its training loop is here:" in told
    assert "r0 |   rank 3: left its loop after 120 steps: it closed its GradientSync" in told
    assert "r0 |   ranks 1-2: waiting in Allgather after 120 steps" in told


def test_an_exempt_phase_of_any_rank_holds_the_clock_of_all(make: Callable[..., Job]) -> None:
    job = make(3, 0.5).start()
    with waiting(job.ranks[2], "Allgather"), job.ranks[1].place.exempt("evaluating"):
        wait_until(lambda: job.dogs[2].line.answer is not None and job.dogs[2].line.answer.excused)
        time.sleep(2.0)  # four times the timeout
        assert not job.ended
        with waiting(job.ranks[1], "Allreduce"):  # whoever waits is in nobody's way, in a phase or not
            wait_until(lambda: job.ended)
    assert job.ended == [(0, 87)]


def test_the_word_of_a_rank_that_fell_silent_in_an_exempt_phase_does_not_hold_for_ever(
    make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make(2, 0.5)
    job.dogs[0].start()
    with job.ranks[1].place.exempt("evaluating"):
        job.dogs[1]._tell()  # and never again: its thread was not started
        with waiting(job.ranks[0], "Allgather"):
            wait_until(lambda: job.ended)
    assert "evaluating, after 0 steps" in capsys.readouterr().err


@pytest.mark.parametrize("with_files", [True, False])
def test_without_sockets(
    make: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str], with_files: bool
) -> None:
    """With files the ranks know of each other; without them each knows only itself, and says so."""
    job = make(3, 0.5, tmp_path / "heartbeats" if with_files else None, sockets=False).start()
    with waiting(job.ranks[1], "Allgather"):
        if with_files:
            with job.ranks[0].place.exempt("saving"):
                wait_until(lambda: job.dogs[1].counted or job.ended)
                time.sleep(2.0)
                assert not job.ended
        wait_until(lambda: job.ended)
    assert job.ended[0] == (1, 87)
    told = capsys.readouterr().err
    assert "r1 | watchdog: waits in Allgather since " in told
    assert "datagrams to rank 0 do not get through" in told
    if with_files:
        assert "r1 |   ranks 0, 2: at " in told
        assert f"these are from {tmp_path / 'heartbeats'}" in told
        job.close()
        assert not (tmp_path / "heartbeats").exists()
    else:
        assert "r1 |   ranks 0, 2: no heartbeat received" in told
        assert "there is no run directory for files" in told


def test_a_process_that_was_stopped_itself_does_not_count_that_time(make: Callable[..., Job]) -> None:
    job = make(2, 10.0)
    rank, dog = job.ranks[0], job.dogs[0]
    rank.spot.wait = Wait("Allgather", time.monotonic() - 7200, threading.get_ident())
    dog._count(7200.0)  # suspended for two hours
    assert not dog.struck
    for _ in range(5):
        dog._count(1.0)
    assert not dog.struck
    for _ in range(5):
        dog._count(1.0)
    assert dog.struck
    dog.struck, rank.spot.wait = 0.0, Wait("Allgather", time.monotonic(), threading.get_ident())
    dog._count(1.0)
    assert sum(dog.counted.values()) < 1.0, "another wait begins anew"


# Marks


class Comm:
    """A communicator whose collectives record what the watchdog sees meanwhile; Bcast fails."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.comm, self.seen = exchange, exchange.comm, []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*buffers: object, **options: object) -> Request | None:
            if name.startswith("I"):
                return Request(self.see)
            self.see()
            if name == "Bcast":
                raise RuntimeError("no broadcast")
            getattr(self.comm, name)(*buffers, **options)
            return None

        return call

    def see(self) -> None:
        self.seen.append([(wait.call, wait.thread == threading.get_ident()) for wait in self.exchange.place.waits()])


class Request:
    """A request that is done at its second test."""

    def __init__(self, see: Callable[[], None]) -> None:
        self.see, self.tests = see, 0

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        self.see()
        self.tests += 1
        return self.tests > 1


def collectives(exchange: Exchange) -> dict[str, Callable[[], object]]:
    payload = np.arange(8, dtype=np.uint8)
    return {
        "Allgather": lambda: exchange.allgather(payload),
        "Allreduce": lambda: exchange.allreduce_(payload),
        "Allgatherv": lambda: exchange.allgatherv(payload, [8], [0]),
        "Alltoallv": lambda: exchange.alltoallv(payload, [8], [0]),
    }


@pytest.mark.parametrize("kind", ["blocking", "polling"])
def test_collectives_are_marked_while_they_last(kind: str) -> None:
    exchange = Exchange(MPI.COMM_SELF)
    used = exchange if kind == "blocking" else exchange.polling()
    own = used.comm
    used.comm = comm = Comm(used)
    for name, call in collectives(used).items():
        comm.seen.clear()
        call()
        assert comm.seen == [[(name, True)]] * (1 if kind == "blocking" else 2)
        assert not exchange.place.waits()
    if kind == "blocking":
        with pytest.raises(RuntimeError, match="no broadcast"):
            used.broadcast_(np.zeros(1, dtype=np.uint8))
        assert comm.seen[-1] == [("Bcast", True)]
        assert not exchange.place.waits(), "a failed call is left too"
    used.comm = own
    for each in {used, exchange}:
        each.close()


def test_a_collective_of_host_arrays_calls_into_no_other_module() -> None:
    exchange = Exchange(MPI.COMM_SELF)
    called: list[str] = []
    home = Exchange.allgather.__code__.co_filename

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename != home:
            called.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    for name, call in collectives(exchange).items():
        call()  # what is imported on first use is imported now
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        called = [where for where in called if not where.startswith(__file__)]
        assert not called, name
    exchange.close()


# Heartbeats


def test_a_beat_survives_its_way(tmp_path: Path) -> None:
    assert beat.decode(KEY, beat.encode(KEY, BEAT), 3) == BEAT
    longest = Beat(2, 10**12, 10**12, beat.WAITS, "\N{GRINNING FACE}\udcff" * 4000, 1e9, "\N{GRINNING FACE}" * 4000, 10**9)
    assert len(beat.encode(KEY, longest)) <= beat.LARGEST
    assert beat.decode(KEY, beat.encode(KEY, longest), 3) is not None
    files = Files(tmp_path / "heartbeats", KEY, 3)
    files.put(BEAT)
    assert files.seen()[2].beat == BEAT
    assert Files(tmp_path / "heartbeats", KEY[::-1], 3).seen() == {}, "files of another job count for nothing"


def test_what_is_no_beat_of_the_job_is_dropped() -> None:
    good = beat.encode(KEY, BEAT)
    draw = random.Random(5)
    for _ in range(300):
        spoilt = bytearray(good)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        assert beat.decode(KEY, bytes(spoilt), 3) is None
    for packet in (b"", good[:20], good[:-1], good + b" " * beat.LARGEST, beat.encode(KEY[::-1], BEAT), b"\0" * 400):
        assert beat.decode(KEY, packet, 3) is None
    fields = vars(BEAT)
    for odd in ({**fields, "rank": 3}, {**fields, "rank": -1}, {**fields, "steps": "1"}, {**fields, "rank": True},
                {**fields, "state": "sleeps"}, {**fields, "more": 1}, {}, {**fields, "seconds": [[]]}):  # fmt: skip
        assert beat.decode(KEY, beat.seal(KEY, odd), 3) is None
    nested = b"[" * 1000
    assert beat.unseal(KEY, beat.hmac.digest(KEY, nested, "sha256") + nested) is None


def test_stray_datagrams_change_nothing(make: Callable[..., Job]) -> None:
    job = make(2, 30.0).start()
    wait_until(lambda: job.dogs[1].line.answer is not None)
    number = job.dogs[0].hub.newest[1][0].number
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for port in (dog.mail.port for dog in job.dogs):
            for packet in (b"", b"x" * 60000, beat.encode(KEY[::-1], BEAT), beat.seal(KEY, {"beat": 1, "ending": True})):
                with contextlib.suppress(OSError):
                    stranger.sendto(packet, ("127.0.0.1", port))
    wait_until(lambda: job.dogs[0].hub.newest[1][0].number > number)
    assert set(job.dogs[0].hub.newest) == {0, 1}
    assert all(dog.thread.is_alive() for dog in job.dogs)


def test_an_older_beat_does_not_replace_a_newer_one(make: Callable[..., Job]) -> None:
    hub = make(3, 30.0).dogs[0].hub
    hub.put(BEAT)
    hub.put(Beat(**{**vars(BEAT), "number": 6, "state": beat.EXITS}))
    assert hub.seen()[2].beat == BEAT


def test_a_forked_process_does_not_speak_for_the_rank(make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    dog = make(2, 30.0).dogs[1]
    with monkeypatch.context() as patch:
        patch.setattr(watching.os, "getpid", lambda: dog.pid + 1)
        dog.close(beat.EXITS)
    assert not dog.final


def test_the_table_puts_ranks_together_and_those_that_wait_last() -> None:
    waits = Beat(**{**vars(BEAT), "state": beat.WAITS, "where": "Allgather"})
    seen = {rank: LastBeat(waits, 1.0) for rank in range(1000)}
    del seen[7]
    seen[500] = LastBeat(BEAT, 605.0)
    seen[999] = LastBeat(Beat(**{**vars(BEAT), "state": beat.EXITS}), 605.0)
    assert rank_table(seen, 1000, 17.0) == [
        "  rank 7: no heartbeat received",
        "  rank 500: stopped or gone: last heartbeat 605 s ago from node-3, process 4711, "
        "at loop.py:31 in train, after 120 steps",
        "  rank 999: left its loop after 120 steps: its interpreter is at exit",
        "  ranks 0-6, 8-499, 501-998: waiting in Allgather after 120 steps",
    ]


# Settings


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "ten"])
def test_a_bad_timeout_is_refused_by_the_command_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    if value == "ten":
        with pytest.raises(SystemExit, match="2"):
            main(["train", "--timeout", value])
    else:
        assert main(["train", "--timeout", value]) == 2
    assert "timeout" in capsys.readouterr().err


def test_a_timeout_is_no_option_of_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--option", "timeout=3"]) == 2
    assert "pass --timeout" in capsys.readouterr().err


def test_nothing_is_watched_on_one_rank() -> None:
    import torch

    sync = mpisparse.GradientSync(torch.nn.Linear(3, 2))
    assert sync._watchdog is None
    assert not [thread for thread in threading.enumerate() if thread.name == "mpisparse-watchdog"]
    sync.close()
