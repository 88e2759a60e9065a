# SPDX-License-Identifier: Apache-2.0
"""What the families share: checkpoints whose bytes are known, and what is read of them, compared by Python."""

import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Key -> (dtype, shape, bytes of an element). Small: what counts is the number of calls, not of bytes.
SHAPES = {"a.b": ("U8", (1001,), 1), "empty": ("F32", (0, 4), 4), "layers/0/w": ("F32", (96, 50), 4), "one": ("I64", (), 8),
          "w": ("F32", (64, 48), 4)}
# Besides, where many bytes are read: more than one leaf of a hash, and served by the kernel itself.
LARGE = {**SHAPES, "large": ("U8", (3001, 100), 1)}


def numbered_lines(key, version, size):
    """So many bytes: a repeated line that names both, so that no two are equal anywhere."""
    line = f"{key} of {version} is here; ".encode()
    return b"".join(line + i.to_bytes(2, "little") for i in range(size // len(line) + 1))[:size]


def content(key, version):
    """The bytes of a tensor."""
    _, shape, width = LARGE[key]
    return numbered_lines(key, version, math.prod(shape) * width)


def write_safetensors(path, tensors):
    """`tensors`: key -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for key, (dtype, shape, raw) in tensors.items():
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_model(path, version, shapes=None):
    write_safetensors(path, {key: (dtype, shape, content(key, version)) for key, (dtype, shape, _) in (shapes or SHAPES).items()})


def read_model(path):
    """Key -> bytes, of a safetensors file."""
    whole = pathlib.Path(path).read_bytes()
    length, = struct.unpack_from("<Q", whole)
    header = json.loads(whole[8:8 + length])
    return {key: whole[8 + length:][slice(*entry["data_offsets"])] for key, entry in header.items() if key != "__metadata__"}


def wrong_model(path, version):
    """What differs in an exported file; empty: nothing."""
    try:
        got = read_model(path)
    except (OSError, ValueError, struct.error) as error:
        return f"it cannot be read: {error}"
    if set(got) != set(SHAPES):
        return f"its keys are {sorted(got)}"
    bad = [key for key in SHAPES if got[key] != content(key, version)]
    return f"{', '.join(bad)}: other bytes" if bad else ""


def exported(context, checkpoint, env=None, timeout=60):
    """The run of an export, and where its file is."""
    out = context.work / "exported.safetensors"
    out.unlink(missing_ok=True)
    return context.run([context.tool, "export", checkpoint, out, "--to", "safetensors"], env=env, timeout=timeout), out


def wrong_checkpoint(context, checkpoint, version):
    """What is wrong with a checkpoint that shall hold `version`; empty: nothing."""
    done, out = exported(context, checkpoint)
    if done.returncode != 0:
        return f"export exits {done.returncode}: {done.stderr.strip()[-600:]}"
    return wrong_model(out, version)


def model(context, version):
    path = context.work / f"{version}.safetensors"
    if not path.exists():
        write_model(path, version)
    return path


def must(context, *words):
    done = context.run([context.tool, *words])
    if done.returncode != 0:
        raise RuntimeError(f"{words}: exit {done.returncode}: {done.stderr}")
    return done


def copy(template, at):
    shutil.rmtree(at, ignore_errors=True)
    subprocess.run(["cp", "-a", str(template), str(at)], check=True)
    return at


def code_is_named(text):
    """Whether an error is said as the command says errors: in words, or with --json as an object."""
    def named(line):
        if line.startswith("{"):
            try:
                error = json.loads(line)["error"]
                return error["code"].isupper() and bool(error["message"])
            except (ValueError, KeyError, TypeError, AttributeError):
                return False
        return line.startswith("tensormount: ") and ": " in line[13:] and line[13:].partition(":")[0].isupper()
    return any(map(named, text.splitlines()))


def fake_tool(context, script):
    """A folder whose `tensormount` is a shell script; in it $REAL is the true one."""
    folder = context.work / "fake"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tool = folder / "tensormount"
    tool.write_text(f"#!/bin/sh\nREAL={context.tool}\n{script}\n")
    tool.chmod(0o755)
    return folder


class Mount:
    """A daemon in the foreground, so that it can be given an environment, killed and waited for."""

    all = set()  # What is not closed yet: whatever ends the run ends these too.

    def __init__(self, context, source, at, *more, env=None):
        self.at = pathlib.Path(at)
        self.at.mkdir(parents=True, exist_ok=True)
        self.log = context.work / "mount.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([context.tool, "mount", str(source), str(at), "-f", *more], stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, env={**os.environ, **(env or {})})
        Mount.all.add(self)
        end = time.monotonic() + 15
        self.is_up = False
        while time.monotonic() < end and self.process.poll() is None and not self.is_up:
            self.is_up = b"mounted " in self.log.read_bytes()
            time.sleep(0.005)

    def close(self, seconds=20):
        """The exit status, "timeout" where it did not end by itself."""
        Mount.all.discard(self)
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = "timeout"
            self.process.kill()
            self.process.wait()
        subprocess.run(["umount", "-l", str(self.at)], check=False, capture_output=True)
        return status

    def said(self):
        return self.log.read_text(errors="replace")


def preload(context, name):
    """The library NAME.c beside this file, for LD_PRELOAD."""
    if name not in context.kept:
        library = context.work / f"{name}.so"
        subprocess.run([os.environ.get("CC", "cc"), "-O1", "-Wall", "-Wextra", "-Wno-implicit-fallthrough", "-Werror", "-shared", "-fPIC",
                        "-o", str(library), str(HERE / f"{name}.c"), "-ldl"], check=True, timeout=60)
        context.kept[name] = str(library)
    return context.kept[name]


def package(context):
    """The interpreter of tests, and the environment in which it finds the Python package of this build."""
    python = ROOT / ".cache/venv/bin/python3"
    library = context.bin.parent / "lib/libtensormount.so"
    if not python.exists() or not library.exists():
        context.missing(f"{python} or {library}")
    return python, {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "python", ROOT / "tests/python", HERE))),
                    "TENSORMOUNT_LIBRARY": str(library), "TENSORMOUNT_COMMAND": context.tool, "OMP_NUM_THREADS": "1",
                    "PYTHONDONTWRITEBYTECODE": "1"}


def need_fuse(context):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        context.missing("/dev/fuse cannot be opened")
