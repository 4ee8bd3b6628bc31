"""Scheme auto between exchanges of all ranks and of nodes whose ranks sum first. Ranks 0 to K-1 are a node, and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from autos import a_run, log_of, script, trained, wide
from mpi4py import MPI
from ranks import alike, bits, everywhere, held, loss_of, raised, seeded, small, total, train_lawfully
from test_families import everything, flat, shared

import mpisparse
from mpisparse import checkpoint
from mpisparse.comm.hierarchy import RANKS_PER_NODE
from mpisparse.core.by_node import ByNode
from mpisparse.errors import ConfigurationError
from mpisparse.plan import choices, measure
from mpisparse.plan.candidates import ALL, BY_NAME, NODES, WEIGHTS, named
from mpisparse.plan.predict import Links

pytestmark = pytest.mark.mpi
GRADIENTS = [each.name for each in ALL if each.kind != WEIGHTS]
DRIFT, COARSE = "drift 17 % int2", "drift 13 % sign"
FAST, SLOW = Links(1e-9, 1e15, 1e15), Links(1e-9, 1e3, 1e3)


def by_nodes(name: str) -> str:
    return BY_NAME[name].by(NODES).name


ENTRIES = [
    (0, by_nodes("dense int4")), (2, "dense int8"), (4, by_nodes("exdyna 10 % int8")), (6, by_nodes("dense int2")),
    (8, "exdyna 1 % int8"),
]  # fmt: skip
OF_WEIGHTS = [
    (0, by_nodes("dense int4")), (2, by_nodes(DRIFT)), (6, by_nodes(COARSE)), (9, COARSE),
    (12, by_nodes(DRIFT + " every 4")), (20, by_nodes("dense int8")), (23, DRIFT), (26, by_nodes("exdyna 10 % int8")),
]  # fmt: skip
LAST = 30


def nodes_of(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setenv(RANKS_PER_NODE, str(ranks))


@pytest.fixture(params=[True, False], ids=["shared memory", "messages"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the ranks of a node can share memory."""
    if not request.param:
        monkeypatch.setattr("mpisparse.comm.shared_rows.PLACE", Path("/nowhere"))
    return bool(request.param)


@pytest.fixture
def nodes(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two nodes of two ranks; returns the ranks of a node."""
    if comm.size != 4:
        pytest.skip("needs four ranks")
    nodes_of(monkeypatch, 2)
    return 2


def used(sync: mpisparse.GradientSync) -> str:
    return named(sync.stats.details)


def where_it_would_be(comm: MPI.Intracomm, model: torch.nn.Module, sync: mpisparse.GradientSync, lr: float) -> torch.Tensor:
    """The mean of all ranks' weights after everything still unsent has arrived, for SGD without momentum; collective."""
    if not sync.exchanges_weights:
        return flat(model) - lr / comm.size * total(comm, held(sync))
    remembered, inner = torch.zeros_like(flat(model)), sync._aggregator.inner  # type: ignore[attr-defined]
    error = torch.as_tensor(inner.works.reducer.error).double()
    owned = inner.owned() if isinstance(inner, ByNode) else inner.works.reducer.owned(comm.rank, comm.size)
    remembered[owned] = error
    return total(comm, flat(model)) / comm.size + total(comm, remembered)


# A change


def test_changes_between_all_ways_of_gradients_lose_nothing(
    comm: MPI.Intracomm, directory: Path, nodes: int, memory: bool
) -> None:
    order = [name for pair in zip(GRADIENTS, map(by_nodes, reversed(GRADIENTS)), strict=True) for name in pair]
    order += [by_nodes(name) for name in GRADIENTS]
    model = small()
    log = log_of(comm, directory, [*enumerate(order)], model)
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, deterministic=log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_lawfully(comm, model, sync, optimizer, loss_of, count=len(order))


def test_nothing_is_lost_between_gradients_and_weights(
    comm: MPI.Intracomm, directory: Path, nodes: int, memory: bool
) -> None:
    lr = 0.1
    log = log_of(comm, directory, OF_WEIGHTS, small())
    model = small()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, deterministic=log)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    mpisparse.attach(optimizer, sync)
    given, begin, chosen = torch.zeros_like(flat(model)), flat(model), []
    for step in range(LAST):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, seeded(comm.rank, step)).backward()
        given += total(comm, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double())
        optimizer.step()
        chosen.append(used(sync))
        off = where_it_would_be(comm, model, sync, lr) - (begin - lr / comm.size * given)
        assert everywhere(comm, float(off.abs().max()) <= 1e-5), (step, chosen[-1], off.abs().max())
        assert alike(comm, shared(model, sync)), step
        if sync.exchanges_weights and isinstance(sync._aggregator.inner, ByNode):  # type: ignore[attr-defined]
            rows = comm.allgather(bits(model.parameters()))
            assert rows[::2] == rows[1::2], "the ranks of a node differ"
            assert rows[0] != rows[2] or step in (2, 11), "no node drifts, though these do not begin now"
        elif not sync.exchanges_weights:
            assert alike(comm, model.parameters()), step
    assert chosen == [
        *[by_nodes("dense int4")] * 2, by_nodes("dense fp32"), *[by_nodes(DRIFT)] * 3, *[by_nodes(COARSE)] * 3,
        *[COARSE] * 3, *[by_nodes(DRIFT + " every 4")] * 8, *[by_nodes("dense int8")] * 3, by_nodes("dense fp32"),
        *[DRIFT] * 2, *[by_nodes("exdyna 10 % int8")] * 4,
    ]  # fmt: skip
    assert sync.stats.details["discontinuities"] == 6.0
    sync.close()


def test_with_nodes_auto_is_bit_by_bit_the_scheme_that_it_replays(comm: MPI.Intracomm, directory: Path, nodes: int) -> None:
    log = log_of(comm, directory, [(0, by_nodes("exdyna 10 % int8"))], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 6)
    assert used(sync) == by_nodes("exdyna 10 % int8")
    assert sync.stats.node_bytes > 0
    other = small()
    plain = mpisparse.GradientSync(other, scheme="exdyna", density=0.1, codec="int8", hierarchy="node", comm=comm)
    second = torch.optim.SGD(other.parameters(), lr=0.01)
    mpisparse.attach(second, plain)
    for step in range(6):
        second.zero_grad()
        loss_of(other, seeded(comm.rank, step)).backward()
        second.step()
    assert everywhere(comm, bits(model.parameters()) == bits(other.parameters()))
    assert everywhere(comm, sync.stats.bytes_received == plain.stats.bytes_received)
    sync.close()
    plain.close()


@pytest.mark.parametrize("due", [4, 5, 6, 7])
def test_parameters_frozen_midway_are_exchanged_between_all_ranks(
    comm: MPI.Intracomm, directory: Path, nodes: int, due: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What waits of them waits on, also if another exchange is due meanwhile; a run that is replayed does the same."""
    log = log_of(comm, directory, [(0, by_nodes("dense int4")), (due, by_nodes("dense int8"))], small())

    def run() -> tuple[list[str], bytes]:
        model, sync, optimizer = a_run(comm, deterministic=log)
        chosen = []
        frozen, before = model[0].weight, torch.empty(0)
        for step in range(11):
            frozen.requires_grad_(step not in (3, 4, 5))
            if step == 3:
                optimizer.zero_grad()
                before = total(comm, held(sync))[: frozen.numel()]
            trained(model, sync, optimizer, step, step + 1)
            chosen.append(used(sync))
            if step in (3, 4, 5):
                waits = total(comm, held(sync))[: frozen.numel()]
                torch.testing.assert_close(waits, before, rtol=1e-5, atol=1e-7)
            assert alike(comm, model.parameters())
        assert before.any()
        whole = everything(model, sync, optimizer)
        sync.close()
        return chosen, whole

    chosen, whole = run()
    later = "dense int8" if due < 7 else by_nodes("dense int8")
    assert chosen == [by_nodes("dense int4")] * 3 + ["dense int4"] * (due - 3) + [later] * (11 - due)
    said = "r0 | auto: dense int4 from step 3 on: dense int4, nodes first does not go with parameters that are frozen"
    assert (said in capsys.readouterr().err) == (comm.rank == 0)
    again = run()
    assert everywhere(comm, again == (chosen, whole))


def test_a_rank_without_batches_goes_along(comm: MPI.Intracomm, directory: Path, nodes: int) -> None:
    entries = [(0, "dense int4"), (3, by_nodes("dense int8")), (5, by_nodes(DRIFT)), (9, by_nodes("dense int4"))]
    log = log_of(comm, directory, entries, small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    with sync.join():
        trained(model, sync, optimizer, 0, 2 if comm.rank == 0 else 12)
    assert not sync.exchanges_weights
    assert [name for _, name in sync.state_dict()["step.history"]] == [name for _, name in entries]
    assert alike(comm, model.parameters())
    sync.close()


# Choosing


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Links]]:
    """The links that the next looks find, by the number of ranks that they connect; the last ones repeat. Those inside a
    node are fast."""
    script(monkeypatch)
    monkeypatch.setattr(measure, "inside", lambda nodes: FAST)
    told = {2: [FAST], 3: [FAST], 4: [FAST]}

    def links(exchange: Any) -> Links:
        known = told[exchange.size]
        return known.pop(0) if len(known) > 1 else known[0]

    monkeypatch.setattr(measure, "links", links)
    return told


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_nodes_sum_first_where_that_is_faster_and_the_log_is_replayed(
    comm: MPI.Intracomm, directory: Path, soon: dict[int, list[Links]], nodes: int, kind: str
) -> None:
    """Links inside a node, and between nodes if one rank sends, are fast; all ranks at once are slow, and later fast."""
    soon[4] = [SLOW, SLOW, SLOW, FAST]
    log = str(directory / "log.jsonl")
    model, sync, optimizer = a_run(comm, kind, log=log)
    names = []
    for step in range(16):
        trained(model, sync, optimizer, step, step + 1)
        names.append(used(sync))
        assert len(set(comm.allgather(names[-1]))) == 1
    assert names[:4] == ["dense int4"] * 3 + [by_nodes("dense fp32")]
    told = sync.stats.details
    assert told["predicted_dense fp32"] > 0
    assert told["predicted_dense fp32, nodes first"] > 0
    whole = everything(model, sync, optimizer)
    sync.close()
    comm.Barrier()
    assert by_nodes("dense fp32") in (directory / "log.jsonl").read_text()
    model, sync, optimizer = a_run(comm, kind, deterministic=log)
    trained(model, sync, optimizer, 0, 16)
    assert used(sync) == names[-1]
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()


def test_weights_are_exchanged_between_nodes_where_that_is_faster(
    comm: MPI.Intracomm, soon: dict[int, list[Links]], nodes: int
) -> None:
    soon[4], soon[2] = [SLOW], [Links(1e-9, 1e4, 1e4)]
    model, sync, optimizer = a_run(comm, "AdamW", wide, every=1)
    trained(model, sync, optimizer, 0, 8)
    assert BY_NAME[used(sync)].kind == WEIGHTS
    assert BY_NAME[used(sync)].way == NODES
    assert alike(comm, shared(model, sync))
    sync.synchronize()
    assert alike(comm, model.parameters())
    sync.close()


WITHOUT: dict[str, dict[str, Any]] = {
    "one node": {}, "a node for each": {}, "unequal nodes": {}, "flat": {"hierarchy": "flat"},
    "backward": {"accumulate": "backward"},
}  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", WITHOUT)
def test_where_nodes_cannot_sum_first_that_is_no_candidate(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, soon: dict[int, list[Links]], case: str
) -> None:
    least = {"unequal nodes": 3, "flat": 4, "backward": 4}.get(case, 2)
    if comm.size < least:
        pytest.skip(f"needs {least} ranks: nodes could not sum first on fewer anyway")
    ranks = {"one node": comm.size, "a node for each": 1, "unequal nodes": comm.size - 1}.get(case, max(1, comm.size // 2))
    nodes_of(monkeypatch, ranks)
    model, sync, optimizer = a_run(comm, weights=False, **WITHOUT[case])
    trained(model, sync, optimizer, 0, 5)
    told = sync.stats.details
    assert "predicted_dense fp32" in told
    assert not [name for name in told if NODES in name]
    sync.close()
    log = log_of(comm, directory, [(0, by_nodes("dense int8"))], small())
    error = raised(comm, ConfigurationError, lambda: a_run(comm, deterministic=log, weights=False, **WITHOUT[case]))
    assert "has 'dense int8, nodes first', which cannot be here: there are no nodes" in error


def test_one_rank_has_no_nodes(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, 2)
    model, sync, optimizer = a_run(MPI.COMM_SELF)
    trained(model, sync, optimizer, 0, 6)
    assert used(sync) == "dense fp32"
    sync.close()


# Kept


@pytest.mark.parametrize("middle", [3, 5, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 7))])
def test_resumed_is_uninterrupted(comm: MPI.Intracomm, directory: Path, nodes: int, middle: int) -> None:
    log = log_of(comm, directory, ENTRIES, small())
    _resumed(comm, directory, log, middle, 10)


@pytest.mark.parametrize("middle", [4, 14, *(pytest.param(step, marks=pytest.mark.slow) for step in (7, 10))])
def test_resumed_is_uninterrupted_with_weights(comm: MPI.Intracomm, directory: Path, nodes: int, middle: int) -> None:
    log = log_of(comm, directory, OF_WEIGHTS, small())
    _resumed(comm, directory, log, middle, 18)


def _resumed(comm: MPI.Intracomm, directory: Path, log: str, middle: int, last: int) -> None:
    """Go back to the middle in the same exchange, which has gone on to others since, and in another one; collective."""
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    trained(model, sync, optimizer, 0, middle)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=middle)
    trained(model, sync, optimizer, middle, last)
    whole = everything(model, sync, optimizer)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    trained(model, sync, optimizer, middle, last)
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    trained(model, sync, optimizer, middle, last)
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", ["dense int4", "exdyna 10 % int8", DRIFT])
def test_on_other_nodes_what_waits_stays(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, name: str, ranks: int
) -> None:
    """As many ranks on other nodes, as after a requeue: they exchange between all ranks, and may choose anew."""
    log = log_of(comm, directory, [(0, by_nodes("dense fp32")), (1, by_nodes(name))], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 5)
    before = where_it_would_be(comm, model, sync, 0.01)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=5)
    sync.close()
    nodes_of(monkeypatch, ranks)
    model, sync, optimizer = a_run(comm)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == 5
    torch.testing.assert_close(where_it_would_be(comm, model, sync, 0.01), before, rtol=1e-5, atol=1e-6)
    assert sync.state_dict()["step.choice"] == name
    assert sync.state_dict()["step.measured"] is None
    assert sync.state_dict()["step.history"] == [[0, by_nodes("dense fp32")], [1, by_nodes(name)], [5, name]]
    trained(model, sync, optimizer, 5, 8)
    assert alike(comm, shared(model, sync))
    sync.close()


@pytest.mark.parametrize("name", ["dense int4", "exdyna 10 % int8", DRIFT])
def test_on_fewer_ranks_what_waits_stays(comm: MPI.Intracomm, directory: Path, nodes: int, name: str) -> None:
    log = log_of(comm, directory, [(0, by_nodes("dense fp32")), (1, by_nodes(name))], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 5)
    before = where_it_would_be(comm, model, sync, 0.01)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=5)
    sync.close()
    fewer = comm.Split(int(comm.rank < 3), comm.rank)
    if comm.rank < 3:
        model, sync, optimizer = a_run(fewer)
        assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == 5
        torch.testing.assert_close(where_it_would_be(fewer, model, sync, 0.01), before, rtol=1e-5, atol=1e-6)
        assert sync.state_dict()["step.choice"] == name
        assert sync.state_dict()["step.history"][-1] == [5, name]
        trained(model, sync, optimizer, 5, 8)
        assert alike(fewer, shared(model, sync))
        sync.close()
    fewer.Free()
    comm.Barrier()


@pytest.mark.parametrize("hindered", [False, True])
def test_what_was_about_to_come_comes_between_all_ranks_where_there_are_no_nodes(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, hindered: bool
) -> None:
    """So does what was in use before, if weights cannot be exchanged: something is frozen."""
    log = log_of(comm, directory, [(0, by_nodes("dense int4")), (2, by_nodes(DRIFT))], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 2)
    before = where_it_would_be(comm, model, sync, 0.01)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=2)
    sync.close()
    nodes_of(monkeypatch, 1)
    model, sync, optimizer = a_run(comm)
    checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    torch.testing.assert_close(where_it_would_be(comm, model, sync, 0.01), before, rtol=1e-5, atol=1e-6)
    assert sync.state_dict()["step.history"] == [[0, by_nodes("dense int4")], [2, DRIFT]]
    model[0].weight.requires_grad_(not hindered)
    trained(model, sync, optimizer, 2, 3)
    assert used(sync) == "dense fp32"
    trained(model, sync, optimizer, 3, 4)
    assert used(sync) == ("dense int4" if hindered else DRIFT)
    sent = [[2, "dense fp32"], [3, "dense int4"]]
    assert sync.state_dict()["step.history"][1:] == (sent if hindered else [[2, DRIFT]])
    assert alike(comm, shared(model, sync))
    sync.close()


@pytest.mark.parametrize("way", ["log", "deterministic"])
def test_without_links_of_nodes_their_exchanges_are_followed_and_links_measured_later(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, soon: dict[int, list[Links]], nodes: int, way: str
) -> None:
    """The state is of a run without nodes."""
    nodes_of(monkeypatch, 1)
    model, sync, optimizer = a_run(comm)
    trained(model, sync, optimizer, 0, 5)
    state = sync.state_dict()
    assert state["step.measured"] is not None
    assert state["step.measured"]["between"] is None
    sync.close()
    nodes_of(monkeypatch, nodes)
    path = directory / "followed.jsonl"
    if comm.rank == 0:
        followed = [*map(tuple, state["step.history"]), (6, by_nodes("dense int8"))]
        choices.write(path, choices.Log(followed, choices.digest_of(sync._layout.slots), comm.size, 7))
    comm.Barrier()
    model, sync, optimizer = a_run(comm, **{way: str(path)})
    sync.load_state_dict(state)
    trained(model, sync, optimizer, 5, 7)
    assert used(sync) == by_nodes("dense int8")
    assert "predicted_seconds" not in sync.stats.details
    if way == "deterministic":
        state = sync.state_dict()
        sync.close()
        model, sync, optimizer = a_run(comm)
        sync.load_state_dict(state)
        assert sync.state_dict()["step.measured"] is None
    trained(model, sync, optimizer, 7, 12)
    assert sync.state_dict()["step.measured"]["between"] is not None
    assert sync.stats.details["predicted_seconds"] > 0
    sync.close()


class Looking(torch.nn.Module):
    """Has a sparse gradient: that of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = wide(), torch.nn.Embedding(30, 20, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.table(x.argmax(1))


def test_nodes_do_not_average_sparse_gradients_in_a_resumed_run_either(
    comm: MPI.Intracomm, directory: Path, soon: dict[int, list[Links]], nodes: int
) -> None:
    """It exchanges weights from its first step on, and nodes would be faster."""
    soon[4], soon[2] = [SLOW], [Links(1e-9, 1e4, 1e4)]
    options = {"every": 1, "density": 0.12}  # no sparse exchange of gradients
    log = log_of(comm, directory, [(0, DRIFT)], Looking())
    model, sync, optimizer = a_run(comm, "SGD", Looking, deterministic=log, **options)
    trained(model, sync, optimizer, 0, 4)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=4)
    sync.close()
    model, sync, optimizer = a_run(comm, "SGD", Looking, **options)
    checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    trained(model, sync, optimizer, 4, 10)
    told = sync.stats.details
    assert "predicted_dense int2, nodes first" in told
    assert f"predicted_{DRIFT}" in told
    assert f"predicted_{by_nodes(DRIFT)}" not in told
    assert alike(comm, shared(model, sync))
    sync.close()


def test_nodes_that_exchange_weights_go_on_whatever_was_frozen_before(
    comm: MPI.Intracomm, directory: Path, nodes: int
) -> None:
    log = log_of(comm, directory, [(0, by_nodes(DRIFT))], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 4)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=4)
    sync.close()
    model, sync, optimizer = a_run(comm, deterministic=log_of(comm, directory, [(0, "dense int8")], small()))
    model[0].weight.requires_grad_(False)
    trained(model, sync, optimizer, 0, 1)
    model[0].weight.requires_grad_(True)
    checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    trained(model, sync, optimizer, 4, 6)
    assert used(sync) == by_nodes(DRIFT)
    assert alike(comm, shared(model, sync))
    sync.close()
