# SPDX-License-Identifier: Apache-2.0
"""Saves into buckets through a staging directory (collective/save/bucket_save.h), and loads of several ranks from a
server, over the stand-in servers of tests/support."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import harness
import object_server
from object_server import status
from remote_sources import DATA, LIBRARY, ROOT, Remote, WEIGHT, setUpModule  # noqa: F401
from remote_writes_test import TO, Writes


# One rank: runs a script that finds group, rank and size.
RANK = """
import os, sys, numpy, tensormount as tm
rank, size = int(sys.argv[1]), int(sys.argv[2])
try:
    with tm.Group.from_folder(sys.argv[3], rank, size, timeout=30) as group:
        exec(sys.argv[4])
except tm.Error as error:
    print("RAISED", type(error).__name__, str(error))
"""


class Ranks:
    """Adds processes that are ranks of a job."""

    def ranks(self, size, script, *arguments, limit=40, **environment):
        """What each rank prints."""
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        at = self.dir / f"ranks-{len(list(self.dir.glob('ranks-*')))}"
        at.mkdir()
        base = {**os.environ, **getattr(self, "env", {}), "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1",
                "TENSORMOUNT_LIBRARY": str(LIBRARY), "PYTHONDONTWRITEBYTECODE": "1", **environment}
        children = [subprocess.Popen([sys.executable, "-c", RANK, str(n), str(size), str(at), script,
                                      *map(str, arguments)],
                                     text=True, env=base, cwd=self.dir, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE) for n in range(size)]
        for child in children:
            self.addCleanup(self.ended, child)
        said = [child.communicate(timeout=limit) for child in children]
        for child, (_, err) in zip(children, said):
            self.assertEqual(child.returncode, 0, err)
        return [out for out, _ in said]

    @staticmethod
    def ended(child):
        if child.poll() is None:
            child.kill()
        child.communicate()


class Saves(Ranks, Writes):
    def setUp(self):
        super().setUp()
        self.staging = self.dir / "staging"

    def save(self, source, name, *more, **how):
        return self.run_tool("import", DATA / source, f"{TO}/{name}", "--ranks", "2", "--staging", self.staging, *more,
                             **how)

    def names(self, store):
        out = self.run_tool("ls", store, "--json").stdout
        return sorted(json.loads(line)["checkpoint"] for line in out.splitlines())

    def test_saves_reach_the_bucket_and_staging_keeps_the_newest(self):
        said = self.save("m.safetensors", "step-1").stdout
        self.assertIn(f"committed {TO}/step-1", said)
        self.assertIn(f"copied from {self.staging}/step-1", said)
        self.assert_whole(source=self.staging / "step-1")
        puts = [r for r in self.server.requests if r.method in ("PUT", "POST") and "/step-1/" in r.path]
        self.assertTrue(puts[-1].path.endswith("/step-1/COMMIT"))
        self.assertEqual(puts[-1].headers.get("If-None-Match"), "*")
        self.save("big.safetensors", "step-2")
        self.assertEqual(self.names(self.staging), ["step-2"])
        # What did not change is neither written nor sent.
        report = json.loads(self.save("big.safetensors", "step-3", "--json").stdout)
        self.assertEqual((report["path"], report["staged"]), (f"{TO}/step-3", f"{self.staging}/step-3"))
        self.assertLess(report["bytes_sent"], WEIGHT / 10)
        self.assertGreater(report["bytes_copied_in_bucket"], 2 * WEIGHT)
        self.assert_whole("step-3", self.staging / "step-3")
        self.assertEqual(self.names(self.staging), ["step-3"])
        self.assertEqual(self.names(TO), ["step-1", "step-2", "step-3"])
        self.assertEqual(self.leftovers(), ([], 0))
        self.run_tool("verify", f"{TO}/latest")
        self.assertIn("no difference", self.run_tool("diff", f"{TO}/latest", DATA / "big.safetensors").stdout)

    def test_rules_prune_the_bucket(self):
        for step in range(1, 5):
            said = self.save("m.safetensors", f"step-{step}", "--retain", "last=2").stdout
        self.assertEqual(said.count("removed by retention rule"), 1)
        self.assertIn("removed by retention rule: step-2", said)
        self.assertEqual(self.names(TO), ["step-3", "step-4"])
        self.assertEqual(self.names(self.staging), ["step-4"])

    def test_new_staging_directory_continues_the_generations(self):
        for step in range(1, 4):
            self.save("m.safetensors", f"step-{step}")
        shutil.rmtree(self.staging)
        self.save("other.safetensors", "resumed")
        latest = json.loads(self.run_tool("info", f"{TO}/latest", "--json").stdout)
        self.assertTrue(latest["path"].endswith("/resumed"), latest)

    def test_refusals(self):
        def refused(*more, name="step-1"):
            return self.run_tool("import", DATA / "m.safetensors", f"{TO}/{name}", *more, expect=2).stderr
        self.assertIn("set the option `staging`, or TENSORMOUNT_STAGING", refused())
        self.assertIn("must be on a file system", refused("--staging", "s3://bucket/other"))
        there = ("--staging", self.staging)
        self.assertIn("UNSUPPORTED: rank 0: save s3://bucket/runs/STORE/step-1: replace",
                      refused(*there, "--if-exists", "replace"))
        self.assertIn("ephemeral: buckets have no marks", refused(*there, "--ephemeral"))
        self.assertIn('retention by "policy"', refused(*there, "--retain", "policy"))
        self.assertFalse(self.staging.exists())
        self.assertFalse(self.stored.exists())
        self.copy(DATA / "STORE/step-1")
        self.assertIn(f"ALREADY_EXISTS: {TO}/step-1: a checkpoint of this name exists", refused(*there))
        self.assertFalse((self.staging / "step-1").exists())

    def test_checkpoint_that_does_not_arrive_stays_and_the_error_says_where(self):
        self.save("m.safetensors", "step-1")

        def fault(number, path, range):
            if "/step-2/" in path and "/data/" in path:
                return status(403)
        self.server.fault = fault
        failed = self.save("other.safetensors", "step-2", expect=2).stderr
        self.server.fault = lambda *_: None
        command = f"tensormount copy {self.staging}/step-2 {TO}"
        self.assertIn("PERMISSION_DENIED", failed)
        self.assertIn(f"the checkpoint is complete in the staging directory: `{command}`", failed)
        self.assertEqual(self.names(TO), ["step-1"])
        again = self.save("m.safetensors", "step-2", expect=2).stderr
        self.assertIn(f"ALREADY_EXISTS: {self.staging}/step-2", again)
        self.assertIn(command, again)
        # Neither the next save nor `rm` removes what the bucket does not have.
        self.save("m.safetensors", "step-3")
        self.assertEqual(self.names(self.staging), ["step-2", "step-3"])
        self.assertIn(f"not yet in {TO}", self.run_tool("rm", self.staging / "step-2", expect=2).stderr)
        self.run_tool(*command.split()[1:])
        self.assert_whole("step-2", self.staging / "step-2")
        self.save("m.safetensors", "step-4")
        self.assertEqual(self.names(self.staging), ["step-4"])
        self.assertEqual(self.names(TO), ["step-1", "step-2", "step-3", "step-4"])
        self.assertTrue(json.loads(self.run_tool("info", f"{TO}/latest", "--json").stdout)["path"].endswith("/step-4"))

    def test_server_that_is_down(self):
        env = {**self.env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "TENSORMOUNT_PATIENCE": "1"}
        # The generations in the bucket are not known.
        self.assertIn("127.0.0.1:9", self.save("m.safetensors", "step-1", expect=2, env=env).stderr)
        self.assertFalse((self.staging / "step-1").exists())
        self.save("m.safetensors", "step-1")
        failed = self.save("m.safetensors", "step-2", expect=2, env=env).stderr
        self.assertIn(f"tensormount copy {self.staging}/step-2 {TO}", failed)
        self.assertEqual(self.names(self.staging), ["step-2"])
        self.save("m.safetensors", "step-3")
        self.assertEqual(self.names(self.staging), ["step-2", "step-3"])

    def test_interrupt_ends_a_copy_that_hangs(self):
        gate = threading.Event()
        self.addCleanup(gate.set)
        self.server.fault = lambda number, path, range: gate.wait(60) and None if "/data/" in path else None
        begun = threading.Event()
        fault = self.server.fault

        def hang(number, path, range):
            if "/data/" in path:
                begun.set()
            return fault(number, path, range)
        self.server.fault = hang
        child = self.start("import", DATA / "m.safetensors", f"{TO}/step-1", "--ranks", "2", "--staging", self.staging)
        self.assertTrue(begun.wait(20))
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=15)
        self.assertEqual(child.returncode, 130, err)
        self.assertIn(f"tensormount copy {self.staging}/step-1 {TO}", err)
        gate.set()
        self.assertNotIn("COMMIT", os.listdir(self.stored / "step-1") if (self.stored / "step-1").exists() else [])
        self.assertTrue((self.staging / "step-1/COMMIT").exists())

    def test_killed_at_any_request(self):
        """The checkpoint is in the bucket, or in the staging directory, or nowhere; and the next save works."""
        self.save("m.safetensors", "step-1")
        requests = len(self.server.requests)
        every = 3 if os.environ.get("TENSORMOUNT_LONG") else requests // 3
        for last in range(1, requests + 1, every):
            shutil.rmtree(self.stored)
            shutil.rmtree(self.staging)
            self.server.forget()
            child = None
            ready = threading.Event()

            def fault(number, path, range, last=last, ready=ready):
                ready.wait(20)
                if number == last:
                    child.kill()
            self.server.fault = fault
            child = self.start("import", DATA / "m.safetensors", f"{TO}/step-1", "--staging", self.staging)
            ready.set()
            child.wait(20)
            self.server.fault = lambda *_: None
            if (self.staging / "step-1/COMMIT").exists():
                self.run_tool("copy", self.staging / "step-1", TO)
                self.assert_whole(source=self.staging / "step-1")
            self.save("other.safetensors", "step-2")
            self.assertEqual(self.names(self.staging), ["step-2"], last)
            self.assert_whole("step-2", self.staging / "step-2")

    def test_python_ranks_and_savers(self):
        script = f"""
state = {{"w": numpy.arange(100000, dtype="f4") + 1, "rank": tm.PerRank(rank)}}
report = tm.save(state, "{TO}/step-1", group, common="off")
assert report["path"] == "{TO}/step-1" and report["staged"].endswith("/step-1"), report
with tm.Saver(group) as saver:
    jobs = [saver.save(state, f"{TO}/step-{{n}}", staging=os.environ["OTHER"]) for n in (2, 3)]
    reports = [job.wait() for job in jobs]
assert [one["staged"] for one in reports] == [os.environ["OTHER"] + f"/step-{{n}}" for n in (2, 3)], reports
print(tm.open("{TO}/latest").path, float(tm.open("{TO}/step-1")["w"][-1]))
if rank == 1:  # It does not know the directory, and all ranks hear of that.
    del os.environ["TENSORMOUNT_STAGING"]
tm.save(state, "{TO}/step-4", group)
"""
        said = self.ranks(2, script, TENSORMOUNT_STAGING=str(self.staging), OTHER=str(self.dir / "other"))
        for text in said:
            first, _, rest = text.partition("\n")
            self.assertEqual(first, f"{TO}/step-3 100000.0")
            self.assertIn("RAISED", rest)
            self.assertIn("TENSORMOUNT_STAGING", rest)
        self.assertEqual(self.names(TO), ["step-1", "step-2", "step-3"])

    def test_rank_that_dies_during_the_copy(self):
        script = f"""
def die(event):
    if rank == int(os.environ["DEAD"]) and event["phase"] == "copy":
        os._exit(0)
path = f"{TO}/step-{{os.environ['DEAD']}}"
tm.save({{"w": numpy.ones(1000, "f4")}}, path, group, staging="{self.staging}", on_event=die)
print("saved")
"""
        # Nobody knows whether rank 0 has copied it.
        said = self.ranks(2, script, DEAD="0")
        self.assertEqual(said[0], "")
        self.assertIn("RAISED UnknownOutcomeError", said[1])
        self.assertIn(f"tensormount copy {self.staging}/step-0 {TO}", said[1])
        self.run_tool("copy", self.staging / "step-0", TO)
        self.assert_whole("step-0", self.staging / "step-0")
        # Rank 0 knows that it is there.
        self.assertEqual(self.ranks(2, script, DEAD="1"), ["saved\n", ""])
        self.assert_whole("step-1", self.staging / "step-1")


class Loads(Ranks, Remote):
    def test_ranks_of_a_machine_ask_for_each_byte_once(self):
        script = """
local = tm.open(sys.argv[5])
columns, rows = slice(256 * rank, 256 * rank + 256), slice(1536 * rank, 1536 * rank + 1536)
def load(url, part, begin):
    mine = {key: numpy.zeros_like(local[key][part]) for key in "vwz"}
    state = {key: tm.Shards((6144, 1024), [(begin, mine[key])]) for key in "vwz"}
    report = tm.load(state, url, group).report
    assert all(mine[key].tobytes() == local[key][part].tobytes() for key in "vwz"), part
    return report["messages_sent"] > 0
print(load(sys.argv[6], (slice(None), slice(None)), (0, 0)), load(sys.argv[7], (slice(None), columns), (0, 256 * rank)),
      load(sys.argv[8], (rows, slice(None)), (1536 * rank, 0)))
"""
        servers = [self.serve(DATA) for _ in range(3)]
        said = self.ranks(4, script, DATA / "BIG/step-1", *(f"{server.url}/BIG/step-1" for server in servers))
        self.assertEqual(said, ["True True False\n"] * 4)
        replicated, columns, rows = (server.sent() / (3 * WEIGHT) for server in servers)
        # Each rank opens the checkpoint and the data files.
        self.assertLess(replicated, 1.05)
        self.assertLess(columns, 1.05)
        self.assertLess(rows, 1.5)  # What is read ahead may be asked for twice.


if __name__ == "__main__":
    harness.main()
