"""A heartbeat: what a rank says of itself, sealed with the job's key so that nothing else is taken for one."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

LARGEST = 1200  # bytes: a datagram that no network cuts in two
LONGEST = {"where": 160, "host": 60}  # characters, of up to four bytes
SEAL = hashlib.sha256().digest_size

RUNS, WAITS, EXEMPT, CLOSED, EXITS = "runs", "waits", "exempt", "closed", "exits"
STATES = (RUNS, WAITS, EXEMPT, CLOSED, EXITS)


@dataclass(frozen=True)
class Beat:
    """Where a rank is. `where`: a line of code, the call that it waits in for `seconds`, or the name of a phase.

    number: counts a rank's beats, so that a late one does not replace a newer. struck: it has waited too long. reported:
    it has printed its stack.
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
        for name, longest in LONGEST.items():
            object.__setattr__(self, name, getattr(self, name)[-longest:])

    @property
    def left(self) -> bool:
        """Whether the rank will not come back."""
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
    """A record as bytes that only holders of the key can make."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return hmac.digest(key, text, "sha256") + text


def unseal(key: bytes, packet: bytes) -> dict[str, Any] | None:
    """The record in a packet, or None if it is no record, too long, or of somebody without the key."""
    text = packet[SEAL:]
    if len(packet) > LARGEST or not hmac.compare_digest(packet[:SEAL], hmac.digest(key, text, "sha256")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def pack(key: bytes, beat: Beat) -> bytes:
    """A beat as a packet."""
    return seal(key, asdict(beat))


def unpack(key: bytes, packet: bytes, ranks: int) -> Beat | None:
    """The beat in a packet, or None if it is not one of this job's."""
    value = unseal(key, packet)
    return None if value is None else read(value, ranks)


def read(value: object, ranks: int) -> Beat | None:
    """The beat in a record, or None if there is none of these ranks."""
    if not isinstance(value, dict) or set(value) != set(TYPES):
        return None
    if any(type(value[name]) is not kind for name, kind in TYPES.items()):
        return None
    beat = Beat(**value)
    return beat if 0 <= beat.rank < ranks and beat.state in STATES else None
