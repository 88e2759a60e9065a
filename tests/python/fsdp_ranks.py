#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fsdp_ranks.py DATAxTENSOR ROWS...: linear layers of ROWS under FSDP2 over tensor parallelism, on each rank of such
a mesh, each a process (nothing is sent). Prints a list for each rank: for each layer the rows that its local tensor has, and
those that its boxes say, or "refused"."""

import json
import os
import sys
import traceback

import torch
import torch._dynamo  # noqa: F401: once, not in each of the processes.
import torch.distributed as dist
from support import needs  # noqa: F401: finds the package.
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensormount._boxes import boxes
from tensormount.errors import LayoutError


def rows_of(rank, shape, layers):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape[0] * shape[1])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    answers = []
    for rows in layers:
        layer = torch.nn.Linear(3, rows, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(rows).reshape(-1, 1).expand(-1, 3))
        # Each rank cuts its part out of what it has: with fake ranks nothing would come from another.
        parallelize_module(layer, mesh["tp"], ColwiseParallel(), src_data_rank=None)
        fully_shard(layer, mesh=mesh["dp"])
        # As the moments of an optimizer are made.
        moments = torch.zeros_like(layer.weight)
        try:
            said = [row for box in boxes(layer.weight) for row in range(box.begin[0], box.begin[0] + box.extent[0])]
            assert boxes(moments) == boxes(layer.weight)
        except LayoutError as error:
            assert "FSDP2" in str(error), error
            said = "refused"
        answers.append([layer.weight.to_local()[:, 0].int().tolist(), said])
    return answers


def in_a_process(function, *arguments):
    """What `function` returns, in a process of its own: a mesh remembers which rank it was asked by."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writing, "w") as pipe:
                json.dump(function(*arguments), pipe)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(said)


def main():
    shape = tuple(map(int, sys.argv[1].split("x")))
    layers = list(map(int, sys.argv[2:]))
    print(json.dumps([in_a_process(rows_of, rank, shape, layers) for rank in range(shape[0] * shape[1])]))


if __name__ == "__main__":
    main()
