"""What others choose: each rank its own largest elements everywhere, one rank for all, a fixed threshold, or by lot.

None of them has exclusive regions, so that what is chosen may build up: all ranks send what any of them chose
(`Stats.build_up`). The sums of a step are shared out evenly.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch

from mpisparse.arrays import Floats, Ints
from mpisparse.core.agree import Inputs, share_counts
from mpisparse.core.records import Chosen, Clock, Parts, Region
from mpisparse.errors import ConfigurationError
from mpisparse.model.layout import Layout
from mpisparse.select.candidates import Found
from mpisparse.select.scorers import Magnitude
from mpisparse.select.threshold import TINY
from mpisparse.wire.indices import unite

PIECE = 65_536


class Picker(Protocol):
    """A rank's own choice: ascending indices, and the magnitude from which they were chosen (0: none)."""

    common: bool  # the choice is the same on all ranks without a message

    def wanted(self, k: int, n: int, step: int) -> int: ...
    def pick(self, acc: Floats, k: int, step: int) -> tuple[Ints, float]: ...
    def state(self) -> dict[str, Any]: ...
    def check(self, state: dict[str, Any]) -> None: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Plain:
    """A picker that wants what is set."""

    common = False

    def wanted(self, k: int, n: int, step: int) -> int:
        return k


class Stateless(Plain):
    """A picker that remembers nothing."""

    def state(self) -> dict[str, Any]:
        return {}

    def check(self, state: dict[str, Any]) -> None:
        pass

    def load(self, state: dict[str, Any]) -> None:
        pass


class TopK(Stateless):
    """The k largest of this rank, as torch.topk finds them."""

    def pick(self, acc: Floats, k: int, step: int) -> tuple[Ints, float]:
        values, index = torch.topk(torch.from_numpy(acc).abs(), k, sorted=False)
        return np.sort(index.numpy()), float(values.min())


class SampledTopK(Stateless):
    """What reaches the threshold of the k largest in a sample; of far too many, the k largest.

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

    def pick(self, acc: Floats, k: int, step: int) -> tuple[Ints, float]:
        n = len(acc)
        count = min(n, max(self.LEAST, int(self.SAMPLE * n)))
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        sample = np.abs(acc[generator.integers(0, n, count)]) if count < n else np.abs(acc)
        at = count - max(1, round(k * count / n))
        threshold = max(float(np.partition(sample, at)[at]), TINY)
        index, magnitude, _ = self.backend.select(acc, 0, n, threshold)
        if len(index) > self.SLACK * k:
            largest = np.sort(np.argpartition(magnitude, len(magnitude) - k)[len(magnitude) - k :])
            index, threshold = index[largest], float(magnitude[largest].min())
        return index, threshold


class CyclicTopK(TopK):
    """The k largest of one rank, which all take; it is another rank's turn in every step."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def pick(self, acc: Floats, k: int, step: int) -> tuple[Ints, float]:
        if step % self.size != self.rank:
            return np.empty(0, dtype=np.int64), 0.0
        return super().pick(acc, k, step)


class RandomK(Stateless):
    """k elements by lot, the same on all ranks because their generators are."""

    common = True

    def __init__(self, seed: int, layout: Layout) -> None:
        self.seed = seed
        self.layout = layout

    def pick(self, acc: Floats, k: int, step: int) -> tuple[Ints, float]:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        picked: Ints = np.sort(generator.choice(self.layout.remaining, k, replace=False, shuffle=False))
        for begin, end in self.layout.waiting:  # the lot is among what is not frozen
            picked[np.searchsorted(picked, begin) :] += end - begin
        return picked, 0.0


class HardThreshold(Plain):
    """All that reach a fixed threshold; none given: the one that gave this rank k in the first step that had as many."""

    def __init__(self, backend: Any, threshold: float | None, density: float, layout: Layout | None = None) -> None:
        self.backend = backend
        self.layout = layout
        self.threshold = max(threshold, TINY) if threshold else 0.0
        self.density = density

    def pick(self, acc: Floats, k: int, step: int) -> tuple[Ints, float]:
        if self.threshold <= 0.0:  # by the density that was set at first, not by that of a warm-up
            at = len(acc) - max(1, int(self.density * (self.layout.remaining if self.layout else len(acc))))
            self.threshold = float(np.partition(np.abs(acc), at)[at])
        threshold = max(self.threshold, TINY)
        index, _, _ = self.backend.select(acc, 0, len(acc), threshold)
        return index, threshold

    def state(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    def check(self, state: dict[str, Any]) -> None:
        if not 0.0 <= float(state["threshold"]) < float("inf"):
            raise ConfigurationError(f"the threshold in the state is no magnitude: {state['threshold']!r}")

    def load(self, state: dict[str, Any]) -> None:
        self.threshold = float(state["threshold"])


class Sidco(Plain):
    """A threshold by fitting exponentials to the tail: the mean excess over one threshold leads to the next.

    A stage leaves a quarter, the last what is wanted. The more stages, the farther out the fit; one more is tried
    whenever the mean over five steps is off by more than a fifth, and after the most that the density allows, one again.
    """

    STAGE, PATIENCE, TOLERANCE = 0.25, 5, 0.2

    def __init__(self, backend: Any, layout: Layout) -> None:
        self.backend = backend
        self.layout = layout
        self.stages = 1
        self.ratios: list[float] = []

    def pick(self, acc: Floats, k: int, step: int) -> tuple[Ints, float]:
        n = self.layout.remaining
        wanted = k / n
        most = max(1, math.ceil(math.log(wanted) / math.log(self.STAGE))) if wanted < 1.0 else 1
        stages = min(self.stages, most)
        shares = [self.STAGE] * (stages - 1) + [wanted / self.STAGE ** (stages - 1)]
        threshold = mean_magnitude(acc, n) * math.log(1.0 / min(1.0, shares[0]))
        threshold = max(threshold, TINY)
        index, magnitude, _ = self.backend.select(acc, 0, len(acc), threshold)
        for share in shares[1:]:
            excess = float(np.mean(magnitude, dtype=np.float64)) - threshold if len(magnitude) else 0.0
            threshold += excess * math.log(1.0 / share)
            reached = magnitude >= np.float32(threshold)
            index, magnitude = index[reached], magnitude[reached]
        self._adapt(len(index) / k, most)
        return index, threshold

    def _adapt(self, ratio: float, most: int) -> None:
        self.ratios.append(ratio)
        if len(self.ratios) == self.PATIENCE:
            off = abs(sum(self.ratios) / self.PATIENCE - 1.0)
            if off > self.TOLERANCE:
                self.stages = self.stages + 1 if self.stages < most else 1
            self.ratios = []

    def state(self) -> dict[str, Any]:
        return {"stages": self.stages, "ratios": np.array(self.ratios)}

    def check(self, state: dict[str, Any]) -> None:
        if int(state["stages"]) < 1 or not np.isfinite(np.asarray(state["ratios"])).all():
            raise ConfigurationError(f"the state's number of stages is {state['stages']!r}")

    def load(self, state: dict[str, Any]) -> None:
        self.stages = int(state["stages"])
        self.ratios = np.asarray(state["ratios"]).tolist()


def mean_magnitude(acc: Floats, n: int) -> float:
    """The mean of |acc| over n elements, the others being zero, piece by piece so that pieces stay in cache; the same bits
    for the same vector."""
    pieces = range(0, len(acc), PIECE)
    return sum(float(np.abs(acc[at : at + PIECE]).sum(dtype=np.float64)) for at in pieces) / n


class UnionChooser:
    """All ranks exchange what any of them picked."""

    def __init__(self, parts: Parts, scorer: Magnitude, picker: Picker) -> None:
        self.parts = parts
        self.scorer = scorer
        self.picker = picker
        self.step = 0

    def choose(self, inputs: Inputs, clock: Clock) -> Chosen:
        """Accumulate, pick, and unite what the ranks picked."""
        exchange, n = self.parts.exchange, len(self.parts.acc)
        self.scorer.accumulate(inputs, 0, 0, 0.0)
        clock.lap("accumulate")
        share_counts(exchange, inputs, np.empty(0, dtype=np.int64), n)  # nobody picks among values that are not finite
        clock.lap("agree")
        k = self.picker.wanted(min(inputs.k, n), self.parts.layout.remaining, self.step)
        mine, threshold = self.picker.pick(self.parts.acc, k, self.step)
        clock.lap("select")
        if self.picker.common:
            workloads = np.diff(np.arange(exchange.size + 1) * len(mine) // exchange.size)
            union = mine
        else:
            bits = int(np.float32(threshold).view(np.uint32))  # the largest of the ranks' thresholds is the step's
            counts = share_counts(exchange, inputs, np.array([len(mine), bits]), n)
            workloads, threshold = counts[:, 0], float(counts[:, 1].max().astype(np.uint32).view(np.float32))
            union = self._unite(mine, workloads)
        clock.lap("unite")
        return Chosen(union, shared_out(union, n, exchange.size), workloads, threshold, k=k)

    def _unite(self, mine: Ints, workloads: Ints) -> Ints:
        everything = [Region(rank, 0, len(self.parts.acc)) for rank in range(len(workloads))]
        found = Found(mine, np.zeros(len(mine), dtype=np.float32))
        picked, _ = unite(self.parts.exchange, self.parts.backend, found, 0.0, everything, workloads.tolist())
        return picked if np.count_nonzero(workloads) <= 1 else merged(picked)

    def adapt(self) -> None:
        """Go on to the next step."""
        self.step += 1

    def state(self) -> dict[str, Any]:
        """What the next choice depends on."""
        return {"step": self.step, **self.scorer.state(), **self.picker.state()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        int(state["step"])
        self.scorer.check(state)
        self.picker.check(state)

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.step = int(state["step"])
        self.scorer.load(state)
        self.picker.load(state)


def merged(picked: Ints) -> Ints:
    """The different ones of several ascending runs, ascending; a stable sort merges runs, where np.unique hashes."""
    ordered = np.sort(picked, kind="stable")
    different: Ints = ordered[np.diff(ordered, prepend=-1) != 0]
    return different


def shared_out(union: Ints, n: int, size: int) -> list[Region]:
    """Regions with about as many chosen elements for each rank."""
    cuts = [int(union[p * len(union) // size]) if len(union) else p * n // size for p in range(1, size)]
    bounds = [0, *cuts, n]
    return [Region(p, bounds[p], bounds[p + 1]) for p in range(size)]
