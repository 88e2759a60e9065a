# SPDX-License-Identifier: Apache-2.0
"""tensormount publish, on stagings whose tensors have no bytes: they need no mount."""

import json
import threading
import time
import unittest

import harness

SCHEMA = {"tensors": {"e": {"dtype": "f32", "shape": [0, 4]}}, "writers": 2}


class PublishTest(harness.ToolTest):
    def staging(self, name, schema):
        """As docs/format.md, "Staging of mounts", says."""
        if not self.store.exists():
            self.save("first")
        folder = self.store / ".staging" / name
        folder.mkdir(parents=True)
        for part in ("data", "manifest", "journal", "schema", "done", "common"):
            (folder / part).mkdir()
        uuid = f"{len(name):032x}"
        (folder / "UUID").write_text(uuid)
        (folder / "lock").touch()
        (folder / "schema" / "00000000000000aa-0.json").write_text(json.dumps(schema))
        (folder / "common" / "00000000000000aa-0.json").write_text('{"iteration": 7}')
        (folder / "staging.json").write_text(json.dumps(
            {"name": name, "uuid": uuid, "generation": 9, "parent": "0" * 32, "parent_name": ""}))
        return folder

    def mark(self, folder, rank):
        new = folder / "done" / ".new"
        new.write_text(json.dumps({"journal": "", "journal_bytes": 0}))
        new.rename(folder / "done" / str(rank))

    def test_publish_names_missing_marks_then_succeeds(self):
        folder = self.staging("step-2", SCHEMA)
        self.mark(folder, 0)
        result = self.run_tool("publish", folder, expect=2)
        self.assertIn("UNAVAILABLE: done marks are missing for 1 of 2 writers: 1", result.stderr)
        self.assertIn("--wait SECONDS", result.stderr)
        self.assertEqual(result.stdout, "writer 1: no done mark\n")
        (event,) = self.json_lines("publish", folder, expect=2)
        self.assertEqual(event["event"], "failed")
        self.assertEqual(event["code"], "UNAVAILABLE")
        self.assertEqual(event["writers_missing"], [1])
        self.assertEqual(json.loads((folder / "report.json").read_text())["problems"],
                         [{"code": "not_done", "object": "writer 1", "detail": "no done mark"}])

        late = threading.Timer(0.3, self.mark, (folder, 1))
        late.start()
        (event,) = self.json_lines("publish", folder, "--wait", 60)
        late.join()
        self.assertEqual(event["event"], "published")
        self.assertEqual(event["checkpoint"], str(self.store / "step-2"))
        self.assertEqual((event["tensors"], event["generation"], event["mounts"]), (1, 9, 0))
        self.run_tool("verify", self.store / "step-2")
        self.run_tool("gc", self.store, "--grace", "0")
        self.assertEqual(sorted(p.name for p in (self.store / "step-2").iterdir()),
                         ["COMMIT", "data", "index", "manifest"])
        self.assertFalse(folder.exists())

    def test_publish_as_another_name(self):
        folder = self.staging("step-2", {"tensors": SCHEMA["tensors"]})
        result = self.run_tool("publish", folder, "--as", "first", expect=2)
        self.assertIn("ALREADY_EXISTS", result.stderr)
        self.assertIn("--as NAME", result.stderr)
        self.run_tool("publish", folder, "--as", "latest", expect=2)
        result = self.run_tool("publish", folder, "--as", "other")
        self.assertIn(f"published {self.store}/other: 1 tensor,", result.stdout)

    def test_missing_tensors_are_listed(self):
        schema = {"tensors": {"w": {"dtype": "f32", "shape": [4, 4]}}, "objects": {"rng": {"grid": [2]}}}
        folder = self.staging("step-2", schema)
        result = self.run_tool("publish", folder, expect=2)
        self.assertEqual(result.stdout.splitlines(), [
            "object rng[0]: not written by any mount", "object rng[1]: not written by any mount",
            "tensor w [:, :]: written by no mount"])
        self.assertIn("DATA_LOSS: object rng[0]: not written by any mount (and 2 more problems)", result.stderr)
        self.assertTrue((folder / "report.txt").exists())

    def test_publish_refuses_paths_that_are_not_a_staging(self):
        self.save("first")
        for path in (self.store, self.store / "first", self.store / ".staging" / "none"):
            self.run_tool("publish", path, expect=2)
        (self.store / ".staging" / "x.01234567").mkdir(parents=True)
        result = self.run_tool("publish", self.store / ".staging" / "x.01234567", expect=2)
        self.assertIn("UNSUPPORTED", result.stderr)

    def test_publish_wait_times_out(self):
        folder = self.staging("step-2", SCHEMA)
        begin = time.monotonic()
        self.run_tool("publish", folder, "--wait", "0.5", expect=2)
        self.assertLess(time.monotonic() - begin, 20)


if __name__ == "__main__":
    unittest.main()
