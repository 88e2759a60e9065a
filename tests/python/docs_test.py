# SPDX-License-Identifier: Apache-2.0
"""The Python of README.md, docs/python.md and docs/extending.md does what it shows."""

import doctest
import os
import re
import struct
import unittest

from support import ROOT, Folder, run, write_safetensors
from tensormount._leaves import registry

try:
    import numpy  # noqa: F401
except ImportError as error:
    raise unittest.SkipTest(str(error))

BLOCK = re.compile(r"<!-- executed by tests/python -->\n```python\n(.*?)```", re.DOTALL)


def blocks(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return BLOCK.findall(file.read())


class Documents(Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        values = struct.pack("<512f", *range(512))
        shape = (16, 32)
        write_safetensors("m.safetensors", {
            "embed": ("F32", shape, values), "layers.0.w": ("F32", shape, values),
            "layers.1.w": ("F32", shape, values), "w": ("F32", shape, values)})
        run("import", "m.safetensors", "README/STORE/step-1", "--ranks", 2)
        write_safetensors("three.safetensors", {
            key: ("F32", shape, values) for key in ("embed", "layers.0.w", "layers.1.w")})
        run("import", "three.safetensors", "STORE/step-1", "--ranks", 2)

    def test_examples_of_python_md_run(self):
        self.check("python.md", 5)

    def test_examples_of_extending_md_run(self):
        self.addCleanup(lambda: [registry.unregister_leaf_kind(kind) for kind in list(registry.registered())])
        self.check("extending.md", 2)

    def check(self, name, count):
        found = blocks("docs", name)
        self.assertEqual(len(found), count)
        test = doctest.DocTestParser().get_doctest("\n".join(found), {}, name, name, 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test)
        self.assertEqual(runner.failures, 0)
        self.assertGreater(runner.tries, 8)

    def test_examples_of_the_readme_run(self):
        (found,) = blocks("README.md")
        names = {}
        os.chdir("README")
        try:
            exec(compile(found, "README.md", "exec"), names)
        finally:
            os.chdir("..")
        self.assertEqual(names["rows"].shape, (2, 4))


if __name__ == "__main__":
    unittest.main()
