# SPDX-License-Identifier: Apache-2.0
"""What a program does on a mount, in a process of its own so that a mount that hangs can be left.

usage: client.py write MNT VERSION    a checkpoint through .staging/published, printed as JSON: whether all
                                      that was written was acknowledged, whether it was published, errors
       client.py stage MNT VERSION    likewise, and it stays in .staging
       client.py read MNT/NAME        key -> bytes in hex, or the errno's name
"""

import errno
import json
import os
import pathlib
import sys

import stores

OBJECT = b"an object of the mount"


def put(path, data):
    """Written, synced and closed, each of which may fail."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        at = 0
        while at < len(data):
            at += os.pwrite(fd, data[at:], at)
        os.fsync(fd)
    except OSError:
        os.close(fd)
        raise
    os.close(fd)


def write(mnt, version, publish):
    out = {"written": False, "published": False, "errors": []}
    staging = mnt / ".staging/published"
    dtypes = {"U8": "u8", "F32": "f32", "I64": "i64"}
    schema = {"tensors": {key: {"dtype": dtypes[dtype], "shape": shape} for key, (dtype, shape, _) in stores.SHAPES.items()},
              "writers": 1}
    try:
        staging.mkdir()
        put(staging / "schema.json", json.dumps(schema).encode())
        for key in stores.SHAPES:
            raw = stores.content(key, version)
            if key == "w":
                put(staging / "slices/w[0:30,:]", raw[:30 * 48 * 4])
                put(staging / "slices/w[30:64,:]", raw[30 * 48 * 4:])
            elif raw:
                put(staging / f"tensors/{key}", raw)
        put(staging / "objects/thing", OBJECT)
        put(staging / "done/0", b"")
        out["written"] = True
    except OSError as error:
        out["errors"].append(f"{errno.errorcode.get(error.errno)} {error.filename}")
    if not publish:
        return out
    try:
        os.rename(staging, mnt / "published")
        out["published"] = True
    except OSError as error:
        out["errors"].append(f"{errno.errorcode.get(error.errno)} publish")
    return out


def read(folder):
    out = {}
    for key in stores.SHAPES:
        try:
            out[key] = (folder / f"tensors/{key}").read_bytes().hex()
        except OSError as error:
            out[key] = errno.errorcode.get(error.errno)
    return out


if __name__ == "__main__":
    mode, at, *rest = sys.argv[1:]
    print(json.dumps(read(pathlib.Path(at)) if mode == "read" else write(pathlib.Path(at), *rest, mode == "write")))
