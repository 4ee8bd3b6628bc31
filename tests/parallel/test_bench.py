"""Small benchmarks and examples on two ranks: they succeed and print records. No times are judged."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpisparse.bench.converge.cases import Case
from mpisparse.bench.converge.plan import Run
from mpisparse.bench.converge.work import perform
from mpisparse.runtime.cli import main
from mpisparse.runtime.settings import Settings

pytestmark = pytest.mark.mpi(min_size=2)

SMALL = ("--elements", "60000", "--rounds", "2", "--json")


@pytest.fixture(autouse=True)
def _on_two_ranks(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size > 2:
        pytest.skip("runs on two ranks")
    monkeypatch.setenv("MPISPARSE_PROGRESS", "plain")


def printed_by(call: Callable[[], object]) -> str:
    """What a call prints, rank after rank; raises AssertionError with all of it if it returns an exit code. Collective."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("default")
        code = call()
    ended = MPI.COMM_WORLD.allgather((code, printed.getvalue(), errors.getvalue()))
    assert not any(code for code, _, _ in ended), "".join(out + err for _, out, err in ended)
    return "".join(out for _, out, _ in ended)


def command(*words: object) -> str:
    """What `mpisparse` prints. Collective."""
    return printed_by(lambda: main([str(word) for word in words]))


def bench(*words: object) -> list[dict[str, Any]]:
    """The records that a benchmark prints. Collective."""
    return [json.loads(line) for line in command("bench", *words).splitlines()]


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


def test_checkpoint(directory: Path) -> None:
    records = bench("checkpoint", *SMALL, "--directory", directory)
    assert [r["what"] for r in records][1::2] == ["checkpoint", "begin in the background"]
    assert not list(directory.iterdir()), "what it wrote is still there"


def test_train(directory: Path) -> None:
    cases = ("dense", "momentum", "exdyna:density=0.05,codec=int8,accumulate=backward")
    records = bench(
        "train", "--json", "--cases", *cases, "--seeds", 2, "--steps", 12, "--batch-size", 8, "--out", directory / "runs"
    )
    assert [r["case"] for r in records] == list(cases)
    assert records[0]["of_dense"] == pytest.approx(1.0, rel=0.01)
    assert [round(r["density"], 2) for r in records] == [1.0, 0.1, 0.05]
    assert all(r["train_loss"] > 0 and r["seeds"] == 2 and r["ranks"] == 2 for r in records)
    assert all(0 <= r["validation_metric"] <= 1 and r["validation_loss"] != r["test_loss"] for r in records)
    assert all(r["compute_ms"] > 0 and r["accumulate_ms"] >= 0 for r in records[1:])
    assert records[2]["build_up"] == pytest.approx(1.0, rel=0.05)
    assert len([p for p in (directory / "runs").iterdir() if p.is_dir()]) == 6


def test_the_command_that_train_names_makes_a_page(directory: Path) -> None:
    words = ("--cases", "dense", "exdyna", "--seeds", 1, "--steps", 3, "--batch-size", 8, "--out", directory / "runs")
    told = command("bench", "train", *words).splitlines()[-1]
    _, found, pattern = told.partition("mpisparse report ")
    assert found, told
    runs = sorted(glob.glob(pattern))
    assert len(runs) == 2
    page = directory / f"page-{MPI.COMM_WORLD.rank}.html"
    command("report", *runs, "--out", page)
    assert "exdyna" in page.read_text()


def test_a_wrong_case_is_told_once(directory: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        bench("train", "--cases", "momentum:alpha=3", "--steps", 1, "--out", directory)
    assert str(caught.value).count("alpha must be a number in") == 1


@pytest.mark.parametrize("example", ["digits", "momentum", "predictive", "speculative"])
def test_examples(monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    monkeypatch.setattr(sys, "argv", [example, *(("--epochs", "1") if example == "digits" else ())])
    assert "accuracy" in printed_by(lambda: not runpy.run_module(f"mpisparse.examples.{example}", run_name="__main__"))


def test_tensorboard(directory: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command("train", "--steps", 3, "--tensorboard", "--out", directory / "run")
    events = EventAccumulator(str(directory / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"]["mean"] for line in lines if line["kind"] == "step"]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses)


FACTORIES = """
import torch

def model(sizes):
    return torch.nn.Linear(4, 2)

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
def factories(comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if comm.rank == 0:
        (directory / "benched.py").write_text(FACTORIES)
    comm.Barrier()
    monkeypatch.syspath_prepend(str(directory))
    yield directory
    sys.modules.pop("benched", None)


def test_runs_are_not_taken_for_each_other(factories: Path) -> None:
    both = ("--models", "benched:model=benched:a", "benched:model=benched:b", "--cases", "dense", "--seeds", 1)
    common = ("--batch-size", 8, "--out", factories / "runs", "--json")
    first, second = bench("train", *both, "--steps", 6, *common)
    assert first["train_loss"] != second["train_loss"]
    again = bench("train", *both, "--steps", 6, *common)
    assert [r["train_loss"] for r in again] == [first["train_loss"], second["train_loss"]]
    with pytest.raises(AssertionError, match="holds a run with other settings"):
        bench("train", *both, "--steps", 8, *common)


def test_recorded_gradients_are_replayed(factories: Path) -> None:
    out = factories / "run"
    for steps in (2, 6):
        model = ("--model", "benched:model", "--data", "benched:a")
        command("train", *model, "--steps", steps, "--record-gradients", 3, "--out", out)
    assert sorted(p.name for p in (out / "gradients").iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]
    records = bench(
        "sync", "--gradients", out, "--rounds", 2, "--json", "--no-gloo", "--density", 0.5, "--path", "step",
        "--out", factories / "sync.jsonl",
    )  # fmt: skip
    assert {r["elements"] for r in records} == {10}, "four weights and a bias for each of two classes"
    assert [r["what"] for r in records if "density" in r] == ["exdyna, step"]
    lines = [json.loads(line) for line in (factories / "sync.jsonl").read_text().splitlines()]
    assert lines == [{"bench": "sync", **record} for record in records]


def test_no_recording_is_told_once(directory: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        bench("sync", "--gradients", directory, "--rounds", 1)
    assert str(caught.value).count("expected gradients of mpisparse train --record-gradients") == 1


def test_scaling(directory: Path) -> None:
    records = bench(
        "scaling", "--elements", 20000, "--density", 0.01, "--steps", 4, "--workers", 5, 70, "--json",
        "--out", directory / "scaling.jsonl",
    )  # fmt: skip
    real = [r for r in records if r["how"] == "real"]
    assert [(r["ranks"], r["scheme"]) for r in real] == [(n, s) for n in (1, 2) for s in ("exdyna", "topk", "dense")]
    assert all(r["same"] == "yes" and r["ms"] > 0 and r["modelled_ms"] > 0 for r in real)
    simulated = [(r["ranks"], r["scheme"]) for r in records if r["how"] == "simulated"]
    assert simulated == [(5, "exdyna"), (5, "topk"), (5, "dense"), (70, "exdyna"), (70, "dense")]
    assert all(abs(r["build_up"] - 1) < 0.02 for r in records if r["scheme"] == "exdyna")
    assert len((directory / "scaling.jsonl").read_text().splitlines()) == len(records)


def test_scaling_of_another_density(directory: Path) -> None:
    cases = ("exdyna:density=0.05", "cltk:density=0.1")
    records = bench("scaling", "--elements", 20000, "--steps", 4, "--workers", 3, "--cases", *cases, "--json")
    assert [round(r["density"], 2) for r in records if r["scheme"] == cases[0]] == [0.05] * 3
    assert all(r["same"] == "yes" for r in records if r["how"] == "real")


def test_scaling_prices_few_bits_buckets_and_nodes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of coded payloads are those of real steps; what overlaps is priced below what does not."""
    monkeypatch.setenv("MPISPARSE_RANKS_PER_NODE", "2")
    cases = ["dense:codec=int4", "dense:codec=int4,overlap=true,bucket_mb=0.02", "dense:codec=int4,hierarchy=node"]
    records = bench(
        "scaling", "--elements", 20000, "--steps", 4, "--workers", 8, "--backward", 0.05, "--ranks-a-node", 2,
        "--bandwidth", 1e5, "--latency", 1e-6, "--cases", *cases, "exdyna:codec=int8,density=0.05", "--json",
    )  # fmt: skip
    real = {r["scheme"]: r for r in records if r["how"] == "real" and r["ranks"] == 2}
    assert [real[case].get("same") for case in cases] == ["yes", "yes", None]
    assert min(r["ms"] for r in real.values()) >= 50
    virtual = {r["scheme"]: r for r in records if r["how"] == "simulated"}
    whole, buckets, nodes = (virtual[case]["modelled_ms"] for case in cases)
    assert 50 < buckets < whole
    assert nodes < whole - 50  # 3/4 of the bytes of half the vector, over half a link, against 7/8 of all over a link
    exdyna = virtual["exdyna:codec=int8,density=0.05"]
    assert exdyna["received_MB"] < 0.01


def test_what_cannot_be_simulated_is_told_first() -> None:
    with pytest.raises(AssertionError) as caught:
        bench("scaling", "--elements", 1000, "--cases", "exdyna", "exdyna:scorer=average")
    assert str(caught.value).count("the simulator knows density, accumulate") == 1
    assert "ranks" not in str(caught.value)


def test_ablation(directory: Path) -> None:
    records = bench(
        "ablation", "--groups", "threshold", "feedback", "--elements", 20000, "--density", 0.01, "--steps", 5, "--json",
        "--train", "digits-cnn", "--train-steps", 3, "--train-out", directory / "runs", "--out", directory / "a.jsonl",
    )  # fmt: skip
    cases = ["exdyna", "exdyna:controller=paper", "exdyna:controller=fixed", "exdyna", "exdyna:compensate=false"]
    assert [r["case"] for r in records] == cases
    whole, paper, fixed, _, dropped = records
    assert whole["worst_error"] < 0.02 < min(paper["density_error"], fixed["density_error"])
    assert dropped["worst_error"] < 0.02
    assert all(len(r["density_by_step"]) == 5 and r["train_loss"] > 0 for r in records)
    assert whole["train_loss"] == records[3]["train_loss"] != dropped["train_loss"]
    assert len(list((directory / "runs").iterdir())) == 4, "what is in two groups is trained once"


def test_memory(directory: Path) -> None:
    """Bytes of an element that follow from what a scheme is; each piece counts once."""
    n, out = 200_000, directory / "memory.jsonl"
    cases = ("dense", "exdyna", "momentum", "dense:codec=int8", "drift", "exdyna:codec=int8", "topk", "speculative")
    records = bench("memory", "--elements", n, "--steps", 6, "--cases", *cases, "--json", "--out", out)
    assert [r["case"] for r in records] == [*cases]
    found = dict(zip(cases, records, strict=True))
    assert all(r["residual"] == 4.0 for r in records)
    assert all(4.0 <= r["published"] < 4.5 for r in records if r["case"] != "drift"), "the mean, and an index of it"
    remembered = [found[case]["scorer"] for case in ("dense", "exdyna", "momentum", "topk")]
    assert remembered == pytest.approx([0.0, 0.0, 4.0, 0.0], abs=0.01)
    assert found["dense:codec=int8"]["owners"] >= 2 * 4 / 2, "e of an owner, and room for the next one"
    assert found["drift"]["published"] == 0.0, "weights move, and no mean is published"
    assert found["speculative"]["more"] >= 4.0, "the second set of weights"
    for name in ("exdyna", "exdyna:codec=int8"):
        assert 8 * 1024 / 1e3 < found[name]["blocks_kB"] < 100, "edges and work of 1,024 blocks"
        assert 0 < found[name]["candidates_kB"] < 12 * n / 1e3
        assert found[name]["messages_kB"] > 0
        assert found[name]["ladder_kB"] > 0
    assert found["exdyna:codec=int8"]["messages_kB"] <= found["exdyna"]["messages_kB"]
    assert found["dense"]["messages_kB"] >= 4 * n / 1e3, "all elements in one message"
    assert [json.loads(line)["bench"] for line in out.read_text().splitlines()] == ["memory"] * len(cases)


def test_sparse_models(directory: Path) -> None:
    cases = ("dense", "exdyna:density=0.05")
    dense, sparse, tailored = bench(
        "sparse-models", "--models", "pruned", "--cases", *cases, "--seeds", 1, "--steps", 5, "--batch-size", 8, "--json",
        "--out", directory / "runs",
    )  # fmt: skip
    assert [r["case"] for r in (dense, sparse, tailored)] == [*cases, "mask-aware"]
    assert tailored["train_loss"] == pytest.approx(dense["train_loss"], rel=1e-4)
    assert tailored["density"] < 0.2
    assert tailored["received_MB"] < 0.2 * dense["received_MB"]
    assert sparse["density"] == pytest.approx(0.05, rel=0.05)
    assert len((directory / "runs" / "records.jsonl").read_text().splitlines()) == 3


def test_ddp_refuses_what_it_would_pass_over(comm: MPI.Intracomm, directory: Path) -> None:
    config = directory / "ddp.toml"
    if comm.rank == 0:
        config.write_text('model = "digits-cnn"\nsteps = 4\nbatch_size = 4\nclip = 1.0\n')
    comm.Barrier()
    with pytest.raises(AssertionError, match="bench ddp does not support clip"):
        bench("ddp", "--config", config)
    with pytest.raises(AssertionError, match="--steps must be at least 4, because the first 3 are warm-up, got 2"):
        bench("ddp", "--model", "digits-cnn", "--steps", 2)


def test_ddp(directory: Path) -> None:
    records = bench(
        "ddp", "--model", "digits-cnn", "--batch-size", 4, "--steps", 4, "--cases", "dense", "exdyna:density=0.1",
        "speculative", "--json", "--out", directory / "ddp.jsonl",
    )  # fmt: skip
    alone, ddp, fp16, bf16, power, dense, sparse, ahead = records
    assert [r["what"] for r in records[:2]] == ["computation alone", "DDP"]
    assert "loss" not in alone
    assert [len(r["loss_by_step"]) for r in records[1:]] == [4] * 7
    assert dense["loss_by_step"] == pytest.approx(ddp["loss_by_step"], rel=1e-4), "the same model, batches and mean"
    for halves in (fp16, bf16):
        assert halves["loss_by_step"] == pytest.approx(ddp["loss_by_step"], rel=1e-2)
    assert alone["of_alone"] == 1.0
    assert power["loss_by_step"][:2] == pytest.approx(ddp["loss_by_step"][:2], rel=1e-4)
    assert sparse["density"] == pytest.approx(0.1, rel=0.02)
    assert ahead["density"] > 0
    assert 0 < ahead["exchange_ms"] < ahead["ms"]
    assert len((directory / "ddp.jsonl").read_text().splitlines()) == 8


def test_nodes_against_all_ranks(directory: Path, monkeypatch: pytest.MonkeyPatch, comm: MPI.Intracomm) -> None:
    """On one node nothing leaves it; what the network devices count is that of the whole machine."""
    monkeypatch.setenv("MPISPARSE_RANKS_PER_NODE", "2")
    out = directory / "nodes.jsonl"
    flat, node = bench("nodes", "--elements", 20000, "--steps", 5, "--cases", "dense:codec=int4", "--json", "--out", out)
    assert [(r["hierarchy"], r["ranks_a_node"]) for r in (flat, node)] == [("flat", 1), ("node", 2)]
    assert flat["times_flat"] == 1.0
    assert node["times_flat"] > 0
    assert node["node_MB"] > 0.07 > flat["node_MB"] == 0  # of 20,000 float32 each rank gets half as sums, and half as means
    assert len(out.read_text().splitlines()) == 2
    monkeypatch.setenv("MPISPARSE_RANKS_PER_NODE", "1")
    with pytest.raises(AssertionError, match="needs hosts with the same number of ranks, at least 2"):
        bench("nodes", "--elements", 20000, "--steps", 5)


def test_converge_finds_the_same_on_ranks_and_on_virtual_workers(directory: Path, comm: MPI.Intracomm) -> None:
    out = directory / "out"
    records = bench(
        "converge", "--model", "digits-cnn", "--steps", 4, "--warmup", 1, "--batch-size", 4, "--seeds", 1, "--rates", 1,
        "--most-rates", 1, "--eval-examples", 32, "--case", "few: scheme=exdyna density=0.01 codec=int8",
        "--out", out, "--json",
    )  # fmt: skip
    assert [r["case"] for r in records] == ["alone", "dense", "few"]
    assert records[1]["bytes"] == pytest.approx(4.0, rel=0.001)
    if comm.rank == 0:
        for file in (out / "runs").iterdir():
            real = json.loads(file.read_text())
            settings = Settings(**{**settings_of(out), "lr": real["lr"], "seed": real["seed"]})
            run = Run(settings, Case(real["case"], **real["definition"]), real["workers"], 32)
            virtual = json.loads(json.dumps(perform(run)))
            timed = ("seconds", "examples_per_second")
            assert {k: v for k, v in virtual.items() if k not in timed} == {k: v for k, v in real.items() if k not in timed}


def settings_of(out: Path) -> dict[str, Any]:
    """The settings that bench converge wrote."""
    written = json.loads((out / "settings.json").read_text())
    known = {field.name for field in fields(Settings)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in written.items() if name in known}


def test_converge_under_mpirun_has_its_ranks_as_workers(directory: Path) -> None:
    with pytest.raises(
        AssertionError, match="the 2 ranks are the workers, one run at a time: leave out --workers and --jobs"
    ):
        bench("converge", "--workers", 3, "--out", directory / "out")
