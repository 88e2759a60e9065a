#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures a save by one rank with several writers, beside as many threads that only write.

    PYTHONPATH=python TENSORMOUNT_LIBRARY=build/release/lib/libtensormount.so \\
        python3 bench/writers.py [--dir /dev/shm] [--gib 1] [--tensors 16] [--writers 1,2] [--rounds 9]

The state is in host memory. The floor: as many threads, each with a file of its own, write the same bytes by pwrite of
1 MiB and fsync. Both make new files; what the round before made is removed outside of the times. Both sides take turns.
Prints one JSON line for each number of writers: medians and quartiles of seconds, CPU seconds, and the rate as a share
of the floor's. Everything is removed afterwards.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import statistics
import tempfile
import time

import torch

import tensormount as tm

PIECE = 1 << 20


def write_plainly(folder, arrays, writers):
    def write(number):
        fd = os.open(f"{folder}/plain{number}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
        at = 0
        for data in arrays[number::writers]:
            for begin in range(0, len(data), PIECE):
                at += os.pwrite(fd, data[begin : begin + PIECE], at)
        os.fsync(fd)
        os.close(fd)

    with concurrent.futures.ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))  # Raises what a thread raised.


def timed(call):
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--writers", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    counts = [int(word) for word in args.writers.split(",")]
    rows = max(1, int(args.gib * (1 << 30) / args.tensors / 4 / 1024))
    state = {f"layers.{i:03d}.w": torch.rand(rows, 1024) for i in range(args.tensors)}
    arrays = [memoryview(one.numpy()).cast("B") for one in state.values()]
    size = sum(one.nbytes for one in state.values())
    folder = tempfile.mkdtemp(dir=args.dir)
    times = {(side, count): [] for count in counts for side in ("save", "plain")}
    try:
        for number in range(args.rounds + 1):
            for side, count in times:
                shutil.rmtree(folder)
                os.mkdir(folder)
                os.sync()
                if side == "save":
                    took = timed(lambda: tm.save(state, f"{folder}/S/step", reuse="off", writers=count))
                else:
                    took = timed(lambda: write_plainly(folder, arrays, count))
                if number:  # The first round warms up.
                    times[side, count].append(took)
        for count in counts:
            line = {"case": "save by one rank", "writers": count, "bytes": size, "rounds": args.rounds}
            for side in ("save", "plain"):
                seconds = [one for one, _ in times[side, count]]
                low, middle, high = statistics.quantiles(seconds, n=4)
                line[side] = {"seconds": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)],
                              "cpu": round(statistics.median(cpu for _, cpu in times[side, count]), 4),
                              "gb_per_second": round(size / 1e9 / middle, 2)}
            line["of_floor"] = round(line["plain"]["seconds"] / line["save"]["seconds"], 3)
            print(json.dumps(line))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
