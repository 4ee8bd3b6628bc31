"""GradientSync: what a torch user touches."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros
from mpisparse.comm.agreement import (
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
from mpisparse.comm.hierarchy import find_nodes
from mpisparse.comm.roll_call import SAMPLES, Apart, Call, answer_at_exit, meet
from mpisparse.comm.survival import Shrunk
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.comm.watchdog import TIMEOUT, check_timeout, watch
from mpisparse.core.buckets import Bucketed
from mpisparse.core.records import Parts, Stats
from mpisparse.core.refusals import explain
from mpisparse.core.step import Clock, Peek, details_of, peeking
from mpisparse.errors import CollectiveError, ConfigurationError, GradientError, check_choice
from mpisparse.model.alike import check_alike, described
from mpisparse.model.buffers import SharedBuffers
from mpisparse.model.digests import Equality, Sameness
from mpisparse.model.early import Early
from mpisparse.model.grad_hooks import take_over
from mpisparse.model.gradients import GradientsBefore, ModelGradients
from mpisparse.model.joining import joined_k, joining, with_zeros
from mpisparse.model.layout import Layout, refuse_wrapped
from mpisparse.model.published import Published
from mpisparse.model.set_density import SetDensity
from mpisparse.model.shards import check_replicas, local_of
from mpisparse.model.states import States
from mpisparse.model.statistics import of_idle_step, of_the_rest
from mpisparse.model.survivors import SHRINK, Survivors, check_mirror, check_survives
from mpisparse.model.unexchanged import Unexchanged
from mpisparse.model.weights_after import WeightsAfter
from mpisparse.schemes import configure
from mpisparse.schemes.by_node import build_by_node
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Options, check_whole
from mpisparse.vectors import NoSink


class GradientSync(States, SetDensity):
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
    on_failure: if a rank dies, "abort" ends the job; "shrink" has the other ranks go on. See docs/howto/failures.md and
    on_shrink(). mirror: with "shrink", the next rank keeps a copy of what each rank has not sent, new within so many steps.
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
        on_failure: str = "abort",
        mirror: int | None = None,
        **scheme_options: Any,
    ) -> None:
        end_job_on_uncaught_exception(comm)
        self._exchange = Exchange(comm)
        meet(self._exchange, "GradientSync")
        error: ConfigurationError | None = None
        try:
            self._timeout = check_timeout(timeout)
            self._options: Options = configure(scheme, density=density, codec=codec, **scheme_options)
            check_whole("check_every", check_every, 0)
            check_choice("on_failure", on_failure, ("abort", SHRINK))
            refuse_wrapped(model)
            self._layout = Layout(model)
            self._backend = load_backend(device=self._layout.device)
            if self._backend.name == "cuda" and not self._options.on_device:
                raise ConfigurationError(f'scheme "{scheme}" runs on the host only, the model is on {self._layout.device}')
            if on_failure == SHRINK:
                check_survives(self._exchange, scheme, self._options, on_gpu=self._backend.name == "cuda")
            if mirror is not None:
                check_mirror(self._exchange, scheme, self._options, mirror, on_failure)
        except ConfigurationError as caught:
            error = caught
        self._exchange.raise_together(error)
        check_replicas(list(model.named_parameters()), self._exchange, self._options, scheme)
        self.scheme = scheme
        self._hindrance: Callable[[], str] = getattr(self._backend, "hindrance", str)  # on the host there is none
        self._model = model
        deaths = f"on_failure {on_failure}, mirror {mirror}"
        check_alike(self._exchange, [*described(model, self._layout, scheme, self._options, self._timeout), deaths])
        self._exchange.segment_nbytes = self._options.segment_nbytes
        self.broadcast_([*model.parameters(), *model.buffers()])
        self._nodes = find_nodes(self._exchange, self._options.hierarchy, self._layout.size)
        self._residual = zeros(self._layout.size, torch.float32, self._layout.device)
        sink = NoSink() if self._options.of_weights else Published(self._layout, self._backend)
        parts = Parts(
            self._residual,
            self._layout.slots,
            self._layout.held,
            sink,
            self._exchange,
            self._backend,
            on_failure == SHRINK,
        )
        self._aggregator, self._companion = self._built(parts, Site(model, self._layout))
        self._early: Early | None = None
        self._of_model = None if self._companion.subject is not None else self._of_gradients(parts)
        self._hooks = self._gradients.watch
        take_over(self._hooks, self._layout.params)
        self._before, self._after = GradientsBefore(self), WeightsAfter(self)
        self._density = float(self._options.density)
        self._falls = getattr(self._options, "density_warmup", 0) > 0
        self._stats: Stats | None = None
        self._made: Callable[[], Stats] | None = None  # makes the statistics of the last step
        self._share = self._layout.size  # the elements that it exchanged
        self._syncing = True
        self._attached: list[Any] = []  # what attach() returned, until it is removed
        self._call: Call | None = None  # the roll call of the coming step, where this rank takes part with zeros
        self._buffers = SharedBuffers(model, self._exchange, self._options.buffers)
        self._equality = Equality(self._layout.slots, self._replicated, self._rates, check_every)
        self._sameness = Sameness()
        self._unexchanged = Unexchanged(self)
        self._damaged: str | None = None
        self._told_unobserved = False
        self._run_directory = None if run_directory is None else Path(run_directory)
        self._watch()
        answer_at_exit(self._exchange)
        self._survivors: Survivors | None = None
        if on_failure == SHRINK:
            self._survivors = Survivors(self._aggregator, self._options, mirror, self._regrouped)

    def _watch(self) -> None:
        """Start the watchdog; collective."""
        self._watchdog = watch(self._exchange, self._timeout, self._run_directory)
        if self._watchdog is not None:
            weakref.finalize(self, self._watchdog.close).atexit = False  # it has its own word for the interpreter's exit

    def _regrouped(self) -> None:
        """Some ranks have died, and others have other numbers; collective. If one dies meanwhile it is called again."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._sameness = Sameness()
        self._watch()

    def on_shrink(self, listener: Callable[[Shrunk], object]) -> None:
        """Have a function called, on all ranks that go on, when others have died; local.

        It gets a record of what happened (died, rank, size, norm, step, seconds, kept), before the call in which that was
        noticed returns: sync.step(), average() and so on. There a loop re-divides its data.
        """
        if self._survivors is None:
            raise ConfigurationError(f'r{self.rank} | on_shrink() is of use with on_failure="shrink" alone')
        self._survivors.survival.listeners.append(listener)

    def _built(self, parts: Parts, site: Site) -> Scheme:
        """Put the scheme together; what it refuses of the model is raised on all ranks. Collective."""
        built: Scheme | None = None
        error: ConfigurationError | None = None
        try:
            if self._nodes is None:
                built = self._options.build_for_model(parts, site)
            else:
                built = build_by_node(self._options, parts, site, self._nodes)
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
            in_backward=self._options.accumulate == "backward",
            looks=self._options.nonfinite == "skip" and not self._aggregator.undoes,
        )  # fmt: skip
        gradients.add = self._aggregator.add
        if isinstance(self._aggregator, Bucketed):
            loop = weakref.proxy(self)
            self._early = Early(self._layout, parts.sink, gradients.watch, self._aggregator, loop, gradients.look)
            gradients.send_early(self._early)
        return gradients

    # What a training loop calls

    def step(self) -> None:
        """Exchange the gradients since the last step and publish their mean as p.grad; collective.

        Where a scheme exchanges weights (drift), call it after optimizer.step(). With overlap=True it may be called between
        backward and an attached optimizer's step, to clip what it published: that step then exchanges nothing.
        """
        self._exchanged.step()

    def begin(self, trouble: str | None = None) -> None:
        """What step() does, for attach, which also calls finish() when the optimizer is done; collective.

        trouble: why this rank cannot go on, for all ranks to raise. Where weights are exchanged, that is left to finish(),
        and only the gradients of a dense start are exchanged here.
        """
        self._exchanged.begin(trouble)

    def _exchange_now(self, trouble: str | None) -> None:
        """Do one step of the aggregator; collective."""
        self._check_ready()
        if not self._companion.idle:
            self._companion.begin()
        call, self._call = self._call, None
        aggregator, works, gradients, clock = self._aggregator, self._aggregator.works, self._gradients, Clock()
        self._backend.use_threads(torch.get_num_threads())
        found = aggregator.ready(clock.lap) if works.scorer.asks else ""  # asked even in trouble: it begins a new step
        found = found or self._hindrance()
        gradients.look()  # k counts what is not frozen
        pieces, notice = gradients.take(self.k if call is None else joined_k(call, self.k), trouble or found)
        number = works.selection.step + (len(works.flight) if works.flight is not None else 0)
        notice = notice._replace(step=number if self._companion.idle else self._companion.counted(number))
        if self._exchange.size > 1:
            notice = self._compared(notice, pieces, call)
        if self._unexchanged.since:
            self._unexchanged.exchanged()
        if self._survivors is not None:
            notice = self._survivors.measured(notice)
        try:
            if self._survivors is None:
                used = self._agreed(notice, clock, self._peek(pieces))
            else:
                used = self._survivors.met(lambda told: self._agreed(told, clock), notice)
        except Refusal as refusal:
            self._take_back(refusal)
            self._refuse(refusal, added=False)
            return
        if self._exchange.size > 1:
            self._equality.done(notice.step)
        if gradients.holds:
            self._hold()
        frozen = gradients.out_of_sight(aggregator.memories) if self._layout.held.stretches else nullcontext()
        try:
            with frozen:
                delivered = aggregator.one_step(works, pieces, notice, clock)
            if works.differ and self._equality.every:  # in flight: when what was sent with it is applied
                self._together(lambda: self._equality.judge(self._exchange))
            works.differ = False
        except (Refusal, GradientError) as error:
            self._fail(error)
            return
        details = details_of(works)
        if self._survivors is not None:
            used = self._survivors.ended(used, details)
        self._note(functools.partial(aggregator.stats, number, notice, delivered, clock.seconds, details))
        if not self._companion.idle:
            self._stats = self._companion.published(delivered, self.stats, sound=notice.status == FINE)
        gradients.publish(self._used_late(delivered) if works.flight is not None else used)
        self._exchange.place.steps = number + 1

    def _peek(self, pieces: Any) -> Peek | None:
        """What tells what this step's pass will find before anything is added; None where that cannot be told. Local."""
        known = self._exchange.size > 1 and not self._gradients.holds and self._options.nonfinite == "raise"
        return peeking(self._aggregator.works, pieces) if known else None

    def _agreed(self, notice: Notice, clock: Clock, peek: Peek | None = None) -> Bools | None:
        """Agree that all ranks can go on, also if their weights differ by no more than rounding; collective."""
        works = self._aggregator.works
        try:
            return self._aggregator.agreement(works, notice, clock, peek)
        except ReplicasDiffer as differ:
            try:
                self._equality.judge(self._exchange)
            except GradientError:
                self._take_back(differ)
                raise
            return differ.used

    def _take_back(self, refusal: Refusal) -> None:
        """The step is refused before the ranks agreed: gradients are still p.grad. Collective, unless ranks are apart.

        Where they are only apart, what has set out stays out: all ranks have sent the same, and a later step() takes it.
        """
        self._gradients.refused()
        if not isinstance(refusal, Apart):
            self._aggregator.recall()
        elif self._exchange.gone:
            self._aggregator.recall(self._exchange.gone)

    def _replicated(self) -> Sequence[torch.Tensor]:
        """The weights that must be equal on all ranks, one tensor for each parameter."""
        return self._companion.replicated() or [local_of(getattr(p, "param", p)) for p in self._layout.params]

    def _rates(self) -> tuple[float, ...]:
        """The learning rates that must be equal on all ranks."""
        return self._exchanged.rates()

    def _compared(self, notice: Notice, pieces: Any, call: Call | None) -> Notice:
        """Add what the ranks compare to a notice; collective in the first exchanges. A rank alone compares nothing."""
        if self._hindrance():  # nothing can be read
            return notice
        notice = notice._replace(digest=self._equality.number(notice.step))
        notice = notice if call is None else with_zeros(notice, call)
        if self._sameness.looks:
            self._compare_batches(pieces, notice.step, joined=call is not None)
        return notice

    def _compare_batches(self, pieces: Any, step: int, *, joined: bool) -> None:
        """Look for ranks that have the same gradient, or weights, in the first exchanges; collective."""
        if not joined:
            sample = self._exchanged.sample(pieces)
            try:
                rows = self._together(lambda: meet(self._exchange, SAMPLES, sample, self.rank, step=step))
            except CollectiveError:
                if self._exchange.gone:
                    self._aggregator.recall(self._exchange.gone)
                raise
            samples = [0] * self.size
            for sample, rank in rows[:, :2].tolist():
                samples[rank] = sample
            self._sameness.note(samples, self.rank)
        self._sameness.done += 1

    def finish(self) -> None:
        """The attached optimizer has done its step; local, unless weights are exchanged now or have arrived."""
        self._exchanged.finish()
        self.turn()

    def turn(self) -> None:
        """Exchange something else from the next step on, if the scheme wants to: weights or gradients; collective then."""
        if self._companion.turning:
            try:
                self._companion = self._companion.turned()
            except (Refusal, GradientError) as error:
                self._fail(error)
            self._gradients.restart()

    def _note(self, made: Callable[[], Stats]) -> None:
        """Keep what the last step did; its statistics are made when they are asked for."""
        self._made, self._share = made, self._layout.held.remaining

    def _fail(self, error: Exception) -> None:
        """Raise what a step found wrong as an error with the parameters' names, or skip the step.

        What was added or sent by then is lost, unless the aggregator has undone it.
        """
        if isinstance(error, Refusal):
            self._refuse(error, added=not self._aggregator.undoes)
            return
        self._damaged = str(error).split(" | ", 1)[-1]
        raise error

    def _refuse(self, refusal: Refusal, *, added: bool) -> None:
        """Raise a refusal as an error, on all ranks alike; or skip the step. `added`: gradients were added before it."""
        statuses = {status for status, _ in refusal.statuses} if isinstance(refusal, StepRefused) else set()
        if self._options.nonfinite == "skip" and NONFINITE in statuses and not added:
            self._skip()
            return
        late_step = self._aggregator.applied if self._aggregator.staleness else None
        frozen = self._gradients.frozen.names()
        words = self._exchanged.words
        tell = functools.partial(explain, refusal, self._exchange, self._layout.name_at, frozen, late_step, **words)
        error, damage = self._together(tell)
        if isinstance(refusal, Overflow):
            self._gradients.drop()
        if self._exchanged.lost(statuses, added=added, late=late_step is not None):
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
        if self._survivors is not None:
            raise ConfigurationError(
                f'r{self.rank} | join() does not go with on_failure="shrink"; give all ranks as many batches (shard)'
            )
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
        frozen = self._gradients.frozen
        frozen.look()
        self._together(lambda: self._check_frozen(frozen))
        self._hold()
        try:
            for used in self._companion.drain():
                self._gradients.publish(used)
        except (Refusal, GradientError) as error:
            self._fail(error)
        if self._survivors is not None:
            self._survivors.restart()

    def _check_frozen(self, frozen: Any) -> None:
        """Raise on all ranks unless their parameters are what they were, and the same ones are frozen; collective."""
        misfit = self._layout.misfit([None] * len(self._layout.slots))
        self._exchange.raise_together(None if misfit is None else GradientError(misfit), GradientError)
        if len(set(self._exchange.gather_texts(str(frozen.digest)))) > 1:
            raise explain(FrozenDiffers(), self._exchange, self._layout.name_at, frozen.names())[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that state_dict() gave on the same rank of as many ranks; collective, all or none."""
        super().load_state_dict(state)
        if self._survivors is not None:
            self._survivors.restart()

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
        if self._survivors is not None:
            self._survivors.close()
        self._aggregator.close()
        self._hooks.remove()
        if self._watchdog is not None:
            self._watchdog.close()

    # What it tells

    @property
    def averages_gradients(self) -> bool:
        """Whether the coming step exchanges gradients before optimizer.step(), not weights after it."""
        return not self.exchanges_weights or self._companion.starting

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks train on weights of their own now, which are exchanged after optimizer.step()."""
        return self._companion.subject is not None

    @property
    def overlaps(self) -> bool:
        """Whether gradients set out during backward.

        Then all but the last backward before a step belong into no_sync(), and clipping after step().
        """
        return self._early is not None

    @property
    def syncing(self) -> bool:
        """Whether a backward is one that step() follows: not inside no_sync()."""
        return self._syncing

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
            self._stats = stats if whole else of_the_rest(stats, self._layout.size, self._share)
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

        Of a scheme that exchanges weights, a copy: the distance from the shared weights. With hierarchy="node" also a copy:
        the rank's shard of what its node was given and has not sent, zeros elsewhere.
        """
        drift = self._companion.drift()
        return self._aggregator.residual if drift is None else drift

    @property
    def k(self) -> int:
        """The number of elements that the set density, or what a scheme makes of it, asks for."""
        density = self._density
        if self._falls:
            density = self._options.density_of(self._aggregator.number, density)
        share = min(1.0, density * self._aggregator.works.k_scale)
        return max(1, math.floor(share * self._layout.held.remaining + 1e-6))

    # A step

    @property
    def _gradients(self) -> Any:
        """What of the model is exchanged: gradients, or weights."""
        return self._companion.subject or self._of_model

    @property
    def _exchanged(self) -> GradientsBefore | WeightsAfter:
        """What of the model is exchanged, and when."""
        return self._after if self.exchanges_weights else self._before

    def _check_ready(self) -> None:
        if self._hooks.removed:
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

    def _idle_stats(self, sent: int, received: int, *, skipped: bool = False) -> Stats:
        """The statistics of a step in which nothing was exchanged."""
        seen = self._made is not None or self._stats is not None
        share, threshold = self.k / max(1, self._layout.held.remaining), self.stats.threshold if seen else 0.0
        return of_idle_step(self._aggregator.number, share, threshold, sent, received, skipped=skipped)
