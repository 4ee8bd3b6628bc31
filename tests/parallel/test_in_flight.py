"""Exclusive selection in flight: deliveries that are applied one or more steps after they were sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import alike, everywhere, loss_of, seeded, small, total

import mpisparse
from mpisparse import names
from mpisparse.core.flights import check_agreed, unpack_agreed
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError
from mpisparse.schemes import register_scheme
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.partitioned import Exdyna

pytestmark = pytest.mark.mpi


@dataclass(frozen=True)
class LateExdyna(Exdyna):
    """exdyna with its deliveries in flight."""

    staleness: int = 1

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        return Scheme(self.put_together(parts, self.make_scorer(parts), keep=self.compensate, staleness=self.staleness))


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


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_nothing_is_lost_and_every_step_is_counted(comm: MPI.Intracomm, staleness: int, codec: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="late-exdyna", density=0.05, codec=codec, staleness=staleness)
    given, arrived = torch.zeros(2, sync.residual.numel(), dtype=torch.float64)
    for step, own in enumerate(train(comm, sync, model, 8)):
        given += own
        arrived += comm.size * flat(model).double()
        waiting, coming = sync.residual.double(), torch.zeros_like(arrived)
        for delivery in sync.state_dict()["step.flight"]:
            waiting[delivery["sent"]] += torch.as_tensor(delivery["left"]).double()
            coming[delivery["index"]] += comm.size * torch.as_tensor(delivery["mean"]).double()
        off = (total(comm, given) - arrived - coming - total(comm, waiting)).abs().max()
        assert off < 1e-5
        assert everywhere(comm, sync._aggregator.number == step + 1)
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
    packed = sync.state_dict()["step.flight"][0]["agreed"]
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


def test_a_codec_that_blends_is_refused(comm: MPI.Intracomm) -> None:
    with pytest.raises(ConfigurationError, match="in flight choose one that does not"):
        mpisparse.GradientSync(small(), scheme="late-exdyna", codec="momentum-int8")


def test_an_aggregator_whose_scorer_is_in_trouble_refuses_the_step(comm: MPI.Intracomm) -> None:
    """On all ranks, though only the last one is in trouble."""
    sync = mpisparse.GradientSync(small(), density=0.05)
    aggregator = sync._aggregator
    if comm.rank == comm.size - 1:
        aggregator.works.scorer.ready = lambda exempt, lap: "out of data"  # type: ignore[method-assign]
    with pytest.raises(mpisparse.GradientError, match=f"r{comm.size - 1} . out of data"):
        aggregator.step(torch.ones(sync.residual.numel()), 10)
    assert not bool(sync.residual.any())
    sync.close()
