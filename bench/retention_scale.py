#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long `prune`, `log` and `blame` take in a store of many steps (docs/performance.md).

usage: retention_scale.py BIN [--steps 2000] [--tensors 1000] [--folder DIR]

BIN: the directory of `tensormount`; lib/libtensormount.so is beside it. Saves the steps, each with a number in its
common values, through the library; then measures a listing, and `prune --dry-run` with several rules, each in its own
process, the best of five.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--folder")
    args = parser.parse_args()
    os.environ.setdefault("TENSORMOUNT_LIBRARY", str(args.bin.parent / "lib" / "libtensormount.so"))
    sys.path.insert(0, str(ROOT / "python"))
    import numpy
    import tensormount

    state = {f"layers.{i}.weight": numpy.full(4, i, "f4") for i in range(args.tensors)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = os.path.join(folder, "STORE")
        begin = time.perf_counter()
        for step in range(1, args.steps + 1):
            state["loss"] = 1.0 / step
            tensormount.save(state, f"{store}/step-{step}")
            if step in (10, args.steps):
                last = time.perf_counter()
                tensormount.save(state, f"{store}/again", replace=True)
                print(f"a save of {args.tensors} tensors beside {step} steps: {time.perf_counter() - last:.3f} s")
        print(f"{args.steps} saves: {time.perf_counter() - begin:.1f} s", flush=True)

        def timed(label, *words):
            best = float("inf")
            for _ in range(5):
                begin = time.perf_counter()
                done = subprocess.run([str(args.bin / "tensormount"), *words], capture_output=True, text=True)
                best = min(best, time.perf_counter() - begin)
                if done.returncode:
                    sys.exit(done.stderr)
            print(json.dumps({"what": label, "seconds": round(best, 3)}), flush=True)

        timed("an empty command", "--version")
        timed("ls STORE", "ls", store)
        for rules in ("last=3", "last=3,every=100", "every=6h", "best=loss:min:2", "last=3,every=100,best=loss:min:2"):
            timed(f"prune --rules {rules} --dry-run", "prune", store, "--rules", rules, "--dry-run", "--json")
        key = f"layers.{args.tensors - 1}.weight"  # It never changes, so that every step is read.
        timed("log STORE", "log", store)
        timed("log STORE --show loss", "log", store, "--show", "loss")
        timed("blame STORE KEY", "blame", store, key)
        timed("blame STORE '*'", "blame", store, "*")


if __name__ == "__main__":
    main()
