"""GradientSync: what a torch user touches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.backends.device import load_backend
from mpisparse.backends.digest import digest
from mpisparse.backends.flat import zeros
from mpisparse.comm.agreement import (
    BROKEN,
    FINE,
    NONFINITE,
    FrozenDiffers,
    Notice,
    Overflow,
    Refusal,
    ReplicasDiffer,
    StepRefused,
)
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.roll_call import SAMPLES, Call, answer_at_exit, meet
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.comm.watchdog import TIMEOUT, check_timeout, watch
from mpisparse.core.records import Parts, Stats
from mpisparse.core.refusals import explain
from mpisparse.core.step import Clock, agree, details_of, run
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.model.buffers import SharedBuffers
from mpisparse.model.collectives import Collectives
from mpisparse.model.digests import Equality, Sameness, rates_of
from mpisparse.model.grad_hooks import take_over
from mpisparse.model.gradients import ModelGradients
from mpisparse.model.joining import joined_k, joining, with_zeros
from mpisparse.model.layout import Layout, refuse_wrapped
from mpisparse.model.published import Published
from mpisparse.model.shards import check_replicas, local_of
from mpisparse.model.unexchanged import Unexchanged
from mpisparse.schemes import configure
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Options, check_density, check_whole
from mpisparse.schemes.state import STATE_FORMAT, check_state, step_state
from mpisparse.vectors import NoSink

DIVERGED = "nothing was exchanged: lower the learning rate or clip, and load a saved state"


class GradientSync(Collectives):
    """Averages a model's gradients over MPI ranks, sparsely, keeping what was not sent for later steps.

    Collective: construct it on all ranks of `comm` (default: all of them) with the same model and options. Parameters
    and buffers are set to those of rank 0. Then, in place of a plain optimizer step:

        loss.backward()
        sync.step()         # p.grad is now the averaged gradient
        optimizer.step()

    None for density or codec is the scheme's own default. Further options are the scheme's: see mpisparse.schemes.

    timeout: seconds after which a rank that waits in an exchange prints where it is and the job ends with exit code 87; 0:
    never. See unwatched(). run_directory: where heartbeats are written if they do not get through the network.
    check_every: steps from one comparison of the replicas to the next; 0: never.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        scheme: str = "exdyna",
        density: float | None = None,
        codec: str | None = None,
        comm: Any = None,
        timeout: float = TIMEOUT,
        run_directory: str | Path | None = None,
        check_every: int = 100,
        **scheme_options: Any,
    ) -> None:
        end_job_on_uncaught_exception(comm)
        self._exchange = Exchange(comm)
        error: ConfigurationError | None = None
        try:
            self._timeout = check_timeout(timeout)
            self._options: Options = configure(scheme, density=density, codec=codec, **scheme_options)
            check_whole("check_every", check_every, 0)
            refuse_wrapped(model)
            self._layout = Layout(model)
            self._backend = load_backend(device=self._layout.device)
            if self._backend.name == "cuda" and not self._options.on_device:
                raise ConfigurationError(f'scheme "{scheme}" runs on the host only, the model is on {self._layout.device}')
        except ConfigurationError as caught:
            error = caught
        self._exchange.raise_together(error)
        check_replicas(list(model.named_parameters()), self._exchange, self._options, scheme)
        self.scheme = scheme
        self._model = model
        self._check_alike()
        self._exchange.segment_nbytes = self._options.segment_nbytes
        self.broadcast_([*model.parameters(), *model.buffers()])
        self._residual = zeros(self._layout.size, torch.float32, self._layout.device)
        sink = NoSink() if self._options.of_weights else Published(self._layout, self._backend)
        parts = Parts(self._residual, self._layout.slots, self._layout.held, sink, self._exchange, self._backend)
        self._aggregator, self._companion = self._built(parts, Site(model, self._layout))
        self._gradients: Any = self._companion.subject or self._of_gradients(parts)
        take_over(self._gradients.watch, self._layout.params)
        self._density = float(self._options.density)
        self._stats: Stats | None = None
        self._made: Callable[[], Stats] | None = None  # makes the statistics of the last step
        self._share = self._layout.size  # the elements that it exchanged
        self._syncing = True
        self._trouble: str | None = None  # of the attached optimizer
        self._attached: list[Any] = []  # what attach() returned, until it is removed
        self._call: Call | None = None  # the roll call of the coming step, where this rank takes part with zeros
        self._buffers = SharedBuffers(model, self._exchange, self._options.buffers)
        self._equality = Equality(self._layout.slots, self._replicated, self._rates, check_every)
        self._sameness = Sameness()
        self._unexchanged = Unexchanged(self)
        self._damaged: str | None = None
        self._told_unobserved = False
        self._watchdog = watch(self._exchange, self._timeout, None if run_directory is None else Path(run_directory))
        answer_at_exit(self._exchange)
        if self._watchdog is not None:
            weakref.finalize(self, self._watchdog.close).atexit = False  # it has its own word for the interpreter's exit

    def _built(self, parts: Parts, site: Site) -> Scheme:
        """Put the scheme together; what it refuses of the model is raised on all ranks. Collective."""
        built: Scheme | None = None
        error: ConfigurationError | None = None
        try:
            built = self._options.build(parts, site)
        except ConfigurationError as caught:
            error = caught
        self._exchange.raise_together(error)
        assert built is not None
        return built

    def _of_gradients(self, parts: Parts) -> ModelGradients:
        """The model's gradients, to be exchanged."""
        assert isinstance(parts.sink, Published)
        gradients = ModelGradients(
            self._model, self._layout, parts.sink, self._backend, self._residual,
            in_backward=self._options.accumulate == "backward", looks=self._options.nonfinite == "skip",
        )  # fmt: skip
        gradients.add = self._aggregator.add
        return gradients

    # What a training loop calls

    def step(self) -> None:
        """Exchange the gradients since the last step and publish their mean as p.grad; collective.

        Where a scheme exchanges weights (drift), call it after optimizer.step().
        """
        if self._options.of_weights:
            self._check_ready()
        if not self._companion.idle:
            self._companion.check_by_hand()
        if self._options.of_weights:
            self.finish()
        else:
            self.begin()

    def begin(self, trouble: str | None = None) -> None:
        """What step() does, for attach, which also calls finish() when the optimizer is done; collective.

        trouble: why this rank cannot go on, for all ranks to raise. Where weights are exchanged, that is left to finish(),
        and only the gradients of a dense start are exchanged here.
        """
        if self._options.of_weights:
            self._check_ready()
            self._trouble = trouble
            self._companion.begin()
            if self._companion.starting:
                call, self._call = self._call, None
                self._companion.average(trouble, call)
        elif not self._companion.draining:
            self._exchange_now(trouble)

    def _exchange_now(self, trouble: str | None) -> None:
        """Do one step of the aggregator; collective."""
        self._check_ready()
        if not self._companion.idle:
            self._companion.begin()
        call, self._call = self._call, None
        aggregator, works, gradients, clock = self._aggregator, self._aggregator.works, self._gradients, Clock()
        self._backend.use_threads(torch.get_num_threads())
        found = aggregator.ready(clock.lap) if works.scorer.asks else ""  # asked even in trouble: it begins a new step
        gradients.look()  # k counts what is not frozen
        pieces, notice = gradients.take(self.k if call is None else joined_k(call, self.k), trouble or found)
        number = works.selection.step + (len(works.flight) if works.flight is not None else 0)
        notice = notice._replace(step=number if self._companion.idle else self._companion.counted(number))
        if self._exchange.size > 1:
            notice = self._compared(notice, pieces, call)
        if self._options.of_weights:
            self._unexchanged.exchanged()
        try:
            used = self._agreed(notice, clock)
        except Refusal as refusal:
            gradients.refused()
            self._refuse(refusal, added=False)
            return
        if gradients.holds:
            self._hold()
        frozen = gradients.out_of_sight(aggregator.memories) if self._layout.held.stretches else nullcontext()
        try:
            with frozen:
                delivered = run(works, pieces, notice, clock)
        except (Refusal, GradientError) as error:
            self._fail(error)
        details = details_of(works)
        self._note(functools.partial(aggregator.stats, number, notice, delivered, clock.seconds, details))
        if not self._companion.idle:
            self._stats = self._companion.published(delivered, self.stats, sound=notice.status == FINE)
        gradients.publish(self._used_late(delivered) if works.flight is not None else used)
        self._exchange.place.steps = number + 1

    def _agreed(self, notice: Notice, clock: Clock) -> Bools | None:
        """Agree that all ranks can go on, also if their weights differ by no more than rounding; collective."""
        works = self._aggregator.works
        try:
            return agree(works, notice, clock)
        except ReplicasDiffer:
            self._gradients.refused()
            self._equality.judge(self._exchange)
            return agree(works, notice._replace(call=None, digest=0), clock)

    def _replicated(self) -> Sequence[torch.Tensor]:
        """The weights that must be equal on all ranks, one tensor for each parameter."""
        return self._companion.replicated() or [local_of(getattr(p, "param", p)) for p in self._layout.params]

    def _rates(self) -> tuple[float, ...]:
        """The learning rates that must be equal on all ranks: where gradients are exchanged."""
        return () if self._options.of_weights else rates_of(self._attached)

    def _compared(self, notice: Notice, pieces: Any, call: Call | None) -> Notice:
        """Add what the ranks compare to a notice; collective in the first exchanges. A rank alone compares nothing."""
        notice = notice._replace(digest=self._equality.number(notice.step))
        notice = notice if call is None else with_zeros(notice, call)
        if self._sameness.looks:
            self._compare_batches(pieces, notice.step, joined=call is not None)
        return notice

    def _compare_batches(self, pieces: Any, step: int, *, joined: bool) -> None:
        """Look for ranks that have the same gradient, or weights, in the first exchanges; collective."""
        if not joined:
            drift = self._companion.drift()
            sample = self._gradients.sample(pieces) if drift is None else digest([drift])
            rows = meet(self._exchange, SAMPLES, sample, self.rank, step=step)
            samples = [0] * self.size
            for sample, rank in rows[:, :2].tolist():
                samples[rank] = sample
            self._sameness.note(samples, self.rank)
        self._sameness.done += 1

    def finish(self) -> None:
        """The attached optimizer has done its step; local, unless weights are exchanged now or have arrived."""
        if self._options.of_weights:
            trouble, self._trouble = self._trouble, None
            self._companion.begin()
            if self._companion.is_due():
                self._exchange_now(trouble)
            else:
                self._rest()
            return
        if not self._companion.idle and not self._companion.draining and self._stats is not None and not self._stats.skipped:
            self._stats = self._companion.finish(self._stats)

    def _note(self, made: Callable[[], Stats]) -> None:
        """Keep what the last step did; its statistics are made when they are asked for."""
        self._made, self._share = made, self._layout.held.remaining

    def _fail(self, error: Exception) -> NoReturn:
        """Raise what a step found wrong as an error with the parameters' names; what was added or sent by then is lost."""
        if isinstance(error, Refusal):
            self._refuse(error, added=True)
        self._damaged = str(error).split(" | ", 1)[-1]
        raise error

    def _refuse(self, refusal: Refusal, *, added: bool) -> None:
        """Raise a refusal as an error, on all ranks alike; or skip the step. `added`: gradients were added before it."""
        statuses = {status for status, _ in refusal.statuses} if isinstance(refusal, StepRefused) else set()
        if self._options.nonfinite == "skip" and NONFINITE in statuses and not added:
            self._skip()
            return
        if isinstance(refusal, ReplicasDiffer):  # in flight: these steps cannot be repeated
            self._damaged = "the replicas differ"
            self._equality.judge(self._exchange)
        late_step = self._aggregator.applied if self._aggregator.staleness else None
        frozen = self._gradients.frozen.names()
        words = {"advice": DIVERGED, "what": "weight"} if self._options.of_weights else {}
        error, damage = explain(refusal, self._exchange, self._layout.name_at, frozen, late_step, **words)
        if isinstance(refusal, Overflow):
            self._gradients.drop()
        lost = added or NONFINITE in statuses
        if self._options.of_weights:  # they are as they were, unless a rank could not add what arrived
            lost = late_step is not None and BROKEN in statuses
        if lost:
            self._damaged = damage or "a step was refused after its gradients were added"
        raise error from (refusal.__cause__ or self._aggregator.cause)

    def _used_late(self, delivered: Any) -> Bools | None:
        """Which parameters had a gradient in the step whose mean is published; none before the first delivery."""
        if delivered is None:
            return np.zeros(len(self._layout.slots), dtype=bool)
        used: Bools | None = delivered.used
        return used

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients only: backward inside adds up, and step() is refused until the block is left."""
        if self._options.accumulate == "backward" and self._options.needs_whole_gradient:
            raise ConfigurationError(
                f'r{self.rank} | no_sync() with accumulate="backward": this scheme needs the step\'s whole gradient at '
                'once, which only accumulate="step" has'
            )
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def join(
        self, *optimizers: torch.optim.Optimizer, each_step: Callable[[], Any] | None = None
    ) -> AbstractContextManager[None]:
        """Allow ranks to have different numbers of batches: `with sync.join(): for batch in loader: ...`. Collective.

        A rank that leaves the block takes part in the steps of the others, with zeros for its gradients, until all have left
        it. Means are over all ranks, as with torch's Join and divide_by_initial_world_size. Its replica moves with the
        others: by the attached optimizer, or by those that are passed here. each_step is called after each of these
        steps; pass scheduler.step if the loop does that after each batch. Where weights are exchanged (drift) the rank
        keeps exchanging its own, which no longer move. average(), agree_any() and observe() leave such a rank out.
        """
        return joining(self, optimizers, each_step)

    def observe(self, metric: float, *, higher_is_better: bool = True) -> float:
        """Tell the scheme a validation metric; returns its mean over ranks. Collective.

        Where the scheme makes no use of it, rank 0 warns once.
        """
        mean = self._mean("observe", metric if higher_is_better else -metric)
        self._observed(mean)
        return mean if higher_is_better else -mean

    def _observed(self, mean: float) -> None:
        """Tell the scheme the mean of a metric, larger being better; local."""
        if not self.observes and not self._told_unobserved:
            self._told_unobserved = True
            if self.rank == 0:
                warnings.warn(
                    f'observe() has no effect with scheme "{self.scheme}" as it is set: only scheme "predictive" with '
                    "adapt_k=True moves k by a metric",
                    stacklevel=3,
                )
        self._aggregator.observe(mean)

    def note_loss(self, loss: float) -> None:
        """Tell the scheme this rank's loss of the coming step, for those that learn from it; local."""
        self._companion.note_loss(float(loss))

    def synchronize(self) -> None:
        """Finish what is in flight, so that replicas are equal; collective. Nothing is, in a synchronous scheme."""
        self._check_undamaged()
        self._meet("synchronize")
        misfit = self._layout.misfit([None] * len(self._layout.slots))
        self._exchange.raise_together(None if misfit is None else GradientError(misfit), GradientError)
        frozen = self._gradients.frozen
        frozen.look()
        if len(set(self._exchange.gather_texts(str(frozen.digest)))) > 1:
            raise explain(FrozenDiffers(), self._exchange, self._layout.name_at, frozen.names())[0]
        self._hold()
        try:
            for used in self._companion.drain():
                self._gradients.publish(used)
        except (Refusal, GradientError) as error:
            self._fail(error)

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Have the weights that are the same on all ranks in the model, their state in the optimizer, for a while.

        Buffers are made the same as well, as the option `buffers` says; then this is collective, if there are any.

        Where ranks have weights of their own (scheme speculative) evaluate inside: `with sync.global_weights(): ...`.
        What is done inside is exempt from the timeout, in every scheme.
        """
        with self.unwatched("evaluating"), self._buffers.in_place(), self._companion.global_weights():
            yield

    def unwatched(self, phase: str = "busy") -> AbstractContextManager[None]:
        """Exempt a long phase of this rank from the timeout of those that wait for it; local.

        `with sync.unwatched("plotting"): ...`. Waiting counts again as soon as no rank is in such a phase.
        """
        return self._exchange.place.exempt(phase)

    def close(self) -> None:
        """Take the hooks off the model and free the communicator; collective."""
        self._aggregator.close()
        self._gradients.watch.remove()
        if self._watchdog is not None:
            self._watchdog.close()

    # What it tells

    @property
    def averages_gradients(self) -> bool:
        """Whether the coming step exchanges gradients before optimizer.step(), not weights after it."""
        return not self._options.of_weights or self._companion.starting

    @property
    def observes(self) -> bool:
        """Whether observe() changes anything: whether the scheme adapts k to a metric."""
        return self._aggregator.observes

    @property
    def rank(self) -> int:
        """This process's rank among those that exchange."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """The number of ranks that exchange."""
        return self._exchange.size

    @property
    def options(self) -> Options:
        """The scheme's options as they were set at construction."""
        return self._options

    @property
    def stats(self) -> Stats:
        """What the last step did."""
        if self._made is not None:
            stats, self._made = self._made(), None
            whole = self._share == self._layout.size
            self._stats = stats if whole else _of_the_rest(stats, self._layout.size, self._share)
        if self._stats is None:
            raise RuntimeError(f"r{self.rank} | there are no statistics before the first step()")
        return self._stats

    @property
    def nbytes_in_flight(self) -> int:
        """Bytes that this rank received for later steps, whose statistics will count them; waits for them to arrive."""
        return self._aggregator.nbytes_in_flight

    @property
    def residual(self) -> torch.Tensor:
        """What this rank has not sent: one flat float32 tensor in the order of model.parameters() that require gradients.

        Of a scheme that exchanges weights, a copy: the distance from the shared weights.
        """
        drift = self._companion.drift()
        return self._residual if drift is None else drift

    @property
    def density(self) -> float:
        """The set density; may be changed between steps, on all ranks alike."""
        return self._density

    @density.setter
    def density(self, value: float) -> None:
        self._density = self._options.changed_density(check_density(value))

    @property
    def k(self) -> int:
        """The number of elements that the set density, or what a scheme makes of it, asks for."""
        share = min(1.0, self._density * self._aggregator.works.k_scale)
        return max(1, math.floor(share * self._layout.held.remaining + 1e-6))

    # State

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and scalars; local. copy=False: residual live."""
        parts = {**self._aggregator.state(), **self._companion.state()}
        state = {key: self._saved(value, copy) for key, value in parts.items()}
        return {
            "format": STATE_FORMAT,
            "scheme": self.scheme,
            "options": json.dumps(self._options.values(), sort_keys=True),
            "rank": self.rank,
            "size": self.size,
            "density": self._density,
            "residual": self._kept(copy),
            **{f"step.{key}": value for key, value in state.items()},
        }

    def _kept(self, copy: bool) -> torch.Tensor:
        """What a state stores of this rank as one vector: the residual, or the rank's own weights."""
        kept = self._companion.kept()
        if kept is not None:
            return kept
        return self._residual.clone() if copy else self._residual

    def _saved(self, value: Any, copy: bool) -> Any:
        """A part's value as torch's, on the host."""
        if isinstance(value, str | int | float | list | dict | None):
            return deepcopy(value) if copy else value
        array: np.ndarray[Any, Any] = self._backend.to_host(value)
        return torch.from_numpy(array.copy() if copy and array is value else array)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that state_dict() gave on the same rank of as many ranks; collective, all or none."""
        self._meet("load_state_dict")
        error: Exception | None = None
        try:
            self.check_state(state)
        except ConfigurationError as caught:
            error = caught
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as caught:
            error = ConfigurationError(f"the state is not one that state_dict() gave: {type(caught).__name__}: {caught}")
        self._exchange.raise_together(error)
        parts = self._upgraded(step_state(state))
        self._companion.load(parts)
        self._aggregator.load(parts)
        if self._companion.subject is not None:
            self._companion.restore(torch.as_tensor(state["residual"]))
        else:
            self._residual.copy_(torch.as_tensor(state["residual"]))
        self._density = float(state["density"])
        self._damaged = None
        self._buffers.forget()
        self._gradients.restart()
        self._exchange.place.steps = int(state["step.step"])
        self._equality.restart(self._companion.counted(self._aggregator.number))

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load_state_dict could take the state; local."""
        check_state(state, self.state_dict(copy=False), self._options, self._aggregator, self._companion)

    def _upgraded(self, parts: dict[str, Any]) -> dict[str, Any]:
        return self._aggregator.upgraded(self._companion.upgraded(parts))

    # Construction

    def _check_alike(self) -> None:
        """Raise on all ranks, with the first difference, unless all have the same options and the same model."""
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        lines = [
            f"scheme {self.scheme} {json.dumps(self._options.values(), sort_keys=True)}",
            f"timeout {self._timeout:g}",
            f"device {self._layout.device.type}",
            *(f"parameter {line}" for line in self._layout.describe()),
            *(f"tensor {name} {list(t.shape)} {t.dtype}" for name, t in tensors),
        ]
        text = "\n".join(lines)
        if len(set(self._exchange.gather_texts(hashlib.sha256(text.encode()).hexdigest()))) == 1:
            return
        texts = [t.split("\n") for t in self._exchange.gather_texts(text)]
        other = next(rank for rank, t in enumerate(texts) if t != texts[0])
        first, second = texts[0], texts[other]
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
        here, there = (t[at] if at < len(t) else "nothing more" for t in (first, second))
        raise ConfigurationError(
            f"r{self.rank} | the ranks differ: rank 0 has {here!r}, rank {other} has {there!r}; "
            "build the same model with the same options on every rank"
        )

    # A step

    def _check_ready(self) -> None:
        if self._gradients.watch.removed:
            raise RuntimeError(f"r{self.rank} | this GradientSync was closed, or another was made for the same model")
        if not self._syncing:
            raise RuntimeError(f"r{self.rank} | step() inside no_sync(): leave the block before the step that exchanges")
        self._check_undamaged()

    def _check_undamaged(self) -> None:
        if self._damaged is not None:
            raise GradientError(
                f"r{self.rank} | the residual is damaged since an earlier error ({self._damaged}); load a saved state"
            )

    def _hold(self) -> None:
        """What is frozen now moves no more: nothing of it stays on its way, and what came of its gradient waits."""
        frozen = self._gradients.frozen
        if frozen.changed:
            self._aggregator.hold()
            self._companion.hold(frozen.mask.tolist())
            frozen.changed = False
        self._gradients.hold_late()

    def _skip(self) -> None:
        """Some rank has a non-finite gradient: drop all gradients and change nothing else."""
        self._gradients.drop()
        self._stats = self._idle_stats(self._exchange.nbytes_sent, self._exchange.nbytes_received, skipped=True)

    def _rest(self) -> None:
        """The optimizer has done a step that no exchange follows: what is in flight is applied."""
        self._check_ready()
        self._unexchanged.exchanged()
        self._made, self._stats = None, self._companion.rested(self._idle_stats(0, 0))
        clock, number = Clock(), self._aggregator.number
        try:
            for delivered in self._aggregator.arrivals():
                self._gradients.publish(delivered.used)
                clock.lap("wait")
                notice = Notice(self.k, np.zeros(len(self._layout.slots), dtype=bool))
                details = details_of(self._aggregator.works)
                self._note(functools.partial(self._aggregator.stats, number, notice, delivered, clock.seconds, details))
        except (Refusal, GradientError) as error:
            self._fail(error)

    def _idle_stats(self, sent: int, received: int, *, skipped: bool = False) -> Stats:
        """The statistics of a step in which nothing was exchanged."""
        seen = self._made is not None or self._stats is not None
        return Stats(
            step=self._aggregator.number,
            density=0.0,
            set_density=self.k / max(1, self._layout.held.remaining),
            selected=0,
            threshold=self.stats.threshold if seen else 0.0,
            bytes_sent=sent,
            bytes_received=received,
            control_bytes=received,
            imbalance=0.0,
            seconds={},
            skipped=skipped,
        )


def _of_the_rest(stats: Stats, size: int, remaining: int) -> Stats:
    """Densities as shares of what is not frozen."""
    names = ("density", "set_density", "sent_density")
    shares = {name: min(1.0, getattr(stats, name) * size / max(1, remaining)) for name in names}
    return dataclasses.replace(stats, **shares)
