# SPDX-License-Identifier: Apache-2.0
"""The values that were used last: `Recent`."""

from __future__ import annotations

from typing import Dict, Generic, Hashable, Optional, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Keeps the `capacity` values that were used last, by name.

    Threads, signal handlers and finalizers may use it at once, also a finalizer of a value that it drops: the dict is
    replaced and never changed. Of two calls at once the change of one may be lost. A value has one name.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: Dict[Hashable, Value] = {}  # The least recently used first.

    def get(self, name: Hashable) -> Optional[Value]:
        """The value kept by that name. It counts as used only by another `keep`."""
        return self._values.get(name)

    def keep(self, name: Hashable, value: Value) -> None:
        if next(reversed(self._values.values()), None) is value:
            return
        kept = dict(self._values)  # Nothing is freed while it is changed: the old dict has all values.
        kept.pop(name, None)
        kept[name] = value
        if len(kept) > self._capacity:
            del kept[next(iter(kept))]
        self._values = kept

    def values(self) -> list[Value]:
        return list(self._values.values())
