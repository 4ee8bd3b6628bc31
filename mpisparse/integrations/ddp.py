"""A communication hook for torch's DistributedDataParallel: an aggregator for each bucket of parameters.

state = ddp.State(model, scheme="exdyna", density=0.01)
model.register_comm_hook(state, ddp.hook)
"""

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from mpisparse.comm.exchange import Exchange
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.comm.watchdog import TIMEOUT, check_timeout, watch
from mpisparse.core.records import Stats
from mpisparse.core.state import sources
from mpisparse.errors import ConfigurationError, NonFiniteGradientError
from mpisparse.integrations.bucket import Bucket
from mpisparse.model.set_density import SetDensity
from mpisparse.schemes import configure
from mpisparse.schemes.options import Options, check_density
from mpisparse.schemes.state import check_options
from mpisparse.vectors import check_alike, check_plain

FORMAT = 2


def hook(state: "State", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks. The future is complete when the hook of the last bucket has returned, or earlier."""
    return state.average(bucket)


@dataclass
class Arrived:
    """A bucket of DDP's in this backward, some of whose gradients may still wait for others to be averaged with."""

    buffer: torch.Tensor
    names: list[str]
    done: torch.futures.Future[torch.Tensor]


class State(SetDensity):
    """What the hook keeps between steps: of every parameter, what was not sent yet. Collective: construct it on all ranks.

    Options are those of GradientSync, for schemes whose only result is the averaged gradient. Parameters are averaged in
    buckets of DDP's size (bucket_cap_mb), so `density` is the share of every bucket. comm: the ranks (default: the model's
    process group). scaler: the torch.amp.GradScaler of the training, if it has one: gradients are unscaled
    before they are added up, and a step with a gradient that is not finite is skipped on all ranks. timeout: see
    GradientSync.
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
        ignored = model.parameters_to_ignore
        self._trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}
        self._names = {id(p): name for name, p in self._trained.items()}
        self._may_be_unused = bool(model.find_unused_parameters or model.static_graph)
        self._buckets: list[Bucket] = []
        error: ConfigurationError | None = None
        try:
            timeout = check_timeout(timeout)
            self._options = configure(scheme, density=density, codec=codec, **options)
            check_plain(self._options)
            _check_scaler(scaler)
            self._exchange.segment_nbytes = self._options.segment_nbytes
            self._buckets = [self._made(names) for names in self._planned(model.bucket_bytes_cap)]
        except ConfigurationError as caught:
            error = caught
        try:
            self._exchange.raise_together(error)
            check_alike(self._exchange, f"scheme {scheme}, timeout {timeout:g}", self._options)
        except ConfigurationError:
            self._exchange.close()
            raise
        self.scheme = scheme
        self._scaler = scaler
        self._density = self._options.density
        self._arrived: list[Arrived] = []  # in this backward, and not complete yet
        self._gradients: dict[str, torch.Tensor] = {}  # in them, and not averaged yet
        self._done: list[Bucket] = []  # averaged in this backward
        self._skipping = False
        self._steps = 0
        self._watchdog = watch(self._exchange, timeout)
        if self._watchdog is not None:
            weakref.finalize(self, self._watchdog.close).atexit = False

    # A step

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the gradients in a bucket over ranks, in place; collective. The future's result is the bucket's memory.

        DDP arranges its own buckets by the order in which gradients come, anew after the first step. Ours stay as they are,
        so that a resumed run selects as an uninterrupted one: one of DDP's may wait for the rest of ours.
        """
        if bucket.index() == 0:
            self._arrived, self._gradients, self._done, self._skipping = [], {}, [], False
        buffer, scale = bucket.buffer(), self._scale()
        if buffer.layout is not torch.strided:
            raise ConfigurationError(
                "sparse gradients cannot be exchanged by a DDP hook; build the embedding with sparse=False"
            )
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        names = [self._names[id(p)] for p in bucket.parameters()]
        arrived = Arrived(buffer, names, torch.futures.Future(devices=devices))
        self._arrived.append(arrived)
        if scale != 1.0:
            buffer.div_(scale)
        self._gradients |= zip(names, bucket.gradients(), strict=True)
        for one in self._buckets:
            if not self._skipping and all(name in self._gradients for name in one.names):
                self._exchange_now(one)
        self._hand_back(scale)
        if bucket.is_last():
            self._steps += 1
            self._exchange.place.steps = self._steps
        return arrived.done

    def _planned(self, nbytes: int) -> list[list[str]]:
        """Which parameters are averaged together: from the last one on, as backward has their gradients ready."""
        planned: list[list[str]] = []
        filled = 0
        for name, p in reversed(self._trained.items()):
            if not planned or (filled >= nbytes and p.numel()):
                planned.append([])
                filled = 0
            planned[-1].append(name)
            filled += p.nbytes
        return planned

    def _made(self, names: list[str]) -> Bucket:
        tensors = {name: self._trained[name] for name in names}
        return Bucket(tensors, self._options, self._exchange, may_be_unused=self._may_be_unused)

    def _exchange_now(self, one: Bucket) -> None:
        """Average a bucket that is complete; one that is not finite ends the step, or lets the scaler skip it."""
        try:
            one.average([self._gradients[name] for name in one.names], self.density)
        except NonFiniteGradientError:
            for earlier in self._done:
                earlier.take_back()
            if self._scaler is None or not self._scaler.is_enabled():
                raise
            self._skipping = True
            return
        self._done.append(one)
        for name in one.names:
            del self._gradients[name]

    def _hand_back(self, scale: float) -> None:
        """Give DDP the buckets all of whose gradients are averaged; in a step that is skipped, all there are."""
        waiting = []
        for arrived in self._arrived:
            if self._skipping:
                arrived.buffer.fill_(math.nan)  # the scaler sees it on all ranks, and skips the step
            elif any(name in self._gradients for name in arrived.names):
                waiting.append(arrived)
                continue
            elif scale != 1.0:
                arrived.buffer.mul_(scale)
            arrived.done.set_result(arrived.buffer)
        self._arrived = waiting

    def _scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    # What it tells

    @property
    def stats(self) -> list[Stats]:
        """What the last step did, for every bucket."""
        return [one.aggregator.last for one in self._buckets if one.aggregator.last is not None]

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent, a flat float32 tensor for each parameter."""
        kept = {name: vector for one in self._buckets for name, vector in one.waiting().items()}
        return {name: kept[name] for name in self._trained if name in kept}

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the coming steps depend on: this rank's own. Tensors, numbers and strings only; local.

        Save it on every rank.
        """
        return {
            "format": FORMAT,
            "scheme": self.scheme,
            "options": json.dumps(self._options.values(), sort_keys=True),
            "rank": self._exchange.rank,
            "size": self._exchange.size,
            "steps": self._steps,
            "density": self._density,
            "buckets": [one.state() for one in self._buckets],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take this rank's state, or those of all ranks that saved, however many they were, in their order; collective."""
        error: Exception | None = None
        loaded: list[Bucket] = []
        try:
            states = [state] if isinstance(state, Mapping) else list(state)
            self._load(states, loaded)
        except ConfigurationError as caught:
            error = caught
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as caught:
            error = ConfigurationError(f"the state is not one that state_dict() gave: {type(caught).__name__}: {caught}")
        try:
            self._exchange.raise_together(error)
        except ConfigurationError:
            _close(loaded)
            raise
        _close(self._buckets)
        self._buckets, self._done = loaded, []
        self._density, self._steps = float(states[0]["density"]), int(states[0]["steps"])
        self._exchange.place.steps = self._steps

    def _load(self, states: Sequence[Mapping[str, Any]], loaded: list[Bucket]) -> None:
        """Append this rank's buckets from the states of the ranks that saved, checked; local."""
        for each in states:
            self._check(each)
        taken = self._taken(states)
        first = next(iter(taken.values()))
        for i, one in enumerate(first["buckets"]):
            loaded.append(self._made(one["names"]))
            loaded[-1].load({rank: each["buckets"][i] for rank, each in taken.items()}, int(first["size"]))

    def _taken(self, states: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """The states that this rank takes over, by the rank that saved."""
        rank, size, old = self._exchange.rank, self._exchange.size, int(states[0]["size"])
        if len(states) == 1 and old == size:
            if states[0]["rank"] != rank:
                raise ConfigurationError(
                    f"the state is of rank {states[0]['rank']}, this is rank {rank}; load each rank's own"
                )
            return {rank: states[0]}
        found = [(each["rank"], each["size"], each["steps"]) for each in states]
        if found != [(other, old, states[0]["steps"]) for other in range(old)]:
            raise ConfigurationError(
                f"the states are of {old} ranks and this is one of {size}: pass a list with the states of all {old} ranks, "
                f"in their order and of the same step; got those of ranks {[one for one, _, _ in found]} "
                f"after {sorted({steps for *_, steps in found})} steps"
            )
        return {source: states[source] for source in sources(old, size, rank)}

    def _check(self, state: Mapping[str, Any]) -> None:
        if state["format"] != FORMAT or state["scheme"] != self.scheme:
            raise ConfigurationError(
                f'the state is of scheme "{state["scheme"]}" in format {state["format"]}, this is "{self.scheme}" in format '
                f"{FORMAT}"
            )
        check_density(state["density"])
        check_options(state["options"], self._options)
        names = [name for one in state["buckets"] for name in one["names"]]
        other = set(names) ^ set(self._trained)
        if other or len(names) > len(self._trained):
            raise ConfigurationError(
                f"the state is of other parameters than those that this model trains: {min(other or names)}"
            )

    def close(self) -> None:
        """Give the communicator back; collective."""
        _close(self._buckets)
        if self._watchdog is not None:
            self._watchdog.close()
        self._exchange.close()


def _close(buckets: list[Bucket]) -> None:
    for one in buckets:
        one.close()


def _check_scaler(scaler: object) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigurationError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
