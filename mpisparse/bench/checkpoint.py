"""bench checkpoint: writing a checkpoint against a plain write of the same bytes, and its cost to the training step."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import mpisparse
from mpisparse import checkpoint
from mpisparse.bench.given import GivenModel
from mpisparse.bench.sync import timed
from mpisparse.errors import ConfigurationError
from mpisparse.plan.synthetic import Synthetic
from mpisparse.runtime.table import show

COLUMNS = {"what": "", "ms": ".1f", "MB_per_s": ".0f", "of_plain": ".2f", "of_copy": ".2f"}


def run(elements: int, rounds: int, directory: Path | None, *, as_json: bool) -> int:
    """Measure on all ranks at once and print on rank 0; collective."""
    comm = MPI.COMM_WORLD
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"--directory {directory} is not a directory; create it, or omit it for a temporary one")
    place = Path(comm.bcast(tempfile.mkdtemp(dir=directory) if comm.rank == 0 else None))
    model = GivenModel.of(Synthetic(elements, comm.size), comm.rank)
    sync = mpisparse.GradientSync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model.backward()
        sync.step()
        optimizer.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "sync": sync}
    nbytes = (2 * 4 * elements) // comm.size + 4 * elements  # this rank's share of weights and momentum, and its residual
    plain, copied = np.ones(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
    times: dict[str, list[float]] = {}
    saving: list[checkpoint.Saving] = []
    try:
        for turn in range(1 + rounds):
            measured = {
                "plain write and fsync": timed(comm, lambda: _plain_write(place / f"plain-{comm.rank}", plain)),
                "checkpoint": timed(comm, _save(place, 2 * turn, state)),
                "copy in memory": timed(comm, lambda: np.copyto(copied, plain)),
            }
            begin = _begin(saving, place, 2 * turn + 1, state)
            measured["begin in the background"] = timed(comm, begin)
            saving[-1].finish()
            if turn:
                for name, seconds in measured.items():
                    times.setdefault(name, []).append(seconds)
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
    if comm.rank == 0:
        if not as_json:
            print(f"{elements:,} parameters, SGD with momentum, {comm.size} ranks; {nbytes / 1e6:.0f} MB per rank")
        show(_records(times, nbytes, elements, comm.size), COLUMNS, as_json=as_json)
    return 0


def _records(times: dict[str, list[float]], nbytes: int, elements: int, ranks: int) -> list[dict[str, Any]]:
    records = []
    for name, seconds in times.items():
        record: dict[str, Any] = {"what": name, "ms": 1e3 * statistics.median(seconds), "elements": elements, "ranks": ranks}
        record["MB_per_s"] = nbytes / statistics.median(seconds) / 1e6
        if name == "checkpoint":
            record["of_plain"] = statistics.median(
                p / s for p, s in zip(times["plain write and fsync"], seconds, strict=True)
            )
        if name == "begin in the background":
            record["of_copy"] = statistics.median(s / c for c, s in zip(times["copy in memory"], seconds, strict=True))
        records.append(record)
    return records


def _save(place: Path, step: int, state: dict[str, Any]) -> Callable[[], Any]:
    return lambda: checkpoint.save(place, step=step, keep=1, **state)


def _begin(saving: list[checkpoint.Saving], place: Path, step: int, state: dict[str, Any]) -> Callable[[], None]:
    last = saving[-1] if saving else None
    return lambda: saving.append(checkpoint.begin_save(place, step=step, keep=1, last=last, **state))


def _plain_write(path: Path, data: Any) -> None:
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        for start in range(0, len(view), 1 << 24):
            file.write(view[start : start + (1 << 24)])
        os.fsync(file.fileno())
