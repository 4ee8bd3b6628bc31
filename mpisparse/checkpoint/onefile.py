"""One HDF5 file for all ranks, written by all at once through HDF5's MPI driver.

Whatever changes a file's structure is collective in parallel HDF5. So the ranks first agree on what will be in the file,
rank 0 lays it out alone (a group for each part, data sets with their space), and then all open it together and
each fills in its own parts, waiting for nobody. Data sets are contiguous, without HDF5's checksums: chunks that are
filtered can be written only by all ranks together. The digest of each part covers what they would.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mpisparse.checkpoint.h5file import Arrays, Digest, FileRecord, Steady
from mpisparse.errors import ConfigurationError

NAME = "all.h5"
SLICE_NBYTES = 1 << 22
Plan = dict[str, tuple[str, int]]  # type and length of each of a part's data sets


def lacking() -> ConfigurationError | None:
    """Why this rank cannot write such a file, if so; local."""
    if h5py.get_config().mpi:
        return None
    return ConfigurationError(
        f'driver="mpio" needs an h5py with MPI, and h5py {h5py.__version__} here has none; build it on a parallel HDF5 with '
        "the MPI that mpi4py uses (HDF5_MPI=ON CC=mpicc HDF5_DIR=... pip install --no-binary=h5py h5py), or leave driver out"
    )


def write_parts(exchange: Any, place: Path, files: dict[str, tuple[Arrays, dict[str, str]]]) -> list[FileRecord]:
    """Write what would be files of this rank as parts of one new file for all, and flush it to disk; collective.

    Where something fails on a rank, that rank raises and the others return nothing.
    """
    path = place / NAME
    parts = {Path(name).stem: content for name, content in files.items()}
    plans = exchange.gather_texts(json.dumps({part: _plan(*content) for part, content in parts.items()}))
    with contextlib.suppress(_ElsewhereError):
        _attempt(exchange, lambda: lay_out(path, _merged(plans)) if exchange.rank == 0 else None)
        _attempt(exchange, path.stat)  # a rank that does not see the file must not leave the others waiting in HDF5
        with open_together(path, exchange.comm) as file:
            digests = {part: _fill(file[part], arrays, texts) for part, (arrays, texts) in parts.items()}
        with open(path, "r+b") as raw:
            os.fsync(raw.fileno())
        return [FileRecord(f"{NAME}/{part}", path.stat().st_size, digest) for part, digest in digests.items()]
    return []


class _ElsewhereError(Exception):
    """Another rank failed; it says why."""


def _attempt(exchange: Any, action: Callable[[], Any]) -> None:
    """Do something, and go on only if it succeeded on all ranks; collective."""
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
    """Open a file that is laid out, to be written by all ranks; collective, and so is closing it."""
    return h5py.File(path, "r+", driver="mpio", comm=comm)


def _plan(arrays: Arrays, texts: dict[str, str]) -> Plan:
    sizes = {f"texts/{name}": ("|u1", len(text.encode())) for name, text in texts.items()}
    return sizes | {f"arrays/{name}": (array.dtype.str, array.size) for name, array in arrays.items()}


def _merged(plans: list[str]) -> dict[str, Plan]:
    return {part: plan for text in plans for part, plan in json.loads(text).items()}


def lay_out(path: Path, parts: dict[str, Plan]) -> None:
    """Make a file with everything but its data, and flush it to disk; local."""
    with open(path, "w+b", buffering=0) as raw:
        steady = Steady(raw)
        with h5py.File(steady, "w", libver="latest") as file:
            for part, plan in parts.items():
                group = file.create_group(part)
                for name, (dtype, size) in plan.items():
                    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                    group.create_dataset(name, shape=(size,), dtype=np.dtype(dtype), dcpl=creation)
        if steady.error is not None:
            raise steady.error
        reserve(raw)
        os.fsync(raw.fileno())


def reserve(raw: io.FileIO) -> None:
    """Take a file's space on the disk, if the file system can: a full one is then noticed before HDF5 writes, and named."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate  # Python's own writes every block where this is not supported
    if fallocate(raw.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(raw.seek(0, os.SEEK_END))):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))


def _fill(part: h5py.Group, arrays: Arrays, texts: dict[str, str]) -> str:
    """Write a part's data into their places; local. Returns the digest, taken from what is being written."""
    digest = Digest(texts)
    for name, text in texts.items():
        _write(part[f"texts/{name}"], np.frombuffer(text.encode(), np.uint8))
    for name, array in sorted(arrays.items()):
        digest.begin(name, array)
        _write(part[f"arrays/{name}"], array, digest)
    return digest.hexdigest()


def _write(dataset: h5py.Dataset, array: NDArray[Any], digest: Digest | None = None) -> None:
    """Write an array in slices that stay in cache from digest to write."""
    length = max(1, SLICE_NBYTES // array.itemsize)
    for start in range(0, array.size, length):
        part = array[start : start + length]
        if digest is not None:
            digest.update(part.view(np.uint8))
        dataset[start : start + length] = part
