"""What selecting takes at any number of ranks: predictions follow the simulator's messages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mpisparse.plan import candidates
from mpisparse.plan.candidates import BY_NAME, SPARSE
from mpisparse.plan.costs import Message
from mpisparse.plan.messages import EVEN, Selected, messages, received_per_element
from mpisparse.plan.predict import FLAT, NODES, Links, Measured, predict
from mpisparse.plan.selected import FIRST, SETS, selected, selections
from mpisparse.plan.simulator import simulator
from mpisparse.plan.synthetic import Synthetic
from mpisparse.runtime import cli

SPARSEST = BY_NAME["exdyna 1 % int8"]
SLOW = Links(1e-4, 1e8, 1e8)


@pytest.mark.parametrize("ranks", [4, 20])
def test_predicted_messages_are_those_of_the_simulated_steps(ranks: int) -> None:
    """Counts are summed above 16 ranks, and gathered below; values and indices are those of a whole vector."""
    elements = 60_000
    found = selected(SPARSEST, elements, ranks)
    assert found.share == pytest.approx(1.0, rel=0.02)
    assert 0.0 <= found.imbalance < 1.0
    assert any(message.kind == "allreduce" for message in found.counts) == (ranks > 16)
    virtual = simulator("exdyna", Synthetic(elements, SETS), ranks, SPARSEST.density, codec="int8")
    steps = [virtual.step() for _ in range(FIRST + 5)][FIRST:]
    received = sorted(int(step.log.received().max()) for step in steps)[2]
    log = messages(SPARSEST, elements, ranks, found)
    assert int(log.received().max()) == pytest.approx(received, rel=0.05)
    assert log.received().max() / elements == received_per_element(SPARSEST, elements, ranks, found)
    assert received_per_element(SPARSEST, elements, ranks, found) != received_per_element(SPARSEST, elements, ranks)


def test_a_long_vector_is_cut_and_what_is_sent_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many elements of fewer are selected, so that counts take as many bytes as those of the long vector."""
    whole = selected(SPARSEST, 80_000, 20)
    monkeypatch.setattr("mpisparse.plan.selected.MOST", 20 * 20_000)
    cut = selected(SPARSEST, 80_000, 20)
    told, expected = (sum(int(message.received().max()) for message in each.counts) for each in (cut, whole))
    assert told == pytest.approx(expected, rel=0.25)
    few, many = (messages(SPARSEST, count, 20, cut).received().max() for count in (10**7, 10**8))
    assert 9 * few < many < 10 * few


def test_only_sparse_gradients_are_simulated_and_each_number_of_ranks_once() -> None:
    found = selections(candidates.suiting(adaptive=False), 2000, (3, 3, 1))
    assert set(found) == {(each.name, 3) for each in candidates.ALL if each.kind == SPARSE}
    assert not selections(candidates.suiting(adaptive=True), 2000, (3, 64))


def test_what_selecting_takes_is_in_the_prediction() -> None:
    m = Measured(64, 10_000_000, 0.1, SLOW, ranks_a_node=8, inside=Links(1e-6, 1e10, 1e10), between=SLOW)
    counts = Message("allgather", messages(BY_NAME["dense int4"], 64, 64).messages[0].nbytes)
    even = Selected(counts=(counts,) * len(messages(SPARSEST, m.elements, 64).messages[:-4]))

    def exchange(way: str = "flat", ranks: int = 64, **changes: Any) -> float:
        return predict(SPARSEST.by(way), m, {(SPARSEST.name, ranks): replace(even, **changes)}).exchange

    assert exchange(seconds=0.25) == pytest.approx(exchange() + 0.25)
    assert exchange(share=2.0) > 1.3 * exchange()
    assert exchange(imbalance=1.0) > exchange()
    assert exchange(ranks=32) == predict(SPARSEST, m, selections={}).exchange == exchange(ranks=8)
    assert predict(SPARSEST.by(NODES), m, {(SPARSEST.name, 64): replace(EVEN, seconds=9.0)}).exchange < 9.0


def test_the_command_asks_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of sparse gradients are those of simulated steps among as many ranks as were asked for."""
    flags = ["--model", "digits-cnn", "--optimizer", "sgd", "--link", "1gbit", "--ranks", "20", "--json"]
    assert cli.main(["plan", *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = {row["exchange"]: row["bytes"] for row in rows if row["way"] == FLAT}
    elements = 283_786
    for each in candidates.suiting(adaptive=False):
        known = {"selected": selected(each, elements, 20)} if each.kind == SPARSE else {}
        assert told[each.name] == pytest.approx(received_per_element(each, elements, 20, **known), rel=0.01), each.name
    assert told[SPARSEST.name] != pytest.approx(received_per_element(SPARSEST, elements, 20), rel=0.01)
