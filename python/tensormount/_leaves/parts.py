# SPDX-License-Identifier: Apache-2.0
"""Leaves that consist of parts: `Shards`, ShardedTensors and JAX arrays."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from tensormount._abi import TM_F4
from tensormount._held import Part, Shards
from tensormount._leaves import registry
from tensormount._leaves.base import ArrayKind, type_name
from tensormount._shards import LOAD, Dims, Shard
from tensormount.errors import LayoutError, UnsupportedError


class ShardsKind(ArrayKind):
    def recognises(self, kind: type) -> bool:
        return issubclass(kind, Shards)

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        return [describe_part(key, part, purpose) for part in leaf.parts]

    def parts(self, leaf: Any) -> Optional[Sequence[Part]]:
        parts: Sequence[Part] = leaf.parts
        return parts

    def memory(self, leaf: Any) -> Any:
        return tuple(registry.memory(part.data) for part in leaf.parts)

    def identity(self, leaf: Any) -> Any:
        return tuple((part[:3], _data_identity(part.data)) for part in leaf.parts)

    def may_be_tied(self, leaf: Any) -> bool:
        return 0 not in leaf.shape and all(0 in part.held for part in leaf.parts)

    def tensors(self, leaf: Any) -> Sequence[Any]:
        return registry.tensors_of(part.data for part in leaf.parts)


def _data_identity(data: Any) -> Any:
    """The identity of the memory of a part, even if it has no cells."""
    kind = registry.kind_of(data)
    return kind.identity(data) if isinstance(kind, ArrayKind) else id(data)


def describe_part(key: str, part: Part, purpose: str) -> Shard:
    kind = registry.kind_of(part.data)
    whole: List[Shard] = []
    if isinstance(kind, ArrayKind) and kind.plain:
        whole = kind.describe(key, part.data, purpose)
    if len(whole) != 1 or whole[0].dtype == TM_F4:
        raise UnsupportedError(
            f"tensor {key}: a part of Shards must be a plain array or tensor, with elements of at least "
            f"one byte, not {type_name(part.data)}"
        )
    (shard,) = whole
    if shard.extent != part.held:
        raise LayoutError(f"tensor {key}: a part of Shards has changed its shape since Shards was made")
    begin, extent, flat = part.begin, part.held, None
    if part.flat is not None:
        extent, flat = part.flat.extent, (part.flat.first, part.held[0])
    return shard._replace(
        global_shape=part.shape, begin=begin, extent=extent, flat=flat, replica=part.replica,
        owner=part,  # Each part is its own owner, so that loads refuse two parts with the same memory.
    )


class ShardedTensorKind(ArrayKind):
    """PyTorch's ShardedTensor, which FSDP1 has in sharded state dicts."""

    def recognises(self, kind: type) -> bool:
        return any(
            one.__name__ == "ShardedTensor" and one.__module__.startswith("torch.distributed._shard")
            for one in kind.__mro__
        )

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        shape = tuple(leaf.metadata().size)
        parts = [(tuple(one.metadata.shard_offsets), one.tensor) for one in leaf.local_shards()]
        return [describe_part(key, part, purpose) for part in Shards(shape, parts).parts] if parts else []

    def memory(self, leaf: Any) -> Any:
        return tuple(map(registry.memory, self.tensors(leaf)))

    def identity(self, leaf: Any) -> Any:
        return tuple(map(_data_identity, self.tensors(leaf)))

    def may_be_tied(self, leaf: Any) -> bool:
        return 0 not in leaf.shape and not any(one.numel() for one in self.tensors(leaf))

    def tensors(self, leaf: Any) -> Sequence[Any]:
        return [one.tensor for one in leaf.local_shards()]


class JaxKind(ArrayKind):
    """Arrays of JAX, recognised by the attributes of jax.Array."""

    def recognises(self, kind: type) -> bool:
        return hasattr(kind, "addressable_shards")

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        import numpy

        if purpose == LOAD:
            raise UnsupportedError(
                f"tensor {key}: JAX arrays are immutable; load into NumPy arrays and make new JAX arrays"
            )
        shape = tuple(int(n) for n in leaf.shape)
        # Several devices of a process may hold the same cells, which are described once.
        found: Dict[Tuple[Dims, Dims], Any] = {}
        for shard in leaf.addressable_shards:
            begin, extent = _box_of_slices(key, shard.index, shape)
            other = found.get((begin, extent))
            if other is None or shard.replica_id < other.replica_id:
                found[(begin, extent)] = shard
        parts = []
        for (begin, extent), shard in found.items():
            platform = next(iter(shard.data.devices())).platform
            if platform != "cpu":
                raise UnsupportedError(
                    f"tensor {key}: JAX arrays in memory of {shard.data.devices()} are not supported"
                )
            data = numpy.asarray(shard.data)
            if data.shape != extent:
                raise LayoutError(
                    f"tensor {key}: a shard has the shape {data.shape}, but its index gives {extent} "
                    f"at {begin}"
                )
            # The parts have no label if the array belongs to this process alone, because other ranks may have the same
            # array.
            replica = None
            if not leaf.is_fully_addressable:
                replica = "main" if shard.replica_id == 0 else "copy"
            parts.append((begin, data, replica))
        return [describe_part(key, part, purpose) for part in Shards(shape, parts).parts] if parts else []


def _box_of_slices(key: str, index: Sequence[Any], shape: Dims) -> Tuple[Dims, Dims]:
    if len(index) != len(shape):
        raise LayoutError(
            f"tensor {key}: the index of a shard has {len(index)} axes, but the tensor has {len(shape)}"
        )
    begin, extent = [], []
    for part, size in zip(index, shape):
        first, end, step = part.indices(size)
        if step != 1:
            raise UnsupportedError(f"tensor {key}: a shard with step {step} is not supported")
        begin.append(first)
        extent.append(max(0, end - first))
    return tuple(begin), tuple(extent)
