# SPDX-License-Identifier: Apache-2.0
"""What a read of a box goes through: parts of large boxes, and the memory that they are read into."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensormount import _index, _shards
from tensormount.errors import InvalidArgumentError, UnsupportedIndexError

# A larger read is one call of the library after the other: Python runs signal handlers, as that of
# Ctrl-C, between them.
PART_BYTES = 128 << 20

# A box and the first byte of it in memory.
Part = tuple[tuple[int, ...], tuple[int, ...], int]


def parts(
    begin: tuple[int, ...], extent: tuple[int, ...], strides: tuple[int, ...], bits: int
) -> Iterator[Part]:
    """Boxes of at most PART_BYTES that are the box together, in the order of rows.

    strides: of the memory that it is read into, in elements. Elements of less than a byte are cut
    where a byte begins.
    """
    yield from _cut(begin, extent, strides, 0, bits, 0)


def _cut(
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    strides: tuple[int, ...],
    axis: int,
    bits: int,
    at: int,
) -> Iterator[Part]:
    while axis < len(extent) and extent[axis] == 1:
        axis += 1
    most = PART_BYTES * 8 // bits
    inner = math.prod(extent[axis + 1 :])
    if axis == len(extent) or extent[axis] * inner <= most:
        yield begin, extent, at * bits // 8
        return
    grain = 8 // math.gcd(8, strides[axis] * bits)  # Elements along the axis in whole bytes.
    step = max(1, most // inner // grain) * grain
    for first in range(0, extent[axis], step):
        count = min(step, extent[axis] - first)
        some_begin = (*begin[:axis], begin[axis] + first, *begin[axis + 1 :])
        some_extent = (*extent[:axis], count, *extent[axis + 1 :])
        offset = at + first * strides[axis]
        if count == 1:
            yield from _cut(some_begin, some_extent, strides, axis + 1, bits, offset)
        else:
            yield some_begin, some_extent, offset * bits // 8


def packed(extent: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of rows that follow each other."""
    return tuple(math.prod(extent[axis + 1 :]) for axis in range(len(extent)))


def run(plan: _index.Plan, shape: tuple[int, ...], key: str) -> tuple[int, int]:
    """First element and number of elements of a box, where it is one run in the order of rows."""
    if 0 in plan.extent:
        return 0, 0
    offset, count, stride, whole = 0, 1, 1, True
    for begin, extent, size in zip(reversed(plan.begin), reversed(plan.extent), reversed(shape)):
        if extent > 1 and not whole:
            break
        offset += begin * stride
        count *= extent
        stride *= size
        whole = whole and extent == size
    else:
        if plan.steps is None:
            return offset, count
    raise UnsupportedIndexError(f"{key}: that is no run of rows, and can only be read")


class Memory(NamedTuple):
    """Where the elements of an `out` are; numbers of elements of the stored type."""

    out: Any
    number: int
    shape: tuple[int, ...]
    address: int
    strides: tuple[int, ...]
    torch: bool

    @classmethod
    def of(cls, out: Any, key: str) -> Memory:
        """What a load checks of memory that it writes to holds here, too (`_shards.describe`)."""
        torch = hasattr(out, "data_ptr") and hasattr(out, "stride")
        if not torch and not hasattr(out, "__array_interface__"):
            raise InvalidArgumentError(
                f"{key}: out is a {type(out).__name__}: a NumPy array or a torch tensor is possible"
            )
        shard = _shards.destination(key, out)
        strides = packed(shard.extent) if shard.strides is None else shard.strides
        return cls(out, shard.dtype, shard.extent, shard.address, strides, torch)

    def assign(self, values: Any) -> None:
        self.out[...] = values


def strides_of(
    plan: _index.Plan, memory: Memory, index: Any, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Of each axis of the box in `out`: an axis that an integer named has none, a new axis counts
    for nothing."""
    items = index if isinstance(index, tuple) else (index,)
    named = sum(1 for item in items if item is not None and item is not Ellipsis)
    strides: list[int] = []
    at = 0  # Axis of out.
    seen = False
    for item in items:
        if item is None:
            at += 1
        elif item is Ellipsis:
            seen = True
            for _ in range(len(shape) - named):
                strides.append(memory.strides[at])
                at += 1
        elif isinstance(item, slice):
            strides.append(memory.strides[at])
            at += 1
        else:
            strides.append(1)
    if not seen:
        strides.extend(memory.strides[at:])
    return tuple(strides)
