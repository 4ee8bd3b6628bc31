"""Names for the types that the modules pass to each other: NumPy arrays, and saved states."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Halves = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]
State = dict[str, Any]  # a part's state: arrays, numbers and texts by name
