"""staleness=1: exdyna's exchange runs while the next step is computed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, everywhere, loss_of, raised, seeded, small, total, trainable

import mpisparse

pytestmark = pytest.mark.mpi


def late(model: torch.nn.Module, **options: Any) -> mpisparse.GradientSync:
    return mpisparse.GradientSync(model, **{"density": 0.1, "staleness": 1, **options})


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in trainable(model)])


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_the_means_are_those_of_the_vectors_aggregator(comm: MPI.Intracomm, codec: str) -> None:
    """The reference is mpisparse.aggregator(n, staleness=1); the first mean is zero."""
    model = small()
    sync = late(model, codec=codec)
    plain = mpisparse.aggregator(sync.residual.numel(), density=0.1, codec=codec, staleness=1)
    same = True
    for step in range(6):
        model.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        own = flat(model)
        sync.step()
        same &= bits([flat(model)]) == bits([plain.step(own)])
        assert bool(flat(model).any()) == (step >= 2)  # indices of a step travel with it, its values with the next
    plain.close()
    sync.close()
    assert everywhere(comm, same)


@pytest.mark.parametrize("attached", [True, False])
def test_resumed_in_flight_is_bitwise_uninterrupted(comm: MPI.Intracomm, directory: Path, attached: bool) -> None:
    def run(model: Any, sync: Any, optimizer: Any, steps: range) -> bytes:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, seeded(comm.rank, step)).backward()
            if not attached:
                sync.step()
            optimizer.step()
        return bits([*model.parameters(), sync.residual])

    def made() -> tuple[Any, Any, Any]:
        model = small()
        sync = late(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attached:
            mpisparse.attach(optimizer, sync)
        return model, sync, optimizer

    first = made()
    run(*first, range(4))
    mpisparse.checkpoint.save(directory / "saved", model=first[0], sync=first[1], optimizer=first[2], step=4)
    found = run(*first, range(4, 8))
    second = made()
    mpisparse.checkpoint.load(directory / "saved", model=second[0], sync=second[1], optimizer=second[2])
    assert len(second[1]._aggregator.works.flight) == 1
    same = run(*second, range(4, 8)) == found
    for each in (first, second):
        each[1].close()
    assert everywhere(comm, same)


@pytest.mark.parametrize("attached", [True, False])
def test_synchronize_lets_the_optimizer_use_what_is_in_flight(comm: MPI.Intracomm, attached: bool) -> None:
    """With SGD at rate 1, what the weights have moved and what waits add up to all gradients."""
    model = small()
    start = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]).double()
    sync = late(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = mpisparse.attach(optimizer, sync) if attached else None
    given = torch.zeros(len(start), dtype=torch.float64)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        given += flat(model).double()
        if handle is None:
            sync.step()
        optimizer.step()
    sync.synchronize()
    if handle is None:
        optimizer.step()
    assert len(sync._aggregator.works.flight or ()) == 0
    moved = start - torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
    balance = moved * comm.size / 0.01 + total(comm, sync.residual)
    scale = total(comm, given.abs()).max()
    assert everywhere(comm, (balance - total(comm, given)).abs().max() < 1e-4 * scale)
    assert alike(comm, model.parameters())
    for step in range(5, 7):  # it goes on
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        if handle is None:
            sync.step()
        optimizer.step()
    assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{"staleness": 1}, {"scheme": "drift", "staleness": 1}], ids=str)
def test_over_mpi_for_one_thread_the_same_bits_come_and_it_is_said_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    ends, told = [], list[str]()
    for level in (MPI.Query_thread(), MPI.THREAD_SERIALIZED):
        monkeypatch.setattr(MPI, "Query_thread", lambda level=level: level)
        model = small()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sync = mpisparse.GradientSync(model, density=0.1, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            mpisparse.attach(optimizer, sync)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, seeded(comm.rank, step)).backward()
                optimizer.step()
        told += [str(each.message) for each in caught if "serves one thread only" in str(each.message)]
        ends.append(bits([*model.parameters(), sync.residual]))
        sync.close()
    assert everywhere(comm, ends[0] == ends[1])
    assert everywhere(comm, len(told) == (1 if comm.rank == 0 else 0)), told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staleness": 2}, "staleness must be 0 or 1, got 2"),
        ({"staleness": -1}, "staleness must be a whole number >= 0"),
        ({"accumulate": "backward"}, 'staleness=1 needs accumulate="step"'),
        ({"nonfinite": "skip"}, 'and nonfinite="raise"'),
        ({"overlap": True}, "choose one of them"),
    ],
)
def test_options_that_do_not_go_together(comm: MPI.Intracomm, options: dict[str, Any], said: str) -> None:
    assert said in raised(comm, mpisparse.ConfigurationError, lambda: late(small(), **options))
