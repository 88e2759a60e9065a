# SPDX-License-Identifier: Apache-2.0
"""How processes end that have saves under way, and which failures they tell of."""

import os
import signal
import textwrap
import time
import unittest

import support
import tensormount as tm
from process_test import ALONE_OF_TWO, LIMIT, python

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

# `job_of_two` waits for a rank that never comes; `slow` is a save that takes a second.
BEGIN = textwrap.dedent(ALONE_OF_TWO) + """
import logging, numpy, os, signal, sys, threading, time
import tensormount as tm

def job_of_two(name, **options):
    return tm.async_save({"w": numpy.zeros(3)}, "S/" + name, alone_of_two(), **options)

def slow(name, **options):
    first = []
    def once(event):
        if not first:
            first.append(event)
            time.sleep(1)
    return tm.async_save({"w": numpy.ones(3)}, "S/" + name, on_event=once, **options)
"""


class Ends(support.Folder):
    def start(self, code):
        process = python("import tensormount as tm\n" + BEGIN + textwrap.dedent(code))
        self.addCleanup(process.kill)
        return process

    def finish(self, process, status=0):
        out, err = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, status, err)
        return out, err

    def test_exception_of_a_signal_handler_cancels_at_exit(self):
        """Of SIGTERM, as of batch systems: the wait ends, the save is cancelled, and that is said."""
        process = self.start("""
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
            job, other = job_of_two("killed"), job_of_two("other")
            print("ends", flush=True)
            """)
        self.assertEqual(process.stdout.readline(), "ends\n")
        time.sleep(0.3)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)  # While it waits for what it has cancelled.
        _, err = self.finish(process)
        self.assertLess(time.monotonic() - begin, 20)
        for name in ("killed", "other"):
            self.assertRegex(err, rf"save S/{name} is lost: .*\(interrupted\)")
        self.assertNotIn("Traceback", err)

    def test_exit_does_not_wait_for_cancelled_jobs(self):
        """Nor is it called lost. What exit_wait=0 gives up is cancelled before others are waited for."""
        out, err = self.finish(self.start("""
            jobs = [job_of_two("cancelled", exit_wait=0.3), slow("long"), job_of_two("given-up", exit_wait=0)]
            jobs[0].cancel()
            import tensormount._jobs as inside
            cancel = inside._LibraryJob.cancel
            def told(live):
                print(live.label, os.path.exists("S/long"), flush=True)
                cancel(live)
            inside._LibraryJob.cancel = told
            """))
        self.assertIn("save S/given-up False\n", out)
        self.assertEqual(err, "")
        self.assertTrue(os.path.exists("S/long"))

    def test_exit_after_an_exception_waits_liveness_at_most(self):
        begin = time.monotonic()
        _, err = self.finish(self.start("""
            job = job_of_two("crashed", liveness=0.5)
            raise ValueError("of the script")
            """), 1)
        self.assertLess(time.monotonic() - begin, 20)
        self.assertRegex(err, "save S/crashed is lost: .*after an uncaught exception")
        # A save of this process alone waits for nobody.
        _, err = self.finish(self.start("""
            job = slow("alone", liveness=0.2)
            raise ValueError("of the script")
            """), 1)
        self.assertTrue(os.path.exists("S/alone"), err)

    def test_multiprocessing_children_can_save(self):
        """They end by os._exit(). A thread of theirs may still save."""
        for method in ("fork", "forkserver", "spawn"):
            with open("children.py", "w") as file:
                file.write(BEGIN + textwrap.dedent("""
                    import multiprocessing

                    def save(name):
                        def late():
                            time.sleep(0.3)
                            tm.async_save({"w": numpy.ones(300_000)}, f"S/{name}-late")
                        slow(name)
                        threading.Thread(target=late).start()

                    if __name__ == "__main__":
                        group = tm.Group.single()
                        tm.save({"w": numpy.ones(3)}, "S/parent", group, replace=True)
                        context = multiprocessing.get_context(sys.argv[1])
                        child = context.Process(target=save, args=(sys.argv[1],))
                        child.start()
                        child.join()
                        sys.exit(child.exitcode)
                    """))
            _, err = self.finish(python(f"""
                import sys
                sys.argv = ["children.py", "{method}"]
                sys.path.insert(0, "")
                exec(compile(open("children.py").read(), "children.py", "exec"))
                """) if method == "fork" else self.script("children.py", method))
            for name in (method, f"{method}-late"):
                self.assertTrue(os.path.exists(f"S/{name}"), f"{name}: {err}")

    def script(self, *arguments):
        return python(f"""
            import os, sys
            os.execv(sys.executable, [sys.executable, *{arguments!r}])
            """)

    def test_multiprocessing_is_not_imported(self):
        out, _ = self.finish(self.start("""
            tm.async_save({"w": numpy.ones(3)}, "S/plain", replace=True).wait()
            print(any(name.startswith("multiprocessing") for name in sys.modules))
            """))
        self.assertEqual(out, "False\n")


class Failures(support.Folder):
    """That nobody asked for."""

    finish, start = Ends.finish, Ends.start

    def test_finalizer_does_not_log(self):
        """It runs wherever the collector does: where a handler holds its lock, too."""
        tm.save({"w": np.ones(1)}, "S/taken")
        _, err = self.finish(self.start("""
            import gc
            class Handler(logging.StreamHandler):
                def emit(self, record):
                    with lock:
                        super().emit(record)
                        lines.append(record)
            lock, lines = threading.Lock(), []
            logging.getLogger().addHandler(Handler())
            job = tm.async_save({"w": numpy.ones(3)}, "S/taken")
            while not job.done(): pass
            circle = [job]
            circle.append(circle)
            with lock:  # As in the middle of a line of another thread.
                del job, circle
                gc.collect()
            job = tm.async_save({"w": numpy.ones(3)}, "S/next", replace=True)
            job.wait()
            # Without a thread to be had the next call tells.
            import _thread
            job, start = tm.async_save({"w": numpy.ones(3)}, "S/taken"), _thread.start_new_thread
            while not job.done(): pass
            def none(*_): raise RuntimeError
            _thread.start_new_thread = none
            with lock:
                del job
            _thread.start_new_thread = start
            job = tm.async_save({"w": numpy.ones(3)}, "S/next", replace=True)
            end = time.monotonic() + 20
            while len(lines) < 2 and time.monotonic() < end: time.sleep(0.01)
            print("told", file=sys.stderr)
            job.wait()
            """))
        self.assertEqual(err.count("save S/taken failed: AlreadyExistsError"), 2, err)
        self.assertEqual(err.split("told")[0].count("failed"), 2, err)

    def test_raised_failure_is_not_logged_again(self):
        tm.save({"w": np.ones(1)}, "S/raised")
        _, err = self.finish(self.start("""
            try:
                tm.async_save({"w": numpy.ones(3), "x": object()}, "S/own")
            except tm.UnsupportedError:
                pass
            with tm.Saver() as saver:
                try:
                    saver.save({"x": object()}, "S/own")
                except tm.UnsupportedError:
                    pass
            with tm.Saver(staging=1000, stage_in_background=True) as saver:
                job = saver.save({"w": numpy.zeros(1 << 18)}, "S/large")
                try:
                    job.wait_staged(60)
                except tm.ResourceExhaustedError:
                    pass
            """))
        self.assertEqual(err, "")


if __name__ == "__main__":
    unittest.main()
