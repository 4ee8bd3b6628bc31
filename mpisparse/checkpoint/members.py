"""Safety checks of an HDF5 file before its data are read, since a file may come from anywhere.

Refused are links other than hard links, data in external files, compression filters, types other than plain numbers, and
data sets that claim to be larger than what the file stores.
"""

from __future__ import annotations

import stat
from pathlib import Path

import h5py

MOST_GROUPS = 4  # nested below arrays/ or texts/; our files have one
FLETCHER32 = (h5py.h5z.FILTER_FLETCHER32,)


class Damaged(Exception):  # noqa: N818 - describes a file
    """A file is not what was written: truncated, altered, or of another kind."""


def file_size(path: Path) -> int:
    """Return the size of a regular file; raises Damaged if it is not one, or is a link to another directory."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path} is not a regular file")
    if path.resolve(strict=True).parent != path.parent.resolve(strict=True):
        raise Damaged(f"{path} is a link to another directory")
    return status.st_size


def members(part: h5py.Group, group: str, room: int) -> list[tuple[str, h5py.Dataset]]:
    """Return all data sets below a group of `part`, with their names; together they may have at most `room` bytes."""
    found: list[tuple[str, h5py.Dataset]] = []
    if not isinstance(part, h5py.Group):
        raise Damaged("there is a data set where a group should be")
    if part.get(group, getlink=True) is not None:
        _walk(child(part, group), "", 0, found)
    for name, data in found:
        room -= _check(name, data, room)
    return found


def child(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    """Return a member of a group; raises Damaged unless it is a group or data set stored in this file."""
    if not isinstance(group.get(name, getlink=True), h5py.HardLink | None):
        raise Damaged(f"{name} is not a hard link")
    item = group[name]
    if not isinstance(item, h5py.Group | h5py.Dataset):
        raise Damaged(f"{name} is neither a group nor a data set")
    return item


def _walk(group: h5py.Group, prefix: str, depth: int, found: list[tuple[str, h5py.Dataset]]) -> None:
    if depth > MOST_GROUPS or not isinstance(group, h5py.Group):
        raise Damaged(f"{prefix or 'the top'} is not a group of data sets")
    for name in group:
        item = child(group, name)
        if isinstance(item, h5py.Group):
            _walk(item, f"{prefix}{name}/", depth + 1, found)
        else:
            found.append((f"{prefix}{name}", item))


def _check(name: str, data: h5py.Dataset, room: int) -> int:
    """Raise Damaged unless a data set holds plain numbers, uncompressed in this file; returns its bytes in memory."""
    creation = data.id.get_create_plist()
    filters = tuple(creation.get_filter(i)[0] for i in range(creation.get_nfilters()))
    if data.ndim != 1 or data.shape is None or data.dtype.kind not in "biufc":
        raise Damaged(f"{name} is not a flat array of numbers")
    if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count():
        raise Damaged(f"the data of {name} are stored in another file")
    if filters not in ((), FLETCHER32):
        raise Damaged(f"{name} has a filter other than fletcher32")
    nbytes: int = data.shape[0] * data.dtype.itemsize
    chunk = data.chunks[0] * data.dtype.itemsize if data.chunks else 0
    if nbytes > min(room, data.id.get_storage_size()) or chunk > nbytes + data.dtype.itemsize:
        raise Damaged(f"{name} claims {nbytes:,} bytes, more than the file stores")
    return nbytes
