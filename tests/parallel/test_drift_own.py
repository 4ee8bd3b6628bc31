"""Document 002 to the letter: drift with masks="own", average="received", server="rank0", on all ranks, bit by bit.

The oracle is the loop of the document's processing node, for a list of nodes, and the central server between them. A node's
weights are those that it sends; W - G is what the document calls the difference from the global weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from drifting import Training
from mpi4py import MPI
from numpy.typing import NDArray
from oracle import SENT
from ranks import alike, everywhere, loss_of, raised, seeded, small, total

import mpisparse

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

pytestmark = pytest.mark.mpi
LITERAL: dict[str, Any] = {"masks": "own", "average": "received", "server": "rank0"}
RATE, STEPS = 0.01, 15


def flat(model: torch.nn.Module) -> Floats:
    weights: Floats = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()
    return weights


class Node:
    """One processing node of the document; its batch in a step is the rank's."""

    def __init__(self, rank: int, k: int) -> None:
        self.rank, self.k, self.model = rank, k, small()
        self.global_weights = flat(self.model)

    def train(self, step: int) -> None:
        """Forward, gradients, and the update of the weights."""
        loss = loss_of(self.model, seeded(self.rank, step))
        for p, gradient in zip(
            self.model.parameters(), torch.autograd.grad(loss, list(self.model.parameters())), strict=True
        ):
            p.data.add_(gradient, alpha=-RATE)

    def filtered(self) -> Ints:
        """The weights of the largest influence score, which is here how far training has moved them."""
        scores = np.abs(flat(self.model) - self.global_weights)
        return np.sort(np.argsort(-scores, kind="stable")[: self.k])

    def validate(self, broadcast: Floats, moved: Floats, index: Ints, arrived: Floats) -> None:
        """Compare with the global weights: what was sent goes to them; what was not keeps its difference, and waits."""
        move = moved.copy()
        move[index] -= arrived
        weights = torch.from_numpy(flat(self.model) + move)
        self.global_weights = broadcast
        torch.nn.utils.vector_to_parameters(weights, self.model.parameters())


class Server:
    """The central server: averages the received weights, and them only; what its codec leaves waits for the next time."""

    def __init__(self, n: int, codec: str) -> None:
        self.error, self.send = np.zeros(n, np.float32), SENT[codec]

    def average(self, index: Sequence[Ints], values: Sequence[Floats]) -> Floats:
        """How far the global weights move, zero where nothing was received."""
        total, count = np.zeros((2, len(self.error)), np.float32)
        for at, arrived in zip(index, values, strict=True):
            total[at] += arrived
            count[at] += 1
        received = np.flatnonzero(count)
        mean = total[received] / count[received] + self.error[received]
        moved = np.zeros(len(self.error), np.float32)
        moved[received] = self.send(mean)
        self.error[received] = mean - moved[received]
        return moved


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_the_processing_nodes_of_document_002(comm: MPI.Intracomm, codec: str) -> None:
    run = Training(comm, torch.optim.SGD, density=0.05, codec=codec, **LITERAL)
    n = len(run.own)
    nodes, server, shared = [Node(rank, run.sync.k) for rank in range(comm.size)], Server(n, codec), flat(small())
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss_of(run.model, seeded(comm.rank, step)).backward()
        run.optimizer.step()
        for node in nodes:
            node.train(step)
        index = [node.filtered() for node in nodes]
        weights = [flat(node.model)[at] for node, at in zip(nodes, index, strict=True)]
        arrived = [server.send(w - shared[at]) for w, at in zip(weights, index, strict=True)]
        moved = server.average(index, arrived)
        before, shared = shared, shared + moved
        for node, at, sent in zip(nodes, index, arrived, strict=True):
            node.validate(shared, moved, at, sent)
        assert everywhere(comm, np.array_equal(run.shared().numpy(), shared)), f"global weights, step {step}"
        assert everywhere(comm, np.array_equal(flat(run.model), flat(nodes[comm.rank].model))), f"own weights, step {step}"
        assert run.sync.stats.workloads == (run.sync.k,) * comm.size
        if codec == "fp32":  # the words of the document: the mean of the weights that were received
            mean, count = np.zeros((2, n))
            for at, w in zip(index, weights, strict=True):
                mean[at] += w
                count[at] += 1
            mean = np.where(count > 0, mean / np.maximum(count, 1), before)
            assert float(np.abs(mean - shared).max()) < 1e-6
    assert comm.size == 1 or run.sync.stats.selected > run.sync.k
    run.sync.close()


def test_the_server_of_document_002_is_rank_0(comm: MPI.Intracomm) -> None:
    """It alone receives what the others send, and remembers what its codec left; one rank has nothing left."""
    run = Training(comm, density=0.05, **LITERAL)
    for _ in range(4):
        run.step()
    reducer: Any = run.sync._aggregator.works.reducer
    kept = comm.allgather((len(reducer.error), bool(reducer.error.any())))
    assert kept == [(len(run.own), comm.size > 1), *[(0, False)] * (comm.size - 1)]
    run.sync.close()


FORMS: dict[str, dict[str, Any]] = {
    "own": {},
    "own, rank 0": {"server": "rank0", "codec": "fp32"},
    "own, rate 1": {"rate": 1.0},
    "own, every third": {"every": 3, "codec": "sign"},
    "own, in flight": {"staleness": 1},
    "own, in flight, every second": {"staleness": 1, "every": 2, "rate": 1.0},
    "received": {"average": "received"},
    "received, in flight": {"average": "received", "staleness": 1, "server": "rank0"},
}


@pytest.mark.parametrize("form", FORMS)
def test_replicas_are_equal_and_nothing_is_lost(comm: MPI.Intracomm, form: str) -> None:
    """G moves by the owners' means but for e, and W - G loses what the rank sent; at rate 1 the mean of W stays."""
    run = Training(comm, density=0.05, masks="own", **FORMS[form])
    sync: Any = run.sync
    stage = sync._aggregator.works.stages[0]
    inner, moved, exchanges = stage.settle, torch.zeros(len(run.own), dtype=torch.float64), [0]
    rate = FORMS[form].get("rate", 1.0 if "received" in form else min(2.0, comm.size**0.5))

    def settle(backend: Any, acc: Any, union: Any, sent: Any, reduced: Any) -> Any:
        drift, mean = sync.residual.double(), total(comm, run.own) / comm.size
        after = inner(backend, acc, union, sent, reduced)
        own = torch.zeros(len(drift), dtype=torch.float64)
        own[torch.from_numpy(reduced.index)] = torch.from_numpy(reduced.own).double()
        assert everywhere(comm, float((drift - sync.residual.double() - own).abs().max()) < 1e-6)
        count = total(comm, (own != 0).double())
        by = count.clamp(min=1) if "received" in form else torch.tensor(float(comm.size))
        moved.add_(rate * total(comm, own) / by)
        exchanges[0] += 1
        if rate == 1.0 and "received" not in form:
            now = total(comm, run.own) / comm.size
            left = torch.zeros(len(drift), dtype=torch.float64)
            left[torch.from_numpy(reduced.index)] = torch.from_numpy(reduced.mean).double()
            gone = total(comm, own) / comm.size - left
            assert everywhere(comm, float((mean - now - gone).abs().max()) < 1e-6)
        return after

    before = run.shared().double()
    stage.settle = settle
    for _ in range(12):
        run.step()
        assert alike(comm, [run.shared()])
    gone = moved - run.remembered()
    assert everywhere(comm, float((run.shared().double() - before - gone).abs().max()) < 4e-6)
    assert exchanges[0] == 12 // FORMS[form].get("every", 1) - FORMS[form].get("staleness", 0)
    del stage.settle
    run.sync.synchronize()
    assert alike(comm, run.model.parameters())
    run.sync.close()


def test_weights_that_are_not_finite_are_refused_on_all_ranks(comm: MPI.Intracomm) -> None:
    """Wherever they lie, as each rank looks everywhere; nothing changes, and the run goes on."""
    run = Training(comm, density=0.05, masks="own")
    run.step()
    before = run.shared()
    weight = next(iter(run.model.parameters()))
    right = weight.detach()[-1, -1].item()
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            weight[-1, -1] = float("nan")
    run.optimizer.zero_grad()
    said = raised(comm, mpisparse.NonFiniteGradientError, run.optimizer.step)
    assert "non-finite weight in 0.weight" in said
    assert everywhere(comm, torch.equal(run.shared(), before))
    with torch.no_grad():
        if comm.rank == comm.size - 1:
            weight[-1, -1] = right
    run.step()
    assert alike(comm, [run.shared()])
    run.sync.close()


def test_what_does_not_go_with_own_masks_is_refused(comm: MPI.Intracomm) -> None:
    for options, why in (
        ({"by": "groups"}, "the groups that their owners select for all ranks"),
        ({"density": 1.0}, "masks has no effect: density 1 selects nothing"),
        ({"blocks": 3}, 'blocks has no effect: masks="own" sorts each rank\'s own drift'),
    ):
        said = raised(comm, mpisparse.ConfigurationError, lambda options=options: Training(comm, masks="own", **options))
        assert why in said
    for name, value in (("average", "received"), ("server", "rank0")):
        said = raised(comm, mpisparse.ConfigurationError, lambda name=name, value=value: Training(comm, **{name: value}))
        assert f"{name} has no effect: all ranks send the same elements" in said
