"""Select exactly k when a threshold in exclusive regions cannot: drop ties beyond k, and fill up a shortage.

A threshold selects too many elements if magnitudes are equal. Regions select too few if an owner's own values are zero in
its region but other ranks' are not: experts, heads, frozen parts, a rank without data. Then every rank nominates its k
largest elements to their owners, and the largest nominees that the owners did not select fill the step up to k.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.comm.regions import Region
from mpisparse.select.search import Collected, Scope, Search, Settled, both
from mpisparse.select.threshold import HUGE, TINY, is_close, spread


def is_short(search: Search[Scope, Collected], settled: Settled[Collected]) -> bool:
    """Tell whether the owners' own values are too few for k."""
    selected = int(settled.workloads.sum())
    return selected < search.k < search.n and not is_close(selected, search.k)


def fill(
    search: Search[Scope, Collected], scope: Scope, settled: Settled[Collected], regions: list[Region], turn: int
) -> Settled[Collected]:
    """Bring the selection to k elements, or to all that are nonzero on some rank if these are fewer. Collective."""
    if is_short(search, settled):
        found = search.nominate(settled.found, settled.threshold, regions)
        settled = both(settled, search.settle(scope, spread(TINY, HUGE), found))
    selected = int(settled.workloads.sum())
    if selected > search.k and not is_close(selected, search.k):
        settled = _drop_ties(search, settled, turn)
    return settled


def _drop_ties(search: Search[Scope, Collected], settled: Settled[Collected], turn: int) -> Settled[Collected]:
    """Of ties at the threshold keep as many as k has room for, in proportion to how many each rank has."""
    above, equal = search.tied(settled.found, settled.threshold).T
    shares = even_shares(equal, search.k - int(above.sum()))
    found = search.cut(settled.found, settled.threshold, shares, turn)
    return replace(settled, found=found, workloads=above + shares)


def even_shares(equal: Ints, room: int) -> Ints:
    """Divide the room in proportion to the ties that each rank has; none gets more than it has."""
    ends = np.cumsum(equal) * min(room, int(equal.sum())) // max(1, int(equal.sum()))
    return np.diff(ends, prepend=0)


def ascending_shares(equal: Ints, room: int) -> Ints:
    """Give the room to the first ranks."""
    before: Ints = np.cumsum(equal) - equal
    return np.clip(room - before, 0, equal)
