"""GradientSync: what a torch user touches."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from mpisparse.comm.agreement import FrozenDiffers, Refusal
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.roll_call import answer_at_exit, meet
from mpisparse.comm.survival import Shrunk
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.comm.watchdog import TIMEOUT, watch
from mpisparse.core.refusals import explain
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.model.buffers import SharedBuffers
from mpisparse.model.construction import Care, assemble, check
from mpisparse.model.digests import Sameness
from mpisparse.model.joining import joining
from mpisparse.model.states import States
from mpisparse.model.survivors import SHRINK, Survivors
from mpisparse.schemes.options import Options


class GradientSync(States):
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
        options = {"density": density, "codec": codec, **scheme_options}
        ground = check(self._exchange, model, scheme, Care(timeout, check_every, on_failure, mirror), options)
        self.broadcast_([*model.parameters(), *model.buffers()])
        super().__init__(ground, assemble(ground))
        self._buffers = SharedBuffers(model, self._exchange, self._options.buffers)
        self._told_unobserved = False
        self._timeout = ground.care.timeout
        self._run_directory = None if run_directory is None else Path(run_directory)
        self._watch()
        answer_at_exit(self._exchange)
        if on_failure == SHRINK:
            self._survivors = Survivors(self._aggregator, self._options, mirror, self._regrouped)

    # What a training loop may call beside its steps

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

    def on_shrink(self, listener: Callable[[Shrunk], object]) -> None:
        """Have a function called, on all ranks that go on, when others have died; local.

        It gets a record of what happened (died, rank, size, norm, step, seconds, kept), before the call in which that was
        noticed returns: sync.step(), average() and so on. There a loop re-divides its data.
        """
        if self._survivors is None:
            raise ConfigurationError(f'r{self.rank} | on_shrink() is of use with on_failure="shrink" alone')
        self._survivors.survival.listeners.append(listener)

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
    def overlaps(self) -> bool:
        """Whether gradients set out during backward.

        Then all but the last backward before a step belong into no_sync(), and clipping after step().
        """
        return self._early is not None

    @property
    def observes(self) -> bool:
        """Whether observe() changes anything: whether the scheme adapts k to a metric."""
        return self._aggregator.observes

    @property
    def options(self) -> Options:
        """The scheme's options as they were set at construction."""
        return self._options

    @property
    def nbytes_in_flight(self) -> int:
        """Bytes that this rank received for later steps, whose statistics will count them; waits for them to arrive."""
        return self._aggregator.nbytes_in_flight

    @property
    def residual(self) -> torch.Tensor:
        """What this rank has not sent: one flat float32 tensor in the order of model.parameters() that require gradients.

        Of a scheme that exchanges weights, a copy: the distance from the shared weights. Where nodes sum first also a copy:
        the rank's shard of what its node was given and has not sent, zeros elsewhere.
        """
        drift = self._companion.drift()
        return self._aggregator.residual if drift is None else drift

    # Watching the other ranks

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
