#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a save into a store of one step and into a store of many, in turns; prints a JSON line.

    TENSORMOUNT_LIBRARY=build/release/lib/libtensormount.so PYTHONPATH=python \\
        .cache/venv-libraries/bin/python3 bench/save_beside_steps.py [--steps 2000] [--rounds 21] [--folder /dev/shm]

One process saves 1,000 tensors of 16 bytes, with and without reuse. The directories are three seconds old when the
saves begin: a save does not write down what changed more recently (docs/format.md, "Known generations").
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time

import numpy as np
import tensormount as tm


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--folder", default="/dev/shm")
    args = parser.parse_args()
    state = {f"layers.{i}.bias": np.full(4, i, np.float32) for i in range(1000)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        stores = {"one": os.path.join(folder, "one"), "many": os.path.join(folder, "many")}
        tm.save(state, f"{stores['one']}/step-0")
        for step in range(args.steps):
            tm.save({"step": np.full(4, step, np.float32)}, f"{stores['many']}/step-{step}")
        time.sleep(3)
        taken = {(store, reuse): [] for store in stores for reuse in ("auto", "off")}
        for turn in range(args.rounds + 3):  # The first three turns are not counted.
            for (store, reuse), seconds in taken.items():
                begin = time.perf_counter()
                tm.save(state, f"{stores[store]}/again", replace=True, reuse=reuse)
                end = time.perf_counter()
                if turn >= 3:
                    seconds.append(end - begin)
                shutil.rmtree(f"{stores[store]}/.trash", ignore_errors=True)
                os.makedirs(f"{stores[store]}/.trash", exist_ok=True)
        for (store, reuse), seconds in taken.items():
            low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
            print(json.dumps({"steps": args.steps if store == "many" else 1, "reuse": reuse, "rounds": len(seconds),
                              "ms": round(middle * 1e3, 2), "quartiles_ms": [round(low * 1e3, 2), round(high * 1e3, 2)]}))


if __name__ == "__main__":
    main()
