"""The newest checkpoint that all ranks can read, on as many ranks as wrote it or on others."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpisparse.checkpoint import store
from mpisparse.checkpoint.contents import MALFORMED, read_own, read_shared, sensible
from mpisparse.checkpoint.h5file import Damaged
from mpisparse.checkpoint.origin import warn_of_origin
from mpisparse.checkpoint.standin import check_scheme_state, ranks_a_node, resize_scheme_states
from mpisparse.checkpoint.state import Subjects
from mpisparse.core.state import sources
from mpisparse.errors import ConfigurationError
from mpisparse.version import __version__


def restore(
    directory: Path, subjects: Subjects, extra: dict[str, Any] | None, exchange: Any,
    check_extra: Callable[[dict[str, Any]], None],
) -> int | None:  # fmt: skip
    """Restore the newest checkpoint that is valid on all ranks; collective."""
    listed = ""
    if exchange.rank == 0:
        store.recover(directory)
        listed = json.dumps([str(p) for p in store.found(directory)])
    for path in json.loads(exchange.gather_texts(listed)[0]):
        damage, contents, refusal = "", None, None
        try:
            contents = read(Path(path), exchange.rank, exchange.size, subjects.sync)
            sensible(f"the caller's extra in {path}", check_extra, contents[2]["extra"])
            refusal = _difference(contents[0], subjects, path) or _misfit(subjects, *contents, path)
        except Damaged as error:
            damage = str(error)
        damages = [text for text in exchange.gather_texts(damage) if text]
        if damages or contents is None:
            if exchange.rank == 0:
                warnings.warn(f"checkpoint {path} is not used: {damages[0]}", stacklevel=3)
            continue
        exchange.raise_together(refusal)
        manifest, shared, own = contents
        warn_of_origin(manifest, subjects.sync, exchange.rank)
        subjects.restore(shared, own)
        if extra is not None:
            extra.update(own["extra"])
        return manifest.step
    return None


def read(path: Path, rank: int, size: int, sync: Any) -> tuple[store.Manifest, dict[str, Any], dict[str, Any]]:
    """Read and verify what one rank needs of a checkpoint; local."""
    here = 1 if sync is None else sync.ranks_a_node
    manifest = store.read_manifest(path)
    shared = read_shared(path, manifest)
    if manifest.ranks == size:
        own = read_own(path, manifest, shared, rank)
        if "sync" not in own or sensible(str(path), ranks_a_node, own["sync"]) == here:
            return manifest, shared, own
    taken = sources(manifest.ranks, size, rank)
    owns = {old: _read_own(path, manifest, shared, old) for old in taken}
    first = owns[taken[0]]
    if "sync" not in first:
        return manifest, shared, first
    at_hand = {old: own["sync"] for old, own in owns.items()}
    syncs = SavedStates(at_hand, manifest.ranks, functools.partial(_read_own, path, manifest, shared))
    merged = sensible(str(path), resize_scheme_states, syncs, shared, manifest.ranks, size, rank, here)
    leader = sync.first_of_node if here > 1 else rank
    if leader != rank and "objects" in first:  # the optimizers of a node must be the same
        other = _read_own(path, manifest, shared, sources(manifest.ranks, size, leader)[0])
        first = {**first, "objects": other.get("objects", {})}
    return manifest, shared, {**first, "sync": merged}


def _read_own(path: Path, manifest: store.Manifest, shared: dict[str, Any], old: int) -> dict[str, Any]:
    """Read and check the own state of an old rank: merging could hide that it is malformed."""
    own = read_own(path, manifest, shared, old)
    if "sync" in own:
        what = f"the exchange's state in {path}, rank {old},"
        sensible(what, check_scheme_state, own["sync"], shared)
    return own


class SavedStates(Mapping[int, dict[str, Any]]):
    """The exchange's states of old ranks; those not in memory are read on demand, and not kept."""

    def __init__(self, at_hand: dict[int, dict[str, Any]], ranks: int, read: Callable[[int], dict[str, Any]]) -> None:
        self.at_hand = at_hand
        self.ranks = ranks
        self.read = read

    def __getitem__(self, rank: int) -> dict[str, Any]:
        if rank in self.at_hand:
            return self.at_hand[rank]
        state: dict[str, Any] = self.read(rank)["sync"]
        return state

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.ranks))

    def __len__(self) -> int:
        return self.ranks


def _difference(manifest: store.Manifest, subjects: Subjects, path: str) -> Exception | None:
    """Return the first difference between the saved model and this one."""
    here = subjects.describe()
    for saved, line in zip((*manifest.model, "nothing more"), (*here, "nothing more"), strict=False):
        if saved != line:
            return ConfigurationError(f"{path} is of another model: it has {saved!r} where this one has {line!r}")
    return None


def _misfit(
    subjects: Subjects, manifest: store.Manifest, shared: dict[str, Any], own: dict[str, Any], path: str
) -> Exception | None:
    """Return why the states do not fit these objects; raises Damaged if they are malformed."""
    same_version = manifest.origin["mpisparse"] == __version__
    try:
        subjects.check(shared, own, same_version=same_version)
    except ConfigurationError as error:
        if same_version and "sync" in own:  # of other objects, or of none
            sensible(f"the exchange's state in {path}", check_scheme_state, own["sync"], shared)
        return ConfigurationError(f"{path} cannot be restored here: {error}")
    except MALFORMED as error:
        raise Damaged(f"{path} is malformed: {error}") from error
    sensible(path, subjects.check_malformed, shared, own)
    return None
