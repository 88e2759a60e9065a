#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares tensormount with other ways to save and load, in turns, in one process tree.

    scripts/setup --with mpi,libraries
    cmake --preset release && cmake --build build/release --target tensormount
    .cache/venv-libraries/bin/python3 bench/peers.py --lib build/release/lib [--ranks 4] [--rounds 7] [--dir DIR]
        [--state gpt,llama,short,small] [--work same,fewer,columns,whole,slice,save] [--only ours,raw,mapped,...] [--cold]
        [--slow SECONDS:BYTES]

The peers save one state (tensors of bf16, row-sharded over the ranks), and load it into memory that is allocated.
  raw          pread or pwrite and fsync of as many bytes, one after the other, into or out of the same memory
  mapped       NumPy: slices of mapped safetensors files of the ranks, copied into place
  safetensors  get_slice of the same files, torch.save with mmap=True, torch.distributed.checkpoint (DCP), tensorstore
               (zarr, a chunk for each rank's rows; where it is installed)
  ours         through the C interface under MPI, verified; ours-unverified; ours-exchange; ours-pages (with page hashes).
               The mapping guard is on, except with --unguarded (a host that allows no signal handler)
  All processes begin a round after a barrier, and the round takes as long as the slowest process. Prints one JSON line for
  each figure: median and quartiles of the rounds in milliseconds, the ratio to raw (median of the ratios of the rounds), CPU
  milliseconds and page faults of all ranks, the most anonymous memory that a rank used in the first load, and for ours the
  bytes read and the bytes wanted. The page cache is warm, unless --cold drops the files from it before each round
  (by posix_fadvise, without root).
  --slow 0.001:200e6 (with --cold, as root): the files lie on storage that needs that many seconds for each request and
  delivers that many bytes a second (tests/support/adverse_fs.cc). The lines then have the read requests of a round, and
  the bytes that they asked for, compared with the bytes of the state.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ELEMENT = 2  # Bytes of bf16.
ALIGNMENT = 1 << 21


# ---- States and cuts ------------------------------------------------------------------------


def state(name):
    """Key -> shape."""
    if name == "small":
        return {f"p.{i}": (16, 16) for i in range(10000)}
    hidden, wide, layers, vocabulary = {"gpt": (896, 3584, 24, 32000), "llama": (2048, 5632, 4, 32000),
                                        "short": (896, 3584, 2, 0)}[name]
    tensors = {}
    for i in range(layers):
        at = f"layers.{i}."
        tensors[at + "norm.weight"] = (hidden,)
        if name == "llama":
            tensors.update({at + "q": (hidden, hidden), at + "k": (256, hidden), at + "v": (256, hidden),
                            at + "o": (hidden, hidden), at + "gate": (wide, hidden), at + "up": (wide, hidden)})
        else:
            tensors.update({at + "qkv": (3 * hidden, hidden), at + "proj": (hidden, hidden), at + "fc": (wide, hidden)})
        tensors[at + "down"] = (hidden, wide)
    if vocabulary:
        tensors["embed"] = (vocabulary, hidden)
    return tensors


def runs(name):
    """A state of one matrix whose columns on 4 ranks are runs of the length in the name, in bytes."""
    row = 4 * int(name) // ELEMENT
    return {"w": (max(4, (256 << 20) // (row * ELEMENT)), row)}


def cut(shape, axis, rank, ranks):
    """(begin, extent) of a rank's box; tensors with one axis are cut along that axis. Axis None: the whole tensor."""
    begin, extent = [0] * len(shape), list(shape)
    if axis is None:
        return tuple(begin), tuple(extent)
    axis = min(axis, len(shape) - 1)
    first, end = shape[axis] * rank // ranks, shape[axis] * (rank + 1) // ranks
    begin[axis], extent[axis] = first, end - first
    return tuple(begin), tuple(extent)


def volume(extent):
    n = 1
    for e in extent:
        n *= e
    return n


class Shards:
    """One rank's boxes of a state, one after the other in one anonymous mapping."""

    def __init__(self, tensors, axis, rank, ranks):
        import numpy as np

        self.boxes = {key: cut(shape, axis, rank, ranks) for key, shape in tensors.items()}
        self.shapes = tensors
        self.bytes = ELEMENT * sum(volume(extent) for _, extent in self.boxes.values())
        self.memory = mmap.mmap(-1, max(1, self.bytes) + ALIGNMENT)
        # Huge pages for all sides, as the allocators of torch and NumPy use.
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self.memory, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        self.all = whole[start:start + self.bytes]
        self.all[:] = 1
        self.arrays, at = {}, 0
        for key, (_, extent) in self.boxes.items():
            n = ELEMENT * volume(extent)
            self.arrays[key] = self.all[at:at + n].view(np.uint16).reshape(extent)
            at += n

    def fill(self):
        """Fills each element with a value that depends on its position, so that wrong elements are found."""
        for key, (begin, extent) in self.boxes.items():
            self.arrays[key][...] = self.expected(key, begin, extent)

    def expected(self, key, begin, extent):
        import numpy as np

        place = np.zeros(extent, np.uint32)
        for axis, (b, n) in enumerate(zip(begin, extent)):
            step = volume(self.shapes[key][axis + 1:])
            shape = [1] * len(extent)
            shape[axis] = n
            place += (np.arange(b, b + n, dtype=np.uint32) * np.uint32(step)).reshape(shape)
        # Finite as bf16: the exponent's highest bit is clear.
        return ((place * np.uint32(2654435761) >> 16) & 0xBFFF).astype(np.uint16)

    def check(self, who):
        for key, (begin, extent) in self.boxes.items():
            if not (self.arrays[key] == self.expected(key, begin, extent)).all():
                raise RuntimeError(f"{who} loaded other bytes of {key}")

    def tensor(self, key):
        import torch

        return torch.from_numpy(self.arrays[key]).view(torch.bfloat16)


# ---- The peers ------------------------------------------------------------------------------
#
# Each has: save(shards); prepare(shards), before the first load of a sharding, for things that a trainer keeps; load(shards);
# and, if one tensor can be opened alone, slice(key, begin, extent, array). All are in place and collective over `world`.


class World:
    """The ranks that take part, as MPI and torch see them."""

    def __init__(self, rank, ranks, folder, barrier):
        self.rank, self.ranks, self.folder, self.barrier = rank, ranks, pathlib.Path(folder), barrier


def synced(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Raw:
    """The same number of bytes as a rank holds, in one file for each rank, by blocks of 1 MiB."""

    def __init__(self, world, tensors):
        self.world = world
        self.file = world.folder / f"raw-{world.rank}"

    def save(self, shards):
        # A new file, renamed when it is complete, as in an atomic save.
        new = self.file.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        view = memoryview(shards.all)
        for at in range(0, len(view), 1 << 20):
            os.pwrite(fd, view[at:at + (1 << 20)], at)
        os.fsync(fd)
        os.close(fd)
        new.rename(self.file)

    def files(self):
        return [self.file]

    def load(self, shards):
        # If fewer ranks load than saved, each reads several files.
        view, at, number = memoryview(shards.all), 0, self.world.rank
        while at < len(view):
            fd = os.open(self.world.folder / f"raw-{number % self.world.saved}", os.O_RDONLY)
            offset = 0
            while at < len(view):
                n = os.preadv(fd, [view[at:at + (1 << 20)]], offset)
                if n == 0:
                    break
                at, offset = at + n, offset + n
            os.close(fd)
            number += self.world.ranks if self.world.ranks < self.world.saved else 1

    def slice(self, key, begin, extent, array):
        view = memoryview(array.reshape(-1).view("u1"))
        fd = os.open(self.file, os.O_RDONLY)
        for at in range(0, len(view), 1 << 20):
            os.preadv(fd, [view[at:at + (1 << 20)]], at)
        os.close(fd)


class Safetensors:
    """One file for each rank's rows. A load copies slices of the files into place."""

    def __init__(self, world, tensors):
        self.world, self.tensors = world, tensors

    def path(self, rank):
        return self.world.folder / f"rows-{rank}.safetensors"

    def files(self):
        return [self.path(self.world.rank)]

    def save(self, shards):
        import safetensors.torch

        safetensors.torch.save_file({key: shards.tensor(key) for key in shards.boxes}, self.path(self.world.rank))
        synced(self.path(self.world.rank))

    def rows(self, key, begin, extent):
        """The part of a box in each rank's file: (rank, first row within the box, rows, index)."""
        shape = self.tensors[key]
        for rank in range(self.world.saved):
            (b, *_), (n, *_) = cut(shape, 0, rank, self.world.saved)
            first, end = max(b, begin[0]), min(b + n, begin[0] + extent[0])
            if first < end:
                index = (slice(first - b, end - b), *(slice(x, x + m) for x, m in zip(begin[1:], extent[1:])))
                yield rank, first - begin[0], end - first, index

    def load(self, shards):
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(safe_open(self.path(r), "pt")) for r in range(self.world.saved)]
            for key, (begin, extent) in shards.boxes.items():
                target = shards.tensor(key)
                for rank, first, n, index in self.rows(key, begin, extent):
                    target[first:first + n] = files[rank].get_slice(key)[index]

    def slice(self, key, begin, extent, array):
        import torch
        from safetensors import safe_open

        target = torch.from_numpy(array).view(torch.bfloat16)
        for rank, first, n, index in self.rows(key, begin, extent):
            with safe_open(self.path(rank), "pt") as file:
                target[first:first + n] = file.get_slice(key)[index]


class Mapped(Safetensors):
    """The same files, mapped by NumPy: a program that knows where the bytes are."""

    def __init__(self, world, tensors):
        super().__init__(world, tensors)
        self.headers = {}

    def save(self, shards):
        raise NotImplementedError

    def header(self, rank):
        if rank not in self.headers:
            with open(self.path(rank), "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                self.headers[rank] = (8 + size, json.loads(f.read(size)))
        return self.headers[rank]

    def array(self, mapped, rank, key):
        base, header = self.header(rank)
        begin, end = header[key]["data_offsets"]
        return mapped[base + begin:base + end].view("u2").reshape(header[key]["shape"])

    def load(self, shards):
        import numpy as np

        files = [np.memmap(self.path(r), np.uint8, "r") for r in range(self.world.saved)]
        for key, (begin, extent) in shards.boxes.items():
            for rank, first, n, index in self.rows(key, begin, extent):
                np.copyto(shards.arrays[key][first:first + n], self.array(files[rank], rank, key)[index])

    def slice(self, key, begin, extent, array):
        import numpy as np

        self.headers.clear()
        for rank, first, n, index in self.rows(key, begin, extent):
            mapped = np.memmap(self.path(rank), np.uint8, "r")
            np.copyto(array[first:first + n], self.array(mapped, rank, key)[index])


class TorchSave(Safetensors):
    def path(self, rank):
        return self.world.folder / f"rows-{rank}.pt"

    def save(self, shards):
        import torch

        # Clones, because tensors of one storage would be saved as one.
        torch.save({key: shards.tensor(key).clone() for key in shards.boxes}, self.path(self.world.rank))
        synced(self.path(self.world.rank))

    def load(self, shards):
        import torch

        files = [torch.load(self.path(r), mmap=True, weights_only=True) for r in range(self.world.saved)]
        for key, (begin, extent) in shards.boxes.items():
            target = shards.tensor(key)
            for rank, first, n, index in self.rows(key, begin, extent):
                target[first:first + n] = files[rank][key][index]

    def slice(self, key, begin, extent, array):
        import torch

        target = torch.from_numpy(array).view(torch.bfloat16)
        for rank, first, n, index in self.rows(key, begin, extent):
            target[first:first + n] = torch.load(self.path(rank), mmap=True, weights_only=True)[key][index]


class Dcp:
    """torch.distributed.checkpoint with DTensors."""

    def __init__(self, world, tensors):
        self.world, self.tensors = world, tensors
        self.states = {}

    def files(self):
        return list((self.world.folder / "dcp").glob("*")) if self.world.rank == 0 else []

    def prepare(self, shards):
        self.states[id(shards)] = self.state(shards)

    def state(self, shards):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh("cpu", list(range(self.world.ranks)))
        out = {}
        for key, shape in self.tensors.items():
            axis = min(shards.axis, len(shape) - 1)
            stride = tuple(volume(shape[a + 1:]) for a in range(len(shape)))
            out[key] = DTensor.from_local(shards.tensor(key), mesh, [Shard(axis)], run_check=False, shape=shape, stride=stride)
        return out

    def save(self, shards):
        import torch.distributed.checkpoint as dcp

        if id(shards) not in self.states:
            self.prepare(shards)
        dcp.save(self.states[id(shards)], checkpoint_id=str(self.world.folder / "dcp"), process_group=self.world.group)

    def load(self, shards):
        import torch.distributed.checkpoint as dcp

        dcp.load(self.states[id(shards)], checkpoint_id=str(self.world.folder / "dcp"), process_group=self.world.group)


class Tensorstore:
    def __init__(self, world, tensors):
        self.world, self.tensors = world, tensors

    def files(self):
        return [p for p in (self.world.folder / "zarr").rglob("*") if p.is_file()] if self.world.rank == 0 else []

    def open(self, key, **how):
        import tensorstore as ts

        return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self.world.folder / "zarr" / key)}}, **how)

    def save(self, shards):
        import tensorstore as ts

        if self.world.rank == 0:
            for key, shape in self.tensors.items():
                rows = -(-shape[0] // self.world.saved)
                self.open(key, create=True, delete_existing=True, dtype=ts.uint16, shape=shape,
                          chunk_layout=ts.ChunkLayout(chunk_shape=(rows, *shape[1:]))).result()
        self.world.barrier()
        opened = {key: self.open(key) for key in shards.boxes}
        done = []
        for key, (begin, extent) in shards.boxes.items():
            index = tuple(slice(b, b + n) for b, n in zip(begin, extent))
            done.append(opened[key].result()[index].write(shards.arrays[key]))
        for write in done:
            write.result()

    def load(self, shards):
        opened = {key: self.open(key) for key in shards.boxes}
        done = []
        for key, (begin, extent) in shards.boxes.items():
            index = tuple(slice(b, b + n) for b, n in zip(begin, extent))
            done.append((shards.arrays[key], opened[key].result()[index].read()))
        for array, read in done:
            array[...] = read.result()

    def slice(self, key, begin, extent, array):
        index = tuple(slice(b, b + n) for b, n in zip(begin, extent))
        array[...] = self.open(key).result()[index].read().result()


# ---- tensormount, through the C interface -----------------------------------------------------


class Region(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("rank", ctypes.c_int32), ("begin", ctypes.POINTER(ctypes.c_int64)),
                ("extent", ctypes.POINTER(ctypes.c_int64)), ("is_flat", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("flat_first", ctypes.c_int64), ("flat_count", ctypes.c_int64)]


class Buffer(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("dtype", ctypes.c_uint32), ("device_kind", ctypes.c_int32),
                ("device_ordinal", ctypes.c_int32), ("data", ctypes.c_void_p), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("rank", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("stream", ctypes.c_void_p)]


class ShardOf(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("replica", ctypes.c_int32), ("global_shape", ctypes.POINTER(ctypes.c_int64)),
                ("global_rank", ctypes.c_int32), ("metadata_only", ctypes.c_int32), ("region", ctypes.POINTER(Region)),
                ("data", ctypes.POINTER(Buffer))]


class SaveOptions(ctypes.Structure):
    """As far as `no_reuse`; the size in `struct_size` tells the library that the rest is missing."""

    _fields_ = [("struct_size", ctypes.c_uint32),
                *((name, ctypes.c_int32) for name in ("placement", "replica_check", "replace", "strategy", "common_check",
                                                     "skip_validation", "no_plan_reuse")),
                ("common_exempt", ctypes.c_void_p), ("common_exempt_count", ctypes.c_size_t), ("producer", ctypes.c_char_p),
                ("liveness_ms", ctypes.c_int64), ("arrival_ms", ctypes.c_int64), ("on_event", ctypes.c_void_p),
                ("on_event_context", ctypes.c_void_p), ("total_ms", ctypes.c_int64), ("page_hashes", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("before_publish", ctypes.c_void_p), ("before_publish_context", ctypes.c_void_p),
                ("on_commit", ctypes.c_void_p), ("on_commit_context", ctypes.c_void_p), ("no_reuse", ctypes.c_int32)]


class LoadOptions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("struct_size", "not_stored", "not_requested", "validate", "verify", "path",
                                                     "exchange_group", "no_plan_reuse")]


class LoadNumbers(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("plan_reused", ctypes.c_int32),
                *((name, ctypes.c_uint64) for name in ("bytes_wanted", "bytes_read", "bytes_received", "bytes_by_leaf",
                                                       "bytes_by_digest", "bytes_unverified", "messages_sent", "peak_buffer_bytes")),
                *((name, ctypes.c_double) for name in ("plan_seconds", "read_seconds", "proof_seconds"))]


BF16, VERIFY_OFF, EXCHANGE = 11, 1, 2


def numbers(values):
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def described(shape, begin, extent, array):
    """Region and buffer of a box, and the objects that they point to."""
    b, e = numbers(begin), numbers(extent)
    region = Region(ctypes.sizeof(Region), len(extent), b, e)
    buffer = Buffer(ctypes.sizeof(Buffer), BF16, data=array.ctypes.data, shape=e, rank=len(extent))
    return region, buffer, (b, e)


class Library:
    """libtensormount, and the world of MPI. One for each process."""

    def __init__(self, folder):
        self.c = ctypes.CDLL(str(folder / "libtensormount.so"), ctypes.RTLD_GLOBAL)
        self.mpi = ctypes.CDLL(str(folder / "libtensormount_mpi.so"), ctypes.RTLD_GLOBAL)
        self.c.tm_last_error.restype = ctypes.c_char_p
        self.job, self.world = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.mpi.tm_mpi_init(ctypes.byref(self.job)))
        self.check(self.mpi.tm_mpi_world(self.job, ctypes.byref(self.world)))
        self.rank = self.c.tm_communicator_rank(self.world)
        self.ranks = self.c.tm_communicator_size(self.world)

    def end(self):
        self.c.tm_communicator_free(self.world)
        self.mpi.tm_mpi_free(self.job)

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.c.tm_last_error().decode())

    def guard(self):
        """Enables the mapping guard. An older library, in a comparison of versions, has none."""
        if hasattr(self.c, "tm_enable_mapping_guard"):
            self.check(self.c.tm_enable_mapping_guard())

    def group(self, count):
        """The first ranks as a group of their own."""
        if count == self.ranks:
            return self.world
        out = ctypes.c_void_p()
        ranks = (ctypes.c_int32 * count)(*range(count))
        self.check(self.c.tm_communicator_subgroup(self.world, ranks, ctypes.c_size_t(count), 1, ctypes.byref(out)))
        return out


class Ours:
    def __init__(self, world, tensors, verify=0, path=0, pages=0):
        self.world, self.tensors, self.lib, self.pages = world, tensors, world.lib, pages
        self.options = LoadOptions(ctypes.sizeof(LoadOptions), verify=verify, path=path)
        self.states, self.report = {}, {}
        self.path = world.folder / "store" / ("pages" if pages else "step")
        self.checkpoint = str(self.path).encode()

    def files(self):
        return list((self.path / "data").glob("*")) if self.world.rank == 0 else []

    def remove(self):
        if self.world.rank == 0:
            shutil.rmtree(self.path)

    def prepare(self, shards):
        state = ctypes.c_void_p()
        self.lib.check(self.lib.c.tm_state_new(ctypes.byref(state)))
        for key, (begin, extent) in shards.boxes.items():
            shape = self.tensors[key]
            region, buffer, keep = described(shape, begin, extent, shards.arrays[key])
            whole = numbers(shape)
            shard = ShardOf(ctypes.sizeof(ShardOf), 0, whole, len(shape), 0, ctypes.pointer(region), ctypes.pointer(buffer))
            self.lib.check(self.lib.c.tm_state_add_tensor(state, key.encode(), ctypes.byref(shard)))
        self.states[id(shards)] = state

    def save(self, shards):
        if id(shards) not in self.states:
            self.prepare(shards)
        # The state does not change between rounds: with reuse, nothing would be written.
        options = SaveOptions(ctypes.sizeof(SaveOptions), replace=1, page_hashes=self.pages, no_reuse=1)
        self.lib.check(self.lib.c.tm_save(self.states[id(shards)], ctypes.c_char_p(self.checkpoint), self.world.comm,
                                          ctypes.byref(options), None))

    def load(self, shards):
        report = ctypes.c_void_p()
        self.lib.check(self.lib.c.tm_load(self.states[id(shards)], ctypes.c_char_p(self.checkpoint), self.world.comm,
                                          ctypes.byref(self.options), ctypes.byref(report)))
        n = LoadNumbers(ctypes.sizeof(LoadNumbers))
        self.lib.check(self.lib.c.tm_load_report_numbers(report, ctypes.byref(n)))
        self.lib.c.tm_load_report_free(report)
        self.report = {name: getattr(n, name) for name, _ in LoadNumbers._fields_[2:]}

    def slice(self, key, begin, extent, array):
        opened = ctypes.c_void_p()
        self.lib.check(self.lib.c.tm_checkpoint_open(ctypes.c_char_p(self.checkpoint), ctypes.byref(opened)))
        region, buffer, keep = described(self.tensors[key], begin, extent, array)
        self.lib.check(self.lib.c.tm_checkpoint_read(opened, key.encode(), ctypes.byref(region), ctypes.byref(buffer)))
        self.lib.c.tm_checkpoint_close(opened)


PEERS = {
    "raw": Raw,
    "ours": Ours,
    "ours-unverified": lambda world, tensors: Ours(world, tensors, verify=VERIFY_OFF),
    "ours-exchange": lambda world, tensors: Ours(world, tensors, path=EXCHANGE),
    "ours-pages": lambda world, tensors: Ours(world, tensors, pages=1),
    "mapped": Mapped,
    "safetensors": Safetensors,
    "torch.save": TorchSave,
    "dcp": Dcp,
    "tensorstore": Tensorstore,
}
# The peer whose files a peer loads.
SAVED_BY = {"mapped": "safetensors", "ours-unverified": "ours", "ours-exchange": "ours"}


# ---- One rank -------------------------------------------------------------------------------


class Shared:
    """A page that all ranks map: a barrier that costs microseconds, and figures of all ranks."""

    def __init__(self, path, rank, ranks):
        import numpy as np

        self.rank, self.ranks, self.turn = rank, ranks, 0
        with open(path, "r+b") as f:
            self.map = mmap.mmap(f.fileno(), 1 << 16)
        self.turns = np.frombuffer(self.map, np.int64, ranks * 8)[::8]
        self.figures = np.frombuffer(self.map, np.float64, ranks * 8, 1 << 15).reshape(ranks, 8)

    def barrier(self, count=None, seconds=5e-5):
        self.turn += 1
        self.turns[self.rank] = self.turn
        while (self.turns[:count or self.ranks] < self.turn).any():
            time.sleep(seconds)  # There are more ranks than cores: ranks that wait leave the cores to the others.

    def gather(self, values, count):
        self.figures[self.rank, :len(values)] = values
        self.barrier(seconds=5e-5 if self.rank < count else 2e-3)  # Ranks that take no part leave the cores to the others.
        all_of = self.figures[:count, :len(values)].copy()
        self.barrier()
        return all_of


def drop(files):
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def removed(peer):
    if hasattr(peer, "remove"):
        peer.remove()
    else:
        for file in peer.files():
            file.unlink()


def quartiles(values):
    values = sorted(values)
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Worker:
    def __init__(self, args):
        self.args = args
        self.lib = Library(pathlib.Path(args.lib).resolve())
        self.rank, self.ranks = self.lib.rank, self.lib.ranks
        if not args.unguarded:
            self.lib.guard()
        self.shared = Shared(args.page, self.rank, self.ranks)
        self.requests, self.requested = 0, 0
        self.met = open(args.met) if args.met else None  # noqa: SIM115
        self.wanted = [name for name in args.only.split(",") if name in PEERS]
        # Files of these peers are loaded, so they must be saved, even if saves are not measured.
        self.savers = list(dict.fromkeys(SAVED_BY.get(name, name) for name in self.wanted))
        if {"dcp"} & set(self.wanted):
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{args.dir}/gloo", rank=self.rank, world_size=self.ranks)

    def world(self, folder, count):
        world = World(self.rank, count, folder, lambda: self.shared.barrier(count))
        world.saved, world.lib = self.ranks, self.lib
        world.comm = self.groups[count] if self.rank < count else None
        world.group = None
        return world

    def timed(self, what, count, before):
        """Seconds of the slowest rank; CPU seconds and minor faults of all ranks."""
        before()
        self.shared.barrier()
        asked = self.asked_from_storage()
        r0, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        if self.rank < count:
            what()
        seconds = time.perf_counter() - begin
        r1 = resource.getrusage(resource.RUSAGE_SELF)
        mine = (seconds, r1.ru_utime + r1.ru_stime - r0.ru_utime - r0.ru_stime, r1.ru_minflt - r0.ru_minflt)
        of_all = self.shared.gather(mine, count)
        requests = [after - b for after, b in zip(self.asked_from_storage(), asked)]
        return of_all[:, 0].max(), of_all[:, 1].sum(), of_all[:, 2].sum(), *requests

    def asked_from_storage(self):
        """Read requests and bytes so far, at rank 0 with --slow."""
        if self.args.met and self.rank == 0:
            for line in self.met:
                words = line.split()
                if len(words) == 5 and words[1] == "read":
                    self.requests += 1
                    self.requested += int(words[4]) - int(words[3])
        return self.requests, self.requested

    def rounds(self, work, cases, count, before=lambda name: None, facts=lambda name: {}):
        """Runs the cases (name -> function) in turns. Each round begins with another case."""
        taken = {name: [] for name in cases}
        names = list(cases)
        rounds = self.args.rounds
        for turn in range(rounds + 1):  # The first turn is not counted.
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                seconds = self.timed(cases[name], count, lambda n=name: before(n))
                if turn > 0:
                    taken[name].append(seconds)
        if self.rank != 0:
            return
        for name in names:
            low, middle, high = quartiles([s for s, *_ in taken[name]])
            ratios = [s / r for (s, *_), (r, *_) in zip(taken[name], taken["raw"])] if "raw" in taken else []
            slow = {"slow": self.args.slow, "requests": round(statistics.median(t[3] for t in taken[name])),
                    "bytes_of_state": round(statistics.median(t[4] for t in taken[name]) / (ELEMENT * sum(map(volume, self.tensors.values()))), 3)}
            print(json.dumps({
                "work": work, "state": self.state, "ranks": self.ranks, "peer": name, "ms": round(middle * 1e3, 3),
                "quartiles_ms": [round(low * 1e3, 3), round(high * 1e3, 3)],
                "of_raw": round(statistics.median(ratios), 3) if ratios else None,
                "cpu_ms": round(1e3 * statistics.median(t[1] for t in taken[name]), 2),
                "faults": round(statistics.median(t[2] for t in taken[name])), "rounds": len(taken[name]),
                "cold": self.args.cold, "guarded": not self.args.unguarded, **(slow if self.args.met else {}), **facts(name)}), flush=True)

    def memory(self, what, count):
        """The largest increase in anonymous memory of a rank, in MiB, sampled while `what` runs."""
        def anonymous():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

        over = threading.Event()
        seen = [anonymous()]

        def sample():
            while not over.wait(2e-4):
                seen.append(anonymous())

        self.shared.barrier()
        if self.rank < count:
            thread = threading.Thread(target=sample)
            thread.start()
            what()
            over.set()
            thread.join()
        return round(self.shared.gather((max(seen) - seen[0],), count).max(), 1)

    def run(self):
        for name in self.args.state.split(","):
            self.state = name
            self.tensors = runs(name) if name.isdigit() else state(name)
            self.one(pathlib.Path(self.args.dir) / f"state-{name}")
        self.lib.end()

    def one(self, folder):
        args = self.args
        if self.rank == 0:
            for sub in ("", "store", "zarr"):
                (folder / sub).mkdir(exist_ok=True)
        self.shared.barrier()
        self.groups = {}
        for count in {self.ranks, max(1, self.ranks // 2)}:
            if self.rank < count:
                self.groups[count] = self.lib.group(count)
        world = self.world(folder, self.ranks)
        peers = {name: PEERS[name](world, self.tensors) for name in self.wanted}
        rows = self.shards(0, self.ranks)
        rows.fill()
        for name in self.savers:
            (peers[name] if name in peers else PEERS[name](world, self.tensors)).save(rows)
            self.shared.barrier()
        work = args.work.split(",")
        if "save" in work:
            # The checkpoint of the round before is removed first: otherwise some peers would free the file that they
            # replace within a round, and others would free nothing.
            self.rounds("save", {name: (lambda p=peer: p.save(rows)) for name, peer in peers.items() if name not in SAVED_BY},
                        self.ranks, lambda name: removed(peers[name]))
        for job, axis, count in (("same", 0, self.ranks), ("fewer", 0, max(1, self.ranks // 2)), ("columns", 1, self.ranks), ("whole", None, self.ranks)):
            if job in work:
                self.loads(job, peers, axis, count, folder)
        if "slice" in work:
            self.slices(peers)

    def shards(self, axis, count):
        shards = Shards(self.tensors, axis, min(self.rank, count - 1), count)
        shards.axis = axis
        return shards

    def loads(self, job, peers, axis, count, folder):
        shards = self.shards(axis, count)
        if count != self.ranks:
            world = self.world(folder, count)
            # A mesh of some of the ranks would need its own process group of torch.
            peers = {name: PEERS[name](world, self.tensors) for name in self.wanted if name != "dcp"}
        if axis is None:
            peers = {name: peer for name, peer in peers.items() if name != "dcp"}
        anonymous = {}
        for name, peer in peers.items():
            if self.rank < count and hasattr(peer, "prepare"):
                peer.prepare(shards)
            shards.all[:] = 255
            anonymous[name] = self.memory(lambda p=peer: p.load(shards), count)
            if self.rank < count:
                if name != "raw":
                    shards.check(name)
            self.shared.barrier()
        self.rounds(job, {name: (lambda p=peer: p.load(shards)) for name, peer in peers.items()}, count,
                    lambda name: self.before(peers[name]), lambda name: {"anonymous_mib": anonymous[name], **getattr(peers[name], "report", {})})

    def before(self, peer):
        if self.args.cold:
            drop(peer.files())

    def slices(self, peers):
        """Columns of the largest tensor, by rank 0 alone."""
        import numpy as np

        key = max(self.tensors, key=lambda k: volume(self.tensors[k]))
        shape = self.tensors[key]
        begin, extent = cut(shape, 1, 1 % self.ranks, self.ranks)
        array = np.ones(extent, np.uint16)
        expected = Shards.expected(argparse.Namespace(shapes=self.tensors), key, begin, extent)
        cases = {}
        for name, peer in peers.items():
            if not hasattr(peer, "slice") or name == "ours-exchange" or name == "ours-unverified":
                continue
            cases[name] = lambda p=peer: p.slice(key, begin, extent, array)
            if self.rank == 0 and name != "raw":
                array[...] = 0
                cases[name]()
                if not (array == expected).all():
                    raise RuntimeError(f"{name} read another slice")
        self.rounds("slice", cases, 1, lambda name: self.before(peers[name]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default="build/release/lib")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None, help="where the files are made, and removed")
    parser.add_argument("--state", default="gpt", help="gpt, llama, short, small, or the bytes of a run (448)")
    parser.add_argument("--work", default="same,fewer,columns,slice,save")
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--unguarded", action="store_true")
    parser.add_argument("--slow", default="", metavar="SECONDS:BYTES")
    parser.add_argument("--page", help=argparse.SUPPRESS)
    parser.add_argument("--met", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.page:
        Worker(args).run()
        return
    try:
        import tensorstore  # noqa: F401
    except ImportError:
        args.only = ",".join(name for name in args.only.split(",") if name != "tensorstore")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.dir, prefix="peers-"))
        page = pathlib.Path(folder) / "page"
        page.write_bytes(bytes(1 << 16))
        files = folder
        if args.slow:
            sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/support"))
            import adverse

            storage = adverse.AdverseFs(pathlib.Path(args.lib).parent / "bin/tests/adverse_fs", folder, "--cache")
            stack.callback(storage.close)
            storage.rules(f"slow:{args.slow} read *")
            files, args.met = str(storage.at), str(storage.log)
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        subprocess.run(["mpirun", *root, "--oversubscribe", "-n", str(args.ranks), sys.executable, "-B", "-W", "ignore", __file__,
                        "--lib", args.lib, "--rounds", str(args.rounds), "--dir", files, "--state", args.state, "--work", args.work,
                        "--only", args.only, "--page", str(page), "--slow", args.slow, "--met", args.met,
                        *(["--cold"] if args.cold else []), *(["--unguarded"] if args.unguarded else [])], check=True,
                       env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
