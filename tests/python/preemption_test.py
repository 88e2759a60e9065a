# SPDX-License-Identifier: Apache-2.0
"""tm.preemption: what becomes of saves when a scheduler sends SIGTERM."""

import os
import shutil
import signal
import subprocess
import textwrap
import time
import unittest

import support
import tensormount as tm
from process_test import ALONE_OF_TWO, python

# slow: a background save of `seconds`, which its hook makes long.
BEGIN = """
import faulthandler, logging, os, signal, sys, time
import numpy, tensormount as tm
logging.basicConfig()
faulthandler.dump_traceback_later(45)

def train(seconds):
    # Short calls: a signal that reaches another thread does not end a call of the main thread.
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)

def slow(path, seconds, **how):
    def wait(report):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
    return tm.async_save({"w": numpy.ones(1000)}, path, before_publish=wait, **how)
"""


class Preemption(support.Folder):
    def setUp(self):
        super().setUp()
        shutil.rmtree("S", ignore_errors=True)

    def start(self, code):
        process = python(BEGIN + textwrap.dedent(ALONE_OF_TWO) + textwrap.dedent(code))
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "ready\n", "it did not begin")
        return process

    def terminated(self, code, status):
        process = self.start(code)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            self.fail(f"it did not end: {process.communicate()[1]}")
        self.assertEqual(process.returncode, status, err)
        return out, err, time.monotonic() - begin

    def names(self):
        return [one["checkpoint"] for one in tm.Store("S").list()]

    def test_a_save_under_way_is_finished_before_the_process_ends(self):
        _, err, took = self.terminated("""
            tm.save({"w": numpy.zeros(3)}, "S/step-1")
            tm.preemption(seconds=30)
            job = slow("S/step-2", 4)
            print("ready", flush=True)
            train(60)
            """, -signal.SIGTERM)
        self.assertEqual(self.names(), ["step-1", "step-2"])
        self.assertLess(took, 20)
        self.assertIn("save S/step-2: may go on for 28 s", err)
        self.assertRegex(err, "the latest checkpoint is .*S/step-2")

    def test_a_save_without_time_is_cancelled(self):
        _, err, took = self.terminated("""
            tm.save({"w": numpy.zeros(3)}, "S/step-1")
            tm.preemption(seconds=3)
            job = slow("S/step-2", 6)
            print("ready", flush=True)
            train(60)
            """, -signal.SIGTERM)
        self.assertEqual(self.names(), ["step-1"])
        self.assertGreater(took, 0.9)
        self.assertIn("cancelled for lack of time: save S/step-2", err)
        self.assertRegex(err, "the latest checkpoint is .*S/step-1")

    def test_a_waiting_save_is_interrupted(self):
        """One that the main thread waits for; the other rank never comes."""
        _, err, took = self.terminated("""
            group = alone_of_two()
            tm.preemption(seconds=3)
            tm.save({"w": numpy.zeros(3)}, "S/never", group, on_event=lambda _: print("ready", flush=True))
            """, -signal.SIGTERM)
        self.assertLess(took, 20)
        self.assertIn("cancelled for lack of time: save S/never", err)
        self.assertFalse(os.path.exists("S/never"))

    def test_the_earlier_handler_is_called_at_once(self):
        """It makes the program save once more and end, as trainers do."""
        out, err, took = self.terminated("""
            stop = []
            signal.signal(signal.SIGTERM, lambda signum, frame: stop.append(time.monotonic()))
            tm.preemption(seconds=30)
            first = slow("S/step-1", 5)
            print("ready", flush=True)
            while not stop:
                time.sleep(0.01)
            print(first.done(), flush=True)
            tm.save({"w": numpy.ones(3)}, "S/step-2")
            first.wait()
            """, 0)
        self.assertEqual(out, "False\n")
        self.assertEqual(self.names(), ["step-1", "step-2"])
        self.assertLess(took, 20)

    def test_a_save_at_the_exit_is_limited_too(self):
        """The end of the interpreter would wait for ten minutes."""
        _, err, took = self.terminated("""
            signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(7))
            tm.preemption(seconds=3)
            job = slow("S/step-1", 6)
            print("ready", flush=True)
            train(60)
            """, 7)
        self.assertLess(took, 20)
        self.assertFalse(os.path.exists("S/step-1"))
        self.assertIn("cancelled for lack of time", err)

    def test_a_forked_worker_ends_at_once(self):
        process = self.start("""
            tm.preemption(seconds=30)
            job = slow("S/step-1", 3)
            child = os.fork()
            if child == 0:
                train(60)
                os._exit(1)
            time.sleep(0.3)  # A signal during the fork itself is lost in Python.
            os.kill(child, signal.SIGTERM)
            begin = time.monotonic()
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGTERM and time.monotonic() - begin < 2.5, status
            job.wait()
            print("ready", flush=True)
            """)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertEqual(self.names(), ["step-1"])

    def test_undo_puts_the_handler_back(self):
        before = signal.getsignal(signal.SIGTERM)
        with tm.preemption(seconds=30):
            self.assertNotEqual(signal.getsignal(signal.SIGTERM), before)
        self.assertEqual(signal.getsignal(signal.SIGTERM), before)
        one = tm.preemption(seconds=30, signum=signal.SIGUSR1)
        other = signal.signal(signal.SIGUSR1, lambda *_: None)
        one.undo()  # A handler that was set meanwhile stays.
        self.assertNotEqual(signal.getsignal(signal.SIGUSR1), signal.SIG_DFL)
        one.undo()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self.assertEqual(other, one._handle)

    def test_bad_limits_are_refused(self):
        for seconds in (0, -1, 2, float("nan")):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "above 2"):
                tm.preemption(seconds=seconds)
        for wrong in ("x", None, [30]):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "seconds=.* a number above 2"):
                tm.preemption(wrong)
        for wrong in (0, "x", None, 1000):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "signum=.* a signal"):
                tm.preemption(30, signum=wrong)
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)


if __name__ == "__main__":
    unittest.main()
