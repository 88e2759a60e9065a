# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others that lie about themselves: versions, names, shapes, sizes; and what reaches a terminal."""

import errno
import io
import json
import os
import pathlib
import shutil
import struct
import subprocess
import zipfile

import numpy as np

import harness

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "golden" / "foreign"
ZARRAY = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<i4", "compressor": None,
          "filters": None, "fill_value": None, "order": "C"}
# Ends lines, sets titles and colours, moves the cursor, turns the direction of text.
NASTY = "a\ntensormount: done\x1b]0;t\x07\x1b[31m\r\x7f\u009b2J\u202eb\u2028c"
HARMFUL = "\x1b\x07\r\x7f\u009b\u202e\u2028"


def write_raw_safetensors(path, keys):
    """One float each, whatever the keys are."""
    header = json.dumps({key: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
                         for i, key in enumerate(keys)}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + np.arange(len(keys), dtype="<f4").tobytes())


class Strange(harness.ToolTest):
    def array(self, folder, **changed):
        folder.mkdir(parents=True)
        (folder / ".zarray").write_text(json.dumps({**ZARRAY, **changed}))
        (folder / "0").write_bytes(np.arange(2, dtype="<i4").tobytes())

    def refused(self, code, *args, naming):
        result = self.run_tool(*args, expect=2)
        self.assertIn(code, result.stderr)
        self.assertIn(naming, result.stderr)

    def test_unknown_format_versions_are_refused(self):
        for name, config, naming in (
                ("version", {"sharded_backend": "torch_dist", "sharded_backend_version": 99},
                 "sharded_backend_version 99 of torch_dist"),
                ("text", {"sharded_backend": "torch_dist", "sharded_backend_version": "1"},
                 "sharded_backend_version \"1\""),
                ("backend", {"sharded_backend": "fancy_backend", "sharded_backend_version": 1},
                 "sharded_backend 'fancy_backend'"),
                ("common", {"sharded_backend": "torch_dist", "common_backend": "fancy"},
                 'common_backend "fancy"'),
                ("common-version", {"sharded_backend": "torch_dist", "common_backend_version": 99},
                 "common_backend_version 99 of torch")):
            folder = self.dir / name
            shutil.copytree(FIXTURES / "dcp-old" / "megatron", folder)
            self.run_tool("ls", folder)
            (folder / "__9_0.distcp").write_bytes(b"several items")
            for part in (".metadata", "__9_0.distcp"):
                self.refused("UNSUPPORTED", "ls", folder / part, naming=f"{folder.name}; open that directory")
            (folder / "metadata.json").write_text(json.dumps(config))
            self.refused("UNSUPPORTED", "ls", folder, naming=naming)
            self.array(self.dir / f"z{name}" / "w")
            (self.dir / f"z{name}" / "metadata.json").write_text(
                json.dumps({**config, "sharded_backend": config["sharded_backend"].replace("torch_dist", "zarr")}))
            self.refused("UNSUPPORTED", "ls", self.dir / f"z{name}", naming="metadata.json")
        group = self.dir / "group"
        self.array(group / "w")
        (group / ".zgroup").write_text('{"zarr_format": 9}')
        self.refused("UNSUPPORTED", "ls", group, naming="zarr_format 9")
        (group / ".zgroup").write_text('{"zarr_format": 2}')
        self.array(group / "below" / "v")
        (group / "below" / ".zgroup").write_text('{"zarr_format": 9}')
        result = self.run_tool("ls", group)
        self.assertEqual(result.stdout.split(), ["w"])
        self.assertIn("directory below: left out", result.stderr)

    def test_checkpoint_in_a_newer_store_is_refused(self):
        self.save("a")
        superblock = self.store / "store.json"
        text = json.loads(superblock.read_text())
        superblock.write_text(json.dumps({**text, "version": text["version"] + 1}))
        for command in (("ls", self.store / "a"), ("cat", self.store / "a", "w"), ("verify", self.store / "a"),
                        ("load", self.store / "a")):
            self.refused("UNSUPPORTED", *command, naming="store.json")
        # A copy of the checkpoint alone is what it was.
        shutil.copytree(self.store / "a", self.dir / "copy")
        self.run_tool("verify", self.dir / "copy")

    def test_array_with_both_zarr_versions_is_left_out(self):
        group = self.dir / "group"
        self.array(group / "w")
        self.array(group / "v")
        (group / "w" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
        result = self.run_tool("ls", group)
        self.assertEqual(result.stdout.split(), ["v"])
        self.assertIn("directory w: left out: it has both .zarray and zarr.json", result.stderr)

    def test_index_selects_the_file_of_a_tensor(self):
        folder = self.dir / "hf"
        shutil.copytree(FIXTURES / "torch-save-2.13" / "hf", folder)
        index = folder / "pytorch_model.bin.index.json"
        files = sorted({name for name in json.loads(index.read_text())["weight_map"].values()
                        if (folder / name).exists()})
        index.write_text(json.dumps({"weight_map": {}}))
        shutil.copy(folder / files[0], folder / "pytorch_model-copy.bin")
        held = self.json_lines("ls", folder / files[0])
        self.assertGreater(len(held), 1)
        chosen, *others = [line["key"] for line in held]
        index.write_text(json.dumps({"weight_map": {
            chosen: "pytorch_model-copy.bin", **{key: files[0] for key in others}}}))
        result = self.run_tool("ls", folder)
        self.assertEqual(sorted(result.stdout.split()), sorted([chosen, *others]))
        (info,) = self.json_lines("info", folder, chosen)
        self.assertEqual({e["file"] for e in info["extents"]}, {"pytorch_model-copy.bin"})
        (info,) = self.json_lines("info", folder, others[0])
        self.assertEqual({e["file"] for e in info["extents"]}, {files[0]})
        self.run_tool("load", folder)

    def test_npz_entries_with_one_name_are_left_out(self):
        path = self.dir / "x.npz"
        entry = io.BytesIO()
        np.save(entry, np.arange(3))
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("w", "w.npy", "v.npy"):
                archive.writestr(name, entry.getvalue())
        result = self.run_tool("ls", path)
        self.assertEqual(result.stdout.split(), ["v"])
        self.assertIn("tensor w: left out: the archive also has an entry 'w'", result.stderr)

    def test_npy_numbers_invalid_in_python_are_refused(self):
        whole = io.BytesIO()
        np.save(whole, np.arange(6, dtype="<i4").reshape(2, 3))
        (self.dir / "fine.npy").write_bytes(whole.getvalue())
        self.run_tool("ls", self.dir / "fine.npy")
        for name, change, fine in (("zero", (b"(2, 3), ", b"(02, 3),"), False),
                                   ("long", (b"(2, 3), ", b"(2L, 3),"), True)):
            data = whole.getvalue().replace(*change)
            (self.dir / "x.npy").write_bytes(data)
            self.run_tool("ls", self.dir / "x.npy", expect=0 if fine else 2)
        head = data[10:10 + struct.unpack("<H", data[8:10])[0]]
        (self.dir / "x.npy").write_bytes(b"\x93NUMPY\x03\x00" + struct.pack("<I", len(head)) + head + data[10 + len(head):])
        self.refused("DATA_LOSS", "ls", self.dir / "x.npy", naming="x.npy")

    def test_empty_and_overlong_keys_are_left_out(self):
        path = self.dir / "x.safetensors"
        write_raw_safetensors(path, ["", "fine", "k" * 10_000])
        result = self.run_tool("ls", path)
        self.assertEqual(result.stdout.split(), ["fine"])
        self.assertEqual(result.stderr.count("x.safetensors: a tensor is left out"), 2)

    def test_non_regular_files_are_refused(self):
        group = self.dir / "group"
        self.array(group / "w")
        (group / "v").mkdir()
        os.mkfifo(group / "v" / ".zarray")
        self.assertEqual(self.run_tool("ls", group).stdout.split(), ["w"])
        self.assertIn("tensor v", self.run_tool("verify", group, expect=1).stdout)
        (group / "u").mkdir()
        os.symlink(".zarray", group / "u" / ".zarray")
        self.assertEqual(self.run_tool("ls", group).stdout.split(), ["w"])
        # What a damaged .zgroup stands above is lost, and named.
        shutil.rmtree(group / "v")
        shutil.rmtree(group / "u")
        self.run_tool("verify", group)
        self.array(group / "below" / "x")
        (group / "below" / ".zgroup").write_text("{")
        self.assertEqual(self.run_tool("ls", group).stdout.split(), ["w"])
        self.assertIn("below/.zgroup", self.run_tool("verify", group, expect=1).stdout)
        # The one file of a checkpoint: nobody asked for anything wrong.
        copy = self.dir / "dcp"
        shutil.copytree(FIXTURES / "dcp-2.13" / "global", copy)
        os.remove(copy / ".metadata")
        os.mkfifo(copy / ".metadata")
        self.refused("DATA_LOSS", "ls", copy, naming=".metadata")
        shutil.copy(FIXTURES / "dcp-2.13" / "global" / ".metadata", self.dir / "metadata")
        os.remove(copy / ".metadata")
        shutil.copy(self.dir / "metadata", copy / ".metadata")
        os.remove(copy / "__3_0.distcp")
        os.symlink("__3_0.distcp", copy / "__3_0.distcp")
        self.assertIn("__3_0.distcp: is not a regular file", self.run_tool("ls", copy).stderr)
        self.refused("DATA_LOSS", "load", copy, naming="__3_0.distcp")

    def sparse(self, path, size):
        try:
            os.truncate(path, size)
        except OSError as error:
            if error.errno == errno.EFBIG:
                self.skipTest("no sparse files of this size here")
            raise

    def test_sparse_oversized_metadata_is_refused_cheaply(self):
        # Zeros that are no metadata are not read, however many there are.
        folder = self.dir / "dcp"
        shutil.copytree(FIXTURES / "dcp-2.13" / "global", folder)
        (folder / ".metadata").write_bytes(b"")
        self.sparse(folder / ".metadata", 1 << 30)
        result = self.run_tool("ls", folder, prefix=("prlimit", "--as=700000000"), expect=2)
        self.assertIn("DATA_LOSS", result.stderr)
        # Some that begin as they should do not fit in memory.
        with open(folder / ".metadata", "r+b") as file:
            file.write(b"\x80\x02")
        result = self.run_tool("ls", folder, prefix=("prlimit", "--as=700000000"), expect=2)
        self.assertIn("RESOURCE_EXHAUSTED", result.stderr)

    def test_invalid_dcp_item_is_not_read(self):
        folder = self.dir / "dcp"
        shutil.copytree(FIXTURES / "dcp-2.13" / "global", folder)
        *_, whole = self.json_lines("verify", folder)
        with open(folder / "__1_0.distcp", "r+b") as file:
            file.write(b"none")
        *damages, verdict = self.json_lines("verify", folder, expect=1)
        self.assertEqual(len(damages), 1)
        self.assertLess(verdict["bytes"], whole["bytes"])

    def test_tensor_over_free_memory_is_refused(self):
        path = self.dir / "x.npy"
        rows = 1 << 40
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 1024), }}".encode()
        head += b" " * (117 - len(head)) + b"\n"
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
        self.sparse(path, 10 + len(head) + rows * 4096)
        result = self.run_tool("export", path, self.dir / "out", "--to", "zarr", expect=2, timeout=20,
                               prefix=("prlimit", "--as=2000000000"))
        self.assertIn("RESOURCE_EXHAUSTED", result.stderr)
        self.assertIn("are free", result.stderr)

    def on_a_terminal(self, *args):
        """What a person sees of standard output and standard error."""
        terminal = harness.Terminal()
        subprocess.run([harness.TOOL, *map(str, args)], stdout=terminal.child, stderr=terminal.child, cwd=self.dir,
                       stdin=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"}, timeout=20)
        return terminal.text()

    def test_control_characters_in_keys_are_escaped(self):
        path = self.dir / "x.safetensors"
        write_raw_safetensors(path, [NASTY, "fine"])
        for command in (("ls", path), ("ls", "-l", path), ("info", path, NASTY), ("layout", path, NASTY),
                        ("--json", "ls", path), ("cat", path, NASTY + "x"), ("verify", path),
                        ("diff", path, self.model)):
            for text in (self.on_a_terminal(*command),
                         "".join((lambda r: (r.stdout, r.stderr))(self.run_tool(*command, expect=None)))):
                for line in text.split("\n"):
                    self.assertFalse(line.startswith("tensormount: done"), command)
                self.assertEqual(set(text) & set(HARMFUL), set(), (command, text))
        lines = self.run_tool("ls", path).stdout.splitlines()
        self.assertEqual(len(lines), 2)
        # JSON has it as it is.
        self.assertIn(NASTY, [line["key"] for line in self.json_lines("ls", path)])
        # Names of files and of types, in warnings and errors.
        folder = self.dir / "hf"
        folder.mkdir()
        write_raw_safetensors(folder / "a.safetensors", ["a"])
        (folder / "model.safetensors.index.json").write_text(json.dumps(
            {"weight_map": {"a": "a.safetensors", "b": "b\x1b[2J\u009b.safetensors"}}))
        for text in (self.on_a_terminal("ls", folder), self.on_a_terminal("load", folder)):
            self.assertEqual(set(text) & set(HARMFUL), set(), text)
        write_raw_safetensors(path, ["w"])
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"\\u001bc"').replace(
            struct.pack("<Q", len(path.read_bytes()) - 12), struct.pack("<Q", len(path.read_bytes()) - 12 + 3)))
        self.assertEqual(set(self.on_a_terminal("ls", path)) & set(HARMFUL), set())


if __name__ == "__main__":
    harness.main()
