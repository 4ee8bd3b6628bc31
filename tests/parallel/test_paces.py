"""Scheme auto with exchanges of weights in every so many steps: nothing is lost, runs resume, logs are followed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from autos import SLOW, a_run, log_of, script, trained, wide
from mpi4py import MPI
from ranks import alike, bits, everywhere, loss_of, seeded, small, total
from test_families import everything, flat, one, shared, where_it_would_be

import mpisparse
from mpisparse import checkpoint
from mpisparse.plan.candidates import ALL, Candidate
from mpisparse.plan.choosing import Choosing
from mpisparse.plan.predict import Links, Window

pytestmark = pytest.mark.mpi
FOURTH, SIGN, SIXTEENTH = "drift 17 % int2 every 4", "drift 13 % sign", "drift 13 % sign every 16"
ENTRIES = [(0, "dense fp32"), (2, FOURTH), (9, SIGN), (14, SIXTEENTH), (18, "dense int8")]
LAST = 35
EXCHANGES = [4, 8, 12, 13, 14, 16, 32]  # after these steps weights are exchanged; the choices of 9 and 18 are due then


def test_nothing_is_lost_and_choices_count_the_optimizers_steps(comm: MPI.Intracomm, directory: Path) -> None:
    lr = 0.1
    log = log_of(comm, directory, ENTRIES, small())
    model = small()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, deterministic=log)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    mpisparse.attach(optimizer, sync)
    given, begin, used, exchanged = torch.zeros_like(flat(model)), flat(model), [], []
    for step in range(LAST):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        given += total(comm, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double())
        weights = sync.exchanges_weights
        optimizer.step()
        used.append(int(sync.stats.details["choice"]))
        if weights and sync.stats.density > 0:
            exchanged.append(step + 1)
        off = where_it_would_be(comm, model, sync, lr) - (begin - lr / comm.size * given)
        assert everywhere(comm, float(off.abs().max()) <= 1e-5), (step, off.abs().max())
        assert alike(comm, shared(model, sync)), step
    assert exchanged == EXCHANGES
    names = ["dense fp32"] * 2 + [FOURTH] * 10 + [SIGN] * 2 + [SIXTEENTH] * 18 + ["dense int8"] * 3
    assert used == [one(name) for name in names]
    history = [[0, "dense fp32"], [2, FOURTH], [12, SIGN], [14, SIXTEENTH], [32, "dense int8"]]
    assert sync.state_dict()["step.history"] == history
    sync.close()


@pytest.mark.parametrize("middle", [6, 8, 15])
def test_resumed_is_uninterrupted(comm: MPI.Intracomm, directory: Path, middle: int) -> None:
    """Between two exchanges, too; by the run itself, and by another one."""
    log = log_of(comm, directory, ENTRIES, small())
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    used = trained(model, sync, optimizer, 0, middle)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=middle)
    used += trained(model, sync, optimizer, middle, LAST)
    whole = everything(model, sync, optimizer)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    assert trained(model, sync, optimizer, middle, LAST) == used[middle:]
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    assert trained(model, sync, optimizer, middle, LAST) == used[middle:]
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("every", "expected"), [(1, SIGN), (4, "drift 13 % sign every 4"), (16, SIXTEENTH)])
def test_a_slow_link_gets_the_rarest_exchange_that_is_allowed(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, every: int, expected: str
) -> None:
    told = script(monkeypatch)
    told[:] = [SLOW]
    model, sync, optimizer = a_run(comm, "AdamW", wide, every=every)
    assert ALL[trained(model, sync, optimizer, 0, 5)[-1]].name == expected
    trained(model, sync, optimizer, 5, 20)
    assert alike(comm, shared(model, sync))
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_look_after_as_many_exchanges_and_every_step_tells_what_was_predicted(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exchanges here, which every fourth step has: the first one after a change is not timed."""
    script(monkeypatch)[:] = [SLOW]
    looked: list[int] = []
    weigh = Choosing._weigh

    def spied(self: Choosing, window: Window, done: int, known: list[Candidate]) -> None:
        looked.append(done)
        weigh(self, window, done, known)

    monkeypatch.setattr(Choosing, "_weigh", spied)
    model, sync, optimizer = a_run(comm, "AdamW", wide)
    for step in range(33):
        trained(model, sync, optimizer, step, step + 1)
        if step > 4:
            assert sync.exchanges_weights
            assert "predicted_dense fp32" in sync.stats.details, step
    assert looked == [3, 16, 24, 32]
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_run_that_goes_back_replays_what_it_chose_between_exchanges(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Links] = script(monkeypatch)
    told[:] = [SLOW]
    log = str(directory / "log.jsonl")
    model, sync, optimizer = a_run(comm, "AdamW", wide, log=log)
    trained(model, sync, optimizer, 0, 10)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=10)
    used = trained(model, sync, optimizer, 10, 30)
    whole = bits(shared(model, sync))
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == 10
    assert trained(model, sync, optimizer, 10, 30) == used
    assert everywhere(comm, bits(shared(model, sync)) == whole)
    sync.close()
    comm.Barrier()
    model, sync, optimizer = a_run(comm, "AdamW", wide, log=log)
    checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    assert trained(model, sync, optimizer, 10, 30) == used
    assert everywhere(comm, bits(shared(model, sync)) == whole)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_batches_keeps_the_pace(comm: MPI.Intracomm, directory: Path) -> None:
    log = log_of(comm, directory, [(0, "dense fp32"), (2, FOURTH), (12, "dense int8")], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    with sync.join():
        trained(model, sync, optimizer, 0, 5 if comm.rank == 0 else 15)
    assert not sync.exchanges_weights
    assert alike(comm, model.parameters())
    sync.close()
