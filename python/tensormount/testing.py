# SPDX-License-Identifier: Apache-2.0
"""For tests of extensions: `check_leaf_kind`, and `threads`, which runs ranks without processes."""

from __future__ import annotations

import contextlib
import importlib.abc
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import tensormount as tm
from tensormount._leaves import registry
from tensormount._leaves.base import ArrayKind

# Makes the leaf of a rank, in its own memory, from (the whole tensor, rank, number of ranks). None: the rank
# has none.
Make = Callable[[Any, int, int], Any]


def threads(call: Callable[[tm.Group, int], Any], size: int, limit: float = 180.0) -> list[Any]:
    """Calls `call(group, rank)` on one thread for each of `size` ranks.

    Returns, by rank, what each call returned or raised.
    """
    values: dict[str, Any] = {}
    name = uuid.uuid4().hex
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            store = _Store(values, name, rank)
            with tm.Group.from_store(store, rank, size, name=f"{name}-{rank}", timeout=60) as group:
                outcomes[rank] = call(group, rank)
        except Exception as error:
            outcomes[rank] = error

    running = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for one in running:
        one.start()
    for one in running:
        one.join(limit)
    if any(one.is_alive() for one in running):
        raise AssertionError(f"a rank did not finish: {outcomes}")
    return outcomes


class _Store:
    """A store within this process. Group counts the groups of a name in each process, so each rank needs its own
    name here; in the keys of this store it is replaced by a common one."""

    def __init__(self, values: dict[str, Any], name: str, rank: int) -> None:
        self._values = values
        self._names = f"{name}-{rank}", name

    def set(self, key: str, value: str) -> None:
        self._values[key.replace(*self._names)] = value

    def get(self, key: str) -> Any:
        return self._values[key.replace(*self._names)]

    def check(self, keys: list[str]) -> bool:
        return all(key.replace(*self._names) in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with _lock:
            key = key.replace(*self._names)
            self._values[key] = found = int(self._values.get(key, 0)) + amount
        return found

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key.replace(*self._names), None) is not None


_lock = threading.Lock()


def check_leaf_kind(
    kind: tm.LeafKind,
    examples: Mapping[str, Make],
    *,
    loads: bool = True,
    ranks: int = 3,
    group: Optional[tm.Group] = None,
    folder: Optional[str] = None,
) -> int:
    """Checks that a kind of leaves behaves as `LeafKind` says. Needs NumPy.

    examples   ways to shard a tensor, by name: functions of (whole, rank, size) that return the leaf of that
               rank, in its own memory, with its cells of the array `whole`; or None. Arrays are f4 or i4
               and have two axes, whose lengths are multiples of `size`.
    loads      False: leaves of the kind never change, so that a load into them is an UnsupportedError.
    ranks      the number of ranks, which are threads. With `group` the ranks are those of the group: each
               calls this function, and `folder` is a directory that all of them share, for the store.

    Checks that recognising a leaf imports no framework; that each example saves the whole tensor, bit for
    bit; that every other example loads from it, bit for bit, also if the sharding of a key changes between
    saves; and that other shapes and types than the stored ones are refused.

    Returns the number of leaves that were compared. Raises AssertionError with the name of the example, or
    the library's exception.
    """
    import numpy

    if not isinstance(kind, tm.LeafKind):
        raise AssertionError(f"{kind!r} is not a tensormount.LeafKind")
    size = ranks if group is None else group.size
    whole = numpy.zeros((size, size), "f4")
    for name, make in examples.items():
        made = (make(whole, rank, size) for rank in (range(size) if group is None else [group.rank]))
        _check_recognised(kind, name, [leaf for leaf in made if leaf is not None])
    with contextlib.ExitStack() as stack:
        if kind not in registry.BUILT_IN:
            stack.enter_context(_registered(kind))
        where = folder or stack.enter_context(tempfile.TemporaryDirectory())

        def call(group: tm.Group, rank: int) -> int:
            return _RankChecks(group, examples, loads, os.path.join(where, "S")).all()

        outcomes = [call(group, group.rank)] if group is not None else threads(call, size)
    # A rank's own error is raised before errors about another rank.
    for error in sorted((one for one in outcomes if isinstance(one, Exception)), key=_is_about_another_rank):
        raise error
    _expect(sum(outcomes) > 0, "the examples hold no data")
    return int(sum(outcomes))


def _is_about_another_rank(error: Exception) -> bool:
    return isinstance(error, tm.Error) and error.rank is not None


@contextlib.contextmanager
def _registered(kind: tm.LeafKind) -> Iterator[None]:
    known = kind in registry.registered()
    tm.register_leaf_kind(kind)
    try:
        yield
    finally:
        if not known:
            registry.unregister_leaf_kind(kind)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


# ---- Recognition ---------------------------------------------------------------------------------


class _NoImports(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        raise AssertionError(f"recognises() must not import anything: it imports {fullname}")


def _check_recognised(kind: tm.LeafKind, name: str, leaves: list[Any]) -> None:
    """recognises() decides by the type alone, imports nothing, and works if the framework is not imported."""
    types: set[type] = set(map(type, leaves))
    plain: tuple[type, ...] = (object, int, float, str, bytes, bool, type(None), dict, list, tuple)
    packages = {base.__module__.split(".")[0] for one in types for base in one.__mro__}
    packages -= {"builtins", "tensormount", "__main__", type(kind).__module__.split(".")[0]}
    hidden = {module: sys.modules[module] for module in list(sys.modules) if module.split(".")[0] in packages}
    no_imports = _NoImports()
    sys.meta_path.insert(0, no_imports)
    try:
        for one in types:
            _expect(kind.recognises(one), f"{name}: recognises() does not accept a {one.__name__}")
        for module in hidden:
            del sys.modules[module]
        for one in (*plain, *types):
            why = f"recognises() accepts a {one.__name__}, which is not a type of the examples"
            _expect(not kind.recognises(one) or one in types, why)
    finally:
        sys.modules.update(hidden)
        sys.meta_path.remove(no_imports)


# ---- Saves and loads -----------------------------------------------------------------------------


class _RankChecks:
    """The saves and loads of one rank."""

    def __init__(
        self, group: tm.Group, examples: Mapping[str, Make], loads: bool, store: str
    ) -> None:
        import numpy

        self.group = group
        self.examples = examples
        self.loads = loads
        self.path = f"{store}/step"
        self.compared = self.tensors = 0
        rows = 4 * group.size
        # All values are distinct, and none is 0.
        self.first = numpy.arange(1, 1 + 2 * group.size * rows, dtype="f4").reshape(rows, -1)
        self.second = self.first + 100_000

    def all(self) -> int:
        for name, make in self.examples.items():
            self.save(name, make, self.first)
            for other, make_other in self.examples.items():
                self.load(f"{other}, loaded from {name}", make_other)
                self.save(f"{other}, saved after {name}", make_other, self.second)
                self.save(f"{name}, saved after {other}", make, self.first)
            if self.loads and self.tensors:
                self.refused(f"{name}, with another shape", make, self.first.repeat(2, 0))
                self.refused(f"{name}, with another dtype", make, self.first.astype("i4"))
        return self.compared

    def leaf(self, make: Make, whole: Any) -> Any:
        return make(whole, self.group.rank, self.group.size)

    def held(self, leaf: Any) -> Any:
        kind = registry.kind_of(leaf)
        return None if kind is None else kind.held(leaf, "save")

    def state(self, leaf: Any) -> dict[str, Any]:
        return {"model": {} if leaf is None else {"w": leaf}}

    def save(self, name: str, make: Make, whole: Any) -> None:
        leaf = self.leaf(make, whole)
        said = tm.validate(self.state(leaf), self.group)
        _expect(said["ok"], f"{name}: the shards of the ranks are inconsistent: {said['findings']}")
        tm.save(self.state(leaf), self.path, self.group, replace=True, arrival=60)
        held = self.held(leaf)
        with tm.open(self.path) as checkpoint:
            self.tensors = len(checkpoint)
            self.compared += self.tensors
            for tensor in checkpoint.values():
                _expect(tensor[...].tobytes() == whole.tobytes(), f"{name}: the stored tensor differs from the leaf")
            if isinstance(held, tm.ObjectPart):
                key = registry.kind_of(leaf).key(leaf, "model.w")  # type: ignore[union-attr]
                same = checkpoint.object(key, held.index) == held.data
                _expect(same, f"{name}: the stored object differs from the leaf")
            else:
                _expect(held is None or self.tensors > 0, f"{name}: the save stored nothing")

    def load(self, name: str, make: Make) -> None:
        leaf, wanted = self.leaf(make, 0 * self.first), self.leaf(make, self.first)
        try:
            state = tm.load(self.state(leaf), self.path, self.group, arrival=60).state
        except tm.UnsupportedError:
            _expect(not self.loads, f"{name}: the load was refused")
            return
        _expect(self.loads, f"{name}: the load was not refused")
        if leaf is not None:
            found = _cells(self.held(state["model"]["w"]))
            _expect(found == _cells(self.held(wanted)), f"{name}: rank {self.group.rank} loaded other values")
            self.compared += bool(found)

    def refused(self, name: str, make: Make, whole: Any) -> None:
        try:
            tm.load(self.state(self.leaf(make, whole)), self.path, self.group, arrival=60)
        except tm.LayoutError:
            return
        raise AssertionError(f"{name}: the load was not refused")


def _cells(held: Any) -> list[bytes]:
    """The bytes of a result of `LeafKind.held`."""
    if held is None or isinstance(held, tm.ObjectPart):
        return [] if held is None else [held.data or b""]
    kind = registry.kind_of(held)
    assert isinstance(kind, ArrayKind)
    parts = kind.parts(held)
    return list(map(_bytes, (part.data for part in parts) if parts is not None else kind.tensors(held) or [held]))


def _bytes(array: Any) -> bytes:
    if not hasattr(array, "detach"):
        return bytes(array.tobytes())
    import torch

    if not array.numel():
        return b""  # The strides of an empty tensor may be anything.
    return bytes(array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
