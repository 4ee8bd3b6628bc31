"""Scheme auto: changes lose nothing, ranks choose the same, choices are saved and replayed, bad input is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from autos import FAST, SLOW, a_run, log_of, script, trained, wide
from mpi4py import MPI
from ranks import PATHS, alike, bits, everywhere, loss_of, raised, seeded, small, train_lawfully
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.errors import ConfigurationError
from mpisparse.plan import choices, measure
from mpisparse.plan.candidates import ALL, WEIGHTS
from mpisparse.plan.predict import Links, Window

pytestmark = pytest.mark.mpi
NAMES = [each.name for each in ALL if each.kind != WEIGHTS]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> list[Links]:
    return script(monkeypatch)


# A change


@pytest.mark.parametrize("path", PATHS)
def test_changes_between_all_candidates_lose_nothing(comm: MPI.Intracomm, directory: Path, path: str) -> None:
    model = small()
    order = [*NAMES, *NAMES[::-2], *NAMES[::3]]
    log = log_of(comm, directory, [*enumerate(order)], model)
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, accumulate=path, deterministic=log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_lawfully(comm, model, sync, optimizer, loss_of, count=len(order))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("before", ["dense int2", "exdyna 1 % int8"])
def test_what_waits_is_sent_by_the_next_exchange_of_everything(comm: MPI.Intracomm, directory: Path, before: str) -> None:
    log = log_of(comm, directory, [(0, before), (2, "dense fp32")], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 2)
    assert everywhere(comm, sync.residual.any())
    trained(model, sync, optimizer, 2, 3)
    assert everywhere(comm, not sync.residual.any())
    sync.close()


def test_the_exchange_in_use_is_the_one_of_its_own_scheme(comm: MPI.Intracomm, directory: Path) -> None:
    """Without a change, auto is bit by bit what it replays."""
    log = log_of(comm, directory, [(0, "exdyna 10 % int8")], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    assert trained(model, sync, optimizer, 0, 6) == 6 * [NAMES.index("exdyna 10 % int8") + 1]
    assert sync.stats.density == pytest.approx(0.1, rel=0.2)
    other = small()
    plain = mpisparse.GradientSync(other, scheme="exdyna", density=0.1, codec="int8", comm=comm)
    second = torch.optim.SGD(other.parameters(), lr=0.01)
    mpisparse.attach(second, plain)
    for step in range(6):
        second.zero_grad()
        loss_of(other, seeded(comm.rank, step)).backward()
        second.step()
    assert everywhere(comm, bits(model.parameters()) == bits(other.parameters()))
    sync.close()
    plain.close()


# Choosing


@pytest.mark.mpi(min_size=2)
def test_ranks_choose_alike_and_a_link_that_changes_is_followed_there_and_back(
    comm: MPI.Intracomm, soon: list[Links], capsys: pytest.CaptureFixture[str]
) -> None:
    soon[:] = [FAST, SLOW, SLOW, FAST]
    model, sync, optimizer = a_run(comm, nonfinite="skip")  # excludes exchanges of weights
    used = trained(model, sync, optimizer, 0, 12)
    assert len(set(comm.allgather(tuple(used)))) == 1
    chosen = [ALL[number].name for number in used]
    assert chosen[:3] == 3 * ["dense int4"]
    assert chosen[3] == "dense fp32"
    assert "dense int2" in chosen
    assert chosen[-1] == "dense fp32"
    told = sync.stats.details
    assert told["predicted_dense fp32"] == told["predicted_seconds"] >= told["computing_seconds"] > 0
    assert set(told) >= {f"predicted_{name}" for name in NAMES}
    assert alike(comm, model.parameters())
    out = capsys.readouterr().err
    assert ("r0 | auto: dense fp32 from step 3 on: predicted step" in out) == (comm.rank == 0)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_looks_in_vain_come_later_and_later(comm: MPI.Intracomm, soon: list[Links], monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions are always off here, and nothing is better than what is in use."""
    looked = []
    count = [0]

    def links(exchange: Any) -> Links:
        looked.append(count[0])
        return FAST

    monkeypatch.setattr(measure, "links", links)
    monkeypatch.setattr(Window, "off", lambda window, predicted: True)
    model, sync, optimizer = a_run(comm)
    for step in range(30):
        count[0] = step + 1
        trained(model, sync, optimizer, step, step + 1)
    assert looked == [3, 5, 9, 17, 25]  # two, four and eight steps later
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "by hand"])
def test_sparse_gradients_are_for_an_attached_optimizer_that_they_suit(
    comm: MPI.Intracomm, soon: list[Links], kind: str, recwarn: pytest.WarningsRecorder
) -> None:
    soon[:] = [SLOW]
    if kind == "by hand":
        model = wide()
        sync = mpisparse.GradientSync(model, scheme="auto", comm=comm)
        for step in range(4):
            model.zero_grad()
            loss_of(model, seeded(comm.rank, step)).backward()
            sync.step()
        used = [int(sync.stats.details["choice"])]
    else:
        model, sync, optimizer = a_run(comm, kind, wide, nonfinite="skip" if kind == "SGD" else "raise")
        used = trained(model, sync, optimizer, 0, 5)  # what waits is sent first where weights follow gradients
    chosen = ALL[used[-1]].name
    assert chosen.startswith({"SGD": "exdyna", "AdamW": "drift", "by hand": "dense int2"}[kind]), chosen
    assert not [str(w.message) for w in recwarn if "sparse gradients" in str(w.message)]
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_bounds_hold(comm: MPI.Intracomm, soon: list[Links]) -> None:
    soon[:] = [SLOW]
    model, sync, optimizer = a_run(comm, density=0.02, codec="int8", nonfinite="skip")
    assert ALL[trained(model, sync, optimizer, 0, 5)[-1]].name == "exdyna 10 % int8"
    sync.close()
    model, sync, optimizer = a_run(comm, "AdamW", codec="bf16")
    assert ALL[trained(model, sync, optimizer, 0, 1)[-1]].name == "dense bf16"
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_high_slowdown_gets_the_richest(comm: MPI.Intracomm) -> None:
    """With real measurements."""
    model, sync, optimizer = a_run(comm, slowdown=1e9)
    used = trained(model, sync, optimizer, 0, 7)
    assert (ALL[used[0]].name, ALL[used[-1]].name) == ("dense int4", "dense fp32")
    assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_batches_chooses_with_the_others(comm: MPI.Intracomm, soon: list[Links]) -> None:
    soon[:] = [FAST, SLOW]
    model, sync, optimizer = a_run(comm, nonfinite="skip")
    with sync.join(optimizer):
        trained(model, sync, optimizer, 0, 2 if comm.rank == 0 else 9)
    assert len(set(comm.allgather(str(sync.state_dict()["step.history"])))) == 1
    assert len(sync.state_dict()["step.history"]) == 3
    assert alike(comm, model.parameters())
    sync.close()


def test_what_is_frozen_waits_through_changes(comm: MPI.Intracomm, directory: Path) -> None:
    order = [name for name in NAMES for _ in range(2)]
    log = log_of(comm, directory, [(2 * i, name) for i, name in enumerate(NAMES)], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 7)
    frozen = model[0].weight
    frozen.requires_grad_(False)
    optimizer.zero_grad()
    before = frozen.detach().clone()
    kept: list[torch.Tensor] = []
    for step in range(7, len(order)):
        trained(model, sync, optimizer, step, step + 1)
        waits = sync.residual[: frozen.numel()].double()
        reducer: Any = sync._aggregator.works.reducer
        if hasattr(reducer, "owned"):  # an owner's error counts once for every rank
            mine = reducer.owned(comm.rank, comm.size)
            whole = torch.zeros(len(sync.residual), dtype=torch.float64)
            whole[mine] = comm.size * torch.as_tensor(reducer.error).double()
            waits = waits + whole[: frozen.numel()]
        comm.Allreduce(MPI.IN_PLACE, waits.numpy())
        kept.append(waits)
    assert torch.equal(frozen, before)
    for waits in kept[1:]:
        torch.testing.assert_close(waits, kept[0], rtol=1e-5, atol=1e-7)
    assert everywhere(comm, comm.size == 1 or kept[0].any())
    assert alike(comm, model.parameters())
    sync.close()


def test_a_model_of_one_parameter_and_one_rank(comm: MPI.Intracomm) -> None:
    for part in (comm, MPI.COMM_SELF):
        model = nn.Linear(1, 1, bias=False)
        sync = mpisparse.GradientSync(model, scheme="auto", comm=part)
        for _ in range(7):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            sync.step()
            assert model.weight.grad is not None
            assert model.weight.grad.item() == pytest.approx(1.0)
        sync.close()
    assert sync.stats.details["choice"] == 0.0


# Kept and replayed


@pytest.mark.mpi(min_size=2)
def test_a_run_is_replayed_bit_by_bit(comm: MPI.Intracomm, directory: Path, soon: list[Links]) -> None:
    soon[:] = [FAST, SLOW]
    log = str(directory / "log.jsonl")
    model, sync, optimizer = a_run(comm, log=log)
    used = trained(model, sync, optimizer, 0, 10)
    sync.close()
    assert len(set(used)) == 3
    comm.Barrier()
    again, sync, optimizer = a_run(comm, deterministic=log)
    assert trained(again, sync, optimizer, 0, 10) == used
    assert everywhere(comm, bits(again.parameters()) == bits(model.parameters()))
    assert "predicted_seconds" not in sync.stats.details
    sync.close()


@pytest.mark.parametrize("middle", [3, 5, 8])
def test_resumed_is_uninterrupted(comm: MPI.Intracomm, directory: Path, middle: int) -> None:
    entries = [(0, "dense int8"), (2, "exdyna 10 % int8"), (4, "dense int2"), (6, "dense fp32"), (7, "exdyna 1 % int8")]
    log = log_of(comm, directory, entries, small())
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    used = trained(model, sync, optimizer, 0, middle)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=middle)
    used += trained(model, sync, optimizer, middle, 10)
    whole = bits([*model.parameters(), sync.residual])
    sync.close()
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    assert trained(model, sync, optimizer, middle, 10) == used[middle:]
    assert everywhere(comm, bits([*model.parameters(), sync.residual]) == whole)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_resumed_run_goes_on_with_what_was_chosen_and_measured(
    comm: MPI.Intracomm, directory: Path, soon: list[Links]
) -> None:
    model, sync, optimizer = a_run(comm)
    trained(model, sync, optimizer, 0, 4)
    before = sync.state_dict()
    assert before["step.history"] == [[0, "dense int4"], [3, "dense fp32"]]
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=4)
    sync.close()
    soon[:] = [SLOW]  # noticed only when steps are far from the prediction
    model, sync, optimizer = a_run(comm)
    checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    assert trained(model, sync, optimizer, 4, 5) == [0]
    after = sync.state_dict()
    assert (after["step.history"], after["step.measured"]) == (before["step.history"], before["step.measured"])
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_run_that_goes_back_replays_what_it_chose_from_there_on(
    comm: MPI.Intracomm, directory: Path, soon: list[Links]
) -> None:
    """In the same process, and in another one that finds the log; what comes after it is chosen anew."""
    soon[:] = [FAST, SLOW, SLOW, FAST]
    log = str(directory / "log.jsonl")
    model, sync, optimizer = a_run(comm, log=log, nonfinite="skip")
    trained(model, sync, optimizer, 0, 4)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=4)
    used = trained(model, sync, optimizer, 4, 14)
    assert len(set(used)) == 2
    whole, history = bits(model.parameters()), sync.state_dict()["step.history"]
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == 4
    soon[:] = [SLOW]  # noticed only when the last check is repeated
    assert trained(model, sync, optimizer, 4, 14) == used
    assert everywhere(comm, bits(model.parameters()) == whole)
    assert sync.state_dict()["step.history"] == history
    sync.close()
    comm.Barrier()
    before = Path(log).read_text()
    a_run(comm, log=log)[1].close()  # one that ends before it has loaded anything
    assert Path(log).read_text() == before
    model, sync, optimizer = a_run(comm, log=log, nonfinite="skip")
    checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    assert trained(model, sync, optimizer, 4, 14) == used
    assert everywhere(comm, bits(model.parameters()) == whole)
    assert ALL[trained(model, sync, optimizer, 14, 24)[-1]].name != ALL[used[-1]].name
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_restarts_in_a_row_replay_the_same_choices(comm: MPI.Intracomm, directory: Path, soon: list[Links]) -> None:
    """The log still has the coming choices when a run that follows it ends at once, here or in another process."""
    soon[:] = [FAST, SLOW, SLOW, FAST]
    log = str(directory / "log.jsonl")
    model, sync, optimizer = a_run(comm, log=log, weights=False)
    trained(model, sync, optimizer, 0, 2)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=2)
    used = trained(model, sync, optimizer, 2, 14)
    assert len(set(used)) == 3
    whole = bits(model.parameters())
    sync.close()
    comm.Barrier()
    before = Path(log).read_text()
    soon[:] = [SLOW]
    model, sync, optimizer = a_run(comm, log=log, weights=False)
    for _ in range(2):
        checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    trained(model, sync, optimizer, 2, 4)
    sync.close()
    comm.Barrier()
    assert Path(log).read_text() == before
    comm.Barrier()
    model, sync, optimizer = a_run(comm, log=log, weights=False)
    checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
    assert trained(model, sync, optimizer, 2, 14) == used
    assert everywhere(comm, bits(model.parameters()) == whole)
    sync.close()


def test_a_replayed_log_is_that_of_rank_0_and_stays(comm: MPI.Intracomm, directory: Path) -> None:
    """Also where `log` names it by another path, and where other ranks have another file."""
    log = Path(log_of(comm, directory, [(0, "dense fp32"), (2, "dense int8")], small()))
    before = log.read_text()
    model, sync, optimizer = a_run(comm, deterministic=str(log), log=str(log.parent / "." / log.name))
    assert trained(model, sync, optimizer, 0, 4) == [0, 0, 2, 2]
    sync.close()
    comm.Barrier()
    assert log.read_text() == before
    read = choices.read

    def local(path: Path, model: str, what: str = "deterministic") -> choices.Log:
        found = read(path, model, what)
        return found if comm.rank == 0 else choices.Log([(0, "dense int4")], *dataclasses.astuple(found)[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "read", local)
        model, sync, optimizer = a_run(comm, deterministic=str(log))
    assert trained(model, sync, optimizer, 0, 4) == [0, 0, 2, 2]
    assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_measures_anew(comm: MPI.Intracomm, directory: Path, soon: list[Links]) -> None:
    soon[:] = [SLOW]
    model, sync, optimizer = a_run(comm, "AdamW", codec="int8")
    trained(model, sync, optimizer, 0, 4)
    before = sync.state_dict()
    assert before["step.measured"]["ranks"] == comm.size
    total = sync.residual.double()
    owner: Any = sync._aggregator.works.reducer
    total[owner.owned(comm.rank, comm.size)] += comm.size * torch.as_tensor(before["step.inner"]["error"]).double()
    comm.Allreduce(MPI.IN_PLACE, total.numpy())
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=4)
    sync.close()
    fewer = comm.Split(int(comm.rank == 0), comm.rank)
    if comm.rank:
        model, sync, optimizer = a_run(fewer, "AdamW", codec="int8")
        checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
        assert sync.state_dict()["step.measured"] is None
        now = sync.residual.double()
        fewer.Allreduce(MPI.IN_PLACE, now.numpy())
        torch.testing.assert_close(now / fewer.size, total / comm.size, rtol=1e-5, atol=1e-7)
        trained(model, sync, optimizer, 4, 7)
        sync.close()
    fewer.Free()
    comm.Barrier()


# Refused


def test_bad_input_is_refused_on_all_ranks(comm: MPI.Intracomm, directory: Path) -> None:
    def refused(match: str, **options: Any) -> None:
        text = raised(comm, ConfigurationError, lambda: mpisparse.GradientSync(small(), scheme="auto", comm=comm, **options))
        assert match in text, text

    text = raised(comm, ConfigurationError, lambda: mpisparse.aggregator(10, scheme="auto", comm=comm))
    assert 'scheme="auto" is for GradientSync' in text
    refused("slowdown must be a number >= 1", slowdown=0.9)
    refused('"auto" chooses among whole gradients', codec="momentum-int8")
    refused("hierarchy='node' is not for this scheme", hierarchy="node")
    refused("log must be the path of a file", log=3)
    refused("cannot be read: No such file", deterministic=str(directory / "none"))
    other = log_of(comm, directory, [(0, "dense int8")], nn.Linear(3, 3))
    refused("of another model", deterministic=other)
    refused("slowdown has no effect", deterministic=other, slowdown=1.3)
    refused("names of candidates", deterministic=log_of(comm, directory, [(0, "dense int3")], small()))
    refused("ascending", deterministic=log_of(comm, directory, [(4, "dense int8"), (2, "dense int4")], small()))
    comm.Barrier()
    if comm.rank == 0:
        (directory / "choices.jsonl").write_text('{"choices": 1}\n[')
    comm.Barrier()
    refused("is no file that the option log wrote", deterministic=str(directory / "choices.jsonl"))


def test_a_file_that_is_no_log_of_this_model_is_not_overwritten(comm: MPI.Intracomm, directory: Path) -> None:
    path = directory / "choices.jsonl"
    other = log_of(comm, directory, [(0, "dense int8")], nn.Linear(3, 3))
    for text, match in ((path.read_text(), "of another model"), ("import torch\n", "is no file that the option log wrote")):
        comm.Barrier()
        if comm.rank == 0:
            path.write_text(text)
        comm.Barrier()
        error = raised(comm, ConfigurationError, lambda: a_run(comm, log=other))
        assert match in error
        assert "remove it, or name another file" in error
        own = str(directory / "own.jsonl")
        if comm.rank == 0:
            Path(own).write_text(json.dumps({"choices": 1, "model": "", "ranks": 1e999}) + "\n")
        comm.Barrier()
        replaying = raised(comm, ConfigurationError, lambda: a_run(comm, log=other, deterministic=own))  # noqa: B023
        assert match in replaying, "also where another log is replayed"
        assert "is no file that the option log wrote" in raised(
            comm, ConfigurationError, lambda: a_run(comm, deterministic=own)  # noqa: B023
        )  # fmt: skip
        assert path.read_text() == text
    too_long = str(directory / ("x" * 300))
    assert "log: " in raised(comm, ConfigurationError, lambda: a_run(comm, log=too_long))
    comm.Barrier()
    if comm.rank == 0:
        path.write_text("")  # as made for it
    comm.Barrier()
    model, sync, optimizer = a_run(comm, log=other)
    trained(model, sync, optimizer, 0, 1)
    sync.close()
    comm.Barrier()
    assert path.read_text().startswith('{"choices": 1')


def test_a_malformed_state_is_refused_and_changes_nothing(comm: MPI.Intracomm) -> None:
    model, sync, optimizer = a_run(comm)
    trained(model, sync, optimizer, 0, 2)
    good = sync.state_dict()
    for key, value in (
        ("step.choice", "dense int3"), ("step.history", [[3, "dense int8"], [1, "dense int8"]]), ("step.inner", {}),
        ("step.measured", {"ranks": 2}), ("step.choice", "drift 17 % int2"),
    ):  # fmt: skip
        raised(comm, ConfigurationError, lambda bad={**good, key: value}: sync.load_state_dict(bad))  # type: ignore[misc]
    now = sync.state_dict()
    assert np.array_equal(now["residual"], good["residual"])
    assert now["step.choice"] == good["step.choice"]
    trained(model, sync, optimizer, 2, 4)
    sync.close()
