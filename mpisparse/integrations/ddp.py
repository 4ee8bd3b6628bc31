"""A communication hook for torch's DistributedDataParallel: an aggregator for each of its buckets.

state = ddp.State(model, scheme="exdyna", density=0.01)
model.register_comm_hook(state, ddp.hook)
"""

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from mpisparse.comm.exchange import Exchange
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.comm.watchdog import TIMEOUT, check_timeout, watch
from mpisparse.core.records import Stats
from mpisparse.core.state import merge_residuals, sources
from mpisparse.errors import ConfigurationError, NonFiniteGradientError
from mpisparse.integrations.bucket import Bucket, Vectors
from mpisparse.schemes import configure
from mpisparse.schemes.options import Options, check_density
from mpisparse.vectors import check_alike, check_plain

FORMAT = 1


def hook(state: "State", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks. The future is complete when it is returned."""
    buffer = state.average(bucket)
    devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    done.set_result(buffer)
    return done


class State:
    """What the hook keeps between steps: of every parameter, what was not sent yet. Collective: construct it on all ranks.

    Options are those of GradientSync, for schemes whose only result is the averaged gradient. Each bucket of the model is
    averaged by itself, so `density` is the share of every bucket. comm: the ranks (default: the model's process group).
    scaler: the torch.amp.GradScaler of the training, if it has one: gradients are unscaled before they are added up, and a
    step with a gradient that is not finite is skipped on all ranks. timeout: see GradientSync.
    """

    def __init__(
        self, model: DistributedDataParallel, *, scheme: str = "exdyna", density: float | None = None,
        codec: str | None = None, comm: Any = None, scaler: torch.amp.GradScaler | None = None, timeout: float = TIMEOUT,
        **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(model, DistributedDataParallel):
            raise ConfigurationError(
                f"ddp.State expects the model wrapped in DistributedDataParallel, got {type(model).__name__}; for a plain "
                "model use mpisparse.GradientSync"
            )
        comm = model.process_group if comm is None else comm
        end_job_on_uncaught_exception(comm)
        self._exchange = Exchange(comm)
        self._options: Options = Options()
        error: ConfigurationError | None = None
        try:
            timeout = check_timeout(timeout)
            self._options = configure(scheme, density=density, codec=codec, **options)
            check_plain(self._options)
            probe = Bucket({"probe": torch.zeros(8)}, self._options, self._exchange)  # refuses what needs a model
            self._kinds = set(probe.vectors())
            probe.close()
            _check_scaler(scaler)
        except ConfigurationError as caught:
            error = caught
        try:
            self._exchange.raise_together(error)
            check_alike(self._exchange, f"scheme {scheme}, timeout {timeout:g}", self._options)
        except ConfigurationError:
            self._exchange.close()
            raise
        self._exchange.segment_nbytes = self._options.segment_nbytes
        self.scheme = scheme
        self._scaler = scaler
        self._density = self._options.density
        named = dict(model.module.named_parameters())
        self._names = {id(p): name for name, p in named.items()}
        self._sizes = {name: p.numel() for name, p in named.items()}
        self._may_be_unused = bool(model.find_unused_parameters or model.static_graph)
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self._waiting: dict[str, Vectors] = {}  # by parameter: what no bucket has taken over yet
        self._done: list[Bucket] = []  # averaged in this backward
        self._skipping = False
        self._steps = 0
        self._watchdog = watch(self._exchange, timeout)
        if self._watchdog is not None:
            weakref.finalize(self, self._watchdog.close).atexit = False

    # A step

    def average(self, bucket: GradBucket) -> torch.Tensor:
        """Average the gradients in a bucket over ranks, in place; collective. Returns the bucket's memory."""
        if bucket.index() == 0:
            self._done, self._skipping = [], False
        buffer, scale = bucket.buffer(), self._scale()
        if buffer.layout is not torch.strided:
            raise ConfigurationError(
                "sparse gradients cannot be exchanged by a DDP hook; build the embedding with sparse=False"
            )
        if not self._skipping:
            one = self._find(bucket)
            if scale != 1.0:
                buffer.div_(scale)
            try:
                one.average(bucket.gradients(), self.density)
            except NonFiniteGradientError:
                for earlier in self._done:
                    earlier.take_back()
                if self._scaler is None or not self._scaler.is_enabled():
                    raise
                self._skipping = True
            else:
                self._done.append(one)
                if scale != 1.0:
                    buffer.mul_(scale)
        if self._skipping:
            buffer.fill_(math.nan)  # the scaler sees it on all ranks, and skips the step
        if bucket.is_last():
            self._steps += 1
            self._exchange.place.steps = self._steps
        return buffer

    def _scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def _find(self, bucket: GradBucket) -> Bucket:
        """Return a bucket's aggregator. DDP regroups parameters once: what waits of each follows it into its new bucket."""
        key = tuple(id(p) for p in bucket.parameters())
        if key not in self._buckets:
            for other in [other for other in self._buckets if set(other) & set(key)]:
                self._waiting |= self._buckets.pop(other).dissolve()
            names = [self._names[member] for member in key]
            made = Bucket(
                dict(zip(names, bucket.gradients(), strict=True)), self._options, self._exchange,
                may_be_unused=self._may_be_unused,
            )  # fmt: skip
            made.restore({name: self._waiting.pop(name) for name in names if name in self._waiting})
            self._buckets[key] = made
        return self._buckets[key]

    # What it tells

    @property
    def density(self) -> float:
        """The set density; may be changed between steps, on all ranks alike."""
        return self._density

    @density.setter
    def density(self, value: float) -> None:
        self._density = self._options.changed_density(check_density(value))

    @property
    def stats(self) -> list[Stats]:
        """What the last step did, for every bucket."""
        return [one.aggregator.last for one in self._buckets.values() if one.aggregator.last is not None]

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent, a flat float32 tensor for each parameter."""
        return {name: vectors["residual"] for name, vectors in self._kept().items()}

    def _kept(self) -> dict[str, Vectors]:
        kept = dict(self._waiting)
        for one in self._buckets.values():
            kept |= one.at_rest()
        return {name: kept[name] for name in self._names.values() if name in kept}

    # State

    def state_dict(self) -> dict[str, Any]:
        """What the coming steps depend on, by parameter: this rank's own. Tensors, numbers and strings only; local.

        Save it on every rank. What the search for thresholds has learnt is not in it: that starts anew.
        """
        return {
            "format": FORMAT,
            "scheme": self.scheme,
            "options": json.dumps(self._options.values(), sort_keys=True),
            "rank": self._exchange.rank,
            "size": self._exchange.size,
            "steps": self._steps,
            "density": self._density,
            "parameters": self._kept(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take this rank's state, or those of all ranks that saved, however many they were, in their order; collective."""
        error: Exception | None = None
        kept: dict[str, Vectors] = {}
        try:
            states = [state] if isinstance(state, Mapping) else list(state)
            kept = self._merged(states)
        except ConfigurationError as caught:
            error = caught
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as caught:
            error = ConfigurationError(f"the state is not one that state_dict() gave: {type(caught).__name__}: {caught}")
        self._exchange.raise_together(error)
        for one in self._buckets.values():
            one.close()
        self._buckets.clear()
        self._waiting, self._done = kept, []
        self._density, self._steps = float(states[0]["density"]), int(states[0]["steps"])

    def _merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Vectors]:
        """This rank's vectors from the states of the ranks that saved, checked."""
        rank, size = self._exchange.rank, self._exchange.size
        for each in states:
            self._check(each)
        old = int(states[0]["size"])
        if len(states) == 1 and old == size:
            if states[0]["rank"] != rank:
                raise ConfigurationError(
                    f"the state is of rank {states[0]['rank']}, this is rank {rank}; load each rank's own"
                )
            return {name: dict(vectors) for name, vectors in states[0]["parameters"].items()}
        found = [(each["rank"], each["size"], each["steps"]) for each in states]
        if found != [(other, old, states[0]["steps"]) for other in range(old)]:
            raise ConfigurationError(
                f"the states are of {old} ranks and this is one of {size}: pass a list with the states of all {old} ranks, "
                f"in their order and of the same step; got those of ranks {[one for one, _, _ in found]} "
                f"after {sorted({steps for *_, steps in found})} steps"
            )
        taken = sources(old, size, rank)
        first = states[taken[0]]["parameters"]
        merged = {}
        for name, vectors in first.items():
            residuals = {source: states[source]["parameters"][name]["residual"].numpy() for source in taken}
            merged[name] = {**vectors, "residual": torch.from_numpy(merge_residuals(residuals, old, size, rank))}
        return merged

    def _check(self, state: Mapping[str, Any]) -> None:
        if state["format"] != FORMAT or state["scheme"] != self.scheme:
            raise ConfigurationError(f'the state is of scheme "{state["scheme"]}", this is "{self.scheme}"')
        check_density(state["density"])
        for name, vectors in state["parameters"].items():
            if name not in self._sizes:
                raise ConfigurationError(f"the state has a parameter {name!r} that this model has not")
            if set(vectors) != self._kinds:
                raise ConfigurationError(f"the state has {sorted(vectors)} of {name}, expected {sorted(self._kinds)}")
            for key, vector in vectors.items():
                shape = (self._sizes[name],)
                if not isinstance(vector, torch.Tensor) or vector.shape != shape or vector.dtype is not torch.float32:
                    raise ConfigurationError(f"the {key} of {name} in the state must be a float32 tensor of shape {shape}")
                if not bool(torch.isfinite(vector).all()):
                    raise ConfigurationError(f"the {key} of {name} in the state is not finite everywhere")

    def close(self) -> None:
        """Give the communicator back; collective."""
        for one in self._buckets.values():
            one.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self._exchange.close()


def _check_scaler(scaler: object) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigurationError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
