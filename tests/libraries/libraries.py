# SPDX-License-Identifier: Apache-2.0
"""What the tests with real libraries share: making checkpoints with them, comparing all of one with
the formula.

A test file calls libraries.need("torch", ...) before it imports them and ends with
libraries.main(). Exit status 77: nothing could be tried here.
"""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77
REQUIRED = os.environ.get("TENSORMOUNT_REQUIRE", "").split(",")
HERE = pathlib.Path(__file__).resolve().parent


def skip_all(why):
    print(f"[  SKIPPED ] {pathlib.Path(sys.argv[0]).stem} ({why})")
    sys.exit(1 if "libraries" in REQUIRED else SKIPPED)


def need(*names):
    """Skips all, or fails where TENSORMOUNT_REQUIRE says libraries, unless these can be imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            skip_all(f"no {name}: scripts/setup --with libraries")


need("numpy")
sys.path.insert(0, str(HERE.parent / "tools"))
import formula  # noqa: E402
import harness  # noqa: E402

HAVE_FUSE = os.access("/dev/fuse", os.R_OK | os.W_OK)


def run_apart(words, seconds, **more):
    """Runs a program in a session of its own, which ends with it or at the deadline, whatever the
    program started and left behind. Its exit status and what it said."""
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                 start_new_session=True, **more)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"still running after {seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        return code, said.read()


def make(program, *args, seconds=150):
    """Runs make_PROGRAM.py, which saves with the library."""
    # Not as the main program: processes that a library spawns would import that, with all it imports.
    code, said = run_apart(
        [sys.executable, "-B", "-W", "ignore", "-c", f"import make_{program}; make_{program}.main()", *args], seconds,
        cwd=HERE, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    if code != 0:
        raise AssertionError(f"make_{program}.py {args}: {code}\n{said[-6000:]}")


class LibraryTest(harness.ToolTest):
    """Checkpoints below cls.made (made once) or self.dir."""

    @classmethod
    def setUpClass(cls):
        base = os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None
        cls.made = pathlib.Path(tempfile.mkdtemp(prefix="libraries-", dir=base))
        cls.addClassCleanup(shutil.rmtree, cls.made, ignore_errors=True)

    def setUp(self):
        base = os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="libraries-", dir=base))
        self.mounts = []
        self.addCleanup(self.clean)

    @contextlib.contextmanager
    def mounted(self, source, *more, name="MNT"):
        mnt = self.mount(source, *more, name=name)
        try:
            yield mnt
        finally:
            subprocess.run([harness.TOOL, "unmount", str(mnt)], check=False, timeout=60, capture_output=True)

    def raw_of(self, key, spec):
        return formula.raw(key, *spec)

    def write_expected(self, expected):
        """All of it as a safetensors file, written by hand."""
        path = self.dir / "expected.safetensors"
        if not path.exists():
            harness.write_safetensors(path, {key: (formula.DTYPES[dtype][1], shape, formula.raw(key, dtype, shape))
                                             for key, (dtype, shape) in expected.items()})
        return path

    def check_list(self, source, expected):
        lines = self.json_lines("ls", source)
        found = {line["key"]: (line["dtype"], tuple(line["shape"])) for line in lines}
        self.assertEqual(found, expected)

    def check_cat(self, source, expected, keys=None):
        """Whole tensors and a box of each through the command."""
        for key in expected if keys is None else keys:
            dtype, shape = expected[key]
            self.assertEqual(self.run_tool("cat", source, key, text=False).stdout, formula.raw(key, dtype, shape), key)
            if shape and 0 not in shape:
                box = formula.a_box(key, shape)
                self.assertEqual(self.run_tool("cat", source, key + formula.shown(box), text=False).stdout,
                                 formula.raw(key, dtype, shape, box), f"{key}{formula.shown(box)}")

    def check_mount(self, source, expected):
        """Every tensor and a box of each through a mount."""
        with self.mounted(source) as mnt:
            found = {str(p.relative_to(mnt / "tensors")) for p in (mnt / "tensors").rglob("*") if p.is_file()}
            self.assertEqual(found, set(expected))
            for key, (dtype, shape) in expected.items():
                whole = (mnt / "tensors" / key).read_bytes()
                self.assertEqual(whole, formula.raw(key, dtype, shape), key)
                if shape and 0 not in shape:
                    box = formula.a_box(key, shape)
                    self.assertEqual((mnt / "slices" / (key + formula.shown(box))).read_bytes(),
                                     formula.raw(key, dtype, shape, box), f"{key}{formula.shown(box)}")

    def check_load(self, source, expected):
        """Loads on other numbers of ranks, in other pieces, compared with the formula's file."""
        for ranks, rule in [(3, "rows"), (4, "cols"), (4, "grid:2x2")]:
            (report,) = self.json_lines("load", source, "--ranks", ranks, "--shard", rule, "--compare",
                                        self.write_expected(expected))
            self.assertEqual(report["different_tensors"], 0)
            # What cannot be split is compared on every rank.
            self.assertGreaterEqual(report["compared_bytes"],
                                    sum(formula.size_of(*spec) for spec in expected.values()))

    def check_adopted(self, source, expected):
        """Adopts it into a store, reads it there, compares both sources."""
        self.run_tool("adopt", source, self.dir / "STORE" / "adopted")
        adopted = self.dir / "STORE" / "adopted"
        self.check_list(adopted, expected)
        self.check_load(adopted, expected)
        self.check_cat(adopted, expected, list(expected)[:4])
        self.run_tool("verify", adopted)
        self.run_tool("diff", source, adopted)
        return adopted

    def check(self, source, expected, adopted=True):
        self.check_list(source, expected)
        if HAVE_FUSE:
            self.check_mount(source, expected)
            self.check_cat(source, expected, list(expected)[::5])
        else:
            self.check_cat(source, expected)
        self.check_load(source, expected)
        self.run_tool("verify", source)
        if adopted:
            self.check_adopted(source, expected)

    def check_refused_when_changed(self, source, data, key, expected):
        """`data`: the name of a file that holds `key`. The adopted checkpoint notices each change."""

        def append(path):
            with open(path, "ab") as f:
                f.write(b"x")

        def overwrite(path):
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)

        def shorten(path):
            os.truncate(path, path.stat().st_size - 1)

        def touch(path):
            os.utime(path)

        for number, change in enumerate([append, overwrite, shorten, touch]):
            copy = self.dir / f"changed{number}"
            shutil.copytree(source, copy)
            adopted = self.dir / "STORE" / f"changed{number}"
            self.run_tool("adopt", copy, adopted)
            self.check_cat(adopted, expected, [key])
            change(copy / data)
            for command in [("cat", adopted, key), ("load", adopted), ("verify", adopted)]:
                done = self.run_tool(*command, expect=None)
                self.assertIn(done.returncode, (1, 2), f"{change.__name__}: {command}: {done.stdout}")
                self.assertIn("changed", done.stdout + done.stderr, f"{change.__name__}: {command}")


def main():
    program = unittest.main(argv=[sys.argv[0], *sys.argv[1:]], verbosity=2, exit=False)
    result = program.result
    if not result.wasSuccessful() or result.testsRun == 0:
        sys.exit(1)
    sys.exit(SKIPPED if len(result.skipped) == result.testsRun else 0)


