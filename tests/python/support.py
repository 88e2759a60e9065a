# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: where it is, how many random cases, which seed."""

import importlib.util
import os
import pathlib
import random
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))


def scaled(cases):
    """`cases` times TENSORMOUNT_TEST_SCALE, at least 1."""
    return max(1, int(cases * float(os.environ.get("TENSORMOUNT_TEST_SCALE", "1"))))


def seeded():
    """A generator of TENSORMOUNT_TEST_SEED, and that seed."""
    seed = int(os.environ.get("TENSORMOUNT_TEST_SEED", "1"))
    return random.Random(seed), seed


def needs(*modules):
    """Skips a test or a class of them by the name of what is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")
