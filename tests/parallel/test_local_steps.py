"""Baselines with local steps and outer steps, diloco and sparseloco, and demo: against plain loops over all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, everywhere, loss_of, raised, seeded, small, total

import mpisparse
from mpisparse.backends.device import load_backend
from mpisparse.schemes.demo.cosines import Cosines
from mpisparse.wire.codecs import CODECS

pytestmark = pytest.mark.mpi


class Training:
    """A small net, its optimizer and the exchange."""

    def __init__(self, comm: MPI.Intracomm, scheme: str, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        self.comm, self.model = comm, small()
        self.sync = mpisparse.GradientSync(self.model, scheme=scheme, **options)
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        mpisparse.attach(self.optimizer, self.sync)
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, seeded(self.comm.rank, self.steps)).backward()
        self.optimizer.step()
        self.steps += 1

    def shared(self) -> torch.Tensor:
        with self.sync.global_weights():
            return flat(self.model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def put(model: torch.nn.Module, values: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(values, model.parameters())


class Ranks:
    """All ranks in one process: a net and an optimizer of each, and the shared weights."""

    def __init__(self, size: int) -> None:
        self.models = [small() for _ in range(size)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.shared, self.steps = flat(self.models[0]), 0

    def train(self, every: int) -> list[torch.Tensor]:
        """Local steps; returns each rank's W - G."""
        for _ in range(every):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss_of(model, seeded(rank, self.steps)).backward()
                optimizer.step()
            self.steps += 1
        return [flat(model) - self.shared for model in self.models]

    def go_on(self) -> None:
        for model in self.models:
            put(model, self.shared.clone())


def close(comm: MPI.Intracomm, a: torch.Tensor, b: torch.Tensor, most: float = 2e-5) -> bool:
    return everywhere(comm, float((a - b).abs().max()) < most)


def test_diloco_does_what_a_plain_loop_does(comm: MPI.Intracomm) -> None:
    run, ranks = Training(comm, "diloco", every=3), Ranks(comm.size)
    outer = torch.nn.Parameter(ranks.shared.clone())
    sgd = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        for _ in range(3):
            run.step()
        outer.grad = -torch.stack(ranks.train(3)).mean(0)
        sgd.step()
        ranks.shared = outer.detach().clone()
        ranks.go_on()
        assert alike(comm, run.model.parameters())  # W = G
        assert everywhere(comm, torch.equal(flat(run.model), run.shared()))
        assert close(comm, run.shared(), ranks.shared)
    run.sync.close()


def test_diloco_without_outer_momentum_conserves_the_mean(comm: MPI.Intracomm) -> None:
    run = Training(comm, "diloco", every=1, codec="sign", outer_rate=1.0, outer_momentum=0.0)
    reducer = run.sync._aggregator.works.reducer
    for _ in range(6):
        run.optimizer.zero_grad()
        loss_of(run.model, seeded(comm.rank, run.steps)).backward()
        twin = copy.deepcopy(run.model)
        other = torch.optim.AdamW(twin.parameters(), lr=0.01)
        other.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        for p, q in zip(twin.parameters(), run.model.parameters(), strict=True):
            p.grad = q.grad
        other.step()
        before = total(comm, flat(twin)) / comm.size + remembered(comm, run.sync)
        run.optimizer.step()
        after = total(comm, flat(run.model)) / comm.size + remembered(comm, run.sync)
        assert everywhere(comm, float((before - after).abs().max()) < 1e-6)
        assert alike(comm, [run.shared()])
        run.steps += 1
    assert reducer is not run.sync._aggregator.works.reducer
    run.sync.close()


def remembered(comm: MPI.Intracomm, sync: Any) -> torch.Tensor:
    reducer = sync._aggregator.works.reducer
    every = np.zeros(len(sync._residual))
    every[reducer.owned(comm.rank, comm.size)] = reducer.error
    return torch.from_numpy(comm.allreduce(every))


def quantised(codec: str, x: torch.Tensor) -> torch.Tensor:
    backend = load_backend()
    payload = np.empty(CODECS[codec].nbytes(len(x)), dtype=np.uint8)
    CODECS[codec].encode(backend, x.numpy().copy(), payload)
    out = np.empty(len(x), dtype=np.float32)
    CODECS[codec].decode(backend, payload, out)
    return torch.from_numpy(out)


def largest(values: torch.Tensor, chunk: int, share: float) -> torch.Tensor:
    """The index of the largest of each chunk, one chunk after the other."""
    found = []
    for begin in range(0, len(values), chunk):
        part = values[begin : begin + chunk].abs()
        found.append(begin + torch.topk(part, max(1, round(share * len(part)))).indices)
    return torch.cat(found).sort().values


@pytest.mark.parametrize("codec", ["fp32", "int2"])
def test_sparseloco_does_what_a_plain_loop_does(comm: MPI.Intracomm, codec: str) -> None:
    options = {"every": 2, "chunk": 500, "density": 0.02, "codec": codec, "outer_rate": 0.8}
    run, ranks = Training(comm, "sparseloco", **options), Ranks(comm.size)
    share = run.sync.k / len(ranks.shared)
    waiting = [torch.zeros(len(ranks.shared)) for _ in range(comm.size)]
    for _ in range(5):
        for _ in range(2):
            run.step()
        sent = []
        for rank, drift in enumerate(ranks.train(2)):
            waiting[rank] = 0.95 * waiting[rank] + drift
            index = largest(waiting[rank], 500, share)
            sent.append(torch.zeros(len(drift)))
            sent[rank][index] = quantised(codec, waiting[rank][index])
            waiting[rank] = waiting[rank] - sent[rank]
        ranks.shared = ranks.shared + 0.8 * torch.stack(sent).mean(0)
        ranks.go_on()
        assert alike(comm, run.model.parameters())
        assert close(comm, run.shared(), ranks.shared, 1e-4)
        ranks.shared = run.shared().clone()  # of nearly equal elements, rounding decides
        ranks.go_on()
        mine: Any = run.sync._aggregator.works.scorer
        waiting = [torch.from_numpy(w) for w in comm.allgather(mine.waiting)]
    assert everywhere(comm, 0.019 < run.sync.stats.density < 0.025)
    run.sync.close()


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("diloco", {"every": 2, "codec": "int4"}), ("sparseloco", {"every": 2, "density": 0.05}), ("demo", {"density": 0.05})],
)
def test_a_checkpoint_goes_on_with_the_same_bits(comm: MPI.Intracomm, tmp_path: Path, scheme: str, options: Any) -> None:
    directory = Path(comm.bcast(str(tmp_path)))
    kind = torch.optim.SGD if scheme == "demo" else torch.optim.AdamW
    run = Training(comm, scheme, kind, **options)
    for _ in range(5):
        run.step()
    mpisparse.checkpoint.save(directory, step=5, model=run.model, optimizer=run.optimizer, sync=run.sync)
    other = Training(comm, scheme, kind, **options)
    other.step()
    assert mpisparse.checkpoint.load(directory, model=other.model, optimizer=other.optimizer, sync=other.sync) == 5
    other.steps = 5
    for each in (run, other):
        for _ in range(5):
            each.step()
    assert everywhere(comm, bits(run.model.parameters()) == bits(other.model.parameters()))
    assert everywhere(comm, torch.equal(run.shared(), other.shared()))
    run.sync.close()
    other.sync.close()


@pytest.mark.parametrize("scheme", ["diloco", "sparseloco"])
def test_synchronize_gives_all_that_waits(comm: MPI.Intracomm, scheme: str) -> None:
    run = Training(comm, scheme, every=2, codec="int4")
    for _ in range(5):
        run.step()
    mine: Any = run.sync._aggregator.works.scorer
    waiting = torch.from_numpy(mine.waiting.copy()).double() if scheme == "sparseloco" else remembered(comm, run.sync)
    mean = total(comm, flat(run.model).double() + waiting) / comm.size
    run.sync.synchronize()
    assert alike(comm, run.model.parameters())
    assert everywhere(comm, float((flat(run.model) - mean).abs().max()) < 1e-6)
    run.step()
    run.sync.close()


@pytest.mark.parametrize("path", ["step", "backward"])
def test_demo_does_what_a_plain_loop_does(comm: MPI.Intracomm, path: str) -> None:
    model, twin = small(), small()
    sync = mpisparse.GradientSync(model, scheme="demo", density=0.02, chunk=16, decay=0.9, accumulate=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mpisparse.attach(optimizer, sync)
    cosines = Cosines(sync._layout.slots, 16)
    momenta = [torch.zeros(len(sync.residual)) for _ in range(comm.size)]
    share = sync.k / len(sync.residual)
    for step in range(8):
        put(twin, flat(model).clone())
        for net in (twin, model):
            net.zero_grad()
            loss_of(net, seeded(comm.rank, step)).backward()
        grads = comm.allgather(torch.cat([p.grad.reshape(-1) for p in twin.parameters() if p.grad is not None]).numpy())
        optimizer.step()
        sent = []
        for rank, grad in enumerate(grads):
            momenta[rank] = 0.9 * momenta[rank] + torch.from_numpy(grad)
            waves = cosines.forward(momenta[rank])
            chosen = torch.zeros_like(waves)
            for begin, end, length in cosines.stretches:
                for at in range(begin, end, length):
                    index = at + torch.topk(waves[at : at + length].abs(), max(1, round(share * length))).indices
                    chosen[index] = waves[index]
            sent.append(chosen)
            momenta[rank] = momenta[rank] - cosines.inverse(chosen)
        expected = cosines.inverse(torch.stack(sent).double().mean(0))
        published = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        sure = expected.abs() > 1e-7
        assert everywhere(comm, torch.equal(published[sure], expected.sign().float()[sure]))
        assert close(comm, sync.residual, momenta[comm.rank], 1e-6)
        assert alike(comm, model.parameters())
    assert everywhere(comm, sync.stats.bytes_received < 4 * len(sync.residual) * comm.size)
    sync.close()


@pytest.mark.parametrize("chunk", [4, 5, 64])
def test_cosines_keep_lengths_and_return(chunk: int) -> None:
    sync = mpisparse.GradientSync(torch.nn.Sequential(torch.nn.Conv2d(3, 7, 3), torch.nn.Linear(13, 6)), scheme="demo")
    cosines, x = Cosines(sync._layout.slots, chunk), torch.randn(len(sync.residual), generator=seeded(0, 0))
    waves = cosines.forward(x)
    torch.testing.assert_close(cosines.inverse(waves), x)
    torch.testing.assert_close(waves.norm(), x.norm())
    for slot in sync._layout.slots:  # a constant is one wave in each tile
        flat_slot = torch.zeros(len(x))
        flat_slot[slot.begin : slot.end] = 1.0
        tiles = sum((s.end - s.begin) // s.length for s in cosines.stretches if slot.begin <= s.begin < slot.end)
        assert int((cosines.forward(flat_slot).abs() > 1e-5).sum()) == tiles
    sync.close()


def test_a_wave_that_all_ranks_have_is_sent_whole() -> None:
    """One tile, one coefficient: nothing of it is left in the momentum."""
    aggregator = mpisparse.aggregator(64, scheme="demo", density=1 / 64)
    wave = torch.cos(torch.pi / 64 * 3 * (torch.arange(64) + 0.5))
    mean = aggregator.step(wave.contiguous())
    assert torch.equal(mean, wave.sign())
    assert float(aggregator.residual.abs().max()) < 1e-6
    aggregator.close()


def test_what_cannot_be_is_refused(comm: MPI.Intracomm) -> None:
    model = small()

    def said(scheme: str, net: Any = model, **options: Any) -> str:
        return raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(net, scheme=scheme, **options))

    assert "density must be 1" in said("diloco", density=0.5)
    assert "outer_momentum must be a number in [0, 1)" in said("diloco", outer_momentum=1.0)
    assert "outer_rate must be a number above 0" in said("sparseloco", outer_rate=0.0)
    assert "feedback must be" in said("sparseloco", feedback=-0.1)
    assert "chunk must be a whole number >= 1" in said("sparseloco", chunk=0)
    assert "every must be a whole number >= 1" in said("diloco", every=0)
    assert "leave accumulate out" in said("sparseloco", accumulate="backward")
    assert "without momentum-" in said("diloco", codec="momentum-int8")
    assert 'scheme "diloco" needs float32 weights' in said("diloco", small().bfloat16())
    assert "decay must be" in said("demo", decay=0.0)
    assert "cannot average a plain vector" in raised(
        comm, mpisparse.ConfigurationError, lambda: mpisparse.aggregator(10, scheme="sparseloco")
    )


def test_weights_that_are_not_finite_change_nothing(comm: MPI.Intracomm) -> None:
    run = Training(comm, "sparseloco", torch.optim.SGD, every=1, density=0.1)
    run.step()
    mine: Any = run.sync._aggregator.works.scorer
    before, waiting = run.shared().clone(), mine.waiting.copy()
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            next(iter(run.model.parameters()))[0, 0] = float("inf")
    loss_of(run.model, seeded(comm.rank, 1)).backward()
    raised(comm, mpisparse.NonFiniteGradientError, run.optimizer.step)
    assert everywhere(comm, torch.equal(run.shared(), before) and np.array_equal(mine.waiting, waiting))
    run.sync.close()
