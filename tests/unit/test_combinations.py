"""Every part with every other: what works conserves what was given, keeps replicas equal, and resumes to the last bit.

In one process, on two and three virtual ranks. The rest is refused with a reason, and the page has the same table.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from combinations import CODECS, PAGE, SCORERS, Combination, combinations, refusal, rewritten
from fewer import TOGETHER, covering
from torch import nn

import mpisparse
from mpisparse.comm.virtual import VirtualComm, run_virtual

pytestmark = pytest.mark.filterwarnings("ignore")
RATE, HALF = 0.1, 6


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 7)
    return (model(x) - x[:, :6].sin()).square().mean()


class Seen(NamedTuple):
    """What a rank saw of a run. given: the sum of its gradients; waits: what it has not sent; remembered: e as an owner."""

    shared: list[bytes]
    end: bytes
    given: torch.Tensor
    waits: torch.Tensor
    remembered: torch.Tensor
    moved: torch.Tensor
    own: torch.Tensor
    sent: int


class Training:
    """One rank's model, optimizer and exchange."""

    def __init__(self, comm: VirtualComm, options: dict[str, Any]) -> None:
        self.rank, self.model = comm.Get_rank(), net()
        learns = {"predicted": {"validation": self.held_out, "history": 3, "validate_every": 4}}
        learns["influence"] = {"probe": self.held_out, "probe_every": 4}
        more = {"rate": 1.0} if options["scheme"] == "drift" else {}
        self.sync = mpisparse.GradientSync(
            self.model, comm=comm, density=0.1, **{**options, **learns.get(options["scorer"], {}), **more}
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        mpisparse.attach(self.optimizer, self.sync)
        self.given = torch.zeros_like(self.flat(), dtype=torch.float64)
        self.shared: list[bytes] = []
        self.sent = 0

    def held_out(self) -> torch.Tensor:
        return loss_of(self.model, 1000 + self.rank)

    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()

    def in_common(self) -> torch.Tensor:
        with self.sync.global_weights():
            return self.flat()

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, 100 * step + self.rank).backward()
            self.given += torch.cat([p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None]).double()
            self.optimizer.step()
            self.shared.append(self.in_common().numpy().tobytes())
            self.sent += self.sync.stats.selected

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What waits beside the residual: momentum of a codec, and an owner's e."""
        state, waits = self.sync.state_dict(copy=False), self.sync.residual.double().clone()
        remembered = torch.zeros_like(waits)
        if "step.blend.index" in state:
            waits[state["step.blend.index"]] += state["step.blend.pending"] * state["step.blend.value"].double()
        if "step.error" in state:
            reducer: Any = self.sync._aggregator.works.reducer
            remembered[reducer.owned(self.rank, self.sync.size)] = state["step.error"].double()
        return waits, remembered

    def end(self) -> bytes:
        """The bits of both sets of weights and of what waits."""
        return b"|".join(t.numpy().tobytes() for t in (self.flat(), self.in_common(), self.sync.residual))


def work(comm: VirtualComm, options: dict[str, Any]) -> tuple[Seen, bytes]:
    """Train, and again from the state in the middle."""
    run, begin = Training(comm, options), net()
    run.train(range(HALF))
    state = run.sync.state_dict()
    with run.sync.global_weights():
        model = {key: value.clone() for key, value in run.model.state_dict().items()}
    run.train(range(HALF, 2 * HALF))
    end = run.end()
    if options["scheme"] != "drift":
        run.sync.synchronize()  # what is in flight is applied
    start = torch.cat([p.detach().reshape(-1) for p in begin.parameters()])
    waits, remembered = run.held()
    moved, own = (start - run.in_common()).double() / RATE, (start - run.flat()).double() / RATE
    seen = Seen(run.shared, end, run.given, waits, remembered, moved, own, run.sent)
    run.sync.close()
    other = Training(comm, options)
    other.model.load_state_dict(model)
    other.sync.load_state_dict(state)
    other.train(range(HALF, 2 * HALF))
    again = other.end()
    other.sync.close()
    return seen, again


def check(options: dict[str, Any], size: int) -> None:
    """Run it on so many virtual ranks, and hold it to the laws."""
    results = run_virtual(size, lambda comm: work(comm, options))
    ranks = [seen for seen, _ in results]
    assert all(len({seen.shared[step] for seen in ranks}) == 1 for step in range(2 * HALF)), "replicas differ"
    assert all(seen.end == again for seen, again in results), "resumed it is another run"
    given = sum(seen.given for seen in ranks)
    if options["scheme"] == "drift":  # the mean of all weights plus e moves by all gradients
        e = sum(seen.remembered for seen in ranks)
        arrived = sum(seen.own for seen in ranks) - size * e / RATE
    else:
        arrived = size * ranks[0].moved + sum(seen.waits for seen in ranks)
    off = float((given - arrived).abs().max())
    assert off < 1e-5 * max(1.0, float(given.abs().max()) * size), f"{off} is lost"
    assert ranks[0].sent > 0
    if options["scheme"] != "drift":
        assert float(ranks[0].moved.abs().max()) > 0


def working() -> list[dict[str, Any]]:
    """All combinations with every codec that are not refused, on two and on three ranks in turn."""
    cases = (
        {"parts": parts, **parts._asdict(), "codec": codec, "size": 2 + (i + j) % 2}
        for (i, parts), (j, codec) in itertools.product(enumerate(combinations()), enumerate(CODECS))
    )
    return [case for case in cases if not refusal({**case["parts"].options, "codec": case["codec"]})]


WORKING = working()
NAMED = [{name: value for name, value in case.items() if name != "parts"} for case in WORKING]
SHORT = covering(NAMED, TOGETHER["pairs"])
CASES = [
    pytest.param(case, id="-".join(map(str, named.values())), marks=[] if i in SHORT else pytest.mark.slow)
    for i, (case, named) in enumerate(zip(WORKING, NAMED, strict=True))
]


@pytest.mark.parametrize("case", CASES)
def test_what_works_loses_nothing(case: dict[str, Any]) -> None:
    """bin/test has each pair of values, --all the whole table."""
    check({**case["parts"].options, "codec": case["codec"]}, case["size"])


def works(quantity: str, selectors: str, scorers: str, schedules: str, codecs: tuple[str, ...]) -> None:
    """Nothing of this is refused."""
    for selector, scorer, schedule in itertools.product(selectors.split(), scorers.split(), schedules.split(", ")):
        options = Combination(quantity, selector, scorer, schedule).options
        for codec in codecs:
            assert not refusal({**options, "codec": codec}), (options, codec)


def test_what_must_work_is_not_refused() -> None:
    plain = tuple(codec for codec in CODECS if not codec.startswith("momentum-"))
    works("gradient", "exclusive own", " ".join(SCORERS), "at once, in flight", CODECS)
    works("drift", "exclusive own", "magnitude average predicted", "at once, in flight, every H", plain)
    works("gradient", "granular", "influence magnitude", "at once, in flight, ahead", CODECS)
    works("drift", "granular", "influence magnitude", "at once, in flight, every H", plain)
    works("gradient", "own granular", " ".join(SCORERS), "ahead", CODECS)  # speculative takes any scorer


def test_a_codec_goes_wherever_fp32_goes_but_momentum_with_gradients_only() -> None:
    for parts in combinations():
        refused = {codec: bool(refusal({**parts.options, "codec": codec})) for codec in CODECS}
        assert len({refused[codec] for codec in CODECS if not codec.startswith("momentum-")}) == 1, parts
        assert refused["momentum-int8"] == (refused["fp32"] or parts.quantity == "drift"), parts


def test_the_page_has_the_table_of_the_program() -> None:
    """`python tests/combinations.py` writes it."""
    assert PAGE.read_text() == rewritten(PAGE.read_text())


@pytest.mark.parametrize("masks", ["owners", "own"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_to_a_scorer_of_drift_training_is_the_gradient(masks: str, staleness: int) -> None:
    """What an exchange moves weights by is not, at the elements that were sent neither."""
    options = {"scheme": "drift", "scorer": "average", "alpha": 1.0, "masks": masks, "staleness": staleness, "codec": "int8"}

    def work(comm: VirtualComm) -> list[float]:
        run, off = Training(comm, options), []
        scorer: Any = run.sync._aggregator.works.scorer
        for step in range(8):
            before = run.given.clone()
            run.train(range(step, step + 1))
            off.append(float(np.abs(scorer.inner.memory - RATE * (run.given - before).abs().numpy()).max()))
        run.sync.close()
        return off

    assert max(itertools.chain.from_iterable(run_virtual(2, work))) < 1e-6


@pytest.mark.parametrize(("masks", "count"), [("owners", 40), ("own", 4)])
def test_in_flight_an_element_of_no_score_does_not_wait_for_ever(masks: str, count: int) -> None:
    """Others, more than a snapshot holds, always have a larger average; each 16th step goes by what waits."""
    busy, once = torch.zeros(64), torch.zeros(64)
    busy[1 : count + 1], once[0], once[1 : count + 1] = 1.0, 500.0, 1000.0

    def work(comm: VirtualComm) -> list[bool]:
        each = mpisparse.aggregator(
            64, scheme="exdyna", scorer="average", density=1 / 16, staleness=1, masks=masks, comm=comm
        )
        waits = []
        for step in range(40):
            each.step(once if step == 0 else busy)
            waits.append(bool(each.residual[0]))
        each.close()
        return waits

    for waits in run_virtual(2, work):
        assert all(waits[:15])
        assert not waits[-1]
