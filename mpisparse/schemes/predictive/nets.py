"""The nets that predict importance, one for each layer or one for all, and how they learn: arrays in, arrays out.

What a net sees of an element are its last gradients, each in units of the layer's root mean square and on a logarithmic
scale, with the sign of what waits in the accumulator taken out: a gradient that agrees with it is positive. Features may
follow them. What it learns is to rank: of two elements of any layers, the one whose sending gains more should have the
larger key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpisparse.arrays import Bytes, Floats, Halves, Ints
from mpisparse.backends.keys import PRODUCTS, keys_of
from mpisparse.backends.kinds import BF16, round_to, widen
from mpisparse.backends.protocol import HIDDEN
from mpisparse.errors import ConfigurationError

INPUTS = 8  # of a net at most, a limit of the kernels
PAIRS, BATCH = 16_384, 512
HEAVIEST = 8.0  # weight of a pair, where 1 is the mean
NEAR = 16  # pairs are of magnitudes that lie within a 16th of all, in their order
SMOOTHING = 0.9  # of the layers' mean squares, from one lesson to the next


@dataclass(frozen=True)
class Slice:
    """Elements [lo, lo + n) to score: rows of n each, of last gradients, oldest first, of features, of the accumulator."""

    lo: int
    rows: Halves


@dataclass(frozen=True)
class Lesson:
    """Elements at ascending indices with their rows as in a Slice; their magnitude, and what sending each gains."""

    number: int
    index: Ints
    rows: Halves
    magnitude: Floats
    gain: Floats


@dataclass(frozen=True)
class Job:
    """What the thread is given in a step: a lesson to learn from first, a slice to score then."""

    lesson: Lesson | None
    slice: Slice | None


@dataclass(frozen=True)
class Prediction:
    """What comes of a job: the scores of the slice from lo on, and how well keys ranked the lesson before it was learned.

    ranking is the share of pairs in the right order, plain that of magnitudes alone; NaN where there was no lesson.
    """

    lo: int
    scores: Bytes
    ranking: float
    plain: float


class Nets:
    """The nets and their optimizer (Adam), as flat vectors; `ends` are the layers' ends in the flat vector of parameters.

    features: the number of inputs beside the gradients, already relative to the layer. shared: one net for all layers.
    """

    def __init__(
        self, backend: Any, ends: Ints, depth: int, *, key: int, rate: float, seed: tuple[int, ...], features: int = 0,
        shared: bool = False,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.ends = ends
        self.depth = depth
        self.inputs = depth + features
        self.shared = shared
        self.key = key
        self.rate = rate
        self.seed = seed
        nets = np.zeros((1 if shared else len(ends), HIDDEN * (self.inputs + 2) + 1), dtype=np.float32)
        generator, first = np.random.default_rng([*seed, 0]), HIDDEN * (self.inputs + 1)
        nets[:, :first] = generator.standard_normal(first) / np.sqrt(self.inputs)
        self.nets: Floats = nets.reshape(-1)
        self.mean, self.square = np.zeros((2, nets.size), dtype=np.float32)
        self.squares: Floats = np.zeros(len(ends), dtype=np.float32)  # mean square of the layers' gradients
        self.batches = 0

    def work(self, job: Job) -> Prediction:
        """Learn, then score."""
        ranking = plain = float("nan")
        if job.lesson is not None:
            ranking, plain = self._learn(job.lesson)
        lo, scores = 0, np.empty(0, dtype=np.uint8)
        if job.slice is not None:
            lo, scores = job.slice.lo, self.score(job.slice)
        return Prediction(lo, scores, ranking, plain)

    def score(self, part: Slice) -> Bytes:
        """The scores of a slice."""
        n = len(part.rows) // (self.inputs + 1)
        out = np.empty(n, dtype=np.uint8)
        first, last = np.searchsorted(self.ends, (part.lo, part.lo + n - 1), side="right").tolist()
        ends = np.minimum(self.ends[first : last + 1], part.lo + n) - part.lo
        nets = self.nets if self.shared else self.nets.reshape(len(self.ends), -1)[first : last + 1].reshape(-1)
        rows, inverse, ends = self._seen(part.rows, ends, first)
        self.backend.predict(rows, nets, inverse, ends, self.inputs, out)
        return out

    def _seen(self, rows: Halves, ends: Ints, first: int = 0) -> tuple[Halves, Floats, Ints]:
        """Rows, the factors on them, and the ends of the layers from `first` on, as the kernels need them.

        A kernel has one net and one factor per layer. With features, or one net for all layers, the gradients are scaled
        before, and the factors are 1.
        """
        inverse = self._inverse()[first : first + len(ends)]
        if not self.shared and self.inputs == self.depth:
            return rows, inverse, ends
        table = rows.reshape(self.inputs + 1, -1).copy()
        with np.errstate(over="ignore"):
            units = widen(table[: self.depth], BF16) * np.repeat(inverse, np.diff(ends, prepend=0))
        table[: self.depth] = round_to(units, BF16)
        ends = ends[-1:] if self.shared else ends
        return table.reshape(-1), np.ones(len(ends), dtype=np.float32), ends

    def _learn(self, lesson: Lesson) -> tuple[float, float]:
        """Learn from random pairs; returns how many of them keys, and magnitudes, had ranked rightly before."""
        ends = np.searchsorted(lesson.index, self.ends)
        self._measure(lesson.rows, ends)
        pairs, weights = self._pairs(lesson)
        scores = np.empty(len(lesson.index), dtype=np.uint8)
        rows, inverse, ends = self._seen(lesson.rows, ends)
        self.backend.predict(rows, self.nets, inverse, ends, self.inputs, scores)
        ranking = _ranked(keys_of(lesson.magnitude, scores, self.key), pairs, weights)
        plain = _ranked(lesson.magnitude, pairs, weights)
        magnitude = lesson.magnitude if self.key == PRODUCTS else np.ones_like(lesson.magnitude)
        count = -(-len(weights) // BATCH)
        steps = self.batches + 1 + np.arange(count)
        corrections = np.stack([1 / (1 - 0.9**steps), 1 / (1 - 0.99**steps)], axis=1).astype(np.float32).reshape(-1)
        self.backend.learn(
            self.nets, self.mean, self.square, rows, inverse, ends, self.inputs, magnitude, pairs, weights, BATCH,
            self.rate, corrections,
        )  # fmt: skip
        self.batches += count
        return ranking, plain

    def _pairs(self, lesson: Lesson) -> tuple[Ints, Floats]:
        """Random pairs (better, worse), one behind the other, weighted by how much better; no equally good ones."""
        generator = np.random.default_rng([*self.seed, 1, lesson.number])
        n = len(lesson.index)
        drawn = generator.integers(0, n, (PAIRS, 2))
        if self.key == PRODUCTS:  # where magnitudes differ much, importance decides nothing
            order = np.argsort(lesson.magnitude, kind="stable")
            drawn[:, 1] = np.minimum(drawn[:, 0] + 1 + drawn[:, 1] % max(1, n // NEAR), n - 1)
            drawn = order[drawn]
        first, second = lesson.gain[drawn].T
        drawn[second > first] = drawn[second > first, ::-1]
        pairs: Ints = drawn[first != second].reshape(-1)
        better, worse = lesson.gain[pairs.reshape(-1, 2)].T.astype(np.float64)
        apart = better - worse
        weights = np.minimum(apart / max(apart.mean(), 1e-300), HEAVIEST) if len(apart) else apart
        return pairs, weights.astype(np.float32)

    def _measure(self, rows: Halves, ends: Ints) -> None:
        """Follow the layers' mean squares."""
        gradients = widen(rows.reshape(self.inputs + 1, -1)[: self.depth], BF16).astype(np.float64)
        sums = np.append(0.0, np.cumsum(np.square(gradients).sum(axis=0)))
        counts = np.diff(ends, prepend=0)
        means = np.diff(sums[ends], prepend=0.0) / np.maximum(1, counts * self.depth)
        blended = np.where(self.squares > 0, SMOOTHING * self.squares + (1 - SMOOTHING) * means, means)
        self.squares[:] = np.where(counts > 0, blended, self.squares)

    def _inverse(self) -> Floats:
        """One over the layers' root mean square; 0 where nothing is known."""
        with np.errstate(divide="ignore"):
            inverse: Floats = np.where(self.squares > 0, 1 / np.sqrt(self.squares), np.float32(0)).astype(np.float32)
        return inverse

    def state(self) -> dict[str, Any]:
        """What learning and scoring depend on."""
        arrays = {"nets": self.nets, "mean": self.mean, "square": self.square, "squares": self.squares}
        return {**arrays, "batches": self.batches}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the nets in the state are of these layers."""
        for name, own in self.state().items():
            given = np.asarray(state[name])
            if given.shape != np.shape(own) or not np.isfinite(given).all():
                raise ConfigurationError(f"the predictors' {name} in the state do not fit {len(self.ends)} layers")

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        for name in ("nets", "mean", "square", "squares"):
            getattr(self, name)[:] = state[name]
        self.batches = int(state["batches"])


def _ranked(keys: Floats, pairs: Ints, weights: Floats) -> float:
    """The weight of pairs (better, worse) whose keys are in that order; equal keys are half right."""
    better, worse = keys[pairs.reshape(-1, 2)].T
    right = (better > worse) + 0.5 * (better == worse)
    return float(np.average(right, weights=weights)) if weights.any() else float("nan")
