"""mpisparse inspect: what is inside a checkpoint, and whether it is what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpisparse.checkpoint import store
from mpisparse.checkpoint.h5file import Damaged, read_file
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.progress import human_bytes


def run(directory: Path, *, verify: bool, as_json: bool) -> int:
    """Print what is inside; returns 1 if something is damaged."""
    damaged = False
    for path in checkpoints(directory):
        record = look(path, verify=verify)
        damaged |= "damaged" in record
        print(json.dumps(record) if as_json else _page(record))
    return int(damaged)


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints that a path means: itself, those in it, or those of the run it is."""
    if directory.name.startswith("step-") and directory.is_dir():
        return [directory]
    found = store.found(directory) or store.found(directory / "checkpoints")
    if not found:
        raise ConfigurationError(
            f"{directory} is no checkpoint and has none in it: expected directories named step-00000020"
        )
    return found


def look(path: Path, *, verify: bool) -> dict[str, Any]:
    """Everything about one checkpoint as plain data; with verify, every byte is read and checked."""
    record: dict[str, Any] = {"path": str(path)}
    try:
        manifest = store.read_manifest(path)
        files = {r.name: {"bytes": r.nbytes, "sha256": r.digest} for r in manifest.files}
        record |= {
            "step": manifest.step,
            "ranks": manifest.ranks,
            **manifest.origin,
            "model": list(manifest.model),
            "files": files,
        }
        for file in manifest.files:
            if not (path / file.name).is_file():
                raise Damaged(f"{path / file.name} is missing")
            if verify:
                arrays, _ = read_file(path / file.name, file)
                files[file.name]["arrays"] = {name: f"{a.dtype} x {a.size}" for name, a in arrays.items()}
        record["verified"] = verify
    except Damaged as error:
        record["damaged"] = str(error)
    return record


def _page(record: dict[str, Any]) -> str:
    if "damaged" in record:
        return f"{record['path']}\n  DAMAGED     {record['damaged']}"
    total = sum(file["bytes"] for file in record["files"].values())
    lines = [
        record["path"],
        f"  step        {record['step']}",
        f"  scheme      {record['scheme']} on {record['ranks']} ranks",
        f"  written by  mpisparse {record['mpisparse']}, torch {record['torch']}",
        f"  written on  {record['kernels']} kernels, {record['threads']} threads",
        f"  model       {len(record['model'])} tensors",
        *(f"    {line}" for line in record["model"]),
        f"  files       {human_bytes(total)}",
        *(
            f"    {name:<18} {human_bytes(file['bytes']):>10}  {file['sha256'][:16]}"
            for name, file in record["files"].items()
        ),
        f"  digests     {'all verified' if record['verified'] else 'not checked: use --verify'}",
    ]
    return "\n".join(lines)
