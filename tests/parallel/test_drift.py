"""Scheme drift: every rank trains on its own weights, and the largest distances from the shared ones are exchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from drifting import Training
from mpi4py import MPI
from ranks import alike, bits, everywhere, loss_of, raised, seeded, small, total
from torch import nn

import mpisparse
from mpisparse.comm.regions import Groups, Part

pytestmark = pytest.mark.mpi

CASES: dict[str, dict[str, Any]] = {
    "sparse": {"density": 0.05},
    "sparse, rate 2": {"density": 0.05, "rate": 2.0},
    "sparse, every third": {"density": 0.05, "every": 3},
    "whole": {"density": 1.0},
    "whole, every second": {"density": 1.0, "every": 2, "rate": 1.5, "spread": False},
    "in groups": {"density": 0.3, "by": "groups"},
    "in groups, sign, every second": {"density": 0.5, "by": "groups", "codec": "sign", "every": 2},
    "in three parts": {"density": 1.0, "every": 3},
    "in five parts, sign": {"density": 1.0, "every": 5, "codec": "sign"},
    "in one part, then in three parts": {"density": 1.0, "every": "1, 4:3"},
    "in three parts in flight": {"density": 1.0, "every": 3, "staleness": 1},
    "whole, float32": {"density": 1.0, "codec": "fp32"},
    "in flight": {"density": 0.05, "staleness": 1},
    "in flight, every third": {"density": 0.05, "staleness": 1, "every": 3, "rate": 2.0},
    "whole in flight": {"density": 1.0, "staleness": 1},
    "whole in flight, every second": {"density": 1.0, "staleness": 1, "every": 2, "spread": False},
}


@pytest.mark.parametrize("case", CASES)
def test_the_shared_weights_are_equal_and_nothing_is_lost(comm: MPI.Intracomm, case: str) -> None:
    """G is bitwise equal; G moved by rate x all means of what was sent, but for e; what was not sent stays in W - G."""
    run = Training(comm, **CASES[case])
    single = CASES[case]["density"] < 1 and "by" not in CASES[case]
    rate, n = CASES[case].get("rate", min(2.0, comm.size**0.5) if single else 1.0), len(run.own)
    before, sent = run.shared().double(), torch.zeros(n, dtype=torch.float64)
    sync: Any = run.sync
    for _ in range(12):
        with Spy(sync) as spy:
            run.step()
        sent += spy.sent
        assert alike(comm, [run.shared()])
        moved = run.shared().double() - before
        gone = rate * total(comm, sent) / comm.size - run.remembered()
        assert everywhere(comm, float((moved - gone).abs().max()) < 2e-6)
    every = 1 if "parts" in case else CASES[case].get("every", 1)
    assert everywhere(comm, sync._aggregator.number == 12 // every)
    run.sync.close()


class Spy:
    """Watches what one rank sends: W - G loses exactly that."""

    def __init__(self, sync: Any) -> None:
        self.sync, self.stage = sync, sync._aggregator.works.stages[0]
        self.sent = torch.zeros(len(sync._residual), dtype=torch.float64)

    def __enter__(self) -> Spy:
        inner, self.settle = self.stage.settle, self.stage.settle

        def settle(backend: Any, acc: Any, union: Any, sent: Any, reduced: Any) -> Any:
            before = self.sync.residual.double()
            after = inner(backend, acc, union, sent, reduced)
            own = reduced.own
            if isinstance(union, range):
                for start, stop, part in own.values(backend):
                    self.sent[start:stop] += torch.from_numpy(part.copy()).double()
            elif isinstance(union, Part | Groups):
                for start, stop, part in own.values(backend):
                    self.sent[torch.from_numpy(union.index(start, stop))] += torch.from_numpy(part.copy()).double()
            else:
                self.sent[torch.from_numpy(union)] += torch.from_numpy(own).double()
            lost = before - self.sync.residual.double()
            assert float((lost - self.sent).abs().max()) < 1e-6  # of weights around 1, rounded twice
            return after

        self.stage.settle = settle
        return self

    def __exit__(self, *_: object) -> None:
        del self.stage.settle


def test_whole_float32_with_sgd_is_dense_sgd(comm: MPI.Intracomm) -> None:
    run = Training(comm, torch.optim.SGD, density=1.0, codec="fp32")
    twin = small()
    dense = mpisparse.GradientSync(twin, scheme="dense")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    mpisparse.attach(optimizer, dense)
    for step in range(10):
        run.step()
        optimizer.zero_grad()
        loss_of(twin, seeded(comm.rank, step)).backward()
        optimizer.step()
    for p, q in zip(run.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    run.sync.close()
    dense.close()


@pytest.mark.parametrize(
    "case", ["sparse", "in groups", "whole, every second", "in three parts", "in flight", "whole in flight"]
)
def test_at_rate_1_the_mean_of_all_weights_is_conserved(comm: MPI.Intracomm, case: str) -> None:
    options = {name: value for name, value in CASES[case].items() if name not in ("rate", "spread")}
    run = Training(comm, **{**options, "rate": 1.0, "every": 3 if "parts" in case else 1})
    for _ in range(6):
        run.optimizer.zero_grad()
        loss_of(run.model, seeded(comm.rank, run.steps)).backward()
        alone = copy.deepcopy(run.model)
        other = torch.optim.AdamW(alone.parameters(), lr=0.01)
        other.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        for p, q in zip(alone.parameters(), run.model.parameters(), strict=True):
            p.grad = q.grad
        other.step()
        trained = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
        before = total(comm, trained) / comm.size + run.remembered()
        run.optimizer.step()
        after = total(comm, run.own) / comm.size + run.remembered()
        assert everywhere(comm, float((before - after).abs().max()) < 1e-6)
        run.steps += 1
    run.sync.close()


@pytest.mark.parametrize(
    ("kind", "options", "root"),
    [
        (torch.optim.AdamW, {"density": 0.05}, True),
        (torch.optim.SGD, {"density": 0.05}, True),
        (torch.optim.AdamW, {"density": 0.3, "by": "groups"}, False),
        (torch.optim.AdamW, {"density": 1.0}, False),
        (torch.optim.AdamW, {"density": 0.05, "rate": 1.0}, False),
    ],
)
def test_the_rate_follows_the_ranks_where_single_elements_are_selected(
    comm: MPI.Intracomm, kind: Any, options: dict[str, Any], root: bool
) -> None:
    run = Training(comm, kind, **options)
    reducer: Any = run.sync._aggregator.works.reducer
    assert reducer.rate == (min(2.0, comm.size**0.5) if root else 1.0)
    run.sync.close()


def test_synchronize_sets_all_ranks_to_the_shared_weights(comm: MPI.Intracomm) -> None:
    cases = ({"density": 0.02}, {"density": 1.0, "every": 4}, {"density": 0.02, "staleness": 1})
    for options in (*cases, {"density": 1.0, "staleness": 1, "every": 5}):
        run = Training(comm, rate=1.0, **options)
        for _ in range(5):
            run.step()
        mean = total(comm, run.own) / comm.size + run.remembered()
        run.sync.synchronize()
        assert alike(comm, run.model.parameters())
        assert everywhere(comm, not run.sync.residual.any() and not run.remembered().any())
        assert everywhere(comm, float((run.own - mean).abs().max()) < 1e-6)
        run.step()
        run.sync.close()


def test_by_hand_it_goes_after_the_optimizer(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, seeded(comm.rank, 0)).backward()
    said = raised(comm, mpisparse.GradientError, sync.step)
    assert "after optimizer.step()" in said
    optimizer.step()
    sync.step()
    assert everywhere(comm, sync.stats.selected > 0)
    sync.close()


def test_weights_that_are_not_finite_are_refused_on_all_ranks(comm: MPI.Intracomm) -> None:
    run = Training(comm, torch.optim.SGD)
    run.step()
    before = run.shared()
    first = next(iter(run.model.parameters()))
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            first[0, 0] = float("inf")
    loss_of(run.model, seeded(comm.rank, 1)).backward()
    said = raised(comm, mpisparse.NonFiniteGradientError, run.optimizer.step)
    assert "non-finite weight in 0.weight" in said
    assert "nothing was exchanged" in said
    assert everywhere(comm, torch.equal(run.shared(), before))
    run.sync.close()


@pytest.mark.parametrize("options", [{"density": 0.3}, {"density": 0.3, "by": "groups"}, {"density": 1.0, "every": 3}])
def test_a_sum_beyond_float32_names_its_weight(comm: MPI.Intracomm, options: dict[str, Any]) -> None:
    run = Training(comm, torch.optim.SGD, codec="bf16", rate=4.0, **options)
    before, last = run.shared(), list(run.model.parameters())[2]
    with torch.no_grad():
        last[-1] = 3e38
    error = None
    for _ in range(3):  # one of them has the part in it
        try:
            run.sync.step()
        except mpisparse.NonFiniteGradientError as caught:
            error = str(caught)
            break
        before = run.shared()
    assert everywhere(comm, error is not None and "beyond what float32 holds in 2.weight" in error), error
    assert everywhere(comm, torch.equal(run.shared(), before))
    run.sync.close()


@pytest.mark.parametrize("case", CASES)
def test_nothing_to_exchange(comm: MPI.Intracomm, case: str) -> None:
    """At a learning rate of 0 nothing changes."""
    run = Training(comm, torch.optim.SGD, **CASES[case])
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    before = run.own
    for _ in range(4):
        run.step()
    assert everywhere(comm, torch.equal(run.own, before) and not run.sync.residual.any())
    run.sync.close()


def test_a_density_that_falls_goes_with_groups(comm: MPI.Intracomm) -> None:
    run = Training(comm, density=0.4, by="groups")
    for density in (1.0, 1.0, 0.7, 0.4):
        run.sync.density = density
        run.step()
        assert everywhere(comm, abs(run.sync.stats.density - density) <= 512 / 2570)
        assert alike(comm, [run.shared()])
    run.sync.close()


def test_other_types_need_a_remainder(comm: MPI.Intracomm) -> None:
    said = raised(
        comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(small().bfloat16(), scheme="drift", codec="int8")
    )
    assert "remainder=True" in said
    options: dict[str, Any] = {"scheme": "drift", "codec": "int8", "remainder": True}
    said = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(small().double(), **options))
    assert "0.weight is float64" in said
    model = small().bfloat16()
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8", remainder=True, density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    mpisparse.attach(optimizer, sync)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=seeded(comm.rank, step)).bfloat16()
        model(x).square().mean().backward()
        optimizer.step()
        assert alike(comm, [sync._residual])
    sync.synchronize()
    assert alike(comm, model.parameters())
    sync.close()


def test_optimizers_that_copy_weights_are_refused(comm: MPI.Intracomm) -> None:
    """By name, also one derived from such."""
    model = small()
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8")
    for name in ("Lookahead", "AdamWScheduleFree", "Ranger21", "MADGRAD", "DAdaptSGD"):
        kind = type("Mine", (type(name, (torch.optim.SGD,), {}),), {})
        optimizer = kind(model.parameters(), lr=0.1)
        text = raised(comm, mpisparse.ConfigurationError, lambda made=optimizer: mpisparse.attach(made, sync))
        assert "keeps copies of weights in its state" in text, name
    sync.close()


@pytest.mark.parametrize("buffers", ["own", "rank0", "average"])
def test_buffers_inside_global_weights(comm: MPI.Intracomm, buffers: str) -> None:
    model = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6))
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8", buffers=buffers)
    model(torch.randn(16, 10, generator=seeded(comm.rank, 3)) * (1 + comm.rank))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_var is not None
    own = norm.running_var.clone()
    every = comm.allgather(own)
    expected = {"own": own, "rank0": every[0], "average": torch.stack(every).double().mean(0).float()}[buffers]
    with sync.global_weights():
        torch.testing.assert_close(norm.running_var, expected)
    assert torch.equal(norm.running_var, own)
    sync.close()


def test_a_scaler_may_skip_a_step_on_one_rank(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8", every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    mpisparse.attach(optimizer, sync, scaler)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, seeded(comm.rank, step))
        if step == 2 and comm.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert everywhere(comm, sync._aggregator.number == 3)
    with sync.global_weights():
        assert alike(comm, model.parameters())
    assert bits([sync.residual])
    sync.close()


@pytest.mark.parametrize("knows", [False, True], ids=["none given", "another given"])
@pytest.mark.parametrize("options", [{"scheme": "drift"}, {"scheme": "exdyna", "density": 0.1}], ids=str)
def test_a_scaler_that_attach_does_not_know_is_refused(comm: MPI.Intracomm, options: dict[str, Any], knows: bool) -> None:
    """A rank that alone skips a step calls no hook, so the others would wait for it."""
    model = small()
    sync = mpisparse.GradientSync(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler, known = (torch.amp.GradScaler("cpu", init_scale=2.0) for _ in range(2))
    handle = mpisparse.attach(optimizer, sync, known if knows else None)
    if knows:
        known.scale(loss_of(model, seeded(comm.rank, 1))).backward()
        known.step(optimizer)
        known.update()
        assert everywhere(comm, sync._aggregator.number == 1)
    scaler.scale(loss_of(model, seeded(comm.rank, 0)) * (float("inf") if comm.rank == 0 else 1.0)).backward()
    said = raised(comm, mpisparse.ConfigurationError, lambda: scaler.step(optimizer))
    assert "attach(optimizer, sync, scaler)" in said
    handle.remove()
    assert not {"_step_supports_amp_scaling", "found_inf", "grad_scale"} & vars(optimizer).keys()
    sync.close()


def test_one_optimizer_is_attached_at_a_time(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="drift")
    handle = mpisparse.attach(first := torch.optim.AdamW(model.parameters()), sync)
    assert "remove()" in raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.attach(first, sync))
    handle.remove()
    mpisparse.attach(second := torch.optim.SGD(model.parameters(), lr=0.1), sync)
    loss_of(model, seeded(comm.rank, 0)).backward()
    second.step()
    assert everywhere(comm, sync.stats.selected > 0)
    sync.close()


def test_all_elements_cannot_become_some(comm: MPI.Intracomm) -> None:
    """An exchange of all elements refuses a density below 1 and states with one, because its owners are different."""
    run, other = Training(comm, density=1.0), Training(comm, density=0.1)
    with pytest.raises(mpisparse.ConfigurationError, match=r"cannot change to 0\.1"):
        run.sync.density = 0.1
    for each in (run, other):
        each.step()
    state = other.sync.state_dict()
    with other.sync.global_weights():
        run.model.load_state_dict(other.model.state_dict())
    said = raised(comm, mpisparse.ConfigurationError, lambda: run.sync.load_state_dict(state))
    assert "density=0.1, this is density=1.0" in said
    run.sync.close()
    other.sync.close()


def test_no_step_inside_global_weights(comm: MPI.Intracomm) -> None:
    """Not even one without an exchange, which would apply deliveries in flight."""
    run = Training(comm, density=0.1, staleness=1, every=2)
    for _ in range(4):
        run.step()
    with run.sync.global_weights():
        assert "global_weights()" in raised(comm, RuntimeError, run.sync.step)
    run.step()
    assert alike(comm, [run.shared()])
    run.sync.close()


def test_a_closure_is_local(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="drift", codec="int8")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2 + comm.rank)
    mpisparse.attach(optimizer, sync)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seeded(comm.rank, 1))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert everywhere(comm, sync._aggregator.number == 3)
    sync.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_closed_exchange_is_told_before_the_optimizer_moves(comm: MPI.Intracomm, staleness: int) -> None:
    run = Training(comm, every=2, staleness=staleness)
    run.step()
    run.step()
    run.sync.close()
    before = bits(run.model.parameters())
    loss_of(run.model, seeded(comm.rank, 2)).backward()
    assert "was closed" in raised(comm, RuntimeError, run.optimizer.step)
    assert "was closed" in raised(comm, RuntimeError, run.sync.step)
    assert everywhere(comm, bits(run.model.parameters()) == before)


@pytest.mark.parametrize("schemes", [("drift", "drift"), ("drift", "exdyna"), ("exdyna", "drift")], ids=str)
def test_the_last_exchange_of_a_model_counts(comm: MPI.Intracomm, schemes: tuple[str, str]) -> None:
    model = small()
    options = {"density": 0.1, "codec": "int8"}
    first, second = (mpisparse.GradientSync(model, scheme=scheme, **options) for scheme in schemes)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, seeded(comm.rank, 0)).backward()
    assert "another was made for the same model" in raised(comm, RuntimeError, first.step)
    mpisparse.attach(optimizer, second)
    optimizer.step()
    assert everywhere(comm, second.stats.selected > 0)
    first.close()
    second.close()


def test_weights_with_gaps_in_memory_are_refused(comm: MPI.Intracomm) -> None:
    model = nn.Linear(6, 4)
    model.weight = nn.Parameter(torch.zeros(4, 12)[:, ::2])
    said = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(model, scheme="drift"))
    assert "parameter weight has gaps in its memory" in said


def test_channels_last_and_tied_weights(comm: MPI.Intracomm) -> None:
    """Weights are moved in the order in which they lie in memory, tied ones once."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 32), nn.Linear(32, 32))
    model[3].weight = model[2].weight
    model = model.to(memory_format=torch.channels_last)
    sync = mpisparse.GradientSync(model, scheme="drift", density=1.0, codec="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mpisparse.attach(optimizer, sync)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 4, 4, generator=seeded(comm.rank, step))).square().mean().backward()
        optimizer.step()
        own = [p.detach().clone() for p in model.parameters()]
        with sync.global_weights():
            assert alike(comm, model.parameters())
            for p, q in zip(model.parameters(), own, strict=True):
                torch.testing.assert_close(p.detach(), q, rtol=0, atol=1e-6)  # all is exchanged, exactly
    sync.close()


def test_what_is_not_finite_before_the_first_exchange(comm: MPI.Intracomm) -> None:
    run = Training(comm, torch.optim.SGD)
    with torch.no_grad():
        run.model[2].weight[1, 1] = float("nan")
    loss_of(run.model, seeded(comm.rank, 1)).backward()
    said = raised(comm, mpisparse.NonFiniteGradientError, run.optimizer.step)
    assert "non-finite weight" in said
    run.sync.close()
