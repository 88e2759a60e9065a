# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint without a mount: Checkpoint.files() and the fsspec protocol."""

import doctest
import io
import json
import os
import pickle
import re
import shutil
import threading
import unittest

import numpy

import support
import tensormount as tm

W = numpy.arange(512.0, dtype="f4").reshape(16, 32)


def save(path="S/step-1", scale=1.0, **how):
    tm.save({"w": W * scale, "layers": {"0": {"b": W[0]}}, "step": 3}, path, **how)


class Empty(support.Folder):
    def setUp(self):
        super().setUp()
        for name in os.listdir():
            shutil.rmtree(name)


class Files(Empty):
    def test_files_have_the_bytes_of_the_tensors(self):
        save()
        with tm.open("S/step-1") as checkpoint:
            files = checkpoint.files()
        # It keeps the checkpoint open.
        self.assertEqual(files.list("tensors"), ["layers.0.b", "w"])
        self.assertEqual(files.read("tensors/w"), W.tobytes())
        self.assertTrue((numpy.load(io.BytesIO(files.read("npy/w.npy"))) == W).all())
        self.assertEqual(files.read("slices/w@2:4,:"), W[2:4].tobytes())
        self.assertEqual(files.read("slices/w[2:4,1]"), W[2:4, 1].tobytes())
        self.assertEqual(json.loads(files.read("common.json"))["step"], 3)
        paths = list(files)
        self.assertTrue({"tensors/w", "hf/model.safetensors", "dcp/.metadata", "zarr/w/zarr.json"} <= set(paths))
        for path in paths:
            stat = files.stat(path)
            self.assertFalse(stat.is_directory)
            self.assertEqual(len(files.read(path)), stat.size, path)

    def test_ranges_are_read_as_of_a_file(self):
        save()
        files = tm.open("S/step-1").files()
        whole = W.tobytes()
        self.assertEqual(files.read("tensors/w", 5, 9), whole[5:9])
        self.assertEqual(files.read("tensors/w", 2040), whole[2040:])
        self.assertEqual(files.read("tensors/w", 2040, 5000), whole[2040:])
        self.assertEqual(files.read("tensors/w", 9000), b"")
        with files.open("tensors/w") as file:
            self.assertEqual(file.seek(-8, os.SEEK_END), 2040)
            self.assertEqual(file.read(), whole[-8:])
            self.assertEqual(file.read(), b"")
            file.seek(100)
            self.assertEqual(file.read(7), whole[100:107])
            self.assertEqual(file.tell(), 107)
            self.assertRaises(ValueError, file.seek, -1)
        self.assertRaises(ValueError, file.read)

    def test_errors_name_the_path(self):
        save()
        files = tm.open("S/step-1").files()
        for call in (files.stat, files.list, files.read, files.open):
            with self.assertRaisesRegex(tm.NotFoundError, "npy/x.npy"):
                call("npy/x.npy")
        self.assertFalse(files.exists("npy/x.npy"))
        self.assertTrue(files.exists("npy"))
        with self.assertRaisesRegex(tm.Error, "npy"):
            files.read("npy")
        with self.assertRaisesRegex(tm.Error, "common.json"):
            files.list("common.json")
        with self.assertRaisesRegex(tm.Error, "common.json/x"):
            files.stat("common.json/x")
        with self.assertRaises(tm.InvalidArgumentError):
            files.stat("a\0b")
        checkpoint = tm.open("S/step-1")
        checkpoint.close()
        with self.assertRaises(tm.ClosedError):
            checkpoint.files()

    def test_damaged_bytes_are_not_returned(self):
        save()
        files = tm.open("S/step-1").files()
        (name,) = [name for name in os.listdir("S/step-1/data") if name.endswith(".bin")]
        path = f"S/step-1/data/{name}"
        os.chmod(path, 0o644)
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) - 100)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        with self.assertRaises(tm.DataLossError):
            for one in ("tensors/w", "tensors/layers.0.b"):
                files.read(one)

    def test_rules_rename_keys(self):
        save()
        files = tm.open("S/step-1").files(key_map=[{"prefix": "layers.", "to": "h."}])
        self.assertEqual(files.list("tensors"), ["h.0.b", "w"])
        renamed = tm.open("S/step-1").files(hf_rules=[{"key": "w", "to": "model.w"}])
        self.assertIn(b'"model.w"', renamed.read("hf/model.safetensors"))
        with self.assertRaises(tm.InvalidArgumentError):
            tm.open("S/step-1").files(key_map=[{"prefix": "layers.0.b", "to": "w"}])

    def test_threads_read_at_the_same_time(self):
        save()
        files = tm.open("S/step-1").files()
        wrong = []

        def read(row):
            for _ in range(50):
                if files.read(f"slices/w@{row}") != W[row].tobytes():
                    wrong.append(row)

        threads = [threading.Thread(target=read, args=(row,)) for row in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_a_removed_checkpoint_is_readable_to_its_end(self):
        save()
        files = tm.open("S/step-1").files()
        file = files.open("tensors/w")
        save(scale=2.0, replace=True)
        self.assertEqual(file.read(), W.tobytes())
        self.assertEqual(files.read("tensors/w"), W.tobytes())


@support.needs("fsspec")
class Fsspec(Empty):
    def setUp(self):
        super().setUp()
        import fsspec
        import tensormount.fsspec

        tensormount.fsspec.register()
        self.fsspec = fsspec
        self.fs = fsspec.filesystem("tensormount", skip_instance_cache=True)

    def test_urls_open_relative_and_absolute(self):
        save()
        for url in ("tensormount://S/step-1/npy/w.npy", "tensormount://S/latest/npy/w.npy",
                    f"tensormount://{os.path.abspath('S')}/step-1/npy/w.npy"):
            with self.fsspec.open(url, "rb") as file:
                self.assertTrue((numpy.load(file) == W).all(), url)
        self.assertEqual(self.fs.cat_file("S/step-1/tensors/w", 4, 12), W.tobytes()[4:12])
        self.assertEqual(self.fs.cat_file("S/step-1/tensors/w", -8), W.tobytes()[-8:])

    def test_steps_are_found_by_listing(self):
        os.makedirs("runs/a")
        save("runs/a/S/step-1")
        save("runs/a/S/step-2")
        self.assertEqual(self.fs.ls("tensormount://runs/a", detail=False), ["runs/a/S"])
        self.assertEqual(sorted(self.fs.ls("runs/a/S", detail=False)),
                         ["runs/a/S/latest", "runs/a/S/step-1", "runs/a/S/step-2"])
        self.assertTrue(self.fs.isdir("runs/a/S/step-2"))
        self.assertTrue(self.fs.isdir("runs/a/S/step-2/hf"))
        self.assertTrue(self.fs.isfile("runs/a/S/step-2/hf/model.safetensors"))
        self.assertEqual(self.fs.glob("runs/a/S/step-*/npy/w.npy"),
                         ["runs/a/S/step-1/npy/w.npy", "runs/a/S/step-2/npy/w.npy"])
        for path in ("runs/a/S/step-9", "runs/a/S/step-1/npy/x.npy", "runs/b", "runs/a/S/step-1/nothing"):
            self.assertFalse(self.fs.exists(path), path)
            with self.assertRaises(FileNotFoundError, msg=path):
                self.fs.info(path)

    def test_a_replaced_checkpoint_is_opened_again(self):
        save()
        self.assertEqual(self.fs.cat_file("S/latest/tensors/w"), W.tobytes())
        save(scale=2.0, replace=True)
        for path in ("S/step-1/tensors/w", "S/latest/tensors/w"):
            self.assertEqual(self.fs.cat_file(path), (W * 2).tobytes())
        save("S/step-2", scale=3.0)
        self.assertEqual(self.fs.cat_file("S/latest/tensors/w"), (W * 3).tobytes())

    def test_checkpoints_of_other_programs_are_shown(self):
        support.write_safetensors("model.safetensors", {"w": ("F32", (16, 32), W.tobytes())})
        os.mkdir("model")
        os.rename("model.safetensors", "model/model.safetensors")
        for source in ("model", "model/model.safetensors"):
            self.assertEqual(self.fs.cat_file(f"{source}/tensors/w"), W.tobytes())

    def test_writes_are_refused(self):
        save()
        with self.assertRaises(PermissionError):
            self.fs.open("S/step-1/tensors/w", "wb")
        for call in (lambda: self.fs.rm("S/step-1", recursive=True), lambda: self.fs.mkdir("S/x"),
                     lambda: self.fs.makedirs("S/x/y"), lambda: self.fs.touch("S/step-1/x"),
                     lambda: self.fs.pipe_file("S/x", b"1"), lambda: self.fs.rmdir("S/step-1"),
                     lambda: self.fs.mv("S/step-1", "S/y"), lambda: self.fs.cp_file("S/step-1/common.json", "x")):
            self.assertRaises(PermissionError, call)
        self.assertEqual(os.listdir(), ["S"])
        self.assertTrue(os.path.exists("S/step-1/COMMIT"))

    def test_it_can_be_pickled(self):
        """As libraries do that read in other processes."""
        save()
        fs = pickle.loads(pickle.dumps(self.fs))
        self.assertEqual(fs.cat_file("S/step-1/tensors/w"), W.tobytes())

    def test_the_example_of_the_guide_runs(self):
        save("STORE/step-1")
        with open(os.path.join(support.ROOT, "docs", "python.md"), encoding="utf-8") as file:
            (example,) = re.findall(r"<!-- executed by tests/python/files_test.py -->\n```python\n(.*?)```", file.read(), re.S)
        test = doctest.DocTestParser().get_doctest(example, {}, "python.md", "python.md", 0)
        runner = doctest.DocTestRunner()
        runner.run(test)
        self.assertEqual(runner.failures, 0)
        self.assertGreater(runner.tries, 4)

    @support.needs("torch")
    def test_dcp_loads_the_view(self):
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        save()
        state = {"w": torch.zeros(16, 32), "layers": {"0": {"b": torch.zeros(32)}}, "step": 0}
        dcp.load(state, storage_reader=FsspecReader("tensormount://S/step-1/dcp"), no_dist=True)
        self.assertTrue(torch.equal(state["w"], torch.from_numpy(W)))
        self.assertEqual(state["step"], 3)

    @support.needs("zarr")
    def test_zarr_opens_the_view(self):
        import zarr

        save()
        array = zarr.open("tensormount://S/step-1/zarr", mode="r")["w"]
        self.assertTrue((array[...] == W).all())


if __name__ == "__main__":
    unittest.main()
