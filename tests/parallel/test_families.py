"""Scheme auto between exchanges of gradients and of weights: nothing is lost, ranks stay alike, runs resume and replay."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from autos import FAST, SLOW, a_run, log_of, script, trained, wide
from mpi4py import MPI
from ranks import alike, bits, everywhere, held, loss_of, raised, seeded, small, total
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.errors import ConfigurationError
from mpisparse.plan.attached import average_states
from mpisparse.plan.candidates import ALL
from mpisparse.plan.families import OfWeights
from mpisparse.plan.predict import Links

pytestmark = pytest.mark.mpi
DRIFT, COARSE = "drift 17 % int2", "drift 13 % sign"
ENTRIES = [
    (0, "dense int4"), (2, DRIFT), (6, COARSE), (8, "exdyna 10 % int8"), (10, "dense fp32"), (12, COARSE),
    (14, "dense int8"),
]  # fmt: skip
LAST = 17


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> list[Links]:
    return script(monkeypatch)


def one(name: str) -> int:
    return next(number for number, each in enumerate(ALL) if each.name == name)


USED = [one(name) for name, count in (
    ("dense int4", 2), ("dense fp32", 1), (DRIFT, 3), (COARSE, 2), ("exdyna 10 % int8", 2), ("dense fp32", 2), (COARSE, 2),
    ("dense int8", 3),
) for _ in range(count)]  # fmt: skip # what waits is sent whole before weights drift, unless it just was


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()


def shared(model: nn.Module, sync: mpisparse.GradientSync) -> list[torch.Tensor]:
    """The weights that must be the same on all ranks."""
    with sync.global_weights():
        return [p.detach().clone() for p in model.parameters()]


def where_it_would_be(comm: MPI.Intracomm, model: nn.Module, sync: mpisparse.GradientSync, lr: float) -> torch.Tensor:
    """The mean of all ranks' weights after everything still unsent has arrived, for SGD without momentum; collective."""
    if not sync.exchanges_weights:
        return flat(model) - lr / comm.size * total(comm, held(sync))
    remembered = torch.zeros_like(flat(model))
    reducer: Any = sync._aggregator.works.reducer
    remembered[reducer.owned(comm.rank, comm.size)] = torch.as_tensor(reducer.error).double()
    return total(comm, flat(model)) / comm.size + total(comm, remembered)


def test_nothing_is_lost_and_ranks_stay_alike(comm: MPI.Intracomm, directory: Path) -> None:
    lr = 0.1
    log = log_of(comm, directory, ENTRIES, small())
    model = small()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, deterministic=log)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    mpisparse.attach(optimizer, sync)
    given = torch.zeros_like(flat(model))
    begin, used, largest = flat(model), [], 0.0
    for step in range(LAST):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, seeded(comm.rank, step)).backward()
        own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double()
        given += total(comm, own)
        largest = max(largest, float(total(comm, own.abs()).max()))
        optimizer.step()
        used.append(int(sync.stats.details["choice"]))
        off = where_it_would_be(comm, model, sync, lr) - (begin - lr / comm.size * given)
        assert everywhere(comm, float(off.abs().max()) <= 1e-6 * (1 + lr * largest)), (step, off.abs().max())
        assert alike(comm, shared(model, sync)), step
        assert sync.exchanges_weights or alike(comm, model.parameters()), step
        assert comm.size == 1 or step != 4 or not everywhere(comm, alike(comm, model.parameters())), "no rank drifts"
    assert used == USED
    assert sync.stats.details["discontinuities"] == 4.0
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_states_of_optimizers_become_their_means(comm: MPI.Intracomm, directory: Path, kind: str) -> None:
    log = log_of(comm, directory, [(0, "dense fp32"), (1, DRIFT), (4, "dense fp32")], small())
    model = small()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, deterministic=log)
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **more)
    before: list[torch.Tensor] = []

    def states() -> list[torch.Tensor]:
        return [v.clone() for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]

    optimizer.register_step_post_hook(lambda *_: before.__setitem__(slice(None), states()))
    mpisparse.attach(optimizer, sync)
    trained(model, sync, optimizer, 0, 3)
    assert not alike(comm, states())
    trained(model, sync, optimizer, 3, 4)  # in whose end ranks go back to gradients
    assert not sync.exchanges_weights
    assert alike(comm, states())
    assert alike(comm, model.parameters())
    for now, own in zip(states(), before, strict=True):
        torch.testing.assert_close(now.double(), total(comm, own) / comm.size, rtol=1e-5, atol=1e-9)
    trained(model, sync, optimizer, 4, 6)
    assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_a_state_of_its_own_gets_the_mean(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, comm=comm)
    optimizer = torch.optim.AdamW(model.parameters())
    if comm.rank == 0:
        loss_of(model, seeded(0, 0)).backward()
        optimizer.step()
    first = comm.bcast([optimizer.state[p]["exp_avg"] for p in model.parameters()] if comm.rank == 0 else None)
    average_states(optimizer, sync._exchange)
    for p, own in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], own / comm.size)
    sync.close()


# Kept and replayed


def everything(model: nn.Module, sync: mpisparse.GradientSync, optimizer: torch.optim.Optimizer) -> bytes:
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return bits([*model.parameters(), *shared(model, sync), sync.residual, *states])


@pytest.mark.parametrize("middle", [2, 4, 10, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 6, 8, 13))])
def test_resumed_is_uninterrupted(
    comm: MPI.Intracomm, directory: Path, middle: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by an exchange that has gone on to the other family since."""
    log = log_of(comm, directory, ENTRIES, small())
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    used = trained(model, sync, optimizer, 0, middle)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=middle)
    used += trained(model, sync, optimizer, middle, LAST)
    assert used == USED
    said = f"r0 | auto: {DRIFT} from step 3 on: replayed; a discontinuity: all that waits was sent first; evaluate and save"
    assert (said in capsys.readouterr().err) == (comm.rank == 0)
    whole = everything(model, sync, optimizer)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    assert trained(model, sync, optimizer, middle, LAST) == used[middle:]
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log)
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == middle
    assert trained(model, sync, optimizer, middle, LAST) == used[middle:]
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_run_is_replayed_bit_by_bit(comm: MPI.Intracomm, directory: Path, soon: list[Links]) -> None:
    """AdamW over a link that becomes slow, and fast again."""
    soon[:] = [FAST, SLOW, SLOW, FAST]
    log = str(directory / "log.jsonl")
    model, sync, optimizer = a_run(comm, "AdamW", wide, log=log, every=1)
    used = trained(model, sync, optimizer, 0, 16)
    whole = everything(model, sync, optimizer)
    assert {ALL[number].name for number in used} >= {"dense fp32", COARSE}
    assert sync.stats.details["discontinuities"] == 2.0
    sync.close()
    comm.Barrier()
    assert (directory / "log.jsonl").read_text().count('"discontinuity": true') == 2
    model, sync, optimizer = a_run(comm, "AdamW", wide, deterministic=log)
    assert trained(model, sync, optimizer, 0, 16) == used
    assert everywhere(comm, everything(model, sync, optimizer) == whole)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_on_other_ranks_the_shared_weights_and_what_is_still_to_arrive_stay(comm: MPI.Intracomm, directory: Path) -> None:
    log = log_of(comm, directory, [(0, "dense fp32"), (1, DRIFT)], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 5)
    before, mean = bits(shared(model, sync)), where_it_would_be(comm, model, sync, 0.01)
    checkpoint.save(directory, model=model, optimizer=optimizer, sync=sync, step=5)
    sync.close()
    fewer = comm.Split(int(comm.rank == 0), comm.rank)
    if comm.rank:
        model, sync, optimizer = a_run(fewer, deterministic=log)
        checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
        assert sync.exchanges_weights
        assert bits(shared(model, sync)) == before
        torch.testing.assert_close(where_it_would_be(fewer, model, sync, 0.01), mean, rtol=1e-5, atol=1e-6)
        trained(model, sync, optimizer, 5, 7)
        assert alike(fewer, shared(model, sync))
        sync.close()
    fewer.Free()
    comm.Barrier()


# What else goes on


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_batches_goes_over_with_the_others(comm: MPI.Intracomm, directory: Path) -> None:
    log = log_of(comm, directory, [(0, "dense int4"), (3, DRIFT), (7, "dense int8")], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    with sync.join():
        trained(model, sync, optimizer, 0, 2 if comm.rank == 0 else 10)
    assert not sync.exchanges_weights
    assert [name for _, name in sync.state_dict()["step.history"]] == ["dense int4", DRIFT, "dense int8"]
    assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_learning_rates_become_those_of_rank_0(comm: MPI.Intracomm, directory: Path) -> None:
    """They may diverge while weights drift. The ranks compare them in each step that exchanges gradients."""
    log = log_of(comm, directory, [(0, "dense fp32"), (1, DRIFT), (4, "dense fp32")], small())
    model, sync, optimizer = a_run(comm, "AdamW", deterministic=log, check_every=1)
    trained(model, sync, optimizer, 0, 2)
    optimizer.param_groups[0].update(lr=0.02 + 0.01 * comm.rank, betas=(0.8, 0.9 + 0.01 * comm.rank))
    trained(model, sync, optimizer, 2, 8)
    assert not sync.exchanges_weights
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.02, (0.8, 0.9))
    assert alike(comm, model.parameters())
    sync.close()


def test_what_is_frozen_is_waited_for(comm: MPI.Intracomm, directory: Path) -> None:
    """Weights are exchanged once nothing of a frozen parameter can wait."""
    log = log_of(comm, directory, [(0, "exdyna 10 % int8"), (3, DRIFT)], small())
    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 2)
    model[0].weight.requires_grad_(False)
    trained(model, sync, optimizer, 2, 6)
    assert not sync.exchanges_weights
    model[0].weight.requires_grad_(True)
    trained(model, sync, optimizer, 6, 7)
    assert sync.exchanges_weights
    trained(model, sync, optimizer, 7, 9)
    assert alike(comm, shared(model, sync))
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_what_is_frozen_after_the_choice_takes_it_back(
    comm: MPI.Intracomm, directory: Path, soon: list[Links], capsys: pytest.CaptureFixture[str]
) -> None:
    """What was in use before goes on, later looks choose weights once nothing is frozen, and the log can be replayed."""
    soon[:] = [SLOW]
    log = str(directory / "log.jsonl")

    def run(**options: Any) -> tuple[list[str], bytes]:
        model, sync, optimizer = a_run(comm, "AdamW", wide, **options)
        used = trained(model, sync, optimizer, 0, 3)
        model[0].weight.requires_grad_(False)
        used += trained(model, sync, optimizer, 3, 5)
        assert not sync.exchanges_weights
        used += trained(model, sync, optimizer, 5, 10)
        model[0].weight.requires_grad_(True)
        used += trained(model, sync, optimizer, 10, 24)
        whole = everything(model, sync, optimizer)
        assert sync.stats.details["discontinuities"] == 1.0
        sync.close()
        comm.Barrier()
        return [ALL[number].name for number in used], whole

    used, whole = run(log=log)
    assert used[2:5] == ["dense int4", "dense fp32", "dense int4"]
    assert not [name for name in used[:10] if name.startswith("drift")]
    assert used[-1].startswith("drift")
    said = capsys.readouterr().err
    why = f"auto: dense int4 from step 4 on: {COARSE} every 4 does not go with parameters that are frozen"
    assert (why in said) == (comm.rank == 0)
    assert run(deterministic=log) == (used, whole)


CASES = ["nothing", "two optimizers", "a part", "closure", "copies", "codes", "scaler", "skip", "half"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_left_out_where_they_cannot_be_exchanged(
    comm: MPI.Intracomm,
    soon: list[Links],
    case: str,
) -> None:
    soon[:] = [SLOW]
    model = wide().bfloat16() if case == "half" else wide()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, nonfinite="skip" if case == "skip" else "raise")
    search = functools.partial(torch.optim.LBFGS, max_iter=1)
    kinds: dict[str, Any] = {"closure": search, "copies": ScheduleFreeAdamW, "codes": Codes}
    split = case in ("two optimizers", "a part")
    parts = [model[0].parameters(), model[2].parameters()] if split else [model.parameters()]
    optimizers = [kinds.get(case, torch.optim.AdamW)(part, lr=0.01) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=case == "scaler")
    for optimizer in optimizers[: 1 if case == "a part" else 2]:
        mpisparse.attach(optimizer, sync, scaler)
    used = []
    for step in range(8):

        def loss(step: int = step) -> torch.Tensor:
            model.zero_grad()
            x = torch.randn(8, 30, generator=seeded(comm.rank, step)).to(model[0].weight.dtype)
            found = model(x).float().square().mean()
            scaler.scale(found).backward()
            return found

        if case == "closure":
            optimizers[0].step(loss)
        else:
            for number, optimizer in enumerate(optimizers):
                if number == 0 or case == "two optimizers":  # each exchanges before its step
                    loss()
                scaler.step(optimizer)
            scaler.update()
        used.append(int(sync.stats.details["choice"]))
        assert sync.exchanges_weights or alike(comm, model.parameters()), step
    assert len(set(used)) > 1, "nothing was chosen"
    assert sync.exchanges_weights == (case == "nothing")
    sync.close()


@pytest.mark.parametrize("case", ["a part", "codes", "scaler"])
def test_weights_that_cannot_be_replayed_are_refused(comm: MPI.Intracomm, directory: Path, case: str) -> None:
    log = log_of(comm, directory, [(0, "dense fp32"), (1, DRIFT)], small())
    model = small()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, deterministic=log)
    moved = [next(model.parameters())] if case == "a part" else model.parameters()
    optimizer = (Codes if case == "codes" else torch.optim.SGD)(moved, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=case == "scaler")
    mpisparse.attach(optimizer, sync, scaler)
    scaler.scale(loss_of(model, seeded(comm.rank, 0))).backward()
    text = raised(comm, ConfigurationError, lambda: scaler.step(optimizer))
    says = {"a part": "does not hold all parameters", "codes": "no mean over ranks", "scaler": "a GradScaler"}
    assert "weights, which cannot be here" in text
    assert says[case] in text
    sync.close()


class Codes(torch.optim.Optimizer):
    """SGD with a momentum in eight bits."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                moving = p.grad + (0.9 * state["scale"] * state["codes"].float() if state else 0.0)
                state["scale"] = moving.abs().max() / 127 + 1e-12
                state["codes"] = (moving / state["scale"]).round().to(torch.int8)
                p.sub_(self.param_groups[0]["lr"] * moving)


class ScheduleFreeAdamW(torch.optim.AdamW):
    """Keeps copies of weights, as its name says."""


def test_bad_input_is_refused_on_all_ranks(comm: MPI.Intracomm, directory: Path) -> None:
    log = log_of(comm, directory, [(0, "dense fp32"), (1, DRIFT)], small())

    def refused(model: nn.Module, match: str, **options: Any) -> None:
        text = raised(comm, ConfigurationError, lambda: mpisparse.GradientSync(model, scheme="auto", comm=comm, **options))
        assert match in text, text

    refused(small(), "weights, which cannot be here", deterministic=log, accumulate="backward")
    refused(small(), "weights, which cannot be here", deterministic=log, nonfinite="skip")
    model = small()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, deterministic=log)
    loss_of(model, seeded(comm.rank, 0)).backward()
    sync.step()
    text = raised(comm, ConfigurationError, sync.step)
    assert "weights now, or is to" in text
    assert "weights=False" in text
    sync.close()

    model, sync, optimizer = a_run(comm, deterministic=log)
    trained(model, sync, optimizer, 0, 4)
    companion = sync._companion
    assert isinstance(companion, OfWeights)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    text = raised(comm, ConfigurationError, lambda: mpisparse.attach(second, sync))
    assert "2 attached optimizers, where it takes one; pass weights=False" in text
    good = sync.state_dict()
    for key, value in (("step.around", {}), ("step.around", {"done": "4", "digest": 1}), ("step.pending", "drift 3 % int2")):
        raised(comm, ConfigurationError, lambda bad={**good, key: value}: sync.load_state_dict(bad))  # type: ignore[misc]
    if comm.size > 1:  # outside global_weights() the model holds the rank's own
        assert "does not hold the shared weights" in raised(comm, ConfigurationError, lambda: sync.load_state_dict(good))
    trained(model, sync, optimizer, 4, 6)
    assert alike(comm, shared(model, sync))
    sync.close()
