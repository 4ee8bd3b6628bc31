"""Nodes first: gradients are summed inside a node, and only the nodes' sums are exchanged. Ranks 0 to K-1 are a node."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, everywhere, in_memory_order, loss_of, published, raised, seeded, small, total, trainable
from ranks import held as flat_waiting
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.comm.hierarchy import RANKS_PER_NODE
from mpisparse.errors import ConfigurationError, GradientError, NonFiniteGradientError

pytestmark = pytest.mark.mpi

CODECS = ("fp32", "bf16", "int8", "int4", "int2", "sign")
SCHEMES: list[dict[str, Any]] = [{"scheme": "dense", "codec": codec} for codec in CODECS]
SCHEMES += [{"scheme": "exdyna", "density": 0.05, "codec": codec} for codec in (*CODECS, "momentum-int8")]
SCHEMES += [
    {"scheme": "exdyna", "density": 0.05, "controller": "paper", "partitioner": "paper"},
    {"scheme": "exdyna", "density": 0.05, "reduce": "allreduce"},
    {"scheme": "momentum", "density": 0.05},
    *({"scheme": name, "density": 0.05} for name in ("topk", "cltk", "randomk", "threshold", "sidco")),
    {"scheme": "dgc", "density": 0.05, "factor": 0.0},  # without momentum of its own, of which more arrives than was given
]
LOSSY = ("int2", "sign")


@pytest.fixture(params=["half", "all"])
def ranks_a_node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, comm: MPI.Intracomm) -> int:
    """Half of an even number of ranks on each of two nodes (of two ranks: one on each), or all of them on one."""
    ranks = comm.size if request.param == "all" or comm.size % 2 else comm.size // 2
    monkeypatch.setenv(RANKS_PER_NODE, str(ranks))
    return ranks


@pytest.fixture
def comm() -> MPI.Intracomm:
    return MPI.COMM_WORLD


def nodes_of(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_NODE, str(ranks))


def waiting(sync: mpisparse.GradientSync, of: Any = torch.clone) -> torch.Tensor:
    """What this rank still has to send: its shard of the node's residual, blended elements, and its error as an owner."""
    held = of(sync.residual.double())
    aggregator: Any = sync._aggregator
    if sync.ranks_a_node == 1:
        return flat_waiting(sync, of)
    parts, region, nodes = sync.state_dict()["step.nodes"]["parts"], aggregator.region, aggregator.nodes
    shard = held[region.lo : region.hi]
    if "error" in parts:
        owned = aggregator.works.reducer.owned(nodes.node, nodes.count)
        shard[owned] += of(nodes.count * torch.as_tensor(parts["error"]).double())
    if "blend.index" in parts:
        index, value = (torch.as_tensor(parts[f"blend.{name}"]) for name in ("index", "value"))
        shard[index.long()] += of(parts["blend.pending"] * value.double())
    return held


def step_lawfully(comm: MPI.Intracomm, model: nn.Module, sync: mpisparse.GradientSync, step: int) -> None:
    """Do one step and check that nothing is lost, and that replicas are equal bit by bit. Collective."""
    model.zero_grad()
    loss_of(model, seeded(comm.rank, step)).backward()
    given = torch.cat([in_memory_order(p, p.grad) for p in trainable(model)])
    before = total(comm, waiting(sync)) + total(comm, given)
    magnitude = total(comm, waiting(sync, torch.abs)) + total(comm, given.abs())
    sync.step()
    after = comm.size * published(model) + total(comm, waiting(sync))
    bound = 1e-7 * (comm.size + 8) * magnitude + 1e-42
    if sync.options.codec.endswith(LOSSY):
        bound += 1e-7 * (comm.size + 8) * float(magnitude.max())
    off = (before - after).abs() - bound
    at = int(off.argmax())
    assert alike(comm, [p.grad for p in model.parameters()]), "the ranks have other gradients"
    assert off[at] <= 0, f"element {at}: {before[at]} before the step, {after[at]} after it"


def train(comm: MPI.Intracomm, count: int = 6, **options: Any) -> mpisparse.GradientSync:
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(count):
        step_lawfully(comm, model, sync, step)
        optimizer.step()
        assert alike(comm, model.parameters()), "the replicas differ"
    return sync


@pytest.mark.singles
@pytest.mark.parametrize("options", SCHEMES, ids=lambda o: "-".join(map(str, o.values())))
def test_nothing_is_lost_and_replicas_are_equal(comm: MPI.Intracomm, ranks_a_node: int, options: dict[str, Any]) -> None:
    sync = train(comm, **options)
    assert sync.ranks_a_node == ranks_a_node
    sync.close()


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_nodes_exchange_what_as_many_ranks_would(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """Every shard's mean is that of an aggregator of plain vectors, between ranks that have the nodes' sums."""
    if comm.size % 2:
        pytest.skip("needs nodes of two ranks")
    ranks, n = 2, 2570
    nodes_of(ranks, monkeypatch)
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node", density=0.05, codec=codec)
    region, between = sync._aggregator.region, comm.Split(comm.rank % ranks, comm.rank)  # type: ignore[attr-defined]
    plain = mpisparse.aggregator(region.hi - region.lo, density=0.05, codec=codec, comm=between)
    for step in range(4):
        model.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        rows = comm.allgather(torch.cat([p.grad.reshape(-1) for p in trainable(model)]))  # type: ignore[union-attr]
        node = comm.rank // ranks * ranks
        summed = rows[node] + rows[node + 1]
        sync.step()
        k = int(0.05 * n)
        share = k * region.hi // n - k * region.lo // n
        mean = plain.step(summed[region.lo : region.hi].clone(), share) / ranks
        same = bits([mean + 0.0]) == bits([published(model)[region.lo : region.hi].float() + 0.0])
        assert everywhere(comm, same)
    plain.close()
    sync.close()
    between.Free()


@pytest.mark.singles
@pytest.mark.parametrize("density", [0.01, 0.05, 1.0])
def test_the_density_is_what_is_set(comm: MPI.Intracomm, ranks_a_node: int, density: float) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node", density=density)
    for step in range(8):
        model.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        found = int(torch.cat([p.grad.reshape(-1) for p in trainable(model)]).count_nonzero())
        assert everywhere(comm, found <= sync.stats.selected and sync.stats.density == sync.stats.selected / 2570)
        assert everywhere(comm, abs(sync.stats.selected - density * 2570) <= 0.1 * density * 2570 + 2), sync.stats
    sync.close()


def test_dense_float32_is_the_mean(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="dense", hierarchy="node")
    loss_of(model, seeded(comm.rank, 0)).backward()
    mean = total(comm, torch.cat([p.grad.reshape(-1) for p in trainable(model)])) / comm.size  # type: ignore[union-attr]
    sync.step()
    assert everywhere(comm, torch.allclose(published(model), mean, rtol=1e-6, atol=1e-9))
    sync.close()


def test_a_node_alone_exchanges_nothing(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(comm.size, monkeypatch)
    sync = train(comm, 2, scheme="dense")
    stats = sync.stats
    assert everywhere(comm, stats.bytes_received == stats.bytes_sent == 0)
    shard = sync._aggregator.parts.residual.numel() if sync._nodes is None else sync._nodes.shard.hi - sync._nodes.shard.lo
    sums_and_means = 4 * (shard * (comm.size - 1) + 2570 - shard)  # float32, and a few statuses
    assert everywhere(comm, sums_and_means <= stats.node_bytes <= sums_and_means + 200 * (comm.size - 1))
    sync.close()


@pytest.mark.mpi(min_size=4)
def test_bytes_between_nodes_are_counted_apart(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    received = {}
    for ranks in (1, 2):
        nodes_of(ranks, monkeypatch)
        sync = train(comm, 2, scheme="dense", codec="int4")
        received[ranks] = sync.stats.bytes_received
        sync.close()
    assert everywhere(comm, received[2] < 0.45 * received[1]), received  # flat: 2 x 3/4 of all; by nodes 2 x 1/2 of half


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("hierarchy", ["node", "auto"])
def test_unequal_nodes_fall_back_to_flat(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, hierarchy: str) -> None:
    nodes_of(comm.size - 1, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync = mpisparse.GradientSync(small(), hierarchy=hierarchy)
    said = [str(w.message) for w in caught if "hierarchy" in str(w.message)]
    assert everywhere(comm, sync.ranks_a_node == 1)
    assert everywhere(comm, len(said) == (comm.rank == 0 and hierarchy == "node"))
    assert not said or f"here they have {comm.size - 1}, 1; all ranks exchange" in said[0]
    sync.close()


@pytest.mark.parametrize(("nodes", "expected"), [(1, 1), (2, 2)])
@pytest.mark.mpi(min_size=4)
def test_auto_is_by_node_on_several_equal_nodes(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, nodes: int, expected: int
) -> None:
    nodes_of(comm.size // nodes, monkeypatch)
    sync = mpisparse.GradientSync(small(), hierarchy="auto")
    assert everywhere(comm, sync.ranks_a_node == expected)
    sync.close()


def test_what_the_variable_must_be(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "two", "-1"):
        monkeypatch.setenv(RANKS_PER_NODE, text)
        if comm.size > 1:
            error = raised(comm, ConfigurationError, lambda: mpisparse.GradientSync(small(), hierarchy="node"))
            assert f"{RANKS_PER_NODE} must be the same whole number >= 1 on all ranks, got ['{text}']" in error


# Refusals: all ranks of all nodes raise together


def backward(comm: MPI.Intracomm, model: nn.Module, step: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, seeded(comm.rank, step)).backward()
    return [p.grad for p in trainable(model)]  # type: ignore[misc]


@pytest.mark.singles
@pytest.mark.parametrize("options", [{}, {"scheme": "dense"}, {"scheme": "dense", "codec": "int4"}, {"scheme": "topk"}])
def test_a_value_that_is_not_finite_is_raised_on_all_ranks(
    comm: MPI.Intracomm, ranks_a_node: int, options: dict[str, Any]
) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node", **options)
    backward(comm, model)
    sync.step()
    last = comm.size - 1
    if grads := backward(comm, model, 1):
        grads[2][0, 3] = float("nan") if comm.rank == last else 1.0
    error = raised(comm, NonFiniteGradientError, sync.step)
    assert f"rank {last} has a non-finite gradient in 2.weight (flat index {30 * 50 + 50 + 3})" in error
    backward(comm, model, 2)
    if comm.size == 1 or sync.ranks_a_node > 1 or options.get("scheme", "exdyna") != "exdyna":
        assert "residual is damaged" in raised(comm, GradientError, sync.step)
    else:  # flat on several ranks, where exdyna sees it before anything is added
        sync.step()
    sync.close()


@pytest.mark.singles
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, {"scheme": "dense"}, {"scheme": "dense", "codec": "int8"}])
def test_a_sum_beyond_float32_is_raised_on_all_ranks(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    nodes_of(comm.size, monkeypatch)
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node", **options)
    backward(comm, model)[0][0, 0] = 3e38
    error = raised(comm, NonFiniteGradientError, sync.step)
    assert "the sum over ranks is beyond what float32 holds in 0.weight (flat index 0)" in error
    sync.close()


def test_a_step_is_skipped_on_all_ranks(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node", nonfinite="skip", density=0.05)
    backward(comm, model)[0][0, 0] = float("inf") if comm.rank == comm.size - 1 else 0.0
    sync.step()
    assert everywhere(comm, sync.stats.skipped and not waiting(sync).any())
    step_lawfully(comm, model, sync, 1)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_go_on_is_told_to_all(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node", density=0.05)
    step_lawfully(comm, model, sync, 0)
    model.zero_grad()
    if comm.rank:
        loss_of(model, seeded(comm.rank, 1)).backward()
    assert "step() with no new gradient on rank 0" in raised(comm, GradientError, sync.step)
    step_lawfully(comm, model, sync, 2)
    backward(comm, model)
    sync.density = 0.05 if comm.rank else 0.1
    assert "density must be the same on all ranks" in raised(comm, ConfigurationError, sync.step)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_parameters_frozen_midway_are_refused(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    if ranks_a_node == 1:
        pytest.skip("flat")
    model = small()
    sync = mpisparse.GradientSync(model, hierarchy="node")
    step_lawfully(comm, model, sync, 0)
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    loss_of(model, seeded(comm.rank, 1)).backward()
    assert 'hierarchy="node" cannot freeze parameters midway' in raised(comm, GradientError, sync.step)
    sync.close()


def test_half_types_keep_what_rounding_leaves(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    for options in ({"scheme": "dense"}, {"scheme": "dense", "codec": "int4"}, {"density": 0.05}):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 20).to(torch.bfloat16))
        sync = mpisparse.GradientSync(model, hierarchy="node", **options)  # type: ignore[arg-type]
        for step in range(3):
            generator, given = seeded(comm.rank, step), []
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                given.append(in_memory_order(p, p.grad))
            before = total(comm, waiting(sync) + torch.cat(given))
            sync.step()
            after = comm.size * published(model) + total(comm, waiting(sync))
            assert everywhere(comm, torch.allclose(before, after, rtol=1e-5, atol=1e-5)), (before - after).abs().max()
            assert alike(comm, [p.grad for p in model.parameters()])
        sync.close()


# State


class Run:
    """A model, what trains it, and its checkpoints."""

    def __init__(self, comm: MPI.Intracomm, **options: Any) -> None:
        self.comm, self.model = comm, small()
        self.sync = mpisparse.GradientSync(self.model, comm=comm, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.subjects = {"model": self.model, "sync": self.sync, "optimizer": self.optimizer}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            backward(self.comm, self.model, step)
            self.sync.step()
            self.optimizer.step()

    def bits(self) -> bytes:
        return bits([*self.model.parameters(), self.sync.residual])


RESUMED = [
    {"density": 0.05}, {"scheme": "momentum", "density": 0.05}, {"scheme": "dense", "codec": "int4"},
    {"scheme": "topk", "density": 0.05}, {"scheme": "dgc", "density": 0.05}, {"scheme": "sidco", "density": 0.05},
]  # fmt: skip


@pytest.mark.singles
@pytest.mark.parametrize("options", RESUMED, ids=lambda o: "-".join(map(str, o.values())))
def test_a_resumed_run_is_the_uninterrupted_one(
    comm: MPI.Intracomm, ranks_a_node: int, directory: Path, options: dict[str, Any]
) -> None:
    straight = Run(comm, hierarchy="node", **options)
    straight.train(0, 6)
    first = Run(comm, hierarchy="node", **options)
    first.train(0, 3)
    checkpoint.save(directory, step=3, **first.subjects)  # type: ignore[arg-type]
    second = Run(comm, hierarchy="node", **options)
    assert checkpoint.load(directory, **second.subjects) == 3  # type: ignore[arg-type]
    assert everywhere(comm, first.bits() == second.bits())
    second.train(3, 6)
    assert everywhere(comm, second.bits() == straight.bits())
    for run in (straight, first, second):
        run.sync.close()


LAYOUTS = [(2, 2, 4, 1), (4, 1, 2, 2), (2, 2, 1, 4), (1, 4, 2, 2), (2, 2, 3, 1), (3, 1, 2, 2), (2, 2, 1, 2), (2, 1, 2, 2),
           (1, 3, 2, 2), (2, 2, 1, 3), (1, 3, 2, 1), (2, 1, 1, 3)]  # fmt: skip


@pytest.mark.singles
@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("options", RESUMED[:4], ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda sizes: "{}x{}-{}x{}".format(*sizes))
def test_nodes_and_ranks_a_node_may_change(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, directory: Path, layout: tuple[int, ...], options: dict[str, Any]
) -> None:
    """What waits, divided by the ranks, is the same before and after; then training goes on lawfully."""
    old, new = layout[0] * layout[1], layout[2] * layout[3]
    if max(old, new) > comm.size:
        pytest.skip("needs more ranks")
    kept = torch.zeros(2570, dtype=torch.float64)
    nodes_of(layout[1], monkeypatch)
    part = comm.Split(int(comm.rank < old), comm.rank)
    if comm.rank < old:
        run = Run(part, hierarchy="node", **options)
        run.train(0, 3)
        assert run.sync.ranks_a_node == layout[1]
        kept = total(part, waiting(run.sync)) / old
        checkpoint.save(directory, step=3, **run.subjects)  # type: ignore[arg-type]
        run.sync.close()
    kept = comm.bcast(kept)
    part.Free()
    nodes_of(layout[3], monkeypatch)
    part = comm.Split(int(comm.rank < new), comm.rank)
    if comm.rank < new:
        run = Run(part, hierarchy="node", **options)
        assert checkpoint.load(directory, **run.subjects) == 3  # type: ignore[arg-type]
        assert run.sync.ranks_a_node == layout[3]
        assert run.sync._aggregator.number == 3
        now = total(part, waiting(run.sync)) / new
        assert everywhere(part, torch.allclose(now, kept, rtol=1e-5, atol=1e-7)), (now - kept).abs().max()
        for step in range(3, 6):
            step_lawfully(part, run.model, run.sync, step)
        run.sync.close()
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_a_state_of_another_hierarchy_is_refused_outside_checkpoints(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes_of(comm.size, monkeypatch)
    flat, node = Run(comm, scheme="dense", codec="int4"), Run(comm, scheme="dense", codec="int4", hierarchy="node")
    for run in (flat, node):
        run.train(0, 2)
    error = raised(comm, ConfigurationError, lambda: flat.sync.load_state_dict(node.sync.state_dict()))
    assert "load it with mpisparse.checkpoint.load" in error
    error = raised(comm, ConfigurationError, lambda: node.sync.load_state_dict(flat.sync.state_dict()))
    assert "with values on their way" in error
    for run in (flat, node):
        run.sync.close()


def test_same_bits_again(comm: MPI.Intracomm, ranks_a_node: int) -> None:
    ends = []
    for _ in range(2):
        run = Run(comm, hierarchy="node", density=0.05, codec="int8")
        run.train(0, 4)
        ends.append(run.bits())
        run.sync.close()
    assert everywhere(comm, ends[0] == ends[1])


def test_memory_that_is_shared_changes_no_bit(
    comm: MPI.Intracomm, ranks_a_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in shared memory, by one message, and by messages of few elements."""
    ends = []
    for elements, shares in ((1 << 19, True), (1 << 19, False), (100, False)):
        monkeypatch.setattr("mpisparse.comm.hierarchy.ROUND", elements)
        if not shares:
            monkeypatch.setattr("mpisparse.comm.shared_rows.PLACE", Path("/nowhere"))
        run = Run(comm, hierarchy="node", scheme="dense", codec="int4")
        nodes = run.sync._nodes
        assert everywhere(comm, nodes is None or bool(nodes.rows) == shares)
        run.train(0, 3)
        ends.append(run.bits())
        run.sync.close()
    assert everywhere(comm, len(set(ends)) == 1)


@pytest.mark.mpi(min_size=2)
def test_one_rank_without_room_for_shared_memory(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of its node send messages then, and no file is left."""
    nodes_of(comm.size, monkeypatch)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr("mpisparse.comm.shared_rows.PLACE", Path("/nowhere"))
    sync = train(comm, 2, density=0.05)
    assert sync._nodes is not None
    assert everywhere(comm, not sync._nodes.rows)
    assert not [path for path in Path("/dev/shm").glob("mpisparse-*") if path.stat().st_size == 4 * 2570]
    sync.close()
