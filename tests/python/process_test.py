# SPDX-License-Identifier: Apache-2.0
"""Saves and loads at the end of the process, under signals, and in forked children."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import unittest

import support
import tensormount as tm

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

LIMIT = 120.0  # Seconds after which a wait is a failure.


def python(code, **environment):
    """Another interpreter with the package that this one has."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, **environment})


class Processes(support.Folder):
    def finish(self, process, status=0):
        out, err = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, status, err)
        return out, err

    def test_interpreter_exit_waits_for_a_job(self):
        for end, status in (("pass", 0), ("raise SystemExit(0)", 0), ("raise ValueError", 1),
                            ("import os; os._exit(0)", 0)):
            process = python(f"""
                import numpy, tensormount as tm
                job = tm.async_save({{"w": numpy.ones(3_000_000)}}, "S/end-{status}-{len(end)}")
                other = tm.async_load({{"w": numpy.zeros(3)}}, "S/nothing")
                {end}
                """)
            _, err = self.finish(process, status)
            if "_exit" not in end:
                with tm.open(f"S/end-{status}-{len(end)}") as checkpoint:
                    self.assertEqual(float(checkpoint["w"][...].sum()), 3_000_000)
                self.assertRegex(err, "load S/nothing failed: CheckpointNotFoundError")

    def test_unobserved_failed_save_is_logged(self):
        tm.save({"w": np.ones(1)}, "S/taken", replace=True)
        begin = """
            import gc, logging, numpy, time, tensormount as tm
            job = tm.async_save({"w": numpy.ones(3)}, "S/taken")
            """
        loud = {"dropped at once": "job = None; time.sleep(1)",
                "dropped when it is over": "\n".join(("while not job.done(): pass", "            job = None")),
                "replaced": "job = tm.async_save({'w': numpy.ones(3)}, 'S/next', replace=True); job.wait()",
                "the end": "pass",
                "the end when it is over": "\n".join(("while not job.done(): pass",)),
                "an error": "raise ValueError('of the script')"}
        quiet = {"waited for": "\n".join(("try: job.wait()", "            except tm.AlreadyExistsError: pass")),
                 "asked": "\n".join(("while job.exception() is None: pass",)),
                 "in with": "\n".join(("try:", "                with job: pass",
                                       "            except tm.AlreadyExistsError: pass"))}
        for cases, lines in ((loud, 1), (quiet, 0)):
            for name, code in cases.items():
                with self.subTest(name):
                    _, err = self.finish(python(begin + code), 1 if name == "an error" else 0)
                    self.assertEqual(err.count("save S/taken failed: AlreadyExistsError"), lines, err)

    def test_exit_abandons_jobs_of_a_missing_rank(self):
        """A rank of two whose other one never comes: the save is lost, and that is said."""
        begin = textwrap.dedent(ALONE_OF_TWO) + """
group = alone_of_two()
job = tm.async_save({"w": numpy.zeros(3)}, "S/never", group, exit_wait=%s)
print("waiting", flush=True)
"""
        for wait, interrupt in ((0, False), (0.5, False), (60, True)):
            start = time.monotonic()
            process = python("import numpy, sys, tensormount as tm\n" + begin % wait)
            self.assertEqual(process.stdout.readline(), "waiting\n")
            if interrupt:
                time.sleep(0.7)
                process.send_signal(signal.SIGINT)
            _, err = self.finish(process)
            self.assertLess(time.monotonic() - start, 30)
            self.assertEqual("save S/never is lost" in err, wait > 0, err)
            self.assertFalse(os.path.exists("S/never"))
        with self.assertRaisesRegex(tm.InvalidArgumentError, "exit_wait"):
            tm.async_save({"w": np.zeros(3)}, "S/x", exit_wait=-1)

    def test_daemon_threads_may_save_until_exit(self):
        for _ in range(support.scaled(3)):
            self.finish(python("""
                import numpy, threading, time, tensormount as tm
                ends = False
                def save(number):
                    while True:
                        try:
                            tm.async_save({"w": numpy.ones(300_000)}, f"S/e{number}", replace=True)
                        except Exception:
                            if ends:
                                # A daemon thread that prints while the interpreter ends is fatal in CPython.
                                return
                            raise
                for number in range(2):
                    threading.Thread(target=save, args=(number,), daemon=True).start()
                time.sleep(0.3)
                ends = True
                """))

    def test_calls_work_without_a_new_thread(self):
        """At a limit, or at the end of the interpreter: the call is made all the same."""
        self.finish(python("""
            import threading, numpy, tensormount as tm
            group = tm.Group.single()
            tm.save({"w": numpy.ones(3)}, "T/x", group)
            def none(self):
                raise RuntimeError("can't start new thread")
            threading.Thread.start = none
            assert tm.verify("T/x")["whole"]
            assert tm.validate({"w": numpy.ones(3)}, group)["ok"]
            tm.export("T/x", "T.safetensors", group)
            group.close()
            """))

    def test_parent_group_can_be_closed_in_a_fork(self):
        self.finish(python("""
            import os, threading, numpy, tensormount as tm
            tm.save({"w": numpy.ones(1 << 24)}, "T/long")
            group, begun = tm.Group.single(), threading.Event()
            work = threading.Thread(target=lambda: tm.export(
                "T/long", "T.npy", group, format="npy", progress=lambda *_: begun.set()))
            work.start()
            begun.wait(60)
            child = os.fork()
            if child == 0:
                group.close()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            work.join()
            """))

    def test_mapping_guard_coexists_with_faulthandler(self):
        """The handler that was there before has what is not the library's."""
        out, err = self.finish(python("""
            import ctypes, faulthandler, mmap, os, numpy, tensormount as tm
            faulthandler.enable()
            tm.enable_mapping_guard()
            tm.save({"w": numpy.arange(1 << 16).reshape(256, 256)}, "G/guard")
            with tm.open("G/guard") as checkpoint:
                print(int(checkpoint["w"][:, 3].sum()), flush=True)
            with open("short", "wb") as file:
                file.truncate(4096)
            with open("short", "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 4096)
                file.truncate(0)
                mapped[0]
            """), -signal.SIGBUS)
        self.assertEqual(int(out), int(np.arange(1 << 16).reshape(256, 256)[:, 3].sum()))
        self.assertIn("Fatal Python error: Bus error", err)

    def test_exit_waits_for_a_slow_hook(self):
        self.finish(python("""
            import numpy, time, tensormount as tm
            tm.async_save({"w": numpy.ones(3)}, "S/slow", on_event=lambda event: time.sleep(0.2))
            """))

    def test_ctrl_c_ends_a_wait(self):
        """A rank of two whose other one never comes: Ctrl-C ends its wait at once, and the process
        without waiting for the time-out."""
        process = python("""
            import numpy, sys, tensormount as tm
            from tests_of_groups import alone_of_two
            group = alone_of_two()
            print("waiting", flush=True)
            try:
                tm.save({"w": numpy.zeros(3)}, "S/never", group)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """.replace("from tests_of_groups import alone_of_two", ALONE_OF_TWO))
        self.assertEqual(process.stdout.readline(), "waiting\n")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, _ = self.finish(process)
        self.assertEqual(out, "interrupted\n")
        self.assertFalse(os.path.exists("S/never"))

    def test_ctrl_c_ends_reads(self):
        """At once for who waits; and the reading ends, too, instead of going on for nobody."""
        process = python("""
            import json, os, signal, sys, threading, time
            import numpy, tensormount as tm
            tm.save({"w": numpy.zeros(1 << 27, "u1")}, "S/long", replace=True)
            before = threading.active_count()
            for call in (tm.verify, lambda path, **how: tm.diff(path, "S/long2", values=True, **how),
                         lambda path, **how: tm.export(path, "out", replace=True, **how)):
                if call is not tm.verify and not os.path.exists("S/long2"):
                    tm.save({"w": numpy.ones(1 << 27, "u1")}, "S/long2")
                def interrupt(done, total):
                    if done > 0:
                        os.kill(os.getpid(), signal.SIGINT)
                try:
                    call("S/long", progress=interrupt)
                    sys.exit("was not interrupted")
                except KeyboardInterrupt:
                    since = time.monotonic()
                while threading.active_count() > before:
                    assert time.monotonic() < since + 20, "still reads"
                    time.sleep(0.01)
            if os.path.exists("out"):  # On a busy machine the export may end before it is cancelled.
                with tm.open("out") as out:
                    assert (out["w"][:] == 0).all()
            """)
        self.finish(process)

    def test_ctrl_c_ends_the_close_of_a_saver(self):
        """Of which a save waits for a rank that never comes; it is cancelled."""
        process = python("""
            import numpy, sys, time, tensormount as tm
            from tests_of_groups import alone_of_two
            saver = tm.Saver(alone_of_two())
            job = saver.save({"w": numpy.zeros(3)}, "S/never")
            print("waiting", flush=True)
            try:
                saver.close()
            except KeyboardInterrupt:
                assert not saver.closed
                since = time.monotonic()
                print("interrupted", flush=True)
            saver.close()
            assert time.monotonic() < since + 20 and saver.closed
            print(type(job.exception()).__name__)
            """.replace("from tests_of_groups import alone_of_two", ALONE_OF_TWO))
        self.assertEqual(process.stdout.readline(), "waiting\n")
        time.sleep(0.3)
        since = time.monotonic()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.readline(), "interrupted\n")
        self.assertLess(time.monotonic() - since, 2)
        out, _ = self.finish(process)
        self.assertEqual(out, "CancelledError\n")
        self.assertFalse(os.path.exists("S/never"))

    def test_interpreter_exits_with_an_open_saver(self):
        for last in ("pass", "circle = [saver, job]; circle.append(circle)", "del saver, job", "raise SystemExit(0)"):
            for mode in (False, True):
                _, err = self.finish(python(f"""
                    import numpy, tensormount as tm
                    saver = tm.Saver(tm.Group.single(), stage_in_background={mode})
                    job = saver.save({{"w": numpy.zeros(1_000_000)}}, "S/saver", replace=True)
                    {last}
                    """))
                self.assertEqual(err, "")

    def test_forked_child_can_drop_the_parents_saver(self):
        self.finish(python("""
            import os, threading, numpy, tensormount as tm
            saver, go_on = tm.Saver(), threading.Event()
            job = saver.save({"w": numpy.ones(3)}, "F/parent", on_event=lambda event: go_on.wait(60))
            child = os.fork()
            if child == 0:
                try:
                    saver.save({"w": numpy.ones(3)}, "F/child")
                except tm.UnsupportedError as error:
                    assert "forked" in str(error), error
                    saver.close()
                    assert saver.closed
                    tm.Saver().save({"w": numpy.ones(3)}, "F/child").wait(60)
                    os._exit(7)
                os._exit(8)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            go_on.set()
            assert job.wait(60)["tensors"] == 1 and not saver.closed
            """))

    def test_exception_of_a_signal_handler_cancels_the_save(self):
        """Be it an Exception, as an alarm's: the save is cancelled, in the wait and while it begins."""
        for after, call in (
            (0.02, 'tm.save({"w": numpy.zeros(3)}, "A/x", on_event=lambda event: go_on.wait(60))'),
            # Copied in the call that begins it, for some 20 ms; it would go on without a job.
            (0.003, 'tm.async_save({"w": big}, "A/x")'),
            (0.02, 'tm.load({"w": numpy.zeros(3)}, "B/x", on_event=lambda event: go_on.wait(60))'),
        ):
            with self.subTest(call=call):
                out, _ = self.finish(python(f"""
                    import numpy, signal, threading, tensormount as tm
                    class Alarm(Exception): pass
                    def ring(*_): raise Alarm
                    signal.signal(signal.SIGALRM, ring)
                    go_on = threading.Event()
                    tm.save({{"w": numpy.ones(3)}}, "B/x", replace=True)
                    big = numpy.ones(30_000_000)
                    # Again, as Python ignores what is raised while it takes an object down.
                    signal.setitimer(signal.ITIMER_REAL, {after}, 2)
                    try:
                        print("over", {call})
                    except Alarm:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        print("alarm")
                    go_on.set()
                    """))
                self.assertEqual(out, "alarm\n")
                self.assertFalse(os.path.exists("A/x"))

    def test_forked_children_can_save_and_load(self):
        tm.save({"w": np.arange(10)}, "S/forked")
        group = tm.Group.single()
        checkpoint = tm.open("S/forked")
        job = tm.async_save({"w": np.zeros(2_000_000)}, "S/meanwhile", group)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (lambda: tm.save({}, "S/child", group), lambda: job.wait(1)):
                    try:
                        call()
                        os._exit(2)
                    except tm.UnsupportedError as error:
                        assert "forked" in str(error), error
                # An open checkpoint is opened again, the same one.
                assert int(checkpoint["w"][3]) == 3 and checkpoint.keys() == ["w"]
                with tm.open("S/forked") as mine:
                    assert int(mine["w"][3]) == 3
                tm.save({"w": np.ones(3)}, "S/of-child")
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        self.assertEqual(status, 0)
        job.wait(LIMIT)
        self.assertEqual(int(checkpoint["w"][3]), 3)
        names = {entry["checkpoint"] for entry in tm.Store("S").list()}
        self.assertLessEqual({"forked", "meanwhile", "of-child"}, names)


# A group of two ranks of which this is the second; nobody is the first.
ALONE_OF_TWO = """
            import ctypes
            from tensormount import _abi, _group
            def alone_of_two():
                lib, found = _abi.library(), []
                token = ctypes.create_string_buffer(32)
                for _ in range(2):
                    tcp = ctypes.c_void_p()
                    assert lib.tm_tcp_listen(None, ctypes.addressof(tcp)) == 0
                    found.append(tcp)
                texts = (ctypes.c_char_p * 2)(*(lib.tm_tcp_address(tcp.value) for tcp in found))
                out = ctypes.c_void_p()
                assert lib.tm_tcp_connect(found[1].value, ctypes.addressof(texts), 1, 2,
                                          ctypes.addressof(token), 32, ctypes.addressof(out)) == 0
                return tm.Group(out.value, owner=found)
"""


if __name__ == "__main__":
    unittest.main()
