"""Every codec conserves its input and keeps its error bound, and its format does not change unnoticed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mpisparse.arrays import Doubles
from mpisparse.backends import device
from mpisparse.backends.protocol import FEW_BITS
from mpisparse.wire.codecs import CODECS, Codec
from mpisparse.wire.codecs.protocol import add_decoded, pack_values, subtract_decoded
from mpisparse.wire.reduction import NOT_A_NUMBER

Floats = NDArray[np.float32]

LARGEST = float(np.finfo(np.float32).max)
PLAIN = ["fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]
EXACT = ["fp32", "fp16", "bf16", "int8", "int4"]  # what they leave is exact, and not larger than what was given
COUNTS = (0, 1, 2, 3, 20, 63, 64, 65, 100, 127, 128, 255, 256, 257, 1000)


@pytest.fixture(scope="module", params=["numpy", "native"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "native":
        pytest.importorskip("mpisparse._cpu", exc_type=ImportError)
    return device.load_backend(request.param)


@pytest.fixture(scope="module", params=PLAIN)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]


def transmit(codec: Codec, kernels: Any, values: Floats) -> tuple[bytes, Floats, Floats]:
    """Return the payload of some values, what the receiver decodes, and what the sender keeps."""
    left = values.copy()
    payload = np.full(codec.nbytes(len(values)), 0xAA, dtype=np.uint8)
    codec.encode(kernels, left, payload)
    sent = payload.tobytes()
    decoded = np.full(len(values), np.nan, dtype=np.float32)
    codec.decode(kernels, payload, decoded)
    assert payload.tobytes() == sent
    return sent, decoded, left


def assert_conserved(codec: Codec, values: Floats, decoded: Floats, left: Floats) -> None:
    """Assert that sent and kept values add up to the input: exactly, or to the rounding of what is kept."""
    assert np.isfinite(decoded).all()
    assert np.isfinite(left).all()
    if codec.name not in EXACT:
        wide = values.astype(np.float64) - decoded
        np.testing.assert_array_equal(left, wide.astype(np.float32))
        return
    exact = [Fraction(float(d)) + Fraction(float(r)) for d, r in zip(decoded, left, strict=True)]
    assert exact == [Fraction(float(v)) for v in values]


def assert_bounded(name: str, values: Floats, left: Floats) -> None:
    """Assert that the error is at most half a step, except for denormals, whose steps are too coarse."""
    for start in range(0, len(values), 256):
        x = np.abs(values[start : start + 256].astype(np.float64))
        most = x.max()
        bound = {
            "fp32": 0 * x,
            "fp16": np.maximum(2.0**-11 * x, 2.0**-39 * most),
            "bf16": 2.0**-8 * x,
            "int8": most / 127 * (0.5 + 2.0**-15) + 0 * x,
        }.get(name)
        if bound is not None:
            assert (np.abs(left[start : start + 256]) <= bound).all()
    if name in FEW_BITS:
        assert_few_bits_bounded(name, values.astype(np.float64), left.astype(np.float64))


def assert_few_bits_bounded(name: str, values: Doubles, left: Doubles) -> None:
    """Assert the best error of a group for its levels, in least squares, or a bound of every value."""
    for start in range(0, len(values), FEW_BITS[name].group):
        x, error = (np.abs(a[start : start + FEW_BITS[name].group]) for a in (values, left))
        if name == "int4":
            assert (error <= (1 / 8 + 2.0**-8) * x.max()).all()  # the gap below the lowest level
            assert (error <= np.maximum(0.27 * x, 0.052 * x.max())).all()
        elif name == "sign":
            best = (x**2).sum() - len(x) * x.mean() ** 2
            assert (error**2).sum() <= best + 2.0**-16 * len(x) * x.mean() ** 2
        else:
            levels = np.where(x >= 49 / 128 * x.max(), 1, 9 / 32)  # the nearest ones are no worse than these
            least = (x**2).sum() - (x @ levels) ** 2 / (levels @ levels)
            assert (error**2).sum() <= least + 2.0**-16 * (x**2).sum()


@pytest.mark.parametrize("count", COUNTS)
def test_nbytes(count: int) -> None:
    padded, groups = count + count % 2, -(-count // 256)
    sizes = {"fp32": 4 * count, "fp16": 4 * groups + 2 * padded, "bf16": 2 * padded, "int8": 4 * groups + -(-count // 4) * 4}
    for name, (group, codes) in {"int4": (64, 32), "int2": (64, 16), "sign": (128, 16)}.items():
        last = min(count % group, codes)
        sizes[name] = -(-count // group // 2) * 4 + (count // group * codes + last + 3) // 4 * 4
    assert {name: CODECS[name].nbytes(count) for name in PLAIN} == sizes


@pytest.mark.parametrize(("name", "bits"), [("int4", 4.4), ("int2", 2.3), ("sign", 1.15)])
def test_bits_of_long_payloads(name: str, bits: float) -> None:
    for count in (10_001, 1_000_000):
        assert 8 * CODECS[name].nbytes(count) <= bits * count


@pytest.mark.parametrize("count", COUNTS)
def test_conserves_within_its_bound(codec: Codec, kernels: Any, count: int) -> None:
    rng = np.random.default_rng(count)
    for scale in (1e-38, 1e-30, 1.0, 3e5, 1e37):
        values = (np.clip(rng.standard_t(2, count), -30, 30) * scale).astype(np.float32)
        values[::5] = values[:1]
        payload, decoded, left = transmit(codec, kernels, values)
        assert len(payload) == codec.nbytes(count)
        assert_conserved(codec, values, decoded, left)
        if scale > 1e-37:
            assert_bounded(codec.name, values, left)
        assert not (codec.lossless and left.any())


def test_only_fp32_is_lossless() -> None:
    assert [name for name in PLAIN if CODECS[name].lossless] == ["fp32"]


@pytest.mark.parametrize("name", ["int8", "fp32", "int4"])
def test_a_momentum_codec_sends_the_bytes_of_another(kernels: Any, name: str) -> None:
    plain, blended = CODECS[name], CODECS[f"momentum-{name}"]
    assert (plain.blended, blended.blended) == (False, True)
    assert blended.lossless == plain.lossless
    values = np.random.default_rng(0).standard_normal(700, dtype=np.float32)
    (sent, decoded, left), expected = transmit(blended, kernels, values), transmit(plain, kernels, values)
    assert sent == expected[0]
    assert decoded.tobytes() == expected[1].tobytes()
    assert left.tobytes() == expected[2].tobytes()


@given(values=arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_conserves_anything_finite(codec: Codec, kernels: Any, values: Floats) -> None:
    _, decoded, left = transmit(codec, kernels, values)
    assert_conserved(codec, values, decoded, left)


@pytest.mark.parametrize("count", COUNTS)
def test_zeros(codec: Codec, kernels: Any, count: int) -> None:
    for zero in (0.0, -0.0):
        _, decoded, left = transmit(codec, kernels, np.full(count, zero, dtype=np.float32))
        assert not decoded.any()
        assert not left.any()


@pytest.mark.parametrize("share", [1.0, 1 - 2.0**-13, 1 - 2.0**-12, 0.996, 0.5])
def test_near_the_largest_float(codec: Codec, kernels: Any, share: float) -> None:
    """No codec overflows, though the nearest fp16, bf16 or multiple of a step may exceed float32."""
    values = np.array([LARGEST * share, -LARGEST * share, 1e30, -1.0, 0.0], dtype=np.float32)
    _, decoded, left = transmit(codec, kernels, values)
    assert_conserved(codec, values, decoded, left)
    rtol = {"int4": 0.13, "int2": 0.3, "sign": 0.7}.get(codec.name, 2.0**-7)
    np.testing.assert_allclose(decoded[:2], values[:2], rtol=rtol)


@pytest.mark.parametrize("count", [1, 255, 600])
def test_what_says_not_a_number(codec: Codec, kernels: Any, count: int) -> None:
    payload = np.full(codec.nbytes(count), NOT_A_NUMBER, np.uint8)
    values = np.zeros(count, np.float32)
    codec.decode(kernels, payload, values)
    assert np.isnan(values).all()


def test_denormals(codec: Codec, kernels: Any) -> None:
    for most in (1, 60, 64, 127, 190, 191, 5000, 2**23 - 1, 2**23 + 5):
        values = np.ldexp([most, -most, most // 2, 1, -1, 0], -149).astype(np.float32)
        _, decoded, left = transmit(codec, kernels, values)
        assert_conserved(codec, values, decoded, left)
        assert codec.name not in EXACT or (np.abs(left) <= np.abs(values)).all()


@pytest.mark.parametrize("count", COUNTS)
def test_adding_is_decoding_and_adding(codec: Codec, kernels: Any, count: int) -> None:
    rng = np.random.default_rng(count)
    payload = np.empty(codec.nbytes(count), np.uint8)
    codec.encode(kernels, rng.standard_normal(count, dtype=np.float32), payload)
    total = rng.standard_normal(count, dtype=np.float32)
    decoded = np.empty(count, np.float32)
    codec.decode(kernels, payload, decoded)
    expected = total + decoded
    rest = total - decoded
    less = total.copy()
    add_decoded(codec, kernels, payload, total)
    subtract_decoded(codec, kernels, payload, less)
    assert total.tobytes() == expected.tobytes()
    assert less.tobytes() == rest.tobytes()


@pytest.mark.parametrize("count", COUNTS)
def test_packing_only_reads(codec: Codec, kernels: Any, count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count, dtype=np.float32)
    values.flags.writeable = False
    packed, encoded = np.full((2, codec.nbytes(count)), 0xAA, np.uint8)
    assert pack_values(codec, kernels, values, packed) == codec.encode(kernels, values.copy(), encoded)
    assert packed.tobytes() == encoded.tobytes()


@pytest.mark.parametrize("name", FEW_BITS)
def test_errors_of_a_group_are_never_larger_than_its_values(kernels: Any, name: str) -> None:
    """In squares, whatever the values are: so error feedback stays bounded."""
    rng = np.random.default_rng(0)
    spike, flat = np.zeros(128), np.ones(128)
    spike[7] = 1.0
    for x in (spike, flat, spike + 0.3 * flat, rng.standard_normal(128), rng.standard_cauchy(128), 0.1 * flat + 5 * spike):
        values = x.astype(np.float32)
        _, _, left = transmit(CODECS[name], kernels, values)
        for start in (0, 64):
            part = slice(None) if name == "sign" else slice(start, start + 64)
            assert (left[part].astype(np.float64) ** 2).sum() <= (values[part].astype(np.float64) ** 2).sum()


def test_groups_do_not_disturb_each_other(codec: Codec, kernels: Any) -> None:
    """Each group of at most 256 values has its own scale: a huge value elsewhere changes nothing."""
    values = np.random.default_rng(0).standard_normal(600).astype(np.float32)
    loud = values.copy()
    loud[256:512] *= 1e20
    _, decoded, left = transmit(codec, kernels, values)
    _, decoded_loud, left_loud = transmit(codec, kernels, loud)
    quiet = np.r_[0:256, 512:600]
    np.testing.assert_array_equal(decoded[quiet], decoded_loud[quiet])
    np.testing.assert_array_equal(left[quiet], left_loud[quiet])


SMALL = [1.0, -2.0, 0.5]
STEPS = [127.0, -1.0, 63.5, 0.4, -126.5]  # a scale of one: whole steps, ties to even, less than half a step
LONG = [1.0] * 256 + [-254.0]
GOLDEN = [
    ("fp32", SMALL, "0000803f 000000c0 0000003f"),
    ("fp32", [-0.0, 1e-45, LARGEST], "00000080 01000000 ffff7f7f"),
    ("bf16", SMALL, "803f 00c0 003f 0000"),
    ("bf16", [1 + 2**-8, 1 + 3 * 2**-8, LARGEST, -LARGEST], "803f 823f 7f7f 7fff"),
    ("fp16", SMALL, "00000039 0070 00f4 006c 0000"),
    ("fp16", [1e5, 1.0, -0.0, 0.0], "00008040 1a76 0034 0080 0000"),
    ("fp16", [0.0], "0000803f 0000 0000"),
    ("fp16", [2.0**-140, -(2.0**-149)], "00008000 0004 0280"),  # the least scale is 2^-126
    ("fp16", LONG, "00008038 0000003c" + "0074" * 256 + "f0f7 0000"),
    ("int8", STEPS, "0000803f 7f ff 40 00 82 000000"),
    ("int8", [0.0, 0.0], "00000000 00 00 0000"),
    ("int8", LONG, "0402013c 00000040" + "7f" * 256 + "81 000000"),
]


@pytest.mark.parametrize(("name", "values", "payload"), GOLDEN)
def test_golden_payloads(kernels: Any, name: str, values: list[float], payload: str) -> None:
    sent, _, _ = transmit(CODECS[name], kernels, np.array(values, dtype=np.float32))
    assert sent.hex() == payload.replace(" ", "")


@pytest.mark.parametrize(
    ("name", "payload", "values"),
    [
        ("fp32", "0000803f 000000c0", [1.0, -2.0]),
        ("fp16", "00000040 003c 00bc 0080 ff7b", [2.0, -2.0, 0.0, 131008.0]),
        ("bf16", "803f 80bf 0080 7f7f", [1.0, -1.0, 0.0, 2.0**128 - 2.0**120]),
        ("int8", "00000040 7f ff 00 81", [254.0, -2.0, 0.0, -254.0]),
    ],
)
def test_golden_payloads_are_read(kernels: Any, name: str, payload: str, values: list[float]) -> None:
    """Stored payloads decode to the original values: decode does not depend on this machine's encode."""
    read = np.empty(len(values), dtype=np.float32)
    CODECS[name].decode(kernels, np.array(list(bytes.fromhex(payload)), dtype=np.uint8), read)
    assert read.tolist() == values


@given(
    values=arrays(np.float32, st.integers(0, 40), elements=st.floats(-1024, 1024, width=32)),
    scale=st.sampled_from([2.0**115, 1.0, 2.0**-100, 2.0**-140]),
)
def test_native_and_reference_send_the_same_bytes(codec: Codec, values: Floats, scale: float) -> None:
    pytest.importorskip("mpisparse._cpu", exc_type=ImportError)
    values = values * np.float32(scale)
    here, there = (transmit(codec, device.load_backend(name), values) for name in ("native", "numpy"))
    assert here[0] == there[0]
    assert here[1].tobytes() == there[1].tobytes()
    assert here[2].tobytes() == there[2].tobytes()
