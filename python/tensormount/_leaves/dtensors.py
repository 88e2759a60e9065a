# SPDX-License-Identifier: Apache-2.0
"""DTensors of PyTorch."""

from __future__ import annotations

import itertools
import operator
import sys
from typing import Any, List, Optional, Sequence, Tuple

from tensormount._leaves import tensors
from tensormount._leaves.base import Facts, shared
from tensormount._shards import COPY, MAIN, UNLABELLED, Shard
from tensormount.errors import LayoutError, UnsupportedError

_LOCAL = operator.attrgetter("_local_tensor")
_PLACEMENTS = operator.attrgetter("placements")
_MESH = operator.attrgetter("device_mesh")
_SELF_DESCRIBING = tensors.SelfDescribingKind()  # For local tensors that describe themselves.


class DTensorKind(tensors.TensorKind):
    plain = False

    def recognises(self, kind: type) -> bool:
        return issubclass(kind, self.exact())

    def exact(self) -> Tuple[type, ...]:
        # If a DTensor exists, this module is imported already.
        module = sys.modules.get("torch.distributed.tensor")
        kind = getattr(module, "DTensor", None) if module is not None else None
        return (kind,) if kind is not None else ()

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        local = leaf._local_tensor
        if tensors.describes_itself(type(local)):
            return _SELF_DESCRIBING.describe(key, leaf, purpose)
        found = boxes_of(key, leaf)
        if not found:
            return []
        if type(local).__name__ == "AsyncCollectiveTensor":
            local = local.wait()
        memory = tensors.local_memory(key, local, purpose)
        labelled = knows_replicas(leaf, world_size)
        shape = tuple(leaf.shape)
        return [
            tensors.shard_of(
                memory, shape, box.begin, box.extent, box.local_begin,
                (MAIN if box.main else COPY) if labelled else UNLABELLED,
            )
            for box in found
        ]

    def memory(self, leaf: Any) -> Any:
        return leaf._local_tensor.data_ptr()

    def identity(self, leaf: Any) -> Any:
        return (super().identity(leaf._local_tensor), tuple(leaf.shape), leaf.placements)

    def may_be_tied(self, leaf: Any) -> bool:
        return not leaf._local_tensor.numel() and 0 not in leaf.shape

    def tensors(self, leaf: Any) -> Sequence[Any]:
        local = leaf._local_tensor
        return _SELF_DESCRIBING.tensors(leaf) if tensors.describes_itself(type(local)) else (local,)

    def nbytes(self, leaf: Any) -> int:
        return int(leaf._local_tensor.nbytes)

    def addresses(self, leaves: Sequence[Any]) -> List[int]:
        return super().addresses(list(map(_LOCAL, leaves)))

    def examine(self, leaves: Sequence[Any], loads: bool) -> Optional[Tuple[Facts, List[int]]]:
        local = _plain_locals(leaves)
        found = super().examine(local, loads) if local is not None else None
        if found is None:
            return None
        placed = _placements(leaves)
        kinds = set(map(type, itertools.chain.from_iterable(placed[1])))
        if any(kind.__hash__ is None for kind in kinds):  # A placement of an unknown kind.
            return None
        found[0].like.extend(placed)
        return found

    def new_addresses(self, leaves: Sequence[Any], loads: bool, facts: Facts) -> Optional[List[int]]:
        local = _plain_locals(leaves)
        if local is None or _placements(leaves) != facts.like[3:6]:
            return None
        return super().new_addresses(local, loads, facts)


def _plain_locals(dtensors: Sequence[Any]) -> Optional[List[Any]]:
    """The local tensors; None: some are not plain tensors."""
    found = list(map(_LOCAL, dtensors))
    return found if set(map(type, found)) == {sys.modules["torch"].Tensor} else None


def _placements(dtensors: Sequence[Any]) -> List[List[Any]]:
    shape = sys.modules["torch"].Tensor.shape.__get__
    placed = [list(map(of, dtensors)) for of in (_PLACEMENTS, _MESH)]
    return [shared(map(shape, dtensors)), *placed]


def knows_replicas(dtensor: Any, world_size: Optional[int] = None) -> bool:
    """Whether `Box.main` says which replica is the main one among all ranks: the mesh has replicas and all ranks."""
    return any(p.is_replicate() for p in dtensor.placements) and bool(
        dtensor.device_mesh.size() == (world_size if world_size is not None else world_size_of_torch())
    )


def boxes_of(key: str, t: Any) -> List[Any]:
    """As `tensormount.boxes`; errors name the key."""
    from tensormount._boxes import boxes

    try:
        return list(boxes(t))
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor {key}: {error}", key=key) from None
    except LayoutError as error:
        raise LayoutError(f"tensor {key}: {error}", key=key) from None


def world_size_of_torch() -> int:
    import torch.distributed

    if not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size())
