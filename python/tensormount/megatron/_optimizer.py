# SPDX-License-Identifier: Apache-2.0
"""The state of Megatron's distributed optimizer, without a gather.

Each data-parallel rank owns a range of each buffer: whole parameters, and parts of the two at its ends. Megatron's
format "fully_reshardable" has a tensor of a parameter's shape for each state of the parameter. To make it, Megatron
gathers the buffers on every rank, or on one. Here a rank describes its own range instead, as boxes of these tensors:
one for a whole parameter, at most 2 n - 1 for a part of one with n axes. The stored tensors are the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import dict_utils, mapping
from megatron.core.dist_checkpointing.optimizer import KEEP_VARS_HINT
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from tensormount.errors import KeyNotFoundError, UnsupportedError

# A parameter whose factory cuts it into more blocks is refused.
_MAX_BLOCKS = 1 << 16
_INSTEAD = "pass gather_optimizer=True to tm.megatron.install()"

_Dims = tuple[int, ...]


def sharded_state(optimizer: Any, model_sharded_state_dict: Any, is_loading: bool) -> dict[int, Any]:
    """Takes the place of DistributedOptimizer.sharded_param_state_fully_reshardable: the parts that this rank owns,
    as {number of the parameter: {state: {where in the rank's range: ShardedTensor}}}. Their data are the memory of the
    optimizer, so that a load fills it in place.

    A save leaves copies out: another rank may cut them in other places, but Megatron's wrapper for parallel saves tells
    parts by their begin alone."""
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    leaves = {one.data: one for one in dict_utils.nested_values(sharded)}
    state: dict[int, Any] = {}
    for number, (param, first, size) in enumerate(_owned(optimizer)):
        leaf = leaves.get(param)
        if leaf is None:
            raise ValueError(f"a model parameter of shape {tuple(param.shape)} is not in the sharded state dict."
                             + KEEP_VARS_HINT)
        layout = _layout(optimizer, leaf, first, size)
        if not is_loading:
            layout = [(at, part) for at, part in layout if mapping.is_main_replica(part.replica_id)]
        state[number] = {}
        found = optimizer._get_main_param_and_optimizer_states(param)
        for name, tensor in _states(found, size, leaf.key).items():
            state[number][name] = {
                str(at): dataclasses.replace(
                    part,
                    key=f"optimizer.state.{name}.{part.key}",
                    data=tensor[at:at + math.prod(part.local_shape)].view(part.local_shape),
                    dtype=tensor.dtype,
                )
                for at, part in layout
            }
    return state


def is_state(state: dict[int, Any]) -> bool:
    """Whether a loaded state is of `sharded_state`, not of Megatron, which has a tensor for each state."""
    return all(isinstance(parts, dict) for states in state.values() for parts in states.values())


def load_state(optimizer: Any, state: dict[int, Any]) -> None:
    """Takes the place of DistributedOptimizer.load_parameter_state_from_fully_reshardable. `state`: as of
    `sharded_state`, with loaded tensors."""
    with torch.no_grad():
        for number, (param, _, size) in enumerate(_owned(optimizer)):
            found = optimizer._get_main_param_and_optimizer_states(param)
            for name, tensor in _states(found, size).items():
                left = size
                for at, part in state.get(number, {}).get(name, {}).items():
                    into = tensor[int(at):int(at) + part.numel()].view(part.shape)
                    if into.data_ptr() != part.data_ptr():
                        into.copy_(part)
                    left -= part.numel()
                if left:
                    raise KeyNotFoundError(
                        f"optimizer.state.{name}, of a parameter of shape {tuple(param.shape)}: {left} of {size} "
                        "elements that this rank owns are not loaded"
                    )
            # Copies the states that are not the optimizer's own memory.
            optimizer._set_main_param_and_optimizer_states(param, found)
        sync = getattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
        if sync is not None:
            sync()


def _owned(optimizer: Any) -> Iterator[tuple[Any, int, int]]:
    """The parameters that this rank owns a part of, each with the first element and the number of elements."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, ranges["param"].start, ranges["param"].end - ranges["param"].start


def _states(found: dict[str, Any], size: int, key: str = "") -> dict[str, Any]:
    """Those of an optimizer's tensors for a parameter that have an element for each of its `size` elements on this
    rank: "param" (the main copy), "exp_avg", "exp_avg_sq"."""
    # "step" is stored with the parameter groups.
    states = {name: one.detach() for name, one in found.items() if name != "step" and isinstance(one, torch.Tensor)}
    for name, tensor in states.items():
        if tensor.shape != (size,) or not tensor.is_contiguous():
            raise UnsupportedError(
                f"optimizer.state.{name}.{key}: has the shape {tuple(tensor.shape)}, but this rank owns {size} "
                f"elements; {_INSTEAD}"
            )
    return states


def _layout(optimizer: Any, leaf: Any, first: int, size: int) -> list[tuple[int, Any]]:
    """Elements [first, first + size) of a local parameter as boxes of its global tensors: for each box its place in
    this range, and a ShardedTensor without data. `leaf`: the parameter's ShardedTensor or factory."""
    if not isinstance(leaf.replica_id, tuple) or len(leaf.replica_id) != 3:
        raise UnsupportedError(f"{leaf.key}: the replica id {leaf.replica_id} is not (PP, TP, DP); {_INSTEAD}")
    # Data-parallel ranks own different elements. Instances of the optimizer have copies.
    replica_id = (*leaf.replica_id[:2], optimizer.distributed_optimizer_instance_id)
    local = torch.empty(leaf.data.shape, device="meta")
    if isinstance(leaf, mapping.ShardedTensorFactory):
        built = dataclasses.replace(leaf, data=local, replica_id=replica_id).build()
        parts = [part for part in dict_utils.nested_values(built) if isinstance(part, mapping.ShardedTensor)]
    else:
        parts = [dataclasses.replace(leaf, data=local, dtype=local.dtype, replica_id=replica_id)]
    found = []
    for part in parts:
        ahead, offset = part.prepend_axis_num, part.global_offset
        for at, begin, extent in _boxes_of_view(part, local, first, size):
            found.append((at, dataclasses.replace(
                part,
                data=None,
                local_shape=(1,) * ahead + extent,
                global_offset=(*offset[:ahead], *(a + b for a, b in zip(offset[ahead:], begin))),
                axis_fragmentations=None,  # The boxes are no grid.
                prepend_axis_num=0,
            )))
    found.sort(key=lambda one: one[0])
    ends = list(itertools.accumulate((math.prod(part.local_shape) for _, part in found), initial=0))
    if ends[:-1] != [at for at, _ in found] or ends[-1] != size:
        raise UnsupportedError(
            f"{leaf.key}: its ShardedTensorFactory does not store each element of the parameter once; {_INSTEAD}"
        )
    return found


def _boxes_of_view(part: Any, local: Any, first: int, size: int) -> Iterator[tuple[int, _Dims, _Dims]]:
    """The boxes of a view of `local` that have its elements [first, first + size): where each begins in this range,
    its begin in the view, and its extent."""
    view = part.data
    if view.untyped_storage()._cdata != local.untyped_storage()._cdata:
        raise UnsupportedError(f"{part.key}: its ShardedTensorFactory copies the parameter; {_INSTEAD}")
    # The last axes from `axis` on are contiguous: a block.
    axis, block = view.dim(), 1
    while axis and (view.shape[axis - 1] == 1 or view.stride(axis - 1) == block):
        axis -= 1
        block *= view.shape[axis]
    if math.prod(view.shape[:axis]) > _MAX_BLOCKS:
        raise UnsupportedError(
            f"{part.key}: its ShardedTensorFactory cuts the parameter into {math.prod(view.shape[:axis])} blocks, "
            f"at most {_MAX_BLOCKS} are supported; {_INSTEAD}"
        )
    for lead in itertools.product(*map(range, view.shape[:axis])):
        at = view.storage_offset() + sum(i * step for i, step in zip(lead, view.stride()))
        low, high = max(at, first), min(at + block, first + size)
        for begin, extent in _boxes_of_run(tuple(view.shape[axis:]), low - at, high - low):
            yield low - first, (*lead, *begin), (1,) * axis + extent
            low += math.prod(extent)


def _boxes_of_run(shape: _Dims, first: int, count: int) -> Iterator[tuple[_Dims, _Dims]]:
    """Elements [first, first + count) of a box of `shape`, in row-major order, as boxes in this order."""
    if count <= 0:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while count > 0:
        index, within = divmod(first, row)
        if within == 0 and count >= row:
            rows = count // row
            yield (index, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            done = rows * row
        else:
            done = min(count, row - within)
            for begin, extent in _boxes_of_run(shape[1:], within, done):
                yield (index, *begin), (1, *extent)
        first += done
        count -= done
