"""Scheme speculative: its checkpoints, and errors that reach all ranks some steps later."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import bits, everywhere, loss_of, raised, seeded, small, total
from speculating import Run, leftovers

import mpisparse
from mpisparse import checkpoint
from mpisparse.errors import ConfigurationError, GradientError, NonFiniteGradientError
from mpisparse.runtime import train
from mpisparse.runtime.settings import Settings
from mpisparse.stopping import StopRequest
from mpisparse.wire.own import OwnByOwner

# Checkpoints

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:an adaptive optimizer")]


def subjects(run: Run) -> dict[str, Any]:
    return {"model": run.model, "optimizer": run.optimizer, "sync": run.sync, "scheduler": run.scheduler}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {"granularity": "learned", "largest": 10_000}),
        ("adamw", {"staleness": 2, "codec": "int8"}),
        ("sgd", {"staleness": 2, "codec": "momentum-int8"}),
        ("sgd", {"staleness": 2, "codec": "int8", "compensate": False}),
        ("sgd", {"codec": "momentum-int8", "compensate": False}),
        ("adam", {"staleness": 0}),
        ("adam", {"granularity": "rule", "tolerance": math.inf}),
        ("sgd", {"granularity": "learned", "learner": "state", "largest": 10_000}),
        ("adam", {"influence": "update", "scored": "after"}),
    ],
)  # fmt: skip
def test_resume(comm: MPI.Intracomm, directory: Path, optimizer: str, options: dict[str, Any]) -> None:
    """A resumed run has the same bits; saving does not change the run that continues."""
    whole = Run(comm, optimizer, **options).train(0, 16)
    saved = Run(comm, optimizer, **options).train(0, 13)
    checkpoint.save(directory, step=13, **subjects(saved))
    resumed = Run(comm, optimizer, **options)
    assert checkpoint.load(directory, **subjects(resumed)) == 13
    assert everywhere(comm, saved.bits() == resumed.bits())
    assert everywhere(comm, saved.train(13, 16).bits() == whole.bits())
    assert everywhere(comm, resumed.train(13, 16).bits() == whole.bits())
    for run in (whole, saved, resumed):
        run.close()


@pytest.mark.parametrize("codec", ["int8", "momentum-int8"])
def test_a_checkpoint_holds_the_global_weights(comm: MPI.Intracomm, directory: Path, codec: str) -> None:
    """Loaded without the scheme or on another number of ranks, the model has the global weights and nothing is lost."""
    run = Run(comm, "adamw", codec=codec).train(0, 6)
    checkpoint.save(directory, step=6, **subjects(run))
    plain = small()
    checkpoint.load(directory, model=plain)
    with run.sync.global_weights():
        assert everywhere(comm, bits(plain.parameters()) == bits(run.model.parameters()))
    alone = Run(MPI.COMM_SELF, "adamw", codec=codec)
    checkpoint.load(directory, **subjects(alone))
    with alone.sync.global_weights():
        assert everywhere(comm, bits(plain.parameters()) == bits(alone.model.parameters()))
    held = total(comm, run.sync.residual.double() + leftovers(run.sync.state_dict())) / comm.size
    kept = alone.sync.residual.double() + leftovers(alone.sync.state_dict())
    assert everywhere(comm, torch.allclose(kept, held, atol=1e-7))
    alone.train(6, 9).close()
    run.close()


def test_a_state_belongs_to_its_global_weights(comm: MPI.Intracomm) -> None:
    """A refusal changes nothing on any rank, also if only one rank's state does not fit."""
    run, plain = Run(comm, "adam").train(0, 2), Run(comm, "adam").train(0, 4)
    old = run.sync.state_dict()
    state, before = run.train(2, 4).sync.state_dict(), run.bits()
    said = raised(comm, ConfigurationError, lambda: run.sync.load_state_dict(state))  # the model holds the rank's own
    assert "the model does not hold the global weights that this state was saved with" in said
    assert everywhere(comm, run.bits() == before)
    with run.sync.global_weights():
        raised(comm, ConfigurationError, lambda: run.sync.load_state_dict(old if comm.rank == comm.size - 1 else state))
    assert everywhere(comm, run.bits() == before)
    assert everywhere(comm, run.train(4, 7).bits() == plain.train(4, 7).bits())
    run.close()
    plain.close()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_saved_and_loaded_inside_global_weights(comm: MPI.Intracomm, directory: Path, optimizer: str) -> None:
    """The state is the same inside as outside, and a run saved or loaded inside continues with the same bits."""
    whole, saved = Run(comm, optimizer).train(0, 9), Run(comm, optimizer).train(0, 6)
    outside = saved.sync.state_dict()
    with saved.sync.global_weights():
        assert everywhere(comm, own_bits(saved.sync.state_dict()) == own_bits(outside))
        checkpoint.save(directory, step=6, **subjects(saved))
    resumed = Run(comm, optimizer).train(0, 2)
    with resumed.sync.global_weights():
        assert checkpoint.load(directory, **subjects(resumed)) == 6
    for run in (saved, resumed):
        assert everywhere(comm, run.train(6, 9).bits() == whole.bits())
    for run in (whole, saved, resumed):
        run.close()


def own_bits(state: dict[str, Any]) -> bytes:
    """Return a state's own weights and the digest of the global weights they belong to."""
    own = state["step.own"]
    entries = [v for s in own["state"] for _, v in sorted(s.items()) if isinstance(v, torch.Tensor)]
    return bits([torch.tensor(own["digest"]), *own["weights"], *entries])


@pytest.mark.parametrize("saved_at", [12, 13])
def test_a_noted_loss_counts_once(comm: MPI.Intracomm, directory: Path, saved_at: int) -> None:
    """Reported every fourth step, before the checkpoint or after: the policy uses it in that step only, and a resumed run
    learns the same."""

    def train(run: Run, first: int, last: int) -> Run:
        for step in range(first, last):
            run.noting = step % 4 == 0
            run.step(step)
        return run

    options: dict[str, Any] = {"granularity": "learned", "largest": 10_000}
    whole, saved, resumed = (Run(comm, **options) for _ in range(3))
    losses = [
        result["figures"][0]
        for step in range(16)
        for result in train(whole, step, step + 1).sync.state_dict()["step.flight"]
    ]
    assert [not math.isnan(loss) for loss in losses] == [step % 4 == 0 for step in range(16)]
    train(saved, 0, saved_at)
    saved.sync.note_loss(7.0)
    checkpoint.save(directory, step=saved_at, **subjects(saved))
    checkpoint.load(directory, **subjects(resumed))
    for run in (saved, resumed):
        run.noting = False
        run.step(saved_at)
        assert everywhere(comm, run.sync.state_dict()["step.flight"][-1]["figures"][0] == 7.0)
        train(run, saved_at + 1, 24)
    assert everywhere(comm, saved.bits() == resumed.bits())
    policies = [run.sync._companion.chooser.policy for run in (saved, resumed)]
    assert everywhere(comm, repr(policies[0].state()) == repr(policies[1].state()))
    for run in (whole, saved, resumed):
        run.close()


def test_train_ends_its_exchange(comm: MPI.Intracomm, directory: Path) -> None:
    """No thread is left when the run is done."""
    stop = StopRequest()
    try:
        code = train.run(Settings(out=str(directory / "run"), scheme="speculative", steps=3, batch_size=4), stop)
    finally:
        stop.restore()
    assert everywhere(comm, code == 0)
    assert everywhere(comm, not any(thread.name.startswith("mpisparse-exchange") for thread in threading.enumerate()))


# Refusals


def test_by_hand(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="speculative", comm=comm)
    said = raised(comm, GradientError, sync.step)
    assert "call mpisparse.attach(optimizer, sync) once" in said
    with pytest.raises(ConfigurationError, match="LBFGS is not known to do"):
        mpisparse.attach(torch.optim.LBFGS(model.parameters()), sync)
    mpisparse.attach(torch.optim.SGD(model.parameters(), lr=0.1), sync)
    with pytest.raises(ConfigurationError, match="another is attached already"):
        mpisparse.attach(torch.optim.SGD(model.parameters(), lr=0.1), sync)
    sync.close()


def test_trouble_of_one_rank_is_all_ranks(comm: MPI.Intracomm) -> None:
    """A non-finite value, another density or a missing backward is known a step later, on all ranks together."""
    last = comm.rank == comm.size - 1
    run = Run(comm).train(0, 3)
    run.optimizer.zero_grad()
    loss_of(run.model, seeded(comm.rank, 3)).backward()
    if last:
        run.model[0].bias.grad[3] = math.nan
    run.optimizer.step()
    said = raised(comm, NonFiniteGradientError, lambda: run.step(4))
    assert f"rank {comm.size - 1} has a non-finite gradient in 0.bias (flat index 1503)" in said
    assert "damaged since an earlier error" in raised(comm, GradientError, lambda: run.step(5))
    run.close()
    run = Run(comm).train(0, 3)
    if comm.size > 1:
        run.sync.density = 0.2 if last else 0.1
        run.step(3)
        assert "density must be the same on all ranks" in raised(comm, ConfigurationError, lambda: run.step(4))
        must_be_loaded(run)
    run.close()
    run = Run(comm).train(0, 3)
    run.optimizer.zero_grad()
    if not last:
        loss_of(run.model, seeded(comm.rank, 3)).backward()
    run.optimizer.step()
    assert f"no new gradient on rank {comm.size - 1}" in raised(comm, GradientError, lambda: run.step(4))
    run.close()


def must_be_loaded(run: Run) -> None:
    """Check that after a lost message neither a step nor synchronize() is possible; collective."""
    run.sync.density = 0.1
    assert "damaged since an earlier error" in raised(run.comm, GradientError, lambda: run.step(90))
    assert "damaged since an earlier error" in raised(run.comm, GradientError, run.sync.synchronize)


def settled(run: Run) -> None:
    """Wait for what is in flight; it stays there."""
    if run.sync._aggregator.works.flight is not None:
        run.sync._aggregator.works.flight.results()


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_error_in_the_thread_is_raised_by_all(
    comm: MPI.Intracomm, directory: Path, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a checkpoint takes the run back to before the error."""
    run = Run(comm, staleness=staleness).train(0, 3)
    checkpoint.save(directory, step=3, **subjects(run))
    settled(run)  # what is in flight arrives before anything fails

    def fail(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(OwnByOwner, "_terms", fail)
        said = raised(comm, GradientError, lambda: run.train(3, 4 + staleness))
        step = "" if staleness == 0 else f"step 3 failed on rank {comm.size - 1}: "
        assert f"{step}MemoryError: no room" in said
        must_be_loaded(run)
        settled(run)
    checkpoint.load(directory, **subjects(run))
    whole = Run(comm, staleness=staleness).train(0, 6)
    assert everywhere(comm, run.train(3, 6).sync.residual.equal(whole.sync.residual))
    assert everywhere(comm, bits(run.tensors()) == bits(whole.tensors()))
    run.close()
    whole.close()


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("name", ["probe", "confidence"])
def test_an_error_in_the_users_function_is_raised_by_all(comm: MPI.Intracomm, name: str, staleness: int) -> None:
    """No rank waits for the one whose function failed, which raises with its own error as the cause."""
    calls = 0

    def fail() -> Any:
        nonlocal calls
        calls += 1
        if calls >= 5 and comm.rank == comm.size - 1:
            raise LookupError("no batch")
        return loss_of(run.model, seeded(comm.rank, 99)) if name == "probe" else 0.5

    often = {"probe_every": 1} if name == "probe" else {}
    run = Run(comm, granularity="rule", staleness=staleness, **often, **{name: fail})
    failing = 2 if name == "probe" else 4  # a probe asks twice
    run.train(0, failing + staleness)
    said = raised(comm, GradientError, lambda: run.step(failing + staleness))
    assert f"{name}(): LookupError: no batch" in said
    if staleness:
        assert f"step {failing} failed on rank {comm.size - 1}: {name}()" in said
        must_be_loaded(run)
    run.close()


def test_a_failed_function_at_staleness_0_changes_nothing(comm: MPI.Intracomm) -> None:
    """All ranks learn of it before anything is added, so the step can be done again."""
    run = Run(comm, staleness=0, granularity="rule", confidence=lambda: told())
    twin = Run(comm, staleness=0, granularity="rule", confidence=lambda: 0.5)
    fails = [False]

    def told() -> float:
        if fails[0] and comm.rank == comm.size - 1:
            raise LookupError("no batch")
        return 0.5

    run.train(0, 3)
    fails[0] = True
    raised(comm, GradientError, lambda: run.step(3))
    fails[0] = False
    run.train(3, 6)
    twin.train(0, 6)
    assert everywhere(comm, run.bits() == twin.bits())
    run.close()
    twin.close()


def test_a_refused_step_forgets_no_noted_loss(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="speculative", staleness=0, density=0.1)
    loss_of(model, seeded(comm.rank, 0)).backward()
    sync.note_loss(2.5)
    sync.density = 0.1 if comm.rank else 0.2
    if comm.size > 1:
        raised(comm, mpisparse.ConfigurationError, sync.step)
        assert everywhere(comm, sync.state_dict()["step.noted"] == 2.5)
    sync.density = 0.1
    sync.step()
    assert everywhere(comm, math.isnan(sync.state_dict()["step.noted"]))
    sync.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_policy_without_losses(comm: MPI.Intracomm, staleness: int) -> None:
    run = Run(comm, granularity="learned", staleness=staleness, probe_every=1)
    run.noting, run.sync._companion.chooser.policy.patience = False, 12
    said = raised(comm, ConfigurationError, lambda: run.train(0, 20))
    assert "heard of no loss for 12 steps" in said
    must_be_loaded(run)
    run.close()
    run.close()  # twice does no harm


@pytest.mark.mpi(min_size=2)
def test_sums_beyond_float32(comm: MPI.Intracomm) -> None:
    run = Run(comm)
    run.optimizer.zero_grad()
    loss_of(run.model, seeded(comm.rank, 0)).backward()
    run.model[2].bias.grad[7] = 3e38
    run.optimizer.step()
    said = raised(comm, NonFiniteGradientError, lambda: run.step(1))
    assert "the sum over ranks is beyond what float32 holds in 2.bias (flat index 2557)" in said
    run.close()
