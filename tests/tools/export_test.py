# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import pickle
import signal
import subprocess
import time
import zipfile

import numpy as np

import harness


class Record:
    """Whatever class a pickle asks for: keeps what it was called and built with."""

    def __init__(self, *args):
        self.args = args

    def __setstate__(self, state):
        self.state = state

    def __hash__(self):
        return id(self)


class Inert(pickle.Unpickler):
    """Reads torch's pickles without torch."""

    def find_class(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("_codecs", "encode"):
            return lambda text, how: text.encode(how)
        return type(name, (Record,), {"module": module})

    def persistent_load(self, pid):
        return pid


def archive_of(raw):
    """The pickled value and the storages of a torch archive; every CRC is checked."""
    archive = zipfile.ZipFile(io.BytesIO(raw))
    assert archive.testzip() is None
    names = archive.namelist()
    value = Inert(io.BytesIO(archive.read("archive/data.pkl"))).load()
    return value, {n.split("/")[-1]: archive.read(n) for n in names if n.startswith("archive/data/")}


def bytes_of(tensor, storages):
    return storages[tensor.args[0][2]]


class Export(harness.ToolTest):
    def setUp(self):
        super().setUp()
        self.tensors.pop("fp4")  # Only safetensors has it.
        harness.write_safetensors(self.model, self.tensors)

    def test_one_and_three_ranks_export_equal_views(self):
        path = self.save("step-1", "--ranks", "3", "--shard", "cols")
        whole = self.run_tool("export", path, "a.safetensors", "--to", "safetensors").stdout
        self.assertIn("MNT/model.safetensors", whole)
        self.run_tool("load", self.dir / "a.safetensors", "--compare", self.model)
        document = self.json_lines("export", path, "b.safetensors", "--to", "safetensors", "--ranks", "3")[0]
        self.assertEqual(document["bytes_written"], document["bytes"])
        self.assertEqual((self.dir / "a.safetensors").read_bytes(), (self.dir / "b.safetensors").read_bytes())
        self.run_tool("export", path, "npy", "--to", "npy", "--ranks", "2")
        for key, (dtype, shape, raw) in self.tensors.items():
            array = np.load(self.dir / "npy" / f"{key}.npy")
            self.assertEqual(array.shape, shape, key)
            self.assertEqual(array.tobytes(), raw, key)
        self.run_tool("export", path, "hf", "--to", "hf", "--hf-part-size", "100KB")
        index = json.loads((self.dir / "hf/model.safetensors.index.json").read_text())
        self.assertEqual(set(index["weight_map"]), set(self.tensors))
        self.run_tool("export", path, "zarr", "--to", "zarr")
        self.assertEqual(json.loads((self.dir / "zarr/zarr.json").read_text())["node_type"], "group")

    def test_torch_export_contains_every_tensor(self):
        path = self.save("step-1", "--ranks", "2")
        self.run_tool("export", path, "m.pt", "--to", "torch", "--ranks", "2")
        value, storages = archive_of((self.dir / "m.pt").read_bytes())
        self.assertEqual(set(value), set(self.tensors))
        for key, (_, shape, raw) in self.tensors.items():
            self.assertEqual(value[key].args[2], shape, key)
            self.assertEqual(bytes_of(value[key], storages), raw, key)

    def test_dcp_export_contains_every_tensor(self):
        path = self.save("step-1", "--ranks", "2")
        self.run_tool("export", path, "dcp", "--to", "dcp", "--ranks", "3")
        files = {f.name: f.read_bytes() for f in (self.dir / "dcp").iterdir()}
        metadata = Inert(io.BytesIO(files[".metadata"])).load().state
        self.assertEqual(set(metadata["state_dict_metadata"]), set(self.tensors))
        for index, where in metadata["storage_data"].items():
            at = where.state["offset"]
            raw = files[where.state["relative_path"]][at:at + where.state["length"]]
            tensor, storages = archive_of(raw)
            self.assertEqual(bytes_of(tensor, storages), self.tensors[index.state["fqn"]][2])

    def test_export_clones_or_links_the_store_file(self):
        # In the order of the view: elements of one size, by key.
        harness.write_safetensors(self.model, {key: self.tensors[key] for key in ("big", "w")})
        path = self.save("step-1", "--placement", "safetensors")
        data = next((path / "data").iterdir())
        document = self.json_lines("export", path, "m.safetensors", "--to", "safetensors", "--ranks", "2")[0]
        self.assertEqual(data.read_bytes(), (self.dir / "m.safetensors").read_bytes())
        shared = document["files_cloned"] + document["files_linked"]
        # A link is for those alone whom the seal of the store's file keeps from writing.
        self.assertTrue(shared == 1 or os.access(data, os.W_OK))
        self.assertEqual(document["bytes_written"], 0 if shared else data.stat().st_size)
        if os.access(self.dir / "m.safetensors", os.W_OK):
            before = data.read_bytes()
            self.flip(self.dir / "m.safetensors", data.stat().st_size - 1)
            self.assertEqual(data.read_bytes(), before)
        # Shared or not, every byte is read and checked.
        self.flip(data, data.stat().st_size - 1)
        failed = self.run_tool("export", path, "n.safetensors", "--to", "safetensors", expect=2)
        self.assertIn("DATA_LOSS", failed.stderr)
        self.assertFalse((self.dir / "n.safetensors").exists())

    def test_invalid_exports_are_refused(self):
        path = self.save()
        self.assertIn("--to", self.run_tool("export", path, "x", expect=2).stderr)
        self.assertIn("one of", self.run_tool("export", path, "x", "--to", "gguf", expect=2).stderr)
        self.assertIn("--to hf", self.run_tool("export", path, "x", "--to", "npy", "--hf-part-size", "1GB", expect=2).stderr)
        self.run_tool("export", path, "x", "--to", "npy")
        again = self.run_tool("export", path, "x", "--to", "npy", expect=2)
        self.assertIn("--if-exists replace", again.stderr)
        self.run_tool("export", path, "x", "--to", "npy", "--if-exists", "replace")
        # A type that a format lacks is named before anything is written.
        harness.write_safetensors(self.model, {"half": ("F4", (2, 2), b"\0\1")})
        lacks = self.run_tool("export", self.save("step-2"), "y", "--to", "npy", expect=2)
        self.assertIn("half (f4)", lacks.stderr)
        self.assertFalse((self.dir / "y").exists())

    def test_killed_export_leaves_a_reported_leftover(self):
        harness.write_safetensors(self.model, {f"t{i}": ("U8", (16 << 20,), bytes(16 << 20)) for i in range(8)})
        path = self.save()
        with subprocess.Popen([harness.TOOL, "export", str(path), "out", "--to", "dcp"], cwd=self.dir,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            deadline = time.monotonic() + 30
            while not list(self.dir.glob("out.*.tmp")) and time.monotonic() < deadline and job.poll() is None:
                time.sleep(0.001)
            os.kill(job.pid, signal.SIGKILL)
        left = list(self.dir.glob("out.*.tmp"))
        if not left:
            self.assertTrue((self.dir / "out").exists())  # It was quicker.
            return
        self.assertFalse((self.dir / "out").exists())
        again = self.run_tool("export", path, "out", "--to", "dcp")
        self.assertIn(left[0].name, again.stderr)
        self.assertTrue((self.dir / "out/.metadata").exists())

    def test_export_works_under_mpi(self):
        harness.need_mpi()
        path = self.save()
        self.run_tool("export", path, "one.pt", "--to", "torch")
        out = self.run_tool("export", path, "three.pt", "--to", "torch", prefix=harness.mpirun(3)).stdout
        self.assertEqual(out.count("exported"), 1)
        self.assertEqual((self.dir / "one.pt").read_bytes(), (self.dir / "three.pt").read_bytes())
        twice = self.run_tool("export", path, "three.pt", "--to", "torch", prefix=harness.mpirun(2), expect=None)
        self.assertEqual(twice.stderr.count("ALREADY_EXISTS"), 1, twice.stderr)


if __name__ == "__main__":
    harness.main()
