"""A model's parameters as one flat vector: where each lies, where its gradient is read from, where its mean is published.

A parameter's elements lie in the flat vector in the order in which they lie in memory (its strides), so that a
gradient of the usual layout, a channels_last one too, is read and published without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Bools, Bytes, Floats, Ints
from mpisparse.backends.kinds import BF16, FP16, FP32, FP64
from mpisparse.errors import ConfigurationError

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend

KINDS = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16, torch.float64: FP64}


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements [begin, end) of the flat vector, in the order of `stride`."""

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
        """The type in which a gradient is read: float64 ones are read as float32."""
        return FP32 if self.kind == FP64 else self.kind

    def view(self, flat: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """This parameter's part of a flat tensor that starts at element `begin`, in the parameter's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.begin - begin)

    def fits(self, p: torch.Tensor) -> bool:
        """Tell whether a parameter is of the type, shape and order in memory that it had at construction."""
        if p.dtype is not self.dtype or p.shape != self.shape:
            return False
        return p.stride() == self.stride or self.matches(p) or memory_order(p) == self.stride

    def takes(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient is of the parameter's type and shape, so that no pass reads beyond it."""
        return grad.dtype is self.dtype and grad.shape == self.shape

    def matches(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient's memory is in this slot's order."""
        sized = [(s, t) for n, s, t in zip(self.shape, grad.stride(), self.stride, strict=True) if n > 1]
        return all(s == t for s, t in sized)


class Layout:
    """The slots of all trainable parameters, in the order of model.parameters()."""

    def __init__(self, model: torch.nn.Module) -> None:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise ConfigurationError(
                f"{type(model).__name__} has no parameter that requires a gradient; nothing would be exchanged"
            )
        self.params: list[torch.nn.Parameter] = [p for _, p in trainable]
        self.device = self.params[0].device
        self.waiting: list[tuple[int, int]] = []  # stretches of parameters that were frozen since
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        self.slots: list[Slot] = []
        at = 0
        for name, p in trainable:
            _check_parameter(name, p, self.device)
            self.slots.append(Slot(name, at, at + p.numel(), tuple(p.shape), memory_order(p), p.dtype))
            at += p.numel()
        self.size = at
        if at == 0:
            raise ConfigurationError(f"the trainable parameters of {type(model).__name__} have no elements")
        self.ends: Ints = np.array([slot.end for slot in self.slots], dtype=np.int64)
        self.kinds = np.array([s.sent_kind for s in self.slots], dtype=np.uint8)

    @property
    def remaining(self) -> int:
        """How many elements are not frozen."""
        return self.size - sum(end - begin for begin, end in self.waiting)

    def waits(self, index: Ints) -> Bools:
        """Which elements of an index are frozen."""
        inside = np.zeros(len(index), dtype=bool)
        for begin, end in self.waiting:
            a, b = np.searchsorted(index, (begin, end)).tolist()
            inside[a:b] = True
        return inside

    def describe(self) -> list[str]:
        """One line for each parameter; equal on all ranks if and only if the layouts are."""
        return [f"{s.name} {list(s.shape)} {str(s.dtype).removeprefix('torch.')} {list(s.stride)}" for s in self.slots]

    def misfit(self, grads: Iterable[torch.Tensor | None]) -> str | None:
        """What of the parameters or their gradients is not as it was at construction, in words; None if all is."""
        for slot, p, grad in zip(self.slots, self.params, grads, strict=True):
            if not slot.fits(p) or p.device != self.device:
                was = _looks(slot.dtype, slot.shape, slot.stride, self.device)
                now = _looks(p.dtype, p.shape, p.stride(), p.device)
                return (
                    f"parameter {slot.name} was {was} when GradientSync was constructed and is {now} now; convert the model "
                    "first, then construct GradientSync and the optimizer, or convert it back"
                )
            if grad is not None and (not slot.takes(grad) or grad.device != self.device):
                was, now = (_looks(t.dtype, t.shape, None, t.device) for t in (p, grad))
                return f"the gradient of parameter {slot.name} is {now}, its parameter is {was}; they must be alike"
        return None

    def name_at(self, index: int) -> str:
        """The name of the parameter that holds a flat index."""
        return self.slots[int(np.searchsorted(self.ends, index, side="right"))].name


def _check_parameter(name: str, p: torch.nn.Parameter, device: torch.device) -> None:
    if isinstance(p, torch.nn.UninitializedParameter):
        raise ConfigurationError(f"parameter {name} is not initialised; run one forward pass of the model first")
    if p.dtype not in KINDS:
        known = ", ".join(str(d).removeprefix("torch.") for d in KINDS)
        raise ConfigurationError(f"parameter {name} is {p.dtype}; supported are {known}")
    if p.device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"parameter {name} is on {p.device}; move the model to the CPU or to one CUDA device")
    if p.device != device:
        raise ConfigurationError(f"parameter {name} is on {p.device}, others are on {device}; move the model to one device")


def _looks(dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int] | None, device: torch.device) -> str:
    strides = "" if stride is None else f" with strides {list(stride)}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{strides} on {device}"


def memory_order(p: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides if it fills its memory without gaps, else those of a contiguous copy."""
    return tuple(torch.empty_like(p, device="meta", memory_format=torch.preserve_format).stride())


def zeros(count: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """A flat tensor of zeros; the host's is NumPy's, which asks for the huge pages that scattered reads and writes need."""
    if device is not None and device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(max(1, count) * dtype.itemsize, dtype=np.uint8)).view(dtype)[:count]


@dataclass
class Gradients:
    """The fresh gradients of a step as addresses in flat order, and the tensors that must live as long."""

    pointers: NDArray[np.uint64]
    ends: Ints
    kinds: Bytes
    sparse: list[tuple[Slot, torch.Tensor]]
    alive: list[torch.Tensor]

    def densified(self) -> Gradients:
        """The same gradients with the sparse ones as dense memory."""
        pointers, alive = self.pointers.copy(), list(self.alive)
        for slot, grad in self.sparse:
            alive.append(in_order(slot, grad.to_dense()))
            pointers[np.searchsorted(self.ends, slot.end)] = alive[-1].data_ptr()
        return Gradients(pointers, self.ends, self.kinds, [], alive)

    def clipped(self, most: float | None) -> Gradients:
        """The same dense gradients scaled to a norm of at most `most`; None: as they are."""
        if most is None or not self.alive:
            return self
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in self.alive]))
        if not norm > most:
            return self
        pointers, scaled = self.pointers.copy(), [g * (most / norm).to(g.dtype) for g in self.alive]
        places = {g.data_ptr(): s.data_ptr() for g, s in zip(self.alive, scaled, strict=True) if g.numel()}
        for i in np.flatnonzero(pointers).tolist():
            pointers[i] = places.get(int(pointers[i]), pointers[i])
        return Gradients(pointers, self.ends, self.kinds, [], scaled)

    def first_nonfinite(self, backend: Backend) -> int:
        """Read all gradients; the first flat index that is not finite, or -1."""
        for slot, grad in self.sparse:
            if not bool(torch.isfinite(grad.values()).all()):
                return slot.begin
        return int(backend.first_nonfinite(self.pointers, self.ends, self.kinds))


def collect(layout: Layout, grads: Iterable[torch.Tensor | None]) -> Gradients:
    """Find each gradient's memory; None is an absent one. Copies only what lies in another order or type."""
    pointers, sparse, alive = [], [], []
    for slot, grad in zip(layout.slots, grads, strict=True):
        pointer = 0
        if grad is not None and grad.layout is torch.strided:
            source = in_order(slot, grad)
            pointer = source.data_ptr()
            alive.append(source)
        elif grad is not None:
            sparse.append((slot, grad.coalesce()))
        pointers.append(pointer)
    return Gradients(np.array(pointers, dtype=np.uint64), layout.ends, layout.kinds, sparse, alive)


def in_order(slot: Slot, grad: torch.Tensor) -> torch.Tensor:
    """The gradient with its memory in the slot's order, float64 as float32; the same tensor where it already is."""
    if grad.dtype is not torch.float64 and (grad.stride() == slot.stride or slot.matches(grad)):
        return grad
    dtype = torch.float32 if grad.dtype is torch.float64 else grad.dtype
    return torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=grad.device).copy_(grad)


def add_sparse_(residual: torch.Tensor, slot: Slot, grad: torch.Tensor) -> int:
    """Add a coalesced sparse gradient into its slot; a flat index of the slot if something there is not finite, else -1."""
    target = slot.view(residual)
    if grad.sparse_dim() == 1:
        target.index_add_(0, grad.indices()[0], grad.values().float())
        touched = target[grad.indices()[0]]
    else:
        touched = target.add_(grad.to_dense().float())
    return -1 if bool(torch.isfinite(touched).all()) else slot.begin


@dataclass
class Run:
    """A stretch of parameters of one type, whose published gradients share one buffer."""

    begin: int
    end: int
    buffer: torch.Tensor

    @property
    def kind(self) -> int:
        return KINDS[self.buffer.dtype]

    @property
    def origin(self) -> int:
        """The address that the flat vector's first element would have if all of it were of this run's type."""
        return self.buffer.data_ptr() - self.begin * self.buffer.itemsize


class Published:
    """The mean gradient: zero but at the last union, as one buffer for each run of equal types, with a view a parameter.

    Only the positions of the last and the new union are written, unless someone else wrote into the views (torch
    counts that in `_version`): then the whole buffer is cleared.
    """

    def __init__(self, layout: Layout, backend: Backend) -> None:
        self.backend = backend
        self.runs: list[Run] = []
        self.run_of: list[Run] = []
        for slot in layout.slots:
            if not self.runs or self.runs[-1].buffer.dtype != slot.dtype:
                self.runs.append(Run(slot.begin, slot.begin, torch.empty(0, dtype=slot.dtype)))
            self.runs[-1].end = slot.end
            self.run_of.append(self.runs[-1])
        for run in self.runs:
            run.buffer = zeros(run.end - run.begin, run.buffer.dtype, layout.device)
        self.slots = layout.slots
        self.views = [slot.view(run.buffer, run.begin) for slot, run in zip(self.slots, self.run_of, strict=True)]
        self.addresses = [view.data_ptr() for view in self.views]  # where the buffers are for as long as this object is
        self.union: Ints = backend.empty(0, np.int64)
        self.version = self.written()

    def written(self) -> int:
        """How often anyone but this object wrote into the buffers."""
        return sum(run.buffer._version for run in self.runs)

    def is_cut_off(self, i: int) -> bool:
        """Tell whether a view has other memory than the buffer: converting a module gives its gradients new memory."""
        return self.views[i].data_ptr() != self.addresses[i]

    def cut_off(self) -> list[int]:
        """The parameters whose views are cut off from the buffer."""
        pairs = zip(self.views, self.addresses, strict=True)
        return [i for i, (view, address) in enumerate(pairs) if view.data_ptr() != address]

    def renew(self, i: int) -> torch.Tensor:
        """Make a view of the buffer again; the one before goes on as a tensor of its own."""
        run = self.run_of[i]
        self.views[i] = self.slots[i].view(run.buffer, run.begin)
        self.addresses[i] = self.views[i].data_ptr()
        return self.views[i]

    def clear(self) -> None:
        """Make every element zero."""
        if self.written() != self.version:
            for run in self.runs:
                run.buffer.zero_()
            self.version = self.written()
        else:
            for run, index in self._split(self.union):
                self.backend.zero_at(run.origin, run.kind, run.end, index)
        self.union = self.backend.empty(0, np.int64)

    def filled(self) -> None:
        """Every element was written from outside: the next clear must be of the whole."""
        self.version = self.written() - 1

    def write(self, union: Ints, mean: Floats) -> bool:
        """Write the mean at the union (the buffer is clear); mean keeps what rounding left. True if it rounded."""
        self.union = union
        start = 0
        for run, index in self._split(union):
            values = mean[start : start + len(index)]
            self.backend.publish_at(run.origin, run.kind, run.end, index, values)
            start += len(index)
        return any(run.kind in (FP16, BF16) for run in self.runs)

    def _split(self, union: Ints) -> list[tuple[Run, Ints]]:
        """The union's share of every run."""
        if len(self.runs) == 1:
            return [(self.runs[0], union)]
        cuts = [0, *self.backend.search(union, np.array([run.begin for run in self.runs[1:]])).tolist(), len(union)]
        return [(run, union[a:b]) for run, (a, b) in zip(self.runs, pairwise(cuts), strict=True) if a < b]

    def sample(self, count: int) -> list[int]:
        """About so many indices of the union, at least one if there is one."""
        places = np.arange(0, len(self.union), max(1, len(self.union) // count))[:count]
        return [int(i) for i in self.backend.pick(self.union, places)]
