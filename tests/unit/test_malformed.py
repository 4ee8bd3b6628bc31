"""Forged checkpoints with valid digests: refused as damaged, or accepted as they are.

Every mutation changes the contents and recomputes digests and sizes, so only checks of the contents can find it.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import h5file, objects, store, tree
from mpisparse.checkpoint.h5file import Arrays, Damaged, FileRecord, read_file, write_file
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.randomness import random_state
from mpisparse.runtime import inspect, run_state

pytestmark = pytest.mark.filterwarnings("ignore:an adaptive optimizer")

Files = dict[str, tuple[Arrays, dict[str, str]]]
EXTRA = {"epoch": 1, "offset": 8, "seconds": 0.5, "received": 1.0, "dense": 2.0, "metric": None}
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 7, 2**40, 2**70, -(2**70), 1.5, math.nan, math.inf, "", "0", "text", "nan", "0x1p99999",
    "\0", "../step-00000001/rank-0000.h5", "/etc/passwd", "os", "float64", "numpy:object", [], {}, [[]], {"x": 1}, DEEP,
    {"dict": []}, {"list": []}, {"float": "nan"}, {"float": "-0x1.0p+0"}, {"scalar": ["int64", 3]},
    {"array": ["buffers/1.running_mean", "os", []]},
]  # fmt: skip


class Run:
    """A small model that trains on one rank, with everything that has a state."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.sync = mpisparse.GradientSync(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        mpisparse.attach(self.optimizer, self.sync)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cpu")

    @property
    def subjects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "sync", "scheduler", "scaler")}

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 6) + random.random() + np.random.rand()).square().mean().backward()
        self.optimizer.step()

    def state(self) -> Any:
        with self.sync.global_weights():
            states = {name: subject.state_dict() for name, subject in self.subjects.items()}
            text, arrays = tree.flatten({**states, "random": random_state()})
            return text, {name: array.tobytes() for name, array in arrays.items()}


class Pair:
    """Two checkpoints of a run: the second is mutated, the first remains as a fallback."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.run = Run(**options)
        for step in (1, 2):
            self.run.train()
            self.run.scheduler.step()
            self.path = checkpoint.save(directory, step=step, extra=EXTRA, **self.run.subjects)
            if step == 1:
                self.first = self.run.state()
        self.directory = directory
        self.manifest = store.read_manifest(self.path)
        self.files: Files = {r.name: read_file(self.path / r.name, r) for r in self.manifest.files}
        self.whole = {p.name: p.read_bytes() for p in self.path.iterdir()}

    def restore(self) -> None:
        """Restore the second checkpoint."""
        shutil.rmtree(self.path)
        self.path.mkdir()
        for name, content in self.whole.items():
            (self.path / name).write_bytes(content)

    def write(self, files: Files) -> None:
        """Write files with new contents, and a manifest with their digests."""
        records = [write_file(self.path / name, *content) for name, content in files.items()]
        self.list_files({record.name: record for record in records})

    def list_files(self, records: dict[str, FileRecord]) -> None:
        body = self.body()
        body["files"] = [vars(records[f["name"]]) if f["name"] in records else f for f in body["files"]]
        self.write_manifest(body)

    def body(self) -> dict[str, Any]:
        """Return the manifest without its digest."""
        body: dict[str, Any] = json.loads((self.path / store.MANIFEST).read_text())
        del body["sha256"]
        return body

    def write_manifest(self, body: Any) -> None:
        (self.path / store.MANIFEST).write_text(json.dumps({**body, "sha256": store._digest(body)}))

    def verdict(self) -> str:
        """Load and compare the outcome with inspect --verify: accepted, refused as another model's, or damaged."""
        before = self.run.state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step = checkpoint.load(self.directory, extra={}, check_extra=run_state.check_run_state, **self.run.subjects)
                verdict = {1: "damaged", 2: "taken"}[step]
            except ConfigurationError:
                verdict = "refused"
        self.told = [str(w.message) for w in caught if "is not used" in str(w.message)]
        assert len(self.told) == (verdict == "damaged")
        record = inspect.look(self.path, verify=True)
        assert ("damaged" in record) == (verdict == "damaged"), (verdict, self.told, record.get("damaged"))
        assert json.dumps(record)
        assert inspect._page(record)
        assert inspect._page(inspect.look(self.path, verify=False))
        if verdict != "taken":
            assert self.run.state() == (self.first if verdict == "damaged" else before)
        return verdict


SCHEMES = {
    "exdyna": {"density": 0.1},
    "momentum": {"scheme": "momentum"},
    "predictive": {"scheme": "predictive", "density": 0.1},
    "speculative": {"scheme": "speculative", "density": 0.2},
    "drift": {"scheme": "drift", "density": 0.2, "staleness": 1},
    "drift-whole": {"scheme": "drift", "density": 1.0, "staleness": 1, "codec": "int8"},
}


@pytest.fixture(params=list(SCHEMES))
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Pair(tmp_path, **SCHEMES[request.param])
    yield made
    made.run.sync.close()


# Mutations


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths to all values in a JSON document."""
    if path:
        yield path
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield from places(value, (*path, key))


def mutate(body: Any, draw: random.Random) -> None:
    """Change one value of a JSON document: replace, delete, duplicate, rename or swap it."""
    *path, key = draw.choice([p for p in places(body) if len(p) < 9])
    parent = body
    for step in path:
        parent = parent[step]
    kind = draw.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif kind == 1 or (kind == 2 and isinstance(parent, dict)):
        parent["more"] = parent.pop(key)
    elif kind == 3:
        other = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = draw.choice(ODD)


def in_manifest(pair: Pair, draw: random.Random) -> None:
    body = pair.body()
    mutate(body, draw)
    pair.write_manifest(body)


def in_state(pair: Pair, draw: random.Random) -> None:
    """Change a value in the JSON of a rank's own state or of the replicated state."""
    name = draw.choice(list(pair.files))
    arrays, texts = pair.files[name]
    state = json.loads(texts["state"])
    mutate(state, draw)
    pair.write({name: (arrays, {"state": json.dumps(state)})})


def in_arrays(pair: Pair, draw: random.Random) -> None:
    """Change an array's type, length, values or name, or remove or add one."""
    name = draw.choice(list(pair.files))
    arrays, texts = dict(pair.files[name][0]), pair.files[name][1]
    key, other = draw.choice(list(arrays)), draw.choice(list(arrays))
    array = arrays[key]
    bad = {"f": math.nan, "i": -1}.get(array.dtype.kind, 255)
    with np.errstate(all="ignore"):
        changes: list[Callable[[], Arrays]] = [
            lambda: {key: array.astype(np.float64 if array.dtype != np.float64 else np.int8)},
            lambda: {key: array.view(np.uint8)},
            lambda: {key: array[:-1]},
            lambda: {key: np.concatenate([array, array])},
            lambda: {key: np.full_like(array, bad)},
            lambda: {key: -array if array.dtype.kind in "if" else array[::-1].copy()},
            lambda: {key: np.full_like(array, np.finfo(array.dtype).max if array.dtype.kind == "f" else 127)},
            lambda: {key: arrays[other], other: array},
            lambda: {"buffers/999": array},
        ]
        arrays |= draw.choice(changes)()
    if draw.randrange(8) == 0:
        del arrays[key]
    pair.write({name: (arrays, texts)})


MUTATIONS = 75  # for each scheme


def test_mutated_checkpoints_are_taken_or_damaged_and_inspect_says_the_same(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    draw = random.Random(request.node.callspec.id)
    verdicts: Counter[str] = Counter()
    names = set(vars(pair.run.scheduler))
    kinds = [in_manifest, in_state, in_state, in_arrays, in_state]
    for i in range(MUTATIONS):
        kinds[i % len(kinds)](pair, draw)
        verdict = pair.verdict()
        verdicts[verdict] += 1
        if verdict == "taken":  # then it can be trained on, unless its numbers are bad ones
            try:
                pair.run.train()
            except GradientError:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    (pair.path / store.MANIFEST).unlink()
                    assert checkpoint.load(pair.directory, **pair.run.subjects) == 1
            for name in vars(pair.run.scheduler).keys() - names:  # torch takes any name, and keeps it
                delattr(pair.run.scheduler, name)
        pair.restore()
    assert pair.verdict() == "taken"
    assert sum(verdicts.values()) == MUTATIONS
    assert verdicts["damaged"] > MUTATIONS // 2, verdicts


# Files that lead elsewhere, or swell


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "run", density=0.1)
    yield made
    made.run.sync.close()


ARRAY = "arrays/buffers/1.running_mean"


def a_soft_link(file: h5py.File, there: Path) -> None:
    file.move(ARRAY, "elsewhere")
    file[ARRAY] = h5py.SoftLink("/elsewhere")


def an_external_link(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file[ARRAY] = h5py.ExternalLink(str(there), ARRAY)


def an_external_group(file: h5py.File, there: Path) -> None:
    del file["arrays"]
    file["arrays"] = h5py.ExternalLink(str(there), "arrays")


def a_virtual_set(file: h5py.File, there: Path) -> None:
    size, dtype = file[ARRAY].shape, file[ARRAY].dtype
    del file[ARRAY]
    layout = h5py.VirtualLayout(shape=size, dtype=dtype)
    layout[:] = h5py.VirtualSource(str(there), ARRAY, shape=size)
    file.create_virtual_dataset(ARRAY, layout)


def external_data(file: h5py.File, there: Path) -> None:
    values = file[ARRAY][()]
    raw = there.with_suffix(".raw")
    raw.write_bytes(values.tobytes())
    del file[ARRAY]
    file.create_dataset(ARRAY, shape=values.shape, dtype=values.dtype, external=[(str(raw), 0, values.nbytes)])


def two_to_the_forty(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file.create_dataset(ARRAY, shape=(2**40,), dtype=np.float32, chunks=(1024,))


def a_huge_chunk(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file.create_dataset(ARRAY, shape=(30,), maxshape=(None,), dtype=np.float32, chunks=(2**29,))


def a_bomb(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file.create_dataset(ARRAY, data=np.zeros(1 << 20, dtype=np.float32), compression="gzip")


def texts_of_any_length(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file.create_dataset(ARRAY, data=["a", "b"], dtype=h5py.string_dtype())


def pairs_of_numbers(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file.create_dataset(ARRAY, data=np.zeros(3, dtype=[("a", "f4"), ("b", "i8")]))


def two_dimensions(file: h5py.File, there: Path) -> None:
    values = file[ARRAY][()]
    del file[ARRAY]
    file.create_dataset(ARRAY, data=values[None])


def one_number(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file[ARRAY] = 3.0


def nothing_at_all(file: h5py.File, there: Path) -> None:
    del file[ARRAY]
    file[ARRAY] = h5py.Empty("f4")


def a_type(file: h5py.File, there: Path) -> None:
    file["arrays/buffers/type"] = np.dtype("f8")


def a_circle(file: h5py.File, there: Path) -> None:
    file["arrays/buffers/again"] = file["arrays"]


def the_same_twice(file: h5py.File, there: Path) -> None:
    file["arrays/buffers/998"] = file[ARRAY]


def a_set_for_a_group(file: h5py.File, there: Path) -> None:
    del file["arrays"]
    file["arrays"] = np.zeros(3)


def a_group_for_a_set(file: h5py.File, there: Path) -> None:
    del file["texts/state"]
    file.create_group("texts/state")


CRAFTED = [
    a_soft_link, an_external_link, an_external_group, a_virtual_set, external_data, two_to_the_forty, a_huge_chunk, a_bomb,
    texts_of_any_length, pairs_of_numbers, two_dimensions, one_number, nothing_at_all, a_type, a_circle, the_same_twice,
    a_set_for_a_group, a_group_for_a_set,
]  # fmt: skip


def digest_as_read(path: Path) -> str:
    """Return the digest of what HDF5 reads from a file, without large data sets."""
    with h5py.File(path) as file:
        groups = {name: group for name, group in file["arrays"].items() if isinstance(group, h5py.Group)}
        inside = {f"{above}/{name}": group[name] for above, group in groups.items() for name in group}
        sets = {name: item for name, item in inside.items() if isinstance(item, h5py.Dataset)}
        small = {name: data[()] for name, data in sets.items() if data.dtype.kind in "biufc" and (data.size or 0) < 1 << 21}
        text = file["texts/state"]
        digest = h5file.Digest({"state": bytes(text[()]).decode()} if isinstance(text, h5py.Dataset) else {})
    for name, array in sorted(small.items()):
        digest.begin(name, np.asarray(array))
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def test_files_that_lead_elsewhere_or_swell_are_damaged_before_they_are_read(one: Pair) -> None:
    there = one.directory / store.name_of(1) / store.rank_file(0)
    file = one.path / store.rank_file(0)
    for change in CRAFTED:
        with h5py.File(file, "r+") as opened:
            change(opened, there)
        try:
            digest = digest_as_read(file)
        except (KeyError, TypeError, AttributeError):
            digest = ""
        one.list_files({file.name: FileRecord(file.name, file.stat().st_size, digest)})
        assert one.verdict() == "damaged", change.__name__
        assert "digest differs" not in one.told[0], change.__name__
        one.restore()
    with h5py.File(file, "r+") as opened:
        opened["arrays"].attrs["note"] = "of the user"
        opened["texts/state"].attrs["huge"] = np.zeros(1000)
    digest = digest_as_read(file)
    one.list_files({file.name: FileRecord(file.name, file.stat().st_size, digest)})
    assert one.verdict() == "taken", "attributes do no harm"


def test_a_data_set_larger_than_its_file_is_not_allocated(tmp_path: Path) -> None:
    for size, chunks in ((2**40, (1024,)), (2**40, None), (30, (2**29,))):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset(
                "arrays/own/0", shape=(size,), maxshape=(None,) if chunks else None, dtype="f4", chunks=chunks
            )
        with pytest.raises(Damaged, match=r"own/0 claims [0-9,]+ bytes, more than the file stores"):
            read_file(tmp_path / "a.h5")


def test_paths_that_leave_the_directory_are_not_followed(one: Pair) -> None:
    first = store.read_manifest(one.directory / store.name_of(1))
    for name in ("../step-00000001/rank-0000.h5", str(one.directory / "step-00000001" / "rank-0000.h5"), "./rank-0000.h5"):
        body = one.body()
        body["files"][0] = {**vars(first.record("rank-0000.h5")), "name": name}
        one.write_manifest(body)
        assert one.verdict() == "damaged"
        assert "by their names" in one.told[0]
    one.restore()
    for name in one.whole:
        away = one.directory.parent / name
        (one.path / name).rename(away)
        (one.path / name).symlink_to(away)
        assert one.verdict() == "damaged", name
        assert "is a link to another directory" in one.told[0]
        (one.path / name).unlink()
        os.mkfifo(one.path / name)  # to open it would wait for ever
        assert one.verdict() == "damaged", name
        assert "is not a regular file" in one.told[0]
        (one.path / name).unlink()
        away.rename(one.path / f"within-{name}")
        (one.path / name).symlink_to(f"within-{name}")
        assert one.verdict() == "taken", "a link inside the directory leads to what is in it"
        one.restore()


@pytest.mark.parametrize("depth", [200, 5000, 200_000])
def test_deep_json_is_damage(one: Pair, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    (one.path / store.MANIFEST).write_text(deep)
    assert one.verdict() == "damaged"
    one.restore()
    for name, (arrays, _) in one.files.items():
        for text in (deep, '{"list": [' * depth + "]}" * depth, '{"dict": [["a", ' * depth + "1" + "]]}" * depth):
            one.write({name: (arrays, {"state": text})})
            assert one.verdict() == "damaged", name
        one.restore()


def test_what_is_nested_too_deep_to_come_back_is_not_stored() -> None:
    state: Any = 1.5
    for _ in range(tree.DEEPEST):
        state = [state]
    assert tree.unflatten(*tree.flatten(state)) == state
    with pytest.raises(tree.UnsupportedError, match="nested more than 100 deep"):
        tree.flatten([state])


def test_another_order_of_the_optimizer_s_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    checkpoint.save(tmp_path, step=1, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    other = torch.optim.SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9)
    with pytest.raises(ConfigurationError, match=r"optimizer's parameters one was '0.weight' where this has '1.weight'"):
        checkpoint.load(tmp_path, model=model, optimizer=other)


def test_optimizers_of_torch_and_of_others_come_back(tmp_path: Path) -> None:
    """Checks for torch's own classes do not apply to others of the same name."""

    class AdamW(torch.optim.SGD):
        """Not torch's."""

    for at, kind in enumerate([*objects.ELEMENTWISE, torch.optim.Adafactor, torch.optim.LBFGS, AdamW]):
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().mean().backward()
            optimizer.step(lambda m=model: m(torch.ones(1, 3)).square().mean())
        saved = tree.flatten(optimizer.state_dict())[0]
        checkpoint.save(tmp_path / str(at), step=1, model=model, optimizer=optimizer)
        again = kind(model.parameters(), lr=0.01)
        assert checkpoint.load(tmp_path / str(at), model=model, optimizer=again) == 1, kind
        assert tree.flatten(again.state_dict())[0] == saved
        assert "damaged" not in inspect.look(tmp_path / str(at) / store.name_of(1), verify=True)
