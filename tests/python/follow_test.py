# SPDX-License-Identifier: Apache-2.0
"""Store.follow, and `tensormount watch` beside it: each publish is reported exactly once.

TENSORMOUNT_TEST_SCALE multiplies the publishes (34: 2,000), TENSORMOUNT_TEST_SEED repeats them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest

import support
import tensormount as tm


class Follow(support.Folder):
    def test_published_checkpoints_come_in_order(self):
        store = tm.Store("S")
        with store.follow(timeout=20) as steps:  # The store does not exist yet.
            for n in (1, 2):
                tm.save({"n": n}, f"S/step-{n}")
            one, two = next(steps), next(steps)
        listed = store.list()
        self.assertEqual([one["uuid"], two["uuid"]], [entry["uuid"] for entry in listed])
        self.assertEqual(sorted(one), ["checkpoint", "created", "derived", "generation", "nonfinite", "parent", "path",
                                       "removed", "uuid"])
        self.assertEqual((one["path"], two["parent"]), (os.path.realpath("S/step-1"), one["uuid"]))
        self.assertEqual(list(steps), [])  # Closed.
        steps.close()

    def test_since(self):
        store = tm.Store("SINCE")
        for n in (1, 2, 3):
            tm.save({"n": n}, f"SINCE/step-{n}")
        for since, expected in ((0, ["step-1", "step-2", "step-3"]), (2, ["step-3"]), ("step-1", ["step-2", "step-3"])):
            with store.follow(since=since, timeout=20) as steps:
                self.assertEqual([next(steps)["checkpoint"] for _ in expected], expected)
        with store.follow(timeout=0) as steps, self.assertRaisesRegex(TimeoutError, "SINCE: no checkpoint was published"):
            next(steps)
        with self.assertRaisesRegex(tm.CheckpointNotFoundError, "step-9: no such checkpoint"):
            store.follow(since="step-9")
        for wrong in (-1, 1.5, True, b"step-1", ""):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "since="):
                store.follow(since=wrong)
        for wrong in (-1, "1", float("nan")):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "timeout="):
                store.follow(timeout=wrong)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "is a checkpoint; watch the store"):
            tm.Store("SINCE/step-1").follow()

    def test_interrupt_ends_the_wait(self):
        script = ("import signal, sys, tensormount as tm\n"
                  "print('begun', flush=True)\n"
                  "for step in tm.Store('none').follow(): pass\n")
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True)
        with child:
            self.assertEqual(child.stdout.readline(), "begun\n")
            time.sleep(0.1)
            begin = time.monotonic()
            child.send_signal(signal.SIGINT)
            errors = child.communicate(timeout=20)[1]
            self.assertLess(time.monotonic() - begin, 20)
        self.assertIn("KeyboardInterrupt", errors)

    def test_close_ends_the_wait_of_another_thread(self):
        steps = tm.Store("none").follow()
        ended = []
        thread = threading.Thread(target=lambda: ended.append(list(steps)), daemon=True)
        thread.start()
        steps.close()
        thread.join(20)
        self.assertEqual(ended, [[]])

    def test_child_process_cannot_use_it(self):
        with tm.Store("S").follow() as steps:
            child = os.fork()
            if child == 0:
                try:
                    next(steps)
                except tm.UnsupportedError:
                    os._exit(0)
                os._exit(1)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_each_publish_is_reported_once(self):
        """With replaced names, prunes, removals, renames and copies between."""
        chance, seed = support.seeded()
        store = tm.Store("MANY")
        publishes = support.scaled(60)
        tm.save({"n": 0}, "MANY/step-0")
        command = subprocess.Popen([support.command(), "-v", "watch", "MANY", "--json"], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(command.wait, 20)
        self.addCleanup(command.kill)
        self.assertIn("watching", command.stderr.readline())
        told, expected = [], []
        with store.follow(timeout=60) as steps:
            followed = []

            def follow():
                for step in steps:
                    followed.append(step)
                    if step["checkpoint"] == "last":
                        break

            thread = threading.Thread(target=follow, daemon=True)
            thread.start()
            for n in range(1, publishes + 1):
                names = [entry["checkpoint"] for entry in store.list()]
                kind = chance.random()
                name = chance.choice(names) if names and kind < 0.3 else f"step-{n}"
                expected.append(tm.save({"n": n}, f"MANY/{name}", replace=True)["uuid"])
                kind = chance.random()
                if kind < 0.15:
                    store.prune(f"last={chance.randint(1, 3)}")
                elif kind < 0.3:
                    os.rename(f"MANY/{name}", f"MANY/moved-{n}")
                elif kind < 0.4:
                    store.remove(name)
                    store.gc(grace=0)
                elif kind < 0.5:
                    shutil.copytree(f"MANY/{name}", f"MANY/copy-{n}", copy_function=os.link)
            expected.append(tm.save({"n": 0}, "MANY/last")["uuid"])
            thread.join(60)
            self.assertFalse(thread.is_alive(), f"seed {seed}: {len(followed)} of {len(expected)}")
            while not told or told[-1]["uuid"] != expected[-1]:
                told.append(json.loads(command.stdout.readline()))
        for reported in (followed, told):
            uuids = [step["uuid"] for step in reported]
            self.assertEqual(sorted(uuids), sorted(expected), f"seed {seed}")
            self.assertEqual(uuids, expected, f"seed {seed}")
        command.send_signal(signal.SIGTERM)
        self.assertEqual(command.communicate(timeout=20), ("", ""))
        self.assertEqual(command.returncode, 143)


if __name__ == "__main__":
    unittest.main()
