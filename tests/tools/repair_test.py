# SPDX-License-Identifier: Apache-2.0
"""tensormount repair: files of real saves, out of a copy, another sharding, and a foreign file."""

import os
import unittest

import harness


class RepairTest(harness.ToolTest):
    def setUp(self):
        super().setUp()
        self.run_tool("import", self.model, self.store / "step-1", "--ranks", 3)
        self.step = self.store / "step-1"

    def damage(self, path, offset):
        mode = os.stat(path).st_mode
        os.chmod(path, 0o644)
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
        os.chmod(path, mode)

    def repair(self, source, *more, expect=0):
        return self.run_tool("repair", self.step, "--from", source, *more, expect=expect).stdout

    def test_repairs_from_any_sharding(self):
        """A lost file comes back byte for byte, headers of rank shards too."""
        self.step = self.store / "shards"
        self.run_tool("import", self.model, self.step, "--ranks", 3, "--placement", "rank-shard", "--reuse", "off")
        self.run_tool("import", self.model, self.dir / "OTHER/shards", "--ranks", 2, "--shard", "flat")
        files = {path: path.read_bytes() for path in (self.step / "data").iterdir()}
        self.assertEqual(sum(path.suffix == ".safetensors" for path in files), 3)
        # A store means the checkpoint of the same name there.
        for source in (self.dir / "OTHER", self.model):
            for path in files:
                os.remove(path)
            self.run_tool("verify", self.step, expect=1)
            self.assertIn("shards: would be whole", self.repair(source, "--dry-run"))
            self.assertFalse(any(path.exists() for path in files))
            self.assertRegex(self.repair(source), r"\.safetensors: the file is missing: ([\d.]+ k?M?B) of \1 repaired\n")
            for path, raw in files.items():
                self.assertEqual(path.read_bytes(), raw, path)
                self.assertEqual(os.stat(path).st_mode & 0o222, 0)
            self.assertIn("shards: whole: ", self.run_tool("verify", self.step).stdout)
        self.assertRegex(self.repair(self.model), r"^shards: whole, nothing to repair, [\d.]+ MB checked\n$")

    def test_unrepaired_files_are_reported(self):
        manifest = self.step / "manifest/r0.tmm"
        self.damage(manifest, 300)
        big = next(path for path in (self.step / "data").iterdir() if "-t" in path.name)
        self.damage(big, 5)
        out = self.repair(self.model, expect=1)
        self.assertRegex(out, r"step-1: data/\S+: checksum mismatch in 1 of 3 stored ranges: .* repaired")
        self.assertRegex(out, r"step-1: manifest/r0.tmm: manifest/r0.tmm: byte 0: not repaired: .* is not a copy of this checkpoint")
        self.assertIn("step-1: still damaged: 1 range not repaired", out)
        (document,) = self.json_lines("repair", self.step, "--from", self.model, expect=1)
        self.assertEqual((document["whole"], document["dry_run"]), (False, False))
        self.assertEqual([one["file"] for one in document["left"]], ["manifest/r0.tmm"])
        self.assertEqual([(one["file"], one["whole"]) for one in document["files"]], [("manifest/r0.tmm", False)])
        self.run_tool("export", self.store / "step-1", self.dir / "out", "--to", "safetensors")
        # Another checkpoint with other bytes gives nothing, and itself is a slip.
        self.assertIn("INVALID_ARGUMENT", self.run_tool("repair", self.step, "--from", self.step, expect=2).stderr)
        self.assertIn("NOT_FOUND", self.run_tool("repair", self.store / "no", "--from", self.model, expect=2).stderr)
        self.assertIn("--from", self.run_tool("repair", self.step, expect=2).stderr)
        self.run_tool("adopt", self.model, self.store / "adopted")
        self.assertIn("UNSUPPORTED", self.run_tool("repair", self.store / "adopted", "--from", self.model, expect=2).stderr)

    def test_repairs_every_file_from_a_copy(self):
        self.run_tool("copy", self.step, self.dir / "COPY")
        names = [path for path in self.step.rglob("*") if path.is_file()]
        files = {path: path.read_bytes() for path in names}
        for path in names:
            self.damage(path, len(files[path]) // 3)
        self.repair(self.dir / "COPY")
        for path, raw in files.items():
            self.assertEqual(path.read_bytes(), raw, path)
        self.run_tool("verify", self.step)
        self.assertEqual(os.listdir(self.store / ".staging"), [])


if __name__ == "__main__":
    unittest.main()
