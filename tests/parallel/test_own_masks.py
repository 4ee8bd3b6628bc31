"""masks="own": every device makes its own mask and sends its own elements, as in the documents; on all ranks, bit by bit.

The oracles are lists of devices in plain NumPy, written from the pseudo-code. What the documents leave open is this: values
go to a region's owner, which adds them in rank order, sends the sum back as the codec has it, and keeps the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from oracle import SENT, bf16
from ranks import PATHS, alike, bits, carried, everywhere, loss_of, seeded, small, total, train_lawfully
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.schemes.predictive.nets import Slice

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:an adaptive optimizer")]
both_paths = pytest.mark.parametrize("path", PATHS)
STEPS = 20


def gradient_of(model: nn.Module, rank: int, step: int) -> Floats:
    grads = torch.autograd.grad(loss_of(model, seeded(rank, step)), list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in grads]).numpy()


def held_out(model: nn.Module) -> Any:
    return lambda: loss_of(model, torch.Generator().manual_seed(77))


def published(model: nn.Module) -> Floats:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).numpy()


class Network:
    """Every device sends values at its own indices; `send` is what a codec makes of values."""

    def __init__(self, n: int, size: int, codec: str) -> None:
        self.n, self.size, self.send = n, size, SENT[codec.removeprefix("momentum-")]

    def average(self, index: Sequence[Ints], values: Sequence[Floats], borders: Sequence[int]) -> tuple[Floats, Any, Floats]:
        """Return the mean, what each device has left of its values, and what the owners keep of their sums."""
        mean, kept = np.zeros((2, self.n), np.float32)
        left = [part.copy() for part in values]
        for lo, hi in zip(borders, [*borders[1:], self.n], strict=True):
            total, sent = np.zeros(self.n, np.float32), np.zeros(self.n, dtype=bool)
            for rank, at in enumerate(index):
                here = (at >= lo) & (at < hi)
                arrived = self.send(values[rank][here])
                left[rank][here] -= arrived
                total[at[here]] += arrived
                sent[at[here]] = True
            back = np.zeros(self.n, np.float32)
            back[sent] = self.send(total[sent])
            kept += total - back
            mean += back / np.float32(self.size)
        return mean, left, kept


class Document1:
    """MA, threshold, mask and QM of every device, with the names of the pseudo-code."""

    ALPHA, BETA = np.float32(0.9), np.float32(0.7)

    def __init__(self, n: int, size: int, target: float, codec: str) -> None:
        self.n, self.size, self.target, self.codec = n, size, target, codec
        self.average, self.momentum = np.zeros((2, size, n), np.float32)
        self.network = Network(n, size, codec)

    def step(self, gradients: Sequence[Floats], borders: Sequence[int]) -> Floats:
        """Sparsity and momentum of each device, then the mean of what is transmitted."""
        one, index = np.float32(1), []
        for r, gradient in enumerate(gradients):
            self.average[r] = self.ALPHA * np.abs(gradient) + (one - self.ALPHA) * self.average[r]
            threshold = np.sort(self.average[r])[int(np.ceil(self.target * self.n - 1e-9))]
            masked = np.where(np.abs(gradient) < threshold, np.float32(0), gradient)
            self.momentum[r] = self.BETA * masked + (one - self.BETA) * self.momentum[r]
            index.append(np.flatnonzero(self.momentum[r]))
        values = [self.momentum[r][index[r]] for r in range(self.size)]
        mean, left, _ = self.network.average(index, values, borders)
        for r in range(self.size):  # what a codec cannot resolve is sent no more; a lossless one resolves everything
            at = index[r]
            faded = (left[r] == values[r]) & (np.abs(gradients[r][at]) < self.threshold_of(r))
            self.momentum[r][at[faded]] = 0
        return mean

    def threshold_of(self, r: int) -> np.float32:
        return np.float32(np.sort(self.average[r])[int(np.ceil(self.target * self.n - 1e-9))])


@both_paths
@pytest.mark.parametrize("codec", ["momentum-fp32", "momentum-int8"])
def test_the_pseudo_code_of_document_001(comm: MPI.Intracomm, codec: str, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(
        model, scheme="momentum", masks="own", compensate=False, density=0.1, codec=codec, accumulate=path
    )
    oracle = Document1(sync.residual.numel(), comm.size, 0.9, codec)
    assert oracle.n - int(np.ceil(0.9 * oracle.n)) == sync.k
    for step in range(STEPS):
        model.zero_grad()
        gradients = comm.allgather(gradient_of(model, comm.rank, step))
        borders = sync.state_dict()["step.borders"]
        expected = oracle.step(gradients, borders)
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        assert everywhere(comm, np.array_equal(published(model), expected)), f"step {step}"
        assert sync.stats.threshold == max(map(oracle.threshold_of, range(comm.size)))
        assert everywhere(comm, not sync.residual.any())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    sync.close()


def create_sparsity_mask(gradients: Floats, importance_scores: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """The document's function; where scores are equal magnitude decides, then the index."""
    sorted_indices = np.lexsort((np.arange(len(gradients)), -np.abs(gradients), -importance_scores.astype(int)))
    mask = np.zeros_like(gradients, dtype=bool)
    mask[sorted_indices[:k]] = True
    return mask


def document_0(
    comm: MPI.Intracomm, gradient: Floats, scores: NDArray[Any], k: int, codec: str, borders: Sequence[int]
) -> Floats:
    """The mean of what all devices transmit, from the gradient and the scores of this one."""
    every = comm.allgather((gradient, scores))
    index = [np.flatnonzero(create_sparsity_mask(g, importance, k)) for g, importance in every]
    network = Network(len(gradient), comm.size, codec)
    mean, *_ = network.average(index, [g[i] for (g, _), i in zip(every, index, strict=True)], borders)
    return mean


@both_paths
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_the_pseudo_code_of_document_000(comm: MPI.Intracomm, codec: str, path: str) -> None:
    """With given scores, other ones on every device."""
    model = small()
    sync = mpisparse.GradientSync(
        model, scheme="predictive", masks="own", rule="importance", compensate=False, density=0.05, codec=codec,
        publish_after=100, accumulate=path, validation=held_out(model),
    )  # fmt: skip
    state = sync.state_dict()
    draw = torch.Generator().manual_seed(comm.rank)
    state["step.scores"] = torch.randint(0, 20, state["step.scores"].shape, generator=draw, dtype=torch.uint8)
    sync.load_state_dict(state)
    given = state["step.scores"].numpy()
    for step in range(STEPS // 2):
        model.zero_grad()
        gradient, borders = gradient_of(model, comm.rank, step), sync.state_dict()["step.borders"]
        expected = document_0(comm, gradient, given, sync.k, codec, borders)
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        assert everywhere(comm, np.array_equal(published(model), expected)), f"step {step}"
        assert everywhere(comm, not sync.residual.any())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    sync.close()


@both_paths
@pytest.mark.parametrize("masks", ["own", "owners"])
def test_scores_of_every_step_before_it_transmits(comm: MPI.Intracomm, masks: str, path: str) -> None:
    """refresh="step": what the nets, as they are then, make of the last gradients decides what this step sends."""
    model, depth = small(), 3
    sync = mpisparse.GradientSync(
        model, scheme="predictive", masks=masks, rule="importance", compensate=False, density=0.05, codec="fp32",
        refresh="step", history=depth, validate_every=5, accumulate=path, validation=held_out(model),
        **({} if masks == "own" else {"percentile": "exact"}),
    )  # fmt: skip
    past = np.zeros((depth + 1, sync.residual.numel()), np.float32)
    scorer: Any = sync._aggregator.works.scorer
    changed = 0
    for step in range(STEPS):
        model.zero_grad()
        gradient, borders = gradient_of(model, comm.rank, step), sync.state_dict().get("step.borders")
        past = np.concatenate([past[1:depth], [gradient, gradient]])  # the accumulator is the gradient
        loss_of(model, seeded(comm.rank, step)).backward()
        before = scorer.tags.copy()
        sync.step()
        rows = (bf16(past).view(np.uint32) >> 16).astype(np.uint16).reshape(-1)
        scores = scorer.nets.score(Slice(0, rows))
        changed += not np.array_equal(before, scores)
        if masks == "own":
            assert everywhere(comm, np.array_equal(scorer.tags, scores)), f"step {step}"
            expected = document_0(comm, gradient, scores, sync.k, "fp32", borders)
            assert everywhere(comm, np.array_equal(published(model), expected)), f"step {step}"
        else:  # an owner decides for all, who take over its scores of what it selects
            union = sync._gradients.published.union
            fresh = np.setdiff1d(np.arange(len(scores)), union)
            assert everywhere(comm, np.array_equal(scorer.tags[fresh], scores[fresh])), f"step {step}"
            assert len(union) == sync.k
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    assert everywhere(comm, changed > STEPS // 2)
    sync.close()


# With error feedback, which the documents leave open: nothing is lost


class Feedback:
    """Devices that keep what they do not send, and choose the k largest of what waits."""

    def __init__(self, n: int, size: int, k: int, codec: str) -> None:
        self.acc, self.k = np.zeros((size, n), np.float32), k
        self.network = Network(n, size, codec)

    def step(self, gradients: Sequence[Floats], borders: Sequence[int]) -> Floats:
        self.acc += np.stack(gradients)
        index = [np.sort(np.argsort(-np.abs(acc), kind="stable")[: self.k]) for acc in self.acc]
        mean, left, kept = self.network.average(index, [a[i] for a, i in zip(self.acc, index, strict=True)], borders)
        for rank, (lo, hi) in enumerate(zip(borders, [*borders[1:], self.acc.shape[1]], strict=True)):
            self.acc[rank][index[rank]] = left[rank]
            self.acc[rank, lo:hi] += kept[lo:hi]
        return mean


@both_paths
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int2"])
@pytest.mark.parametrize("scheme", ["exdyna", "topk"])
@pytest.mark.pairs
def test_the_largest_with_feedback_against_numpy(comm: MPI.Intracomm, scheme: str, codec: str, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme=scheme, masks="own", density=0.03, codec=codec, accumulate=path)
    twin = Feedback(sync.residual.numel(), comm.size, sync.k, codec)
    for step in range(STEPS):
        model.zero_grad()
        expected = twin.step(comm.allgather(gradient_of(model, comm.rank, step)), sync.state_dict()["step.borders"])
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        assert everywhere(comm, np.array_equal(published(model), expected)), f"step {step}"
        assert everywhere(comm, np.array_equal(sync.residual.numpy(), twin.acc[comm.rank])), f"step {step}"
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    sync.close()


CASES: dict[str, dict[str, Any]] = {
    "exdyna": {"scheme": "exdyna"},
    "exdyna, average": {"scheme": "exdyna", "scorer": "average"},
    "momentum": {"scheme": "momentum"},
    "momentum, gradient": {"scheme": "momentum", "mask": "gradient"},
    "predictive": {"scheme": "predictive", "history": 3, "validate_every": 6, "publish_after": 2},
    "predictive, at once": {"scheme": "predictive", "history": 3, "validate_every": 6, "refresh": "step"},
    "topk": {"scheme": "topk"},
    "threshold": {"scheme": "threshold"},
    "sidco": {"scheme": "sidco"},
    "dgc": {"scheme": "dgc", "factor": 0.0},
}
CODECS = ["fp32", "fp16", "int8", "int4", "sign", "momentum-fp32", "momentum-int8"]


def make(case: str, model: nn.Module, **more: Any) -> mpisparse.GradientSync:
    options = {**CASES[case], **more}
    if options["scheme"] == "predictive":
        options["validation"] = held_out(model)
    return mpisparse.GradientSync(model, masks="own", density=0.04, **options)


@both_paths
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.singles
def test_nothing_is_lost_and_replicas_are_equal(comm: MPI.Intracomm, case: str, codec: str, path: str) -> None:
    model = small()
    sync = make(case, model, codec=codec, accumulate=path)
    train_lawfully(comm, model, sync, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), loss_of, count=18)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_sends_its_share_and_selections_build_up(comm: MPI.Intracomm, case: str) -> None:
    model = small()
    sync = make(case, model, codec="fp32")
    for step in range(4):
        model.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        loads = sync.stats.workloads
        if case in ("exdyna", "exdyna, average", "momentum", "predictive", "topk"):
            assert loads == (sync.k,) * comm.size
        assert max(loads) <= sync.stats.selected <= sum(loads)
    if comm.size > 1:
        assert sync.stats.build_up > 1 or case in ("threshold", "sidco", "momentum, gradient")
    sync.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("codec", ["int8", "momentum-int8"])
@pytest.mark.singles
def test_resumed_to_the_last_bit(comm: MPI.Intracomm, directory: Path, case: str, codec: str) -> None:
    def run(steps: range) -> bytes:
        """Train in these steps, from the checkpoint unless it is to be written after the first half."""
        model = small()
        sync, optimizer = make(case, model, codec=codec), torch.optim.SGD(model.parameters(), lr=0.1)
        if steps.start:
            assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == steps.start
        for step in steps:
            if step == 7 and not steps.start:
                checkpoint.save(directory, step=step, model=model, optimizer=optimizer, sync=sync)
            optimizer.zero_grad()
            loss_of(model, seeded(comm.rank, step)).backward()
            sync.step()
            optimizer.step()
        end = bits([*model.parameters(), sync.residual])
        sync.close()
        return end

    whole = run(range(14))
    assert everywhere(comm, run(range(7, 14)) == whole)


def test_everything_is_the_dense_mean(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, masks="own", density=1.0)
    model.zero_grad()
    gradients = comm.allgather(gradient_of(model, comm.rank, 0))
    loss_of(model, seeded(comm.rank, 0)).backward()
    sync.step()
    np.testing.assert_allclose(published(model), np.mean(gradients, axis=0, dtype=np.float64), rtol=1e-5, atol=1e-8)
    assert everywhere(comm, not sync.residual.any())
    sync.close()


def test_elements_with_nothing_to_send_take_no_room(comm: MPI.Intracomm) -> None:
    """Half of the averages are large, but their accumulators are zero by then: k others are sent."""
    model = small()
    sync = mpisparse.GradientSync(model, scheme="exdyna", scorer="average", alpha=0.1, masks="own", density=0.2)
    n = sync.residual.numel()
    flat = torch.zeros(n)
    for step in range(6):
        flat[:] = torch.linspace(0.5, 1.0, n)
        flat[: n // 2] = 100.0 if step == 0 else 0.0
        begin = 0
        for p in model.parameters():
            p.grad = flat[begin : begin + p.numel()].view_as(p).clone()
            begin += p.numel()
        sync.step()
        assert sync.stats.workloads == (sync.k,) * comm.size, step
    sync.close()


# In flight

LATE: dict[str, dict[str, Any]] = {
    "magnitude": {"scheme": "exdyna"},
    "average": {"scheme": "momentum", "codec": "int8"},
    "predicted": {"scheme": "predictive", "history": 3, "validate_every": 5, "publish_after": 2},
    "predicted at once": {"scheme": "predictive", "history": 3, "validate_every": 5, "refresh": "step"},
}
N = 3000


def vector(rank: int, step: int) -> torch.Tensor:
    return torch.randn(N, generator=seeded(rank, step)) * (1 + rank)


def late(comm: MPI.Intracomm, case: str, staleness: int, codec: str) -> Any:
    options = {**LATE[case], "codec": codec}
    return mpisparse.aggregator(N, density=0.05, masks="own", staleness=staleness, comm=comm, **options)


@pytest.mark.filterwarnings("ignore:scheme .predictive. without")
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4", "momentum-int8"])
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("case", LATE)
@pytest.mark.singles
def test_in_flight_nothing_is_lost(comm: MPI.Intracomm, case: str, staleness: int, codec: str) -> None:
    """All that was given is in the means that came, in those under way, or in a residual; the means are equal everywhere."""
    aggregator = late(comm, case, staleness, codec)
    given, arrived = torch.zeros(2, N, dtype=torch.float64)
    for step in range(20):
        given += vector(comm.rank, step)
        mean = aggregator.step(vector(comm.rank, step))
        assert alike(comm, [mean])
        arrived += comm.size * mean.double()
        assert everywhere(comm, (step < staleness) == (not mean.any()))
    for _ in aggregator.arrivals():
        arrived += comm.size * aggregator.parts.sink.published().double()
    waiting = aggregator.residual + carried(aggregator.state(), N, "")
    off = (total(comm, given) - arrived - total(comm, waiting)).abs().max()
    assert float(off) < 1e-4
    aggregator.close()


@pytest.mark.filterwarnings("ignore:scheme .predictive. without")
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("codec", ["int8", "momentum-int8"])
@pytest.mark.parametrize("case", LATE)
@pytest.mark.pairs
def test_in_flight_resumed_to_the_last_bit(comm: MPI.Intracomm, case: str, codec: str, staleness: int) -> None:
    whole = late(comm, case, staleness, codec)
    for step in range(9):
        whole.step(vector(comm.rank, step))
    state, residual = copy.deepcopy(whole.state()), whole.residual.clone()
    resumed = late(comm, case, staleness, codec)
    resumed.check(state)
    resumed.load(state)
    resumed.residual.copy_(residual)
    for step in range(9, 18):
        both = [each.step(vector(comm.rank, step)).clone() for each in (whole, resumed)]
        assert everywhere(comm, bits([both[0], whole.residual]) == bits([both[1], resumed.residual])), step
    whole.close()
    resumed.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scheme": "predictive", "compensate": False, "rescale": True}, "in flight is gone"),
        ({"scheme": "topk"}, "delivers at once"),
    ],
)
def test_what_does_not_go_in_flight_is_refused(comm: MPI.Intracomm, options: dict[str, Any], why: str) -> None:
    with pytest.raises(mpisparse.ConfigurationError, match=why):
        mpisparse.aggregator(N, masks="own", staleness=1, comm=comm, **options)
