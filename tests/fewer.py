"""Which cases of a test the short run leaves to `bin/test --all`: marks singles, pairs and ranks.

`@pytest.mark.singles` on a test with several parametrizations: of their product only as many cases run as have every value
once; `@pytest.mark.pairs`: every pair of values together. Other numbers of ranks run other cases.
`@pytest.mark.ranks(2, 4)`: under mpirun it runs on two and on four ranks.

The number of ranks is a parameter of every test under mpirun: each product runs as its marks say on three ranks, and as
`singles` on one, two and four, so that every value meets every number of ranks. What never runs on three ranks runs as its
marks say on all others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import pytest

Case = Mapping[str, Hashable]  # which value each parameter has
TURNS = (1, 3, 2, 4)  # some files run on one and on three ranks only
WHOLE = 3  # the number of ranks on which products run as their marks say
TOGETHER = {"singles": 1, "pairs": 2}  # marks, and how many values each of which must be seen together


def covering(cases: Sequence[Case], together: int, size: int = 1) -> set[int]:
    """Positions of a few cases that have all that any case has of so many values together.

    Each number of ranks prefers cases that those before it in TURNS did not take.
    """
    before: set[int] = set()
    for turn in TURNS:
        taken = cover(cases, together, before)
        if turn == size:
            break
        before |= taken
    return taken


def cover(cases: Sequence[Case], together: int, avoided: set[int]) -> set[int]:
    """Take the case that shows most of what is missing until nothing is; of equal ones, what was avoided comes last."""
    missing = set(itertools.chain.from_iterable(shown(case, together) for case in cases))
    seen: Counter[tuple[str, Hashable]] = Counter()
    taken: set[int] = set()

    def worth(i: int) -> tuple[int, bool, int]:
        return len(missing & shown(cases[i], together)), i not in avoided, -sum(seen[v] for v in cases[i].items())

    while missing:
        best = max(range(len(cases)), key=worth)
        taken.add(best)
        seen.update(cases[best].items())
        missing -= shown(cases[best], together)
    return taken


def shown(case: Case, together: int) -> set[tuple[tuple[str, Hashable], ...]]:
    """All that a case shows: single values and, if so many count together, pairs; a case without values shows itself."""
    values = sorted(case.items(), key=lambda value: value[0])
    return {found for count in range(together + 1) for found in itertools.combinations(values, count)}


def case_of(item: Any) -> Case:
    """The values of a test's parameters, by identity: not all are hashable. Those of one parametrize() are one value."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    case: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if not isinstance(mark.args[0], str) else mark.args[0].replace(" ", "").split(",")
        case[",".join(names)] = tuple(id(params.pop(name)) for name in names)
    return case | {name: id(value) for name, value in params.items()}  # of fixtures


def left_out(items: Sequence[pytest.Item], size: int) -> Iterator[pytest.Item]:
    """Tests that so many ranks do not run; 0: not under mpirun."""
    families: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        here = item.get_closest_marker("ranks")
        least = max((mark.kwargs.get("min_size", 0) for mark in item.iter_markers("mpi")), default=0)
        marked = next((together for name, together in TOGETHER.items() if item.get_closest_marker(name)), 0)
        if size not in (0, WHOLE) and least <= WHOLE and not here:
            marked = TOGETHER["singles"]
        if here and size and size not in here.args:
            yield item
        elif marked and not 0 < size < least and not item.get_closest_marker("slow"):  # what is skipped shows nothing
            families.setdefault((item.nodeid.split("[")[0], marked), []).append(item)
    for (_, together), family in families.items():
        taken = covering([case_of(item) for item in family], together, size or 1)
        yield from (item for i, item in enumerate(family) if i not in taken)
