"""Checkpoints in HDF5: the complete state of a run, written atomically, to be loaded on any number of ranks.

    mpisparse.checkpoint.save(directory, step=step, model=model, optimizer=optimizer, sync=sync)     # collective
    step = mpisparse.checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)         # collective

For inference, without MPI:

    mpisparse.checkpoint.load_model(directory, model)
    mpisparse.checkpoint.export(directory, "model.safetensors")

The directory must be on a file system that all ranks see. docs/reference/files.md describes its contents.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ParamSpec

from mpisparse import names
from mpisparse.checkpoint import onefile, store, tree
from mpisparse.checkpoint.contents import MALFORMED, read_own, read_shared, sensible
from mpisparse.checkpoint.h5file import Arrays, Damaged, FileRecord, write_file
from mpisparse.checkpoint.model_files import export, load_model
from mpisparse.checkpoint.periodic import STOP_BEFORE, Periodic
from mpisparse.checkpoint.standin import check_scheme_state, ranks_a_node, resize_scheme_states
from mpisparse.checkpoint.state import ArrayCopies, Subjects, split
from mpisparse.comm.roll_call import meet
from mpisparse.comm.survival import together
from mpisparse.core.state import sources
from mpisparse.errors import CheckpointError, ConfigurationError, check_choice
from mpisparse.schemes.optimizers import unwrapped
from mpisparse.version import __version__

__all__ = ["CheckpointError", "Damaged", "Periodic", "Saving", "begin_save", "every", "export", "load", "load_model", "save"]

P = ParamSpec("P")


class Saving:
    """A checkpoint that is being written; finish() completes it. Created by begin_save()."""

    def __init__(
        self, exchange: Any, directory: Path, place: Path, manifest: store.Manifest, keep: int | None, *,
        owns_exchange: bool, memory: ArrayCopies, driver: str | None,
    ) -> None:  # fmt: skip
        self._exchange = exchange
        self._owns_exchange = owns_exchange
        self._directory = directory
        self._place = place
        self._manifest = manifest
        self._keep = keep
        self._memory = memory
        self._driver = driver
        self._records: list[FileRecord] = []
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def _write(self, files: dict[str, tuple[Arrays, dict[str, str]]]) -> None:
        try:
            if self._driver == "mpio":
                self._records = onefile.write_parts(self._exchange, self._place, files)
                return
            for name, (arrays, texts) in files.items():
                self._records.append(write_file(self._place / name, arrays, texts))
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _start(self, files: dict[str, tuple[Arrays, dict[str, str]]], *, background: bool) -> None:
        if not background:
            self._write(files)
            return
        self._thread = threading.Thread(target=self._write, args=(files,), name="mpisparse-checkpoint", daemon=False)
        self._thread.start()

    @property
    def written(self) -> bool:
        """Whether this rank's files are on disk; local."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> Path:
        """Wait for all ranks' files and complete the checkpoint; collective. Raises CheckpointError on all ranks."""
        with self._exchange.place.exempt("saving"):
            meet(self._exchange, "finish() of a checkpoint")
            return self._finish()

    def _finish(self) -> Path:
        if self._thread is not None:
            self._thread.join()
        report = {"error": self._error, "files": [asdict(record) for record in self._records]}
        reports = [json.loads(text) for text in self._exchange.gather_texts(json.dumps(report))]
        errors = [f"r{rank} | {r['error']}" for rank, r in enumerate(reports) if r["error"]]
        outcome = ""
        if self._exchange.rank == 0:
            outcome = self._complete(reports, errors)
        outcome = self._exchange.gather_texts(outcome)[0]
        if self._owns_exchange:
            self._exchange.close()
        if outcome:
            raise CheckpointError(
                f"checkpoint {store.name_of(self._manifest.step)} could not be written ({outcome}); older ones are intact"
            )
        return self._directory / store.name_of(self._manifest.step)

    def abandon(self) -> None:
        """Wait for this rank's files, and on rank 0 remove the checkpoint; local. For a run that ends in an error."""
        if self._thread is not None:
            self._thread.join()
        if self._exchange.rank == 0:
            store.discard(self._place)

    def _complete(self, reports: list[dict[str, Any]], errors: list[str]) -> str:
        """On rank 0: give the checkpoint its final name, or remove it; returns the errors."""
        try:
            if not errors:
                files = tuple(FileRecord(**record) for report in reports for record in report["files"])
                manifest = store.Manifest(**{**self._manifest.__dict__, "files": files})
                store.complete(self._directory, self._place, manifest, self._keep)
                return ""
        except OSError as error:
            errors = [f"r0 | {error}"]
        store.discard(self._place)
        return "; ".join(errors)


def _exempt_saving(begin: Callable[P, Saving]) -> Callable[P, Saving]:
    """Exempt a function from the timeout of its keyword argument `sync`."""

    @functools.wraps(begin)
    def run(*args: P.args, **options: P.kwargs) -> Saving:
        sync: Any = options.get("sync")
        with sync.unwatched("saving") if sync is not None else contextlib.nullcontext():
            return begin(*args, **options)

    return run


@_exempt_saving
def begin_save(
    directory: str | Path, *, step: int, model: Any, optimizer: Any = None, sync: Any = None, scheduler: Any = None,
    scaler: Any = None, extra: dict[str, Any] | None = None, keep: int | None = None, background: bool = True,
    last: Saving | None = None, driver: str | None = None,
) -> Saving:  # fmt: skip
    """Begin a checkpoint; collective. With `background` a thread writes a copy of the state while training continues.

    Call finish() on the result, on all ranks, before the next checkpoint. `last`: a finished Saving whose memory is reused
    for the copy. `driver`: see save(); "mpio" cannot write in the background.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigurationError(f"step must be a whole number >= 0, got {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigurationError(f"keep must be a whole number >= 1, or None for all, got {keep!r}")
    if driver is not None:
        check_choice("driver", driver, names.DRIVERS)
        if background:
            raise ConfigurationError(f'driver="{driver}" communicates while it writes; pass background=False')
    if last is not None and not last.written:
        raise CheckpointError("the last checkpoint is still being written; call its finish() first")
    memory = last._memory if last is not None else ArrayCopies()
    subjects = Subjects(model, unwrapped(optimizer), sync, scheduler, scaler)
    exchange = _exchange(sync)
    if exchange.survival is not None and (driver is not None or not exchange.survival.inside):
        raise ConfigurationError(
            'with on_failure="shrink" checkpoints are written at once, one file per rank: call checkpoint.save(), no driver'
        )
    meet(exchange, "checkpoint.save")
    try:
        exchange.raise_together(onefile.lacking() if driver is not None else None)
    except ConfigurationError:
        _release(exchange, sync)
        raise
    error: Exception | None = None
    place, files = Path(), {}
    try:
        if exchange.rank == 0:
            place = store.begin(Path(directory), step)
        files = _files(subjects, extra, exchange.rank, exchange.size)
        if background:
            copies = memory.copy({name: arrays for name, (arrays, _) in files.items()})
            files = {name: (copies[name], texts) for name, (_, texts) in files.items()}
    except (OSError, ConfigurationError, tree.UnsupportedError) as caught:
        error = CheckpointError(f"cannot begin a checkpoint in {directory}: {caught}")
    try:
        exchange.raise_together(error, CheckpointError)
    except CheckpointError:
        if exchange.rank == 0 and place != Path():
            store.discard(place)
        _release(exchange, sync)
        raise
    place = Path(exchange.gather_texts(str(place))[0])
    manifest = store.Manifest(step, exchange.size, (), tuple(subjects.describe()), _origin(sync))
    saving = Saving(
        exchange, Path(directory), place, manifest, keep, owns_exchange=sync is None, memory=memory, driver=driver
    )  # fmt: skip
    saving._start(files, background=background)
    return saving


def save(
    directory: str | Path, *, step: int, model: Any, optimizer: Any = None, sync: Any = None, scheduler: Any = None,
    scaler: Any = None, extra: dict[str, Any] | None = None, keep: int | None = None, driver: str | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint of `step` into directory/step-...; collective. Returns its path.

    `extra`: this rank's own tensors, arrays and scalars. `keep`: how many checkpoints to leave in the directory.
    `driver`: "mpio" writes one file for all ranks through parallel HDF5, instead of two per rank. Raises CheckpointError on
    all ranks if any cannot write; older checkpoints remain intact.
    """

    def attempt() -> Path:
        return begin_save(
            directory, step=step, model=model, optimizer=optimizer, sync=sync, scheduler=scheduler, scaler=scaler,
            extra=extra, keep=keep, background=False, driver=driver,
        ).finish()  # fmt: skip

    return attempt() if sync is None else together(sync._exchange, attempt)


def load(
    directory: str | Path, *, model: Any, optimizer: Any = None, sync: Any = None, scheduler: Any = None,
    scaler: Any = None, extra: dict[str, Any] | None = None, check_extra: Callable[[dict[str, Any]], None] | None = None,
) -> int | None:  # fmt: skip
    """Restore the newest valid checkpoint of a directory; collective. Returns its step, or None if there is none.

    `extra` receives what was saved. A damaged, malformed or unfinished checkpoint causes a warning and is skipped for the
    previous one; so is one whose extra makes `check_extra` raise ValueError. A checkpoint of another model or scheme is
    refused. On another number of ranks residuals are merged or split.
    """
    subjects = Subjects(model, unwrapped(optimizer), sync, scheduler, scaler)
    exchange = _exchange(sync)
    try:
        with exchange.place.exempt("loading"):

            def attempt() -> int | None:
                meet(exchange, "checkpoint.load")
                return _load(Path(directory), subjects, extra, exchange, check_extra or (lambda extra: None))

            return together(exchange, attempt)
    finally:
        _release(exchange, sync)


def every(
    directory: str | Path, *, model: Any, steps: int | None = None, seconds: float | None = None, optimizer: Any = None,
    sync: Any = None, scheduler: Any = None, scaler: Any = None, keep: int | None = 2, driver: str | None = None,
    stop_before: float = STOP_BEFORE,
) -> Periodic:  # fmt: skip
    """Checkpoint a loop at intervals of steps or seconds, and when its job must stop; resume it first. Collective.

        saves = mpisparse.checkpoint.every("runs/mine", steps=500, model=model, optimizer=optimizer, sync=sync)
        for step in range(saves.step, 10_000):  # from the step at which the job was stopped
            ...
            saves.step_done()
        saves.finish()

    Restores the newest valid checkpoint of the directory, if there is one. stop_before: seconds before the time limit of a
    Slurm job at which the loop stops; 0: by signals only. See Periodic.
    """
    subjects = {"model": model, "optimizer": optimizer, "sync": sync, "scheduler": scheduler, "scaler": scaler}
    return Periodic(
        functools.partial(save, keep=keep, driver=driver, **subjects), functools.partial(load, **subjects), Path(directory),
        sync, steps=steps, seconds=seconds, stop_before=stop_before,
    )  # fmt: skip


def _load(
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
            contents = _read(Path(path), exchange.rank, exchange.size, subjects.sync)
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
        _warn_of_origin(manifest, subjects.sync, exchange.rank)
        subjects.restore(shared, own)
        if extra is not None:
            extra.update(own["extra"])
        return manifest.step
    return None


def _exchange(sync: Any) -> Any:
    from mpisparse.comm.exchange import Exchange

    return sync._exchange if sync is not None else Exchange()


def _release(exchange: Any, sync: Any) -> None:
    """Free a communicator that was created for one call."""
    if sync is None:
        exchange.close()


def _files(
    subjects: Subjects, extra: dict[str, Any] | None, rank: int, size: int
) -> dict[str, tuple[Arrays, dict[str, str]]]:
    """Return the two files that a rank writes: its own state, and its share of the replicated state."""
    own_text, own = tree.flatten(subjects.own(extra))
    shared_text, shared = tree.flatten(subjects.shared())
    texts = {"state": shared_text} if rank == 0 else {}
    return {
        store.rank_file(rank): (own, {"state": own_text}),
        store.shared_file(rank): (split(shared, size)[rank], texts),
    }


def _read(path: Path, rank: int, size: int, sync: Any) -> tuple[store.Manifest, dict[str, Any], dict[str, Any]]:
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


def _origin(sync: Any) -> dict[str, Any]:
    import torch

    from mpisparse.backends.device import load_backend

    backend = load_backend()
    return {
        "mpisparse": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": backend.isa() if backend.name == "native" else backend.name,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "scheme": sync.scheme if sync is not None else None,
    }


def _warn_of_origin(manifest: store.Manifest, sync: Any, rank: int) -> None:
    """Warn on rank 0 if torch, the thread count or the processor differ, which may change bits."""
    here = _origin(sync)
    for key, meaning in (("torch", "torch"), ("threads", "the number of threads"), ("cpu", "the CPU's capability")):
        if manifest.origin[key] != here[key] and rank == 0:
            warnings.warn(
                f"{meaning} was {manifest.origin[key]} when the checkpoint was written and is {here[key]} now: "
                "the run continues, but its results may differ in the last bits",
                stacklevel=4,
            )
