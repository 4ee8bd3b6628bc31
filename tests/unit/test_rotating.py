"""Parts of a vector that are sent in turn."""

from __future__ import annotations

import numpy as np
import pytest

from mpisparse.comm.regions import BLOCK, Groups, Part
from mpisparse.errors import ConfigurationError
from mpisparse.schemes import configure
from mpisparse.select.rotating import Pace


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 3, 12 * BLOCK])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_parts_are_disjoint_and_cover_everything(n: int, every: int) -> None:
    parts = [Part(n, every, phase) for phase in range(every)]
    index = [part.index(0, len(part)) for part in parts]
    assert all((np.diff(each) > 0).all() for each in index)
    assert sorted(np.concatenate(index).tolist()) == list(range(n))
    for part, each in zip(parts, index, strict=True):
        for element in {0, 1, min(n, BLOCK), n // 2, n}:
            assert part.below(element) == np.searchsorted(each, element)


@pytest.mark.parametrize("numbers", [[], [0], [1, 3], [0, 1, 2, 3, 4], [4]])
def test_groups_as_an_index(numbers: list[int]) -> None:
    n, width = 45, 10
    groups = Groups(n, width, np.array(numbers, dtype=np.int64))
    expected = [i for i in range(n) if i // width in numbers]
    assert groups.index(0, len(groups)).tolist() == expected
    assert [groups.below(element) for element in range(n + 1)] == np.searchsorted(expected, np.arange(n + 1)).tolist()


def test_the_pace_may_change() -> None:
    pace = Pace.of("2, 5:3")
    assert [pace.at(step) for step in (0, 1, 4, 5, 6, 100)] == [(2, 0), (2, 1), (2, 4), (3, 0), (3, 1), (3, 95)]
    assert Pace.of(7).at(12) == (7, 12)
    assert configure("drift", density=1.0, codec="sign", every="5, 200:40").values()["every"] == "5, 200:40"


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None, "", "0", "2, 5", "2, 5:0", "2, 5:3, 5:4", "2, 9:3, 5:4", "x"])
def test_bad_paces(every: object) -> None:
    with pytest.raises(ConfigurationError, match='every must be a whole number >= 1, or a text such as "5, 200:40"'):
        configure("drift", every=every)


@pytest.mark.parametrize(("scheme", "name"), [("drift", "rate"), ("diloco", "outer_rate"), ("sparseloco", "outer_rate")])
def test_a_rate_is_a_number(scheme: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a number above 0, got None"):
        configure(scheme, **{name: None})
