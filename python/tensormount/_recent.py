# SPDX-License-Identifier: Apache-2.0
"""The values that were used last: `Recent`."""

from __future__ import annotations

from typing import Dict, Generic, Hashable, Optional, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Keeps the `capacity` values that were used last, by name.

    Threads, signal handlers and finalizers may use it at once, also a finalizer of a value that it drops: the dict is
    replaced and never changed. Of two calls at once the change of one may be lost.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: Dict[Hashable, Value] = {}  # The least recently used first.

    def get(self, name: Hashable) -> Optional[Value]:
        """The value kept by that name. It counts as used only by another `keep`."""
        return self._values.get(name)

    def keep(self, name: Hashable, value: Value) -> None:
        kept = {other: old for other, old in self._values.items() if other != name}
        kept[name] = value
        for other in list(kept)[: -self._capacity]:
            del kept[other]
        self._values = kept

    def values(self) -> list[Value]:
        return list(self._values.values())
