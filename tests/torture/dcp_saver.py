# SPDX-License-Identifier: Apache-2.0
"""Saves by torch.distributed.checkpoint through tensormount's Writer, for crash.py:
dcp_saver.py MARK RENDEZVOUS {N PATH MODEL}...

Two gloo ranks, each with half of the rows, save one .safetensors MODEL after another, every second one
in a thread (async_save). "begin N" is appended to the file MARK before the call, "done N" by each rank
when it has returned; what it raises ends the program with 1.
"""

import json
import os
import struct
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensormount as tm

DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def mark(file, text):
    with open(file, "ab", buffering=0) as out:
        out.write(f"{text}\n".encode())


def read_model(path, mesh):
    """Its tensors: matrices cut by rows, the others whole on both ranks."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(length)), bytearray(file.read())
    state = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        whole = torch.frombuffer(data[begin:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
        state[key] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) if whole.dim() else whole
    return state


def save_all(rank, marks, rendezvous, *arguments):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    writer = tm.torch.Writer()  # One for all: so is its group.
    for turn, (number, path, model) in enumerate(zip(*[iter(arguments)] * 3)):
        state = read_model(model, mesh)
        if rank == 0:
            mark(marks, f"begin {number}")
        if turn % 2:
            dcp.async_save(state, storage_writer=writer, checkpoint_id=path).result()
        else:
            dcp.save(state, storage_writer=writer, checkpoint_id=path)
        mark(marks, f"done {number}")
    dist.destroy_process_group()


def main():
    # Forked before torch has begun a thread: it is imported once.
    other = os.fork()
    save_all(1 if other == 0 else 0, *sys.argv[1:])
    if other != 0:
        _, status = os.waitpid(other, 0)
        sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
