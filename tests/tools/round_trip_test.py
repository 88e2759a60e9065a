# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import pathlib
import unittest

import numpy as np
from awscrt import checksums

import harness

RULES = ["rows", "cols", "grid:2x2", "flat", "dim:2", "replicate"]


class RoundTrip(harness.ToolTest):
    def test_every_shard_rule_round_trips(self):
        digests = []
        for rule in RULES:
            path = self.save(rule.replace(":", "-"), "--shard", rule, "--ranks", "4")
            for key, (_, _, raw) in self.tensors.items():
                got = self.run_tool("cat", path, key, text=False).stdout
                self.assertEqual(got, raw, f"{rule} {key}")
            digests.append({t["key"]: t["digest"] for t in self.json_lines("ls", path)})
            self.run_tool("verify", path)
        for other in digests[1:]:
            self.assertEqual(other, digests[0])
        for key, (_, _, raw) in self.tensors.items():
            self.assertEqual(digests[0][key], f"{checksums.crc64nvme(raw):016x}", key)

    def test_checkpoint_loads_on_other_ranks_and_rules(self):
        for saved in ["cols", "flat"]:
            path = self.save(saved, "--shard", saved, "--ranks", "3")
            for ranks, rule in [(1, "rows"), (2, "cols"), (3, "grid:3x1"), (2, "grid:1x2"), (5, "flat")]:
                (report,) = self.json_lines("load", path, "--ranks", ranks, "--shard", rule, "--compare", self.model)
                self.assertEqual(report["different_tensors"], 0)
                self.assertEqual(report["compared_bytes"], report["bytes_wanted"])
                self.assertEqual(report["bytes_unverified"], 0)
                self.assertEqual(report["tensors"], len(self.tensors))
                self.assertEqual(len(report["per_rank"]), ranks)

    def test_every_placement_round_trips(self):
        # One valid safetensors file needs one rank that holds all tensors whole.
        for placement, rule in [("auto", "rows"), ("tensor-file", "rows"), ("rank-shard", "cols"),
                                ("safetensors", "replicate")]:
            path = self.save(placement, "--placement", placement, "--ranks", "2", "--shard", rule)
            self.run_tool("load", path, "--compare", self.model)
            self.run_tool("verify", path)
        refused = self.run_tool("import", self.model, self.store / "x", "--placement", "safetensors", "--ranks", "2",
                                expect=2)
        self.assertIn("UNSUPPORTED: placement safetensors: one rank must hold all tensors whole", refused.stderr)

    def test_compare_names_the_differing_tensor(self):
        path = self.save()
        changed = dict(self.tensors)
        dtype, shape, raw = changed["w"]
        changed["w"] = (dtype, shape, raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
        harness.write_safetensors(self.dir / "other.safetensors", changed)
        result = self.run_tool("load", path, "--compare", self.dir / "other.safetensors", expect=1)
        self.assertIn("tensor w [0:64, 0:48]: byte 100 of the slice differs", result.stderr)

    def test_cat_slices_like_numpy(self):
        path = self.save("s", "--shard", "cols", "--ranks", "3")
        w = np.frombuffer(self.tensors["w"][2], "<f4").reshape(64, 48)
        for text, expected in [("[3:9, 5:40]", w[3:9, 5:40]), ("[7]", w[7]), ("[:, 47]", w[:, 47]),
                               ("[10:10]", w[10:10]), ("[-1, -2:]", w[-1, -2:])]:
            for key in ["w" + text, "w@" + text[1:-1]]:
                out = self.run_tool("cat", path, key, "--as", "npy", text=False).stdout
                got = np.load(io.BytesIO(out))
                self.assertEqual(got.shape, expected.shape, key)
                self.assertEqual(got.tobytes(), expected.tobytes(), key)
                raw = self.run_tool("cat", path, key, text=False).stdout
                self.assertEqual(raw, expected.tobytes(), key)
        self.assertIn("INVALID_ARGUMENT", self.run_tool("cat", path, "w[0:65]", expect=2).stderr)
        bias = np.frombuffer(self.tensors["bias"][2], "<f8")
        text = self.run_tool("cat", path, "bias", "--as", "text").stdout.split()
        np.testing.assert_array_equal(np.array([float(t) for t in text]), bias)

    def test_ls_and_info_describe_a_checkpoint(self):
        path = self.save("step-1", "--shard", "cols", "--ranks", "4")
        self.assertEqual(self.run_tool("ls", path).stdout.split(), sorted(self.tensors))
        self.assertEqual(self.run_tool("ls", path, "layers*qkv").stdout.split(), ["layers.0.attn/qkv"])
        self.assertIn("[64, 48]", self.run_tool("ls", "-l", path, "w").stdout)
        (info,) = self.json_lines("info", path)
        self.assertEqual(info["world_size"], 4)
        self.assertEqual(info["tensors"], len(self.tensors))
        self.assertEqual(info["tensor_bytes"], sum(len(t[2]) for t in self.tensors.values()))
        (w,) = self.json_lines("info", path, "w")
        self.assertEqual(sum(e["length"] for e in w["extents"]), 64 * 48 * 4)
        (store,) = self.json_lines("info", self.store)
        self.assertEqual(store["latest"], "step-1")
        (listed,) = self.json_lines("ls", self.store)
        self.assertEqual(listed["checkpoint"], "step-1")

    def test_every_kind_of_source_is_accepted(self):
        self.save("step-1")
        self.save("step-2")
        for source in [self.model, self.store, self.store / "step-1", self.store / "latest"]:
            self.assertEqual(self.run_tool("cat", source, "tiny", text=False).stdout, self.tensors["tiny"][2])
            self.run_tool("load", source, "--compare", self.model)
            self.run_tool("verify", source)
        # A checkpoint is a source of import too.
        self.run_tool("import", self.store / "step-1", self.store / "copy", "--shard", "flat", "--ranks", "2")
        self.run_tool("load", self.store / "copy", "--compare", self.model)

    def test_rule_files_shard_by_key(self):
        rules = self.dir / "rules.json"
        rules.write_text(json.dumps([{"match": "layers.*", "shard": "dim:1"}, {"match": "big", "shard": "flat"}]))
        path = self.save("step-1", "--shard", rules, "--ranks", "3")
        (mlp,) = self.json_lines("info", path, "layers.0.mlp")
        self.assertEqual([e["region"] for e in mlp["extents"]], ["[0:129, 0:11]", "[0:129, 11:22]", "[0:129, 22:33]"])
        self.run_tool("load", path, "--compare", self.model)
        rules.write_text("{}")
        self.assertIn("a JSON list", self.run_tool("load", path, "--shard", rules, expect=2).stderr)

    def test_import_keeps_content_metadata(self):
        golden = pathlib.Path(__file__).parent.parent / "golden" / "v1" / "step-1000"
        copy = self.store / "copy"
        self.run_tool("import", golden, copy, "--ranks", "2")
        for source in [golden, copy]:
            (info,) = self.json_lines("info", source)
            self.assertEqual(info["content"], {"model": "golden", "step": 1000})
            self.assertEqual(info["common_values"], 6)
            lines = self.run_tool("info", source).stdout.splitlines()
            self.assertIn('content        model: "golden"', lines)
            self.assertIn("content        step: 1000", lines)
        self.assertNotIn("content", self.json_lines("info", self.model)[0])

    def test_info_prints_common_values(self):
        golden = pathlib.Path(__file__).parent.parent / "golden" / "v1" / "step-1000"
        dcp = pathlib.Path(__file__).parent.parent / "golden" / "foreign" / "dcp-2.13" / "global"
        for source in (golden, dcp):
            (document,) = self.json_lines("info", source, "--common")
            self.assertEqual(json.loads(self.run_tool("info", source, "--common").stdout), document)
            if os.access("/dev/fuse", os.R_OK | os.W_OK):
                mnt = self.mount(source, "--views")
                self.assertEqual(json.loads((mnt / "common.json").read_text()), document)
                self.run_tool("unmount", mnt)
            plain = {name: value for name, value in document.items() if not name.startswith("$")}
            self.assertTrue(plain)
            lines = self.run_tool("info", source).stdout.splitlines()
            for name, value in plain.items():
                said = self.json_lines("info", source, name)
                if "object" not in said[0]:  # What DCP stored as an object is that, too.
                    self.assertEqual(said, [{"common": name, "value": value}])
                    self.assertEqual(json.loads(self.run_tool("info", source, name).stdout), value)
                (line,) = [l for l in lines if l.startswith(f"common         {name}: ")]
                self.assertLessEqual(len(line), 180)
        result = self.run_tool("cat", golden, next(iter(self.json_lines("info", golden, "--common")[0])), expect=2)
        self.assertIn("the key is that of a common value; `tensormount info", result.stderr)
        self.fails("info", golden, "w", "--common", code="INVALID_ARGUMENT", says="takes no KEY")
        # Long ones are cut, many are counted.
        values = {f"v{i:02}": i for i in range(30)} | {"long": "ü" * 5000, "\x1b[2J": 1}
        header = json.dumps({"__metadata__": {k: str(v) for k, v in values.items()},
                             "w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        self.model.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
        out = self.run_tool("info", self.model).stdout
        self.assertIn("other common values: tensormount info ", out)
        self.assertNotIn("\x1b", out + self.run_tool("info", self.model, "--common").stdout)
        self.assertLess(max(map(len, out.splitlines())), 200)
        (document,) = self.json_lines("info", self.model, "--common")
        self.assertEqual(document, {k: str(v) for k, v in values.items()})

    def test_store_behind_a_symlink_works(self):
        (self.dir / "real").mkdir()
        (self.dir / "link").symlink_to("real")
        self.run_tool("import", self.model, self.dir / "link" / "STORE" / "a")
        self.run_tool("import", self.model, self.dir / "link" / "STORE" / "b")
        self.run_tool("load", self.dir / "real" / "STORE" / "b", "--compare", self.model)


if __name__ == "__main__":
    harness.main()
