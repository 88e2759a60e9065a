# SPDX-License-Identifier: Apache-2.0
"""What the tests of real clients share: stores of known bytes, mounts that are always unmounted.

A test file begins with `import clients`, calls `clients.libraries("zarr", ...)` for what it imports
and ends with `clients.main()`. Exit status 77: nothing could be tried here.
"""

import contextlib
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

SKIPPED = 77
REQUIRED = os.environ.get("TENSORMOUNT_REQUIRE", "").split(",")


def skip_all(why):
    """Ends the program: nothing can be tried. A failure where TENSORMOUNT_REQUIRE says clients."""
    print(f"[  SKIPPED ] {pathlib.Path(sys.argv[0]).stem} ({why})")
    sys.exit(1 if "clients" in REQUIRED else SKIPPED)


def libraries(*names):
    """Imports them, or skips all."""
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            skip_all(f"no {name}: {error}; scripts/setup --with python,clients")
    return found if len(found) != 1 else found[0]


def programs(*names):
    for name in names:
        if shutil.which(name) is None:
            skip_all(f"no {name}; scripts/setup --with python,clients")


libraries("numpy")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
import harness  # noqa: E402


class ClientTest(harness.ToolTest):
    """self.dir, self.store, self.model and self.tensors as in harness.ToolTest."""

    def setUp(self):
        harness.need_fuse()
        super().setUp()

    @contextlib.contextmanager
    def mounted(self, source, *more, name="MNT"):
        """The mount point; unmounted at the end, whatever happens and whatever still uses it."""
        mnt = self.mount(source, *more, name=name)
        try:
            yield mnt
        finally:
            if subprocess.run([harness.TOOL, "unmount", str(mnt)], check=False, timeout=60,
                              capture_output=True).returncode != 0:
                subprocess.run(["umount", "-l", str(mnt)], check=False, timeout=60)

    def sh(self, command, *args, expect=0, timeout=60, text=True):
        """Runs a program, or a line of bash where `args` is empty. What it said, both streams."""
        words = [command, *map(str, args)] if args else ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(words, cwd=self.dir, timeout=timeout, text=text, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "LC_ALL": "C"})
        if expect is not None:
            self.assertEqual(done.returncode, expect, f"{words}\n{done.stdout}")
        return done.stdout

    def save(self, name="step-1", *more, model=None):
        path = super().save(name, *more, model=model)
        key = os.environ.get("TENSORMOUNT_PLANT")
        if key:  # By hand, to see that a test fails for a wrong byte in the middle of this tensor.
            (info,) = self.json_lines("info", path, key)
            extent = info["extents"][len(info["extents"]) // 2]
            self.flip(path / extent["file"], extent["offset"] + extent["length"] // 2)
        return path

    def expected(self):
        """Bytes of every tensor by key."""
        return {key: raw for key, (_, _, raw) in self.tensors.items()}

    def check_copy(self, folder, expected=None):
        """That the files below `folder` are exactly these tensors."""
        expected = self.expected() if expected is None else expected
        found = {str(p.relative_to(folder)): p for p in pathlib.Path(folder).rglob("*") if p.is_file()}
        self.assertEqual(sorted(found), sorted(expected))
        for key, raw in expected.items():
            self.assertEqual(found[key].read_bytes(), raw, key)


def main():
    program = unittest.main(argv=[sys.argv[0], *sys.argv[1:]], verbosity=2, exit=False)
    result = program.result
    if not result.wasSuccessful() or result.testsRun == 0:
        sys.exit(1)
    sys.exit(SKIPPED if len(result.skipped) == result.testsRun else 0)
