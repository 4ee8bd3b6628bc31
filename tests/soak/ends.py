"""What a run's last checkpoint restores, for bitwise comparison."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mpisparse.checkpoint import h5file, store, tree


def contents(checkpoint: Path) -> dict[str, Any]:
    """Return all that a checkpoint restores, as bytes and text, without the run's seconds."""
    manifest = store.read_manifest(checkpoint)
    arrays: dict[str, Any] = {}
    shared = ""
    states: dict[str, Any] = {}
    for record in manifest.files:
        own, texts = h5file.read_file(checkpoint / record.name, record)
        if record.name.startswith("rank"):
            state = tree.unflatten(texts["state"], own)
            state["extra"] = {key: state["extra"][key] for key in ("epoch", "offset")}
            states[record.name] = as_bytes(tree.flatten(state))
        else:
            arrays |= own
            shared = texts.get("state", shared)
    return {**states, "shared": as_bytes((shared, arrays)), "step": manifest.step, "ranks": manifest.ranks}


def as_bytes(flat: tuple[str, h5file.Arrays]) -> tuple[str, dict[str, bytes]]:
    return flat[0], {name: array.tobytes() for name, array in flat[1].items()}


def digests(checkpoint: Path) -> dict[str, str]:
    """Return a digest of each part of what a checkpoint restores."""
    return {part: hashlib.sha256(repr(value).encode()).hexdigest() for part, value in contents(checkpoint).items()}
