# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of others names and its files lack is damage to every command that takes all of it."""

import json
import os
import pathlib
import shutil

import numpy as np

import harness

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "golden" / "foreign"


class Lost(harness.ToolTest):
    def dcp(self, name):
        """A checkpoint that several ranks wrote with torch's DCP, without the file of the last."""
        copy = self.dir / name
        shutil.copytree(FIXTURES / "dcp-2.13" / "global", copy)
        return copy

    def indexed(self):
        """Two files and their index, the second of which is gone."""
        folder = self.dir / "hf"
        folder.mkdir()
        for key in "ab":
            harness.write_safetensors(folder / f"{key}.safetensors", {key: ("F32", (2, 3), os.urandom(24))})
        (folder / "model.safetensors.index.json").write_text(json.dumps(
            {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
        whole = self.dir / "whole"
        shutil.copytree(folder, whole)
        (folder / "b.safetensors").unlink()
        return folder, whole

    def refused(self, *args, naming):
        result = self.run_tool(*args, expect=2)
        self.assertIn("DATA_LOSS", result.stderr)
        self.assertIn("--partial", result.stderr)
        for text in naming:
            self.assertIn(text, result.stderr.split("DATA_LOSS", 1)[1])

    def check(self, source, naming, keys):
        result = self.run_tool("verify", source, expect=1)
        for text in naming:
            self.assertIn(text, result.stdout)
        *damages, verdict = self.json_lines("verify", source, expect=1)
        self.assertFalse(verdict["whole"])
        self.assertEqual(verdict["lost"], len(damages))
        self.run_tool("verify", source, "--partial")
        for command in (("adopt", source, self.store / "x"), ("import", source, self.store / "x"),
                        ("export", source, self.dir / "out", "--to", "npy"), ("load", source)):
            self.refused(*command, naming=naming)
        self.assertFalse((self.store / "x").exists())
        self.assertFalse((self.dir / "out").exists())
        # What is there can be looked at.
        listed = self.run_tool("ls", source)
        for text in naming:
            self.assertIn(text, listed.stderr)
        for command in ("adopt", "import"):
            made = self.store / command
            told = self.run_tool(command, source, made, "--partial")
            self.assertIn(naming[0], told.stderr)
            self.assertEqual(self.run_tool("ls", made).stdout.split(), keys)
            # Whoever finds it later can tell.
            self.assertIn(naming[0], self.run_tool("info", made).stdout)
            self.run_tool("verify", made)
        told = self.run_tool("export", source, self.dir / "out", "--to", "npy", "--partial")
        self.assertIn(naming[0], told.stderr)
        self.run_tool("load", source, "--partial")

    def test_lost_dcp_file_is_reported(self):
        source = self.dcp("hole")
        files = sorted(source.glob("*.distcp"))
        whole = self.run_tool("ls", source).stdout.split()
        files[-1].unlink()
        # Cells that other files hold are there, and every key that lacks some is named.
        *damages, _ = self.json_lines("verify", source, expect=1)
        lost = {key for damage in damages for key in damage["keys"]}
        keys = self.run_tool("ls", source).stdout.split()
        holed = [key for key in keys if key in lost]
        self.assertTrue(holed)
        told = self.run_tool("verify", source, "-v", expect=1).stdout
        for key in holed:
            self.assertIn(f"tensor {key}: [", told)
        self.check(source, [files[-1].name, "the file is missing"], [key for key in whole if key not in lost])
        short = self.dcp("short")
        file = sorted(short.glob("*.distcp"))[-1]
        os.truncate(file, file.stat().st_size // 2)
        self.run_tool("verify", short, expect=1)
        self.refused("load", short, naming=[file.name, "before the end of an item"])

    def test_lost_indexed_file_is_reported(self):
        source, whole = self.indexed()
        self.check(source, ["b.safetensors", "tensor b"], ["a"])
        # A part that nothing is lost of is whole.
        self.run_tool("load", source, "--keys", "a")
        self.refused("load", source, "--keys", "b", naming=["tensor b"])
        self.refused("load", whole, "--compare", source, naming=["tensor b"])
        result = self.run_tool("diff", source, source, expect=2)
        self.assertIn("tensor b", result.stderr)
        self.run_tool("diff", source, source, "--keys", "a")
        # A number of the set is gone, and no index says what was in it.
        folder = self.dir / "gap"
        folder.mkdir()
        for i in (1, 3):
            harness.write_safetensors(folder / f"model-{i:05}-of-00003.safetensors",
                                      {f"k{i}": ("F32", (2, 3), os.urandom(24))})
        self.refused("load", folder, naming=["only 2 of 3 files exist"])
        self.run_tool("load", folder, "--partial")

    def test_missing_zarr_chunks_are_reported(self):
        folder = self.dir / "zarr"
        for name in ("whole", "holed"):
            (folder / name).mkdir(parents=True)
            (folder / name / ".zarray").write_text(json.dumps(
                {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<i4", "compressor": None,
                 "filters": None, "fill_value": None, "order": "C"}))
            for i in range(2):
                (folder / name / str(i)).write_bytes(np.arange(2, dtype="<i4").tobytes())
        (folder / "holed" / "1").unlink()
        self.check(folder, ["tensor holed", "[2:4] is not stored"], ["whole"])
        # What a fill value stands for is no loss, but nothing that we read.
        text = (folder / "holed" / ".zarray").read_text()
        (folder / "holed" / ".zarray").write_text(text.replace('"fill_value": null', '"fill_value": 0'))
        self.assertIn("fill value", self.run_tool("verify", folder).stderr)
        self.assertIn("fill value", self.run_tool("load", folder).stderr)

    def test_compare_reports_tensors_missing_in_the_first_source(self):
        more = {"a": ("F32", (2, 3), bytes(24)), "b": ("F32", (2, 3), bytes(24))}
        harness.write_safetensors(self.dir / "one.safetensors", {"a": more["a"]})
        harness.write_safetensors(self.dir / "two.safetensors", more)
        one, two = self.dir / "one.safetensors", self.dir / "two.safetensors"
        result = self.run_tool("load", one, "--compare", two, "--ranks", "2", expect=1)
        self.assertIn("tensor b: missing in the first source", result.stderr)
        self.assertIn("1 slices differ", result.stdout)
        self.run_tool("load", one, "--compare", two, "--keys", "a")
        rules = self.dir / "rules.json"
        rules.write_text('[{"drop": "b"}]')
        self.run_tool("load", two, "--compare", two, "--map", rules)

    def test_glob_that_matches_nothing_is_refused(self):
        for command in (("load", self.model), ("load", self.model, "--compare", self.model),
                        ("diff", self.model, self.model)):
            result = self.run_tool(*command, "--keys", "typo*", expect=2)
            self.assertIn("--keys 'typo*': no key matches it", result.stderr)

    def test_keys_of_missing_data_are_compared_after_the_map(self):
        folder, whole = self.indexed()
        rules = self.dir / "rules.json"
        rules.write_text(json.dumps([{"key": "b", "to": "renamed"}]))
        drops = self.dir / "drops.json"
        drops.write_text(json.dumps([{"drop": "b"}]))
        for keys in ((), ("--keys", "rena*")):
            self.refused("load", folder, "--map", rules, *keys, naming=["b"])
        self.run_tool("load", folder, "--map", rules, "--keys", "a")
        self.run_tool("load", folder, "--map", drops)
        self.refused("load", folder, "--keys", "b", naming=["b"])
        renamed = self.dir / "renamed.safetensors"
        harness.write_safetensors(renamed, {"a": ("F32", (2, 3), bytes(24)), "renamed": ("F32", (2, 3), bytes(24))})
        self.refused("diff", folder, renamed, "--map", rules, "--keys", "rena*", naming=["b"])
        self.run_tool("diff", folder, whole, "--map", drops, "--keys", "a")


if __name__ == "__main__":
    harness.main()
