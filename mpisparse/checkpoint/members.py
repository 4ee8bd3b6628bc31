"""What may be in an HDF5 file of ours, checked before a byte of it is read: nothing leads out of the file, nothing swells.

A file may come from anywhere. Links that are not hard ones, data kept in other files, filters that unpack and types that
are no plain numbers are refused; so is a data set that claims to be larger than what the file holds of it.
"""

from __future__ import annotations

import stat
from pathlib import Path

import h5py

DEEPEST = 4  # groups in each other below arrays/ or texts/; ours have one
FLETCHER32 = (h5py.h5z.FILTER_FLETCHER32,)


class Damaged(Exception):  # noqa: N818 - named for what it says of a file
    """A file is not what was written: cut short, altered, or not a file of ours."""


def check_place(path: Path) -> int:
    """Raise unless the path is a plain file in its own directory, where no link leads out; returns its size in bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path} is not a plain file")
    if path.resolve(strict=True).parent != path.parent.resolve(strict=True):
        raise Damaged(f"{path} is a link that leaves its directory")
    return status.st_size


def members(part: h5py.Group, group: str, room: int) -> list[tuple[str, h5py.Dataset]]:
    """All data sets below a group of a part, by their names in it; together they may have `room` bytes."""
    found: list[tuple[str, h5py.Dataset]] = []
    if not isinstance(part, h5py.Group):
        raise Damaged("there is a data set where a group should be")
    if part.get(group, getlink=True) is not None:
        _walk(child(part, group), "", 0, found)
    for name, data in found:
        room -= _check(name, data, room)
    return found


def child(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    """A group's member; raises unless it is a group or a data set that lies in this file."""
    if not isinstance(group.get(name, getlink=True), h5py.HardLink | None):
        raise Damaged(f"{name} is a link that leads elsewhere")
    item = group[name]
    if not isinstance(item, h5py.Group | h5py.Dataset):
        raise Damaged(f"{name} is neither a group nor a data set")
    return item


def _walk(group: h5py.Group, prefix: str, depth: int, found: list[tuple[str, h5py.Dataset]]) -> None:
    if depth > DEEPEST or not isinstance(group, h5py.Group):
        raise Damaged(f"{prefix or 'the top'} is no group of data sets")
    for name in group:
        item = child(group, name)
        if isinstance(item, h5py.Group):
            _walk(item, f"{prefix}{name}/", depth + 1, found)
        else:
            found.append((f"{prefix}{name}", item))


def _check(name: str, data: h5py.Dataset, room: int) -> int:
    """Raise unless a data set is a flat one of numbers that lie in this file as they are; returns its bytes in memory."""
    creation = data.id.get_create_plist()
    filters = tuple(creation.get_filter(i)[0] for i in range(creation.get_nfilters()))
    if data.ndim != 1 or data.shape is None or data.dtype.kind not in "biufc":
        raise Damaged(f"{name} is not a flat array of numbers")
    if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count():
        raise Damaged(f"the data of {name} are in another file")
    if filters not in ((), FLETCHER32):
        raise Damaged(f"{name} is packed by a filter that is not ours")
    nbytes: int = data.shape[0] * data.dtype.itemsize
    chunk = data.chunks[0] * data.dtype.itemsize if data.chunks else 0
    if nbytes > min(room, data.id.get_storage_size()) or chunk > nbytes + data.dtype.itemsize:
        raise Damaged(f"{name} claims {nbytes:,} bytes, more than the file holds of it")
    return nbytes
