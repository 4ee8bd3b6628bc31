"""A digest of what must be equal on all ranks, weights and learning rates, in the first message of a step.

Without it, replicas that differ although they receive the same gradients would drift apart unnoticed. A digest is a sum
of the bits as integers (mpisparse.backends.digest).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.backends.digest import LARGEST, digest
from mpisparse.comm.roll_call import SAMPLES, meet
from mpisparse.comm.survival import together
from mpisparse.errors import GradientError

if TYPE_CHECKING:
    from mpisparse.backends.flat import Slot
    from mpisparse.comm.exchange import Exchange

ROUNDING = 1e-5  # a difference below this share of the largest weight may be the rounding of different processors
REPEATED = 3  # how many first exchanges look for ranks with the same gradients


class Equality:
    """Compares the replicas every few steps, and the learning rates of attached optimizers in every step.

    tensors: the weights that must be equal, one for each slot. rates: the learning rates, by group, where gradients are
    exchanged. every: steps from one comparison to the next; 0: never. turn: which of several attached optimizers steps.
    """

    def __init__(
        self, slots: Sequence[Slot], tensors: Callable[[], Sequence[torch.Tensor]],
        rates: Callable[[], tuple[float, ...]], every: int, turn: Callable[[], int] = int,
    ) -> None:  # fmt: skip
        self.slots, self.tensors, self.rates, self.every, self.turn = slots, tensors, rates, every, turn
        self._last = 0
        self._within = False  # an optimizer evaluates closures
        self._held: int | None = None  # the digest of the weights before it began

    def hold(self, step: int) -> None:
        """The optimizer begins to evaluate a closure: compare the weights as they are now, if that is due; local.

        Closures may be evaluated with other weights on each rank: sharpness-aware optimizers look where their own gradient
        leads, and return. What becomes due meanwhile waits until release().
        """
        self._within, self._held = True, digest(self.tensors()) if self._due(step) else None

    def release(self) -> None:
        """The closures are done: compare the weights as they are in each step; local."""
        self._within, self._held = False, None

    def number(self, step: int) -> int:
        """The digest to compare in a step; local. A comparison stays due until a step is done()."""
        if not self.every:
            return 0
        rates = hash((self.turn(), *self.rates())) & LARGEST
        if not self._due(step) or self._waits:
            return rates
        return (rates * 31 + (digest(self.tensors()) if self._held is None else self._held)) & LARGEST

    def done(self, step: int) -> None:
        """Called when the ranks have compared the digest, or when the state of a step was loaded; local."""
        if not self._waits:
            self._last = step

    def _due(self, step: int) -> bool:
        return bool(self.every) and step // self.every > self._last // self.every

    @property
    def _waits(self) -> bool:
        return self._within and self._held is None

    def judge(self, exchange: Exchange) -> None:
        """Raise GradientError on all ranks with what differs; collective. Only warn if rounding explains it."""
        me = f"r{exchange.rank} | "
        told = [json.loads(text) for text in exchange.gather_texts(json.dumps([self.turn(), self.rates()]))]
        turns, others = [turn for turn, _ in told], [rates for _, rates in told]
        rank = next((r for r, turn in enumerate(turns) if turn != turns[0]), 0)
        if rank:
            raise GradientError(
                f"{me}the ranks step different optimizers: rank 0 number {turns[0] + 1} of those that were attached, rank "
                f"{rank} number {turns[rank] + 1}; step them in the same order on all ranks. check_every=0 turns this check "
                "off"
            )
        rank = next((r for r, other in enumerate(others) if other != others[0]), 0)
        if rank:
            first, second = others[0], others[rank]
            at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), -1)
            what = f"of group {at}: {first[at]:.7g} on rank 0, {second[at]:.7g} on rank {rank}" if at >= 0 else "in number"
            raise GradientError(
                f"{me}the learning rates differ {what}; change them on all ranks alike: a scheduler that follows a loss "
                "needs the same loss everywhere, such as sync.average(loss). check_every=0 turns this check off"
            )
        tensors = list(self.tensors())
        mine = json.dumps([digest([tensor]) for tensor in tensors])
        lists = [json.loads(text) for text in exchange.gather_texts(mine)]
        rank = next((r for r, other in enumerate(lists) if other != lists[0]), 0)
        if not rank:
            if exchange.rank == 0:  # in flight, an update came between
                warnings.warn("the replicas differed in an earlier step, by rounding; they are equal again", stacklevel=2)
            return
        at = next(i for i, (a, b) in enumerate(zip(lists[0], lists[rank], strict=True)) if a != b)
        self._raise_or_warn(exchange, at, rank, tensors)

    def _raise_or_warn(self, exchange: Exchange, at: int, rank: int, tensors: list[torch.Tensor]) -> None:
        apart, largest = _distance(exchange, tensors[at])
        name = self.slots[at].name
        found = f"ranks 0 and {rank} differ in {name}, by up to {apart:.2g} where weights reach {largest:.2g}"
        if apart <= ROUNDING * largest:
            self.every = 0
            if exchange.rank == 0:
                warnings.warn(
                    f"the replicas differ: {found}; that may be rounding, if the ranks' processors or libraries differ. "
                    "It is not looked for again",
                    stacklevel=2,
                )
            return
        raise GradientError(
            f"r{exchange.rank} | the replicas differ: {found}. Each optimizer.step() needs an exchange before it (attach() "
            "does that), and the same settings on every rank; do not change weights on one rank alone. check_every=0 turns "
            "this check off"
        )


def _distance(exchange: Exchange, tensor: torch.Tensor) -> tuple[float, float]:
    """The largest distance over ranks of a tensor from rank 0's, and rank 0's largest value; collective."""
    own = tensor.detach().cpu().double().contiguous().reshape(-1)
    first = own.clone()
    exchange.broadcast_(first.view(torch.uint8).numpy())
    apart = float((own - first).abs().max()) if len(own) else 0.0
    texts = exchange.gather_texts(str(apart))
    return max(map(float, texts)), float(first.abs().max()) if len(first) else 0.0


class Sameness:
    """Looks for ranks that have the same gradients in the first exchanges, because they train on the same batches."""

    def __init__(self) -> None:
        self.done = 0
        self._other: set[tuple[int, int]] = set()  # pairs of ranks that differed once
        self._same: set[tuple[int, int]] = set()  # pairs of ranks that once had the same, which was not zero

    @property
    def looks(self) -> bool:
        """Whether the coming exchange is among the first."""
        return self.done < REPEATED

    def compare(self, exchange: Exchange, step: int, sample: int) -> None:
        """Tell each other the digests of what the ranks exchange in a step; collective."""
        rows = together(exchange, lambda: meet(exchange, SAMPLES, sample, exchange.rank, step=step))
        samples = [0] * exchange.size
        for one, rank in rows[:, :2].tolist():
            samples[rank] = one
        self.note(samples, exchange.rank)

    def note(self, samples: Sequence[int], rank: int) -> None:
        """Compare the digests of all ranks (0: none); rank 0 warns after the last comparison. Local."""
        ranks = range(len(samples))
        pairs = [(a, b) for a in ranks for b in ranks if a < b]
        self._other |= {(a, b) for a, b in pairs if samples[a] != samples[b]}
        self._same |= {(a, b) for a, b in pairs if samples[a] == samples[b] != 0}
        alike = self._same - self._other
        if self.done == REPEATED - 1 and alike and rank == 0:
            a, b = min(alike)
            warnings.warn(
                f"ranks {a} and {b} had the same gradient, bit for bit, in the first {REPEATED} steps: they train on the "
                "same batches. Give each rank its own part of the data: mpisparse.shard(loader)",
                stacklevel=2,
            )


def rates_of(attached: Iterable[Any]) -> tuple[float, ...]:
    """The learning rates of attached optimizers, by group, except those on a device, for which the host would wait."""
    found = [group.get("lr") for one in attached for group in one.optimizer.param_groups]
    rates = [0.0 if rate is None else rate for rate in found]  # some optimizers choose their own
    here = [float(rate) for rate in rates if not (isinstance(rate, torch.Tensor) and rate.device.type != "cpu")]
    return tuple(float(np.float32(rate)) for rate in here)  # processors may differ in the last bits of a float64
