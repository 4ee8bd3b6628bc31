"""1-bit Adam: AdamW in the warm-up, then the momentum's signs with error feedback both ways."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, everywhere, loss_of, raised, seeded, small, total
from torch import nn

import mpisparse
from mpisparse.backends.device import load_backend
from mpisparse.comm.regions import even_regions
from mpisparse.comm.virtual import run_virtual
from mpisparse.optim import OneBitAdamW
from mpisparse.optim.moments import FLOOR
from mpisparse.optim.schedule import Schedule
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.encoded import encode

pytestmark = pytest.mark.mpi

Start = Callable[..., OneBitAdamW]


@pytest.fixture
def start() -> Iterator[Start]:
    """Constructs optimizers, and closes them after the test."""
    made: list[OneBitAdamW] = []

    def construct(params: Any, **options: Any) -> OneBitAdamW:
        made.append(OneBitAdamW(params, **{"lr": 0.01, "warmup": 4, **options}))
        return made[-1]

    yield construct
    for optimizer in made:
        optimizer.close()


def groups(model: Any) -> list[dict[str, Any]]:
    """Weights with decay and another rate, biases without decay."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "weight_decay": 0.1, "lr": 0.02},
        {"params": biases, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def train(comm: MPI.Intracomm, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        optimizer.step()


def every_gradient(comm: MPI.Intracomm, params: list[Any]) -> list[torch.Tensor]:
    """All ranks' gradients as flat vectors; collective."""
    return [torch.from_numpy(g) for g in comm.allgather(torch.cat([p.grad.reshape(-1) for p in params]).numpy())]


def test_the_warm_up_is_adamw_on_the_mean_gradient(comm: MPI.Intracomm, start: Start) -> None:
    model, twin = small(), small()
    optimizer = start(groups(model), warmup=10, warmup_codec="fp32", maximize=True)
    other = torch.optim.AdamW(groups(twin), lr=0.01, maximize=True)
    for step in range(8):
        for net, chosen in ((model, optimizer), (twin, other)):
            chosen.zero_grad()
            loss_of(net, seeded(comm.rank, step)).neg().backward()
        for p in twin.parameters():
            assert p.grad is not None
            p.grad.copy_(total(comm, p.grad) / comm.size)
        optimizer.step()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"], rtol=1e-4, atol=1e-8)


class Oracle:
    """The same with all ranks' gradients in one process, as flat vectors in one group without decay."""

    def __init__(self, flat: torch.Tensor, tensors: list[int], size: int, codecs: tuple[str, str], lr: float) -> None:
        self.p, self.tensors, self.size, self.codecs, self.lr = flat.clone(), tensors, size, codecs, lr
        self.m, self.v, self.e = (torch.zeros(len(flat)) for _ in range(3))
        self.r = [torch.zeros(len(flat)) for _ in range(size)]
        self.t, self.kv, self.schedule = 0, 0.0, Schedule(4, 2)

    def quantised(self, codec: str, x: torch.Tensor) -> torch.Tensor:
        spans = [(r.lo, r.hi) for r in even_regions(len(x), self.size)]
        return torch.from_numpy(encode(CODECS[codec], load_backend(), x.numpy(), spans).decoded(load_backend()))

    def mean(
        self, codec: str, xs: list[torch.Tensor], e: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        sent = [self.quantised(codec, x) for x in xs]
        u = torch.stack(sent).sum(0) / self.size + e
        back = self.quantised(codec, u)
        return [x - q for x, q in zip(xs, sent, strict=True)], u - back, back

    def denominator(self, floored: bool = True) -> torch.Tensor:
        root = (self.v / (1 - 0.999**self.kv)).sqrt()
        parts = [part.clamp(min=FLOOR * float(part.mean())) for part in root.split(self.tensors)]
        return (torch.cat(parts) if floored else root) + 1e-8

    def step(self, grads: list[torch.Tensor]) -> None:
        turn, warm, (few, many) = self.schedule.turn(self.t), self.t < 4, self.codecs
        if self.t == 4:
            share = 0.1 / self.denominator()
            self.r, self.e = [r * share for r in self.r], self.e * share
        self.t += 1
        if not turn.whole:
            den = self.denominator()
            xs = [(0.9 * self.m + 0.1 * g) / den + r for g, r in zip(grads, self.r, strict=True)]
            self.r, self.e, z = self.mean(few, xs, self.e)
            self.m = z * den
        else:
            share = None if warm else 0.1 / self.denominator()
            waiting = self.r if share is None else [torch.zeros(len(self.p))] * self.size
            given = [g + r for g, r in zip(grads, waiting, strict=True)]
            left, e, g = self.mean(many, given, self.e if warm else 0 * self.e)
            if share is None:
                self.r, self.e = left, e
            else:
                self.r, self.e = [r + share * rest for r, rest in zip(self.r, left, strict=True)], self.e + share * e
            self.kv += turn.steps
            self.m = 0.9 * self.m + 0.1 * g
            self.v = 0.999**turn.steps * self.v + (1 - 0.999**turn.steps) * g * g
            z = self.m / self.denominator(floored=not warm)
        self.p = self.p - self.lr / (1 - 0.9**self.t) * z


@pytest.mark.parametrize("codecs", [("sign", "int4"), ("int8", "fp32")])
def test_it_does_what_a_plain_loop_does(comm: MPI.Intracomm, start: Start, codecs: tuple[str, str]) -> None:
    model = small()
    optimizer = start(model.parameters(), weight_decay=0.0, refresh=2, codec=codecs[0], warmup_codec=codecs[1])
    params = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in params])
    oracle = Oracle(flat, [p.numel() for p in params], comm.size, codecs, 0.01)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        grads = every_gradient(comm, params)
        optimizer.step()
        oracle.step(grads)
        now = torch.cat([p.detach().reshape(-1) for p in params])
        assert alike(comm, [now])
        close = float((now - oracle.p).abs().max()) < 1e-4
        assert everywhere(comm, close), f"step {step}: {float((now - oracle.p).abs().max()):g}"
        with torch.no_grad():  # a sign of nearly nothing may differ by rounding; go on from the same numbers
            oracle.p, oracle.m = now.clone(), optimizer._momentum.clone()
            oracle.r[comm.rank] = optimizer._averaging.residual.clone()
            oracle.r = [torch.from_numpy(r) for r in comm.allgather(oracle.r[comm.rank].numpy())]
            oracle.e = torch.cat([torch.from_numpy(e) for e in comm.allgather(optimizer._averaging.error.numpy())])
            oracle.v = optimizer._variance.clone()


def test_what_signs_leave_arrives_later(comm: MPI.Intracomm, start: Start) -> None:
    """All updates = all that were asked for - what still waits, in units of the update."""
    model = small()
    optimizer = start(model.parameters(), warmup=2, refresh=0)
    train(comm, model, optimizer, range(3))
    averaging = optimizer._averaging
    for step in range(3, 10):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        members = optimizer._places.members(optimizer.state)
        dens = [member.denominator(floor) for member, floor in zip(members, optimizer._floors, strict=True)]
        asked = torch.cat([
            ((0.9 * optimizer.state[p]["exp_avg"] + 0.1 * _grad(p)) / den).reshape(-1)
            for p, den in zip(model.parameters(), dens, strict=True)
        ])  # fmt: skip
        before = total(comm, asked + averaging.residual) + total(comm, _of_owner(averaging, comm.size))
        optimizer.step()
        after = total(comm, averaging.work + averaging.residual) + total(comm, _of_owner(averaging, comm.size))
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def _grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def _of_owner(averaging: Any, size: int) -> torch.Tensor:
    every = torch.zeros(averaging.n)
    every[averaging.lo : averaging.hi] = averaging.error * size
    return every


def test_rows_without_gradients_stay_where_they_are(comm: MPI.Intracomm, start: Start) -> None:
    """The variance of unused rows is zero; signs of neighbours must not move them, or hardly."""
    torch.manual_seed(0)
    table = nn.Embedding(60, 16)
    before = table.weight.detach().clone()
    optimizer = start(table.parameters(), lr=0.01, weight_decay=0.0, refresh=1)
    for step in range(40):
        optimizer.zero_grad()
        rows = torch.randint(0, 20, (32,), generator=seeded(comm.rank, step))
        table(rows).square().sum().backward()
        optimizer.step()
    moved = (table.weight.detach() - before).abs()
    assert everywhere(comm, bool(torch.isfinite(moved).all()))
    assert everywhere(comm, float(moved[32:].max()) == 0.0)
    assert everywhere(comm, float(moved[20:32].max()) < 0.2 * float(moved[:20].max()))


def test_parameters_without_gradients(comm: MPI.Intracomm, start: Start) -> None:
    """One without a gradient on any rank does not move; one with a gradient on some rank moves, equally on all ranks."""
    model: Any = small()
    optimizer = start(model.parameters(), refresh=1)
    for step in range(14):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        frozen, partly = step in (2, 6, 8, 11), step in (3, 7, 9)
        before = model[0].bias.detach().clone()
        if frozen or (partly and comm.rank):
            model[0].bias.grad = None
        optimizer.step()
        assert everywhere(comm, torch.equal(before, model[0].bias) == frozen)
        assert alike(comm, model.parameters())
    optimizer.zero_grad()
    count = optimizer._steps
    optimizer.step()  # as torch: nothing to do
    assert everywhere(comm, optimizer._steps == count)


@pytest.mark.parametrize("at", [2, 4, 7, 9])
def test_a_state_goes_on_with_the_same_bits(comm: MPI.Intracomm, start: Start, at: int) -> None:
    model = small()
    optimizer = start(groups(model), refresh=2)
    train(comm, model, optimizer, range(at))
    twin = copy.deepcopy(model)
    other = start(groups(twin), refresh=2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(comm, model, optimizer, range(at, at + 8))
    train(comm, twin, other, range(at, at + 8))
    assert everywhere(comm, bits(model.parameters()) == bits(twin.parameters()))
    assert everywhere(comm, optimizer.stats.bytes_received == other.stats.bytes_received)


def test_states_that_do_not_fit_are_refused(comm: MPI.Intracomm, start: Start) -> None:
    model = small()
    optimizer = start(model.parameters())
    train(comm, model, optimizer, range(6))
    good = copy.deepcopy(optimizer.state_dict())
    train(comm, model, optimizer, range(6, 8))
    kept = bits(model.parameters())

    def refused(change: Callable[[dict[str, Any]], Any]) -> str:
        state = copy.deepcopy(good)
        if comm.rank == comm.size - 1:
            change(state)
        return raised(comm, mpisparse.ConfigurationError, lambda: optimizer.load_state_dict(state))

    assert "another optimizer" in refused(lambda s: s.pop("onebit"))
    assert "codec='int4'" in refused(lambda s: s["onebit"].update(codec="int4"))
    assert "error" in refused(lambda s: s["onebit"].update(error=torch.zeros(3)))
    assert "exp_avg of parameter 1" in refused(lambda s: s["state"][1]["exp_avg"].fill_(float("nan")))
    assert "not one that state_dict() gave" in refused(lambda s: s["state"].pop(0))
    assert everywhere(comm, bits(model.parameters()) == kept)
    train(comm, model, optimizer, range(8, 9))
    assert alike(comm, model.parameters())


def test_bad_arguments_are_refused_as_torch_does(comm: MPI.Intracomm, start: Start) -> None:
    model = small()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0"),
        ({"eps": -1e-8}, "Invalid epsilon"),
        ({"weight_decay": -0.1}, "Invalid weight_decay"),
        ({"amsgrad": True}, "amsgrad"),
        ({"fused": True}, "fused"),
        ({"warmup": 0}, "warmup must be a whole number >= 1"),
        ({"warmup": 4, "refresh": 5}, "refresh must be at most warmup"),
        ({"codec": "signs"}, "did you mean 'sign'"),
        ({"warmup_codec": "momentum-int8"}, "unknown warmup_codec"),
    ]
    for options, said in cases:
        assert said in raised(comm, ValueError, functools.partial(start, model.parameters(), **options))
    assert "complex" in raised(comm, ValueError, lambda: start([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]))
    raised(comm, mpisparse.ConfigurationError, lambda: start(torch.zeros(3)))
    for bad in (-1.0, "0.1", None):  # on one rank only: all raise the same type
        lr = bad if comm.rank == comm.size - 1 else 0.01
        raised(comm, mpisparse.ConfigurationError, functools.partial(start, model.parameters(), lr=lr))
    if comm.size > 1:
        assert "ranks differ" in raised(comm, ValueError, lambda: start(model.parameters(), warmup=4 + comm.rank))
    optimizer = start(model.parameters())
    assert "all groups" in raised(
        comm, ValueError, lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    )


@pytest.mark.parametrize("at", [1, 5])
def test_a_refused_step_changes_nothing(comm: MPI.Intracomm, start: Start, at: int) -> None:
    model: Any = small()
    optimizer = start(model.parameters())
    train(comm, model, optimizer, range(at))
    before = bits([*model.parameters(), *optimizer.state[model[0].weight].values(), optimizer._averaging.error])
    loss_of(model, seeded(comm.rank, 9)).backward()
    if comm.rank == comm.size - 1:
        model[2].weight.grad[3, 3] = float("nan")
    said = raised(comm, mpisparse.NonFiniteGradientError, optimizer.step)
    assert f"rank {comm.size - 1} has a non-finite gradient in 2 of group 0" in said
    optimizer.zero_grad()
    loss_of(model, seeded(comm.rank, 9)).backward()
    if comm.rank == 0:
        model[2].weight.grad = model[2].weight.grad.to_sparse()
    assert "sparse gradients" in raised(comm, mpisparse.GradientError, optimizer.step)
    optimizer.zero_grad()
    loss_of(model, seeded(comm.rank, 9)).backward()
    if comm.size > 1:
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
        assert "on all ranks alike" in raised(comm, mpisparse.ConfigurationError, optimizer.step)
    optimizer.param_groups[0]["lr"] = None if comm.rank == comm.size - 1 else 0.01
    assert "a group's learning rate" in raised(comm, mpisparse.GradientError, optimizer.step)
    optimizer.param_groups[0]["lr"] = 0.01
    after = bits([*model.parameters(), *optimizer.state[model[0].weight].values(), optimizer._averaging.error])
    assert everywhere(comm, before == after)
    train(comm, model, optimizer, range(at, at + 2))
    assert alike(comm, model.parameters())


def test_a_scaler_skips_steps_on_all_ranks(comm: MPI.Intracomm, start: Start) -> None:
    model, twin = small(), small()
    optimizer, plain = start(model.parameters()), start(twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(9):
        optimizer.zero_grad()
        loss = loss_of(model, seeded(comm.rank, step))
        scaler.scale(loss * float("inf") if step == 5 and comm.rank == 0 else loss).backward()
        if step == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert everywhere(comm, optimizer.stats.skipped == (step == 5))
        if step != 5:
            train(comm, twin, plain, range(step, step + 1))
    assert alike(comm, model.parameters())
    assert everywhere(comm, scaler.get_scale() == (512.0 if comm.rank == 0 else 1024.0))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_closures_and_schedulers(comm: MPI.Intracomm, start: Start) -> None:
    model = small()
    optimizer = start(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for step in range(8):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, seeded(comm.rank, step))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step()
        assert everywhere(comm, float(loss.detach()) > 0.0)
    assert alike(comm, model.parameters())


def test_bytes(comm: MPI.Intracomm, start: Start) -> None:
    """A step in signs receives a bit per element and 2 bytes per group on both ways, one in int4 four times as much."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = start(model.parameters(), warmup=2, refresh=1)
    received = []
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 256, generator=seeded(comm.rank, step))).square().mean().backward()
        optimizer.step()
        received.append(optimizer.stats.bytes_received)
    share = 2 * (comm.size - 1) / comm.size * 65536
    signs, fours = share * (1 + 16 / 128) / 8, share * (4 + 16 / 64) / 8
    control = 128 * comm.size
    expected = [fours, fours, signs, signs, fours, signs]
    fits = all(e <= r <= e + control for e, r in zip(expected, received, strict=True))
    assert everywhere(comm, fits), (received, expected)


def test_other_types_are_kept_in_float32(comm: MPI.Intracomm, start: Start) -> None:
    model = small().bfloat16()
    optimizer = start(model.parameters())
    for step in range(8):
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=seeded(comm.rank, step)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        assert alike(comm, model.parameters())
    assert everywhere(comm, optimizer.state[next(iter(model.parameters()))]["exp_avg"].dtype is torch.float32)


@pytest.mark.ranks(3)
def test_it_learns_as_adamw_does(comm: MPI.Intracomm, start: Start) -> None:
    """A net learns a noisy function: near to dense AdamW, and better than alone."""

    def final(kind: str) -> float:
        torch.manual_seed(1)
        teacher = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 4))
        model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 4))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind == "onebit":
            optimizer = start(model.parameters(), lr=0.01, warmup=25)
        elif kind == "dense":
            sync = mpisparse.GradientSync(model, scheme="dense")
            mpisparse.attach(optimizer, sync)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 240)
        for step in range(240):
            optimizer.zero_grad()
            g = seeded(comm.rank, step)
            x = torch.randn(8, 20, generator=g)
            y = teacher(x).detach() + torch.randn(8, 4, generator=g)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            schedule.step()
        x = torch.randn(4000, 20, generator=torch.Generator().manual_seed(77))
        loss = float((model(x) - teacher(x)).square().mean().detach())
        if kind == "dense":
            sync.close()
        return float(comm.allreduce(loss) / comm.size)

    onebit, dense, alone = final("onebit"), final("dense"), final("alone")
    assert 1.0 + onebit < 1.02 * (1.0 + dense), (onebit, dense, alone)  # 1 is the noise's
    if comm.size > 1:
        assert (alone - onebit) > 0.5 * (alone - dense), (onebit, dense, alone)


def test_a_checkpoint_goes_on_with_the_same_bits(comm: MPI.Intracomm, start: Start, tmp_path: Path) -> None:
    directory = Path(comm.bcast(str(tmp_path)))
    model = small()
    optimizer = start(model.parameters())
    train(comm, model, optimizer, range(7))
    mpisparse.checkpoint.save(directory, step=7, model=model, optimizer=optimizer)
    train(comm, model, optimizer, range(7, 12))
    twin = small()
    other = start(twin.parameters())
    assert mpisparse.checkpoint.load(directory, model=twin, optimizer=other) == 7
    train(comm, twin, other, range(7, 12))
    assert everywhere(comm, bits(model.parameters()) == bits(twin.parameters()))


def test_virtual_workers_compute_what_ranks_compute(comm: MPI.Intracomm) -> None:
    def trained(ranks: Any) -> bytes:
        model = small()
        optimizer = OneBitAdamW(model.parameters(), lr=0.01, warmup=3, refresh=1, comm=ranks)
        train(ranks, model, optimizer, range(8))
        optimizer.close()
        return bits(model.parameters())

    real = trained(comm)
    assert everywhere(comm, run_virtual(comm.size, trained) == [real] * comm.size)


@pytest.mark.mpi(min_size=2)
def test_replicas_that_differ_are_named(comm: MPI.Intracomm, start: Start) -> None:
    model = small()
    optimizer = start(model.parameters(), check_every=4)
    train(comm, model, optimizer, range(6))  # compared before step 4
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1.0
    train(comm, model, optimizer, range(6, 8))
    text = raised(comm, mpisparse.GradientError, lambda: train(comm, model, optimizer, range(8, 9)))
    assert f"ranks 0 and {comm.size - 1} differ in 0 of group 0" in text
    assert "check_every=0 turns this check off" in text


def test_a_sync_is_not_attached(comm: MPI.Intracomm, start: Start) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme="dense")
    optimizer = start(model.parameters())
    assert "exchanges by itself" in raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.attach(optimizer, sync))
    sync.close()


def test_the_schedule() -> None:
    schedule = Schedule(8, 2)
    whole = [step for step in range(70) if schedule.turn(step).whole]
    assert whole == [*range(8), 16, 17, 32, 33, 64, 65]
    assert sum(schedule.turn(step).steps for step in range(70)) == pytest.approx(66)
    assert not any(Schedule(8, 0).turn(step).whole for step in range(8, 200))
    assert np.isclose(schedule.turn(16).steps, 5.0)


def test_beside_a_sync_it_is_not_taken_for_an_optimizer_that_forgot_to_exchange(comm: MPI.Intracomm, start: Start) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, comm=comm)  # to average metrics, say
    train(comm, model, start(model.parameters()), range(3))  # a warning would be an error
    assert everywhere(comm, sync._unexchanged.count == 0)
    sync.close()
