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
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from mpisparse import names
from mpisparse.checkpoint import onefile, store, tree
from mpisparse.checkpoint.h5file import Damaged
from mpisparse.checkpoint.loading import restore
from mpisparse.checkpoint.model_files import export, load_model
from mpisparse.checkpoint.origin import origin_of
from mpisparse.checkpoint.periodic import STOP_BEFORE, Periodic
from mpisparse.checkpoint.saving import Files, Saving
from mpisparse.checkpoint.state import ArrayCopies, Subjects, split
from mpisparse.comm.roll_call import meet
from mpisparse.comm.survival import together
from mpisparse.errors import CheckpointError, ConfigurationError, check_choice
from mpisparse.schemes.optimizers import unwrapped

__all__ = ["CheckpointError", "Damaged", "Periodic", "Saving", "begin_save", "every", "export", "load", "load_model", "save"]

P = ParamSpec("P")
MOST_STEPS = 2**63 - 1  # what a roll call can carry


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
    exchange = _exchange(sync)
    error: Exception | None = None
    try:
        _check_saving(step, keep, driver, last, background=background)
        _check_survival(exchange, driver)
        subjects = Subjects(model, unwrapped(optimizer), sync, scheduler, scaler)
    except (ConfigurationError, CheckpointError) as caught:
        error = caught
    try:
        _agree(exchange, error, step, driver)
    except (ConfigurationError, CheckpointError):
        _release(exchange, sync)
        raise
    memory = last._memory if last is not None else ArrayCopies()
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
    manifest = store.Manifest(step, exchange.size, (), tuple(subjects.describe()), origin_of(sync))
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
                return restore(Path(directory), subjects, extra, exchange, check_extra or (lambda extra: None))

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


def _check_saving(step: int, keep: int | None, driver: str | None, last: Saving | None, *, background: bool) -> None:
    """Raise unless a checkpoint can begin, as far as one rank can tell; local."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_STEPS:
        raise ConfigurationError(f"step must be a whole number >= 0, got {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigurationError(f"keep must be a whole number >= 1, or None for all, got {keep!r}")
    if driver is not None:
        check_choice("driver", driver, names.DRIVERS)
        if background:
            raise ConfigurationError(f'driver="{driver}" communicates while it writes; pass background=False')
    if last is not None and not last.written:
        raise CheckpointError("the last checkpoint is still being written; call its finish() first")


def _check_survival(exchange: Any, driver: str | None) -> None:
    """Raise if ranks are to survive the death of others, and could not while this checkpoint is written; local."""
    if exchange.survival is not None and (driver is not None or not exchange.survival.inside):
        raise ConfigurationError(
            'with on_failure="shrink" checkpoints are written at once, one file per rank: call checkpoint.save(), no driver'
        )


def _agree(exchange: Any, error: Exception | None, step: int, driver: str | None) -> None:
    """Raise on all ranks if one has an error, or if they would write different checkpoints; collective."""
    kinds = (None, ConfigurationError, CheckpointError)
    own = (0, kinds.index(type(error)), 0) if error is not None else (step, 0, int(driver is not None))
    steps, errors, drivers = meet(exchange, "checkpoint.save", *own)[:, :3].T.tolist()
    first = next(filter(None, errors), 0)
    if (kind := kinds[first]) is not None:
        exchange.raise_together(error, kind)
    if len(set(steps)) > 1:
        raise ConfigurationError(
            f"a checkpoint must be of the same step on all ranks, got {steps}: call checkpoint.save on all ranks alike"
        )
    if len(set(drivers)) > 1:
        at = drivers.index(1)
        raise ConfigurationError(
            f"driver must be the same on all ranks: rank {at} has one, rank {drivers.index(0)} has none"
        )
    exchange.raise_together(onefile.lacking() if driver is not None else None)


def _files(subjects: Subjects, extra: dict[str, Any] | None, rank: int, size: int) -> Files:
    """Return the two files that a rank writes: its own state, and its share of the replicated state."""
    own_text, own = tree.flatten(subjects.own(extra))
    shared_text, shared = tree.flatten(subjects.shared())
    texts = {"state": shared_text} if rank == 0 else {}
    return {
        store.rank_file(rank): (own, {"state": own_text}),
        store.shared_file(rank): (split(shared, size)[rank], texts),
    }


def _exchange(sync: Any) -> Any:
    from mpisparse.comm.exchange import Exchange

    return sync._exchange if sync is not None else Exchange()


def _release(exchange: Any, sync: Any) -> None:
    """Free a communicator that was created for one call."""
    if sync is None:
        exchange.close()
