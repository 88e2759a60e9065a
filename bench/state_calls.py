#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the time to describe a rank's tensors to the C interface from Python (ctypes).

    cmake --preset release && cmake --build build/release --target tensormount
    bench/state_calls.py [--lib build/release/lib] [--tensors 10000] [--rounds 9]

Cases run in turns. Prints one JSON line for each: microseconds per tensor, median and quartiles of the rounds. The time
in which Python collects the numbers counts; a loop that only does that, without a call, is the lower bound.
"""

import argparse
import array
import ctypes
import json
import pathlib
import statistics
import time

from peers import Buffer, Region, ShardOf, numbers

F32 = 12


class Ways:
    """Rows 128 to 256 of tensors of [512, 1024] f32. All use the same memory, which is not read."""

    def __init__(self, lib, count):
        self.c = ctypes.CDLL(str(lib / "libtensormount.so"))
        self.c.tm_last_error.restype = ctypes.c_char_p
        self.memory = (ctypes.c_float * (128 * 1024))()
        self.address = ctypes.addressof(self.memory)
        self.keys = [f"layers.{i}.attention.weight" for i in range(count)]
        self.layout = ctypes.c_void_p()
        packed, words = self.numbers()
        self.check(self.c.tm_layout_new(packed, ctypes.c_size_t(len(packed)), ctypes.c_void_p(words.buffer_info()[0]),
                                        ctypes.c_size_t(len(words)), ctypes.c_size_t(count), ctypes.byref(self.layout)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.c.tm_last_error().decode())

    def numbers(self):
        words = array.array("q")
        for _ in self.keys:
            words.extend((F32, 0, 0, 2, self.address, 512, 1024, 128, 0, 128, 1024))
        return "\0".join(self.keys).encode() + b"\0", words

    def one_by_one(self, state):
        for key in self.keys:
            shape, begin, extent = numbers((512, 1024)), numbers((128, 0)), numbers((128, 1024))
            region = Region(ctypes.sizeof(Region), 2, begin, extent)
            data = Buffer(ctypes.sizeof(Buffer), F32, data=self.address, shape=extent, rank=2)
            shard = ShardOf(ctypes.sizeof(ShardOf), 0, shape, 2, 0, ctypes.pointer(region), ctypes.pointer(data))
            self.check(self.c.tm_state_add_tensor(state, key.encode(), ctypes.byref(shard)))

    def at_once(self, state):
        packed, words = self.numbers()
        self.check(self.c.tm_state_add_tensors(state, packed, ctypes.c_size_t(len(packed)), ctypes.c_void_p(words.buffer_info()[0]),
                                               ctypes.c_size_t(len(words)), ctypes.c_size_t(len(self.keys))))

    def known_layout(self, state):
        addresses = array.array("Q", [self.address for _ in self.keys])
        self.check(self.c.tm_state_add_layout(state, self.layout, ctypes.c_void_p(addresses.buffer_info()[0]),
                                              ctypes.c_size_t(len(addresses))))

    def only_python(self, state):
        del state
        self.numbers()

    def timed(self, way):
        state = ctypes.c_void_p()
        self.check(self.c.tm_state_new(ctypes.byref(state)))
        begin = time.perf_counter()
        way(state)
        seconds = time.perf_counter() - begin
        self.c.tm_state_free(state)
        return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default="build/release/lib")
    parser.add_argument("--tensors", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    ways = Ways(pathlib.Path(args.lib).resolve(), args.tensors)
    cases = {"one by one": ways.one_by_one, "at once": ways.at_once, "known layout": ways.known_layout, "only Python": ways.only_python}
    taken = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, way in cases.items():
            taken[name].append(ways.timed(way) / args.tensors * 1e6)
    for name, figures in taken.items():
        low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
        print(json.dumps({"way": name, "tensors": args.tensors, "us_a_tensor": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)],
                          "rounds": args.rounds}), flush=True)


if __name__ == "__main__":
    main()
