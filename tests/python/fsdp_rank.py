#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fsdp_rank.py RANK ROWS...: one of eight ranks (nothing is sent) of linear layers of ROWS under FSDP2 (4) over tensor
parallelism (2); prints for each the rows that it holds as [begin, count], or "refused"."""

import json
import sys

import torch
import torch.distributed as dist
from support import needs  # noqa: F401: finds the package.
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensormount._boxes import boxes
from tensormount.errors import LayoutError


def main():
    rank, *layers = map(int, sys.argv[1:])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    answers = []
    for rows in layers:
        layer = torch.nn.Linear(3, rows, bias=False)
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=mesh["dp"])
        try:
            answers.append([(box.begin[0], box.extent[0]) for box in boxes(layer.weight)])
        except LayoutError:
            answers.append("refused")
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
