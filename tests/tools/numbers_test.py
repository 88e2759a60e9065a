# SPDX-License-Identifier: Apache-2.0
"""ls --stats and --where, info, log, watch and verify --nonfinite: a NaN in a run is found by each of them."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

import harness

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
os.environ.setdefault("TENSORMOUNT_LIBRARY", str(harness.BIN.parent / "lib" / "libtensormount.so"))
import tensormount as tm


class NumbersTest(harness.ToolTest):
    def keys(self, *args, expect=0):
        return self.run_tool("ls", *args, expect=expect).stdout.split()

    def test_a_nan_in_a_run_is_found(self):
        layers = {f"layers.{n}.w": np.full((8, 8), n + 1.0, "<f4") for n in range(4)}
        for step in range(1, 6):
            layers["layers.2.w"] = layers["layers.2.w"] * 2
            if step == 3:
                layers["layers.2.w"][5, :3] = np.nan
            tm.save({**layers, "mask": np.array([0, -np.inf], "<f4")}, self.store / f"step-{step}")
        with_mask = self.json_lines("log", self.store, "--reverse")
        self.assertEqual([row["nonfinite"] for row in with_mask], [1, 1, 4, 4, 4])
        self.assertIn("  nonfinite=4  ", self.run_tool("log", self.store).stdout.splitlines()[2])
        step = self.store / "step-3"
        self.assertEqual(self.keys(step, "--where", "nan > 0"), ["layers.2.w"])
        self.assertEqual(self.keys(step, "layers.*", "--where", "nonfinite > 0"), ["layers.2.w"])
        self.assertEqual(self.keys(self.store / "step-2", "--where", "nan > 0", expect=1), [])
        self.assertIn("[0:8, 0:8] in ", self.run_tool("info", step, "layers.2.w").stdout)
        self.assertIn(": 3 NaN\n", self.run_tool("info", step, "layers.2.w").stdout)
        [found] = self.json_lines("info", step, "layers.2.w")
        self.assertEqual((found["nan"], found["extents"][0]["nan"], found["absmax"]), (3, 3, 24))
        lines = self.run_tool("verify", "--nonfinite", "--nonfinite-exempt", "mask", step, expect=1).stdout
        self.assertIn("step-3: tensor layers.2.w: 3 NaN among 64 values\n", lines)
        self.assertNotIn("mask", lines)
        self.run_tool("verify", "--nonfinite", "--quick", "--nonfinite-exempt", "mask", self.store / "step-2")
        [blamed] = self.json_lines("blame", self.store, "layers.2.w")
        self.assertEqual(blamed["checkpoint"], "step-5")
        watched = subprocess.run([harness.TOOL, "watch", self.store, "--since", "step-2", "--once", "--json"],
                                 capture_output=True, text=True, timeout=60, check=True)
        self.assertEqual(json.loads(watched.stdout)["nonfinite"], 4)

    def test_conditions(self):
        state = {
            "a.w": np.array([[1, -5], [0, 2]], "<f4"),
            "a.b": np.array([3], "<i8"),
            "big": np.full(10, 1e30, "<f8"),
            "none": np.empty((0, 2), "<f2"),
            "c": np.array([np.inf, 1], "<c8"),
        }
        tm.save(state, self.store / "one")
        for condition, expected in (
            ("absmax > 4", ["a.w", "big"]),
            ("absmax>=3 and absmax<5", ["a.b"]),
            ('key ~ "a.*"', ["a.b", "a.w"]),
            ("key !~ 'a.*' and not dtype = 'f64'", ["c", "none"]),
            ("zeros = count", ["none"]), ("zeros = elements", ["c", "none"]),
            ("zeros == 2 or (inf = 1 and posinf = 1 and neginf = 0)", ["c"]),
            ("rank != 1 and bytes <= 16", ["a.w", "none"]),
            ("absmax > 0 or elements = 0", ["a.b", "a.w", "big", "c", "none"]),
            ("not absmax > 0", []),  # Not known of `none`.
            ("counted = 1 and chunks < 1", ["none"]),
            ("nan > 0 or absmax = 1e30", ["big"]),
        ):
            with self.subTest(condition):
                self.assertEqual(self.keys(self.store / "one", "--where", condition, expect=0 if expected else 1), expected)
        for condition, position in (
            ("nan", "an operator was expected at position 4"),
            ("nothing > 0", "the name of a field was expected at position 1"),
            ("nan > x", "a number was expected at position 7"),
            ("nan > 1x", "a number was expected at position 7"),
            ("key = a", "a text in quotes was expected at position 7"),
            ("key = 'a", "a closing quote was expected at position 7"),
            ("(nan > 0", "a closing parenthesis was expected at position 9"),
            ("nan > 0 nan > 1", "and, or, or the end was expected at position 9"),
            ("nan ~ 'a'", "no glob for the number nan was expected at position 6"),
            ("not " * 100 + "nan > 0", "nested deeper than 64"),
        ):
            with self.subTest(condition):
                self.assertIn(position, self.run_tool("ls", self.store / "one", "--where", condition, expect=2).stderr)

    def test_conditions_use_full_statistics_that_were_kept(self):
        tm.save({"a": np.array([3, 4], "<f4"), "b": np.array([1, -1], "<f4")}, self.store / "one", statistics="off")
        self.assertEqual(self.keys(self.store / "one", "--where", "norm > 0 or nan = 0", expect=1), [])
        self.run_tool("stats", "--full", self.store / "one")
        self.assertEqual(self.keys(self.store / "one", "--where", "norm = 5"), ["a"])
        self.assertEqual(self.keys(self.store / "one", "--where", "mean = 0 and min < 0 and absmax = max"), ["b"])
        self.assertEqual(self.keys(self.store / "one", "--where", "nan = 0 and counted = 0"), ["a", "b"])

    def test_columns_and_json(self):
        tm.save({"w": np.array([0, 0.1, np.nan], "<f4"), "none": np.empty(0, "<f2")}, self.store / "one")
        tm.save({"w": np.array([0, 0.1, np.nan], "<f4")}, self.store / "off", statistics="off", reuse="off")
        lines = self.run_tool("ls", "--stats", self.store / "one").stdout.splitlines()
        self.assertEqual([line.split()[-5:] for line in lines], [
            ["zeros", "nan", "inf", "absmax", "key"], ["0", "0", "0", "-", "none"], ["1", "1", "0", "0.1", "w"]])
        [none, w] = self.json_lines("ls", "--stats", self.store / "one")
        self.assertEqual([none[name] for name in ("zeros", "nan", "absmax")], [0, 0, None])
        self.assertEqual([w[name] for name in ("zeros", "nan", "posinf", "neginf")], [1, 1, 0, 0])
        [off] = self.json_lines("ls", "--stats", self.store / "off")
        self.assertIsNone(off["nan"])
        self.assertIn("   ?", self.run_tool("ls", "--stats", self.store / "off").stdout)
        self.assertEqual(self.keys(self.store / "off", "--where", "nan > 0", expect=1), [])
        self.assertEqual(self.keys(self.store / "off", "--where", "counted = 0"), ["w"])

    def test_values_that_were_not_counted_are_read(self):
        tm.save({"w": np.array([0, np.nan], "<f4")}, self.store / "off", statistics="off")
        harness.write_safetensors(self.dir / "model.safetensors", {"x": ("F32", [1], np.array([np.inf], "<f4").tobytes())})
        self.assertIn("tensor w: 1 NaN among 2 values",
                      self.run_tool("verify", "--nonfinite", self.store / "off", expect=1).stdout)
        self.assertIn("without --quick",
                      self.run_tool("verify", "--nonfinite", "--quick", self.store / "off", expect=2).stderr)
        self.assertIn("tensor x: 1 infinite among 1 values",
                      self.run_tool("verify", "--nonfinite", self.dir / "model.safetensors", expect=1).stdout)

    def test_import_refuses_nan(self):
        harness.write_safetensors(self.dir / "model.safetensors", {"x": ("F32", [2], np.array([np.nan, 1], "<f4").tobytes())})
        failed = self.run_tool("import", self.dir / "model.safetensors", self.store / "one", "--nonfinite", "refuse", expect=2)
        self.assertIn("tensor x: 1 NaN among the 2 values", failed.stderr)
        self.assertFalse((self.store / "one").exists())
        self.run_tool("import", self.dir / "model.safetensors", self.store / "one", "--nonfinite", "refuse",
                      "--nonfinite-exempt", "x")
        self.assertEqual(self.keys(self.store / "one", "--where", "nan = 1"), ["x"])

    def test_a_mount_shows_counts_and_an_alert(self):
        tm.save({"w": np.array([0, -3, np.nan], "<f4")}, self.store / "step-1")
        mnt = self.mount(self.store)
        metrics = dict(line.rsplit(" ", 1) for line in (mnt / ".tensormount" / "metrics").read_text().splitlines()
                       if not line.startswith("#"))
        self.assertEqual(metrics["tensormount_latest_nonfinite"], "1")
        self.assertEqual(metrics["tensormount_latest_generation"], "1")
        self.assertEqual(metrics['tensormount_latest_info{checkpoint="step-1"}'], "1")
        self.assertEqual(int(metrics["tensormount_latest_bytes"]),
                         sum(file.stat().st_size for file in (self.store / "step-1" / "data").iterdir()))
        w = mnt / "step-1" / "tensors" / "w"
        seen = {name: os.getxattr(w, f"user.tensormount.{name}").decode()
                for name in ("zeros", "nan", "posinf", "neginf", "absmax")}
        self.assertEqual(seen, {"zeros": "1", "nan": "1", "posinf": "0", "neginf": "0", "absmax": "3"})

    def test_damaged_counts_are_reported(self):
        tm.save({"w": np.array([0, 0.1], "<f4")}, self.store / "one")
        manifest = self.store / "one" / "manifest" / "coordinator.tmm"
        self.flip(manifest, manifest.stat().st_size - 40)  # A byte of the row of `w`.
        self.assertIn("the value counts are damaged", self.run_tool("ls", "--stats", self.store / "one", expect=2).stderr)
        self.assertEqual(self.keys(self.store / "one"), ["w"])
        self.assertIn("coordinator.tmm", self.run_tool("verify", self.store / "one", expect=1).stdout)
        self.assertIn("damaged", self.run_tool("log", self.store, expect=1).stdout)


if __name__ == "__main__":
    harness.main()
