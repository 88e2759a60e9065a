# SPDX-License-Identifier: Apache-2.0
"""What other programs saved, as SOURCE of every command; adopt; --root."""

import json
import os
import struct
import zipfile

import harness


class Foreign(harness.ToolTest):
    def setUp(self):
        super().setUp()
        self.run = self.dir / "run"
        self.bytes = {"a": os.urandom(24), "b": os.urandom(40)}
        for step in (10, 20):
            folder = self.run / f"iter_{step:07}"
            folder.mkdir(parents=True)
            self.write(folder, "model-00001-of-00002.safetensors", "a", ("F32", (2, 3), self.bytes["a"]))
            self.write(folder, "model-00002-of-00002.safetensors", "b", ("I64", (5,), self.bytes["b"]))
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
                "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}))
        (self.run / "latest_checkpointed_iteration.txt").write_text("10\n")
        self.step = self.run / "iter_0000020"

    def write(self, folder, name, key, tensor):
        harness.write_safetensors(folder / name, {key: tensor})

    def test_every_command_takes_it(self):
        self.assertEqual(self.run_tool("ls", self.step).stdout.split(), ["a", "b"])
        lines = self.run_tool("ls", self.run).stdout.splitlines()
        self.assertEqual(lines, ["iter_0000010\tgeneration 10\tlatest", "iter_0000020\tgeneration 20"])
        (info,) = self.json_lines("info", self.run)
        self.assertEqual(info, {"training_directory": str(self.run.resolve()), "checkpoints": 2,
                                "latest": "iter_0000010"})
        (info,) = self.json_lines("info", self.run / "latest")
        self.assertEqual(info["name"], "iter_0000010")
        self.assertEqual(info["producer"], "safetensors")
        self.assertFalse(info["self_contained"])
        self.assertEqual(info["root"], str((self.run / "iter_0000010").resolve()))
        self.assertEqual(self.run_tool("cat", self.step, "b", text=False).stdout, self.bytes["b"])
        self.assertEqual(self.run_tool("cat", self.run, "a", text=False).stdout, self.bytes["a"])
        self.run_tool("load", self.step, "--ranks", "2", "--compare", self.run / "iter_0000010")
        self.run_tool("import", self.run, self.store / "copy", "--ranks", "2")
        self.run_tool("load", self.store / "copy", "--compare", self.step)
        self.run_tool("diff", self.store / "copy", self.step)

    def test_verify(self):
        lines = self.json_lines("verify", self.run)
        self.assertEqual([l["checkpoint"] for l in lines], ["iter_0000010", "iter_0000020"])
        self.assertTrue(all(l["whole"] and l["bytes"] == 64 for l in lines), lines)
        # A shard that is lost leaves a hole; cells that are stored twice are damage too.
        for folder, offsets in (("hole", (0, 4)), ("twice", (0, 1))):
            (self.dir / folder).mkdir()
            for i, offset in enumerate(offsets):
                path = self.dir / folder / f"shard-{i + 1:05}-model-00001-of-00001.safetensors"
                header = json.dumps({
                    "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [offset]}})},
                    "w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
                path.write_bytes(struct.pack("<Q", len(header)) + header + b"xy")
        result = self.run_tool("verify", self.dir / "hole", expect=1)
        self.assertIn("tensor w", result.stdout)
        self.assertIn("[2:4] is stored nowhere", result.stdout)
        result = self.run_tool("verify", self.dir / "twice", expect=1)
        self.assertIn("[1:2] is stored twice", result.stdout)
        self.assertIn("shard-00002-model-00001-of-00001.safetensors", result.stdout)
        os.truncate(self.step / "model-00002-of-00002.safetensors", 30)
        self.assertIn("model-00002-of-00002", self.run_tool("verify", self.step, expect=1).stderr)

    def test_verify_checks_the_crcs_of_archives(self):
        import numpy as np
        path = self.dir / "x.npz"
        np.savez(path, first=np.arange(1000, dtype=np.int32), second=np.arange(2000, dtype=np.int32))
        self.run_tool("verify", path)
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("second.npy")
        self.flip(path, info.header_offset + 1000)
        result = self.run_tool("verify", path, expect=1)
        self.assertIn("tensor second [0:2000]", result.stdout)
        self.assertNotIn("first", result.stdout)
        self.assertIn("x.npz", result.stdout)

    def test_adopt(self):
        (adopted,) = self.json_lines("adopt", self.step, self.store / "step-20")
        self.assertEqual(adopted["bytes"], 64)
        self.assertEqual(adopted["bytes_hashed"], 64)
        self.assertEqual(adopted["format"], "safetensors")
        self.assertFalse(adopted["self_contained"])
        path = self.store / "step-20"
        said = self.run_tool("info", path).stdout
        self.assertIn(f"self-contained no: the data lie in files of others below {self.step.resolve()}", said)
        self.assertIn("safetensors", said)
        self.run_tool("verify", path)
        self.assertEqual(self.run_tool("cat", path, "a", text=False).stdout, self.bytes["a"])
        self.run_tool("load", path, "--ranks", "2", "--compare", self.step)
        self.assertIn("ALREADY_EXISTS", self.run_tool("adopt", self.step, path, expect=2).stderr)
        said = self.run_tool("adopt", self.run, path, "--if-exists", "replace", "--quick").stdout
        self.assertIn("no data were read", said)
        self.assertIn("not self-contained", said)
        self.assertEqual(json.loads(self.run_tool("info", path, "--json").stdout)["root"],
                         str((self.run / "iter_0000010").resolve()))
        (self.dir / "no").mkdir()
        self.assertIn("UNSUPPORTED", self.run_tool("adopt", self.dir / "no", self.store / "x", expect=2).stderr)
        self.assertIn("INVALID_ARGUMENT", self.run_tool("adopt", path, self.store / "x", expect=2).stderr)
        self.assertIn("INVALID_ARGUMENT",
                      self.run_tool("adopt", self.step, self.store / "x", "--if-exists", "maybe", expect=2).stderr)
        self.assertFalse((self.store / "x").exists())

    def test_roots(self):
        hub = self.dir / "hub"
        (hub / "blobs").mkdir(parents=True)
        (hub / "snapshots" / "s").mkdir(parents=True)
        harness.write_safetensors(hub / "blobs" / "0123", {"w": ("U8", (4,), b"abcd")})
        (hub / "snapshots" / "s" / "model.safetensors").symlink_to("../../blobs/0123")
        source = hub / "snapshots" / "s"
        for command in (["ls"], ["info"], ["cat", "w"], ["verify"], ["load"]):
            args = [command[0], source, *command[1:]]
            failed = self.run_tool(*args, expect=2)
            self.assertIn("PERMISSION_DENIED", failed.stderr)
            self.assertIn("--root", failed.stderr)
            self.run_tool(*args, "--root", "/nowhere/at/all", expect=2)
            self.run_tool(*args, "--root", self.dir / "run", "--root", hub)
        self.run_tool("adopt", source, self.store / "s", "--root", hub)
        self.assertEqual(self.run_tool("cat", self.store / "s", "w").stdout, "abcd")

    def test_objects(self):
        # A pickle that would run a program where it is loaded: it is listed.
        torch = self.dir / "m.pt"
        evil = b"\x80\x02}q\x00X\x01\x00\x00\x00kcposix\nsystem\nX\x04\x00\x00\x00echo\x85Rs."
        with zipfile.ZipFile(torch, "w") as archive:
            archive.writestr("m/data.pkl", evil)
            archive.writestr("m/byteorder", "little")
            archive.writestr("m/version", "3\n")
        failed = self.run_tool("ls", torch, expect=2)
        self.assertIn("posix.system", failed.stderr)


if __name__ == "__main__":
    harness.main()
