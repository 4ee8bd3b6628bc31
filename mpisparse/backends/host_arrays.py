"""What the backends in the host's memory share: their arrays are NumPy's, so that nothing is ever copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Floats, Ints


def empty(count: int, dtype: Any) -> NDArray[Any]:
    """An array of anything."""
    return np.empty(count, dtype)


def array_of(tensor: torch.Tensor) -> Floats:
    """A flat float32 tensor as an array on the same memory."""
    values: Floats = tensor.numpy()
    return values


def from_host(values: NDArray[Any]) -> NDArray[Any]:
    """A NumPy array as one of this backend."""
    return values


def to_host(array: NDArray[Any]) -> NDArray[Any]:
    """An array of this backend as NumPy's."""
    return array


def search(index: Ints, values: Ints) -> Ints:
    """Where each value would be inserted into the ascending index, before equal ones."""
    return np.searchsorted(index, values)


def pick(index: Ints, places: Ints) -> Ints:
    """The elements of an index at some places."""
    return index[places]


def add(total: Floats, term: Floats) -> None:
    """Add one term of a sum in place."""
    np.add(total, term, out=total)


def divide(values: Floats, by: float) -> None:
    """Divide in place by a number, rounded to float32."""
    torch.from_numpy(values).div_(by)  # on torch's threads


def late_nonfinite(acc: Floats) -> int:
    """Where an earlier accumulate() met a value that is not finite and did not say so: nowhere."""
    return -1
