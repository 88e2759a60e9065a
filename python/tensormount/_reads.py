# SPDX-License-Identifier: Apache-2.0
"""Reads of boxes: the parts of large boxes, and the memory of `out`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Union

from tensormount import _index
from tensormount.errors import InvalidArgumentError, UnsupportedIndexError

# A larger read is made in several calls of the library. Python runs signal handlers (Ctrl-C) between them.
PART_BYTES = 128 << 20

# Begin and extent of a box, and the offset of its first byte in the memory that it is read into.
Part = tuple[tuple[int, ...], tuple[int, ...], int]


def parts(
    begin: tuple[int, ...], extent: tuple[int, ...], strides: tuple[int, ...], bits: int
) -> Iterator[Part]:
    """Cuts a box into boxes of at most PART_BYTES, in row-major order.

    strides: those of the memory that it is read into, in elements. Elements of less than a byte are cut only
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
    grain = 8 // math.gcd(8, strides[axis] * bits)  # A multiple of `grain` begins at a byte.
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
    """The strides of a packed row-major array, in elements."""
    return tuple(math.prod(extent[axis + 1 :]) for axis in range(len(extent)))


def run(plan: _index.Plan, shape: tuple[int, ...], key: str) -> tuple[int, int]:
    """First element and number of elements of a box that is one run in row-major order. UnsupportedIndexError:
    it is not one run."""
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
    raise UnsupportedIndexError(f"{key}: the index does not select one contiguous run of elements; read it instead")


class Memory(NamedTuple):
    """The memory of an `out`. `number`: its dtype, as in c.h; `strides` in elements."""

    out: Any
    number: int
    shape: tuple[int, ...]
    address: int
    strides: tuple[int, ...]
    torch: bool

    @classmethod
    def of(cls, out: Any, key: str) -> Memory:
        """Checks `out` as a load checks its destinations (`registry.destination`)."""
        from tensormount._leaves import registry

        torch = hasattr(out, "data_ptr") and hasattr(out, "stride")
        if not torch and not hasattr(out, "__array_interface__"):
            raise InvalidArgumentError(
                f"{key}: out is a {type(out).__name__}, not a NumPy array or a torch tensor"
            )
        shard = registry.destination(key, out)
        strides = packed(shard.extent) if shard.strides is None else shard.strides
        return cls(out, shard.dtype, shard.extent, shard.address, strides, torch)

    def assign(self, values: Any) -> None:
        self.out[...] = values


def strides_of(
    plan: _index.Plan, memory: Memory, index: Any, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The stride in `out` for each axis of the box. An axis with an integer index does not exist in `out` and
    gets 1; new axes (None) are skipped."""
    items = index if isinstance(index, tuple) else (index,)
    named = sum(1 for item in items if item is not None and item is not Ellipsis)
    strides: list[int] = []
    at = 0  # Axis of `out`.
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


def named_reads(wanted: Union[Mapping[str, Any], Iterable[str]]) -> Mapping[str, Any]:
    """The reads of `read_many`: name of the result to key, or to (key, index)."""
    if isinstance(wanted, Mapping):
        return wanted
    keys = [] if isinstance(wanted, (str, bytes)) else list(wanted)
    if isinstance(wanted, (str, bytes)) or not all(isinstance(key, str) for key in keys):
        raise InvalidArgumentError(
            f"read_many({wanted!r}): a list of keys, or a dict of names to keys or (key, index), was "
            "expected"
        )
    return {key: key for key in keys}
