#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures saves and loads from Python, compared with their lower bounds. Prints JSON lines.

usage: python_jobs.py [--rounds N] [--mib N] [--ranks N] [--folder FOLDER] [tensors | hold | dcp]...

tensors  10,000 tensors of 4 KiB on 4 ranks: the time from the call to the first byte written ("ready": the part
         in Python, "cpu": its CPU time; validation, plan and verdict), for the first and for a repeated save
hold     how long async_save blocks the caller, compared with a copy of the same bytes to memory that was used
         before
dcp      save, load and rows to columns of --mib MiB (default 256) by --ranks gloo ranks (default 4), compared with
         DCP's file writer and reader, and with reading the same number of bytes ("raw"), interleaved; through Writer
         and Reader, beside DCP with a writer and a reader that do nothing ("dcp_alone"): "of_limit" is the ratio to
         DCP alone and 1.15 times our own save or load; how long async_save blocks the caller ("hold"). CPU time and
         memory are those of rank 0: "extra_mib" is how far its peak exceeds what it had before the call

PYTHONPATH and TENSORMOUNT_LIBRARY as for tests/python.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests/python"))


def told(**values):
    print(json.dumps(values), flush=True)


def quartiles(values):
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "best": ordered[0], "worst": ordered[-1]}


# ---- Code of the ranks -----------------------------------------------------------------------------------


def tensors(group, rank, size, rounds, kind):
    """10,000 tensors of 4 KiB, a quarter on each rank, compared with a save of one tensor by the same ranks, which
    is the cost of the call, its threads and the waits for other ranks. Ranks begin together."""
    import gc

    import tensormount as tm

    if kind == "torch":
        import torch
    else:
        import numpy as np

    def made(name, count):
        made = (lambda i: torch.full((1024,), float(i))) if kind == "torch" else (
            lambda i: np.full(1024, i, "f4"))
        return {f"{name}.layer.{i}.weight": made(i) for i in range(rank, count, size)}

    def saved(state):
        tm.validate({}, group)
        begin, cpu = time.perf_counter(), time.thread_time()
        report = tm.save(state, "S/tensors", group, replace=True)
        whole, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        wrote = sum(report[f"{phase}_seconds"] for phase in ("write", "compare", "publish"))
        checked = report["validate_seconds"] + report["plan_seconds"]
        return {"ready_ms": 1e3 * (whole - wrote), "library_ms": 1e3 * checked,
                "python_ms": 1e3 * (whole - wrote - checked), "cpu_ms": 1e3 * cpu,
                "save_ms": 1e3 * whole}

    found = {"first": [], "known": [], "one tensor": []}
    for number in range(rounds + 1):
        state = made(f"round{number}", 10_000)
        one = made(f"one{number}", size)
        gc.collect()  # So that garbage of the state is not collected within a measured save.
        saved(one)
        times = {"first": saved(state), "known": saved(state), "one tensor": saved(one)}
        if number:
            for what, numbers in times.items():
                found[what].append(numbers)
    if rank == 0:
        for what, rows in found.items():
            told(bench="python_tensors", kind=kind, what=what, rounds=rounds, **{
                name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]})


def hold(rounds):
    import numpy as np
    import tensormount as tm

    group = tm.Group.single()
    source = {f"w{i}": np.full(1 << 22, i, "f4") for i in range(16)}
    floor = {key: np.zeros_like(value) for key, value in source.items()}
    held, copied = [], []
    for number in range(rounds + 1):
        begin = time.perf_counter()
        for key, value in source.items():
            np.copyto(floor[key], value)
        middle = time.perf_counter()
        job = tm.async_save(source, "S/hold", group, replace=True)
        end = time.perf_counter()
        job.wait()
        if number:  # The first save allocates the memory.
            copied.append(middle - begin)
            held.append(end - middle)
    told(bench="python_hold", bytes=sum(v.nbytes for v in source.values()),
         copy_ms=1e3 * statistics.median(copied), hold_ms=1e3 * statistics.median(held),
         ratio=statistics.median(held) / statistics.median(copied))


def memory_mib(what):
    """A field of /proc/self/status, e.g. VmRSS or VmHWM."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(what + ":"))


def nothing():
    """A writer and a reader of DCP that move no data: what DCP itself costs. The reader answers with the metadata of the
    last save, of every rank's plan."""
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
    from torch.futures import Future

    def done(value):
        future = Future()
        future.set_result(value)
        return future

    class NoWriter(StorageWriter):
        def reset(self, checkpoint_id=None):
            pass

        def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
            pass

        def prepare_local_plan(self, plan):
            return plan

        def prepare_global_plan(self, plans):
            return plans

        def write_data(self, plan, planner):
            for item in plan.items:
                planner.resolve_data(item)
            return done([])

        def finish(self, metadata, results):
            pass

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return True

    class NoReader(StorageReader):
        def __init__(self, metadata):
            self.metadata = metadata

        def reset(self, checkpoint_id=None):
            pass

        def read_metadata(self):
            return Metadata(state_dict_metadata=dict(self.metadata))

        def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
            pass

        def prepare_local_plan(self, plan):
            return plan

        def prepare_global_plan(self, plans):
            return plans

        def read_data(self, plan, planner):
            for item in plan.items:
                planner.commit_tensor(item, planner.resolve_tensor(item))
            return done(None)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return True

    return NoWriter, NoReader


def dcp_rank(rounds, mib):
    import tensormount as tm
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    no_writer, no_reader = nothing()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = dist.get_world_size()

    def made(axis):
        rows = mib * 16  # 16 tensors of `rows` rows of 4 KiB.
        shape = [rows // size, 1024] if axis == 0 else [rows, 1024 // size]
        return {f"layer.{i}": DTensor.from_local(torch.rand(shape), mesh, [Shard(axis)],
                                                 run_check=False) for i in range(16)}

    rows, columns = made(0), made(1)
    group = tm.Group.from_torch()
    times, cpu, extra = {}, {}, {}

    def timed(name, call):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # The peak begins again at the memory that is in use now.
        before = memory_mib("VmRSS")
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        call()
        used = time.process_time() - used
        dist.barrier()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        cpu.setdefault(name, []).append(used)
        extra.setdefault(name, []).append(memory_mib("VmHWM") - before)

    def held(name, call, wait):
        """The time of `call`, which begins a save that goes on in the background, and of `call` and `wait`."""
        pending = []
        begin = time.perf_counter()

        def whole():
            pending.append(call())
            times.setdefault(name + "_hold", []).append(time.perf_counter() - begin)
            wait(pending.pop())

        timed(name + "_background", whole)

    def raw():
        """Reads the same number of bytes as a rank loads, into the same memory, sequentially from one file."""
        with open(f"dcp/__{dist.get_rank()}_0.distcp", "rb", buffering=0) as file:
            for tensor in rows.values():
                file.readinto(tensor.to_local().numpy())

    def fresh(path):
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    for number in range(rounds + 1):
        if number == 1:
            times.clear()
            cpu.clear()
            extra.clear()
        fresh("dcp")
        fresh("S")
        timed("dcp_save", lambda: dcp.save(rows, checkpoint_id="dcp"))
        timed("save", lambda: tm.save(rows, "S/step", group))
        timed("dcp_load", lambda: dcp.load(rows, checkpoint_id="dcp"))
        timed("load", lambda: tm.load(rows, "S/step", group))
        timed("dcp_columns", lambda: dcp.load(columns, checkpoint_id="dcp"))
        timed("columns", lambda: tm.load(columns, "S/step", group))
        timed("unverified", lambda: tm.load(rows, "S/step", group, verify="off"))
        timed("columns_unverified", lambda: tm.load(columns, "S/step", group, verify="off"))
        timed("raw", raw)
        fresh("S")
        timed("writer", lambda: dcp.save(rows, storage_writer=tm.torch.Writer("S/dcp", group=group)))
        metadata = tm.torch.Reader("S/dcp").read_metadata().state_dict_metadata
        timed("reader", lambda: dcp.load(rows, storage_reader=tm.torch.Reader("S/dcp")))
        timed("reader_columns", lambda: dcp.load(columns, storage_reader=tm.torch.Reader("S/dcp")))
        timed("dcp_save_alone", lambda: dcp.save(rows, storage_writer=no_writer()))
        timed("dcp_load_alone", lambda: dcp.load(rows, storage_reader=no_reader(metadata)))
        timed("dcp_columns_alone", lambda: dcp.load(columns, storage_reader=no_reader(metadata)))
        fresh("dcp")
        fresh("S")
        held("dcp", lambda: dcp.async_save(rows, checkpoint_id="dcp"), lambda future: future.result())
        held("async", lambda: tm.async_save(rows, "S/step", group), lambda handle: handle.wait())
    if dist.get_rank() == 0:
        for name, of in (("save", "dcp_save"), ("writer", "dcp_save"), ("load", "dcp_load"),
                         ("reader", "dcp_load"), ("unverified", "dcp_load"), ("raw", "dcp_load"),
                         ("columns", "dcp_columns"), ("columns_unverified", "dcp_columns"),
                         ("reader_columns", "dcp_columns"),
                         ("async_background", "dcp_background")):
            told(bench="python_dcp", what=name, mib=mib, ms=round(1e3 * statistics.median(times[name]), 1),
                 dcp_ms=round(1e3 * statistics.median(times[of]), 1),
                 ratio=round(statistics.median(a / b for a, b in zip(times[name], times[of])), 3),
                 cpu_ms=round(1e3 * statistics.median(cpu[name]), 1),
                 dcp_cpu_ms=round(1e3 * statistics.median(cpu[of]), 1),
                 extra_mib=round(statistics.median(extra[name]), 1),
                 dcp_extra_mib=round(statistics.median(extra[of]), 1))
        for name, alone, own in (("writer", "dcp_save_alone", "save"), ("reader", "dcp_load_alone", "load"),
                                 ("reader_columns", "dcp_columns_alone", "columns")):
            told(bench="python_dcp", what=name, mib=mib, ms=round(1e3 * statistics.median(times[name]), 1),
                 dcp_alone_ms=round(1e3 * statistics.median(times[alone]), 1),
                 own_ms=round(1e3 * statistics.median(times[own]), 1),
                 of_limit=round(statistics.median(
                     a / (b + 1.15 * c) for a, b, c in zip(times[name], times[alone], times[own])), 3))
        told(bench="python_dcp", what="hold", mib=mib, ms=round(1e3 * statistics.median(times["async_hold"]), 1),
             dcp_ms=round(1e3 * statistics.median(times["dcp_hold"]), 1),
             ratio=round(statistics.median(a / b for a, b in zip(times["async_hold"], times["dcp_hold"])), 3))
    group.close()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="size of the state of dcp")
    parser.add_argument("--ranks", type=int, default=4, help="of dcp")
    parser.add_argument("--folder", help="where the checkpoints lie; default: a new one in TMPDIR")
    parser.add_argument("what", nargs="*", default=["tensors", "hold", "dcp"])
    arguments = parser.parse_args()
    folder = arguments.folder or tempfile.mkdtemp()
    os.chdir(folder)
    try:
        if "tensors" in arguments.what:
            import ranks

            for kind in ("numpy", "torch"):
                for out in ranks.run("python_jobs:tensors", 4, arguments.rounds, kind,
                                     PYTHONPATH=os.pathsep.join([os.path.join(ROOT, "bench"),
                                                                 os.environ.get("PYTHONPATH", "")])):
                    sys.stdout.write(out)
        if "hold" in arguments.what:
            hold(arguments.rounds)
        if "dcp" in arguments.what:
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                 str(arguments.ranks), os.path.abspath(__file__), "rank", str(arguments.rounds), str(arguments.mib)],
                check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        dcp_rank(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
