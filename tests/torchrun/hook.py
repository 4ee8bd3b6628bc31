"""Under torchrun: the communication hook of DistributedDataParallel."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpisparse
from mpisparse.integrations import ddp
from mpisparse.schemes import find_scheme

SMALL = 0.001  # MB: so that the net below has several buckets


class Net(nn.Module):
    """Three layers, one of which may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(20, 30), nn.Linear(30, 30), nn.Linear(30, 3)

    def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        result: torch.Tensor = self.third(x if short else self.second(x).tanh())
        return result


def wrapped(dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net().to(dtype), **{"bucket_cap_mb": SMALL, **options})


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 20, generator=generator).to(dtype)


def total(vector: torch.Tensor) -> torch.Tensor:
    """Sum over ranks in float64."""
    summed = vector.double()
    dist.all_reduce(summed)
    return summed


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def waiting(state: ddp.State, model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """What all ranks together have not sent, by parameter."""
    mine = state.residuals
    return {name: total(mine.get(name, torch.zeros(p.numel()))) for name, p in model.module.named_parameters()}


def own_gradients(model: DistributedDataParallel, x: torch.Tensor, **call: Any) -> dict[str, torch.Tensor]:
    """This rank's own gradients, before any exchange."""
    copy = Net().to(x.dtype)
    copy.load_state_dict(model.module.state_dict())
    copy(x, **call).square().mean().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in copy.named_parameters()}


def check_law(name: str, scheme: str, steps: int = 5, tolerance: float = 1e-5, **options: Any) -> None:
    """Nothing is lost: waiting before + gradients = ranks x published + waiting after. Replicas are equal."""
    model, size = wrapped(), dist.get_world_size()
    state = ddp.State(model, scheme=scheme, **options)
    model.register_comm_hook(state, ddp.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent, groups = 0, []
    for step in range(steps):
        optimizer.zero_grad()
        before, own = waiting(state, model), own_gradients(model, batch(step))
        model(batch(step)).square().mean().backward()
        after, published = waiting(state, model), grads(model.module)
        for key, grad in published.items():
            expected = before[key] + total(own[key].reshape(-1))
            left = size * grad.reshape(-1).double() + after[key]
            assert torch.allclose(expected, left, rtol=tolerance, atol=tolerance), (name, step, key)
            assert torch.equal(total(grad), size * grad.double()), (name, "replicas differ")
            sent += int((grad != 0).sum())
        groups.append(len(state.stats))
        optimizer.step()
    assert sent, name
    assert groups[-1] > 1, "one bucket only: nothing is shown of several"
    state.close()


def schemes() -> None:
    for scheme in ("dense", "exdyna", "momentum", "topk", "cltk", "randomk", "sidco", "threshold", "predictive"):
        given: dict[str, Any] = (
            {} if scheme == "dense" else {"threshold": 0.01} if scheme == "threshold" else {"density": 0.1}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_law(scheme, scheme, **given)
    for codec in find_scheme("exdyna")().codecs():
        check_law(codec, "exdyna", 3, 1e-4, density=0.1, codec=codec)
    check_law("dense int4", "dense", 3, 1e-4, codec="int4")


def like_plain_ddp() -> None:
    """Dense in float32 is what DDP does by itself; every way to use DDP works."""
    for given in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        plain, hooked = wrapped(**given), wrapped(**given)
        state = ddp.State(hooked, scheme="dense")
        hooked.register_comm_hook(state, ddp.hook)
        for step in range(3):
            for model in (plain, hooked):
                model.zero_grad(set_to_none=not given)
                if "static_graph" not in given:  # where torch itself fails in the first step
                    with model.no_sync():
                        model(batch(step)).square().mean().backward()
                model(batch(50 + step)).square().mean().backward()
            for one, other in zip(plain.parameters(), hooked.parameters(), strict=True):
                assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-7), given  # type: ignore[arg-type]
        state.close()


def unused() -> None:
    """A parameter without a gradient on any rank keeps what waits of it; DDP would not read it."""
    model = wrapped(find_unused_parameters=True)
    state = ddp.State(model, density=0.2)
    model.register_comm_hook(state, ddp.hook)
    for step in range(6):
        short = step in (2, 3)
        model.zero_grad()
        before, own = waiting(state, model), own_gradients(model, batch(step), short=short)
        model(batch(step), short=short).square().mean().backward()
        after = waiting(state, model)
        assert any(bool(each.any()) for each in after.values())
        for key, grad in grads(model.module).items():
            expected = before[key] + total(own[key].reshape(-1))
            left = dist.get_world_size() * grad.reshape(-1).double() + after[key]
            assert torch.allclose(expected, left, rtol=1e-5, atol=1e-6), (step, key)
    state.close()


def falling() -> None:
    """The density falls in the first steps."""
    model = wrapped()
    state = ddp.State(model, density=0.02, density_from=0.8, density_warmup=3)
    model.register_comm_hook(state, ddp.hook)
    sent = []
    for step in range(5):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        sent.append(sum(int((grad != 0).sum()) for grad in grads(model.module).values()))
    assert sent[0] > 2 * sent[1] > 4 * sent[2] > 8 * sent[3] > 0, sent
    state.close()


def half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = wrapped(dtype)
        state = ddp.State(model, density=0.3)
        model.register_comm_hook(state, ddp.hook)
        for step in range(3):
            model.zero_grad()
            before, own = waiting(state, model), own_gradients(model, batch(step, dtype))
            model(batch(step, dtype)).square().mean().backward()
            after = waiting(state, model)
            for key, grad in grads(model.module).items():
                assert grad.dtype is dtype
                expected = before[key] + total(own[key].reshape(-1))
                left = dist.get_world_size() * grad.reshape(-1).double() + after[key]
                assert torch.allclose(expected, left, rtol=1e-3, atol=1e-4), (dtype, step, key)
        state.close()


def nonfinite() -> None:
    """Raised on all ranks together, in words; with a scaler the step is skipped on all. Either way nothing is lost."""
    nonfinite_in(None)
    nonfinite_in(torch.amp.GradScaler("cpu", init_scale=256.0))


def nonfinite_in(scaler: torch.amp.GradScaler | None) -> None:
    model = wrapped()
    state = ddp.State(model, density=0.1, scaler=scaler)
    model.register_comm_hook(state, ddp.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, bad: bool) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if bad and dist.get_rank() == 0:  # only the first layer, which is in the last bucket
            loss = loss + model.module.first.weight.sum() * torch.inf
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()

    for i in range(3):
        step(batch(i), bad=False)
    before, weights = waiting(state, model), nn.utils.parameters_to_vector(model.parameters())
    if scaler is None:
        refused(lambda: step(batch(3), True), mpisparse.NonFiniteGradientError, "non-finite gradient in first")
    else:
        step(batch(3), bad=True)
        assert scaler.get_scale() == 128.0
        assert torch.equal(weights, nn.utils.parameters_to_vector(model.parameters()))
    after = waiting(state, model)
    assert torch.allclose(before["first.weight"], after["first.weight"], rtol=1e-5, atol=1e-6)
    own = own_gradients(model, batch(3))
    for key in ("third.weight", "third.bias"):  # averaged before the trouble was known: the mean waits again
        assert torch.allclose(before[key] + total(own[key].reshape(-1)), after[key], rtol=1e-4, atol=1e-5), key
    if scaler is not None:
        step(batch(4), bad=False)
    state.close()


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    message = ""
    try:
        call()
    except kind as error:
        message = str(error)
    assert all(word in message for word in words), f"{message!r} has not all of {words}"


def refusals() -> None:
    model, wrong = wrapped(), mpisparse.ConfigurationError
    for scheme in ("drift", "speculative", "diloco", "sparseloco"):
        refused(
            lambda scheme=scheme: ddp.State(model, scheme=scheme),
            wrong,
            f'scheme "{scheme}" moves a model\'s weights',
            "use GradientSync",
        )
    refused(lambda: ddp.State(model.module), wrong, "wrapped in DistributedDataParallel")
    refused(lambda: ddp.State(model, density=3), wrong, "density must be in (0, 1]")
    refused(lambda: ddp.State(model, nonfinite="skip"), wrong, "nonfinite")
    refused(lambda: ddp.State(model, accumulate="backward"), wrong, "accumulate")
    refused(lambda: ddp.State(model, scaler=3), wrong, "GradScaler")
    refused(lambda: ddp.State(model, density=0.1 * (1 + dist.get_rank())), wrong, "the ranks differ")


def train(model: DistributedDataParallel, steps: range, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def continued(scheme: str, **options: Any) -> None:
    """A resumed run has the bits of an uninterrupted one, wherever it was interrupted."""
    straight = wrapped()
    state = ddp.State(straight, scheme=scheme, **options)
    straight.register_comm_hook(state, ddp.hook)
    optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
    kept: dict[int, io.BytesIO] = {}
    for step in range(7):
        train(straight, range(step, step + 1), optimizer)
        if step in (0, 3):
            kept[step + 1] = io.BytesIO()
            torch.save([straight.module.state_dict(), state.state_dict()], kept[step + 1])
    for step, file in kept.items():
        file.seek(0)
        weights, saved = torch.load(file, weights_only=True)
        again = wrapped(bucket_cap_mb=SMALL / 100)
        again.module.load_state_dict(weights)
        resumed = Noting(again, scheme=scheme, **options)
        again.register_comm_hook(resumed, ddp.hook)
        resumed.load_state_dict(saved)
        train(again, range(step, 7), torch.optim.SGD(again.parameters(), lr=0.1))
        assert len(resumed.arranged) > 1, "DDP's buckets stayed as they were: nothing is shown of others"
        assert any(resumed.waited), "no bucket of DDP's had to wait for another"
        assert same(again.module.state_dict(), straight.module.state_dict()), (scheme, step)
        assert same(resumed.state_dict(), state.state_dict()), (scheme, step)
        resumed.close()
    state.close()


class Noting(ddp.State):
    """Notes how DDP arranges its buckets, and which of them wait for others."""

    def __init__(self, model: DistributedDataParallel, **options: Any) -> None:
        super().__init__(model, **options)
        self.arranged: set[tuple[str, ...]] = set()
        self.waited: list[bool] = []

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done = super().average(bucket)
        self.arranged.add(tuple(self._names[id(p)] for p in bucket.parameters()))
        self.waited.append(not done.done())
        return done


def same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def interrupted() -> None:
    continued("exdyna", density=0.1)
    continued("exdyna", density=0.1, codec="momentum-int8")
    continued("momentum", density=0.1, codec="int8")
    continued("predictive", density=0.1)
    continued("randomk", density=0.1)
    continued("demo", density=0.1)
    continued("dense", codec="int4")


def saved(directory: Path) -> None:
    """Write each rank's state, and the sum of what waits, for the resumed job."""
    model = wrapped()
    state = ddp.State(model, scheme="momentum", density=0.1, codec="int8")
    model.register_comm_hook(state, ddp.hook)
    train(model, range(4))
    torch.save(state.state_dict(), directory / f"state-{dist.get_rank()}.pt")
    sums = {name: each.sum().item() for name, each in waiting(state, model).items()}
    if dist.get_rank() == 0:
        (directory / "sums.json").write_text(json.dumps([sums, dist.get_world_size()]))
        torch.save(model.module.state_dict(), directory / "model.pt")
    other = wrapped()
    twin = ddp.State(other, scheme="momentum", density=0.1, codec="int8")
    twin.load_state_dict(torch.load(io.BytesIO((directory / f"state-{dist.get_rank()}.pt").read_bytes()), weights_only=True))
    for name, each in state.residuals.items():
        assert torch.equal(each, twin.residuals[name])
    state.close()
    twin.close()


def resumed(directory: Path) -> None:
    """Take over on another number of ranks: (1 / ranks) x what waits stays the same."""
    sums, old = json.loads((directory / "sums.json").read_text())
    model = wrapped()
    model.module.load_state_dict(torch.load(directory / "model.pt", weights_only=True))
    state = ddp.State(model, scheme="momentum", density=0.1, codec="int8")
    model.register_comm_hook(state, ddp.hook)
    states = [torch.load(directory / f"state-{rank}.pt", weights_only=True) for rank in range(old)]
    wrong = mpisparse.ConfigurationError
    refused(lambda: state.load_state_dict(states[0]), wrong, f"the states are of {old} ranks")
    refused(lambda: state.load_state_dict(states[::-1]), wrong, "in their order")
    refused(lambda: state.load_state_dict({"format": 1}), wrong, "not one that state_dict() gave")
    refused(
        lambda: state.load_state_dict([{**each, "buckets": each["buckets"][1:]} for each in states]), wrong, "other param"
    )
    broken = [{**one, "residual": one["residual"] * torch.nan} for one in states[0]["buckets"]]
    refused(lambda: state.load_state_dict([{**each, "buckets": broken} for each in states]), wrong, "is not finite")
    options = {**json.loads(states[0]["options"]), "alpha": 0.5}
    refused(
        lambda: state.load_state_dict([{**each, "options": json.dumps(options)} for each in states]), wrong, "saved with"
    )
    state.load_state_dict(states)
    for name, each in waiting(state, model).items():
        assert abs(each.sum().item() / dist.get_world_size() - sums[name] / old) < 1e-4, name
    train(model, range(4, 8))
    assert state.state_dict()["steps"] == 8
    state.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "resume":
        resumed(Path(sys.argv[2]))
    else:
        schemes()
        like_plain_ddp()
        unused()
        falling()
        half_precision()
        nonfinite()
        refusals()
        interrupted()
        saved(Path(sys.argv[2]))
    assert "mpi4py.MPI" not in sys.modules
    dist.barrier()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all shown", flush=True)
    dist.destroy_process_group()
