# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, opened and read without NumPy: what they hold, what is refused, threads, pickles."""

import doctest
import errno
import math
import os
import pickle
import shutil
import sys
import threading
import unittest
from unittest import mock

import tensormount as tm
from support import GOLDEN, Folder, run, write_safetensors
from tensormount import _abi, _held, _key_map, _index, _load, _save, _saver, _store, _values, _verify, errors


class Golden(unittest.TestCase):
    """A checkpoint of format version 1: what tests/golden/golden_test.cc wrote."""

    def setUp(self):
        self.checkpoint = tm.open(os.path.join(GOLDEN, "step-1000"))
        self.addCleanup(self.checkpoint.close)

    def test_lists_tensors(self):
        self.assertEqual(self.checkpoint.keys(), ["empty", "flat/\u00e9", "layers.0.b", "layers.0.w",
                                                  "leaves", "scalar"])
        self.assertEqual(self.checkpoint.keys("*a*r*"), ["layers.0.b", "layers.0.w", "scalar"])
        self.assertEqual(self.checkpoint.keys("f*\u00e9"), ["flat/\u00e9"])  # '*' crosses '/'.
        self.assertEqual(list(self.checkpoint), self.checkpoint.keys())
        self.assertEqual(len(self.checkpoint), 6)
        self.assertEqual([key for key, _ in self.checkpoint.items()], self.checkpoint.keys())
        self.assertEqual([t.key for t in self.checkpoint.values()], self.checkpoint.keys())
        self.assertIn("scalar", self.checkpoint)
        self.assertNotIn("nothing", self.checkpoint)
        self.assertNotIn(7, self.checkpoint)
        self.assertIsNone(self.checkpoint.get("nothing"))

    def test_describes_a_tensor(self):
        tensor = self.checkpoint["layers.0.w"]
        self.assertEqual((tensor.key, tensor.shape, tensor.ndim, tensor.size, tensor.nbytes),
                         ("layers.0.w", (6, 8), 2, 48, 192))
        self.assertEqual((tensor.dtype_name, len(tensor)), ("f32", 6))
        self.assertIsInstance(tensor.digest, int)
        self.assertEqual(repr(tensor), "<tensormount.Tensor 'layers.0.w': f32 [6, 8]>")
        scalar = self.checkpoint["scalar"]
        self.assertEqual((scalar.shape, scalar.size), ((), 1))
        with self.assertRaises(TypeError):
            len(scalar)
        with self.assertRaises(TypeError):
            next(iter(scalar))

    def test_reads_bytes(self):
        expected = bytes((i * 3 + (i >> 8)) % 256 for i in range(192))
        tensor = self.checkpoint["layers.0.w"]
        self.assertEqual(tensor.read_bytes(), expected)
        self.assertEqual(tensor.read_bytes(5, 20), expected[5:25])
        self.assertEqual(tensor.read_bytes(192), b"")
        for offset, size in ((0, 193), (-1, 2), (5, -1), (193, 0)):
            with self.assertRaises(tm.OutOfRangeError):
                tensor.read_bytes(offset, size)

    def test_reads_objects(self):
        objects = self.checkpoint.objects
        # Whatever it gives can be asked for: a mapping.
        whole = {"config": b"{}", ("rng", 0): b"first", ("rng", 1): b"second"}
        self.assertEqual(dict(objects), whole)
        self.assertEqual(list(objects.items()), list(whole.items()))
        self.assertEqual(list(objects.values()), list(whole.values()))
        self.assertEqual((len(objects), objects == whole), (3, True))
        self.assertEqual(objects.names(), ["config", "rng"])
        self.assertEqual((objects.grid("rng"), objects.grid("config")), ((2,), ()))
        self.assertEqual(objects["config"], b"{}")
        self.assertEqual((objects["rng", 0], objects["rng", 1]), (b"first", b"second"))
        self.assertEqual(self.checkpoint.object("rng", (1,)), b"second")
        self.assertIn("rng", objects)
        self.assertIn(("rng", 1), objects)
        for key in (("config",), *objects):
            self.assertIn(key, objects)
            objects[key]
        for key in (("rng", 2), ("rng",), ("rng", 0, 0), ("config", 0), ("none",), (), (1,), 1, "none", "n\0"):
            self.assertNotIn(key, objects)
        self.assertEqual(sorted(objects), list(whole))
        self.assertEqual(sorted([*objects, "s"], reverse=True), ["s", *list(whole)[::-1]])
        for key, said in (("none", "no object|none"), ("rng", r"on a grid \[2\]: pass the index of a part"),
                          (("rng", 2), r"no part \[2\]"), ("confg", "did you mean config[?]")):
            with self.assertRaisesRegex(KeyError, said):
                objects[key]
        with self.assertRaises(KeyError):
            objects.grid("none")

    def test_reads_common_values_of_every_kind(self):
        common = self.checkpoint.common
        nested = {-1: None, "": (0.5, -0.0), "big": 1 << 63}
        self.assertEqual(common["args"], [nested, [], {}, "\udcff"])
        self.assertEqual(math.copysign(1, common["args"][0][""][1]), -1)
        self.assertEqual({name: common[name] for name in ("bytes", "flag", "iteration", "lr", "name")},
                         {"bytes": b"\0\1", "flag": True, "iteration": 1000, "lr": 0.25,
                          "name": "golden"})
        self.assertIs(common["flag"], True)
        self.assertEqual(self.checkpoint.metadata, {"model": "golden", "step": 1000})
        self.assertEqual(self.checkpoint.rank_common(1), {"seed": 7})
        self.assertEqual(self.checkpoint.rank_common(0), {})
        self.assertEqual(self.checkpoint.warnings, [])

    def test_notebook_shows_a_table(self):
        text = self.checkpoint._repr_html_()
        self.assertIn("<code>layers.0.w</code></td><td>f32</td><td>[6, 8]</td>", text)
        self.assertIn("6 tensors", text)


class Opening(Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        data = bytes(range(64))
        write_safetensors("m.safetensors", {"w": ("F32", (4, 4), data), "<b>": ("U8", (64,), data)})
        run("import", "m.safetensors", "STORE/step-1", "--ranks", 2)

    def test_missing_checkpoint_raises_file_not_found(self):
        with self.assertRaises(FileNotFoundError) as caught:
            tm.open("STORE/step-9")
        error = caught.exception
        self.assertIsInstance(error, tm.NotFoundError)
        self.assertEqual((error.code, error.errno), ("NOT_FOUND", errno.ENOENT))
        self.assertIn("step-9", str(error))

    def test_missing_key_raises_key_error(self):
        with tm.open("STORE/step-1") as checkpoint:
            with self.assertRaises(KeyError) as caught:
                checkpoint["v"]
            self.assertIsInstance(caught.exception, tm.NotFoundError)
            self.assertEqual(caught.exception.key, "v")
            with self.assertRaisesRegex(KeyError, "did you mean <b>[?]"):
                checkpoint["<b"]
            with self.assertRaisesRegex(KeyError, "did you mean <b>[?]"):
                checkpoint.read_many(["<b"])
            for _ in range(10):  # Not for each of many.
                self.assertNotIn("<bb", checkpoint)
                with self.assertRaises(KeyError) as caught:
                    checkpoint["<bb"]
            self.assertNotIn("mean", str(caught.exception))
            # A NUL would end the key, and name another.
            with self.assertRaises(KeyError):
                checkpoint["w\0"]
            with self.assertRaises(tm.InvalidArgumentError):
                tm.open("STORE/step-1\0")

    def test_key_hint_is_cheap_and_keeps_the_error(self):
        import difflib

        compared, listed = [], []

        def compare(key, known, *more):
            compared.append(len(known))
            return plain(key, known, *more)

        def count(function, *arguments):
            listed.append(function)
            return lists(function, *arguments)

        plain, lists = difflib.get_close_matches, _abi.get_list
        with mock.patch("difflib.get_close_matches", compare), mock.patch("tensormount._abi.get_list", count):
            for number in (18_000, 30_000):
                with tm.open("STORE/step-1") as checkpoint:
                    checkpoint._keys = sorted(f"model.layers.{i // 192}.experts.{i % 64}.w{i // 64 % 3}.weight"
                                              for i in range(number))
                    key = "model.layers.7.experts.9.w1.weight"
                    for wrong in ("model.layers.7.experts.9.w1.weigth", "layers.7.experts.9.w1.weight",
                                  "module.layers.7.experts.9.w1.weight", "base.model.layers.7.experts.9.w1.weight"):
                        with self.assertRaisesRegex(KeyError, f"did you mean {key}[?]"):
                            checkpoint[wrong]
            self.assertTrue(compared and max(compared) <= 40, compared)
            self.assertEqual(listed, [])
            # Nothing is kept, and many are not listed.
            for most, calls, said in ((1 << 20, 1, "did you mean <b>"), (0, 0, "^((?!did you mean).)*$")):
                listed.clear()
                with mock.patch("tensormount._hints._MAX_INDEX_BYTES", most):
                    for path in ("STORE/step-1", "m.safetensors"):
                        with tm.open(path) as checkpoint:
                            with self.assertRaisesRegex(KeyError, said):
                                checkpoint["<b"]
                            with self.assertRaises(KeyError):
                                checkpoint.object("none")
                            self.assertIsNone(checkpoint._keys)
                self.assertEqual(len(listed), 4 * calls)
        with mock.patch("tensormount._abi.get_list", side_effect=tm.DataLossError("damaged")):
            with tm.open("STORE/step-1") as checkpoint:
                for look_up in (checkpoint.__getitem__, checkpoint.object):
                    with self.assertRaises(tm.KeyNotFoundError):
                        look_up("<b")

    def test_every_kind_of_path_opens(self):
        for path in ("STORE/step-1", b"STORE/step-1", "STORE/latest", "STORE", "m.safetensors"):
            with tm.open(path) as checkpoint:
                self.assertEqual(checkpoint.keys(), ["<b>", "w"])
                self.assertEqual(checkpoint.warnings, ["STORE is a store; its latest checkpoint, step-1, was opened"]
                                 if path == "STORE" else [])
        for step in (9, 10):
            os.makedirs(f"RUN/step{step}")
            write_safetensors(f"RUN/step{step}/model.safetensors", {"w": ("U8", (2,), bytes([step, step]))})
        with tm.open("RUN") as checkpoint:
            self.assertEqual(checkpoint["w"].read_bytes(), b"\n\n")
            self.assertEqual(checkpoint.warnings, ["RUN is a training directory; its latest checkpoint, step10, was opened"])
        for path in ("~/STORE", "~"):
            with self.assertRaisesRegex(tm.UnsupportedError, "only a shell"):
                tm.open(path)
        with self.assertRaisesRegex(tm.UnsupportedError, "only a shell"):
            tm.save({"n": 1}, "~/STORE/step-1")
        self.assertFalse(os.path.exists("~"))
        with self.assertRaisesRegex(tm.UnsupportedError, "part of the checkpoint .*/step-1; open that directory"):
            tm.open("STORE/step-1/COMMIT")
        from pathlib import Path

        with tm.open(Path("STORE") / "step-1") as checkpoint:
            self.assertEqual(checkpoint.path, os.path.join(os.getcwd(), "STORE", "step-1"))
            self.assertRegex(checkpoint.uuid, "^[0-9a-f]{32}$")
            self.assertIn("&lt;b&gt;", checkpoint._repr_html_())
        with tm.open("m.safetensors") as checkpoint:
            self.assertIsNone(checkpoint.uuid)

    def test_closed_checkpoint_refuses_every_use(self):
        checkpoint = tm.open("STORE/step-1")
        tensor = checkpoint["w"]
        checkpoint.close()
        checkpoint.close()
        self.assertTrue(checkpoint.closed)
        self.assertIn("closed", repr(checkpoint))
        for use in (checkpoint.keys, lambda: checkpoint["w"], tensor.read_bytes,
                    lambda: checkpoint.common, lambda: list(checkpoint.objects),
                    checkpoint.__enter__):
            with self.assertRaises(tm.ClosedError):
                use()

    def test_pickles_as_path_and_uuid(self):
        shutil.copytree("STORE", "PICKLED")
        checkpoint = tm.open("PICKLED/latest")
        tensor = checkpoint["w"]
        text = pickle.dumps((checkpoint, tensor))
        again, tensor_again = pickle.loads(text)
        self.assertEqual((again.path, again.uuid), (checkpoint.path, checkpoint.uuid))
        self.assertEqual(tensor_again.read_bytes(), tensor.read_bytes())
        run("import", "m.safetensors", "PICKLED/step-1", "--if-exists", "replace")
        self.assertEqual(tensor.read_bytes(0, 4), bytes(range(4)))  # What was opened stays.
        with self.assertRaises(tm.StaleError):
            pickle.loads(text)

    def test_data_loss_error_names_the_damaged_place(self):
        shutil.copytree("STORE", "DAMAGED")
        for folder, _, names in os.walk("DAMAGED/step-1/data"):
            for name in names:
                path = os.path.join(folder, name)
                os.chmod(path, 0o644)
                with open(path, "r+b") as file:
                    data = bytearray(file.read())
                    at = data.find(bytes(range(8)))
                    while at >= 0:
                        data[at] ^= 1
                        at = data.find(bytes(range(8)), at + 1)
                    file.seek(0)
                    file.write(data)
        with tm.open("DAMAGED/step-1") as checkpoint, self.assertRaises(tm.DataLossError) as caught:
            checkpoint["w"].read_bytes()
        self.assertIsInstance(caught.exception, OSError)
        self.assertEqual(caught.exception.key, "w")
        self.assertIn("data/", caught.exception.message)

    def test_close_does_not_disturb_concurrent_reads(self):
        for _ in range(20):
            checkpoint = tm.open("STORE/step-1")
            tensor = checkpoint["w"]
            ends = []

            def read():
                try:
                    while True:
                        assert tensor.read_bytes() == bytes(range(64))
                except tm.ClosedError:
                    ends.append(True)

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            checkpoint.close()
            for thread in threads:
                thread.join()
            self.assertEqual(len(ends), 4)

    def test_close_does_not_disturb_concurrent_lookups(self):
        def look_up(checkpoint):
            try:
                while True:
                    checkpoint["w"]
            except tm.ClosedError:
                pass

        before = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, before)
        sys.setswitchinterval(1e-6)
        for _ in range(200):
            checkpoint = tm.open("STORE/step-1")
            threads = [threading.Thread(target=look_up, args=(checkpoint,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            checkpoint.close()
            for thread in threads:
                thread.join()

    def test_unreferenced_checkpoint_is_closed(self):
        def files():
            found = []
            for number in os.listdir("/proc/self/fd"):
                try:
                    found.append(os.readlink("/proc/self/fd/" + number))
                except FileNotFoundError:
                    pass
            return sum("STORE" in path for path in found)

        before = files()
        kept = tm.open("STORE/step-1")["w"]  # Which keeps its checkpoint open.
        self.assertGreater(files(), before)
        kept.read_bytes()
        del kept
        self.assertEqual(files(), before)


class Errors(unittest.TestCase):
    def test_errors_pickle_with_their_fields(self):
        for name in tm.__all__:
            kind = getattr(tm, name)
            if not (isinstance(kind, type) and issubclass(kind, tm.Error)):
                continue
            error = kind("words", errno=7, rank=3, key="w", box=((0, 1), (2, 3)), file="data/a",
                         cause="a reason")
            again = pickle.loads(pickle.dumps(error))
            self.assertIs(type(again), kind)
            self.assertEqual(vars(again), vars(error))
            self.assertEqual((again.errno, again.rank, str(again)), (7, 3, f"{kind.code}: words"))

    def test_errors_take_fields_from_the_library(self):
        """tm_last_error_json, of a library that has it."""

        class Library:
            def tm_last_error(self):
                return b"short"

            def tm_last_errno(self):
                return 5

            def tm_free(self, _):
                pass

            def tm_last_error_json(self, at):
                import ctypes

                self.text = ctypes.create_string_buffer(
                    b'{"code":"DATA_LOSS","errno":74,"message":"long","rank":2,"key":"w","later":1,'
                    b'"box":{"begin":[0,4],"extent":[1,2]},"file":"data/x","cause":null}')
                ctypes.c_void_p.from_address(at).value = ctypes.addressof(self.text)
                return 0

        before, _abi._library = _abi._library, Library()
        try:
            with self.assertRaises(tm.DataLossError) as caught:
                _abi.fail(7)
        finally:
            _abi._library = before
        error = caught.exception
        self.assertEqual((error.message, error.errno, error.rank, error.key, error.box, error.file,
                          error.cause), ("long", 74, 2, "w", ((0, 4), (1, 2)), "data/x", None))

    def test_unknown_status_raises_internal_error(self):
        with self.assertRaises(errors.InternalError):
            _abi.fail(99)


class Index(unittest.TestCase):
    def test_slice_plan_covers_only_the_box(self):
        plan = _index.plan((slice(2, 9, 3), 1, None, Ellipsis, slice(-2, None)), (10, 4, 5, 6))
        self.assertEqual(plan.begin, (2, 1, 0, 4))
        self.assertEqual(plan.extent, (7, 1, 5, 2))
        self.assertEqual(plan.steps, (3, 1, 1, 1))
        self.assertEqual(plan.shape, (3, 1, 5, 2))

    def test_error_names_the_unsupported_index(self):
        class Array:
            shape = (2,)

        for index, words in ((slice(None, None, -1), "negative step"), ([0, 1], "fancy"),
                             (True, "boolean"), ("a", "str"), (1.5, "float"), (Array(), "fancy"),
                             ((Ellipsis, Ellipsis), "one ellipsis"), (slice(0, 4, 0), "zero"),
                             (slice("a", None), "integers"), (slice(0.5, None), "integers")):
            with self.assertRaises(tm.UnsupportedIndexError) as caught:
                _index.plan(index, (4, 4))
            self.assertIsInstance(caught.exception, IndexError)
            self.assertIn(words, str(caught.exception))

    def test_index_beyond_the_tensor_is_out_of_range(self):
        for index in (4, -5, (0, 4), (0, 0, 0), (slice(None), 0, slice(None)), (Ellipsis, 0, 0, 0)):
            with self.assertRaises(tm.OutOfRangeError):
                _index.plan(index, (4, 4))
        with self.assertRaises(tm.OutOfRangeError):
            _index.plan(0, ())
        with self.assertRaises(tm.OutOfRangeError):
            _index.plan(slice(None), ())


class Values(unittest.TestCase):
    def test_special_floats_are_decoded(self):
        values = _values.from_json(
            b'[{"$float":"inf"},{"$float":"-inf"},{"$float":"nan","bits":"7ff8000000000001"}]')
        self.assertEqual(values[:2], [math.inf, -math.inf])
        self.assertTrue(math.isnan(values[2]))

    def test_dicts_with_non_string_keys_are_decoded(self):
        self.assertEqual(_values.from_json(b'{"$dict":[[0,"a"],["$x",{"$tuple":[]}]]}'),
                         {0: "a", "$x": ()})
        with self.assertRaises(tm.LayoutError):
            _values.from_json(b'{"$later":1}')


class Layouts(Folder):
    """Where bytes are, for programs and as a picture."""

    def test_layout_lists_chunks_and_draws_them(self):
        write_safetensors("m.safetensors", {"a<b>": ("F32", (4, 2), bytes(range(32)))})
        run("import", "m.safetensors", "STORE/step-1", "--ranks", 2)
        with tm.open("STORE/step-1") as checkpoint:
            tensor = checkpoint["a<b>"]
            layout = tensor.layout()
            found = bytearray(32)
            for chunk in layout["chunks"]:
                first = chunk["boxes"][0]["begin"][0] * 8
                with open(os.path.join(checkpoint.path, chunk["file"]), "rb") as file:
                    file.seek(chunk["offset"])
                    found[first : first + chunk["length"]] = file.read(chunk["length"])
            self.assertEqual(bytes(found), bytes(range(32)))
            self.assertEqual([holder["name"] for holder in layout["holders"]], ["rank 0", "rank 1"])
            svg = tensor.layout_svg()
            self.assertTrue(svg.lstrip().startswith("<svg") or svg.startswith("<?xml"), svg[:80])
            # Nothing of a name becomes a part of the page.
            page = tensor._repr_html_()
            self.assertNotIn("a<b>", page)
            self.assertIn("a&lt;b&gt;", page)
            self.assertIn("data:image/svg+xml;base64,", page)
            self.assertIn("a&lt;b&gt;", checkpoint._repr_html_())
        with self.assertRaises(tm.ClosedError):
            tensor.layout()


class Examples(Folder):
    """Docstrings, and the code blocks of docs/python.md and README are in docs_test.py."""

    def test_docstring_examples_run(self):
        import struct

        import tensormount._checkpoint as module

        try:
            import numpy  # noqa: F401
        except ImportError:
            self.skipTest("no NumPy")
        write_safetensors("m.safetensors", {"w": ("F32", (16, 32), struct.pack("<512f", *range(512)))})
        run("import", "m.safetensors", "STORE/step-1", "--ranks", 2)
        for one in (module, _held, _key_map, _save, _saver, _load, _store, _verify, tm):
            result = doctest.testmod(one)
            self.assertEqual(result.failed, 0, one.__name__)
            self.assertGreater(result.attempted, 0)


if __name__ == "__main__":
    unittest.main()
