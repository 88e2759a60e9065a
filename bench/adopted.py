#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures reads of checkpoints of torch.distributed.checkpoint in place, compared with torch itself.

    .cache/venv-libraries/bin/python3 bench/adopted.py --bin build/release/bin [--dir /dev/shm] [--rounds 5]
        [--only metadata,open,storage,slice,load] [--gib 0.5]

Prints one JSON line for each figure: medians of rounds in which both sides take turns. The data are made below
--dir and removed. The page cache is warm: this measures programs, not disks.
"""

import argparse
import gc
import json
import os
import pathlib
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "libraries"))

PYTHON = [sys.executable, "-B", "-W", "ignore"]


def say(name, **fields):
    print(json.dumps({"workload": name, **fields}), flush=True)


def milliseconds(function):
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def median(values):
    return round(statistics.median(values), 2)


class Bench:
    def __init__(self, args, folder):
        self.args, self.dir = args, folder
        self.tool = str(pathlib.Path(args.bin).resolve() / "tensormount")

    def run(self, *words, seconds=300):
        done = subprocess.run([self.tool, *map(str, words)], capture_output=True, timeout=seconds, check=True)
        return done.stdout

    def python(self, code, *words, seconds=600):
        """Runs code of this file in a new process and returns the last JSON that it prints."""
        done = subprocess.run([*PYTHON, str(pathlib.Path(__file__).resolve()), "--inner", code, *map(str, words)],
                              capture_output=True, text=True, timeout=seconds, start_new_session=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-4000:])
        return json.loads(done.stdout.splitlines()[-1])

    def start(self):
        return milliseconds(lambda: self.run("--version"))

    def steps(self, folder):
        """Milliseconds of the steps of opening a directory, in a process that does nothing else."""
        done = subprocess.run([self.tool.removesuffix("tensormount") + "adoptbench", str(folder), "1"],
                              capture_output=True, check=True, timeout=300)
        return json.loads(done.stdout)

    # 100,000 chunks of .metadata, against pickle.load of the same bytes.
    def metadata(self):
        folder = self.dir / "chunks"
        self.python("make_chunks", folder)
        starts, ours, parsed, theirs, without_gc = [], [], [], [], []
        for _ in range(self.args.rounds):
            starts.append(self.start())
            parsed.append(self.steps(folder)["pickle_and_records_ms"])
            ours.append(milliseconds(lambda: self.run("--json", "ls", folder)))
            said = self.python("unpickle", folder)
            theirs.append(said["ms"])
            without_gc.append(said["ms_without_gc"])
        net = median(ours) - median(starts)
        say("metadata of 100,000 chunks", bytes=(folder / ".metadata").stat().st_size, parsed_ms=median(parsed),
            ls_ms=median(ours), start_ms=median(starts), pickle_load_ms=median(theirs),
            pickle_load_without_gc_ms=median(without_gc), ratio=round(median(theirs) / median(parsed), 1),
            ratio_without_gc=round(median(without_gc) / median(parsed), 1), ratio_of_ls=round(median(theirs) / net, 1))
        shutil.rmtree(folder)

    # 10,000 tensors: from `mount` to the first byte, and the library's parsing of the metadata.
    def open(self):
        folder, mnt = self.dir / "many", self.dir / "mnt"
        self.python("make_many", folder)
        mnt.mkdir()
        first, read, inside, theirs, one = [], [], [], [], []

        def mount_and_read():
            self.run("mount", folder, mnt)
            with open(mnt / "tensors" / "layers.7777.weight", "rb") as f:
                assert len(f.read(4)) == 4

        for _ in range(self.args.rounds):
            if os.access("/dev/fuse", os.R_OK | os.W_OK):
                first.append(milliseconds(mount_and_read))
                self.run("unmount", mnt)
            read.append(milliseconds(lambda: self.run("cat", folder, "layers.7777.weight")))
            inside.append(self.steps(folder)["first_byte_ms"])
            said = self.python("read_metadata", folder)
            theirs.append(said["ms"])
            one.append(said["one_ms"])
        say("10,000 tensors", metadata_bytes=(folder / ".metadata").stat().st_size,
            mount_to_first_byte_ms=median(first) if first else None, cat_ms=median(read),
            library_first_byte_ms=median(inside), torch_read_metadata_ms=median(theirs), torch_one_tensor_ms=median(one),
            ratio=round(median(theirs) / median(inside), 1), ratio_of_mount=round(median(theirs) / median(first or read), 1))
        shutil.rmtree(folder)

    # The bytes that adoption adds, and the bytes that one slice of columns reads.
    def storage(self):
        folder, store = self.big(), self.dir / "STORE"
        self.run("adopt", folder, store / "adopted")
        data = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        added = sum(p.stat().st_size for p in (store / "adopted").rglob("*") if p.is_file())
        say("adopted", data_bytes=data, added_bytes=added, percent=round(100 * added / data, 4))

    def slice(self):
        folder = self.big()
        report = json.loads(self.run("--json", "load", folder, "--ranks", 4, "--shard", "cols", "--keys", "layers.0.*"))
        say("columns of one tensor on 4 ranks", bytes_wanted=report["bytes_wanted"], bytes_read=report["bytes_read"],
            ratio=round(report["bytes_read"] / report["bytes_wanted"], 4))

    # Rows on 4 ranks, loaded as columns on 4 ranks.
    def load(self):
        folder = self.big()
        ours, theirs, mpi, report = [], [], [], {}
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        for _ in range(self.args.rounds):
            report = json.loads(self.run("--json", "load", folder, "--ranks", 4, "--shard", "cols"))
            ours.append(report["seconds"])
            if shutil.which("mpirun"):
                done = subprocess.run(["mpirun", *root, "--oversubscribe", "-n", "4", self.tool, "--json", "load",
                                       str(folder), "--shard", "cols"], capture_output=True, check=True, timeout=300)
                mpi.append(json.loads(done.stdout.splitlines()[-1])["seconds"])
            theirs.append(self.python("load_columns", folder)["seconds"])
        say("rows loaded as columns, 4 ranks", bytes=report["bytes_wanted"], threads_s=round(statistics.median(ours), 3),
            mpi_s=round(statistics.median(mpi), 3) if mpi else None, torch_s=round(statistics.median(theirs), 3),
            bytes_read=report["bytes_read"],
            ratio_threads=round(statistics.median(theirs) / statistics.median(ours), 2),
            ratio_mpi=round(statistics.median(theirs) / statistics.median(mpi), 2) if mpi else None)

    def big(self):
        folder = self.dir / "big"
        if not folder.exists():
            self.python("make_rows", folder, self.args.gib)
        return folder


# --- Code for processes with torch -----------------------------------------------------------


def inner_make_chunks(folder):
    import torch
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties,
                                                       TensorStorageMetadata)
    folder = pathlib.Path(folder)
    folder.mkdir()
    ranks, length = 1000, 4 * 64 + 1513
    states, storage = {}, {}
    for t in range(100):
        key = f"model.layers.{t}.weight"
        chunks = [ChunkStorageMetadata(torch.Size([r, 0]), torch.Size([1, 64])) for r in range(ranks)]
        states[key] = TensorStorageMetadata(TensorProperties(), torch.Size([ranks, 64]), chunks)
        for r in range(ranks):
            storage[MetadataIndex(key, torch.Size([r, 0]), r)] = filesystem._StorageInfo(
                f"__{r}_0.distcp", t * length, length)
    with open(folder / ".metadata", "wb") as f:
        pickle.dump(Metadata(states, storage_data=storage), f)
    for r in range(ranks):
        with open(folder / f"__{r}_0.distcp", "wb") as f:
            f.truncate(100 * length)
    print("{}")


def inner_unpickle(folder):
    import torch.distributed.checkpoint  # noqa: F401
    raw = (pathlib.Path(folder) / ".metadata").read_bytes()
    usual = milliseconds(lambda: pickle.loads(raw))
    gc.collect()
    gc.disable()
    print(json.dumps({"ms": usual, "ms_without_gc": milliseconds(lambda: pickle.loads(raw))}))


def inner_make_many(folder):
    import torch
    import torch.distributed.checkpoint as dcp
    dcp.save({f"layers.{i}.weight": torch.full((16,), float(i)) for i in range(10000)}, checkpoint_id=folder,
             no_dist=True)
    print("{}")


def inner_read_metadata(folder):
    import torch
    import torch.distributed.checkpoint as dcp
    read = milliseconds(lambda: dcp.FileSystemReader(folder).read_metadata())
    one = {"layers.7777.weight": torch.zeros(16)}
    print(json.dumps({"ms": read, "one_ms": milliseconds(
        lambda: dcp.load(one, checkpoint_id=folder, no_dist=True))}))


ROWS, LAYERS = 4096, 32


def columns_of(gib):
    return int(float(gib) * 2**30) // (2 * ROWS * LAYERS) // 4 * 4


def rows_of_rank(rank, count, folder, gib):
    import make_torch
    import torch
    import torch.distributed.checkpoint as dcp
    line, _ = make_torch.meshes_of(count)
    shape = (ROWS, columns_of(gib))
    state = {f"layers.{i}.weight": make_torch.DTensor.from_local(
        torch.full((ROWS // count, shape[1]), float(i), dtype=torch.bfloat16), line, [make_torch.Shard(0)],
        run_check=False) for i in range(LAYERS)}
    dcp.save(state, checkpoint_id=folder)


def inner_make_rows(folder, gib):
    import ranks
    ranks.run(4, rows_of_rank, folder, gib)
    print("{}")


def columns_of_rank(rank, count, folder):
    import make_torch
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    line, _ = make_torch.meshes_of(count)
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: make_torch.DTensor.from_local(
        torch.zeros(value.size[0], value.size[1] // count, dtype=torch.bfloat16), line, [make_torch.Shard(1)],
        run_check=False) for key, value in described.items()}
    dist.barrier()
    begin = time.perf_counter()
    dcp.load(state, checkpoint_id=folder)
    dist.barrier()
    if rank == 0:
        print(json.dumps({"seconds": time.perf_counter() - begin}))


def inner_load_columns(folder):
    import ranks
    ranks.run(4, columns_of_rank, folder)


def main():
    if sys.argv[1:2] == ["--inner"]:
        globals()[f"inner_{sys.argv[2]}"](*sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=str(ROOT / "build" / "release" / "bin"))
    parser.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--only", default="metadata,open,storage,slice,load")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="adopted-", dir=args.dir))
    try:
        for name in args.only.split(","):
            getattr(Bench(args, folder), name)()
    finally:
        mnt = folder / "mnt"
        if mnt.exists() and os.path.ismount(mnt):
            subprocess.run(["umount", "-l", str(mnt)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
