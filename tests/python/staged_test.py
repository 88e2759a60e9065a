#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a save in the background holds on to: tensors until their bytes are copied, the rest until the
verdict."""

import asyncio
import gc
import threading
import unittest
import weakref

import numpy
from support import Folder

import tensormount as tm


class StagedTensors(Folder):
    """The save is held up where it begins to write, so that its verdict is not there."""

    def setUp(self):
        super().setUp()
        self.go_on = threading.Event()
        self.held_up = threading.Event()

    def hold_up(self, event):
        if event["phase"] == "write" and event["kind"] == "start":
            self.held_up.set()
            self.go_on.wait(60)

    def check_let_go(self, begin, ask):
        """`begin` saves a state; once `ask` has looked at the job nobody has the state any more."""
        state = {"w": numpy.ones(10_000), "of": {"b": numpy.zeros(10)}, "step": 3}
        refs = [weakref.ref(state["w"]), weakref.ref(state["of"]["b"])]
        job = begin(state)
        try:
            del state
            self.assertTrue(self.held_up.wait(60))
            ask(job)
            gc.collect()
            self.assertEqual([ref() is None for ref in refs], [True, True])
            self.assertFalse(job.done())
        finally:
            self.go_on.set()
        self.assertEqual(job.wait()["tensors"], 2)
        with tm.open("store/step") as read:
            self.assertTrue((read["w"][...] == 1).all())

    def test_async_save_releases_staged_tensors(self):
        self.check_let_go(
            lambda state: tm.async_save(state, "store/step", on_event=self.hold_up), lambda job: None
        )

    def test_saver_releases_tensors_after_staging(self):
        for ask in (lambda job: job.wait_staged(60), lambda job: job.done()):
            self.held_up.clear()
            self.go_on.clear()
            with tm.Saver(stage_in_background=True) as saver:
                self.check_let_go(
                    lambda state: saver.save(state, "store/step", replace=True, on_event=self.hold_up), ask
                )

    def not_staged_yet(self, saver, name):
        """A save whose bytes are not copied before `self.earlier`, because an earlier one has the memory."""
        self.earlier = threading.Event()
        first = saver.save({"w": numpy.zeros(10_000)}, "store/first", replace=True,
                           on_event=lambda event: event["phase"] == "write" and self.earlier.wait(60))
        state = {"w": numpy.ones(10_000)}
        job = saver.save(state, name, on_event=self.hold_up)
        return first, job, weakref.ref(state["w"])

    def test_awaited_job_releases_staged_tensors(self):
        async def awaited(job, ref):
            task = asyncio.ensure_future(job)
            await asyncio.sleep(0.05)
            held = ref() is not None
            self.earlier.set()
            for _ in range(3000):
                if ref() is None:
                    break
                await asyncio.sleep(0.001)
            gone = ref() is None
            self.go_on.set()
            return held, gone, (await task)["tensors"]

        with tm.Saver(stage_in_background=True, staging=100_000) as saver:
            first, job, ref = self.not_staged_yet(saver, "store/awaited")
            self.assertEqual(asyncio.run(awaited(job, ref)), (True, True, 1))
            first.wait(60)

    def test_next_save_releases_tensors_of_an_unobserved_job(self):
        with tm.Saver(stage_in_background=True, staging=100_000) as saver:
            first, job, ref = self.not_staged_yet(saver, "store/silent")
            self.earlier.set()
            self.assertTrue(self.held_up.wait(60))
            self.assertIsNotNone(ref())
            tm.save({"n": 1}, "store/next")
            self.assertIsNone(ref())
            self.go_on.set()
            job.wait(60)
            first.wait(60)


if __name__ == "__main__":
    unittest.main()
