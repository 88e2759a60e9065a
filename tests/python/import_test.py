# SPDX-License-Identifier: Apache-2.0
"""What an import costs, and what it does not bring along."""

import importlib.util
import os
import re
import subprocess
import sys
import unittest

import tensormount

HEAVY = ("numpy", "torch", "ml_dtypes", "asyncio", "importlib.resources", "importlib.metadata",
         "concurrent.futures", "json", "subprocess")


def python(*arguments):
    # Of an environment without site packages that import things by themselves: not ours to count.
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.path.dirname(os.path.dirname(tensormount.__file__))
    done = subprocess.run([sys.executable, "-S", *arguments], capture_output=True, text=True,
                          env=environment)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done


class Import(unittest.TestCase):
    def test_import_loads_no_heavy_module(self):
        loaded = python("-c", "import sys, tensormount as tm; tm.open; print(*sys.modules)").stdout
        self.assertEqual(sorted(set(HEAVY) & set(loaded.split())), [])

    def test_import_alone_loads_no_library_or_submodule(self):
        loaded = python("-c", "import sys, tensormount; print(*sys.modules)").stdout.split()
        self.assertEqual([name for name in loaded if name.startswith("tensormount")],
                         ["tensormount"])
        self.assertNotIn("ctypes", loaded)
        self.assertNotIn("typing", loaded)

    def test_every_public_name_exists(self):
        for name in tensormount._NAMES:
            self.assertIn(name, dir(tensormount))
            if name in tensormount._PLUGINS:  # The package that it needs may be missing.
                self.assertIsNotNone(importlib.util.find_spec(f"tensormount.{name}"), name)
            else:
                self.assertTrue(getattr(tensormount, name), name)
        with self.assertRaises(AttributeError):
            tensormount.nothing
        self.assertNotIn("open", tensormount.__all__)

    def test_a_signal_handler_that_interrupts_an_import_hears_it(self):
        told = python("-c", '''if True:
            import sys, tensormount as tm

            class Interrupt:  # Runs in the middle of the import, like a signal handler.
                def find_spec(self, name, path=None, target=None):
                    if name == "tensormount._shards":
                        sys.meta_path.remove(self)
                        try:
                            tm.async_save
                        except tm.BusyError as error:
                            print(error)

            tm.BusyError
            sys.meta_path.insert(0, Interrupt())
            tm.save
            print(tm.async_save.__name__)
            ''').stdout
        self.assertRegex(told, "(?s)^BUSY: tensormount.async_save: is being imported .* handler .*once before.*async_save$")

    def test_type_hints_resolve(self):
        import typing

        import tensormount as tm

        for call in (tm.save, tm.async_save, tm.Saver.save, tm.load, tm.async_load, tm.validate,
                     tm.export, tm.verify):
            with self.subTest(call=call.__qualname__):
                self.assertIn("return", typing.get_type_hints(call))

    def test_type_checkers_see_every_lazy_name(self):
        with open(tensormount.__file__, encoding="utf-8") as file:
            seen = re.findall(r"\b(\w+) as \1\b", file.read())
        self.assertEqual(sorted(seen), sorted(tensormount._NAMES))

    def test_missing_library_is_reported(self):
        for path, words in (("/nowhere/lib.so", "TENSORMOUNT_LIBRARY"), ("libc.so.6", "it lacks")):
            said = python("-c", f"""
import os, tensormount as tm
os.environ["TENSORMOUNT_LIBRARY"] = {path!r}
try:
    tm.open("x")
except tm.LibraryError as error:
    assert isinstance(error, ImportError)
    print(error)""").stdout
            self.assertIn(words, said)


if __name__ == "__main__":
    unittest.main()
