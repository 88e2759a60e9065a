# SPDX-License-Identifier: Apache-2.0
"""Savers: background saves with memory of their own."""

import gc
import os
import pickle
import threading
import time
import unittest
import weakref

import support
import tensormount as tm

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

LIMIT = 120.0  # Seconds after which a wait is a failure.


class Savers(support.Folder):
    """`tm.Saver`. Where devices come into it: device_test.py."""

    def held_up(self):
        """What lets a save go on, and a hook that holds it up until then, or for a time."""
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        return go_on, lambda event: go_on.wait(10) or go_on.set()

    def value(self, path):
        with tm.open(path) as checkpoint:
            return float(checkpoint["w"][0])

    def test_saver_saves_like_async_save(self):
        weights, group = np.full(1000, 3.0), tm.Group.single()
        with tm.Saver(group) as saver:
            self.assertIs(saver.group, group)
            job = saver.save({"w": weights, "step": 3}, "S/step", objects={"o": b"same"},
                             rank_objects={"rng": b"mine"}, metadata={"run": "x"}, replace=True)
            weights[:] = 4
            self.assertEqual(job.wait(LIMIT)["tensors"], 1)
            with tm.open("S/step") as checkpoint:
                self.assertEqual((float(checkpoint["w"][9]), checkpoint.common["step"]), (3.0, 3))
                self.assertEqual((checkpoint.objects["o"], checkpoint.objects["rng", 0]),
                                 (b"same", b"mine"))
                self.assertEqual(checkpoint.metadata, {"run": "x"})
            with self.assertRaises(tm.AlreadyExistsError):
                saver.save({"w": weights}, "S/step").wait(LIMIT)
            # What this rank does wrong is raised here, and the next save is none the worse.
            with self.assertRaises(tm.UnsupportedError):
                saver.save({"w": weights, "x": object()}, "S/step", replace=True)
            with self.assertRaisesRegex(TypeError, "no option plcement"):
                saver.save({"w": weights}, "S/step", plcement="auto")
            with self.assertRaises(tm.InvalidArgumentError):
                saver.save({"w": weights}, "S/step\0")
            again = saver.save({"w": weights, "step": 5}, "S/step", replace=True).wait(LIMIT)
        self.assertGreater(again["generation"], job.wait()["generation"])
        self.assertEqual(self.value("S/step"), 4.0)

    def test_group_allows_two_savers(self):
        group = tm.Group.single()
        first, second = tm.Saver(group), tm.Saver(group)
        with self.assertRaisesRegex(tm.ResourceExhaustedError, "at most 2"):
            tm.Saver(group)
        first.close()
        second.close()
        first, second = tm.Saver(group), tm.Saver(group)
        jobs = [way({"w": np.full(10, number)}, f"S/way-{number}") for number, way in enumerate(
            (first.save, second.save, lambda state, path: tm.async_save(state, path, group)))]
        for number, job in enumerate(jobs):
            job.wait(LIMIT)
            self.assertEqual(self.value(f"S/way-{number}"), number)
        group.close()
        self.assertTrue(first.closed and second.closed)

    def test_staging_is_bounded(self):
        go_on, hook = self.held_up()
        with tm.Saver(staging=1 << 20) as saver:
            job = saver.save({"w": np.zeros(1 << 18)}, "S/large")
            for wait in (job.wait_staged, job.wait):
                with self.assertRaisesRegex(tm.ResourceExhaustedError, "2097152 .* allows 1048576"):
                    wait(LIMIT)
            self.assertFalse(os.path.exists("S/large"))
            # Two that fit, but not together.
            first = saver.save({"w": np.full(90_000, 1.0)}, "S/first", on_event=hook)
            threading.Timer(0.3, go_on.set).start()
            second = saver.save({"w": np.full(90_000, 2.0)}, "S/second")
            self.assertTrue(go_on.is_set())
            self.assertGreater(second.progress()["stalled_seconds"], 0.1)
            first.wait(LIMIT), second.wait(LIMIT)
        self.assertEqual((self.value("S/first"), self.value("S/second")), (1.0, 2.0))

    def test_background_staging_returns_at_once(self):
        go_on, hook = self.held_up()
        weights = np.full(1000, 3.0)
        with tm.Saver(stage_in_background=True) as saver:
            # The third waits for a lane, and its caller does not.
            held = [saver.save({"w": weights}, f"S/held-{number}", on_event=hook) for number in range(2)]
            job = saver.save({"w": weights}, "S/third")
            self.assertFalse(go_on.is_set())
            self.assertEqual(job.progress()["state"], "staging")
            with self.assertRaisesRegex(TimeoutError, "save S/third: not staged after 0.1 s"):
                job.wait_staged(timeout=0.1)
            go_on.set()
            job.wait_staged(LIMIT)
            weights[:] = 4
            for one in (*held, job):
                one.wait(LIMIT)
        self.assertEqual(self.value("S/third"), 3.0)

    def test_background_staging_keeps_arrays_alive(self):
        go_on, hook = self.held_up()
        with tm.Saver(stage_in_background=True) as saver:
            for number in range(4):  # Nobody else has the arrays, nor the jobs.
                saver.save({"w": np.full(1 << 17, number)}, f"L/{number}", on_event=hook)
            gc.collect()
            go_on.set()
        for number in range(4):
            self.assertEqual(self.value(f"L/{number}"), number)

    def test_close_waits_for_pending_saves(self):
        go_on, hook = self.held_up()
        saver = tm.Saver()
        job = saver.save({"w": np.ones(10)}, "S/closed", on_event=hook)
        closing = threading.Thread(target=saver.close)
        closing.start()
        closing.join(0.3)  # Meanwhile this thread has the interpreter.
        self.assertTrue(closing.is_alive())
        self.assertFalse(saver.closed)
        go_on.set()
        closing.join(LIMIT)
        self.assertTrue(saver.closed)
        self.assertTrue(os.path.exists("S/closed"))
        self.assertEqual(job.wait(LIMIT)["tensors"], 1)
        saver.close()
        self.assertIn("closed", repr(saver))
        with self.assertRaisesRegex(tm.ClosedError, "the saver is closed"):
            saver.save({"w": np.ones(10)}, "S/late")
        with self.assertRaises(tm.ClosedError), saver:
            pass
        # A block that raises waits, too; and verdicts that nobody has asked for are there afterwards.
        with self.assertRaises(ZeroDivisionError), tm.Saver() as saver:
            fine = saver.save({"w": np.ones(10)}, "S/raised")
            refused = saver.save({"w": np.ones(10)}, "S/raised")
            raise ZeroDivisionError
        self.assertTrue(fine.done() and refused.done())
        self.assertIsInstance(refused.exception(), tm.AlreadyExistsError)

    def test_hook_cannot_close_the_saver(self):
        with tm.Saver() as saver:
            with self.assertLogs("tensormount", "ERROR") as logged:
                saver.save({"w": np.ones(3)}, "S/hook", on_event=lambda event: saver.close()).wait()
            self.assertIn("closed in a hook", logged.output[0])
            self.assertFalse(saver.closed)

    def test_dropped_saver_is_collected(self):
        go_on, hook = self.held_up()
        saver = tm.Saver()
        gone = weakref.ref(saver)
        job = saver.save({"w": np.ones(10)}, "S/dropped", on_event=hook)
        del saver
        self.assertIsNotNone(gone())
        go_on.set()
        job.wait(LIMIT)
        self.assertIsNone(gone())
        self.assertTrue(os.path.exists("S/dropped"))
        # In a circle with its group, which outlives it.
        for _ in range(3):
            group = tm.Group.single()
            saver = tm.Saver(group)
            circle = [group, saver]
            circle.append(circle)
            saver.save({"w": np.ones(10)}, "S/dropped", replace=True).wait(LIMIT)
            gone = weakref.ref(saver)
            del group, saver, circle
            gc.collect()
            self.assertIsNone(gone())

    def test_saver_leaks_nothing(self):
        def once():
            with tm.Saver(staging=1 << 20) as saver:
                saver.save({"w": np.ones(10)}, "S/again", replace=True)

        def held():
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        once()
        before = held()
        for _ in range(support.scaled(10)):
            once()
        end = time.monotonic() + 10  # A thread that was joined is listed until the kernel has removed it.
        while any(now > then for now, then in zip(held(), before)) and time.monotonic() < end:
            time.sleep(0.01)
        for now, then in zip(held(), before):
            self.assertLessEqual(now, then)

    def test_dropped_jobs_finish_or_cancel(self):
        for cancels in (False, True):
            go_on, hook = self.held_up()
            with tm.Saver(cancel_on_drop=cancels) as saver:
                job = saver.save({"w": np.ones(10)}, f"S/drop-{cancels}", on_event=hook)
                del job
                gc.collect()
                go_on.set()
            self.assertEqual(os.path.exists(f"S/drop-{cancels}"), not cancels)

    def test_options_of_wrong_types_are_refused(self):
        for wrong in ({"device_staging": "8GB"}, {"device_staging": 8e9}, {"device_staging": -1},
                      {"device_staging": True}, {"device_staging": None}, {"device_staging": 1 << 64},
                      {"staging": 0}, {"staging": "1"}, {"staging": -5}, {"staging": 1.5},
                      {"stage_in_background": "no"}, {"cancel_on_drop": None}):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(
                    tm.InvalidArgumentError, next(iter(wrong)) + "="):
                tm.Saver(**wrong)
        with self.assertRaises(TypeError):
            tm.Saver(None, 1 << 30)
        with tm.Saver(device_staging=np.int64(5), staging=np.int64(5)) as saver:
            with self.assertRaises(tm.UnsupportedError):
                pickle.dumps(saver)

    @support.needs("torch")
    def test_saver_saves_a_model(self):
        import torch

        model = torch.nn.Linear(3, 2)
        group = tm.Group.single()
        with tm.Saver(group) as saver:
            for more in ({}, {"group": group}):
                job = tm.torch.async_save("S/model", model=model, saver=saver, replace=True, **more)
                self.assertEqual(job.wait(LIMIT)["tensors"], 2)
            for wrong in ({"saver": saver, "group": tm.Group.single()}, {"saver": 5}):
                with self.assertRaisesRegex(tm.InvalidArgumentError, "saver"):
                    tm.torch.async_save("S/model", model=model, **wrong)


if __name__ == "__main__":
    unittest.main()
