"""Consistency checks of a checkpoint's contents, without the objects to restore; for load() and inspect --verify.

A digest shows that a file is what somebody wrote, not that it is a checkpoint. All functions are local; those that read
raise Damaged.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpisparse.checkpoint.h5file import Arrays, Damaged, FileRecord, read_file
from mpisparse.checkpoint.objects import (
    check_optimizer,
    check_random,
    check_scaler,
    check_scheduler,
    check_strides,
    need,
)  # fmt: skip
from mpisparse.checkpoint.state import OBJECT_KEYS, OBJECTS, described, with_objects
from mpisparse.checkpoint.store import Manifest, rank_file, shared_file
from mpisparse.checkpoint.tree import unflatten
from mpisparse.errors import check_choice
from mpisparse.schemes import SCHEMES
from mpisparse.schemes.options import Options
from mpisparse.schemes.state import STATE_FORMAT
from mpisparse.version import __version__

ORIGIN = {"mpisparse": str, "torch": str, "threads": int, "kernels": str, "cpu": str, "scheme": (str, type(None))}
Reader = Callable[[Path, FileRecord], tuple[Arrays, dict[str, str]]]
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)  # includes RecursionError


def sensible(what: str, check: Callable[..., Any], *args: Any) -> Any:
    """Run a check and turn its errors into Damaged."""
    try:
        return check(*args)
    except MALFORMED as error:
        problem = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise Damaged(f"{what} is malformed: {problem}") from error


def read_shared(path: Path, manifest: Manifest, read: Reader = read_file) -> dict[str, Any]:
    """Read, verify and check the replicated state; local."""
    sensible(f"the manifest of {path}", check_origin, manifest)
    arrays: Arrays = {}
    texts: dict[str, str] = {}
    for writer in range(manifest.ranks):
        record = manifest.record(shared_file(writer))
        part, words = read(path / record.name, record)
        if arrays.keys() & part.keys() or words.keys() != ({"state"} if writer == 0 else set()):
            raise Damaged(f"{path / record.name} holds data that belong in another file of the checkpoint")
        arrays |= part
        texts |= words
    what = f"the replicated state of {path}"
    shared: dict[str, Any] = sensible(what, unflatten, texts["state"], arrays)
    sensible(what, check_shared, manifest, shared)
    return shared


def read_own(path: Path, manifest: Manifest, shared: dict[str, Any], rank: int, read: Reader = read_file) -> dict[str, Any]:
    """Read, verify and check the own state of a rank; local."""
    own, where = _unflattened(path, manifest, rank, read)
    sensible(where, check_own, manifest, shared, own, rank)
    return own


def read_buffers(path: Path, manifest: Manifest, shared: dict[str, Any], rank: int) -> dict[str, Any]:
    """Read the own state of a rank and check its buffers alone, whatever else it holds; local.

    So a model can be read without the scheme that trained it.
    """
    own, where = _unflattened(path, manifest, rank, read_file)
    sensible(where, check_buffers, manifest, shared, own)
    return own


def _unflattened(path: Path, manifest: Manifest, rank: int, read: Reader) -> tuple[dict[str, Any], str]:
    record = manifest.record(rank_file(rank))
    arrays, texts = read(path / record.name, record)
    return sensible(str(path / record.name), lambda: unflatten(texts["state"], arrays)), str(path / record.name)


def check_origin(manifest: Manifest) -> None:
    """Raise unless the manifest names the versions and the machine that wrote the checkpoint."""
    for key, kind in ORIGIN.items():
        value = manifest.origin.get(key)
        need(isinstance(value, kind) and not isinstance(value, bool), f"its origin has {key} {value!r}")  # type: ignore[arg-type]


def check_shared(manifest: Manifest, shared: Any) -> None:
    """Raise unless the replicated state holds a model's tensors, and states of the classes it names."""
    need(isinstance(shared, dict) and isinstance(shared.get("model"), dict), "it holds no model")
    need(all(isinstance(name, str) for name in shared["model"]), "it holds no model")
    need(set(described(shared["model"])) <= set(manifest.model), "its model is not that of the manifest")
    check_objects(shared)


def check_objects(shared: dict[str, Any]) -> None:
    """Raise unless the states of optimizer, scheduler and scaler are of the named classes, for the model's tensors."""
    for name in OBJECTS:
        need(isinstance(shared.get(f"{name}_kind", ""), str), f"it does not name the {name}'s kind")
        need(name not in shared or f"{name}_kind" in shared, f"it does not name the {name}'s kind")
    shapes = {name: t.shape for name, t in shared["model"].items() if isinstance(t, torch.Tensor)}
    names = shared.get("optimizer_parameters")
    if names is not None:
        need(isinstance(names, list), "it does not name the optimizer's parameters")

    def has_shape(number: int, shape: torch.Size) -> bool:
        named = names[number] if names is not None else None
        return named not in shapes or shape == shapes[named]  # a parameter outside the model may have any shape

    if "optimizer" in shared:
        check_optimizer(shared["optimizer"], _kind(shared, "optimizer", torch.optim), has_shape)
        count = sum(len(group["params"]) for group in shared["optimizer"]["param_groups"])
        need(names is None or len(names) == count, "it does not name all of the optimizer's parameters")
    if "scheduler" in shared:
        check_scheduler(shared["scheduler"], _kind(shared, "scheduler", torch.optim.lr_scheduler))
    if "scaler" in shared and shared["scaler_kind"] == "GradScaler" and _of(shared, "scaler", "torch."):
        check_scaler(shared["scaler"])


def _kind(shared: dict[str, Any], name: str, module: Any) -> type | None:
    """Return the class of a state, if it is one of torch's own."""
    if not _of(shared, name, module.__name__):
        return None
    kind = getattr(module, shared[f"{name}_kind"], None)
    return kind if isinstance(kind, type) else None


def _of(shared: dict[str, Any], name: str, module: str) -> bool:
    return str(shared.get(f"{name}_module", "")).startswith(module)


def saved_options(sync: dict[str, Any]) -> Options:
    """Return the options that a GradientSync was saved with; callables are replaced by a placeholder."""
    scheme = sync["scheme"]
    check_choice("scheme", scheme, SCHEMES)
    saved = SCHEMES[scheme].upgraded(json.loads(sync["options"]))
    types = {field.name: str(field.type) for field in dataclasses.fields(SCHEMES[scheme])}
    callables = {name for name, kind in types.items() if "Callable" in kind and saved.get(name) is True}
    known = types.keys() & saved.keys()
    options: dict[str, Any] = {name: float if name in callables else saved[name] for name in known}
    return SCHEMES[scheme](**options)


def check_buffers(manifest: Manifest, shared: dict[str, Any], own: Any) -> None:
    """Raise unless a rank's buffers, with the replicated tensors, are the manifest's model."""
    need(isinstance(own, dict) and isinstance(own.get("buffers"), dict), "it holds no buffers")
    lines = [*described(shared["model"]), *described(own["buffers"])]
    need(sorted(lines) == sorted(manifest.model), "its buffers do not complete the manifest's model")


def check_own(manifest: Manifest, shared: dict[str, Any], own: Any, rank: int) -> None:
    """Raise unless a rank's own state is complete and, with the replicated one, has all tensors of the manifest's model."""
    check_buffers(manifest, shared, own)
    need(isinstance(own.get("extra"), dict), "it holds no extra of the caller")
    check_random(own.get("random"))
    if "objects" in own:
        named = isinstance(own["objects"], dict) and own["objects"].keys() <= OBJECT_KEYS - shared.keys()
        need(named, "it holds more than an optimizer, a scheduler and a scaler of this rank, or what all ranks share")
        check_objects(with_objects(shared, own))
    if "sync" in own:
        _check_sync(own["sync"], manifest, shared, rank)


def _check_sync(sync: Any, manifest: Manifest, shared: dict[str, Any], rank: int) -> None:
    """Raise unless this is the state of a GradientSync on that rank; the scheme checks its own part."""
    named = isinstance(sync, dict) and all(isinstance(key, str) for key in sync)
    need(named, "the exchange's state is not a dict with string keys")
    need(isinstance(json.loads(sync["options"]), dict), "the exchange's options are not a JSON object")
    need(type(sync["format"]) is int, f"the exchange's state has format {sync['format']!r}")
    if manifest.origin["mpisparse"] == __version__:  # another version may have another format and other options
        need(sync["format"] == STATE_FORMAT, f"the exchange's state has format {sync['format']!r}")
        saved_options(sync)
    writer = sync["rank"], sync["size"]
    fits = writer == (rank, manifest.ranks) and bool not in map(type, writer)
    need(fits, f"the exchange's state is of (rank, size) {writer}")
    need(sync["scheme"] == manifest.origin["scheme"], "the scheme is not that of the manifest")
    if "step.edges" in sync:  # borders between ranks, in blocks
        need(len(sync["step.borders"]) == manifest.ranks + 1, "the borders are of another number of ranks")
    residual, names = sync["residual"], shared.get("trainable")
    sizes = {name: math.prod(t.shape) for name, t in shared["model"].items() if isinstance(t, torch.Tensor)}
    flat = isinstance(residual, torch.Tensor) and residual.dim() == 1 and residual.dtype is torch.float32
    need(flat, "the residual is not a flat float32 tensor")
    need(names is None or isinstance(names, dict), "it does not name the trainable parameters")
    if names is not None and names.keys() <= sizes.keys():  # a module may omit some from its state_dict
        need(len(residual) == sum(sizes[name] for name in names), "the residual does not fit the trainable parameters")
        for name, strides in names.items():
            check_strides(shared["model"][name].shape, strides)
