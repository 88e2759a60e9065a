#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small files with torch.save of the PyTorch that is installed, for tests of reading them in
place:

    make_torch_save.py DIR

Cell i of a tensor, in row-major order whatever its strides are, is (i * 7 + 3) % 251; of bool it is
i % 3 == 0; float16 and float8 have these as bits.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import sys

import torch


def formula(dtype, *shape):
    n = 1
    for extent in shape:
        n *= extent
    i = torch.arange(n)
    if dtype == torch.bool:
        return (i % 3 == 0).reshape(shape)
    values = (i * 7 + 3) % 251
    if dtype == torch.float16:
        return values.to(torch.int16).view(dtype).reshape(shape)
    if dtype.itemsize == 1:
        return values.to(torch.uint8).view(dtype).reshape(shape)
    return values.to(dtype).reshape(shape)


def in_a_larger_storage():
    base = torch.full((8, 9), -1.0)
    window = base[2:6, 1:8:2]
    window.copy_(formula(torch.float32, 4, 4))
    return window


def nested():
    storage = torch.zeros(24)
    storage[:12] = formula(torch.float32, 12)
    storage[12:] = formula(torch.float32, 12)
    tied = formula(torch.float32, 5)
    model = collections.OrderedDict()
    model["w"] = formula(torch.float32, 4, 6)
    model["transposed"] = formula(torch.float32, 4, 6).t().contiguous().t()
    model["permuted"] = formula(torch.int32, 2, 3, 4).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    model["window"] = in_a_larger_storage()
    model["first_half"] = storage[:12].view(3, 4)
    model["second_half"] = storage[12:]
    model["tied"] = tied
    model["tied_too"] = tied
    model["expanded"] = torch.tensor([3.0]).expand(4)
    model["parameter"] = torch.nn.Parameter(formula(torch.float32, 3, 3))
    model["bf16"] = formula(torch.bfloat16, 5, 3)
    model["f16"] = formula(torch.float16, 6)
    model["f64"] = formula(torch.float64, 6)
    model["f8"] = formula(torch.float8_e4m3fn, 4, 4)
    model["i64"] = formula(torch.int64, 7)
    model["u16"] = formula(torch.uint16, 7)
    model["u8"] = formula(torch.uint8, 7)
    model["bool"] = formula(torch.bool, 7)
    model["c64"] = formula(torch.complex64, 3)
    model["scalar"] = formula(torch.float32)
    model["empty"] = formula(torch.float32, 0, 3)
    model["sparse"] = torch.eye(3).to_sparse()
    return {
        "model": model,
        "optimizer": {
            "state": {
                0: {"step": formula(torch.float32), "exp_avg": formula(torch.float32, 4, 6)},
                1: {"step": 7, "exp_avg": formula(torch.float32, 2)},
            },
            "param_groups": [{"lr": 0.125, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "epoch": 3,
        "args": argparse.Namespace(seed=1, path=pathlib.PurePosixPath("/data/x")),
        "a": {"b": formula(torch.float32, 2), "c": 1},
        "a.b": formula(torch.float32, 3),
        "a.c": 2,
        "list": [formula(torch.int64, 2), {"x": formula(torch.int64, 3)}, 5],
        ("a", "tuple"): formula(torch.int64, 2),
    }


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x + self.w


def main():
    out = sys.argv[1]
    for folder in ("hf", "ranks/mp_rank_00", "ranks/mp_rank_01"):
        os.makedirs(os.path.join(out, folder), exist_ok=True)

    def save(name, value, **options):
        torch.save(value, os.path.join(out, name), **options)

    save("nested.pt", nested())
    save("alone.weights.pth", formula(torch.float32, 3, 2))
    save("plain.bin", {"epoch": 4, "name": "x", 5: None})
    save("number.pt", 17)
    save("old.pt", {"w": formula(torch.float32, 2)}, _use_new_zipfile_serialization=False)
    save("refused.pt", {"w": formula(torch.float32, 2), "x": functools.partial(max, 1)})
    torch.jit.script(Scripted()).save(os.path.join(out, "script.pt"))

    weight_map = {}
    for number, names in enumerate((("embed.w", "head.w"), ("layers.0.w",)), 1):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        save("hf/" + name, {key: formula(torch.bfloat16, 4, number + 1) for key in names})
        weight_map.update({key: name for key in names})
    weight_map["lost.w"] = "pytorch_model-00002-of-00002.bin"
    weight_map["gone.w"] = "pytorch_model-00003-of-00002.bin"
    with open(os.path.join(out, "hf/pytorch_model.bin.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": 56}, "weight_map": weight_map}, f, indent=2)

    for rank in range(2):
        folder = f"ranks/mp_rank_0{rank}/"
        save(
            folder + "model_optim_rng.pt",
            {
                "iteration": 10,
                "args": argparse.Namespace(tensor_model_parallel_size=2),
                "model": {"language_model": {"w": formula(torch.float32, 3, rank + 1)}},
            },
        )
        save(folder + "distrib_optim.pt", {0: {"param": formula(torch.float32, 6)}})


if __name__ == "__main__":
    main()
