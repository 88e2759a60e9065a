#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads a slice of a checkpoint through the installed library with nothing but ctypes.

usage: ctypes_test.py LIBRARY CHECKPOINT     of examples/save_load: "layer.weight", f32 [64, 48]
"""

import ctypes
import sys

P64 = ctypes.POINTER(ctypes.c_int64)


class Region(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("rank", ctypes.c_int32), ("begin", P64),
                ("extent", P64), ("is_flat", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("flat_first", ctypes.c_int64), ("flat_count", ctypes.c_int64)]


class Buffer(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("dtype", ctypes.c_uint32),
                ("device_kind", ctypes.c_int32), ("device_ordinal", ctypes.c_int32),
                ("data", ctypes.c_void_p), ("shape", P64), ("strides", P64),
                ("rank", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("stream", ctypes.c_void_p)]


class TensorInfo(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("dtype", ctypes.c_uint32),
                ("rank", ctypes.c_int32), ("has_digest", ctypes.c_int32),
                ("bytes", ctypes.c_uint64), ("digest", ctypes.c_uint64),
                ("shape", ctypes.c_int64 * 16)]


def main(library, path):
    tm = ctypes.CDLL(library)
    tm.tm_last_error.restype = ctypes.c_char_p
    tm.tm_list_get.restype = ctypes.c_char_p
    tm.tm_list_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    tm.tm_list_size.restype = ctypes.c_size_t
    tm.tm_list_size.argtypes = [ctypes.c_void_p]

    def call(function, *arguments):
        status = getattr(tm, function)(*arguments)
        assert status == 0, f"{function}: {status}: {tm.tm_last_error().decode()}"

    checkpoint = ctypes.c_void_p()
    assert tm.tm_checkpoint_open(b"/nowhere", ctypes.byref(checkpoint)) == 2
    assert b"/nowhere" in tm.tm_last_error()
    call("tm_checkpoint_open", path.encode(), ctypes.byref(checkpoint))
    keys = ctypes.c_void_p()
    call("tm_checkpoint_keys", checkpoint, ctypes.byref(keys))
    assert [tm.tm_list_get(keys, i, None) for i in range(tm.tm_list_size(keys))] == [
        b"layer.weight"]
    tm.tm_list_free(keys)

    info = TensorInfo(struct_size=ctypes.sizeof(TensorInfo))
    call("tm_checkpoint_tensor", checkpoint, b"layer.weight", ctypes.byref(info))
    assert (info.dtype, info.rank, list(info.shape[:2])) == (12, 2, [64, 48]), "info"

    begin = (ctypes.c_int64 * 2)(30, 7)
    extent = (ctypes.c_int64 * 2)(5, 3)
    values = (ctypes.c_float * 15)()
    region = Region(struct_size=ctypes.sizeof(Region), rank=2, begin=begin, extent=extent)
    out = Buffer(struct_size=ctypes.sizeof(Buffer), dtype=12, rank=2, shape=extent,
                 data=ctypes.cast(values, ctypes.c_void_p))
    call("tm_checkpoint_read", checkpoint, b"layer.weight", ctypes.byref(region),
         ctypes.byref(out))
    assert list(values) == [r * 48 + c for r in range(30, 35) for c in range(7, 10)], "values"

    text = ctypes.c_char_p()
    call("tm_checkpoint_common", checkpoint, b"step", ctypes.byref(text), None)
    assert text.value == b"1000", text.value
    tm.tm_free(text)
    tm.tm_checkpoint_close(checkpoint)

    # The command is not in this library, and says so.
    assert tm.tm_main(1, (ctypes.c_char_p * 2)(b"tensormount", None)) == 2
    assert b"run the program tensormount" in tm.tm_last_error(), tm.tm_last_error()
    print("ctypes_test: the slice is right")


if __name__ == "__main__":
    main(*sys.argv[1:])
