"""The selections of other methods: every rank's largest elements, one rank's for all, a fixed threshold, or at random.

None of them has exclusive regions, so selections may build up: all ranks send what any of them picked
(`Stats.build_up`). The summation is divided evenly over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from mpisparse.arrays import Doubles, Floats, Ints, State
from mpisparse.backends.flat import Held
from mpisparse.backends.protocol import PIECE as NEIGHBOURS
from mpisparse.comm.agreement import Notice
from mpisparse.comm.regions import even_regions, shared_out
from mpisparse.errors import ConfigurationError
from mpisparse.select.candidates import NONE, Candidates, largest
from mpisparse.select.plans import Agreed, Outcome, pack_agreed, unpack_agreed
from mpisparse.select.search import share_counts
from mpisparse.select.threshold import TINY
from mpisparse.select.view import Live, VectorKeys, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

PIECE = 65_536


class Picked(NamedTuple):
    """A rank's own pick: ascending indices, the threshold that they reach (0: none), and what the picker learns from."""

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    threshold: float
    lesson: Any = None


class Picker:
    """How a rank picks; reads only. By default a picker wants the set k and remembers nothing.

    common: the pick is the same on all ranks without a message.
    """

    common: bool = False

    def wanted(self, k: int, n: int, step: int) -> int:
        """How many of n elements to pick if the set density asks for k."""
        return k

    def pick(self, acc: Floats, k: int, step: int) -> Picked:
        """Pick about k elements; reads only."""
        raise NotImplementedError

    def learn(self, lesson: Any) -> None:
        """Learn from a pick when its step is done."""

    def state(self) -> State:
        """What the next pick depends on."""
        return {}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""

    def load(self, state: State) -> None:
        """Load a state that state() returned."""


class TopK(Picker):
    """The k largest of this rank, as torch.topk finds them; on a device, the first of ties, and no zeros."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def pick(self, acc: Any, k: int, step: int) -> Picked:
        if not isinstance(acc, np.ndarray):
            found = largest(self.backend, VectorKeys(self.backend, acc), len(acc), k)
            return Picked(found.index, float(found.magnitude.min()) if len(found.index) else 0.0)
        values, index = torch.topk(torch.from_numpy(np.abs(acc)), k, sorted=False)
        return Picked(np.sort(index.numpy()), float(values.min()))


class SampledTopK(Picker):
    """Elements that reach the threshold of the k largest in a sample; the k largest if these are far too many.

    Over the first `warm_up` steps k falls from a quarter of all, by the same factor in every step.
    """

    SAMPLE, LEAST, SLACK, START = 0.01, 4096, 1.3, 0.25

    def __init__(self, backend: Any, seed: int, warm_up: int) -> None:
        self.backend = backend
        self.seed = seed
        self.warm_up = warm_up

    def wanted(self, k: int, n: int, step: int) -> int:
        if step < self.warm_up:
            return max(k, round(n * self.START * math.pow(k / n / self.START, step / self.warm_up)))
        return k

    def pick(self, acc: Floats, k: int, step: int) -> Picked:
        n = len(acc)
        count = min(n, max(self.LEAST, int(self.SAMPLE * n)))
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        sample = np.abs(values_of(self.backend, acc, generator.integers(0, n, count) if count < n else None))
        at = count - max(1, round(k * count / n))
        threshold = max(float(np.partition(sample, at)[at]), TINY)
        index, magnitude = map(self.backend.to_host, self.backend.select(acc, 0, n, threshold)[:2])
        if len(index) > self.SLACK * k:
            largest = np.sort(np.argpartition(magnitude, len(magnitude) - k)[len(magnitude) - k :])
            index, threshold = index[largest], float(magnitude[largest].min())
        return Picked(index, threshold)


class CyclicTopK(TopK):
    """The k largest of one rank, which all ranks send; the ranks take turns."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        super().__init__(backend)
        self.rank = rank
        self.size = size

    def pick(self, acc: Floats, k: int, step: int) -> Picked:
        if step % self.size != self.rank:
            return Picked(NONE.index, 0.0)
        return super().pick(acc, k, step)


class RandomK(Picker):
    """k elements at random, the same on all ranks because their generators are."""

    common = True

    def __init__(self, seed: int, held: Held) -> None:
        self.seed = seed
        self.held = held

    def pick(self, acc: Floats, k: int, step: int) -> Picked:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        picked: Ints = np.sort(generator.choice(self.held.remaining, k, replace=False, shuffle=False))
        for begin, end in self.held.stretches:  # pick among what is not frozen
            picked[np.searchsorted(picked, begin) :] += end - begin
        return Picked(picked, 0.0)


class HardThreshold(Picker):
    """All elements that reach a fixed threshold; by default the one that k of this rank reached in the first step with k."""

    def __init__(self, backend: Any, threshold: float | None, density: float, held: Held | None = None) -> None:
        self.backend = backend
        self.held = held
        self.threshold = max(threshold, TINY) if threshold else 0.0
        self.density = density

    def pick(self, acc: Floats, k: int, step: int) -> Picked:
        found = self.threshold
        if found <= 0.0:  # found at the density that was set first, not at a warm-up's
            found = self._first(acc, max(1, int(self.density * (self.held.remaining if self.held else len(acc)))))
        threshold = max(found, TINY)
        index, _, _ = self.backend.select(acc, 0, len(acc), threshold)
        return Picked(self.backend.to_host(index), threshold, found)

    def _first(self, acc: Any, k: int) -> float:
        """The k-th largest magnitude."""
        if isinstance(acc, np.ndarray):
            return float(np.partition(np.abs(acc), len(acc) - k)[len(acc) - k])
        magnitude = largest(self.backend, VectorKeys(self.backend, acc), len(acc), k).magnitude
        return float(magnitude.min()) if len(magnitude) == k else 0.0

    def learn(self, lesson: Any) -> None:
        """Keep the threshold that was found."""
        self.threshold = float(lesson)

    def state(self) -> State:
        return {"threshold": self.threshold}

    def check(self, state: State) -> None:
        if not 0.0 <= float(state["threshold"]) < float("inf"):
            raise ConfigurationError(f"the threshold in the state is no magnitude: {state['threshold']!r}")

    def load(self, state: State) -> None:
        self.threshold = float(state["threshold"])


class Sidco(Picker):
    """A threshold by fitting exponentials to the tail: the mean excess over one threshold leads to the next.

    Each stage leaves a quarter of the elements, the last one k. More stages fit farther out in the tail. One more is tried
    whenever the mean over five steps is off by more than a fifth; after the most that the density allows, it starts at one.
    """

    STAGE, PATIENCE, TOLERANCE = 0.25, 5, 0.2

    def __init__(self, backend: Any, held: Held) -> None:
        self.backend = backend
        self.held = held
        self.stages = 1
        self.ratios: list[float] = []

    def pick(self, acc: Floats, k: int, step: int) -> Picked:
        n = self.held.remaining
        wanted = k / n
        most = max(1, math.ceil(math.log(wanted) / math.log(self.STAGE))) if wanted < 1.0 else 1
        stages = min(self.stages, most)
        shares = [self.STAGE] * (stages - 1) + [wanted / self.STAGE ** (stages - 1)]
        threshold = max(sum_of_magnitudes(acc) / n * math.log(1.0 / min(1.0, shares[0])), TINY)
        tail = acc
        for share in shares[1:]:
            _, tail, _ = self.backend.select(tail, 0, len(tail), threshold)
            excess = sum_of_magnitudes(tail) / len(tail) - threshold if len(tail) else 0.0
            threshold += excess * math.log(1.0 / share)
        index = self.backend.to_host(self.backend.select(acc, 0, len(acc), threshold)[0])
        return Picked(index, threshold, (len(index) / k, most))

    def learn(self, lesson: Any) -> None:
        """Try another number of stages if too many or too few were picked for some steps."""
        ratio, most = lesson
        self.ratios.append(ratio)
        if len(self.ratios) == self.PATIENCE:
            off = abs(sum(self.ratios) / self.PATIENCE - 1.0)
            if off > self.TOLERANCE:
                self.stages = self.stages + 1 if self.stages < most else 1
            self.ratios = []

    def state(self) -> State:
        return {"stages": self.stages, "ratios": np.array(self.ratios)}

    def check(self, state: State) -> None:
        if int(state["stages"]) < 1 or not np.isfinite(np.asarray(state["ratios"])).all():
            raise ConfigurationError(f"the state's number of stages is {state['stages']!r}")

    def load(self, state: State) -> None:
        self.stages = int(state["stages"])
        self.ratios = np.asarray(state["ratios"]).tolist()


def values_of(backend: Any, acc: Any, places: Ints | None) -> Floats:
    """The values at given places in any order, or all values; on the host."""
    if isinstance(acc, np.ndarray):
        return acc if places is None else acc[places]
    values: Floats = backend.to_host(acc if places is None else backend.values_at(acc, backend.from_host(places)))
    return values


def layer_sums(backend: Any, values: Any, layers: Sequence[tuple[int, int]]) -> Doubles:
    """The sum of magnitudes in each layer [begin, end), and that of their squares, with the same bits on every backend."""
    begins = [np.arange(begin, end, NEIGHBOURS) for begin, end in layers]
    ends = [np.minimum(starts + NEIGHBOURS, end) for starts, (_, end) in zip(begins, layers, strict=True)]
    sums = backend.piece_sums(values, np.concatenate(begins), np.concatenate(ends)).reshape(-1, 2)
    found, counts = np.zeros((len(layers), 2)), np.array([len(starts) for starts in begins])
    firsts = np.cumsum(counts) - counts
    if len(sums):
        found[counts > 0] = np.add.reduceat(sums, firsts[counts > 0])
    return found


def sum_of_magnitudes(values: Any) -> float:
    """The sum of |values| in float64, with the same bits on the host and on a device.

    Halves of a piece are added until one element is left, then pieces in their order.
    """
    whole = len(values) // PIECE * PIECE
    batch = PIECE * (4 if isinstance(values, np.ndarray) else 64)  # to stay in the host's cache, or to fill a device
    parts = [values[at : min(whole, at + batch)].reshape(-1, PIECE) for at in range(0, whole, batch)]
    return sum(each for part in [*parts, values[None, whole:]] for each in _sums_by_halves(abs(part)))


def _sums_by_halves(rows: Any) -> list[float]:
    """The sum of each row."""
    sums, length = rows.astype(np.float64) if isinstance(rows, np.ndarray) else rows.double(), rows.shape[1]
    while length > 1:
        half = (length + 1) // 2
        front = sums[:, : length - half]
        front += sums[:, half:length]
        length = half
    found = sums[:, :length].reshape(-1)
    return list(found.tolist() if isinstance(found, np.ndarray) else found.cpu().tolist())


class UnionPlan(NamedTuple):
    """One step in which all ranks send what any of them picked. Picks are on the host, the union is where acc is."""

    backend: Any
    picker: Picker
    k: int
    n: int
    remaining: int
    step: int
    own: bool = False
    looks: bool = False
    scope: tuple[int, int] = (0, 0)  # no candidates are collected in the pass
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """The accumulator itself."""
        return live

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Pick, and share how many; collective."""
        share_counts(exchange, notice, NONE.index, self.n)  # nobody picks among values that are not finite
        live: Live = view  # type: ignore[assignment]  # these pickers read the whole accumulator
        k = self.picker.wanted(min(self.k, self.n), self.remaining, self.step)
        mine, threshold, lesson = self.picker.pick(live.acc, k, self.step)
        if self.picker.common:
            loads = np.diff(np.arange(exchange.size + 1) * len(mine) // exchange.size)
            regions = shared_out(mine, self.n, exchange.size)
            return Agreed(NONE, threshold, loads, regions, union=backend.from_host(mine), k=k, lesson=lesson)
        bits = int(np.float32(threshold).view(np.uint32))  # the largest of the ranks' thresholds is the step's
        counts = share_counts(exchange, notice, np.array([len(mine), bits]), self.n)
        most = float(counts[:, 1].max().astype(np.uint32).view(np.float32))
        picked = Candidates(mine, np.full(len(mine), np.float32(most))).on_device(backend)
        everywhere = [region._replace(lo=0, hi=self.n) for region in even_regions(self.n, exchange.size)]
        return Agreed(picked, most, counts[:, 0], everywhere, k=k, lesson=lesson)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """Remove duplicate indices, and divide the summation evenly."""
        picked = self.backend.to_host(union)
        once = picked if np.count_nonzero(agreed.workloads) <= 1 else merged(picked)
        return agreed._replace(union=self.backend.from_host(once), regions=shared_out(once, self.n, len(agreed.workloads)))


class UnionSelection:
    """Plans steps in which all ranks send what any of them picked."""

    added: ClassVar[State] = {}

    def __init__(self, picker: Picker, held: Held, backend: Any) -> None:
        self.picker = picker
        self.backend = backend
        self.held = held
        self.step = 0

    def plan(self, k: int) -> UnionPlan:
        """The coming step."""
        return UnionPlan(self.backend, self.picker, k, self.held.n, self.held.remaining, self.step)

    def learn(self, agreed: Agreed, outcome: Outcome) -> None:
        """Go on to the next step."""
        self.picker.learn(agreed.lesson)
        self.step += 1

    def state(self) -> State:
        """What the next pick depends on."""
        return {"step": self.step, **self.picker.state()}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        int(state["step"])
        self.picker.check(state)

    def load(self, state: State) -> None:
        """Load a state that state() returned."""
        self.step = int(state["step"])
        self.picker.load(state)

    def resize(self, states: Sequence[State]) -> State:
        """Take over from the first rank."""
        return {key: states[0][key] for key in self.state()}

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values."""
        return pack_agreed(agreed)

    def unpacked(self, state: State) -> Agreed:
        """The agreement that packed() packed."""
        return unpack_agreed(state)


def merged(picked: Ints) -> Ints:
    """The distinct values of several ascending runs, ascending; a stable sort merges runs, whereas np.unique hashes."""
    ordered = np.sort(picked, kind="stable")
    different: Ints = ordered[np.diff(ordered, prepend=-1) != 0]
    return different
