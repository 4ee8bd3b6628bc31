"""Validation data on several ranks: the same split on all, also with more ranks than examples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from ranks import everywhere

from mpisparse.runtime import train
from mpisparse.runtime.settings import Settings
from mpisparse.stopping import StopRequest

pytestmark = pytest.mark.mpi


def test_one_validation_example_teaches_all_ranks(comm: MPI.Intracomm, directory: Path) -> None:
    """Its accuracy moves k."""
    settings = Settings(
        out=str(directory / "run"), scheme="predictive", validation=0.0005, steps=8, batch_size=4, eval_every=3,
        options={"validate_every": 5, "publish_after": 1}, density=0.01,
    )  # fmt: skip
    stop = StopRequest()
    try:
        trainer = train.Trainer(settings, stop)
        held = trainer.data.validation
        assert held is not None
        own = [float(part.double().sum()) for part in held.batch(np.arange(len(held)), seed=0, epoch=0, train=False)]
        rows = trainer.sync.gather_floats(np.array([len(held), *own]))
        code = trainer.train()
        trainer.close()
        ranking = trainer.sync.stats.details["ranking"]
        trainer.sync.close()
    finally:
        stop.restore()
    assert everywhere(comm, code == 0 and rows[0, 0] == 1 and bool((rows == rows[0]).all()))
    assert everywhere(comm, 0.0 <= ranking <= 1.0)
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    evals = [(line["step"], line["data"]) for line in lines if line["kind"] == "eval"]
    assert everywhere(comm, evals == [(3, "validation"), (6, "validation"), (8, "validation"), (8, "test")])
