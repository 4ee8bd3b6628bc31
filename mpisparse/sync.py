"""GradientSync: what a torch user touches."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisparse.backends.device import load_backend
from mpisparse.comm.exchange import Exchange, end_job_on_uncaught_exception
from mpisparse.comm.watchdog import TIMEOUT, check_timeout, watch
from mpisparse.core.agree import (
    BROKEN,
    NO_BACKWARD,
    NONFINITE,
    STALE,
    DensityDiffers,
    FrozenDiffers,
    Inputs,
    Overflow,
    StepRefused,
    share_readiness,
)
from mpisparse.core.records import Clock, Parts
from mpisparse.core.step import Stats
from mpisparse.errors import ConfigurationError, GradientError, NonFiniteGradientError
from mpisparse.model.frozen import Frozen
from mpisparse.model.grad_hooks import GradientWatch
from mpisparse.model.layout import Layout, Published, collect, zeros
from mpisparse.model.registry import parameters_registered
from mpisparse.schemes import configure
from mpisparse.schemes.options import Options, check_density
from mpisparse.schemes.state import STATE_FORMAT, check_state, step_state


class GradientSync:
    """Averages a model's gradients over MPI ranks, sparsely, keeping what was not sent for later steps.

    Collective: construct it on all ranks of `comm` (default: all of them) with the same model and options. Parameters
    and buffers are set to those of rank 0. Then, in place of a plain optimizer step:

        loss.backward()
        sync.step()         # p.grad is now the averaged gradient
        optimizer.step()

    None for density or codec is the scheme's own default. Further options are the scheme's: see mpisparse.schemes.

    timeout: seconds after which a rank that waits in an exchange prints where it is and the job ends with exit code 87; 0:
    never. See unwatched(). run_directory: where heartbeats are written if they do not get through the network.
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
        **scheme_options: Any,
    ) -> None:
        end_job_on_uncaught_exception()
        self._exchange = Exchange(comm)
        error: ConfigurationError | None = None
        try:
            self._timeout = check_timeout(timeout)
            self._options: Options = configure(scheme, density=density, codec=codec, **scheme_options)
            self._layout = Layout(model)
            self._backend = load_backend(device=self._layout.device)
            if self._backend.name == "cuda" and not self._options.on_device:
                raise ConfigurationError(f'scheme "{scheme}" runs on the host only, the model is on {self._layout.device}')
        except ConfigurationError as caught:
            error = caught
        self._exchange.raise_together(error)
        self.scheme = scheme
        self._model = model
        self._check_alike()
        self._exchange.segment_nbytes = self._options.segment_nbytes
        self.broadcast_([*model.parameters(), *model.buffers()])
        self._registered = parameters_registered()
        self._residual = zeros(self._layout.size, torch.float32, self._layout.device)
        self._published = Published(self._layout, self._backend)
        parts = Parts(self._layout, self._residual, self._published, self._exchange, self._backend, model)
        self._step = self._options.build(parts)
        self._frozen = Frozen(self._layout, self._backend)
        self._late: list[tuple[int, torch.Tensor]] = []
        in_backward = self._options.accumulate == "backward"
        self._watch = GradientWatch(self._layout, self._published, self._accumulate if in_backward else None)
        self._density = float(self._options.density)
        self._stats: Stats | None = None
        self._syncing = True
        self._bad = -1
        self._left: set[int] = set()
        self._damaged: str | None = None
        self._trouble: str | None = None
        self._told_unobserved = False
        self._watchdog = watch(self._exchange, self._timeout, None if run_directory is None else Path(run_directory))
        if self._watchdog is not None:
            weakref.finalize(self, self._watchdog.close).atexit = False  # it has its own word for the interpreter's exit

    # What a training loop calls

    def step(self) -> None:
        """Exchange the gradients since the last step and publish their mean as p.grad; collective."""
        self._step.check_by_hand()
        self.begin()

    def begin(self, trouble: str | None = None) -> None:
        """What step() does, for attach, which also calls finish() when the optimizer is done; collective.

        trouble: why this rank cannot go on, for all ranks to raise.
        """
        if self._step.draining:
            return
        self._check_ready()
        self._exchange.reset_counters()
        self._backend.use_threads(torch.get_num_threads())
        clock = Clock()
        self._frozen.look()
        inputs = self._inputs(clock, trouble)
        used = None
        try:
            if not self._step.deferred:
                used = share_readiness(self._exchange, inputs)
        except StepRefused as refused:
            self._late = []  # these gradients are still p.grad
            if self._options.nonfinite == "skip" and any(status == NONFINITE for status, _ in refused.statuses):
                self._skip()
                return
            raise self._refusal(refused) from None
        except DensityDiffers as differing:
            self._late = []
            raise self._differing(differing) from None
        except FrozenDiffers:
            self._late = []
            raise self._frozen_differently() from None
        clock.lap("wait")
        self._freeze()
        with self._explained(), self._frozen.out_of_sight(self._vectors):
            self._stats = self._step.run(inputs, clock)
        if self._layout.waiting:
            self._stats = _of_the_rest(self._stats, self._layout)
        self._publish(self._step.used() if self._step.deferred else used)
        self._watch.restart()
        self._exchange.place.steps = self._stats.step + 1

    def finish(self) -> None:
        """The attached optimizer has used the published gradient; local."""
        if not self._step.draining and self._stats is not None and not self._stats.skipped:
            self._stats = self._step.finish(self._stats)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise what a scheme found wrong as an error with the parameters' names; what was added or sent by then is lost."""
        try:
            yield
        except StepRefused as refused:
            raise self._refusal(refused) from None
        except DensityDiffers as differing:
            self._damaged = "the density was not the same on all ranks"
            raise self._differing(differing) from None
        except FrozenDiffers:
            self._damaged = "the ranks had frozen different parameters"
            raise self._frozen_differently() from None
        except Overflow as overflow:
            raise self._overflow(overflow.args[0]) from None
        except GradientError as error:
            self._damaged = str(error).split(" | ", 1)[-1]
            raise

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

    def observe(self, metric: float, *, higher_is_better: bool = True) -> float:
        """Tell the scheme a validation metric; returns its mean over ranks. Collective.

        Where the scheme makes no use of it, rank 0 warns once.
        """
        mean = self._exchange.mean(metric)
        if not self.observes and not self._told_unobserved:
            self._told_unobserved = True
            if self.rank == 0:
                warnings.warn(
                    f'observe() has no effect with scheme "{self.scheme}" as it is set: only scheme "predictive" with '
                    "adapt_k=True moves k by a metric",
                    stacklevel=2,
                )
        self._step.observe(mean if higher_is_better else -mean)
        return mean

    def average(self, value: float) -> float:
        """The mean of a number over ranks; collective."""
        return self._exchange.mean(value)

    def note_loss(self, loss: float) -> None:
        """Tell the scheme this rank's loss of the coming step, for those that learn from it; local."""
        self._step.note_loss(float(loss))

    def agree_any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any rank; collective."""
        return bool(self._exchange.allreduce_(np.array([flag], dtype=np.int64), "max")[0])

    def gather_floats(self, row: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Gather a row of numbers from every rank; row r of the result is rank r's. Collective."""
        return self._exchange.allgather(row)

    def broadcast_(self, tensors: list[torch.Tensor]) -> None:
        """Set tensors to those of rank 0; collective."""
        with torch.no_grad():
            for tensor in tensors:
                dense = tensor.detach().cpu().contiguous()
                self._exchange.broadcast_(dense.reshape(-1).view(torch.uint8).numpy())
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)

    def check_together(self, error: Exception | None) -> None:
        """Raise on all ranks if any has an error; collective."""
        self._exchange.raise_together(error)

    def synchronize(self) -> None:
        """Finish what is in flight, so that replicas are equal; collective. Nothing is, in a synchronous scheme."""
        self._check_undamaged()
        misfit = self._layout.misfit([None] * len(self._layout.slots))
        self._exchange.raise_together(None if misfit is None else GradientError(misfit), GradientError)
        self._frozen.look()
        if len(set(self._exchange.gather_texts(str(self._frozen.digest)))) > 1:
            raise self._frozen_differently()
        self._freeze()
        with self._explained():
            for used in self._step.drain():
                self._publish(used)
                self._watch.restart()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Have the weights that are the same on all ranks in the model, their state in the optimizer, for a while; local.

        Where ranks have weights of their own (scheme speculative) evaluate inside: `with sync.global_weights(): ...`.
        What is done inside is exempt from the timeout, in every scheme.
        """
        with self.unwatched("evaluating"), self._step.global_weights():
            yield

    def unwatched(self, phase: str = "busy") -> AbstractContextManager[None]:
        """Exempt a long phase of this rank from the timeout of those that wait for it; local.

        `with sync.unwatched("plotting"): ...`. Waiting counts again as soon as no rank is in such a phase.
        """
        return self._exchange.place.exempt(phase)

    def close(self) -> None:
        """Take the hooks off the model and free the communicator; collective."""
        self._watch.remove()
        self._step.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self._exchange.close()

    # What it tells

    @property
    def observes(self) -> bool:
        """Whether observe() changes anything: whether the scheme adapts k to a metric."""
        return self._step.observes

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
        if self._stats is None:
            raise RuntimeError(f"r{self.rank} | there are no statistics before the first step()")
        return self._stats

    @property
    def residual(self) -> torch.Tensor:
        """This rank's accumulator: one flat float32 tensor in the order of model.parameters() that require gradients."""
        return self._residual

    @property
    def density(self) -> float:
        """The set density; may be changed between steps, on all ranks alike."""
        return self._density

    @density.setter
    def density(self, value: float) -> None:
        self._density = float(dataclasses.replace(self._options, density=check_density(value)).density)

    @property
    def k(self) -> int:
        """The number of elements that the set density, or what a scheme makes of it, asks for."""
        return max(1, math.floor(min(1.0, self._density * self._step.scale) * self._layout.remaining + 1e-6))

    # State

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and scalars; local. copy=False: residual live."""
        state = {
            key: torch.from_numpy(self._on_host(v, copy))
            if isinstance(v, np.ndarray) or (isinstance(v, torch.Tensor) and self._backend.name == "cuda")
            else deepcopy(v)
            if copy
            else v
            for key, v in self._step.state().items()
        }
        return {
            "format": STATE_FORMAT,
            "scheme": self.scheme,
            "options": json.dumps(self._options.values(), sort_keys=True),
            "rank": self.rank,
            "size": self.size,
            "density": self._density,
            "residual": self._residual.clone() if copy else self._residual,
            **{f"step.{key}": value for key, value in state.items()},
        }

    def _on_host(self, array: Any, copy: bool) -> np.ndarray[Any, Any]:
        """An array of the step's state as NumPy's."""
        values: np.ndarray[Any, Any] = self._backend.to_host(array)
        return values.copy() if copy and values is array else values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that state_dict() gave on the same rank of as many ranks; collective, all or none."""
        error: Exception | None = None
        try:
            self.check_state(state)
        except ConfigurationError as caught:
            error = caught
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as caught:
            error = ConfigurationError(f"the state is not one that state_dict() gave: {type(caught).__name__}: {caught}")
        self._exchange.raise_together(error)
        self._step.load(step_state(state))
        self._residual.copy_(torch.as_tensor(state["residual"]))
        self._density = float(state["density"])
        self._damaged, self._bad = None, -1
        self._left.clear()
        self._frozen.changed = True
        self._published.clear()
        self._watch.restart()
        self._exchange.place.steps = int(state["step.step"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load_state_dict could take the state; local."""
        check_state(state, self.state_dict(copy=False), self._options, self._step)

    # Construction

    def _check_alike(self) -> None:
        """Raise on all ranks, with the first difference, unless all have the same options and the same model."""
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        lines = [
            f"scheme {self.scheme} {json.dumps(self._options.values(), sort_keys=True)}",
            f"timeout {self._timeout:g}",
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
        if self._watch.removed:
            raise RuntimeError(f"r{self.rank} | this GradientSync was closed, or another was made for the same model")
        if not self._syncing:
            raise RuntimeError(f"r{self.rank} | step() inside no_sync(): leave the block before the step that exchanges")
        self._check_undamaged()

    def _check_undamaged(self) -> None:
        if self._damaged is not None:
            raise GradientError(
                f"r{self.rank} | the residual is damaged since an earlier error ({self._damaged}); load a saved state"
            )

    def _changed(self, grads: list[torch.Tensor | None]) -> str | None:
        """What of the model is not as it was at construction, in words; None if nothing that matters."""
        new = None
        nothing_came = not self._watch.fresh.any() and all(grad is None for grad in grads)
        if nothing_came or self._registered != parameters_registered():
            known = {id(p) for p in self._layout.params}
            if any(id(p) not in known for p in self._model.parameters() if p.requires_grad):
                new = "the model has parameters that it did not have"
            self._registered = parameters_registered() if new is None else -1
        if any(p.requires_grad for p in self._layout.frozen):
            new = "a frozen parameter requires a gradient now, which it did not"
        if new is None:
            all_frozen = self._layout.remaining == 0
            return "all parameters are frozen: nothing is left to train" if all_frozen else self._layout.misfit(grads)
        return (
            f"{new} when GradientSync was constructed: its gradient would not be exchanged and the ranks would drift apart; "
            "construct GradientSync (and the optimizer) after the change"
        )

    def _inputs(self, clock: Clock, trouble: str | None) -> Inputs:
        grads = self._watch.grads()
        found = self._step.scorer.trouble(clock)
        self._trouble = trouble or self._changed(grads) or found
        if self._trouble is not None:  # gradients of another type or shape must not be read
            unused = np.ones(len(grads), dtype=bool)
            return Inputs(None, self.k, unused, BROKEN, frozen=self._frozen.digest, trouble=self._trouble)
        self._late = self._frozen.take_out(grads)
        if self._options.accumulate == "backward":
            self._take_left()
            inputs = Inputs(None, self.k, ~self._watch.fresh | self._frozen.mask)
            inputs.note_nonfinite(self._bad)
            inputs.note_nonfinite(self._backend.late_nonfinite(self._step.scorer.acc))
        else:
            unused = np.fromiter((g is None for g in grads), dtype=bool, count=len(grads))
            gradients = collect(self._layout, grads)
            inputs = Inputs(gradients, self.k, unused)
            if self._options.nonfinite == "skip":
                inputs.note_nonfinite(gradients.first_nonfinite(self._backend))
        inputs.frozen = self._frozen.digest
        for i, grad in self._late:
            inputs.note_nonfinite(-1 if bool(torch.isfinite(grad.to_dense()).all()) else self._layout.slots[i].begin)
        if inputs.status == NONFINITE:
            return inputs
        if inputs.unused.all():
            inputs.status = NO_BACKWARD
        elif stale := self._watch.stale():
            inputs.status, inputs.detail = STALE, self._layout.slots[stale[0]].begin
        self._watch.reattach()
        return inputs

    def _accumulate(self, i: int) -> None:
        """Path "backward": add parameter i's gradient into the residual and drop it."""
        slot, p = self._layout.slots[i], self._layout.params[i]
        assert p.grad is not None
        if not slot.takes(p.grad) or p.grad.device != self._layout.device:
            self._left.add(i)  # not to be read; step() says why
            return
        bad = self._step.scorer.add(i, slot, p.grad)
        if bad >= 0 and self._bad < 0:
            self._bad = bad
        p.grad = None

    def _take_left(self) -> None:
        """Path "backward": take the gradients that could not be read when they came, if they can be now."""
        for i in sorted(self._left):
            if self._layout.params[i].grad is not None and not self._frozen.mask[i]:
                self._accumulate(i)
        self._left.clear()

    def _freeze(self) -> None:
        """What is frozen now moves no more: nothing of it stays on its way, and what came of its gradient waits."""
        if self._frozen.changed:
            self._step.freeze()
            self._frozen.changed = False
        for i, grad in self._late:
            self._layout.slots[i].view(self._residual).add_(grad.to_dense().float())
        self._late = []

    def _vectors(self) -> dict[str, Any]:
        """All that elements are chosen by."""
        return {"residual": self._backend.array_of(self._residual), **self._step.memories()}

    def _skip(self) -> None:
        """Some rank has a non-finite gradient: drop all gradients and change nothing else."""
        for p in self._layout.params:
            p.grad = None
        self._watch.restart()
        last = self._stats.threshold if self._stats else 0.0
        self._stats = Stats(
            step=int(self._step.state()["step"]),
            density=0.0,
            set_density=self.k / max(1, self._layout.remaining),
            selected=0,
            threshold=last,
            bytes_sent=self._exchange.nbytes_sent,
            bytes_received=self._exchange.nbytes_received,
            imbalance=0.0,
            seconds={},
            skipped=True,
        )

    def _publish(self, used: np.ndarray[Any, np.dtype[np.bool_]] | None) -> None:
        """Make the published views p.grad; a parameter without a gradient on any rank, and nothing published, keeps None."""
        for i, (p, view) in enumerate(zip(self._layout.params, self._published.views, strict=True)):
            if self._frozen.mask[i] or (used is not None and not used[i] and not bool(view.any())):
                p.grad = None
            elif p.grad is not view:
                p.grad = view

    def _differing(self, differing: DensityDiffers) -> Exception:
        """The error that all ranks raise when they were set to different densities."""
        return ConfigurationError(
            f"r{self.rank} | density must be the same on all ranks; they select {differing.args[0]} elements: "
            "set sync.density on all ranks alike"
        )

    def _frozen_differently(self) -> Exception:
        """The error that all ranks raise when they have frozen different parameters; collective."""
        names = self._exchange.gather_texts(self._frozen.names())
        other = next((rank for rank, text in enumerate(names) if text != names[0]), 0)
        which = f": rank 0 {names[0] or 'none'}, rank {other} {names[other] or 'none'}" if other else ""
        return GradientError(
            f"r{self.rank} | the ranks have frozen different parameters{which}; call requires_grad_() on all ranks alike"
        )

    def _overflow(self, index: int) -> Exception:
        """The error that all ranks raise when every rank is finite and their sum is not."""
        found = f"the sum over ranks is beyond what float32 holds in {self._layout.name_at(index)} (flat index {index})"
        self._damaged = found
        for p in self._layout.params:
            p.grad = None
        return NonFiniteGradientError(f"r{self.rank} | {found}; lower the learning rate or clip")

    def _refusal(self, refused: StepRefused) -> Exception:
        """The error that all ranks raise: of the first rank with the gravest trouble."""
        me = f"r{self.rank} | "
        if self._step.deferred:  # others have gone on since
            self._damaged = "a step was refused"
        by_status = {status: (rank, detail) for rank, (status, detail) in reversed(list(enumerate(refused.statuses)))}
        if NONFINITE in by_status:
            rank, index = by_status[NONFINITE]
            found = f"rank {rank} has a non-finite gradient in {self._layout.name_at(index)} (flat index {index})"
            self._damaged = found
            return NonFiniteGradientError(
                f'{me}{found}; lower the learning rate, clip, or pass nonfinite="skip" to skip such steps'
            )
        if BROKEN in by_status:
            trouble = None if self._trouble is None else GradientError(self._trouble)
            self._exchange.raise_together(trouble, GradientError)
        if STALE in by_status:
            rank, index = by_status[STALE]
            return GradientError(
                f"{me}on rank {rank} backward added to the gradient that the last step published in "
                f"{self._layout.name_at(index)}; call zero_grad() after each optimizer step"
            )
        ranks = [rank for rank, (status, _) in enumerate(refused.statuses) if status == NO_BACKWARD]
        return GradientError(f"{me}step() with no new gradient on rank {', '.join(map(str, ranks))}; call backward() first")


def _of_the_rest(stats: Stats, layout: Layout) -> Stats:
    """Densities as shares of what is not frozen."""
    names = ("density", "set_density", "sent_density")
    shares = {name: min(1.0, getattr(stats, name) * layout.size / max(1, layout.remaining)) for name in names}
    return dataclasses.replace(stats, **shares)
