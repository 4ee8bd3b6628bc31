"""Control messages: what a step receives besides indices and values stays small, however few elements are selected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

import mpisparse
from mpisparse.backends.device import load_backend
from mpisparse.bench.given import GivenModel
from mpisparse.comm.exchange import Exchange
from mpisparse.plan.synthetic import Synthetic
from mpisparse.select import tallies

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings('ignore:scheme "predictive" without validation')]

FIRST, STEPS = 20, 32  # steps that are not counted, and those that are; two of these select by magnitude
OTHER = 1024  # bytes for each other rank


class Fresh(Synthetic):
    """Other gradients in every step."""

    steps = FIRST + STEPS

    def gradient(self, rank: int, step: int) -> NDArray[np.float32]:
        random = np.random.default_rng((rank, step))
        parts = [scale * random.standard_t(3, size) for size, scale in zip(self.sizes, self.scales, strict=True)]
        return np.concatenate(parts).astype(np.float32)


def bytes_of_steps(
    comm: MPI.Intracomm, source: Synthetic, **options: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean over ranks of control bytes and of the others, for each step of the steady state."""
    model = GivenModel.of(source, comm.rank)
    sync = mpisparse.GradientSync(model, **options)
    moved = np.zeros((2, STEPS))
    for step in range(FIRST + STEPS):
        model.zero_grad()
        model.backward()
        sync.step()
        if step >= FIRST:
            control = sync.stats.control_bytes
            moved[:, step - FIRST] = control, sync.stats.bytes_received - control
    sync.close()
    control, payload = comm.allreduce(moved) / comm.size
    return control, payload


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "exdyna", "codec": "int8"},
        {"scheme": "exdyna", "codec": "int8", "accumulate": "backward"},
        {"scheme": "momentum"},
        {"scheme": "predictive"},
    ],
    ids=lambda options: "-".join(options.values()),
)
@pytest.mark.parametrize(("n", "density"), [(20_000, 0.001), (60_000, 0.01), (60_000, 0.1)])
@pytest.mark.singles
def test_control_is_a_quarter_of_the_rest_and_a_kilobyte_for_each_other_rank(
    comm: MPI.Intracomm, n: int, density: float, options: dict[str, Any]
) -> None:
    control, payload = bytes_of_steps(comm, Fresh(n, comm.size), density=density, **options)
    assert control.mean() <= payload.mean() / 4 + OTHER * (comm.size - 1)


@pytest.mark.mpi(min_size=2)
def test_a_step_whose_threshold_is_hard_to_find_costs_at_most_three_times_that(comm: MPI.Intracomm) -> None:
    """Gradients that repeat, of which each rank's nets learn keys of another scale: docs/explanation/design.md says why."""
    control, payload = bytes_of_steps(comm, Synthetic(60_000, comm.size), scheme="predictive", density=0.01)
    bound = payload / 4 + OTHER * (comm.size - 1)
    assert control.mean() <= 1.25 * bound.mean()
    assert (control <= 3 * bound).all()


@pytest.mark.parametrize("total", [0, 1, 30, 100, 5000])
@pytest.mark.parametrize("known", [True, False])
def test_counts_arrive(comm: MPI.Intracomm, total: int, known: bool) -> None:
    """Few items in many slots and many in few; ranks with nothing among them."""
    backend, exchange = load_backend(), Exchange(comm)
    rows = [np.bincount(np.random.default_rng(r).integers(0, 77, r % 2 * total), minlength=77) for r in range(comm.size)]
    totals = np.array([row.sum() for row in rows]) if known else None
    got = tallies.gather(exchange, backend, rows[comm.rank], totals)
    exchange.close()
    np.testing.assert_array_equal(got, np.stack(rows))
