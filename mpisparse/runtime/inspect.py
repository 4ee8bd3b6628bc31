"""mpisparse inspect: the contents of a checkpoint, and whether they are intact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpisparse.checkpoint import store
from mpisparse.checkpoint.contents import ORIGIN, read_own, read_shared, sensible
from mpisparse.checkpoint.h5file import Arrays, Damaged, FileRecord, inside, read_file
from mpisparse.checkpoint.standin import check_scheme_state
from mpisparse.runtime.progress import human_bytes
from mpisparse.runtime.run_state import check_run_state

GRADIENTS = {"gradient", "sizes"}  # arrays that train --record-gradients writes per rank


def run(directory: Path, *, verify: bool, as_json: bool) -> int:
    """Print the contents of checkpoints; return 1 if one is damaged."""
    damaged = False
    for path in store.named(directory):
        record = look(path, verify=verify)
        damaged |= "damaged" in record
        print(json.dumps(record) if as_json else _page(record))
    return int(damaged)


def look(path: Path, *, verify: bool) -> dict[str, Any]:
    """Describe one checkpoint as plain data; `verify` reads and checks every byte."""
    record: dict[str, Any] = {"path": str(path)}
    try:
        manifest = store.read_manifest(path)
        files: dict[str, Any] = {}
        record |= {
            "step": manifest.step,
            "ranks": manifest.ranks,
            **{key: manifest.origin.get(key) for key in ORIGIN},
            "model": list(manifest.model),
            "files": files,
        }
        entries = {file.name: _entry(files, file) for file in manifest.files}
        for file in manifest.files:
            whole, _ = inside(path / file.name)
            if not whole.is_file():
                raise Damaged(f"{whole} is missing")
        if verify:
            _check(path, manifest, entries)
        record["verified"] = verify
    except Damaged as error:
        record["damaged"] = str(error)
    return record


def _check(path: Path, manifest: store.Manifest, entries: dict[str, Any]) -> None:
    """Raise Damaged unless load() would accept the files; add their arrays to `entries`."""

    def read(file: Path, record: FileRecord) -> tuple[Arrays, dict[str, str]]:
        arrays, texts = read_file(file, record)
        entries[record.name]["arrays"] = {name: f"{a.dtype} x {a.size}" for name, a in arrays.items()}
        return arrays, texts

    if len(manifest.files) == manifest.ranks:  # recorded gradients
        for record in manifest.files:
            if set(read(path / record.name, record)[0]) != GRADIENTS:
                raise Damaged(f"{path / record.name} contains neither the state of a rank nor its gradient")
        return
    shared = read_shared(path, manifest, read)
    for rank in range(manifest.ranks):
        own = read_own(path, manifest, shared, rank, read)
        if "sync" in own:
            sensible(f"the state of the exchange of rank {rank} in {path}", check_scheme_state, own["sync"], shared)
        sensible(f"the state of the run of rank {rank} in {path}", check_run_state, own["extra"])


def _entry(files: dict[str, Any], record: FileRecord) -> dict[str, Any]:
    """Add the manifest's entry of a file, or of a part of one, to `files`; return it."""
    whole, part = inside(Path(record.name))
    entry = files.setdefault(whole.name, {"bytes": record.nbytes})
    if part != "/":
        entry = entry.setdefault("parts", {}).setdefault(part, {})
    entry["sha256"] = record.digest
    return entry  # type: ignore[no-any-return]


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
        *_listed(record["files"]),
        f"  digests     {'all verified' if record['verified'] else 'not checked: use --verify'}",
    ]
    return "\n".join(lines)


def _listed(files: dict[str, Any]) -> list[str]:
    lines = []
    for name, file in files.items():
        lines.append(f"    {name:<18} {human_bytes(file['bytes']):>10}  {file.get('sha256', '')[:16]}".rstrip())
        lines += [f"      {part:<27}  {content['sha256'][:16]}" for part, content in file.get("parts", {}).items()]
    return lines
