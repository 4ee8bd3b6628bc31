"""How finely values are sent. One codec per file; each is looked up by name and imported then.

A package of its own may add codecs with `register_codec`, or declare them as entry points in the group "mpisparse.codecs".
"""

from __future__ import annotations

from collections.abc import Mapping

from mpisparse import names
from mpisparse.errors import check_choice
from mpisparse.wire.codecs.protocol import Codec, Kernels

__all__ = ["CODECS", "Codec", "Kernels", "codec_names", "find_codec", "register_codec"]

CODECS: Mapping[str, Codec] = names.CODECS


def find_codec(name: str) -> Codec:
    """Return the codec of this name, importing its module if need be."""
    if name not in CODECS:
        check_choice("codec", name, CODECS)
    return CODECS[name]


def register_codec(codec: Codec) -> None:
    """Add a codec, and with it momentum-NAME; refuse one that loses values or whose name is taken.

    Local: call it on all ranks.
    """
    names.CODECS.add(getattr(codec, "name", None), codec)


def codec_names(*, blended: bool | None = None) -> list[str]:
    """List all codecs, or those that do or do not blend values with what was sent before; imports none."""
    return [name for name in CODECS if blended is None or name.startswith(names.BLENDED) == blended]
