"""Models out of checkpoints, for inference and for other programs: no MPI, no optimizer, no scheme. Local functions.

A model's weights are those that all ranks share: with schemes whose ranks have weights of their own (drift,
speculative), the global ones. Its buffers are those of rank 0, or their mean if the scheme's option `buffers` says so.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpisparse.checkpoint import store
from mpisparse.checkpoint.contents import read_buffers, read_shared
from mpisparse.checkpoint.h5file import Damaged
from mpisparse.errors import CheckpointError, ConfigurationError, suggest
from mpisparse.version import __version__

SUFFIXES = (".safetensors", ".pt", ".pth")
NEEDS_EXTRA = "files of type .safetensors need the extra: pip install 'mpisparse[export]'; or write a .pt file"


@dataclass(frozen=True)
class SavedModel:
    """A model as a file holds it: its state_dict, and where and when it was written, if known."""

    path: Path
    tensors: dict[str, Any]
    step: int | None = None
    scheme: str | None = None


def export(source: str | Path, target: str | Path, *, overwrite: bool = False) -> SavedModel:
    """Write the model of a run or checkpoint to a file of type .safetensors, .pt or .pth: whole, or not at all.

    source: a run's directory, a directory of checkpoints, or one checkpoint. Of several, the newest valid one is taken.
    Returns what was written. A .pt file is a plain state_dict: read it with torch.load(file, weights_only=True).
    """
    target = Path(target)
    _check_target(target, overwrite=overwrite)
    saved = _newest(source)
    _write(saved, target)
    return saved


def load_model(source: str | Path, model: torch.nn.Module) -> int | None:
    """Load a model's weights and buffers; returns their step, or None if the file does not tell.

    source: a run's directory, a directory of checkpoints, one checkpoint, or a file that export() wrote. The model may be
    on any device, and of another floating-point type. Raises, and changes nothing, if it has other tensors.
    """
    source = Path(source)
    saved = _read_file(source) if source.suffix in SUFFIXES and not source.is_dir() else _newest(source)
    here = model.state_dict()
    _check_same(saved, here)
    _check_tied(saved, here)
    model.load_state_dict(saved.tensors)
    return saved.step


def _newest(source: str | Path) -> SavedModel:
    """Read the newest valid checkpoint that a path names; warn of those that are skipped."""
    damages = []
    for path in store.named(Path(source)):
        try:
            saved = read_model(path)
        except Damaged as error:
            damages.append(str(error))
            continue
        for damage in damages:
            warnings.warn(f"a newer checkpoint than {path} is not used: {damage}", stacklevel=4)
        return saved
    raise CheckpointError(f"{source} has no checkpoint that can be read: {damages[0]}")


def read_model(path: Path) -> SavedModel:
    """Read and verify the model in one checkpoint; raises Damaged."""
    manifest = store.read_manifest(path)
    shared = read_shared(path, manifest)
    own = read_buffers(path, manifest, shared, 0)
    buffers = own["buffers"]
    if manifest.ranks > 1 and _option(own, "buffers") == "average":
        others = (read_buffers(path, manifest, shared, rank)["buffers"] for rank in range(1, manifest.ranks))
        buffers = _mean([buffers, *others])
    tensors = {**shared["model"], **buffers}
    order = {line.rpartition(" [")[0]: number for number, line in enumerate(manifest.model)}
    names = sorted(tensors, key=lambda name: order.get(name, len(order)))
    return SavedModel(path, {name: tensors[name] for name in names}, manifest.step, manifest.origin["scheme"])


def _option(own: dict[str, Any], name: str) -> Any:
    """Return an option of the scheme that wrote a rank's own state, if it says."""
    try:
        return json.loads(own["sync"]["options"]).get(name)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _mean(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Average floating-point buffers over ranks; others are those of rank 0."""
    merged = dict(ranks[0])
    for name, first in ranks[0].items():
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            merged[name] = (sum(buffers[name].double() for buffers in ranks) / len(ranks)).to(first.dtype)
    return merged


# Comparison with a model


def _lines(tensors: dict[str, Any]) -> list[str]:
    shapes = {name: list(t.shape) if isinstance(t, torch.Tensor) else "(no tensor)" for name, t in tensors.items()}
    return sorted(f"{name} {shape}" for name, shape in shapes.items())


def _check_same(saved: SavedModel, here: dict[str, Any]) -> None:
    """Raise ConfigurationError unless names and shapes are those of a model's state_dict."""
    there, ours = _lines(saved.tensors), _lines(here)
    if there == ours:
        return
    lacking, extra = (next(iter(sorted(set(a) - set(b))), "nothing") for a, b in ((ours, there), (there, ours)))
    raise ConfigurationError(
        f"{saved.path} is of another model: it has {extra!r} where this one has {lacking!r}; build the model as for training"
    )


def _check_tied(saved: SavedModel, here: dict[str, Any]) -> None:
    """Raise ConfigurationError if tensors that share memory in the model have different values in the file."""
    for names in _tied(here):
        first, *others = names
        for other in others:
            if not torch.equal(saved.tensors[first], saved.tensors[other]):
                raise ConfigurationError(
                    f"{saved.path} is of another model: {first!r} and {other!r} are tied in this one and differ there"
                )


def _tied(tensors: dict[str, Any]) -> Iterable[list[str]]:
    """Yield the names of tensors that are the same piece of memory."""
    groups: dict[Any, list[str]] = {}
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor) and t.numel():
            groups.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype), []).append(name)
    return (names for names in groups.values() if len(names) > 1)


# Files


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Raise ConfigurationError unless a model may be written to this path."""
    if target.suffix not in SUFFIXES:
        raise ConfigurationError(f"unknown type {target.suffix!r} of {target}; {suggest(target.suffix, SUFFIXES)}")
    if target.is_dir() or (target.exists() and not overwrite):
        hint = "" if target.is_dir() else ", or overwrite it (--overwrite)"
        raise ConfigurationError(f"{target} already exists; choose another name{hint}")
    if not target.parent.is_dir():
        raise ConfigurationError(f"there is no directory {target.parent} to write {target.name} into")
    if target.suffix == ".safetensors":
        _safetensors()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ConfigurationError(NEEDS_EXTRA) from None
    return safetensors


def _write(saved: SavedModel, target: Path) -> None:
    """Write a draft beside the target, flush it, and give it the target's name."""
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        if target.suffix == ".safetensors":
            _write_safetensors(saved, draft)
        else:
            torch.save(saved.tensors, draft)
        with open(draft, "r+b") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except ConfigurationError:
        raise
    except Exception as error:  # a full disk is an OSError, a RuntimeError of torch's or a SafetensorError
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _write_safetensors(saved: SavedModel, draft: Path) -> None:
    odd = [name for name, value in saved.tensors.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ConfigurationError(
            f"{odd[0]!r} of the model is a {type(saved.tensors[odd[0]]).__name__}, and .safetensors holds tensors only; "
            "write a .pt file"
        )
    about = {"format": "pt", "mpisparse": __version__, "step": str(saved.step), "scheme": str(saved.scheme)}
    _safetensors().torch.save_file(saved.tensors, draft, metadata=about)


def _read_file(path: Path) -> SavedModel:
    """Read a file that export() wrote, or another plain state_dict; raises CheckpointError."""
    if not path.exists():
        raise ConfigurationError(f"there is no file {path}")
    step: int | None = None
    try:
        if path.suffix == ".safetensors":
            with _safetensors().safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
                written = (file.metadata() or {}).get("step", "")
            step = int(written) if written.isdecimal() else None
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigurationError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds for a file that is damaged
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(f"{path} holds no state_dict: expected a dict of tensors by name")
    return SavedModel(path, tensors, step)
