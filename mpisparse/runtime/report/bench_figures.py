"""The pictures of each benchmark's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BenchRecord = dict[str, Any]
Name = Callable[[BenchRecord], str]
Filter = Callable[[BenchRecord], bool]


def everything(record: BenchRecord) -> bool:
    """Accept every record."""
    return True


@dataclass(frozen=True)
class Plot:
    """Lines of a value: against the number of ranks or, if it is a list with a value per step, against steps."""

    title: str
    note: str
    y: str
    kind: str
    name: Name
    only: Filter = everything
    by_ranks: bool = False
    log: bool | None = None
    steps: str = ""  # the record's list of the steps of the values, if they are not all steps


@dataclass(frozen=True)
class Bars:
    """A bar per record."""

    title: str
    note: str
    y: str
    kind: str
    name: Name
    only: Filter = everything


@dataclass(frozen=True)
class Scatter:
    """A named dot per record, against a value on a log scale, and the line of those that no other record beats.

    levels: records to draw as horizontal lines, too, as they may have no place on the log scale.
    """

    title: str
    note: str
    x: str
    y: str
    along: str
    name: Name
    levels: tuple[str, ...] = ()
    only: Filter = everything


def _what(record: BenchRecord) -> str:
    return str(record["what"])


def _on_ranks(record: BenchRecord) -> str:
    return f"{record['what']}, {record['ranks']} ranks"


def _scheme(record: BenchRecord) -> str:
    return f"{record['scheme']}, {record['how']}"


def _case(record: BenchRecord) -> str:
    name = str(record["case"]).removeprefix("exdyna:")
    return "whole" if name == "exdyna" else name


def _grouped(record: BenchRecord) -> str:
    return f"{record['group']}: {_case(record)}"


def _trained(record: BenchRecord) -> str:
    return f"{record['model']}: {record['case']}"


def _of(group: str) -> Filter:
    return lambda record: bool(record["group"] == group)


def _exclusive(record: BenchRecord) -> bool:
    return str(record["scheme"]).startswith("exdyna")


RECEIVED = "received per rank and step"
LAST = "mean of the last tenth of the steps"

FIGURES: dict[str, tuple[Plot | Bars | Scatter, ...]] = {
    "sync": (
        Bars("Time of a step", "median", "ms", "ms", _on_ranks),
        Bars("Against dense", "times as fast as MPI Allreduce", "times_faster", "number", _on_ranks),
        Bars("Build-up", "actual over set density", "build_up", "number", _on_ranks),
    ),
    "scaling": (
        Plot("Build-up", "actual over set density", "build_up", "number", _scheme, by_ranks=True),
        Plot("Bytes of a step", "received by the busiest rank", "received_MB", "MB", _scheme, by_ranks=True),
        Plot("Imbalance", "busiest over mean, minus one", "imbalance", "number", _scheme, _exclusive, by_ranks=True),
        Plot("Time of a step, measured", "ranks share this machine's cores", "ms", "ms", _scheme, by_ranks=True),
        Plot("Time of a step, modelled", "from measurements of this machine", "modelled_ms", "ms", _scheme, by_ranks=True),
    ),
    "ablation": (
        Plot("Density by threshold", "of each step", "density_by_step", "number", _case, _of("threshold"), log=True),
        Plot("Imbalance by partitions", "of each step", "imbalance_by_step", "percent", _case, _of("partitions")),
        Bars("Bytes by number of blocks", RECEIVED, "received_MB", "MB", _case, _of("blocks")),
        Bars("Imbalance by number of blocks", "mean", "imbalance", "percent", _case, _of("blocks")),
        Bars("Bytes by codec", RECEIVED, "received_MB", "MB", _case, _of("codecs")),
        Bars("Time of a step", "relative to the unchanged scheme", "of_whole", "number", _grouped),
        Bars("Training loss", LAST, "train_loss", "number", _grouped),
    ),
    "sparse-models": (
        Bars("Bytes", "received per rank, relative to dense", "of_dense", "number", _trained),
        Bars("Training loss", LAST, "train_loss", "number", _trained),
        Bars("Metric", "on the test data", "metric", "number", _trained),
    ),
    "train": (
        Bars("Training loss", LAST, "train_loss", "number", _trained),
        Bars("Metric", "on the test data", "metric", "number", _trained),
        Bars("Bytes", "received per rank", "received_MB", "MB", _trained),
        Bars("Density", "share of elements selected", "density", "number", _trained),
    ),
    "converge": (
        Scatter(
            "Frontier",
            "test loss at each case's best learning rate",
            "bytes",
            "test",
            "bytes received per parameter and step",
            lambda record: str(record["case"]),
            ("alone", "dense"),
        ),
        Plot(
            "Validation loss",
            "at each case's best learning rate",
            "validation_by_step",
            "number",
            lambda record: str(record["case"]),
            steps="evaluated_by_step",
        ),
        Bars(
            "Captured",
            "share of what dense gains over one worker alone",
            "captured",
            "number",
            lambda record: str(record["case"]),
            lambda record: record["case"] not in ("alone", "dense"),
        ),
    ),
    "ddp": (
        Bars("Time of a training step", "median", "ms", "ms", _what),
        Bars("Steps per second", "relative to DDP", "times_ddp", "number", _what),
        Bars(
            "Overlapped steps",
            "relative to max(computation, exchange) + the last bucket",
            "of_bound",
            "number",
            _what,
            lambda record: "of_bound" in record,
        ),
        Plot("Training loss", "mean over ranks", "loss_by_step", "number", _what),
    ),
}
