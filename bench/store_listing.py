# SPDX-License-Identifier: Apache-2.0
"""Measures `ls -l STORE` and `info STORE/NAME` in a store of many steps (docs/performance.md, "Stores of thousands of
steps").

Two stores have --steps checkpoints of --tensors tensors each. In "packed" the tensors are in a few files (the default
for small tensors). In "files" each has its own file, which is the worst case: every file of every step must be examined
to know whether it is shared. The first step is imported; the others are hard links to it (`cp -al`), except COMMIT,
manifests and index, which are copied.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import tempfile
import time


def write_model(path, tensors, elements):
    header, at = {}, 0
    for i in range(tensors):
        header[f"layers.{i}.w"] = {"dtype": "F32", "shape": [elements], "data_offsets": [at, at + 4 * elements]}
        at += 4 * elements
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + os.urandom(at))


def seconds(*command):
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", help="build/release/bin/tensormount")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=["packed", "files"], action="append")
    parser.add_argument("--folder", help="where the stores are made; removed at the end")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="store-listing-", dir=args.folder))
    try:
        model = folder / "model.safetensors"
        write_model(model, args.tensors, 64)
        for case in args.case or ["packed", "files"]:
            store = folder / case
            placement = ["--placement", "tensor-file"] if case == "files" else []
            subprocess.run([args.tool, "-q", "import", model, store / "step-0", *placement], check=True)
            files = sum(1 for _ in (store / "step-0" / "data").iterdir())
            for step in range(1, args.steps):
                to = store / f"step-{step}"
                to.mkdir()
                subprocess.run(["cp", "-al", store / "step-0" / "data", to / "data"], check=True)
                for name in ("manifest", "index", "COMMIT"):
                    subprocess.run(["cp", "-r", store / "step-0" / name, to / name], check=True)
            listing = [seconds(args.tool, "ls", "-l", store) for _ in range(args.rounds)]
            info = [seconds(args.tool, "info", store / "step-1") for _ in range(args.rounds)]
            print(f"{case}: {args.steps} steps of {args.tensors} tensors in {files} files: "
                  f"ls -l {statistics.median(listing):.3f} s (first {listing[0]:.3f}), "
                  f"info of one {statistics.median(info):.3f} s", flush=True)
            shutil.rmtree(store)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
