"""Scheme momentum: the document's rule bit for bit, nothing lost, nothing selected beyond the percentile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from oracle import by_group, int8
from ranks import PATHS, Ledger, alike, bits, digits, everywhere, held, loss_of, raised, seeded, small, total, train_lawfully
from torch import nn
from torch.nn.functional import cross_entropy

import mpisparse
from mpisparse.errors import ConfigurationError, GradientError

Floats = NDArray[np.float32]

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:an adaptive optimizer")]
both_paths = pytest.mark.parametrize("path", PATHS)


def local_gradient(model: nn.Module, rank: int, step: int) -> Floats:
    grads = torch.autograd.grad(loss_of(model, seeded(rank, step)), list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in grads]).numpy()


def flat_grad(model: nn.Module) -> Floats:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()


# The document


@both_paths
def test_the_documents_pseudo_code(path: str) -> None:
    """On one rank, without compensation and quantisation, element by element over 50 steps."""
    alpha, beta, target = np.float32(0.9), np.float32(0.7), 0.9
    model = small()
    sync = mpisparse.GradientSync(
        model, scheme="momentum", compensate=False, mask="gradient", percentile="exact", codec="momentum-fp32",
        accumulate=path, comm=MPI.COMM_SELF,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n = sync.residual.numel()
    average, momentum = np.zeros((2, n), np.float32)
    for step in range(50):
        gradient = local_gradient(model, 0, step)
        average = alpha * np.abs(gradient) + (np.float32(1) - alpha) * average
        threshold = np.sort(average)[int(np.ceil(target * n - 1e-9))]
        gradient = np.where(np.abs(gradient) < threshold, np.float32(0), gradient)
        momentum = beta * gradient + (np.float32(1) - beta) * momentum
        optimizer.zero_grad()
        loss_of(model, seeded(0, step)).backward()
        sync.step()
        assert np.array_equal(flat_grad(model), momentum), f"step {step}"
        assert sync.stats.threshold == threshold
        assert not sync.residual.any()
        optimizer.step()
    sync.close()


class Twin:
    """All ranks of the scheme in one process in plain NumPy, with given partitions."""

    def __init__(self, n: int, size: int, k: int, *, by_average: bool, compensate: bool) -> None:
        self.n, self.size, self.k, self.by_average, self.compensate = n, size, k, by_average, compensate
        self.acc, self.average, self.momentum = np.zeros((3, size, n), np.float32)
        self.carried = np.zeros(n, dtype=bool)

    def step(self, gradients: list[Floats], regions: list[tuple[int, int, int]]) -> Floats:
        alpha, beta, one = np.float32(0.9), np.float32(0.7), np.float32(1)
        owned = np.empty(self.n, np.float32)
        for r, gradient in enumerate(gradients):
            self.acc[r] += gradient
            self.average[r] = alpha * np.abs(gradient) + (one - alpha) * self.average[r]
        for rank, lo, hi in regions:
            owned[lo:hi] = self.average[rank, lo:hi]
        threshold = np.sort(owned)[self.n - self.k]
        selected = np.zeros(self.n, dtype=bool)
        for rank, lo, hi in regions:
            score = self.average[rank] if self.by_average else np.abs(self.acc[rank])
            selected[lo:hi] = score[lo:hi] >= threshold
        sent = selected | self.carried
        masked = np.where(selected, self.acc, np.float32(0))
        self.acc = np.where(selected, np.float32(0), self.acc)
        self.momentum[:, sent] = (beta * masked + (one - beta) * self.momentum)[:, sent]
        mean = np.zeros(self.n, np.float32)
        parts = np.array_split(np.flatnonzero(sent), np.arange(1, self.size) * sent.sum() // self.size)
        for (rank, _, _), part in zip(regions, parts, strict=True):  # equal parts, wherever they were selected
            arrived = [by_group(int8)(self.momentum[r, part]) for r in range(self.size)]
            summed = arrived[0].copy()
            for row in arrived[1:]:
                summed += row
            back = by_group(int8)(summed)
            left = [self.momentum[r, part] - arrived[r] for r in range(self.size)]
            left[rank] = left[rank] + (summed - back)
            resting = (back == 0) & ~selected[part]
            for r in range(self.size):
                left[r][resting] += np.float32(0.3 / 0.7) * self.momentum[r, part][resting]
                self.acc[r, part] += left[r]
                self.momentum[r, part[resting]] = 0
            mean[part] = back / np.float32(self.size)
            sent[part[resting]] = False
        self.carried = sent
        if not self.compensate:
            self.acc[:] = 0
        return mean


@both_paths
@pytest.mark.parametrize(
    "options", [{}, {"mask": "gradient"}, {"compensate": False, "mask": "average"}, {"compensate": False}], ids=str
)
@pytest.mark.singles
def test_the_whole_step_against_numpy(comm: MPI.Intracomm, path: str, options: dict[str, Any]) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="momentum", percentile="exact", accumulate=path, **options)
    compensate = options.get("compensate", True)
    by_average = options.get("mask", "average" if compensate else "gradient") == "average"
    twin = Twin(sync.residual.numel(), comm.size, sync.k, by_average=by_average, compensate=compensate)
    for step in range(15):
        model.zero_grad()
        gradient = local_gradient(model, comm.rank, step)
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        borders = sync.stats.borders
        regions = [((p - step) % comm.size, borders[p], borders[p + 1]) for p in range(comm.size)]
        expected = twin.step(comm.allgather(gradient), regions)
        assert everywhere(comm, np.array_equal(flat_grad(model), expected)), f"step {step}"
        assert everywhere(comm, np.array_equal(sync.residual.numpy(), twin.acc[comm.rank])), f"step {step}"
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    sync.close()


# Laws


@both_paths
@pytest.mark.parametrize(
    "options",
    [
        {}, {"density": 0.01}, {"mask": "gradient"}, {"codec": "momentum-fp32"}, {"codec": "int8"}, {"codec": "fp32"},
        {"beta": 1.0}, {"beta": 0.05}, {"alpha": 0.1}, {"partitioner": "paper"}, {"density": 1.0},
        {"scheme": "exdyna", "density": 0.02, "codec": "momentum-int8"}, {"scheme": "exdyna", "scorer": "average"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.singles
def test_nothing_is_lost_and_replicas_are_equal(comm: MPI.Intracomm, path: str, options: dict[str, Any]) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, accumulate=path, **{"scheme": "momentum", **options})
    train_lawfully(comm, model, sync, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_of, 12)


class Words(nn.Module):
    """A sparse embedding, a layer that only even steps use, and one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 6, sparse=True)
        self.often, self.sometimes = nn.Linear(6, 5), nn.Linear(6, 5)
        self.low = nn.Linear(5, 3).to(torch.bfloat16)

    def forward(self, words: torch.Tensor, some: bool) -> torch.Tensor:
        x = self.embed(words)
        x = self.often(x) + (self.sometimes(x) if some else 0)
        return self.low(x.to(torch.bfloat16)).float()


@both_paths
def test_absent_and_sparse_gradients_count_as_zeros(comm: MPI.Intracomm, path: str) -> None:
    torch.manual_seed(1)
    model = Words()
    sync = mpisparse.GradientSync(model, scheme="momentum", accumulate=path)
    average = torch.zeros(sync.residual.numel())
    for step in range(6):
        words = torch.randint(0, 40, (9,), generator=seeded(comm.rank, step))
        seen = dict(model.named_parameters())
        loss = model(words, step % 2 == 0).square().sum()
        grads = torch.autograd.grad(loss, list(seen.values()), allow_unused=True, retain_graph=True)
        dense = [
            torch.zeros(p.numel()) if g is None else g.to_dense().float().reshape(-1)
            for p, g in zip(seen.values(), grads, strict=True)
        ]
        average = 0.9 * torch.cat(dense).abs() + (1 - np.float32(0.9)) * average
        model.zero_grad()
        loss.backward()
        sync.step()
        torch.testing.assert_close(sync.state_dict()["step.mean.average"], average, rtol=1e-6, atol=0)
    sync.close()


def test_what_is_masked_comes_to_rest(comm: MPI.Intracomm) -> None:
    """After the last gradient momentum is sent until int8 cannot resolve it; the rest is in the residuals."""
    model = nn.Linear(500, 4, bias=False)
    sync = mpisparse.GradientSync(model, scheme="momentum", density=0.05)
    weights = torch.randn(4, 500, generator=seeded(comm.rank, 0))
    published = torch.zeros(2000, dtype=torch.float64)
    sent = []
    for step in range(12):
        model.zero_grad()
        (model.weight * (weights if step == 0 else torch.zeros_like(weights))).sum().backward()
        sync.step()
        published += model.weight.grad.reshape(-1).double()
        sent.append(sync.stats.sent_density)
        assert everywhere(comm, sync.stats.sent_density >= sync.stats.density)
    given = total(comm, weights.reshape(-1))
    torch.testing.assert_close(comm.size * published + total(comm, held(sync)), given, rtol=1e-5, atol=1e-5)
    if comm.size > 1:  # regions rotate, so that other elements are selected in the next step
        assert sent[1] > 0.05
    assert len(sync.state_dict()["step.blend.index"]) < 500, "what was masked long ago is still on its way"
    sync.close()


@both_paths
def test_the_selected_density_is_the_target(comm: MPI.Intracomm, path: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64))
    for density in (0.1, 0.03):
        sync = mpisparse.GradientSync(model, scheme="momentum", density=density, accumulate=path)
        for step in range(12):
            model.zero_grad()
            x = torch.randn(8, 64, generator=seeded(comm.rank, step))
            (model(x) - x).square().mean().backward()
            sync.step()
            assert everywhere(comm, abs(sync.stats.density / density - 1) <= 0.01), sync.stats.density
        sync.close()


def test_the_state_takes_at_most_12_bytes_a_parameter(comm: MPI.Intracomm) -> None:
    """This includes the residual, at density 0.01."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64))
    sync = mpisparse.GradientSync(model, scheme="momentum", density=0.01)
    for step in range(12):
        model.zero_grad()
        x = torch.randn(8, 64, generator=seeded(comm.rank, step))
        (model(x) - x).square().mean().backward()
        sync.step()
        arrays = [value for value in sync.state_dict().values() if isinstance(value, torch.Tensor)]
        assert everywhere(comm, sum(array.nbytes for array in arrays) <= 12 * sync.residual.numel())
    assert everywhere(comm, len(sync.state_dict()["step.blend.index"]) > sync.k)  # what is still to be sent counts
    sync.close()


# Refusals


@pytest.mark.filterwarnings("ignore:scheme .predictive. without validation")
@both_paths
@pytest.mark.parametrize("scheme", ["momentum", "predictive"])
def test_who_had_no_backward_makes_up_for_it(comm: MPI.Intracomm, path: str, scheme: str) -> None:
    """After the last rank's backward the step runs as if it had never been refused."""
    ends = []
    for refuses in (False, True):
        model = small()
        sync = mpisparse.GradientSync(model, scheme=scheme, accumulate=path)
        for step in range(4):
            model.zero_grad()
            late = refuses and comm.rank == comm.size - 1
            if not late:
                loss_of(model, seeded(comm.rank, step)).backward()
            if refuses:
                assert "call backward() first" in raised(comm, GradientError, sync.step)
            if late:
                loss_of(model, seeded(comm.rank, step)).backward()
            sync.step()
        state = [value for value in sync.state_dict().values() if isinstance(value, torch.Tensor)]
        ends.append(bits([*state, *(p.grad for p in model.parameters())]))
        sync.close()
    assert everywhere(comm, ends[0] == ends[1])


@pytest.mark.filterwarnings("ignore:scheme .predictive. without validation")
@pytest.mark.parametrize("scheme", ["momentum", "predictive"])
def test_all_may_call_backward_again_after_a_refusal(comm: MPI.Intracomm, scheme: str) -> None:
    """The others' gradients are kept: nothing is lost. A second backward without a step in between is refused as always."""
    model = small()
    sync = mpisparse.GradientSync(model, scheme=scheme, accumulate="backward")
    ledger = Ledger(comm, model, sync)
    for step in range(4):
        model.zero_grad()
        if comm.rank != step % comm.size:
            loss_of(model, seeded(comm.rank, step)).backward()
        assert "call backward() first" in raised(comm, GradientError, sync.step)
        loss_of(model, seeded(comm.rank, step + 100)).backward()
        ledger.step()
    loss_of(model, seeded(comm.rank, 4)).backward()
    assert "a second backward" in raised(comm, GradientError, lambda: loss_of(model, seeded(comm.rank, 5)).backward())
    sync.close()


def test_a_gradient_in_parts_is_refused_where_the_average_cannot_have_it_whole(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="momentum", accumulate="backward")
    assert "step's whole gradient" in raised(comm, ConfigurationError, lambda: sync.no_sync().__enter__())
    loss_of(model, seeded(comm.rank, 0)).backward()
    text = raised(comm, GradientError, lambda: loss_of(model, seeded(comm.rank, 1)).backward())
    assert 'pass accumulate="step"' in text
    sync.close()


def test_a_gradient_in_parts_is_one_gradient(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="momentum")
    with sync.no_sync():
        loss_of(model, seeded(comm.rank, 0)).backward()
    loss_of(model, seeded(comm.rank, 1)).backward()
    whole = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    sync.step()
    assert everywhere(comm, torch.equal(sync.state_dict()["step.mean.average"], np.float32(0.9) * whole.abs()))
    sync.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 0.0}, "alpha must be a number in (0, 1], got 0.0"),
        ({"beta": 1.5}, "beta must be a number in (0, 1], got 1.5"),
        ({"mask": "averages"}, "average"),
        ({"percentile": "sorted"}, "exact"),
        ({"compensate": "no"}, "compensate must be True or False, got 'no'"),
        ({"scorer": "magnitude"}, 'scorer must be "average"'),
        ({"reduce": "allreduce"}, 'codec must be "fp32"'),
    ],
)
def test_options_are_checked(comm: MPI.Intracomm, options: dict[str, Any], words: str) -> None:
    text = raised(comm, ConfigurationError, lambda: mpisparse.GradientSync(small(), scheme="momentum", **options))
    assert words in text


def test_a_state_of_another_kind_is_refused(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="momentum")
    n = sync.residual.numel()
    damages: dict[str, tuple[dict[str, Any], str]] = {
        "short": ({"step.mean.average": torch.zeros(n - 1)}, "the average in the state"),
        "negative": ({"step.mean.average": torch.full((n,), -1.0)}, "the average in the state"),
        "outside": ({"step.blend.index": torch.tensor([n]), "step.blend.value": torch.ones(1)}, "still being sent"),
        "no number": ({"step.step": "x"}, "step in the state is malformed"),
        "no borders": ({"step.borders": torch.zeros(0, dtype=torch.int64)}, "borders"),
        "no threshold": ({"step.controller.threshold": float("nan")}, "controller's threshold"),
        "unsorted": ({"step.blend.index": torch.tensor([3, 2]), "step.blend.value": torch.ones(2)}, "still being sent"),
    }
    for change, words in damages.values():
        state = {**sync.state_dict(), **change}
        assert words in raised(comm, ConfigurationError, lambda state=state: sync.load_state_dict(state))
    sync.close()


# As it is used


@pytest.mark.ranks(2)
def test_adam_with_a_schedule(comm: MPI.Intracomm) -> None:
    """On digits, compared with dense Adam with the same schedule, batches and seeds."""
    images, labels = digits()
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(9))
    images, labels = images[mixed], labels[mixed]
    share = 48 // comm.size

    def accuracy(scheme: str) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
            nn.Linear(64, 10),
        )  # fmt: skip
        sync = mpisparse.GradientSync(model, scheme=scheme)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=360)
        handle = mpisparse.attach(optimizer, sync)
        for epoch in range(12):
            order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))
            for start in range(comm.rank * share, 1440, 48):
                batch = order[start : start + share]
                optimizer.zero_grad()
                cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                schedule.step()
        assert alike(comm, model.parameters())
        handle.remove()
        sync.close()
        with torch.no_grad():
            return float((model(images[1440:]).argmax(1) == labels[1440:]).float().mean())

    dense, sparse = accuracy("dense"), accuracy("momentum")
    assert dense >= 0.9
    assert sparse >= dense - 0.05
