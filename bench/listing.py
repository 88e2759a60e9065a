# SPDX-License-Identifier: Apache-2.0
"""Measures the listing of a mount with very many tensors, compared with a directory of the same names.

  python3 bench/listing.py TENSORMOUNT [--tensors 100000] [--rounds 5] [--dir /tmp]

Both are cold in each round: the mount is new, and the directory's entries are dropped from the kernel's caches
(needs root). Prints one line of JSON for each case: medians of interleaved rounds, in milliseconds.
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


def name_of(i):
    return f"model.layers.{i % 97}.mlp.experts.{i}.weight"


def make(folder, tensors):
    plain = folder / "plain"
    plain.mkdir()
    header = {}
    for i in range(tensors):
        (plain / name_of(i)).write_bytes(b"\0" * 64)
        header[name_of(i)] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * i, 64 * i + 64]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "w.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"\0" * (64 * tensors))
    return plain


def drop_caches():
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def timed(*command):
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - begin) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tensormount")
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tensormount-listing.", dir=args.dir))
    mnt = folder / "mnt"
    mnt.mkdir()
    try:
        plain = make(folder, args.tensors)
        subprocess.run([args.tensormount, "import", "-q", folder / "w.safetensors", folder / "store" / "c"], check=True)
        cases = {}

        def note(case, ours, floor=None):
            cases.setdefault(case, []).append((ours, floor))

        for _ in range(args.rounds):
            for option in ("-f", "-l"):
                drop_caches()
                begin = time.perf_counter()
                subprocess.run([args.tensormount, "mount", "-q", folder / "store" / "c", mnt], check=True)
                os.stat(mnt / "tensors" / name_of(0))
                note("mount to the first stat", (time.perf_counter() - begin) * 1e3)
                ours = timed("ls", option, mnt / "tensors")
                again = timed("ls", option, mnt / "tensors")
                found = timed("find", mnt / "tensors", "-size", "+1000c") if option == "-l" else None
                subprocess.run([args.tensormount, "unmount", mnt], check=True)
                drop_caches()
                note(f"ls {option}, cold", ours, timed("ls", option, plain))
                note(f"ls {option}, again", again, timed("ls", option, plain))
                if found is not None:
                    note("find -size, warm", found, timed("find", plain, "-size", "+1000c"))
        for case, times in cases.items():
            line = {"case": case, "tensors": args.tensors, "rounds": len(times), "unit": "ms",
                    "figure": round(statistics.median(t[0] for t in times), 1)}
            if times[0][1] is not None:
                line["floor"] = round(statistics.median(t[1] for t in times), 1)
                line["of_floor"] = round(line["figure"] / line["floor"], 2)
            print(json.dumps(line), flush=True)
    finally:
        subprocess.run([args.tensormount, "unmount", "--lazy", "-q", mnt], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
