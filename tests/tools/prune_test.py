# SPDX-License-Identifier: Apache-2.0
"""tensormount prune, pin, unpin, rm --force, import --retain and --ephemeral."""

import json
import os
import subprocess
import threading
import time

import harness


class PruneTest(harness.ToolTest):
    def names(self):
        return [line["checkpoint"] for line in self.json_lines("ls", self.store)]

    def steps(self, count):
        for step in range(1, count + 1):
            self.save(f"step-{step}")

    def test_prune_applies_command_line_rules(self):
        self.steps(6)
        dry = self.run_tool("prune", self.store, "--keep-last", 2, "--keep-every", 3, "--dry-run")
        self.assertIn("would remove step-1: no rule keeps it\n", dry.stdout)
        self.assertIn("would keep step-3: step 3 is a multiple of 3\n", dry.stdout)
        self.assertIn("would keep step-6: the newest; one of the last 2; step 6 is a multiple of 3\n", dry.stdout)
        self.assertIn("3 checkpoints would be removed, 3 stay\n", dry.stdout)
        self.assertEqual(len(self.names()), 6)
        (document,) = self.json_lines("prune", self.store, "--rules", "last=2,every=3")
        self.assertEqual((document["removed"], document["rules"], document["dry_run"]), (3, "last=2,every=3", False))
        self.assertEqual([one["checkpoint"] for one in document["checkpoints"]], [f"step-{n}" for n in range(6, 0, -1)])
        self.assertEqual(self.names(), ["step-3", "step-5", "step-6"])
        self.run_tool("verify", self.store)
        self.run_tool("gc", self.store, "--grace", "0")
        self.run_tool("fsck", self.store)
        self.assertEqual(self.run_tool("prune", self.store).stdout,
                         "no rules: none were given, and the store has no policy (--set-policy sets one)\n"
                         "0 checkpoints removed, 3 stay\n")
        for wrong in (("--keep-last", "x"), ("--keep-every", "2d"), ("--keep-best", "loss:least:1"), ("--rules", "all")):
            self.assertIn("INVALID_ARGUMENT", self.run_tool("prune", self.store, *wrong, expect=2).stderr)
        self.assertEqual(len(self.names()), 3)

    def test_prune_applies_the_store_policy(self):
        self.steps(3)
        self.assertIn("no policy", self.run_tool("prune", self.store, "--show-policy").stdout)
        self.assertIn("--set-policy", self.run_tool("prune", self.store, "--set-policy", expect=2).stderr)
        self.run_tool("prune", self.store, "--keep-last", 2, "--keep-best", "eval.loss:min:1", "--set-policy")
        self.assertEqual(self.run_tool("prune", self.store, "--show-policy").stdout, "last=2,best=eval.loss:min:1\n")
        self.run_tool("fsck", self.store)
        self.assertEqual(len(self.names()), 3)
        self.run_tool("prune", self.store, "--keep-last", 2, "--set-policy")
        self.run_tool("prune", self.store)
        self.assertEqual(self.names(), ["step-2", "step-3"])
        (self.store / "policy.json").write_text("{")
        for rules in ((), ("--keep-last", 1)):
            self.assertIn("policy.json", self.run_tool("prune", self.store, *rules, expect=2).stderr)
        self.run_tool("prune", self.store, "--clear-policy")
        self.assertFalse((self.store / "policy.json").exists())
        self.assertEqual(self.names(), ["step-2", "step-3"])

    def test_empty_rule_values_are_refused(self):
        self.steps(4)
        for words in (("--keep-last", "", "--keep-every", 100), ("--rules", "", "--keep-last", 1), ("--rules", ""),
                      ("--keep-last", 1, "--keep-best", "")):
            self.assertIn("value of this option is empty", self.run_tool("prune", self.store, *words, expect=2).stderr)
        for words in (("--keep-last", 2, "--set-policy", "--dry-run"), ("--clear-policy", "--dry-run"),
                      ("--set-policy", "--clear-policy", "--keep-last", 2), ("--show-policy", "--keep-last", 2)):
            self.run_tool("prune", self.store, *words, expect=2)
        self.assertFalse((self.store / "policy.json").exists())
        self.assertEqual(len(self.names()), 4)
        for words in (("prune", self.store, "--keep-last=", "--dry-run"), ("pin", self.store / "step-1", "--reason=", "--json")):
            self.assertIn("the value of this option is empty", self.run_tool(*words, expect=2).stderr)
        self.run_tool("pin", self.store / "step-1", "--reason", "")

    def test_unreadable_checkpoint_is_kept_and_reported(self):
        self.steps(4)
        (self.store / "step-4" / "COMMIT").write_text("")
        done = self.run_tool("prune", self.store, "--keep-last", 2)
        self.assertIn("step-4: the checkpoint cannot be read, so no rule removes it", done.stderr)
        self.assertEqual(self.json_lines("prune", self.store, "--keep-last", 2)[0]["checkpoints"][-1]["unread"], True)

    def test_unreadable_pins_prevent_removal(self):
        self.steps(2)
        self.run_tool("pin", self.store / "step-1")
        pins = self.store / ".pins"
        pins.rename(self.store / ".kept")
        pins.write_text("")
        listed = self.run_tool("ls", "-l", self.store)
        self.assertIn("cannot read the pins", listed.stderr)
        self.assertIn(" ?   step-1", listed.stdout)
        self.assertEqual([line["pinned"] for line in self.json_lines("ls", "-l", self.store)], [None, None])
        self.run_tool("rm", self.store / "step-2", expect=2)
        self.assertEqual(len(self.names()), 2)

    def test_nothing_is_removed_when_the_newest_fails_verify(self):
        self.steps(3)
        data = next((self.store / "step-3" / "data").iterdir())
        data.unlink()
        failed = self.run_tool("prune", self.store, "--keep-last", 1, expect=2)
        self.assertIn("nothing is removed: step-3, the newest", failed.stderr)
        self.assertEqual(len(self.names()), 3)

    def test_pins_are_set_listed_and_removed(self):
        self.steps(3)
        self.run_tool("pin", self.store / "step-1", "--reason", "in the paper", "--expires", "90d")
        (pin,) = self.json_lines("pin", self.store)
        self.assertEqual((pin["name"], pin["reason"], pin["expired"]), ("step-1", "in the paper", False))
        self.assertAlmostEqual(pin["expires"], time.time() + 90 * 86400, delta=300)
        self.assertEqual([line["pinned"] for line in self.json_lines("ls", "-l", self.store)], [True, False, False])
        self.assertIn(" pin step-1", self.run_tool("ls", "-l", self.store).stdout)
        refused = self.run_tool("rm", self.store / "step-2", self.store / "step-1", expect=2)
        self.assertIn("PERMISSION_DENIED", refused.stderr)
        self.assertIn("in the paper", refused.stderr)
        self.assertIn("hint: remove the pin with `tensormount unpin`, or use `rm --force`", refused.stderr)
        self.assertEqual(len(self.names()), 3)
        self.run_tool("prune", self.store, "--keep-last", 1)
        self.assertEqual(self.names(), ["step-1", "step-3"])
        self.run_tool("unpin", self.store / "step-1")
        self.assertIn("NOT_FOUND", self.run_tool("unpin", self.store / "step-1", expect=2).stderr)
        self.run_tool("pin", self.store / "step-1")
        self.run_tool("rm", "--force", self.store / "step-1")
        self.assertEqual(self.names(), ["step-3"])
        self.assertEqual(self.json_lines("pin", self.store), [])

    def test_pin_expiry_times_are_parsed(self):
        self.steps(1)
        checkpoint = self.store / "step-1"
        for text, seconds in (("2027-01-31T12:00Z", 1801396800), ("2027-01-31T12:00:30Z", 1801396830),
                              ("2027-01-31Z", 1801353600), ("@1801353600", 1801353600)):
            (pin,) = self.json_lines("pin", checkpoint, "--expires", text)
            self.assertEqual(pin["expires"], seconds)
        for text in ("soon", "-1d", "1.5h", "@", "@x", "2027-13-01", "2027-01-31T12", "9" * 30 + "d", "5", "d",
                     "@0", "2027-02-30"):
            self.assertIn("INVALID_ARGUMENT", self.run_tool("pin", checkpoint, f"--expires={text}", expect=2).stderr, text)
        over = self.run_tool("pin", checkpoint, "--expires", "2001-01-01")
        self.assertIn("the pin does not protect the checkpoint", over.stderr)

    def test_import_prunes_with_retain(self):
        self.steps(3)
        (report,) = self.json_lines("import", self.store / "step-3", self.store / "step-4", "--retain", "last=2",
                                    "--ephemeral")
        # Rules do not count what is ephemeral.
        self.assertEqual((report["pruned"], report["not_pruned"]), (["step-1"], []))
        self.run_tool("import", self.store / "step-3", self.store / "step-5")
        self.assertEqual(self.names(), ["step-2", "step-3", "step-5"])
        failed = self.run_tool("import", self.store / "step-3", self.store / "step-6", "--retain", "all", expect=2)
        self.assertIn("--retain", failed.stderr)
        self.assertEqual(self.names(), ["step-2", "step-3", "step-5"])

    def test_concurrent_prunes_keep_the_newest(self):
        """They and a save at the same time: the newest stays."""
        self.steps(4)
        stop = threading.Event()
        ended = []

        def prune(rules):
            while not stop.is_set():
                done = subprocess.run([harness.TOOL, "prune", str(self.store), "--rules", rules], capture_output=True,
                                      text=True, timeout=60)
                ended.append((done.returncode, done.stderr))

        threads = [threading.Thread(target=prune, args=(rules,)) for rules in ("last=1", "every=2", "last=2,every=3")]
        for thread in threads:
            thread.start()
        try:
            for step in range(5, 9):
                self.save(f"step-{step}")
                self.run_tool("verify", self.store / f"step-{step}")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        self.assertIn("step-8", self.names())
        self.run_tool("verify", self.store / "step-8")
        self.assertTrue(ended)
        for status, told in ended:
            # What was verified may have gone, or the lock was held for long.
            self.assertTrue(status == 0 or any(word in told for word in ("NOT_FOUND", "STALE", "BUSY")), told)


if __name__ == "__main__":
    harness.main()
