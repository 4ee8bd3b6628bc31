"""Predicted importance as a scorer: records, publishes, selects by importance and magnitude together.

Time is cut into windows of `depth` steps. In each, the gradients of one slice of the vector are recorded, and at its end the
slice is given to the thread to be scored; the next window takes the next slice. Every `every` steps there is a lesson: the
gradients of a sample of elements in the `depth` steps before, what had accumulated by then, and what sending each of them
would gain. Whatever the thread is given in a step is published exactly `delay` steps later.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpisparse.arrays import Floats, Halves, Ints
from mpisparse.backends.flat import Pieces, Slot, collect, pieces_of, zeros
from mpisparse.backends.keys import keys_of
from mpisparse.backends.kinds import BF16, widen
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.predictive.background import Background, PredictorError
from mpisparse.schemes.predictive.nets import Job, Lesson, Nets, Prediction, Slice
from mpisparse.schemes.predictive.sample import draw
from mpisparse.select.candidates import Candidates
from mpisparse.select.scorers import DensePieces, WholeGradient
from mpisparse.select.threshold import FIRST_GROWTH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpisparse.schemes.predictive.features import Features
    from mpisparse.select.scorers import Exempt, Lap


NEUTRAL, MOST = 127, 254  # what untrained nets give every element, and the best score there is
LEAST, SLICES = 65_536, 32  # a slice is a 32nd of the vector, but no less than so many elements
SAMPLE = 4096


class ScoredKeys(NamedTuple):
    """Importance and magnitude together, by one of the rules in the backend."""

    backend: Any
    acc: Any
    scores: Any
    rule: int

    @property
    def vector(self) -> Any:
        """All keys."""
        return keys_of(self.acc, self.scores, self.rule)

    def select(self, lo: int, hi: int, floor: float) -> Candidates:
        """The elements of [lo, hi) whose keys reach the floor."""
        return Candidates(*self.backend.select_scored(self.acc, self.scores, self.rule, lo, hi, floor))

    def histogram(self, lo: int, hi: int) -> Ints:
        """The histogram of keys in [lo, hi)."""
        counts: Ints = self.backend.histogram_scored(self.acc, self.scores, self.rule, lo, hi)
        return counts


class Predicted(WholeGradient):
    """Scores of one byte for every element, kept fresh by a thread and by what other ranks tell of their selections.

    Rows, sample and scores are in the memory of the model. On a device the thread gets copies, for which it waits itself.

    validate() gives the gradient of a held-out batch, by which a lesson's gains are measured: what the loss would fall by if
    the element were sent. None: the gain is the accumulator's magnitude, predicted from that of the step before.
    delay: steps until what was submitted is published; with 0 every step records, scores and publishes the whole vector
    before it selects. late: deliveries are in flight, so that a step is done when it has added up its gradient.
    """

    prior = FIRST_GROWTH

    def __init__(
        self, residual: torch.Tensor, backend: Any, slots: Sequence[Slot], *, nets: Nets, key: int, every: int, delay: int,
        cores: float, seed: tuple[int, ...], validate: Callable[[], Pieces] | None, late: bool = False,
        features: Features | None = None,
    ) -> None:  # fmt: skip
        super().__init__(residual, backend, slots)
        self.ends = np.array([slot.end for slot in slots], dtype=np.int64)
        self.nets = nets
        self.key = key
        self.every = every
        self.delay = delay
        self.seed = seed
        self.validate = validate
        self.late = late
        self.depth, self.inputs = nets.depth, nets.inputs
        self.features = features
        self.tags: Any = backend.array_of(zeros(len(residual), torch.uint8, residual.device))
        backend.fill(self.tags, NEUTRAL)
        self.keys = ScoredKeys(backend, self.acc, self.tags, key)
        self.step = 0
        n = len(residual)
        self.at_once = delay == 0
        self.length = n if self.at_once else min(n, max(LEAST, -(-n // SLICES)))
        self.free: list[Any] = []  # rows that nobody uses
        self.rows = self._fresh_rows()
        self.sample: Ints = np.empty(0, dtype=np.int64)
        self.placed: Any = self.sample  # the same in the memory of the model
        self.sampled: Any = np.empty(0, dtype=np.uint16)
        self.background: Background[Callable[[], Job], Prediction] = Background(functools.partial(_work, nets), cores)
        self.due: deque[tuple[int, Halves | None]] = deque()  # when what was submitted is published, and its rows
        self.results: deque[Prediction] = deque()  # the results that are here, in the order of `due`
        self.gradient: Pieces | None = None  # of the held-out batch, in the step of a lesson
        self.ranking = self.plain = float("nan")
        if self._lesson_in(0) == 0:
            self._draw(np.empty(0, dtype=np.int64))

    # When

    @property
    def _place(self) -> int:
        """This step's place in its window; where every step ends one, the last: older rows move down."""
        return self.depth - 1 if self.at_once else self.step % self.depth

    def _slice(self, step: int) -> tuple[int, int]:
        """Where the slice of a step's window begins, and its length."""
        lo = step // self.depth * self.length % (-(-len(self.acc) // self.length) * self.length)
        return lo, min(self.length, len(self.acc) - lo)

    @property
    def _lo(self) -> int:
        """Where the slice of this window begins."""
        return self._slice(self.step)[0]

    @property
    def _n(self) -> int:
        """The length of this window's slice."""
        return self._slice(self.step)[1]

    def _lesson_in(self, step: int) -> int:
        """Steps until the sample's gradients are first recorded; from 0 to -depth + 1 they are, at -depth is the lesson."""
        return self.every - 1 - self.depth - step % self.every

    # Before and while gradients come

    def ready(self, exempt: Exempt, lap: Lap) -> str:
        """Wait for the results that are due, and take the gradient of the held-out batch if a lesson is due."""
        super().ready(exempt, lap)
        with contextlib.suppress(PredictorError):  # what ended the thread is reported below
            self._await(sum(step <= self.step for step, _ in self.due))
        lap("predictor")
        if self.background.trouble is not None or self.validate is None or self._lesson_in(self.step) != -self.depth:
            return self.background.trouble or ""
        try:
            with exempt("validating"):
                self.gradient = self.validate()
        except Exception as error:
            self.cause = error
            return str(error) or type(error).__name__
        finally:
            lap("validate")
        return ""

    def _await(self, count: int) -> None:
        """Wait until so many of the results that are due next are here."""
        while len(self.results) < count:
            self.results.append(self.background.take())

    def _publish(self, made: Prediction) -> None:
        self.tags[made.lo : made.lo + len(made.scores)] = self.backend.from_host(made.scores)
        if made.ranking == made.ranking:
            self.ranking, self.plain = made.ranking, made.plain

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        self._publish_due()
        found = super().accumulate(pieces, *((0, 0) if self.at_once else (lo, hi)), floor)
        self._submit()
        if self.at_once and found.bad < 0:
            found = self._scored_now(lo, hi, floor)
        if self._lesson_in(self.step + 1) == 0:
            self._draw(found.index)
        if self.late:
            self._next_step()
        return found

    def _publish_due(self) -> None:
        while self.due and self.due[0][0] <= self.step:
            _, rows = self.due.popleft()
            self._publish(self.results.popleft())
            if rows is not None:
                self.free.append(rows)

    def _scored_now(self, lo: int, hi: int, floor: float) -> Candidates:
        """Wait for this step's scores, and select by them."""
        with contextlib.suppress(PredictorError):  # the next step reports what ended the thread
            self._await(len(self.due))
            self._publish_due()
        return self.keys.select(lo, hi, floor)

    def _pass(self, dense: DensePieces, lo: int, hi: int, floor: float) -> Candidates:
        self._record(dense, 0, len(self.acc))
        return Candidates(*self.backend.accumulate_select_scored(self.acc, self.tags, self.key, *dense, lo, hi, floor))

    def _update(self, slot: Slot, pointer: int) -> int:
        one = (np.array([pointer], np.uint64), np.array([slot.end - slot.begin]), np.array([slot.sent_kind], np.uint8))
        self._record(one, slot.begin, slot.end)
        return int(self.backend.accumulate(self.acc[slot.begin : slot.end], pointer, slot.sent_kind)) if pointer else -1

    def _record(self, dense: DensePieces, begin: int, end: int) -> None:
        """Note the gradients of [begin, end) that belong to the slice or to the sample."""
        a, b = max(begin, self._lo), min(end, self._lo + self._n)
        if a < b:
            row = self._row(self.rows, self._place)
            self.backend.record(*dense, a - begin, row[a - self._lo : b - self._lo])
        place = -self._lesson_in(self.step)
        if 0 <= place < self.depth:
            first, last = np.searchsorted(self.sample, (begin, end)).tolist()
            whole = begin == 0 and last - first == len(self.sample)
            index = self.placed if whole else self.backend.from_host(self.sample[first:last] - begin)
            values = self.backend.empty(last - first, np.float32)
            self.backend.gather(*dense, index, values)
            self.backend.encode_bf16(values, self._row(self.sampled, place)[first:last])

    # When they are all there

    def _submit(self) -> None:
        """Give the thread what is complete in this step."""
        part, lesson, rows, lo = None, None, None, self._lo
        if self._place == self.depth - 1:
            accumulated = pieces_of(self.residual[lo : lo + self._n])
            self.backend.record(*accumulated.dense, 0, self._row(self.rows, self.inputs))
            self._write_features(self.rows, np.arange(lo, lo + self._n))
            part = self._handed(self.rows[: (self.inputs + 1) * self._n])
            if isinstance(self.rows, np.ndarray) and not self.at_once:  # else they are read when others are written to them
                rows, self.rows = self.rows, self._fresh_rows()
        place = -self._lesson_in(self.step)
        if place == self.depth - 1:
            self.backend.encode_bf16(self.backend.values_at(self.acc, self.placed), self._row(self.sampled, self.inputs))
            if self.features is not None:
                self.features.measure(self.acc)
            self._write_features(self.sampled, self.sample)
        if place == self.depth:
            lesson = self._lesson()
        if part is not None or lesson is not None:
            self.background.submit(functools.partial(_arrived, lesson, lo, part))
            self.due.append((self.step + self.delay, rows))

    def _handed(self, array: Any) -> Callable[[], Any]:
        """Return what gives an array to the thread: itself, or a copy that is on its way from a device."""
        return functools.partial(_itself, array) if isinstance(array, np.ndarray) else self.backend.copied(array)

    def _write_features(self, rows: Halves, index: Ints) -> None:
        """Write the features of these elements, if any, between the rows of their gradients and of the accumulator."""
        if self.features is not None:
            n = len(index)
            more = rows[self.depth * n : self.inputs * n]
            self.features.write(index, self._row(rows, self.inputs), more)

    def _lesson(self) -> Callable[[], Lesson]:
        slope, gradient = None, self.gradient
        if gradient is not None:
            slopes, self.gradient = self.backend.empty(len(self.sample), np.float32), None
            self.backend.gather(*gradient.dense, self.placed, slopes)
            slope = self._handed(slopes)
        values = self._handed(self.backend.values_at(self.acc, self.placed))
        rows = self._handed(self.sampled)
        return functools.partial(_lesson_of, self.step // self.every, self.sample, rows, values, slope, gradient)

    def _draw(self, candidates: Any) -> None:
        """Choose the sample of the next lesson."""
        generator = np.random.default_rng([*self.seed, 2, self.step // self.every])
        self.sample = draw(generator, self.ends, SAMPLE, self.backend.to_host(candidates))
        self.placed = self.backend.from_host(self.sample)
        self.sampled = self._zeros((self.inputs + 1) * len(self.sample))

    def _row(self, rows: Any, r: int) -> Any:
        n = self._n if rows is self.rows else len(self.sample)
        return rows[r * n : (r + 1) * n]

    def _fresh_rows(self) -> Any:
        return self.free.pop() if self.free else self._zeros((self.inputs + 1) * self.length)

    def _zeros(self, count: int) -> Any:
        halves = self.backend.empty(count, np.uint16)
        self.backend.fill(halves, 0)
        return halves

    # Selecting

    def received(self, index: Any, tags: Any) -> None:
        """Take over the scores by which other ranks selected."""
        self.backend.put_bytes(self.tags, index, tags)

    def sent(self, index: Ints) -> None:
        """The step is done."""
        if not self.late:
            self._next_step()

    def _next_step(self) -> None:
        self.step += 1
        if self.at_once:  # the gradients are a step older
            recorded = self._n * self.depth
            self.rows[: recorded - self._n] = self.rows[self._n : recorded]

    def details(self) -> dict[str, float]:
        held = [self.rows, self.sampled, *self.free, *(rows for _, rows in self.due if rows is not None)]
        return {
            "ranking": self.ranking,
            "ranking_by_magnitude": self.plain,
            "predictor_seconds": self.background.seconds,
            "history_bytes": float(sum(rows.nbytes for rows in held)),
        }

    def close(self) -> None:
        self.background.close()

    # State

    def state(self) -> dict[str, Any]:
        """Scores, nets, what is being recorded, and results that are still to be published; waits for the thread."""
        self._await(len(self.due))
        return {
            **{f"predictor.{key}": value for key, value in self.nets.state().items()},
            **({} if self.features is None else self.features.state()),
            "scores": self.tags,
            "recorded": self._recorded(),
            "sample": self.sample,
            "sampled": self.sampled,
            "pending.due": np.array([step for step, _ in self.due], dtype=np.int64),
            "pending.lo": np.array([made.lo for made in self.results], dtype=np.int64),
            "pending.count": np.array([len(made.scores) for made in self.results], dtype=np.int64),
            "pending.scores": np.concatenate([np.empty(0, np.uint8), *(made.scores for made in self.results)]),
            "pending.ranking": np.array([(made.ranking, made.plain) for made in self.results], dtype=np.float64).reshape(-1),
            "ranking": np.array([self.ranking, self.plain]),
            "time": self.step,
        }

    def _recorded(self) -> Halves:
        """The rows of this window, with zeros where nothing was recorded yet."""
        rows: Halves = np.array(self.backend.to_host(self.rows[: (self.inputs + 1) * self._n]))
        rows[(self.depth if self.at_once else self.step % self.depth) * self._n :] = 0
        return rows

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the state is of this vector and these nets."""
        self.nets.check({key: state[f"predictor.{key}"] for key in self.nets.state()})
        if self.features is not None:
            self.features.check(state)
        n, time, counts = len(self.acc), int(state["time"]), np.asarray(state["pending.count"])
        sample, places, due = (np.asarray(state[key]) for key in ("sample", "pending.lo", "pending.due"))
        fits = (
            np.shape(state["scores"]) == (n,)
            and np.shape(state["ranking"]) == (2,)
            and all(int(np.max(state[key], initial=0)) <= MOST for key in ("scores", "pending.scores"))
            and time >= 0
            and len(state["recorded"]) == (self.inputs + 1) * self._slice(time)[1]
            and len(state["sampled"]) == (self.inputs + 1) * len(sample)
            and (not len(sample) or (sample[0] >= 0 and sample[-1] < n and (np.diff(sample) > 0).all()))
            and len(places) == len(counts) == len(due)
            and (not len(due) or (time <= due[0] and due[-1] < time + max(1, self.delay) and bool((np.diff(due) > 0).all())))
            and len(state["pending.ranking"]) == 2 * len(counts)
            and counts.sum() == len(state["pending.scores"])
            and bool(((places >= 0) & (places + counts <= n)).all())
        )
        if not fits:
            raise ConfigurationError(f"the predicted scores and their history in the state do not fit {n} elements")

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave, also on another number of ranks."""
        super().load(state)
        self._await(len(self.due))
        self.nets.load({key: state[f"predictor.{key}"] for key in self.nets.state()})
        if self.features is not None:
            self.features.load(state)
        self.step = int(state["time"])
        there = self.backend.from_host
        self.tags[:] = there(np.asarray(state["scores"], dtype=np.uint8))
        self.rows[: len(state["recorded"])] = there(np.asarray(state["recorded"], dtype=np.uint16))
        self.sample = np.array(state["sample"], dtype=np.int64)
        self.placed, self.sampled = there(self.sample), there(np.array(state["sampled"], dtype=np.uint16))
        self.due = deque((step, None) for step in np.asarray(state["pending.due"]).tolist())
        cuts = np.cumsum(state["pending.count"])[:-1]
        parts = np.split(np.array(state["pending.scores"], dtype=np.uint8), cuts)
        rankings = np.asarray(state["pending.ranking"], dtype=np.float64).reshape(-1, 2).tolist()
        places = np.asarray(state["pending.lo"]).tolist()
        self.results = deque(
            Prediction(lo, scores, *ranking) for lo, scores, ranking in zip(places, parts, rankings, strict=False)
        )
        self.ranking, self.plain = np.asarray(state["ranking"], dtype=np.float64).tolist()
        self.gradient = None


# What the thread does. It must not know the scorer, which ends the thread when nobody knows it any more.


def _work(nets: Nets, arrived: Callable[[], Job]) -> Prediction:
    return nets.work(arrived())


def _arrived(lesson: Callable[[], Lesson] | None, lo: int, rows: Callable[[], Halves] | None) -> Job:
    """A job whose arrays are here."""
    return Job(None if lesson is None else lesson(), None if rows is None else Slice(lo, rows()))


def _itself(array: Any) -> Any:
    return array


@np.errstate(over="ignore", invalid="ignore")
def _lesson_of(
    number: int, index: Ints, rows: Callable[[], Halves], values: Callable[[], Floats], slope: Callable[[], Floats] | None,
    gradient: Pieces | None,
) -> Lesson:  # fmt: skip
    """A lesson whose arrays are here. The gradient lives until then, because it was to be read."""
    recorded, accumulated = rows(), values()
    if slope is None:
        known, gain = widen(recorded[len(recorded) - len(index) :], BF16), np.abs(accumulated)
    else:
        known, gain = accumulated, np.nan_to_num(slope() * accumulated)
    return Lesson(number, index, recorded, np.abs(known), gain)


def validation(slots: Sequence[Slot], gradient: Callable[[], list[torch.Tensor | None]]) -> Callable[[], Pieces]:
    """The gradient of a held-out batch as pieces of the flat vector."""
    ends = np.array([slot.end for slot in slots], dtype=np.int64)
    kinds = np.array([slot.sent_kind for slot in slots], dtype=np.uint8)

    def take() -> Pieces:
        return collect(slots, ends, kinds, [None if g is None else g.to_dense() for g in gradient()])

    return take
