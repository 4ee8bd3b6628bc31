"""Tensors in tiles, each transformed by a discrete cosine transform (DCT-II, orthonormal) as a product of matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mpisparse.backends.flat import Slot
from mpisparse.select.chunks import Chunks

NOTHING = 1e-12  # a smaller cosine is a rounded zero


class Block(NamedTuple):
    """Tiles of height x width that fill a rectangle of one tensor; their coefficients begin at `at`.

    [begin, end): the tensor's place in the flat vector, of rows of `columns` elements.
    """

    begin: int
    end: int
    columns: int
    rows_at: slice
    columns_at: slice
    height: int
    width: int
    at: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.rows * int(self.columns_at.stop - self.columns_at.start)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.rows_at.stop - self.rows_at.start)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The rectangle in a flat vector, in tiles: down, across, height, width."""
        rectangle = flat[self.begin : self.end].view(-1, self.columns)[self.rows_at, self.columns_at]
        tiles = (self.rows // self.height, rectangle.shape[1] // self.width, self.height, self.width)
        strides = (self.columns * self.height, self.width, self.columns, 1)
        return rectangle.as_strided(tiles, strides, rectangle.storage_offset())

    def coefficients(self, flat: torch.Tensor) -> torch.Tensor:
        """The same tiles in a vector of coefficients, where they are contiguous."""
        part = flat[self.at : self.at + self.size]
        return part.view(self.rows // self.height, -1, self.height, self.width)


class Cosines:
    """The transform of all tensors of a flat vector, and back. chunk: the largest height and width of a tile."""

    def __init__(self, slots: Sequence[Slot], chunk: int) -> None:
        self.blocks = list(_blocks(slots, chunk))
        self.stretches = [Chunks(b.at, b.at + b.size, b.height * b.width) for b in self.blocks]

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        """The coefficients of a vector."""
        out = torch.empty_like(flat)
        for block in self.blocks:
            down, across = (basis(size, flat.dtype, flat.device) for size in (block.height, block.width))
            block.coefficients(out).copy_(down @ block.view(flat) @ across.T)
        return out

    def inverse(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The vector that has these coefficients."""
        out = torch.empty_like(coefficients)
        for block in self.blocks:
            down, across = (basis(size, out.dtype, out.device) for size in (block.height, block.width))
            block.view(out).copy_(down.T @ block.coefficients(coefficients) @ across)
        return out


@functools.cache
def basis(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The matrix whose product with a column of `size` elements is its transform."""
    wave = torch.arange(size, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi / size * torch.outer(wave, wave + 0.5)) * math.sqrt(2.0 / size)
    matrix[0] /= math.sqrt(2.0)
    matrix[matrix.abs() < NOTHING] = 0.0
    return matrix.to(device, dtype)


def _blocks(slots: Sequence[Slot], chunk: int) -> Iterator[Block]:
    """Cut tensors of several dimensions into squares of side `chunk`, vectors into pieces of it; the rest is smaller."""
    for slot in slots:
        sizes = [slot.shape[i] for i in sorted(range(len(slot.shape)), key=lambda i: -slot.stride[i])]  # as in memory
        count = slot.end - slot.begin
        rows = sizes[0] if len(sizes) > 1 else min(1, count)
        columns, at = count // max(1, rows), slot.begin
        for rows_at, height in _cuts(rows, chunk):
            for columns_at, width in _cuts(columns, chunk):
                block = Block(slot.begin, slot.end, columns, rows_at, columns_at, height, width, at)
                at += block.size
                yield block


def _cuts(size: int, chunk: int) -> Iterator[tuple[slice, int]]:
    """Cut a length into pieces of `chunk` and a remainder."""
    whole = size // chunk * chunk
    if whole:
        yield slice(0, whole), chunk
    if size > whole:
        yield slice(whole, size), size - whole
