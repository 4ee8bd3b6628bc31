"""Dense exchange with every codec: error feedback both ways, at the ranks and at the owners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import Ledger, alike, everywhere, held, loss_of, seeded, small, total

import mpisparse
from mpisparse.wire.codecs import codec_names

pytestmark = pytest.mark.mpi

LOSSY = [name for name in codec_names(blended=False) if name != "fp32"]


@pytest.mark.parametrize("path", ["step", "backward"])
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.singles
def test_conservation_and_replicas(comm: MPI.Intracomm, codec: str, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="dense", codec=codec, accumulate=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ledger = Ledger(comm, model, sync)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        ledger.step()
        assert everywhere(comm, sync.stats.density == 1.0)
        optimizer.step()
        assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.parametrize(("kind", "path"), [(torch.float32, "step"), (torch.bfloat16, "backward")], ids=str)
def test_freezing_midway_loses_nothing(comm: MPI.Intracomm, kind: torch.dtype, path: str) -> None:
    model = small().to(kind)
    sync = mpisparse.GradientSync(model, scheme="dense", codec="int4", accumulate=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    last = model[2]
    assert isinstance(last, torch.nn.Linear)
    waiting = None
    for step in range(9):
        last.weight.requires_grad_(not 3 <= step < 6)
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=seeded(comm.rank, step)).to(kind)
        model(x).square().mean().backward()
        sync.step()
        optimizer.step()
        held_back = total(comm, held(sync))[-1020:-20]  # of last.weight
        if waiting is not None and 3 <= step < 6:
            torch.testing.assert_close(held_back, waiting, rtol=1e-4, atol=1e-8)
        waiting = held_back
        assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.parametrize("codec", LOSSY)
def test_what_a_codec_leaves_arrives_later(comm: MPI.Intracomm, codec: str) -> None:
    """The mean of many steps with the same vector tends to the vector's mean, faster than one over the square root."""
    n, steps = 5000, 64
    mine = torch.randn(n, generator=torch.Generator().manual_seed(comm.rank))
    aggregator = mpisparse.aggregator(n, scheme="dense", codec=codec)
    arrived = torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        arrived += aggregator.step(mine).double()
    mean = total(comm, mine) / comm.size
    off = float((arrived / steps - mean).norm() / mean.norm())
    assert everywhere(comm, off < 0.25), f"{codec}: {off:.3f} of the mean is missing"
    assert alike(comm, [arrived])
    aggregator.close()


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_a_state_goes_on_with_the_same_bits(comm: MPI.Intracomm, codec: str) -> None:
    vectors = [torch.randn(3000, generator=torch.Generator().manual_seed(10 * s + comm.rank)) for s in range(6)]
    one, other = (mpisparse.aggregator(3000, scheme="dense", codec=codec) for _ in range(2))
    for vector in vectors[:3]:
        one.step(vector)
    other.check(one.state())
    other.load({key: np.array(v) if isinstance(v, np.ndarray) else v for key, v in one.state().items()})
    other.residual.copy_(one.residual)
    for vector in vectors[3:]:
        assert everywhere(comm, torch.equal(one.step(vector), other.step(vector)))
    one.close()
    other.close()


def test_a_sum_beyond_float32_is_refused_on_all_ranks(comm: MPI.Intracomm) -> None:
    aggregator = mpisparse.aggregator(1000, scheme="dense", codec="bf16", comm=comm)
    vector = torch.zeros(1000)
    vector[700] = 3e38
    if comm.size == 1:
        aggregator.close()
        pytest.skip("one summand cannot overflow")
    with pytest.raises(mpisparse.NonFiniteGradientError, match="beyond what float32 holds"):
        aggregator.step(vector)
    aggregator.close()


def test_dense_float32_keeps_nothing_and_needs_no_accumulator(comm: MPI.Intracomm) -> None:
    """Gradients go straight to where the mean goes; what waits in the accumulator, as after a load, still counts."""
    aggregator = mpisparse.aggregator(4000, scheme="dense")
    mine = torch.randn(4000, generator=torch.Generator().manual_seed(comm.rank))
    expected = total(comm, mine) / comm.size
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(aggregator.step(mine).double(), expected, **close)
    aggregator.load(aggregator.state())
    aggregator.residual.copy_(2 * mine)
    torch.testing.assert_close(aggregator.step(mine).double(), 3 * expected, **close)
    assert everywhere(comm, not aggregator.residual.any())
    torch.testing.assert_close(aggregator.step(mine).double(), expected, **close)
    aggregator.close()


@pytest.mark.parametrize("codec", ["int4", "int2", "sign"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_fewer_elements_than_ranks(comm: MPI.Intracomm, codec: str, n: int) -> None:
    """Owners of nothing take part, and nothing is lost."""
    aggregator = mpisparse.aggregator(n, scheme="dense", codec=codec)
    given, published = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(4):
        vector = torch.randn(n, generator=seeded(comm.rank, step))
        mean = aggregator.step(vector)
        assert alike(comm, [mean])
        given, published = given + vector, published + mean
    waits, state = aggregator.residual.double().clone(), aggregator.state()
    if "error" in state:
        reducer: Any = aggregator.works.reducer
        waits[reducer.owned(comm.rank, comm.size)] += comm.size * torch.from_numpy(np.array(state["error"])).double()
    off = (total(comm, given) - comm.size * published - total(comm, waits)).abs().max()
    assert everywhere(comm, float(off) < 1e-4), float(off)
    aggregator.close()
