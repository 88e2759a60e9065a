# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: folders, files to read, the command that imports them.

The package is that which `import tensormount` finds: an installed wheel, or with PYTHONPATH=python the
tree, for which TENSORMOUNT_LIBRARY and TENSORMOUNT_COMMAND name the library and the command.
"""

import contextlib
import doctest
import faulthandler
import importlib.util
import json
import os
import random
import re
import shutil
import struct
import subprocess
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEADER = os.path.join(ROOT, "include", "tensormount", "c.h")
GOLDEN = os.path.join(ROOT, "tests", "golden", "v1")


def command():
    named = os.environ.get("TENSORMOUNT_COMMAND")
    if named:
        return named
    from tensormount._main import program

    return program()


def run(*arguments):
    """Runs the command; its standard output."""
    done = subprocess.run([command(), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"tensormount {' '.join(map(str, arguments))}: {done.stderr}")
    return done.stdout


def write_safetensors(path, tensors):
    """tensors: key to (name of the dtype, shape, bytes)."""
    header, at = {}, 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


class Folder(unittest.TestCase):
    """A test with a folder of its own, in which it runs."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(dir=os.environ.get("TENSORMOUNT_TEST_TMPDIR"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        before = os.getcwd()
        os.chdir(cls.folder)
        cls.addClassCleanup(os.chdir, before)


def damage(path, key, garbage):
    """Overwrites the first bytes of a tensor that is stored in one chunk, in the checkpoint directory `path`."""
    import tensormount as tm

    with tm.open(path) as checkpoint:
        (chunk,) = checkpoint[key].layout()["chunks"]
    file = os.path.join(path, chunk["file"])
    os.chmod(file, 0o600)
    with open(file, "r+b") as held:
        held.seek(chunk["offset"])
        held.write(garbage)


def check_examples(test, document, marker):
    """Runs the one example of docs/DOCUMENT that is marked as executed by `marker`, in a new folder."""
    test.addCleanup(os.chdir, os.getcwd())
    os.chdir(tempfile.mkdtemp(dir="."))
    with open(os.path.join(ROOT, "docs", document), encoding="utf-8") as file:
        (example,) = re.findall(rf"<!-- executed by {marker} -->\n```python\n(.*?)```", file.read(), re.S)
    found = doctest.DocTestParser().get_doctest(example, {}, document, document, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(found)
    test.assertEqual(runner.failures, 0)
    test.assertGreater(runner.tries, 4)


@contextlib.contextmanager
def stored_as(name, text):
    """Saves store that JSON as the plain value of that name, as another version might."""
    from tensormount import _tree

    plain = _tree.FlatTree.json_texts

    def other(flat):
        common, of_rank = plain(flat)
        return {**common, name: text}, of_rank

    with mock.patch.object(_tree.FlatTree, "json_texts", other):
        yield


def seed():
    return int(os.environ.get("TENSORMOUNT_TEST_SEED", "20261125"))


def seeded():
    """A generator of `seed()`, and that."""
    return random.Random(seed()), seed()


def scaled(cases):
    """`cases` times TENSORMOUNT_TEST_SCALE, at least 1."""
    return max(1, int(cases * float(os.environ.get("TENSORMOUNT_TEST_SCALE", "1"))))


LONG = scaled(1) > 1
# Shows where a test crashes, or hangs before ctest ends it, also in a process of its own.
faulthandler.enable()
if not LONG:
    faulthandler.dump_traceback_later(150)
needs_long = unittest.skipUnless(LONG, "takes long: TENSORMOUNT_TEST_SCALE=34")


def needs(*modules):
    """Skips a test or a class of them by the name of what is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")
