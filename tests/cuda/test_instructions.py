"""What the passes cost in instructions, from their machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
import sass

pytestmark = pytest.mark.skipif(bool(sass.missing()), reason=sass.missing())


LOADS = r"\bLDG?\.E"
WIDE = rf"{LOADS}\.(64|128)"
# Kernels with loops over a tile inside one parameter: how many (for each type of gradient, and where there is none), and
# how many vectors are read where a gradient is added.
KERNELS = {"accumulate_select": (4, 2), "average_select": (4, 3), "accumulate": (3, 2), "first_nonfinite": (3, 1)}


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_inside_a_parameter_are_bound_by_memory(kernel: str, tmp_path: Path) -> None:
    """At most 35 instructions an element, halves included, and four loads on their way before the first is waited for."""
    from mpisparse.backends.cuda.binding import compile_cubin

    many, vectors = KERNELS[kernel]
    found = [loop for loop in sass.loops(compile_cubin("90"), kernel, tmp_path) if loop.count(WIDE) > 1]
    assert len(found) == many
    for loop in found:
        elements = 4 * loop.count(WIDE) / (vectors if loop.count("FADD") else 1)
        assert len(loop.code) / elements <= 35, loop.code
        assert loop.loads_before_the_first_wait() >= 4, loop.code


def test_a_histogram_has_loads_on_their_way(tmp_path: Path) -> None:
    from mpisparse.backends.cuda.binding import compile_cubin

    (loop,) = (loop for loop in sass.loops(compile_cubin("90"), "histogram", tmp_path) if loop.count(LOADS))
    assert loop.loads_before_the_first_wait() >= 4
    assert len(loop.code) / loop.count(LOADS) <= 35


@pytest.mark.parametrize("kernel", ["select_apart", "histogram_apart", "subtract_apart"])
def test_weights_have_loads_on_their_way(kernel: str, tmp_path: Path) -> None:
    """Four elements in a turn: weight and reference of each in the region, the weights alone elsewhere."""
    from mpisparse.backends.cuda.binding import compile_cubin

    found = [loop for loop in sass.loops(compile_cubin("90"), kernel, tmp_path) if loop.count(LOADS) > 1]
    assert sorted(loop.count(LOADS) for loop in found) == [4, 8]
    for loop in found:
        assert loop.loads_before_the_first_wait() >= 4
        assert len(loop.code) / 4 <= 35


def test_a_wait_ends_the_count_of_loads() -> None:
    code = (
        "LDG.E.128 R8, desc[UR8][R2.64]",
        "LDG.E R20, desc[UR8][R2.64+0x200]",
        "@P0 FADD R12, R10, R4",
        "LDG.E R21, desc[UR8][R2.64+0x400]",
    )
    assert sass.Loop(code).loads_before_the_first_wait() == 2
    assert sass.Loop(code[:2] + code[3:]).loads_before_the_first_wait() == 3
    assert sass.Loop(("LDG.E R8, [R2.64]", "STG.E.64 [R4.64], R7")).loads_before_the_first_wait() == 1
    assert sass.Loop(("LDG.E.64 R8, [R2.64]", "LDG.E R1, [R8.64]")).loads_before_the_first_wait() == 1
