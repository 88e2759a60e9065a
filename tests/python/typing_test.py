# SPDX-License-Identifier: Apache-2.0
"""The package's type hints, for whoever checks theirs strictly."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import tensormount

USE = """\
import tensormount as tm

checkpoint: tm.Checkpoint = tm.open("STORE/step-1")
shape: tuple[int, ...] = checkpoint["w"].shape
text: bytes = checkpoint.objects["config"]
try:
    rows = checkpoint["w"][0:2]
except tm.DataLossError as error:
    print(error.key, error.box, error.code.lower())
wrong: int = checkpoint.uuid
"""


# Their classes are of no type where they are not installed.
FRAMEWORKS = ("torch", "fsspec", "accelerate", "lightning", "megatron", "olmo_core", "torchtitan", "transformers", "vllm")
WITHOUT = """\
[mypy-{name},{name}.*]
ignore_missing_imports = True
"""
# The modules that subclass them.
OVER = """\
[mypy-tensormount.torch.*,{}]
disallow_subclassing_any = False
warn_return_any = False
"""


class Typing(unittest.TestCase):
    def test_mypy_strict_accepts_the_package(self):
        try:
            import mypy  # noqa: F401
        except ImportError as error:
            self.skipTest(str(error))
        package = os.path.dirname(tensormount.__file__)
        self.assertTrue(os.path.exists(os.path.join(package, "py.typed")))
        with tempfile.TemporaryDirectory() as folder:
            use = os.path.join(folder, "use.py")
            with open(use, "w", encoding="utf-8") as file:
                file.write(USE)
            # mypy takes no folder of installed packages as one of sources.
            copy = os.path.join(folder, "src", "tensormount")
            shutil.copytree(package, copy,
                            ignore=shutil.ignore_patterns("bin", "lib", "__pycache__"))
            environment = dict(os.environ, MYPYPATH=os.path.dirname(copy))
            settings = os.path.join(folder, "mypy.ini")
            with open(settings, "w", encoding="utf-8") as file:
                file.write("[mypy]\nstrict = True\n")
                file.write("".join(WITHOUT.format(name=name) for name in FRAMEWORKS
                                   if importlib.util.find_spec(name) is None))
                over = ["tensormount.fsspec", *(f"tensormount.{name}.*" for name in tensormount._PLUGINS)]
                file.write(OVER.format(",".join(over)))
            done = subprocess.run(
                [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", folder,
                 copy, use],
                capture_output=True, text=True, cwd=folder, env=environment)
        # Of all, only the mistake in the last line.
        self.assertEqual([line.split(":")[1] for line in done.stdout.splitlines()
                          if ": error:" in line], ["10"], done.stdout + done.stderr)
        self.assertIn("use.py:10", done.stdout)


if __name__ == "__main__":
    unittest.main()
