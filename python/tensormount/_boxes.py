# SPDX-License-Identifier: Apache-2.0
"""The boxes of a global tensor that one coordinate of a device mesh holds.

PyTorch describes the local part of a DTensor by an offset and a size for each axis. With `_StridedShard` the
part is not one box. Here every axis is a list of intervals, so that any placement has exact boxes, and each
box has its position in the local tensor.

FSDP2 over tensor parallelism cuts a parameter for tensor parallelism first, then cuts each rank's part, and
describes the result as `_StridedShard`. If sizes do not divide evenly, the described cells differ from the
held cells (`fsdp_cuts`), and only the shape of the local tensor tells which ones it has.

The arithmetic (`placement_boxes`) does not use PyTorch.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Dims = Tuple[int, ...]

# One of ("shard", axis), ("strided", axis, split_factor), ("replicate",), ("partial", text) and ("unknown", text). Axes
# may be negative.
Placement = Tuple[Any, ...]

# [begin, end) of one axis.
Interval = Tuple[int, int]


class Box(NamedTuple):
    """A box of a global tensor, and the box of the local tensor that holds its cells.

    All numbers are in elements, one per axis. In the local tensor the box begins at `local_begin` and has
    the same extent. `main`: this coordinate holds the main replica of the box (its number is 0 on each
    replicating axis of the mesh).
    """

    begin: Dims
    extent: Dims
    local_begin: Dims
    main: bool


def _chunk(intervals: List[Interval], pieces: int) -> List[List[Interval]]:
    """Cuts the indices of `intervals` into `pieces` lists as torch.chunk does: ceil(size / pieces) indices each,
    fewer or none in the last lists."""
    size = sum(end - begin for begin, end in intervals)
    each = -(-size // pieces)
    cut: List[List[Interval]] = [[] for _ in range(pieces)]
    number, room = 0, each
    for begin, end in intervals:
        while begin < end:
            if room == 0:
                number, room = number + 1, each
            stop = min(end, begin + room)
            cut[number].append((begin, stop))
            room -= stop - begin
            begin = stop
    return cut


def _merged(intervals: List[Interval]) -> List[Interval]:
    """Drops empty intervals and joins adjacent ones."""
    out: List[Interval] = []
    for begin, end in intervals:
        if begin == end:
            continue
        if out and out[-1][1] == begin:
            out[-1] = (out[-1][0], end)
        else:
            out.append((begin, end))
    return out


@functools.lru_cache(maxsize=65536)
def _axis_intervals(
    size: int, cuts: Tuple[Tuple[int, int, int], ...]
) -> Tuple[Interval, ...]:
    """The intervals of an axis that remain after `cuts`, each (split_factor, number of pieces, index of the
    piece). A split_factor of 0 means "not strided"."""
    intervals: List[Interval] = [(0, size)]
    for split_factor, pieces, piece in cuts:
        if split_factor == 0:
            intervals = _chunk(intervals, pieces)[piece]
        else:
            # A mesh axis further to the right cuts the axis into split_factor parts; this mesh axis takes
            # its piece of each part.
            parts = _chunk(intervals, split_factor)
            intervals = [i for part in parts for i in _chunk(part, pieces)[piece]]
        intervals = _merged(intervals)
    return tuple(intervals)


def placement_boxes(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> List[Box]:
    """The boxes of a tensor of `global_shape` that `coordinate` of a mesh holds.

    The boxes are in the order of the local tensor and together fill it. None is empty, and along an axis
    that is cut none touches the next. If the local tensor has no cells, there is one box without cells, so
    that the tensor is known on this rank, too.

    LayoutError: the arguments are inconsistent. UnsupportedError: partial sums, whose cells no rank holds, or
    an unknown placement.
    """
    from .errors import LayoutError, UnsupportedError

    rank = len(global_shape)
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise LayoutError(
            f"a mesh with {len(mesh_shape)} axes needs as many coordinates and placements, not "
            f"{len(coordinate)} and {len(placements)}"
        )
    cuts: List[List[Tuple[int, int, int]]] = [[] for _ in range(rank)]
    main = True
    for where, (pieces, piece, placement) in enumerate(zip(mesh_shape, coordinate, placements)):
        if not 0 <= piece < pieces:
            raise LayoutError(f"coordinate {piece} is outside of mesh axis {where}, whose size is {pieces}")
        kind = placement[0]
        if kind == "replicate":
            main = main and piece == 0
        elif kind in ("shard", "strided"):
            axis = placement[1] + rank if placement[1] < 0 else placement[1]
            if not 0 <= axis < rank:
                raise LayoutError(f"the placement shards axis {placement[1]}, but the tensor has only {rank} axes")
            split_factor = placement[2] if kind == "strided" else 0
            if kind == "strided" and split_factor < 1:
                raise LayoutError(f"the split factor {split_factor} is less than 1")
            cuts[axis].append((split_factor, pieces, piece))
        elif kind == "partial":
            raise UnsupportedError(
                f"the placement {placement[1]} on axis {where} of the mesh: the ranks hold partial sums, not elements "
                "of the tensor; redistribute the DTensor first"
            )
        else:
            raise UnsupportedError(f"the placement {placement[-1]} on axis {where} of the mesh is not supported")
    axes = [
        _axis_intervals(size, tuple(cut)) if cut else ((0, size),)
        for size, cut in zip(global_shape, cuts)
    ]
    if any(sum(end - begin for begin, end in axis) == 0 for axis in axes):
        # The first interval of each axis; [0, 0) for an axis without intervals.
        first = [axis[0] if axis else (0, 0) for axis in axes]
        begins = tuple(begin for begin, _ in first)
        return [Box(begins, tuple(end - begin for begin, end in first), (0,) * rank, main)]
    # Where each interval begins in the local tensor.
    starts = [
        list(itertools.accumulate((end - begin for begin, end in axis[:-1]), initial=0))
        for axis in axes
    ]
    boxes = []
    for chosen in itertools.product(*(range(len(axis)) for axis in axes)):
        picked = [axis[i] for axis, i in zip(axes, chosen)]
        boxes.append(
            Box(
                tuple(begin for begin, _ in picked),
                tuple(end - begin for begin, end in picked),
                tuple(start[i] for start, i in zip(starts, chosen)),
                main,
            )
        )
    return boxes


def fsdp_cuts(
    mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Optional[Tuple[Dims, Dims, Tuple[Placement, ...]]]:
    """The cuts that FSDP2 makes if it describes a parameter by these placements: the mesh shape, coordinate and
    placements with the strided mesh axis moved to the end and not strided.

    None: FSDP2 does not make such placements. Its placements have one strided mesh axis, whose split factor is
    the number of parts into which mesh axes further to the right cut the same axis of the tensor.
    """
    strided = [i for i, placement in enumerate(placements) if placement[0] == "strided"]
    if len(strided) != 1:
        return None
    (where,) = strided
    _, axis, split_factor = placements[where]
    parts = math.prod(
        mesh_shape[i]
        for i, placement in enumerate(placements)
        if i > where and placement == ("shard", axis)
    )
    if split_factor != parts:
        return None
    order = [i for i in range(len(placements)) if i != where]
    return (
        (*(mesh_shape[i] for i in order), mesh_shape[where]),
        (*(coordinate[i] for i in order), coordinate[where]),
        (*(placements[i] for i in order), ("shard", axis)),
    )


def local_shape(boxes: Sequence[Box]) -> Dims:
    """The shape of the local tensor that these boxes (of `placement_boxes`) make up."""
    if not boxes:
        return ()
    return tuple(
        max(box.local_begin[axis] + box.extent[axis] for box in boxes)
        for axis in range(len(boxes[0].extent))
    )


def describe_placement(placement: Any) -> Placement:
    """A placement of PyTorch in the form of `placement_boxes`. Never fails: other kinds become "unknown"."""
    from torch.distributed.tensor import placement_types

    # Exact types only: a subclass may select other cells.
    kind = type(placement)
    if kind is placement_types.Shard:
        return ("shard", placement.dim)
    if kind is placement_types.Replicate:
        return ("replicate",)
    strided = getattr(placement_types, "_StridedShard", None)
    if strided is not None and kind is strided:
        return ("strided", placement.dim, int(placement.split_factor))
    if isinstance(placement, placement_types.Partial):
        return ("partial", str(placement) if kind.__name__ == "Partial" else repr(placement))
    return ("unknown", repr(placement))


def boxes(dtensor: DTensor) -> List[Box]:
    """The boxes of the global tensor that this rank's part of `dtensor` holds.

    They are in the order of the local tensor; the list is empty if this rank is not in the mesh.

    UnsupportedError: partial sums, unknown placements. LayoutError: the local tensor has another shape than
    the placements describe, or its cells cannot be determined (FSDP2 over tensor parallelism).
    """
    from .errors import LayoutError

    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape, mesh_shape = tuple(dtensor.shape), tuple(mesh.shape)
    placements = tuple(describe_placement(p) for p in dtensor.placements)
    held = tuple(dtensor._local_tensor.shape)
    found = placement_boxes(shape, mesh_shape, coordinate, placements)
    fits = _fits(held, found)
    cuts = fsdp_cuts(mesh_shape, coordinate, placements)
    if cuts is not None:
        other = placement_boxes(shape, *cuts)
        if other != found and _fits(held, other):
            if not fits:
                return other
            if 0 not in held:
                raise LayoutError(
                    f"{_dtensor_text(dtensor, coordinate)} has a local tensor of shape {held}, which may hold "
                    f"{_cells(found)}, as the placements say, or {_cells(other)}, as FSDP2 over "
                    "tensor parallelism makes it; use a size that the mesh divides evenly"
                )
    if not fits:
        raise LayoutError(
            f"{_dtensor_text(dtensor, coordinate)} has a local tensor of shape {held}, but the placements "
            f"give {local_shape(found)}"
        )
    return found


def _fits(held: Dims, boxes: Sequence[Box]) -> bool:
    said = local_shape(boxes)
    return held == said or (0 in held and 0 in said)


def _cells(boxes: Sequence[Box]) -> str:
    return " and ".join(
        "[" + ", ".join(f"{b}:{b + n}" for b, n in zip(box.begin, box.extent)) + "]"
        for box in boxes
    )


def _dtensor_text(dtensor: DTensor, coordinate: Sequence[int]) -> str:
    return (
        f"a DTensor of shape {tuple(dtensor.shape)} with placements {tuple(dtensor.placements)} on "
        f"a mesh of {tuple(dtensor.device_mesh.shape)}, at coordinate {tuple(coordinate)},"
    )
