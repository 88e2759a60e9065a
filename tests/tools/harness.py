# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command share: running it, making safetensors files, damaging stores."""

import fcntl
import json
import os
import pathlib
import pty
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from processes import has_ended

BIN = pathlib.Path(os.environ["TENSORMOUNT_BIN"])
TOOL = str(BIN / "tensormount")
REQUIRED = os.environ.get("TENSORMOUNT_REQUIRE", "").split(",")

NUMPY = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?", "F16": "<f2"}


def need(part, there, why):
    """Skips, or fails where TENSORMOUNT_REQUIRE names the part."""
    if there:
        return
    if part in REQUIRED:
        raise AssertionError(f"{part} is required: {why}")
    raise unittest.SkipTest(why)


def need_fuse():
    need("fuse", os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse cannot be opened")


def need_mpi():
    need("mpi", shutil.which("mpirun") is not None, "no mpirun")


def mpirun(ranks, *more):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", *more, "-n", str(ranks)]


class Terminal:
    """A terminal that children print to: pass `child` as their stdout or stderr, and ask `text` when they have ended.

    We hold the children's side open and write the end ourselves: when the last holder closes it, a reader may be told
    of the end before it gets what was written just before.
    """

    END = b"\0no more\0"

    def __init__(self, columns=80):
        self.main, self.child = pty.openpty()
        fcntl.ioctl(self.child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.seen = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        while not self.seen.endswith(self.END):
            self.seen += os.read(self.main, 65536)

    def text(self):
        os.write(self.child, self.END)
        self.reader.join(30)
        assert not self.reader.is_alive(), self.seen
        os.close(self.child)
        os.close(self.main)
        return self.seen[:-len(self.END)].decode().replace("\r\n", "\n")


def write_safetensors(path, tensors):
    """tensors: key -> (dtype name, shape, bytes). By hand, so that every dtype is possible."""
    header, at = {}, 0
    for key, (dtype, shape, raw) in tensors.items():
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, raw in tensors.values():
            file.write(raw)


def sample_tensors(seed=1):
    rng = np.random.default_rng(seed)

    def of(dtype, *shape):
        items = int(np.prod(shape, dtype=np.int64))
        bits = {"F64": 64, "I64": 64, "F32": 32, "BF16": 16, "F16": 16, "U8": 8, "F8_E4M3": 8, "F4": 4}[dtype]
        return dtype, shape, rng.integers(0, 256, items * bits // 8, dtype=np.uint8).tobytes()

    return {
        "w": of("F32", 64, 48),
        "layers.0.attn/qkv": of("BF16", 30, 7, 5),
        "layers.0.mlp": of("F16", 129, 33),
        "bias": of("F64", 17),
        "steps": of("I64"),
        "empty": of("F32", 0, 4),
        "tiny": of("U8", 3),
        "fp8": of("F8_E4M3", 16, 16),
        "fp4": of("F4", 6, 8),
        "big": of("F32", 1100, 1024),
    }


class ToolTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        base = os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="tools-", dir=base))
        self.mounts = []
        self.addCleanup(self.clean)
        self.store = self.dir / "STORE"
        self.model = self.dir / "model.safetensors"
        self.tensors = sample_tensors()
        write_safetensors(self.model, self.tensors)

    def clean(self):
        for mnt in self.mounts:
            if os.path.ismount(mnt):
                subprocess.run(["umount", "-l", str(mnt)], check=False)
        shutil.rmtree(self.dir, ignore_errors=True)

    def run_tool(self, *args, expect=0, prefix=(), env=None, text=True, timeout=90):
        command = [*prefix, TOOL, *map(str, args)]
        result = subprocess.run(
            command, capture_output=True, timeout=timeout, text=text, cwd=self.dir, stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})})
        if expect is not None:
            self.assertEqual(result.returncode, expect, f"{command}\n{result.stdout}\n{result.stderr}")
        return result

    def json_lines(self, *args, expect=0):
        out = self.run_tool("--json", *args, expect=expect).stdout
        return [json.loads(line) for line in out.splitlines()]

    def fails(self, *args, code, says, status=2):
        """The command ends with one error line of that code that holds the text."""
        result = self.run_tool(*args, expect=status)
        lines = [l for l in result.stderr.splitlines() if "hint:" not in l and "warning:" not in l]
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith(f"tensormount: {code}: "), lines[0])
        self.assertIn(says, lines[0])
        return result

    def save(self, name="step-1", *more, model=None):
        """Files of its own, which a test may damage: of several checkpoints of one model, too."""
        self.run_tool("import", model or self.model, self.store / name, "--reuse", "off", *more)
        return self.store / name

    def mount(self, source, *more, name="MNT"):
        need_fuse()
        mnt = self.dir / name
        mnt.mkdir(exist_ok=True)
        self.mounts.append(mnt)
        self.run_tool("mount", source, mnt, *more)
        return mnt

    def wait_for(self, what, condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"waited {seconds} s for {what}")
            time.sleep(0.02)

    @staticmethod
    def flip(path, offset, mask=1):
        """Damages one byte of a sealed file."""
        os.chmod(path, 0o644)
        with open(path, "r+b") as f:
            f.seek(offset)
            byte = f.read(1)[0]
            f.seek(offset)
            f.write(bytes([byte ^ mask]))


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    unittest.main(argv=[sys.argv[0], *sys.argv[1:]], verbosity=2)
