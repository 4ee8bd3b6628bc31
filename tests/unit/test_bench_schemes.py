"""Every scheme in every benchmark of schemes, on one rank in this process: it runs, or is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpisparse.names import CODECS, SCHEMES
from mpisparse.plan.simulator import SIMULATED
from mpisparse.runtime.cli import main

pytestmark = pytest.mark.filterwarnings('ignore:scheme "predictive" without validation')

SPARSE = tuple(scheme for scheme in SCHEMES if scheme != "dense")
OF_WEIGHTS = tuple(scheme for scheme in SCHEMES if SCHEMES[scheme].of_weights)
SPARSE_MODELS = ("pruned", "embeddings", "experts")
SHORT = ("--seeds", "1", "--steps", "3", "--batch-size", "4")


def bench(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    """Return the records that a benchmark prints; it must succeed."""
    assert main(["bench", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_sync_runs_every_scheme_on_both_paths(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--elements", 20000, "--rounds", 1, "--density", 0.05, "--no-gloo")
    records = bench(capsys, "sync", *size, "--scheme", *SCHEMES)
    names = [r["what"] for r in records if "density" in r]
    paths = {scheme: ("step",) if scheme in OF_WEIGHTS else ("step", "backward") for scheme in SCHEMES}
    assert names == [f"{scheme}, {path}" for scheme in SCHEMES for path in paths[scheme]]
    assert all(r["density"] > 0 and r["ms"] > 0 for r in records if "density" in r)


def test_sync_explains_every_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "sync", "--elements", "2000", "--rounds", "1", "--no-gloo", "--path", "step", "--scheme", *SCHEMES]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert all(f"\n{scheme}, step: " in told for scheme in SCHEMES)
    assert told.count("(with the optimizer's updates)") == 1


@pytest.mark.parametrize("codec", [codec for codec in CODECS if not codec.startswith("momentum-")])
def test_sync_runs_every_codec_of_its_help_with_every_sparse_scheme(capsys: pytest.CaptureFixture[str], codec: str) -> None:
    size = ("--elements", 20000, "--rounds", 1, "--density", 0.05, "--no-gloo", "--path", "step")
    records = bench(capsys, "sync", *size, "--scheme", *SPARSE, "--codec", codec)
    used = {r["what"].split(",")[0]: r["codec"] for r in records if "codec" in r}
    blended = f"momentum-{codec}"
    assert used == {**dict.fromkeys(SPARSE, codec), "momentum": blended if blended in CODECS else codec}


def test_train_runs_every_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = bench(capsys, "train", "--cases", *SCHEMES, *SHORT, "--out", tmp_path)
    assert [r["case"] for r in records] == list(SCHEMES)


@pytest.mark.parametrize(
    ("model", "schemes"),
    [
        *((model, tuple(SCHEMES)[i::3]) for i, model in enumerate(SPARSE_MODELS)),
        *(pytest.param(model, tuple(SCHEMES), marks=pytest.mark.slow) for model in SPARSE_MODELS),
    ],
)
def test_sparse_models_run_every_scheme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, schemes: tuple[str, ...]
) -> None:
    records = bench(capsys, "sparse-models", "--models", model, "--cases", *schemes, *SHORT, "--out", tmp_path)
    assert [r["case"] for r in records[:-1]] == list(schemes)


def test_ddp_runs_every_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    records = bench(capsys, "ddp", "--model", "digits-cnn", "--steps", 4, "--batch-size", 4, "--cases", *SCHEMES)
    ours = [r for r in records if "density" in r]
    assert [r["what"] for r in ours] == list(SCHEMES)
    assert all(0 < r["exchange_ms"] < r["ms"] for r in ours if r["what"] not in ("diloco", "sparseloco"))  # not due yet


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scaling_runs_what_it_can_simulate_and_refuses_the_others(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    links = ("--latency", "1e-5", "--bandwidth", "1e9", "--workers", "2", "--elements", "2000", "--steps", "4")
    code = main(["bench", "scaling", "--cases", scheme, *links, "--json"])
    told = capsys.readouterr()
    if scheme in (*SIMULATED, "dense"):
        assert code == 0
        assert all(json.loads(line)["scheme"] == scheme for line in told.out.splitlines())
    else:
        assert code == 2
        assert f'scheme "{scheme}" has no simulator' in told.err
        assert not told.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("sync --scheme drift --codec momentum-int8", "cannot blend"),
        ("sync --scheme exdyan", "unknown scheme 'exdyan'; did you mean 'exdyna'?"),
        ("scaling --cases exdyan --latency 1 --bandwidth 1", "unknown scheme 'exdyan'; did you mean 'exdyna'?"),
        (
            "scaling --cases topk:codec=int8 --latency 1 --bandwidth 1",
            "the simulator knows no options of scheme topk, got codec",
        ),
        ("train --cases exdyan", "unknown scheme 'exdyan'; did you mean 'exdyna'?"),
        ("ddp --model digits-cnn --steps 4 --cases exdyan", "unknown scheme 'exdyan'; did you mean 'exdyna'?"),
        ("sparse-models --cases exdyan", "unknown scheme 'exdyan'; did you mean 'exdyna'?"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(
    words: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench_name, *rest = words.split()
    size = ["--elements", "2000"] if bench_name in ("sync", "scaling") else []
    gloo = ["--no-gloo"] if bench_name == "sync" else []
    assert main(["bench", bench_name, *rest, *size, *gloo]) == 2
    assert says in capsys.readouterr().err
