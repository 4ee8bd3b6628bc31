"""The baselines against plain NumPy, and the laws that every scheme obeys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from oracle import SENT
from ranks import PATHS, everywhere, loss_of, raised, seeded, small, total, train_lawfully
from torch import nn

import mpisparse
from mpisparse.errors import ConfigurationError

pytestmark = pytest.mark.mpi

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

BASELINES = ["topk", "cltk", "randomk", "threshold", "sidco", "dgc"]
both_paths = pytest.mark.parametrize("path", PATHS)
every_baseline = pytest.mark.parametrize("scheme", BASELINES)


class Twin:
    """All ranks of a baseline in one process."""

    def __init__(self, scheme: str, n: int, size: int, k: int, codec: str) -> None:
        self.scheme, self.n, self.size, self.k, self.sent = scheme, n, size, k, SENT[codec]
        self.acc, self.velocity = np.zeros((2, size, n), np.float32)
        self.thresholds: list[np.float32] = []
        self.stages, self.ratios = [1] * size, [[] for _ in range(size)]
        self.t = 0

    def picks(self) -> list[Ints]:
        """Return what each rank selects."""
        largest = [np.argsort(np.abs(acc), kind="stable")[self.n - self.k :] for acc in self.acc]
        if self.scheme == "topk":
            return largest
        if self.scheme == "cltk":
            return [index if r == self.t % self.size else index[:0] for r, index in enumerate(largest)]
        if self.scheme == "randomk":
            lot = np.random.Generator(np.random.Philox(key=[0, self.t])).choice(self.n, self.k, False, shuffle=False)
            return [lot] * self.size
        if self.scheme == "dgc":  # so few elements are all in the sample
            kept = [np.abs(acc) >= np.sort(np.abs(acc))[self.n - self.k] for acc in self.acc]
            return [np.flatnonzero(mask) for mask in kept]
        if self.scheme == "sidco":
            return [self.by_fit(r) for r in range(self.size)]
        if not self.thresholds:
            self.thresholds = [np.sort(np.abs(acc))[self.n - self.k] for acc in self.acc]
        return [np.flatnonzero(np.abs(a) >= t) for a, t in zip(self.acc, self.thresholds, strict=True)]

    def by_fit(self, rank: int) -> Ints:
        """Select above the threshold of a multi-stage exponential fit (a quarter per stage), then adapt the stages."""
        magnitude, stages, share = np.abs(self.acc[rank]), self.stages[rank], self.k / self.n
        tail = magnitude.astype(np.float64)
        threshold = tail.mean() * np.log(1 / min(1.0, 0.25 if stages > 1 else share))
        for stage in range(1, stages):
            tail = tail[tail >= np.float32(threshold)]
            rest = 0.25 if stage < stages - 1 else share / 0.25 ** (stages - 1)
            threshold += (tail.mean() - threshold) * np.log(1 / rest)
        picked = np.flatnonzero(magnitude >= np.float32(threshold))
        self.ratios[rank].append(len(picked) / self.k)
        if len(self.ratios[rank]) == 5:
            most = int(np.ceil(np.log(share) / np.log(0.25)))
            if abs(np.mean(self.ratios[rank]) - 1) > 0.2:
                self.stages[rank] = stages + 1 if stages < most else 1
            self.ratios[rank] = []
        return picked

    def step(self, gradients: list[Floats]) -> tuple[Floats, Ints]:
        """Return the published mean and the number of elements that each rank selected."""
        self.velocity = np.float32(0.9 if self.scheme == "dgc" else 0.0) * self.velocity + np.stack(gradients)
        self.acc += self.velocity
        picks = self.picks()
        union = np.unique(np.concatenate(picks))
        self.velocity[:, union] = 0
        mean = np.zeros(self.n, np.float32)
        for owner in range(self.size):
            part = union[owner * len(union) // self.size : (owner + 1) * len(union) // self.size]
            arrived = [self.sent(acc[part]) for acc in self.acc]
            summed = arrived[0].copy()
            for row in arrived[1:]:
                summed += row
            back = self.sent(summed)
            for r in range(self.size):
                self.acc[r, part] -= arrived[r]
            self.acc[owner, part] += summed - back
            mean[part] = back / np.float32(self.size)
        self.t += 1
        return mean, np.array([len(index) for index in picks])


@both_paths
@every_baseline
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.pairs
def test_the_whole_step_against_numpy(comm: MPI.Intracomm, scheme: str, path: str, codec: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme=scheme, density=0.03, codec=codec, accumulate=path)
    twin = Twin(scheme, sync.residual.numel(), comm.size, sync.k, codec)
    for step in range(14):
        model.zero_grad()
        loss = loss_of(model, seeded(comm.rank, step))
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        sync.step()
        expected, picked = twin.step(comm.allgather(torch.cat([g.reshape(-1) for g in grads]).numpy()))
        published = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
        assert everywhere(comm, np.array_equal(published, expected)), f"step {step}"
        assert everywhere(comm, np.array_equal(sync.residual.numpy(), twin.acc[comm.rank])), f"step {step}"
        assert everywhere(comm, sync.stats.selected >= picked.max())
        if scheme != "randomk":
            assert everywhere(comm, sorted(sync.stats.workloads) == sorted(picked.tolist()))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    sync.close()


@every_baseline
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": "backward"}, {"codec": "int8"}, {"codec": "momentum-int8"}, {"density": 1.0}], ids=str
)
@pytest.mark.singles
def test_nothing_is_lost_and_replicas_are_equal(comm: MPI.Intracomm, scheme: str, options: dict[str, Any]) -> None:
    model = small()
    gradient_adds_up = {"factor": 0.0} if scheme == "dgc" else {}
    sync = mpisparse.GradientSync(model, scheme=scheme, **{"density": 0.02, **gradient_adds_up, **options})
    train_lawfully(comm, model, sync, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_of, 8)


@every_baseline
@pytest.mark.parametrize("width", [1, 30])
def test_density_one_is_dense(comm: MPI.Intracomm, scheme: str, width: int) -> None:
    """Everything is sent and the mean is published, also with fewer elements than ranks."""
    model = nn.Linear(width, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=1.0)
    model(torch.randn(4, width, generator=seeded(comm.rank, 0))).square().mean().backward()
    expected = total(comm, model.weight.grad.double()) / comm.size
    sync.step()
    assert everywhere(comm, torch.allclose(model.weight.grad.double(), expected, rtol=1e-5))
    sync.close()


def test_what_builds_up_and_what_does_not(comm: MPI.Intracomm) -> None:
    """Ranks with different data select different elements, so local top-k sends more with more ranks."""
    built = {}
    for scheme in ("exdyna", "topk", "cltk", "randomk"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 64))
        sync = mpisparse.GradientSync(model, scheme=scheme, density=0.02)
        for step in range(6):
            model.zero_grad()
            x = torch.randn(4, 64, generator=seeded(comm.rank, step))
            (model(x) - x).square().mean().backward()
            sync.step()
        built[scheme] = sync.stats.build_up
        sync.close()
    assert built["exdyna"] == pytest.approx(1.0, abs=0.02)
    assert built["cltk"] == built["randomk"] == pytest.approx(1.0, abs=1e-9)
    assert 1.0 + 0.2 * (comm.size - 1) <= built["topk"] <= comm.size


def test_dgc_clips_the_local_gradient(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="dgc", density=1.0, clip=0.01)
    loss_of(model, seeded(comm.rank, 0)).backward()
    own = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    most = 0.01 / np.sqrt(comm.size)
    assert everywhere(comm, own.norm() > most)
    expected = total(comm, own * (most / own.norm())) / comm.size
    sync.step()
    published = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    assert everywhere(comm, torch.allclose(published, expected, rtol=1e-4, atol=1e-9))
    sync.close()


def test_dgc_warms_up(comm: MPI.Intracomm) -> None:
    torch.manual_seed(5)
    model = nn.Linear(300, 200)
    sync = mpisparse.GradientSync(model, scheme="dgc", density=0.001, warm_up=4)
    picked, set_ = [], []
    for step in range(6):
        model.zero_grad()
        model(torch.randn(4, 300, generator=seeded(comm.rank, step))).square().mean().backward()
        sync.step()
        picked.append(max(sync.stats.workloads) / sync.residual.numel())
        set_.append(sync.stats.set_density)
    wanted = [0.25 * (0.001 / 0.25) ** (t / 4) for t in range(4)] + [0.001, 0.001]
    assert everywhere(comm, all(0.3 * w <= p <= 1.4 * w for p, w in zip(picked, wanted, strict=True))), picked
    assert set_ == pytest.approx(wanted, rel=0.01)
    sync.close()


@pytest.mark.parametrize("scheme", ["threshold", "sidco", "dgc"])
def test_zeros_are_not_sent_to_fill_up(comm: MPI.Intracomm, scheme: str) -> None:
    model = nn.Linear(400, 20, bias=False)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=0.05)
    for step in range(3):
        model.zero_grad()
        few = torch.zeros(20, 400)
        few.reshape(-1)[torch.randint(0, 8000, (30,), generator=seeded(0, step))] = 1.0 if step else 0.0
        (model.weight * few).sum().backward()
        sync.step()
        assert everywhere(comm, sync.stats.selected <= 60)
    sync.close()


def test_a_fixed_threshold_is_of_the_density_set_at_first(comm: MPI.Intracomm) -> None:
    model = nn.Linear(400, 20, bias=False)
    sync = mpisparse.GradientSync(model, scheme="threshold", density=0.01)
    for density in (1.0, 0.01):  # as a warm-up does
        sync.density = density
        model.zero_grad()
        (model.weight * torch.randn(20, 400, generator=seeded(comm.rank, 0))).sum().backward()
        sync.step()
    assert everywhere(comm, 2.0 < sync.stats.threshold < 3.5), "of a normal distribution, 0.01 lie beyond 2.58"
    sync.close()


def test_the_threshold_is_the_same_on_all_ranks(comm: MPI.Intracomm) -> None:
    for scheme in BASELINES:
        model = small()
        sync = mpisparse.GradientSync(model, scheme=scheme, density=0.05)
        loss_of(model, seeded(comm.rank, 0)).backward()
        sync.step()
        assert len(set(comm.allgather(sync.stats.threshold))) == 1
        sync.close()


def test_what_is_not_compensated_is_dropped(comm: MPI.Intracomm) -> None:
    for scheme in BASELINES:
        model = small()
        sync = mpisparse.GradientSync(model, scheme=scheme, density=0.05, compensate=False)
        loss_of(model, seeded(comm.rank, 0)).backward()
        sync.step()
        assert everywhere(comm, not sync.residual.any())
        sync.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "threshold", "threshold": -1.0}, "threshold must be a number above 0, got -1.0"),
        ({"scheme": "randomk", "seed": 0.5}, "seed must be a whole number >= 0, got 0.5"),
        ({"scheme": "dgc", "factor": 1.0}, "factor must be a number in [0, 1), got 1.0"),
        ({"scheme": "dgc", "clip": 1.0, "accumulate": "backward"}, 'clip needs accumulate="step"'),
        ({"scheme": "topk", "compensate": 1}, "compensate must be True or False, got 1"),
        ({"scheme": "top-k"}, "did you mean 'topk'?"),
        ({"scheme": "cltk", "blocks": 5}, "unknown option 'blocks'"),
    ],
)
def test_options_are_checked(comm: MPI.Intracomm, options: dict[str, Any], words: str) -> None:
    assert words in raised(comm, ConfigurationError, lambda: mpisparse.GradientSync(small(), **options))
