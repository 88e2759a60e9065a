# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors that a rank holds, for trainers whose tensors are not DTensors."""

from __future__ import annotations

import math
import operator
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

from ._abi import TM_REPLICA_COPY, TM_REPLICA_MAIN, TM_REPLICA_UNLABELLED
from .errors import LayoutError

_REPLICAS = {None: TM_REPLICA_UNLABELLED, "main": TM_REPLICA_MAIN, "copy": TM_REPLICA_COPY}


class Flat(NamedTuple):
    """A run of elements of a box in row-major order that begins at element `first`. The data give its length."""

    first: int
    begin: Tuple[int, ...]
    extent: Tuple[int, ...]


class Part(NamedTuple):
    """A box of a tensor, or a run of elements of a box (`flat`), and `data`, the array with its cells."""

    shape: Tuple[int, ...]  # The shape of the whole tensor.
    begin: Tuple[int, ...]
    flat: Optional[Flat]
    held: Tuple[int, ...]  # The shape of data.
    replica: int
    data: Any

    @property
    def place(self) -> Tuple[Any, ...]:
        """All fields except `data`."""
        return self[:-1]


def _numbers(values: Any) -> Tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise LayoutError(f"{values!r}: expected a sequence with one integer for each axis") from None


class Shards:
    """A leaf of a state dict: the parts of a tensor that this rank holds or wants.

    shape  the shape of the whole tensor.
    parts  a list of (begin, data) or (begin, data, replica). `data` is a NumPy array or PyTorch tensor of
           the shape of a box, and `begin` says where in the tensor the box begins. With Flat(first, begin,
           extent) instead of `begin`, `data` has one axis. replica: "main" or "copy" if several ranks hold
           the box and this one knows which it is; otherwise None.

    At least one part is needed; it may have no cells. A rank that holds nothing leaves the key out. A load
    fills `data` in place. LayoutError: a part is not within the tensor.

        >>> import numpy, tensormount as tm
        >>> rows = numpy.arange(8.0).reshape(2, 4)
        >>> rest = numpy.arange(8.0, 12.0)
        >>> parts = [((0, 0), rows), (tm.Flat(0, (2, 0), (1, 4)), rest)]
        >>> path = tm.save({"w": tm.Shards((3, 4), parts)}, "STORE/shards", replace=True)["path"]
        >>> with tm.open(path) as checkpoint:
        ...     checkpoint["w"][2].tolist()
        [8.0, 9.0, 10.0, 11.0]
    """

    __slots__ = ("parts", "shape")

    def __init__(
        self,
        shape: Sequence[int],
        parts: Sequence[
            Union[
                Tuple[Union[Sequence[int], Flat], Any],
                Tuple[Union[Sequence[int], Flat], Any, Optional[str]],
            ]
        ],
    ) -> None:
        self.shape = _numbers(shape)
        for part in parts:
            if not isinstance(part, (tuple, list)) or len(part) not in (2, 3):
                raise LayoutError(f"a part of Shards is (begin, data) or (begin, data, replica), not {part!r}")
        self.parts: List[Part] = [self._part(*part) for part in parts]
        if not self.parts:
            # Without parts, the tensor would be missing in this rank's part of the save.
            raise LayoutError("Shards has no parts: pass an empty part, or leave the key out")

    def _part(
        self, where: Union[Sequence[int], Flat], data: Any, replica: Optional[str] = None
    ) -> Part:
        if not (replica is None or isinstance(replica, str)) or replica not in _REPLICAS:
            raise LayoutError(f"replica={replica!r}: must be \"main\", \"copy\" or None")
        if not hasattr(data, "shape"):
            raise LayoutError(f"a part of Shards must be an array or a tensor, not {type(data).__name__}")
        held = tuple(map(int, data.shape))
        flat: Optional[Flat] = None
        begin: Tuple[int, ...]
        if isinstance(where, Flat):
            flat = Flat(operator.index(where.first), _numbers(where.begin), _numbers(where.extent))
            if len(held) != 1 or not 0 <= flat.first <= math.prod(flat.extent) - held[0]:
                raise LayoutError(f"{flat}: the data of shape {held} are not a run of elements of this box")
            begin, extent = flat.begin, flat.extent
        else:
            begin, extent = _numbers(where), held
        if not len(begin) == len(extent) == len(self.shape) or any(
            b < 0 or n < 0 or b + n > size for b, n, size in zip(begin, extent, self.shape)
        ):
            raise LayoutError(
                f"the box at {begin} with extent {extent} is not inside a tensor of shape {self.shape}"
            )
        return Part(self.shape, begin, flat, held, _REPLICAS[replica], data)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(int(part.data.nbytes) for part in self.parts)

    def __repr__(self) -> str:
        return f"<tensormount.Shards: {len(self.parts)} of {list(self.shape)}>"
