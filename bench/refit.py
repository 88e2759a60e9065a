#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures refit: tensors that hold one checkpoint get the values of the next one, of which few tensors changed.

    PYTHONPATH=python TENSORMOUNT_LIBRARY=build/release/lib/libtensormount.so \\
        python3 bench/refit.py [--dir /dev/shm] [--gib 3] [--tensors 291] [--percent 1] [--rounds 7]

The bytes are made up; memory for four times --gib is needed. Prints one JSON line for each case, medians of rounds in
which both sides take turns, page cache warm; everything is removed afterwards:

- refit: tm.refit against a full tm.load of the new checkpoint: seconds, and bytes that were read from storage for each
  byte of the changed tensors (aim: at most 0.05 and 1.1);
- nothing changed: the same where both are one checkpoint;
- lazy copy: copying each lazy tensor into its target against tm.load.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time

import torch

import tensormount as tm


def timed(call):
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def copy_lazily(targets, path):
    with tm.open(path) as checkpoint:
        for key, target in targets.items():
            target.copy_(checkpoint[key].lazy())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--gib", type=float, default=3)
    parser.add_argument("--tensors", type=int, default=291, help="as many as Llama 8B has")
    parser.add_argument("--percent", type=float, default=1, help="of the tensors that change")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = max(1, int(args.gib * (1 << 30) / args.tensors / 4 / 1024))
    generator = torch.Generator().manual_seed(0)
    old = {f"layers.{i:05d}.w": torch.rand(rows, 1024, generator=generator) for i in range(args.tensors)}
    step = max(1, round(100 / args.percent))
    changed = list(old)[::step]
    folder = tempfile.mkdtemp(dir=args.dir)
    try:
        a, b = (os.path.join(folder, "STORE", name) for name in ("a", "b"))
        tm.save(old, a)
        new = {key: tensor + 1 if key in changed else tensor for key, tensor in old.items()}
        tm.save(new, b)
        targets = {key: tensor.clone() for key, tensor in old.items()}
        wanted = sum(old[key].nbytes for key in changed)
        seconds = {"load": [], "refit": [], "equal": [], "lazy": []}
        for number in range(args.rounds + 1):
            tm.load(targets, a)
            took, found = timed(lambda: tm.refit(targets, a, b))
            assert found.keys == changed and all(torch.equal(targets[key], new[key]) for key in new)
            equal, nothing = timed(lambda: tm.refit(targets, b, b))
            assert nothing.keys == []
            full, _ = timed(lambda: tm.load(targets, b))
            lazily, _ = timed(lambda: copy_lazily(targets, b))
            if number:  # The first round warms up.
                for name, value in zip(seconds, (full, took, equal, lazily)):
                    seconds[name].append(value)
        middle = {name: statistics.median(values) for name, values in seconds.items()}
        whole = {"tensors": args.tensors, "bytes": sum(tensor.nbytes for tensor in old.values()), "rounds": args.rounds}
        for case, name, read in (("refit", "refit", found.report["bytes_read"]), ("nothing changed", "equal", 0),
                                 ("lazy copy", "lazy", None)):
            line = {"case": case, **whole, "seconds": round(middle[name], 5), "load_seconds": round(middle["load"], 5),
                    "of_load": round(middle[name] / middle["load"], 4)}
            if case == "refit":
                line.update(changed=len(changed), changed_bytes=wanted, read_of_changed=round(read / wanted, 4))
            print(json.dumps(line), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
