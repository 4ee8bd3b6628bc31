"""Arrays in a device's memory, with the little of NumPy's behaviour that the step's parts use: slices, views, copies.

There is no arithmetic: every sum is a kernel, whose bits are known. Nothing comes to the host unless asked for by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpisparse.backends.cuda.launcher import Launcher


class DeviceArray:
    """`count` elements from an address on; `owner` keeps the memory alive. MPI takes it as a device buffer."""

    __slots__ = ("count", "dtype", "launcher", "owner", "pointer")

    def __init__(self, launcher: Launcher, pointer: int, count: int, dtype: Any, owner: object) -> None:
        self.launcher = launcher
        self.pointer = pointer
        self.count = count
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.owner = owner

    def __len__(self) -> int:
        return self.count

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.count,),
            "typestr": self.dtype.str,
            "data": (self.pointer if self.count else 0, False),
            "strides": None,
            "version": 3,
        }

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("this array is in a device's memory: bring it to the host with the backend's to_host()")

    def __getitem__(self, part: slice) -> DeviceArray:
        start, stop, step = part.indices(self.count)
        if step != 1:
            raise IndexError(f"a device array is cut in one piece, not in steps of {step}")
        count = max(0, stop - start)
        return DeviceArray(self.launcher, self.pointer + start * self.itemsize, count, self.dtype, self.owner)

    def __setitem__(self, part: slice, values: DeviceArray | float) -> None:
        target = self[part]
        if not isinstance(values, DeviceArray):
            target.fill(values)
        elif (values.count, values.dtype) != (target.count, target.dtype):
            raise ValueError(f"{values.count} of {values.dtype} do not fit {target.count} of {target.dtype}")
        elif target.count:
            self.launcher.copy(target.pointer, values.pointer, target.nbytes)

    def view(self, dtype: Any) -> DeviceArray:
        """The same memory as elements of another type."""
        wanted = np.dtype(dtype)
        if self.nbytes % wanted.itemsize:
            raise ValueError(f"{self.nbytes} bytes are no whole number of {wanted}")
        return DeviceArray(self.launcher, self.pointer, self.nbytes // wanted.itemsize, wanted, self.owner)

    def copy(self) -> DeviceArray:
        """The same values in memory of their own."""
        twin = allocate(self.launcher, self.count, self.dtype)
        twin[:] = self
        return twin

    def alike(self, count: int) -> DeviceArray:
        """Another array of the same type, of anything, in memory that nothing launched before writes to."""
        twin = allocate(self.launcher, count, self.dtype)
        self.launcher.synchronize()
        return twin

    def to_pinned(self) -> NDArray[Any]:
        """A copy in pinned memory of the host."""
        values = self.launcher.pinned(self.nbytes).view(self.dtype)
        if self.count:
            self.launcher.copy_out(values, self.pointer)
        return values

    def from_pinned(self, values: NDArray[Any]) -> DeviceArray:
        """A copy on this array's device of what is on the host."""
        twin = allocate(self.launcher, len(values), values.dtype)
        if len(values):
            self.launcher.copy_in(twin.pointer, values)
        return twin

    def fill(self, value: float) -> None:
        """Set all elements to 0, or bytes to any value."""
        if value != 0 and self.itemsize != 1:
            raise ValueError(f"a device array of {self.dtype} can be filled with 0 only, not with {value}")
        if self.count:
            self.launcher.fill(self.pointer, int(value), self.nbytes)


def allocate(launcher: Launcher, count: int, dtype: Any) -> DeviceArray:
    """An array of anything."""
    pointer, owner = launcher.allocate(max(1, count * np.dtype(dtype).itemsize))
    return DeviceArray(launcher, pointer, count, dtype, owner)
