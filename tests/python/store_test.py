# SPDX-License-Identifier: Apache-2.0
"""Arguments of `Store`: wrong ones are refused by name."""

import unittest

import support
import tensormount as tm


class Arguments(support.Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tm.save({"n": 1}, "S/a")

    def refused(self, call, message):
        with self.assertRaisesRegex(tm.InvalidArgumentError, message):
            call()

    def test_texts_are_checked(self):
        store = tm.Store("S")
        for wrong in (None, 5, ["last=1"], b"last=1"):
            self.refused(lambda: store.prune(wrong), "rules=.*: must be a str as text")
        for wrong in (None, 5, ["a"], b"a"):
            for call in (store.pin, store.unpin, store.remove):
                self.refused(lambda: call(wrong), "name=.*: must be a str of a checkpoint")
            self.refused(lambda: store.publish(wrong), "staging=.*: must be a str")
        for wrong in (None, 5, b"x"):
            self.refused(lambda: store.pin("a", reason=wrong), "reason=.*: must be a str")
        self.refused(lambda: setattr(store, "policy", 5), "policy=5: must be a str")
        self.refused(lambda: store.pin("a", reason="\ud800"), r"reason='\\ud800': contains a surrogate")
        self.refused(lambda: store.pin("\ud800"), r"name='\\ud800': contains a surrogate")
        self.refused(lambda: store.pin("a", reason="x\0y"), r"reason='x\\x00y': must not contain NUL")
        self.refused(lambda: store.prune("last=1\0"), r"rules='last=1\\x00': must not contain NUL")
        for call in (store.pin, store.unpin, store.remove):
            self.refused(lambda: call(""), "S: name='': the name of the checkpoint is empty")
        self.assertEqual((store.pins(), store.policy, len(store.list())), ([], None, 1))

    def test_numbers_are_checked(self):
        store = tm.Store("S")
        for wrong in ("90d", [1], float("nan"), 0):
            self.refused(lambda: store.pin("a", expires=wrong), "expires=.*: must be seconds since 1970")
        self.refused(lambda: store.gc(grace="1h"), "grace='1h': must be a number of seconds")
        self.refused(lambda: store.gc(staging_age="1h"), "staging_age='1h': must be a number of seconds")
        self.refused(lambda: store.publish("x", wait="long"), "wait='long': must be a number of seconds")
        self.assertEqual(store.pins(), [])


if __name__ == "__main__":
    unittest.main()
