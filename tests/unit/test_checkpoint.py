"""Checkpoints in one process: their contents, what they detect, and what remains when something fails."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.backends import device, numpy_backend
from mpisparse.checkpoint import h5file, onefile, store, tree
from mpisparse.checkpoint.h5file import Damaged, read_file, write_file
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import CheckpointError, ConfigurationError
from mpisparse.runtime import inspect

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Open the common file on one rank without HDF5's MPI driver; its layout and contents are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onefile, "lacking", lambda: None)
        patch.setattr(onefile, "open_together", lambda path, comm: h5py.File(path, "r+"))
        yield


@pytest.fixture(params=[None, "mpio"], ids=["files", "one-file"])
def driver(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Run with files per rank, and with one file for all."""
    with alone():
        yield request.param


# Trees


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any type and shape, of random bits, contiguous or not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape))
    if dtype is torch.bool:
        flat = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    else:
        size = count * dtype.itemsize
        flat = torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size)) or b"\0" * 16), dtype=dtype)[:count]
    tensor = flat.reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 5e-324]),
    st.text(),
    tensors(),
)
KEYS = st.one_of(st.integers(), st.text())
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4), st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Tell whether two states have equal types, order of keys and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and memory(a) == memory(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b)
    return bool(a == b)


def memory(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


@given(STATES)
def test_a_tree_comes_back_as_it_was(state: Any) -> None:
    text, arrays = tree.flatten(state)
    assert same(tree.unflatten(text, arrays), state)
    assert all(name.count("/") == 1 for name in arrays)
    with h5py.File("names.h5", "w", driver="core", backing_store=False) as file:
        for name in arrays:
            file[name] = 0
        assert {f"{group}/{name}" for group in file for name in file[group]} == set(arrays), "HDF5 has these names"


def test_arrays_are_named_by_their_place() -> None:
    class Slashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("a/b", nn.Parameter(torch.ones(2, 3)))
            self.register_buffer("count", torch.tensor(3))

    _, arrays = tree.flatten({"model": Slashed().state_dict(), "optimizer": {"state": {0: {"m": torch.zeros(4)}}}})
    assert {name: array.shape for name, array in arrays.items()} == {
        "model/a%2Fb": (2, 3),
        "model/count": (),  # elsewhere scalars are in the text
        "optimizer/state.0.m": (4,),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7)], ids=str)
def test_every_type_goes_through_a_file(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.arange(int(np.prod(shape)) + 1)[1:].reshape(shape).to(dtype)
    text, arrays = tree.flatten({"x": values})
    record = write_file(tmp_path / "a.h5", arrays, {"state": text})
    arrays, texts = read_file(tmp_path / "a.h5", record)
    assert same(tree.unflatten(texts["state"], arrays), {"x": values})


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros(0), np.arange(3, dtype=">i4")])
def test_numpy_arrays_go_through_a_file(tmp_path: Path, value: Any) -> None:
    text, arrays = tree.flatten([value])
    arrays, texts = read_file(tmp_path / "a.h5", write_file(tmp_path / "a.h5", arrays, {"state": text}))
    assert same(tree.unflatten(texts["state"], arrays), [value])


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", 1j, lambda: None, torch.float32, np.float32(1)],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_stored_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(tree.UnsupportedError, match=rf"{type(value).__name__} at /groups/1/lr"):
        tree.flatten({"groups": [0, {"lr": value}]})
    with pytest.raises(tree.UnsupportedError, match="at the top"):
        tree.flatten(value)


@pytest.mark.parametrize("key", [1.5, True, None, (1, 2)], ids=repr)
def test_keys_that_cannot_be_stored_are_refused_with_their_place(key: Any) -> None:
    with pytest.raises(tree.UnsupportedError, match=f"the key {re.escape(repr(key))} at /a"):
        tree.flatten({"a": {key: 1}})


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3).to(torch.float8_e4m3fn),
        lambda: np.array([object()]),
        lambda: np.array(["text"]),
    ],
    ids=["float8", "objects", "texts"],
)
def test_tensors_are_stored_or_refused_with_their_place(make: Any) -> None:
    value = make()
    with pytest.raises(tree.UnsupportedError, match="at /state/0"):
        tree.flatten({"state": [value]})


@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_tensors_return_as_they_were(coalesced: bool) -> None:
    value = torch.sparse_coo_tensor([[1, 1, 4]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], (6, 2), check_invariants=False)
    value = value.coalesce() if coalesced else value
    text, arrays = tree.flatten({"x": value})
    back = tree.unflatten(text, dict(arrays))["x"]
    assert back.is_coalesced() == coalesced
    assert back.shape == value.shape
    assert torch.equal(back._indices(), value._indices())
    assert torch.equal(back._values(), value._values())
    arrays["x/indices"] = arrays["x/indices"] + 5
    with pytest.raises(ValueError, match="malformed"):
        tree.unflatten(text, arrays)


# Files


@pytest.fixture(params=["numpy", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run with the checksum of either backend."""
    if request.param == "native":
        pytest.importorskip("mpisparse._cpu", exc_type=ImportError)
    backend = device.load_backend(request.param)
    monkeypatch.setattr(h5file, "load_backend", lambda: backend)
    return backend


@given(st.lists(st.integers(0, 65535), max_size=3000))
def test_native_and_reference_checksums_agree(words: list[int]) -> None:
    pytest.importorskip("mpisparse._cpu", exc_type=ImportError)
    array = np.array(words, dtype=np.uint16).view(np.uint8)
    assert device.load_backend("native").fletcher32(array) == numpy_backend.fletcher32(array)


@pytest.mark.parametrize("count", [2, 718, 720, 722, 8192, 8194, 100_002])
def test_checksums_of_extreme_bytes_agree(count: int) -> None:
    pytest.importorskip("mpisparse._cpu", exc_type=ImportError)
    for byte in (0, 255):
        array = np.full(count, byte, dtype=np.uint8)
        assert device.load_backend("native").fletcher32(array) == numpy_backend.fletcher32(array)


def some_arrays() -> h5file.Arrays:
    generator = np.random.Generator(np.random.PCG64(5))
    return {
        "own/0": generator.standard_normal(1001).astype(np.float32),
        "own/1": generator.integers(0, 255, 77, dtype=np.uint8),
        "own/2": np.zeros(0, dtype=np.float64),
        "own/3": np.array([True, False, True]),
        "own/4": generator.standard_normal(3),
        "own/5": np.full(64, -1, dtype=np.int64),
    }


@pytest.mark.parametrize("chunk", [8, 24, 400, 1 << 22])
def test_hdf5_itself_accepts_our_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any, chunk: int
) -> None:
    monkeypatch.setattr(h5file, "CHUNK_NBYTES", chunk)
    arrays = some_arrays()
    record = write_file(tmp_path / "a.h5", arrays, {"state": "text", "empty": ""})
    assert record.nbytes == (tmp_path / "a.h5").stat().st_size
    with h5py.File(tmp_path / "a.h5") as file:
        for name, array in arrays.items():
            data = file[f"arrays/{name}"]
            assert data.fletcher32 or not array.size
            assert data.id.get_num_chunks() >= array.nbytes / (chunk + array.itemsize) if array.size else True
            assert same(data[()], array)
        assert file["texts/state"].fletcher32
    found, texts = read_file(tmp_path / "a.h5", record)
    assert same(dict(sorted(found.items())), arrays)
    assert texts == {"state": "text", "empty": ""}


def places_of_data(path: Path) -> list[tuple[str, int, int]]:
    """Return the name, first byte and length of every chunk in a file."""
    places = []
    with h5py.File(path) as file:
        for name in [*(f"arrays/{n}" for n in some_arrays()), "texts/state"]:
            data = file[name].id
            for i in range(data.get_num_chunks() if file[name].chunks else 0):
                info = data.get_chunk_info(i)
                places.append((name, info.byte_offset, info.size))
    return places


def test_hdf5_itself_notices_a_flipped_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(h5file, "CHUNK_NBYTES", 400)
    path = tmp_path / "a.h5"
    write_file(path, some_arrays(), {"state": "text"})
    content = path.read_bytes()
    draw = random.Random(3)
    places = places_of_data(path)
    assert len(places) > 14
    for name, begin, nbytes in places:
        spoiled = bytearray(content)
        spoiled[begin + draw.randrange(nbytes)] ^= 1 << draw.randrange(8)
        path.write_bytes(spoiled)
        with h5py.File(path) as file, pytest.raises(OSError, match=r"(?i)checksum|filter"):
            file[name][()]
        with pytest.raises(Damaged, match=str(path)):
            read_file(path)


def test_the_digest_notices_what_hdf5_cannot(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    arrays = {"own/0": np.arange(8.0), "own/1": np.arange(8.0) + 1}
    texts = {"state": "one", "other": "two"}
    record = write_file(path, arrays, texts)
    others: list[tuple[h5file.Arrays, dict[str, str]]] = [
        ({"own/0": arrays["own/1"], "own/1": arrays["own/0"]}, texts),
        (arrays, {"state": "two", "other": "one"}),
        (arrays | {"own/1": (np.arange(8.0) + 1).view(np.int64)}, texts),
        ({"own/0": arrays["own/0"]}, texts),
        (arrays | {"own/2": np.zeros(0)}, texts),
        (arrays, {"state": "one"}),
    ]
    for other, words in others:
        nbytes = write_file(path, other, words).nbytes
        with pytest.raises(Damaged, match="digest differs"):
            read_file(path, h5file.FileRecord(record.name, nbytes, record.digest))
    read_file(path, write_file(path, arrays, texts))


def test_cut_and_lengthened_files_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    record = write_file(path, some_arrays(), {"state": "text"})
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 100, *range(200, len(content), 977), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(Damaged):
            read_file(path, record)
    path.write_bytes(content + b"\0")
    with pytest.raises(Damaged, match="were written"):
        read_file(path, record)
    path.unlink()
    with pytest.raises(Damaged, match="cannot be read"):
        read_file(path, record)


# One file for all ranks


def write_one(place: Path, files: dict[str, tuple[h5file.Arrays, dict[str, str]]]) -> dict[str, h5file.FileRecord]:
    """Write the contents of files as parts of one file; returns their records by file name."""
    exchange = Exchange()
    with alone():
        records = onefile.write_parts(exchange, place, files)
    exchange.close()
    return dict(zip(files, records, strict=True))


def test_every_type_goes_through_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onefile, "SLICE_NBYTES", 24)
    states = {
        f"rank-{i:04d}.h5": {"a": torch.arange(35).reshape(5, 7).to(dtype), "none": torch.zeros(0, 3, dtype=dtype)}
        for i, dtype in enumerate(DTYPES)
    }
    flat = {name: tree.flatten(state) for name, state in states.items()}
    empty: dict[str, tuple[h5file.Arrays, dict[str, str]]] = {"shared-0000.h5": ({}, {}), "shared-0001.h5": ({}, {"x": ""})}
    records = write_one(tmp_path, {name: (arrays, {"state": text}) for name, (text, arrays) in flat.items()} | empty)
    assert [p.name for p in tmp_path.iterdir()] == ["all.h5"]
    assert {r.nbytes for r in records.values()} == {(tmp_path / "all.h5").stat().st_size}
    for name, state in states.items():
        arrays, texts = read_file(tmp_path / records[name].name, records[name])
        assert same(tree.unflatten(texts["state"], arrays), state)
    for name, content in empty.items():
        assert read_file(tmp_path / records[name].name, records[name]) == content


def test_the_digest_of_a_part_notices_what_hdf5_cannot(tmp_path: Path) -> None:
    arrays = {"own/0": np.arange(9.0), "own/1": np.arange(9.0) + 1}
    texts = {"state": "one", "other": "two"}
    records = write_one(tmp_path, {"rank-0000.h5": (arrays, texts), "rank-0001.h5": ({"own/0": np.zeros(9)}, texts)})
    first, second = records.values()
    whole = tmp_path / "all.h5"
    content = whole.read_bytes()

    def other_value(file: h5py.File) -> None:
        file["rank-0000/arrays/own/0"][5] = 7.0

    def other_text(file: h5py.File) -> None:
        file["rank-0000/texts/state"][:] = np.frombuffer(b"two", np.uint8)

    def swapped(file: h5py.File) -> None:
        for old, new in (("rank-0000", "x"), ("rank-0001", "rank-0000"), ("x", "rank-0001")):
            file.move(old, new)

    def renamed(file: h5py.File) -> None:
        file.move("rank-0000/arrays/own/1", "rank-0000/arrays/own/2")

    def less(file: h5py.File) -> None:
        del file["rank-0000/arrays/own/1"]

    for change in (other_value, other_text, swapped, renamed, less):
        with h5py.File(whole, "r+") as file:
            change(file)
        record = h5file.FileRecord(first.name, whole.stat().st_size, first.digest)
        with pytest.raises(Damaged, match=r"all\.h5/rank-0000 is not what was written: its digest differs"):
            read_file(tmp_path / first.name, record)
        whole.write_bytes(content)
        read_file(tmp_path / first.name, first)
        read_file(tmp_path / second.name, second)


def test_a_part_that_is_not_there_is_damage(tmp_path: Path) -> None:
    (record,) = write_one(tmp_path, {"rank-0000.h5": (some_arrays(), {})}).values()
    with pytest.raises(Damaged, match=r"all\.h5/rank-0001 cannot be read"):
        read_file(tmp_path / "all.h5" / "rank-0001", h5file.FileRecord("all.h5/rank-0001", record.nbytes, record.digest))


def test_one_file_needs_an_h5py_with_mpi(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5py, "get_config", lambda: SimpleNamespace(mpi=False))
    for subjects in (run.subjects, {"model": run.model}):
        with pytest.raises(ConfigurationError, match=r"needs an h5py with MPI, .* has none; build it .*HDF5_MPI=ON"):
            checkpoint.save(tmp_path, step=1, driver="mpio", **subjects)
    with pytest.raises(ConfigurationError, match=r"unknown driver 'mpi'; did you mean 'mpio'\?"):
        run.save(tmp_path, 1, driver="mpi")
    with pytest.raises(ConfigurationError, match="communicates while it writes; pass background=False"):
        checkpoint.begin_save(tmp_path, step=1, driver="mpio", **run.subjects)
    assert not list(tmp_path.iterdir())


def test_inspect_shows_the_parts_of_one_file(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with alone():
        path = run.save(tmp_path, 5, driver="mpio")
    assert inspect.run(tmp_path, verify=True, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    (file,) = record["files"].values()
    assert file["bytes"] == (path / "all.h5").stat().st_size
    assert {part: bool(content["arrays"]) for part, content in file["parts"].items()} == {
        "rank-0000": True,
        "shared-0000": True,
    }
    assert inspect.run(tmp_path, verify=True, as_json=False) == 0
    told = capsys.readouterr().out
    assert all(words in told for words in ("all.h5 ", "  rank-0000 ", "  shared-0000 ", "all verified"))
    with h5py.File(path / "all.h5", "r+") as spoiled:
        spoiled["shared-0000/arrays/model/0.weight"][0] += 1
    assert inspect.run(tmp_path, verify=False, as_json=False) == 0
    assert inspect.run(tmp_path, verify=True, as_json=False) == 1
    assert "all.h5/shared-0000 is not what was written" in capsys.readouterr().out
    (path / "all.h5").unlink()
    assert inspect.run(tmp_path, verify=False, as_json=False) == 1
    assert "all.h5 is missing" in capsys.readouterr().out


# The store


def complete(directory: Path, step: int, keep: int | None = None) -> Path:
    place = store.begin(directory, step)
    (place / "rank-0000.h5").write_text(str(step))
    record = h5file.FileRecord("rank-0000.h5", len(str(step)), "abc")
    return store.complete(directory, place, store.Manifest(step, 1, (record,), ("w [1] float32",), {"torch": "x"}), keep)


def test_names() -> None:
    assert store.name_of(20) == "step-00000020"
    assert store.rank_file(3) == "rank-0003.h5"
    assert store.shared_file(12) == "shared-0012.h5"


def test_manifest_comes_back_and_its_digest_counts(tmp_path: Path) -> None:
    path = complete(tmp_path, 20)
    manifest = store.read_manifest(path)
    assert (manifest.step, manifest.ranks, manifest.model, manifest.origin) == (20, 1, ("w [1] float32",), {"torch": "x"})
    assert manifest.record("rank-0000.h5") == h5file.FileRecord("rank-0000.h5", 2, "abc")
    with pytest.raises(Damaged, match="lists no file"):
        manifest.record("rank-0001.h5")
    body = json.loads((path / store.MANIFEST).read_text())
    for key, value in {"step": 21, "ranks": 2, "model": [], "origin": {}, "files": [], "format": 2, "sha256": "0"}.items():
        (path / store.MANIFEST).write_text(json.dumps({**body, key: value}))
        with pytest.raises(Damaged):
            store.read_manifest(path)
    for text in ("", "[]", "null", "{}", "{", json.dumps({**body, "more": 1})):
        (path / store.MANIFEST).write_text(text)
        with pytest.raises(Damaged):
            store.read_manifest(path)
    (path / store.MANIFEST).write_bytes(b"\xff\xfe")
    with pytest.raises(Damaged):
        store.read_manifest(path)
    (path / store.MANIFEST).unlink()
    with pytest.raises(Damaged, match="not finished"):
        store.read_manifest(path)


def test_another_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FORMAT", 7)
    path = complete(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(Damaged, match="has format 7, this version reads 1"):
        store.read_manifest(path)


def await_removal() -> None:
    for thread in threading.enumerate():
        if thread.name == store.REMOVER:
            thread.join()


def test_one_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    first = complete(tmp_path, 4)
    (first / "mark").touch()
    first.rename(tmp_path / f"{store.REPLACED}{first.name}")  # killed before the new one had its name
    store.recover(tmp_path)
    assert (first / "mark").exists()
    first.rename(tmp_path / f"{store.REPLACED}{first.name}")
    complete(tmp_path, 5)
    assert [p.name for p in store.found(tmp_path)] == ["step-00000005", "step-00000004"]
    complete(tmp_path, 4).rename(tmp_path / f"{store.REPLACED}{first.name}")
    complete(tmp_path, 4)  # killed after it had: the new one stays
    store.recover(tmp_path)
    await_removal()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 1.5}, {"step": 1, "keep": 0}, {"step": 1, "keep": -1}], ids=str)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(mpisparse.ConfigurationError, match="must be a whole number"):
        checkpoint.save(tmp_path, model=nn.Linear(2, 2), **options)
    assert not list(tmp_path.iterdir())


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        complete(tmp_path, step)
    (tmp_path / "step-00000003" / store.MANIFEST).write_text("{")
    complete(tmp_path, 4, keep=2)
    assert [p.name for p in store.found(tmp_path)] == ["step-00000004", "step-00000003", "step-00000002"]
    complete(tmp_path, 5, keep=2)
    assert [p.name for p in store.found(tmp_path)] == ["step-00000005", "step-00000004"]


@pytest.mark.parametrize("spoil", ["gone", "short"])
def test_one_that_lacks_a_file_neither_counts_as_kept_nor_gets_a_name(tmp_path: Path, spoil: str) -> None:
    for step in (1, 2, 3):
        complete(tmp_path, step)
    file = tmp_path / "step-00000003" / "rank-0000.h5"
    file.unlink() if spoil == "gone" else file.write_text("")
    complete(tmp_path, 4, keep=2)
    assert [p.name for p in store.found(tmp_path)] == ["step-00000004", "step-00000003", "step-00000002"]
    place = store.begin(tmp_path, 5)
    if spoil == "short":
        (place / "rank-0000.h5").write_text("")
    record = h5file.FileRecord("rank-0000.h5", 1, "abc")
    with pytest.raises(OSError, match=r"rank-0000\.h5 (cannot be read|has 0 bytes, 1 were written)"):
        store.complete(tmp_path, place, store.Manifest(5, 1, (record,), (), {}), 1)
    assert [p.name for p in store.found(tmp_path)] == ["step-00000004", "step-00000003", "step-00000002"]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = complete(tmp_path, 1)
    (path / "rank-0000.h5").unlink()
    os.mkfifo(path / "rank-0000.h5")
    assert not store.is_whole(path)
    complete(tmp_path, 2, keep=1)


OTHER = """
import sys
from pathlib import Path
from mpisparse.checkpoint import store
print(store.begin(Path(sys.argv[1]), 7).name, flush=True)
sys.stdin.read()
"""


def test_unfinished_ones_of_a_live_process_stay_and_those_of_a_dead_one_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    name = other.stdout.readline().strip()
    place = store.begin(tmp_path, 7)
    assert place.name != name
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, place.name])
    other.kill()
    other.communicate()
    again = store.begin(tmp_path, 8)
    await_removal()
    assert [p.name for p in tmp_path.iterdir()] == [again.name]


def test_unfinished_ones_of_another_host_go_when_nothing_is_written(tmp_path: Path) -> None:
    idle, busy = (tmp_path / f"{store.UNFINISHED}step-00000001-{kernel * 16}-12-34-56" for kernel in "ab")
    for place in (idle, busy):
        place.mkdir()
        os.utime(place, (0, 0))
    (busy / "rank-0000.h5").touch()
    mine = store.begin(tmp_path, 2)
    await_removal()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([busy.name, mine.name])
    store.sweep(tmp_path)
    await_removal()
    assert not list(tmp_path.iterdir())


def test_two_that_save_the_same_step_at_once_both_come_through(tmp_path: Path) -> None:
    """While one renames the old checkpoint away and the new one in, the other restores the old name."""
    complete(tmp_path, 4)
    rename = Path.rename
    given_back = 0

    def meddle(self: Path, target: Path) -> Path:
        nonlocal given_back
        result = rename(self, target)
        if Path(target).name.startswith(store.REPLACED) and given_back < 2:
            given_back += 1
            store.recover(tmp_path)
            assert (tmp_path / "step-00000004").exists()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", meddle)
        assert store.is_whole(complete(tmp_path, 4))
    assert given_back == 2
    await_removal()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


SAVING = """
import sys
from torch import nn
from mpisparse import checkpoint
for step in range(1, 21):
    checkpoint.save(sys.argv[1], step=step, model=nn.Linear(40, 40), keep=2)
"""


def test_two_jobs_that_save_into_one_directory_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVING, str(tmp_path)]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [job.communicate(timeout=900)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], told
    names = sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(store.RETIRED))
    assert names[-2:] == ["step-00000019", "step-00000020"]
    assert all(name.startswith("step-") for name in names), names
    assert all("damaged" not in inspect.look(tmp_path / name, verify=True) for name in names)


def test_unfinished_ones_are_ignored_and_removed(tmp_path: Path) -> None:
    complete(tmp_path, 1)
    place = store.begin(tmp_path, 2)
    (place / "rank-0000.h5").write_text("half")
    assert [p.name for p in store.found(tmp_path)] == ["step-00000001"]
    (tmp_path / f"{store.RETIRED}step-00000000").mkdir()
    (tmp_path / "step-notes.txt").write_text("of the user")
    again = store.begin(tmp_path, 3)
    await_removal()
    assert sorted(p.name for p in tmp_path.iterdir()) == [again.name, "step-00000001", "step-notes.txt"]
    store.discard(again)
    assert not again.exists()


@pytest.mark.parametrize("keep", [None, 1, 2, 3])
def test_keep(tmp_path: Path, keep: int | None) -> None:
    for step in range(1, 6):
        complete(tmp_path, step, keep)
    kept = [5, 4, 3, 2, 1][:keep]
    await_removal()
    assert [store.read_manifest(p).step for p in store.found(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    first = complete(tmp_path, 4)
    (first / "mark").touch()
    assert complete(tmp_path, 4) == first
    assert not (first / "mark").exists()
    await_removal()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_an_older_step_than_those_there_is_kept(tmp_path: Path) -> None:
    for step in (10, 20):
        complete(tmp_path, step, 2)
    complete(tmp_path, 15, 2)
    assert tmp_path.joinpath("step-00000015").exists()
    assert len(store.found(tmp_path)) == 2


def test_steps_past_eight_digits_are_in_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        complete(tmp_path, step)
    assert [store.read_manifest(p).step for p in store.found(tmp_path)] == [100_000_000, 99_999_999]


# Saved and restored


class Run:
    """A small model that trains on one rank, with everything that has a state."""

    def __init__(self, seed: int = 1, width: int = 9, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3))
        self.sync = mpisparse.GradientSync(self.model, **(options or {"density": 0.1}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cpu")

    @property
    def subjects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "sync", "scheduler", "scaler")
        return {name: getattr(self, name) for name in names}

    def train(self, count: int = 2) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6) + random.random() + np.random.rand()).square().mean().backward()
            self.sync.step()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, directory: Path, step: int, **options: Any) -> Path:
        return checkpoint.save(directory, step=step, **options, **self.subjects)

    def load(self, directory: Path) -> int | None:
        return checkpoint.load(directory, **self.subjects)

    def state(self) -> Any:
        """Return all that a checkpoint restores, as a text and bytes."""
        states = {name: subject.state_dict() for name, subject in self.subjects.items()}
        text, arrays = tree.flatten({**states, "random": checkpoint.state.random_state()})
        return text, {name: array.tobytes() for name, array in arrays.items()}

    def close(self) -> None:
        self.sync.close()


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.close()


def test_save_and_load_give_everything_back(tmp_path: Path, run: Run, driver: str | None) -> None:
    run.train(3)
    extra = {"epoch": 3, "mean": torch.arange(3.0), "name": "x", "nothing": None}
    path = checkpoint.save(tmp_path, step=3, extra=extra, driver=driver, **run.subjects)
    assert path == tmp_path / "step-00000003"
    names = ["all.h5", "manifest.json"] if driver else ["manifest.json", "rank-0000.h5", "shared-0000.h5"]
    assert sorted(p.name for p in path.iterdir()) == names
    saved = run.state()
    run.train(2)
    later = run.state()
    assert later != saved
    other = Run(seed=2)
    found: dict[str, Any] = {}
    assert checkpoint.load(tmp_path, extra=found, **other.subjects) == 3
    assert same(found, extra)
    assert other.state() == saved
    other.train(2)
    assert other.state() == later
    other.close()


def test_keep_and_the_newest_is_loaded(tmp_path: Path, run: Run, driver: str | None) -> None:
    states = {}
    for step in (1, 2, 3):
        run.train()
        run.save(tmp_path, step, keep=2, driver=driver if step > 1 else None)
        states[step] = run.state()
    assert [p.name for p in store.found(tmp_path)] == ["step-00000003", "step-00000002"]
    run.train()
    assert run.load(tmp_path) == 3
    assert run.state() == states[3]


@pytest.mark.parametrize("restarted", [False, True])
def test_one_whose_bytes_were_altered_does_not_count_as_kept(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    for step in (1, 2, 3):
        run.save(tmp_path, step)
    file = tmp_path / "step-00000003" / "rank-0000.h5"
    altered = bytearray(file.read_bytes())
    altered[len(altered) // 2 :] = bytes(len(altered) - len(altered) // 2)
    file.write_bytes(altered)
    if restarted:
        monkeypatch.setattr(store, "_known", {})
    run.save(tmp_path, 4, keep=2)
    assert [p.name for p in store.found(tmp_path)] == ["step-00000004", "step-00000003", "step-00000002"]


def test_another_model_is_refused_with_the_first_difference(tmp_path: Path, run: Run) -> None:
    run.save(tmp_path, 1)
    others = {
        "wider": (nn.Sequential(nn.Linear(6, 10)), "0.weight [9, 6] float32' where this one has '0.weight [10, 6] float32'"),
        "less": (nn.Sequential(nn.Linear(6, 9)), "'1.weight [9] float32' where this one has 'nothing more'"),
        "type": (nn.Sequential(nn.Linear(6, 9)).double(), "float32' where this one has '0.weight [9, 6] float64'"),
    }
    for model, words in others.values():
        before = {name: memory(t) for name, t in model.state_dict().items()}
        with pytest.raises(ConfigurationError, match="is of another model") as caught:
            checkpoint.load(tmp_path, model=model)
        assert words in str(caught.value)
        assert {name: memory(t) for name, t in model.state_dict().items()} == before


@pytest.mark.parametrize(
    "options",
    [{"scheme": "dense"}, {"density": 0.1, "codec": "fp16"}, {"density": 0.1, "accumulate": "backward"}],
    ids=["scheme", "codec", "accumulate"],
)
def test_another_scheme_is_refused_and_changes_nothing(
    tmp_path: Path, run: Run, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    run.train()
    run.save(tmp_path, 1)
    other = Run(seed=2, **options)
    before = other.state()
    with pytest.raises(ConfigurationError, match=request.node.callspec.id):
        other.load(tmp_path)
    assert other.state() == before
    other.close()


def test_another_optimizer_is_refused_and_changes_nothing(tmp_path: Path, run: Run) -> None:
    run.train()
    run.save(tmp_path, 1)
    other = Run(seed=2)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1, momentum=0.9)
    other.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(other.optimizer, 50)
    before = other.state()
    with pytest.raises(ConfigurationError, match=r"(?i)optimizer"):
        other.load(tmp_path)
    assert other.state() == before
    other.close()


def test_another_thread_count_warns(tmp_path: Path, run: Run) -> None:
    run.save(tmp_path, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match=f"number of threads was {threads} .* is {threads + 1} now"):
            assert run.load(tmp_path) == 1
    finally:
        torch.set_num_threads(threads)


# Damaged


@pytest.fixture(scope="module", params=[None, "mpio"], ids=["files", "one-file"])
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Path, Run, dict[int | None, Any]]]:
    """Two checkpoints, a run to load them into, and what each restores; None stands for the initial state."""
    directory = tmp_path_factory.mktemp("pair")
    run = Run()
    states: dict[int | None, Any] = {}
    for step in (1, 2):
        run.train()
        with alone():
            run.save(directory, step, driver=request.param)
        states[step] = run.state()
    run.train()
    states[None] = run.state()
    yield directory, run, states
    run.close()


def check_load(directory: Path, run: Run, states: dict[int | None, Any]) -> int | None:
    """Load and check that the restored state is exactly the saved one; returns the step."""
    run.train(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = run.load(directory)
    told = [str(w.message) for w in caught if "is not used" in str(w.message)]
    assert step in (1, 2)
    assert run.state() == states[step]
    assert [store.name_of(2) in text for text in told] == ([True] if step == 1 else [])
    return step


def files_of(directory: Path) -> list[Path]:
    return sorted((directory / store.name_of(2)).iterdir())


def test_flipped_bits_are_noticed_or_do_no_harm(pair: tuple[Path, Run, dict[int | None, Any]]) -> None:
    directory, run, states = pair
    draw = random.Random(11)
    noticed = 0
    flips = 120
    for i in range(flips):
        path = files_of(directory)[i % len(files_of(directory))]
        content = path.read_bytes()
        spoiled = bytearray(content)
        spoiled[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(spoiled)
        noticed += check_load(directory, run, states) == 1
        path.write_bytes(content)
    assert noticed > flips // 2, "flips do not reach what is read"
    assert check_load(directory, run, states) == 2


def test_cut_and_missing_files_are_noticed(pair: tuple[Path, Run, dict[int | None, Any]]) -> None:
    directory, run, states = pair
    for path in files_of(directory):
        content = path.read_bytes()
        for length in (0, 1, 50, len(content) // 3, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            assert check_load(directory, run, states) == 1, f"{path.name} cut to {length} bytes"
        path.unlink()
        assert check_load(directory, run, states) == 1, f"no {path.name}"
        path.write_bytes(content)
    assert check_load(directory, run, states) == 2


def test_files_of_another_checkpoint_are_noticed(pair: tuple[Path, Run, dict[int | None, Any]]) -> None:
    directory, run, states = pair
    for path in files_of(directory):
        content = path.read_bytes()
        shutil.copy(directory / store.name_of(1) / path.name, path)
        assert check_load(directory, run, states) == 1, path.name
        path.write_bytes(content)


def test_all_damaged_is_none_and_changes_nothing(tmp_path: Path, run: Run) -> None:
    run.train()
    for step in (1, 2):
        (run.save(tmp_path, step) / store.rank_file(0)).write_bytes(b"")
    before = run.state()
    with pytest.warns(UserWarning, match="is not used") as told:
        assert run.load(tmp_path) is None
    assert len(told) == 2
    assert run.state() == before


# A full disk

PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system in memory, whose size a test can set."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # a failed test may hold a file open


def limit(disk: Path, nbytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={nbytes}", str(disk)], check=True)


def used(disk: Path) -> int:
    return shutil.disk_usage(disk).used


@pytest.mark.parametrize(
    ("driver", "background"), [(None, False), (None, True), ("mpio", False)], indirect=["driver"], ids=str
)
def test_a_full_disk_leaves_the_older_ones_intact(disk: Path, background: bool, driver: str | None) -> None:
    """With any number of free pages there is an error and nothing remains, or the checkpoint is complete."""
    run = Run(width=700)
    run.train()
    before = used(disk)
    run.save(disk, 1, driver=driver)
    one, old = run.state(), used(disk)
    needed = (old - before) // PAGE
    run.train()
    for free in range(needed + 8):
        limit(disk, old + free * PAGE)
        saving = checkpoint.begin_save(disk, step=2, background=background, driver=driver, **run.subjects)
        with contextlib.suppress(CheckpointError):
            saving.finish()
            break
        assert sorted(p.name for p in disk.iterdir()) == ["step-00000001"]
        assert used(disk) == old
    assert needed - 8 < free < needed + 7
    limit(disk, 1 << 26)
    two = run.state()
    run.train()
    assert run.load(disk) == 2
    assert run.state() == two
    shutil.rmtree(disk / store.name_of(2))
    assert run.load(disk) == 1
    assert run.state() == one
    run.close()


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot begin a checkpoint"):
        run.save(tmp_path / "file", 1)


def test_a_state_that_cannot_be_stored_leaves_nothing(tmp_path: Path, run: Run) -> None:
    with pytest.raises(CheckpointError, match="cannot store object at /extra/bad"):
        checkpoint.save(tmp_path, step=1, extra={"bad": object()}, **run.subjects)
    assert not list(tmp_path.iterdir())


# No pickle

PICKLING = re.compile(r"\bpickle\b|\btorch\.(load|save)\b|\bmarshal\b|\bshelve\b|\bdill\b")
SENDING = "bcast|gather|scatter|allgather|alltoall|send|recv|isend|irecv|sendrecv|reduce|allreduce"


def lines_with(pattern: re.Pattern[str], sources: list[Path]) -> list[str]:
    """Return the lines of code that match a pattern, with their positions."""
    return [
        f"{source}:{number}: {line.strip()}"
        for source in sources
        for number, line in enumerate(source.read_text().splitlines(), 1)
        if pattern.search(line) and not re.search(r"(?i)(without|no) pickle|allow_pickle=False", line)
    ]


def test_nothing_is_pickled() -> None:
    sources = list(Path(mpisparse.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    found = [line for line in lines_with(PICKLING, sources) if "weights_only=True" not in line]
    assert [line for line in found if "model_files.py" not in line] == []
    assert [line.partition(": ")[2] for line in found] == ["torch.save(saved.tensors, draft)"], "for other programs to read"
    loads = lines_with(re.compile(r"\bnp\.load\("), sources)
    assert not loads, "np.load without allow_pickle=False in the same line"


def test_what_is_read_from_files_is_sent_without_pickle() -> None:
    """Only benchmarks, which read no files, may use mpi4py's lower-case methods, which pickle."""
    package = Path(mpisparse.__file__).parent
    benches = [source for source in (package / "bench").glob("*.py") if "\ndef run(" in source.read_text()]
    assert benches
    sources = [source for source in package.rglob("*.py") if source not in benches]
    assert not lines_with(re.compile(rf"\bcomm\.({SENDING})\("), sources)
