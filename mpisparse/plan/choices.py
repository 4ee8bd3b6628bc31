"""What was chosen when: a history for checkpoints, and a file of it that another run can replay."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpisparse.backends.flat import Slot
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError
from mpisparse.plan.candidates import BY_NAME, WEIGHTS

History = list[tuple[int, str]]  # from which step on, and the candidate's name


@dataclass(frozen=True)
class Log:
    """A history with what it is of: a model, and so many ranks. looked: the step after which they looked last."""

    history: History
    model: str
    ranks: int
    looked: int

    def until(self, step: int) -> History:
        """What was chosen up to a step."""
        return [(at, name) for at, name in self.history if at <= step]


def digest_of(slots: Sequence[Slot]) -> str:
    """A digest of a model's parameters: names, shapes and types."""
    lines = [f"{slot.name} {list(slot.shape)} {slot.dtype}" for slot in slots]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def checked(history: Any, what: str) -> History:
    """Return a history of plain values; raise ConfigurationError unless it is one."""
    try:
        found = [(step, name) for step, name in history]
        sound = all(type(step) is int and step >= 0 and name in BY_NAME for step, name in found)
    except (TypeError, ValueError):
        sound = False
    if not sound or [step for step, _ in found] != sorted({step for step, _ in found}):
        raise ConfigurationError(f"{what} must list steps, ascending, with names of candidates; known: {', '.join(BY_NAME)}")
    return found


def flattened(history: History, done: int) -> History:
    """The same history, where after so many steps what was chosen last goes on between all ranks."""
    return [*(each for each in history if each[0] < done), *((done, BY_NAME[name].flat.name) for _, name in history[-1:])]


def discontinuities(history: History) -> list[int]:
    """The steps of a history from which on ranks, or nodes, train on their own weights, or no longer do."""
    own = [(step, each.way if each.kind == WEIGHTS else "") for step, each in ((s, BY_NAME[name]) for s, name in history)]
    return [step for (_, old), (step, new) in pairwise(own) if old != new]


def returns(history: History) -> int:
    """How often a candidate came back that had been left; what a run begins with, before it has measured, does not count."""
    chosen = [name for _, name in history[1:]]
    return sum(name in chosen[:place] for place, name in enumerate(chosen))


def write(path: Path, log: Log) -> None:
    """Write a log, whole or not at all. A file that cannot be written does not end the run."""
    breaks = set(discontinuities(log.history))
    lines: list[dict[str, Any]] = [{"choices": 1, "model": log.model, "ranks": log.ranks, "looked": log.looked}]
    for step, name in log.history:
        lines.append({"step": step, "candidate": name} | ({"discontinuity": True} if step in breaks else {}))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        print(f"mpisparse: {path}: {error.strerror or error}; choices are not written", file=sys.stderr, flush=True)


def read(path: Path, model: str, what: str = "deterministic") -> Log:
    """Read what write() wrote for the same model."""
    try:
        first, *rest = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        history = [(line["step"], line["candidate"]) for line in rest]
        known, of = first["choices"], first["model"]
        ranks, looked = int(first.get("ranks", 0)), int(first.get("looked", 0))
    except OSError as error:
        raise ConfigurationError(f"{what}: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ConfigurationError(f"{what}: {path} is no file that the option log wrote: {error}") from error
    if known != 1:
        raise ConfigurationError(f"{what}: {path} is of version {known!r}, this one reads version 1")
    if of != model:
        raise ConfigurationError(f"{what}: {path} is of another model, whose parameters have other names, shapes or types")
    return Log(checked(history, f"{what}: {path}"), model, ranks, looked)


def read_together(path: Path, model: str, exchange: Exchange) -> History:
    """Return the history that rank 0 has read, or raise what it found wrong, on all ranks; collective."""
    told: dict[str, Any] = {}
    if exchange.rank == 0:
        try:
            told = {"history": read(path, model).history}
        except ConfigurationError as error:
            told = {"error": f"{error}; pass the log of a run of this model"}
    told = json.loads(exchange.gather_texts(json.dumps(told))[0])
    if "error" in told:
        raise ConfigurationError(told["error"])
    return [(step, name) for step, name in told["history"]]


def read_earlier(path: Path, model: str, exchange: Exchange) -> Log | None:
    """On rank 0, the log of an earlier run of the same model on as many ranks, if there is one; collective.

    Raises on all ranks if the file is anything else, which would be overwritten.
    """
    log, error = None, None
    try:
        if exchange.rank == 0 and path.exists() and path.stat().st_size:
            log = read(path, model, "log")
    except ConfigurationError as caught:
        error = ConfigurationError(f"{caught}; it is not overwritten: remove it, or name another file")
    except OSError as caught:
        error = ConfigurationError(f"log: {path} cannot be: {caught.strerror or caught}; name another file")
    exchange.raise_together(error)
    return log if log is not None and log.ranks == exchange.size else None
