"""Exchanges tailored to one kind of sparse model each, as small references: exact means, and only what can be there is sent.

Each takes the ranks and a model with fresh gradients, leaves the mean as p.grad, and returns how many elements it covered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from mpisparse.bench.sparse_models import PrunedLinear
from mpisparse.comm.exchange import Exchange
from mpisparse.core.records import Stats
from mpisparse.core.step import Clock
from mpisparse.errors import GradientError
from mpisparse.sync import GradientSync

Reduction = Callable[[Exchange, nn.Module], int]


class TailoredSync(GradientSync):
    """A GradientSync whose exchange is a tailored one; nothing is kept for later."""

    def __init__(self, model: nn.Module, reduction: Reduction, **options: Any) -> None:
        super().__init__(model, scheme="dense", **options)
        self.reduction = reduction
        self.steps = 0

    def begin(self, trouble: str | None = None) -> None:
        """Publish the mean of the gradients since the last step as p.grad; collective."""
        if trouble is not None:
            raise GradientError(f"r{self.rank} | {trouble}")
        self._exchange.reset_counters()
        clock, n = Clock(), self._layout.size
        covered = self.reduction(self._exchange, self._model)
        clock.lap("reduce")
        self.steps += 1
        self._stats = Stats(
            step=self.steps - 1, density=covered / n, set_density=covered / n, selected=covered, threshold=0.0,
            bytes_sent=self._exchange.nbytes_sent, bytes_received=self._exchange.nbytes_received, imbalance=0.0,
            seconds=clock.seconds, sent_density=covered / n,
        )  # fmt: skip
        self._gradients.watch.restart()
        self._exchange.place.steps = self.steps


def by_mask(exchange: Exchange, model: nn.Module) -> int:
    """Mask-aware: of a layer with a mask, only the weights that are there; one all-reduce of all that is left."""
    masks = {id(part.weight): part.mask for part in model.modules() if isinstance(part, PrunedLinear)}
    params = [(p, masks.get(id(p))) for p in model.parameters() if p.requires_grad]
    return _reduce_dense(exchange, [(p, None if mask is None else mask.flatten().nonzero()[:, 0]) for p, mask in params])


def by_rows(exchange: Exchange, model: nn.Module) -> int:
    """Row-wise: of an embedding, the rows that any rank looked up, gathered and summed in rank order; the rest dense."""
    tables = [p for part in model.modules() if isinstance(part, nn.Embedding) and part.sparse for p in part.parameters()]
    known = {id(p) for p in tables}
    covered = _reduce_dense(exchange, [(p, None) for p in model.parameters() if p.requires_grad and id(p) not in known])
    return covered + sum(_gather_rows(exchange, p) for p in tables)


def by_use(exchange: Exchange, model: nn.Module) -> int:
    """Per expert: only parameters that have a gradient on some rank."""
    params = [p for p in model.parameters() if p.requires_grad]
    used = exchange.allreduce_(np.array([p.grad is not None for p in params], dtype=np.uint8), "or").astype(bool)
    return _reduce_dense(exchange, [(p, None) for p, use in zip(params, used.tolist(), strict=True) if use])


def _reduce_dense(exchange: Exchange, parts: list[tuple[nn.Parameter, torch.Tensor | None]]) -> int:
    """One all-reduce of these parameters' gradients, or of some elements of them; the mean becomes p.grad."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in parts]
    flat = [g.flatten() if index is None else g.flatten()[index] for g, (_, index) in zip(grads, parts, strict=True)]
    total = exchange.allreduce_(torch.cat(flat).numpy()) / np.float32(exchange.size)
    means = torch.split(torch.from_numpy(total), [len(values) for values in flat])
    for (p, index), mean in zip(parts, means, strict=True):
        if index is None:
            p.grad = mean.view_as(p).clone()
        else:
            p.grad = torch.zeros_like(p)
            p.grad.view(-1)[index] = mean
    return len(total)


def _gather_rows(exchange: Exchange, p: nn.Parameter) -> int:
    """Gather the rows of all ranks' sparse gradients of a table; the mean, dense, becomes p.grad."""
    rows, values = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    if p.grad is not None:
        grad = p.grad.coalesce()
        rows, values = grad.indices()[0].to(torch.int32).numpy(), grad.values().numpy()
    payload = np.concatenate([rows.view(np.uint8), values.reshape(-1).view(np.uint8)])
    counts = exchange.allgather(np.array([len(rows)], dtype=np.int64))[:, 0].tolist()
    nbytes = [count * 4 * (1 + p.shape[1]) for count in counts]
    starts = [0, *np.cumsum(nbytes[:-1]).tolist()]
    gathered = exchange.allgatherv(payload, nbytes, starts)
    total, touched = torch.zeros_like(p), torch.zeros(len(p), dtype=torch.bool)
    for start, count in zip(starts, counts, strict=True):
        index = torch.from_numpy(gathered[start : start + 4 * count].view(np.int32).astype(np.int64))
        end = start + 4 * count * (1 + p.shape[1])
        total[index] += torch.from_numpy(gathered[start + 4 * count : end].view(np.float32)).view(count, p.shape[1])
        touched[index] = True
    p.grad = total.div_(exchange.size)
    return int(touched.sum()) * p.shape[1]
