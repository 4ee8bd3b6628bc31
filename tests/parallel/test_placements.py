"""Ranks whose gradients lie in different places: every step still selects k elements, and no element waits forever."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.typing import NDArray
from oracle import Oracle, Settings
from ranks import PATHS, alike
from torch import nn

import mpisparse
from mpisparse.select import search, selector

pytestmark = pytest.mark.mpi

Floats = NDArray[np.float32]
N = 3000
SCHEMES: dict[str, dict[str, Any]] = {
    "exdyna": {},
    "momentum": {"codec": "fp32"},
    "predictive": {"codec": "fp32", "history": 3, "validate_every": 6, "publish_after": 2},
}


def places(rank: int, size: int) -> NDArray[np.int64]:
    """Return the rank of each element if the vector is divided contiguously."""
    return np.arange(N) * size // N


def only(chosen: Any) -> Floats:
    """Return one for chosen elements, else zero."""
    mask = np.zeros(N, dtype=np.float32)
    mask[chosen] = 1.0
    return mask


PLACEMENTS: dict[str, Callable[[int, int], Floats]] = {
    "alike": lambda rank, size: only(slice(None)),
    "one rank has nothing": lambda rank, size: only(slice(None) if rank or size == 1 else []),
    "one rank has all": lambda rank, size: only(slice(None) if rank == size - 1 else []),
    "one rank has ten": lambda rank, size: only(slice(None) if rank else np.arange(1000, 1100, 10)),
    "shares in order": lambda rank, size: only(places(rank, size) == rank),
    "shares in reverse": lambda rank, size: only(places(rank, size) == size - 1 - rank),
    "every so many": lambda rank, size: only(np.arange(N) % size == rank),
    "ten that only one rank has": lambda rank, size: (
        only(np.arange(1000, 1100, 10)) if rank == size - 1 else 1 - only(np.arange(1000, 1100, 10))
    ),
    "three each": lambda rank, size: only(np.array([500, 1500, 2500]) + 7 * rank),
    "nothing at all": lambda rank, size: only([]),
    "one rank has next to nothing": lambda rank, size: only(slice(None)) * np.float32(1.0 if rank or size == 1 else 1e-20),
    "both ends, and one that nobody else has": lambda rank, size: (
        only(np.arange(N) != N // 2) if rank else only([*range(300), N // 2, *range(N - 300, N)]) * np.float32(20)
    ),
}  # fmt: skip
all_placements = pytest.mark.parametrize("placement", PLACEMENTS)


def magnitudes(rank: int, step: int, tied: bool = False) -> Floats:
    """Return a gradient of random signs and, unless tied, random magnitudes."""
    draw = np.random.default_rng([rank, step])
    values = draw.choice([-1.0, 1.0], N) * (1.0 if tied else draw.uniform(0.5, 1.0, N))
    return values.astype(np.float32)


class Vector(nn.Module):
    """One parameter with a given gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(N))

    def give(self, gradient: Floats) -> None:
        self.zero_grad()
        torch.autograd.backward(self.w, torch.from_numpy(gradient.copy()))


def make(scheme: str, path: str, density: float) -> tuple[Vector, mpisparse.GradientSync]:
    model = Vector()
    options = dict(SCHEMES[scheme])
    if scheme == "predictive":
        options["validation"] = lambda: (model.w - 1).square().sum()
    return model, mpisparse.GradientSync(model, scheme=scheme, density=density, accumulate=path, **options)


def nonzero_anywhere(comm: MPI.Intracomm, values: Floats) -> int:
    """Count the elements that are nonzero on some rank; collective."""
    mine = (values != 0).astype(np.uint8)
    comm.Allreduce(MPI.IN_PLACE, mine, op=MPI.MAX)
    return int(mine.sum())


def step_and_compare(comm: MPI.Intracomm, model: Vector, sync: mpisparse.GradientSync, gradient: Floats) -> tuple[int, int]:
    """Run a step; returns the number of selected elements and the expected number."""
    wanted = min(sync.k, nonzero_anywhere(comm, sync.residual.numpy() + gradient))
    model.give(gradient)
    sync.step()
    return sync.stats.selected, wanted


def test_what_has_a_score_and_nothing_to_send_is_not_sent(comm: MPI.Intracomm) -> None:
    """Gradients like those of an embedding: averages stay where the accumulator is empty."""
    model, sync = make("momentum", "step", 0.1)
    pairs = []
    for step in range(8):
        mask = np.random.default_rng([comm.rank, step]).random(N) < 0.03
        selected, wanted = step_and_compare(comm, model, sync, mask * np.abs(magnitudes(comm.rank, step)))
        assert model.w.grad is not None
        pairs += [(selected, wanted), (int(model.w.grad.count_nonzero()), wanted)]
    sync.close()
    assert held(pairs), pairs


@pytest.mark.parametrize("scheme", ["momentum", "predictive"])
@pytest.mark.parametrize("path", PATHS)
def test_what_never_scores_high_is_sent_too(comm: MPI.Intracomm, scheme: str, path: str) -> None:
    """Half of the gradients are always twice as large as the others."""
    model, sync = make(scheme, path, 0.4)
    sent = np.zeros(N, dtype=bool)
    for _ in range(50):
        model.give(np.where(np.arange(N) % 2, 1.0, 2.0).astype(np.float32))
        sync.step()
        assert model.w.grad is not None
        sent |= model.w.grad.numpy() != 0
    sync.close()
    assert sent.all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.singles
def test_states_load_at_any_step(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, scheme: str, path: str) -> None:
    """Also to and from a run at a step with fixed partitions."""
    monkeypatch.setattr(selector, "SWEEP", 16)
    model, sync = make(scheme, path, 0.05)
    states, after = {}, {}
    for step in range(18):
        if step in (10, 15, 16):
            states[step] = sync.state_dict()
        model.give(magnitudes(comm.rank, step))
        sync.step()
        after[step] = sync.residual.numpy().tobytes()
    sync.load_state_dict(states[15])
    wrong = []
    for step, state in states.items():
        sync.load_state_dict(state)
        model.give(magnitudes(comm.rank, step))
        sync.step()
        wrong += [step] if sync.residual.numpy().tobytes() != after[step] else []
        sync.load_state_dict(states[15])
    sync.close()
    assert not wrong


def held(pairs: list[tuple[int, int]]) -> bool:
    """Tell whether all counts are within 5 % or one element of the target."""
    return all(abs(selected - wanted) <= max(1.0, 0.05 * wanted) for selected, wanted in pairs)


@all_placements
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.pairs
def test_the_density_is_held(comm: MPI.Intracomm, scheme: str, path: str, placement: str) -> None:
    mask = PLACEMENTS[placement](comm.rank, comm.size)
    for density, tied in ((0.02, False), (0.4, False), (0.02, True))[: 3 if scheme == "exdyna" else 1]:
        model, sync = make(scheme, path, density)
        gradients = [mask * magnitudes(comm.rank, step, tied) for step in range(8)]
        pairs = [step_and_compare(comm, model, sync, gradient) for gradient in gradients]
        sync.close()
        assert held(pairs), (density, tied, pairs)


@all_placements
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.singles
def test_many_ranks_hold_the_density(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, path: str, placement: str
) -> None:
    """Few ranks use the code path of more than 16."""
    monkeypatch.setattr(search, "GATHERED_RANKS", 0)
    mask = PLACEMENTS[placement](comm.rank, comm.size)
    model, sync = make("exdyna", path, 0.05)
    pairs = [step_and_compare(comm, model, sync, mask * magnitudes(comm.rank, step)) for step in range(8)]
    sync.close()
    assert held(pairs), pairs


@settings(derandomize=True, database=None, deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32), runs=st.integers(1, 6), density=st.sampled_from([0.001, 0.01, 0.1, 0.6]))
@pytest.mark.parametrize("path", PATHS)
def test_the_density_is_held_wherever_gradients_lie(
    comm: MPI.Intracomm, path: str, seed: int, runs: int, density: float
) -> None:
    """Every rank has a few runs of elements, anywhere, of any scale; they move once in the middle."""
    pairs = []
    model, sync = make("exdyna", path, density)
    for step in range(6):
        draw = np.random.default_rng([seed, comm.rank, step // 3])
        mask = np.zeros(N, dtype=np.float32)
        for _ in range(runs):
            start, length = draw.integers(0, N), int(np.exp(draw.uniform(0, np.log(N))))
            mask[start : start + length] = 10.0 ** draw.integers(-3, 3)
        pairs.append(step_and_compare(comm, model, sync, mask * magnitudes(comm.rank, step)))
    sync.close()
    assert held(pairs), pairs


@all_placements
@pytest.mark.parametrize(("scheme", "path"), [("exdyna", "step"), ("exdyna", "backward"), ("momentum", "step")])
@pytest.mark.singles
@pytest.mark.ranks(3)
def test_every_element_is_sent_and_training_converges(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, scheme: str, path: str, placement: str
) -> None:
    """Ranks pull their elements towards one; all must get as close as with dense gradients."""
    monkeypatch.setattr(selector, "SWEEP", 16)  # to see several of them
    mask = PLACEMENTS[placement](comm.rank, comm.size)
    pulled = comm.allreduce(mask) / comm.size
    model, sync = make(scheme, path, 0.1)
    rate, steps = (0.05, 80) if scheme == "exdyna" else (0.03, 240)  # only every 16th step ignores scores
    rate, steps = rate / max(float(pulled.max()), 0.01), steps + 16 * comm.size
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    sent = np.zeros(N, dtype=bool)
    for _ in range(steps):
        model.give(mask * (model.w.detach().numpy() - 1))
        sync.step()
        assert model.w.grad is not None
        sent |= model.w.grad.numpy() != 0
        optimizer.step()
    same = alike(comm, model.parameters())
    sync.close()
    distance, dense = model.w.detach().numpy() - 1, (1 - rate * pulled) ** steps
    assert same
    assert sent[pulled > 1e-6].all(), np.flatnonzero((pulled > 1e-6) & ~sent)
    assert not sent[pulled == 0].any()
    behind = 0.1 if scheme == "exdyna" else 0.2  # of 1 at the beginning; momentum lets small gradients wait longer
    assert (distance**2).mean() <= (dense**2).mean() + behind


@pytest.mark.parametrize(("path", "tied"), [("step", False), ("step", True), ("backward", False)])
@all_placements
@pytest.mark.singles
def test_steps_equal_the_oracle(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, placement: str, path: str, tied: bool
) -> None:
    """Twenty steps, some of them with fixed partitions."""
    monkeypatch.setattr(selector, "SWEEP", 4)
    options = Settings(density=0.05, accumulate=path)
    masks = [PLACEMENTS[placement](rank, comm.size) for rank in range(comm.size)]
    oracle, wrong = Oracle(N, comm.size, options), []
    model = Vector()
    sync = mpisparse.GradientSync(model, **dataclasses.asdict(options))
    for step in range(20):
        expected = oracle.step([mask * magnitudes(rank, step, tied) for rank, mask in enumerate(masks)])
        model.give(masks[comm.rank] * magnitudes(comm.rank, step, tied))
        sync.step()
        assert model.w.grad is not None
        alike_ = {
            "published": model.w.grad.numpy().tobytes() == expected.published.tobytes(),
            "residual": sync.residual.numpy().tobytes() == expected.residuals[comm.rank].tobytes(),
            "threshold": sync.stats.threshold == expected.threshold,
            "borders": sync.stats.borders == expected.borders,
        }
        wrong += [(step, name) for name, same in alike_.items() if not same]
    sync.close()
    assert not wrong
