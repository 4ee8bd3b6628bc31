"""Built-in and custom workloads: each learns or at least steps, and batches depend only on what they should."""

from __future__ import annotations

import lzma
import math
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.setup import make_optimizer
from mpisparse.runtime.workloads import DATA, MODELS, TASKS, Data, Examples, build
from mpisparse.runtime.workloads.data.draws import below, draw, shuffle
from mpisparse.runtime.workloads.data.images import ImageExamples, image_data
from mpisparse.runtime.workloads.data.ratings import Unseen
from mpisparse.runtime.workloads.data.text import LENGTH
from mpisparse.runtime.workloads.tasks import IGNORED

LARGE = {"resnet152", "bert-base", "gpt-small"}
PROSE = "one fish two fish red fish blue fish\n" * 60


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def images(count: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with small data of every kind."""
    monkeypatch.chdir(tmp_path)
    labels = np.arange(12) % 3
    np.savez("images.npz", x_train=images(12, 8, 8, 3), y_train=labels, x_test=images(6, 8, 8, 3), y_test=labels[:6])
    np.savez("large.npz", images=images(12, 3, 32, 32), labels=labels)
    Path("text.txt").write_text(PROSE)
    pairs = [f"u{user},i{(7 * user + item) % 11}" for user in range(5) for item in range(4)]
    Path("ratings.csv").write_text("\n".join(pairs))
    return tmp_path


def batch(examples: Examples, *indices: int, seed: int = 1, epoch: int = 0, train: bool = True) -> list[torch.Tensor]:
    return list(examples.batch(ints(*indices), seed=seed, epoch=epoch, train=train))


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def small_data(model: str) -> str:
    return {"digits": "images.npz", "synthetic-images": "images.npz", "synthetic-ratings": "ratings.csv"}.get(
        MODELS[model].data, "text.txt"
    )


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.slow] * (m in LARGE)) for m in MODELS])
def test_model_steps(name: str, folder: Path) -> None:
    """The initial loss is near that of guessing, every parameter gets a gradient, and a step lowers the loss."""
    model, data, task = build(name, small_data(name), seed=0)
    inputs, targets = batch(data.train, 0, 1, 2, 3)
    model.eval()  # no dropout; batch norm by its initial statistics would be wrong, so its modules stay in training
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.train()
    loss = task.loss(model(inputs), targets)
    loss.backward()
    rows = max(data.sizes.get("vocabulary", 1), MODELS[name].options.get("rows", 1))
    guess = {"ratings": math.log(2), "classes": math.log(3)}.get(data.task, math.log(rows))
    assert loss.item() == pytest.approx(guess, abs=1.0)
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    slope = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    torch.optim.SGD(model.parameters(), lr=1e-3 / slope).step()  # to first order, 0.001 less
    assert task.loss(model(inputs), targets).item() == pytest.approx(loss.item() - 1e-3, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("digits-cnn", 0.284),
        ("resnet20", 0.272),
        ("resnet18", 11.17),
        ("vgg16", 14.72),
        ("lstm-small", 0.297),
        ("lstm", 4.33),
        ("bert-mini", 3.17),
        ("gpt", 0.834),
        ("gpt-nano", 0.834),
        ("gpt-mini", 10.77),
        pytest.param("gpt-small", 123.7, marks=pytest.mark.slow),
        pytest.param("resnet152", 58.15, marks=pytest.mark.slow),
        pytest.param("bert-base", 85.1, marks=pytest.mark.slow),
    ],
)
def test_model_sizes(name: str, millions: float, folder: Path) -> None:
    model, _, _ = build(name, "digits" if name == "digits-cnn" else small_data(name), seed=0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "digits-cnn"])
@pytest.mark.parametrize("shape", [(28, 28), (9, 5), (40, 36)])
def test_image_models_take_any_size(name: str, shape: tuple[int, int], folder: Path) -> None:
    np.savez("odd.npz", images=images(4, *shape), labels=ints(0, 1, 1, 0))
    model, data, _ = build(name, "odd.npz", seed=0)
    assert model(batch(data.train, 0, 1)[0]).shape == (2, 2)


def test_residual_blocks_start_as_their_shortcut(folder: Path) -> None:
    model = build("resnet18", "images.npz", seed=0)[0]
    x = torch.rand(2, 64, 8, 8)
    assert torch.equal(model.stages[0](x), x)
    halved = model.stages[2](x)
    assert halved.shape == (2, 128, 4, 4)
    assert torch.equal(halved, model.stages[2].shortcut(x).relu())


def test_gpt_sees_no_later_token(folder: Path) -> None:
    model = build("gpt-nano", "text.txt", seed=0)[0]
    tokens = torch.arange(10)[None]
    other = tokens.clone()
    other[0, 6] = 99
    first, second = model(tokens), model(other)
    assert torch.equal(first[0, :6], second[0, :6])
    assert not torch.isclose(first[0, 6:], second[0, 6:]).all(1).any()


def test_gpt_decays_matrices_only(folder: Path) -> None:
    model = build("gpt-nano", "text.txt", seed=0)[0]
    optimizer = make_optimizer(model, Settings(model="gpt-nano", optimizer="adamw", weight_decay=0.1, beta2=0.99))
    first, second = optimizer.param_groups
    assert {p.dim() for p in first["params"]} == {2}
    assert {p.dim() for p in second["params"]} == {1}
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert first["betas"] == second["betas"] == (0.9, 0.99)
    assert len(first["params"]) + len(second["params"]) == len(list(model.parameters()))


def test_an_alphabet_has_the_letters_of_the_training_text(folder: Path) -> None:
    Path("own.txt").write_text("añb" * 200 + "ß" * 100)
    data = build("gpt-nano", "own.txt:alphabet:8", seed=0)[1]
    assert data.sizes == {"vocabulary": 5, "length": 8}, "a, b, ñ and ß, and any other"
    Path("own.txt").write_text("añb" * 700 + "ß" * 100)
    data = build("gpt-nano", "own.txt:alphabet:8", seed=0)[1]
    assert data.sizes["vocabulary"] == 4
    assert batch(data.train, 0, train=False)[0].tolist() == [[1, 3, 2, 1, 3, 2, 1, 3]]
    assert set(batch(data.test, len(data.test) - 1, train=False)[0].flatten().tolist()) == {0}
    Path("own.txt").write_bytes(b"\xff" * 500)
    with pytest.raises(ConfigurationError, match="an alphabet needs text in UTF-8"):
        build("gpt-nano", "own.txt:alphabet", seed=0)


def test_digits_are_learned() -> None:
    model, data, task = build("digits-cnn", None, seed=0)
    assert (len(data.train), len(data.test)) == (1500, 297)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        order = shuffle(1500, seed=epoch)
        for start in range(0, 1500, 32):
            inputs, targets = data.train.batch(order[start : start + 32], seed=0, epoch=epoch, train=True)
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    correct, count = task.measure(
        model(data.test.batch(np.arange(297), seed=0, epoch=0, train=False)[0]), batch_labels(data)
    )
    assert count == 297
    assert task.finish(correct / count) > 0.9


def batch_labels(data: Data) -> torch.Tensor:
    return data.test.batch(np.arange(len(data.test)), seed=0, epoch=0, train=False)[1]


def test_seed_decides_the_model(folder: Path) -> None:
    """Nothing else does: the global generators neither matter nor change."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    first = build("lstm", "text.txt", seed=3)[0].state_dict()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    again, other = (build("lstm", "text.txt", seed=seed)[0].state_dict() for seed in (3, 4))
    assert (torch.rand(3), random.random(), np.random.rand()) == (pytest.approx(expected[0]), *expected[1:])
    assert equal(list(first.values()), list(again.values()))
    assert not equal(list(first.values()), list(other.values()))


KINDS = {
    "images": ("resnet18", "large.npz", True),
    "small images": ("digits-cnn", "images.npz", False),
    "tokens": ("lstm", "text.txt", True),
    "words": ("lstm", "text.txt:words", True),
    "masked": ("bert-mini", "text.txt", True),
    "ratings": ("ncf", "ratings.csv", True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind: str, folder: Path) -> None:
    """A batch equals its examples one by one; seed and epoch matter only for random training data."""
    model, path, chance = KINDS[kind]
    data = build(model, path, seed=0)[1]
    for train in (True, False):
        both = batch(data.train, 3, 7, train=train)
        alone = [batch(data.train, index, train=train) for index in (3, 7)]
        assert equal(both, [torch.cat(parts) for parts in zip(*alone, strict=True)])
        assert equal(both, batch(build(model, path, seed=9)[1].train, 3, 7, train=train))
        torch.manual_seed(torch.initial_seed() + 1)
        for changed in ({"epoch": 1}, {"seed": 2}):
            assert equal(both, batch(data.train, 3, 7, train=train, **changed)) == (not (train and chance))
    assert len(data.test) > 0


def test_images_are_shifted_and_mirrored() -> None:
    """Every training image is one of the 9 x 9 windows of the framed one or its mirror, and all kinds occur."""
    x = np.arange(1, 1 + 32 * 32, dtype=np.float32).reshape(1, 1, 32, 32).repeat(400, axis=0)
    examples = ImageExamples(x, np.zeros(400, np.int64), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    framed = np.pad(x[0, 0], 4)
    windows = {framed[i : i + 32, j : j + 32].tobytes(): (i, j, False) for i in range(9) for j in range(9)}
    windows |= {framed[i : i + 32, j : j + 32][:, ::-1].tobytes(): (i, j, True) for i in range(9) for j in range(9)}
    found = [windows[image.numpy().tobytes()] for image in batch(examples, *range(400))[0][:, 0]]
    assert {i for i, _, _ in found} == {j for _, j, _ in found} == set(range(9))
    assert 150 < sum(mirrored for _, _, mirrored in found) < 250
    assert np.array_equal(batch(examples, 5, train=False)[0].numpy(), x[:1])


def test_images_are_normalised() -> None:
    x = np.array([0, 0, 10, 10], np.uint8).reshape(4, 1, 1, 1) + np.zeros((1, 2, 3, 3), np.uint8)
    x[:, 1] = 7  # a channel that is constant stays finite
    data = image_data((x, ints(0, 0, 1, 1)), (x, ints(0, 0, 1, 1)), 2)
    normal = batch(data.train, 0, 1, 2, 3)[0]
    assert normal[:, 0].flatten().tolist() == [-1.0] * 18 + [1.0] * 18
    assert not normal[:, 1].any()


def test_windows(folder: Path) -> None:
    """Test windows are adjacent, training windows start anywhere, targets are one token later."""
    data = build("lstm", "text.txt", seed=0)[1]
    assert data.sizes["vocabulary"] == 256
    training = PROSE.encode()[: -len(PROSE) // 20]
    assert len(data.train) == (len(training) - 1) // LENGTH
    inputs, targets = batch(data.train, 0, 1, 2, train=False)
    assert bytes(inputs.flatten().tolist()) == training[: 3 * LENGTH]
    assert bytes(targets.flatten().tolist()) == training[1 : 3 * LENGTH + 1]
    inputs, targets = batch(data.train, *range(len(data.train)))
    for window, after in zip(inputs, targets, strict=True):
        assert bytes([*window.tolist(), int(after[-1])]) in training
        assert torch.equal(window[1:], after[:-1])


def test_windows_of_another_length(folder: Path) -> None:
    data = build("lstm", "text.txt:characters:10", seed=0)[1]
    assert data.sizes["length"] == 10
    assert bytes(batch(data.train, 0, 1, train=False)[0].flatten().tolist()) == PROSE.encode()[:20]
    masked = build("bert-mini", "text.txt:words:10", seed=0)[1]
    assert (batch(masked.train, 0, 1, 2)[1] != IGNORED).sum(1).tolist() == [2, 2, 2]
    with pytest.raises(ConfigurationError, match="expected windows of at least 4 words, got 3"):
        build("lstm", "text.txt:words:3", seed=0)


def test_masks(folder: Path) -> None:
    """Ten of 64 tokens are targets: 80 % masked, 10 % unchanged, 10 % replaced at random."""
    data = build("bert-mini", "text.txt:characters", seed=0)[1]
    plain = build("lstm", "text.txt", seed=0)[1]
    count = len(data.train)
    clean = torch.cat([batch(plain.train, *range(count), train=False)[0]])
    inputs, targets = batch(data.train, *range(count), train=False)
    chosen = targets != -100
    assert (chosen.sum(1) == 10).all()
    assert torch.equal(targets[chosen], clean[chosen])
    assert torch.equal(inputs[~chosen], clean[~chosen])
    masked = (inputs[chosen] == 256).float().mean()
    kept = (inputs[chosen] == clean[chosen]).float().mean()
    assert masked.item() == pytest.approx(0.8, abs=0.07)
    assert kept.item() == pytest.approx(0.1, abs=0.05)
    assert 0.03 < 1 - masked - kept < 0.17
    assert inputs.max() == 256 == data.sizes["vocabulary"] - 1


def test_words_are_numbered_by_frequency(folder: Path) -> None:
    data = build("lstm", "text.txt:words", seed=0)[1]
    assert (
        data.sizes["vocabulary"] == 7
    )  # unknown, fish, blue, one, red, two, and the line end, which the cut makes the rarest
    assert batch(data.train, 0, train=False)[0][0, :9].tolist() == [3, 1, 5, 1, 4, 1, 2, 1, 6]


def test_text_files(folder: Path) -> None:
    """A file, its .xz and a directory of its halves give the same data; train… and test… are used as named."""
    half = len(PROSE) // 2
    Path("parts").mkdir()
    Path("parts/a.txt").write_text(PROSE[: half - 1])
    assert PROSE[half - 1] == "\n"  # what joins the files
    Path("parts/b.txt.xz").write_bytes(lzma.compress(PROSE[half:].encode()))
    Path("parts/ignored.bin").write_bytes(b"\xff")
    Path("text.txt.xz").write_bytes(lzma.compress(PROSE.encode()))
    expected = batch(build("lstm", "text.txt", seed=0)[1].test, 0)
    for path in ("text.txt.xz", "parts"):
        assert equal(expected, batch(build("lstm", path, seed=0)[1].test, 0))
    Path("named").mkdir()
    for name in ("train", "test", "valid"):
        Path(f"named/{name}.txt").write_text(f"{name} " * 100)
    data = build("lstm", "named", seed=0)[1]
    texts = [bytes(batch(part, 0, train=False)[0][0].tolist()) for part in (data.train, data.test)]
    assert texts == [b"train " * 10 + b"trai", b"test " * 12 + b"test"]


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        (("x_train", "y_train", "x_test", "y_test"), (0, 1, 2, 3)),
        (("train_images", "train_labels", "test_images", "test_labels"), (0, 2, 3, 1)),
        (("X_train", "Y_train", "X_test", "Y_test"), (0, 2, 3, 1)),
        (("trainX", "trainY", "val_x", "val_y"), (0, 1, 2, 3)),
        (("images", "labels"), (0, 1, 2, 3)),
        (("data", "target"), (0, 2, 3, 1)),
    ],
)
@pytest.mark.parametrize("kind", [np.uint8, np.float64])
def test_npz(keys: tuple[str, ...], layout: tuple[int, ...], kind: type, folder: Path) -> None:
    """Every naming, layout and type gives the same images; without a test set one in six is held out."""
    x, y = images(60, 3, 7, 9), (np.arange(60) % 4)[:, None]
    arrays = [x.transpose(layout).astype(kind), y, x[:6].transpose(layout).astype(kind), y[:6]]
    np.savez("any.npz", **dict(zip(keys, arrays, strict=False)))
    data = build("digits-cnn", "any.npz", seed=0)[1]
    assert data.sizes == {"classes": 4, "channels": 3, "height": 7, "width": 9}
    held_out = 0 if len(keys) == 4 else 10
    assert (len(data.train), len(data.test)) == (60 - held_out, held_out or 6)
    if not held_out:
        np.savez("plain.npz", x_train=x, y_train=y.ravel(), x_test=x[:6], y_test=y[:6].ravel())
        assert equal(batch(build("digits-cnn", "plain.npz", seed=0)[1].train, 3, 7), batch(data.train, 3, 7))


def test_npz_without_channels(folder: Path) -> None:
    np.savez("grey.npz", images=images(20, 6, 5), labels=np.arange(20) % 2)
    assert build("digits-cnn", "grey.npz", seed=0)[1].sizes == {"classes": 2, "channels": 1, "height": 6, "width": 5}


@pytest.mark.parametrize("header", ["", "userId,movieId,rating,timestamp\n", "a,b,c,d\n"])
def test_csv(header: str, folder: Path) -> None:
    """The latest item is for testing, repeated pairs count once, and users with one item are only for training."""
    rows = (
        "ann,tea,1,30\nann,milk,5,10\nann,rum,3,20\nbob,rum,4,0.5\n\nbob,tea,4,1\ncid,gin,1,1\nbob,rum,1,3\nann,milk,5,11\n"
    )
    Path("r.csv").write_text(header + rows)
    data = build("ncf", "r.csv", seed=0)[1]
    assert data.sizes == {"users": 3, "items": 4}
    pairs = [
        sorted(tuple(row) for row in batch(part, *range(len(part)))[0][:, 0].tolist()) for part in (data.train, data.test)
    ]
    assert pairs == [[(0, 1), (0, 2), (1, 0), (2, 3)], [(0, 0), (1, 2)]]


def test_csv_of_names_has_no_header(folder: Path) -> None:
    Path("r.csv").write_text("user1,item1\nuser1,item2\nuser2,item3\n")
    data = build("ncf", "r.csv", seed=0)[1]
    assert (data.sizes, len(data.train), len(data.test)) == ({"users": 2, "items": 3}, 2, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), unique=True), st.integers(0, 99))
def test_negatives_are_unseen(pairs: list[tuple[int, int]], seed: int) -> None:
    """Every unseen item can be drawn."""
    users, items = np.array(pairs, np.int64).reshape(-1, 2).T
    unseen = Unseen(users, items, 4, 7)
    for user in range(4):
        left = {item for item in range(7) if (user, item) not in pairs}
        assert unseen.counts[user] == len(left)
        if left:
            picked = unseen.pick(ints(user), draw(ints(user), 300, seed=seed, epoch=0))
            assert set(picked[0].tolist()) == left


def test_rating_batches(folder: Path) -> None:
    data = build("ncf", "ratings.csv", seed=0)[1]
    for part, train, width in ((data.train, True, 5), (data.test, False, 100)):
        pairs, targets = batch(part, 0, 2, 4, train=train)
        assert pairs.shape == (3, width, 2)
        assert targets.tolist() == [[1.0] + [0.0] * (width - 1)] * 3
        assert (pairs[:, :, 0] == pairs[:, :1, 0]).all()
        assert (pairs[:, 1:, 1] != pairs[:, :1, 1]).all()


@pytest.mark.parametrize("name", [name for name in DATA if name != "digits"])
def test_built_in_data(name: str) -> None:
    data = build({"synthetic-images": "digits-cnn", "synthetic-ratings": "ncf"}.get(name, "lstm"), name, seed=0)[1]
    assert len(data.train) > 4 * len(data.test) > 1000
    inputs, _ = batch(data.train, 0, len(data.train) - 1)
    if "vocabulary" in data.sizes:
        assert inputs.max() < data.sizes["vocabulary"] == (8191 if name == "python-words" else 256)


def test_synthetic_images_can_be_told_apart() -> None:
    """The nearest class mean is right for nearly all, so there is something to learn."""
    data = build("digits-cnn", "synthetic-images", seed=0)[1]
    x, y = data.train.batch(np.arange(2000), seed=0, epoch=0, train=False)
    means = torch.stack([x[y == label].mean(0).flatten() for label in range(10)])
    x, y = data.test.batch(np.arange(500), seed=0, epoch=0, train=False)
    assert (torch.cdist(x.flatten(1), means).argmin(1) == y).float().mean() > 0.95


def test_synthetic_ratings_can_be_learned() -> None:
    """Users with common items share further items more often than by chance."""
    data = build("ncf", "synthetic-ratings", seed=0)[1]
    pairs, _ = data.train.batch(np.arange(len(data.train)), seed=0, epoch=0, train=True)
    met = torch.zeros(2000, 1000)
    met[pairs[:, 0, 0], pairs[:, 0, 1]] = 1
    candidates, targets = data.test.batch(np.arange(500), seed=0, epoch=0, train=False)
    scores = (met[:500] @ met.T @ met).gather(1, candidates[:, :, 1])
    hits, count = TASKS["ratings"].measure(scores, targets)
    assert hits / count > 0.3  # by chance 0.1


BAD_FILES = {
    "keys.npz": ({"pixels": images(3, 2, 2)}, r"keys\.npz: expected arrays x_train.* got pixels"),
    "labels.npz": ({"images": images(3, 2, 2), "labels": ints(0, 1)}, r"one label per image; got images \(3, 2, 2\)"),
    "negative.npz": ({"images": images(3, 2, 2), "labels": ints(0, -1, 1)}, "must be class numbers"),
    "flat.npz": ({"images": images(3, 4), "labels": ints(0, 1, 1)}, r"must be numbers \(N, H, W\).* got \(3, 4\)"),
    "nan.npz": ({"images": np.full((2, 2, 2), np.nan), "labels": ints(0, 1)}, "NaN"),
    "huge.npz": ({"images": np.full((2, 2, 2), 1e300), "labels": ints(0, 1)}, "infinite values"),
    "label.npz": ({"images": images(2, 2, 2), "labels": ints(0, 2**40)}, r"below 1,048,576, got 1099511627776; number the"),
    "unsigned.npz": (
        {"images": images(2, 2, 2), "labels": np.array([0, 2**64 - 1], np.uint64)},
        "must be class numbers below",
    ),
    "infinite.npz": ({"images": images(2, 2, 2), "labels": np.array([0, np.inf])}, "must be class numbers below"),
    "object.npz": ({"images": np.array([None, {}]), "labels": ints(0, 1)}, "plain arrays"),
    "shapes.npz": (
        {"x_train": images(2, 2, 2), "y_train": ints(0, 1), "x_test": images(2, 3, 2), "y_test": ints(0, 1)},
        r"the same shape, got .* \(1, 2, 2\) and \(1, 3, 2\)",
    ),
    "no.npz": (b"not a zip", "expected an .npz of plain arrays"),
    "empty.txt": (b"", r"empty\.txt: .* \(the text is empty\)"),
    "short.txt": (b"x" * 100, r"more than 64 characters .* got 35 and 65; give a longer text"),
    "latin.txt:words": ("Grüße ".encode("latin-1") * 99, "UTF-8"),
    "broken.xz": (lzma.compress(b"x" * 9999)[:-20], r"broken\.xz: could not be read as xz"),
    "fields.csv": (b"1,2,3\n1,3\n7\n", r"fields\.csv, line 3: expected user,item.*, got '7'"),
    "number.csv": (b"1,2,3,4\n\n1,3,x,4\n", r"number\.csv, line 3: the rating must be a number, got 'x'"),
    "time.csv": (b"user,item,rating,time\n1,2,3,now\n", r"time\.csv, line 2: the timestamp must be a number, got 'now'"),
    "never.csv": (b"1,2,3,4\n1,3,3,inf\n", r"never\.csv, line 2: the timestamp must be finite, got 'inf'"),
    "order.csv": (b"item,user\n1,2\n", "the header says item,user; reorder"),
    "none.csv": (b"user,item\n", "the file has none"),
    "single.csv": (b"1,1\n2,2\n", "users with at least two items"),
    "all.csv": (b"1,1\n1,2\n2,2\n", "1 users have all 2 items"),
    "picture.png": (b"", "unknown type of file 'picture.png'; expected a path: images.npz"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, folder: Path) -> None:
    content, message = BAD_FILES[name]
    path = Path(name.split(":")[0])
    if isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        build("lstm", name, seed=0)


def test_an_npz_that_claims_too_much_is_refused(folder: Path) -> None:
    np.savez("claims.npz", images=images(2, 2, 2), labels=ints(0, 1))
    with zipfile.ZipFile("claims.npz") as whole:
        content = {name: whole.read(name) for name in whole.namelist()}
    shape = b"(2, 2, 2), }"
    content["images.npy"] = content["images.npy"].replace(shape, b"(2,1,9" + b"0" * 15 + b"),}", 1)
    with zipfile.ZipFile("claims.npz", "w") as file:
        for name, data in content.items():
            file.writestr(name, data)
    with pytest.raises(ConfigurationError, match=r"claims\.npz: expected an \.npz of plain arrays"):
        build("digits-cnn", "claims.npz", seed=0)


CUSTOM = """
import random, numpy as np, torch
from torch.utils.data import Dataset, TensorDataset
from mpisparse.runtime.workloads import Task, Data

class Noisy(Dataset):
    classes = ["cat", "dog", "eel"]
    def __len__(self): return 10
    def __getitem__(self, index):
        return torch.full((1, 4, 4), index + random.random() + np.random.rand()) + torch.rand(1), index % 3

class Iterable:
    def __iter__(self): return iter(())

def linear(sizes): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, sizes["classes"]))
def fixed(width=8): return torch.nn.Linear(width, 3)
def optional(sizes=None): return torch.nn.Linear(sizes["width"], 3)
def many(a, b): return None
def wrong(): return 7
ready = torch.nn.Linear(1, 1)
def pair(): return Noisy(), Noisy()
def tensors(): return TensorDataset(torch.rand(5, 2), torch.rand(5))
def triple(): return tensors(), tensors(), "wl:error"
def whole(): return Data(None, None, "wl:error", {"width": 3})
def typo(): return Noisy(), Noisy(), "clases"
def stream(): return Iterable(), Iterable()
def items(): return [1, 2], [3]
def empty(): return [], []
error = Task("squared error", False, lambda o, t: ((o - t) ** 2).mean(), lambda o, t: (float(((o - t) ** 2).sum()), len(t)))
"""


@pytest.fixture
def custom(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a module `wl` in the working directory, which is not on the path (as for a console script)."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "wl", raising=False)
    Path("wl.py").write_text(CUSTOM)
    return folder


def test_custom_factories(custom: Path) -> None:
    model, data, task = build("wl:linear", "wl:pair", seed=0)
    assert data.sizes == {"classes": 3, "channels": 1, "height": 4, "width": 4}
    assert task is TASKS["classes"]
    inputs, targets = batch(data.train, 4, 2)
    assert targets.tolist() == [1, 2]
    assert task.loss(model(inputs), targets).isfinite()
    assert build("digits-cnn", "wl:pair", seed=0)[0](inputs).shape == (2, 3)
    assert isinstance(build("wl:fixed", "digits", seed=0)[0], torch.nn.Linear)
    assert build("wl:fixed", "wl:whole", seed=0)[1].sizes == {"width": 3}
    drawn, plain = (build("wl:fixed", data, seed=0)[0].weight for data in ("wl:triple", "wl:whole"))
    assert torch.equal(drawn, plain)  # data that draws changes nothing about the model
    assert build("wl:optional", "wl:whole", seed=0)[0].in_features == 3
    _, data, task = build("torch.nn:Identity", "wl:triple", seed=0)
    assert task.metric == "squared error"
    assert batch(data.train, 1, 3)[0].shape == (2, 2)
    assert equal(batch(data.train, 1), batch(build("torch.nn:Identity", "wl:triple", seed=0)[1].train, 1))


def test_custom_randomness_follows_the_example(custom: Path) -> None:
    """A dataset that uses the global generators gives the same example in any batch, and leaves them unchanged."""
    data = build("wl:linear", "wl:pair", seed=0)[1]
    torch.manual_seed(1)
    state = torch.get_rng_state(), random.getstate()
    both = batch(data.train, 3, 7)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    assert equal(both, [torch.cat(parts) for parts in zip(batch(data.train, 3), batch(data.train, 7), strict=True)])
    assert not equal(both, batch(data.train, 3, 7, epoch=1))
    assert equal(batch(data.test, 3, train=False), batch(data.test, 3, epoch=1, seed=2, train=False))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("resnet81", None, "unknown model 'resnet81'; did you mean 'resnet18'"),
        ("lstm", "python-txt", "unknown data 'python-txt'; did you mean 'python-text'.* or give a path: images.npz"),
        ("lstm", "gone.txt", "no file or directory 'gone.txt'"),
        ("lstm", "gone.txt:words", "no file or directory 'gone.txt'"),
        ("lstm", "digits", "'lstm' needs data with the sizes vocabulary, but 'digits' has .*such as 'python-text'"),
        ("ncf", "text.txt", "needs data with the sizes users, items"),
        ("wl:linear", None, "model 'wl:linear' has no data of its own; choose from: digits"),
        ("wl:liner", "digits", "no 'liner'; did you mean 'linear'"),
        ("wl:many", "digits", "one argument, sizes, or none; this one requires 2"),
        ("wl:wrong", "digits", "must return a torch.nn.Module, got int"),
        ("wl:ready", "digits", "expected a function or class to call, got an object of Linear"),
        ("wl.py:linear", "digits", "no module 'wl.py'.* for the file wl.py write wl:"),
        ("nowhere.models:net", "digits", "tried to import 'nowhere.models', but there is no module 'nowhere'"),
        ("a b:c", "digits", "expected package.module:object, got 'a b:c'"),
        ("wl:fixed", "wl:typo", "unknown task 'clases'; did you mean 'classes'"),
        ("wl:fixed", "wl:stream", "map-style datasets whose items are .*got a Iterable"),
        ("wl:fixed", "wl:items", "items must be .input, target., but the first is int"),
        ("wl:fixed", "wl:empty", "a dataset is empty"),
        ("wl:fixed", "wl:wrong", "must return Data, or .*got int"),
    ],
)
def test_bad_names(model: str, data: str | None, message: str, custom: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(model, data, seed=0)


def test_a_bad_model_is_found_before_data_is_loaded(custom: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'linear'"):
        build("wl:liner", "gone.txt", seed=0)


def test_errors_inside_custom_modules_are_theirs(custom: Path) -> None:
    Path("needy.py").write_text("import surely_not_installed")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        build("needy:net", "digits", seed=0)


def test_classes_metric() -> None:
    outputs, targets = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]]), torch.tensor([0, 1, 1])
    task = TASKS["classes"]
    assert task.measure(outputs, targets) == (2.0, 3.0)
    expected = np.mean([math.log1p(math.exp(-1)), math.log1p(math.exp(-3)), math.log1p(math.exp(1))])
    assert task.loss(outputs, targets).item() == pytest.approx(expected)
    assert (task.metric, task.higher_is_better, task.finish(0.5)) == ("accuracy", True, 0.5)


@pytest.mark.parametrize("name", ["tokens", "masked-tokens"])
def test_token_metric(name: str) -> None:
    """Ignored targets do not count; the perplexity of equally likely tokens is their number."""
    task = TASKS[name]
    outputs, targets = torch.zeros(2, 3, 8), torch.tensor([[1, -100, 2], [7, 0, -100]])
    outputs[0, 1] = torch.arange(8.0)
    total, count = task.measure(outputs, targets)
    assert count == 4
    assert task.finish(total / count) == pytest.approx(8)
    assert task.loss(outputs, targets).item() == pytest.approx(math.log(8))
    assert (task.metric, task.higher_is_better, task.finish(1e6)) == ("perplexity", False, math.inf)


def test_rating_metric() -> None:
    """Rank ten is a hit, eleven is not; ties and NaN are not hits."""
    outputs = torch.zeros(4, 100)
    outputs[0, 0], outputs[0, 1:10] = 1, 2
    outputs[1, 0], outputs[1, 1:11] = 1, 2
    outputs[3] = math.nan
    targets = torch.zeros(4, 100)
    targets[:, 0] = 1
    task = TASKS["ratings"]
    assert task.measure(outputs, targets) == (1.0, 4.0)
    assert task.loss(torch.zeros(2, 100), targets[:2]).item() == pytest.approx(math.log(2))
    assert (task.metric, task.higher_is_better) == ("hit rate@10", True)


def mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_draws(seed: int, epoch: int, index: int) -> None:
    """The vectorized hash equals the one in Python integers."""
    step = 0x9E3779B97F4A7C15
    row = mix((index * step + mix(mix((seed + step) % 2**64) ^ epoch)) % 2**64)
    assert draw(ints(0, index), 3, seed=seed, epoch=epoch)[1].tolist() == [mix((row + i * step) % 2**64) for i in (1, 2, 3)]


def test_draws_are_even() -> None:
    counts = np.bincount(below(draw(np.arange(1000), 70, seed=1, epoch=2), 7).ravel(), minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - 10_000).max() < 400
    assert sorted(shuffle(1000, seed=3).tolist()) == list(range(1000))


def test_names_need_no_torch() -> None:
    """Nor MPI: --help shows the names and descriptions on a login node."""
    code = (
        "import sys, mpisparse.runtime.workloads as w; print([m for m in ('torch', 'numpy', 'mpi4py') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
    assert all(entry.description for entry in (*MODELS.values(), *DATA.values()))
