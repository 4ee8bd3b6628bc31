"""Whole layers or single weights: which elements a rank updates and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpisparse.arrays import Doubles, Floats, Ints
from mpisparse.backends.flat import Slot
from mpisparse.select.candidates import Candidates
from mpisparse.select.pickers import layer_sums, values_of
from mpisparse.select.threshold import TINY

GRANULARITIES = {"fine": 1.0, "hybrid": 0.5, "coarse": 0.0}  # the share of layers of which single weights are taken
SAMPLE, LEAST, SLACK = 0.01, 4096, 1.3


@dataclass(frozen=True)
class Filtered:
    """What passed: ascending indices, the influence that single weights had to reach, and the layers taken whole."""

    index: Ints
    threshold: float
    fine: tuple[bool, ...]
    whole: tuple[str, ...]


class Filter:
    """Takes about k elements a step. Fine: the weights of the greatest influence. Coarse: whole layers, greatest mean first,
    until k elements are reached, and so at least one layer.

    A layer is a parameter. One of more than `largest` elements (None: 4 k) is never taken whole but filtered finely, because
    it would cost too much or wait too long. With a threshold, all that reaches it passes, whatever k is.
    """

    def __init__(
        self, slots: Sequence[Slot], backend: Any, *, largest: int | None, threshold: float | None, seed: int
    ) -> None:
        self.layers = [slot for slot in slots if slot.end > slot.begin]
        self.backend = backend
        self.largest = largest
        self.threshold = threshold
        self.seed = seed

    def run(self, scores: Any, k: int, share: float, step: int) -> Filtered:
        """Filter by magnitude with this share of the layers fine: 1 is fine-grained, 0 coarse, anything between a hybrid."""
        fine, means = self._levels(scores, k, share)
        singles = [layer for layer, is_fine in zip(self.layers, fine, strict=True) if is_fine]
        coarse = [layer for layer, is_fine in zip(self.layers, fine, strict=True) if not is_fine]
        n, count = (sum(layer.end - layer.begin for layer in group) for group in (self.layers, singles))
        whole = self._whole(means, coarse, k * (n - count) / n)
        index, threshold = self._singles(scores, singles, -(-k * count // n), step)
        if whole:
            index = np.sort(np.concatenate([index, *(np.arange(layer.begin, layer.end) for layer in whole)]))
        return Filtered(index, threshold, fine, tuple(layer.name for layer in whole))

    def _levels(self, scores: Any, k: int, share: float) -> tuple[tuple[bool, ...], dict[int, float]]:
        """Which layers are fine: first those with the most uneven influence, where choosing single weights pays most.

        Also the mean influence of layers that may be taken whole, by where they begin.
        """
        largest = 4 * k if self.largest is None else self.largest
        fine = [layer.end - layer.begin > largest for layer in self.layers]
        small = [i for i, is_fine in enumerate(fine) if not is_fine]
        count = round(share * len(small))
        if count == len(small):
            return (True,) * len(fine), {}
        means, spreads = self._measured(scores, [self.layers[i] for i in small])
        for place in np.argsort(-spreads, kind="stable")[:count].tolist():
            fine[small[place]] = True
        return tuple(fine), {self.layers[i].begin: mean for i, mean in zip(small, means.tolist(), strict=True)}

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def _measured(self, scores: Any, layers: list[Slot]) -> tuple[Doubles, Doubles]:
        """The layers' mean influence, and how unevenly it is spread: its standard deviation as a multiple of its mean."""
        sums = layer_sums(self.backend, scores, [(layer.begin, layer.end) for layer in layers])
        means, squares = sums.T / [layer.end - layer.begin for layer in layers]
        deviations = np.sqrt(np.maximum(squares - np.square(means), 0.0))
        return means, np.where(means > 0.0, deviations / means, 0.0)

    def _whole(self, means: dict[int, float], layers: list[Slot], budget: float) -> list[Slot]:
        """The layers to take whole."""
        if self.threshold is not None:
            return [layer for layer in layers if means[layer.begin] >= self.threshold]
        taken, left = [], budget
        for layer in sorted(layers, key=lambda layer: (-means[layer.begin], layer.begin)):
            if left <= 0.0 or means[layer.begin] <= 0.0:
                break
            left -= layer.end - layer.begin
            taken.append(layer)
        return taken

    def _singles(self, scores: Any, layers: list[Slot], k: int, step: int) -> tuple[Ints, float]:
        """Index of the k weights of the greatest influence in some layers, by a sample if they are many."""
        if not layers:
            return np.empty(0, dtype=np.int64), 0.0
        stretches = _joined(layers)
        threshold = self.threshold if self.threshold is not None else self._sampled(scores, stretches, k, step)
        index, magnitude = self._reaching(scores, stretches, max(threshold, TINY))
        if self.threshold is None and len(index) > SLACK * k:
            largest = np.sort(np.argpartition(magnitude, len(magnitude) - k)[len(magnitude) - k :])
            index, threshold = index[largest], float(magnitude[largest].min())
        return index, float(threshold)

    def _reaching(self, scores: Any, stretches: list[tuple[int, int]], threshold: float) -> tuple[Ints, Floats]:
        """Indices and magnitudes that reach the threshold in some stretches; on the host."""
        one = isinstance(scores, np.ndarray)  # each of them alone: for a device that would be as many waits
        spans = stretches if one else [(stretches[0][0], stretches[-1][1])]
        found = [Candidates(*self.backend.select(scores, lo, hi, threshold)).on_host(self.backend) for lo, hi in spans]
        index, magnitude = (np.concatenate([each[i] for each in found]) for i in (0, 1))
        if len(spans) < len(stretches):
            inside = np.searchsorted(np.ravel(stretches), index, side="right") % 2 == 1
            index, magnitude = index[inside], magnitude[inside]
        return index, magnitude

    def _sampled(self, scores: Any, stretches: list[tuple[int, int]], k: int, step: int) -> float:
        lengths = np.array([hi - lo for lo, hi in stretches])
        n = int(lengths.sum())
        count = min(n, max(LEAST, int(SAMPLE * n)))
        places = np.arange(n)
        if count < n:
            places = np.random.Generator(np.random.Philox(key=[self.seed, step])).integers(0, n, count)
        starts = np.cumsum([0, *lengths[:-1]])
        part = np.searchsorted(starts, places, side="right") - 1
        sample = np.abs(values_of(self.backend, scores, places - starts[part] + np.array([lo for lo, _ in stretches])[part]))
        wanted = min(count, max(1, round(k * count / n)))
        return float(np.partition(sample, count - wanted)[count - wanted])


def _joined(layers: list[Slot]) -> list[tuple[int, int]]:
    """Layers as stretches, with neighbours merged."""
    stretches: list[tuple[int, int]] = []
    for layer in layers:
        if stretches and stretches[-1][1] == layer.begin:
            stretches[-1] = stretches[-1][0], layer.end
        else:
            stretches.append((layer.begin, layer.end))
    return stretches
