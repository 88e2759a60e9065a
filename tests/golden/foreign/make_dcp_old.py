#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes DCP checkpoints as releases did that cannot be installed beside each other, with nothing
but the standard library: classes of the same names stand in for theirs.

    make_dcp_old.py DIR    DIR/torch-1.13, DIR/zstd, DIR/olmo, DIR/megatron, DIR/megatron-0.19, ...

Values are those of make_dcp.py. Layout of items: caffe2/serialize/inline_container.cc (1.13);
of metadata: torch/distributed/checkpoint/{metadata,filesystem}.py; of flattened state:
megatron/core/dist_checkpointing/strategies/torch.py (0.5 to 0.14).
"""

import collections
import io
import itertools
import json
import os
import pickle
import struct
import sys
import types
import zlib


# ---- Stand-ins ------------------------------------------------------------------------------


def module(name):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            sys.modules[path] = types.ModuleType(path)
    return sys.modules[name]


def stand_in(where, name, base=object, **members):
    """A class that pickles as where.name."""
    made = type(name, (base,), {"__module__": where, **members})
    setattr(module(where), name, made)
    return made


def function(where, name):
    def made(*_):
        raise AssertionError("never called")

    made.__module__, made.__name__, made.__qualname__ = where, name, name
    setattr(module(where), name, made)
    return made


def record(cls, state):
    made = cls()
    made.__dict__.update(state)
    return made


class Named:
    """A global that is not a class: torch.float32."""

    def __init__(self, where, name):
        self.__module__, self.name = where, name
        setattr(module(where), name, self)

    def __reduce__(self):
        return self.name


Size = stand_in(
    "torch", "Size", tuple, __reduce__=lambda self: (sys.modules["torch"].Size, (tuple(self),))
)
STORAGES = {"f32": "Float", "f64": "Double", "bf16": "BFloat16", "i64": "Long", "bool": "Bool"}
DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "i64": "int64", "bool": "bool"}
BYTES = {"f32": 4, "f64": 8, "bf16": 2, "i64": 8, "bool": 1}
DTYPE = {key: Named("torch", name) for key, name in DTYPES.items()}
DTYPE["qint8"] = Named("torch", "qint8")
STORAGE = {key: stand_in("torch", name + "Storage") for key, name in STORAGES.items()}
REBUILD = function("torch._utils", "_rebuild_tensor_v2")
GET_LAYOUT = function("torch.serialization", "_get_layout")
LAYOUT = stand_in("torch", "layout", __reduce__=lambda self: (GET_LAYOUT, ("torch.strided",)))()


class Classes:
    """The names that one release has written."""

    def __init__(self, base, properties, encoding, by_name, storage=None):
        meta = base + ".metadata"
        self.metadata = stand_in(meta, "Metadata")
        self.tensor = stand_in(meta, "TensorStorageMetadata")
        self.chunk = stand_in(meta, "ChunkStorageMetadata")
        self.bytes = stand_in(meta, "BytesStorageMetadata")
        self.index = stand_in(meta, "MetadataIndex")
        self.storage = stand_in(storage or base + ".filesystem", "_StorageInfo")
        kind = stand_in(properties, encoding)
        kind.TORCH_CONTIGUOUS_FORMAT = record(kind, {"value": 0})
        kind.__reduce__ = lambda _: (
            (getattr, (kind, "TORCH_CONTIGUOUS_FORMAT")) if by_name else (kind, (0,))
        )
        self.format = kind()
        self.properties = stand_in(
            properties, "TensorProperties", __getstate__=lambda p: p.__dict__["state"]
        )


OLD = "torch.distributed._shard"
NEW = "torch.distributed.checkpoint"


def torch_1_13():
    where = OLD + ".sharded_tensor.metadata"
    return Classes(OLD + ".checkpoint", where, "MEM_FORMAT_ENCODING", False)


def torch_2_1():
    where = OLD + ".sharded_tensor.metadata"
    return Classes(NEW, where, "MEM_FORMAT_ENCODING", True)


def torch_2_6(storage=None):
    return Classes(NEW, NEW + ".metadata", "_MEM_FORMAT_ENCODING", True, storage)


# ---- Items ----------------------------------------------------------------------------------


def formula(dtype, index):
    if dtype == "bool":
        return bytes([index % 3 == 0])
    value = (index * 7 + 3) % 251
    if dtype == "bf16":
        return struct.pack("<f", value)[2:]
    return struct.pack({"f32": "<f", "f64": "<d", "i64": "<q"}[dtype], value)


def zip_of(entries):
    """As PyTorchStreamWriter writes it: stored, sizes behind the bytes, starts aligned to 64."""
    out, central = bytearray(), bytearray()
    for name, data in entries:
        name = name.encode()
        header = len(out)
        padding = 64 - (header + 30 + len(name) + 4) % 64
        flags = 0x0808 if data else 0x0800
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        fields = struct.pack("<HHHHH", 0, flags, 0, 0, 0)
        out += b"PK\3\4" + fields + struct.pack("<IIIHH", 0, 0, 0, len(name), len(extra))
        out += name + extra + data
        sizes = (zlib.crc32(data), len(data), len(data))
        if data:
            out += b"PK\7\10" + struct.pack("<III", *sizes)
        central += b"PK\1\2" + struct.pack("<H", 0) + fields
        central += struct.pack("<IIIHHHHHII", *sizes, len(name), 0, 0, 0, 0, 0, header) + name
    start, end, n = len(out), len(out) + len(central), len(entries)
    out += central + b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, n, n, end - start, start)
    out += b"PK\6\7" + struct.pack("<IQI", 0, end, 1)
    out += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, n, n, end - start, start, 0)
    return bytes(out)


class StoragePickler(pickle.Pickler):
    def persistent_id(self, value):
        return value.id if isinstance(value, StorageRef) else None


class StorageRef:
    def __init__(self, dtype, elements):
        self.id = ("storage", STORAGE[dtype], "0", "cpu", elements)


class Tensor:
    def __init__(self, dtype, shape, strides, elements):
        self.args = (StorageRef(dtype, elements), 0, shape, strides, False, collections.OrderedDict())

    def __reduce__(self):
        return REBUILD, self.args


def archive(value, payload=None):
    stream = io.BytesIO()
    StoragePickler(stream, protocol=2).dump(value)
    entries = [("archive/data.pkl", stream.getvalue())]
    if payload is not None:
        entries.append(("archive/data/0", payload))
    return zip_of([*entries, ("archive/version", b"3\n")])


def dense(shape):
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    return tuple(strides)


def tensor_item(dtype, cells, shape, transposed=False):
    """`cells`: numbers of the cells of a row-major tensor of `shape`."""
    strides = dense(shape)
    if transposed:
        grid = list(itertools.product(*map(range, shape)))
        place = {at: i for i, at in enumerate(sorted(grid, key=lambda at: at[::-1]))}
        order = sorted(range(len(cells)), key=lambda i: place[grid[i]])
        cells = [cells[i] for i in order]
        strides = tuple(reversed(dense(shape[::-1])))
    payload = b"".join(formula(dtype, cell) for cell in cells)
    return archive(Tensor(dtype, tuple(shape), strides, len(cells)), payload)


# ---- Checkpoints ----------------------------------------------------------------------------


class Writer:
    def __init__(self, folder, classes, prefix=""):
        self.folder, self.c, self.prefix = folder, classes, prefix
        os.makedirs(folder, exist_ok=True)
        self.files = collections.defaultdict(bytearray)
        self.states, self.storage, self.extra = {}, {}, {}

    def place(self, rank, index, item, **more):
        name = f"{self.prefix}__{rank}_0.distcp"
        file = self.files[name]
        info = {"relative_path": name, "offset": len(file), "length": len(item), **more}
        self.storage[index] = record(self.c.storage, info)
        file += item

    def object(self, rank, fqn, item, **more):
        self.states[fqn] = self.c.bytes()
        self.place(rank, record(self.c.index, {"fqn": fqn, "index": None}), item, **more)

    def metadata(self, fqn, dtype, shape, chunks):
        state = (DTYPE[dtype], LAYOUT, False, self.c.format, False)
        properties = record(self.c.properties, {"state": state})
        chunks = [record(self.c.chunk, {"offsets": Size(o), "sizes": Size(s)}) for o, s in chunks]
        self.states[fqn] = record(
            self.c.tensor, {"properties": properties, "size": Size(shape), "chunks": chunks}
        )

    def index(self, fqn, offset, hint):
        return record(self.c.index, {"fqn": fqn, "offset": Size(offset), "index": hint})

    def tensor(self, fqn, dtype, shape, chunks, hint=True, transposed=False, **more):
        self.metadata(fqn, dtype, shape, chunks)
        steps = dense(shape)
        for rank, (offset, size) in enumerate(chunks):
            cells = [
                sum((o + i) * s for o, i, s in zip(offset, at, steps))
                for at in itertools.product(*map(range, size))
            ]
            item = tensor_item(dtype, cells, size, transposed)
            self.place(rank, self.index(fqn, offset, rank if hint else None), item, **more)

    def flattened(self, fqn, dtype, shape, grid, cuts, shown=True):
        """Optimizer state of Megatron-Core up to 0.14: every cell of the grid cut into flat ranges."""
        cell = [extent // n for extent, n in zip(shape, grid)]
        flat = 1
        for extent in cell:
            flat *= extent
        steps, chunks, cells = dense(shape), [], []
        for at in itertools.product(*map(range, grid)):
            places = list(itertools.product(*map(range, cell)))
            for begin, end in zip([0, *cuts], [*cuts, flat]):
                chunks.append(((*at, begin), (*(1 for _ in at), end - begin)))
                cells.append(
                    [
                        sum((a * c + p) * s for a, c, p, s in zip(at, cell, place, steps))
                        for place in places[begin:end]
                    ]
                )
        self.metadata(fqn, dtype, (*grid, flat), chunks)
        for i, ((offset, size), numbers) in enumerate(zip(chunks, cells)):
            self.place(i % 2, self.index(fqn, offset, i), tensor_item(dtype, numbers, size))
        if shown:
            data = self.extra.setdefault("mcore_data", {})
            data[fqn] = {"nd_reformulated_orig_global_shape": tuple(shape)}

    def close(self, **more):
        for name, data in self.files.items():
            with open(os.path.join(self.folder, name), "wb") as file:
                file.write(data)
        state = {"state_dict_metadata": self.states, "planner_data": {}, **self.extra, **more}
        with open(os.path.join(self.folder, ".metadata"), "wb") as file:
            pickle.dump(record(self.c.metadata, {**state, "storage_data": self.storage}), file, 4)


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def common_cases(w, **more):
    w.object(0, "iteration", archive(1200))
    w.tensor("rows", "f32", (4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))], **more)
    w.tensor("columns", "bf16", (4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 3))], **more)
    w.tensor("scalar", "f64", (), [((), ())], **more)
    w.tensor("empty", "i64", (0, 3), [((0, 0), (0, 3))], **more)
    w.tensor("turned", "f32", (5, 4), [((0, 0), (5, 2)), ((0, 2), (5, 2))], transposed=True)


def torch_releases(folder):
    w = Writer(os.path.join(folder, "torch-1.13"), torch_1_13())
    common_cases(w)
    w.close()
    # No hints, keys that nest, and a storage_data of strings for what has one item.
    w = Writer(os.path.join(folder, "torch-2.1"), torch_2_1())
    common_cases(w, hint=False)
    paths = {"rows": ("rows",), "columns": ("model", 0, "columns")}
    w.storage["scalar"] = w.storage.pop(next(k for k in w.storage if k.fqn == "scalar"))
    w.storage[7] = w.storage["scalar"]
    w.close(planner_data=paths)


def odd(folder):
    """What is well-formed, and not whole or not for us."""
    w = Writer(os.path.join(folder, "odd"), torch_2_6())
    w.tensor("fine", "f32", (3,), [((0,), (3,))])
    w.tensor("zstd", "f32", (3,), [((0,), (3,))], transform_descriptors=["zstd"])
    w.object(0, "zstd_object", b"compressed", transform_descriptors=["zstd"])
    w.tensor("hole", "f32", (4,), [((0,), (2,)), ((2,), (2,))])
    del w.storage[next(k for k in w.storage if k.fqn == "hole" and k.index == 1)]
    w.tensor("overlap", "f32", (4,), [((0,), (3,)), ((2,), (2,))])
    # A dict of (key, offset) has one entry for the two.
    w.tensor("twice", "f32", (4,), [((0,), (4,)), ((0,), (3,))])
    del w.storage[next(k for k in w.storage if k.fqn == "twice" and k.index == 1)]
    w.tensor("outside", "f32", (4,), [((0,), (4,))])
    w.states["outside"].chunks[0].sizes = Size((5,))
    w.tensor("quantised", "f32", (4,), [((0,), (4,))])
    state = w.states["quantised"].properties.__dict__
    state["state"] = (DTYPE["qint8"], *state["state"][1:])
    w.tensor("other_dtype", "f32", (4,), [((0,), (4,))])
    state = w.states["other_dtype"].properties.__dict__
    state["state"] = (DTYPE["i64"], *state["state"][1:])
    w.tensor("other_shape", "f32", (2, 3), [((0, 0), (2, 3))])
    w.states["other_shape"].size = w.states["other_shape"].chunks[0].sizes = Size((3, 2))
    w.tensor("short_file", "f32", (4,), [((0,), (4,))])
    w.tensor("no_file", "f32", (4,), [((0,), (4,))])
    for key, info in w.storage.items():
        if key.fqn == "no_file":
            info.relative_path = "__7_0.distcp"
        if key.fqn == "short_file":
            info.offset += 1 << 40
    # Two ranks without a share have one identity; both stand in the list, at the end of the shape.
    w.tensor("ends", "f32", (2, 3), [((0, 0), (2, 3)), ((2, 0), (0, 3)), ((2, 0), (0, 3))])
    stray = w.index("stray", (0,), 0)
    w.storage[stray] = record(w.c.storage, {"relative_path": "x", "offset": 0, "length": 1})
    w.close()
    write(os.path.join(folder, "odd", "__9_0.distcp"), b"left over from an earlier save")


def shared(folder):
    """A small file that speaks of very many chunks: one list of them for all tensors."""
    w = Writer(os.path.join(folder, "shared"), torch_2_6())
    w.metadata("a", "f32", (100,), [((i,), (1,)) for i in range(100)])
    for i in range(100):
        w.metadata(f"t{i}", "f32", (100,), [])
        w.states[f"t{i}"].chunks = w.states["a"].chunks
    w.close()


def olmo(folder):
    step = os.path.join(folder, "olmo", "step100")
    name = "olmo_core.distributed.checkpoint.filesystem"
    w = Writer(os.path.join(step, "model_and_optim"), torch_2_6(name))
    common_cases(w)
    w.close()
    write(os.path.join(step, ".metadata.json"), b'{"version": "3.0.0", "ephemeral": false}')
    for rank in range(2):
        write(os.path.join(step, "train", f"rank{rank}.pt"), archive({"epoch": rank}))


def megatron(folder):
    for name in ("megatron", "megatron-0.19"):
        path = os.path.join(folder, name)
        w = Writer(path, torch_2_6())
        # Layers stacked under one key, a chunk a layer and half.
        halves = [((l, 2 * h, 0), (1, 2, 3)) for l in range(3) for h in range(2)]
        w.tensor("decoder.layers.w", "bf16", (3, 4, 3), halves)
        w.flattened("optimizer.exp_avg", "f32", (4, 6), (2, 2), (2, 5))
        w.flattened("optimizer.rows", "f32", (4, 6), (2, 1), (6,))
        w.flattened("optimizer.lost", "f32", (4, 6), (2, 2), (), shown=False)
        for i in range(2):
            w.object(i, f"rng/a_b/shard_{i}.0_2.1", archive([{"seed": i}]))
            w.object(i, f"old/shard_0.{i}_1", archive([i]))
        w.object(0, "extra/shard_0_1", archive([{"lr": 0.5}]))
        w.object(0, "partial/shard_0_2", archive([1]))
        common = {"iteration": 7, "args": {"seed": 1, "dtype": DTYPE["bf16"]}, "fn": REBUILD}
        if name == "megatron":
            write(os.path.join(path, "common.pt"), archive(common))
        else:
            w.object(0, "common_state/shard_0_1", archive([common]))
        w.close(planner_data=None)
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write(os.path.join(path, "metadata.json"), json.dumps(config).encode())


def main():
    folder = sys.argv[1]
    for make in (torch_releases, odd, shared, olmo, megatron):
        make(folder)


if __name__ == "__main__":
    main()
