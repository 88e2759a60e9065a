# SPDX-License-Identifier: Apache-2.0
"""One of twenty answers is broken in a random way: the same bytes always, and how much longer it takes."""

import collections
import json
import os
import random
import statistics
import subprocess
import sys
import threading

import numpy as np

from servers import ROOT, SCALE

import harness
import object_server
from remote_sources import DATA, LIBRARY, Remote, setUpModule  # noqa: F401

SHARE = 1 / 20
ENV = {"PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY), "PYTHONDONTWRITEBYTECODE": "1",
       "OMP_NUM_THREADS": "1"}

# Reads by the library; prints the seconds of it and what was wrong.
READER = """
import json, sys, time
import numpy as np
import tensormount as tm
what, url, local = sys.argv[1:4]
wrong = []
with tm.open(local) as checkpoint:
    expected = {key: checkpoint[key][...] for key in checkpoint}
begun = time.monotonic()
if what == "load":
    into = {key: np.zeros_like(value) for key, value in expected.items()}
    tm.load(into, url)
    seconds = time.monotonic() - begun
    wrong = [key for key, value in into.items() if value.tobytes() != expected[key].tobytes()]
else:
    rng = np.random.default_rng(int(sys.argv[4]))
    with tm.open(url) as checkpoint:
        for _ in range(300):
            key = str(rng.choice(list(expected)))
            rows = len(expected[key])
            begin = int(rng.integers(rows))
            end = min(rows, begin + int(rng.choice([1, 10, 100])))
            if checkpoint[key][begin:end].tobytes() != expected[key][begin:end].tobytes():
                wrong.append([key, begin, end])
    seconds = time.monotonic() - begun
print(json.dumps([seconds, wrong]))
"""


def random_fault(rng):
    s = object_server
    return rng.choice([
        s.status(503), s.status(500), s.status(502), s.status(429, {"Retry-After": "0"}), s.reset(0),
        s.reset(rng.randrange(1, 4 << 20)), s.short(1), s.short(rng.randrange(1, 1 << 20)),
        s.wrong_range(rng.choice([1, 4096, 1 << 20])), s.delay(rng.uniform(0.05, 0.3))])


class Broken(Remote):
    def setUp(self):
        super().setUp()
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        # As far away as a server in the same region.
        self.latency = 0.01

    def server_that_breaks(self, seed, share, folder=DATA):
        server, rng, lock = self.serve(folder), random.Random(seed), threading.Lock()

        def fault(number, path, range):
            with lock:
                broken = random_fault(rng) if rng.random() < share else None
            return broken or object_server.delay(self.latency)
        server.fault = fault
        return server

    def run_reader(self, what, source, seed, share):
        server = self.server_that_breaks(seed, share)
        result = subprocess.run([sys.executable, "-W", "ignore", "-c", READER, what, f"{server.url}/{source}",
                                 str(DATA / source), str(seed)], env={**os.environ, **ENV}, capture_output=True, text=True,
                                timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
        seconds, wrong = json.loads(result.stdout)
        self.assertEqual(wrong, [])
        faults = server.faults()
        slow = faults.pop("delay", 0)
        return seconds, len(server.requests), faults, slow

    def compare(self, what, source, rounds):
        ratios, seen, requests, whole, broken = [], collections.Counter(), 0, [], []
        for seed in range(max(1, int(rounds * SCALE))):
            unbroken, _, faults, _ = self.run_reader(what, source, seed, 0)
            self.assertEqual(sum(faults.values()), 0)
            seconds, count, faults, _ = self.run_reader(what, source, seed, SHARE)
            ratios.append(seconds / unbroken)
            whole.append(unbroken)
            broken.append(seconds)
            seen.update(faults)
            requests += count
        ratios.sort()
        print(f"{what} of {source}, {requests} answers of which {sum(seen.values())} were broken, {dict(seen)}: "
              f"{statistics.median(broken):.3f} s instead of {statistics.median(whole):.3f} s; "
              f"ratio {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f} (the goal is 2)")
        self.assertGreater(sum(seen.values()), 0)

    def test_loads(self):
        for source in ("BIG/step-1", "big.safetensors", "MANY/step-1"):
            with self.subTest(source):
                self.compare("load", source, 10)

    def test_short_reads(self):
        for source in ("BIG/step-1", "big.safetensors"):
            with self.subTest(source):
                self.compare("rows", source, 5)

    def test_every_command(self):
        """All commands that read, each beside a server that breaks: the same output."""
        for seed in range(int(4 * SCALE)):
            self.url = self.server_that_breaks(seed, SHARE).url
            for source in self.SOURCES:
                self.same(source, "ls", "-l")
                self.same(source, "verify")
                self.run_tool("diff", f"{self.url}/{source}", DATA / source)
                for name, place in (("local", DATA / source), ("remote", f"{self.url}/{source}")):
                    self.run_tool("export", place, self.dir / name, "--to", "safetensors", "--if-exists", "replace")
                self.assertEqual((self.dir / "remote").read_bytes(), (self.dir / "local").read_bytes(), source)
            self.run_tool("copy", f"{self.url}/STORE/step-1", self.dir / f"copy-{seed}")
            self.run_tool("verify", self.dir / f"copy-{seed}" / "step-1")

    def test_bytes_that_are_wrong_without_a_sign_are_found_by_hashes(self):
        """Right headers with wrong bytes: tensormount's checkpoints have hashes; a safetensors file has none."""
        rng = random.Random(3)
        outcomes = collections.Counter()
        expected = self.run_tool("cat", DATA / "BIG/step-1", "w", text=False).stdout
        for seed in range(int(20 * SCALE)):
            server = self.serve(DATA)
            server.fault = lambda number, path, range: (
                object_server.wrong_range(rng.choice([1, 4096]), honest=False) if rng.random() < 0.15 else None)
            result = self.run_tool("cat", f"{server.url}/BIG/step-1", "w", expect=None, text=False)
            self.assertTrue(expected.startswith(result.stdout))
            if result.returncode == 0:
                self.assertEqual(result.stdout, expected)
            else:
                self.assertRegex(result.stderr, b"^tensormount: (DATA_LOSS|STALE|UNSUPPORTED|NOT_FOUND): ")
            outcomes["whole" if result.returncode == 0 else result.stderr.split(b":")[1].strip().decode()] += 1
        print(f"wrong bytes with the right head: {dict(outcomes)}")
        self.assertGreater(outcomes["whole"], 0)
        self.assertGreater(outcomes["DATA_LOSS"], 0)


if __name__ == "__main__":
    harness.main()
