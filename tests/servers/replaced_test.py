# SPDX-License-Identifier: Apache-2.0
"""10,000 reads of objects that are replaced all the time: the bytes of one object, or STALE; never bytes of two.

All numbers of a tensor are the number of its version, so that one foreign byte is seen.
"""

import collections
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import threading
import unittest

import numpy as np

from servers import Nginx, ROOT, SCALE

import harness
import remote_sources
from remote_sources import DATA, LIBRARY, Remote

VERSIONS = range(1, 8)
COUNT = 1_200_000  # Numbers of 8 bytes in a tensor: two requests.
ENV = {"PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY), "PYTHONDONTWRITEBYTECODE": "1",
       "OMP_NUM_THREADS": "1"}

# Reads until N reads have an outcome, by T threads; prints how often each outcome came, and every wrong read.
READER = """
import collections, json, random, sys, threading
import numpy as np
import tensormount as tm
url, count, threads, seed = sys.argv[1], *map(int, sys.argv[2:5])
left, lock, outcomes, wrong = count, threading.Lock(), collections.Counter(), []

def one(outcome):
    global left
    with lock:
        outcomes[outcome] += 1
        left -= 1

def work(rng):
    last = None
    while left > 0:
        version = None
        try:
            with tm.open(url) as checkpoint:
                tensor = checkpoint["w"]
                for _ in range(rng.randint(1, 40)):
                    if rng.random() < 0.05:
                        got = tensor[...]
                    else:
                        n = rng.choice([1, 500, 8192, 100_000, 400_000])
                        begin = rng.randrange(tensor.shape[0])
                        got = tensor[begin:begin + n]
                    if not (got == got[0]).all() or version not in (None, got[0]):
                        wrong.append([int(got[0]), version, np.unique(got).tolist()])
                    version = int(got[0])
                    one("old or new" if version == last else "another version than before")
                    last = version
        except tm.StaleError:
            one("STALE")
        except tm.Error as error:
            one(type(error).__name__)
            if len(wrong) < 5 and not isinstance(error, tm.DataLossError): wrong.append(str(error))

runs = [threading.Thread(target=work, args=(random.Random(1000 * seed + n),)) for n in range(threads)]
[t.start() for t in runs]
[t.join() for t in runs]
print(json.dumps([outcomes, wrong]))
"""


def setUpModule():
    remote_sources.setUpModule()
    folder = DATA / "versions"
    folder.mkdir()
    for version in VERSIONS:
        # Each third one has another size.
        numbers = np.full(COUNT - 5 * (version % 3 == 0), version, np.uint64)
        file = folder / f"{version}.safetensors"
        harness.write_safetensors(file, {"w": ("I64", numbers.shape, numbers.tobytes())})
        # nginx's ETag is the time in whole seconds, and the size.
        os.utime(file, (1_700_000_000 + 10 * version,) * 2)
    for version in VERSIONS:
        subprocess.run([harness.TOOL, "import", folder / f"{version}.safetensors", DATA / "stores" / str(version) / "step",
                        "--ranks", "2"], check=True, capture_output=True, timeout=60)


class Replacer:
    """Replaces www/NAME by one version after the other, in one step each."""

    def __init__(self, folder, pause=0.01):
        self.folder, self.pause, self.count = folder, pause, 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.put(1)

    def put(self, version):
        new = self.folder.parent / "new"
        os.link(DATA / "versions" / f"{version}.safetensors", new)
        os.replace(new, self.folder / "m.safetensors")
        new.unlink(missing_ok=True)  # Of the version that is there already: rename() did nothing.

    def work(self):
        while not self.stop.wait(self.pause):
            self.count += 1
            self.put(VERSIONS[self.count % len(VERSIONS)])

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stop.set()
        self.thread.join()


class Replaced(Remote):
    def setUp(self):
        super().setUp()
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        self.folder = self.dir / "www"
        self.folder.mkdir()

    def read(self, url, count, processes=4, threads=3):
        """The outcomes of `count` reads; fails if one had bytes of two versions."""
        count = max(processes, int(count * SCALE))

        def run(seed):
            return subprocess.run([sys.executable, "-W", "ignore", "-c", READER, url, str(count // processes), str(threads),
                                   str(seed)], env={**os.environ, **ENV}, capture_output=True, text=True, timeout=300)
        outcomes = collections.Counter()
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            for result in pool.map(run, range(processes)):
                self.assertEqual(result.returncode, 0, result.stderr)
                found, wrong = json.loads(result.stdout)
                self.assertEqual(wrong, [])
                outcomes.update(found)
        self.assertGreaterEqual(sum(outcomes.values()), count - processes)
        self.assertLessEqual(set(outcomes), {"STALE", "old or new", "another version than before"}, outcomes)
        # It did happen in the middle of reads, and reads did succeed.
        self.assertGreater(outcomes["STALE"], count // 100)
        self.assertGreater(outcomes["another version than before"], count // 200)
        return outcomes

    def cat(self, url):
        """(status, numbers, standard error) of the command."""
        result = subprocess.run([harness.TOOL, "cat", url, "w"], capture_output=True, timeout=60)
        return result.returncode, np.frombuffer(result.stdout[:len(result.stdout) // 8 * 8], np.uint64), result.stderr

    def report(self, what, replacer, outcomes):
        print(f"{what}: {sum(outcomes.values())} reads beside {replacer.count} replacements: {dict(outcomes)}")

    def test_reads_from_nginx(self):
        server = Nginx(self.dir / "nginx", self.folder)
        with Replacer(self.folder) as replacer, server:
            outcomes = self.read(f"{server.url}/m.safetensors", 6_000)
        self.report("nginx", replacer, outcomes)
        self.assertIn(412, server.statuses())

    def test_reads_from_servers_that_know_conditions_or_not(self):
        for sends, conditions in ((["ETag", "Last-Modified"], True), (["ETag"], False), (["Last-Modified"], True),
                                  (["Last-Modified"], False)):
            with self.subTest(sends=sends, conditions=conditions):
                server = self.serve(self.folder)
                server.sends, server.conditions = sends, conditions
                with Replacer(self.folder) as replacer:
                    outcomes = self.read(f"{server.url}/m.safetensors", 1_000, processes=3)
                self.report(f"{'+'.join(sends)}, If-Match {'known' if conditions else 'ignored'}", replacer, outcomes)

    def test_commands_print_one_version(self):
        server = Nginx(self.dir / "nginx", self.folder)
        outcomes = collections.Counter()

        def one(_):
            return self.cat(f"{server.url}/m.safetensors")
        with Replacer(self.folder, 0.15) as replacer, server, concurrent.futures.ThreadPoolExecutor(3) as pool:
            for code, numbers, error in pool.map(one, range(int(600 * SCALE))):
                self.assertLessEqual(len(np.unique(numbers)), 1, error)
                if code == 0:
                    self.assertIn(len(numbers), (COUNT, COUNT - 5))
                    outcomes["whole"] += 1
                else:
                    self.assertRegex(error, b"^tensormount: STALE: .*was replaced")
                    outcomes["STALE"] += 1
        self.report("command", replacer, outcomes)
        self.assertEqual(set(outcomes), {"whole", "STALE"})

    def test_checkpoints_that_are_replaced(self):
        """A directory that becomes another checkpoint in one step, behind the same URL: many objects, not one."""
        server = Nginx(self.dir / "nginx", self.folder)
        stop, turns = threading.Event(), 0
        current = self.folder / "step"

        def put(version):
            os.symlink(DATA / "stores" / str(version) / "step", self.dir / "new")
            os.replace(self.dir / "new", current)
        put(1)

        def work():
            nonlocal turns
            while not stop.wait(0.3):
                turns += 1
                put(VERSIONS[turns % len(VERSIONS)])
        thread = threading.Thread(target=work, daemon=True)
        outcomes = collections.Counter()

        def one(_):
            return self.cat(f"{server.url}/step")
        with server, concurrent.futures.ThreadPoolExecutor(3) as pool:
            thread.start()
            try:
                for code, numbers, error in pool.map(one, range(int(300 * SCALE))):
                    self.assertLessEqual(len(np.unique(numbers)), 1, error)
                    self.assertTrue(code in (0, 2), error)
                    if code == 0:
                        self.assertIn(len(numbers), (COUNT, COUNT - 5))
                    else:
                        self.assertRegex(error, b"^tensormount: (STALE|DATA_LOSS|NOT_FOUND): ")
                    outcomes["whole" if code == 0 else error.split(b":")[1].strip().decode()] += 1
            finally:
                stop.set()
                thread.join()
        print(f"a directory replaced {turns} times: {dict(outcomes)}")
        self.assertGreater(outcomes["whole"], 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
