"""Shared by the parallel tests: verdicts and sums over ranks, and the two laws that every synchronous step obeys.

A rank that leaves a loop alone makes the others wait for ever, so whatever may differ between ranks is reduced first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import mpisparse

PATHS = ["step", "backward"]
Loss = Callable[[nn.Module, torch.Generator], torch.Tensor]


def seeded(rank: int, step: int) -> torch.Generator:
    """Return a generator for a rank and step, the same in every run."""
    return torch.Generator().manual_seed(1000 * step + rank)


def small() -> nn.Module:
    """Build a net of 2,570 parameters, the same in every run."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20))


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Return a loss: the net learns the sine of its inputs."""
    x = torch.randn(8, 30, generator=generator)
    return (model(x) - x[:, :20].sin()).square().mean()


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's images of digits, in [0, 1], and their labels; importing it would take longer than a test."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None, "the extra examples is not installed"
    assert spec.origin is not None
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.float32)
    return torch.from_numpy(table[:, :64] / 16).reshape(-1, 1, 8, 8), torch.from_numpy(table[:, 64].astype(np.int64))


def everywhere(comm: MPI.Intracomm, flag: object) -> bool:
    """Tell whether a flag is set on all ranks; collective."""
    return bool(comm.allreduce(bool(flag), MPI.LAND))


def total(comm: MPI.Intracomm, values: torch.Tensor) -> torch.Tensor:
    """Sum over ranks in float64; collective."""
    summed = values.double().contiguous().clone()
    comm.Allreduce(MPI.IN_PLACE, summed.numpy())
    return summed


def bits(tensors: Iterable[torch.Tensor | None]) -> bytes:
    """Return the bytes of tensors; NaN payloads and signs of zero count."""
    return b"|".join(
        b"none"
        if t is None
        else t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if t.numel()
        else b""
        for t in tensors
    )


def alike(comm: MPI.Intracomm, tensors: Iterable[torch.Tensor | None]) -> bool:
    """Tell whether tensors are bitwise equal on all ranks; collective."""
    return len(set(comm.allgather(hashlib.sha256(bits(tensors)).digest()))) == 1


def raised(comm: MPI.Intracomm, kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """Return the text of the error that every rank must raise, equal on all ranks; collective."""
    error: Exception | None = None
    try:
        call()
    except Exception as caught:
        error = caught
    outcomes = comm.allgather((isinstance(error, kind), repr(error), str(error).split(" | ", 1)[-1]))
    assert all(right for right, _, _ in outcomes), f"expected {kind} on every rank: {[what for _, what, _ in outcomes]}"
    assert len({text for _, _, text in outcomes}) == 1, [text for _, _, text in outcomes]
    return str(outcomes[0][2])


def in_memory_order(p: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    """Flatten values of a parameter's shape as the residual has them: in the order of the parameter's strides."""
    if values is None:
        return torch.zeros(p.numel(), dtype=torch.float64)
    dims = sorted(range(p.dim()), key=lambda d: -p.stride(d))
    return values.detach().double().to_dense().permute(dims).reshape(-1)


def magnitudes(grad: torch.Tensor) -> torch.Tensor:
    """Return absolute values; for a sparse gradient those of its terms, before they are summed."""
    if grad.layout is torch.strided:
        return grad.abs()
    return torch.sparse_coo_tensor(grad._indices(), grad._values().abs(), grad.shape, check_invariants=False)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def published(model: nn.Module) -> torch.Tensor:
    """Return p.grad of all trainable parameters in the residual's order, zero if there is none."""
    return torch.cat([in_memory_order(p, p.grad) for p in trainable(model)])


def held(sync: mpisparse.GradientSync, of: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> torch.Tensor:
    """Return what a rank still has to send (or the sum of magnitudes): its residual, blended elements in flight, and as many
    times what it remembers as an owner as there are ranks."""
    state, kept = sync.state_dict(copy=False), of(sync.residual.double())
    inner = state.get("step.inner", {})  # of scheme auto, the exchange in use
    if "nodes" in inner:
        return kept + _of_shard(sync._aggregator.inner, inner["nodes"]["parts"].get("error"), of)  # type: ignore[attr-defined]
    error = state.get("step.error", inner.get("error"))
    if error is not None:
        reducer: Any = sync._aggregator.works.reducer
        kept[reducer.owned(sync.rank, sync.size)] += of(sync.size * torch.as_tensor(error).double())
    return kept + of(carried(state, len(kept)))


def _of_shard(by_node: Any, error: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What a rank remembers as an owner of its shard, as many times as there are nodes."""
    whole, nodes, region = torch.zeros(by_node.nodes.n, dtype=torch.float64), by_node.nodes, by_node.region
    if error is not None:
        owned = by_node.works.reducer.owned(nodes.node, nodes.count)
        whole[region.lo : region.hi][owned] += of(nodes.count * torch.as_tensor(error).double())
    return whole


def carried(state: dict[str, Any], n: int, prefix: str = "step.") -> torch.Tensor:
    """What a momentum codec still has to send of n elements: of what was settled last, and of deliveries in flight."""
    kept = torch.zeros(n, dtype=torch.float64)
    if f"{prefix}blend.index" in state:
        sent = [(state[f"{prefix}blend.index"], state[f"{prefix}blend.value"])]
        sent += [(d["sent"], d["note"][0]) for d in state.get(f"{prefix}flight", ()) if d.get("note") is not None]
        for index, values in sent:
            kept[torch.as_tensor(index)] += state[f"{prefix}blend.pending"] * torch.as_tensor(values).double()
    return kept


class Ledger:
    """Records this rank's gradients, and checks that a step conserves them."""

    def __init__(self, comm: MPI.Intracomm, model: nn.Module, sync: mpisparse.GradientSync) -> None:
        self.comm, self.model, self.sync = comm, model, sync
        self.given = torch.zeros(2, sync.residual.numel(), dtype=torch.float64)  # the sum, and the sum of magnitudes
        begin = 0
        for p in trainable(model):
            p.register_hook(functools.partial(self._record, p, slice(begin, begin + p.numel())))
            begin += p.numel()
        self.restart()

    def _record(self, p: nn.Parameter, part: slice, grad: torch.Tensor) -> None:
        self.given[0, part] += in_memory_order(p, grad)
        self.given[1, part] += in_memory_order(p, magnitudes(grad))

    def restart(self) -> None:
        """Discard the recorded gradients and start from the current residual. Collective."""
        self.given.zero_()
        self.held = total(self.comm, torch.stack([held(self.sync), held(self.sync, torch.abs)]))

    def step(self) -> None:
        """Call sync.step() and check that residuals and gradients equal what is then published and held. Collective."""
        before, magnitude = self.held + total(self.comm, self.given)
        self.sync.step()
        self.restart()
        after = self.comm.size * published(self.model) + self.held[0]
        roundings = self.comm.size + (3 if "step.blend.index" not in self.sync.state_dict(copy=False) else 8)
        bound = 1e-7 * roundings * magnitude + 1e-42  # one rounding for each addition and each conversion
        if self.sync.options.codec.endswith(("int2", "sign")):  # what is left may be much larger than what was given
            bound += 1e-7 * roundings * float(magnitude.max())
        off = (before - after).abs() - bound
        at = int(off.argmax())
        assert alike(self.comm, [p.grad for p in self.model.parameters()]), "the ranks have other gradients"
        assert off[at] <= 0, f"element {at}: {before[at]} before the step, {after[at]} after it"  # so on all ranks


def lawful_steps(
    comm: MPI.Intracomm,
    model: nn.Module,
    sync: mpisparse.GradientSync,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    count: int = 6,
) -> Iterator[int]:
    """Train and check both laws; yields each step's number after publishing and before the optimizer's step. Collective.

    Every other step zeroes gradients in place, so that backward adds into the published buffer itself.
    """
    ledger = Ledger(comm, model, sync)
    for step in range(count):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss(model, seeded(comm.rank, step)).backward()
        ledger.step()
        yield step
        optimizer.step()
        assert alike(comm, model.parameters()), "the replicas differ"
    sync.close()


def train_lawfully(*args: Any, **kwargs: Any) -> None:
    """Run lawful_steps() to the end. Collective."""
    for _ in lawful_steps(*args, **kwargs):
        pass
