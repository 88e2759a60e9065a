#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every workload of ckptbench in the smallest size and checks its JSON lines.

usage: ckptbench_smoke.py CKPTBENCH
"""
import json
import os
import subprocess
import sys
import tempfile

# Workload -> how many cases it has.
WORKLOADS = {"save": 2, "async": 3, "replicas": 4, "plan": 1, "load": 4, "reshard": 6,
             "staging-write": 4, "publish": 2, "open": 2, "hash": 3, "validate": 4}
MOUNTS = {"mount-read": 24, "mount-write": 2, "mount-ls": 2}
FIELDS = ["figure", "floor", "of_floor", "figure_p99", "floor_p99", "rounds"]


def check(line, workload):
    entry = json.loads(line)
    assert entry["workload"] == workload, line
    assert entry["case"] and entry["floor_is"], line
    assert entry["unit"] in ("GB/s", "ms"), line
    for field in FIELDS:
        assert isinstance(entry[field], (int, float)) and entry[field] > 0, f"{field}: {line}"
    # A rate of the floor and a time of the floor are compared the same way round.
    better = entry["figure"] / entry["floor"]
    if entry["unit"] == "ms":
        better = 1 / better
    assert abs(better / entry["of_floor"] - 1) < 0.05, line


def main():
    wanted = dict(WORKLOADS)
    if os.access("/dev/fuse", os.R_OK | os.W_OK):
        wanted.update(MOUNTS)
    elif "fuse" in os.environ.get("TENSORMOUNT_REQUIRE", "").split(","):
        sys.exit("FUSE is required and /dev/fuse cannot be opened")
    else:
        print("no /dev/fuse: the workloads on mounts are left out")
    with tempfile.TemporaryDirectory() as folder:
        for workload, cases in wanted.items():
            run = subprocess.run(
                [sys.argv[1], workload, "--gib", "0.004", "--ranks", "2", "--rounds", "2",
                 "--tensors", "50", "--chunks", "4", "--world", "128", "--dir", folder, "--json"],
                capture_output=True, text=True, timeout=60)
            if (workload in MOUNTS and run.returncode != 0 and
                    "UNSUPPORTED: built without FUSE" in run.stderr):
                print(f"{workload}: built without FUSE")
                continue
            assert run.returncode == 0, f"{workload}: exit {run.returncode}: {run.stderr}"
            lines = run.stdout.splitlines()
            assert len(lines) == cases, f"{workload}: {len(lines)} lines instead of {cases}"
            for line in lines:
                check(line, workload)
            assert not os.listdir(folder), f"{workload} left {os.listdir(folder)}"
        # Words that it does not know are refused.
        run = subprocess.run([sys.argv[1], "nonsense"], capture_output=True, text=True, timeout=60)
        assert run.returncode == 2 and "nonsense" in run.stderr, run.stderr
    print(f"{sum(wanted.values())} cases")


main()
