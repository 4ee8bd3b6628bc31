"""Checks of a codec from outside this package, before it can lose values in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpisparse.arrays import Bytes, Doubles, Floats
from mpisparse.backends.device import load_backend
from mpisparse.errors import ConfigurationError
from mpisparse.wire.codecs.protocol import ALIGNMENT, Codec

LENGTHS = (0, 1, 2, 255, 257)
SCALES = (0.0, 1e-30, 1.0, 1e30)
ROUNDING = 2.0**-23  # of float32, by which decoded + left may differ from the values
LEAST = 2.0**-149
NOT_SENT = 0xAA  # fills a payload before encode, so that bytes left unwritten are recognisable


def check_codec(name: str, codec: Any) -> None:
    """Raise ConfigurationError unless `codec` has all members and what it sends and leaves adds up."""
    _check_members(name, codec)
    for values in _samples():
        try:
            why = _check_round_trip(codec, values)
        except Exception as error:
            why = f"raised {type(error).__name__}: {error}"
        if why:
            raise ConfigurationError(f"codec {name!r} is refused: with {len(values)} values it {why}")


def _check_members(name: str, codec: Any) -> None:
    kinds = {"name": str, "lossless": bool, "blended": bool, "variable": bool}
    wrong = [f"{key} ({kind.__name__})" for key, kind in kinds.items() if not isinstance(getattr(codec, key, None), kind)]
    wrong += [f"{key}()" for key in ("nbytes", "encode", "decode") if not callable(getattr(codec, key, None))]
    if wrong or isinstance(codec, type):
        lacks = f"which lacks {', '.join(wrong)}" if wrong else "a class"
        raise ConfigurationError(
            f"codec {name!r} must be an object with the members of mpisparse.codecs.Codec, got {codec!r}, {lacks}"
        )
    if codec.name != name:
        raise ConfigurationError(f"codec {name!r} must have that name, got {codec.name!r}")
    if codec.blended:
        raise ConfigurationError(
            f"codec {name!r} must have blended = False: momentum-{name}, which blends and then calls it, exists by itself"
        )


def _samples() -> Iterator[Floats]:
    """Vectors of awkward lengths: zeros, heavy tails, small and large numbers, ties."""
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        for scale in SCALES:
            values = (np.clip(rng.standard_t(2, length), -30, 30) * scale).astype(np.float32)
            values[::5] = values[:1]
            yield values


def _check_round_trip(codec: Codec, values: Floats) -> str | None:
    """Encode and decode a copy of the values; return what is wrong, as a phrase that follows "it"."""
    size, kernels = codec.nbytes(len(values)), load_backend()
    if not isinstance(size, int) or size < 0 or size % ALIGNMENT:
        return f"must have nbytes >= 0 and a multiple of {ALIGNMENT}, got {size!r}; pad the payload"
    left, payload = values.copy(), np.full(size, NOT_SENT, np.uint8)
    written = codec.encode(kernels, left, payload)
    if not isinstance(written, int) or not 0 <= written <= size or written % ALIGNMENT:
        return f"must return the bytes it wrote, a multiple of {ALIGNMENT} and at most nbytes = {size}, got {written!r}"
    if written != size and not codec.variable:
        return f"wrote {written} bytes where nbytes says {size}; declare variable = True if sizes differ"
    sent = payload[:written].copy()
    decoded = _decode(codec, sent, len(values))
    why = _compare(codec, values, decoded, left)
    if why is None and sent.tobytes() != payload[:written].tobytes():
        why = "changed the payload that it decoded, which others still read"
    if why is None and (
        _encode(codec, values) != sent.tobytes() or _decode(codec, sent, len(values)).tobytes() != decoded.tobytes()
    ):
        why = "gave other bytes or values the second time; a codec must have no memory"
    if why is None and not codec.variable and not np.isnan(_decode(codec, np.full(size, 0xFF, np.uint8), len(values))).all():
        why = "must decode a payload of bytes 0xFF to NaN, by which an owner reports that its sum overflowed"
    return why


def _encode(codec: Codec, values: Floats) -> bytes:
    payload = np.full(codec.nbytes(len(values)), 255 - NOT_SENT, np.uint8)
    return payload[: codec.encode(load_backend(), values.copy(), payload)].tobytes()


def _decode(codec: Codec, payload: Bytes, count: int) -> Floats:
    decoded = np.full(count, np.nan, np.float32)
    codec.decode(load_backend(), payload, decoded)
    return decoded


def _compare(codec: Codec, values: Floats, decoded: Floats, left: Floats) -> str | None:
    if not (np.isfinite(decoded).all() and np.isfinite(left).all()):
        return "decoded or left values that are not finite"
    if codec.lossless and (left.any() or (decoded != values).any()):
        return "is lossless by its own word, but decoded other values than were sent"
    before, after = values.astype(np.float64), decoded.astype(np.float64) + left.astype(np.float64)
    bound: Doubles = ROUNDING * np.maximum(np.abs(before), np.abs(decoded.astype(np.float64))) + LEAST
    off = np.flatnonzero(np.abs(before - after) > bound)
    if not len(off):
        return None
    at = int(off[0])
    given = f"sent {decoded[at]!s} and left {left[at]!s} of {values[at]!s}"
    return f"{given}; encode must leave in values what decode does not give"
