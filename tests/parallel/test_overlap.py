"""overlap=True: buckets sent during backward give the same bits as the same buckets sent in step()."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, everywhere, raised, seeded, total
from torch import nn

import mpisparse
from mpisparse.comm.exchange import PollingExchange
from mpisparse.core.bucket import cut
from mpisparse.core.buckets import Bucketed
from mpisparse.errors import CollectiveError

pytestmark = pytest.mark.mpi

MB = 0.008  # two thousand elements
CASES = [
    {"scheme": "dense"},
    {"scheme": "dense", "codec": "int4"},
    {"scheme": "dense", "codec": "sign"},
    {"scheme": "dense", "codec": "bf16"},
    {"scheme": "exdyna", "density": 0.05},
    {"scheme": "exdyna", "density": 0.02, "codec": "int4"},
    {"scheme": "exdyna", "density": 0.05, "codec": "momentum-int8"},
]


def deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    layers = [layer for _ in range(4) for layer in (nn.Linear(40, 40), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(40, 10)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 40, generator=seeded(rank, step)).to(next(model.parameters()).dtype)
    return (model(x) - x[:, :10].sin()).square().mean()


def overlapped(model: nn.Module, **options: Any) -> mpisparse.GradientSync:
    return mpisparse.GradientSync(model, **{"overlap": True, "bucket_mb": MB, "scheme": "dense", **options})


def train(
    comm: MPI.Intracomm, sync: mpisparse.GradientSync, model: nn.Module, steps: range, optimizer: Any = None
) -> Iterator[bytes]:
    """Train; yields the bits of what a step published, of the weights and of the residual."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        sync.step()
        grads = [p.grad for p in model.parameters()]
        optimizer.step()
        yield bits([*grads, *model.parameters(), sync.residual])
        assert alike(comm, model.parameters())


def early(sync: mpisparse.GradientSync) -> float:
    return sync.stats.details["early"]


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Send every bucket in step()."""
    return lambda: monkeypatch.setattr(Bucketed, "overlaps", False)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Make every message of the thread take this many seconds longer."""
    fast = PollingExchange._call

    def set_delay(seconds: float) -> None:
        def call(self: PollingExchange, *args: Any, **options: Any) -> None:
            time.sleep(seconds)
            fast(self, *args, **options)

        monkeypatch.setattr(PollingExchange, "_call", call)

    return set_delay


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_the_same_buckets_exchanged_at_once(
    comm: MPI.Intracomm, in_step: Callable[[], None], options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = deep(dtype)
    sync = overlapped(model, **options)
    found = list(train(comm, sync, model, range(6)))
    several = len(sync._aggregator.buckets)  # type: ignore[attr-defined]
    assert several > 3
    assert everywhere(comm, early(sync) == (several if sync._aggregator.overlaps else 0))  # type: ignore[attr-defined]
    sync.close()
    in_step()
    twin = deep(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = overlapped(twin, **options)
    same = list(train(comm, other, twin, range(6))) == found
    assert early(other) == 0
    other.close()
    assert everywhere(comm, same)


@pytest.mark.parametrize("options", [CASES[1], CASES[4]], ids=str)
def test_each_bucket_is_what_an_aggregator_of_its_elements_makes(comm: MPI.Intracomm, options: dict[str, Any]) -> None:
    """The reference is one aggregator for each bucket's vector, with no model and no thread around it."""
    model = deep()
    sync = overlapped(model, **options)
    buckets = sync._aggregator.buckets  # type: ignore[attr-defined]
    plain = [mpisparse.aggregator(bucket.hi - bucket.lo, **options) for bucket in buckets]
    n, k = buckets[-1].hi, int(options.get("density", 1.0) * buckets[-1].hi + 1e-6)
    same = True
    for step in range(5):
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        sync.step()
        mean = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        for bucket, aggregator in zip(buckets, plain, strict=True):
            part = slice(bucket.lo, bucket.hi)
            share = k * bucket.hi // n - k * bucket.lo // n
            same &= bits([aggregator.step(own[part], share)]) == bits([mean[part]])
            same &= bits([aggregator.residual]) == bits([sync.residual[part]])
    for aggregator in plain:
        aggregator.close()
    sync.close()
    assert everywhere(comm, same)


@pytest.mark.mpi(min_size=2)
def test_neither_a_slow_rank_nor_threads_change_bits(comm: MPI.Intracomm, slow: Callable[[float], None]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + comm.rank % 2)
    model = deep()
    sync = overlapped(model, codec="int4")
    found = list(train(comm, sync, model, range(4)))
    sync.close()
    if comm.rank == 1:
        slow(0.005)
    twin = deep()
    other = overlapped(twin, codec="int4")
    same = list(train(comm, other, twin, range(4))) == found
    torch.set_num_threads(before)
    other.close()
    assert everywhere(comm, same)


@pytest.mark.mpi(min_size=2)
@pytest.mark.singles
@pytest.mark.parametrize("options", [CASES[0], CASES[1], CASES[4], CASES[6]], ids=str)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_value_that_is_not_finite_in_a_late_bucket_changes_nothing(
    comm: MPI.Intracomm, nonfinite: str, options: dict[str, Any]
) -> None:
    model, twin = deep(), deep()
    sync, other = (overlapped(m, nonfinite=nonfinite, **options) for m in (model, twin))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for one, m, optimizer in zip((sync, other), (model, twin), optimizers, strict=True):
        list(train(comm, one, m, range(3), optimizer))
    before = bits([*model.parameters(), sync.residual])
    model.zero_grad()
    first = next(iter(model.parameters()))  # in the bucket that is sent last
    hook = first.register_hook(lambda grad: grad * float("nan")) if comm.rank == 1 else None
    loss_of(model, comm.rank, 3).backward()
    if hook is not None:
        hook.remove()
    if nonfinite == "skip":
        sync.step()
        assert sync.stats.skipped
        assert all(p.grad is None for p in model.parameters())
    else:
        text = raised(comm, mpisparse.NonFiniteGradientError, sync.step)
        assert "rank 1 has a non-finite gradient in 0.weight (flat index 0)" in text, text
    unchanged = bits([*model.parameters(), sync.residual]) == before
    found = list(train(comm, sync, model, range(4, 7), optimizers[0]))
    same = found == list(train(comm, other, twin, range(4, 7), optimizers[1]))
    sync.close()
    other.close()
    assert everywhere(comm, unchanged)
    assert everywhere(comm, same)


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_refuses_changes_nothing(comm: MPI.Intracomm) -> None:
    """A rank without a backward, one with two, one that clips too early: buckets in flight are undone."""
    model = deep()
    sync = overlapped(model, codec="int4")
    list(train(comm, sync, model, range(2)))
    before = bits([sync.residual])
    same = True
    for case, said in (
        ("none", "no new gradient on rank 1"),
        ("two", "twice before step()"),
        ("clip", "after it had been sent"),
    ):
        model.zero_grad()
        odd = comm.rank == 1
        if not (odd and case == "none"):
            loss_of(model, comm.rank, 5).backward()
        if odd and case == "two":
            loss_of(model, comm.rank, 6).backward()
        if odd and case == "clip" and sync._aggregator.overlaps:  # type: ignore[attr-defined]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if case != "clip" or sync._aggregator.overlaps:  # type: ignore[attr-defined]
            assert said in raised(comm, mpisparse.GradientError, sync.step)
            same &= bits([sync.residual]) == before
    list(train(comm, sync, model, range(2, 4)))
    sync.close()
    assert everywhere(comm, same)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [2, 4])  # before and after batches are compared
def test_ranks_in_different_calls_are_told(comm: MPI.Intracomm, steps: int) -> None:
    """Buckets are in flight on all ranks but one: they stay in flight, and the next step() of all applies them."""
    model = deep()
    sync = overlapped(model)
    list(train(comm, sync, model, range(steps)))
    model.zero_grad()
    if comm.rank != 1:
        loss_of(model, comm.rank, 2).backward()
    call = sync.step if comm.rank != 1 else lambda: sync.average(1.0)
    text = raised(comm, CollectiveError, call)
    assert "average is collective, call it on every rank" in text
    if comm.rank == 1:
        loss_of(model, comm.rank, 2).backward()
    sync.step()
    assert alike(comm, [p.grad for p in model.parameters()])
    list(train(comm, sync, model, range(steps + 1, steps + 3)))
    assert alike(comm, model.parameters())
    sync.close()


def test_accumulation_unused_parameters_and_a_state_between(comm: MPI.Intracomm) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.spare = deep(), nn.Linear(40, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    model, twin = Partly(), deep()
    model.body.load_state_dict(twin.state_dict())
    sync, dense = overlapped(model), mpisparse.GradientSync(twin, scheme="dense")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(4):
        for one, m, optimizer in zip((sync, dense), (model, twin), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with one.no_sync():
                loss_of(m, comm.rank, 2 * step).backward()
            loss_of(m, comm.rank, 2 * step + 1).backward()
            kept = one.state_dict()["residual"]  # as before the step
            assert not kept.any()
            one.step()
            optimizer.step()
    near = all(
        torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(model.body.parameters(), twin.parameters(), strict=True)
    )
    idle = not model.spare.weight.grad.any() if model.spare.weight.grad is not None else True
    for one in (sync, dense):
        one.close()
    assert everywhere(comm, near)
    assert everywhere(comm, idle)


class Skipping(nn.Module):
    """Layers of which each rank leaves another one out in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.left_out = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == self.left_out % 4 else layer(x).tanh()
        return x[:, :10]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [CASES[1], CASES[5]], ids=str)
def test_other_layers_threads_and_speeds_on_each_rank_change_no_bit(
    comm: MPI.Intracomm, in_step: Callable[[], None], slow: Callable[[float], None], options: dict[str, Any]
) -> None:
    """Two micro-batches a step; buckets close early on some ranks and in step() on others, in rank 0's first order."""
    threads, ends = torch.get_num_threads(), []
    for turn in range(2):
        if turn:
            in_step()
        else:
            torch.set_num_threads(1 + comm.rank % 2)
            slow(0.002 * (comm.rank == 1))
        model = Skipping()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sync = overlapped(model, **options)
        optimizer, early_ones = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model.left_out = comm.rank + step
            with sync.no_sync():
                loss_of(model, comm.rank, 2 * step).backward()
            model.left_out += 2
            loss_of(model, comm.rank, 2 * step + 1).backward()
            sync.step()
            optimizer.step()
            early_ones.append(early(sync))
        ends.append(bits([*model.parameters(), sync.residual]))
        several = len(sync._aggregator.buckets)  # type: ignore[attr-defined]
        assert everywhere(comm, max(early_ones) < several), "some layer is always left out"
        assert turn or comm.allreduce(max(early_ones), MPI.MAX) > 0
        sync.close()
        torch.set_num_threads(threads)
    assert everywhere(comm, ends[0] == ends[1])


@pytest.mark.parametrize("options", [CASES[1], CASES[4]], ids=str)
def test_a_checkpoint_between_backward_and_the_step_holds_no_gradient(
    comm: MPI.Intracomm, directory: Path, options: dict[str, Any]
) -> None:
    """Otherwise the gradients of buckets in flight would be added twice after a resume."""
    model, twin = deep(), deep()
    sync, other = (overlapped(m, **options) for m in (model, twin))
    list(train(comm, sync, model, range(4)))
    model.zero_grad()
    loss_of(model, comm.rank, 4).backward()
    mpisparse.checkpoint.save(directory / "saved", model=model, sync=sync, step=4)
    sync.step()
    found = bits([*[p.grad for p in model.parameters()], sync.residual])
    mpisparse.checkpoint.load(directory / "saved", model=twin, sync=other)
    loss_of(twin, comm.rank, 4).backward()
    other.step()
    same = bits([*[p.grad for p in twin.parameters()], other.residual]) == found
    sync.close()
    other.close()
    assert everywhere(comm, same)


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_batches_follows_the_density_of_the_others(comm: MPI.Intracomm) -> None:
    model = deep()
    sync = overlapped(model, scheme="exdyna", density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sync.join(optimizer):
        for step in range(3 + 3 * (comm.rank == 0)):
            sync.density = 0.1 / (1 + step)
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            sync.step()
            optimizer.step()
    assert alike(comm, [*model.parameters(), torch.tensor(sync.stats.selected)])
    assert everywhere(comm, sync.stats.selected <= 1.1 * 0.1 / 6 * sync.residual.numel() + 5)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_a_density_changed_after_buckets_set_out_is_refused(comm: MPI.Intracomm) -> None:
    model = deep()
    sync = overlapped(model, scheme="exdyna", density=0.1)
    list(train(comm, sync, model, range(3)))
    model.zero_grad()
    loss_of(model, comm.rank, 3).backward()
    before, sync.density = sync.state_dict()["residual"], 0.05
    if sync._aggregator.overlaps:  # type: ignore[attr-defined]
        assert "change the density, or freeze parameters, before backward" in raised(
            comm, mpisparse.GradientError, sync.step
        )
        assert everywhere(comm, bits([before]) == bits([sync.residual]))
    model.zero_grad()
    list(train(comm, sync, model, range(4, 6)))
    sync.close()


@pytest.mark.parametrize("options", [CASES[1], CASES[4]], ids=str)
def test_resumed_is_bitwise_uninterrupted(comm: MPI.Intracomm, directory: Path, options: dict[str, Any]) -> None:
    model = deep()
    sync = overlapped(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    list(train(comm, sync, model, range(4), optimizer))
    mpisparse.checkpoint.save(directory / "saved", model=model, optimizer=optimizer, sync=sync, step=4)
    found = list(train(comm, sync, model, range(4, 8), optimizer))
    sync.close()
    twin = deep()
    other = overlapped(twin, **options)
    second = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    mpisparse.checkpoint.load(directory / "saved", model=twin, optimizer=second, sync=other)
    same = list(train(comm, other, twin, range(4, 8), second)) == found
    other.close()
    assert everywhere(comm, same)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("options", [CASES[1], CASES[4]], ids=str)
def test_another_number_of_ranks_goes_on_with_what_waits(
    comm: MPI.Intracomm, directory: Path, options: dict[str, Any]
) -> None:
    model = deep()
    sync = overlapped(model, **options)
    list(train(comm, sync, model, range(4)))
    state = sync.state_dict()
    waits = sync.residual.double().clone()
    for bucket, saved in zip(sync._aggregator.buckets, state["step.buckets"], strict=True):  # type: ignore[attr-defined]
        if "error" in saved:  # what waits at an owner counts as often as there are ranks
            waits[bucket.lo : bucket.hi][bucket.aggregator.works.reducer.owned(sync.rank, sync.size)] += (
                sync.size * torch.as_tensor(saved["error"]).double()
            )
    before = total(comm, waits) / comm.size
    mpisparse.checkpoint.save(directory / "saved", model=model, sync=sync, step=4)
    sync.close()
    fewer = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
    fine = True
    if comm.rank < 2:
        twin = deep()
        other = overlapped(twin, comm=fewer, **options)
        mpisparse.checkpoint.load(directory / "saved", model=twin, sync=other)
        after = total(fewer, other.residual) / 2
        fine = torch.allclose(after, before, rtol=1e-4, atol=1e-6)
        list(train(fewer, other, twin, range(4, 6)))
        other.close()
    fewer.Free()
    assert everywhere(comm, fine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_that_is_no_power_of_two_rounds_as_the_scaler_does(
    comm: MPI.Intracomm, in_step: Callable[[], None], dtype: torch.dtype
) -> None:
    """The exchange unscales what it sends, the scaler unscales p.grad: the same bits."""
    ends = []
    for turn in range(2):
        if turn:
            in_step()
        model = deep(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sync = overlapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        mpisparse.attach(optimizer, sync, scaler)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, comm.rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(bits([*model.parameters(), sync.residual]))
        sync.close()
    assert everywhere(comm, ends[0] == ends[1])


@pytest.mark.parametrize("clips", [False, True])
def test_a_grad_scaler_unscales_before_buckets_are_added(comm: MPI.Intracomm, clips: bool) -> None:
    """Scales that are powers of two change no bit, an infinity skips the step on all ranks, clipping sees the mean."""
    model, twin = deep(), deep()
    sync, other = (overlapped(m, codec="int4") for m in (model, twin))
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    attachment = mpisparse.attach(optimizer, sync, scaler)
    mpisparse.attach(plain, other)
    for step in range(6):
        optimizer.zero_grad()
        bad = step == 3 and comm.rank == comm.size - 1
        first = next(iter(model.parameters()))
        hook = first.register_hook(lambda grad: grad * float("inf")) if bad else None
        scaler.scale(loss_of(model, comm.rank, step)).backward()
        if hook is not None:
            hook.remove()
        if clips and step != 3:
            scaler.unscale_(optimizer)
            sync.step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            plain.zero_grad()
            loss_of(twin, comm.rank, step).backward()
            if clips:
                other.step()
                nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            plain.step()
    same = bits([*model.parameters(), sync.residual]) == bits([*twin.parameters(), other.residual])
    attachment.remove()
    for one in (sync, other):
        one.close()
    assert everywhere(comm, same)


def test_clipping_without_overlap_is_the_same_as_clipping_the_mean(comm: MPI.Intracomm) -> None:
    model = deep()
    sync = overlapped(model)
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm()
    sync.close()
    assert everywhere(comm, norm > 1e-3 and abs(clipped - 1e-3) < 1e-6)
    assert alike(comm, [clipped])


def test_buckets_hold_at_most_what_they_may() -> None:
    model = deep()
    sync = mpisparse.GradientSync(model, scheme="dense", comm=MPI.COMM_SELF)
    slots = sync._layout.slots
    for nbytes in (1, 4 * 1600, 4 * 1700, 4 * 5000, 1e9):
        cuts = cut(slots, nbytes)
        assert cuts[0] == 0
        assert cuts[-1] == len(slots)
        for a, b in pairwise(cuts):
            assert b == a + 1 or 4 * (slots[b - 1].end - slots[a].begin) <= nbytes
    assert len(cut(slots, 1)) == len(slots) + 1
    assert cut(slots, 1e9) == [0, len(slots)]
    sync.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bucket_mb": 0}, "bucket_mb must be a number above 0, got 0"),
        ({"bucket_mb": -1.0}, "bucket_mb must be a number above 0"),
        ({"overlap": "yes"}, "overlap must be True or False"),
        ({"accumulate": "backward"}, 'leave accumulate="backward" out'),
        ({"scheme": "exdyna", "scorer": "average"}, 'overlap=True needs scorer="magnitude"'),
        ({"scheme": "exdyna", "staleness": 1}, "choose one of them"),
        ({"scheme": "momentum"}, "unknown option 'overlap'"),
    ],
)
def test_options_that_do_not_go_together(comm: MPI.Intracomm, options: dict[str, Any], said: str) -> None:
    assert said in raised(comm, mpisparse.ConfigurationError, lambda: overlapped(deep(), **options))


@pytest.mark.mpi(min_size=2)
def test_what_cannot_overlap_works_and_is_said_once(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket, and MPI for one thread: rank 0 warns, results are those of a plain exchange."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = deep()
        sync = overlapped(model, bucket_mb=1e3, codec="int4")
        found = list(train(comm, sync, model, range(3)))
        sync.close()
        threads = MPI.THREAD_SERIALIZED
        monkeypatch.setattr(MPI, "Query_thread", lambda: threads)
        serial = deep()
        single = overlapped(serial)
        list(train(comm, single, serial, range(3)))
        one_at_a_time = early(single) == 0
        single.close()
    texts = [str(w.message) for w in caught if "overlap=True" in str(w.message)]
    said = ["holds the whole model" in texts[0], "serves one thread only" in texts[1]] if len(texts) == 2 else [False]
    assert everywhere(comm, all(said) if comm.rank == 0 else not texts), texts
    assert everywhere(comm, one_at_a_time)
    twin = deep()
    other = mpisparse.GradientSync(twin, scheme="dense", codec="int4")
    same = list(train(comm, other, twin, range(3))) == found
    other.close()
    assert everywhere(comm, same)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_of_another_model_is_dropped_before_backward(comm: MPI.Intracomm, to_none: bool) -> None:
    """A generator's backward adds to the published gradients of its discriminator, which are zeroed before the next."""
    model, twin = deep(), deep()
    sync, plain = overlapped(model, codec="int4"), overlapped(twin, codec="int4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = []
    for step, bits_of_twin in enumerate(train(comm, plain, twin, range(4))):
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, comm.rank, step).backward()
        sync.step()
        optimizer.step()
        grads = [p.grad for p in model.parameters()]
        same.append(bits([*grads, *model.parameters(), sync.residual]) == bits_of_twin)
        with sync.no_sync():
            loss_of(model, comm.rank, step + 100).backward()
    found_early = early(sync) > 0
    sync.close()
    plain.close()
    assert everywhere(comm, all(same) and found_early)


def test_a_mean_that_was_not_zeroed_is_refused_and_taken_back(comm: MPI.Intracomm) -> None:
    model = deep()
    sync = overlapped(model, codec="int4")
    list(train(comm, sync, model, range(3)))
    before = bits([sync.residual, *model.parameters()])
    loss_of(model, comm.rank, 3).backward()  # adds to the mean, and sets out
    assert "call zero_grad()" in raised(comm, mpisparse.GradientError, sync.step)
    assert everywhere(comm, bits([sync.residual, *model.parameters()]) == before)
    model.zero_grad()
    list(train(comm, sync, model, range(3, 5)))
    sync.close()


def test_the_command_line_trains_with_it(comm: MPI.Intracomm, directory: Path) -> None:
    from mpisparse.runtime.cli import main

    flags = ["--scheme", "dense", "--codec", "int4", "--option", "overlap=true", "--option", "bucket_mb=0.01"]
    out = str(directory / "run")
    common = ["train", "--model", "digits-cnn", "--steps", "6", "--accumulation", "2", "--clip", "1.0", "--out", out]
    code = main([*common, *flags])
    assert everywhere(comm, code == 0)
