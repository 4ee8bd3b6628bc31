"""Scheme speculative: every rank's two sets of weights equal those of a twin in one process, whatever the timing."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from ranks import PATHS, alike, bits, everywhere, loss_of, raised, seeded, small, total
from speculating import OPTIMIZERS, Run, leftovers
from torch import nn

import mpisparse
from mpisparse.model.layout import Layout
from mpisparse.schemes.speculative.influence import Probe

Floats = NDArray[np.float32]

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:an adaptive optimizer")]


# The twin


class Set:
    """A model and its optimizer, in plain torch."""

    def __init__(self, optimizer: str) -> None:
        self.model = small()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, gradient: Floats, lr: float) -> None:
        parts = torch.from_numpy(gradient).split([p.numel() for p in self.model.parameters()])
        for p, part in zip(self.model.parameters(), parts, strict=True):
            p.grad = part.view_as(p).clone()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return weights and state as writable flat vectors."""
        entries = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        names = sorted({n for s in entries for n, v in s.items() if n != "step" and isinstance(v, torch.Tensor)})
        states = {n: [self.optimizer.state[p][n] for p in self.model.parameters()] for n in names}
        return {"": [p.data for p in self.model.parameters()], **states}  # type: ignore[dict-item]

    def flat(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat([t.reshape(-1) for t in tensors]) for name, tensors in self.vectors().items()}

    def write(self, values: dict[str, torch.Tensor]) -> None:
        sizes = [p.numel() for p in self.model.parameters()]
        for name, tensors in self.vectors().items():
            source = values[name] if name in values else torch.zeros(sum(sizes))
            for tensor, part in zip(tensors, source.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))


class Twin:
    """All ranks in one process: accumulators, influence, both sets of weights, and results in flight."""

    def __init__(self, size: int, optimizer: str, *, k: int, staleness: int, tolerance: float, received: bool) -> None:
        self.size, self.k, self.staleness, self.tolerance, self.received = size, k, staleness, tolerance, received
        self.shared = Set(optimizer)
        self.own = [Set(optimizer) for _ in range(size)]
        self.n = sum(p.numel() for p in self.shared.model.parameters())
        self.acc, self.influence = np.zeros((2, size, self.n), np.float32)
        self.late: list[Floats] = []

    def step(self, gradients: list[Floats], lr: float) -> None:
        sums, senders = np.zeros((2, self.n), np.float32)
        sent: list[tuple[Any, Floats]] = []
        for r, gradient in enumerate(gradients):
            self.acc[r] += gradient
            now = np.abs(self.acc[r]) * np.float32(1e-3)
            self.influence[r] = now + (self.influence[r] - now) * np.float32(0.5)
            passed = self.influence[r] >= np.sort(self.influence[r])[self.n - self.k]
            sent.append((torch.from_numpy(passed), np.where(passed, self.acc[r], np.float32(0))))
            self.acc[r] = 0 if self.received else np.where(passed, np.float32(0), self.acc[r])
            sums += sent[-1][1]
            senders += passed
        self.late.append(sums / np.maximum(senders, 1) if self.received else sums / np.float32(self.size))
        if len(self.late) > self.staleness:
            self.shared.step(self.late.pop(0), lr)
        if self.staleness:
            for own, (passed, gradient) in zip(self.own, sent, strict=True):
                self._correct(own)
                self._ahead(own, passed, gradient, lr)

    def _correct(self, own: Set) -> None:
        mine, shared = own.flat(), self.shared.flat()
        back = (mine[""] - shared[""]).abs() > self.tolerance
        if self.tolerance == 0.0:
            own.model.load_state_dict(self.shared.model.state_dict())
            own.optimizer.load_state_dict(copy.deepcopy(self.shared.optimizer.state_dict()))
        elif back.any():
            own.write({name: torch.where(back, shared.get(name, torch.zeros(self.n)), v) for name, v in mine.items()})
            for p, q, part in zip(own.model.parameters(), self.shared.model.parameters(), self._split(back), strict=True):
                if own.optimizer.state[p].get("step") == 0 and part.any():  # its state begins with the global one
                    own.optimizer.state[p]["step"] = self.shared.optimizer.state[q]["step"].clone()

    def _ahead(self, own: Set, passed: torch.Tensor, gradient: Floats, lr: float) -> None:
        """Update everything, then restore the weights that the filter excludes."""
        before = own.flat()
        steps = {p: copy.deepcopy(own.optimizer.state[p].get("step")) for p in own.model.parameters()}
        own.step(gradient, lr)
        after = own.flat()
        own.write({name: torch.where(passed, v, before.get(name, torch.zeros(self.n))) for name, v in after.items()})
        for p, part in zip(own.model.parameters(), self._split(passed), strict=True):
            if not part.any() and "step" in own.optimizer.state[p]:
                own.optimizer.state[p]["step"] = torch.tensor(0.0) if steps[p] is None else steps[p]

    def _split(self, flags: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flags.split([p.numel() for p in self.shared.model.parameters()])


def follow(run: Run, twin: Twin, steps: int) -> None:
    """Train and compare both sets of every rank with the twin after every step; collective."""
    comm = run.comm
    for step in range(steps):
        lr = run.optimizer.param_groups[0]["lr"]
        run.step(step)
        twin.step(comm.allgather(run.gradient), lr)
        own = twin.own[comm.rank] if twin.staleness else twin.shared
        same = bits(run.model.parameters()) == bits(own.model.parameters())
        with run.sync.global_weights():
            shared = bits(run.model.parameters()) == bits(twin.shared.model.parameters())
            replicas = alike(comm, run.tensors())
        assert everywhere(comm, same), f"step {step}: a rank's own weights"
        assert everywhere(comm, shared), f"step {step}: the global weights"
        assert replicas, f"step {step}: the ranks' global weights or their state differ"
        assert everywhere(comm, np.array_equal(run.sync.residual.numpy(), twin.acc[comm.rank])), f"step {step}: residual"
    run.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_as_the_twin(comm: MPI.Intracomm, optimizer: str) -> None:
    run = Run(comm, optimizer)
    follow(run, Twin(comm.size, optimizer, k=257, staleness=1, tolerance=1e-3, received=False), 8)


@pytest.mark.parametrize("staleness", [0, 2])
def test_staleness(comm: MPI.Intracomm, staleness: int) -> None:
    """Staleness 0: no update ahead, one set of weights, and the result of a synchronous exchange of the same elements."""
    run = Run(comm, staleness=staleness)
    follow(run, Twin(comm.size, "sgd", k=257, staleness=staleness, tolerance=1e-3, received=False), 7)


def test_staleness_0_with_everything_is_a_synchronous_scheme(comm: MPI.Intracomm) -> None:
    """At density 1 the bits are those of topk, which also sums in rank order."""
    run, plain = Run(comm, staleness=0, density=1.0), small()
    sync = mpisparse.GradientSync(plain, scheme="topk", density=1.0, comm=comm)
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
    for step in range(5):
        run.step(step)
        optimizer.zero_grad()
        loss_of(plain, seeded(comm.rank, step)).backward()
        sync.step()
        optimizer.step()
        scheduler.step()
        assert everywhere(comm, bits(plain.parameters()) == bits(run.model.parameters()))
    assert run.sync.stats.speculation.updated == 0
    sync.close()
    run.close()


@pytest.mark.parametrize("tolerance", [0.0, math.inf])
def test_extremes_of_the_tolerance(comm: MPI.Intracomm, tolerance: float) -> None:
    """Tolerance 0 always returns to the global weights before the next update ahead; infinity never does."""
    run = Run(comm, "adam", tolerance=tolerance)
    first = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
    follow_steps, touched = 8, torch.zeros(len(first), dtype=torch.bool)
    twin = Twin(comm.size, "adam", k=257, staleness=1, tolerance=tolerance, received=False)
    for step in range(follow_steps):
        run.step(step)
        twin.step(comm.allgather(run.gradient), 0.01 * 0.7 ** (step // 3))
        done = run.sync.stats.speculation
        own = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
        with run.sync.global_weights():
            shared = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
        passed = torch.from_numpy(twin.influence[comm.rank] >= np.sort(twin.influence[comm.rank])[twin.n - twin.k])
        touched |= passed
        if tolerance == 0.0:
            assert everywhere(comm, done.drift_after == 0.0 and done.corrected == len(own))
            assert everywhere(comm, torch.equal(own[~passed], shared[~passed]))
        else:
            assert everywhere(comm, done.corrected == 0 and done.drift_after == done.drift)
            assert everywhere(comm, torch.equal(own[~touched], first[~touched]))
        assert everywhere(comm, bits(run.model.parameters()) == bits(twin.own[comm.rank].model.parameters()))
    run.close()


def test_the_average_of_those_who_sent(comm: MPI.Intracomm) -> None:
    run = Run(comm, average="received", compensate=False)
    follow(run, Twin(comm.size, "sgd", k=257, staleness=1, tolerance=1e-3, received=True), 6)


def test_one_server_or_many(comm: MPI.Intracomm) -> None:
    many, one = Run(comm).train(0, 6), Run(comm, server="rank0").train(0, 6)
    assert everywhere(comm, many.bits() == one.bits())
    many.close()
    one.close()


def test_a_closure_gives_the_same_run(comm: MPI.Intracomm) -> None:
    plain, closed = Run(comm, "adam"), Run(comm, "adam")
    for step in range(4):
        plain.step(step)

        def closure(step: int = step) -> torch.Tensor:
            closed.optimizer.zero_grad()
            loss = loss_of(closed.model, seeded(comm.rank, step))
            loss.backward()
            return loss

        closed.optimizer.step(closure)
        closed.scheduler.step()
        assert everywhere(comm, plain.bits() == closed.bits())
    plain.close()
    closed.close()


# Nothing lost


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("path", PATHS)
def test_conservation(comm: MPI.Intracomm, codec: str, path: str) -> None:
    """All gradients are in the updates of the global weights, in flight, or in the residuals."""
    model = small()
    sync = mpisparse.GradientSync(
        model, scheme="speculative", codec=codec, accumulate=path, comm=comm, density=0.1, granularity="hybrid", staleness=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mpisparse.attach(optimizer, sync)
    n = sync.residual.numel()
    given, size, moved = torch.zeros(3, n, dtype=torch.float64)
    begin = 0

    def record(grad: torch.Tensor, part: slice) -> None:
        given[part] += grad.reshape(-1).double()
        size[part] += grad.reshape(-1).double().abs()

    for p in model.parameters():
        p.register_hook(functools.partial(record, part=slice(begin, begin + p.numel())))
        begin += p.numel()
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        optimizer.step()
        if model[0].weight.grad is not None:
            moved += torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
        state = sync.state_dict()
        late = torch.zeros(n, dtype=torch.float64)
        for result in state["step.flight"]:
            late[torch.as_tensor(result["index"])] += torch.as_tensor(result["mean"]).double()
        held = total(comm, sync.residual.double() + leftovers(state))
        off = (total(comm, given) - comm.size * (moved + late) - held).abs()
        assert bool((off <= 1e-6 * total(comm, size) + 1e-30).all()), f"step {step}: {float(off.max())}"
    assert bool(moved.any())
    sync.close()


def test_finishing(comm: MPI.Intracomm) -> None:
    """synchronize() applies the results in flight to the global weights in order, and sets every rank's own to them."""
    run = Run(comm, staleness=2).train(0, 5)
    twin = Set("sgd")
    with run.sync.global_weights():
        twin.model.load_state_dict(run.model.state_dict())
        twin.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    flight = run.sync.state_dict()["step.flight"]
    assert len(flight) == 2
    for result in flight:
        mean = np.zeros(run.sync.residual.numel(), np.float32)
        mean[np.asarray(result["index"])] = np.asarray(result["mean"])
        assert mean.any()
        twin.step(mean, run.optimizer.param_groups[0]["lr"])
    run.sync.synchronize()
    assert run.sync.state_dict()["step.flight"] == []
    states = [twin.optimizer.state[p]["momentum_buffer"] for p in twin.model.parameters()]
    own = bits(run.tensors())
    assert everywhere(comm, own == bits([*twin.model.parameters(), *states]))
    with run.sync.global_weights():
        assert everywhere(comm, bits(run.tensors()) == own)
    run.train(5, 8).close()


def test_no_finishing_inside_global_weights(comm: MPI.Intracomm) -> None:
    """If one rank tries, all raise; nothing changes, and the run continues as if nothing had happened."""
    run, plain = Run(comm).train(0, 4), Run(comm).train(0, 4)
    with run.sync.global_weights() if comm.rank == comm.size - 1 else contextlib.nullcontext():
        said = raised(comm, RuntimeError, run.sync.synchronize)
        assert "synchronize() inside global_weights(): leave the block first" in said
    with run.sync.global_weights():
        assert "global weights are in the model" in raised(comm, RuntimeError, lambda: run.step(4))
    for each in (run, plain):
        each.train(4, 6).sync.synchronize()
    assert everywhere(comm, run.bits() == plain.bits())
    run.close()
    plain.close()


# However long messages take


@pytest.mark.parametrize("granularity", ["schedule", "rule", "learned"])
def test_a_slow_rank_changes_nothing(comm: MPI.Intracomm, granularity: str) -> None:
    """Messages of one rank are a second late: all ranks end with the same bits."""
    options: dict[str, Any] = {"granularity": granularity, "largest": 10_000, "codec": "int8"}
    options |= {} if granularity == "learned" else {"horizon": 20}
    plain, slow = Run(comm, **options), Run(comm, **options)
    exchange = slow.sync._aggregator._polling
    call, calls = exchange._call, [0]

    def late(*args: Any, **options: Any) -> None:
        calls[0] += 1
        if comm.rank == comm.size - 1 and calls[0] == 9:
            time.sleep(1.0)
        call(*args, **options)

    exchange._call = late
    plain.train(0, 24)
    slow.train(0, 24)
    assert everywhere(comm, plain.bits() == slow.bits())
    assert calls[0] > 9
    plain.close()
    slow.close()


def test_a_reward_in_seconds(comm: MPI.Intracomm) -> None:
    """Ranks measure different times but learn from the same ones: they make the same choices and have the same weights."""
    run = Run(comm, granularity="learned", reward="seconds", largest=10_000, density=0.01)
    fine = []
    for step in range(45):
        time.sleep(0.002 * comm.rank)
        run.step(step)
        fine.append(run.sync.stats.speculation.fine)
    policy = run.sync._companion.chooser.policy
    assert everywhere(comm, policy.draws == 4 and policy.cost > 0.0 and comm.bcast(policy.cost) == policy.cost)
    assert everywhere(comm, comm.bcast(fine) == fine)
    with run.sync.global_weights():
        assert alike(comm, run.tensors())
    run.close()


def test_granularity_in_the_statistics(comm: MPI.Intracomm) -> None:
    run = Run(comm, granularity="schedule", horizon=8, largest=10_000)
    fine = []
    for step in range(10):
        run.step(step)
        fine.append(run.sync.stats.speculation.fine)
    assert fine == [0.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert run.sync.stats.speculation.in_flight == 1
    assert run.sync.stats.speculation.drift_after <= 1e-3
    run.close()


def test_confidence_by_a_function(comm: MPI.Intracomm) -> None:
    """The mean over ranks decides on all ranks, from the step on in which it is known."""
    run = Run(comm, granularity="rule", horizon=10**6, largest=10_000, confidence=lambda: 1.0 if comm.rank == 0 else 0.4)
    fine = [run.train(step, step + 1).sync.stats.speculation.fine for step in range(4)]
    mean = (1.0 + 0.4 * (comm.size - 1)) / comm.size
    assert fine == [0.0] + [round(4 * mean / 2) / 4] * 3
    run.close()


def test_there_is_no_third_copy(comm: MPI.Intracomm) -> None:
    """Tensors of a parameter's size are its own and global weights, and two entries of Adam's state for each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(211, 97), nn.Tanh(), nn.Linear(97, 5))
    sync = mpisparse.GradientSync(model, scheme="speculative", comm=comm, density=0.1, staleness=2)
    optimizer = torch.optim.Adam(model.parameters())
    mpisparse.attach(optimizer, sync)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 211, generator=seeded(comm.rank, step))).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.data for t in tensors if isinstance(t, nn.Parameter)]
    places = {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes() == 4 * 211 * 97}
    assert everywhere(comm, len(places) == 2 * 3), f"{len(places)} pieces of memory of a weight's size"
    sync.close()


def test_a_probe_in_training(comm: MPI.Intracomm) -> None:
    """Its curvature enters the influence; ranks stay equal, and the model's buffers do not change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 20))

    def loss() -> torch.Tensor:
        x = torch.randn(8, 30, generator=seeded(comm.rank, 99))
        return (model(x) - x[:, :20].sin()).square().mean()

    sync = mpisparse.GradientSync(
        model, scheme="speculative", comm=comm, probe=loss, probe_every=3, granularity="rule", density=0.1
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mpisparse.attach(optimizer, sync)
    for _ in range(7):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert int(model[1].num_batches_tracked) == 7
    state = sync.state_dict()
    assert everywhere(comm, state["step.probes"] == 3 and bool(state["step.mean.curvature"].any()))
    assert sync.stats.speculation.probe_loss < 1.0
    with sync.global_weights():
        assert alike(comm, model.parameters())
    sync.close()


def test_curvature_changes_little_of_the_choice_on_a_net(comm: MPI.Intracomm) -> None:
    """Of the update's influence too: the diagonal of the Hessian is small against one over the learning rate."""
    model = small()
    steps = range(10)
    probes = [Probe(model, Layout(model), lambda: loss_of(model, seeded(99, 0)), epsilon=1e-2, seed=seed) for seed in steps]
    curvature = torch.stack([probe.run(0, 0)[1] for probe in probes]).mean(dim=0)

    def picks(*, bent: bool) -> list[set[int]]:
        run, found = Run(comm, influence="update", density=0.05, tolerance=0.0), []
        scorer: Any = run.sync._aggregator.works.scorer.inner
        if bent:
            scorer.influence.learn(curvature.clone())
        for step in steps:
            run.step(step)
            found.append(set(run.sync._companion.selection.chosen.index.tolist()))
        run.close()
        return found

    shares = [len(a & b) / len(a) for a, b in zip(picks(bent=True), picks(bent=False), strict=True)]
    assert everywhere(comm, min(shares) < 1.0)
    assert everywhere(comm, np.mean(shares) > 0.8)


@pytest.mark.parametrize("staleness", [0, 1])
def test_scored_after_a_step_goes_by_the_one_before(comm: MPI.Intracomm, staleness: int) -> None:
    """As in the pseudo-code: the first scores are zero, and each step chooses by those that the last one left."""
    run = Run(comm, scored="after", staleness=staleness, density=0.05)
    scorer: Any = run.sync._aggregator.works.scorer.inner
    for step in range(5):
        left = scorer.influence.scores.numpy().copy()
        run.step(step)
        chosen = run.sync._companion.selection.chosen
        assert everywhere(
            comm, set(chosen.index.tolist()) == set(np.argsort(-left, kind="stable")[: run.sync.k if step else 0])
        )
        assert everywhere(comm, not np.array_equal(left, scorer.influence.scores))
    run.close()


def test_influence_of_updates_needs_an_optimizer(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="speculative", staleness=0, influence="update")
    loss_of(model, seeded(comm.rank, 0)).backward()
    assert "attach() it" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()
