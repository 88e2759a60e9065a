#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One of four gloo ranks of boxes_test.py: scatters tensors over meshes, compares its parts with their boxes."""

import torch
import torch.distributed as dist
from boxes_test import put_together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tensormount import _boxes

CASES = [
    ((4,), (9, 3), [Shard(0)]),
    ((4,), (3, 10), [Shard(1)]),
    ((2, 2), (8, 4), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), (12, 5), [_StridedShard(0, split_factor=3), Shard(1)]),
    ((2, 2), (7,), [Replicate(), Shard(0)]),
    ((2, 2), (16, 2), [Shard(0), _StridedShard(0, split_factor=2)]),
    ((2, 2), (), [Replicate(), Replicate()]),
    ((2, 2), (16, 3), [_StridedShard(0, split_factor=4), Replicate()]),
]


def main():
    dist.init_process_group("gloo")
    for mesh_shape, shape, placements in CASES:
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        # Scattered from rank 0 by gloo; the others' own numbers must not be seen. PyTorch 2.13 cannot scatter strided
        # shards of unequal sizes (an assertion): they are cut locally.
        dtensor = distribute_tensor(whole if dist.get_rank() == 0 else torch.full_like(whole, -7), mesh, placements)
        boxes = _boxes.boxes(dtensor)
        local = dtensor.to_local()
        assert torch.equal(put_together(whole, boxes, local.shape, whole.dtype), local), (mesh_shape, shape, placements, boxes)
        mains = torch.tensor(int(boxes[0].main) * sum(torch.Size(box.extent).numel() for box in boxes))
        dist.all_reduce(mains)
        assert mains.item() == whole.numel(), (mesh_shape, shape, placements)
    uneven = torch.arange(13 * 5).reshape(13, 5)
    mesh = init_device_mesh("cpu", (2, 2))
    dtensor = distribute_tensor(uneven, mesh, [_StridedShard(0, split_factor=3), Shard(1)], src_data_rank=None)
    local = dtensor.to_local()
    assert torch.equal(put_together(uneven, _boxes.boxes(dtensor), local.shape, uneven.dtype), local)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
