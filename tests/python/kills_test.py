# SPDX-License-Identifier: Apache-2.0
"""One of eight ranks is killed, stops or raises at a random moment of saves and loads: all others are
told who by their deadline, in agreement with the disk, and nothing is left of any of them."""

import collections
import json
import os
import random
import signal
import time
import unittest

import ranks
import support
import tensormount as tm

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

RANKS = 8
TIMES = {"liveness": 2.0, "arrival": 3.0}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "raises": signal.SIGUSR1}
# When the others have to know at the latest. The end of a process is seen at once. Who stops between
# two calls is late before it is silent; rank 0 has half as long again to say whom it waits for. Of
# a rank that cancels, those that wait for others in a vote let go after three seconds.
DEADLINES = {"killed": 0.0, "stopped": 1.5 * TIMES["arrival"], "raises": 3.0}
# What is promised; on machines whose cores others use as well, it shows nothing but them.
GRACE = 2.0 if support.scaled(1) > 1 else 15.0
TOLD = {"PeerLost", "PeerTimeout", "CancelledError", "UnknownOutcomeError"}


class Bug(Exception):
    """Of the program that saves."""


def values(rank, number):
    return {"w": np.arange(60_000, dtype="f4").reshape(6, -1) + number,
            f"only.{rank}": np.full(1_000, number), "step": number, "mine": tm.PerRank(rank)}


# ---- What a rank does ----------------------------------------------------------------------------


def until_one_is_gone(group, rank, size, path, seed):
    """Saves and loads, the same on all ranks. Says of each call what it was, of which checkpoint, the
    verdict, whom it named, when, and in which words."""
    def attempt(call, number, work):
        verdict, named, said = "ok", None, ""
        try:
            work()
        except tm.Error as error:
            verdict, named, said = type(error).__name__, error.rank, str(error)
            if "Bug" in said:  # While the state was taken apart: it is told as it is.
                verdict = "Bug"
        print(json.dumps([call, number, verdict, named, time.monotonic(), said]), flush=True)
        return verdict == "ok"

    def save(number):
        return attempt("save", number, lambda: tm.save(
            values(rank, number), f"{path}/{number}", group, **TIMES))

    def load(number):
        def work():
            into = values(rank, -1)
            tm.load(into, f"{path}/{number}", group, **TIMES)
            assert into["step"] == number and set(into[f"only.{rank}"]) == {number}, into
        return attempt("load", number, work)

    def load_beside_save(number):
        job = tm.async_save(values(rank, number), f"{path}/{number}", group, **TIMES)
        loaded = load(number - 1)
        return attempt("async_save", number, job.wait) and loaded

    struck = []

    def raises(*_):
        struck.append(Bug())
        raise struck[0]

    signal.signal(signal.SIGUSR1, raises)
    generator, number = random.Random(seed), 0
    fine = save(0)
    while fine:
        if struck:  # Python ignores what is raised while it takes an object down.
            raise struck[0]
        number += 1
        fine = generator.choice([save, load_beside_save])(number) and load(number)


# ---- Tests ---------------------------------------------------------------------------------------


class Kills(support.Folder):
    def test_kills_at_random_moments_are_survived(self):
        generator, seed = support.seeded()
        moments, met = support.scaled(6), set()
        for number in range(moments):
            victim, way = generator.randrange(RANKS), generator.choice(sorted(SIGNALS))
            with self.subTest(number=number, victim=victim, way=way, seed=seed):
                met |= {(way, call) for call in self.strike(f"K{number}", victim, way, generator)}
        if moments >= 100:
            self.assertEqual(len(met), len(SIGNALS) * len(["save", "async_save", "load"]), met)

    def strike(self, path, victim, way, generator):
        """The calls that failed."""
        found = ranks.start("kills_test:until_one_is_gone", RANKS, path, generator.random())
        try:
            begun = [rank.process.stdout.readline() for rank in found]
            self.assertEqual([line[:15] for line in begun], ['["save", 0, "ok'] * RANKS, begun)
            time.sleep(generator.random() * 0.5)
            when = time.monotonic()
            found[victim].process.send_signal(SIGNALS[way])
            # Each ends by itself, and so does whatever else has its standard output.
            results = {rank.number: rank.result() for rank in found if rank.number != victim}
            if way == "stopped":
                found[victim].process.send_signal(signal.SIGCONT)
            status, last_words = found[victim].result()
        finally:
            ranks.end(found)
        told, failed = {}, set()
        for number, (ended, out) in results.items():
            self.assertEqual(ended, 0, out)
            told[number] = self.lines(begun[number] + out)
            errors = [line for line in told[number] if line[2] != "ok"]
            self.assertTrue(errors, out)
            for call, _, verdict, named, at, _ in errors:
                self.assertIn(verdict, TOLD | ({"Bug"} if way == "raises" else set()))
                self.assertEqual(named, victim, out)
                self.assertLess(at - when, DEADLINES[way] + GRACE, out)
                failed.add(call)
        if way == "raises":
            self.assertEqual(status, 3, last_words)
            self.assertIn("RAISED Bug", last_words)
        elif way == "stopped":  # It wakes up when all is over, and is told the same.
            self.assertEqual(status, 0, last_words)
            told[victim] = self.lines(begun[victim] + last_words)
        self.assert_true_of_the_disk(path, told)
        return failed

    @staticmethod
    def lines(out):
        return [json.loads(line) for line in out.splitlines()]

    def assert_true_of_the_disk(self, path, told):
        verdicts = collections.defaultdict(set)
        for call, name, verdict, *_ in sum(told.values(), []):
            if call != "load":
                verdicts[str(name)].add(verdict)
        there = {entry["checkpoint"] for entry in tm.Store(path).list()}
        for name, said in verdicts.items():
            if "ok" in said:
                self.assertLessEqual(said, {"ok", "UnknownOutcomeError"}, name)
                self.assertIn(name, there)
            elif "UnknownOutcomeError" not in said:
                self.assertNotIn(name, there)
        self.assertLessEqual(there, verdicts.keys())
        for name in there:
            self.assertTrue(tm.verify(os.path.join(path, name))["whole"], name)


if __name__ == "__main__":
    unittest.main()
