#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""States of PyTorch that live on a GPU, saved and loaded; and how long that takes beside what else there
is. Prints lines of JSON; ends with 77 and the reason where there is no PyTorch with a device.

usage: torch_on_device.py --dir DIR [--gib N] [--rounds N]
"""

import argparse
import json
import os
import statistics
import sys
import time


def fail(words):
    sys.exit(f"torch_on_device: {words}")


def say(**line):
    print(json.dumps(line), flush=True)


def same(a, b):
    import torch

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def states(torch, device):
    """Tensors of every kind of memory: packed, strided, transposed, with gaps, empty, small, on the host."""
    generator = torch.Generator(device="cpu").manual_seed(7)
    base = torch.randn(64, 96, generator=generator).to(device)
    state = {"packed": base.clone(), "rows": base[::2], "columns": base[:, 3:50:3], "transposed": base.t(),
             "scalar": base[3, 4], "empty": base[:0], "host": torch.randn(33, generator=generator),
             "bytes": torch.arange(255, dtype=torch.uint8).to(device)[1:200]}
    for name in ("bfloat16", "float16", "float64", "int64", "bool", "complex64", "float8_e4m3fn"):
        dtype = getattr(torch, name, None)
        if dtype is not None:
            state[name] = (base * 50).to(torch.float32).to(dtype)
    for i in range(300):
        state[f"small.{i}"] = torch.full((i % 7 + 1,), float(i), device=device)
    return state


def equality(tm, torch, device, folder):
    state = states(torch, device)
    tm.save(state, f"{folder}/store/equal")
    request = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in state.items()}
    # Into strided memory of the device, too.
    request["packed"] = torch.zeros(96, 64, device=device).t()
    tm.load(request, f"{folder}/store/equal")
    wrong = [key for key in state if not same(state[key], request[key])]
    if wrong:
        fail(f"other bytes: {wrong}")
    on_host = {key: torch.zeros_like(value, device="cpu", memory_format=torch.contiguous_format)
               for key, value in state.items()}
    tm.load(on_host, f"{folder}/store/equal")
    wrong = [key for key in state if not same(state[key].cpu(), on_host[key])]
    if wrong:
        fail(f"other bytes on the host: {wrong}")
    job = tm.async_save(state, f"{folder}/store/background")
    for value in state.values():
        if value.is_floating_point() and value.numel() and value.dtype == torch.float32:
            value.zero_()  # The bytes are copied: nothing of this is seen.
    job.wait()
    again = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in state.items()}
    tm.load(again, f"{folder}/store/background")
    wrong = [key for key in request if not same(request[key], again[key])]
    if wrong:
        fail(f"a background save saw what came later: {wrong}")
    say(case="torch equality", tensors=len(state))


def streams(tm, torch, device, folder):
    """What a side stream was given before the call is saved, however long it takes."""
    side = torch.cuda.Stream()
    w = torch.zeros(1 << 20, device=device)
    big = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(30):
            big = big @ big * 1e-3
        w.fill_(5.0)
        tm.save({"w": w}, f"{folder}/store/streams")
    read = torch.zeros(1 << 20)
    tm.load({"w": read}, f"{folder}/store/streams")
    if not bool((read == 5).all()):
        fail("a save did not wait for the stream that was current")
    say(case="torch streams")


def timed(rounds, device, *ways):
    import torch

    seconds = [[] for _ in ways]
    for turn in range(rounds + 1):
        for i, way in enumerate(ways):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            way()
            torch.cuda.synchronize(device)
            if turn:
                seconds[i].append(time.perf_counter() - begin)
    return [statistics.median(s) for s in seconds]


def figures(tm, torch, device, folder, gib, rounds):
    each = int(gib * (1 << 30)) // 16
    state = {f"w{i}": torch.randint(0, 256, (each,), dtype=torch.uint8, device=device) for i in range(16)}
    request = {key: torch.empty_like(value) for key, value in state.items()}
    total = each * 16

    def ours():
        tm.save(state, f"{folder}/store/figures", replace=True)

    saves = [("tensormount", ours), ("torch.save", lambda: torch.save(state, f"{folder}/torch.pt"))]
    loads = [("tensormount", lambda: tm.load(request, f"{folder}/store/figures")),
             ("torch.load", lambda: torch.load(f"{folder}/torch.pt", map_location=device))]
    try:
        from safetensors.torch import load_file, save_file

        saves.append(("safetensors", lambda: save_file(state, f"{folder}/model.safetensors")))
        loads.append(("safetensors", lambda: load_file(f"{folder}/model.safetensors", device=str(device))))
    except ImportError:
        say(case="safetensors", skipped="it is not installed")
    try:
        import torch.distributed.checkpoint as dcp

        saves.append(("DCP", lambda: dcp.save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)))
        loads.append(("DCP", lambda: dcp.load(request, checkpoint_id=f"{folder}/dcp", no_dist=True)))
    except ImportError:
        say(case="DCP", skipped="it is not there")
    for case, ways in (("torch save", saves), ("torch load, warm", loads)):
        took = timed(rounds, device, *[way for _, way in ways])
        say(case=case, gib=total / (1 << 30), gb_per_s={
            name: round(total / 1e9 / seconds, 3) for (name, _), seconds in zip(ways, took)})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", required=True)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as e:
        print(f"skipped: no PyTorch: {e}")
        sys.exit(77)
    if not torch.cuda.is_available():
        print("skipped: PyTorch has no device here")
        sys.exit(77)
    import tensormount as tm

    device = torch.device("cuda:0")
    folder = os.path.join(arguments.dir, "torch")
    os.makedirs(folder, exist_ok=True)
    say(case="torch", version=torch.__version__, device=torch.cuda.get_device_name(0))
    equality(tm, torch, device, folder)
    streams(tm, torch, device, folder)
    figures(tm, torch, device, folder, min(arguments.gib, 1), arguments.rounds)


main()
