#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Readers on a mount while checkpoints are published, replaced and removed below it.

usage: soak.py BIN [--seconds N] [--readers N]

Every read is compared with a formula of checkpoint and tensor. Only ESTALE and ENOENT are allowed,
for what was removed.
"""

import argparse
import errno
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time

TENSORS = 8
SIZE = 300_000


def content(step, key):
    pattern = bytes((step * 37 + key * 11 + j * 5 + j // 256) % 256 for j in range(4099))
    return (pattern * (SIZE // 4099 + 1))[:SIZE]


def write_model(path, step):
    header = {f"t{k}": {"dtype": "U8", "shape": [SIZE // 100, 100], "data_offsets": [k * SIZE, (k + 1) * SIZE]}
              for k in range(TENSORS)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(content(step, k) for k in range(TENSORS)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--readers", type=int, default=64)
    args = parser.parse_args()
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        print(f"skipped: /dev/fuse: {error.strerror}")
        return 1 if "fuse" in os.environ.get("TENSORMOUNT_REQUIRE", "").split(",") else 77
    program = str(pathlib.Path(args.bin).resolve() / "tensormount")

    def run(*command):
        return subprocess.run([program, *map(str, command)], text=True, capture_output=True, timeout=60)

    with tempfile.TemporaryDirectory(dir=os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None) as name:
        folder = pathlib.Path(name)
        store, at = folder / "store", folder / "mnt"
        at.mkdir()

        def save(step):
            write_model(folder / "in.safetensors", step)
            done = run("import", folder / "in.safetensors", store / f"step-{step}", "--ranks", 2)
            if done.returncode != 0:
                raise RuntimeError(done.stderr)

        save(1)
        mounted = run("mount", store, at)
        if mounted.returncode != 0:
            print(mounted.stderr)
            return 1
        wrong, reads, refused = [], [0], [0]
        end = time.monotonic() + args.seconds

        def read(seed):
            pick = random.Random(seed)
            while time.monotonic() < end and not wrong:
                try:
                    names = [n for n in os.listdir(at) if n.startswith("step-")]
                    step = int(pick.choice(names).removeprefix("step-")) if names else 1
                    key = pick.randrange(TENSORS)
                    want = content(step, key)
                    with open(at / f"step-{step}/tensors/t{key}", "rb", buffering=0) as file:
                        for _ in range(5):
                            offset, size = pick.randrange(SIZE), pick.randrange(1, 100_000)
                            got = os.pread(file.fileno(), size, offset)
                            if got != want[offset:offset + size]:
                                wrong.append(f"step-{step} t{key} at {offset} + {size}")
                            reads[0] += 1
                except OSError as error:
                    if error.errno not in (errno.ESTALE, errno.ENOENT):
                        wrong.append(str(error))
                    refused[0] += 1

        readers = [threading.Thread(target=read, args=(i,)) for i in range(args.readers)]
        try:
            for reader in readers:
                reader.start()
            step = 1
            while time.monotonic() < end:
                step += 1
                save(step)
                if step > 3:
                    run("rm", store / f"step-{step - 3}")
                    run("gc", store, "--grace", 0)
        finally:
            end = min(end, time.monotonic())
            for reader in readers:
                reader.join()
            run("unmount", "--lazy", at)
    print(f"{step} saves, {reads[0]} reads, {refused[0]} of what was removed, wrong: {wrong[:5]}")
    return 1 if wrong or reads[0] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
