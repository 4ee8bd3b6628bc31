"""Checkpoints of scheme drift: the shared weights once, and of each rank its weights, optimizer, scheduler and scaler."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drifting import Training
from mpi4py import MPI
from ranks import alike, bits, everywhere, raised, seeded, small, total
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import store
from mpisparse.checkpoint.state import Subjects
from mpisparse.core.state import sources
from mpisparse.errors import CheckpointError
from mpisparse.runtime import inspect

pytestmark = pytest.mark.mpi

CASES: dict[str, dict[str, Any]] = {
    "sparse": {"density": 0.05},
    "whole, every third": {"density": 1.0, "every": 3, "codec": "sign", "rate": 1.5, "spread": False},
    "in groups": {"density": 0.3, "by": "groups", "codec": "sign"},
    "in two parts": {"density": 1.0, "every": 2, "codec": "sign"},
    "in two parts in flight": {"density": 1.0, "every": 2, "codec": "sign", "staleness": 1},
    "in flight": {"density": 0.05, "staleness": 1},
    "whole in flight": {"density": 1.0, "staleness": 1},
    "in flight, every third": {"density": 0.05, "staleness": 1, "every": 3},
    "own, in flight, rank 0": {"density": 0.05, "masks": "own", "staleness": 1, "server": "rank0"},
    "own, by average": {"density": 0.05, "masks": "own", "scorer": "average", "every": 2},
}
SPARSE = ["sparse", "in flight, every third", "own, in flight, rank 0", "own, by average"]
STEPS, MIDDLE = 9, 4


class Run(Training):
    """With batch norm and dropout, a scheduler and a scaler, each other ones on each rank."""

    def __init__(self, comm: MPI.Intracomm, seed: int = 7, *, half: bool = False, **options: Any) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 20))
        model = small().bfloat16() if half else model
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**comm.rank, growth_interval=2 + comm.rank)
        super().__init__(comm, model=model, scaler=self.scaler, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5 + 0.1 * comm.rank)
        torch.manual_seed(100 * seed + comm.rank)

    def train(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.steps += 1

    @property
    def subjects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "sync", "scheduler", "scaler")}

    def save(self, directory: Path) -> Path:
        return checkpoint.save(directory, step=self.steps, **self.subjects)

    def load(self, directory: Path) -> int | None:
        step = checkpoint.load(directory, **self.subjects)
        self.steps = step or 0
        return step

    def bits(self) -> bytes:
        numbers = [*(group["lr"] for group in self.optimizer.param_groups), self.scaler.get_scale()]
        return super().bits() + bits([torch.tensor(numbers, dtype=torch.float64), torch.get_rng_state()])


def finished(comm: MPI.Intracomm, **options: Any) -> bytes:
    """The bits of an uninterrupted run; collective."""
    run = Run(comm, **options)
    run.train(STEPS)
    ended = run.bits()
    run.sync.close()
    return ended


@pytest.mark.parametrize("case", CASES)
def test_resume_to_the_last_bit(comm: MPI.Intracomm, directory: Path, case: str) -> None:
    background = "every" in CASES[case]
    whole = finished(comm, **CASES[case])
    first = Run(comm, **CASES[case])
    first.train(MIDDLE)
    middle, shared = first.bits(), first.shared()
    saving = checkpoint.begin_save(directory, step=MIDDLE, background=background, **first.subjects)
    first.train(STEPS - MIDDLE)
    path = saving.finish()
    assert everywhere(comm, first.bits() == whole), "saving changed the run"
    first.sync.close()
    second = Run(comm, seed=8, **CASES[case])
    second.train(2)
    assert second.load(directory) == MIDDLE
    assert everywhere(comm, torch.equal(second.shared(), shared))
    assert everywhere(comm, second.bits() == middle)
    second.train(STEPS - MIDDLE)
    assert everywhere(comm, second.bits() == whole)
    assert alike(comm, [second.shared()])
    assert everywhere(comm, "damaged" not in inspect.look(path, verify=True)), inspect.look(path, verify=True)
    second.sync.close()


def test_one_rank_may_have_skipped_a_step(comm: MPI.Intracomm, directory: Path) -> None:
    """The optimizers' states then have other counts of steps, and that of one rank may be empty."""
    run = Run(comm, every=2)
    for step in range(3):
        run.optimizer.zero_grad()
        loss = run.loss() * (float("inf") if comm.rank == 0 and step < 2 else 1.0)
        run.scaler.scale(loss).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.steps += 1
        if step == 1:
            run.save(directory)
            right = run.bits()
    other = Run(comm, seed=8, every=2)
    assert other.load(directory) == 2
    assert everywhere(comm, other.bits() == right)
    run.sync.close()
    other.sync.close()


@pytest.mark.parametrize("options", [{"every": 2}, {"density": 1.0, "every": 2}, {"staleness": 1}], ids=str)
def test_weights_of_another_type_keep_their_remainders(
    comm: MPI.Intracomm, directory: Path, options: dict[str, Any]
) -> None:
    """Those of the shared weights too; saved between two exchanges, where weight + remainder is not rounded."""
    options = {"half": True, "remainder": True, **options}
    run = Run(comm, **options)
    run.train(5)
    run.save(directory)
    other = Run(comm, seed=8, **options)
    assert other.load(directory) == 5
    assert everywhere(comm, torch.equal(other.sync._residual, run.sync._residual))
    for each in (run, other):
        each.train(4)
    assert everywhere(comm, other.bits() == run.bits())
    assert everywhere(comm, torch.equal(other.sync._residual, run.sync._residual))
    assert run.sync.state_dict()["step.shared_remainder"].any()
    run.sync.close()
    other.sync.close()


def test_a_state_without_a_checkpoint(comm: MPI.Intracomm) -> None:
    """state_dict() is the same inside and outside of global_weights(), and loads inside and outside of it."""
    run, other, third = Run(comm, staleness=1), Run(comm, seed=8, staleness=1), Run(comm, seed=9, staleness=1)
    run.train(5)
    state = run.sync.state_dict()
    with run.sync.global_weights():
        model = {key: value.clone() for key, value in run.model.state_dict().items()}
        inside = run.sync.state_dict()
    tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
    assert everywhere(comm, all(torch.equal(state[key], inside[key]) for key in tensors))
    other.model.load_state_dict(model)
    other.sync.load_state_dict(state)
    with third.sync.global_weights():
        third.model.load_state_dict(model)
        third.sync.load_state_dict(state)
    for each in (other, third):
        assert everywhere(comm, bits([each.sync.residual, each.shared()]) == bits([run.sync.residual, run.shared()]))
        assert everywhere(comm, torch.equal(each.own, run.own))
        each.sync.close()
    run.sync.close()


def test_a_state_needs_the_shared_weights_in_the_model(comm: MPI.Intracomm) -> None:
    run = Run(comm)
    run.train(3)
    state = run.sync.state_dict()
    run.train(1)
    said = raised(comm, mpisparse.ConfigurationError, lambda: run.sync.load_state_dict(state))
    assert "global_weights()" in said
    run.sync.close()


@pytest.mark.parametrize("buffers", ["rank0", "average"])
def test_buffers_of_all_ranks_are_not_saved(comm: MPI.Intracomm, directory: Path, buffers: str) -> None:
    """Each rank's own are; and a rank that cannot store its state makes none wait."""
    run = Run(comm, buffers=buffers)
    run.train(3)
    right = run.bits()
    extra = {"bad": object()} if comm.rank == 0 else {}
    said = raised(comm, CheckpointError, lambda: checkpoint.save(directory, step=3, extra=extra, **run.subjects))
    assert "cannot store object" in said
    run.save(directory)
    run.train(2)
    assert run.load(directory) == 3
    assert everywhere(comm, run.bits() == right)
    run.sync.close()


BROKEN: dict[str, Any] = {
    "more than objects": {"model": {}},
    "no kind": {"optimizer": {"state": {}, "param_groups": []}},
    "a malformed optimizer": {"optimizer": {"state": {0: 3}, "param_groups": [{"params": [0]}]}, "optimizer_kind": "SGD"},
    "a malformed scaler": {"scaler": {"scale": -1.0}, "scaler_kind": "GradScaler", "scaler_module": "torch.amp"},
}


@pytest.mark.parametrize("what", BROKEN)
def test_malformed_objects_of_a_rank_are_found(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = Run(comm)
    run.train(1)
    run.save(directory)
    right = run.bits()
    run.train(1)
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(Subjects, "objects", lambda self: BROKEN[what])
        path = run.save(directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run.load(directory) == 1
    assert comm.rank or "is not used" in str(caught[0].message)
    assert everywhere(comm, "damaged" in inspect.look(path, verify=True))
    assert everywhere(comm, run.bits() == right)
    run.sync.close()


# Another number of ranks


@pytest.mark.parametrize("case", [*SPARSE, "whole in flight"])
@pytest.mark.parametrize("fewer", [pytest.param(n, marks=pytest.mark.mpi(min_size=n + 1)) for n in (1, 2, 3)])
@pytest.mark.parametrize("grow", [False, True], ids=["shrink", "grow"])
@pytest.mark.pairs
def test_another_number_of_ranks(comm: MPI.Intracomm, directory: Path, fewer: int, grow: bool, case: str) -> None:
    """The shared weights are the same bits, the mean of all weights plus e stays, and an optimizer is that of the source."""
    part = comm.Split(0 if comm.rank < fewer else MPI.UNDEFINED, comm.rank)
    writers, readers = (part, comm) if grow else (comm, part)
    before: Any = None
    if writers != MPI.COMM_NULL:
        run = Run(writers, **CASES[case])
        run.train(6)
        run.save(directory)
        mean = total(writers, run.own) / writers.size + run.remembered()
        before = bits([run.shared()]), mean, writers.allgather((run.own, moments(run)))
        apart = float(run.sync.residual.abs().max())
        assert everywhere(writers, apart > 0)
        run.sync.close()
    shared, mean, ranks = comm.bcast(before)
    if readers != MPI.COMM_NULL:
        run = Run(readers, seed=8, **CASES[case])
        assert run.load(directory) == 6
        assert everywhere(readers, bits([run.shared()]) == shared)
        now = total(readers, run.own) / readers.size + run.remembered()
        assert everywhere(readers, float((now - mean).abs().max()) < 1e-6)
        source = sources(len(ranks), readers.size, readers.rank)[0]
        assert everywhere(readers, torch.equal(moments(run), ranks[source][1]))
        if readers.size % len(ranks) == 0:
            assert everywhere(readers, torch.equal(run.own, ranks[source][0]))
        run.train(6)
        assert alike(readers, [run.shared()])
        assert store.read_manifest(run.save(directory)).ranks == readers.size
        run.sync.close()
    if part != MPI.COMM_NULL:
        part.Free()


def moments(run: Run) -> torch.Tensor:
    """AdamW's averages."""
    return torch.cat([state["exp_avg"].reshape(-1) for state in run.optimizer.state.values()])


@pytest.mark.mpi(min_size=2)
def test_remainders_on_another_number_of_ranks(comm: MPI.Intracomm, directory: Path) -> None:
    options: dict[str, Any] = {"half": True, "remainder": True, "every": 2}
    run = Run(comm, **options)
    run.train(5)
    run.save(directory)
    mean, shared = total(comm, run.own) / comm.size + run.remembered(), run.sync._residual.clone()
    run.sync.close()
    alone = comm.Split(comm.rank)
    if comm.rank == 0:
        other = Run(alone, seed=8, **options)
        assert other.load(directory) == 5
        assert torch.equal(other.sync._residual, shared)
        assert float((other.own + other.remembered() - mean).abs().max()) < 1e-6
        other.train(3)
        other.sync.close()
    alone.Free()
    comm.Barrier()


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 3), (3, 1), (1, 4), (3, 4), (4, 3), (5, 7), (8, 3)])
def test_shifted_weights_have_the_same_mean(comm: MPI.Intracomm, old: int, new: int) -> None:
    from mpisparse.core.state import share_in_shift

    weights = [torch.randn(100, generator=seeded(r, old)).double().numpy() for r in range(old)]
    shift = sum(share_in_shift(old, new, r) * weights[r] for r in range(old))
    shifted = [weights[sources(old, new, r)[0]] + shift for r in range(new)]
    np.testing.assert_allclose(np.mean(shifted, axis=0), np.mean(weights, axis=0), atol=1e-12)
    assert new % old or not np.any(shift)


@pytest.mark.parametrize("buffers", ["rank0", "average"])
def test_the_model_for_inference_is_what_is_evaluated(comm: MPI.Intracomm, directory: Path, buffers: str) -> None:
    """The shared weights, with the buffers that global_weights() has."""
    run = Run(comm, density=0.05, buffers=buffers)
    run.train(3)
    run.save(directory)
    with run.sync.global_weights():
        evaluated = {name: t.clone() for name, t in run.model.state_dict().items()}
    model = Run(comm, seed=8).model
    assert checkpoint.load_model(directory, model) == 3
    checkpoint.export(directory, directory / f"model-{comm.rank}.pt")
    exported = torch.load(directory / f"model-{comm.rank}.pt", weights_only=True)
    same = all(torch.equal(t, model.state_dict()[name]) and torch.equal(t, exported[name]) for name, t in evaluated.items())
    moved = not torch.equal(run.model[0].weight, model[0].weight)
    run.sync.close()
    assert everywhere(comm, same)
    assert everywhere(comm, moved), "a rank's own weights are not the shared ones"
