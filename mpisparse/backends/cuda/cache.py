"""Compiled kernels on disk: by source, options, architecture and compiler. A file that is damaged is compiled again.

They lie in MPISPARSE_CACHE, in $XDG_CACHE_HOME/mpisparse, or in ~/.cache/mpisparse. Where nothing can be written, each
process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

CHECK = hashlib.sha256().digest_size  # bytes before the code


def place() -> Path:
    """Return the directory of compiled kernels."""
    if own := os.environ.get("MPISPARSE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpisparse"


def fetch(key: Sequence[str], compile_: Callable[[], bytes]) -> bytes:
    """Return what was compiled for a key, or compile it now and keep it for later processes."""
    try:
        file = place() / f"kernels-{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:32]}"
    except RuntimeError:  # there is no home directory
        return compile_()
    with contextlib.suppress(OSError):
        kept = file.read_bytes()
        if hashlib.sha256(kept[CHECK:]).digest() == kept[:CHECK]:
            return kept[CHECK:]
    code = compile_()
    with contextlib.suppress(OSError):
        _write(file, hashlib.sha256(code).digest() + code)
    return code


def _write(file: Path, data: bytes) -> None:
    """Write a file whole or not at all: ranks of a host may do so at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, scratch = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        Path(scratch).replace(file)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
