"""What is in flight, or in buckets, when the ranks form anew goes back to each rank; virtual ranks, of which none dies."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mpisparse
from mpisparse.comm.survival import Survival
from mpisparse.comm.virtual import VirtualComm, run_virtual
from tests.survival.job import owed

SIZES, RATE, STEPS, RANKS = (70, 40, 3), 0.5, 9, 3
BUCKETS = {"overlap": True, "bucket_mb": 0.0002}  # three of them
LATE = {"density": 0.1, "staleness": 1}
DRIFT = {"rate": 1.0, "codec": "fp32", "staleness": 1}


class Recovery:
    """Stands for Survival and CommittedDelivery: in chosen steps the ranks drop what is on its way, and go on.

    exchange: of all ranks. form: forms them anew. now: whether this is such a step. count: how often they did.
    """

    def __init__(self, exchange: Any, form: Callable[[], object]) -> None:
        self.exchange, self.form, self.now, self.count = exchange, form, False, 0
        self.survival = self

    def carrying(self, carry: Any) -> Any:
        return carry

    def surely(self, attempt: Callable[[], Any]) -> Any:
        self._form()
        return attempt()

    def commit(self, notice: Any, attempt: Callable[[bool], Any]) -> Any:
        result = attempt(False)
        return attempt(True) if self._form() else result

    def _form(self) -> bool:
        now, self.now = self.now, False
        if now:
            self.count += 1
            self.form()
        return now


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n)) for n in SIZES])

    def flat(self) -> np.ndarray:
        return torch.cat([p.detach() for p in self.weights]).numpy().copy()


def train(comm: VirtualComm, scheme: str, options: dict[str, Any], dropped: set[int], reloaded: set[int]) -> dict[str, Any]:
    model, given = Model(), np.zeros(sum(SIZES))
    sync = mpisparse.GradientSync(model, scheme=scheme, comm=comm, check_every=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    mpisparse.attach(optimizer, sync)
    aggregator, numbers, published = sync._aggregator, list[int](), list[np.ndarray]()
    recovery = Recovery(sync._exchange, lambda: aggregator.regrouped(sync.options.regrouped, comm.rank, comm.size)())
    aggregator.survive(recovery)  # type: ignore[arg-type]
    for step in range(STEPS):
        if step in reloaded:
            sync.load_state_dict(sync.state_dict())
        recovery.now = step in dropped
        grad = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(100 * comm.rank + step)) ** 3
        given += grad.double().numpy()
        optimizer.zero_grad()
        sum((p * part).sum() for p, part in zip(model.weights, grad.split(SIZES), strict=True)).backward()
        optimizer.step()
        numbers.append(sync.stats.step)
        published.append(model.flat())
    sync.synchronize()
    return {
        "given": given, "left": owed(sync).astype(np.float64), "weights": model.flat(), "numbers": numbers,
        "published": published, "count": recovery.count,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:overlap=True:UserWarning")  # virtual ranks have one thread
@pytest.mark.parametrize(
    ("scheme", "options", "dropped", "reloaded"),
    [
        ("exdyna", LATE, {3, 6}, set()),
        ("exdyna", LATE, {3, 6}, {3, 5}),
        ("exdyna", {**LATE, "codec": "int8"}, {2, 3, 4}, {4}),
        ("exdyna", {**LATE, "scorer": "average"}, {5}, set()),
        ("exdyna", {"density": 0.1, "masks": "own", "staleness": 2}, {4, 7}, {7}),
        ("exdyna", {**LATE, "codec": "momentum-int8"}, {3, 6}, set()),
        ("exdyna", {**LATE, "codec": "momentum-int8"}, {4}, {4}),
        ("exdyna", {"density": 0.1, "masks": "own", "staleness": 2, "codec": "momentum-int8"}, {4, 7}, {6}),
        ("exdyna", {"density": 0.1, **BUCKETS}, {0, 4}, set()),
        ("exdyna", {"density": 0.1, "codec": "int8", **BUCKETS}, {3}, set()),
        ("dense", BUCKETS, {0, 4}, set()),
        ("dense", {"codec": "int4", **BUCKETS}, {4, 5}, set()),
        ("drift", {**DRIFT, "density": 0.1}, {3, 6}, set()),
        ("drift", {**DRIFT, "density": 1.0}, {3, 6}, set()),
        ("drift", {**DRIFT, "density": 1.0, "every": 3}, {3, 6}, set()),
        ("drift", {**DRIFT, "density": 0.1, "every": 2}, {4}, set()),
    ],
)
def test_what_is_on_its_way_returns(scheme: str, options: dict[str, Any], dropped: set[int], reloaded: set[int]) -> None:
    ends = run_virtual(RANKS, lambda comm: train(comm, scheme, options, dropped, reloaded))
    given = np.sum([end["given"] for end in ends], axis=0)
    received = -ends[0]["weights"].astype(np.float64) / RATE
    left = np.sum([end["left"] for end in ends], axis=0)
    assert np.abs(RANKS * received + left - given).max() < 1e-4
    for end in ends:
        assert end["count"] == len(dropped)
        assert (end["weights"].view(np.uint32) == ends[0]["weights"].view(np.uint32)).all()
        assert options.get("every") == 2 or end["numbers"] == list(range(STEPS))


def test_a_step_after_a_drop_publishes_nothing_and_the_next_one_does() -> None:
    (end, *_) = run_virtual(RANKS, lambda comm: train(comm, "exdyna", LATE, {5}, set()))
    moved = [bool((now != before).any()) for before, now in zip(end["published"], end["published"][1:], strict=False)]
    assert moved == [False, True, True, True, False, True, True, True]  # after steps 1 to 8


class Agreeing:
    """A communicator whose agreements have given results."""

    def __init__(self, *results: bool, dead: bool) -> None:
        self.results, self.dead = list(results), dead

    def end_alone(self) -> None: ...

    def knows_of_dead(self) -> bool:
        return self.dead

    def agreed(self, fine: bool) -> bool:
        return self.results.pop(0) and fine

    def revoke(self) -> None:
        raise InterruptedError("the ranks recover")


def test_one_failed_agreement_is_not_a_death() -> None:
    attempts: list[int] = []

    def surviving(*results: bool, dead: bool = False) -> Survival:
        exchange: Any = SimpleNamespace(
            comm=Agreeing(*results, dead=dead), spot=SimpleNamespace(wait=None), gone="", size=2, norms=(), place=None
        )
        return Survival(exchange, lambda living: lambda: 0.0)

    surviving(False, True).surely(lambda: attempts.append(1))
    assert attempts == [1], "nothing is repeated"
    for survival in (surviving(False, False), surviving(False, True, dead=True)):
        with pytest.raises(InterruptedError):
            survival.surely(lambda: None)
