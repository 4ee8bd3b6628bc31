"""What the watchdog prints before it ends a job."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Mapping

from mpisparse.comm.place import Place
from mpisparse.comm.watchdog.transport import LastBeat

HUNG = 87  # exit code of a job in which ranks waited too long for others


def print_lines(rank: int, lines: Iterable[str]) -> None:
    """Print lines prefixed with the rank, in one write so that the output of other ranks does not mix in."""
    with contextlib.suppress(Exception):  # no failure here may keep the job from ending
        sys.stdout.flush()
        sys.stderr.write("".join(f"r{rank} | {line}\n" for line in lines))
        sys.stderr.flush()


def own_report(place: Place) -> list[str]:
    """Describe this rank: the collective calls that it waits in, and the stack of its training loop."""
    now, lines = time.monotonic(), []
    for wait in place.waits():
        seconds = now - wait.since
        begun = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        how = "" if wait.thread == place.thread else " for a result in flight"
        lines.append(f"waits in {wait.call}{how} since {begun} ({seconds:.0f} s)")
    what = "; ".join(lines) or "does not wait for other ranks"
    return [f"watchdog: {what}, after {place.steps} steps; its training loop is here:", *place.stack(place.thread)]


def rank_table(seen: Mapping[int, LastBeat], ranks: int, silent: float) -> list[str]:
    """List where each rank was last, waiting ranks at the end; ranks with the same description share a line."""
    groups: dict[str, list[int]] = {}
    for rank in range(ranks):
        groups.setdefault(_last(seen.get(rank), silent), []).append(rank)
    waiting = {text for text in groups if text.startswith("waiting")}
    return [f"  {_ranks(groups[text])}: {text}" for text in sorted(groups, key=lambda text: (text in waiting, groups[text]))]


def _last(known: LastBeat | None, silent: float) -> str:
    if known is None:
        return "no heartbeat received"
    beat, age = known
    if beat.left or age <= silent:
        return str(beat)
    return f"stopped or gone: last heartbeat {age:.0f} s ago from {beat.host}, process {beat.pid}, {beat}"


def _ranks(ranks: list[int]) -> str:
    """Format as "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
