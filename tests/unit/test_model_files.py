"""Models out of checkpoints: exported and loaded, without MPI; bad input changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import model_files, store
from mpisparse.errors import CheckpointError, ConfigurationError
from mpisparse.runtime.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"


class Tied(nn.Module):
    """Tied weights, batch norm, a scalar parameter, two types."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.short = nn.Linear(width, width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.embedding(x)) * self.scale
        return self.head(hidden + self.short(hidden.bfloat16()))  # type: ignore[no-any-return]


def train(directory: Path, steps: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """Train a model on one rank with a checkpoint after every step; return its global state_dict at the end."""
    torch.manual_seed(3)
    model = Tied()
    sync = mpisparse.GradientSync(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpisparse.attach(optimizer, sync)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randint(11, (9,))).square().mean().backward()
        optimizer.step()
        checkpoint.save(directory, step=step, model=model, optimizer=optimizer, sync=sync)
    own = model.embedding.weight.detach().clone()
    with sync.global_weights():
        assert torch.equal(model.embedding.weight, own) == (options.get("scheme") != "drift"), "it has its own"
        state = {name: t.clone() for name, t in model.state_dict().items()}
    sync.close()
    return state


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run with three checkpoints, and the model of the last."""
    run = tmp_path_factory.mktemp("run")
    return run, train(run / "checkpoints", density=0.2)


OPTIONS: dict[str, dict[str, Any]] = {
    "exdyna": {"density": 0.2},
    "drift": {"density": 0.05, "remainder": True},
    "speculative": {"density": 0.2},
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("scheme", OPTIONS)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_exported_weights_are_the_global_ones(tmp_path: Path, scheme: str, suffix: str) -> None:
    expected = train(tmp_path / "run", scheme=scheme, **OPTIONS[scheme])
    target = tmp_path / f"model{suffix}"
    assert checkpoint.export(tmp_path / "run", target).step == 3
    if suffix == ".pt":
        found = torch.load(target, weights_only=True)
        assert list(found) == list(expected), "in the order of the model's own state_dict"
    else:
        found = load_file(target)
        with safe_open(target, "pt") as file:
            assert file.metadata() == {"format": "pt", "mpisparse": mpisparse.__version__, "step": "3", "scheme": scheme}
    assert_same(found, expected)
    model = Tied()
    for source, step in ((target, None if suffix == ".pt" else 3), (tmp_path / "run", 3)):
        nn.init.zeros_(model.embedding.weight)
        assert checkpoint.load_model(source, model) == step
        assert_same(model.state_dict(), expected)
        assert model.head.weight is model.embedding.weight
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_a_directory_of_checkpoints_and_one_checkpoint_are_sources(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    run, expected = saved
    for source, step in ((run, 3), (run / "checkpoints", 3), (run / "checkpoints" / "step-00000002", 2), (str(run), 3)):
        model = Tied()
        assert checkpoint.load_model(source, model) == step
        assert torch.equal(model.embedding.weight, expected["embedding.weight"]) == (step == 3)


def test_types_are_converted(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = Tied().double()
    checkpoint.load_model(saved[0], model)
    assert torch.equal(model.short.weight, saved[1]["short.weight"].double())


def test_h5py_alone_reads_a_model(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """By the names of parameters; bfloat16 as bit patterns."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for path in (saved[0] / "checkpoints" / "step-00000003").glob("*.h5"):
        with h5py.File(path) as file:
            for group in ("model", "buffers"):
                arrays = file.get(f"arrays/{group}", {})
                found |= {name: data[()].reshape(data.attrs["shape"]) for name, data in arrays.items()}
    assert found.keys() == saved[1].keys()
    for name, tensor in saved[1].items():
        expected = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
        assert np.array_equal(found[name], expected.numpy()), name
        assert found[name].shape == tensor.shape


def test_the_mean_of_all_ranks_buffers_is_exported_where_the_scheme_says_so() -> None:
    means = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    merged = model_files._mean([{"mean": mean, "count": torch.tensor(3 + n)} for n, mean in enumerate(means)])
    assert merged["mean"].tolist() == [2.0, 4.0]
    assert merged["mean"].dtype is torch.float32
    assert merged["count"] == 3
    assert model_files._option({"sync": {"options": '{"buffers": "average"}'}}, "buffers") == "average"
    assert model_files._option({}, "buffers") is None


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_checkpoints_of_earlier_versions_are_exported(tmp_path: Path, name: str) -> None:
    """The arrays of the oldest have numbers instead of names, in files of two ranks."""
    saved = checkpoint.export(GOLDEN / name, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    manifest = store.read_manifest(GOLDEN / name / "step-00000020")
    lines = [f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in found.items()]
    assert lines == list(manifest.model)
    case = json.loads((GOLDEN / name / "digests-0.json").read_text())["case"]
    assert (saved.step, saved.scheme) == (20, case.get("scheme"))  # none with OneBitAdamW, which is an optimizer
    assert all(torch.isfinite(t).all() and t.any() for t in found.values())


# Without MPI

SCRIPT = """
import sys
sys.modules["mpi4py"] = None  # its import fails, as on a machine without it
import torch
from mpisparse import checkpoint
from mpisparse.runtime.cli import main
from safetensors.torch import load_file

class Alike(torch.nn.Module):
    def __init__(self, path):
        super().__init__()
        self.values = {name: torch.empty_like(t) for name, t in load_file(path).items()}
    def state_dict(self):
        return self.values
    def load_state_dict(self, state):
        self.values = state

for scheme, run in zip(sys.argv[2::2], sys.argv[3::2]):
    target = f"{sys.argv[1]}/{scheme}.safetensors"
    assert main(["export", run, target]) == 0
    model = Alike(target)
    assert checkpoint.load_model(run, model) == checkpoint.load_model(target, model)
assert not [name for name in sys.modules if name.startswith("mpi4py") and sys.modules[name] is not None]
print("done")
"""


@pytest.mark.filterwarnings("ignore:.*")
def test_no_mpi_is_needed(tmp_path: Path) -> None:
    runs = {scheme: GOLDEN / scheme for scheme in ("exdyna", "dense", "speculative", "predictive")}
    train(tmp_path / "drift", scheme="drift", **OPTIONS["drift"])
    runs["drift"] = tmp_path / "drift"
    words = [str(word) for pair in runs.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), *words], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
    assert done.stdout.count("export: ") == len(runs)


# Bad input


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    spoiled = run / "checkpoints" / "step-00000003" / "shared-0000.h5"
    spoiled.write_bytes(spoiled.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"a newer checkpoint than .*step-00000002 is not used: .*shared-0000.h5 has"):
        assert checkpoint.load_model(run, Tied()) == 2
    with pytest.raises(CheckpointError, match=r"step-00000003 has no checkpoint that can be read: .* were written"):
        checkpoint.export(spoiled.parent, tmp_path / "model.pt")
    for step in (1, 2):
        (run / "checkpoints" / store.name_of(step) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="has no checkpoint that can be read"):
        checkpoint.load_model(run, Tied())
    assert main(["export", str(run), str(tmp_path / "model.pt")]) == 1
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/nowhere", "model.pt"], "/nowhere is not a checkpoint and contains none"),
        (["RUN", "model.onnx"], "unknown type '.onnx' of model.onnx; choose from: .pt, .pth, .safetensors"),
        (["RUN", "model.safetensor"], "did you mean '.safetensors'?"),
        (["RUN", "model"], "unknown type '' of model"),
        (["RUN", "there.pt"], "there.pt already exists; choose another name, or overwrite it (--overwrite)"),
        (["RUN", "folder.pt", "--overwrite"], "folder.pt already exists; choose another name"),
        (["RUN", "no/such/model.pt"], "there is no directory no/such to write model.pt into"),
    ],
)
def test_refused(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, words: list[str], says: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("there.pt").write_text("precious")
    Path("folder.pt").mkdir()
    assert main(["export", *(str(saved[0]) if word == "RUN" else word for word in words)]) == 2
    assert says in capsys.readouterr().err
    assert sorted(os.listdir()) == ["folder.pt", "there.pt"]
    assert Path("there.pt").read_text() == "precious"


def test_an_existing_file_is_replaced_if_that_is_asked_for(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.pt"
    target.write_text("old")
    assert main(["export", str(saved[0]), str(target), "--overwrite"]) == 0
    assert "10 tensors of step 3" in capsys.readouterr().out
    assert_same(torch.load(target, weights_only=True), saved[1])


def test_another_model_is_refused_and_left_as_it_was(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    wide = Tied(8)
    before = {name: t.clone() for name, t in wide.state_dict().items()}
    with pytest.raises(ConfigurationError, match=r"of another model: it has 'embedding.weight \[11, 7\]' where .*\[11, 8\]"):
        checkpoint.load_model(saved[0], wide)
    assert_same(wide.state_dict(), before)
    with pytest.raises(ConfigurationError, match=r"it has '.*' where this one has '0.bias \[2\]'; build the model"):
        checkpoint.load_model(saved[0], nn.Sequential(nn.Linear(2, 2)))


def test_weights_that_are_tied_here_and_differ_there_are_refused(tmp_path: Path) -> None:
    model = Tied()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    state["head.weight"] += 1
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(ConfigurationError, match=r"'embedding.weight' and 'head.weight' are tied in this one and differ"):
        checkpoint.load_model(tmp_path / "model.pt", model)


def test_without_the_extra_the_error_names_it(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'mpisparse\[export\]'; or write a .pt file"):
        checkpoint.export(saved[0], tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_no_tensor_goes_into_pt_files_only(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

    model = Extra(2, 2)
    checkpoint.save(tmp_path / "run", step=1, model=model)
    with pytest.raises(ConfigurationError, match=r"'_extra_state' of the model is a dict, and .* write a .pt file"):
        checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")
    checkpoint.export(tmp_path / "run", tmp_path / "model.pt")
    again = Extra(2, 2)
    checkpoint.load_model(tmp_path / "model.pt", again)
    assert again.loaded == {"version": 3}
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / f"model{suffix}"
    target.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*: .*No space left on device"):
        checkpoint.export(saved[0], target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert target.read_text() == "old"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_files_that_hold_no_model_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    with pytest.raises(ConfigurationError, match="there is no file"):
        checkpoint.load_model(path, Tied())
    for content in (b"", b"nonsense" * 40, json.dumps({"a": 1}).encode()):
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(CheckpointError, match="cannot be read"):
                checkpoint.load_model(path, Tied())
    if suffix == ".pt":
        torch.save([1, 2], path)
        with pytest.raises(CheckpointError, match="holds no state_dict"):
            checkpoint.load_model(path, Tied())
        torch.save({"x": os.system}, path)
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.load_model(path, Tied())
