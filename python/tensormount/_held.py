# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors that a rank holds by itself, for trainers whose tensors are no DTensors."""

from __future__ import annotations

import math
import operator
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

from .errors import LayoutError

_REPLICAS = {None: 0, "main": 1, "copy": 2}  # TM_REPLICA_*


class Flat(NamedTuple):
    """Elements of a box in its row-major order, from number `first` on: as many as the memory has."""

    first: int
    begin: Tuple[int, ...]
    extent: Tuple[int, ...]


class _Part(NamedTuple):
    begin: Tuple[int, ...]
    flat: Optional[Flat]
    data: Any
    held: Tuple[int, ...]  # The shape of data.
    replica: int


def _numbers(values: Any) -> Tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise LayoutError(f"{values!r}: a number for each axis was expected") from None


class Shards:
    """A leaf of a state dict: what this rank holds of a tensor, or wants of it, box by box.

    shape  of the whole tensor.
    parts  (begin, data) or (begin, data, replica) each: where in the tensor the box begins whose cells
           `data` are, an array of NumPy or tensor of PyTorch of the box's shape. Instead of `begin` a
           Flat(first, begin, extent): then `data` has one axis. replica: "main" or "copy" where several
           ranks hold the box and this one knows which counts; None.

    At least one part, which may be without cells; who has none leaves the key out. A load fills
    `data` in place. LayoutError: a part does not lie in the tensor.

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
        self.parts: List[_Part] = [self._part(*part) for part in parts]
        if not self.parts:
            # Nobody would know that there is such a tensor.
            raise LayoutError("Shards without a part: give one without cells, or leave the key out")

    def _part(
        self, where: Union[Sequence[int], Flat], data: Any, replica: Optional[str] = None
    ) -> _Part:
        if not (replica is None or isinstance(replica, str)) or replica not in _REPLICAS:
            raise LayoutError(f"replica={replica!r}: \"main\", \"copy\" or None")
        if not hasattr(data, "shape"):
            raise LayoutError(f"a part of Shards: {type(data).__name__} is no array and no tensor")
        held = tuple(map(int, data.shape))
        flat: Optional[Flat] = None
        begin: Tuple[int, ...]
        if isinstance(where, Flat):
            flat = Flat(operator.index(where.first), _numbers(where.begin), _numbers(where.extent))
            if len(held) != 1 or not 0 <= flat.first <= math.prod(flat.extent) - held[0]:
                raise LayoutError(f"{flat}: memory of {held} is no part of that box")
            begin, extent = flat.begin, flat.extent
        else:
            begin, extent = _numbers(where), held
        if not len(begin) == len(extent) == len(self.shape) or any(
            b < 0 or n < 0 or b + n > size for b, n, size in zip(begin, extent, self.shape)
        ):
            raise LayoutError(
                f"a box from {begin} on of {extent} does not lie in a tensor of {self.shape}"
            )
        return _Part(begin, flat, data, held, _REPLICAS[replica])

    @property
    def nbytes(self) -> int:
        """Of what this rank holds."""
        return sum(int(part.data.nbytes) for part in self.parts)

    def __repr__(self) -> str:
        return f"<tensormount.Shards: {len(self.parts)} of {list(self.shape)}>"
