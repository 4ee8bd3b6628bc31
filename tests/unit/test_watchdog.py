"""The watchdog with its ranks in one process: real threads, sockets and files, and an end of the job that is only noted."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mpisparse
from mpisparse.comm.watchdog import beat, transport, watching
from mpisparse.comm.watchdog.beat import Beat
from mpisparse.comm.watchdog.place import Place, Wait
from mpisparse.comm.watchdog.transport import Files, Seen
from mpisparse.comm.watchdog.words import table
from mpisparse.runtime.cli import main

KEY = bytes(range(32))
BEAT = Beat(2, 7, 120, beat.RUNS, "loop.py:31 in train", 0.0, "node-3", 4711)


class Rank:
    """What a watchdog sees of an exchange."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.place = rank, size, Place()
        self.spot = self.place.spot()


class Job:
    """The watchdogs of a few ranks; `ended` notes which of them ended the job, and how."""

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
        """Return as late as MPI's own end would: never, while the job lasts."""
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
    with job.ranks[1].spot("Allgather"), job.ranks[2].spot("Allgather"):
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
    with job.ranks[2].spot("Allgather"), job.ranks[1].place.exempt("evaluating"):
        wait_until(lambda: job.dogs[2].line.answer is not None and job.dogs[2].line.answer.excused)
        time.sleep(2.0)  # four times the timeout
        assert not job.ended
        with job.ranks[1].spot("Allreduce"):  # whoever waits is in nobody's way, in a phase or not
            wait_until(lambda: job.ended)
    assert job.ended == [(0, 87)]


def test_the_word_of_a_rank_that_fell_silent_in_an_exempt_phase_does_not_hold_for_ever(
    make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make(2, 0.5)
    job.dogs[0].start()
    with job.ranks[1].place.exempt("evaluating"):
        job.dogs[1]._tell()  # and never again: its thread was not started
        with job.ranks[0].spot("Allgather"):
            wait_until(lambda: job.ended)
    assert "evaluating, after 0 steps" in capsys.readouterr().err


@pytest.mark.parametrize("with_files", [True, False])
def test_without_sockets(
    make: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str], with_files: bool
) -> None:
    """By files the ranks know of each other; without them each knows of itself alone, and says so."""
    job = make(3, 0.5, tmp_path / "heartbeats" if with_files else None, sockets=False).start()
    with job.ranks[1].spot("Allgather"):
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
        assert "r1 |   ranks 0, 2: no heartbeat of it is known here" in told
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


# Heartbeats


def test_a_beat_survives_its_way(tmp_path: Path) -> None:
    assert beat.unpack(KEY, beat.pack(KEY, BEAT), 3) == BEAT
    longest = Beat(2, 10**12, 10**12, beat.WAITS, "\N{GRINNING FACE}\udcff" * 4000, 1e9, "\N{GRINNING FACE}" * 4000, 10**9)
    assert len(beat.pack(KEY, longest)) <= beat.LARGEST
    assert beat.unpack(KEY, beat.pack(KEY, longest), 3) is not None
    files = Files(tmp_path / "heartbeats", KEY, 3)
    files.put(BEAT)
    assert files.seen()[2].beat == BEAT
    assert Files(tmp_path / "heartbeats", KEY[::-1], 3).seen() == {}, "files of another job count for nothing"


def test_what_is_no_beat_of_the_job_is_dropped() -> None:
    good = beat.pack(KEY, BEAT)
    draw = random.Random(5)
    for _ in range(300):
        spoilt = bytearray(good)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        assert beat.unpack(KEY, bytes(spoilt), 3) is None
    for packet in (b"", good[:20], good[:-1], good + b" " * beat.LARGEST, beat.pack(KEY[::-1], BEAT), b"\0" * 400):
        assert beat.unpack(KEY, packet, 3) is None
    fields = vars(BEAT)
    for odd in ({**fields, "rank": 3}, {**fields, "rank": -1}, {**fields, "steps": "1"}, {**fields, "rank": True},
                {**fields, "state": "sleeps"}, {**fields, "more": 1}, {}, {**fields, "seconds": [[]]}):  # fmt: skip
        assert beat.unpack(KEY, beat.seal(KEY, odd), 3) is None
    nested = b"[" * 1000
    assert beat.unseal(KEY, beat.hmac.digest(KEY, nested, "sha256") + nested) is None


def test_stray_datagrams_change_nothing(make: Callable[..., Job]) -> None:
    job = make(2, 30.0).start()
    wait_until(lambda: job.dogs[1].line.answer is not None)
    number = job.dogs[0].hub.newest[1][0].number
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for port in (dog.mail.port for dog in job.dogs):
            for packet in (b"", b"x" * 60000, beat.pack(KEY[::-1], BEAT), beat.seal(KEY, {"beat": 1, "ending": True})):
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
    seen = {rank: Seen(waits, 1.0) for rank in range(1000)}
    del seen[7]
    seen[500] = Seen(BEAT, 605.0)
    seen[999] = Seen(Beat(**{**vars(BEAT), "state": beat.EXITS}), 605.0)
    assert table(seen, 1000, 17.0) == [
        "  rank 7: no heartbeat of it is known here",
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
