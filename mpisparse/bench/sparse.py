"""bench sparse-models: schemes on models that are sparse themselves, compared with exchanges tailored to each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpisparse.bench.tailored import Reduction, TailoredSync, by_mask, by_rows, by_use
from mpisparse.bench.train import Case, progress_to_stderr, train_case
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.table import save, show
from mpisparse.runtime.train import Trainer
from mpisparse.stopping import StopRequest

COLUMNS = {
    "model": "", "case": "", "density": ".4f", "density_error": ".4f", "received_MB": ".3f", "of_dense": ".4f",
    "train_loss": ".4f", "spread": ".4f", "validation_metric": ".4f", "test_loss": ".4f", "metric": ".4f",
    "ms_a_step": ".2f",
}  # fmt: skip


@dataclass(frozen=True)
class SparseWorkload:
    """A sparse model with its data, and the exchange tailored to it."""

    model: str
    tailored: str
    reduction: Reduction


HOME = "mpisparse.bench.sparse_models"
WORKLOADS = {
    "pruned": SparseWorkload(f"{HOME}:pruned=digits", "mask-aware", by_mask),
    "embeddings": SparseWorkload(f"{HOME}:embeddings=synthetic-ratings", "row-wise", by_rows),
    "experts": SparseWorkload(f"{HOME}:experts=digits", "per expert", by_use),
}


class TailoredTrainer(Trainer):
    """A Trainer with a tailored exchange."""

    def __init__(self, settings: Settings, stop: StopRequest, *, reduction: Reduction) -> None:
        self.reduction = reduction
        super().__init__(settings, stop)

    def make_sync(self) -> TailoredSync:
        return TailoredSync(self.model, self.reduction, timeout=self.settings.timeout)


def run(base: Settings, names: list[str], cases: list[str], seeds: int, *, as_json: bool) -> int:
    """Train every case on every workload, and print on rank 0; collective."""
    end_job_on_uncaught_exception()
    stop = StopRequest()
    records: list[dict[str, Any]] = []
    try:
        with progress_to_stderr(as_json):
            for name in names:
                work = WORKLOADS[name]
                for case in [*map(Case.parse, cases), Case(work.tailored, "dense", {})]:
                    kind = partial(TailoredTrainer, reduction=work.reduction) if case.text == work.tailored else Trainer
                    settings = replace(base, out=str(Path(base.out) / name))
                    code, record = train_case(settings, work.model, case, seeds, stop, kind)
                    if code:
                        return code
                    records.append({**record, "model": name})
    finally:
        stop.restore()
    if MPI.COMM_WORLD.rank == 0:
        show(records, COLUMNS, as_json=as_json)
        if not as_json:
            print(
                "density error: largest relative error from the third step on; the last case of each model is tailored to it"
            )
            print("density of a tailored exchange: the share of all elements that it covered")
        save("sparse-models", records, Path(base.out) / "records.jsonl")
    return 0
