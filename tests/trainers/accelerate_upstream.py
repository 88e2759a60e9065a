# SPDX-License-Identifier: Apache-2.0
"""Accelerate's own tests of checkpoints, with each Accelerator registered.

usage: TENSORMOUNT_UPSTREAM=DIR accelerate_upstream.py     DIR has a checkout of Accelerate, "accelerate"

pytest loads this file as a plugin, too, which registers each Accelerator when it is made.
"""

import os
import re
import subprocess
import sys
import unittest

import tensormount as tm

FILES = ("tests/test_state_checkpointing.py", "tests/test_accelerator.py")
# Tests that cannot pass, and why.
REFUSED = {}
FAILED = re.compile(r"^FAILED \S+::(\S+)", re.MULTILINE)


def pytest_configure(config):
    """Called by pytest, which loads this file with -p."""
    import accelerate

    made = accelerate.Accelerator.__init__

    def registered(self, *args, **options):
        made(self, *args, **options)
        tm.accelerate.register(self)

    accelerate.Accelerator.__init__ = registered


class Upstream(unittest.TestCase):
    def test_accelerates_own_tests_pass(self):
        folder = os.environ.get("TENSORMOUNT_UPSTREAM")
        if folder is None:
            self.skipTest("TENSORMOUNT_UPSTREAM is not set")
        here, package = os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(tm.__file__))
        path = os.pathsep.join(filter(None, [here, package, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rf", "--color=no", "-p", "no:cacheprovider",
             "-p", os.path.splitext(os.path.basename(__file__))[0], *FILES],
            cwd=os.path.join(folder, "accelerate"), env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=1800)
        print(done.stdout.strip().splitlines()[-1])
        self.assertEqual(set(FAILED.findall(done.stdout)), set(REFUSED), done.stdout[-5000:])
        self.assertGreater(int(re.findall(r"(\d+) passed", done.stdout)[-1]), 40)


if __name__ == "__main__":
    unittest.main()
