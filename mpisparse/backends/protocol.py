"""What a backend does: read this first.

A backend is a set of kernels plus the arrays they work on. Everything that touches all elements of the flat vector, or all
selected ones, goes through a backend; the rest of the package decides what to call. There are three, chosen once by
`mpisparse.backends.device.load_backend`, and they agree to the last bit:

| backend | arrays | code |
|---|---|---|
| native | NumPy arrays in host memory | kernels/*.cpp, *.hpp, compiled at installation as mpisparse._cpu |
| numpy | NumPy arrays in host memory | numpy_backend.py: where no compiler was found; the oracle of the kernel tests |
| cuda | torch tensors in device memory | kernels/*.cu, launched by cuda/backend.py |

A `Vector` is an array in the backend's own memory. Small results (counts, histograms, places) are NumPy arrays for every
backend. Gradients are not copied: kernels get their addresses, see `Pointers`.

Three backends need three implementations of a new kernel, plus a case in tests/unit/test_kernels.py (native against numpy)
and in tests/cuda/checks.py (cuda against numpy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Doubles, Floats, Ints

if TYPE_CHECKING:
    import torch

GROUP = 256  # values that share a scale in the payloads of encode_int8 and encode_fp16
GROUP_OF_WEIGHTS = 512  # neighbours whose distance from the shared weights is one norm
PIECE = 1024  # most neighbours whose sum piece_sums() makes
HIDDEN = 8  # hidden units of a net that predicts importance

Vector = Any

# The gradients of one step, one entry per parameter: the address of its dense memory (0: no gradient), where the parameter
# ends in the flat vector, and its element kind (mpisparse.backends.kinds).
Pointers = NDArray[np.uint64]
Ends = Ints
Kinds = Bytes

Rows = Sequence[tuple[Vector, Vector]]  # scales and codes of each rank

# Candidates: ascending flat indices, their magnitudes, and the first non-finite flat index or -1.
Found = tuple[Vector, Vector, int]


class CodeForm(NamedTuple):
    """Form of the payloads of int4, int2 and sign: values that share a bfloat16 scale, and bits of a value's code."""

    group: int
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes of a group's codes: byte j holds those of values j, j + nbytes, j + 2 nbytes, ..., the first one lowest."""
        return self.group * self.bits // 8


FEW_BITS = {"int4": CodeForm(64, 4), "int2": CodeForm(64, 2), "sign": CodeForm(128, 1)}


class Backend(Protocol):
    """Kernels and the arrays they work on.

    `acc` is the accumulator: the flat float32 vector of residual plus gradients. `index` is an ascending int64 vector of
    flat indices without duplicates. An element reaches a floor if it is not below it, so NaN always does.
    """

    @property
    def name(self) -> str: ...

    def use_threads(self, count: int, /) -> None:
        """Set how many threads kernels may use from now on, for the whole process. Results do not depend on it.

        The step passes torch.get_num_threads() on, once; a device ignores it.
        """
        ...

    # Arrays

    def empty(self, count: int, dtype: Any, /) -> Vector:
        """Allocate without initializing."""
        ...

    def array_of(self, tensor: torch.Tensor, /) -> Vector:
        """View a flat float32 tensor of the backend's device, on the same memory."""
        ...

    def from_host(self, values: NDArray[Any], /) -> Vector:
        """Return a NumPy array in the backend's memory; host backends return it unchanged."""
        ...

    def to_host(self, array: Vector, /) -> NDArray[Any]:
        """Return a vector as a NumPy array; host backends return it unchanged."""
        ...

    # NumPy arrays and torch tensors agree on len, slices, assignment to slices, nbytes and itemsize. What they spell
    # differently goes through the backend:

    def copy(self, array: Vector, /) -> Vector:
        """Return the same values in memory of their own."""
        ...

    def fill(self, array: Vector, value: float, /) -> None:
        """Set all elements."""
        ...

    def view_as(self, array: Vector, dtype: Any, /) -> Vector:
        """View the same memory as elements of another NumPy type."""
        ...

    # Passes over the flat vector

    def accumulate_select(
        self, acc: Vector, pointers: Pointers, ends: Ends, kinds: Kinds, lo: int, hi: int, floor: float, /
    ) -> Found:
        """Add the gradients into acc and collect the elements of acc[lo:hi] that reach the floor, in one pass."""
        ...

    def average_select(
        self, acc: Vector, average: Vector, rate: float, pointers: Pointers, ends: Ends, kinds: Kinds, lo: int, hi: int,
        floor: float, /,
    ) -> Found:  # fmt: skip
        """Add the gradients into acc, update average = rate x |gradient| + (1 - rate) x average, and collect the elements
        of average[lo:hi] that reach the floor."""
        ...

    def select(self, acc: Vector, lo: int, hi: int, floor: float, /) -> Found:
        """Collect the elements of acc[lo:hi] that reach the floor."""
        ...

    def accumulate(self, acc: Vector, pointer: int, kind: int, /) -> int:
        """Add one gradient into its slice of the accumulator; return the first non-finite index or -1.

        Asynchronous devices always return -1 and report through late_nonfinite().
        """
        ...

    def late_nonfinite(self, acc: Vector, /) -> int:
        """Return the lowest non-finite index that accumulate() met but did not report since the last call, or -1."""
        ...

    def first_nonfinite(self, pointers: Pointers, ends: Ends, kinds: Kinds, /) -> int:
        """Return the first non-finite flat index of the gradients, or -1; changes nothing."""
        ...

    # Selection by predicted importance: `scores` holds a byte per element, `key` says how it combines with the magnitude
    # (mpisparse.backends.keys)

    def accumulate_select_scored(
        self, acc: Vector, scores: Vector, key: int, pointers: Pointers, ends: Ends, kinds: Kinds, lo: int, hi: int,
        floor: float, /,
    ) -> Found:  # fmt: skip
        """As accumulate_select, by key instead of magnitude."""
        ...

    def select_scored(self, acc: Vector, scores: Vector, key: int, lo: int, hi: int, floor: float, /) -> Found:
        """As select, by key instead of magnitude."""
        ...

    def histogram_scored(self, acc: Vector, scores: Vector, key: int, lo: int, hi: int, /) -> Ints:
        """As histogram, of keys."""
        ...

    def record(self, pointers: Pointers, ends: Ends, kinds: Kinds, lo: int, out: Vector, /) -> None:
        """Write the gradients of [lo, lo + len(out)) as finite bfloat16; absent ones are zero."""
        ...

    def gather(self, pointers: Pointers, ends: Ends, kinds: Kinds, index: Vector, out: Vector, /) -> None:
        """Write the gradients at ascending indices; absent ones are zero."""
        ...

    def bytes_at(self, values: Vector, index: Vector, /) -> Vector:
        """Return a copy of the bytes at index."""
        ...

    def put_bytes(self, values: Vector, index: Vector, new: Vector, /) -> None:
        """Set the bytes at index."""
        ...

    # Counts

    def histogram(self, acc: Vector, lo: int, hi: int, /) -> Ints:
        """Count the magnitudes in acc[lo:hi] in 2048 bins, by exponent and three bits of mantissa."""
        ...

    def piece_sums(self, values: Vector, begins: Ints, ends: Ints, /) -> Doubles:
        """Sum the magnitudes of each piece [begins[i], ends[i]) of at most PIECE neighbours, and their squares, in float64.

        Two numbers for each piece. Its halves, filled up with zeros, are added until one number is left.
        """
        ...

    def tail_counts(self, magnitudes: Vector, rungs: Floats, /) -> Ints:
        """Count, for each rung (ascending), the magnitudes that reach it; NaN reaches none."""
        ...

    def block_counts(self, index: Vector, magnitude: Vector, threshold: float, edges: Ints, /) -> Ints:
        """Count the candidates that reach the threshold in each block; block b is [edges[b], edges[b + 1])."""
        ...

    def search(self, index: Vector, values: Ints, /) -> Ints:
        """Return where each value would be inserted into the index, before equal ones."""
        ...

    def pick(self, index: Vector, places: Ints, /) -> Ints:
        """Return the elements of an index at some places."""
        ...

    # Indices as compressed sparse rows: uint32 counts per row, uint16 columns

    def compress_rows(
        self, index: Vector, magnitude: Vector, threshold: float, lo: int, row: int, rows: int, /
    ) -> tuple[Vector, Vector]:
        """Return row counts and columns of the candidates that reach the threshold; row 0 starts at lo."""
        ...

    def expand_rows(self, counts: Vector, columns: Vector, lo: int, row: int, out: Vector, /) -> bool:
        """Write the flat indices of compressed rows to out; False if the counts do not add up to its length."""
        ...

    # Indices as Golomb-Rice codes (mpisparse.backends.gaps); NumPy arrays for every backend

    def encode_indices(self, index: Ints, lo: int, hi: int, /) -> Bytes:
        """Return ascending indices of [lo, hi) as bytes."""
        ...

    def decode_indices(self, payload: Bytes, lo: int, hi: int, out: Ints, /) -> int:
        """Write the indices to out; return how many bytes they took, or -1 if the message is damaged."""
        ...

    # Counts as bytes, and borders between partitions (mpisparse.backends.numpy_tallies); NumPy arrays for every backend

    def encode_counts(self, counts: Ints, /) -> Bytes:
        """Return counts as bytes."""
        ...

    def decode_counts(self, payload: Bytes, total: int, out: Ints, /) -> bool:
        """Write the counts, whose sum is `total`, to out; False if the message is damaged."""
        ...

    def encode_falling(self, counts: Ints, above: int, payload: Bytes, /) -> None:
        """Write counts that fall from one to the next, as what lies between two of them, with zeros behind."""
        ...

    def decode_falling(self, payload: Bytes, total: int, above: int, out: Ints, /) -> bool:
        """Write falling counts to out: `above` lies above the last, `total` below that; False if damaged."""
        ...

    def least_borders(
        self, work: Sequence[Ints], edges: Ints, limit: int, rooms: Sequence[int], unit: int, low: int, high: int, /
    ) -> Ints:
        """Find the borders that make the heaviest part lightest; low and high enclose the bound on it."""
        ...

    # Reads and writes at an index

    def values_at(self, acc: Vector, index: Vector, /) -> Vector:
        """Return a copy of the values at index."""
        ...

    def take(self, acc: Vector, index: Vector, out: Vector, /) -> None:
        """Move the values at index to out, leaving zeros in acc."""
        ...

    def put(self, acc: Vector, index: Vector, values: Vector, /) -> None:
        """Set the values at index."""
        ...

    def add_at(self, acc: Vector, index: Vector, values: Vector, /) -> None:
        """Add to the values at index."""
        ...

    def zero_at(self, address: int, kind: int, count: int, index: Vector, /) -> None:
        """Clear the elements at index in a published buffer of `count` elements of a kind."""
        ...

    def publish_at(self, address: int, kind: int, count: int, index: Vector, values: Vector, /) -> None:
        """Write values at index in a published buffer, rounded to its kind; `values` becomes the rounding error."""
        ...

    def add(self, total: Vector, term: Vector, /) -> None:
        """Add a term to a sum in place."""
        ...

    def divide(self, values: Vector, by: float, /) -> None:
        """Divide in place by a number rounded to float32."""
        ...

    # Momentum between steps (mpisparse.core.blend)

    def blend(
        self, index: Vector, values: Vector, carried: Vector, previous: Vector, share: float, /
    ) -> tuple[Vector, Vector, Vector]:
        """Mix share x value + (1 - share) x previous at the union of two indices.

        Returns the union, the mixed values, and a byte per element: 1 if it is in the first index.
        """
        ...

    def drop_decayed(
        self, acc: Vector, index: Vector, values: Vector, selected: Vector, mean: Vector, left: Vector, pending: float, /
    ) -> tuple[Vector, Vector]:
        """Drop elements whose momentum has decayed: not selected, and their mean over ranks is zero.

        Their unsent momentum, pending x value, is added to `left`, then `left` into acc at index. Returns index and values
        of the other elements.
        """
        ...

    # Value codecs: each encoder leaves in x what it did not send

    def encode_int8(self, x: Vector, scales: Vector, q: Vector, /) -> None: ...
    def decode_int8(self, scales: Vector, q: Vector, x: Vector, /) -> None: ...
    def encode_fp16(self, x: Vector, scales: Vector, h: Vector, /) -> None: ...
    def decode_fp16(self, scales: Vector, h: Vector, x: Vector, /) -> None: ...
    def encode_bf16(self, x: Vector, h: Vector, /) -> None: ...
    def decode_bf16(self, h: Vector, x: Vector, /) -> None: ...

    # FEW_BITS has their form. The last group's codes end after min(values, nbytes) bytes; missing values count as zeros.
    # pack_* write what encode_* write, but leave x as it is.

    def encode_int4(self, x: Vector, scales: Vector, codes: Vector, /) -> None: ...
    def pack_int4(self, x: Vector, scales: Vector, codes: Vector, /) -> None: ...
    def decode_int4(self, scales: Vector, codes: Vector, x: Vector, /) -> None: ...
    def encode_int2(self, x: Vector, scales: Vector, codes: Vector, /) -> None: ...
    def pack_int2(self, x: Vector, scales: Vector, codes: Vector, /) -> None: ...
    def decode_int2(self, scales: Vector, codes: Vector, x: Vector, /) -> None: ...
    def encode_sign(self, x: Vector, scales: Vector, codes: Vector, /) -> None: ...
    def pack_sign(self, x: Vector, scales: Vector, codes: Vector, /) -> None: ...
    def decode_sign(self, scales: Vector, codes: Vector, x: Vector, /) -> None: ...

    # Decode and add, or subtract, in one pass: the bits of decode, then add

    def add_int8(self, scales: Vector, q: Vector, total: Vector, /) -> None: ...
    def add_fp16(self, scales: Vector, h: Vector, total: Vector, /) -> None: ...
    def add_bf16(self, h: Vector, total: Vector, /) -> None: ...
    def add_int4(self, scales: Vector, codes: Vector, total: Vector, /) -> None: ...
    def add_int2(self, scales: Vector, codes: Vector, total: Vector, /) -> None: ...
    def add_sign(self, scales: Vector, codes: Vector, total: Vector, /) -> None: ...
    def subtract_int4(self, scales: Vector, codes: Vector, total: Vector, /) -> None: ...
    def subtract_int2(self, scales: Vector, codes: Vector, total: Vector, /) -> None: ...
    def subtract_sign(self, scales: Vector, codes: Vector, total: Vector, /) -> None: ...

    # An owner's part of a reduction: left = sum of the rows, in order, / by + error; encode it. Returns the first index that
    # is not finite (then left, scales and codes mean nothing), or -1; a device returns it as a vector, without waiting.

    def settle_int4(self, rows: Rows, by: float, error: Vector, left: Vector, scales: Vector, codes: Vector, /) -> Any: ...
    def settle_int2(self, rows: Rows, by: float, error: Vector, left: Vector, scales: Vector, codes: Vector, /) -> Any: ...
    def settle_sign(self, rows: Rows, by: float, error: Vector, left: Vector, scales: Vector, codes: Vector, /) -> Any: ...


class DeviceBackend(Backend, Protocol):
    """What only a device does: launches are few if they do much."""

    def hindrance(self) -> str:
        """Return why nothing can be done now, or an empty text."""
        ...

    def accumulate_soon(self, acc: Vector, source: torch.Tensor, kind: int, /) -> int:
        """As accumulate, of a tensor; several small ones are added together, by flush() at the latest."""
        ...

    def flush(self, acc: Vector, /) -> None:
        """Add the gradients that wait to be added to the memory of which acc is a part."""
        ...

    def copied(self, array: Vector, /) -> Callable[[], NDArray[Any]]:
        """Begin to copy a vector to the host; what is returned waits for that and gives it, on any thread."""
        ...

    def neighbours(self, blocks: Ints, width: int, skip: int, count: int, /) -> Vector:
        """Return `count` elements of blocks of `width` neighbours one behind the other, from number `skip` on."""
        ...

    # Without waiting for the device: what the host would ask for stays there, or is told with the next summary

    def pack_rows(
        self, index: Vector, magnitude: Vector, threshold: float, lo: int, row: int, counts: Vector, columns: Vector, /
    ) -> None:
        """As compress_rows, into vectors; `columns` is as long as there are candidates that reach the threshold."""
        ...

    def unpack_rows(self, counts: Vector, columns: Vector, lo: int, hi: int, row: int, out: Vector, /) -> None:
        """As expand_rows, of indices below hi. If the message is damaged all are `lo`, and the next summary raises."""
        ...

    def forget_damage(self) -> None:
        """Tell nothing of messages that were damaged so far: they are sent again."""
        ...

    def first_bad(self, values: Vector, /) -> Vector:
        """Return the first index that is not finite or -1, as a vector of one int64."""
        ...

    def spoil(self, payload: Vector, value: int, bad: Vector, /) -> None:
        """Set all bytes of a payload to a value if first_bad() found an index."""
        ...


class HostBackend(Backend, Protocol):
    """What only the host backends do: a look ahead, training of nets that predict importance, checksums.

    `history` holds rows of bfloat16 gradients, oldest first, then one row of the accumulator.
    """

    def peek_select(
        self, acc: Floats, pointers: Pointers, ends: Ends, kinds: Kinds, lo: int, hi: int, floor: float, /
    ) -> Found:
        """What accumulate_select would find in acc[lo:hi]; reads no more than that, and adds nothing."""
        ...

    # Weights, as pieces of float32, against a flat reference

    def select_apart(
        self, pointers: Pointers, ends: Ends, kinds: Kinds, reference: Floats, lo: int, hi: int, floor: float, /
    ) -> Found:
        """Collect the elements of [lo, hi) whose weights are at least `floor` apart from the reference.

        Watches these differences and all weights for non-finite values; elsewhere the reference is not read.
        """
        ...

    def group_norms(self, pointers: Pointers, ends: Ends, kinds: Kinds, reference: Floats, norms: Floats, /) -> int:
        """Write how far apart each group of 512 neighbours is, as a norm; return the first non-finite index or -1."""
        ...

    def histogram_apart(self, pointers: Pointers, ends: Ends, kinds: Kinds, reference: Floats, lo: int, hi: int, /) -> Ints:
        """As histogram, of weights minus reference."""
        ...

    def subtract_apart(
        self, pointers: Pointers, ends: Ends, kinds: Kinds, reference: Floats, lo: int, out: Floats, /
    ) -> None:
        """Write weights minus reference of [lo, lo + len(out))."""
        ...

    def values_apart(self, pointers: Pointers, ends: Ends, kinds: Kinds, reference: Floats, index: Ints, /) -> Floats:
        """Return weights minus reference at ascending indices."""
        ...

    def move_apart(
        self, pointers: Pointers, ends: Ends, kinds: Kinds, reference: Floats, index: Ints, mean: Floats, own: Floats, /
    ) -> None:
        """Add the mean to the reference at ascending indices, and mean - own to the weights."""
        ...

    def add_stretch(self, pointers: Pointers, ends: Ends, kinds: Kinds, lo: int, values: Floats, /) -> None:
        """Add to the weights of [lo, lo + len(values))."""
        ...

    def divide_into(self, out: Floats, pointers: Pointers, ends: Ends, kinds: Kinds, by: float, /) -> int:
        """Write the gradients divided by a number; absent ones are zero. Return the first non-finite index or -1."""
        ...

    # Long vectors in few bits (codec: a name of FEW_BITS): a payload for each chunk of values, one behind the other. Chunks
    # are a multiple of 2048 values long, but for the last one (mpisparse.backends.payloads).

    def decode_chunks(self, codec: str, payload: Bytes, chunk: int, x: Floats, /) -> None:
        """Decode the payloads of all chunks of x."""
        ...

    def settle_chunks(
        self, codec: str, rows: Sequence[Bytes], chunk: int, by: float, error: Floats, left: Floats, payload: Bytes, /
    ) -> int:
        """As settle_*, for all chunks of `left`. `error` is only read."""
        ...

    def accumulate_chunks(
        self, codec: str, acc: Floats, pointers: Pointers, ends: Ends, kinds: Kinds, borders: Ints, chunk: int,
        payload: Bytes, /,
    ) -> int:  # fmt: skip
        """Add the gradients into acc and encode the sums, of which what is not sent stays in acc.

        Chunks begin anew at each border; the first border is 0, the last one the number of elements. Returns the first index
        that is not finite (then acc and payload mean nothing), or -1.
        """
        ...

    def predict(self, history: Any, nets: Floats, inverse: Floats, ends: Ints, depth: int, out: Bytes, /) -> None:
        """Score elements by their layers' nets: importance in (0, 1) in steps of 1 / 255."""
        ...

    def learn(
        self, nets: Floats, mean: Floats, square: Floats, history: Any, inverse: Floats, ends: Ints, depth: int,
        magnitude: Floats, pairs: Ints, weights: Floats, batch: int, rate: float, corrections: Floats, /,
    ) -> None:  # fmt: skip
        """Train the nets with Adam to rank the first element of each pair above the second."""
        ...

    def reaching(self, index: Ints, magnitude: Floats, threshold: float, /) -> Ints:
        """Return the candidates that reach a threshold."""
        ...

    def by_owner(self, index: Ints, block: int, size: int, rank: int, /) -> tuple[Ints, Ints, Ints]:
        """Deal an ascending index out to `size` owners: each has every size-th block of `block` elements, a power of two.

        Returns the places of the index in the order of their owners, how many each owner has, and where `rank` keeps its
        elements: its blocks one behind the other.
        """
        ...

    def fletcher32(self, data: Bytes, /) -> int:
        """HDF5's checksum."""
        ...
