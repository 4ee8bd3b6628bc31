"""Which pictures are made of the records of each benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Name = Callable[[Record], str]
Filter = Callable[[Record], bool]


def everything(record: Record) -> bool:
    """Draw every record."""
    return True


@dataclass(frozen=True)
class Plot:
    """Lines of a value: against the number of ranks, or, where it is a list with a value for each step, against steps."""

    title: str
    note: str
    y: str
    kind: str
    name: Name
    only: Filter = everything
    by_ranks: bool = False
    log: bool | None = None


@dataclass(frozen=True)
class Bars:
    """A bar for each record."""

    title: str
    note: str
    y: str
    kind: str
    name: Name
    only: Filter = everything


def _what(record: Record) -> str:
    return str(record["what"])


def _on_ranks(record: Record) -> str:
    return f"{record['what']}, {record['ranks']} ranks"


def _scheme(record: Record) -> str:
    return f"{record['scheme']}, {record['how']}"


def _case(record: Record) -> str:
    name = str(record["case"]).removeprefix("exdyna:")
    return "whole" if name == "exdyna" else name


def _grouped(record: Record) -> str:
    return f"{record['group']}: {_case(record)}"


def _trained(record: Record) -> str:
    return f"{record['model']}: {record['case']}"


def _of(group: str) -> Filter:
    return lambda record: bool(record["group"] == group)


def _exclusive(record: Record) -> bool:
    return str(record["scheme"]).startswith("exdyna")


RECEIVED = "received by a rank in a step"
LAST = "of the last tenth of the steps"

FIGURES: dict[str, tuple[Plot | Bars, ...]] = {
    "sync": (
        Bars("Time of a step", "median", "ms", "ms", _on_ranks),
        Bars("Against dense", "times as fast as MPI Allreduce", "times_faster", "number", _on_ranks),
        Bars("Build-up", "actual over set density", "build_up", "number", _on_ranks),
    ),
    "scaling": (
        Plot("Build-up", "actual over set density", "build_up", "number", _scheme, by_ranks=True),
        Plot("Bytes of a step", "received by the busiest rank", "received_MB", "MB", _scheme, by_ranks=True),
        Plot("Imbalance", "the busiest over the mean, less one", "imbalance", "number", _scheme, _exclusive, by_ranks=True),
        Plot("Time of a step, measured", "ranks share this machine's cores", "ms", "ms", _scheme, by_ranks=True),
        Plot("Time of a step, modelled", "by the measured machine", "modelled_ms", "ms", _scheme, by_ranks=True),
    ),
    "ablation": (
        Plot("Density by threshold", "of each step", "density_by_step", "number", _case, _of("threshold"), log=True),
        Plot("Imbalance by partitions", "of each step", "imbalance_by_step", "percent", _case, _of("partitions")),
        Bars("Bytes by number of blocks", RECEIVED, "received_MB", "MB", _case, _of("blocks")),
        Bars("Imbalance by number of blocks", "mean", "imbalance", "percent", _case, _of("blocks")),
        Bars("Bytes by codec", RECEIVED, "received_MB", "MB", _case, _of("codecs")),
        Bars("Time of a step", "of the whole scheme's", "of_whole", "number", _grouped),
        Bars("Training loss", LAST, "train_loss", "number", _grouped),
    ),
    "sparse-models": (
        Bars("Bytes", "received by a rank, of dense", "of_dense", "number", _trained),
        Bars("Training loss", LAST, "train_loss", "number", _trained),
        Bars("Metric", "on the test data", "metric", "number", _trained),
    ),
    "train": (
        Bars("Training loss", LAST, "train_loss", "number", _trained),
        Bars("Metric", "on the test data", "metric", "number", _trained),
        Bars("Bytes", "received by a rank", "received_MB", "MB", _trained),
        Bars("Density", "selected share of all elements", "density", "number", _trained),
    ),
    "ddp": (
        Bars("Time of a training step", "median", "ms", "ms", _what),
        Bars("Steps a second", "times those of DDP", "times_ddp", "number", _what),
        Plot("Training loss", "mean over ranks", "loss_by_step", "number", _what),
    ),
}
