"""One HDF5 file of arrays and texts, protected by HDF5's fletcher32 on every chunk and by a digest of the contents.

Arrays are stored flat, with their shapes as attributes. Chunks are written directly, with checksums from our own kernel:
HDF5's filter is slower than the disk. The digest covers the name, type, length and bytes of every array, and every text,
in the order of their names.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mpisparse.backends.device import load_backend
from mpisparse.checkpoint.members import Damaged, child, file_size, members
from mpisparse.checkpoint.tree import Arrays

__all__ = ["Arrays", "Damaged", "Digest", "FileRecord", "Steady", "inside", "read_file", "set_shape", "write_file"]

CHUNK_NBYTES = 1 << 20  # a chunk stays in cache from digest to write
FLUSH_NBYTES = 1 << 24


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as its manifest lists it. A part of a file has a name like `all.h5/rank-0000`.

    `nbytes` is always the size of the whole file.
    """

    name: str
    nbytes: int
    digest: str


def write_file(path: Path, arrays: Arrays, texts: dict[str, str]) -> FileRecord:
    """Write arrays and texts to a new file and flush it to disk; local. The digest is computed from the same pass."""
    digest = Digest(texts)
    with open(path, "w+b", buffering=0) as raw:
        steady, flushed = Steady(raw), 0
        with h5py.File(steady, "w", libver="latest") as file:
            for name, text in sorted(texts.items()):
                file.create_dataset(f"texts/{name}", data=np.frombuffer(text.encode(), np.uint8), fletcher32=bool(text))
            for name, array in sorted(arrays.items()):
                digest.begin(name, array)
                for _ in _write_array(file, f"arrays/{name}", array.reshape(-1), digest):
                    if raw.tell() - flushed >= FLUSH_NBYTES:  # the disk starts writing meanwhile
                        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                        flushed = raw.tell()
                set_shape(file[f"arrays/{name}"], array.shape)
        if steady.error is not None:
            raise steady.error
        os.fsync(raw.fileno())
        return FileRecord(path.name, raw.seek(0, os.SEEK_END), digest.hexdigest())


class Steady(io.RawIOBase):
    """A file that hides write errors from HDF5, which crashes on them, and keeps the first one for the caller."""

    def __init__(self, raw: io.FileIO) -> None:
        self.raw = raw
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view) and self.error is None:
                done += self.raw.write(view[done:])
        except OSError as error:
            self.error = error
        if self.error is not None:
            self.raw.seek(len(view) - done, os.SEEK_CUR)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = bytes(len(view))
        self.raw.readinto(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.raw.seek(offset, whence)

    def tell(self) -> int:
        return self.raw.tell()

    def truncate(self, size: int | None = None) -> int:
        try:
            return self.raw.truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _write_array(file: h5py.File, name: str, array: NDArray[Any], digest: Digest) -> Iterator[None]:
    """Write an array in chunks; yields after each."""
    if array.size == 0:
        file.create_dataset(name, data=array)
        return
    chunks = -(-array.nbytes // CHUNK_NBYTES)
    length = -(-array.size // chunks)
    dataset = file.create_dataset(name, shape=array.shape, dtype=array.dtype, chunks=(length,), fletcher32=True)
    buffer = np.zeros(length * array.itemsize + 4, dtype=np.uint8)
    fletcher32 = load_backend().fletcher32
    for start in range(0, array.size, length):
        part = array[start : start + length].view(np.uint8)
        digest.update(part)
        buffer[: len(part)] = part
        buffer[len(part) : -4] = 0
        buffer[-4:].view(np.uint32)[0] = fletcher32(buffer[:-4])
        dataset.id.write_direct_chunk((start,), buffer)
        yield


def set_shape(dataset: h5py.Dataset, shape: Sequence[int]) -> None:
    """Note the shape of an array that is stored flat, for those who read the file with h5py alone."""
    dataset.attrs["shape"] = np.array(shape, dtype=np.int64)


class Digest:
    """sha256 of texts and arrays in the order given."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.sha = hashlib.sha256(json.dumps(sorted(texts.items())).encode())

    def begin(self, name: str, array: NDArray[Any]) -> None:
        self.sha.update(json.dumps([name, array.dtype.str, array.size]).encode())

    def update(self, part: Any) -> None:
        self.sha.update(part)

    def hexdigest(self) -> str:
        return self.sha.hexdigest()


def read_file(path: Path, record: FileRecord | None = None) -> tuple[Arrays, dict[str, str]]:
    """Read a file or a part of one and verify all checksums, with a record also size and digest; local. Raises Damaged."""
    whole, group = inside(path)
    try:
        size = file_size(whole) if record is not None else whole.stat().st_size
        if record is not None and size != record.nbytes:
            raise Damaged(f"{whole} has {size:,} bytes, {record.nbytes:,} were written")
        with h5py.File(whole, "r") as file:
            part = file if group == "/" else child(file, group)
            texts = {name: bytes(data[()]).decode() for name, data in members(part, "texts", size)}
            arrays = {name: data[()] for name, data in members(part, "arrays", size)}
    except Damaged as error:
        raise error if str(whole) in str(error) else Damaged(f"{path}: {error}") from None
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if record is not None:
        digest = Digest(texts)
        for name, array in sorted(arrays.items()):
            digest.begin(name, array)
            digest.update(array.view(np.uint8))
        if digest.hexdigest() != record.digest:
            raise Damaged(f"{path} is not what was written: its digest differs from the manifest's")
    return arrays, texts


def inside(path: Path) -> tuple[Path, str]:
    """Split a path into a file and a group in it: a path without a suffix is a group of its parent file."""
    return (path, "/") if path.suffix else (path.parent, path.name)
