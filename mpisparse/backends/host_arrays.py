"""The array operations of the host backends: NumPy arrays on the memory that torch has, so nothing is ever copied.

mpisparse.backends.protocol says what each does. All are implemented in C: a step calls them often enough that the frames of
Python functions would count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Ints

empty: Callable[[int, Any], NDArray[Any]] = np.empty
array_of: Callable[[torch.Tensor], Floats] = torch.Tensor.numpy
from_host: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
to_host: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
search: Callable[[Ints, Ints], Ints] = np.ndarray.searchsorted
copy: Callable[[NDArray[Any]], NDArray[Any]] = np.ndarray.copy
fill: Callable[[NDArray[Any], float], None] = np.ndarray.fill
view_as: Callable[[NDArray[Any], Any], NDArray[Any]] = np.ndarray.view
pick: Callable[[Ints, Ints], Ints] = operator.getitem
bytes_at: Callable[[Bytes, Ints], Bytes] = operator.getitem
put_bytes: Callable[[Any, Ints, Bytes], None] = operator.setitem
