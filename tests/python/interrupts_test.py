# SPDX-License-Identifier: Apache-2.0
"""What signal handlers, finalizers and other threads do in the middle of a call: ask for the same job, end
what it uses, fork."""

import ctypes
import gc
import os
import sys
import threading
import time
import unittest
from unittest import mock

import support
import tensormount as tm
from process_test import LIMIT, python
from tensormount import _abi, _group, _tasks

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))


class Interrupts(support.Folder):
    def finish(self, code, status=0):
        process = python("""
            import faulthandler, gc, os, signal, sys, threading, time
            import numpy, tensormount as tm
            faulthandler.dump_traceback_later(60, exit=True)
            """ + code)
        self.addCleanup(process.kill)
        out, err = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, status, err)
        return out, err

    def test_signal_handler_may_query_a_finishing_job(self):
        """While it is taken, and while what the job held goes."""
        self.finish("""
            from tensormount import _load, _save
            asked = []
            def ask(*_):
                if len(asked) > 8:
                    return
                asked.append(True)
                assert job.done() and job.exception() is None
                job.cancel()
                asked.append(job.wait(60))
            signal.signal(signal.SIGUSR1, ask)
            for name, kind in (("_report", _save.SaveJob), ("_loaded", _load.LoadJob)):
                def interrupted(*given, take=kind._take_report):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    taken = take(*given)
                    os.kill(os.getpid(), signal.SIGUSR1)
                    return taken
                kind._take_report = interrupted
            class Asks:
                def __del__(self):
                    ask()
            def hook(event, held=None): pass
            job = tm.async_save({"w": numpy.ones(3), "step": 3}, "S/asked", on_event=hook)
            assert job.wait(60)["tensors"] == 1 and len(asked) >= 2
            del asked[:]
            state = {"w": numpy.zeros(3), "step": 0}
            job = tm.async_load(state, "S/asked")
            loaded = job.wait(60)
            assert loaded.state is state and state["step"] == 3 and float(state["w"].sum()) == 3, state
            assert all(one is True or one.state is state for one in asked) and asked
            # Of what the job held the last reference goes.
            del asked[:]
            asks = Asks()
            job = tm.async_save({"w": numpy.ones(3)}, "S/held", on_event=lambda event, asks=asks: None)
            del asks
            assert job.wait(60)["tensors"] == 1 and asked
            """)

    def test_signal_handlers_at_any_moment_are_safe(self):
        self.finish("""
            jobs = []
            def ask(*_):
                for job in jobs[-2:]:
                    job.done()
                    if len(jobs) % 3 == 0:
                        job.cancel()
                    if len(jobs) % 5 == 0:
                        job.exception()
            signal.signal(signal.SIGALRM, ask)
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            group, end = tm.Group.single(), time.monotonic() + 2
            state = {"w": numpy.ones(100), "step": 1}
            tm.save(state, "S/load", group)
            while time.monotonic() < end:
                for kind in (lambda: tm.async_save(state, "S/any", group, replace=True),
                             lambda: tm.async_load(state, "S/load", group)):
                    jobs.append(kind())
                    try:
                        jobs[-1].wait(60)
                    except tm.CancelledError:
                        pass
                tm.validate(state, group)
                jobs.append(tm.async_save(state, "S/any", group, replace=True))
                jobs.append(tm.async_load(state, "S/load", tm.Group.single()))
                jobs[-1].wait(60) if len(jobs) % 3 else None
                del jobs[:-6]
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(len(jobs))
            """)

    def test_threads_waiting_for_one_load_see_it_filled(self):
        """One of them fills the request, and it is the caller's when any of them has the verdict."""
        tm.save({"w": np.ones(3), **{f"v{i}": i for i in range(50)}}, "S/threads")
        before = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, before)
        sys.setswitchinterval(1e-5)
        for _ in range(support.scaled(10)):
            request = {"w": np.zeros(3), **{f"v{i}": -1 for i in range(50)}}
            job = tm.async_load(request, "S/threads")
            wrong = []

            def ask(request=request, job=job, wrong=wrong):
                loaded = job.wait(LIMIT)
                if loaded.state is not request or request["v49"] not in (49, "mine"):
                    wrong.append(request["v49"])
                request["v49"] = "mine"

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual((wrong, request["v49"]), ([], "mine"))

    def test_nested_waits_do_not_deadlock(self):
        self.finish("""
            from tensormount._tasks import OneTimeEvent
            once = OneTimeEvent()
            signal.signal(signal.SIGALRM, lambda *_: once.wait(0.0001))
            signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
            threading.Timer(1, once.set).start()
            while not once.wait(0.001):
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            """)
        once = _tasks.OneTimeEvent()
        threading.Timer(0.05, once.set).start()
        self.assertTrue(once.wait(LIMIT) and once.wait(0))

    def test_ctrl_c_while_a_thread_starts_is_raised(self):
        """Within Thread.start() threading may answer what a signal handler raises with an error of its own,
        though the thread runs: the call is made once, and what the handler raised is what the caller gets."""
        calls = []
        start = threading.Thread.start
        raised = [KeyboardInterrupt(), ValueError("a handler's"), KeyboardInterrupt()]
        for own, answer in zip(raised, (RuntimeError("release unlocked lock"), KeyError("a thread"), None)):

            def interrupted(thread, own=own, answer=answer):
                start(thread)
                try:
                    raise own
                finally:
                    if answer:
                        raise answer

            with mock.patch.object(threading.Thread, "start", interrupted), self.assertRaises(type(own)) as got:
                _tasks.run_in_background(calls.append)
            self.assertIs(got.exception, own)
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            try:
                raise ValueError("what the caller is busy with")
            except ValueError:
                self.assertEqual(_tasks.run_in_background(lambda task: 7), 7)
        deadline = time.monotonic() + LIMIT
        while len(calls) < len(raised) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.assertEqual(len(calls), len(raised))

    def test_memory_of_an_interrupted_call_lives_until_the_library_returns(self):
        """The library goes on after an exception has ended the call, and then writes its verdict."""
        freed = []

        class Verdict(ctypes.c_int32):
            def __del__(self):
                freed.append(ctypes.addressof(self))

        def interrupt(*_):
            raise KeyboardInterrupt

        for call in (
            lambda: tm.verify("S/a", progress=interrupt),
            lambda: tm.diff("S/a", "S/b", progress=interrupt),
            lambda: tm.copy(["S/a", "S/b"], "T", progress=interrupt),
            lambda: tm.repair("S/a", "T/a", progress=interrupt),
        ):
            go_on, returned = threading.Event(), threading.Event()

            def library(function, *arguments, go_on=go_on, returned=returned, **kinds):
                go_on.wait(LIMIT)
                returned.set()
                return b"{}"

            with mock.patch.object(ctypes, "c_int32", Verdict), mock.patch.object(_abi, "get_text", library):
                with self.assertRaises(KeyboardInterrupt):
                    call()
                gc.collect()
                self.assertEqual(freed, [])
                go_on.set()
                self.assertTrue(returned.wait(LIMIT))
            deadline = time.monotonic() + LIMIT
            while not freed and time.monotonic() < deadline:
                time.sleep(0.001)
            self.assertEqual(len(freed), 1)
            freed.clear()

    def test_library_may_be_opened_reentrantly(self):
        self.finish("""
            import ctypes
            opened = ctypes.CDLL
            def interrupted(*given, **more):
                ctypes.CDLL = opened
                tm.library_version()
                return opened(*given, **more)
            ctypes.CDLL = interrupted
            assert tm.library_version()
            """)

    def test_reentrant_mpi_initialization_is_refused(self):
        session = _group._MpiSession

        def begin(self):
            session.get()

        with mock.patch.object(session, "__init__", begin), self.assertRaisesRegex(tm.BusyError, "signal handler"):
            session.get()
        self.assertIs(session._one, None)
        self.assertFalse(session._begins)
        # A forked child of who has it leaves it alone.
        of_parent = session.__new__(session)
        of_parent.process, of_parent.lib, of_parent.address = os.getpid() + 1, None, 5
        of_parent._end()


class Closing(support.Folder):
    """A group is closed by another thread while a call makes ready."""

    finish = Interrupts.finish

    def test_close_is_safe_during_each_call(self):
        self.finish("""
            from collections.abc import Mapping
            def close(group):
                thread = threading.Thread(target=group.close)
                thread.start()
                thread.join(60)
                assert "closed" in repr(group), group
            class Closes(Mapping):
                def __init__(self, group, items):
                    self.group, self.given = group, items
                def __len__(self): return len(self.given)
                def __getitem__(self, key): return self.given[key]
                def __iter__(self):
                    close(self.group)
                    return iter(self.given)
            class Leaf(tm.Shards):
                @property
                def parts(self):
                    if self.group:
                        group, self.group = self.group, None
                        close(group)
                    return self.given
                @parts.setter
                def parts(self, parts):
                    self.group, self.given = None, parts
            def objects(group):
                close(group)
                yield "o"
            def validate(group):
                leaf = Leaf((3,), [((0,), numpy.ones(3))])
                leaf.group = group
                assert tm.validate({"w": leaf}, group)["ok"]
            def saver(group):
                made = tm.Saver(group)
                return made.save({"w": numpy.ones(3)}, "C/saver", objects=Closes(group, {"o": b"x"})).wait(60)
            tm.save({"w": numpy.ones(3)}, "C/first", objects={"o": b"x"}, replace=True)
            for number, call in enumerate((
                lambda group: tm.save({"w": numpy.ones(3)}, "C/saved", group,
                                      objects=Closes(group, {"o": b"x"})),
                lambda group: tm.async_save({"w": numpy.ones(3)}, "C/later", group,
                                            rank_objects=Closes(group, {"o": b"x"})).wait(60),
                lambda group: tm.load({"w": numpy.zeros(3)}, "C/first", group, objects=objects(group)),
                lambda group: tm.export("C/first", "out", group, format="npy",
                                        key_map=[Closes(group, {"prefix": "x", "to": ""})]),
                validate, saver,
            )):
                group = tm.Group.single()
                opened = getattr(group, "_open", None)
                call(group)
                gc.collect()
                assert "closed" in repr(group), number
                assert opened and not opened._uses and not opened._unfreed, (number, opened._uses)
                try:
                    tm.save({"w": numpy.ones(3)}, "C/none", group)
                    sys.exit("the group is closed")
                except tm.StaleError:
                    pass
            for path in ("C/saved", "C/later", "C/saver"):
                with tm.open(path) as checkpoint:
                    assert float(checkpoint["w"][...].sum()) == 3
            assert os.path.exists("out")
            """)

    def test_close_is_safe_at_any_moment(self):
        self.finish("""
            sys.setswitchinterval(1e-6)
            tm.save({"w": numpy.ones(3)}, "S/first", objects={"o": b"x"}, replace=True)
            def work(call):
                try:
                    while True:
                        call()
                except tm.StaleError:
                    pass
            for _ in range(20):
                group = tm.Group.single()
                threads = [threading.Thread(target=work, args=(call,)) for call in (
                    lambda: tm.save({"w": numpy.ones(3)}, "S/saved", group, replace=True),
                    lambda: tm.load({"w": numpy.ones(3)}, "S/first", group),
                    lambda: tm.validate({"w": numpy.ones(3)}, group))]
                for thread in threads:
                    thread.start()
                time.sleep(0.005)
                group.close()
                for thread in threads:
                    thread.join(60)
                    assert not thread.is_alive()
            """)


class Forks(support.Folder):
    finish = Interrupts.finish

    def test_forked_child_does_not_unmount_for_its_parent(self):
        with open("program", "w") as file:
            file.write("#!/bin/sh\necho \"$@\" >> calls\n")
        os.chmod("program", 0o755)
        self.finish("""
            faulthandler.cancel_dump_traceback_later()  # Its thread is not in the children.
            from tensormount._mount import Mount
            mnt = Mount("somewhere", os.path.abspath("program"), False)
            for way in ("exit", "with", "dropped"):
                child = os.fork()
                if child == 0:
                    if way == "with":
                        with mnt:
                            pass
                        os._exit(0)
                    if way == "dropped":
                        del mnt
                        os._exit(0)
                    sys.exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not os.path.exists("calls"), open("calls").read()
            mnt.close()
            assert open("calls").read() == "--json unmount somewhere\\n"
            """)


if __name__ == "__main__":
    unittest.main()
