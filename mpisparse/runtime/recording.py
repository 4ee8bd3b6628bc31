"""Gradients of a real run, recorded on disk for benchmarks: one directory per step, written atomically.

`RUN/gradients/step-00000001` holds one file per rank with its flat gradient after backward and clipping, and a manifest
with their digests: the format of checkpoints.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Floats
from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros
from mpisparse.checkpoint import store
from mpisparse.checkpoint.h5file import Damaged, FileRecord, read_file, write_file
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import CheckpointError, ConfigurationError
from mpisparse.model.layout import Layout
from mpisparse.version import __version__

DIRECTORY = "gradients"


class Recorder:
    """Writes gradients until `count` steps are recorded, including those of an earlier part of the run."""

    def __init__(self, run: Path, model: torch.nn.Module, *, count: int, scheme: str) -> None:
        self.directory = run / DIRECTORY
        self.layout = Layout(model)
        self.count = count
        self.origin: dict[str, Any] = {
            "mpisparse": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "kernels": load_backend().name,
            "scheme": scheme,
        }
        self.exchange = Exchange()
        self.left = self._count_left()

    def _count_left(self) -> int:
        """Return how many steps are still to be recorded; collective."""
        found = len(store.found(self.directory)) if self.exchange.rank == 0 else 0
        return max(0, self.count - int(self.exchange.allreduce_(np.array([found]))[0]))

    def record(self, step: int) -> Path:
        """Write every rank's gradient of a step; collective. Raises CheckpointError on all ranks if one cannot."""
        rank, error, made = self.exchange.rank, "", ""
        try:
            if rank == 0:
                made = str(store.begin(self.directory, step))
        except OSError as caught:
            error = str(caught)
        self._raise_together(error)
        place = Path(self.exchange.gather_texts(made)[0])
        record: FileRecord | None = None
        try:
            record = write_file(place / store.rank_file(rank), self._arrays(), {})
        except OSError as caught:
            error = str(caught)
        texts = self.exchange.gather_texts("" if record is None else f"{record.nbytes} {record.digest}")
        if rank == 0:
            error = self._complete(step, place, texts) or error
        self._raise_together(error)
        self.left = self._count_left()
        return self.directory / store.name_of(step)

    def close(self) -> None:
        """Free the communicator; collective."""
        self.exchange.close()

    def _raise_together(self, error: str) -> None:
        self.exchange.raise_together(CheckpointError(error) if error else None, CheckpointError)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        flat = zeros(self.layout.size, torch.float32)
        for slot, p in zip(self.layout.slots, self.layout.params, strict=True):
            if p.grad is not None:
                slot.view(flat).copy_(p.grad.to_dense())
        sizes = [slot.end - slot.begin for slot in self.layout.slots]
        return {"gradient": flat.numpy(), "sizes": np.array(sizes, dtype=np.int64)}

    def _complete(self, step: int, place: Path, texts: list[str]) -> str:
        """On rank 0: give the step's directory its final name, or remove it; returns the error."""
        try:
            if all(texts):
                words = [text.split() for text in texts]
                files = tuple(FileRecord(store.rank_file(r), int(n), digest) for r, (n, digest) in enumerate(words))
                manifest = store.Manifest(step, len(texts), files, tuple(self.layout.describe()), self.origin)
                store.complete(self.directory, place, manifest, None)
                return ""
            store.discard(place)
        except OSError as error:
            store.discard(place)
            return str(error)
        return ""


class Recording:
    """Recorded gradients; the path is a run's directory, its `gradients`, one step in there, or one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _rank_files(path)
        self.steps = len(self.files)
        self.ranks = len(self.files[0])
        self.sizes = [int(size) for size in self._read(*self.files[0][0])["sizes"]]
        self._gradient = functools.cache(self._load)

    def gradient(self, rank: int, step: int) -> Floats:
        """Return a rank's gradient of the recording's step number `step`; it is verified when first read."""
        return self._gradient(rank, step)

    def _load(self, rank: int, step: int) -> Floats:
        arrays = self._read(*self.files[step][rank])
        gradient: Floats = arrays["gradient"]
        if arrays["sizes"].tolist() != self.sizes or len(gradient) != sum(self.sizes):
            raise ConfigurationError(f"{self.files[step][rank][0]} is of another model than the first file of {self.path}")
        return gradient

    def _read(self, path: Path, record: FileRecord | None) -> dict[str, NDArray[Any]]:
        try:
            arrays, _ = read_file(path, record)
        except Damaged as error:
            raise ConfigurationError(f"{error}; record the gradients again") from error
        kinds = {"gradient": np.dtype(np.float32), "sizes": np.dtype(np.int64)}
        if any(name not in arrays or arrays[name].dtype != kind or arrays[name].ndim != 1 for name, kind in kinds.items()):
            raise ConfigurationError(f"{path} was not written by mpisparse train --record-gradients: it holds no gradient")
        return arrays


def _rank_files(path: Path) -> list[list[tuple[Path, FileRecord | None]]]:
    """List the files of every step in rank order, with their records from the manifest."""
    if path.is_file():
        return [[(path, None)]]
    directory = path / DIRECTORY if (path / DIRECTORY).is_dir() else path
    steps = [directory] if (directory / store.MANIFEST).is_file() else store.found(directory)[::-1]
    if not steps:
        raise ConfigurationError(
            f"expected gradients of mpisparse train --record-gradients N, found none in {path}; pass its --out"
        )
    try:
        manifests = [store.read_manifest(step) for step in steps]
        files: list[list[tuple[Path, FileRecord | None]]] = [
            [(step / store.rank_file(rank), manifest.record(store.rank_file(rank))) for rank in range(manifest.ranks)]
            for step, manifest in zip(steps, manifests, strict=True)
        ]
    except Damaged as error:
        raise ConfigurationError(f"{error}; remove that step's directory, or record again") from error
    if len({len(row) for row in files}) > 1:
        raise ConfigurationError(f"{directory} holds steps of different rank counts; record them again")
    return files
