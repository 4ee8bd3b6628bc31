"""Heartbeats: the state of one rank, authenticated with the job's key so that stray packets are ignored."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

LARGEST = 1200  # bytes: fits in one packet of any network
MOST_CHARACTERS = {"where": 160, "host": 60}  # characters, of up to four bytes
SEAL = hashlib.sha256().digest_size

RUNS, WAITS, EXEMPT, CLOSED, EXITS = "runs", "waits", "exempt", "closed", "exits"
STATES = (RUNS, WAITS, EXEMPT, CLOSED, EXITS)


@dataclass(frozen=True)
class Beat:
    """The state of one rank.

    `where` is a line of code, the collective call that it has been in for `seconds`, or the name of a phase. `number`
    increases from beat to beat of a rank, so that a late packet does not replace a newer one. `struck`: the rank has waited
    longer than the timeout. `reported`: it has printed its stack.
    """

    rank: int
    number: int
    steps: int
    state: str
    where: str
    seconds: float
    host: str
    pid: int
    struck: bool = False
    reported: bool = False

    def __post_init__(self) -> None:
        for name, longest in MOST_CHARACTERS.items():
            object.__setattr__(self, name, getattr(self, name)[-longest:])

    @property
    def left(self) -> bool:
        """Whether the rank has left for good."""
        return self.state in (CLOSED, EXITS)

    def __str__(self) -> str:
        after = f"after {self.steps} step{'s' if self.steps != 1 else ''}"
        if self.state == WAITS:
            return f"waiting in {self.where} {after}"
        if self.state in (EXEMPT, RUNS):
            return f"{'at ' if self.state == RUNS else ''}{self.where}, {after}"
        how = "it closed its GradientSync" if self.state == CLOSED else "its interpreter is at exit"
        return f"left its loop {after}: {how}"


TYPES = get_type_hints(Beat)


def seal(key: bytes, value: dict[str, Any]) -> bytes:
    """Encode a record with a message authentication code."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return hmac.digest(key, text, "sha256") + text


def unseal(key: bytes, packet: bytes) -> dict[str, Any] | None:
    """Decode a packet; None if it is too long, not a record, or not authenticated with the key."""
    text = packet[SEAL:]
    if len(packet) > LARGEST or not hmac.compare_digest(packet[:SEAL], hmac.digest(key, text, "sha256")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def encode(key: bytes, beat: Beat) -> bytes:
    """Encode a beat as a packet."""
    return seal(key, asdict(beat))


def decode(key: bytes, packet: bytes, ranks: int) -> Beat | None:
    """Decode a packet; None if it is not a beat of this job."""
    value = unseal(key, packet)
    return None if value is None else read(value, ranks)


def read(value: object, ranks: int) -> Beat | None:
    """Build a beat from a record; None if a field is missing, of another type or out of range."""
    if not isinstance(value, dict) or set(value) != set(TYPES):
        return None
    if any(type(value[name]) is not kind for name, kind in TYPES.items()):
        return None
    beat = Beat(**value)
    return beat if 0 <= beat.rank < ranks and beat.state in STATES else None
