"""What bench converge is to do: a workload, cases, learning rates and seeds; and which runs are still to be done."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisparse.bench.converge.cases import ALONE, Case
from mpisparse.bench.converge.rates import Grid, best_rate
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.settings import Settings

UNUSED = (
    "epochs", "accumulation", "bf16", "device", "scheme", "density", "density_from", "density_warmup", "codec", "options",
    "eval_every", "target",
)  # fmt: skip # settings of a file that the bench would ignore, or that are a case's own
FREE = ("lr", "seed", "out", "imports")  # settings in which results of one directory may differ

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training: a case at one learning rate with one seed."""

    settings: Settings
    case: Case
    workers: int
    eval_examples: int

    @property
    def key(self) -> tuple[str, float, int]:
        return self.case.name, self.settings.lr, self.settings.seed

    def __str__(self) -> str:
        return f"{self.case.name}, lr {self.settings.lr:g}, seed {self.settings.seed}"


@dataclass(frozen=True)
class ConvergePlan:
    """Cases x learning rates x seeds on a workload.

    tuning_seeds: how many of the seeds pick the learning rate; the others are run only at the rate that was picked.
    give_up: leave further seeds of a rate out once its validation loss is worse than the best by this share; 0 never does.
    stability: run all seeds at the rates that the grid begins with, and at no others.
    """

    settings: Settings
    cases: list[Case]
    grid: Grid
    out: Path
    seeds: int = 3
    tuning_seeds: int = 3
    workers: int = 4
    eval_examples: int = 1024
    jobs: int = 1
    give_up: float = 0.0
    stability: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.give_up < math.inf:
            raise ConfigurationError(f"--give-up must be a share of at least 0, got {self.give_up:g}; 0 never gives up")
        if not self.settings.lr > 0.0:
            raise ConfigurationError(f"--lr must be above 0, got {self.settings.lr:g}: its neighbours are multiples of it")
        usual = Settings(scheme=self.settings.default_scheme())
        unused = [name for name in UNUSED if getattr(self.settings, name) != getattr(usual, name)]
        if unused:
            raise ConfigurationError(
                f"bench converge does not support the settings {', '.join(unused)}; remove them from its file. It counts in "
                "--steps, and each case has its own options"
            )

    def common(self) -> dict[str, Any]:
        """Return what all results in a directory must have in common, as plain values."""
        values = {name: value for name, value in dataclasses.asdict(self.settings).items() if name not in FREE}
        return {**values, "workers": self.workers, "eval_examples": self.eval_examples}

    def run(self, case: Case, rate: float, seed: int) -> Run:
        """Return one of the runs; `seed` counts from 0."""
        settings = dataclasses.replace(self.settings, lr=rate, seed=self.settings.seed + seed)
        return Run(settings, case, 1 if case.name == ALONE else self.workers, self.eval_examples)

    def missing(self, done: Mapping[tuple[str, float, int], Record]) -> list[Run]:
        """Return the runs that can be done now: further rates may be wanted when these are."""
        if self.stability:
            every = itertools.product(self.cases, self.grid.start(), range(self.seeds))
            return [run for one in every if (run := self.run(*one)).key not in done]
        return [run for case in self.cases for run in self._missing(case, done)]

    def _missing(self, case: Case, done: Mapping[tuple[str, float, int], Record]) -> Iterator[Run]:
        scores = self.scores(case, done)
        rates = self.grid.wanted(scores, case.rates)
        by_seed = zip(*(self._tuning(case, rate) for rate in rates), strict=True)
        first = [run for run in next(by_seed, ()) if run.key not in done]
        yield from first or sorted(
            (run for runs in by_seed for run in runs if run.key not in done),
            key=lambda run: done[self.run(case, run.settings.lr, 0).key].get("validation", math.inf),
        )  # the most promising rates first: others may be given up
        best = best_rate(scores)
        if not rates and best is not None:
            runs = (self.run(case, best, seed) for seed in range(self.seeds))
            yield from (run for run in runs if run.key not in done)

    def _tuning(self, case: Case, rate: float) -> list[Run]:
        return [self.run(case, rate, seed) for seed in range(min(self.tuning_seeds, self.seeds))]

    def scores(self, case: Case, done: Mapping[tuple[str, float, int], Record]) -> dict[float, float]:
        """Return the mean validation loss of every learning rate that is decided; infinite if one seed diverged.

        A rate that was given up has the mean of the seeds that were run.
        """
        scores, begun = dict[float, float](), dict[float, float]()
        for rate in sorted({rate for name, rate, _ in done if name == case.name}):
            records = [done.get(run.key) for run in self._tuning(case, rate)]
            losses = [math.inf if record["diverged"] else record["validation"] for record in records if record is not None]
            if math.inf in losses:
                scores[rate] = math.inf
            elif losses:
                (scores if len(losses) == len(records) else begun)[rate] = statistics.fmean(losses)
        least = min(scores.values(), default=math.inf)
        given_up = {rate: loss for rate, loss in begun.items() if self.give_up and loss > least * (1 + self.give_up)}
        return scores | given_up
