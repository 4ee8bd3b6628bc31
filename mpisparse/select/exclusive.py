"""Selection in exclusive regions: one threshold for all ranks, and each rank selects in a region of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mpisparse.arrays import Ints, State
from mpisparse.comm.agreement import Notice
from mpisparse.select.able import not_poor
from mpisparse.select.candidates import NONE, Candidates, certain, count_ties, drop_ties
from mpisparse.select.fill import ascending_shares, fill, is_short
from mpisparse.select.partition import imbalance
from mpisparse.select.plans import Agreed, Outcome, pack_agreed, unpack_agreed
from mpisparse.select.riders import Opening, pack
from mpisparse.select.search import Collected, Scope, Search, Settled, Settlement, both, share_counts
from mpisparse.select.selector import BALANCED, LEAST_CALM, ExclusiveSelector
from mpisparse.select.threshold import TINY, TOLERANCE, Controller, Rungs, TailAware, locate_rungs
from mpisparse.select.view import Live, Snapshot, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

NO_RUNGS: Rungs = np.empty(0, dtype=np.float32)
DRAWS = 3  # how often borders are drawn in a step at most
SPARE = 0.6  # the floor of a snapshot, as a share of the lowest rung
SHORT = 1 << 20  # elements that a second pass reads in the time of a message
MARGIN = 4  # the size of a snapshot, as a multiple of what a rank is likely to send


class Rules(NamedTuple):
    """Options of exclusive selection.

    masked: thresholds come from the keys, but elements are selected whose accumulator reaches them. exact: the threshold is
    the key that exactly k elements reach, found by gathering all keys. scored: keys are not the accumulator's magnitudes.
    keeps: unsent values stay in the accumulator. Keys that do not grow with them could let some elements wait for ever, so
    every 16th step selects by magnitude. late: deliver gets a snapshot.
    """

    masked: bool = False
    exact: bool = False
    scored: bool = False
    keeps: bool = True
    late: bool = False

    @property
    def by_ladder(self) -> bool:
        """Whether the threshold is found by counting the pass's candidates on a ladder."""
        return not (self.masked or self.exact)


class Evidence(NamedTuple):
    """What the next step's threshold is learnt from; `settled` is None if this step says nothing about it."""

    selector: ExclusiveSelector
    settled: Settled[Any] | None
    k: int


def settle_in_regions(
    search: Search[Scope, Collected], selector: ExclusiveSelector, scope: Scope, rungs: Rungs, found: Collected
) -> tuple[Settled[Collected], ExclusiveSelector]:
    """Agree on the threshold; if borders are drawn in the step, once to draw them and once inside them.

    Returns the selector with the borders of this step.
    """
    settled = search.settle(scope, rungs, found, everywhere=selector.in_step)
    if selector.keeps:
        return settled, _verdict(search, settled, selector.judged(settled.workloads))
    if not selector.in_step:
        return settled, selector
    everywhere, floor = settled.found, settled.rungs[0]
    able, mine = search.able, scope
    totals: Ints | None = settled.workloads
    for _ in range(DRAWS if search.gathers else 1):  # redrawing from sums would give nearly the same borders
        counts = search.block_counts(everywhere, settled.threshold, selector.edges, totals)
        if search.gathers and totals is not None:  # the selector still has the borders of the last step
            selector = selector.judged(selector.loads(counts))
        able = search.able if search.gathers else not_poor(settled.workloads)
        selector = selector.drawn(counts, able, search.least, None if search.gathers else settled.workloads)
        if search.gathers:
            search.drawn(counts, selector)
        mine, inside = search.inside(everywhere, selector.cut)
        settled = both(settled, search.settle(mine, settled.rungs, inside))
        short = settled.workloads.sum() < search.k  # then no borders help, and the whole vector would be candidates
        if imbalance(settled.workloads[able]) <= BALANCED or (short and settled.rungs[0] <= TINY):
            break
        totals = None  # not all ranks know the counts at the new threshold
        if settled.rungs[0] < floor:  # the ladder moved down, so the next borders need candidates from its lowest rung
            floor = settled.rungs[0]
            everywhere = search.select(scope, float(floor))
    if len(able) < search.size:  # elements that only ranks without a partition have must be sent, too
        found = search.add_poor(settled.found, settled.threshold, able, selector.cut)
        settled = both(settled, search.settle(mine, settled.rungs, found))
    return settled, _verdict(search, settled, selector)


def _verdict(
    search: Search[Scope, Collected], settled: Settled[Collected], selector: ExclusiveSelector
) -> ExclusiveSelector:
    """Return the selector; its borders are redrawn next if they leave ranks with too little to select."""
    return replace(selector, calm=0) if is_short(search, settled) else selector


def settle_step(
    search: Search[Scope, Collected], selector: ExclusiveSelector, scope: Scope, rungs: Rungs, found: Collected,
    sound: Callable[[Settled[Collected]], Settled[Collected]] | None = None, *, tells: bool = True,
) -> tuple[Settled[Collected], Evidence]:  # fmt: skip
    """Agree on threshold and borders, and select exactly k if the controller holds k; for real ranks and simulated ones.

    sound: leaves out elements that should not be sent. tells: whether the next threshold can be learnt from this step.
    """
    settled, selector = settle_in_regions(search, selector, scope, rungs, found)
    k, selected = search.k, int(settled.workloads.sum())
    close = selected > 0 and abs(selected - k) <= max(1.0, TOLERANCE * k)
    if not selector.controller.holds or (close and tells and sound is None):
        return settled, Evidence(selector, settled, k)
    filled = fill(search, scope, sound(settled) if sound else settled, selector.cut, selector.step)
    learnt = settled if tells and not is_short(search, settled) else None
    return filled, Evidence(selector, learnt, search.k)


def may_look(selector: ExclusiveSelector) -> bool:
    """Whether it pays to find a step's candidates before the gradient is added.

    With accumulate="backward" it was added during backward. Otherwise this takes a second pass, which costs less than the
    message it saves only if the vector is short: on 25 M elements in shared memory a step took 1.2 times as long with it.
    """
    return selector.reads_region or selector.n <= SHORT


def first_rungs(selector: ExclusiveSelector, k: int) -> Rungs:
    """The ladder that a step starts with; if everything is sent, one rung that all elements reach."""
    return selector.controller.ladder(k) if k < selector.n else np.zeros(1, dtype=np.float32)


def next_selector(
    controller: Controller, lesson: Evidence, union: Ints, search: Callable[..., Ints], pick: Callable[..., Ints]
) -> ExclusiveSelector:
    """The selector of the next step; `controller` is the latest one."""
    settled, k = lesson.settled, lesson.k
    if settled is not None and k < lesson.selector.n:
        controller = controller.after(settled.rungs, settled.total, settled.rung, k)
    return lesson.selector.after(union, controller, search, pick)


class ExclusivePlan(NamedTuple):
    """One step of exclusive selection."""

    selector: ExclusiveSelector
    rules: Rules
    k: int
    region: tuple[int, int]
    rungs: Rungs
    by_magnitude: bool
    scope: tuple[int, int]
    floor: float
    looks: bool
    own: bool = False
    told: Ints | None = None  # every rank's counts on the ladder, if they came with the roll call

    def opened(self, backend: Backend, peek: Callable[[int, int, float], Candidates]) -> Opening | None:
        """The counts to send with the roll call, if possible; local.

        peek: finds the candidates of a pass without adding anything.
        """
        if self.by_magnitude or not len(self.rungs) or not may_look(self.selector):
            return None
        found = peek(*self.region, self.floor)
        return Opening(found, pack(backend, backend.tail_counts(found.magnitude, self.rungs)))

    def look(self, live: Live, notice: Notice) -> View:
        """In flight, a snapshot of the candidates."""
        live = live.by_magnitude() if self.by_magnitude else live
        found = live.found
        if not len(self.rungs) and notice.status == 0:  # no ladder yet: take more than this rank is likely to send
            wanted = min(self.selector.n, MARGIN * self.k)
            floor = float(locate_rungs(live.histogram(*self.region), wanted)[0])
            found = live.select(*self.region, floor)
        values, found = live.backend.to_host(live.take(found.index)), found.on_host(live.backend)
        if self.k < self.selector.n:  # values that just departed (`Ahead`) are zero now and must not be selected again
            waits = values != 0.0
            found, values = Candidates(found.index[waits], found.magnitude[waits]), values[waits]
        return Snapshot(live.backend, found, values)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree on the threshold and the borders. Collective."""
        seen = view.by_magnitude() if self.by_magnitude else view
        search = Settlement(exchange, backend, seen, self.selector.controller, notice, self.selector.n, self.told)
        if self.rules.by_ladder:
            sound = functools.partial(self._without_zeros, exchange, backend, view) if self.rules.scored else None
            settled, lesson = settle_step(
                search, self.selector, self.region, self.rungs, view.found, sound, tells=not self.by_magnitude
            )
        else:
            settled = self._settle_percentile(search, exchange, backend, notice, view)
            lesson = Evidence(self.selector, settled, self.k)
        if self.selector.controller.at_least_one and not self.rules.exact:
            settled = _at_least_one(settled, lesson.selector, exchange.rank, backend)
        found, threshold, union = settled.found, float(settled.rungs[settled.rung]), None
        if exchange.size == 1 and isinstance(found.index, np.ndarray):  # no other rank needs it
            union = found.index[found.magnitude >= np.float32(threshold)]
        return Agreed(
            found, threshold, settled.workloads, lesson.selector.cut, union, reselected=settled.reselected,
            refined=settled.refined, lesson=lesson,
        )  # fmt: skip

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """Regions are exclusive, so their concatenated indices are the union."""
        return agreed._replace(union=union)

    def _settle_percentile(
        self, search: Settlement, exchange: Exchange, backend: Backend, notice: Notice, view: View
    ) -> Settled[Candidates]:
        """Find a threshold from the keys in the ranks' regions, and select what reaches it in the masked vector."""
        if self.rules.exact:
            rungs = np.array([self._percentile(exchange, backend, view)], dtype=np.float32)
            idle = np.zeros(exchange.size, dtype=np.int64)
            settled = Settled(view.found, rungs, 0, np.array([self.k]), idle)
        else:
            settled = search.settle(self.region, self.rungs, view.found)
        masked = view.by_magnitude() if self.rules.masked else view
        selected = masked.select(*self.region, settled.threshold)
        if self.rules.exact and not self.rules.masked:
            selected = self._first_of_equals(exchange, backend, selected, settled.threshold)
        counts = np.array([len(selected.index)], dtype=np.int64)
        return replace(settled, found=selected, workloads=share_counts(exchange, notice, counts, self.selector.n)[:, 0])

    @staticmethod
    def _without_zeros(
        exchange: Exchange, backend: Backend, view: View, settled: Settled[Candidates]
    ) -> Settled[Candidates]:
        """Leave out elements that have a score but a zero in the accumulator; they would displace others. Collective."""
        selected = settled.found.on_host(backend).reaching(settled.threshold)
        held = view.holds(selected.index)
        counts = exchange.allgather(np.array([len(held), np.count_nonzero(held)], dtype=np.int64))
        if (counts[:, 0] == counts[:, 1]).all():
            return settled
        kept = Candidates(selected.index[held], selected.magnitude[held])
        return replace(settled, found=kept.on_device(backend), workloads=counts[:, 1])

    def _percentile(self, exchange: Exchange, backend: Backend, view: View) -> float:
        """The k-th largest key over all ranks' regions, found by gathering and sorting all keys; for tests."""
        n, regions = self.selector.n, sorted(self.selector.cut)
        mine = backend.to_host(view.select(*self.region, 0.0).magnitude).view(np.uint8)
        every = exchange.allgatherv(mine, [4 * (r.hi - r.lo) for r in regions], [4 * r.lo for r in regions])
        return max(float(np.partition(every.view(np.float32), n - self.k)[n - self.k]), TINY)

    def _first_of_equals(self, exchange: Exchange, backend: Backend, selected: Candidates, threshold: float) -> Candidates:
        """Of elements equal to the threshold, take the first until k are selected."""
        on_host = selected.on_host(backend)
        rows = exchange.allgather(count_ties(on_host, threshold))
        order = [r.rank for r in self.selector.cut]
        shares = ascending_shares(rows[order, 1], self.k - int(rows[:, 0].sum()))
        return drop_ties(on_host, threshold, int(shares[order.index(exchange.rank)]), 0).on_device(backend)


def _at_least_one(
    settled: Settled[Candidates], selector: ExclusiveSelector, rank: int, backend: Backend
) -> Settled[Candidates]:
    """Let ranks that selected nothing send the first element of their region; all ranks know which do. Local."""
    empty = settled.workloads == 0
    for region in selector.cut:
        empty[region.rank] &= region.hi > region.lo
    if not empty.any():
        return settled
    workloads, found = settled.workloads + empty, settled.found
    if empty[rank]:
        first = Candidates(np.array([selector.region_of[rank][0]], dtype=np.int64), NONE.magnitude)
        found = certain(first).on_device(backend)
    return replace(settled, found=found, workloads=workloads)


class ExclusiveSelection:
    """Plans each step's exclusive regions, with an online threshold."""

    added: ClassVar[State] = {"calm": 0, "needed": LEAST_CALM}

    def __init__(self, selector: ExclusiveSelector, rules: Rules, rank: int, backend: Backend) -> None:
        self.selector = selector
        self.rules = rules
        self.rank = rank
        self.backend = backend

    @property
    def step(self) -> int:
        return self.selector.step

    def plan(self, k: int) -> ExclusivePlan:
        """Where this rank collects candidates in the coming step, and the floor that they must reach."""
        selector, rules = self.selector, self.rules
        waits = rules.by_ladder and rules.scored and rules.keeps and selector.controller.holds
        by_magnitude = waits and selector.is_due and k < selector.n
        rungs = NO_RUNGS if by_magnitude else first_rungs(selector, k)
        region = (0, selector.n) if selector.in_step else selector.region_of[self.rank]
        lower = SPARE if rules.late else 1.0  # a snapshot has nothing below its floor
        scope, floor = (region, lower * float(rungs[0])) if len(rungs) else ((0, 0), 0.0)
        return ExclusivePlan(selector, rules, k, region, rungs, by_magnitude, scope, floor, rules.late)

    def learn(self, agreed: Agreed, outcome: Outcome) -> None:
        """Go on to the next step: its controller, blocks and borders."""
        before, backend, controller = self.selector, self.backend, self.selector.controller
        if self.rules.late and agreed.lesson.settled is None and isinstance(controller, TailAware):
            controller = replace(controller, threshold=0.0)  # the ladder missed: the next step counts its whole vector
        after = next_selector(controller, agreed.lesson, agreed.union, backend.search, backend.pick)
        # At staleness 2 or more, the lesson's selector has missed the steps that were learnt from meanwhile.
        self.selector = after if after.step == before.step + 1 else replace(after, step=before.step + 1)

    def state(self) -> State:
        """What the next selection depends on."""
        return self.selector.state()

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        self.selector.check(state)

    def load(self, state: State) -> None:
        """Load a state that state() returned."""
        self.selector = self.selector.loaded(state)

    def resize(self, states: Sequence[State]) -> State:
        """All ranks have the same state; another number of ranks starts with even partitions."""
        return {key: states[0][key] for key in self.state()}

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight, with what the next threshold is learnt from."""
        lesson: Evidence | None = agreed.lesson
        if lesson is None:  # nothing_agreed(), before the first agreement
            return pack_agreed(agreed)
        settled = lesson.settled
        learnt = {} if settled is None else {"rungs": settled.rungs, "total": settled.total, "rung": settled.rung}
        return {**pack_agreed(agreed), "selector": lesson.selector.state(), "lesson_k": lesson.k, **learnt}

    def unpacked(self, state: State) -> Agreed:
        """The agreement that packed() packed; raises KeyError, TypeError or ValueError if the state is invalid."""
        agreed = unpack_agreed(state)
        if "selector" not in state:
            return agreed
        self.selector.check(state["selector"])
        k, settled = int(state["lesson_k"]), None
        if "rungs" in state:
            rungs, total = np.asarray(state["rungs"], dtype=np.float32), np.asarray(state["total"], dtype=np.int64)
            settled = Settled(None, rungs, int(state["rung"]), total, total)
        if not 1 <= k <= self.selector.n or (settled is not None and not _is_ladder(settled, of_all=k == self.selector.n)):
            raise ValueError("what a threshold is to be learnt from is no ladder of thresholds with counts")
        return agreed._replace(lesson=Evidence(self.selector.loaded(state["selector"]), settled, k))


def _is_ladder(settled: Settled[Any], *, of_all: bool) -> bool:
    """Whether thresholds ascend from above 0 (from 0 if all elements are sent) and their counts fall."""
    rungs, total = settled.rungs, settled.total
    if rungs.ndim != 1 or total.shape != rungs.shape or not 0 <= settled.rung < len(rungs):
        return False
    rises = bool(np.isfinite(rungs).all() and (np.diff(rungs) >= 0).all()) and (rungs[0] > 0 or (of_all and rungs[0] == 0))
    return bool(rises and total[-1] >= 0 and (np.diff(total) <= 0).all())
