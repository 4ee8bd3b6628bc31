"""Scheme drift by nodes: a node is one worker, whose ranks have the same weights. Ranks 0 to K-1 are a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drifting import Training
from mpi4py import MPI
from ranks import alike, bits, everywhere, loss_of, raised, seeded, small, total

import mpisparse
from mpisparse import checkpoint
from mpisparse.comm.hierarchy import RANKS_PER_NODE

pytestmark = pytest.mark.mpi

CASES: dict[str, dict[str, Any]] = {
    "sparse": {"density": 0.05, "rate": 1.7},
    "sparse, every third, int4": {"density": 0.05, "every": 3, "codec": "int4", "rate": 1.0},
    "in groups": {"density": 0.3, "by": "groups"},
    "whole": {"density": 1.0},
    "whole, every second": {"density": 1.0, "every": 2, "rate": 1.5, "spread": False},
    "in three parts": {"density": 1.0, "every": 3, "rate": 0.8},
    "a dense start": {"density": 0.05, "dense_steps": 3, "every": 2},
}


class ByNode(Training):
    """Nodes of some ranks."""

    def __init__(self, comm: MPI.Intracomm, **options: Any) -> None:
        super().__init__(comm, **{"kind": torch.optim.AdamW, "hierarchy": "node", **options})
        self.aggregator: Any = self.sync._aggregator

    def remembered(self) -> torch.Tensor:
        """e of all owners; collective."""
        if self.sync.ranks_a_node == 1:
            return super().remembered()
        every = np.zeros(len(self.own))
        every[self.aggregator.owned()] = self.aggregator.works.reducer.error
        return torch.from_numpy(self.comm.allreduce(every))


@pytest.fixture(params=["half", "all"])
def ranks_a_node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, comm: MPI.Intracomm) -> int:
    """Half of an even number of ranks on each of two nodes (of two ranks: one on each), or all of them on one."""
    ranks = comm.size if request.param == "all" or comm.size % 2 else comm.size // 2
    monkeypatch.setenv(RANKS_PER_NODE, str(ranks))
    return ranks


@pytest.fixture(params=[True, False], ids=["shared memory", "messages"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the ranks of a node can share memory."""
    if not request.param:
        monkeypatch.setattr("mpisparse.comm.shared_rows.PLACE", Path("/nowhere"))
    return bool(request.param)


def same_in_nodes(comm: MPI.Intracomm, run: Training, ranks: int) -> bool:
    """Tell whether the ranks of each node have the same weights, and the same state of the optimizer; collective."""
    states = [t for s in run.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    every = comm.allgather(bits([*run.model.parameters(), *states]))
    return everywhere(comm, all(every[rank] == every[rank // ranks * ranks] for rank in range(comm.size)))


@pytest.mark.singles
@pytest.mark.parametrize("case", CASES)
def test_nodes_stay_one_worker_and_nothing_is_lost(comm: MPI.Intracomm, ranks_a_node: int, memory: bool, case: str) -> None:
    """G is the same on all ranks, W on those of a node; at rate 1 an exchange leaves the mean of W + e as it was."""
    run = ByNode(comm, **{**CASES[case], "rate": 1.0})
    steps: Any = run.sync._aggregator.one_step
    for _ in range(7):
        found: list[torch.Tensor] = []

        def spied(*args: Any, found: list[torch.Tensor] = found) -> Any:
            found.append(total(comm, run.own) / comm.size + run.remembered())
            delivered = steps(*args)
            found.append(total(comm, run.own) / comm.size + run.remembered())
            return delivered

        run.sync._aggregator.one_step = spied  # type: ignore[method-assign]
        run.step()
        assert everywhere(comm, not found or float((found[0] - found[1]).abs().max()) < 1e-6)
        assert alike(comm, [run.shared()])
        assert same_in_nodes(comm, run, ranks_a_node)
    assert everywhere(comm, run.aggregator.number > 0)
    run.sync.synchronize()
    assert alike(comm, run.model.parameters())
    assert everywhere(comm, not run.sync.residual.any() and not run.remembered().any())
    run.step()
    run.sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", ["whole", "whole, every second"])
def test_a_node_is_a_rank_with_the_mean_of_its_gradients(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Compared with two ranks without nodes, each with the mean gradient of a node; all elements in float32."""
    if comm.size % 2:
        pytest.skip("needs two equal nodes")
    ranks = comm.size // 2
    monkeypatch.setenv(RANKS_PER_NODE, str(ranks))
    options = {**CASES[case], "codec": "fp32"}
    run = ByNode(comm, kind=torch.optim.SGD, **options)
    part = comm.Split(comm.rank % ranks, comm.rank)
    twin = small()
    other = mpisparse.GradientSync(twin, scheme="drift", comm=part, **options)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    mpisparse.attach(optimizer, other)
    for step in range(4):
        run.step()
        optimizer.zero_grad()
        node = comm.rank // ranks * ranks
        sum(loss_of(twin, seeded(rank, step)) for rank in range(node, node + ranks)).div(ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
        for p, q in zip(run.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    run.sync.close()
    other.close()
    part.Free()


@pytest.mark.mpi(min_size=4)
def test_bytes_between_nodes_and_inside_are_counted_apart(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    received = {}
    for ranks in (1, 2):
        monkeypatch.setenv(RANKS_PER_NODE, str(ranks))
        run = ByNode(comm, density=1.0, codec="int4")
        for _ in range(3):
            run.step()
        received[ranks] = run.sync.stats.bytes_received
        assert everywhere(comm, (run.sync.stats.node_bytes > 2 * 4 * 1285) == (ranks == 2))
        run.sync.close()
    assert everywhere(comm, received[2] < 0.6 * received[1]), received


@pytest.mark.mpi(min_size=2)
def test_ranks_of_a_node_that_differ_are_told(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_NODE, str(comm.size))
    run = ByNode(comm, density=0.1)
    run.optimizer.param_groups[0]["lr"] = 0.01 * (1 + comm.rank)
    assert "the ranks of a node have different weights" in raised(comm, mpisparse.GradientError, run.step)
    run.sync.close()


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_cannot_do_is_raised_on_all(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    run = ByNode(comm, density=0.1)
    run.step()
    run.optimizer.zero_grad()
    run.loss().backward()
    grads = [p.grad for p in run.model.parameters()]
    if comm.rank == comm.size - 1 and grads[0] is not None:
        grads[0][0, 0] = float("nan")
    if ranks_a_node > 1:
        before = bits(run.model.parameters())
        said = raised(comm, mpisparse.NonFiniteGradientError, run.optimizer.step)
        assert f"rank {comm.size - 1} has a non-finite gradient in 0.weight (flat index 0)" in said
        assert everywhere(comm, bits(run.model.parameters()) == before)
        run.step()
    next(iter(run.model.parameters())).data[0, 0] = float("inf") if comm.rank // ranks_a_node == 0 else 0.0
    said = raised(comm, mpisparse.NonFiniteGradientError, run.step)
    assert "non-finite weight in 0.weight (flat index 0)" in said or ranks_a_node > 1, said
    run.sync.close()


def test_a_scaler_and_uneven_batches(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    """An infinity on one rank skips the step on all; a rank without batches takes part with zeros."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    run = ByNode(comm, scaler=scaler, density=0.2, every=2)
    for step in range(4):
        run.optimizer.zero_grad()
        scaler.scale(run.loss()).backward()
        first = next(iter(run.model.parameters()))
        if step == 1 and comm.rank == comm.size - 1 and first.grad is not None:
            first.grad[0, 0] = float("inf")
        scaler.step(run.optimizer)
        scaler.update()
        run.steps += 1
    assert same_in_nodes(comm, run, ranks_a_node)
    run.sync.close()
    run = ByNode(comm, density=0.2, every=2)
    with run.sync.join():
        for _ in range(2 + 3 * (comm.rank == comm.size - 1)):
            run.step()
    assert same_in_nodes(comm, run, ranks_a_node)
    run.sync.synchronize()
    assert alike(comm, run.model.parameters())
    run.sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staleness": 1}, "leave staleness=1 out"),
        ({"remainder": True}, "leave remainder=True out"),
    ],
)
def test_options_that_do_not_go_together(comm: MPI.Intracomm, options: dict[str, Any], said: str) -> None:
    assert said in raised(comm, mpisparse.ConfigurationError, lambda: ByNode(comm, **options))


@pytest.mark.mpi(min_size=2)
def test_by_hand_it_is_refused(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_NODE, str(comm.size))
    sync = mpisparse.GradientSync(small(), scheme="drift", hierarchy="node")
    assert "attach() the optimizer" in raised(comm, mpisparse.ConfigurationError, sync.step)
    sync.close()


# State


@pytest.mark.singles
@pytest.mark.parametrize("case", CASES)
def test_resumed_is_bitwise_uninterrupted(comm: MPI.Intracomm, ranks_a_node: int, directory: Path, case: str) -> None:
    first, second = (ByNode(comm, **CASES[case]) for _ in range(2))
    for _ in range(4):
        first.step()
    checkpoint.save(directory, step=4, model=first.model, optimizer=first.optimizer, sync=first.sync)
    assert checkpoint.load(directory, model=second.model, optimizer=second.optimizer, sync=second.sync) == 4
    second.steps = 4
    assert everywhere(comm, first.bits() == second.bits())
    for _ in range(4):
        first.step()
        second.step()
        assert same_in_nodes(comm, first, ranks_a_node)  # at these rates W moves in an exchange of one node, too
    assert everywhere(comm, first.bits() == second.bits())
    first.sync.close()
    second.sync.close()


LAYOUTS = [(1, 2, 2, 1), (2, 1, 1, 2), (1, 3, 2, 1), (2, 1, 1, 3), (3, 1, 1, 2), (2, 2, 4, 1), (4, 1, 2, 2), (2, 2, 1, 2),
           (1, 2, 2, 2), (2, 2, 1, 4)]  # fmt: skip


@pytest.mark.singles
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", ["sparse", "whole, every second", "in three parts"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda sizes: "{}x{}-{}x{}".format(*sizes))
def test_nodes_and_ranks_a_node_may_change(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, directory: Path, layout: tuple[int, ...], case: str
) -> None:
    """G is the same before and after, and so is the mean of what nodes still have to add; then training goes on."""
    old, new = layout[0] * layout[1], layout[2] * layout[3]
    if max(old, new) > comm.size:
        pytest.skip("needs more ranks")
    kept = torch.zeros(2, 2570, dtype=torch.float64)
    monkeypatch.setenv(RANKS_PER_NODE, str(layout[1]))
    part = comm.Split(int(comm.rank < old), comm.rank)
    if comm.rank < old:
        run = ByNode(part, **CASES[case])
        for _ in range(5):
            run.step()
        kept = torch.stack([run.shared().double(), total(part, run.own) / old + run.remembered()])
        checkpoint.save(directory, step=5, model=run.model, optimizer=run.optimizer, sync=run.sync)
        run.sync.close()
    kept = comm.bcast(kept)
    part.Free()
    monkeypatch.setenv(RANKS_PER_NODE, str(layout[3]))
    part = comm.Split(int(comm.rank < new), comm.rank)
    if comm.rank < new:
        run = ByNode(part, **CASES[case])
        assert checkpoint.load(directory, model=run.model, optimizer=run.optimizer, sync=run.sync) == 5
        assert run.sync.ranks_a_node == layout[3]
        assert everywhere(part, run.aggregator.number >= 2)
        now = torch.stack([run.shared().double(), total(part, run.own) / new + run.remembered()])
        assert everywhere(part, torch.allclose(now, kept, rtol=1e-5, atol=1e-6)), (now - kept).abs().max(dim=1)
        assert same_in_nodes(part, run, layout[3])
        run.steps = 5
        for _ in range(4):
            run.step()
            assert alike(part, [run.shared()])
            assert same_in_nodes(part, run, layout[3])
        run.sync.close()
    part.Free()
