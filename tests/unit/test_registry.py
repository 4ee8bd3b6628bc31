"""Codecs and schemes from outside the package: found by name, checked when they are registered, refused when broken."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outside.codecs import BITMAP, UPPER16, Bitmap, Bytes, Floats, Upper16
from outside.schemes import Census

import mpisparse
from mpisparse import names
from mpisparse.errors import ConfigurationError
from mpisparse.schemes import SCHEMES, Options, configure, takes
from mpisparse.schemes.baselines import LocalTopK
from mpisparse.wire.codecs import CODECS, codec_names, find_codec

PLAIN = ["fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for registry in (names.CODECS, names.SCHEMES):
        monkeypatch.setattr(registry, "_added", {})
        monkeypatch.setattr(registry, "_found", {})


def test_built_in_codecs() -> None:
    assert list(CODECS) == PLAIN + [f"momentum-{name}" for name in PLAIN]
    assert len(CODECS) == 14
    assert all(CODECS[name].name == name and not CODECS[name].variable for name in CODECS)
    assert codec_names(blended=False) == PLAIN
    assert all(CODECS[name].blended == (name not in PLAIN) for name in CODECS)


@pytest.mark.parametrize("name", ["int3", "momentum-int3", "momentum-momentum-", "momentum-", "", None, 3, []])
def test_unknown_codecs(name: Any) -> None:
    assert name not in CODECS
    with pytest.raises(ConfigurationError, match=r"unknown codec .*choose from: bf16, "):
        find_codec(name)


@pytest.mark.parametrize("codec", [UPPER16, BITMAP], ids=lambda codec: codec.name)
def test_a_registered_codec_is_one_like_others(codec: Any) -> None:
    mpisparse.register_codec(codec)
    assert find_codec(codec.name) is CODECS[codec.name] is codec
    blended = find_codec(f"momentum-{codec.name}")
    assert (blended.name, blended.blended, blended.variable) == (f"momentum-{codec.name}", True, codec.variable)
    assert codec_names()[len(PLAIN)] == codec.name
    assert mpisparse.schemes.configure("exdyna", codec=codec.name).codec == codec.name
    mpisparse.register_codec(codec)  # the same one is no second one


def test_a_codec_of_variable_size_returns_its_size() -> None:
    values = np.array([0.0, 1.0, 0.0, 0.0, -2.0], np.float32)
    payload = np.zeros(BITMAP.nbytes(5), np.uint8)
    assert len(payload) == 24
    assert BITMAP.encode(None, values, payload) == 12  # type: ignore[arg-type]


def test_a_taken_name_is_refused() -> None:
    mpisparse.register_codec(UPPER16)

    @dataclass(frozen=True)
    class Second(Upper16):
        pass

    with pytest.raises(ConfigurationError, match="there is a codec 'upper16' already, registered as Upper16"):
        mpisparse.register_codec(Second())
    assert CODECS["upper16"] is UPPER16
    with pytest.raises(ConfigurationError, match="there is a codec 'fp16' already, built in"):
        mpisparse.register_codec(renamed("fp16"))
    assert type(CODECS["fp16"]).__name__ == "Fp16"


def renamed(new: Any) -> Any:
    class Renamed(Upper16):
        name = new

    return Renamed()


@pytest.mark.parametrize("name", ["", "Upper", "up per", "upper_16", "-upper", "upper-", "16", "momentum-upper", None, 16])
def test_odd_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="lower-case words and digits joined by hyphens") as caught:
        mpisparse.register_codec(renamed(name))
    assert repr(name) in str(caught.value)


class NoDecode:
    name, lossless, blended, variable = "less", False, False, False

    def nbytes(self, count: int) -> int:
        return 4 * count

    encode = nbytes


class Forgets(Upper16):
    def encode(self, kernels: Any, values: Floats, payload: Bytes) -> int:
        nbytes = super().encode(kernels, values, payload)
        values.fill(0.0)
        return nbytes


class Keeps(Upper16):
    def encode(self, kernels: Any, values: Floats, payload: Bytes) -> int:
        return super().encode(kernels, values.copy(), payload)


class Silent(Upper16):
    def encode(self, kernels: Any, values: Floats, payload: Bytes) -> int:
        super().encode(kernels, values, payload)
        return None  # type: ignore[return-value]


class Shorter(Bitmap):
    variable = False


class Unpadded(Upper16):
    def nbytes(self, count: int) -> int:
        return 2 * count


class Boasts(Upper16):
    lossless = True


class Misses(Upper16):
    """The last of an odd number of values is forgotten by the reader."""

    def decode(self, kernels: Any, payload: Bytes, values: Floats) -> None:
        even = len(values) // 2 * 2
        values[:even].view(np.uint32)[:] = payload.view(np.uint16)[:even].astype(np.uint32) << 16


class Remembers(Upper16):
    def encode(self, kernels: Any, values: Floats, payload: Bytes) -> int:
        nbytes = super().encode(kernels, values, payload)
        vars(self)["calls"] = vars(self).get("calls", 0) + 1
        halves = payload.view(np.uint16)
        halves[len(values) :] = vars(self)["calls"]
        return nbytes


class Scribbles(Upper16):
    def decode(self, kernels: Any, payload: Bytes, values: Floats) -> None:
        super().decode(kernels, payload, values)
        payload.fill(0)


class Rounds(Upper16):
    """Finite whatever comes: a payload cannot say that a sum overflowed."""

    def decode(self, kernels: Any, payload: Bytes, values: Floats) -> None:
        super().decode(kernels, payload, values)
        np.nan_to_num(values, copy=False)


class Overflows(Upper16):
    """Half precision without a scale."""

    def encode(self, kernels: Any, values: Floats, payload: Bytes) -> int:
        payload.fill(0)
        with np.errstate(over="ignore"):
            payload.view(np.float16)[: len(values)] = values
        values -= payload.view(np.float16)[: len(values)]
        return self.nbytes(len(values))

    def decode(self, kernels: Any, payload: Bytes, values: Floats) -> None:
        values[:] = payload.view(np.float16)[: len(values)]


class Blended(Upper16):
    blended = True


class Breaks(Upper16):
    def encode(self, kernels: Any, values: Floats, payload: Bytes) -> int:
        return int(np.argmax(values)) and super().encode(kernels, values, payload)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (NoDecode, r"codec 'less' must be an object with the members of mpisparse.codecs.Codec, got .* lacks decode\(\)"),
        (Forgets, "it sent .* and left 0.0 of .*encode must leave in values what decode does not give"),
        (Keeps, "with 1 values it sent .* and left .* of"),
        (Silent, "must return the bytes it wrote.* got None"),
        (Shorter, "wrote .* bytes where nbytes says .*declare variable = True"),
        (Unpadded, "nbytes >= 0 and a multiple of 4, got 2; pad the payload"),
        (Boasts, "lossless by its own word"),
        (Misses, "with 1 values it decoded or left values that are not finite"),
        (Remembers, "must have no memory"),
        (Scribbles, "changed the payload that it decoded"),
        (Rounds, "must decode a payload of bytes 0xFF to NaN"),
        (Overflows, "not finite"),
        (Blended, "must have blended = False: momentum-upper16, .* exists by itself"),
        (Breaks, "with 0 values it raised ValueError"),
    ],
)
def test_a_broken_codec_is_refused_when_it_is_registered(broken: type, said: str) -> None:
    codec = broken()
    with pytest.raises(ConfigurationError, match=said):
        mpisparse.register_codec(codec)
    assert codec.name not in CODECS


def test_a_class_is_no_codec() -> None:
    with pytest.raises(ConfigurationError, match=r"must be an object with the members .*a class"):
        mpisparse.register_codec(Upper16)  # type: ignore[arg-type]


LAZY = """
import sys
import mpisparse.wire.codecs as codecs
built_in = {"mpisparse.wire.codecs." + name for name in ("fp32", "fp16", "bf16", "int8", "int4", "momentum", "check")}
names = codecs.codec_names()
assert "bitmap" in names and "momentum-bitmap" in names and "fp16" in codecs.CODECS and "bitmap" in codecs.CODECS
assert not ({"outside", "torch"} | built_in) & set(sys.modules), "listing names imports codecs"
codecs.find_codec("int8")
assert built_in & set(sys.modules) == {"mpisparse.wire.codecs.int8"}
assert codecs.find_codec("bitmap").variable and "outside.codecs" in sys.modules
"""


def run_with_package(tmp_path: Path, entries: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where a package `extras` with these entry points is installed."""
    about = tmp_path / "extras-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extras\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[1])!r}]\n"
    return subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=900)


def test_a_declared_codec_is_imported_when_it_is_asked_for(tmp_path: Path) -> None:
    done = run_with_package(tmp_path, "[mpisparse.codecs]\nbitmap = outside.codecs:BITMAP\n", LAZY)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("upper = outside.codecs:UPPER16", "codec 'upper' must have that name, got 'upper16'"),
        ("upper = outside.codecs:Upper16", "must be an object"),
        ("upper = outside.nothing:X", "codec 'upper', declared by package extras as outside.nothing:X, cannot be imported"),
    ],
)
def test_what_is_wrong_with_a_declared_codec_is_said_when_it_is_asked_for(tmp_path: Path, entry: str, said: str) -> None:
    code = "import mpisparse; print(list(mpisparse.codecs.CODECS)); mpisparse.codecs.find_codec('upper')"
    done = run_with_package(tmp_path, f"[mpisparse.codecs]\n{entry}\n", code)
    assert "'upper'" in done.stdout
    assert said in done.stderr


def test_a_declared_codec_cannot_replace_a_built_in_one(tmp_path: Path) -> None:
    code = "import mpisparse; print(list(mpisparse.codecs.CODECS), mpisparse.codecs.find_codec('fp16'))"
    done = run_with_package(tmp_path, "[mpisparse.codecs]\nfp16 = outside.codecs:UPPER16\n", code)
    assert done.returncode == 0, done.stderr
    assert "ignoring the codec 'fp16' that package extras declares" in done.stderr
    assert done.stdout.count("'fp16'") == 1
    assert "Fp16()" in done.stdout


def test_a_declared_name_cannot_be_registered_too(tmp_path: Path) -> None:
    code = "import mpisparse, outside.codecs; mpisparse.register_codec(outside.codecs.BITMAP)"
    done = run_with_package(tmp_path, "[mpisparse.codecs]\nbitmap = outside.codecs:BITMAP\n", code)
    assert "there is a codec 'bitmap' already, declared by package extras as outside.codecs:BITMAP" in done.stderr


# Schemes


def test_a_registered_scheme_is_one_like_others() -> None:
    mpisparse.register_scheme("census", Census)
    assert SCHEMES["census"] is Census
    assert list(SCHEMES)[-1] == "census"
    assert configure("census", share=0.25) == Census(share=0.25)
    assert takes("census", "share")
    with pytest.raises(ConfigurationError, match="unknown option 'shore' for scheme \"census\"; did you mean 'share'"):
        configure("census", shore=0.25)
    with pytest.raises(ConfigurationError, match="there is a scheme 'census' already, registered as"):
        mpisparse.register_scheme("census", LocalTopK)
    with pytest.raises(ConfigurationError, match="there is a scheme 'exdyna' already, built in"):
        mpisparse.register_scheme("exdyna", Census)


class Plain(LocalTopK):
    """Inherits the fields of a dataclass, but its own would not be among them."""

    share: float = 0.5


@dataclass(frozen=True)
class Unbuilt(Options):
    pass


@dataclass(frozen=True)
class Asking(LocalTopK):
    share: float = field(kw_only=True)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (int, r"must be a frozen dataclass derived from mpisparse.schemes.Options, got <class 'int'>"),
        (LocalTopK(), "got LocalTopK"),
        (Plain, r"decorate it with @dataclass\(frozen=True\)"),
        (Unbuilt, r"with a method build\(parts\), got .* without one"),
        (Asking, "every option of scheme 'mine' needs a default; share has none"),
    ],
)
def test_what_is_no_scheme_is_refused(kind: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        mpisparse.register_scheme("mine", kind)
    assert "mine" not in SCHEMES


@pytest.mark.parametrize("name", ["", "My scheme", "mine_2", "2mine", None])
def test_odd_names_of_schemes_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="the name of a scheme must be lower-case words"):
        mpisparse.register_scheme(name, Census)


LAZY_SCHEMES = """
import sys
import mpisparse.schemes as schemes
assert list(schemes.SCHEMES)[-1] == "census" and "dense" in schemes.SCHEMES
own = {f"mpisparse.schemes.{name}" for name in ("dense", "baselines", "partitioned", "predictive", "speculative")}
assert not (own | {"outside"}) & set(sys.modules), "listing names imports schemes"
schemes.configure("dense")
assert own & set(sys.modules) == {"mpisparse.schemes.dense"}
assert schemes.configure("census", share=0.25).share == 0.25 and "outside.schemes" in sys.modules
from mpisparse.runtime.settings import Settings
assert Settings(scheme="census").scheme == "census"
"""


def test_a_declared_scheme_is_imported_when_it_is_asked_for(tmp_path: Path) -> None:
    done = run_with_package(tmp_path, "[mpisparse.schemes]\ncensus = outside.schemes:Census\n", LAZY_SCHEMES)
    assert done.returncode == 0, done.stderr


def test_the_examples_of_contributing_run() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = "\n".join(examples) + "\nprint(mpisparse.schemes.configure('coarse', codec='momentum-plain'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert len(examples) == 2
    assert done.stdout.startswith("Coarse(density=0.001, codec='momentum-plain',"), done.stderr
