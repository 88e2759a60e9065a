# SPDX-License-Identifier: Apache-2.0
"""diff: what two sources of any kind do not have in common."""

import json
import subprocess
import unittest

import numpy as np

import harness


class Diff(harness.ToolTest):
    def lines(self, *args, expect=1):
        return self.run_tool("diff", *args, expect=expect).stdout.splitlines()

    def test_checkpoint_equals_its_source_file(self):
        path = self.save("a", "--ranks", "3", "--shard", "cols")
        (line,) = self.lines(path, self.model, expect=0)
        self.assertRegex(line, r"^no difference: 10 equal; 1 compared by digest, 9 by bytes \(9\.\d MB read\)$")
        other = self.save("b", "--ranks", "2", "--shard", "flat")
        (line,) = self.lines(path, other, expect=0)
        self.assertEqual(line, "no difference: 10 equal; 10 compared by digest, 0 by bytes")
        # Of a store the latest.
        self.assertEqual(self.lines(self.store, other, expect=0), [line])
        self.assertEqual(self.run_tool("diff", path, other, "-q").stdout, "")
        for data in [*(path / "data").iterdir(), *(other / "data").iterdir()]:
            data.unlink()  # Nobody looks at it.
        self.assertEqual(self.lines(path, other, expect=0), [line])

    def test_diff_reports_added_removed_and_changed_keys(self):
        path = self.save("a", "--ranks", "2")
        changed = dict(self.tensors)
        changed["new"] = changed.pop("bias")
        changed["w"] = ("F32", (48, 64), changed["w"][2])
        changed["tiny"] = ("BOOL", (3,), bytes([0, 1, 1]))
        raw = bytearray(changed["big"][2])
        raw[4 * (1024 * 7 + 3)] ^= 1
        changed["big"] = (*changed["big"][:2], bytes(raw))
        harness.write_safetensors(self.model, changed)
        lines = self.lines(path, self.model)
        self.assertEqual(lines[:-1], [
            "- bias f64 [17]", "~ big f32 [1100, 1024]: bytes differ, first at [7, 3]", "+ new f64 [17]",
            "~ tiny: dtype u8 and bool", "~ w: shape [64, 48] and [48, 64]"])
        self.assertRegex(lines[-1], r"^1 added, 1 removed, 3 changed, 6 equal; 1 compared by digest, 6 by bytes")
        self.assertIn("~ big f32 [1100, 1024]: digests differ", self.lines(path, self.save("b")))
        self.assertEqual(self.lines(path, self.model, "--keys", "*i*")[:-1], [lines[0], lines[1], lines[3]])

    def test_places_of_largest_differences_are_reported(self):
        first, second = self.dir / "first.safetensors", self.dir / "second.safetensors"
        for path, values in ((first, [5, 100, 0.25]), (second, [5, 101, 0.75])):
            harness.write_safetensors(path, {"w": ("F32", (3,), np.array(values, "<f4").tobytes())})
        values = self.json_lines("diff", first, second, "--values", expect=1)[0]["values"]
        self.assertEqual((values["max_abs"], values["max_abs_at"]), (1, [1]))
        self.assertEqual((values["max_rel"], values["max_rel_at"]), (0.5 / 0.75, [2]))
        self.assertEqual(values["first_at"], [1])

    def test_diff_reports_differing_values(self):
        a = np.linspace(-1, 1, 1024, dtype="<f4").reshape(32, 32)
        b = a.copy()
        b[3, 7] += np.float32(0.5)
        b[2, 1:12] += np.float32(0.01)
        a[9, 9] = np.nan
        bits = np.zeros(8, "<f4")
        nans = np.full(8, np.nan, "<f4")
        first, second = self.dir / "first.safetensors", self.dir / "second.safetensors"
        steps = np.array([2**62], "<i8")
        harness.write_safetensors(first, {"w": ("F32", (32, 32), a.tobytes()), "n": ("F32", (8,), nans.tobytes()),
                                          "step": ("I64", (), steps.tobytes()),
                                          "half": ("F32", (32, 32), b.tobytes())})
        bits[:] = nans
        bits.view("<u4")[5] ^= 1
        half = (np.round(b * 128) / 128).astype("<f4")  # As many bits as bf16 has, nearly.
        bf16 = (half.view("<u4") >> 16).astype("<u2")
        harness.write_safetensors(second, {"w": ("F32", (32, 32), b.tobytes()), "n": ("F32", (8,), bits.tobytes()),
                                           "step": ("I64", (), (steps - 3).tobytes()),
                                           "half": ("BF16", (32, 32), bf16.tobytes())})
        lines = self.lines(first, second, "--values")
        self.assertRegex(lines[0], r"^~ half: dtype f32 and bf16; \d+ of 1024 elements differ, max abs 0\.00\d+ at ")
        self.assertEqual(lines[1], "~ n f32 [8]: 0 of 8 elements differ; 1 are NaN on both, with different bits")
        self.assertRegex(lines[2], r"^~ step i64 \[\]: 1 of 1 elements differ, max abs 3 at \[\], max rel 6\.\d+e-19 at ")
        self.assertRegex(lines[3], r"^~ w f32 \[32, 32\]: 13 of 1024 elements differ, max abs 0\.5 at \[3, 7\], "
                                   r"max rel [\d.]+ at \[\d+, \d+\], first at \[2, 1\]; 1 are NaN on one side$")
        events = {e.get("key"): e for e in self.json_lines("diff", first, second, "--values", expect=1)}
        difference = np.abs(a.astype("f8") - b.astype("f8"))
        values = events["w"]["values"]
        self.assertEqual(values["max_abs"], np.nanmax(difference))
        self.assertEqual(values["max_abs_at"], [3, 7])
        scale = np.maximum(np.abs(a.astype("f8")), np.abs(b.astype("f8")))
        with np.errstate(invalid="ignore"):
            self.assertEqual(values["max_rel"], np.nanmax(difference / scale))
        self.assertEqual((values["elements"], values["differing"], values["nan_on_one_side"]), (1024, 13, 1))
        self.assertEqual(values["first_at"], [2, 1])
        self.assertEqual(events["step"]["values"]["max_abs"], 3)
        self.assertEqual(events["n"]["values"]["nan_on_both"], 1)
        self.assertEqual(events["w"]["first"], {"dtype": "f32", "shape": [32, 32], "bytes": 4096})
        self.assertEqual(events[None]["changed"], 4)
        self.assertFalse(events[None]["same"])

    def test_key_map_renames_the_first_source(self):
        path = self.save("a")
        rules = self.dir / "rules.json"
        rules.write_text(json.dumps([{"key": "w", "to": "zz.w"}, {"drop": "fp*"}]))
        self.save("b", "--map", rules)
        self.assertEqual(self.lines(path, self.store / "b")[:-1], ["- fp4 f4 [6, 8]", "- fp8 f8_e4m3 [16, 16]",
                                                                   "- w f32 [64, 48]", "+ zz.w f32 [64, 48]"])
        self.lines(path, self.store / "b", "--map", rules, expect=0)

    def test_diff_reports_common_values_and_objects(self):
        save = harness.BIN / "tests" / "save_stacked"
        for name, more in [("a", ["0.50"]), ("b", ["0.25"])]:
            subprocess.run([save, self.store / name, *more], check=True, timeout=60)
        lines = self.lines(self.store / "a", self.store / "b")
        self.assertEqual(lines[:-1], [
            "~ object rng: hashes differ", "~ common args.lr: 0.5 in the first and 0.25 in the second"])
        events = self.json_lines("diff", self.store / "a", self.store / "b", expect=1)
        self.assertEqual([(e["event"], e.get("what")) for e in events],
                         [("changed", "object"), ("changed", "common"), ("compared", None)])
        self.assertEqual(events[0]["first"], {"bytes": 4})

    def test_failures_are_not_reported_as_differences(self):
        path = self.save("a")
        self.assertIn("NOT_FOUND", self.run_tool("diff", path, self.dir / "none", expect=2).stderr)
        file = next((path / "data").iterdir())
        self.flip(file, file.stat().st_size - 5)
        self.assertIn("DATA_LOSS", self.run_tool("diff", path, self.model, expect=2).stderr)


if __name__ == "__main__":
    harness.main()
