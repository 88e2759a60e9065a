# SPDX-License-Identifier: Apache-2.0
"""Stores in buckets: copies, drains, removal and gc, over the stand-in for S3 (tests/support/bucket_writes.py)."""

import filecmp
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import harness
import object_server
from object_server import action, reset, status
from remote_buckets_test import Bucket
from remote_sources import DATA, LIBRARY, ROOT, setUpModule  # noqa: F401

@action
def unquoted(answer):
    """As Ceph ends an upload in parts."""
    if b"<CompleteMultipartUploadResult>" in answer.body:
        answer.body = answer.body.replace(b"&#34;", b"")


DAY = 86400
LIBCURL = next(p for p in (f"/usr/lib/{platform.machine()}-linux-gnu/libcurl.so.4", "/usr/lib64/libcurl.so.4",
                           "/usr/lib/libcurl.so.4") if os.path.exists(p))
TO = "s3://bucket/runs/STORE"


@action
def killed(answer, child):
    """Ends a process after the request was carried out, before the answer."""
    child.kill()
    answer.cut, answer.end = 0, "reset"


class Writes(Bucket):
    def setUp(self):
        super().setUp()
        self.stored = self.folder / "bucket" / "runs" / "STORE"

    def start(self, *args, **more):
        child = subprocess.Popen([harness.TOOL, *map(str, args)], env={**os.environ, **self.env}, text=True,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
        self.addCleanup(self.ended, child)
        return child

    @staticmethod
    def ended(child):
        if child.poll() is None:
            child.kill()
        child.communicate()

    def copy(self, *sources, to=TO, **more):
        return self.run_tool("copy", *sources, to, **more)

    def assert_whole(self, name="step-1", source=DATA / "STORE/step-1", to=None):
        """The checkpoint in the bucket has every file of the source, and no other; nothing else is left."""
        there = (to or self.stored) / name
        files = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
        self.assertEqual({str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}, files)
        _, different, wrong = filecmp.cmpfiles(source, there, files, shallow=False)
        self.assertEqual((different, wrong), ([], []))

    def leftovers(self):
        """Claims and uploads that were not ended."""
        claims = self.stored / ".claims"
        return sorted(os.listdir(claims)) if claims.is_dir() else [], len(self.server.bucket.uploads)

    def large(self):
        """A checkpoint with a data file of several parts."""
        source = DATA / "PARTS/step-1"
        if not source.exists():
            self.run_tool("import", DATA / "big.safetensors", source)
        return source

    def import_step(self, source, to, *more):
        self.run_tool("import", source, to, "--ranks", "2", *more)


class Copies(Writes):
    def test_whole_store(self):
        self.copy(DATA / "STORE")
        for name in ("step-1", "step-2"):
            self.assert_whole(name, DATA / "STORE" / name)
            self.assertIn("no difference", self.run_tool("diff", f"{TO}/{name}", DATA / "STORE" / name).stdout)
        self.assertEqual(self.leftovers(), ([], 0))
        self.assertEqual([line.split("\t")[0] for line in self.run_tool("ls", TO).stdout.splitlines()],
                         ["step-1", "step-2"])
        self.run_tool("verify", f"{TO}/latest")
        self.assertIn("sound", self.run_tool("fsck", TO).stdout)
        again = self.copy(DATA / "STORE").stdout
        self.assertEqual(again.count("already in the store"), 2)
        # And back.
        self.run_tool("copy", TO, self.dir / "back")
        self.assert_whole("step-2", DATA / "STORE/step-2", self.dir / "back")

    def test_commit_is_the_last_and_conditional(self):
        self.copy(DATA / "STORE/step-1")
        puts = [r for r in self.server.requests if r.method in ("PUT", "POST") and "/step-1/" in r.path]
        self.assertTrue(puts[-1].path.endswith("/step-1/COMMIT"))
        self.assertEqual(puts[-1].headers.get("If-None-Match"), "*")
        self.assertEqual(len([r for r in puts if r.path.endswith("COMMIT")]), 1)
        self.assertFalse([r for r in self.server.requests if r.status in (400, 403)])

    def test_every_request_may_be_the_last(self):
        # Killed before the request was carried out, and after it, before the answer.
        self.copy(DATA / "STORE/step-1")
        requests = len(self.server.requests)
        self.assertGreater(requests, 15)
        seen = set()
        every = 1 if os.environ.get("TENSORMOUNT_LONG") else 4
        for after in (False, True):
            for last in range(1 + after, requests + 1, every):
                shutil.rmtree(self.stored)
                self.server.bucket.uploads.clear()
                self.server.forget()
                child = None

                def fault(number, path, range, last=last, after=after):
                    while child is None:
                        time.sleep(0.001)
                    if number != last:
                        return None
                    if after:
                        return killed(child)
                    child.kill()
                    return status(503)
                self.server.fault = fault
                child = self.start("copy", DATA / "STORE/step-1", TO)
                child.wait(20)
                child.communicate()
                while last not in {r.number for r in self.server.requests}:  # It is carried out all the same.
                    time.sleep(0.001)
                self.server.fault = lambda *_: None
                there = (self.stored / "step-1" / "COMMIT").exists()
                seen.add(there)
                if there:
                    self.assert_whole()
                self.copy(DATA / "STORE/step-1")
                self.assert_whole()
                if not there:
                    self.assertEqual(self.leftovers(), ([], 0), (last, after))
                self.server.bucket.older = -100  # Beside a COMMIT a claim may be in use for a minute.
                self.run_tool("gc", TO)
                self.server.bucket.older = 0
                self.assertEqual(self.leftovers(), ([], 0), (last, after))
        self.assertEqual(seen, {False, True})

    def test_large_objects_go_up_in_parts_and_continue(self):
        def sent():
            return [(r.path, int(re.search(r"partNumber=(\d+)", r.query)[1])) for r in self.server.requests
                    if r.method == "PUT" and "partNumber" in r.query]
        source = self.large()

        def fault(number, path, range):
            if len(sent()) >= 4:
                child.kill()
        self.server.fault = fault
        child = self.start("copy", source, TO)
        child.wait(30)
        self.server.fault = lambda *_: None
        self.assertEqual(child.returncode, -signal.SIGKILL)
        self.assertNotIn("step-1", self.run_tool("ls", TO).stdout)
        kept = {(upload["path"], number) for upload in self.server.bucket.uploads.values() for number in upload["parts"]}
        self.assertTrue(kept)
        self.server.page = 1  # All listings come in pages.
        self.server.forget()
        self.copy(source)
        self.assert_whole(source=source)
        self.assertEqual(set(sent()) & kept, set())
        self.assertEqual(self.leftovers(), ([], 0))

    def test_servers_that_tell_no_checksums_get_all_parts_again(self):
        source = self.large()
        self.server.bucket.checksums = False

        def fault(number, path, range):
            if any("partNumber=2" in r.query for r in self.server.requests):
                child.kill()
        self.server.fault = fault
        child = self.start("copy", source, TO)
        child.wait(30)
        self.server.fault = lambda *_: None
        self.copy(source)
        self.assert_whole(source=source)

    def test_broken_answers(self):
        rng = random.Random(5)
        broken = [lambda: status(503), lambda: reset(), lambda: status(500), lambda: status(429, {"Retry-After": "0"}),
                  lambda: object_server.short()]

        def fault(number, path, range):
            return rng.choice(broken)() if rng.random() < 0.2 else None
        for turn in range(20 if os.environ.get("TENSORMOUNT_LONG") else 2):
            self.server.fault = fault
            self.copy(DATA / "STORE", to=f"{TO}{turn}", timeout=60)
            self.server.fault = lambda *_: None
            self.assert_whole("step-2", DATA / "STORE/step-2", self.folder / f"bucket/runs/STORE{turn}")
            self.server.bucket.older = -100
            self.run_tool("gc", f"{TO}{turn}")
            self.server.bucket.older = 0
            self.assertEqual([p.name for p in (self.folder / f"bucket/runs/STORE{turn}/.claims").iterdir()], [])
        self.assertGreater(sum(self.server.faults().values()), 8)

    def test_two_writers_have_one_winner(self):
        other = self.dir / "OTHER/step-1"
        self.import_step(DATA / "other.safetensors", other)
        for turn in range(5):
            shutil.rmtree(self.stored, ignore_errors=True)
            both = [self.start("copy", source, TO) for source in (DATA / "STORE/step-1", other)]
            ends = [child.communicate(timeout=30) + (child.returncode,) for child in both]
            winners = [at for at, end in enumerate(ends) if end[2] == 0]
            self.assertLessEqual(len(winners), 1, ends)
            for end in ends:
                if end[2] != 0:
                    self.assertRegex(end[1], "BUSY|ALREADY_EXISTS")
            if winners:
                self.assert_whole(source=(DATA / "STORE/step-1", other)[winners[0]])

    def test_same_checkpoint_by_two_processes(self):
        for turn in range(5):
            shutil.rmtree(self.stored, ignore_errors=True)
            both = [self.start("copy", DATA / "STORE/step-1", TO) for _ in range(2)]
            ends = [child.communicate(timeout=30) + (child.returncode,) for child in both]
            self.assertIn(0, [end[2] for end in ends], ends)
            self.assert_whole()

    def test_servers_without_conditions_are_refused(self):
        for how, ignored, text in ((False, (), "ignores"), ("refused", (), "refuses"), (True, ("If-Match",), "ignores"),
                                   (True, ("If-None-Match",), "ignores")):
            self.server.bucket.conditional, self.server.bucket.ignores = how, set(ignored)
            result = self.copy(DATA / "STORE/step-1", expect=2)
            self.assertIn(f"the server {text}", result.stderr)
            self.assertIn("--unconditional", result.stderr)
            self.assertFalse((self.stored / "step-1").exists())
            self.assertEqual(self.leftovers(), ([], 0))
            self.run_tool("copy", DATA / "STORE/step-1", TO, "--unconditional")
            self.assert_whole()
            shutil.rmtree(self.stored)

    def test_conditions_at_the_end_of_parts_are_not_needed(self):
        source = self.large()
        self.server.bucket.conditional_parts = "refused"
        self.copy(source)
        self.assert_whole(source=source)

    def test_objects_of_others_are_not_touched(self):
        (self.stored / "step-1" / "data").mkdir(parents=True)
        (self.stored / "step-1" / "data" / "mine").write_text("mine")
        self.assertIn("objects that are no checkpoint", self.copy(DATA / "STORE/step-1", expect=2).stderr)
        self.assertEqual((self.stored / "step-1" / "data" / "mine").read_text(), "mine")
        self.assertEqual(self.leftovers(), ([], 0))
        self.run_tool("gc", TO, "--grace", "0", "--staging-age", "0")
        self.assertTrue((self.stored / "step-1" / "data" / "mine").exists())
        self.assertIn("objects that are no checkpoint", self.run_tool("fsck", TO).stdout)

    def test_objects_that_change_during_the_copy(self):
        def fault(number, path, range):
            # The last listing comes after all objects.
            if path == "/bucket/" and (self.stored / "step-1/manifest/r1.tmm").exists():
                (self.stored / "step-1/manifest/r1.tmm").write_bytes(b"x")
        self.server.fault = fault
        self.assertIn("STALE", self.copy(DATA / "STORE/step-1", expect=2).stderr)
        self.server.fault = lambda *_: None
        self.assertFalse((self.stored / "step-1/COMMIT").exists())
        self.copy(DATA / "STORE/step-1")
        self.assert_whole()

    def test_a_commit_that_appears_during_the_copy_stays(self):
        # Another copy of the same checkpoint publishes between the look for COMMIT and the listing.
        self.copy(DATA / "STORE/step-1")
        commit = (self.stored / "step-1/COMMIT").read_bytes()
        (self.stored / "step-1/COMMIT").unlink()
        claim = {"format": "tensormount-claim", "version": 1, "for": "copy", "by": "x",
                 "uuid": self.run_tool("ls", DATA / "STORE").stdout.split()[3]}
        (self.stored / ".claims/step-1").write_text(json.dumps(claim) + "\n")

        def fault(number, path, range):
            if self.server.requests and "encoding-type=url&list-type=2" == self.server.requests[-1].query[:29]:
                return
            if path == "/bucket/" and sum(r.method == "PUT" for r in self.server.requests) >= 3:
                (self.stored / "step-1/COMMIT").write_bytes(commit)
        self.server.fault = fault
        self.copy(DATA / "STORE/step-1", expect=None)
        self.server.fault = lambda *_: None
        self.assertEqual((self.stored / "step-1/COMMIT").read_bytes(), commit)

    def test_etags_without_quotes(self):
        source = self.large()

        def fault(number, path, range):
            return unquoted()
        self.server.fault = fault
        self.copy(source)
        self.server.fault = lambda *_: None
        self.assert_whole(source=source)

    def test_damaged_source(self):
        source = self.dir / "S"
        shutil.copytree(DATA / "STORE", source)
        victim = max((source / "step-1/data").iterdir(), key=lambda p: p.stat().st_size)
        with open(victim, "r+b") as file:
            os.chmod(victim, 0o644)
            file.seek(300)
            byte = file.read(1)
            file.seek(300)
            file.write(bytes([byte[0] ^ 1]))
        self.assertIn("DATA_LOSS", self.copy(source, expect=2).stderr)
        self.assertFalse((self.stored / "step-1/COMMIT").exists())
        self.assertTrue((self.stored / "step-2/COMMIT").exists())

    def test_reused_files_are_copied_by_the_server(self):
        store = self.dir / "S"
        self.import_step(DATA / "m.safetensors", store / "step-1")
        self.import_step(DATA / "m.safetensors", store / "step-2", "--reuse", "latest")
        said = json.loads(self.run_tool("--json", "copy", store, TO).stdout.splitlines()[-1])
        self.assertGreater(said["bytes_linked"], 0)
        self.assertTrue([r for r in self.server.requests if "x-amz-copy-source" in r.headers])
        self.assert_whole("step-2", store / "step-2")
        # A server that cannot: the bytes are sent.
        shutil.rmtree(self.stored)
        self.server.bucket.copies = False
        self.copy(store)
        self.assert_whole("step-2", store / "step-2")

    def test_interrupted_by_a_signal(self):
        def fault(number, path, range):
            if path.endswith("r1.tmm"):
                child.send_signal(signal.SIGINT)
                time.sleep(0.1)
        self.server.fault = fault
        child = self.start("copy", DATA / "STORE", TO)
        _, err = child.communicate(timeout=20)
        self.server.fault = lambda *_: None
        self.assertEqual(child.returncode, 130, err)
        self.copy(DATA / "STORE")
        self.assert_whole("step-2", DATA / "STORE/step-2")

    def test_signals_are_seen_while_the_server_is_silent(self):
        self.server.fault = lambda number, path, range: object_server.delay(8) if path.endswith("r1.tmm") else None
        child = self.start("copy", DATA / "STORE", TO)
        while not any(r.path.endswith("r0.tmm") for r in self.server.requests):
            time.sleep(0.01)
        begin = time.monotonic()
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=7)
        self.assertEqual(child.returncode, 128 + signal.SIGTERM)
        self.assertLess(time.monotonic() - begin, 7)

    def test_unsigned_requests_prove_their_bytes(self):
        self.server.public = True
        self.copy(DATA / "STORE/step-1", env={"AWS_ENDPOINT_URL": self.server.url, "AWS_NO_SIGN_REQUEST": "1"})
        self.assert_whole()
        puts = [r for r in self.server.requests if r.method == "PUT" and r.body]
        self.assertTrue(all("x-amz-checksum-sha256" in r.headers for r in puts))

    def test_from_bucket_to_bucket(self):
        self.copy(DATA / "STORE")
        for turn in range(2):
            self.run_tool("copy", TO, "s3://bucket/OTHER")
        self.assert_whole("step-2", DATA / "STORE/step-2", self.folder / "bucket/OTHER")
        self.assertIn("is the store of the source", self.run_tool("copy", f"{TO}/step-1", TO + "/", expect=2).stderr)

    def test_names_with_special_characters(self):
        name = "step 1+é%41&#?"
        store = self.dir / "S"
        self.import_step(DATA / "m.safetensors", store / name)
        self.copy(store)
        self.assert_whole(name, store / name)
        self.assertIn("no difference", self.run_tool("diff", f"{TO}/{name}", DATA / "m.safetensors").stdout)

    def test_destinations_that_cannot_be_written_are_refused(self):
        for args in (("adopt", DATA / "m.safetensors", f"{TO}/x"),
                     ("copy", DATA / "STORE", f"{self.server.url}/bucket/x"),
                     ("export", DATA / "STORE/step-1", "s3://bucket/x", "--to", "dcp"),
                     ("export", DATA / "STORE/step-1", f"{self.server.url}/x", "--to", "safetensors")):
            result = self.run_tool(*args, expect=2)
            self.assertRegex(result.stderr, "UNSUPPORTED|READ_ONLY")
        self.assertFalse(self.stored.exists())
        self.assertIn("INVALID_ARGUMENT", self.copy(DATA / "STORE", to="s3://bucket/a/../b", expect=2).stderr)


    def test_doctor_says_whether_copies_are_possible(self):
        for how, text in ((True, "yes copies to it: possible"), (False, "no  copies to it: the server ignores"),
                          ("refused", "no  copies to it: UNSUPPORTED")):
            self.server.bucket.conditional = how
            self.assertIn(text, self.run_tool("doctor", "s3://bucket/STORE", expect=None).stdout)
        self.assertFalse([p for p in self.folder.rglob("*") if "doctor" in p.name])


    def test_answers_that_are_lost_for_long(self):
        # COMMIT was put and its answer lost; before it is put again, the checkpoint is removed and gc has been.
        self.copy(DATA / "STORE/step-2")
        taken = []

        def fault(number, path, range):
            if path.endswith("step-1/COMMIT") and self.server.requests[-1].method == "GET" and not taken and (
                    self.stored / "step-1/manifest/r1.tmm").exists() and "prefix" not in self.server.requests[-1].query:
                taken.append(number)
                return status(503)
        self.server.fault = fault
        child = self.start("copy", DATA / "STORE/step-1", TO)
        while not (self.stored / "step-1/COMMIT").exists() and child.poll() is None:
            time.sleep(0.002)
        self.run_tool("rm", f"{TO}/step-1", expect=None)
        self.run_tool("gc", TO, "--grace", "0", expect=None)
        child.communicate(timeout=30)
        self.server.fault = lambda *_: None
        if (self.stored / "step-1/COMMIT").exists():
            self.run_tool("verify", f"{TO}/step-1")
        self.run_tool("verify", f"{TO}/step-2")


    def test_libcurl_of_the_python_extra(self):
        # The package lies beside pycurl.libs, and libcurl of the system cannot be opened.
        shutil.copytree(ROOT / "python/tensormount", self.dir / "site2/tensormount",
                        ignore=shutil.ignore_patterns("__pycache__", "lib", "bin"))
        libs = self.dir / "site2/pycurl.libs"
        libs.mkdir()
        (libs / "libcurl-1234.so.4").symlink_to(LIBCURL)
        code = ("import os, tensormount as tm; "
                "print(tm.copy(os.environ['S'], 's3://bucket/runs/STORE')['checkpoints'][0]['event']); "
                "print(os.environ['TENSORMOUNT_LIBCURL_ELSE'])")
        env = {**os.environ, **self.env, "PYTHONPATH": str(self.dir / "site2"), "S": str(DATA / "STORE/step-1"),
               "TENSORMOUNT_LIBRARY": str(LIBRARY), "TENSORMOUNT_LIBCURL": "libnothing.so"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
        self.assertEqual(done.stdout.splitlines(), ["copied", str(libs / "libcurl-1234.so.4")], done.stderr)
        self.assert_whole()


class Removal(Writes):
    def setUp(self):
        super().setUp()
        self.copy(DATA / "STORE")
        self.server.forget()

    def test_rm_and_gc(self):
        self.run_tool("rm", f"{TO}/step-2")
        self.assertFalse((self.stored / "step-2/COMMIT").exists())
        self.assertNotIn("step-2", self.run_tool("ls", TO).stdout)
        self.assertIn("no such checkpoint", self.run_tool("rm", f"{TO}/step-2", expect=2).stderr)
        self.assertIn("removed", self.run_tool("fsck", TO).stdout)
        # The name is taken until gc.
        self.assertIn("BUSY", self.copy(DATA / "STORE/step-2", expect=2).stderr)
        self.assertIn("kept", self.run_tool("gc", TO).stdout)
        self.assertTrue(list((self.stored / "step-2").rglob("*.tmm")))
        dry = self.run_tool("gc", TO, "--grace", "0", "--dry-run").stdout
        self.assertTrue(list((self.stored / "step-2").rglob("*.tmm")), dry)
        self.run_tool("gc", TO, "--grace", "0")
        self.assertFalse([p for p in (self.stored / "step-2").rglob("*") if p.is_file()])
        self.assertEqual(self.leftovers(), ([], 0))
        self.assert_whole()
        self.copy(DATA / "STORE/step-2")
        self.assert_whole("step-2", DATA / "STORE/step-2")

    def test_damaged_commit_can_be_removed(self):
        (self.stored / "step-1/COMMIT").write_bytes(b"x" * 100)
        self.run_tool("rm", f"{TO}/step-1")
        self.run_tool("gc", TO, "--grace", "0")
        self.assertFalse([p for p in (self.stored / "step-1").rglob("*") if p.is_file()])

    def test_without_permission_to_delete(self):
        self.server.fault = lambda number, path, range: status(403) if path.endswith("step-1/COMMIT") and (
            self.stored / ".claims/step-1").exists() else None
        self.run_tool("rm", f"{TO}/step-1", expect=2)
        self.server.fault = lambda *_: None

    def test_stray_claims_delete_nothing(self):
        text = json.dumps({"format": "tensormount-claim", "version": 1, "uuid": "0" * 31 + "1", "for": "removal"})
        for name in ("x/y", ".trash"):
            for path, data in ((f".claims/{name}", text + "\n"), (f"{name}/data/mine", "mine")):
                (self.stored / path).parent.mkdir(parents=True, exist_ok=True)
                (self.stored / path).write_text(data)
        self.run_tool("gc", TO, "--grace", "0", "--staging-age", "0")
        self.assertTrue((self.stored / "x/y/data/mine").exists() and (self.stored / ".trash/data/mine").exists())

    def test_prune(self):
        self.assertIn("would remove step-1", self.run_tool("prune", TO, "--keep-last", "1", "--dry-run").stdout)
        self.assert_whole()
        self.run_tool("prune", TO, "--keep-last", "1")
        self.assertEqual([line.split("\t")[0] for line in self.run_tool("ls", TO).stdout.splitlines()], ["step-2"])
        self.server.bucket.older = -100
        self.run_tool("prune", TO, "--keep-last", "1")  # Frees what an earlier one left.
        self.assertFalse([p for p in (self.stored / "step-1").rglob("*") if p.is_file()])

    def test_removal_may_be_cut_at_any_request(self):
        for last in range(1, 40):
            if not (self.stored / "step-1/COMMIT").exists():
                self.run_tool("gc", TO, "--grace", "0")
                self.copy(DATA / "STORE/step-1")
            self.server.forget()
            child = None

            def fault(number, path, range, last=last):
                while child is None:
                    time.sleep(0.001)
                if number == last:
                    return killed(child)
            self.server.fault = fault
            child = self.start("rm", f"{TO}/step-1")
            child.wait(20)
            self.server.fault = lambda *_: None
            if (self.stored / "step-1/COMMIT").exists():
                self.assert_whole()
                self.run_tool("rm", f"{TO}/step-1")
            self.assertNotIn("step-1\t", self.run_tool("ls", TO).stdout)
            if child.returncode == 0:
                break
        else:
            self.fail("rm makes more than 40 requests")
        self.run_tool("gc", TO, "--grace", "0")
        self.assertEqual(self.leftovers(), ([], 0))
        self.assert_whole("step-2", DATA / "STORE/step-2")

    def test_gc_frees_what_an_interrupted_copy_left(self):
        source = self.large()
        to = f"{TO}2"
        stored = self.folder / "bucket/runs/STORE2"

        def fault(number, path, range):
            if any("partNumber=2" in r.query for r in self.server.requests):
                child.kill()
        self.server.fault = fault
        child = self.start("copy", source, to)
        child.wait(30)
        self.server.fault = lambda *_: None
        said = self.run_tool("fsck", to).stdout
        self.assertIn("a copy that is running or was interrupted", said)
        self.assertRegex(said, "unfinished uploads: [1-3]")
        self.assertIn("kept", self.run_tool("gc", to).stdout)
        self.assertTrue(self.server.bucket.uploads)
        self.server.bucket.older = -DAY - 60
        self.run_tool("gc", to)
        self.assertEqual(len(self.server.bucket.uploads), 0)
        self.assertEqual([str(p.relative_to(stored)) for p in stored.rglob("*") if p.is_file()], ["store.json"])

    def test_gc_leaves_a_copy_that_goes_on(self):
        # While gc looks, the copy that seemed to have been left renews its claim.
        claim = self.stored / ".claims/step-9"
        claim.parent.mkdir(exist_ok=True)
        text = {"format": "tensormount-claim", "version": 1, "uuid": "0" * 31 + "1", "for": "copy", "by": "x"}
        claim.write_text(json.dumps(text) + "\n")
        (self.stored / "step-9").mkdir()
        (self.stored / "step-9/data").write_text("x")
        self.server.bucket.older = -DAY - 60

        def fault(number, path, range):
            if self.server.requests and "uploads=" in self.server.requests[-1].query:
                self.server.replace("/bucket/runs/STORE/.claims/step-9", (json.dumps(text) + "\n").encode())
        self.server.fault = fault
        self.run_tool("gc", TO)
        self.assertTrue((self.stored / "step-9/data").exists())

    def test_lost_commit_is_found(self):
        (self.stored / "step-1/COMMIT").unlink()
        result = self.run_tool("fsck", TO, expect=1)
        self.assertIn("step-1: the checkpoint has no COMMIT", result.stdout)
        self.run_tool("gc", TO, "--grace", "0", "--staging-age", "0")
        self.assertTrue(list((self.stored / "step-1").rglob("*.tmm")))


class Exports(Writes):
    def exported(self, to, *more, **options):
        return self.run_tool("export", DATA / "BIG/step-1", to, *more, **options)

    def test_one_file(self):
        self.exported("s3://bucket/x/m.safetensors", "--to", "safetensors")
        self.exported(self.dir / "m.safetensors", "--to", "safetensors")
        self.assertTrue(filecmp.cmp(self.folder / "bucket/x/m.safetensors", self.dir / "m.safetensors", shallow=False))
        self.assertIn("ALREADY_EXISTS", self.exported("s3://bucket/x/m.safetensors", "--to", "safetensors", expect=2).stderr)
        self.exported("s3://bucket/x/m.safetensors", "--to", "safetensors", "--if-exists", "replace")
        self.assertEqual(self.leftovers(), ([], 0))

    def test_directories(self):
        for form in ("hf", "npy", "zarr"):
            more = ("--hf-part-size", "30MB") if form == "hf" else ()
            self.exported(f"s3://bucket/x/{form}", "--to", form, "--ranks", "3", *more)
            self.exported(self.dir / form, "--to", form, *more)
            there, here = self.folder / "bucket/x" / form, self.dir / form
            files = {str(p.relative_to(here)) for p in here.rglob("*") if p.is_file()}
            self.assertEqual({str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}, files)
            self.assertEqual(filecmp.cmpfiles(here, there, files, shallow=False)[1:], ([], []))
        puts = [r.path for r in self.server.requests if r.method == "PUT" and "/hf/" in r.path]
        self.assertTrue(puts[-1].endswith("model.safetensors.index.json"))
        self.assertIn("ALREADY_EXISTS", self.exported("s3://bucket/x/hf", "--to", "hf", expect=2).stderr)

    def test_failures_leave_nothing(self):
        failed = []

        def fault(number, path, range):
            if "00002-of" in path and not failed:
                failed.append(number)
                return status(403)
        self.server.fault = fault
        result = self.exported("s3://bucket/x/hf", "--to", "hf", "--hf-part-size", "30MB", "--ranks", "2", expect=2)
        self.assertIn("PERMISSION_DENIED", result.stderr)
        self.assertFalse([p for p in (self.folder / "bucket/x").rglob("*") if p.is_file()])
        self.assertEqual(self.leftovers(), ([], 0))


class Drains(Writes):
    def wait_for(self, what, child, seconds=20):
        end = time.monotonic() + seconds
        while not what():
            self.assertIsNone(child.poll(), child.returncode is not None and child.communicate())
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def published(self, name):
        return (self.stored / name / "COMMIT").exists()

    def test_steps_are_copied_as_they_come(self):
        store = self.dir / "S"
        self.import_step(DATA / "m.safetensors", store / "step-1")
        child = self.start("copy", store, TO, "--drain", "--retain", "last=2")
        self.wait_for(lambda: self.published("step-1"), child)
        for name in ("step-2", "step-3", "step-4"):
            self.import_step(DATA / f"{'m' if name == 'step-3' else 'other'}.safetensors", store / name)
            self.wait_for(lambda: self.published(name), child)
        self.wait_for(lambda: not self.published("step-2"), child)
        time.sleep(0.3)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=20)
        self.assertEqual(child.returncode, 0, err)
        self.assertIn("removed step-1", out)
        self.assertEqual([line.split("\t")[0] for line in self.run_tool("ls", TO).stdout.splitlines()],
                         ["step-3", "step-4"])

    def test_it_waits_for_a_server_that_fails(self):
        store = self.dir / "S"
        self.import_step(DATA / "m.safetensors", store / "step-1")
        self.server.fault = lambda *_: status(403)
        child = self.start("copy", store, TO, "--drain")
        self.wait_for(lambda: len(self.server.requests) > 4, child)
        self.server.fault = lambda *_: None
        self.wait_for(lambda: self.published("step-1"), child)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
        self.assertIn("next try in", err)

    def test_it_reports_a_missing_bucket_and_deleted_objects(self):
        store = self.dir / "S"
        self.import_step(DATA / "m.safetensors", store / "step-1")
        child = self.start("copy", store, "s3://nothing/STORE", "--drain")
        self.wait_for(lambda: len(self.server.requests) > 10, child)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=20)
        self.assertEqual(child.returncode, 128 + signal.SIGTERM)
        self.assertIn("NoSuchBucket", err)
        # An object that somebody deletes before the check: the next try puts it again.
        deleted = []

        def fault(number, path, range):
            if not deleted and path == "/bucket/" and (self.stored / "step-1/manifest/r1.tmm").exists():
                deleted.append((self.stored / "step-1/manifest/r1.tmm").unlink())
        self.server.fault = fault
        child = self.start("copy", store, TO, "--drain")
        self.wait_for(lambda: self.published("step-1"), child)
        self.assertTrue(deleted)
        self.assert_whole("step-1", store / "step-1")

    def test_a_restart_copies_nothing_that_was_pruned(self):
        store = self.dir / "S"
        for n in range(1, 5):
            self.import_step(DATA / "m.safetensors", store / f"step-{n}", "--reuse", "off")
        for turn in range(2):
            self.server.forget()
            child = self.start("copy", store, TO, "--drain", "--retain", "last=2")
            self.wait_for(lambda: self.published("step-4"), child)
            time.sleep(0.5)
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=20)
            self.assertEqual(child.returncode, 0)
            names = {r.path.split("/")[4] for r in self.server.requests if r.path.endswith("/COMMIT") and r.method == "PUT"}
            self.assertEqual(names, [{"step-3", "step-4"}, set()][turn])

    def test_one_that_cannot_be_copied_does_not_hold_the_others_up(self):
        store = self.dir / "S"
        self.import_step(DATA / "m.safetensors", store / "step-1")
        self.import_step(DATA / "other.safetensors", store / "step-2")
        self.server.fault = lambda number, path, range: status(403) if "step-1" in path else None
        child = self.start("copy", store, TO, "--drain")
        self.wait_for(lambda: self.published("step-2"), child)
        self.server.fault = lambda *_: None
        self.wait_for(lambda: self.published("step-1"), child)

    def test_to_a_directory(self):
        store, to = self.dir / "S", self.dir / "T"
        self.import_step(DATA / "m.safetensors", store / "a")
        child = self.start("copy", store, to, "--drain")
        self.wait_for(lambda: (to / "a/COMMIT").exists(), child)
        self.import_step(DATA / "other.safetensors", store / "b")
        self.wait_for(lambda: (to / "b/COMMIT").exists(), child)
        time.sleep(0.3)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=20)
        self.assertEqual(child.returncode, 0)

    def test_failures_that_do_not_pass_end_it(self):
        self.server.bucket.conditional = False
        self.assertIn("--unconditional", self.run_tool("copy", DATA / "STORE", TO, "--drain", expect=2).stderr)
        self.run_tool("copy", DATA / "nothing", TO, "--drain", expect=2)
        self.assertIn("one STORE", self.run_tool("copy", DATA / "STORE", DATA / "BIG", TO, "--drain", expect=2).stderr)


if __name__ == "__main__":
    harness.main()
