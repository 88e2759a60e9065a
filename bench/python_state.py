#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the time in Python to flatten a state dict and to describe its tensors. The library is not called.

    bench/python_state.py [--tensors 10000] [--rounds 9]

Cases run in turns. Prints one JSON line for each: microseconds per tensor, median and quartiles of the rounds. The lower
bound is a loop that only reads the address of each tensor.
"""

import argparse
import array
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

from tensormount import _layouts, _shards, _tree  # noqa: E402


def tensors_of_numpy(count):
    import numpy

    return {f"layers.{i}.attention.weight": numpy.zeros((8, 16), numpy.float32) for i in range(count)}


def tensors_of_torch(count):
    import torch

    return {f"layers.{i}.attention.weight": torch.zeros(8, 16) for i in range(count)}


class Ways:
    def __init__(self, kind, tensors):
        self.kind = kind
        self.tensors = tensors
        self.nested = {"model": tensors, "step": 1000}
        self.items = list(tensors.items())
        self.cache = _layouts.LayoutCache()
        self.cache.get(self.items)
        self.cache.get(self.items, _shards.LOAD)

    def floor(self):
        if self.kind == "torch":
            array.array("Q", [t.data_ptr() for t in self.tensors.values()])
        else:
            array.array("Q", [t.__array_interface__["data"][0] for t in self.tensors.values()])

    def first_layout(self):
        _layouts.LayoutCache().get(self.items)

    def known_layout(self):
        assert self.cache.get(self.items)[2]

    def known_layout_of_a_load(self):
        assert self.cache.get(self.items, _shards.LOAD)[2]

    def flatten_flat(self):
        assert _tree.flatten(self.tensors).structure is None

    def flatten_nested(self):
        _tree.flatten(self.nested)

    def flatten_nested_and_json(self):
        _tree.flatten(self.nested).json_texts()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for kind, make in (("torch", tensors_of_torch), ("numpy", tensors_of_numpy)):
        try:
            ways = Ways(kind, make(args.tensors))
        except ImportError:
            print(json.dumps({"kind": kind, "skipped": "not installed"}), flush=True)
            continue
        cases = {
            "addresses alone": ways.floor,
            "first layout": ways.first_layout,
            "known layout": ways.known_layout,
            "known layout of a load": ways.known_layout_of_a_load,
            "flatten, flat": ways.flatten_flat,
            "flatten, nested": ways.flatten_nested,
            "flatten, nested, as JSON": ways.flatten_nested_and_json,
        }
        taken = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, way in cases.items():
                begin = time.perf_counter()
                way()
                taken[name].append((time.perf_counter() - begin) / args.tensors * 1e6)
        for name, figures in taken.items():
            low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
            print(
                json.dumps(
                    {
                        "kind": kind,
                        "way": name,
                        "tensors": args.tensors,
                        "us_a_tensor": round(middle, 3),
                        "quartiles": [round(low, 3), round(high, 3)],
                        "rounds": args.rounds,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
