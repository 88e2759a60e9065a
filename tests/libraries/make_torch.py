# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints with torch: make_torch.py WHAT[,WHAT...] FOLDER [RANKS...]; each at FOLDER/WHAT.

load@PATH loads that checkpoint and compares it. Of several numbers of ranks each does all of it.
"""

import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import formula
import ranks


def tensor(key, dtype, shape, box=None):
    """As the formula says, packed."""
    values = formula.values(key, dtype, shape)
    values = values if box is None else values[box]
    of = getattr(torch, formula.DTYPES[dtype][2])
    if values.size == 0:
        return torch.empty(values.shape[:-1], dtype=of)
    return torch.from_numpy(values.copy()).view(of).reshape(values.shape[:-1])


def laid_out(value, how):
    """The same elements, otherwise in memory."""
    if "transposed" in how:
        return value.t().contiguous().t()
    if "permuted" in how:
        return value.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if "channels_last" in how:
        return value.to(memory_format=torch.channels_last)
    if "window" in how:
        big = torch.zeros([extent + 3 for extent in value.shape], dtype=value.dtype)
        window = big[tuple(slice(1, extent + 1) for extent in value.shape)]
        window.copy_(value)
        return window
    return value


def distributed(key, spec, rank, count, meshes):
    dtype, shape, how = spec
    local = laid_out(tensor(key, dtype, shape, formula.local_box(shape, how, rank, count)), how)
    word = how.split()[0]
    if word == "plain":
        return local
    line, grid = meshes
    mesh, places = {
        "rows": (line, [Shard(0)]),
        "cols": (line, [Shard(1)]),
        "grid": (grid, [Shard(0), Shard(1)]),
        "partly": (grid, [Replicate(), Shard(1)]),
        "replicated": (line, [Replicate()]),
    }[word]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride)


def meshes_of(count):
    return init_device_mesh("cpu", (count,)), init_device_mesh("cpu", (2, count // 2))


def state(rank, count, specs=None, objects=None):
    meshes = meshes_of(count)
    specs = formula.MODEL if specs is None else specs
    flat = {key: distributed(key, spec, rank, count, meshes) for key, spec in specs.items()}
    flat.update(formula.OBJECTS if objects is None else objects)
    return formula.nested(flat)


def make_dcp(rank, count, folder):
    dcp.save(state(rank, count), checkpoint_id=folder)


def make_dcp_files(rank, count, folder):
    """Several files a rank."""
    dcp.save(state(rank, count), storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False))


def make_dcp_threads(rank, count, folder):
    dcp.save(state(rank, count), storage_writer=dcp.FileSystemWriter(folder, thread_count=3))


def make_dcp_ranks_only(rank, count, folder):
    """No plan that all agreed upon: a checkpoint a rank."""
    specs = {f"model.of_rank{rank}": ("f32", (5, 3), "plain"), "model.all": ("bf16", (4, 4), "plain")}
    dcp.save(state(rank, count, specs, {}), checkpoint_id=folder, use_collectives=False)


def make_dcp_twice(rank, count, folder):
    """A second save in place with fewer items leaves files of the first behind."""
    dcp.save(state(rank, count), checkpoint_id=folder)
    specs = dict(list(formula.MODEL.items())[:5])
    dcp.save(state(rank, count, specs, {}),
             storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True, overwrite=True))


def make_like_stand_ins(rank, count, folder):
    """What common_cases() of tests/golden/foreign/make_dcp_old.py writes, saved by torch on two ranks."""

    def cells(dtype, *shape):
        index = torch.arange(torch.Size(shape).numel())
        return ((index * 7 + 3) % 251).to(dtype).reshape(shape)

    line = init_device_mesh("cpu", (count,))

    def part(value, axis, turned=False):
        shape = value.shape
        local = value.chunk(count, axis)[rank].contiguous()
        if turned:
            local = local.t().contiguous().t()
        return DTensor.from_local(local, line, [Shard(axis)], run_check=False, shape=shape, stride=value.stride())

    dcp.save({
        "iteration": 1200,
        "rows": part(cells(torch.float32, 4, 6), 0),
        "columns": part(cells(torch.bfloat16, 4, 6), 1),
        "scalar": cells(torch.float64),
        "empty": cells(torch.int64, 0, 3),
        "turned": part(cells(torch.float32, 5, 4), 1, turned=True),
    }, checkpoint_id=folder)


HF = {key: spec for key, spec in formula.MODEL.items()
      if spec[0] in ("f32", "bf16", "f16") and spec[1] and 0 not in spec[1]
      and not set(spec[2].split()) & {"transposed", "permuted", "channels_last"}}


def hf_state(rank, count):
    meshes = meshes_of(count)
    return {key: distributed(key, spec, rank, count, meshes) for key, spec in HF.items()}


def make_hf_shards(rank, count, folder):
    dcp.save(hf_state(rank, count), storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))


def make_hf_consolidated(rank, count, folder):
    names = {key: 1 + i % 3 for i, key in enumerate(HF)}
    dcp.save(hf_state(rank, count), storage_writer=dcp.HuggingFaceStorageWriter(
        folder, fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True))


def load(rank, count, source):
    """Loads MODEL from a checkpoint that need not be torch's, as rows, and compares every byte."""
    line = init_device_mesh("cpu", (count,))
    wanted, boxes = {}, {}
    for key, (dtype, shape, _) in formula.MODEL.items():
        box = formula.local_box(shape, "rows" if shape else "plain", rank, count)
        local = torch.zeros([s.stop - s.start for s in box], dtype=getattr(torch, formula.DTYPES[dtype][2]))
        stride = torch.empty(shape, device="meta").stride()
        wanted[key] = local if not shape else DTensor.from_local(
            local, line, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
        boxes[key] = box
    dcp.load(wanted, checkpoint_id=source)
    for key, value in wanted.items():
        value = value.to_local() if isinstance(value, DTensor) else value
        found = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        if found != formula.raw(key, *formula.MODEL[key][:2], boxes[key]):
            raise AssertionError(f"rank {rank} of {count}: {key} differs")


def all_of(rank, count, wanted, folder):
    for what in wanted:
        if what.startswith("load@"):
            load(rank, count, what[5:])
            continue
        globals()[f"make_{what}"](rank, count, f"{folder}/{what}")


def main():
    wanted, folder, *more = sys.argv[1:]
    for what in wanted.split(","):
        if not what.startswith("load@"):
            pathlib.Path(folder, what).mkdir(parents=True, exist_ok=True)
    for count in more or ["4"]:
        ranks.run(int(count), all_of, wanted.split(","), folder)


if __name__ == "__main__":
    main()
