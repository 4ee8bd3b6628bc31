"""The whole step in plain NumPy, with all ranks as lists in one process. Real runs must match it bit for bit.

It keeps no candidates and sends no messages: it counts in the accumulators themselves, a union is a concatenation, and a
codec is a rounding. Only the pure decisions (partition.py, threshold.py) are the library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Floats, Ints
from mpisparse.select import partition, selector, threshold
from mpisparse.select.threshold import Choice, Rungs

Scopes = list[tuple[int, int]]

GROUP = 256


def nearest(x: Floats, bits: int, least: int, largest: float) -> Floats:
    """Round to `bits` significant bits, ties to even, in units of at least 2^least, clipped to the largest."""
    wide = x.astype(np.float64)
    unit = np.exp2(np.maximum(np.frexp(wide)[1] - bits, least).astype(np.float64))
    return np.clip(np.rint(wide / unit) * unit, -largest, largest).astype(np.float32)


def fp16(x: Floats) -> Floats:
    return nearest(x, 11, -24, 65504.0)


def bf16(x: Floats) -> Floats:
    return nearest(x, 8, -133, (2 - 2.0**-7) * 2.0**127)


def exact(x: Floats) -> Floats:
    return x.copy()


def scaled_fp16(x: Floats) -> Floats:
    """Round to fp16 after scaling by the power of two that brings the largest magnitude into [2^14, 2^15)."""
    most = np.abs(x).max()
    scale = np.float32(2.0 ** min(max(math.frexp(most)[1] - 15, -126), 127) if most > 0 else 1.0)
    return fp16(np.clip(x / scale, -32752, 32752)) * scale


def int8(x: Floats) -> Floats:
    """Round to multiples of 1/127 of the largest magnitude."""
    scale = np.float32(np.abs(x).max() / np.float32(127))
    steps = np.clip(np.rint(x / scale), -127, 127) if scale > 0 else np.zeros_like(x)
    return steps.astype(np.int8) * scale


def int4(x: Floats) -> Floats:
    """Round to 16 multiples of the value of largest magnitude."""
    scale = bf16(np.where(x.max() >= -x.min(), x.max(), x.min())[None])[0]
    levels = np.array([-224, -176, -136, -102, -70, -41, -16, 0, 18, 44, 73, 104, 138, 173, 211, 256]) / 256 * float(scale)
    ascending = np.sort(levels)
    middles = (ascending[1:] + ascending[:-1]) / 2
    return ascending[np.searchsorted(middles, x, side="right" if scale > 0 else "left")].astype(np.float32)


def int2(x: Floats) -> Floats:
    """Round magnitudes to 9/32 of a scale or to the scale, which is the best for a first guess of which gets which."""
    size, part = np.abs(x), np.abs(x) / np.float32(64)
    outer = size >= np.float32(49 / 128) * size.max()
    total, many = by_rows(np.where(outer, part, np.float32(0))), np.float32(outer.sum())
    product = np.float32(9 / 32) * (by_rows(part) - total) + total
    square = np.float32(81 / 1024) * (np.float32(len(x)) - many) + many
    scale = bf16((product / (square / np.float32(64)))[None])[0]
    return np.copysign(np.where(size >= np.float32(41 / 64) * scale, scale, np.float32(9 / 32) * scale), x)


def sign(x: Floats) -> Floats:
    """Send the mean magnitude with each value's sign."""
    scale = bf16(by_rows(np.abs(x) * (np.float32(1) / np.float32(len(x))))[None])[0]
    return np.copysign(np.full(len(x), scale), x)


def by_rows(x: Floats) -> np.float32:
    """Add up 16 lanes, one row after the other, then lanes in halves."""
    lanes = np.zeros(16, np.float32)
    for start in range(0, len(x), 16):
        row = x[start : start + 16]
        lanes[: len(row)] += row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def by_group(round_group: Callable[[Floats], Floats], size: int = GROUP) -> Callable[[Floats], Floats]:
    """Apply a rounding to every group of values separately."""

    def round_all(x: Floats) -> Floats:
        groups = [round_group(x[i : i + size]) for i in range(0, len(x), size)]
        return np.concatenate([x[:0], *groups])

    return round_all


SENT = {
    "fp32": exact, "fp16": by_group(scaled_fp16), "bf16": bf16, "int8": by_group(int8),
    "int4": by_group(int4, 64), "int2": by_group(int2, 64), "sign": by_group(sign, 128),
}  # fmt: skip
STORED = {"float32": exact, "float64": exact, "float16": fp16, "bfloat16": bf16}


@dataclass(frozen=True)
class Settings:
    """The options of GradientSync that the oracle supports."""

    density: float = 0.001
    codec: str = "fp32"
    accumulate: str = "step"
    controller: str = "tail"
    partitioner: str = "best"
    blocks: int | None = None


@dataclass(frozen=True)
class Result:
    """The results of one step on all ranks."""

    published: Floats
    residuals: list[Floats]
    threshold: float
    workloads: tuple[int, ...]
    borders: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A ladder with the number of elements above each rung, the chosen rung, and the elements per rank above it."""

    rungs: Rungs
    total: Ints
    rung: int
    workloads: list[int]

    @property
    def threshold(self) -> np.float32:
        return self.rungs[self.rung]


class Oracle:
    """Up to 16 ranks with `n` elements each.

    `stored` lists the parameters' types as (end, type), ascending; None if all are float32.
    """

    def __init__(self, n: int, size: int, settings: Settings, stored: Sequence[tuple[int, str]] | None = None) -> None:
        self.n, self.size, self.settings, self.density = n, size, settings, settings.density
        self.stored = stored or [(n, "float32")]
        self.acc = [np.zeros(n, np.float32) for _ in range(size)]
        self.controller: Any = threshold.CONTROLLERS[settings.controller]()
        paper = settings.partitioner == "paper"
        self.blocks = settings.blocks or (partition.PAPER_BLOCKS if paper else partition.default_blocks(size))
        self.edges = partition.paper_edges(n, self.blocks) if paper else partition.even_edges(n, self.blocks)
        self.borders = partition.even_borders(len(self.edges) - 1, size)
        self.draws_in_step = not paper and settings.accumulate == "step" and size > 1
        self.work: Ints | None = None
        self.calm, self.needed = 0, 2  # the borders of the last step stay once they have fitted so often
        self.t = 0

    def step(self, gradients: Sequence[Floats]) -> Result:
        """Add one gradient per rank and do a step of all ranks."""
        for acc, gradient in zip(self.acc, gradients, strict=True):
            acc += gradient
        k = max(1, math.floor(self.density * self.n + 1e-6))
        found = self._settle(k)
        bounds = self.edges[self.borders].tolist()
        height = self._heights()
        picked = [lo + np.flatnonzero(height[lo:hi] >= found.threshold) for lo, hi in pairwise(bounds)]
        if self.settings.controller == "paper":  # an empty selection sends one index, as in the published code
            firsts = [np.arange(lo, min(lo + 1, hi)) for lo, hi in pairwise(bounds)]
            picked = [part if len(part) else first for part, first in zip(picked, firsts, strict=True)]
        picked, level = self._fill(k, picked, float(found.threshold))
        union = np.concatenate(picked)
        published = self._publish(union, self._reduce(picked))
        if k < self.n and not self.short:
            self.controller = self.controller.after(found.rungs, found.total, found.rung, k)
        self._rebalance(union)
        workloads = tuple(len(index) for index in picked)
        return Result(published, [acc.copy() for acc in self.acc], level, workloads, tuple(bounds))

    def _fill(self, k: int, picked: list[Ints], level: float) -> tuple[list[Ints], float]:
        """Bring the selection to k: fill up with elements that other ranks have, and drop ties beyond k."""
        self.short = False
        slack = max(1.0, 0.01 * k)
        total = sum(map(len, picked))
        if self.settings.controller != "tail" or k >= self.n or (total and abs(total - k) <= slack):
            return picked, level
        height = self._heights()
        if total < k:
            self.short = True
            height[:] = 0
            for acc in self.acc:
                largest = np.argsort(-np.abs(acc), kind="stable")[:k]
                height[largest] = np.maximum(height[largest], np.abs(acc[largest]))
            height[np.concatenate(picked)] = threshold.HUGE
            rungs, counts = threshold.spread(threshold.TINY, threshold.HUGE), None
            ordered = np.sort(height)
            while True:
                counts = self.n - np.searchsorted(ordered, rungs)
                choice = self.controller.choose(rungs, counts, k)
                if choice.rung is not None:
                    break
                rungs = choice.finer
            level = float(rungs[choice.rung])
        parts = [lo + np.flatnonzero(height[lo:hi] >= np.float32(level)) for lo, hi in pairwise(self._bounds())]
        if sum(map(len, parts)) - k <= slack:
            return parts, level
        return self._without_ties(k, parts, height, np.float32(level)), level

    def _bounds(self) -> list[int]:
        return self.edges[self.borders].tolist()

    def _without_ties(self, k: int, parts: list[Ints], height: Floats, level: np.float32) -> list[Ints]:
        """Keep only as many ties as reach k: each rank keeps its share, in rank order; which ties depends on the step."""
        ties = [part[height[part] == level] for part in parts]
        by_rank = sorted(range(self.size), key=self._owner)
        room, every = k - sum(len(part) - len(tie) for part, tie in zip(parts, ties, strict=True)), sum(map(len, ties))
        kept, before = list(parts), 0
        for p in by_rank:
            upto = before + len(ties[p])
            share = upto * room // every - before * room // every
            taken = [ties[p][(self.t * share + i) % len(ties[p])] for i in range(share)]
            kept[p] = np.sort(np.concatenate([parts[p][height[parts[p]] > level], np.array(taken, dtype=np.int64)]))
            before = upto
        return kept

    @property
    def _sweeps(self) -> bool:
        whole_rotations = not self.draws_in_step and self.size <= 16
        due = self.t % selector.SWEEP == selector.SWEEP - 1
        return self.settings.partitioner == "best" and self.size > 1 and not whole_rotations and due

    def _owner(self, p: int) -> int:
        return (p - (self.t // selector.SWEEP if self._sweeps else self.t)) % self.size

    def _reduce(self, picked: list[Ints]) -> Floats:
        """Return the mean of the decoded values. Ranks keep what a codec drops, owners what they do not send back."""
        send = SENT[self.settings.codec]
        mean = np.zeros(self.n, np.float32)
        union = np.concatenate(picked)
        ends = [p * len(union) // self.size for p in range(self.size + 1)]
        for p, index in enumerate(union[a:b] for a, b in pairwise(ends)):  # equal parts, wherever they were selected
            total = np.zeros(len(index), np.float32)
            for acc in self.acc:
                sent = send(acc[index])
                acc[index] -= sent
                total += sent
            back = send(total)
            self.acc[self._owner(p)][index] += total - back
            mean[index] = back / np.float32(self.size)
        return mean

    def _publish(self, union: Ints, mean: Floats) -> Floats:
        """Round the mean to the parameters' types; every rank keeps the rounding error."""
        published, begin = np.empty_like(mean), 0
        for end, kind in self.stored:
            published[begin:end] = STORED[kind](mean[begin:end])
            begin = end
        for acc in self.acc:
            acc[union] += (mean - published)[union]
        return published

    def _settle(self, k: int) -> Found:
        """Find the threshold for the partitions of this step, and draw these first if they are drawn inside the step."""
        rungs = self.controller.ladder(k) if k < self.n else np.zeros(1, np.float32)
        self.poor = np.zeros(self.n, np.float32)
        if not self.draws_in_step or self._sweeps or self.keeps:
            found = self._search(rungs, self._regions(), k, sum_counts)
            if self.draws_in_step and not self._sweeps:
                most = 0.15 + 2 * self._chance(found.workloads)
                fits = self._fits(found.workloads, k, sum(found.workloads), most)
                balanced = sum(found.workloads) > 0 and imbalance(found.workloads) <= most
                self.calm = self.needed if fits else 0
                self.needed = max(2, self.needed - 1) if balanced else min(64, 2 * self.needed)
            return found
        self.able = list(range(self.size))
        found = self._search(rungs, [(0, self.n)] * self.size, k, self._predict, everywhere=True)
        inherited = None
        for _ in range(3):
            above = [partition.block_counts(np.flatnonzero(np.abs(acc) >= found.threshold), self.edges) for acc in self.acc]
            if inherited is None:  # what the borders of the last step would have given
                inherited = [int(above[self._owner(p)][a:b].sum()) for p, (a, b) in enumerate(pairwise(self.borders))]
            sharing = [p for p in range(self.size) if self._owner(p) in self.able]
            inner = partition.best_borders([above[self._owner(p)] for p in sharing], self.edges)
            self.borders = np.array([inner[sum(q < p for q in sharing)] for p in range(self.size + 1)])
            found = self._search(found.rungs, self._regions(), k, sum_counts)
            loads = [found.workloads[rank] for rank in self.able]
            if max(loads) * len(loads) / max(1, sum(loads)) - 1 <= 0.1:
                break
            if sum(found.workloads) < k and found.rungs[0] <= threshold.TINY:
                break
        if len(self.able) < self.size:
            found = self._with_poor_ranks(found, k)
        most = 0.1 + self._chance(inherited)
        self.calm = self.calm + 1 if self._fits(inherited, k, int(found.total[found.rung]), most) else 0
        return found

    def _chance(self, loads: list[int]) -> float:
        """By how much of itself a rank's count varies, if elements fall at random."""
        return math.sqrt(self.size / sum(loads)) if sum(loads) else math.inf

    @property
    def keeps(self) -> bool:
        return self.calm >= self.needed

    def _fits(self, loads: list[int], k: int, selected: int, most: float) -> bool:
        """Tell whether borders that give these loads may stay: they are balanced, and owners have enough."""
        short = selected < k < self.n and not (selected > 0 and k - selected <= max(1.0, 0.01 * k))
        return not short and sum(loads) > 0 and imbalance(loads) <= most

    def _with_poor_ranks(self, found: Found, k: int) -> Found:
        """Find the threshold that gives k when ranks without a partition contribute their elements above the one found."""
        self.poor = np.zeros(self.n, np.float32)
        for rank in set(range(self.size)) - set(self.able):
            magnitude = np.abs(self.acc[rank])
            self.poor = np.maximum(self.poor, np.where(magnitude >= found.threshold, magnitude, np.float32(0)))
        rungs, ordered = found.rungs, np.sort(np.where(self._owned() >= found.rungs[0], self._heights(), self.poor))
        while True:
            total = self.n - np.searchsorted(ordered, rungs)
            choice = self.controller.choose(rungs, total, k)
            if choice.rung is not None:
                return Found(rungs, total, choice.rung, [])
            if choice.finer is None:  # there is nothing below
                return Found(rungs, total, 0, [])
            rungs = choice.finer

    def _owned(self) -> Floats:
        """Return each element's magnitude on the rank that owns it."""
        height = np.zeros(self.n, np.float32)
        for p, (lo, hi) in enumerate(pairwise(self._bounds())):
            height[lo:hi] = np.abs(self.acc[self._owner(p)][lo:hi])
        return height

    def _heights(self) -> Floats:
        """Return the magnitude that decides about each element: its owner's, or a larger one of a rank without partition."""
        return np.maximum(self._owned(), self.poor)

    def _predict(self, counts: list[Ints]) -> Ints:
        return harmonic_mean([counts[rank] for rank in self.able])

    def _leave_poor_ranks_out(self, k: int) -> None:
        """Exclude the ranks with the fewest large elements until the others reach k.

        They must reach it at most two octaves below the magnitude above which all ranks have k on average.
        """
        counted = [np.bincount(abs_bits(acc) >> 20, minlength=2048)[::-1].cumsum()[::-1] for acc in self.acc]
        tails = [np.minimum(tail, 2 * k * self.size) for tail in counted]  # ranks tell each other no more
        at = max([1, *np.flatnonzero(np.sum(tails, axis=0) >= k * self.size).tolist()])
        ranked = sorted(range(self.size), key=lambda rank: tails[rank][at])
        for poor in range(self.size):
            able = ranked[poor:]
            if harmonic_mean([tails[rank] for rank in able])[max(1, at - 16)] >= k:
                self.able = sorted(able)
                return

    def _regions(self) -> Scopes:
        """Return the region in which each rank selects."""
        bounds = self.edges[self.borders].tolist()
        mine = [next(p for p in range(self.size) if self._owner(p) == rank) for rank in range(self.size)]
        return [(bounds[p], bounds[p + 1]) for p in mine]

    def _search(
        self, rungs: Rungs, scopes: Scopes, k: int, predict: Callable[[list[Ints]], Ints], everywhere: bool = False
    ) -> Found:
        """Count and let the controller choose a rung or a finer ladder; failing that, place a ladder by a histogram.

        Each new histogram aims for twice as many elements.
        """
        parts = [acc[lo:hi] for acc, (lo, hi) in zip(self.acc, scopes, strict=True)]
        magnitudes = [np.sort(np.abs(part)) for part in parts]
        wanted = 0
        while True:
            counts = [len(m) - np.searchsorted(m, rungs) for m in magnitudes]
            total = predict(counts)
            choice = self.controller.choose(rungs, total, k) if k < self.n else Choice(rung=0)
            if choice.rung is not None:
                return Found(rungs, total, choice.rung, [int(c[choice.rung]) for c in counts])
            if choice.finer is not None:
                rungs = choice.finer
                continue
            if not wanted and everywhere:
                self._leave_poor_ranks_out(k)
                if len(self.able) < self.size and len(rungs):
                    wanted = k * len(self.able)
                    continue
            sharing = self.able if everywhere else range(self.size)
            wanted = wanted or k * (len(self.able) if everywhere else 1)
            bits = abs_bits(np.concatenate([parts[rank] for rank in sharing]))
            rungs = self.controller.locate(np.bincount(bits >> 20, minlength=2048), wanted)
            wanted *= 2

    def _rebalance(self, union: Ints) -> None:
        """Set the borders for the next step by this one's selection; if borders are drawn in the step, set the blocks."""
        if self.settings.partitioner == "paper":
            loads = partition.block_counts(union, self.edges[self.borders])
            self.borders = partition.paper_borders(self.borders, loads, self.edges, self.blocks)
        elif self.draws_in_step:
            bounds = self.edges[self.borders]
        elif self.size > 1:
            now = 256 * partition.block_counts(union, self.edges)
            self.work = now if self.work is None else self.work + (now - self.work) // 4
        due = self.size > 16 or (self.t + 1) % self.size == 0  # with up to 16 ranks, borders stay for a whole rotation
        if self.settings.partitioner != "paper" and not self.draws_in_step and due:
            cost = 128 * self.work + 256 * np.diff(self.edges) if self.size > 1 else np.diff(self.edges)
            self.borders = partition.best_borders([cost] * self.size, self.edges, math.ceil(2 * self.n / self.size))
        self.t += 1
        self.calm = 0 if self._sweeps else self.calm
        if self.settings.partitioner != "paper" and self.draws_in_step and not self.keeps and not self._sweeps:
            blocks = partition.enough_blocks(self.blocks, self.size, len(union))
            self.edges = partition.worked_edges(self.n, blocks, union, bounds)
            self.borders = np.searchsorted(self.edges, bounds)
        if self._sweeps:
            self.edges = partition.even_edges(self.n, self.blocks)
            self.borders = partition.even_borders(len(self.edges) - 1, self.size)
        if self._sweeps and self.draws_in_step:
            if self.t // selector.SWEEP % self.size == 0:
                self.work = 256 * partition.block_counts(union, self.edges)
            work = np.zeros(len(self.edges) - 1, np.int64) if self.work is None else self.work
            self.borders = partition.best_borders([128 * work + 256 * np.diff(self.edges)] * self.size, self.edges)


def imbalance(loads: list[int]) -> float:
    return max(loads) * len(loads) / sum(loads) - 1


def abs_bits(values: Floats) -> NDArray[np.uint32]:
    """Return the bits of the magnitudes, which sort like the magnitudes."""
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def sum_counts(counts: list[Ints]) -> Ints:
    """Predict the selection of disjoint regions: the sum of the counts."""
    return np.sum(counts, axis=0)


def harmonic_mean(counts: list[Ints]) -> Ints:
    """Predict the selection of balanced regions from each rank's counts over all elements.

    A rank that selects little gets a longer partition, so the harmonic mean over ranks counts.
    """
    return np.rint(len(counts) / sum(1.0 / np.maximum(c, 0.5) for c in counts)).astype(np.int64)
