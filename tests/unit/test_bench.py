"""Benchmarks and examples as a user starts them, small: they end well and print records. No times are judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MPIRUN = Path(sys.executable).with_name("mpirun")
SMALL = ("--elements", "60000", "--rounds", "2", "--json")

pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason=f"there is no mpirun beside {sys.executable}")


def job(*words: object, ranks: int = 2) -> str:
    """What a job on so many ranks prints; fails if it does not end well."""
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1",
        "MPISPARSE_PROGRESS": "plain",
    }  # fmt: skip
    command = [str(MPIRUN), "-n", str(ranks), sys.executable, *map(str, words)]
    ended = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def bench(*words: object) -> list[dict[str, Any]]:
    """The records that a benchmark prints."""
    output = job("-m", "mpisparse.runtime.cli", "bench", *words)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_sync() -> None:
    records = bench("sync", *SMALL, "--no-gloo", "--density", "0.05", "--codec", "int8", "--scheme", "exdyna", "momentum")
    names = [r["what"] for r in records]
    assert names[:3] == ["MPI Allreduce", "MPI Allreduce, in place", "plain in-place add"]
    assert names[3:] == ["exdyna, step", "exdyna, backward", "momentum, step", "momentum, backward"]
    for record in records[3:]:
        assert record["density"] == pytest.approx(0.05, rel=0.02)
        assert record["sent_density"] >= record["density"]
        assert record["received_MB"] > 0
    assert [r["codec"] for r in records[3::2]] == ["int8", "momentum-int8"]


def test_kernels() -> None:
    records = bench("kernels", *SMALL)
    assert len({r["kernel"] for r in records}) == len(records) > 5


def test_checkpoint(tmp_path: Path) -> None:
    records = bench("checkpoint", *SMALL, "--directory", tmp_path)
    assert [r["what"] for r in records][1::2] == ["checkpoint", "begin in the background"]
    assert not list(tmp_path.iterdir()), "what it wrote is still there"


def test_train(tmp_path: Path) -> None:
    cases = ("dense", "momentum", "exdyna:density=0.05,codec=int8,accumulate=backward")
    records = bench(
        "train", "--json", "--cases", *cases, "--seeds", 2, "--steps", 12, "--batch-size", 8, "--out", tmp_path / "runs"
    )
    assert [r["case"] for r in records] == list(cases)
    assert records[0]["of_dense"] == pytest.approx(1.0, rel=0.01)
    assert [round(r["density"], 2) for r in records] == [1.0, 0.1, 0.05]
    assert all(r["train_loss"] > 0 and r["seeds"] == 2 and r["ranks"] == 2 for r in records)
    assert len(list((tmp_path / "runs").iterdir())) == 6


def test_a_wrong_case_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        bench("train", "--cases", "momentun", "--steps", 1, "--out", tmp_path)
    assert str(caught.value).count("did you mean 'momentum'?") == 1


@pytest.mark.parametrize("example", ["digits", "momentum"])
def test_examples(example: str) -> None:
    short = ("--epochs", "1") if example == "digits" else ()
    assert "accuracy" in job("-m", f"mpisparse.examples.{example}", *short)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job("-m", "mpisparse.runtime.cli", "train", "--steps", 3, "--tensorboard", "--out", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"]["mean"] for line in lines if line["kind"] == "step"]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses)
