# SPDX-License-Identifier: Apache-2.0
"""tensormount copy, and what ls -l, info and verify say of checkpoints that share files."""

import json
import os
import signal
import subprocess
import time
import unittest

import harness


def files_below(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class CopyTest(harness.ToolTest):
    def setUp(self):
        super().setUp()
        self.other = self.dir / "OTHER"
        for name in ("step-1", "step-2"):
            self.save(name)

    def share(self, name, of):
        """A checkpoint of the store that has all files of another one: as `cp -al` makes it."""
        subprocess.run(["cp", "-al", self.store / of, self.store / name], check=True)

    def cost(self, name):
        """What du would see: all bytes, and those that no other checkpoint has."""
        others = {os.stat(path).st_ino for other in self.store.iterdir()
                  if other.is_dir() and not other.name.startswith(".") and other.name != name
                  for path in other.rglob("*") if path.is_file()}
        stats = [os.stat(path) for path in (self.store / name).rglob("*") if path.is_file()]
        return sum(st.st_size for st in stats), sum(st.st_size for st in stats if st.st_ino not in others)

    def test_ls_reports_the_costs_on_disk(self):
        self.share("twin", "step-1")
        for entry in self.json_lines("ls", "-l", self.store):
            name = entry["checkpoint"]
            self.assertEqual((entry["stored_bytes"], entry["own_bytes"]), self.cost(name))
            self.assertEqual(entry["shared_bytes"], entry["stored_bytes"] - entry["own_bytes"])
            (info,) = self.json_lines("info", self.store / name)
            self.assertEqual({key: info[key] for key in ("stored_bytes", "own_bytes", "shared_bytes", "created")},
                             {key: entry[key] for key in ("stored_bytes", "own_bytes", "shared_bytes", "created")})
            twins = {"twin": "step-1", "step-1": "twin"}
            self.assertEqual([one["checkpoint"] for one in info["shared_with"]],
                             [twins[name]] if name in twins else [])
        total = {os.stat(p).st_ino: os.stat(p).st_size for name in ("step-1", "step-2", "twin")
                 for p in (self.store / name).rglob("*") if p.is_file()}
        (info,) = self.json_lines("info", self.store)
        self.assertEqual(info["stored_bytes"], sum(total.values()))
        self.assertEqual(info["shared_bytes"], self.cost("twin")[0])
        self.assertEqual((info["trash_bytes"], info["staging_bytes"]), (0, 0))
        lines = self.run_tool("ls", "-l", self.store).stdout.splitlines()
        self.assertRegex(lines[0], r"^ +1 \d{4}-\d\d-\d\d \d\d:\d\d +[\d.]+ MB +0 B +step-1$")
        self.assertRegex(lines[1], r"^ +2 \d{4}-\d\d-\d\d \d\d:\d\d +([\d.]+ MB) +\1 latest +step-2$")
        text = self.run_tool("info", self.store / "twin").stdout
        self.assertRegex(text, r"\nstored +[\d.]+ MB, 0 B of them only in this checkpoint\nshared +[\d.]+ MB in \d+ files with step-1\n")
        self.assertRegex(self.run_tool("info", self.store).stdout, r"\nstored +[\d.]+ MB, [\d.]+ MB of them shared")

    def test_damaged_shared_file_names_all_checkpoints(self):
        self.share("twin", "step-1")
        file = sorted(self.store.glob("step-1/data/*"))[0]
        name = f"data/{file.name}"
        file.chmod(0o644)
        with open(file, "r+b") as out:
            out.seek(20_000)
            byte = out.read(1)
            out.seek(20_000)
            out.write(bytes([byte[0] ^ 1]))
        file.chmod(0o444)
        out = self.run_tool("verify", self.store / "twin", expect=1).stdout
        self.assertIn(f"twin: {name}: the same file is part of step-1, which is damaged too\n", out)
        damages = [line for line in self.json_lines("verify", self.store, expect=1) if line["event"] == "damage"]
        self.assertEqual({line["checkpoint"]: line["shared_with"] for line in damages},
                         {"twin": ["step-1"], "step-1": ["twin"]})
        out = self.run_tool("fsck", self.store, "--read-data", expect=1).stdout
        self.assertIn("; the same file is in step-1", out)
        self.assertIn("; the same file is in twin", out)
        found = [line for line in self.json_lines("fsck", self.store, "--read-data", expect=1)
                 if line["event"] == "finding" and line["damage"]]
        self.assertEqual([line["shared_with"] for line in found], [["twin"], ["step-1"]])

    def test_copy_copies_checkpoints(self):
        out = self.run_tool("copy", self.store / "step-1", self.store / "latest", self.other).stdout
        self.assertRegex(out, rf"^copied {self.other}/step-1: [\d.]+ MB copied\n"
                              rf"copied {self.other}/step-2: [\d.]+ MB copied\n$")
        for name in ("step-1", "step-2"):
            self.assertEqual(files_below(self.store / name), files_below(self.other / name))
            self.run_tool("verify", self.other / name)
        self.run_tool("fsck", self.other)
        self.assertIn("already in the store, skipped", self.run_tool("copy", self.store, self.other).stdout)
        events = self.json_lines("copy", self.store, self.other, "--limit-rate", "1GB")
        self.assertEqual([(e["event"], e["checkpoint"]) for e in events], [("there", "step-1"), ("there", "step-2")])
        self.assertEqual(self.run_tool("copy", "-q", self.store, self.other).stdout, "")

    def test_copy_reports_the_other_name_at_the_destination(self):
        self.run_tool("copy", self.store / "step-1", self.other)
        (self.other / "step-1").rename(self.other / "renamed")
        result = self.run_tool("copy", self.store / "step-1", self.other, expect=2)
        self.assertIn("ALREADY_EXISTS", result.stderr)
        self.assertIn("renamed: the store already has this checkpoint under this other name", result.stderr)

    def test_invalid_copies_are_refused(self):
        self.assertIn("INVALID_ARGUMENT", self.run_tool("copy", self.store, self.store, expect=2).stderr)
        self.assertIn("NOT_FOUND", self.run_tool("copy", self.store / "step-9", self.other, expect=2).stderr)
        self.assertIn("--limit-rate", self.run_tool("copy", self.store, self.other, "--limit-rate", "fast",
                                                    expect=2).stderr)
        self.assertFalse(self.other.exists())
        file = sorted(self.store.glob("step-2/data/*"))[0]
        file.chmod(0o644)
        with open(file, "r+b") as out:
            out.write(b"?")
        result = self.run_tool("--json", "copy", self.store, self.other, expect=2)
        events = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual([(e["event"], e.get("code")) for e in events], [("copied", None), ("failed", "DATA_LOSS")])
        self.assertIn(f"data/{file.name}", events[1]["message"])
        self.assertIn("DATA_LOSS", result.stderr)
        self.assertFalse((self.other / "step-2").exists())
        self.run_tool("adopt", self.model, self.store / "adopted")
        self.assertIn("UNSUPPORTED", self.run_tool("copy", self.store / "adopted", self.other, expect=2).stderr)

    def test_interrupted_copy_is_resumed(self):
        for how in (signal.SIGINT, signal.SIGKILL):
            process = subprocess.Popen([harness.TOOL, "copy", self.store / "step-1", self.other, "--limit-rate", "1MB"],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not list(self.other.glob(".staging/.copy-*/*")):
                time.sleep(0.01)
            time.sleep(0.3)
            process.send_signal(how)
            _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 130 if how == signal.SIGINT else -how, err)
            if how == signal.SIGINT:
                self.assertIn("run the same command again to continue", err)
            self.assertFalse((self.other / "step-1").exists())
            self.assertEqual(len(list(self.other.glob(".staging/.copy-*"))), 1)
        self.run_tool("copy", self.store / "step-1", self.other)
        self.assertEqual(files_below(self.store / "step-1"), files_below(self.other / "step-1"))
        self.assertEqual(list(self.other.glob(".staging/.copy-*")), [])


if __name__ == "__main__":
    unittest.main()
