"""Tensors as pieces of one flat float32 vector: where each lies, and how it is read without a copy.

A tensor's elements lie in the flat vector in the order in which they lie in memory (its strides), so that a gradient of
the usual layout, channels_last too, is read without a copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Bools, Bytes, Ints
from mpisparse.backends.kinds import BF16, FP16, FP32, FP64
from mpisparse.backends.protocol import Backend

KINDS = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16, torch.float64: FP64}


@dataclass(frozen=True)
class Slot:
    """One tensor's place: elements [begin, end) of the flat vector, in the order of `stride`."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> int:
        return KINDS[self.dtype]

    @property
    def sent_kind(self) -> int:
        """The element type in which a gradient is read: float64 is read as float32."""
        return FP32 if self.kind == FP64 else self.kind

    def view(self, flat: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """This tensor's part of a flat tensor that starts at element `begin`, in the tensor's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.begin - begin)

    def fits(self, p: torch.Tensor) -> bool:
        """Tell whether a tensor has the type, shape and memory order of this slot."""
        if p.dtype is not self.dtype or p.shape != self.shape:
            return False
        return p.stride() == self.stride or self.matches(p) or memory_order(p) == self.stride

    def takes(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient has this slot's type and shape, so that no pass reads beyond it."""
        return grad.dtype is self.dtype and grad.shape == self.shape

    def matches(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient's memory is in this slot's order."""
        return lies_as(grad, self.stride)


@dataclass
class Held:
    """Stretches of the vector that are not exchanged for now, because their parameters are frozen."""

    n: int
    stretches: list[tuple[int, int]] = field(default_factory=list)
    remaining: int = field(init=False)  # elements that are exchanged

    def __post_init__(self) -> None:
        self.hold(self.stretches)

    def hold(self, stretches: list[tuple[int, int]]) -> None:
        """Hold these stretches and no others."""
        self.stretches = stretches
        self.remaining = self.n - sum(end - begin for begin, end in stretches)

    def below(self, element: int) -> int:
        """How many elements below this one are exchanged."""
        return element - sum(min(end, element) - begin for begin, end in self.stretches if begin < element)

    def covers(self, index: Ints) -> Bools:
        """Tell which elements of an ascending index are held."""
        inside = np.zeros(len(index), dtype=bool)
        for begin, end in self.stretches:
            a, b = np.searchsorted(index, (begin, end)).tolist()
            inside[a:b] = True
        return inside


class Pieces(NamedTuple):
    """The vector that a step adds, as addresses in flat order; `alive` are the tensors that must live as long.

    Address 0 is a piece of zeros. Sparse tensors, such as the gradient of an embedding, stand apart in `sparse`.
    """

    pointers: NDArray[np.uint64]
    ends: Ints
    kinds: Bytes
    sparse: list[tuple[Slot, torch.Tensor]]
    alive: list[torch.Tensor]

    @property
    def dense(self) -> tuple[NDArray[np.uint64], Ints, Bytes]:
        """What kernels take of it."""
        return self.pointers, self.ends, self.kinds

    def stretch(self, lo: int, hi: int) -> Pieces:
        """Return the pieces of elements [lo, hi), of which there are some; all pieces must be dense float32."""
        first, last = np.searchsorted(self.ends, (lo, hi - 1), side="right").tolist()
        pointers = self.pointers[first : last + 1].copy()
        pointers[0] += np.uint64(4 * (lo - (int(self.ends[first - 1]) if first else 0)))
        ends = np.minimum(self.ends[first : last + 1], hi) - lo
        return Pieces(pointers, ends, self.kinds[first : last + 1], [], self.alive)

    def densified(self) -> Pieces:
        """Return the same pieces with the sparse ones as dense memory."""
        if not self.sparse:
            return self
        pointers, alive = self.pointers.copy(), list(self.alive)
        for slot, grad in self.sparse:
            alive.append(in_order(slot, grad.to_dense()))
            pointers[np.searchsorted(self.ends, slot.end)] = alive[-1].data_ptr()
        return Pieces(pointers, self.ends, self.kinds, [], alive)

    def clipped(self, most: float | None) -> Pieces:
        """Return dense pieces scaled to a norm of at most `most`; None: as they are."""
        if most is None or not self.alive:
            return self
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in self.alive]))
        if not norm > most:
            return self
        pointers, scaled = self.pointers.copy(), [g * (most / norm).to(g.dtype) for g in self.alive]
        places = {g.data_ptr(): s.data_ptr() for g, s in zip(self.alive, scaled, strict=True) if g.numel()}
        for i in np.flatnonzero(pointers).tolist():
            pointers[i] = places.get(int(pointers[i]), pointers[i])
        return Pieces(pointers, self.ends, self.kinds, [], scaled)

    def first_nonfinite(self, backend: Backend) -> int:
        """Read all pieces; return the first flat index that is not finite, or -1."""
        for slot, grad in self.sparse:
            if not bool(torch.isfinite(grad.values()).all()):
                return slot.begin
        return int(backend.first_nonfinite(*self.dense))


def pieces_of(vector: torch.Tensor) -> Pieces:
    """A flat tensor as one piece."""
    kind = KINDS[vector.dtype]
    return Pieces(
        np.array([vector.data_ptr()], np.uint64), np.array([len(vector)]), np.array([kind], np.uint8), [], [vector]
    )


def collect(slots: Sequence[Slot], ends: Ints, kinds: Bytes, grads: Iterable[torch.Tensor | None]) -> Pieces:
    """Find each gradient's memory; None is an absent one. Copies only what lies in another order or type."""
    pointers, sparse, alive = [], [], []
    for slot, grad in zip(slots, grads, strict=True):
        pointer = 0
        if grad is not None and grad.layout is torch.strided:
            source = grad if grad.stride() == slot.stride and grad.dtype is not torch.float64 else in_order(slot, grad)
            pointer = source.data_ptr()
            alive.append(source)
        elif grad is not None:
            sparse.append((slot, grad.coalesce()))
        pointers.append(pointer)
    return Pieces(np.array(pointers, dtype=np.uint64), ends, kinds, sparse, alive)


def in_order(slot: Slot, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient with its memory in the slot's order, float64 as float32; itself where it already is."""
    if grad.dtype is not torch.float64 and (grad.stride() == slot.stride or slot.matches(grad)):
        return grad
    dtype = torch.float32 if grad.dtype is torch.float64 else grad.dtype
    return torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=grad.device).copy_(grad)


def lies_as(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Tell whether a tensor's elements lie in memory as these strides have them; those of one element mean nothing."""
    return all(s == t for n, s, t in zip(tensor.shape, tensor.stride(), stride, strict=True) if n > 1)


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that have memory of their own: those of an expanded one (stride 0) share it."""
    for dim, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and n > 1 else tensor
    return tensor


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values of the same shape into a tensor that may be expanded."""
    own = distinct(tensor)
    own.copy_(values[tuple(map(slice, own.shape))])


def add_sparse_(vector: torch.Tensor, slot: Slot, grad: torch.Tensor) -> int:
    """Add a coalesced sparse gradient into its slot; return a flat index of the slot if a sum is not finite, else -1."""
    target = slot.view(vector)
    if grad.sparse_dim() == 1:
        target.index_add_(0, grad.indices()[0], grad.values().float())
        touched = target[grad.indices()[0]]
    else:
        touched = target.add_(grad.to_dense().float())
    return -1 if bool(torch.isfinite(touched).all()) else slot.begin


def memory_order(p: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it fills its memory without gaps, else those of a contiguous copy."""
    return tuple(torch.empty_like(p, device="meta", memory_format=torch.preserve_format).stride())


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum of tensors in the order in which they lie in memory."""
    total = 0
    for tensor in tensors:
        own = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        total = zlib.crc32(own.cpu().numpy().data, total)
    return total


def on_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host array as a tensor of a device: copied from pinned memory, for which nobody waits; on the host, itself."""
    tensor = torch.from_numpy(values)
    staged = tensor.pin_memory() if device.type == "cuda" else tensor
    return staged.to(device, non_blocking=True)


def zeros(count: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """A flat tensor of zeros. On the host NumPy allocates it: it asks for huge pages, which scattered access needs."""
    if device is not None and device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(max(1, count) * dtype.itemsize, dtype=np.uint8)).view(dtype)[:count]
