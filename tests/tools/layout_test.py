# SPDX-License-Identifier: Apache-2.0
"""layout: pictures of which rank's chunk holds which box."""

import html.parser
import json
import os
import re
import subprocess
import unittest
import xml.etree.ElementTree as ET

import harness

SVG = "{http://www.w3.org/2000/svg}"


class Layout(harness.ToolTest):
    def text(self, *args):
        return self.run_tool("layout", *args).stdout

    def svg(self, *args):
        file = self.dir / "picture.svg"
        self.run_tool("layout", *args, "--svg", file)
        return file.read_text()

    def test_layout_draws_a_grid(self):
        path = self.save("a", "--ranks", "4", "--shard", "grid:2x2", "--placement", "rank-shard")
        picture = self.text(path, "w")
        lines = picture.splitlines()
        self.assertEqual(lines[0], "w  f32 [64, 48]  12.3 kB")
        self.assertEqual(lines[1], "4 chunks in 4 files of a")
        self.assertEqual(lines[2], "down: axis 0, across: axis 1")
        drawn = [line for line in lines if "rank" in line and "│" in line]
        self.assertEqual([re.findall(r"rank \d", line) for line in drawn],
                         [["rank 0", "rank 1"], ["rank 2", "rank 3"]])
        self.assertEqual(sum("┼" in line for line in lines), 1)
        self.assertRegex(picture, r"(?m)^\[32:64, 0:24\] +rank 2 +data/\w+-r2\.safetensors +\d+ +3072$")
        self.assertNotIn("\033", picture)

    def test_two_outputs_on_stdout_are_refused(self):
        path = self.save("a")
        for options, named in ((("--svg", "-", "--json"), ("--svg -", "--json")),
                               (("--html", "-", "--json"), ("--html -", "--json")),
                               (("--svg", "-", "--html", "-"), ("--svg -", "--html -"))):
            result = self.run_tool("layout", path, "w", *options, expect=2)
            self.assertIn(f"layout: {named[0]} and {named[1]} both write to standard output", result.stderr)
            self.assertEqual(result.stdout, "")
        self.run_tool("layout", path, "w", "--json", "--svg", self.dir / "picture.svg")

    def test_json_lists_every_chunk(self):
        path = self.save("a", "--ranks", "3", "--shard", "cols", "--placement", "rank-shard")
        (layout,) = self.json_lines("layout", path, "layers.0.mlp")
        self.assertEqual((layout["dtype"], layout["shape"], layout["checkpoint"]), ("f16", [129, 33], "a"))
        self.assertEqual([h["name"] for h in layout["holders"]], ["rank 0", "rank 1", "rank 2"])
        self.assertEqual([c["boxes"] for c in layout["chunks"]],
                         [[{"begin": [0, 11 * r], "extent": [129, 11]}] for r in range(3)])
        (info,) = self.json_lines("info", path, "layers.0.mlp")
        for chunk, extent in zip(layout["chunks"], info["extents"]):
            for field, name in [("region", "region"), ("file", "file"), ("offset", "offset"), ("length", "length"),
                                ("hash", "hash")]:
                self.assertEqual(chunk[field], extent[name])
            self.assertFalse(chunk["strided"])

    def test_layout_draws_runs_scalars_cubes_and_empty_tensors(self):
        path = self.save("a", "--ranks", "4", "--shard", "flat", "--placement", "rank-shard")
        runs = self.text(path, "layers.0.attn/qkv")  # [30, 7, 5] in runs of 263 elements.
        self.assertIn("down: axis 0, across: axes 1 to 2", runs)
        self.assertIn("[7:16, 0:7, 0:5] flat 18:281   rank 1", runs)
        self.assertEqual(re.findall(r"rank \d(?=[ │])", "\n".join(x for x in runs.splitlines() if "│" in x)),
                         [f"rank {r}" for r in range(4)])
        self.assertIn("[]  ", self.text(path, "steps"))
        self.assertEqual(self.text(path, "empty").count("\n"), 3)
        bias = self.text(path, "bias")  # A strip.
        self.assertNotIn("down:", bias)
        self.assertRegex(bias, r"│ +rank 0 +│ +rank 1 +│ +rank 2 +│ +rank 3 +│")
        cube = self.text(self.save("b", "--ranks", "4", "--shard", "grid:2x2"), "layers.0.attn/qkv")
        self.assertIn("down: axis 0, across: axis 1\naxis 2 (5) is not cut", cube)

    def test_tensor_file_chunks_name_their_writers(self):
        path = self.save("a", "--ranks", "2", "--placement", "tensor-file")
        picture = self.text(path, "big")
        self.assertIn("2 chunks in 1 file of a", picture)
        self.assertRegex(picture, r"(?m)^rank 1: 1 chunk, 2\.3 MB$")

    def test_layout_draws_foreign_files(self):
        picture = self.text(self.model, "w")
        self.assertIn("no hash", picture)
        self.assertIn("model.safetensors", picture)
        part = self.dir / "model-00002-of-00005.safetensors"
        self.model.rename(part)
        self.assertIn("part 2: 1 chunk", self.text(part, "w"))

    def test_layout_draws_layers(self):
        subprocess.run([harness.BIN / "tests" / "save_stacked", self.store / "s"], check=True, timeout=60)
        picture = self.text(self.store / "s", "layers.2.w")
        self.assertIn("layers.2.w  f32 [6, 5]", picture)
        self.assertIn("layer 2 of w", picture)
        self.assertRegex(picture, r"(?m)^\[3:6, 0:5\] +rank 1 ")
        out = self.run_tool("layout", self.store / "s", "layers.4.w", expect=2).stderr
        self.assertIn("NOT_FOUND", out)
        self.assertIn(f"hint: `tensormount ls {self.store / 's'}` lists the keys", out)

    def test_svg_draws_every_box(self):
        path = self.save("a", "--ranks", "4", "--shard", "grid:2x2", "--placement", "rank-shard")
        text = self.svg(path, "w")
        root = ET.fromstring(text)
        tips = [r.find(SVG + "title").text for r in root.iter(SVG + "rect") if r.find(SVG + "title") is not None]
        self.assertEqual(len(tips), 4)
        self.assertRegex(tips[3], r"^\[32:64, 24:48\] of rank 3\ndata/\w+-r3.safetensors at \d+, 3072 bytes\nhash \w{32}$")
        # The boxes are the four quarters of the panel.
        def geometry(rects):
            return [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in rects]
        rects = list(root.iter(SVG + "rect"))
        ((left, top, width, height),) = geometry(r for r in rects if r.get("fill") == "#eee")
        boxes = geometry(r for r in rects if r.find(SVG + "title") is not None)
        self.assertEqual({box[:2] for box in boxes},
                         {(left + right * width / 2, top + down * height / 2)
                          for right in (0, 1) for down in (0, 1)})
        self.assertEqual({box[2:] for box in boxes}, {(width / 2, height / 2)})
        labels = [t.text for t in root.iter(SVG + "text")]
        for wanted in ["w", "rank 0", "[0:32, 0:24]", "axis 0 ↓", "axis 1 →", "24", "Held by"]:
            self.assertIn(wanted, labels)
        self.assertNotIn("href", text)
        self.assertEqual(self.svg(path, "w"), text)
        self.assertEqual(self.run_tool("layout", path, "w", "--svg", "-").stdout, text)

    def test_only_regular_files_are_replaced(self):
        path = self.save("a")
        folder, pipe, link, other = (self.dir / name for name in ("folder", "pipe", "link.svg", "link.svg.new"))
        folder.mkdir()
        os.mkfifo(pipe)
        (self.dir / "real.svg").write_text("old")
        link.symlink_to("real.svg")
        other.write_text("the user's")
        for option in ("--svg", "--html"):
            for taken in (folder, pipe, self.store):
                before = sorted(self.dir.iterdir())
                self.fails("layout", path, "w", option, taken, code="INVALID_ARGUMENT", says="not a regular file")
                self.assertEqual(sorted(self.dir.iterdir()), before)
        self.assertTrue(folder.is_dir() and pipe.is_fifo() and (self.store / "store.json").is_file())
        self.run_tool("layout", path, "w", "--svg", link)
        self.assertTrue(link.is_symlink() and (self.dir / "real.svg").read_text().startswith("<"))
        self.assertEqual(other.read_text(), "the user's")

    def test_html_escapes_keys(self):
        harness.write_safetensors(self.model, {"a<b>&\"'\n\x01": ("F32", (2,), bytes(8))})
        file = self.dir / "report.html"
        out = self.run_tool("layout", self.model, "a<b>&\"'\n\x01", "--html", file).stdout
        self.assertIn("report.html: 1 chunk of", out)
        text = file.read_text()
        self.assertIn("<h1>a&lt;b&gt;&amp;&quot;'��</h1>", text)
        self.assertIn("<svg ", text)
        self.assertNotRegex(text, r"(src|href)=")
        html.parser.HTMLParser().feed(text)
        ET.fromstring(text[text.index("<svg"):text.index("</svg>") + 6])

    def test_thousands_of_chunks_are_merged_in_the_drawing(self):
        subprocess.run([harness.BIN / "tests" / "save_chunks", self.store, "many"], check=True, timeout=60)
        path = self.store / "many"
        text = self.svg(path, "one")
        root = ET.fromstring(text)
        self.assertLess(len(text), 100_000)
        self.assertLess(len(list(root.iter(SVG + "text"))), 100)
        self.assertIn("5000 boxes: the picture is reduced to", text)
        picture = self.text(path, "one")
        self.assertLess(len(picture.splitlines()), 100)
        self.assertRegex(picture, r"(?m)^[\d]+ of 5000 boxes are too small to be seen$")
        self.assertIn("... and 4960 more chunks", picture)
        self.assertRegex(picture, r"(?m)^5000 └─+┘$")
        (layout,) = self.json_lines("layout", path, "one")
        self.assertEqual(len(layout["chunks"]), 5000)
        self.assertEqual(self.text(path, "one", "-v").count("data/"), 5000)
        self.assertIn("down: axis 1, across: axis 2\naxis 0 (3) is not cut", self.text(path, "few"))

    def test_adjacent_chunks_of_one_rank_are_merged(self):
        subprocess.run([harness.BIN / "tests" / "save_chunks", self.store, "many", "1"], check=True, timeout=60)
        text = self.svg(self.store / "many", "few")
        self.assertEqual(text.count("chunks drawn as one"), 1)
        self.assertIn("rank 0: 400 chunks drawn as one, from [0:3, 0:1, 0:4]", text)


if __name__ == "__main__":
    harness.main()
