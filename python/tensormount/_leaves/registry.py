# SPDX-License-Identifier: Apache-2.0
"""Finds the kind of a leaf, and calls it."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from tensormount._leaves.base import ArrayKind, LeafKind, type_name
from tensormount._shards import LOAD, PURPOSES, SAVE, Shard
from tensormount.errors import InvalidArgumentError, UnsupportedError

# The built-in kinds in the order in which they are tried. Set by _leaves/__init__.py.
BUILT_IN: Tuple[ArrayKind, ...] = ()
_registered: List[LeafKind] = []
# Types whose kind was looked up; None: no kind.
_known: Dict[type, Optional[LeafKind]] = {}
_MAX_KNOWN = 4096
_UNKNOWN = object()
# Exceptions that leaves without plain memory raise.
_MEMORY_ERRORS = (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError)


def register_leaf_kind(kind: LeafKind) -> None:
    """Registers a kind of leaves for `save`, `load` and every other function that takes a state dict.

    The type of a leaf determines its kind. The exact types ndarray, memmap, Tensor, Parameter and DTensor always
    keep their built-in kinds. Then come registered kinds, the last registered first; then subclasses of those
    types, tensors that describe themselves to PyTorch's checkpoints, `Shards` and JAX arrays. Registering a kind
    again changes nothing.
    """
    if not isinstance(kind, LeafKind):
        raise InvalidArgumentError(f"{kind!r:.100}: an instance of a subclass of LeafKind was expected")
    if kind not in _registered:
        _registered.insert(0, kind)
        _known.clear()


def unregister_leaf_kind(kind: LeafKind) -> None:
    """Undoes `register_leaf_kind`, for tests."""
    _registered.remove(kind)
    _known.clear()


def registered() -> Sequence[LeafKind]:
    """The kinds that are not built in, the last registered first."""
    return _registered


def kind_of(value: Any) -> Optional[LeafKind]:
    """The kind of a leaf; None: it is a plain value, or of an unknown type."""
    found: Any = _known.get(type(value), _UNKNOWN)
    return _kind_of_type(type(value)) if found is _UNKNOWN else found


def _kind_of_type(kind: type) -> Optional[LeafKind]:
    found = families().get(kind) or next(
        (one for one in (*_registered, *BUILT_IN) if one.recognises(kind)), None
    )
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[kind] = found
    return found


def families() -> Dict[type, ArrayKind]:
    """Types whose leaves are examined together (`ArrayKind.exact`), of frameworks that are imported."""
    return {exact: kind for kind in BUILT_IN for exact in kind.exact()}


def describe(key: str, leaf: Any, purpose: str = SAVE, world_size: Optional[int] = None) -> List[Shard]:
    """The shards of one leaf on this rank. `purpose`: "save", "load" (the memory is written to)
    or "validate" (no memory is needed). `world_size`: the number of ranks of the group; None: that of
    torch.distributed. Replicas of a DTensor are labelled only if its mesh has all ranks, because a rank
    does not know the copies on other meshes.

    Empty if this rank is not in a DTensor's mesh. UnsupportedError: a kind of array, element or memory that
    cannot be saved or loaded. LayoutError: a DTensor whose local part does not fit its placements, or (loads)
    cells that overlap in memory.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose={purpose!r}: must be one of {', '.join(PURPOSES)}")
    kind = kind_of(leaf)
    if isinstance(kind, ArrayKind):
        return kind.describe(key, leaf, purpose, world_size)
    raise UnsupportedError(f"tensor {key}: {type_name(leaf)} is not a known type of arrays or tensors")


def destination(key: str, leaf: Any) -> Shard:
    """The memory of a plain array or tensor on the host, which a read fills as a whole. Errors as of
    `describe`; UnsupportedError: a part of a larger tensor (a DTensor), or memory of a device."""
    kind = kind_of(leaf)
    if not isinstance(kind, ArrayKind) or not kind.plain:
        raise UnsupportedError(f"tensor {key}: {type_name(leaf)} is not a plain array or tensor")
    (shard,) = kind.describe(key, leaf, LOAD)
    if shard.memory is not None:
        raise UnsupportedError(f"tensor {key}: memory on {leaf.device} is not supported here: read into host memory")
    return shard


# ---- Whether leaves are one tensor ---------------------------------------------------------------


def identity(leaf: Any) -> Any:
    """Equal for leaves that are the same tensor: the same memory with the same shape, strides and dtype. Valid only
    while the leaves live. A tensor without cells is equal only to itself.

    Parts of a larger tensor that have no cells on this rank are compared by their storage: they may be one
    tensor, or empty ends of one buffer (`may_be_tied`)."""
    try:
        if 0 not in leaf.shape:
            return _array_kind(leaf).identity(leaf)
    except _MEMORY_ERRORS:
        pass
    return id(leaf)


def memory(leaf: Any) -> Any:
    """Equal for leaves with equal `identity`, and perhaps for others. Faster than `identity`."""
    try:
        return _array_kind(leaf).memory(leaf)
    except _MEMORY_ERRORS:
        return id(leaf)


def may_be_tied(leaf: Any) -> bool:
    """Whether equal `identity` proves nothing: this rank has no cell of a tensor that other ranks have cells of."""
    kind = kind_of(leaf)
    return isinstance(kind, ArrayKind) and kind.may_be_tied(leaf)


def addresses(leaves: Sequence[Any]) -> Optional[List[int]]:
    """Addresses of the memory of leaves of one family; None: they are of several families, or of none."""
    known = families()
    found = {known.get(kind) for kind in set(map(type, leaves))}
    kind = found.pop() if len(found) == 1 else None
    try:
        return kind.addresses(leaves) if kind is not None else None
    except RuntimeError:  # Sparse tensors, for example.
        return None


def _array_kind(leaf: Any) -> ArrayKind:
    kind = kind_of(leaf)
    if isinstance(kind, ArrayKind):
        return kind
    raise TypeError


# ---- Their memory --------------------------------------------------------------------------------


def tensors_of(leaves: Iterable[Any]) -> List[Any]:
    """The tensors of PyTorch whose memory these leaves use."""
    found: List[Any] = []
    for leaf in leaves:
        kind = kind_of(leaf)
        if isinstance(kind, ArrayKind):
            found.extend(kind.tensors(leaf))
    return found


def nbytes_of(leaves: Iterable[Any]) -> int:
    """Bytes that this rank holds of these leaves."""
    return sum(_array_kind(leaf).nbytes(leaf) for leaf in leaves)
