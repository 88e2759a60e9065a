# SPDX-License-Identifier: Apache-2.0
"""What every tensor of these tests holds: bytes made of its key and the index of each element.

Only NumPy: the programs that save know nothing else, and what is read is compared with nothing else.
"""

import zlib

import numpy as np

# Our name: bytes of an element, name in safetensors, name in torch.
DTYPES = {
    "bool": (1, "BOOL", "bool"),
    "u8": (1, "U8", "uint8"),
    "i8": (1, "I8", "int8"),
    "i16": (2, "I16", "int16"),
    "u16": (2, "U16", "uint16"),
    "i32": (4, "I32", "int32"),
    "i64": (8, "I64", "int64"),
    "f16": (2, "F16", "float16"),
    "bf16": (2, "BF16", "bfloat16"),
    "f32": (4, "F32", "float32"),
    "f64": (8, "F64", "float64"),
    "f8_e4m3": (1, "F8_E4M3", "float8_e4m3fn"),
    "f8_e5m2": (1, "F8_E5M2", "float8_e5m2"),
    "c64": (8, "C64", "complex64"),
}


def size_of(dtype, shape):
    return DTYPES[dtype][0] * int(np.prod(shape, dtype=np.int64))


def values(key, dtype, shape):
    """Of the whole tensor: uint8 [*shape, bytes of an element]. No two elements of any width of four
    or more bytes are likely to be equal, nor two tensors."""
    size = DTYPES[dtype][0]
    index = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = index + np.uint64(zlib.crc32(key.encode()) + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    out = np.ascontiguousarray(x.astype("<u8")).view(np.uint8).reshape(-1, 8)[:, :size]
    if dtype == "bool":
        out = out & 1
    return np.ascontiguousarray(out).reshape(*shape, size)


def raw(key, dtype, shape, box=None):
    """Its bytes in row-major order, or those of a box (a tuple of slices)."""
    whole = values(key, dtype, shape)
    return np.ascontiguousarray(whole if box is None else whole[box]).tobytes()


def a_box(key, shape):
    """Some box of it, neither empty nor, where that can be, whole; as slices."""
    box = []
    for axis, extent in enumerate(shape):
        seed = zlib.crc32(f"{key} {axis}".encode())
        low = seed % extent
        box.append(slice(low, low + 1 + (seed >> 8) % (extent - low)))
    return tuple(box)


def shown(box):
    """As the command and the mount spell it."""
    return "[" + ",".join(f"{s.start}:{s.stop}" for s in box) + "]"


def split(extent, parts, index):
    """The share of one of `parts` as torch.chunk cuts: the last ones may be short or empty."""
    step = -(-extent // parts)
    return slice(min(index * step, extent), min((index + 1) * step, extent))


# A checkpoint of a small model in its first days: key -> (dtype, shape, how four ranks hold it).
# rows, cols: one axis over all; grid: two axes over 2 x 2; partly: axis 1 over the second two,
# the same on the first two; replicated: whole on every rank; plain: no distributed tensor at all;
# a word more says how the bytes lie in the memory of whoever holds them.
MODEL = {
    "model.embed.weight": ("bf16", (61, 32), "rows"),
    "model.layers.0.attn.qkv": ("f32", (64, 48), "rows"),
    "model.layers.0.attn.out": ("bf16", (30, 64), "cols"),
    "model.layers.0.mlp.up": ("f16", (21, 25), "grid"),
    "model.layers.0.mlp.down": ("f32", (7, 10), "partly"),
    "model.layers.0.norm": ("f64", (17,), "replicated"),
    "model.layers.1.conv": ("f32", (8, 6, 3, 3), "plain channels_last"),
    "model.layers.1.tied": ("f32", (12, 20), "plain transposed"),
    "model.layers.1.turned": ("bf16", (24, 36), "rows transposed"),
    "model.layers.1.turned_grid": ("f32", (10, 14), "grid transposed"),
    "model.layers.1.middle": ("f32", (5, 9, 4), "cols"),
    "model.layers.1.permuted": ("i16", (4, 8, 6), "rows permuted"),
    "model.layers.1.part_of_big": ("f32", (6, 5), "plain window"),
    "model.layers.2.fp8": ("f8_e4m3", (16, 33), "rows"),
    "model.layers.2.fp8_wide": ("f8_e5m2", (9, 16), "cols"),
    "model.layers.2.mask": ("bool", (13, 3), "rows"),
    "model.layers.2.bytes": ("u8", (31,), "rows"),
    "model.layers.2.signed": ("i8", (3, 5), "replicated"),
    "model.layers.2.short": ("u16", (10,), "rows"),
    "model.layers.2.waves": ("c64", (6, 4), "rows"),
    "model.layers.2.thin": ("f32", (2, 3), "rows"),  # Two ranks hold nothing.
    "model.layers.2.one_row": ("i64", (1, 40), "rows"),
    "model.empty": ("f32", (0, 4), "plain"),
    "model.empty_shards": ("bf16", (0, 8), "rows"),
    "model.scalar": ("f32", (), "plain"),
    "model.scalar_mesh": ("bf16", (), "replicated"),
    "optim.state.step": ("i64", (), "plain"),
    "optim.state.exp_avg": ("f32", (64, 48), "rows"),
    "optim.state.counts": ("i32", (5, 3), "plain"),
    "optim.state.large": ("f32", (300, 257), "grid"),
}

# What is no tensor, and by which names it is found again: dicts are split, in lists too, and lists and
# tuples of plain values stay one object.
OBJECTS = {
    "meta.iteration": 1000,
    "meta.name": "a run",
    "meta.rate": 0.125,
    "optim.groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"]}],
    "optim.flags": (True, None, 3),
}
OBJECT_VALUES = {
    **{key: value for key, value in OBJECTS.items() if key != "optim.groups"},
    **{f"optim.groups.0.{name}": value for name, value in OBJECTS["optim.groups"][0].items()},
}


def expected(specs):
    """key -> (dtype, shape)."""
    return {key: (spec[0], tuple(spec[1])) for key, spec in specs.items()}


def local_box(shape, how, rank, ranks):
    """What a rank holds, as slices."""
    how = how.split()[0]
    box = [slice(0, extent) for extent in shape]
    half = ranks // 2
    if how == "rows":
        box[0] = split(shape[0], ranks, rank)
    elif how == "cols":
        box[1] = split(shape[1], ranks, rank)
    elif how == "grid":
        box[0] = split(shape[0], 2, rank // half)
        box[1] = split(shape[1], half, rank % half)
    elif how == "partly":
        box[1] = split(shape[1], half, rank % half)
    return tuple(box)


def nested(flat):
    """{"a.b": x} as {"a": {"b": x}}."""
    tree = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree
