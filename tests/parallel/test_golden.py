"""Checkpoints of earlier versions, written by steps.py on two ranks after 20 steps of each scheme, still load and resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mpi4py import MPI
from ranks import alike

from mpisparse import checkpoint
from mpisparse.names import SCHEMES

sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
from steps import Training

pytestmark = pytest.mark.mpi

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.filterwarnings("ignore:the state is of 2 ranks")  # OneBitAdamW on other numbers of them
@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_checkpoint_of_an_earlier_version_goes_on(comm: MPI.Intracomm, name: str) -> None:
    expected = json.loads((GOLDEN / name / f"digests-{comm.rank % 2}.json").read_text())
    training = Training(expected["case"])
    step = checkpoint.load(GOLDEN / name, **training.parts())
    training.step(20)
    training.synchronize()
    same = alike(comm, training.model.parameters())
    if comm.size == 2:  # a second one, because digests need the state before a step; stats are those of the process
        again = Training(expected["case"])
        checkpoint.load(GOLDEN / name, **again.parts())
        loaded = again.weights_and_residual()
        again.close()
        assert loaded == {key: expected[key] for key in loaded}
    training.close()
    assert step == 20
    assert same


def test_every_scheme_has_a_golden_checkpoint() -> None:
    ours = {scheme for scheme in SCHEMES if SCHEMES[scheme].__module__.startswith("mpisparse.")}  # not what tests register
    cases = [json.loads((path / "digests-0.json").read_text())["case"] for path in GOLDEN.iterdir()]
    assert {*ours, "onebit"} == {case.get("scheme", "onebit") for case in cases}
