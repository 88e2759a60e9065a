#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the time in Python and the memory of jobs with many ranks. Prints JSON lines.

usage: python_ranks.py [--world N] [--tensors N] [--rounds N] [--sizes N,...] [--counts N,...]
                       [--folder FOLDER] [many | memory]...

many    --world ranks in this process, each with --tensors row-sharded DTensors (of PyTorch's fake process
        group, one rank after the other): the time in Python for a rank, the first time and repeated; then all
        ranks validate, and save twice, as threads of the library that reach each other over Unix sockets.
        Ranks share the cores, so times are those of all ranks together.
memory  peak memory (VmHWM) of rank 0 and of the others, which are processes without PyTorch, in two equal
        saves and two equal loads by --sizes ranks. Each rank has a row of --counts tensors ("rows"), or its
        share of the keys ("keys").

PYTHONPATH and TENSORMOUNT_LIBRARY as for tests/python.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests/python"))


def told(**values):
    print(json.dumps(values), flush=True)


# ---- Many ranks in one process -------------------------------------------------------------------


def state_of(rank, world, tensors):
    """The DTensors of rank `rank` of `world`, made without communication."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = DeviceMesh("cpu", torch.arange(world), _init_backend=False)
        made = {f"model.layers.{i}.attention.weight":
                DTensor.from_local(torch.full((1, 16), float(i)), mesh, [Shard(0)], run_check=False,
                                   shape=torch.Size((world, 16)), stride=(16, 1))
                for i in range(tensors)}
        mesh.get_coordinate()
    finally:
        dist.destroy_process_group()
    return made


def connected(world):
    """One group for each rank of this process."""
    import tensormount as tm

    from tensormount import _group

    folder = tempfile.mkdtemp(dir=".")
    groups = [None] * world
    _group._next_number = lambda name: 0  # All ranks of this process form one group, not several in a row.

    def connect(rank):
        groups[rank] = tm.Group.from_folder(folder, rank, world, timeout=120)

    each_in_a_thread(world, connect)
    return groups


def each_in_a_thread(count, call):
    """Calls call(i) for all i on one thread each. Returns the seconds from the moment at which all threads were
    ready to the end of the last call."""
    barrier = threading.Barrier(count + 1)

    def run(i):
        barrier.wait()
        call(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def many(world, tensors, rounds):
    import gc

    import torch  # noqa: F401

    from tensormount import _abi, _jobs, _save, _shards, _tree
    from tensormount._state import cache_of

    lib = _abi.library()
    groups = connected(world)
    floor, first, again, library, states = [], [], [], [], []
    for rank, group in enumerate(groups):
        state = state_of(rank, world, tensors)
        states.append(state)
        gc.collect(0)

        def described():
            flat = _tree.flatten(state)
            flat.json_texts()
            cache_of(group).get(flat.items(), _shards.SAVE, world)

        steps = (lambda: [leaf._local_tensor.data_ptr() for leaf in state.values()], described,
                 described, lambda: _save.build(state, group, _shards.SAVE),
                 lambda: _save.build(state, group, _shards.SAVE))
        for kind, step in zip((floor, first, again, [], library), steps):
            begin = time.thread_time()
            step()
            kind.append(1e6 * (time.thread_time() - begin) / tensors)
    for what, figures in (("first", first), ("known", again), ("known, and told the library", library)):
        told(bench="python_many", what=what, world=world, tensors=tensors,
             us_a_tensor=round(statistics.median(figures), 2), worst=round(max(figures), 2),
             addresses_alone=round(statistics.median(floor), 2))

    # Only the time in the library: states are built before.
    for number in range(rounds):
        built = [_save.build(s, g, _shards.VALIDATE)[0] for s, g in zip(states, groups)]

        def judge(rank):
            sound = ctypes.c_int32()
            with groups[rank]._handle() as handle:
                status = lib.tm_validate(built[rank].address, handle.address, None, ctypes.addressof(sound), None)
            assert status == 0 and sound.value == 1, (rank, status)

        cpu = time.process_time()
        wall = each_in_a_thread(world, judge)
        told(bench="python_many", what="validate", world=world, tensors=tensors, round=number,
             seconds=round(wall, 3), cpu_seconds=round(time.process_time() - cpu, 3))
    for number in range(rounds):
        built = [_save.build(s, g, _shards.SAVE)[0] for s, g in zip(states, groups)]
        given = _abi.SaveOptions(struct_size=ctypes.sizeof(_abi.SaveOptions), replace=1)
        jobs = [_jobs.begin(_save.SaveJob, lib.tm_save_in_place, b, "S/many", g, g._handle(), given)
                for b, g in zip(built, groups)]
        reports = [job.wait() for job in jobs]
        # The last rank to begin waits for no other rank.
        told(bench="python_many", what="save", world=world, tensors=tensors, round=number,
             known=reports[-1]["plan_reused"], validate_s=round(reports[-1]["validate_seconds"], 3),
             plan_s=round(max(r["plan_seconds"] for r in reports), 3),
             write_s=round(max(r["write_seconds"] for r in reports), 3),
             publish_s=round(reports[0]["publish_seconds"], 3))
    each_in_a_thread(world, lambda rank: groups[rank].close())


# ---- Memory --------------------------------------------------------------------------------------


def peak_mib():
    """VmHWM since the last call, in MiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return peak / 1024


def memory(group, rank, size, count, how):
    """Prints the peaks of this rank."""
    import numpy as np
    import tensormount as tm
    from tensormount import _abi, _jobs, _layouts, _load, _save, _shards
    from tensormount._state import State

    data = np.full((count if how == "rows" else -(-count // size), 64), rank, "f4")
    names = [f"model.layers.{i}.attention.weight" for i in range(count)]

    def build():
        built = State()
        if how == "rows":
            at, step = data.__array_interface__["data"][0], data.strides[0]
            built.add_shards(
                _shards.Shard(name, 12, (size, 64), (rank, 0), (1, 64), 0, at + i * step, None, None,
                              False, None) for i, name in enumerate(names))
        else:
            built.add_tensors(list(zip(names[rank::size], data)), _shards.SAVE, cache, size)
        return built

    cache = _layouts.LayoutCache()
    path = f"S/{how}{count}by{size}"
    save = _abi.SaveOptions(struct_size=ctypes.sizeof(_abi.SaveOptions), replace=1)
    load = _abi.LoadOptions(struct_size=ctypes.sizeof(_abi.LoadOptions), not_requested=4)
    peaks = {"before": peak_mib()}
    for number in (1, 2):
        _jobs.begin(_save.SaveJob, _abi.library().tm_save_in_place, build(), path, group, group._handle(), save).wait()
        peaks[f"save {number}"] = peak_mib()
    for number in (1, 2):
        pending = _load._LoadRequest({})
        pending.group = group
        _load.start(build(), path, group, group._handle(), (load, []), pending).wait()
        peaks[f"load {number}"] = peak_mib()
    tm.validate({}, group)
    print(json.dumps(peaks))


def memories(sizes, counts):
    import ranks

    bench = os.path.join(ROOT, "bench")
    for how in ("rows", "keys"):
        for count in counts:
            for size in sizes:
                path = os.pathsep.join([bench, os.environ.get("PYTHONPATH", "")])
                found = [json.loads(out) for out in
                         ranks.run("python_ranks:memory", size, count, how, PYTHONPATH=path)]
                for what in found[0]:
                    others = [peaks[what] for peaks in found[1:]]
                    told(bench="python_memory", how=how, tensors=count, ranks=size, what=what,
                         rank_0_mib=round(found[0][what], 1), others_mib=round(max(others), 1),
                         others_median_mib=round(statistics.median(others), 1),
                         over_mib=round(found[0][what] - statistics.median(others), 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="8,16")
    parser.add_argument("--counts", default="10000,100000")
    parser.add_argument("--folder", help="where the checkpoints lie; default: a new one in TMPDIR")
    parser.add_argument("what", nargs="*", default=["many", "memory"])
    arguments = parser.parse_args()
    folder = arguments.folder or tempfile.mkdtemp()
    os.chdir(folder)
    try:
        if "many" in arguments.what:
            many(arguments.world, arguments.tensors, arguments.rounds)
        if "memory" in arguments.what:
            memories([int(n) for n in arguments.sizes.split(",")],
                     [int(n) for n in arguments.counts.split(",")])
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
