#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares two builds of ckptbench, which run in turns.

    bench/pairs.py OLD/bin/ckptbench build/release/bin/ckptbench [--minutes 15] [--only load,reshard] [--rounds 9]

For each workload each build runs once, and each round begins with the other build, until the time is over. Prints one
JSON line for each row of ckptbench: number of pairs, medians of both builds (seconds, or seconds for a fixed number of
bytes), and median, minimum and maximum of the ratios new / old of the pairs. Use a machine that does nothing else.
"""

import argparse
import collections
import json
import resource
import statistics
import subprocess
import time

WORKLOADS = ["plan", "publish", "open", "hash", "validate", "save", "load", "reshard", "mount-read", "mount-ls",
             "staging-write", "mount-write", "replicas", "async"]
SIZE = ["--gib", "0.125", "--tensors", "2000", "--chunks", "20"]


def figures(binary, workload, folder, rounds):
    """Row -> time, and the CPU seconds of the whole run. Bytes a second become seconds a byte."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([binary, workload, *SIZE, "--rounds", str(rounds), "--dir", folder, "--json"], capture_output=True, text=True,
                          timeout=300, check=True)
    out = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        is_time = row["unit"] in ("s", "ms", "us", "ns")
        out[f"{row['workload']}/{row['case']}"] = row["figure"] if is_time else 1 / row["figure"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    out[f"{workload}/CPU of the run"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--rounds", type=int, default=2, help="of each run; the first of a process is slower")
    args = parser.parse_args()
    rows = collections.defaultdict(list)
    end = time.monotonic() + 60 * args.minutes
    turn = 0
    while time.monotonic() < end:
        for workload in args.only.split(","):
            order = [args.old, args.new]
            got = {binary: figures(binary, workload, args.dir, args.rounds) for binary in (order if turn % 2 else order[::-1])}
            for row, old in got[args.old].items():
                if row in got[args.new]:
                    rows[row].append((old, got[args.new][row]))
            if time.monotonic() > end:
                break
        turn += 1
    for row, pairs in sorted(rows.items()):
        ratios = [new / old for old, new in pairs]
        print(json.dumps({"row": row, "pairs": len(pairs), "old": round(statistics.median(o for o, _ in pairs), 5),
                          "new": round(statistics.median(n for _, n in pairs), 5),
                          "ratio": round(statistics.median(ratios), 3), "least": round(min(ratios), 3),
                          "most": round(max(ratios), 3)}), flush=True)


if __name__ == "__main__":
    main()
