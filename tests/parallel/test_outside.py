"""A codec and a scheme from outside the package go through the exchange as built-in ones do."""

from __future__ import annotations

from typing import Any

import outside.registered  # noqa: F401 - registers them
import pytest
import torch
from mpi4py import MPI
from ranks import everywhere, loss_of, raised, small, train_lawfully

import mpisparse
from mpisparse import names
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.metrics import StepRows

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("path", ["step", "backward"])
@pytest.mark.parametrize("codec", ["upper16", "momentum-upper16", "bitmap", "momentum-bitmap", "momentum-fp16"])
@pytest.mark.parametrize("scheme", ["census", "exdyna", "momentum", "topk"])
@pytest.mark.pairs
def test_nothing_is_lost_and_replicas_are_equal(comm: MPI.Intracomm, scheme: str, codec: str, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme=scheme, codec=codec, density=0.02, accumulate=path)
    train_lawfully(comm, model, sync, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_of, 8)


@pytest.mark.parametrize("codec", ["upper16", "bitmap"])
def test_a_scheme_whose_ranks_send_their_own_elements_loses_nothing(comm: MPI.Intracomm, codec: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="speculative", codec=codec, density=0.05, staleness=0)
    train_lawfully(comm, model, sync, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_of, 8)


def test_a_scheme_reports_its_own_phase_and_detail(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="census", density=0.02, share=0.25)
    loss_of(model, torch.Generator().manual_seed(comm.rank)).backward()
    sync.step()
    assert everywhere(comm, sync.stats.seconds["head_count"] >= 0)
    assert everywhere(comm, sync.stats.details == {"waiting_elements": 0.0})
    model.zero_grad()
    loss_of(model, torch.Generator().manual_seed(comm.rank)).backward()
    sync.step()
    assert everywhere(comm, sync.stats.details["waiting_elements"] > 0)
    sync.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share": 2.0}, "share must be in [0, 1), got 2.0"),
        ({"shere": 0.1}, "unknown option 'shere' for scheme \"census\"; did you mean 'share'?"),
        ({"codec": "upper17"}, "unknown codec 'upper17'; did you mean 'upper16'?"),
    ],
)
def test_refusals_are_those_of_built_in_ones(comm: MPI.Intracomm, options: dict[str, Any], said: str) -> None:
    assert said in raised(comm, ConfigurationError, lambda: mpisparse.GradientSync(small(), scheme="census", **options))


def test_ranks_may_measure_different_phases(comm: MPI.Intracomm) -> None:
    exchange = Exchange(comm)
    rows = StepRows(exchange.allgather, exchange.gather_texts)
    first = rows.gather([7.0 + comm.rank], {"compute": 1.0, f"mine, rank {comm.rank}\n": 2.0})
    mine = [f"mine, rank {rank}\n" for rank in range(comm.size)]
    assert everywhere(comm, rows.phases == [*mine, "compute"])
    own = 2.0 * torch.eye(comm.size, dtype=torch.float64).numpy()
    assert everywhere(comm, (first[:, 0] == [7.0 + rank for rank in range(comm.size)]).all())
    assert everywhere(comm, (first[:, 1:-1] == own).all() and (first[:, -1] == 1.0).all())
    second = rows.gather([0.0], {"compute": 3.0} if comm.rank else {"compute": 3.0, "late": 4.0})
    assert everywhere(comm, rows.phases == ["late", *mine, "compute"])
    assert everywhere(comm, second[0].tolist() == [0.0, 4.0, *(0.0 for _ in mine), 3.0])
    exchange.close()


@pytest.mark.parametrize("kind", ["SCHEMES", "CODECS"])
def test_all_ranks_raise_if_one_has_not_registered_it(
    comm: MPI.Intracomm, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(getattr(names, kind), "_added", {})
    text = raised(comm, ConfigurationError, lambda: mpisparse.GradientSync(small(), scheme="census", codec="upper16"))
    assert ("unknown scheme 'census'" if kind == "SCHEMES" else "unknown codec 'upper16'") in text
