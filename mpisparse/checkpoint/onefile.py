"""One HDF5 file for all ranks, written by all in parallel through HDF5's MPI driver.

Changing a file's structure is collective in parallel HDF5. So the ranks first gather what the file will contain, and rank 0
creates it alone: one group per part, and data sets with their space allocated. Then all ranks open it together and each
writes its own parts independently. Data sets are contiguous and have no HDF5 checksums, because filtered chunks need
collective writes; the digest of each part protects the data instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mpisparse.checkpoint.h5file import Arrays, Digest, FileRecord, Steady, set_shape
from mpisparse.errors import ConfigurationError

FILE_NAME = "all.h5"
SLICE_NBYTES = 1 << 22
Shapes = dict[str, tuple[str, list[int]]]  # type and shape of each data set of a part


def lacking() -> ConfigurationError | None:
    """Return the error if this rank's h5py cannot write such a file; local."""
    if h5py.get_config().mpi:
        return None
    return ConfigurationError(
        f'driver="mpio" needs an h5py with MPI, but h5py {h5py.__version__} here has none; build it on a parallel HDF5 with '
        "the MPI that mpi4py uses (HDF5_MPI=ON CC=mpicc HDF5_DIR=... pip install --no-binary=h5py h5py), or leave driver out"
    )


def write_parts(exchange: Any, place: Path, files: dict[str, tuple[Arrays, dict[str, str]]]) -> list[FileRecord]:
    """Write this rank's files as parts of one new file for all ranks, and flush it to disk; collective.

    If a rank fails, it raises and the others return an empty list.
    """
    path = place / FILE_NAME
    parts = {Path(name).stem: content for name, content in files.items()}
    shapes = exchange.gather_texts(json.dumps({part: _shapes(*content) for part, content in parts.items()}))
    with contextlib.suppress(_ElsewhereError):
        _attempt(exchange, lambda: lay_out(path, _merged(shapes)) if exchange.rank == 0 else None)
        _attempt(exchange, path.stat)  # a rank that cannot see the file must not let the others wait in HDF5
        with open_together(path, exchange.comm) as file:
            digests = {part: _fill(file[part], arrays, texts) for part, (arrays, texts) in parts.items()}
        with open(path, "r+b") as raw:
            os.fsync(raw.fileno())
        return [FileRecord(f"{FILE_NAME}/{part}", path.stat().st_size, digest) for part, digest in digests.items()]
    return []


class _ElsewhereError(Exception):
    """Another rank failed and raises the cause."""


def _attempt(exchange: Any, action: Callable[[], Any]) -> None:
    """Run an action; raises on all ranks if it fails on any. Collective."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:
        error = caught
    failed = exchange.gather_texts("failed" if error is not None else "")
    if error is not None:
        raise error
    if any(failed):
        raise _ElsewhereError


def open_together(path: Path, comm: Any) -> h5py.File:
    """Open an existing file for writing by all ranks; collective, as is closing it."""
    return h5py.File(path, "r+", driver="mpio", comm=comm)


def _shapes(arrays: Arrays, texts: dict[str, str]) -> Shapes:
    shapes = {f"texts/{name}": ("|u1", [len(text.encode())]) for name, text in texts.items()}
    return shapes | {f"arrays/{name}": (array.dtype.str, list(array.shape)) for name, array in arrays.items()}


def _merged(texts: list[str]) -> dict[str, Shapes]:
    return {part: shapes for text in texts for part, shapes in json.loads(text).items()}


def lay_out(path: Path, parts: dict[str, Shapes]) -> None:
    """Create a file with everything but its data, and flush it to disk; local."""
    with open(path, "w+b", buffering=0) as raw:
        steady = Steady(raw)
        with h5py.File(steady, "w", libver="latest") as file:
            for part, shapes in parts.items():
                group = file.create_group(part)
                for name, (dtype, shape) in shapes.items():
                    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                    size = (math.prod(shape),)
                    set_shape(group.create_dataset(name, shape=size, dtype=np.dtype(dtype), dcpl=creation), shape)
        if steady.error is not None:
            raise steady.error
        reserve(raw)
        os.fsync(raw.fileno())


def reserve(raw: io.FileIO) -> None:
    """Allocate a file's disk space, if the file system can, so that a full disk is reported before HDF5 writes."""
    # os.posix_fallocate would write every block where the file system cannot allocate.
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    if fallocate(raw.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(raw.seek(0, os.SEEK_END))):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))


def _fill(part: h5py.Group, arrays: Arrays, texts: dict[str, str]) -> str:
    """Write the data of a part and return their digest; local."""
    digest = Digest(texts)
    for name, text in texts.items():
        _write(part[f"texts/{name}"], np.frombuffer(text.encode(), np.uint8))
    for name, array in sorted(arrays.items()):
        digest.begin(name, array)
        _write(part[f"arrays/{name}"], array.reshape(-1), digest)
    return digest.hexdigest()


def _write(dataset: h5py.Dataset, array: NDArray[Any], digest: Digest | None = None) -> None:
    """Write an array in slices that stay in cache from digest to write."""
    length = max(1, SLICE_NBYTES // array.itemsize)
    for start in range(0, array.size, length):
        part = array[start : start + length]
        if digest is not None:
            digest.update(part.view(np.uint8))
        dataset[start : start + length] = part
