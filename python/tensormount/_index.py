# SPDX-License-Identifier: Apache-2.0
"""Basic indexing as in NumPy: converts an index to the box that is read. Imports no NumPy."""

from __future__ import annotations

from operator import index as _as_int
from typing import Any, NamedTuple, Optional

from tensormount.errors import OutOfRangeError, UnsupportedIndexError


class Plan(NamedTuple):
    begin: tuple[int, ...]  # First cell of the box; one number for each axis of the tensor.
    extent: tuple[int, ...]
    steps: Optional[tuple[int, ...]]  # Steps within the box, for each axis; None: all are 1.
    shape: tuple[int, ...]  # The shape of the result.
    scalar: bool  # The index is one integer for each axis, nothing else: the result is a scalar.


def whole(shape: tuple[int, ...]) -> Plan:
    return Plan((0,) * len(shape), shape, None, shape, False)


def plan(index: Any, shape: tuple[int, ...]) -> Plan:
    """The box of a tensor of `shape` that `index` selects.

    An index has integers, slices with positive steps, `...` and None (a new axis). Slices are clipped, as in
    Python. A slice with a step above 1 reads the whole box that it spans; the result is a part of that box.

    OutOfRangeError: an integer is out of range, or there are too many. UnsupportedIndexError: any other index.
    """
    items = index if type(index) is tuple else (index,)
    axes = len(shape)
    if len(items) == 1 and type(items[0]) is slice and axes and items[0].step is None:
        # Fast path for rows, the most frequent index: in small reads planning takes a noticeable part of the time.
        first, last, _ = _slice(items[0], shape[0])
        count = last - first if last > first else 0
        extent = (count,) + shape[1:]
        return Plan((first if count else 0,) + (0,) * (axes - 1), extent, None, extent, False)
    return _general(items, shape, axes)


def _general(items: Any, shape: tuple[int, ...], axes: int) -> Plan:
    begin: list[int] = []
    extent: list[int] = []
    steps: list[int] = []
    result: list[int] = []
    stepped = False
    ellipsis_seen = False
    scalar = True
    at = 0
    for number, item in enumerate(items):
        kind = type(item)
        if kind is slice:
            if at >= axes:
                raise _too_many(items, axes)
            first, last, step = _slice(item, shape[at])
            count = max(0, -(-(last - first) // step))
            span = (count - 1) * step + 1 if count else 0
            begin.append(first if count else 0)
            extent.append(span)
            steps.append(step)
            if step != 1:
                stepped = True
            result.append(count)
            scalar = False
            at += 1
        elif item is Ellipsis:
            if ellipsis_seen:
                raise UnsupportedIndexError("an index can have at most one ellipsis (...)")
            ellipsis_seen = True
            scalar = False
            later = sum(1 for other in items[number + 1 :] if other is not None
                        and other is not Ellipsis)
            if at + later > axes:
                raise _too_many(items, axes)
            for size in shape[at : axes - later]:
                begin.append(0)
                extent.append(size)
                steps.append(1)
                result.append(size)
            at = axes - later
        elif item is None:
            result.append(1)
            scalar = False
        else:
            if at >= axes and _is_integer(item):
                raise _too_many(items, axes)
            position = _integer(item)
            size = shape[at]
            if not -size <= position < size:
                raise OutOfRangeError(
                    f"index {position} is out of range of axis {at}, which has {size} elements"
                )
            begin.append(position + size if position < 0 else position)
            extent.append(1)
            steps.append(1)
            at += 1
    if at < axes:
        scalar = False
        for size in shape[at:]:
            begin.append(0)
            extent.append(size)
            steps.append(1)
            result.append(size)
    return Plan(
        tuple(begin), tuple(extent), tuple(steps) if stepped else None, tuple(result), scalar
    )


def _slice(item: slice, size: int) -> tuple[int, int, int]:
    step = item.step
    if step is None or step == 1:
        if item.start is None and item.stop is None:
            return 0, size, 1
    elif _is_integer(step) and _as_int(step) < 0:
        raise UnsupportedIndexError(
            f"the negative step {step} is not supported in a slice: read forwards, and reverse the array"
        )
    try:
        return item.indices(size)
    except TypeError as error:
        raise UnsupportedIndexError(f"the bounds of a slice must be integers: {error}") from None
    except ValueError as error:
        raise UnsupportedIndexError(str(error)) from None


def _is_integer(item: Any) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool)


def _integer(item: Any) -> int:
    kind = type(item)
    if kind is int:
        return int(item)
    name = kind.__name__
    if kind is bool or name in ("bool_", "bool"):
        raise UnsupportedIndexError("boolean indexing is not supported: read the box, and index the array")
    if kind is list or (hasattr(item, "shape") and getattr(item, "shape") != ()):
        raise UnsupportedIndexError(
            f"indexing by a {name} (fancy or boolean) is not supported: read the box, and index the array"
        )
    try:
        return _as_int(item)
    except TypeError:
        raise UnsupportedIndexError(
            f"indexing by a {name} is not supported: use integers, slices, ... and None"
        ) from None


def _too_many(items: Any, axes: int) -> OutOfRangeError:
    named = sum(1 for item in items if item is not None and item is not Ellipsis)
    return OutOfRangeError(f"{named} indices for a tensor of {axes} axes")
