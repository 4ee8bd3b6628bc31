"""bench ablation: scheme exdyna with one part removed or changed at a time, on the same gradients.

Every group of variants includes the unchanged scheme; the steps of a group are interleaved. With --train every variant
also trains a model.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

import mpisparse
from mpisparse.bench.given import GivenModel
from mpisparse.bench.sync import open_source
from mpisparse.bench.train import FIRST, Case, progress_to_stderr, train_case
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.core.records import Stats
from mpisparse.plan.synthetic import Source
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.table import save, show
from mpisparse.stopping import StopRequest

COLUMNS = {
    "group": "", "case": "", "density": ".6f", "density_error": ".4f", "worst_error": ".4f", "imbalance": ".3f",
    "received_MB": ".4f", "bytes_per_element": ".2f", "ms": ".2f", "of_whole": ".2f", "train_loss": ".4f",
    "test_loss": ".4f", "metric": ".4f",
}  # fmt: skip
BLOCKS = (64, 256, 1024, 4096, 16384, 65536)
WHOLE = "exdyna"
GROUPS: dict[str, list[str]] = {
    "partitions": [
        WHOLE, "exdyna:partitioner=paper", "exdyna:partitioner=static", "exdyna:accumulate=backward",
        "exdyna:partitioner=paper,accumulate=backward", "exdyna:partitioner=static,accumulate=backward",
    ],
    "threshold": [WHOLE, "exdyna:controller=paper", "exdyna:controller=fixed"],
    "blocks": [WHOLE, *(f"exdyna:blocks={count}" for count in BLOCKS)],
    "feedback": [WHOLE, "exdyna:compensate=false"],
    "codecs": [WHOLE, "exdyna:codec=fp16", "exdyna:codec=bf16", "exdyna:codec=int8"],
}  # fmt: skip


@dataclass(frozen=True)
class AblationPlan:
    """Which groups to measure on which gradients, and how to train each variant, if at all."""

    groups: list[str]
    elements: int
    density: float
    steps: int
    gradients: Path | None = None
    model: str | None = None
    training: Settings | None = None
    seeds: int = 1
    as_json: bool = False
    out: Path | None = None


def run(plan: AblationPlan) -> int:
    """Measure every group and print on rank 0; collective."""
    end_job_on_uncaught_exception()
    comm = MPI.COMM_WORLD
    source = open_source(comm, plan.gradients, plan.elements)
    records = [record for group in plan.groups for record in _measure(comm, plan, source, group)]
    if plan.model is not None and plan.training is not None:
        with progress_to_stderr(plan.as_json):
            code = _train(plan, plan.model, plan.training, records)
        if code:
            return code
    if comm.rank == 0:
        elements = sum(source.sizes)
        for record in records:
            record.update(elements=elements, ranks=comm.size, set_density=plan.density, steps=plan.steps)
        if not plan.as_json:
            print(f"{elements:,} float32, {comm.size} ranks, density {plan.density:g}, {plan.steps} steps")
        shown = {key: form for key, form in COLUMNS.items() if any(key in record for record in records)}
        show(records, shown, as_json=plan.as_json)
        if not plan.as_json:
            print("density errors are relative, mean and worst, from the third step on; steps of a group are interleaved")
        save("ablation", records, plan.out)
    return 0


def _measure(comm: MPI.Intracomm, plan: AblationPlan, source: Source, group: str) -> list[dict[str, Any]]:
    """Run the variants of a group, one step of each per round."""
    model = GivenModel.of(source, comm.rank)
    variants = [_Variant(model, case, plan.density) for case in GROUPS[group]]
    for _ in range(plan.steps):
        for variant in variants:
            variant.step(comm)
    whole = variants[0].seconds[FIRST:]
    records = []
    for variant in variants:
        ratios = [ours / seconds for ours, seconds in zip(whole, variant.seconds[FIRST:], strict=True)]
        records.append({"group": group, "case": variant.case, **variant.record(), "of_whole": 1 / statistics.median(ratios)})
        variant.sync.close()
    return records


class _Variant:
    """One variant, with its own parameters and the common gradients."""

    def __init__(self, source: GivenModel, case: str, density: float) -> None:
        self.case = case
        self.model = source.twin()
        self.sync = mpisparse.GradientSync(self.model, density=density, **Case.parse(case).values)
        self.seconds: list[float] = []
        self.notes: list[Stats] = []

    def step(self, comm: MPI.Intracomm) -> None:
        self.model.zero_grad()
        self.model.backward()
        held = [p.grad for p in self.model.layers]
        comm.Barrier()
        start = time.perf_counter()
        self.sync.step()
        self.seconds.append(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))
        self.notes.append(self.sync.stats)
        held.clear()

    def record(self) -> dict[str, Any]:
        """Summarize the steps from the third on."""
        notes = self.notes[FIRST:]
        errors = [abs(s.build_up - 1) for s in notes]
        selected = statistics.mean(s.selected for s in notes)
        received = statistics.mean(s.bytes_received for s in notes)
        return {
            "density": statistics.mean(s.density for s in notes),
            "density_error": statistics.mean(errors),
            "worst_error": max(errors),
            "imbalance": statistics.mean(s.imbalance for s in notes),
            "received_MB": received / 1e6,
            "bytes_per_element": received / selected,
            "ms": 1e3 * statistics.median(self.seconds[FIRST:]),
            "density_by_step": [s.density for s in self.notes],
            "imbalance_by_step": [s.imbalance for s in self.notes],
        }


def _train(plan: AblationPlan, model: str, settings: Settings, records: list[dict[str, Any]]) -> int:
    """Train every variant once and add the results to its records; returns the exit code."""
    stop = StopRequest()
    trained: dict[str, dict[str, Any]] = {}
    try:
        for record in records:
            case = record["case"]
            if case not in trained:
                own = Case.parse(case + ("," if ":" in case else ":") + f"density={plan.density}")
                code, trained[case] = train_case(settings, model, own, plan.seeds, stop)
                if code:
                    return code
            record.update({key: trained[case][key] for key in ("train_loss", "test_loss", "metric", "spread")})
            record.update(model=model, trained_density=trained[case]["density"])
    finally:
        stop.restore()
    return 0
