# SPDX-License-Identifier: Apache-2.0
"""Objects of an opened checkpoint: bytes by key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Union

from tensormount.errors import KeyNotFoundError

if TYPE_CHECKING:
    from tensormount._checkpoint import Checkpoint


class _Part(tuple[Any, ...]):
    """(key, index, ...). Compares with a str as with (str,), so that parts and keys sort together."""

    __slots__ = ()

    def __lt__(self, other: Any) -> Any:
        return super().__lt__((other,) if isinstance(other, str) else other)

    def __le__(self, other: Any) -> Any:
        return super().__le__((other,) if isinstance(other, str) else other)

    def __gt__(self, other: Any) -> Any:
        return super().__gt__((other,) if isinstance(other, str) else other)

    def __ge__(self, other: Any) -> Any:
        return super().__ge__((other,) if isinstance(other, str) else other)

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class Objects(Mapping[Union[str, "tuple[Any, ...]"], bytes]):
    """The objects of a checkpoint: a mapping from keys to bytes. `objects["rng", 3]` is part 3 of a grid.

    Iteration returns, in order, the key of an object that is one piece, and (key, index, ...) for each part
    of an object on a grid. items(), values() and dict() therefore read all parts. `in` accepts a key, on a
    grid or not, or one part. names() has each key once.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, key: Union[str, tuple[Any, ...]]) -> bytes:
        if isinstance(key, tuple):
            return self._checkpoint.object(key[0], tuple(key[1:]))
        return self._checkpoint.object(key)

    def __contains__(self, key: object) -> bool:
        name, *index = key if isinstance(key, tuple) and key else (key,)
        if not isinstance(name, str):
            return False
        try:
            grid = self.grid(name)
        except KeyNotFoundError:
            return False
        if isinstance(key, str):
            return True
        return len(index) == len(grid) and all(i in range(n) for i, n in zip(index, grid))

    def __iter__(self) -> Iterator[Union[str, tuple[Any, ...]]]:
        for name in self.names():
            grid = self.grid(name)
            if grid:
                for index in itertools.product(*map(range, grid)):
                    yield _Part((name, *index))
            else:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<objects {self.names()!r}>"

    def names(self) -> list[str]:
        """Keys of objects, in byte order, including objects on a grid."""
        return self._checkpoint._object_names()

    def grid(self, key: str) -> tuple[int, ...]:
        """The grid of an object: (4,) for one part of each of four ranks; () for an object that is one piece.

        Raises KeyNotFoundError.
        """
        return self._checkpoint._object_grid(key)
