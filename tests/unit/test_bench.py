"""Benchmarks and examples as a user starts them, small: they end well and print records. No times are judged."""

from __future__ import annotations

import glob
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
    ended = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def bench(*words: object) -> list[dict[str, Any]]:
    """The records that a benchmark prints."""
    output = job("-m", "mpisparse.runtime.cli", "bench", *words)
    return [json.loads(line) for line in output.splitlines()]


def test_sync() -> None:
    schemes = ("exdyna", "momentum", "speculative")
    records = bench("sync", *SMALL, "--no-gloo", "--density", "0.05", "--codec", "int8", "--scheme", *schemes)
    names = [r["what"] for r in records]
    assert names[:3] == ["MPI Allreduce", "MPI Allreduce, in place", "plain in-place add"]
    assert names[3:] == [f"{scheme}, {path}" for scheme in schemes for path in ("step", "backward")]
    for record in records[3:]:
        if "speculative" not in record["what"]:  # there each rank sends what it chose itself
            assert record["density"] == pytest.approx(0.05, rel=0.02)
        assert record["sent_density"] >= record["density"]
        assert record["received_MB"] > 0
    assert [r["codec"] for r in records[3::2]] == ["int8", "momentum-int8", "int8"]


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
    assert all(0 <= r["validation_metric"] <= 1 and r["validation_loss"] != r["test_loss"] for r in records)
    assert all(r["compute_ms"] > 0 and r["accumulate_ms"] >= 0 for r in records[1:])
    assert records[2]["build_up"] == pytest.approx(1.0, rel=0.05)
    assert len([p for p in (tmp_path / "runs").iterdir() if p.is_dir()]) == 6


def test_the_command_that_train_names_makes_a_page(tmp_path: Path) -> None:
    words = ("--cases", "dense", "exdyna", "--seeds", 1, "--steps", 3, "--batch-size", 8, "--out", tmp_path / "runs")
    told = job("-m", "mpisparse.runtime.cli", "bench", "train", *words).splitlines()[-1]
    _, found, pattern = told.partition("mpisparse report ")
    assert found, told
    runs = sorted(glob.glob(pattern))
    assert len(runs) == 2
    job("-m", "mpisparse.runtime.cli", "report", *runs, "--out", tmp_path / "page.html", ranks=1)
    assert "exdyna" in (tmp_path / "page.html").read_text()


def test_a_wrong_case_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        bench("train", "--cases", "momentum:alpha=3", "--steps", 1, "--out", tmp_path)
    assert str(caught.value).count("alpha must be a number in") == 1


@pytest.mark.parametrize("example", ["digits", "momentum", "predictive", "speculative"])
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


FACTORIES = """
import torch

def model(sizes):
    return torch.nn.Linear(4, 2)

def model_bad(sizes):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise OSError("no such file on this rank")
    return model(sizes)

def _data(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, 4, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return data, data

def a():
    return _data(1)

def b():
    return _data(2)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "benched.py").write_text(FACTORIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_runs_are_not_taken_for_each_other(factories: Path) -> None:
    both = ("--models", "benched:model=benched:a", "benched:model=benched:b", "--cases", "dense", "--seeds", 1)
    common = ("--batch-size", 8, "--out", factories / "runs", "--json")
    first, second = bench("train", *both, "--steps", 6, *common)
    assert first["train_loss"] != second["train_loss"]
    again = bench("train", *both, "--steps", 6, *common)
    assert [r["train_loss"] for r in again] == [first["train_loss"], second["train_loss"]]
    with pytest.raises(AssertionError, match="holds a run with other settings"):
        bench("train", *both, "--steps", 8, *common)


def test_a_factory_that_fails_on_one_rank_ends_the_bench(factories: Path) -> None:
    bad = ("--models", "benched:model_bad=benched:a", "--cases", "dense", "--seeds", 1, "--steps", 2)
    with pytest.raises(AssertionError, match="no such file on this rank"):
        bench("train", *bad, "--out", factories / "runs")


def train(*words: object, ranks: int = 1) -> str:
    return job(
        "-m", "mpisparse.runtime.cli", "train", "--model", "benched:model", "--data", "benched:a", *words, ranks=ranks
    )


def test_epochs_are_epochs_on_another_number_of_ranks(factories: Path) -> None:
    out = factories / "run"
    train("--batch-size", 8, "--epochs", 2, "--out", out)
    train("--batch-size", 8, "--epochs", 4, "--out", out, ranks=2)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if line["kind"] == "step"]
    assert [epochs.count(e) for e in range(5)] == [22, 22, 11, 11, 0], "of the 180 examples that are not held out"


def test_accumulation_fills_epochs(factories: Path) -> None:
    train("--batch-size", 8, "--accumulation", 13, "--epochs", 3, "--out", factories / "run")
    lines = [json.loads(line) for line in (factories / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "step"] == [0, 1, 2]


def test_a_run_begun_from_another_goes_on_from_its_own_checkpoints(factories: Path) -> None:
    one, two = factories / "one", factories / "two"
    train("--steps", 5, "--out", one)
    train("--steps", 10, "--resume", one, "--out", two)
    train("--steps", 12, "--resume", one, "--out", two)
    lines = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(6, 13))


def test_a_target_may_be_raised(factories: Path) -> None:
    out = factories / "run"
    assert "target 0.01 reached" in train("--steps", 4, "--eval-every", 1, "--target", 0.01, "--out", out)
    assert "reached" not in train("--steps", 4, "--eval-every", 1, "--target", 1.5, "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]


def test_recorded_gradients_are_replayed(factories: Path) -> None:
    out = factories / "run"
    train("--steps", 2, "--record-gradients", 3, "--out", out, ranks=2)
    train("--steps", 6, "--record-gradients", 3, "--out", out, ranks=2)
    assert sorted(p.name for p in (out / "gradients").iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]
    records = bench(
        "sync", "--gradients", out, "--rounds", 2, "--json", "--no-gloo", "--density", 0.5, "--path", "step",
        "--out", factories / "sync.jsonl",
    )  # fmt: skip
    assert {r["elements"] for r in records} == {10}, "four weights and a bias for each of two classes"
    assert [r["what"] for r in records if "density" in r] == ["exdyna, step"]
    lines = [json.loads(line) for line in (factories / "sync.jsonl").read_text().splitlines()]
    assert lines == [{"bench": "sync", **record} for record in records]


def test_no_recording_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        bench("sync", "--gradients", tmp_path, "--rounds", 1)
    assert str(caught.value).count("expected gradients that mpisparse train --record-gradients") == 1


def test_scaling(tmp_path: Path) -> None:
    records = bench(
        "scaling", "--elements", 20000, "--density", 0.01, "--steps", 4, "--workers", 5, 70, "--json",
        "--out", tmp_path / "scaling.jsonl",
    )  # fmt: skip
    real = [r for r in records if r["how"] == "real"]
    assert [(r["ranks"], r["scheme"]) for r in real] == [(n, s) for n in (1, 2) for s in ("exdyna", "topk", "dense")]
    assert all(r["same"] == "yes" and r["ms"] > 0 and r["modelled_ms"] > 0 for r in real)
    simulated = [(r["ranks"], r["scheme"]) for r in records if r["how"] == "simulated"]
    assert simulated == [(5, "exdyna"), (5, "topk"), (5, "dense"), (70, "exdyna"), (70, "dense")]
    assert all(abs(r["build_up"] - 1) < 0.02 for r in records if r["scheme"] == "exdyna")
    assert len((tmp_path / "scaling.jsonl").read_text().splitlines()) == len(records)


def test_scaling_of_another_density(tmp_path: Path) -> None:
    cases = ("exdyna:density=0.05", "cltk:density=0.1")
    records = bench("scaling", "--elements", 20000, "--steps", 4, "--workers", 3, "--cases", *cases, "--json")
    assert [round(r["density"], 2) for r in records if r["scheme"] == cases[0]] == [0.05] * 3
    assert all(r["same"] == "yes" for r in records if r["how"] == "real")


def test_what_cannot_be_simulated_is_told_first() -> None:
    with pytest.raises(AssertionError) as caught:
        bench("scaling", "--elements", 1000, "--cases", "exdyna", "exdyna:codec=int8")
    assert str(caught.value).count("the simulator knows density, accumulate") == 1
    assert "ranks" not in str(caught.value)


def test_ablation(tmp_path: Path) -> None:
    records = bench(
        "ablation", "--groups", "threshold", "feedback", "--elements", 20000, "--density", 0.01, "--steps", 5, "--json",
        "--train", "digits-cnn", "--train-steps", 3, "--train-out", tmp_path / "runs", "--out", tmp_path / "a.jsonl",
    )  # fmt: skip
    cases = ["exdyna", "exdyna:controller=paper", "exdyna:controller=fixed", "exdyna", "exdyna:compensate=false"]
    assert [r["case"] for r in records] == cases
    whole, paper, fixed, _, dropped = records
    assert whole["worst_error"] < 0.02 < min(paper["density_error"], fixed["density_error"])
    assert dropped["worst_error"] < 0.02
    assert all(len(r["density_by_step"]) == 5 and r["train_loss"] > 0 for r in records)
    assert whole["train_loss"] == records[3]["train_loss"] != dropped["train_loss"]
    assert len(list((tmp_path / "runs").iterdir())) == 4, "what is in two groups is trained once"


def test_groups_of_the_ablation_are_those_of_the_command_line() -> None:
    from mpisparse.bench.ablation import GROUPS
    from mpisparse.runtime import cli

    assert tuple(GROUPS) == cli.GROUPS


def test_sparse_models(tmp_path: Path) -> None:
    cases = ("dense", "exdyna:density=0.05")
    dense, sparse, tailored = bench(
        "sparse-models", "--models", "pruned", "--cases", *cases, "--seeds", 1, "--steps", 5, "--batch-size", 8, "--json",
        "--out", tmp_path / "runs",
    )  # fmt: skip
    assert [r["case"] for r in (dense, sparse, tailored)] == [*cases, "mask-aware"]
    assert tailored["train_loss"] == pytest.approx(dense["train_loss"], rel=1e-4)
    assert tailored["density"] < 0.2
    assert tailored["received_MB"] < 0.2 * dense["received_MB"]
    assert sparse["density"] == pytest.approx(0.05, rel=0.05)
    assert len((tmp_path / "runs" / "records.jsonl").read_text().splitlines()) == 3


def test_ddp_refuses_what_it_would_pass_over(tmp_path: Path) -> None:
    config = tmp_path / "ddp.toml"
    config.write_text('model = "digits-cnn"\nsteps = 3\nbatch_size = 4\nclip = 1.0\n')
    with pytest.raises(AssertionError, match="bench ddp trains plainly and has no clip"):
        bench("ddp", "--config", config)
    with pytest.raises(AssertionError, match="expected --steps of 3 or more, of which 2 warm up, got 2"):
        bench("ddp", "--model", "digits-cnn", "--steps", 2)


def test_ddp_whose_records_cannot_be_written_ends(tmp_path: Path) -> None:
    config = tmp_path / "ddp.toml"
    config.write_text('model = "digits-cnn"\nsteps = 3\nbatch_size = 4\n')
    with pytest.raises(AssertionError, match="expected a file that can be written"):
        bench("ddp", "--config", config, "--cases", "dense", "--out", config / "no")


def test_ddp(tmp_path: Path) -> None:
    records = bench(
        "ddp", "--model", "digits-cnn", "--batch-size", 4, "--steps", 4, "--cases", "dense", "exdyna:density=0.1",
        "speculative", "--json", "--out", tmp_path / "ddp.jsonl",
    )  # fmt: skip
    alone, ddp, fp16, power, dense, sparse, ahead = records
    assert [r["what"] for r in records[:2]] == ["computation alone", "DDP"]
    assert "loss" not in alone
    assert [len(r["loss_by_step"]) for r in records[1:]] == [4] * 6
    assert dense["loss_by_step"] == pytest.approx(ddp["loss_by_step"], rel=1e-4), "the same model, batches and mean"
    assert fp16["loss_by_step"] == pytest.approx(ddp["loss_by_step"], rel=1e-2)
    assert power["loss_by_step"][:2] == pytest.approx(ddp["loss_by_step"][:2], rel=1e-4)
    assert sparse["density"] == pytest.approx(0.1, rel=0.02)
    assert ahead["density"] > 0
    assert 0 < ahead["exchange_ms"] < ahead["ms"]
    assert len((tmp_path / "ddp.jsonl").read_text().splitlines()) == 7
