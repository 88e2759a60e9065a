#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small .npy and .npz files with the NumPy that is installed, for tests of reading them in
place:

    make_numpy.py DIR

Cell i of an array, in row-major order whatever its order in the file is, is (i * 7 + 3) % 251; of
bool it is i % 3 == 0; float16 has these as bits.
"""

import os
import sys

import numpy as np


def formula(dtype, *shape):
    n = int(np.prod(shape, dtype=np.int64))
    i = np.arange(n)
    if dtype == "bool":
        return (i % 3 == 0).reshape(shape)
    values = (i * 7 + 3) % 251
    if dtype == "float16":
        return values.astype(np.int16).view(np.float16).reshape(shape)
    return values.astype(dtype).reshape(shape)


def main():
    out = sys.argv[1]
    folder = os.path.join(out, "folder")
    os.makedirs(os.path.join(folder, "layer"), exist_ok=True)

    def save(name, array):
        np.save(os.path.join(folder, name), array, allow_pickle=True)

    save("w.npy", formula("float32", 4, 6))
    save("fortran.npy", np.asfortranarray(formula("float64", 3, 4, 5)))
    save("bool.npy", formula("bool", 7))
    save("f16.npy", formula("float16", 3, 3))
    save("u64.npy", formula("uint64", 5))
    save("scalar.npy", formula("int32"))
    save("empty.npy", formula("float32", 0, 3))
    save("layer/c128.npy", formula("complex128", 2, 2))
    save("layer/view.npy", formula("int16", 6, 4)[::2].copy())
    save("big.npy", formula(">f4", 3))
    save("object.npy", np.array([None, 1], dtype=object))
    save("text.npy", np.array(["a", "bc"]))
    save("dates.npy", np.array(["2026-11-22"], dtype="datetime64[D]"))
    save("records.npy", np.zeros(2, dtype=[("a", "<f4"), ("b", "<i4")]))
    save("void.npy", np.zeros(2, dtype="V2"))
    with open(os.path.join(folder, "version2.npy"), "wb") as f:
        np.lib.format.write_array(f, formula("int64", 2, 3), version=(2, 0))
    with open(os.path.join(folder, "version3.npy"), "wb") as f:
        np.lib.format.write_array(f, formula("int64", 2, 3), version=(3, 0))
    with open(os.path.join(folder, "two.npy"), "wb") as f:
        np.save(f, formula("int8", 5))
        np.save(f, formula("int8", 5))

    arrays = {
        "w": formula("float32", 4, 6),
        "fortran": np.asfortranarray(formula("int32", 4, 6)),
        "layer/x.y": formula("uint8", 9),
        "object": np.array([None], dtype=object),
    }
    np.savez(os.path.join(out, "stored.npz"), **arrays)
    np.savez_compressed(os.path.join(out, "compressed.npz"), w=formula("float32", 64))


if __name__ == "__main__":
    main()
