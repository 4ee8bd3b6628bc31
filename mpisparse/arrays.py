"""Names for the NumPy array types that the modules pass to each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Halves = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]
