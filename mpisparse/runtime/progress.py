"""What a person sees during training: a live bar on a terminal, plain lines elsewhere; on rank 0 unless ranks have logs.

mpirun stands between a rank and the terminal (see mpisparse.runtime.terminal); MPISPARSE_PROGRESS=bar|plain overrides.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Protocol

from mpisparse.measures import phase
from mpisparse.runtime.terminal import reaches_terminal

PLAIN_SECONDS = 5.0
MORE_THAN_DENSE = "more than dense: this model is too small, or the density too high"
AS_MUCH = 1.01  # times the bytes of dense are as many: control messages come on top


class Progress(Protocol):
    """Shows steps and messages."""

    def step(self, step: int, facts: dict[str, str]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Shows nothing, on ranks other than 0."""

    def step(self, step: int, facts: dict[str, str]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class Plain:
    """Prints a line every few seconds."""

    def __init__(self, total: int, rank: int = 0) -> None:
        self.total = total
        self.rank = rank
        self.shown = 0.0

    def step(self, step: int, facts: dict[str, str]) -> None:
        now = time.monotonic()
        if now - self.shown >= PLAIN_SECONDS or step == self.total:
            self.shown = now
            self.say(f"step {step}/{self.total}  " + "  ".join(f"{key} {value}" for key, value in facts.items()))

    def say(self, text: str) -> None:
        print(f"r{self.rank} | {text}", flush=True)

    def close(self) -> None: ...


class Bar:
    """A live bar, drawn by rich."""

    def __init__(self, total: int, start: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.console = Console(force_terminal=True, width=int(os.environ.get("COLUMNS", "110")))
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[facts]}"))
        self.bar = RichProgress(*columns, console=self.console, refresh_per_second=4)
        self.task = self.bar.add_task("", total=total, completed=start, facts="")
        self.bar.start()

    def step(self, step: int, facts: dict[str, str]) -> None:
        self.bar.update(self.task, completed=step, facts=" ".join(f"[dim]{k}[/] {v}" for k, v in facts.items()))

    def say(self, text: str) -> None:
        self.console.print(f"r0 | {text}", highlight=False, markup=False)

    def close(self) -> None:
        self.bar.stop()


def make_progress(rank: int, total: int, start: int, *, log_ranks: bool = False) -> Progress:
    """Create the progress display of a rank; plain lines on every rank if each has a log."""
    if log_ranks:
        return Plain(total, rank)
    if rank:
        return Silent()
    wanted = os.environ.get("MPISPARSE_PROGRESS") or ("bar" if reaches_terminal(sys.stdout) else "plain")
    return Bar(total, start) if wanted == "bar" else Plain(total)


def human_bytes(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def compared_with_dense(received: float, dense: float) -> str:
    """Compare the bytes received with those of a dense all-reduce, in words."""
    if received > AS_MUCH * dense:
        return f"{received / dense:.1f} times the bytes of a dense all-reduce ({MORE_THAN_DENSE})"
    if received > dense:
        return "as much as a dense all-reduce"
    return f"{100 * (1 - received / dense):.1f} % less than a dense all-reduce"


def own_facts(loss: float, seconds: dict[str, float]) -> dict[str, str]:
    """Return what the log of a rank other than 0 shows of a step."""
    return {"loss": f"{loss:.4f}"} | {name: f"{1e3 * taken:.1f} ms" for name, taken in seconds.items()}


def step_facts(fields: dict[str, Any], dense: float, name: str = "", metric: float | None = None) -> dict[str, str]:
    """Return what rank 0 shows of a step; `metric`, called `name`, is that of the last evaluation."""
    received = fields["bytes_received"]["mean"]
    seconds = fields["seconds"]
    exchange = sum(spent["mean"] for name, spent in seconds.items() if phase(name).exchange)
    facts = {
        "loss": f"{fields['loss']['mean']:.4f}",
        "density": f"{fields['density']:.5f}",
        "compute": f"{1e3 * seconds['compute']['mean']:.0f} ms",
        "exchange": f"{1e3 * exchange:.1f} ms",
    }
    if metric is not None:
        facts[name] = f"{metric:.4f}"
    if dense:
        more = received > AS_MUCH * dense
        facts["saved"] = "none, more than dense" if more else f"{max(0.0, 100 * (1 - received / dense)):.1f} %"
    return facts
