"""Real runs equal the NumPy oracle bit for bit after every step: any rank count, codec, path, setting and backend."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from oracle import Oracle, Result, Settings
from torch import nn

import mpisparse
from mpisparse.backends.device import load_backend
from mpisparse.model import construction

pytestmark = pytest.mark.mpi

STEPS = 8
BOOST = (1.0, 1.1, 0.9, 1.0, 40.0, 0.02, 0.0, 1.0)  # gradients grow and vanish: control must search anew
LAYERS = ((10, 30, 0.02), (1, 30, 1.0), (60, 100, 0.3), (1, 1, 5.0), (37, 41, 0.001), (90, 100, 0.05), (1, 0, 1.0))
TYPES = ("float32", "float16", "bfloat16", "float64", "float32", "bfloat16", "float32")
PAPER = Settings(controller="paper", partitioner="paper")

Layers = tuple[tuple[int, int, float], ...]
Gradients = list[torch.Tensor | None]

both_backends = pytest.mark.parametrize("backend", ["native", "numpy"])
both_paths = pytest.mark.parametrize("accumulate", ["step", "backward"])
best_and_paper = pytest.mark.parametrize("settings", [Settings(), PAPER], ids=["best", "paper"])


@dataclass(frozen=True)
class Problem:
    """Gradients by seed: heavy-tailed, of another scale in every layer (rows, columns, scale) and on every rank.

    types: of the parameters, None for float32. even: all ranks and all steps have the same scale. tied: all magnitudes equal
    one. absent: some layers lack a gradient on some ranks. densities: for each step, empty for the density of the settings.
    """

    layers: Layers = LAYERS
    types: tuple[str, ...] | None = None
    tied: bool = False
    absent: bool = False
    even: bool = False
    densities: tuple[float, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.types or ("float32",) * len(self.layers)

    @property
    def ends(self) -> list[int]:
        return [int(end) for end in np.cumsum([rows * columns for rows, columns, _ in self.layers])]

    def density(self, step: int, settings: Settings) -> float:
        return self.densities[step] if self.densities else settings.density

    def model(self) -> nn.Module:
        layers = zip(self.layers, self.kinds, strict=True)
        return nn.ParameterList(
            torch.zeros(rows, columns, dtype=getattr(torch, kind)) for (rows, columns, _), kind in layers
        )


@functools.cache
def make_gradients(problem: Problem, rank: int, step: int) -> Gradients:
    """Return a rank's gradients at a step, in the parameters' types."""
    draw = np.random.default_rng([rank, step])
    gradients: Gradients = []
    for i, ((rows, columns, scale), kind) in enumerate(zip(problem.layers, problem.kinds, strict=True)):
        values = draw.standard_t(2.5, (rows, columns)) * scale * (1 if problem.even else BOOST[step] * (1 + rank))
        values = np.sign(values) if problem.tied else values
        absent = problem.absent and (i + rank // 2 + step) % 3 == 0
        gradients.append(None if absent else torch.from_numpy(values).to(getattr(torch, kind)))
    return gradients


def flatten(problem: Problem, tensors: Iterable[torch.Tensor | None]) -> NDArray[np.float32]:
    """One float32 vector, zero where a layer has no tensor."""
    shapes = [(rows, columns) for rows, columns, _ in problem.layers]
    parts = [torch.zeros(shape) if t is None else t for t, shape in zip(tensors, shapes, strict=True)]
    return torch.cat([part.detach().reshape(-1).float() for part in parts]).numpy()


@functools.lru_cache(maxsize=1)
def oracle_steps(problem: Problem, settings: Settings, size: int) -> list[Result]:
    """Return the oracle's steps, cached for the other backends."""
    oracle = Oracle(problem.ends[-1], size, settings, list(zip(problem.ends, problem.kinds, strict=True)))
    results = []
    for step in range(STEPS):
        oracle.density = problem.density(step, settings)
        results.append(oracle.step([flatten(problem, make_gradients(problem, rank, step)) for rank in range(size)]))
    return results


def differences(sync: mpisparse.GradientSync, published: NDArray[np.float32], expected: Result) -> list[str]:
    """Return where this rank differs from the oracle."""
    alike = {
        "published": published.tobytes() == expected.published.tobytes(),
        "residual": sync.residual.numpy().tobytes() == expected.residuals[sync.rank].tobytes(),
        "threshold": sync.stats.threshold == expected.threshold,
        "workloads": sync.stats.workloads == expected.workloads,
        "borders": sync.stats.borders == expected.borders,
    }
    return [name for name, same in alike.items() if not same]


class Check:
    """Runs a problem and compares it with the oracle."""

    def __init__(self, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.comm = comm
        self.monkeypatch = monkeypatch

    def __call__(self, backend: str, problem: Problem, settings: Settings) -> None:
        """Assert after all steps: a rank that left early would make the others wait."""
        self.monkeypatch.setattr(construction, "load_backend", functools.partial(load_backend, backend))
        expected = oracle_steps(problem, settings, self.comm.size)
        model = problem.model()
        params = list(model.parameters())
        sync = mpisparse.GradientSync(model, **dataclasses.asdict(settings))
        wrong = []
        for step in range(STEPS):
            sync.density = problem.density(step, settings)
            model.zero_grad(set_to_none=step % 2 == 0)  # else backward adds into the published buffer itself
            gradients = make_gradients(problem, self.comm.rank, step)
            given = [(p, g.clone()) for p, g in zip(params, gradients, strict=True) if g is not None]
            torch.autograd.backward([p for p, _ in given], [g for _, g in given])
            sync.step()
            published = flatten(problem, (p.grad for p in params))
            wrong += [(step, name) for name in differences(sync, published, expected[step])]
        used = sync._backend.name
        sync.close()
        assert used == backend
        assert not wrong, f"r{self.comm.rank} | differs from the oracle at (step, what): {wrong}"


@pytest.fixture
def check(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Check:
    return Check(comm, monkeypatch)


@both_backends
@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
@both_paths
@best_and_paper
@pytest.mark.pairs
def test_codecs(check: Check, backend: str, settings: Settings, accumulate: str, codec: str, density: float) -> None:
    check(backend, Problem(), dataclasses.replace(settings, density=density, codec=codec, accumulate=accumulate))


@both_backends
@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("codec", ["int4", "int2", "sign"])
@pytest.mark.pairs
def test_codecs_of_few_bits(check: Check, backend: str, codec: str, density: float) -> None:
    check(backend, Problem(), Settings(density=density, codec=codec))


@pytest.mark.parametrize("density", [0.0001, 0.005, 0.02, 0.3, 0.7, 0.999])
@both_paths
@pytest.mark.singles
def test_densities(check: Check, accumulate: str, density: float) -> None:
    check("native", Problem(), Settings(density=density, codec="int8", accumulate=accumulate))


@pytest.mark.parametrize("partitioner", ["paper", "best"])
def test_an_empty_selection_sends_one_index(check: Check, partitioner: str) -> None:
    """With the published threshold, which small gradients never reach: one element per partition that is not empty."""
    problem = Problem(layers=((100, 30, 1e-7), (37, 41, 1e-6)))
    settings = Settings(controller="paper", partitioner=partitioner, density=0.01)
    steps = oracle_steps(problem, settings, check.comm.size)
    for result in steps:
        filled = [hi > lo for lo, hi in itertools.pairwise(result.borders)]
        assert result.workloads == tuple(map(int, filled))
        assert 1 <= sum(result.workloads) <= check.comm.size
    check("native", problem, settings)


@both_paths
@pytest.mark.parametrize(("controller", "partitioner"), [("tail", "paper"), ("paper", "best")])
@pytest.mark.parametrize("blocks", [None, 7])
@pytest.mark.pairs
def test_mixed_settings(check: Check, accumulate: str, controller: str, partitioner: str, blocks: int | None) -> None:
    check("native", Problem(), Settings(0.02, "fp16", accumulate, controller, partitioner, blocks))


@both_backends
@both_paths
@pytest.mark.parametrize(
    "problem",
    [
        Problem(types=TYPES),
        Problem(tied=True),
        Problem(absent=True),
        Problem(densities=(0.2, 0.1, 0.05, 0.02, 0.01, 1.0, 0.001, 0.001)),
    ],
    ids=["types", "tied", "absent", "warm-up"],
)
@pytest.mark.pairs
def test_problems(check: Check, backend: str, accumulate: str, problem: Problem) -> None:
    check(backend, problem, Settings(0.03, "int8", accumulate))


@both_backends
@both_paths
@pytest.mark.parametrize("density", [0.02, 0.2, 1.0])
@pytest.mark.pairs
def test_borders_that_stay(check: Check, backend: str, accumulate: str, density: float) -> None:
    """Ranks that select alike: the borders of the last step balance this one."""
    problem, settings = Problem(layers=((100, 300, 1.0),), even=True), Settings(density, "int8", accumulate)
    borders = [result.borders for result in oracle_steps(problem, settings, check.comm.size)]
    assert len(set(borders)) < len(borders)
    check(backend, problem, settings)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 33])
@both_paths
@best_and_paper
@pytest.mark.pairs
def test_few_elements(check: Check, settings: Settings, accumulate: str, count: int) -> None:
    check("native", Problem(((1, count, 1.0),)), dataclasses.replace(settings, density=0.4, accumulate=accumulate))


@both_backends
@both_paths
@pytest.mark.singles
def test_regions_longer_than_a_row_of_indices(check: Check, backend: str, accumulate: str) -> None:
    check(backend, Problem(((300, 301, 0.1), (1, 77, 3.0), (500, 401, 0.2))), Settings(0.01, "bf16", accumulate))
