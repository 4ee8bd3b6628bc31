"""A collective that one rank forgets is named on all ranks, whatever the others are in; nothing hangs, and all can go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import alike, loss_of, raised, seeded, small
from torch import nn

import mpisparse
from mpisparse.comm import roll_call
from mpisparse.comm.roll_call import ENTRIES, in_words
from mpisparse.errors import CollectiveError

pytestmark = pytest.mark.mpi

SCHEMES: dict[str, dict[str, Any]] = {
    "exdyna": {},
    "dense": {},
    "backward": {"scheme": "exdyna", "accumulate": "backward"},
    "speculative": {},  # delivers in flight
    "drift": {"every": 2},
    "drift in flight": {"scheme": "drift", "every": 2, "staleness": 1},
    "a dense start": {"scheme": "drift", "dense_steps": 100},
}


class Run:
    """A model in training."""

    def __init__(self, comm: MPI.Intracomm, name: str = "exdyna") -> None:
        self.comm, self.model, self.number = comm, small(), 0
        options = {"scheme": name, "density": None if name == "dense" else 0.1, **SCHEMES[name]}
        self.sync = mpisparse.GradientSync(self.model, comm=comm, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        mpisparse.attach(self.optimizer, self.sync)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, seeded(self.comm.rank, self.number)).backward()
        self.number += 1
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def save(self, directory: Path) -> Callable[[], Path]:
        return lambda: mpisparse.checkpoint.save(
            directory, step=self.number, model=self.model, optimizer=self.optimizer, sync=self.sync
        )


def apart(comm: MPI.Intracomm, first: Callable[[], Any], others: Callable[[], Any]) -> str:
    """Return the error of all ranks when rank 0 is in one call and the others in another. Collective."""
    return raised(comm, CollectiveError, first if comm.rank == 0 else others)


def named(comm: MPI.Intracomm, place: str) -> str:
    """What the message says of all ranks but rank 0."""
    return {2: f"rank 1 {place}", 3: f"ranks 1 and 2 {place}", 4: f"ranks 1, 2 and 3 {place}"}[comm.size]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_checkpoint_of_rank_0_alone_in_mid_training(comm: MPI.Intracomm, directory: Path, name: str) -> None:
    """Where the exchange is in flight the others learn of it when its result is due."""
    run = Run(comm, name)
    run.steps(4)
    text = apart(comm, run.save(directory), lambda: run.steps(6))
    step = 5 if name.startswith("drift") else 4  # the next one that exchanges
    assert (
        text == f"rank 0 is in checkpoint.save, {named(comm, f'in step {step}')}: save is collective, call it on every rank"
    )
    assert not list(directory.iterdir())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["exdyna", "drift"])
def test_after_a_mismatch_all_can_go_on(comm: MPI.Intracomm, directory: Path, name: str) -> None:
    run = Run(comm, name)
    run.steps(2)
    apart(comm, run.save(directory), lambda: run.sync.average(1.0))
    run.steps(2)
    run.save(directory)()
    run.steps(2)
    run.sync.synchronize()
    assert alike(comm, run.model.parameters())
    run.sync.close()


@pytest.mark.mpi(min_size=2)
def test_every_entry_point_has_a_name(comm: MPI.Intracomm, directory: Path) -> None:
    run = Run(comm)
    run.steps(3)
    sync, model = run.sync, run.model
    state = sync.state_dict()
    saving = mpisparse.checkpoint.begin_save(directory, step=3, model=model, optimizer=run.optimizer, sync=sync)
    calls: dict[str, Callable[[], Any]] = {
        "checkpoint.save": run.save(directory),
        "finish() of a checkpoint": saving.finish,
        "checkpoint.load": lambda: mpisparse.checkpoint.load(directory, model=model, optimizer=run.optimizer, sync=sync),
        "average": lambda: sync.average(2.0),
        "observe": lambda: sync.observe(2.0),
        "agree_any": lambda: sync.agree_any(True),
        "gather_floats": lambda: sync.gather_floats(np.zeros(3)),
        "broadcast_": lambda: sync.broadcast_(list(model.parameters())),
        "check_together": lambda: sync.check_together(None),
        "synchronize": sync.synchronize,
        "load_state_dict": lambda: sync.load_state_dict(state),
        "close": sync.close,
    }
    assert set(calls) <= set(ENTRIES)
    for name, call in calls.items():
        text = apart(comm, call, run.step)
        assert (
            text
            == f"rank 0 is in {name}, {named(comm, 'in step 3')}: {name.split('.')[-1]} is collective, call it on every rank"
        )
    assert "average" in apart(comm, sync.synchronize, lambda: sync.average(1.0))
    saving.finish()
    run.step()
    sync.close()
    sync.close()  # twice is fine


@pytest.mark.mpi(min_size=2)
def test_of_aggregators_and_optimizers_that_exchange_by_themselves(comm: MPI.Intracomm) -> None:
    made = mpisparse.aggregator(1000, density=0.1, comm=comm)
    vector = torch.randn(1000, generator=seeded(comm.rank, 0))
    made.step(vector)
    assert "rank 0 is in close, " in apart(comm, made.close, lambda: made.step(vector))
    made.close()
    model = small()
    optimizer = mpisparse.optim.OneBitAdamW(model.parameters(), comm=comm)
    loss_of(model, seeded(comm.rank, 0)).backward()
    optimizer.step()
    state = optimizer.state_dict()
    text = apart(comm, lambda: optimizer.load_state_dict(state), optimizer.step)
    assert text.startswith(f"rank 0 is in load_state_dict, {named(comm, 'in step 1')}")
    optimizer.close()


def test_numbers_of_all_ranks(comm: MPI.Intracomm) -> None:
    """What a roll call carries along arrives whole."""
    sync = mpisparse.GradientSync(small(), density=0.1, comm=comm)
    values = [0.1 + rank for rank in range(comm.size)]
    assert sync.average(values[comm.rank]) == sum(values) / comm.size
    assert sync.agree_any(comm.rank == comm.size - 1) is True
    assert sync.agree_any(False) is False
    assert sync.gather_floats(np.full(2, float(comm.rank))).tolist() == [[float(r)] * 2 for r in range(comm.size)]
    tensor = torch.full((3,), float(comm.rank + 1))
    sync.broadcast_([tensor])
    assert tensor.tolist() == [1.0] * 3
    sync.close()


def test_a_model_of_one_parameter(comm: MPI.Intracomm) -> None:
    """Fewer elements than ranks: the roll call is the same."""
    model = nn.Linear(1, 1, bias=False)
    sync = mpisparse.GradientSync(model, density=1.0, comm=comm)
    model(torch.ones(1, 1)).sum().backward()
    sync.step()
    if comm.size > 1:
        assert "in step 1" in apart(
            comm, lambda: sync.average(1.0), lambda: (model(torch.ones(1, 1)).sum().backward(), sync.step())
        )
    sync.close()


def test_words() -> None:
    save, step, end = ENTRIES.index("checkpoint.save"), 0, ENTRIES.index("the end of the program")
    assert in_words([(save, 3), (step, 12)]) == (
        "rank 0 is in checkpoint.save, rank 1 in step 12: save is collective, call it on every rank"
    )
    assert in_words([(step, 4), (end, 4), (end, 4)]).startswith(
        "rank 0 is in step 4, ranks 1 and 2 at the end of the program: "
    )
    assert in_words([(step, 4)] * 12 + [(step, 5)]).startswith(
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more are in step 4, rank 12 in"
    )


def test_a_connection_that_is_closed_says_in_which_call() -> None:
    """Over a process group a rank that ends closes its connections; no roll call of it comes."""

    class Closed:
        def gathered(self, gathering: Any) -> Any:
            raise ConnectionError("r0 | the exchange with the other ranks broke off")

    row = np.array([roll_call.ENTRIES.index("checkpoint.save"), 6], dtype=np.int64)
    call: Any = roll_call.Call(Closed(), row, gathering=object())  # type: ignore[arg-type]
    with pytest.raises(ConnectionError, match=r"broke off. This rank was in checkpoint.save: .* make it on every rank"):
        roll_call.answers(call)
