"""The format of coded indices: Golomb-Rice codes of the gaps between them.

A gap is the number of elements between an index and the one before it, or the start of the region. Its `low` lowest bits are
written as they are; the rest, the quotient, as so many zeros and a one. A message without indices is empty. Others are

    one byte     0: all gaps have the parameter low_bits(); 1: each group of 128 has its own
    parameters   one byte per group, where groups have their own
    low bits     of all gaps
    quotients    of all gaps; in groups, one of 32 or more is written as 32
    escapes      the quotients of 32 or more, in as many bits as the length of the region has

Bits fill bytes from the lowest on. Of the two ways the shorter is taken. The first has a bound that follows from the count
and the length of the region (most_nbytes): about 2 + log2(length / count) bits per index. Uniformly random positions take
half a bit less. 16-bit columns and four bytes per row of 65,536 are always more than the bound.
"""

from __future__ import annotations

GROUP = 128
ESCAPE = 32
MOST_LOW = 31
PLAIN, GROUPED = 0, 1


def low_bits(count: int, length: int) -> int:
    """The parameter with the least bound for so many indices in a region."""
    return min(MOST_LOW, max(0, ((length - count) // count).bit_length() - 1))


def most_nbytes(count: int, length: int) -> int:
    """Bytes that so many indices in a region take at most, wherever they are."""
    if count == 0:
        return 0
    low = low_bits(count, length)
    return 1 + -(-(count * (1 + low) + ((length - count) >> low)) // 8)
