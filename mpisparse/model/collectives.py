"""Small collectives of a training loop: numbers and tensors of all ranks. Each begins with a roll call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from mpisparse.backends.flat import distinct
from mpisparse.comm.roll_call import meet
from mpisparse.comm.survival import together
from mpisparse.model.joining import mean_of
from mpisparse.model.shards import local_of

if TYPE_CHECKING:
    from mpisparse.arrays import Ints
    from mpisparse.comm.exchange import Exchange

T = TypeVar("T")
Rows = np.ndarray[Any, np.dtype[np.float64]]


class Collectives:
    """What GradientSync offers besides its steps."""

    _exchange: Exchange

    def _meet(self, entry: str, *values: int) -> Ints:
        """Raise CollectiveError on all ranks unless all are in this entry point; collective."""
        return meet(self._exchange, entry, *values)

    def _mean(self, entry: str, value: float) -> float:
        """The mean of a number over ranks, summed in rank order; collective."""
        rows = self._meet(entry, int(np.float64(value).view(np.int64)))
        return mean_of(rows[:, 0])

    def _together(self, attempt: Callable[[], T]) -> T:
        """Run a joint operation of all ranks; repeat it among the living if one dies and the others are to go on."""
        return together(self._exchange, attempt)

    def average(self, value: float) -> float:
        """The mean of a number over ranks; collective."""
        return self._mean("average", value)

    def agree_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; collective."""
        return bool(self._meet("agree_any", int(bool(flag)))[:, 0].any())

    def gather_floats(self, row: Rows) -> Rows:
        """Gather a row of numbers from every rank; row r of the result is rank r's. Collective."""

        def gather() -> Rows:
            self._meet("gather_floats")
            return self._exchange.allgather(row)

        return self._together(gather)

    def gather_texts(self, text: str) -> list[str]:
        """Gather a text from every rank, in the order of the ranks; collective."""

        def gather() -> list[str]:
            self._meet("gather_texts")
            return self._exchange.gather_texts(text)

        return self._together(gather)

    def broadcast_(self, tensors: list[torch.Tensor]) -> None:
        """Set tensors to those of rank 0; collective."""
        local = [distinct(local_of(tensor)) for tensor in tensors]  # a buffer may be expanded
        survives = self._exchange.survival is not None

        def broadcast() -> list[torch.Tensor]:
            self._meet("broadcast_")
            arrived = [tensor.detach().cpu().contiguous() for tensor in local]
            if survives:  # until all have them, each rank has its own
                arrived = [tensor.clone() for tensor in arrived]
            for dense in arrived:
                self._exchange.broadcast_(dense.reshape(-1).view(torch.uint8).numpy())
            return arrived

        arrived = self._together(broadcast)
        with torch.no_grad():
            for tensor, dense in zip(local, arrived, strict=True):
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)

    def check_together(self, error: Exception | None) -> None:
        """Raise on all ranks if any has an error; collective."""

        def check() -> None:
            self._meet("check_together")
            self._exchange.raise_together(error)

        self._together(check)
