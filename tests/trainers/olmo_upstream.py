# SPDX-License-Identifier: Apache-2.0
"""Runs OLMo-core's own checkpoint tests through tm.olmo.install().

usage: TENSORMOUNT_UPSTREAM=DIR python olmo_upstream.py [--stock] [PYTEST-ARGUMENT...]

DIR/OLMo-core is a checkout. Without arguments: the tests below, but those of gs:// and s3://. --stock: without
tensormount.
"""

import os
import sys

TESTS = ("distributed/checkpoint_test.py", "distributed/checkpoint/filesystem_test.py", "train/checkpoint_test.py")
STOCK = "TENSORMOUNT_UPSTREAM_STOCK"

if "--stock" in sys.argv:
    sys.argv.remove("--stock")
    os.environ[STOCK] = "1"
import olmo_core.train.checkpoint  # noqa: F401: the installed one, not that of the checkout.

if STOCK not in os.environ:
    # Also in the ranks of a test: they are forked, or spawned, and then run this file as a module.
    import tensormount as tm

    tm.olmo.install()


def main():
    import pytest

    checkout = os.path.join(os.environ["TENSORMOUNT_UPSTREAM"], "OLMo-core")
    os.chdir(checkout)
    tests = sys.argv[1:] or [os.path.join("src", "test", test) for test in TESTS]
    return pytest.main(["-q", "-p", "no:cacheprovider", "-rfE", "--tb=short", "-k", "not remote", *tests])


if __name__ == "__main__":
    sys.exit(main())
