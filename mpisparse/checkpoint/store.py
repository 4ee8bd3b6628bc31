"""Checkpoints on disk: a directory `step-00000020` of files and a manifest, which is written last. Local functions."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpisparse.checkpoint.h5file import Damaged, FileRecord, inside, read_file
from mpisparse.checkpoint.members import file_size
from mpisparse.errors import ConfigurationError
from mpisparse.owner import Owner, this_process

FORMAT = 1
MANIFEST = "manifest.json"
REMOVER = "mpisparse-remove"
MOST_NBYTES = 1 << 28  # largest manifest; that of 4,096 ranks has about 2 MB
UNFINISHED, REPLACED, RETIRED = ".unfinished-", ".replaced-", ".retired-"
OWNED = re.compile(r"step-\d+-([0-9a-f]+)-(\d+)-(\d+)-[0-9a-f]+")  # end of the name of an unfinished checkpoint
VERIFIED_NBYTES = 1 << 30
IDLE_SECONDS = 3600  # an unfinished checkpoint of another host without writes for this long is taken for abandoned


@dataclass(frozen=True)
class Manifest:
    """The description that completes a checkpoint: its files with their digests, its model, and its origin."""

    step: int
    ranks: int
    files: tuple[FileRecord, ...]
    model: tuple[str, ...]
    origin: dict[str, Any]

    def record(self, name: str) -> FileRecord:
        """Return the record of a file, or of the part of all.h5 in its place; raises Damaged if there is none."""
        for record in self.files:
            if Path(record.name).stem == Path(name).stem:
                return record
        raise Damaged(f"the manifest of step {self.step} lists no file {name}")


def name_of(step: int) -> str:
    """Return the directory name of a step."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the file name of a rank's own state."""
    return f"rank-{rank:04d}.h5"


def shared_file(rank: int) -> str:
    """Return the file name of the share of the replicated state that a rank writes."""
    return f"shared-{rank:04d}.h5"


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def begin(directory: Path, step: int) -> Path:
    """Create a directory for an unfinished checkpoint, and begin to remove those that dead runs left.

    Its name identifies the process, so that two runs never write to the same one or remove each other's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory)
    me = this_process()
    place = directory / f"{UNFINISHED}{name_of(step)}-{me.kernel}-{me.pid}-{me.start}-{secrets.token_hex(4)}"
    place.mkdir()
    try:
        now = place.stat().st_mtime  # by the file server's clock, like the times it is compared with
        _retire(directory, [p for p in directory.glob(f"{UNFINISHED}*") if p != place and _is_abandoned(p, me, now)])
    except OSError:
        discard(place)
        raise
    return place


def sweep(directory: Path) -> None:
    """Begin to remove all unfinished checkpoints; only for the run that holds the directory's lock."""
    _retire(directory, list(directory.glob(f"{UNFINISHED}*")))


def _is_abandoned(place: Path, me: Owner, now: float) -> bool:
    """Tell whether an unfinished checkpoint is abandoned.

    Its process is gone, or is this one, which has begun the next. A process on another host cannot be seen; it counts as
    gone after an hour without a write.
    """
    named = OWNED.fullmatch(place.name.removeprefix(UNFINISHED))
    if named is None:
        return True  # written by a version that named no owner
    kernel, pid, start = named[1], int(named[2]), int(named[3])
    if (kernel, pid, start) == (me.kernel, me.pid, me.start):
        return True
    runs = Owner("", kernel, pid, start).runs()
    return not runs if runs is not None else now - _last_write(place) > IDLE_SECONDS


def _last_write(place: Path) -> float:
    times = [0.0]
    for path in (place, *place.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)


def complete(directory: Path, place: Path, manifest: Manifest, keep: int | None) -> Path:
    """Write the manifest, flush, and rename the checkpoint; then remove all but the `keep` newest valid ones.

    Raises OSError and leaves older checkpoints in place if a listed file is missing or incomplete.
    """
    lacking = missing(place, manifest)
    if lacking:
        raise OSError(lacking)
    body = {"format": FORMAT, **asdict(manifest)}
    text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
    with open(place / MANIFEST, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(place)
    target = directory / name_of(manifest.step)
    replaced = _rename_over(place, target)
    sync_directory(directory)
    with contextlib.suppress(OSError):
        _known[target] = _written(target, manifest)
    _retire(directory, replaced + _expired(directory, target, keep))
    return target


def missing(path: Path, manifest: Manifest) -> str:
    """Describe the first listed file that is missing or has another size; "" if all are complete."""
    for record in manifest.files:
        whole, _ = inside(path / record.name)
        try:
            file_size(whole)
            with open(whole, "rb") as file:  # a network file system may cache an old size until the file is opened
                nbytes = os.fstat(file.fileno()).st_size
        except Damaged as error:
            return str(error)
        except OSError as error:
            return f"{whole} cannot be read: {error.strerror}"
        if nbytes != record.nbytes:
            return f"{whole} has {nbytes:,} bytes, {record.nbytes:,} were written"
    return ""


def _rename_over(place: Path, target: Path) -> list[Path]:
    """Rename a directory; returns the ones it replaced. Another run may recover or replace them at the same time."""
    replaced: list[Path] = []
    while True:
        try:
            place.rename(target)
            return replaced
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                recover(target.parent)
                raise
        aside = target.with_name(f"{REPLACED}{target.name}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            target.rename(aside)
            replaced.append(aside)


def _retire(directory: Path, paths: list[Path]) -> None:
    """Rename directories out of sight and begin to remove them; skips those that another run has removed."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{RETIRED}{secrets.token_hex(4)}-{path.name.lstrip('.')}"))
    _remove_retired(directory)


def _remove_retired(directory: Path) -> None:
    """Remove in a thread, because deleting a large file may take nearly as long as writing it."""
    retired = list(directory.glob(f"{RETIRED}*"))
    if retired:
        threading.Thread(target=lambda: [*map(discard, retired)], name=REMOVER).start()


def _expired(directory: Path, newest: Path, keep: int | None) -> list[Path]:
    """List the checkpoints beyond the newest one and `keep` - 1 other valid ones."""
    left = (keep or 10**9) - 1
    expired = []
    for path in found(directory):
        if path == newest:
            continue
        if left <= 0:
            expired.append(path)
        left -= is_whole(path)
    return expired


def is_whole(path: Path) -> bool:
    """Tell whether a checkpoint is what was written: its manifest, file sizes and contents.

    Contents are read once, and again only after they were modified. A checkpoint of more than VERIFIED_NBYTES is not read,
    because one rank would have to read what all ranks wrote.
    """
    try:
        manifest = read_manifest(path)
        if missing(path, manifest):
            return False
        if _known.get(path) == _written(path, manifest):
            return True
        if sum(record.nbytes for record in manifest.files) <= VERIFIED_NBYTES:
            for record in manifest.files:
                read_file(path / record.name, record)
        _known[path] = _written(path, manifest)
    except (Damaged, OSError):
        return False
    return True


def _written(path: Path, manifest: Manifest) -> tuple[int, ...]:
    """Return the modification times of a checkpoint's files."""
    return tuple(inside(path / record.name)[0].stat().st_mtime_ns for record in manifest.files)


_known: dict[Path, tuple[int, ...]] = {}  # valid checkpoints with the modification times of their files


def recover(directory: Path) -> None:
    """Restore the name of a checkpoint that was being replaced when its run was killed."""
    for replaced in directory.glob(f"{REPLACED}step-*"):
        target = directory / "-".join(replaced.name.removeprefix(REPLACED).split("-")[:2])
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):  # another run did so
                replaced.rename(target)


def discard(place: Path) -> None:
    """Remove an unfinished checkpoint."""
    shutil.rmtree(place, ignore_errors=True)


def found(directory: Path) -> list[Path]:
    """List the checkpoints of a directory, newest first, valid or not."""
    named = [p for p in directory.glob("step-*") if p.is_dir() and p.name.removeprefix("step-").isdecimal()]
    return sorted(named, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def named(directory: Path) -> list[Path]:
    """Return the checkpoints that a path means, newest first: itself, those in it, or those of the run in it."""
    try:
        if directory.name.startswith("step-") and directory.is_dir():
            return [directory]
        checkpoints = found(directory) or found(directory / "checkpoints")
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(directory)[:200]}: {error.strerror}") from error
    if not checkpoints:
        raise ConfigurationError(
            f"{directory} is not a checkpoint and contains none; expected directories named like step-00000020"
        )
    return checkpoints


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest; raises Damaged."""
    try:
        if file_size(path / MANIFEST) > MOST_NBYTES:
            raise Damaged(f"{path / MANIFEST} has more than {MOST_NBYTES:,} bytes: it is not a manifest")
        body = json.loads((path / MANIFEST).read_text())
        digest = body.pop("sha256")
        if digest != _digest(body):
            raise Damaged(f"{path / MANIFEST} is not what was written: its digest differs")
        version = body.pop("format")
        if version != FORMAT:
            raise Damaged(f"{path} has format {version}, this version reads {FORMAT}")
        files = tuple(FileRecord(**record) for record in body.pop("files"))
        manifest = Manifest(files=files, model=tuple(body.pop("model")), **body)
        check_manifest(path, manifest)
        return manifest
    except FileNotFoundError as error:
        raise Damaged(f"{path} has no manifest: it was not finished") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise Damaged(f"{path / MANIFEST} cannot be read: {error}") from error


def check_manifest(path: Path, manifest: Manifest) -> None:
    """Raise Damaged unless a manifest is of this step and lists every rank's files by their names."""
    for name, value, least in (("step", manifest.step, 0), ("ranks", manifest.ranks, 1)):
        if type(value) is not int or not least <= value < 2**63:
            raise Damaged(f"{path / MANIFEST} has {name} {value!r}, not a whole number of at least {least}")
    number = path.name.removeprefix("step-")
    if path.name.startswith("step-") and number.isdecimal() and int(number) != manifest.step:
        raise Damaged(f"{path / MANIFEST} is of step {manifest.step}")
    listed = [record.name for record in manifest.files]
    if manifest.ranks not in (len(listed), len(listed) / 2) or not _are_ours(listed, manifest.ranks):
        raise Damaged(f"{path / MANIFEST} does not list the files of {manifest.ranks} ranks by their names")
    for record in manifest.files:
        if type(record.nbytes) is not int or record.nbytes < 0 or not isinstance(record.digest, str):
            raise Damaged(f"{path / MANIFEST} has no size or no digest of {record.name}")
    if not all(isinstance(line, str) for line in manifest.model):
        raise Damaged(f"{path / MANIFEST} does not describe a model's tensors")
    plain = isinstance(manifest.origin, dict) and all(
        v is None or isinstance(v, str | int | float) for v in manifest.origin.values()
    )
    if not plain:
        raise Damaged(f"{path / MANIFEST} does not describe its origin")


def _are_ours(listed: list[Any], ranks: int) -> bool:
    """Tell whether these are all ranks' own files and, in a checkpoint, all shares of the replicated state."""
    own, shared = [{name(rank) for rank in range(ranks)} for name in (rank_file, shared_file)]
    expected = own if len(listed) == ranks else own | shared
    inside_one = {f"all.h5/{Path(name).stem}" for name in expected}
    return set(map(str, listed)) in (expected, inside_one)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
