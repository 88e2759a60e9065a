#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small checkpoints with the PyTorch that is installed, for tests of reading them in place:

    make_dcp.py DIR    DIR/global (4 ranks), DIR/ranks (no global plan), DIR/files (2 files a rank),
                       DIR/f4 (2 ranks)

Cell i of a tensor, in global row-major order, is (i * 7 + 3) % 251, so that every cell can be
compared without keeping what was saved. Only of bool it is i % 3 == 0; float8 has these bytes.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def formula(dtype, *shape):
    n = 1
    for extent in shape:
        n *= extent
    i = torch.arange(n)
    if dtype == torch.bool:
        return (i % 3 == 0).reshape(shape)
    values = (i * 7 + 3) % 251
    if dtype.itemsize == 1:
        return values.to(torch.uint8).view(dtype).reshape(shape)
    return values.to(dtype).reshape(shape)


def objects():
    return {
        "iteration": 1200,
        "betas": (0.9, 0.95),
        "name": "run",
        "bytes": b"\x00\xff",
        "flags": [True, None, -1],
        "opaque": torch.float32,
    }


def state():
    """What 4 ranks save together: every cut."""
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    cut = distribute_tensor
    return {
        "model": {
            "rows": cut(formula(torch.float32, 8, 6), line, [Shard(0)]),
            "columns": cut(formula(torch.bfloat16, 4, 8), line, [Shard(1)]),
            "grid": cut(formula(torch.int64, 6, 8), square, [Shard(0), Shard(1)]),
            "uneven": cut(formula(torch.float32, 5, 3), line, [Shard(0)]),
            "short": cut(formula(torch.float32, 2, 3), line, [Shard(0)]),
            "replicated": cut(formula(torch.float32, 3, 4), line, [Replicate()]),
            "transposed": cut(formula(torch.float32, 4, 6), line, [Shard(1)]).t(),
        },
        "plain": formula(torch.float64, 3),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "bool": formula(torch.bool, 7),
        "f8": formula(torch.float8_e4m3fn, 4, 4),
        "strided": formula(torch.float32, 5, 4).t(),
        "optim": {"param_groups": [{"lr": 0.001, "betas": (0.9, 0.95)}]},
        **objects(),
    }


def save_global(rank, folder, port):
    dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=4)
    dcp.save(state(), checkpoint_id=os.path.join(folder, "global"))
    dist.destroy_process_group()


def save_ranks(rank, folder, port):
    dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    writer = dcp.FileSystemWriter(os.path.join(folder, "ranks"))
    values = {
        "w": distribute_tensor(formula(torch.float32, 4, 3), mesh, [Shard(0)]),
        "own": formula(torch.int32, rank + 1),
        "rank": rank,
    }
    dcp.save(values, storage_writer=writer, use_collectives=False)
    dist.destroy_process_group()


def save_f4(rank, folder, port):
    """Two elements a byte: byte i of a tensor, in global row-major order, is (i * 7 + 3) % 251."""
    dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def part(axis, *shape):
        whole = formula(torch.uint8, *shape)
        local = whole.chunk(2, axis)[rank].contiguous().view(torch.float4_e2m1fn_x2)
        return DTensor.from_local(local, mesh, [Shard(axis)], run_check=False, shape=whole.shape,
                                  stride=whole.stride())

    dcp.save({"rows": part(0, 4, 6), "columns": part(1, 4, 6), "line": part(0, 5)},
             checkpoint_id=os.path.join(folder, "f4"))
    dist.destroy_process_group()


def main():
    folder = sys.argv[1]
    for function, ranks in ((save_global, 4), (save_ranks, 2), (save_f4, 2)):
        with tempfile.TemporaryDirectory() as port:
            mp.spawn(function, args=(folder, os.path.join(port, "store")), nprocs=ranks)
    values = {"a": formula(torch.float32, 9), "b": formula(torch.int16, 3, 3), "n": 5}
    writer = dcp.FileSystemWriter(os.path.join(folder, "files"), thread_count=2)
    dcp.save(values, storage_writer=writer, no_dist=True)


if __name__ == "__main__":
    main()
