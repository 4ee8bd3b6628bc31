"""Roll call: each collective entry point sends its name and its step in its first message.

All first messages are rows of the same length in the same MPI call, with room for further data of a step (`Exchange.spare`
bytes). So ranks in different entry points, one in checkpoint.save and another in a step, meet in it and raise together;
otherwise they would wait for ever. A process that ends answers one last roll call, so that a rank that waits for it learns
of its end.

The calls are nonblocking: another thread waits for those of deliveries in flight, and a process that ends answers those
of all its exchanges at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.comm.agreement import Refusal
from mpisparse.comm.watchdog.watching import announce_exit
from mpisparse.errors import CollectiveError

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange, Gathering

STEP, END, JOINED, FIRST = "step", "the end of the program", "join", "the first step"
SAMPLES = "one of the first steps"
ENTRIES = (
    STEP, END, JOINED, FIRST, "checkpoint.save", "finish() of a checkpoint", "checkpoint.load", "average", "observe",
    "agree_any", "gather_floats", "gather_texts", "broadcast_", "check_together", "synchronize", "global_weights",
    "load_state_dict", "close", "should_stop", SAMPLES, "GradientSync", "aggregator", "OneBitAdamW",
)  # fmt: skip
JOINABLE = (STEP, FIRST, SAMPLES, "average", "observe", "agree_any", "should_stop")  # also for ranks without batches
VALUES = 7  # numbers that an entry point may send along
HEAD = 2 + VALUES
LISTED = 8  # how many ranks a message names one by one


class Apart(Refusal):
    """The ranks are in different entry points; args[0] says which."""


class Call(NamedTuple):
    """A roll call that has begun. rows: the answers, if they are known."""

    exchange: Exchange
    row: Ints
    gathering: Gathering | None  # None: there is one rank
    rows: Ints | None = None


def begin(exchange: Exchange, entry: str, step: int, values: Sequence[int] = (), rider: Bytes | None = None) -> Call:
    """Send the others this rank's entry point; local. answers() waits for theirs.

    rider: exchange.spare bytes that travel along; None: zeros.
    """
    if exchange.gone:
        raise CollectiveError(f"r{exchange.rank} | {exchange.gone}")
    row = np.zeros(HEAD + exchange.spare // 8, dtype=np.int64)
    row[:2] = ENTRIES.index(entry), step
    row[2 : 2 + len(values)] = values
    if rider is not None:
        row[HEAD:] = rider.view(np.int64)
    return Call(exchange, row, exchange.begin_allgather(row) if exchange.size > 1 else None)


def answers(call: Call, exchange: Exchange | None = None) -> Ints:
    """Wait for the rows of all ranks, and raise Apart unless they are in the same entry point; collective.

    exchange: that of the waiting thread, if it is another thread. Returns row r for rank r: entry, step, and its values.
    Ranks that have no more batches (JOINED) may be in any entry point that they can take part in.
    """
    if call.rows is not None:
        return call.rows
    if call.gathering is None:
        return call.row[None, :HEAD]
    try:
        rows = (exchange or call.exchange).gathered(call.gathering)[:, :HEAD]
    except ConnectionError as error:
        where = _place(ENTRIES[call.row[0]], int(call.row[1]))
        raise ConnectionError(
            f"{error}. This rank was {where}: if no other has an error, one has ended without that call, which is "
            "collective: make it on every rank"
        ) from error.__cause__
    if (rows[:, :2] != call.row[:2]).any() and not _together(rows[:, :2].tolist()):
        text = in_words(rows[:, :2].tolist())
        if (rows[:, 0] == ENTRIES.index(END)).any():
            call.exchange.gone = text
        raise Apart(text)
    return rows


def riders(call: Call) -> Bytes:
    """The riders of all ranks that came with the answers to a call, one row per rank; local."""
    assert call.gathering is not None
    return np.ascontiguousarray(call.gathering.rows[:, HEAD:]).view(np.uint8)


def _together(rows: Sequence[tuple[int, int]]) -> bool:
    """Tell whether all ranks are in the same entry point, and in the same step if that is one."""
    places = {(entry, step if ENTRIES[entry] == STEP else 0) for entry, step in rows if ENTRIES[entry] != JOINED}
    joined = any(ENTRIES[entry] == JOINED for entry, _ in rows)
    return len(places) <= 1 and all(not joined or ENTRIES[entry] in JOINABLE for entry, _ in places)


def all_done(rows: Ints) -> bool:
    """Tell whether no rank has any more batches."""
    return not len(at_work(rows))


def at_work(rows: Ints) -> Ints:
    """The answers of ranks that have batches."""
    busy: Ints = rows[rows[:, 0] != ENTRIES.index(JOINED)]
    return busy


def meet(exchange: Exchange, entry: str, *values: int, step: int | None = None) -> Ints:
    """Raise CollectiveError on all ranks unless all are in this entry point; collective.

    values: at most 7 numbers to send along. step: this rank's step, if it is not the number of steps done. Returns the
    values of each rank that has batches.
    """
    if exchange.survival is not None:
        rows: Ints = exchange.survival.surely(lambda: _meet(exchange, entry, values, step))
        return rows
    return _meet(exchange, entry, values, step)


def _meet(exchange: Exchange, entry: str, values: Sequence[int], step: int | None) -> Ints:
    number = exchange.place.steps if step is None else step
    try:
        return at_work(answers(begin(exchange, entry, number, values)))[:, 2:]
    except Apart as apart:
        raise CollectiveError(f"r{exchange.rank} | {apart.args[0]}") from None


def in_words(rows: Sequence[tuple[int, int]]) -> str:
    """Describe which ranks are in which call, and what to do. rows: entry and step of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, (entry, step) in enumerate(rows):
        ranks.setdefault(_place(ENTRIES[entry], step), []).append(rank)
    groups = [f"{_named(members)}{'' if i else ' is' if len(members) == 1 else ' are'} {place}"
              for i, (place, members) in enumerate(ranks.items())]  # fmt: skip
    names = [ENTRIES[entry] for entry, _ in rows]
    other = next((name for name in names if name not in (STEP, END, JOINED, FIRST, SAMPLES)), None)
    if JOINED in names and END not in names:
        return f"{', '.join(groups)}: leave the block of join() on every rank before {other or 'this step'}"
    if other is not None:
        short = other.rsplit(".", 1)[-1]
        return f"{', '.join(groups)}: {short} is collective, call it on every rank"
    return f"{', '.join(groups)}: a step is collective, each rank needs the same number of them, or sync.join()"


def _place(entry: str, step: int) -> str:
    if entry == JOINED:
        return "at the end of its batches"
    if entry in (STEP, SAMPLES):
        return f"in step {step}"
    return f"at {END}" if entry == END else f"in {entry}"


def _named(ranks: Sequence[int]) -> str:
    """Name ranks: all, or the first ones of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > LISTED:
        return f"ranks {', '.join(map(str, ranks[:LISTED]))} and {len(ranks) - LISTED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


# The end of the program

_open: list[Exchange] = []


def answer_at_exit(exchange: Exchange) -> None:
    """Make the process answer one last roll call of an exchange when it ends, unless the exchange was closed; local.

    Only over MPI, whose processes end together in any case. Ranks of a process group notice a closed connection.
    """
    if exchange.size > 1 and exchange.comm.ends_together:
        _open[:] = [other for other in _open if other.is_open]
        _open.append(exchange)
        atexit.unregister(_leave)
        atexit.register(_leave)  # registered last, so that it runs before transports close and the watchdog waits for ranks


def newest_of(size: int, other_than: Exchange | None) -> Exchange | None:
    """The last opened exchange with this many ranks that is still open; local.

    It is the same on all ranks if they open and close exchanges together.
    """
    able = (each for each in reversed(_open) if each.began_with == size and each.is_open and not each.gone)
    return next((each for each in able if each is not other_than), None)


def _leave() -> None:
    """Tell ranks that wait in an entry point that this one will not come. All ranks that end meet here."""
    failed = getattr(sys, "last_value", None) is not None  # an uncaught error: waiting ranks notice the end
    left = [exchange for exchange in _open if exchange.pid == os.getpid() and exchange.is_open and not exchange.gone]
    left = [exchange for exchange in left if not failed or exchange.survival is not None]  # without, all end
    if failed:
        announce_exit()
    for exchange in left:
        if exchange.survival is not None:
            exchange.survival.leave(lambda exchange=exchange: _answer(begin(exchange, END, exchange.place.steps)))
    calls = [begin(exchange, END, exchange.place.steps) for exchange in left if exchange.survival is None]
    if left:
        announce_exit()
    for call in calls:
        _answer(call)


def _answer(call: Call) -> None:
    """Meet other ranks that end, or tell those that wait in an entry point that this one will not come."""
    try:
        _wait_quietly(call)
        answers(call)
    except ConnectionError:
        pass  # a rank is gone, and none waits
    except Apart as apart:
        print(f"r{call.exchange.rank} | {apart.args[0]}", file=sys.stderr, flush=True)


def _wait_quietly(call: Call) -> None:
    """Wait without using the core, because some rank may still have work to do."""
    pause = 5e-5
    while call.gathering is not None and not call.gathering.request.Test():
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
