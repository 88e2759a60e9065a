#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of docs/mounting.md: every ```console block, in one shell, line for line.

usage: semantics_test.py BIN     BIN is the folder of the built command
"""

import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARK = "=====next====="


def examples(text):
    """(command, expected lines) of every console block."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.S | re.M):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def write_model(path, tensors):
    header, data = {}, b""
    for key, shape, value in tensors:
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def run(command, folder, env, **more):
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=60, **more)


def prepare(folder, env):
    weight = bytes((i * 7 + i // 251) % 256 for i in range(64 * 128 * 4))
    bias = bytes(i % 199 for i in range(4 * 300))
    (folder / "w.bin").write_bytes(weight)
    (folder / "bias.bin").write_bytes(bias)
    (folder / "MNT").mkdir()
    (folder / "HF").mkdir()
    for step, first in (("step-1", bias), ("step-2", bias[::-1])):
        write_model(folder / "in.safetensors", [("layers/0/w", [64, 128], weight), ("bias", [300], first)])
        done = run(["tensormount", "import", "in.safetensors", f"STORE/{step}", "--ranks", "2"], folder, env)
        if done.returncode != 0:
            sys.exit(f"import failed: {done.stderr}")


def matches(want, got):
    """Line by line; "..." stands for anything."""
    if len(want) != len(got):
        return False
    return all(re.fullmatch(".*".join(map(re.escape, w.split("..."))), g) for w, g in zip(want, got))


def skip_reason():
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return None


def main():
    reason = skip_reason()
    if reason:
        print(f"skipped: {reason}")
        sys.exit(1 if "fuse" in os.environ.get("TENSORMOUNT_REQUIRE", "").split(",") else 77)
    env = {**os.environ, "PATH": f"{pathlib.Path(sys.argv[1]).resolve()}:{os.environ['PATH']}", "LC_ALL": "C"}
    wanted = examples((ROOT / "docs" / "mounting.md").read_text())
    failed = 0
    base = os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None
    with tempfile.TemporaryDirectory(dir=base) as name:
        folder = pathlib.Path(name)
        prepare(folder, env)
        script = "exec 2>&1\n" + "".join(f"{command}\nprintf '%s\\n' '{MARK}'\n" for command, _ in wanted)
        try:
            done = run(["bash"], folder, env, input=script)
        finally:
            if os.path.ismount(folder / "MNT"):
                run(["tensormount", "unmount", "--lazy", "MNT"], folder, env)
        outputs = done.stdout.split(MARK + "\n")
        for (command, lines), output in zip(wanted, outputs):
            if not matches(lines, output.splitlines()):
                failed += 1
                print(f"$ {command}\nwanted:\n" + "\n".join(lines) + f"\ngot:\n{output}")
        if len(outputs) != len(wanted) + 1:
            failed += 1
            print(f"{len(wanted)} commands, {len(outputs) - 1} answers")
    print(f"{len(wanted)} commands, {failed} failed")
    return 1 if failed or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
