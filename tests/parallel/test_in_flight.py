"""Exclusive selection in flight: deliveries that are applied one or more steps after they were sent."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, carried, everywhere, loss_of, seeded, small, total

import mpisparse
from mpisparse import names
from mpisparse.core.flights import check_agreed, unpack_agreed
from mpisparse.core.records import Delivered, Parts
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.schemes import register_scheme
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.partitioned import Exdyna
from mpisparse.schemes.state import step_state

pytestmark = pytest.mark.mpi


@dataclass(frozen=True)
class LateExdyna(Exdyna):
    """exdyna with its deliveries in flight."""

    flight: int = 1

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        return Scheme(self.aggregated(parts, site, self.flight))


if "late-exdyna" not in names.SCHEMES:
    register_scheme("late-exdyna", LateExdyna)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in model.parameters()])


def train(comm: MPI.Intracomm, sync: mpisparse.GradientSync, model: torch.nn.Module, count: int) -> Iterator[torch.Tensor]:
    """Train; yields each step's own gradient after the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        own = flat(model).double()
        sync.step()
        yield own
        optimizer.step()
        assert alike(comm, model.parameters())


WITH_PARTS: list[dict[str, Any]] = [
    {"staleness": 1}, {"staleness": 1, "codec": "momentum-int8"}, {"scheme": "drift", "staleness": 1},
    {"scheme": "speculative"}, {"overlap": True, "bucket_mb": 0.001}, {"scheme": "momentum"},
]  # fmt: skip


@pytest.mark.parametrize("options", WITH_PARTS, ids=str)
def test_a_state_goes_through_a_file_of_torch(comm: MPI.Intracomm, options: dict[str, Any]) -> None:
    """torch.load takes nothing but tensors and plain values by default, also of what is in flight or in buckets."""
    trained = []
    for stops in (False, True):
        model = small()
        sync = mpisparse.GradientSync(model, density=0.1, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mpisparse.attach(optimizer, sync)
        for step in range(6):
            if stops and step == 3:
                file = io.BytesIO()
                with sync.global_weights():
                    torch.save([model.state_dict(), optimizer.state_dict(), sync.state_dict()], file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                for part, state in zip((model, optimizer, sync), saved, strict=True):
                    part.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, seeded(comm.rank, step)).backward()
            optimizer.step()
        sync.synchronize()
        trained.append(bits([*model.parameters(), sync.residual]))
        sync.close()
    assert everywhere(comm, trained[0] == trained[1])


@pytest.mark.parametrize("codec", ["fp32", "int8", "momentum-int8"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_nothing_is_lost_and_every_step_is_counted(comm: MPI.Intracomm, staleness: int, codec: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="late-exdyna", density=0.05, codec=codec, flight=staleness)
    given, arrived = torch.zeros(2, sync.residual.numel(), dtype=torch.float64)
    for step, own in enumerate(train(comm, sync, model, 8)):
        given += own
        arrived += comm.size * flat(model).double()
        waiting, coming = sync.residual.double(), torch.zeros_like(arrived)
        state = sync.state_dict()
        waiting += carried(state, len(waiting))
        for delivery in state["step.flight"]:
            waiting[delivery["sent"]] += torch.as_tensor(delivery["left"]).double()
            coming[delivery["index"]] += comm.size * torch.as_tensor(delivery["mean"]).double()
        off = (total(comm, given) - arrived - coming - total(comm, waiting)).abs().max()
        assert off < 1e-5
        assert everywhere(comm, sync._aggregator.number == step + 1)
    for _ in sync._aggregator.arrivals():  # what one brings back to be blended is added to what the one before it brought
        arrived += comm.size * flat(model).double()
    waiting = sync.residual.double() + carried(sync.state_dict(), len(arrived))
    assert (total(comm, given) - arrived - total(comm, waiting)).abs().max() < 1e-5
    sync.close()


def test_what_has_just_set_out_is_not_selected_again(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="late-exdyna", density=0.05)
    last, again, count = np.empty(0, dtype=np.int64), 0, 0
    for _ in train(comm, sync, model, 10):
        union = np.asarray(sync.state_dict()["step.flight"][0]["agreed"]["union"])
        again, count, last = again + len(np.intersect1d(union, last)), count + len(union), union
    assert count > 0
    assert again == 0
    sync.close()


def test_an_agreement_fits_another_number_of_ranks(comm: MPI.Intracomm) -> None:
    """Values that were agreed on by as many ranks as saved the state are sent by those that loaded it."""
    model = small()
    sync = mpisparse.GradientSync(model, scheme="late-exdyna", density=0.05)
    for _ in train(comm, sync, model, 3):
        pass
    selection, n = sync._aggregator.works.selection, sync.residual.numel()
    packed = step_state(sync.state_dict())["flight"][0]["agreed"]
    for size in (comm.size, comm.size + 1, comm.size + 3):
        agreed = unpack_agreed(selection, packed, n, size)
        assert [region.rank for region in sorted(agreed.regions)] == list(range(size))
        assert sum(region.hi - region.lo for region in agreed.regions) == n
        assert agreed.workloads.sum() == len(agreed.union)
        check_agreed(selection, packed, n, size)
    outside = {**packed, "union": np.array([n])}
    with pytest.raises(ConfigurationError, match="not of this model"):
        check_agreed(selection, outside, n, comm.size)
    sync.close()


@pytest.mark.parametrize("compensate", [True, False])
def test_momentum_in_flight_is_that_at_once_a_step_later(comm: MPI.Intracomm, compensate: bool) -> None:
    """Each rank's own elements leave when they are chosen, so that the same ones are blended with the same ones."""
    options = {"scheme": "momentum", "masks": "own", "codec": "momentum-fp32", "compensate": compensate}
    now, late = (mpisparse.aggregator(300, comm=comm, staleness=staleness, **options) for staleness in (0, 1))
    means = []
    for step in range(12):
        given = torch.randn(300, generator=seeded(comm.rank, step)) ** 3
        mean = late.step(given).clone()
        assert everywhere(comm, torch.equal(mean, means[-1] if means else torch.zeros(300))), f"step {step}"
        means.append(now.step(given).clone())
    assert now.works.flight is None
    assert late.works.flight is not None
    (arrived,) = late.works.flight.results()
    assert isinstance(arrived, Delivered)
    assert everywhere(comm, len(arrived.sent.index) > late.k), "nothing was sent that was not chosen in the same step"
    now.close()
    late.close()


def test_an_aggregator_whose_scorer_is_in_trouble_refuses_the_step(comm: MPI.Intracomm) -> None:
    """On all ranks, although only the last one has a problem."""
    sync = mpisparse.GradientSync(small(), density=0.05)
    aggregator = sync._aggregator
    if comm.rank == comm.size - 1:
        aggregator.works.scorer.ready = lambda exempt, lap: "out of data"  # type: ignore[method-assign]
    with pytest.raises(GradientError, match="out of data"):
        aggregator.step(torch.ones(sync.residual.numel()), 10)
    assert not bool(sync.residual.any())
    sync.close()
