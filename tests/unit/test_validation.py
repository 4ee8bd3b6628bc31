"""Validation data: held out of the training data by the seed and used to steer; test data judge the result."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisparse import checkpoint
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.cli import main
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.workloads import Data, Examples, build, hold_out
from mpisparse.runtime.workloads.data.ratings import rating_data
from mpisparse.runtime.workloads.data.text import MaskedTokens, NextTokens
from mpisparse.runtime.workloads.split import Subset, difference, split_of

# Splits


class Numbered:
    """Examples whose input is their number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Any, *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(np.asarray(indices)), torch.zeros(len(indices))


def numbers(examples: Examples | None, **changes: Any) -> list[int]:
    """Return the inputs of all examples."""
    assert examples is not None
    options: dict[str, Any] = {"seed": 0, "epoch": 0, "train": False, **changes}
    return examples.batch(np.arange(len(examples)), **options)[0].flatten().tolist()


@given(st.integers(2, 400), st.floats(0.01, 0.6), st.integers(0, 2**40 - 1))
def test_a_split_has_every_example_once(total: int, share: float, seed: int) -> None:
    if round(share * total) >= total:
        return
    whole = Data(Numbered(total), Numbered(3), "classes", {})
    data = hold_out(whole, share, seed=seed)
    train, validation = numbers(data.train), numbers(data.validation)
    assert sorted(train + validation) == list(range(total))
    assert len(validation) == max(1, round(share * total))
    assert numbers(hold_out(whole, share, seed=seed).validation) == validation
    assert data.test is whole.test


def test_a_split_is_by_the_seed() -> None:
    whole = Data(Numbered(1000), Numbered(3), "classes", {})
    parts = [set(numbers(hold_out(whole, 0.1, seed=seed).validation)) for seed in range(3)]
    assert all(len(a & b) < 30 for a, b in itertools.pairwise(parts)), "one in ten of a hundred, by chance"
    assert numbers(hold_out(whole, 0.1, seed=0).validation)[:5] == [1, 9, 10, 28, 38], "the same bits for ever"


def test_nothing_is_held_out_unless_asked_and_needed() -> None:
    whole = Data(Numbered(10), Numbered(3), "classes", {})
    assert hold_out(whole, 0.0, seed=0) is whole
    own = Data(Numbered(10), Numbered(3), "classes", {}, Numbered(4))
    assert hold_out(own, 0.5, seed=0) is own
    assert split_of(own, 3) == split_of(whole, 3) == {"share": 0.0}
    with pytest.raises(ConfigurationError, match="the validation data is empty"):
        hold_out(Data(Numbered(10), Numbered(3), "classes", {}, Numbered(0)), 0.1, seed=0)
    with pytest.raises(ConfigurationError, match="of 1 training examples leaves none"):
        hold_out(Data(Numbered(1), Numbered(3), "classes", {}), 0.1, seed=0)


def test_augmentation_follows_the_example_and_validation_has_none() -> None:
    """Whatever its index among the remaining examples."""
    data = build("resnet20", None, seed=0)[1]
    split = hold_out(data, 0.1, seed=5)
    assert isinstance(split.train, Subset)
    assert isinstance(split.validation, Subset)
    own = split.train._indices[[3, 70]]
    ours, theirs = (
        split.train.batch(np.array([3, 70]), seed=1, epoch=2, train=True),
        data.train.batch(own, seed=1, epoch=2, train=True),
    )
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("tokens", [500, 501, 509, 510, 511])
@pytest.mark.parametrize("kind", [NextTokens, MaskedTokens])
def test_windows_of_a_text_do_not_reach_into_those_held_out(tokens: int, kind: type[NextTokens]) -> None:
    """Training windows start anywhere, so a randomly held-out window would overlap its neighbours."""
    more = (10_000,) if kind is MaskedTokens else ()
    whole = Data(kind(np.arange(tokens), 10, *more), Numbered(1), "tokens", {})
    split = hold_out(whole, 0.1, seed=0)
    assert type(split.train) is type(split.validation) is kind
    assert split.validation is not None
    assert len(split.validation) == 5
    trained = set[int]()
    for epoch in range(30):
        for part in split.train.batch(np.arange(len(split.train)), seed=0, epoch=epoch, train=True):
            trained |= set(part.flatten().tolist())
    held = set[int]()
    for part in split.validation.batch(np.arange(5), seed=0, epoch=0, train=False):
        held |= set(part.flatten().tolist())
    if kind is MaskedTokens:  # masks, replaced tokens and what is not to be guessed
        trained, held = ({token for token in part if 0 <= token < tokens} for part in (trained, held))
        windows = split.train._windows(np.arange(len(split.train)), 9)  # type: ignore[attr-defined]
        assert windows.max() < split.validation._tokens.min()  # type: ignore[attr-defined]
    else:
        assert max(trained) < min(held)
        assert max(held) == tokens - 1
        assert len(held) == 51


def test_a_text_too_short_to_hold_any_out_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="too short to hold out 1 windows of 10"):
        hold_out(Data(NextTokens(np.arange(21), 10), Numbered(1), "tokens", {}), 0.1, seed=0)


def test_held_out_ratings_are_not_given_away() -> None:
    users, items = np.repeat(np.arange(40), 6), np.tile(np.arange(6), 40) + np.repeat(np.arange(40), 6) % 9
    whole = rating_data("made", users, items, 40, 120)
    split = hold_out(whole, 0.2, seed=0)
    assert split.validation is not None
    train, held = (
        part.batch(np.arange(len(part)), seed=0, epoch=0, train=mode)[0]
        for part, mode in ((split.train, True), (split.validation, False))
    )
    true = [{tuple(pair) for pair in pairs[:, 0].tolist()} for pairs in (train, held)]
    assert not true[0] & true[1]
    assert len(true[1]) == 40 == round(0.2 * len(whole.train))
    negatives = set[tuple[int, ...]]()
    for epoch in range(60):
        drawn = split.train.batch(np.arange(len(split.train)), seed=0, epoch=epoch, train=True)[0]
        negatives |= {tuple(pair) for pair in drawn[:, 1:].reshape(-1, 2).tolist()}
    assert negatives & true[1], "else training would tell which pairs are held out: those that are never negatives"
    assert not negatives & true[0]
    rivals = {tuple(pair) for pair in held[:, 1:].reshape(-1, 2).tolist()}
    assert not rivals & (true[0] | true[1])


# Data with validation data of its own


def test_files_with_three_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0).integers(0, 255, (30, 8, 8), dtype=np.uint8)
    parts = {"train": draws[:20], "val": draws[20:26], "test": draws[26:].astype(np.float64)}
    np.savez("three.npz", **{f"{name}_images": x for name, x in parts.items()}, **{
        f"{name}_labels": np.arange(len(x)) % 3 + (name == "val") for name, x in parts.items()
    })  # fmt: skip
    data = build("digits-cnn", "three.npz", seed=0)[1]
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 6, 4)
    assert data.sizes["classes"] == 4
    Path("named").mkdir()
    for name in ("train", "test", "valid"):
        Path(f"named/{name}.txt").write_text(f"{name} " * 100)
    for unit in ("", ":words:8"):
        data = build("lstm", f"named{unit}", seed=0)[1]
        assert data.validation is not None
        assert len(data.validation) == len(data.test) if unit else len(data.validation) > len(data.test)
        assert hold_out(data, 0.5, seed=0) is data
    assert bytes(data.validation.batch(np.array([0]), seed=0, epoch=0, train=False)[0][0].tolist()) == bytes(8)  # unknown


SETS = """
import torch
from torch.utils.data import TensorDataset
def of(count): return TensorDataset(torch.rand(count, 2), torch.rand(count))
def named(): return {"train": of(9), "validation": of(4), "test": of(3), "task": "classes"}
def two(): return {"train": of(9), "test": of(3)}
def three(): return of(9), of(4), of(3)
def lacking(): return {"train": of(9), "validation": of(3)}
def typo(): return {"train": of(9), "test": of(3), "validatoin": of(3)}
"""


def test_factories_with_three_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "sets", raising=False)
    Path("sets.py").write_text(SETS)
    data = build("torch.nn:Identity", "sets:named", seed=0)[1]
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (9, 4, 3)
    assert build("torch.nn:Identity", "sets:two", seed=0)[1].validation is None
    for name, words in (
        ("three", 'which is which; return {"train": …, "validation": …, "test": …}'),
        ("lacking", "must return Data, or (train, test)"),
        ("typo", "unknown key 'validatoin'; did you mean 'validation'?"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            build("torch.nn:Identity", f"sets:{name}", seed=0)


# Runs

SPIES = """
import torch
from torch.utils.data import Dataset

log = []  # which set, which example, and whether gradients were wanted of it, in the order in which they were taken

class Spied(Dataset):
    classes = 4
    def __init__(self, name, count):
        self.name, self.inputs = name, torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
    def __len__(self): return len(self.inputs)
    def __getitem__(self, index):
        log.append((self.name, index, torch.is_grad_enabled()))
        return self.inputs[index], self.inputs[index, :4].argmax()

def model(): return torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
def pair(): return Spied("train", 100), Spied("test", 30)
def three(): return {"train": Spied("train", 100), "test": Spied("test", 30), "validation": Spied("validation", 20)}
"""
TINY = ["--model", "spies:model", "--data", "spies:pair", "--batch-size", "8", "--density", "0.1", "--steps", "12"]
EVERY = ["--eval-every", "4"]


@pytest.fixture
def spied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, int, bool]]]:
    """Create the module `spies`; returns a function that lists the examples read since its last call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPISPARSE_PROGRESS", "plain")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spies", raising=False)
    Path("spies.py").write_text(SPIES)

    def taken() -> list[tuple[str, int, bool]]:
        log: list[tuple[str, int, bool]] = sys.modules["spies"].log
        seen = log[2:]  # the first of each set is looked at when they are opened
        log.clear()
        return seen

    return taken


def train(out: str, *options: str) -> int:
    return main(["train", "--out", out, *TINY, *options])


def evals(out: str) -> list[tuple[int, str]]:
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["data"]) for line in lines if line["kind"] == "eval"]


@pytest.mark.parametrize("scheme", ["exdyna", "predictive"])
def test_test_data_is_touched_at_the_end_only(spied: Callable[[], Any], scheme: str) -> None:
    learns = ["--option", "validate_every=5"] if scheme == "predictive" else []
    assert train("run", "--scheme", scheme, *EVERY, "--target", "2.0", *learns) == 0
    taken = spied()
    assert [name for name, _, _ in taken[-30:]] == ["test"] * 30
    assert "test" not in [name for name, _, _ in taken[:-30]]
    assert evals("run") == [(4, "validation"), (8, "validation"), (12, "validation"), (12, "test")]


def test_importance_is_learned_from_data_that_is_not_trained_on(spied: Callable[[], Any]) -> None:
    """In every step, and over epochs."""
    assert train("run", "--scheme", "predictive", "--steps", "30", "--option", "validate_every=5", *EVERY) == 0
    taken = [(index, wanted) for name, index, wanted in spied() if name == "train"]
    held = set(numbers(hold_out(Data(Numbered(100), Numbered(1), "classes", {}), 0.1, seed=0).validation))
    lessons = [index for index, wanted in taken if wanted and index in held]
    assert len(lessons) == 6 * 10, "six lessons of ten examples, all that are held out"
    assert len([index for index, wanted in taken if wanted and index not in held]) == 30 * 8
    assert {index for index, wanted in taken if not wanted} == held


def test_a_data_set_of_its_own_for_validation(spied: Callable[[], Any]) -> None:
    assert train("run", "--data", "spies:three", *EVERY) == 0
    taken = spied()
    assert {index for name, index, _ in taken if name == "train"} <= set(range(100))
    assert len({index for name, index, _ in taken if name == "train"}) > 60
    assert len([name for name, _, _ in taken if name == "validation"]) >= 3 * 20
    assert evals("run")[-2:] == [(12, "validation"), (12, "test")]
    assert train("run", "--data", "spies:three", *EVERY, "--steps", "16", "--validation", "0.3") == 0, "nothing was split"


def test_the_test_data_steers_where_asked(spied: Callable[[], Any]) -> None:
    assert train("on-test", "--evaluate-on", "test", "--validation", "0", *EVERY, "--target", "0.0") == 0
    assert evals("on-test") == [(4, "test")]
    assert {name for name, _, wanted in spied() if not wanted} == {"test"}
    assert train("both", "--evaluate-on", "test", *EVERY) == 0
    assert evals("both") == [(4, "test"), (8, "test"), (12, "test"), (12, "validation")]
    assert train("neither", "--validation", "0") == 0
    assert evals("neither") == [(12, "test")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "0.5"], "--target needs validation data"),
        (EVERY, "--eval-every needs validation data"),
        (["--scheme", "predictive"], "adaptive k of scheme predictive (--option adapt_k=false turns it off) needs"),
        (
            ["--scheme", "predictive", "--option", "adapt_k=false", "--option", "validation=true"],
            "--option validation=true needs validation data",
        ),
    ],
)
def test_nothing_to_steer_by_is_refused(
    spied: Callable[[], Any], capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert train("run", "--validation", "0", *options) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "--evaluate-on test" in said
    assert not Path("run").exists()


@pytest.mark.filterwarnings("ignore:scheme .predictive. without validation")
def test_prediction_without_validation_data_looks_at_none(spied: Callable[[], Any]) -> None:
    options = ["--scheme", "predictive", "--option", "adapt_k=false", "--option", "validate_every=5"]
    assert train("run", "--validation", "0", *options) == 0
    taken = spied()
    assert len([1 for name, _, wanted in taken if wanted and name == "train"]) == 12 * 8
    assert {name for name, _, wanted in taken if not wanted} == {"test"}


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "for 1 % pass 0.01"), (10.0, "got 10.0; for 10 % pass 0.1"), (-0.1, "got -0.1"), (float("nan"), "got nan")],
)
def test_shares_that_cannot_be(value: float, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("validation must be a share in [0, 1)")) as caught:
        Settings(validation=value)
    assert words in str(caught.value)
    with pytest.raises(ConfigurationError, match="unknown evaluate_on 'tset'; did you mean 'test'"):
        Settings(evaluate_on="tset")


# Going on


def test_a_split_stays_as_it_was(spied: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", *EVERY) == 0
    held = {index for name, index, wanted in spied() if name == "train" and not wanted}
    for options in (["--validation", "0.2"], ["--validation", "0"], ["--seed", "1"]):
        assert train("run", "--steps", "20", *options) == 2
        said = capsys.readouterr().err
        assert "what was validation data once must not be trained on" in said or "seed" in said
    spied()
    assert train("run", *EVERY, "--steps", "20") == 0
    taken = spied()
    assert {index for name, index, wanted in taken if name == "train" and not wanted} == held
    assert not {index for name, index, wanted in taken if wanted} & held


def test_a_run_of_an_earlier_version_goes_on_as_it_was(
    spied: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints have no validation data, which did not exist then."""

    save = checkpoint.begin_save

    def begin(*words: Any, extra: dict[str, Any], **more: Any) -> checkpoint.Saving:
        return save(*words, extra={key: v for key, v in extra.items() if key != "split"}, **more)

    as_it_was = ["--validation", "0", "--evaluate-on", "test"]
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "begin_save", begin)
        assert train("run", *as_it_was) == 0
    assert train("run", "--steps", "20") == 2
    said = capsys.readouterr().err
    assert "was trained on all training data" in said
    assert "continue with --validation 0" in said
    assert train("run", "--steps", "20", *as_it_was) == 0
    assert evals("run") == [(12, "test"), (20, "test")]


def test_what_differs_is_told() -> None:
    data = hold_out(Data(Numbered(50), Numbered(3), "classes", {}), 0.1, seed=2)
    now = split_of(data, 2)
    assert now == {"share": 0.1, "seed": 2, "left": 45}
    assert difference(dict(now), now) is None
    assert difference(None, {"share": 0.0}) is None
    told = str(difference({"share": 0.2, "seed": 2, "left": 40}, now))
    assert "--validation 0.2 by --seed 2, 40 examples left" in told
    assert "now --validation 0.1" in told
    assert "all training data" in str(difference(None, now))
    assert "none held out" in str(difference("nonsense", now)), "whatever a checkpoint says"
