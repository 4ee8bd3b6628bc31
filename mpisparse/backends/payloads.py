"""Where in a payload of few bits scales and codes lie; long vectors have a payload for each chunk of values."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpisparse.backends.protocol import CodeForm


class Places(NamedTuple):
    """Where in a payload scales end, codes begin and end, and the payload ends."""

    scales_end: int
    codes: int
    codes_end: int
    end: int


@lru_cache(maxsize=64)
def places_of(form: CodeForm, count: int) -> Places:
    """Lay out the payload of `count` values; the codes of the last group end with the last byte in use."""
    groups, rest = divmod(count, form.group)
    scales_end = 2 * -(-count // form.group)
    codes = _padded(scales_end)
    codes_end = codes + groups * form.nbytes + min(rest, form.nbytes)
    return Places(scales_end, codes, codes_end, _padded(codes_end))


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4
