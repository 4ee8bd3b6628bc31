"""Cases that the short run takes of a product still show every value, or every pair of values."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from fewer import covering, left_out


def product(*sizes: int) -> list[dict[str, int]]:
    return [dict(zip("abcdef", values, strict=False)) for values in itertools.product(*map(range, sizes))]


def combined(cases: list[dict[str, int]], together: int) -> set[tuple[tuple[str, int], ...]]:
    return {found for case in cases for found in itertools.combinations(sorted(case.items()), together)}


@pytest.mark.parametrize(
    ("cases", "singles", "pairs"),
    [
        (product(2, 3, 4, 2, 2), 4, 14),
        (product(7), 7, 7),
        (product(2, 2), 2, 4),
        (product(3, 7, 2), 7, 22),
        (random.Random(1).sample(product(3, 3, 3, 3), 20), 5, 20),  # some pairs are in no case
        (product(1), 1, 1),
        ([{}], 1, 1),
    ],
)
def test_all_is_shown_by_few_cases(cases: list[dict[str, int]], singles: int, pairs: int) -> None:
    for size, (together, most) in itertools.product((*range(1, 5), 9), ((1, singles), (2, pairs))):
        taken = covering(cases, together, size)
        assert combined([cases[i] for i in taken], together) == combined(cases, together)
        assert combined([cases[i] for i in taken], 1) == combined(cases, 1)
        assert 0 < len(taken) <= most


def test_other_numbers_of_ranks_take_other_cases() -> None:
    cases = product(2, 3, 4, 2, 2)
    assert len(set.union(*(covering(cases, 2, size) for size in range(1, 5)))) > 3 * len(covering(cases, 2))
    assert covering(product(20, 2), 1, 1) | covering(product(20, 2), 1, 3) == set(range(40))
    assert set.union(*(covering(product(7, 4), 1, size) for size in range(1, 5))) == set(range(28))


class Item:
    """As much of a test as left_out() looks at."""

    def __init__(self, name: str, marks: dict[str, tuple[int, ...]], least: int = 0, **params: int) -> None:
        self.nodeid, self.marks, self.least = f"test_some.py::{name}[{params}]", marks, least
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=self.marks[name]) if name in self.marks else None

    def iter_markers(self, name: str) -> Any:
        if name == "parametrize":
            return iter([SimpleNamespace(args=(name,)) for name in self.callspec.params])
        return iter([SimpleNamespace(kwargs={}), SimpleNamespace(kwargs={"min_size": self.least})])


def test_what_is_left_out() -> None:
    products: list[Any] = [Item(name, {"pairs": ()}, **case) for name in ("test_a", "test_b") for case in product(3, 3, 3)]
    others: list[Any] = [Item("test_c", {}), Item("test_d", {"ranks": (2, 4)}), Item("test_e", {"ranks": (3,), "pairs": ()})]
    for size, expected in ((0, []), (2, others[2:]), (3, others[1:2])):
        missed = list(left_out([*products, *others], size))
        assert [item for item in missed if item in others] == expected
        run = [item for item in products if item not in missed]
        assert {item.nodeid.split("[")[0] for item in run} == {"test_some.py::test_a", "test_some.py::test_b"}
        least, most = (2 * 3, 2 * 3) if size == 2 else (2 * 9, 2 * 12)
        assert least <= len(run) <= most


def test_products_run_whole_on_three_ranks_and_every_value_on_the_others() -> None:
    def run(items: list[Any], size: int) -> list[dict[str, int]]:
        return [item.callspec.params for item in items if item not in list(left_out(items, size))]

    whole = product(4, 3)
    items: list[Any] = [Item("test_a", {}, **case) for case in whole]
    for size in (0, 3):
        assert run(items, size) == whole
    for size in (1, 2, 4):
        assert len(run(items, size)) == 4
        assert combined(run(items, size), 1) == combined(whole, 1)
    assert run([Item("test_a", {}, least=4, **case) for case in whole], 4) == whole, "it never runs on three ranks"
    assert run([Item("test_a", {"ranks": (2, 4)}, **case) for case in whole], 2) == whole


def test_what_needs_more_ranks_shows_nothing() -> None:
    items: list[Any] = [Item("test_a", {"singles": ()}, least=case["a"] + 1, **case) for case in product(4, 3)]
    for size in (1, 2, 3, 4):
        missed = list(left_out(items, size))
        shown = [i.callspec.params for i in items if i not in missed and i.least <= size]
        assert {(case["a"]) for case in shown} == set(range(size))
        assert {(case["b"]) for case in shown} == {0, 1, 2}


# Tests as pytest collects them: these do nothing, and the last one looks which of them run


@pytest.mark.pairs
@pytest.mark.parametrize("a", [{}, {"x": 1}, {"x": 2}])
@pytest.mark.parametrize(("b", "c"), [(1, 1.0), (1, 2.0), (2, 1.0)])
@pytest.mark.parametrize("d", [None, len, "text"])
def test_of_pairs(a: Any, b: int, c: float, d: Any) -> None:
    pass


@pytest.mark.singles
@pytest.mark.parametrize("a", [{}, {"x": 1}, {"x": 2}])
@pytest.mark.parametrize("b, c", [(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)])  # noqa: PT006 - may be written so, too
def test_of_singles(a: Any, b: int, c: float) -> None:
    pass


@pytest.mark.parametrize(("name", "least", "most", "whole"), [("test_of_pairs", 9, 12, 27), ("test_of_singles", 4, 4, 12)])
def test_collected_tests_are_left_out(request: pytest.FixtureRequest, name: str, least: int, most: int, whole: int) -> None:
    family: list[Any] = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    if len(family) < whole:
        pytest.skip("not all of them were asked for")
    run = [item for item in family if not item.get_closest_marker("skip")]
    if request.config.getoption("--all"):
        least = most = whole
    assert least <= len(run) <= most
    together = {(item.callspec.params["b"], item.callspec.params["c"]) for item in run}
    assert together == {(item.callspec.params["b"], item.callspec.params["c"]) for item in family}
