# SPDX-License-Identifier: Apache-2.0
"""Arrays of NumPy."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, List, Optional, Sequence, Tuple

from tensormount._dtypes import all_dtypes
from tensormount._leaves.base import ArrayKind, Facts, shared, type_name
from tensormount._shards import LOAD, UNLABELLED, VALIDATE, Dims, Shard, distinct
from tensormount.errors import LayoutError, UnsupportedError

# The number in c.h for each name of NumPy. Types under a byte are left out, because each of their elements takes a
# whole byte in NumPy.
_NUMBERS = {row.numpy: row.number for row in all_dtypes() if row.bits % 8 == 0}
_NO_BYTES = ctypes.c_char * 0


class NumpyKind(ArrayKind):
    plain = True

    def recognises(self, kind: type) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and issubclass(kind, numpy.ndarray)

    def exact(self) -> Tuple[type, ...]:
        numpy = sys.modules.get("numpy")
        return (numpy.ndarray, numpy.memmap) if numpy is not None else ()

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        if type(leaf) not in self.exact():
            raise UnsupportedError(
                f"tensor {key}: {type_name(leaf)} cannot be stored, because it has more than its elements; "
                "pass numpy.asarray(...)"
            )
        dtype = leaf.dtype
        number = _NUMBERS.get(dtype.name)
        if number is None or dtype.names is not None or dtype.subdtype is not None:
            raise UnsupportedError(f"tensor {key}: NumPy arrays of {dtype} cannot be stored")
        if not dtype.isnative:
            raise UnsupportedError(
                f"tensor {key}: big-endian arrays ({dtype.str}) cannot be stored; "
                "convert with .astype(dtype.newbyteorder('='))"
            )
        if purpose == LOAD and not leaf.flags.writeable:
            raise UnsupportedError(f"tensor {key}: a read-only NumPy array cannot be loaded into")
        shape = leaf.shape
        strides: Optional[Dims] = None
        if not leaf.flags.c_contiguous:
            if any(n > 1 and stride % dtype.itemsize for n, stride in zip(shape, leaf.strides)):
                raise UnsupportedError(
                    f"tensor {key}: the strides {leaf.strides} are not multiples of the element size "
                    f"{dtype.itemsize}; pass a copy of the array"
                )
            strides = tuple(stride // dtype.itemsize for stride in leaf.strides)
            if purpose == LOAD and not distinct(shape, strides):
                raise LayoutError(
                    f"tensor {key}: elements of the array overlap in memory, so it cannot be loaded into"
                )
        rank = len(shape)
        if rank > 16:
            raise LayoutError(f"tensor {key}: {rank} axes, at most 16 are supported")
        return [
            Shard(
                key, number, shape, (0,) * rank, shape, UNLABELLED, self.memory(leaf), strides, None,
                purpose == VALIDATE, leaf,
            )
        ]

    def memory(self, leaf: Any) -> Any:
        return leaf.__array_interface__["data"][0]

    def identity(self, leaf: Any) -> Any:
        return (self.memory(leaf), leaf.shape, leaf.strides, leaf.dtype.str, leaf.dtype.name)

    def addresses(self, leaves: Sequence[Any]) -> List[int]:
        try:
            return list(map(ctypes.addressof, map(_NO_BYTES.from_buffer, leaves)))
        except (TypeError, ValueError, BufferError):
            # from_buffer refuses read-only arrays, arrays with gaps, and types of ml_dtypes. This way is four times as
            # slow.
            return [a.__array_interface__["data"][0] for a in leaves]

    def examine(self, leaves: Sequence[Any], loads: bool) -> Optional[Tuple[Facts, List[int]]]:
        like: List[List[Any]] = [
            [a.dtype for a in leaves],
            shared(a.shape for a in leaves),
            shared(a.strides for a in leaves),
            [a.flags.writeable for a in leaves],
        ]
        return Facts(like, []), self.addresses(leaves)

    def new_addresses(self, leaves: Sequence[Any], loads: bool, facts: Facts) -> Optional[List[int]]:
        same = [
            a
            for a, dtype, shape, strides, writeable in zip(leaves, *facts.like)
            if a.dtype == dtype
            and a.shape == shape
            and a.strides == strides
            and a.flags.writeable == writeable
        ]
        return self.addresses(leaves) if len(same) == len(leaves) else None
