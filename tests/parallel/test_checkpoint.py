"""Checkpoints on any number of ranks: resumed bit for bit, atomic on all ranks, and resized.

MPISPARSE_TEST_DRIVER=mpio writes one file for all ranks, which needs an h5py with MPI: see tests/mpio.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, everywhere, held, seeded, total
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import h5file, onefile, store
from mpisparse.checkpoint import state as checkpoint_state
from mpisparse.core import state
from mpisparse.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.mpi

DRIVER = os.environ.get("MPISPARSE_TEST_DRIVER")
CODECS = ["fp32", "fp16", "bf16", "int8"]
SCHEMES = [{"scheme": "dense"}, {"scheme": "dense", "codec": "int4"}] + [
    {"density": 0.05, "codec": codec, "accumulate": path} for codec in CODECS for path in ("step", "backward")
]
SCHEMES += [
    {"scheme": "momentum"},
    {"scheme": "momentum", "accumulate": "backward"},
    {"scheme": "momentum", "compensate": False},
    {"scheme": "exdyna", "codec": "momentum-int8", "density": 0.05},
    {"scheme": "topk", "density": 0.05},
    {"scheme": "cltk", "density": 0.05},
    {"scheme": "randomk", "density": 0.05},
    {"scheme": "threshold", "density": 0.05},
    {"scheme": "sidco", "density": 0.05},
    {"scheme": "dgc", "density": 0.05},
]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
STEPS, MIDDLE = 10, 4


class Run:
    """A model with batch norm and dropout, with everything that trains it."""

    def __init__(self, comm: MPI.Intracomm, optimizer: str = "sgd", seed: int = 7, **options: Any) -> None:
        torch.manual_seed(seed)
        self.comm = comm
        self.model = nn.Sequential(
            nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 10)
        )  # fmt: skip
        self.sync = mpisparse.GradientSync(self.model, comm=comm, **(options or {"density": 0.05}))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.extra: dict[str, Any] = {}
        torch.manual_seed(100 * seed + comm.rank)

    @property
    def subjects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "sync": self.sync, "scheduler": self.scheduler}

    def train(self, first: int, last: int) -> None:
        """Do steps first, ..., last - 1; collective."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            x = torch.randn(8, 20, generator=seeded(self.comm.rank, step)) * (1 + self.comm.rank)
            self.model(x).square().mean().backward()
            self.sync.step()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, directory: Path, step: int, **options: Any) -> Path:
        options = {"driver": DRIVER, **options}
        return checkpoint.save(directory, step=step, extra={"own": [self.comm.rank, step]}, **options, **self.subjects)

    def load(self, directory: Path) -> int | None:
        self.extra = {}
        return checkpoint.load(directory, extra=self.extra, **self.subjects)

    def bits(self) -> bytes:
        """Return all that must be equal after a resume: weights, statistics, residual, optimizer, random generators."""
        states = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        rate = torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64)
        scheme = [t for t in self.sync.state_dict().values() if isinstance(t, torch.Tensor)]
        return bits([*self.model.state_dict().values(), *scheme, *states, rate, torch.get_rng_state()])

    def close(self) -> None:
        self.sync.close()


def raised(comm: MPI.Intracomm, kind: type[Exception], call: Callable[[], Any]) -> str:
    """Return the text of the error that every rank must raise, the same on all; collective."""
    error: Exception | None = None
    try:
        call()
    except Exception as caught:
        error = caught
    outcomes = comm.allgather((type(error).__name__, str(error)))
    assert set(outcomes) == {(kind.__name__, str(outcomes[0][1]))}, f"expected {kind.__name__} on every rank: {outcomes}"
    return str(outcomes[0][1])


def finished(comm: MPI.Intracomm, first: int = 0, last: int = STEPS, **options: Any) -> bytes:
    """Return the bits of an uninterrupted run; collective."""
    run = Run(comm, **options)
    run.train(first, last)
    ended = run.bits()
    run.close()
    return ended


@pytest.mark.parametrize(("optimizer", "background"), [("sgd", False), ("adamw", True)], ids=["sgd", "adamw-background"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: "-".join(str(v) for v in s.values()))
@pytest.mark.singles
def test_resume_to_the_last_bit(
    comm: MPI.Intracomm, directory: Path, scheme: dict[str, Any], optimizer: str, background: bool
) -> None:
    if background and DRIVER:
        pytest.skip(f"{DRIVER} does not write in the background")
    options = {"optimizer": optimizer, **scheme}
    whole = finished(comm, **options)
    first = Run(comm, **options)
    first.train(0, MIDDLE)
    middle = first.bits()
    saving = checkpoint.begin_save(
        directory, step=MIDDLE, extra={"own": [comm.rank, MIDDLE]}, background=background, driver=DRIVER, **first.subjects
    )
    first.train(MIDDLE, STEPS)  # what is saved is the state of the moment when saving was begun
    assert saving.finish() == directory / store.name_of(MIDDLE)
    assert everywhere(comm, first.bits() == whole), "saving changed the run"
    first.close()

    second = Run(comm, seed=8, **options)  # other weights, other random numbers
    assert second.load(directory) == MIDDLE
    assert second.extra == {"own": [comm.rank, MIDDLE]}
    assert everywhere(comm, second.bits() == middle)
    second.train(MIDDLE, STEPS)
    assert everywhere(comm, second.bits() == whole)
    assert alike(comm, second.model.parameters())
    second.close()


def test_background_saves_the_moment_when_it_was_begun(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DRIVER:
        pytest.skip(f"{DRIVER} does not write in the background")
    trained = threading.Event()

    def write_late(*args: Any) -> Any:
        assert trained.wait(600)
        return h5file.write_file(*args)

    run = Run(comm)
    run.train(0, MIDDLE)
    right = run.bits()
    monkeypatch.setattr(checkpoint.saving, "write_file", write_late)
    saving = checkpoint.begin_save(directory, step=MIDDLE, **run.subjects)
    assert not saving.written
    run.train(MIDDLE, STEPS)
    assert everywhere(comm, not store.found(directory))
    trained.set()
    saving.finish()
    assert saving.written
    assert run.load(directory) == MIDDLE
    assert everywhere(comm, run.bits() == right)
    run.close()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_fused_optimizers_go_on_in_any_memory_order(comm: MPI.Intracomm, directory: Path, kind: str) -> None:
    """A fused step goes through memory as it lies, and files do not keep the order of channels_last."""
    ended = []
    for stops in (False, True):

        def start(seed: int) -> dict[str, Any]:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
            sync = mpisparse.GradientSync(model, scheme="dense")
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, fused=True)
            mpisparse.attach(optimizer, sync)
            return {"model": model, "sync": sync, "optimizer": optimizer}

        run = start(1)
        for step in range(6):
            if stops and step == 3:
                checkpoint.save(directory, step=step, driver=DRIVER, **run)
                run["sync"].close()
                run = start(2)
                assert checkpoint.load(directory, **run) == step
            run["optimizer"].zero_grad()
            run["model"](torch.randn(2, 3, 6, 6, generator=seeded(comm.rank, step))).square().mean().backward()
            run["optimizer"].step()
        ended.append(bits(run["model"].parameters()))
        run["sync"].close()
    assert everywhere(comm, ended[0] == ended[1])


def test_load_into_a_run_that_has_trained(comm: MPI.Intracomm, directory: Path) -> None:
    whole = finished(comm)
    run = Run(comm)
    run.train(0, MIDDLE)
    run.save(directory, MIDDLE)
    run.train(50, 53)
    assert run.load(directory) == MIDDLE
    run.train(MIDDLE, STEPS)
    assert everywhere(comm, run.bits() == whole)
    run.close()


def test_nothing_to_load(comm: MPI.Intracomm, directory: Path) -> None:
    run = Run(comm)
    before = run.bits()
    assert run.load(directory / "nowhere") is None
    assert run.bits() == before
    run.close()


def test_an_error_on_one_rank_is_raised_on_all(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(comm)
    run.train(0, 2)
    run.save(directory, 2)
    run.train(2, 3)
    for failing in {0, comm.size - 1}:
        for background in (False,) if DRIVER else (False, True):
            with monkeypatch.context() as patch:
                if comm.rank == failing:
                    patch.setattr(*((onefile, "_fill") if DRIVER else (checkpoint.saving, "write_file")), fail_to_write)
                saving = checkpoint.begin_save(directory, step=3, background=background, driver=DRIVER, **run.subjects)
                told = raised(comm, CheckpointError, saving.finish)
            assert "step-00000003" in told
            assert f"r{failing} | OSError: no space left for a test" in told
            assert "older ones are intact" in told
            left = [p.name for p in directory.iterdir()]
            assert everywhere(comm, left == ["step-00000002"]), left
    run.save(directory, 3)
    assert run.load(directory) == 3
    run.close()


def fail_to_write(*_: Any) -> None:
    raise OSError("no space left for a test")


def test_one_file_is_refused_on_all_where_a_rank_has_no_mpi_in_h5py(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(comm)
    lacking = comm.size - 1
    error = mpisparse.ConfigurationError("no MPI in h5py") if comm.rank == lacking else None
    monkeypatch.setattr(onefile, "lacking", lambda: error)
    told = raised(comm, mpisparse.ConfigurationError, lambda: run.save(directory, 1, driver="mpio"))
    assert told == f"r{lacking} | no MPI in h5py"
    left = [p.name for p in directory.iterdir()]
    assert everywhere(comm, not left), left
    run.close()


@pytest.mark.parametrize("reserved", [True, False] if DRIVER else [True])  # only the file for all ranks reserves its space
def test_a_full_disk_is_an_error_on_all(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, reserved: bool
) -> None:
    """With too little space the new checkpoint is removed and the old one stays; with enough it is complete."""
    if not reserved:
        monkeypatch.setattr(onefile, "reserve", lambda raw: None)
    mounted = mount(directory, "size=16m") if comm.rank == 0 else ""
    problem = comm.bcast(mounted)
    if problem:
        pytest.skip(f"cannot mount a small tmpfs: {problem}")
    try:
        model = nn.Linear(100, 700)
        before = shutil.disk_usage(directory).used
        comm.Barrier()
        checkpoint.save(directory, step=1, model=model, driver=DRIVER)
        old = comm.bcast(shutil.disk_usage(directory).used)
        for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.5):
            if comm.rank == 0:
                mount(directory, f"remount,size={old + int(share * (old - before)) // 4096 * 4096}")
            comm.Barrier()
            if share > 1:
                checkpoint.save(directory, step=2, model=model, driver=DRIVER)
                assert checkpoint.load(directory, model=model) == 2
                break
            told = raised(comm, CheckpointError, lambda: checkpoint.save(directory, step=2, model=model, driver=DRIVER))
            assert "No space left" in told or not reserved, told
            left = [p.name for p in directory.iterdir()]
            assert everywhere(comm, left == ["step-00000001"]), left
            assert checkpoint.load(directory, model=model) == 1
    finally:
        comm.Barrier()
        if comm.rank == 0:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
        comm.Barrier()


def mount(place: Path, options: str) -> str:
    """Mount a file system in memory or change its size; returns the error."""
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
    ).stderr.strip()


def test_a_directory_that_cannot_be_is_an_error_on_all(comm: MPI.Intracomm, directory: Path) -> None:
    run = Run(comm)
    if comm.rank == 0:
        (directory / "file").write_text("in the way")
    comm.Barrier()
    told = raised(comm, CheckpointError, lambda: run.save(directory / "file", 1))
    assert str(directory / "file") in told
    run.close()


@pytest.mark.mpi(min_size=2)
def test_steps_that_differ_are_refused_on_all_and_leave_nothing(comm: MPI.Intracomm, directory: Path) -> None:
    run = Run(comm)
    run.train(0, 1)
    told = raised(comm, ConfigurationError, lambda: run.save(directory, 1 + (comm.rank == 1)))
    assert "the same step on all ranks, got [1, 2" in told
    assert everywhere(comm, not any(directory.iterdir()))
    run.save(directory, 1)
    run.close()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"step": "7"}, "step must be a whole number >= 0, got '7'"), ({"step": 2**63}, "step must be a whole number"),
    ({"keep": 0}, "keep must be a whole number >= 1"), ({"driver": "mpi"}, "unknown driver 'mpi'"),
    ({"model": "sharded"}, "the model is sharded"), ({"last": "unfinished"}, "still being written"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), BAD, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("own", [True, False], ids=["sync", "no sync"])
@pytest.mark.singles
def test_what_one_rank_cannot_save_is_refused_on_all(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str, own: bool
) -> None:
    run = Run(comm)
    subjects: dict[str, Any] = {**run.subjects, "step": 1} if own else {"model": run.model, "step": 1}
    if comm.rank == comm.size - 1:
        subjects |= {key: value for key, value in options.items() if key != "model"}
        if "last" in options:
            subjects["last"] = SimpleNamespace(written=False)
        if "model" in options:
            monkeypatch.setattr(checkpoint_state, "is_sharded", lambda p: True)
    kind = CheckpointError if "last" in options else ConfigurationError
    told = raised(comm, kind, lambda: checkpoint.begin_save(directory, background=False, **subjects))
    assert words in told
    monkeypatch.undo()
    left = [p.name for p in directory.iterdir()]
    assert everywhere(comm, not left), left
    run.save(directory, 1)
    run.close()


def test_a_checkpoint_of_another_model_is_not_replaced_silently(comm: MPI.Intracomm, directory: Path) -> None:
    """As of two models, each with its exchange, that are saved into one directory."""
    models = [nn.Linear(3, 2), nn.Linear(2, 3), nn.Linear(2, 3)]
    told = []
    for model in models:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.save(directory, step=4, model=model, driver=DRIVER)
        told.append([str(one.message) for one in caught])
    first, second, third = comm.bcast(told)
    assert not first
    assert not third
    assert len(second) == 1
    assert "step-00000004 was a checkpoint of another model" in second[0]
    assert not told[1] or comm.rank == 0


@pytest.mark.mpi(min_size=2)
def test_a_driver_on_one_rank_is_refused_on_all(comm: MPI.Intracomm, directory: Path) -> None:
    run = Run(comm)
    driver = "mpio" if comm.rank == 1 else None
    told = raised(comm, ConfigurationError, lambda: checkpoint.save(directory, step=1, driver=driver, **run.subjects))
    assert "driver must be the same on all ranks: rank 1 has one, rank 0 has none" in told
    run.close()


def test_a_state_that_cannot_be_stored_is_an_error_on_all_and_leaves_nothing(comm: MPI.Intracomm, directory: Path) -> None:
    run = Run(comm)
    extra = {"bad": object()} if comm.rank == comm.size - 1 else {}
    told = raised(
        comm, CheckpointError, lambda: checkpoint.save(directory, step=1, extra=extra, driver=DRIVER, **run.subjects)
    )
    assert "cannot store object at /extra/bad" in told
    left = [p.name for p in directory.iterdir()]
    assert everywhere(comm, not left), left
    run.close()


def damage(path: Path, how: str) -> None:
    """Damage a file."""
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
@pytest.mark.parametrize("name", ["manifest.json", "first-rank", "last-rank", "first-shared", "last-shared"])
def test_damaged_newest_and_all_use_the_one_before(comm: MPI.Intracomm, directory: Path, name: str, how: str) -> None:
    run = Run(comm)
    run.train(0, 2)
    run.save(directory, 2)
    right = run.bits()
    run.train(2, 4)
    newest = run.save(directory, 4)
    which, _, kind = name.partition("-")
    if kind:
        rank = 0 if which == "first" else comm.size - 1
        record = store.read_manifest(newest).record(store.rank_file(rank) if kind == "rank" else store.shared_file(rank))
        name = h5file.inside(Path(record.name))[0].name
    comm.Barrier()
    if comm.rank == 0:
        damage(newest / name, how)
    comm.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = run.load(directory)
    told = [str(w.message) for w in caught if "is not used" in str(w.message)]
    assert everywhere(comm, step == 2)
    assert everywhere(comm, run.bits() == right)
    assert len(told) == (1 if comm.rank == 0 else 0)
    assert comm.rank or str(newest) in told[0]
    run.close()


def test_another_model_or_scheme_is_refused_on_all_and_changes_nothing(comm: MPI.Intracomm, directory: Path) -> None:
    run = Run(comm)
    run.train(0, 2)
    run.save(directory, 2)
    run.close()
    model = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 11))
    sync = mpisparse.GradientSync(model, comm=comm, density=0.05)
    told = raised(comm, mpisparse.ConfigurationError, lambda: checkpoint.load(directory, model=model, sync=sync))
    assert "4.weight [10, 40] float32" in told
    assert "4.weight [11, 40] float32" in told
    sync.close()
    others = {"scheme": {"scheme": "dense"}, "codec": {"density": 0.05, "codec": "int8"}}
    for key, options in others.items():
        other = Run(comm, seed=9, **options)
        before = other.bits()
        told = raised(comm, mpisparse.ConfigurationError, lambda other=other: other.load(directory))
        assert key in told
        assert everywhere(comm, other.bits() == before), f"refused for its {key}, but changed"
        other.close()


def test_a_layer_used_under_two_names_keeps_its_own_statistics(comm: MPI.Intracomm, directory: Path) -> None:
    def build() -> tuple[nn.Module, mpisparse.GradientSync]:
        norm = nn.BatchNorm1d(6)
        model = nn.ModuleDict({"first": norm, "second": norm})
        return model, mpisparse.GradientSync(model, comm=comm, density=0.5)

    model, sync = build()
    model["first"](torch.randn(9, 6, generator=seeded(comm.rank, 0)) * (1 + comm.rank))
    right = bits(model.buffers())
    checkpoint.save(directory, step=1, model=model, sync=sync)
    sync.close()
    model, sync = build()
    assert checkpoint.load(directory, model=model, sync=sync) == 1
    assert everywhere(comm, bits(model.buffers()) == right)
    sync.close()


def test_without_a_sync_no_communicator_is_left_behind(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    duplicate = mpisparse.exchange.Exchange.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        duplicate(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(mpisparse.exchange.Exchange, "__init__", note)
    model = nn.Linear(3, 2)
    checkpoint.save(directory, step=1, model=model, driver=DRIVER)
    right = bits(model.parameters())
    with torch.no_grad():
        model.weight.zero_()
    assert checkpoint.load(directory, model=model) == 1
    assert bits(model.parameters()) == right
    assert made
    left = [exchange for exchange in made if exchange.comm != MPI.COMM_NULL]
    for exchange in left:
        exchange.close()
    assert not left, "MPICH has about two thousand communicators: a run that saves often without a sync ends"


# Resize


def mean_residual(comm: MPI.Intracomm, run: Run) -> torch.Tensor:
    """Return the sum of residuals, with values in flight, divided by the ranks; collective."""
    return total(comm, held(run.sync)) / comm.size


def averages(run: Run) -> torch.Tensor:
    """Return the moving average of a scheme that has one."""
    return run.sync.state_dict().get("step.mean.average", torch.zeros(0))


@pytest.mark.filterwarnings("ignore:scheme .predictive. without validation")
@pytest.mark.parametrize(
    "options",
    [
        {}, {"codec": "int8"}, {"scheme": "momentum"}, {"scheme": "predictive"},
        {"scheme": "predictive", "features": "all", "nets": "shared"},
        {"scheme": "dense", "density": 1.0, "codec": "int4"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("fewer", [pytest.param(n, marks=pytest.mark.mpi(min_size=n + 1)) for n in (1, 2, 3)])
@pytest.mark.parametrize("grow", [False, True], ids=["shrink", "grow"])
@pytest.mark.pairs
def test_another_number_of_ranks(
    comm: MPI.Intracomm, directory: Path, fewer: int, grow: bool, options: dict[str, Any]
) -> None:
    part = comm.Split(0 if comm.rank < fewer else MPI.UNDEFINED, comm.rank)
    writers, readers = (part, comm) if grow else (comm, part)
    options = {"density": 0.02, **options}
    before: Any = None
    if writers != MPI.COMM_NULL:
        run = Run(writers, **options)
        run.train(0, 6)
        run.save(directory, 6)
        mean, largest = mean_residual(writers, run), run.sync.residual.abs().max().item()
        before = (bits(run.model.parameters()), mean, largest, writers.allgather(averages(run)))
        run.close()
    parameters, mean, largest, average = comm.bcast(before)
    if readers != MPI.COMM_NULL:
        run = Run(readers, seed=8, **options)
        assert run.load(directory) == 6
        assert bits(run.model.parameters()) == parameters
        now = mean_residual(readers, run)
        assert mean.abs().max() > 0, "there is nothing to merge"
        largest = readers.allreduce(max(largest, run.sync.residual.abs().max().item()), MPI.MAX)
        torch.testing.assert_close(now, mean, rtol=1e-6, atol=1e-6 * largest)
        taken = state.sources(len(average), readers.size, readers.rank)
        torch.testing.assert_close(averages(run), torch.stack([average[r] for r in taken]).mean(0))
        assert run.extra["own"][0] in range(comm.size)
        run.train(6, 10)
        assert alike(readers, run.model.parameters())
        assert store.read_manifest(run.save(directory, 10)).ranks == readers.size
        run.close()
    if part != MPI.COMM_NULL:
        part.Free()


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 3), (3, 1), (1, 4), (3, 4), (4, 3), (5, 7), (8, 3)])
def test_merged_residuals_have_the_same_mean(comm: MPI.Intracomm, old: int, new: int) -> None:
    residuals = {r: torch.randn(500, generator=seeded(r, old)).numpy() for r in range(old)}
    merged = [state.merge_residuals({s: residuals[s] for s in state.sources(old, new, r)}, old, new, r) for r in range(new)]
    assert all(m.dtype == np.float32 for m in merged)
    mean = sum(r.astype(np.float64) for r in residuals.values()) / old
    np.testing.assert_allclose(sum(m.astype(np.float64) for m in merged) / new, mean, rtol=1e-6, atol=1e-6)


def test_the_replicated_state_is_shared_out(comm: MPI.Intracomm, directory: Path) -> None:
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(8)))
    sync = mpisparse.GradientSync(model, comm=comm, density=0.05)
    path = checkpoint.save(directory, step=1, model=model, sync=sync, driver=DRIVER)
    records = [store.read_manifest(path).record(store.shared_file(rank)) for rank in range(comm.size)]
    held = [sum(a.nbytes for a in h5file.read_file(path / r.name, r)[0].values()) for r in records]
    assert sum(held) == sum(p.numel() * 4 for p in model.parameters())
    assert max(held) <= sum(held) / comm.size + 30 * 30 * 4
    assert min(held) > 0
    sync.close()
