"""The simulator selects what a real run on the same number of ranks does: indices, threshold, borders, workloads, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray
from ranks import everywhere

import mpisparse
from mpisparse.bench.given import GivenModel
from mpisparse.errors import ConfigurationError
from mpisparse.plan.simulator import simulator
from mpisparse.plan.synthetic import Synthetic
from mpisparse.select import search

pytestmark = pytest.mark.mpi


class Apart(Synthetic):
    """Each rank has gradients only in its share of the vector; in the first share they are all equal."""

    def gradient(self, rank: int, step: int) -> NDArray[np.float32]:
        values = super().gradient(rank, step).copy()
        share = np.arange(len(values)) * self.ranks // len(values)
        values[share != self.ranks - 1 - rank] = 0.0
        return np.where(share == 0, np.sign(values), values)


CASES: list[dict[str, Any]] = [
    {"scheme": "exdyna"},
    {"scheme": "exdyna", "accumulate": "backward"},
    {"scheme": "exdyna", "controller": "paper", "partitioner": "paper"},
    {"scheme": "exdyna", "controller": "fixed", "partitioner": "static", "blocks": 77},
    {"scheme": "exdyna", "density": 1.0},
    {"scheme": "topk"},
    {"scheme": "cltk", "density": 0.1},
]


@pytest.mark.parametrize("gathered", [16, 0], ids=["few", "many"])
@pytest.mark.parametrize(
    ("source_of", "case"), [*((Synthetic, case) for case in CASES), *((Apart, case) for case in CASES[:2])], ids=str
)
def test_real_and_simulated_steps_are_equal(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, source_of: type[Synthetic], case: dict[str, Any], gathered: int
) -> None:
    monkeypatch.setattr(search, "GATHERED_RANKS", gathered)
    options = {"density": 0.01, **case}
    source = source_of(30_001, comm.size)
    model = GivenModel.of(source, comm.rank)
    sync = mpisparse.GradientSync(model, **options)
    virtual = simulator(source=source, size=comm.size, **options)
    for step in range(6):
        model.zero_grad()
        model.backward()
        sync.step()
        stats, expected = sync.stats, comm.bcast(virtual.step() if comm.rank == 0 else None)
        assert everywhere(comm, np.array_equal(sync._gradients.published.union, expected.union)), f"step {step}"
        assert everywhere(comm, (stats.threshold, stats.borders) == (expected.threshold, expected.borders)), f"step {step}"
        assert everywhere(comm, stats.workloads == tuple(expected.workloads[[r.rank for r in expected.regions]]))
        counted = (int(expected.log.sent()[comm.rank]), int(expected.log.received()[comm.rank]))
        assert everywhere(comm, (stats.bytes_sent, stats.bytes_received) == counted), f"step {step}"
    sync.close()


def test_bytes_in_few_bits_are_those_of_a_real_step(comm: MPI.Intracomm) -> None:
    """Of the first step: later ones select by what the codec has left, too."""
    source = Synthetic(20_000, comm.size)
    model = GivenModel.of(source, comm.rank)
    sync = mpisparse.GradientSync(model, density=0.02, codec="int4", comm=comm)
    model.backward()
    sync.step()
    log = simulator("exdyna", source, comm.size, 0.02, codec="int4").step().log
    same = (sync.stats.bytes_sent, sync.stats.bytes_received) == (log.sent()[comm.rank], log.received()[comm.rank])
    sync.close()
    assert everywhere(comm, same)


def test_what_it_does_not_know_is_refused() -> None:
    for options in ({"scorer": "average"}, {"codec": "momentum-int8"}):
        with pytest.raises(ConfigurationError, match="leave the other options as they are"):
            simulator("exdyna", Synthetic(100, 2), 2, 0.1, **options)
    with pytest.raises(ConfigurationError, match='scheme "dgc" has no simulator'):
        simulator("dgc", Synthetic(100, 2), 2, 0.1)
