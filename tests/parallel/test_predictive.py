"""Scheme predictive: the document's mask, nothing lost, and no dependence on the predictor's speed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, alike, bits, everywhere, lawful_steps, loss_of, raised, seeded, small, total
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.schemes.predictive.nets import Nets

pytestmark = pytest.mark.mpi

QUICK = {"scheme": "predictive", "density": 0.05, "history": 3, "validate_every": 6, "publish_after": 2}
RULES = ["product", "importance"]


def held_out(model: nn.Module) -> Any:
    """Return the loss on a held-out batch."""
    return lambda: loss_of(model, torch.Generator().manual_seed(77))


def make(model: nn.Module, **options: Any) -> mpisparse.GradientSync:
    return mpisparse.GradientSync(model, **{**QUICK, "validation": held_out(model), **options})


def train(comm: MPI.Intracomm, model: nn.Module, sync: mpisparse.GradientSync, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        optimizer.step()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.singles
def test_nothing_is_lost_and_replicas_stay_equal(comm: MPI.Intracomm, rule: str, path: str) -> None:
    model = small()
    sync = make(model, rule=rule, accumulate=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in lawful_steps(comm, model, sync, optimizer, loss_of, count=16):
        if step > 1:
            assert abs(sync.stats.selected - sync.k) <= max(2, 0.02 * sync.k)
    assert everywhere(comm, sync.stats.details["ranking"] > 0)  # lessons were learned


def create_sparsity_mask(gradients: np.ndarray, importance_scores: np.ndarray, k: int) -> np.ndarray:
    """Apply the document's rule, with ties broken by magnitude, then by index."""
    order = np.lexsort((np.arange(len(gradients)), -np.abs(gradients), -importance_scores.astype(int)))
    mask = np.zeros_like(gradients, dtype=bool)
    mask[order[:k]] = True
    return mask


@pytest.mark.parametrize("compensate", [False, True])
def test_the_mask_is_the_documents(comm: MPI.Intracomm, compensate: bool) -> None:
    """Scores have many ties; each element's score and gradient are those of its owner."""
    model = small()
    sync = make(model, rule="importance", percentile="exact", compensate=compensate, codec="fp32", publish_after=100)
    state = sync.state_dict()
    generator = torch.Generator().manual_seed(comm.rank)
    state["step.scores"] = torch.randint(0, 20, state["step.scores"].shape, generator=generator, dtype=torch.uint8)
    sync.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        scores = sync.state_dict()["step.scores"].numpy()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]) + sync.residual
        gradient[::5] = gradient[0]  # equal magnitudes too
        with torch.no_grad():
            begin = 0
            for p in model.parameters():
                assert p.grad is not None
                p.grad.copy_((gradient - sync.residual)[begin : begin + p.numel()].view_as(p))
                begin += p.numel()
        sync.step()
        whole, every = (np.stack(comm.allgather(x)) for x in (gradient.numpy(), scores))
        borders, size = sync.stats.borders, comm.size
        owners = np.concatenate(
            [np.full(borders[p + 1] - borders[p], (p - step) % size) for p in range(size)]  # partitions rotate over ranks
        )
        owned = np.arange(len(owners))
        mask = create_sparsity_mask(whole[owners, owned], every[owners, owned], sync.k)
        union = sync._gradients.published.union
        assert everywhere(comm, np.array_equal(np.flatnonzero(mask), union)), step
        np.testing.assert_allclose(
            torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).numpy(),
            np.where(mask, whole.astype(np.float64).mean(axis=0), 0.0),
            rtol=1e-5,
            atol=1e-9,
        )
        heard = sync.state_dict()["step.scores"].numpy()
        assert everywhere(comm, (heard[union] == every[owners, owned][union]).all())  # scores travel with what is selected
        optimizer.step()
    sync.close()


def slowly(nets: Nets, job: Any, work: Any = Nets.work) -> Any:
    time.sleep(0.2)
    return work(nets, job)


def test_a_slow_predictor_changes_no_bit(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for slow in (False, True):
        with monkeypatch.context() as patch:
            if slow and comm.rank == comm.size - 1:
                patch.setattr(Nets, "work", slowly)
            model = small()
            sync = make(model)
            train(comm, model, sync, range(14))
            ends.append(bits([*model.parameters(), sync.state_dict()["step.scores"], sync.residual]))
            sync.close()
    assert everywhere(comm, ends[0] == ends[1])


@pytest.mark.parametrize("publish_after", [1, 2, 5])
def test_scores_change_exactly_so_many_steps_after(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, publish_after: int
) -> None:
    """With a slow thread or a blocking one; before the first lesson, in step 5, all scores are equal."""

    def changes() -> list[int]:
        model = small()
        sync = make(model, publish_after=publish_after, comm=MPI.COMM_SELF)
        scores = sync._aggregator.works.scorer.tags  # type: ignore[attr-defined]
        changed = []
        for step in range(20):
            before = scores.copy()
            train(MPI.COMM_SELF, model, sync, range(step, step + 1))
            if (scores != before).any():
                changed.append(step)
            if Nets.work is not slowly:
                sync.state_dict()  # waits for the thread
        sync.close()
        return changed

    expected = [*range(5 + publish_after, 20, 3)]  # slices are complete in steps 2, 5, 8, ...
    fast = changes()
    monkeypatch.setattr(Nets, "work", slowly)
    slow = changes()
    assert everywhere(comm, fast == slow == expected), (fast, slow)


def test_a_predictor_that_dies_ends_the_next_step_everywhere(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state cannot be saved or replaced either: all ranks raise."""

    def fail(*args: Any) -> None:
        raise ValueError("no net")

    if comm.rank == 0:
        monkeypatch.setattr(Nets, "score", fail)
    model = small()
    sync = make(model)
    state = sync.state_dict()
    checkpoint.save(directory, step=0, model=model, sync=sync)
    train(comm, model, sync, range(3))
    deadline = time.monotonic() + 600
    while comm.rank == 0 and sync._aggregator.works.scorer.background.failure is None:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    model.zero_grad()
    loss_of(model, seeded(comm.rank, 3)).backward()
    message = raised(comm, RuntimeError, sync.step)
    assert message == "the predictor failed: ValueError: no net"
    for kind, call in (
        (checkpoint.CheckpointError, lambda: checkpoint.save(directory, step=3, model=model, sync=sync)),
        (checkpoint.CheckpointError, lambda: checkpoint.begin_save(directory, step=3, model=model, sync=sync)),
        (mpisparse.ConfigurationError, lambda: checkpoint.load(directory, model=model, sync=sync)),
        (mpisparse.ConfigurationError, lambda: sync.load_state_dict(state)),
    ):
        assert message in raised(comm, kind, call)
    sync.close()


def test_threads_end(comm: MPI.Intracomm) -> None:
    def threads() -> int:
        return sum(thread.name == "mpisparse-predictor" for thread in threading.enumerate())

    before = threads()
    model = small()
    sync = make(model)
    train(comm, model, sync, range(8))
    during = threads()
    sync.close()
    assert everywhere(comm, (during, threads()) == (before + 1, before))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("middle", [5, 6, 7, 8])
@pytest.mark.singles
def test_resume_to_the_last_bit(comm: MPI.Intracomm, directory: Path, middle: int, path: str) -> None:
    """Stopped while gradients are recorded, in the step of a lesson, and with results in flight."""

    def run() -> tuple[nn.Module, mpisparse.GradientSync, torch.optim.Optimizer]:
        model = small()
        sync = make(model, accumulate=path, publish_after=3)
        return model, sync, torch.optim.SGD(model.parameters(), lr=0.1)

    def end(model: nn.Module, sync: mpisparse.GradientSync) -> bytes:
        state = sync.state_dict()
        sync.close()
        return bits([*model.parameters(), *(v for v in state.values() if isinstance(v, torch.Tensor))])

    model, sync, optimizer = run()
    train(comm, model, sync, range(middle))
    sync.observe(1.0)
    assert everywhere(comm, len(sync.state_dict()["step.pending.due"]))
    checkpoint.save(directory, step=middle, model=model, optimizer=optimizer, sync=sync)
    train(comm, model, sync, range(middle, 16))
    whole = end(model, sync)
    model, sync, optimizer = run()
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    train(comm, model, sync, range(middle, 16))
    assert everywhere(comm, end(model, sync) == whole)


SEES = {
    "predictive": {"features": "all", "nets": "shared", "publish_after": 3},
    "drift": {"features": "all", "scorer": "predicted", "masks": "own"},
}


@pytest.mark.filterwarnings("ignore:an adaptive optimizer")  # whose state is what matters here
@pytest.mark.parametrize("scheme", SEES)
@pytest.mark.parametrize("middle", [7, 8])
def test_resume_with_all_that_nets_see(comm: MPI.Intracomm, directory: Path, middle: int, scheme: str) -> None:
    """With results in flight, and an optimizer whose state nets see."""

    def run() -> dict[str, Any]:
        model = small()
        learns = {"history": 3, "validate_every": 6, "validation": held_out(model)}
        sync = mpisparse.GradientSync(model, scheme=scheme, density=0.05, **learns, **SEES[scheme])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99))
        mpisparse.attach(optimizer, sync)
        return {"model": model, "optimizer": optimizer, "sync": sync}

    def trained(subjects: dict[str, Any], steps: range) -> None:
        for step in steps:
            subjects["optimizer"].zero_grad()
            loss_of(subjects["model"], seeded(comm.rank, step)).backward()
            subjects["optimizer"].step()

    def end(subjects: dict[str, Any]) -> bytes:
        state = subjects["sync"].state_dict()
        subjects["sync"].close()
        own = (value for value in state.values() if isinstance(value, torch.Tensor))
        return bits([*subjects["model"].parameters(), *own])

    first = run()
    trained(first, range(middle))
    state = first["sync"].state_dict()
    assert everywhere(comm, len(state["step.pending.due"]) and bool(state["step.features.factors"].any()))
    checkpoint.save(directory, step=middle, **first)
    trained(first, range(middle, 16))
    whole = end(first)
    second = run()
    assert checkpoint.load(directory, **second) == middle
    trained(second, range(middle, 16))
    assert everywhere(comm, end(second) == whole)


def test_all_ranks_change_k_in_the_same_step(comm: MPI.Intracomm) -> None:
    """The mean over ranks decides, which differs from what most ranks saw."""
    model = small()
    sync = make(model)
    before = sync.k
    sync.observe(1.0)
    sync.observe(2.0 + comm.rank)
    assert everywhere(comm, sync.k == int(before / 1.5) or sync.k == round(before / 1.5))
    sync.observe(-5.0 * comm.rank - 5.0)
    assert everywhere(comm, abs(sync.k - before) <= 1)
    train(comm, model, sync, range(2))
    assert everywhere(comm, sync.stats.details["k_scale"] == pytest.approx(1.0))
    sync.close()


def test_k_goes_on_as_it_would_have(comm: MPI.Intracomm, directory: Path) -> None:
    """Stopped in the middle of a plateau, below the best metric; later metrics move k as in an uninterrupted run."""
    metrics = [0.5, 0.9, 0.7, 0.7, 0.7, 0.95, 0.95, 0.95, 0.2]
    middle = 4

    def observed(model: nn.Module, sync: mpisparse.GradientSync, times: range) -> list[tuple[float, int, float]]:
        seen = []
        for i in times:
            train(comm, model, sync, range(2 * i, 2 * i + 2))
            sync.observe(metrics[i] + 0.01 * comm.rank)
            seen.append((sync.stats.details["k_scale"], sync.k, sync.stats.density))
        return seen

    model = small()
    sync = make(model)
    observed(model, sync, range(middle))
    checkpoint.save(directory, step=middle, model=model, sync=sync)
    whole = observed(model, sync, range(middle, len(metrics)))
    sync.close()
    model = small()
    sync = make(model)
    checkpoint.load(directory, model=model, sync=sync)
    assert everywhere(comm, observed(model, sync, range(middle, len(metrics))) == whole)
    assert everywhere(comm, [round(scale, 3) for scale, _, _ in whole] == [1.0, 1.5, 1.0, 1.0, 1.5])
    sync.close()


def test_a_state_with_the_best_metric_ever_in_place_of_a_window_is_taken(comm: MPI.Intracomm) -> None:
    """Versions before the window saved such a state."""
    sync = make(small())
    state = sync.state_dict()
    for key in ("recent", "since"):
        del state[f"step.demand.{key}"]
    state |= {f"step.demand.{key}": value for key, value in {"best": 0.9, "last": 0.5, "still": 1, "scale": 1.5}.items()}
    sync.load_state_dict(state)
    ks = [sync.k]
    for metric in (0.505, 0.55, 0.7):
        sync.observe(metric)
        ks.append(sync.k)
    assert everywhere(comm, ks[0] == ks[1] and ks[1] > ks[2] > ks[3])
    del state["step.demand.last"]
    raised(comm, mpisparse.ConfigurationError, lambda: sync.load_state_dict(state))
    sync.close()


def test_history_bytes(comm: MPI.Intracomm) -> None:
    """Two bytes per gradient and accumulator element of the recorded slice and of the one in flight, and the sample."""
    model = small()
    sync = make(model)
    for step in range(9):
        train(comm, model, sync, range(step, step + 1))
        slices = 1 if step < 2 else 2
        elements = slices * sync.residual.numel() + len(sync.state_dict()["step.sample"])
        assert everywhere(comm, sync.stats.details["history_bytes"] == 2 * (3 + 1) * elements), step
    sync.close()


def test_validation_disturbs_nothing(comm: MPI.Intracomm) -> None:
    """Buffers, modes, gradients and random numbers are as without validation; its result is checked."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Dropout(0.5), nn.Linear(50, 20))
    modes: list[bool] = []

    def loss() -> torch.Tensor:
        modes.append(model.training)
        torch.rand(3), np.random.rand()
        return loss_of(model, torch.Generator().manual_seed(1)) + torch.rand(())

    sync = make(model, validation=loss)
    for step in range(6):
        loss_of(model, seeded(comm.rank, step)).backward()
        before = bits([torch.get_rng_state(), *model.buffers()]), str(np.random.get_state())
        sync.step()
        after = bits([torch.get_rng_state(), *model.buffers()]), str(np.random.get_state())
        assert everywhere(comm, before == after)
        model.zero_grad()
    assert everywhere(comm, modes == [False] and model.training)
    sync.close()


def test_which_hooks_validation_runs(comm: MPI.Intracomm) -> None:
    """Validation runs hooks of modules and tensors, but not those after accumulation into p.grad."""
    model = small()
    sync = make(model)
    first = next(model.parameters())
    ran: list[str] = []
    first.register_hook(lambda _: ran.append("tensor"))
    first.register_post_accumulate_grad_hook(lambda _: ran.append("accumulation"))
    model[2].register_full_backward_hook(lambda *_: ran.append("module"))  # type: ignore[index]
    for step in range(6):
        model.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        ran.clear()
        sync.step()
        assert everywhere(comm, ran == (["module", "tensor"] if step == 5 else [])), step
    sync.close()


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda: 3.0, "validation() must return a loss, a tensor of one element with a gradient; got 3.0"),
        (lambda: torch.zeros(2, requires_grad=True), "shape [2]"),
        (lambda: torch.zeros(()), "requires_grad=False"),
    ],
    ids=["number", "vector", "constant"],
)
def test_what_validation_must_return(comm: MPI.Intracomm, returned: Any, expected: str) -> None:
    model = small()
    wrong = comm.rank == comm.size - 1
    sync = make(model, validation=returned if wrong else held_out(model))
    train(comm, model, sync, range(5))
    model.zero_grad()
    loss_of(model, seeded(comm.rank, 5)).backward()
    assert expected in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()


def test_without_validation_the_coming_magnitude_is_learned(comm: MPI.Intracomm) -> None:
    """Gradients that keep their sign grow in the step of a lesson, others shrink: earlier magnitudes do not show which."""
    model = nn.Linear(80, 50, bias=False)
    with pytest.warns(UserWarning, match="without validation= learns to predict the accumulator's coming magnitude"):
        sync = make(model, validation=None, compensate=False)
    generator = seeded(comm.rank, 0)
    size, keeps = 1 + torch.rand(50, 80, generator=generator), torch.rand(50, 80, generator=generator) < 0.5
    for step in range(51):
        model.zero_grad()
        sign = torch.where(keeps, 1.0, (-1.0) ** step)
        growth = torch.where(keeps, 2.0, 0.5) if step % 6 == 5 else torch.ones(())
        (model.weight * size * sign * growth).sum().backward()
        sync.step()
        if step == 8:
            assert everywhere(comm, sync.stats.details["ranking"] == pytest.approx(0.5, abs=0.1))
    assert everywhere(comm, sync.stats.details["ranking_by_magnitude"] == pytest.approx(0.5, abs=0.1))
    assert everywhere(comm, sync.stats.details["ranking"] > 0.9)
    sync.close()


def test_what_is_sent_stands_for_the_rest(comm: MPI.Intracomm) -> None:
    """rescale multiplies each layer's values by accumulated / selected magnitude, capped; no residual."""
    model = small()
    sync = make(model, compensate=False, rescale=True, scale_cap=3.0, codec="fp32")
    for step in range(3):
        loss_of(model, seeded(comm.rank, step)).backward()
        own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double()
        sync.step()
        union = torch.from_numpy(sync._gradients.published.union)
        scaled = torch.zeros_like(own)
        begin = 0
        for p in model.parameters():
            inside = union[(union >= begin) & (union < begin + p.numel())]
            whole, kept = own[begin : begin + p.numel()].abs().sum(), own[inside].abs().sum()
            scaled[inside] = own[inside] * (whole / kept).clamp(max=3.0)
            begin += p.numel()
        mean = total(comm, scaled) / comm.size
        got = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double()
        assert torch.allclose(got, mean, rtol=1e-5, atol=1e-9)
        assert not sync.residual.any()
        assert alike(comm, [p.grad for p in model.parameters()])
        model.zero_grad()
    sync.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"history": 2}, "history must be a whole number >= 3"),
        ({"history": 9}, "history must be at most 8 gradients, got 9"),
        ({"history": 5, "features": "all", "nets": "shared"}, "at most 4 gradients beside 4 other features, got 5"),
        ({"history": 6, "features": "all"}, "at most 5 gradients beside 3 other features, got 6"),
        ({"features": "none"}, "features"),
        ({"nets": "none"}, "nets"),
        ({"validate_every": 3}, "validate_every must be a whole number >= 4"),
        ({"validation": 3}, "validation must be a callable that returns a loss, got 3"),
        ({"rule": "magnitude"}, "rule"),
        ({"budget": 0}, "budget"),
        ({"compensate": "residual"}, "compensate"),
        ({"k_factor": 1.0}, "k_factor > 1"),
        ({"k_least": 2.0}, "k_least <= 1 <= k_most"),
        ({"publish_after": 0}, "publish_after"),
    ],
)
def test_options_are_checked(comm: MPI.Intracomm, options: dict[str, Any], expected: str) -> None:
    assert expected in raised(comm, mpisparse.ConfigurationError, lambda: make(small(), **options))


def test_a_state_that_does_not_fit_is_refused(comm: MPI.Intracomm) -> None:
    model = small()
    sync = make(model, publish_after=5)
    train(comm, model, sync, range(9))
    state = sync.state_dict()
    recorded, scores, pending = (state[f"step.{key}"] for key in ("recorded", "scores", "pending.scores"))
    assert everywhere(comm, state["step.pending.due"].tolist() == [10, 13])
    damages: list[tuple[str, Any]] = [
        ("step.scores", torch.zeros(3, dtype=torch.uint8)),
        ("step.scores", torch.full_like(scores, 255)),
        ("step.predictor.nets", torch.zeros(3)),
        ("step.sample", torch.tensor([10**9])),
        ("step.pending.lo", torch.tensor([-1])),
        ("step.pending.due", torch.tensor([13, 10])),
        ("step.time", 12),
        ("step.ranking", torch.zeros(3)),
        ("step.recorded", recorded[: len(recorded) // 2]),
        ("step.pending.scores", torch.full_like(pending, 255)),
        ("step.demand.scale", "much"),
        ("step.demand.recent", torch.tensor([0.5, float("nan")], dtype=torch.float64)),
        ("step.demand.since", -1),
    ]
    for key, value in damages:
        damaged = {**state, key: value}
        raised(comm, mpisparse.ConfigurationError, lambda damaged=damaged: sync.load_state_dict(damaged))
    sync.load_state_dict({**state, "step.scores": torch.full_like(scores, 254)})
    sync.load_state_dict(state)
    train(comm, model, sync, range(9, 11))
    sync.close()
