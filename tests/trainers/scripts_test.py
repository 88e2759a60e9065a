# SPDX-License-Identifier: Apache-2.0
"""A script that only passes paths to torch.distributed.checkpoint, under torchrun and `python -m tensormount.patched`:
a rank is killed during a background save, and the script resumes."""

import json
import os
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "python"))

import support
import tensormount as tm

try:
    import torch  # noqa: F401
except ImportError as error:
    raise unittest.SkipTest(str(error))

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts_train.py")
STEPS = 5
LIMIT = 120.0


class Torchrun:
    """The script under torchrun, on `size` ranks."""

    def __init__(self, size, *arguments, patched=True):
        package = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.log = open(f"log-{arguments[-1]}", "w+")
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
             *(["-m", "tensormount.patched"] if patched else []), SCRIPT, *map(str, arguments)],
            stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})

    def wait(self):
        """The exit status of torchrun."""
        try:
            return self.agent.wait(LIMIT)
        finally:
            self.close()

    def close(self):
        if self.agent.poll() is None:
            os.killpg(self.agent.pid, signal.SIGKILL)  # With its ranks.
            self.agent.wait()

    def said(self):
        self.log.seek(0)
        return self.log.read()[-5000:]

    def pid(self, rank):
        """The process of a rank, which torchrun started in this order."""
        with open(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children") as file:
            return [int(pid) for pid in file.read().split() if is_rank(int(pid), rank)][0]


def is_rank(pid, rank):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"RANK={rank}".encode() in file.read().split(b"\0")


def staged(directory):
    """Whether a save to the directory has begun to write."""
    try:
        return bool(os.listdir(os.path.join(directory, ".staging")))
    except FileNotFoundError:
        return False


class Scripts(support.Folder):
    def torchrun(self, size, *arguments, **options):
        started = Torchrun(size, *arguments, **options)
        self.addCleanup(started.log.close)
        self.addCleanup(started.close)
        return started

    def results(self, started, name):
        self.assertEqual(started.wait(), 0, started.said())
        with open(name) as file:
            return json.load(file)

    def kill_in_a_save(self, started, out):
        """Kills rank 1 while the save of step 2 writes, or of a later step if that save is over too early; the step."""
        end = time.monotonic() + LIMIT
        for step in range(2, STEPS + 1):
            directory = os.path.join(out, f"step-{step}")
            while not staged(directory):
                self.assertIsNone(started.agent.poll(), started.said())
                self.assertLess(time.monotonic(), end, started.said())
                time.sleep(0.0005)
            victim = started.pid(1)
            os.kill(victim, signal.SIGSTOP)
            # If rank 1 has sent all that the save needs of it, rank 0 publishes the checkpoint alone.
            patience = time.monotonic() + 1
            while time.monotonic() < patience and not os.path.exists(os.path.join(directory, "tm-state")):
                time.sleep(0.01)
            if not os.path.exists(os.path.join(directory, "tm-state")):
                os.kill(victim, signal.SIGKILL)
                return step
            os.kill(victim, signal.SIGCONT)
        raise AssertionError(f"{STEPS - 1} saves were over before a rank could be killed")

    def test_resume_after_a_killed_save_is_exact(self):
        expected = self.results(self.torchrun(2, "stock", STEPS, "expected", patched=False), "expected")
        killed = self.torchrun(2, "out", STEPS, "never")
        step = self.kill_in_a_save(killed, "out")
        self.assertNotEqual(killed.wait(), 0)
        self.assertFalse(os.path.exists(f"out/step-{step}/tm-state"))
        self.assertTrue(tm.verify(f"out/step-{step - 1}/tm-state")["whole"])
        # On one rank the weights are those of the step; its losses are of fewer data.
        one = self.results(self.torchrun(1, "out", step - 1, "one"), "one")
        self.assertEqual(one, {"resumed": step - 1, "losses": {},
                               "digests": {str(step - 1): expected["digests"][str(step - 1)]}})
        two = self.results(self.torchrun(2, "out", STEPS, "two"), "two")
        self.assertEqual(two["resumed"], step - 1)
        self.assertEqual(two["digests"], {str(number): expected["digests"][str(number)]
                                          for number in range(step - 1, STEPS + 1)})
        self.assertEqual(two["losses"], {str(number): expected["losses"][str(number)]
                                         for number in range(step, STEPS + 1)})
        # Without the plug-in nothing of it is needed, or used.
        self.assertTrue(os.path.exists("stock/step-1/.metadata"))
        self.assertFalse(os.path.exists("out/step-1/.metadata"))


if __name__ == "__main__":
    unittest.main()
