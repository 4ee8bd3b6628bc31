"""The dense start of drift: gradients are averaged in the first steps, then ranks train on their own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drifting import Training
from mpi4py import MPI
from ranks import alike, bits, everywhere, loss_of, raised, seeded, small, total
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.schemes.drift.companion import Drifting

pytestmark = pytest.mark.mpi

STEPS = 4


def companion(run: Training) -> Drifting:
    found = run.sync._companion
    assert isinstance(found, Drifting)
    return found


def waiting(run: Training) -> torch.Tensor:
    """The sum over ranks of what was given and not published; collective."""
    start = companion(run).start
    assert start is not None
    assert start.averaging is not None
    own = start.averaging.residual.double()
    own[start.averaging.lo : start.averaging.hi] += run.comm.size * start.averaging.error.double()
    return total(run.comm, own)


@pytest.mark.parametrize("codec", ["int4", "fp32", "sign"])
def test_it_is_dense_until_it_ends(comm: MPI.Intracomm, codec: str) -> None:
    run, twin = Training(comm, density=0.05, dense_steps=STEPS, dense_codec=codec), small()
    dense = mpisparse.GradientSync(twin, scheme="dense", codec=codec)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    mpisparse.attach(optimizer, dense)
    for step in range(STEPS - 1):
        run.step()
        optimizer.zero_grad()
        loss_of(twin, seeded(comm.rank, step)).backward()
        optimizer.step()
        assert everywhere(comm, run.sync.stats.bytes_received > 0 or comm.size == 1)
        for p, q in zip(run.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        assert alike(comm, run.model.parameters())
        assert everywhere(comm, torch.equal(run.shared(), run.own.float()))
    run.step()
    assert alike(comm, run.model.parameters())
    assert everywhere(comm, not run.sync.averages_gradients)
    run.step()
    assert alike(comm, [run.shared()])
    assert comm.size == 1 or not alike(comm, run.model.parameters())
    run.sync.close()
    dense.close()


@pytest.mark.parametrize("half", [False, True])
def test_nothing_is_lost(comm: MPI.Intracomm, half: bool) -> None:
    """All gradients = ranks x all means + what waits; and nothing waits at the end."""
    model = small().bfloat16() if half else small()
    run = Training(comm, torch.optim.SGD, model=model, density=0.05, dense_steps=STEPS, remainder=half)
    given, means = (torch.zeros(len(run.own), dtype=torch.float64) for _ in range(2))
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss().backward()
        given += torch.cat([p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None])
        run.sync.begin()
        means += torch.cat([p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None])
        assert alike(comm, [p.grad for p in model.parameters()])
        rest = waiting(run)
        torch.testing.assert_close(comm.size * means + rest, total(comm, given), rtol=1e-5, atol=1e-6)
        if step == STEPS - 1 and not half:
            assert float(rest.abs().max()) == 0.0
        run.sync.finish()
        run.steps += 1
    run.sync.close()


class Resumed(Training):
    """Saves and loads everything."""

    def __init__(self, comm: MPI.Intracomm, **options: Any) -> None:
        super().__init__(comm, density=0.05, dense_steps=STEPS, dense_codec="sign", **options)

    def save(self, directory: Path) -> None:
        checkpoint.save(directory, step=self.steps, model=self.model, optimizer=self.optimizer, sync=self.sync)

    def load(self, directory: Path) -> None:
        step = checkpoint.load(directory, model=self.model, optimizer=self.optimizer, sync=self.sync)
        assert step is not None
        self.steps = step

    def train(self, count: int) -> None:
        for _ in range(count):
            self.step()


@pytest.mark.parametrize("middle", [2, STEPS, STEPS + 1])
def test_resume_to_the_last_bit(comm: MPI.Intracomm, directory: Path, middle: int) -> None:
    """Loaded by a run that is still in its start, and by one that is beyond it."""
    first = Resumed(comm)
    first.train(middle)
    first.save(directory)
    first.train(STEPS + 3 - middle)
    for done in (0, STEPS + 2):
        other = Resumed(comm)
        other.train(done)
        other.load(directory)
        other.train(STEPS + 3 - middle)
        assert everywhere(comm, other.bits() == first.bits())
        other.sync.close()
    first.sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("old", [1, None])
def test_on_another_number_of_ranks_the_mean_of_what_waits_stays(
    comm: MPI.Intracomm, directory: Path, old: int | None
) -> None:
    """From one rank to all, and from all to one."""
    single = comm.Split(comm.rank, 0)
    before, after = (comm, single) if old is None else (single, comm)
    run = Resumed(before)
    run.train(2)
    if before is comm or comm.rank == 0:
        run.save(directory)
    mean = torch.from_numpy(comm.bcast((waiting(run) / before.size).numpy()))
    comm.barrier()
    other = Resumed(after)
    other.load(directory)
    torch.testing.assert_close(waiting(other) / after.size, mean, rtol=1e-5, atol=1e-7)
    other.train(STEPS)
    assert alike(after, [other.shared()])
    run.sync.close()
    other.sync.close()
    single.Free()


def test_a_gradient_that_is_not_finite_is_refused_on_all_ranks(comm: MPI.Intracomm) -> None:
    run = Training(comm, density=0.05, dense_steps=STEPS)
    run.step()
    before = run.bits()
    run.optimizer.zero_grad()
    (run.loss() * (float("nan") if comm.rank == comm.size - 1 else 1.0)).backward()
    said = raised(comm, mpisparse.GradientError, run.optimizer.step)
    assert f"rank {comm.size - 1} has a non-finite gradient" in said
    assert everywhere(comm, run.bits() == before)
    run.step()
    run.sync.close()


def test_a_rank_without_a_gradient_is_refused_on_all_ranks(comm: MPI.Intracomm) -> None:
    run = Training(comm, density=0.05, dense_steps=STEPS)
    if comm.rank:
        run.loss().backward()
    assert "no new gradient on rank 0" in raised(comm, mpisparse.GradientError, run.optimizer.step)
    run.sync.close()


def test_unused_parameters_do_not_move(comm: MPI.Intracomm) -> None:
    model = nn.ModuleDict({"used": small(), "unused": nn.Linear(3, 3)})
    run = Training(comm, model=model, density=0.05, dense_steps=2)
    before = bits(model["unused"].parameters())
    for step in range(2):
        run.optimizer.zero_grad()
        loss_of(model["used"], seeded(comm.rank, step)).backward()
        run.optimizer.step()
    assert everywhere(comm, bits(model["unused"].parameters()) == before)
    assert alike(comm, model.parameters())
    run.sync.close()


def test_what_it_cannot_do_is_refused(comm: MPI.Intracomm) -> None:
    table = nn.Embedding(9, 4, sparse=True)
    run = Training(comm, torch.optim.SGD, model=table, density=0.5, dense_steps=2)
    table(torch.tensor([1])).sum().backward()
    assert "sparse gradient of parameter weight" in raised(comm, mpisparse.GradientError, run.optimizer.step)
    said = raised(comm, mpisparse.ConfigurationError, run.sync.step)
    assert "attach() the optimizer" in said
    run.sync.close()


@pytest.mark.mpi(min_size=2)
def test_optimizers_that_differ_are_found_at_the_end(comm: MPI.Intracomm) -> None:
    run = Training(comm, density=0.05, dense_steps=2)
    run.optimizer.param_groups[0]["lr"] = 0.01 * (1 + comm.rank)
    run.step()
    assert "their optimizers differ" in raised(comm, mpisparse.GradientError, run.step)
    run.sync.close()


def test_a_scaler_skips_on_all_ranks_in_the_start_and_alone_after_it(comm: MPI.Intracomm) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    unscale, step = scaler.unscale_, scaler.step
    model = small()
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8", dense_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attachment = mpisparse.attach(optimizer, sync, scaler)
    moves = []
    for number in range(5):
        before = bits(model.parameters())
        optimizer.zero_grad()
        infinite = number in (1, 4) and comm.rank == 0
        scaler.scale(loss_of(model, seeded(comm.rank, number)) * (float("inf") if infinite else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moves.append(bits(model.parameters()) != before)
    assert everywhere(comm, moves[:4] == [True, False, True, True])
    assert everywhere(comm, not sync.averages_gradients)
    assert everywhere(comm, sync._aggregator.number == 2)
    attachment.remove()
    assert (scaler.unscale_, scaler.step) == (unscale, step)
    sync.close()


def test_a_closure_is_evaluated_before_its_gradients_are_averaged(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8", dense_steps=2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    mpisparse.attach(optimizer, sync)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seeded(comm.rank, 1))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        assert alike(comm, model.parameters())
    optimizer.step(closure)
    with sync.global_weights():
        assert alike(comm, model.parameters())
    sync.close()
