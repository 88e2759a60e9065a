#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small hierarchies with zarr-python 2, for tests of reading them in place:

    make_zarr.py DIR    DIR/plain, DIR/megatron (as megatron-core 0.5 called it)

Cell i of an array, in row-major order, is (i * 7 + 3) % 251; of bool it is i % 3 == 0; bfloat16 is
the upper half of that float32.
"""

import json
import os
import sys

import numpy as np
import zarr


def formula(dtype, *shape):
    n = int(np.prod(shape, dtype=np.int64))
    i = np.arange(n)
    if dtype == "bool":
        return (i % 3 == 0).reshape(shape)
    return ((i * 7 + 3) % 251).astype(dtype).reshape(shape)


def bfloat16(*shape):
    upper = (formula("float32", *shape).view(np.uint32) >> 16).astype(np.uint16)
    return upper.view("V2")


def plain(out):
    root = zarr.open_group(out, mode="w")

    def create(name, array, chunks, **options):
        target = root.create_dataset(
            name, shape=array.shape, chunks=chunks, dtype=array.dtype, compressor=None, **options
        )
        target[...] = array

    create("edges", formula("float32", 10, 6), (4, 4))
    create("fortran", formula("int64", 5, 7), (2, 3), order="F")
    create("layer/nested", formula("int16", 4, 3, 5), (2, 2, 2), dimension_separator="/")
    create("layer/bool", formula("bool", 7), (3,))
    create("scalar", formula("float64"), ())
    root.create_dataset("blosc", data=formula("float32", 8), chunks=(4,))
    # Chunks that are all fill value are not stored.
    sparse = root.create_dataset(
        "sparse", shape=(8,), chunks=(2,), dtype="<f4", compressor=None, fill_value=0,
        write_empty_chunks=False)
    sparse[:2] = 1


def megatron(out):
    """Arrays as strategies/zarr.py created them: by name of folder, no compressor, no fill value."""

    def create(key, array, chunks):
        os.makedirs(os.path.join(out, key), exist_ok=True)
        target = zarr.create(
            array.shape, chunks=chunks, dtype=array.dtype, compressor=None, fill_value=None,
            store=os.path.join(out, key), overwrite=True, write_empty_chunks=True)
        target[...] = array

    create("decoder.layers.self_attention.weight", formula("float32", 2, 6, 4), (1, 3, 4))
    create("uneven", formula("float32", 7, 5), (2, 3))
    create("steps", formula("int64"), ())
    create("half", bfloat16(6, 4), (3, 4))
    create("patched", bfloat16(6, 4), (3, 4))
    # It patched the name of the type afterwards.
    name = os.path.join(out, "patched", ".zarray")
    with open(name) as f:
        described = json.load(f)
    described["dtype"] = "bfloat16"
    with open(name, "w") as f:
        json.dump(described, f)
    with open(os.path.join(out, "metadata.json"), "w") as f:
        json.dump({"sharded_backend": "zarr", "sharded_backend_version": 1}, f)


def main():
    plain(os.path.join(sys.argv[1], "plain"))
    megatron(os.path.join(sys.argv[1], "megatron"))


if __name__ == "__main__":
    main()
