# SPDX-License-Identifier: Apache-2.0
"""Kinds of leaves: `LeafKind`, the interface for extensions, and `ArrayKind`, the base of the built-in kinds."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from tensormount._held import Part
from tensormount._shards import Dims, Shard


class ObjectPart:
    """A leaf that is stored as bytes: an object, or its part `index` on a grid of parts.

    data: the bytes; None in a load."""

    __slots__ = ("data", "grid", "index")

    def __init__(
        self, data: Optional[bytes], index: Sequence[int] = (), grid: Sequence[int] = ()
    ) -> None:
        self.data = data
        self.index = tuple(index)
        self.grid = tuple(grid)


class LeafKind:
    """Saves and loads leaves of one kind. Subclass it for your own classes and pass an instance to
    `register_leaf_kind`. docs/extending.md has an example.

    Methods must not import the framework of the leaves: if it is not imported, it has no leaves.
    `tensormount.testing.check_leaf_kind` checks a kind.
    """

    def recognises(self, kind: type) -> bool:
        """Whether leaves of that exact type are of this kind. The result is cached for each type."""
        raise NotImplementedError

    def held(self, leaf: Any, purpose: str) -> Any:
        """The data that this rank holds or wants of a leaf: `Shards` or a leaf of a built-in kind, which the library
        reads (purpose "save"), fills in place ("load") or only describes ("validate"; needs no memory). An
        `ObjectPart`: the leaf is stored as bytes. None: nothing is stored, and a load does not change the leaf.

        Called once for each save and load. An exception fails it on all ranks.
        """
        raise NotImplementedError

    def key(self, leaf: Any, name: str) -> str:
        """The key under which the leaf is stored. `name`: the key that its path in the state dict gives. Several
        leaves of a rank may have one key if they hold different parts of one tensor."""
        return name

    def put(self, leaf: Any, what: Any) -> Any:
        """The replacement of the leaf after a load. `what`: the filled result of `held`, or the bytes of an
        ObjectPart."""
        return leaf


class Facts(NamedTuple):
    """Facts about leaves of one kind that determine their shards.

    `like`: lists with one item for each leaf. Leaves with equal items in all lists have the same shards, except for
    addresses, if their storage is large enough. `storage`: for tensors, the offsets in the storages and the sizes
    of the storages. `places`: if some tensors are on CUDA devices, the number of each one's device, -1 for the host;
    `devices`: what the library is told of each of these devices.
    """

    like: List[List[Any]]
    storage: List[List[int]]
    places: List[int] = []
    devices: Dict[int, Dims] = {}


class ArrayKind(LeafKind):
    """The base of the built-in kinds, whose leaves are read and filled in place."""

    # Whether a leaf is only memory, not a part of a larger tensor.
    plain = False

    def exact(self) -> Tuple[type, ...]:
        """Types whose leaves are examined together (`examine`), without subclasses, which may be more than memory."""
        return ()

    def held(self, leaf: Any, purpose: str) -> Any:
        return leaf

    # ---- One leaf --------------------------------------------------------------------------------

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        """As `registry.describe`."""
        raise NotImplementedError

    def parts(self, leaf: Any) -> Optional[Sequence[Part]]:
        """The parts that the leaf consists of; None: the leaf itself is described."""
        return None

    def memory(self, leaf: Any) -> Any:
        """As `registry.memory`."""
        return id(leaf)

    def identity(self, leaf: Any) -> Any:
        """As `registry.identity`."""
        return id(leaf)

    def may_be_tied(self, leaf: Any) -> bool:
        """As `registry.may_be_tied`."""
        return False

    def tensors(self, leaf: Any) -> Sequence[Any]:
        """The tensors of PyTorch whose memory the leaf uses."""
        return ()

    def nbytes(self, leaf: Any) -> int:
        """Bytes that this rank holds of the leaf."""
        return int(leaf.nbytes)

    # ---- Many leaves of the exact types ----------------------------------------------------------
    #
    # RuntimeError: each leaf must be described by itself, because some are sparse, nested or in a transform
    # of torch.func.

    def addresses(self, leaves: Sequence[Any]) -> List[int]:
        """The address of the memory of each leaf."""
        raise NotImplementedError

    def examine(self, leaves: Sequence[Any], loads: bool) -> Optional[Tuple[Facts, List[int]]]:
        """The facts and addresses of the leaves. None: facts do not describe one of them completely."""
        return None

    def new_addresses(self, leaves: Sequence[Any], loads: bool, facts: Facts) -> Optional[List[int]]:
        """The addresses of other leaves that have the same facts; None: their facts differ."""
        return None


def shared(values: Iterable[Any]) -> List[Any]:
    """A list in which equal values are one object: ten thousand tensors have few different shapes, and ten thousand
    new objects would start the garbage collector."""
    first: Dict[Any, Any] = {}
    return [first.setdefault(value, value) for value in values]


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
