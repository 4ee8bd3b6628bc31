"""bench train: compares schemes in real training, with the same seeds and batches: loss against bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.flags import parse_options
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.settings_file import to_toml
from mpisparse.runtime.table import save, show
from mpisparse.runtime.train import Trainer
from mpisparse.stopping import StopRequest

COLUMNS = {
    "model": "", "case": "", "ranks": "d", "seeds": "d", "train_loss": ".4f", "spread": ".4f", "validation_metric": ".4f",
    "test_loss": ".4f", "metric": ".4f", "received_MB": ".2f", "of_dense": ".4f", "density": ".4f", "sent_density": ".4f",
    "build_up": ".2f", "imbalance": ".2f", "ms_a_step": ".1f", "compute_ms": ".1f",
}  # fmt: skip
TrainerKind = Callable[[Settings, StopRequest], Trainer]
FIRST = 2  # statistics of density start at this step: the first ones find the threshold
SETTINGS = ("density", "codec")  # values of a case that are settings; the others are options of the scheme


@dataclasses.dataclass(frozen=True)
class Case:
    """A scheme with its options, as `SCHEME:NAME=VALUE,NAME=VALUE`."""

    text: str
    scheme: str
    values: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Case:
        scheme, _, rest = text.partition(":")
        return cls(text, scheme, parse_options(rest.split(",")) if rest else {})

    def settings(self, base: Settings, model: str, data: str | None, seed: int, out: Path) -> Settings:
        """Return the settings of one run of this case."""
        own = {name: self.values[name] for name in SETTINGS if name in self.values}
        options = {name: value for name, value in self.values.items() if name not in SETTINGS}
        return dataclasses.replace(
            base, model=model, data=data, seed=seed, out=str(out), scheme=self.scheme, options=options, **own
        )


def run(base: Settings, models: list[str], cases: list[str], seeds: int, *, as_json: bool) -> int:
    """Train every case on every model (NAME or NAME=DATA) with every seed, and print on rank 0; collective."""
    end_job_on_uncaught_exception()
    comm = MPI.COMM_WORLD
    stop = StopRequest()
    parsed = [Case.parse(text) for text in cases]
    records = []
    try:
        with progress_to_stderr(as_json):
            for model in models:
                for case in parsed:
                    code, record = train_case(base, model, case, seeds, stop)
                    if code:
                        return code
                    records.append(record)
    finally:
        stop.restore()
    if comm.rank == 0:
        show(records, COLUMNS, as_json=as_json)
        save("train", records, Path(base.out) / "records.jsonl")
        if not as_json:
            print("choose by the validation metric; test loss and metric are of the end, on data used for nothing else")
            print(f"train loss: mean of the last tenth of the steps; spread: largest minus smallest of {seeds} seeds")
            print(f"pages with all curves: mpisparse report {base.out}/*/")
    return 0


def progress_to_stderr(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """Redirect progress to standard error if standard output is for JSON records."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def train_case(
    base: Settings,
    model: str,
    case: Case,
    seeds: int,
    stop: StopRequest,
    kind: Callable[[Settings, StopRequest], Trainer] = Trainer,
) -> tuple[int, dict[str, Any]]:
    """Train a case with every seed; returns the exit code and the results, averaged over seeds. Collective."""
    comm = MPI.COMM_WORLD
    name, _, data = model.partition("=")
    runs = []
    for seed in range(base.seed, base.seed + seeds):
        out = Path(base.out) / f"{_label(model)}-{_label(case.text)}-{comm.size}-ranks-seed-{seed}"
        settings = case.settings(base, name, data or None, seed, out)
        _check_directory(comm, settings)
        code, result = _train(kind(settings, stop))
        if code:
            return code, {}
        runs.append(result)
    return 0, {"model": model, "case": case.text, "ranks": comm.size, **_summary(runs)}


def _label(text: str) -> str:
    """Make a text fit for a directory's name."""
    return "".join(c if c.isalnum() else "-" for c in text)


def _check_directory(comm: MPI.Intracomm, settings: Settings) -> None:
    """Raise on all ranks if the directory holds a run with other settings, which must not be mistaken for this one."""
    config = Path(settings.out) / "config.toml"
    other = comm.bcast(config.exists() and config.read_text(encoding="utf-8") != to_toml(settings))
    if other:
        error = ConfigurationError(f"{settings.out} holds a run with other settings; choose another --out, or remove it")
        error.repeated = comm.rank != 0
        raise error


def _train(trainer: Trainer) -> tuple[int, dict[str, Any]]:
    """Train or resume; returns the exit code and the results of rank 0, the same on all ranks. Collective."""
    try:
        code = trainer.train()
    finally:
        trainer.close()
    result = _result(trainer) if trainer.sync.rank == 0 else {}
    result = MPI.COMM_WORLD.bcast(result)
    trainer.sync.close()
    return code, result


def _result(trainer: Trainer) -> dict[str, Any]:
    """Summarize a finished run from its metrics; of a step repeated after a stop, the last record counts."""
    lines = [json.loads(line) for line in (trainer.out / "metrics.jsonl").read_text().splitlines()]
    steps = list({line["step"]: line for line in lines if line["kind"] == "step"}.values())
    last = steps[-max(1, len(steps) // 10) :]
    evals = {line.get("data", "test"): line for line in lines if line["kind"] == "eval"}  # the last of each
    validation = {
        f"validation_{key}": _number(evals["validation"][key]) for key in ("loss", "metric") if "validation" in evals
    }
    times = [line["seconds"] for line in steps]
    phases = dict.fromkeys(phase for each in times for phase in each)
    return {
        "train_loss": statistics.mean(_number(line["loss"]["mean"]) for line in last),
        **validation,
        "test_loss": _number(evals["test"]["loss"]),
        "metric": _number(evals["test"]["metric"]),
        "received_MB": trainer.state.received / 1e6,
        "of_dense": trainer.state.received / max(1.0, trainer.state.dense),
        "density": statistics.mean(line["density"] for line in steps),
        "build_up": statistics.mean(line["density"] / line["set_density"] for line in steps[FIRST:] or steps),
        "imbalance": statistics.mean(line["imbalance"] for line in steps[FIRST:] or steps),
        "density_error": max((abs(line["density"] / line["set_density"] - 1) for line in steps[FIRST:]), default=0.0),
        "sent_density": statistics.mean(line["sent_density"] for line in steps),
        "ms_a_step": 1e3 * trainer.state.seconds / trainer.state.step,
        **{f"{phase}_ms": 1e3 * statistics.median(t.get(phase, {"mean": 0.0})["mean"] for t in times) for phase in phases},
    }


def _number(value: float | None) -> float:
    """Read a number of the metrics, where null stands for a non-finite one."""
    return math.nan if value is None else value


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Average over the seeds."""
    means = {key: statistics.mean(run.get(key, 0.0) for run in runs) for key in runs[0]}
    losses = [run["train_loss"] for run in runs]
    return {"seeds": len(runs), **means, "spread": max(losses) - min(losses)}
