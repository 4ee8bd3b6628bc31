"""Checkpoints of earlier versions, on two ranks after 20 steps of each scheme, still load and resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mpi4py import MPI
from ranks import alike

from mpisparse import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
from steps import Training

pytestmark = pytest.mark.mpi

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("scheme", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_checkpoint_of_an_earlier_version_goes_on(comm: MPI.Intracomm, scheme: str) -> None:
    expected = json.loads((GOLDEN / scheme / f"digests-{comm.rank % 2}.json").read_text())
    training = Training(expected["case"])
    step = checkpoint.load(GOLDEN / scheme, model=training.model, optimizer=training.optimizer, sync=training.sync)
    training.step(20)
    training.sync.synchronize()
    same = alike(comm, training.model.parameters())
    if comm.size == 2:  # a second one, because digests need the state before a step; stats are those of the process
        again = Training(expected["case"])
        checkpoint.load(GOLDEN / scheme, model=again.model, optimizer=again.optimizer, sync=again.sync)
        loaded = again.weights_and_residual()
        again.sync.close()
        assert loaded == {name: expected[name] for name in loaded}
    training.sync.close()
    assert step == 20
    assert same
