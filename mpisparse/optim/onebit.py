"""1-bit Adam: after a warm-up the variance rests, and ranks exchange the signs of their momentum.

With the variance at rest Adam is linear in the momentum, so that error feedback makes up for what the signs leave. What is
sent is the update, momentum / denominator: elements that share a scale are of like size in these units, and an element
whose variance is nearly zero cannot run away, as the update that arrives is no larger than the scale.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.backends.device import load_backend
from mpisparse.comm.agreement import BROKEN, FINE, NONFINITE, FrozenDiffers, Notice, Refusal, ReplicasDiffer, StepRefused
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.roll_call import answer_at_exit, meet
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.core.records import Stats
from mpisparse.core.refusals import explain
from mpisparse.core.step import share_readiness
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.model.digests import Equality
from mpisparse.optim.arguments import check_flags, check_group, check_settings
from mpisparse.optim.moments import Member, Places
from mpisparse.optim.schedule import Schedule
from mpisparse.optim.state import FORMAT, check_state
from mpisparse.schemes.options import check_whole
from mpisparse.wire.averaging import Averaging

ADVICE = "nothing was changed: lower the learning rate or clip, or use a torch.amp.GradScaler, which skips such steps"


class OneBitAdamW(torch.optim.Optimizer):
    """AdamW for data-parallel training that exchanges about one bit per element. Collective: construct it on all ranks.

    Every rank calls backward on its own batch, then step(): no GradientSync is needed. Parameters are set to those of rank
    0. In the first `warmup` steps gradients are averaged with `warmup_codec` and AdamW is done. Then every rank updates the
    momentum with its own gradient, and these are averaged with `codec`, with error feedback both ways. After warmup x 2, 4,
    8, ... steps gradients are averaged for `refresh` steps (None: an eighth of warmup), which renew the variance.

    lr, betas, eps, weight_decay and maximize are AdamW's, per group too; foreach changes nothing; amsgrad, capturable,
    differentiable and fused are refused. A GradScaler works as it is: all ranks skip a step together. Clip before step():
    that is each rank's own gradient. comm: the ranks, all by default. check_every: steps from one comparison of the
    replicas to the next; 0: never.
    """

    own_state = True  # state_dict() differs between ranks
    exchanges = True  # no GradientSync belongs to it
    _step_supports_amp_scaling = True  # torch's GradScaler leaves it to step() to unscale, or to skip

    def __init__(
        self, params: Any, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None, comm: Any = None,
        warmup: int = 100, refresh: int | None = None, codec: str = "sign", warmup_codec: str = "int4",
        check_every: int = 100,
    ) -> None:  # fmt: skip
        end_job_on_uncaught_exception(comm)
        self._exchange = Exchange(comm)
        meet(self._exchange, "OneBitAdamW")
        self._ready = False
        self._settings = {"warmup": warmup, "refresh": refresh, "codec": codec, "warmup_codec": warmup_codec}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        error: Exception | None = None
        try:
            check_flags({"amsgrad": amsgrad, "capturable": capturable, "differentiable": differentiable, "fused": fused})
            check_settings(self._settings)
            check_whole("check_every", check_every, 0)
            super().__init__(params, {**defaults, "foreach": foreach})
            self._places = Places(self.param_groups)
            self._backend = load_backend(device=self._places.device)
        except (ValueError, TypeError) as caught:
            error = caught
        try:
            self._exchange.raise_together(error)
            self._check_alike(check_every)
        except ConfigurationError:
            self._exchange.close()
            raise
        self._broadcast()
        self._codec, self._warmup_codec = codec, warmup_codec
        self._schedule = Schedule(warmup, max(1, warmup // 8) if refresh is None else refresh)
        self._averaging = Averaging(self._places.size, self._exchange, self._backend, self._places.device)
        self._momentum, self._variance = (torch.zeros_like(self._averaging.work) for _ in range(2))
        self._floors: list[float] = []  # the least denominators, after the warm-up
        self._steps = 0
        self._equality = Equality(self._places.slots, lambda: self._places.params, tuple, check_every)
        self._stats: Stats | None = None
        self._damaged = ""
        self._tie([0.0] * len(self._places.slots), [0.0] * len(self._places.slots))
        self._ready = True
        answer_at_exit(self._exchange)

    # What a training loop calls

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; returns the closure's loss, this rank's own. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the vector that is exchanged has a fixed size."""
        if self._ready:
            raise ConfigurationError("OneBitAdamW cannot add parameters later; construct it with all groups")
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])

    @property
    def stats(self) -> Stats:
        """What the last step did; bytes_received counts all that this rank received in it."""
        if self._stats is None:
            raise RuntimeError(f"r{self._exchange.rank} | there are no statistics before the first step()")
        return self._stats

    def close(self) -> None:
        """Free the communicator; collective."""
        if self._exchange.is_open and not self._exchange.gone:
            meet(self._exchange, "close")
        self._exchange.close()

    # A step

    def _step(self) -> None:
        begin, exchange = time.perf_counter(), self._exchange
        if self._damaged:
            raise GradientError(f"r{exchange.rank} | {self._damaged}; load a saved state")
        exchange.reset_counters()
        members = self._places.members(self.state)
        try:
            used = self._agree(members)
            if used is not None and used.any():
                self._exchange_and_move(members, used)
        except Refusal as refusal:
            raise self._explained(refusal) from refusal.__cause__
        n = self._averaging.n
        self._stats = Stats(
            step=max(0, self._steps - 1), density=1.0, set_density=1.0, selected=n, threshold=0.0,
            bytes_sent=exchange.nbytes_sent, bytes_received=exchange.nbytes_received, imbalance=1.0,
            seconds={"step": time.perf_counter() - begin}, skipped=used is None, sent_density=1.0,
        )  # fmt: skip

    def _agree(self, members: list[Member]) -> Bools | None:
        """Read the gradients; returns which parameters have one on some rank, None if all ranks skip the step."""
        hindrance: Callable[[], str] = getattr(self._backend, "hindrance", str)  # on the host there is none
        trouble, unused = self._places.trouble() or hindrance(), np.array([m.p.grad is None for m in members])
        digest = 0
        try:
            digest = self._digest()
        except (TypeError, ValueError) as error:
            trouble = trouble or f"a group's learning rate, or another of its numbers, is none: {error}"
        notice, infinite = Notice(0, unused, frozen=digest, step=self._steps), getattr(self, "found_inf", None)
        if trouble:
            notice = notice._replace(status=BROKEN, trouble=trouble)
        else:
            notice = notice._replace(digest=self._equality.number(self._steps) if self._exchange.size > 1 else 0)
            self._read_gradients(members, getattr(self, "grad_scale", None))
            work = self._backend.array_of(self._averaging.work)
            *_, bad = self._backend.select(work, 0, len(work), float("inf"))
            notice = notice.nonfinite(0 if bad < 0 and infinite is not None and float(infinite) else bad)
        try:
            used = share_readiness(self._exchange, notice)
        except ReplicasDiffer as differ:
            self._equality.judge(self._exchange)  # raises, unless rounding explains it
            used = differ.used
        except StepRefused as refused:
            if infinite is not None and {status for status, _ in refused.statuses} <= {FINE, NONFINITE}:
                return None
            raise
        self._equality.done(self._steps)
        return np.ones(len(unused), dtype=bool) if used is None else used

    def _read_gradients(self, members: list[Member], scale: torch.Tensor | None) -> None:
        """Copy the gradients into the vector to average, unscaled; of what has none, zeros."""
        for member in members:
            part, grad = member.slot.view(self._averaging.work), member.p.grad
            if grad is None:
                part.zero_()
                continue
            factor = (-1.0 if member.group["maximize"] else 1.0) / (1.0 if scale is None else float(scale))
            part.copy_(grad)
            if factor != 1.0:
                part.mul_(factor)

    def _exchange_and_move(self, members: list[Member], used: Bools) -> None:
        """Average over ranks and move the parameters; on all ranks the same."""
        averaging, turn = self._averaging, self._schedule.turn(self._steps)
        moving, share = [i for i, moves in enumerate(used) if moves], None
        self._damaged = "a step was refused after what waits for the exchange had changed"
        if self._steps == self._schedule.warmup:
            self._floors = [member.floor() for member in members]
            averaging.scale_(self._share(members))
        if not turn.whole:
            self._move_by_momentum(members, moving)
        elif self._steps < self._schedule.warmup:
            averaging.average_(self._warmup_codec)
            self._move_by_gradient(members, moving, turn.steps)
        else:
            share = self._share(members)
            averaging.average_once_(self._warmup_codec, share)
            self._move_by_gradient(members, moving, turn.steps)
        for member in (member for member, moves in zip(members, used, strict=True) if not moves):
            averaging.give_back_(member.slot.begin, member.slot.end, share)
        self._steps += 1
        self._damaged = ""

    def _move_by_gradient(self, members: list[Member], moving: list[int], steps: float) -> None:
        """AdamW with the mean gradient; the variance moves as far as in so many steps."""
        for i in moving:
            member, floor = members[i], 0.0
            member.move_moments_(member.slot.view(self._averaging.work), steps)
            if self._floors:
                floor = self._floors[i] = member.floor()
            member.move_(member.moments["exp_avg"] / member.denominator(floor))

    def _move_by_momentum(self, members: list[Member], moving: list[int]) -> None:
        """Update the momentum with this rank's gradient, average it, and move by it; the variance rests."""
        for i in moving:
            members[i].own_update_(members[i].slot.view(self._averaging.work), self._floors[i])
        self._averaging.average_(self._codec)
        for i in moving:
            update = members[i].slot.view(self._averaging.work)
            members[i].take_update_(update, self._floors[i])
            members[i].move_(update)

    def _share(self, members: list[Member]) -> torch.Tensor:
        """What an element's gradient counts in the update, for each element: it is part of the momentum."""
        share = torch.empty_like(self._averaging.work)
        for member, floor in zip(members, self._floors, strict=True):
            member.slot.view(share).fill_(1 - member.group["betas"][0]).div_(member.denominator(floor))
        return share

    # What must be the same on all ranks

    def _digest(self) -> int:
        """A number of what must be the same in a step."""
        names = ("lr", "eps", "weight_decay", "maximize")
        values = [[*(float(group[name]) for name in names), *map(float, group["betas"])] for group in self.param_groups]
        return zlib.crc32(json.dumps([self._steps, values]).encode())

    def _explained(self, refusal: Refusal) -> Exception:
        if isinstance(refusal, FrozenDiffers):
            texts = self._exchange.gather_texts(", ".join(f"{float(group['lr']):g}" for group in self.param_groups))
            return ConfigurationError(
                f"r{self._exchange.rank} | the ranks' groups, or numbers of steps, differ; learning rates are "
                f"{' and '.join(texts)}: set them on all ranks alike"
            )
        return explain(refusal, self._exchange, self._places.name_at, "", advice=ADVICE)[0]

    def _check_alike(self, check_every: int) -> None:
        """Raise on all ranks unless all have the same parameters and settings."""
        settings = json.dumps({**self._settings, "check_every": check_every})
        texts = self._exchange.gather_texts("\n".join([settings, *self._places.describe()]))
        for rank, text in enumerate(texts):
            for here, there in zip([*texts[0].split("\n"), "no more"], [*text.split("\n"), "no more"], strict=False):
                if here != there:
                    raise ConfigurationError(
                        f"r{self._exchange.rank} | the ranks differ: rank 0 has {here!r}, rank {rank} has {there!r}; "
                        "construct OneBitAdamW with the same parameters and options on every rank"
                    )

    def _broadcast(self) -> None:
        """Set all parameters to those of rank 0."""
        for p in (p for group in self.param_groups for p in group["params"]):
            dense = p.detach().cpu().contiguous()
            self._exchange.broadcast_(dense.reshape(-1).view(torch.uint8).numpy())
            if dense.data_ptr() != p.data_ptr():
                p.data.copy_(dense)

    # State

    def _tie(self, steps: list[float], variance_steps: list[float]) -> None:
        """Let the state of each parameter be views of the flat vectors."""
        for slot, p, step, variance_step in zip(self._places.slots, self._places.params, steps, variance_steps, strict=True):
            self.state[p] = {
                "step": torch.tensor(step, dtype=torch.float32),
                "variance_step": torch.tensor(variance_step, dtype=torch.float64),
                "exp_avg": slot.view(self._momentum),
                "exp_avg_sq": slot.view(self._variance),
                "residual": slot.view(self._averaging.residual),
            }

    def state_dict(self) -> dict[str, Any]:
        """As AdamW's, with each parameter's residual, and under "onebit" what belongs to this rank alone; local."""
        own = {"format": FORMAT, "rank": self._exchange.rank, "size": self._exchange.size, "steps": self._steps}
        return {**super().state_dict(), "onebit": {**own, **self._settings, "error": self._averaging.error}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state that state_dict() gave on the same rank; collective, all or none.

        From another number of ranks, what waited for the exchange is dropped, with a warning.
        """
        error: Exception | None = None
        try:
            check_state(state_dict, self.state_dict(), self._places.numbers)
        except ConfigurationError as caught:
            error = caught
        except (LookupError, TypeError, ValueError, AttributeError) as caught:
            error = ConfigurationError(f"the state is not one that state_dict() gave: {type(caught).__name__}: {caught}")
        meet(self._exchange, "load_state_dict")
        self._exchange.raise_together(error)
        own, saved = state_dict["onebit"], [state_dict["state"][number] for number in self._places.numbers]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for slot, entry in zip(self._places.slots, saved, strict=True):
            slot.view(self._momentum).copy_(entry["exp_avg"])
            slot.view(self._variance).copy_(entry["exp_avg_sq"])
            slot.view(self._averaging.residual).copy_(entry["residual"])
        self._tie([float(entry["step"]) for entry in saved], [float(entry["variance_step"]) for entry in saved])
        if own["size"] == self._exchange.size:
            self._averaging.error.copy_(own["error"])
        else:
            self._averaging.forget_()
            self._warn_of_ranks(own["size"])
        self._steps, self._damaged, self._floors = int(own["steps"]), "", []
        self._equality.done(self._steps)
        if self._steps > self._schedule.warmup:
            self._floors = [member.floor() for member in self._places.members(self.state)]

    def _warn_of_ranks(self, size: int) -> None:
        if self._exchange.rank == 0:
            warnings.warn(
                f"the state is of {size} ranks, these are {self._exchange.size}: momentum and variance go on, what waited "
                "for the exchange is dropped",
                stacklevel=3,
            )
