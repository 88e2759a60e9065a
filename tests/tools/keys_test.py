# SPDX-License-Identifier: Apache-2.0
"""Other names for keys (--map), and specs of jobs (check)."""

import io
import json
import os
import sys
import pathlib
import subprocess
import unittest

import numpy as np
from safetensors import safe_open

import harness

RULES = [
    {"key": "bias", "to": "head/bias"},
    {"match": "layers.*.attn/*", "to": "blocks.*.attention.*"},
    {"prefix": "fp", "to": "float"},
    {"drop": "empty"},
]
NAMES = {"bias": "head/bias", "layers.0.attn/qkv": "blocks.0.attention.qkv", "fp8": "float8", "fp4": "float4",
         "empty": None}
SPECS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "specs"


class Maps(harness.ToolTest):
    def setUp(self):
        super().setUp()
        self.rules = self.dir / "rules.json"
        self.rules.write_text(json.dumps(RULES))
        self.renamed = {NAMES.get(k, k): v for k, v in self.tensors.items() if NAMES.get(k, k) is not None}

    def test_import_renames_keys(self):
        path = self.save("a", "--map", self.rules, "--ranks", "3", "--shard", "flat")
        self.assertEqual(self.run_tool("ls", path).stdout.split(), sorted(self.renamed))
        for key, (_, _, raw) in self.renamed.items():
            self.assertEqual(self.run_tool("cat", path, key, text=False).stdout, raw, key)
        self.run_tool("verify", path)

    def test_adopt_renames_keys_in_place(self):
        self.run_tool("adopt", self.model, self.store / "a", "--map", self.rules)
        path = self.store / "a"
        self.assertEqual(self.run_tool("ls", path).stdout.split(), sorted(self.renamed))
        self.run_tool("verify", path)
        for remade in (False, True):
            for key, (_, _, raw) in self.renamed.items():
                self.assertEqual(self.run_tool("cat", path, key, text=False).stdout, raw, key)
            if not remade:
                (path / "index" / "index.sst").unlink()
                self.run_tool("fsck", self.store, "--rebuild")
                self.run_tool("verify", path)
        # The same names as an import by the same rules has.
        other = self.save("b", "--map", self.rules)
        self.run_tool("diff", path, other)
        # Another map over it, at once and later.
        again = self.dir / "again.json"
        again.write_text(json.dumps([{"prefix": "blocks.", "to": "layers."}]))
        self.run_tool("adopt", self.model, self.store / "a", "--map", again, "--if-exists", "replace", "--quick")
        self.assertEqual(self.run_tool("ls", path).stdout.split(), sorted(self.tensors))

    def test_adopt_counts_bytes_without_dropped_tensors(self):
        rules = self.dir / "drops.json"
        rules.write_text(json.dumps([{"drop": "big"}]))
        (report,) = self.json_lines("adopt", self.model, self.store / "a", "--map", rules)
        kept = sum(len(raw) for key, (_, _, raw) in self.tensors.items() if key != "big")
        self.assertEqual((report["tensors"], report["bytes"], report["bytes_hashed"]),
                         (len(self.tensors) - 1, kept, kept))

    def test_load_uses_mapped_names(self):
        path = self.save("a")
        other = self.dir / "renamed.safetensors"
        harness.write_safetensors(other, self.renamed)
        (report,) = self.json_lines("load", path, "--map", self.rules, "--compare", other, "--ranks", "2")
        self.assertEqual(report["tensors"], len(self.renamed))
        self.assertEqual(report["different_tensors"], 0)
        self.assertEqual(report["compared_bytes"], report["bytes_wanted"])
        self.assertIn("peak_buffer_bytes", report)
        (report,) = self.json_lines("load", path, "--map", self.rules, "--keys", "float*")
        self.assertEqual(report["tensors"], 2)
        out = self.run_tool("load", path, "--map", self.rules, "--compare", self.model, expect=1)
        self.assertIn("tensor head/bias: missing in the second source", out.stderr)

    def test_load_reports_its_own_peak_memory(self):
        # The resource usage of a process begins with that of the program it was before exec.
        code = "import os, sys; held = b'x' * (300 << 20); os.execv(sys.argv[1], sys.argv[1:])"
        out = self.run_tool("--json", "load", self.model, prefix=(sys.executable, "-c", code)).stdout
        self.assertLess(json.loads(out)["peak_memory"], 250 << 20)

    def test_mount_shows_mapped_names(self):
        path = self.save("a", "--ranks", "2")
        mnt = self.mount(path, "--map", self.rules)
        for key, (dtype, shape, raw) in self.renamed.items():
            self.assertEqual((mnt / "tensors" / key).read_bytes(), raw, key)
        self.assertFalse((mnt / "tensors" / "empty").exists())
        with safe_open(mnt / "model.safetensors", framework="numpy") as opened:
            np.testing.assert_array_equal(opened.get_tensor("head/bias").view("u1"),
                                          np.frombuffer(self.tensors["bias"][2], "u1"))
            self.assertNotIn("bias", opened.keys())
        listed = json.loads((mnt / "checkpoint.json").read_text())["tensors"]
        self.assertEqual([t["key"] for t in listed], sorted(self.renamed))
        self.assertEqual(os.getxattr(mnt / "tensors" / "head" / "bias", "user.tensormount.stored_key"), b"bias")

    def test_invalid_rules_are_refused(self):
        self.rules.write_text(json.dumps([{"key": "w", "to": "tiny"}]))
        path = self.save("a")
        mnt = self.dir / "MNT"
        mnt.mkdir()
        for command in [["import", path, self.store / "b"], ["load", path], ["mount", path, mnt],
                        ["adopt", self.model, self.store / "b"]]:
            out = self.run_tool(*command, "--map", self.rules, expect=2)
            self.assertRegex(out.stderr, "tiny and w would both be called tiny", command)
        self.rules.write_text(json.dumps([{"prefix": "w", "too": "v"}]))
        out = self.run_tool("load", path, "--map", self.rules, expect=2)
        self.assertIn('rules.json: name map: rules[0] (line 1): unknown field "too"', out.stderr)
        self.assertFalse((self.store / "b").exists())


class Layers(harness.ToolTest):
    """A stacked tensor whose layers have names of their own."""

    def setUp(self):
        super().setUp()
        subprocess.run([harness.BIN / "tests" / "save_stacked", self.store / "s"], check=True, timeout=60)
        self.path = self.store / "s"
        self.w = np.arange(120, dtype="<f4").reshape(4, 6, 5)

    def test_ls_lists_layers_with_the_layers_option(self):
        self.assertEqual(self.run_tool("ls", self.path).stdout.split(), ["bias", "w"])
        names = [f"layers.{n}.w" for n in range(4)]
        self.assertEqual(self.run_tool("ls", self.path, "--layers").stdout.split(), ["bias", "w", *names])
        (layer,) = self.json_lines("ls", self.path, "layers.2*", "--layers")
        self.assertEqual(layer, {"key": "layers.2.w", "dtype": "f32", "shape": [6, 5], "bytes": 120,
                                 "stacked_key": "w", "layer": 2})
        (info,) = self.json_lines("info", self.path)
        self.assertEqual(info["layers"], {"w": "layers.{}.w"})
        self.assertEqual(info["common_values"], 0)
        self.assertIn("layer      3 of w, from byte 360", self.run_tool("info", self.path, "layers.3.w").stdout)
        self.assertIn("NOT_FOUND", self.run_tool("info", self.path, "layers.4.w", expect=2).stderr)

    def test_cat_reads_a_layer(self):
        for n in range(4):
            raw = self.run_tool("cat", self.path, f"layers.{n}.w", text=False).stdout
            self.assertEqual(raw, self.w[n].tobytes())
        out = self.run_tool("cat", self.path, "layers.1.w[2:5, -1]", "--as", "npy", text=False).stdout
        np.testing.assert_array_equal(np.load(io.BytesIO(out)), self.w[1, 2:5, -1])

    def test_mount_opens_layers_by_name(self):
        mnt = self.mount(self.path)
        self.assertEqual(sorted(os.listdir(mnt / "tensors")), ["bias", "w"])
        for n in range(4):
            self.assertEqual((mnt / "tensors" / f"layers.{n}.w").read_bytes(), self.w[n].tobytes())
            np.testing.assert_array_equal(np.load(mnt / "npy" / f"layers.{n}.w.npy", mmap_mode="r"), self.w[n])
        size = subprocess.run(["du", "-sb", mnt / "tensors"], check=True, capture_output=True, text=True).stdout
        self.assertEqual(int(size.split()[0]), 480 + 3)

    def test_layer_names_survive_import_and_mapping(self):
        out = self.run_tool("import", self.path, self.store / "copy", "-v", "--ranks", "3", "--shard", "dim:2",
                            "--reuse", "off")
        self.assertRegex(out.stderr, r"rank 1: \d+ B in data/")
        raw = self.run_tool("cat", self.store / "copy", "layers.2.w", text=False).stdout
        self.assertEqual(raw, self.w[2].tobytes())
        rules = self.dir / "rules.json"
        rules.write_text(json.dumps([{"match": "layers.*.w", "to": "h/*/weight"}, {"key": "w", "to": "stack"}]))
        self.run_tool("import", self.path, self.store / "mapped", "--map", rules)
        raw = self.run_tool("cat", self.store / "mapped", "h/2/weight", text=False).stdout
        self.assertEqual(raw, self.w[2].tobytes())
        self.run_tool("verify", self.store / "mapped")


class Check(harness.ToolTest):
    def test_example_specs_give_the_expected_verdicts(self):
        for spec in sorted(SPECS.glob("*.json")):
            bad = "missing" in spec.name
            (report,) = json.loads("[" + self.run_tool("check", spec, "--json", expect=1 if bad else 0).stdout + "]")
            self.assertEqual(report["ok"], not bad)
        self.assertEqual(report["world"], 16384)

    def test_check_names_the_missing_box(self):
        out = self.run_tool("check", SPECS / "missing_rows.json", expect=1).stdout
        self.assertIn("tensor embed: [500:501, 0:64] is held by no rank", out)

    def test_check_lists_findings_up_to_the_limit(self):
        spec = self.dir / "spec.json"
        spec.write_text(json.dumps({"world": 2, "tensors": [
            {"key": "w{i}", "dtype": "f32", "shape": [4], "repeat": {"i": [0, 9]},
             "shards": [{"ranks": 0, "begin": [0], "extent": [3]}]}]}))
        (report,) = json.loads("[" + self.run_tool("--json", "check", spec, "--limit", "4", expect=1).stdout + "]")
        self.assertEqual((len(report["findings"]), report["finding_count"]), (4, 9))

    def test_invalid_specs_are_refused(self):
        spec = self.dir / "spec.json"
        spec.write_text('{"world": 2, "tensors": [{"key": "w"}]}')
        self.assertIn("tensors[0]: give exactly one of", self.run_tool("check", spec, expect=2).stderr)
        self.assertIn("NOT_FOUND", self.run_tool("check", self.dir / "none", expect=2).stderr)


if __name__ == "__main__":
    harness.main()
