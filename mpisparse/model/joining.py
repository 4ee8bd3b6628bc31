"""Uneven numbers of batches: a rank without more batches takes part in the others' steps with zeros."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Ints
from mpisparse.backends.digest import digest
from mpisparse.comm.agreement import FINE, NO_BACKWARD, Notice
from mpisparse.comm.roll_call import ENTRIES, FIRST, JOINED, STEP, Apart, Call, all_done, answers, at_work, begin
from mpisparse.comm.stop_together import only_of_a_sync
from mpisparse.errors import CollectiveError, ConfigurationError, GradientError


def joined_k(call: Call, own: int) -> int:
    """The number of elements that the ranks at work select in the step of a roll call; a rank's own if there is none."""
    rows = at_work(answers(call))
    return int(rows[0, 4]) if len(rows) else own


def with_zeros(notice: Notice, call: Call) -> Notice:
    """The notice of a rank that takes part without a new gradient. Raises if it cannot, after its roll call said it can."""
    if notice.status not in (FINE, NO_BACKWARD):
        raise GradientError(notice.trouble or "a gradient that this rank did not exchange before join() cannot be exchanged")
    return notice._replace(status=FINE, call=call)


@contextlib.contextmanager
def joining(sync: Any, optimizers: Sequence[torch.optim.Optimizer], each_step: Callable[[], Any] | None) -> Iterator[None]:
    """Let the loop inside the block end at different steps on different ranks; collective."""
    trailing = Trailing(sync, optimizers, each_step)
    if sync.size == 1:
        yield
        return
    with only_of_a_sync():
        yield
    trailing.run()


class Trailing:
    """The steps of a rank without more batches."""

    def __init__(self, sync: Any, optimizers: Sequence[torch.optim.Optimizer], each_step: Callable[[], Any] | None) -> None:
        self.sync, self.each_step = sync, each_step
        self.attached = [attachment.optimizer for attachment in sync._attached]
        self.others = [optimizer for optimizer in optimizers if all(optimizer is not a for a in self.attached)]
        if sync.averages_gradients or not sync.options.of_weights:  # now, or in other steps
            self._check()

    def _check(self) -> None:
        """Raise ConfigurationError if the optimizer cannot move this replica along with the others."""
        me = f"r{self.sync.rank} | "
        if not self.attached and not self.others:
            raise ConfigurationError(
                f"{me}join() moves the replica of a rank that has no more batches: attach() the optimizer, or pass it: "
                "sync.join(optimizer)"
            )
        if len(self.attached) > 1:
            raise ConfigurationError(
                f"{me}join() can follow one attached optimizer, not {len(self.attached)}: a rank without batches does not "
                "know which is next; give all ranks as many batches (mpisparse.shard)"
            )
        if any(attachment.scaler is not None for attachment in self.sync._attached):
            raise ConfigurationError(
                f"{me}join() cannot follow a GradScaler: its scale depends on gradients that a rank without batches does "
                "not have; give all ranks as many batches (mpisparse.shard), or use bfloat16, which needs no scaler"
            )
        for optimizer in (*self.attached, *self.others):
            if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
                raise ConfigurationError(
                    f"{me}join() cannot step {type(optimizer).__name__}, which needs a closure, and a rank without batches "
                    "has no loss; give all ranks as many batches (mpisparse.shard)"
                )

    def run(self) -> None:
        """Take part until no rank has any more batches; collective."""
        going = True
        while going:
            going = self._step() if self.sync.averages_gradients else self._rest_or_exchange()
        if self.sync.averages_gradients:
            self._compare()

    def _compare(self) -> None:
        """Raise on all ranks if replicas differ: the loop may change gradients in ways that this rank did not follow."""
        sync = self.sync
        if sync._equality.every and len(set(sync._exchange.gather_texts(str(digest(sync._replicated()))))) > 1:
            sync._equality.judge(sync._exchange)

    def _step(self) -> bool:
        """Take part in one step that exchanges gradients; return whether there was one."""
        sync = self.sync
        call = self._listen()
        if call.rows is None or all_done(call.rows):
            return False
        sync._call = call
        if self.attached:
            self.attached[0].step()
        else:
            sync.step()
        for optimizer in self.others:
            optimizer.step()
        if self.each_step is not None:
            self.each_step()
        return True

    def _rest_or_exchange(self) -> bool:
        """Count one optimizer step without movement, and exchange weights if an exchange is due.

        Ranks meet only in exchanges, so all ranks make the one after the last batch.
        """
        sync = self.sync
        sync._companion.begin()
        if not sync._companion.is_due():
            sync._exchanged.rest()
            return True
        sync._call = call = self._listen()
        sync._exchange_now(None)
        sync.turn()
        return call.rows is not None and not all_done(call.rows)

    def _listen(self) -> Call:
        """Answer roll calls until one is of a step, or until no rank is at work; collective."""
        sync, exchange = self.sync, self.sync._exchange
        sync._gradients.look()
        frozen = int(sync._gradients.frozen.digest)
        while True:
            call = begin(exchange, JOINED, exchange.place.steps, (FINE, 0, 0, 1, frozen))
            try:
                rows = answers(call)
            except Apart as apart:
                raise CollectiveError(f"r{exchange.rank} | {apart.args[0]}") from None
            busy = at_work(rows)
            entry = ENTRIES[busy[0, 0]] if len(busy) else STEP
            if entry == STEP:
                return call._replace(rows=rows)
            if entry == FIRST:
                exchange.raise_together(None, GradientError)
            elif entry == "observe":
                sync._observed(mean_of(busy[:, 2]))


def mean_of(numbers: Ints) -> float:
    """The mean of float64 numbers that roll calls carry as the bits of integers, summed in rank order."""
    return float(sum(np.ascontiguousarray(numbers).view(np.float64).tolist()) / len(numbers))
