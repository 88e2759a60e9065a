# SPDX-License-Identifier: Apache-2.0
"""Checkpoints behind http and https, over the stand-in server of tests/support/object_server.py."""

import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import harness
import object_server
from object_server import ObjectServer
from remote_sources import DATA, LIBRARY, MOST_PEAK, ROOT, Remote, WEIGHT, linked, setUpModule  # noqa: F401


class Http(Remote):
    def test_ls_prints_the_same(self):
        for source in self.SOURCES:
            self.same(source, "ls")
            self.same(source, "ls", "-l")
            self.same(source, "ls", "*b*")
        self.assertFalse([r for r in self.server.requests if r.method != "GET"])

    def test_info_of_foreign_checkpoints_prints_the_same(self):
        for source in self.SOURCES[1:]:
            # The identity of a foreign checkpoint depends on its place.
            self.same(source, "info", mask=rb"uuid +[0-9a-f]{32}")

    def test_info_of_own_checkpoint_prints_the_same(self):
        local = self.run_tool("info", DATA / "STORE" / "step-1").stdout
        remote = self.run_tool("info", f"{self.url}/STORE/step-1").stdout
        # What is shared with other checkpoints is not known where nothing lists the store.
        expected = re.sub("(?m)^stored .*\n", "", local).replace(str(DATA), self.url)
        self.assertEqual(remote, expected)

    def test_info_of_a_key_prints_the_same(self):
        for source in self.SOURCES[:3]:
            for key in ("w", "layers.0.attn/qkv", "empty", "fp4"):
                self.same(source, "info", key)
        self.same("dcp", "info", "model.rows")

    def test_cat_prints_the_same(self):
        for source in self.SOURCES[:3]:
            for key in ("big", "big[7:9, 3:1000]", "w[:, 5]", "steps", "layers.0.attn/qkv"):
                self.same(source, "cat", key)
        self.same("dcp", "cat", "model.transposed")
        self.same("dcp", "cat", "model.grid", "--as", "text")

    def test_verify_of_foreign_checkpoints_prints_the_same(self):
        for source in self.SOURCES[1:]:
            self.same(source, "verify")

    def test_verify_of_own_checkpoint_prints_the_same(self):
        self.same("STORE/step-1", "verify")

    def test_verify_finds_damage_behind_a_url(self):
        linked(DATA / "STORE", self.dir / "STORE")
        victim = max((self.dir / "STORE/step-1/data").iterdir(), key=lambda file: file.stat().st_size)
        raw = bytearray(victim.read_bytes())
        raw[1_000_000] ^= 1
        server = self.serve(self.dir)
        server.replace(f"STORE/step-1/data/{victim.name}", raw)
        result = self.run_tool("verify", f"{server.url}/STORE/step-1", expect=1)
        self.assertIn("tensor big", result.stdout)
        self.assertIn("checksum mismatch", result.stdout)
        self.assertIn("DATA_LOSS", self.run_tool("cat", f"{server.url}/STORE/step-1", "big", expect=2).stderr)

    def test_export_writes_the_same(self):
        for source in self.SOURCES:
            for name, url in (("local", DATA / source), ("remote", f"{self.url}/{source}")):
                self.run_tool("export", url, self.dir / name, "--to", "safetensors", "--if-exists", "replace")
            self.assertEqual((self.dir / "remote").read_bytes(), (self.dir / "local").read_bytes(), source)

    def test_diff_and_load_compare_with_local_files(self):
        for source in self.SOURCES:
            self.assertIn("no difference", self.run_tool("diff", f"{self.url}/{source}", DATA / source).stdout)
            self.run_tool("load", f"{self.url}/{source}", "--ranks", "2", "--shard", "cols", "--compare", DATA / source)
        result = self.run_tool("diff", f"{self.url}/STORE/step-1", f"{self.url}/STORE/step-2", expect=1)
        self.assertIn("9 changed", result.stdout)
        self.run_tool("import", f"{self.url}/hf", self.dir / "STORE" / "step-1")
        self.run_tool("diff", self.dir / "STORE" / "step-1", DATA / "hf")

    def test_opening_costs_four_requests(self):
        for source in ("STORE/step-1", "MANY/step-1", "m.safetensors", "many.safetensors"):
            self.server.forget()
            self.same(source, "ls")
            self.assertLessEqual(len(self.server.requests), 4, self.paths())
            self.assertEqual({r.status for r in self.server.requests}, {206}, self.paths())

    def test_a_tensor_costs_its_bytes(self):
        self.same("BIG/step-1", "cat", "w")
        self.assertGreaterEqual(self.server.sent(), WEIGHT)
        self.assertLessEqual(self.server.sent(), 1.01 * WEIGHT)

    def test_a_tensor_of_a_file_costs_its_bytes(self):
        self.same("big.safetensors", "cat", "w")
        self.assertLessEqual(self.server.sent(), 1.01 * WEIGHT)

    def test_a_row_costs_little(self):
        for source in ("BIG/step-1", "big.safetensors"):
            self.server.forget()
            self.same(source, "cat", "w[3333]")
            self.assertLessEqual(self.server.sent(), 400 << 10, [(r.path, r.range) for r in self.server.requests])

    def test_server_that_ignores_ranges_is_refused(self):
        self.server.fault = lambda number, path, range: object_server.no_ranges()
        self.fails("ls", f"{self.url}/big.safetensors", code="UNSUPPORTED", says="ignores the Range header")
        self.assertEqual(set(self.paths()), {"/big.safetensors"})
        self.server.forget()
        self.fails("cat", f"{self.url}/MANY/step-1", "layers.7.weight", code="UNSUPPORTED", says="ignores the Range header")
        self.assertGreater(self.server.faults()["no_ranges"], 0)
        # Small objects come whole, and are read.
        self.same("dcp", "cat", "model.rows")

    def test_server_that_ignores_ranges_is_asked_once(self):
        self.server.fault = lambda number, path, range: object_server.no_ranges()
        self.run_tool("ls", f"{self.url}/big.safetensors", expect=2)
        self.assertEqual(self.paths(), ["/big.safetensors"])

    def test_missing_and_forbidden_objects_are_reported(self):
        self.fails("ls", f"{self.url}/none.safetensors", code="NOT_FOUND", says=f"{self.url}/none.safetensors")
        self.fails("ls", f"{self.url}/none", code="NOT_FOUND", says=f"{self.url}/none")
        self.fails("ls", f"{self.url}/STORE/step-9", code="NOT_FOUND", says=f"{self.url}/STORE/step-9")
        self.server.fault = lambda number, path, range: object_server.status(403)
        self.fails("ls", f"{self.url}/m.safetensors", code="PERMISSION_DENIED", says="403 Forbidden")
        self.fails("ls", f"{self.url}/STORE/step-1", code="PERMISSION_DENIED", says="403 Forbidden")
        self.server.fault = lambda number, path, range: object_server.status(401)
        self.fails("ls", f"{self.url}/m.safetensors", code="PERMISSION_DENIED", says="401 Unauthorized")

    def test_empty_object_is_reported_like_an_empty_file(self):
        local = self.run_tool("ls", DATA / "empty.safetensors", expect=2).stderr
        remote = self.run_tool("ls", f"{self.url}/empty.safetensors", expect=2).stderr
        self.assertEqual(self.server.requests[0].status, 416)
        self.assertEqual(remote.replace(self.url, str(DATA)), local)

    def test_empty_object_of_a_server_without_ranges(self):
        self.server.fault = lambda number, path, range: object_server.status(
            200, {"ETag": '"e"', "Content-Length": "0"})
        self.fails("ls", f"{self.url}/empty.safetensors", code="DATA_LOSS", says="a file of 0 bytes is too short")

    def test_stores_are_not_listed(self):
        for command in (["ls"], ["info"], ["verify"], ["cat", "w"]):
            for source in ("STORE", "STORE/latest"):
                self.fails(command[0], f"{self.url}/{source}", *command[1:], code="UNSUPPORTED",
                           says="servers for HTTP list no directories")

    def test_directory_that_the_server_lists(self):
        """nginx and others redirect /DIR to /DIR/, which may be a page: of any length, or with a file's headers."""
        page = b"<html>"
        for name in ("v1.0", "a b.x"):
            linked(DATA / "hf", self.dir / name)
        server = self.serve(self.dir)
        for headers in ({"Content-Length": "1000000"}, {"ETag": '"page"', "Content-Length": str(len(page))}):
            server.answer = lambda method, path, _, body: (
                object_server.Answer(301, {"Location": f"{path}/".replace(" ", "%20")}) if path in ("/v1.0", "/a b.x") else
                object_server.Answer(200, headers, page) if path.endswith("/") else None)
            for name in ("v1.0", "a%20b.x"):
                server.forget()
                self.assertEqual(self.run_tool("ls", f"{server.url}/{name}").stdout, self.run_tool("ls", DATA / "hf").stdout)
                self.assertIn(301, {r.status for r in server.requests})
                self.assertFalse([r.path for r in server.requests if r.path.endswith("/")])

    def test_names_are_encoded(self):
        folder = self.dir / "a b+c%d é"
        linked(DATA / "m.safetensors", folder / "m #1?.safetensors")
        linked(DATA / "STORE", folder / "STORE")
        server = self.serve(self.dir)
        for url in (f"{server.url}/a%20b+c%25d%20%C3%A9", f"{server.url}/a b%2Bc%25d é"):
            self.same("STORE/step-1", "ls", url=f"{url}/STORE/step-1")
            self.same("m.safetensors", "cat", "w", url=f"{url}/m%20%231%3F.safetensors")

    def test_copy_of_a_checkpoint_behind_a_url(self):
        self.run_tool("copy", f"{self.url}/STORE/step-1", self.dir / "here")
        self.run_tool("verify", self.dir / "here" / "step-1")
        self.run_tool("diff", self.dir / "here" / "step-1", DATA / "STORE" / "step-1")
        # Nothing is published if a data file is gone.
        self.server.fault = lambda number, path, range: object_server.status(404) if "/data/" in path else None
        self.run_tool("copy", f"{self.url}/BIG/step-1", self.dir / "other", expect=2)
        self.assertGreater(self.server.faults()["status"], 0)
        self.assertFalse((self.dir / "other" / "step-1").exists())

    def test_writing_to_a_url_is_refused(self):
        for args in (["import", DATA / "m.safetensors", f"{self.url}/STORE/step-3"], ["init", f"{self.url}/NEW"],
                     ["prune", f"{self.url}/STORE", "--keep-last", "1"], ["rm", f"{self.url}/STORE/step-1"],
                     ["export", DATA / "m.safetensors", f"{self.url}/out.safetensors", "--to", "safetensors"]):
            result = self.run_tool(*args, expect=2)
            self.assertRegex(result.stderr, "UNSUPPORTED|READ_ONLY", args)
        self.assertFalse([r for r in self.server.requests if r.method != "GET"])

    def test_passwords_in_urls_are_refused_and_not_shown(self):
        port = self.url.rpartition(":")[2]
        result = self.run_tool("ls", f"http://me:PASSWORD@127.0.0.1:{port}/m.safetensors", expect=2)
        self.assertIn("INVALID_ARGUMENT", result.stderr)
        self.assertNotIn("PASSWORD", result.stderr)


class Messages(Remote):
    def test_signatures_in_urls_are_not_shown(self):
        query = "?X-Amz-Signature=PRESIGNED"
        self.same("m.safetensors", "ls", url=f"{self.url}/m.safetensors{query}")
        self.assertIn("Signature", self.server.requests[0].query)
        result = self.run_tool("ls", f"{self.url}/none.safetensors{query}", expect=2)
        self.assertIn("NOT_FOUND", result.stderr)
        self.assertNotIn("PRESIGNED", result.stderr)

    def test_missing_libcurl_is_named(self):
        env = {"TENSORMOUNT_LIBCURL": "/no/libcurl.so"}
        result = self.run_tool("ls", f"{self.url}/m.safetensors", expect=2, env=env)
        self.assertRegex(result.stderr, "^tensormount: UNSUPPORTED: .*Install libcurl4")
        self.run_tool("ls", DATA / "m.safetensors", env=env)


class Replaced(Remote):
    """An object that is replaced while it is read: the bytes of one object, or STALE."""

    def setUp(self):
        super().setUp()
        self.folder = self.dir / "www"
        self.folder.mkdir()
        self.server = self.serve(self.folder)
        self.old, self.new = bytes([1]) * WEIGHT, bytes([2]) * WEIGHT
        for name, raw in (("old", self.old), ("new", self.new)):
            harness.write_safetensors(self.dir / name, {"w": ("U8", (WEIGHT,), raw)})

    def put(self, name="old", age=0):
        self.server.replace("m.safetensors", (self.dir / name).read_bytes())
        if age:
            os.utime(self.folder / "m.safetensors", (time.time() - age,) * 2)

    def test_bytes_are_never_mixed(self):
        url = f"{self.server.url}/m.safetensors"
        self.put(age=3600)
        self.assertEqual(self.run_tool("cat", url, "w", text=False).stdout, self.old)
        count = len(self.server.requests)
        self.assertGreaterEqual(count, 3)
        for sends, conditions, code in ((["ETag", "Last-Modified"], True, 412), (["ETag"], False, 206),
                                        (["Last-Modified"], True, 412), (["Last-Modified"], False, 206)):
            self.server.sends, self.server.conditions = sends, conditions
            for at in range(1, count + 1):
                self.put(age=3600)
                self.server.forget()
                self.server.fault = lambda number, path, range: self.put("new") if number == at else None
                result = self.run_tool("cat", url, "w", text=False, expect=None)
                case = (sends, conditions, at, result.stderr)
                if at == 1:
                    self.assertEqual((result.returncode, result.stdout), (0, self.new), case)
                    continue
                self.assertEqual(result.returncode, 2, case)
                self.assertIn(b"STALE", result.stderr, case)
                self.assertIn(b"was replaced", result.stderr, case)
                self.assertEqual(result.stdout, self.old[:len(result.stdout)], case)
                # The server did answer with the new object, or refused to.
                self.assertIn(code, {r.status for r in self.server.requests if r.number >= at}, case)

    def test_object_of_another_size_is_stale(self):
        self.put()
        self.server.fault = lambda number, path, range: (
            self.server.replace("m.safetensors", b"short") if number == 2 else None)
        self.server.conditions = False
        self.fails("cat", f"{self.server.url}/m.safetensors", "w", code="STALE", says="was replaced")

    def test_answers_that_disagree_on_the_size_are_stale(self):
        self.put()
        self.server.fault = lambda number, path, range: object_server.lying_total() if number == 2 else None
        self.fails("cat", f"{self.server.url}/m.safetensors", "w", code="STALE", says="was replaced")
        self.assertEqual(self.server.faults()["lying_total"], 1)

    def test_object_that_vanishes_is_stale(self):
        self.put()
        self.server.fault = lambda number, path, range: object_server.status(404) if number > 1 else None
        self.fails("cat", f"{self.server.url}/m.safetensors", "w", code="STALE", says="m.safetensors")

    def test_object_without_identity_is_refused(self):
        self.put()
        self.server.sends = []
        self.fails("cat", f"{self.server.url}/m.safetensors", "w", code="UNSUPPORTED",
                   says="neither an ETag nor Last-Modified")
        result = self.run_tool("ls", f"{self.server.url}/m.safetensors?X-Amz-Signature=PRESIGNED", expect=2)
        self.assertIn("neither an ETag", result.stderr)
        self.assertNotIn("PRESIGNED", result.stderr)

    def lines_of_python(self):
        """What a program prints that opens, reads, meets the new object, and opens again."""
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        self.put()
        script = """
import sys, tensormount as tm
with tm.open(sys.argv[1]) as checkpoint:
    print(set(checkpoint["w"][:4096].tolist()), flush=True)
    sys.stdin.readline()
    try:
        print(set(checkpoint["w"][8_000_000:].tolist()))
    except tm.StaleError as error:
        print("StaleError", error)
with tm.open(sys.argv[1]) as checkpoint:
    try:
        print(set(checkpoint["w"][8_000_000:].tolist()))
    except tm.StaleError as error:
        print("again", error)
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY),
                       "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen([sys.executable, "-c", script, f"{self.server.url}/m.safetensors"], env=environment,
                              text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            self.addCleanup(child.kill)
            self.assertEqual(child.stdout.readline(), "{1}\n")
            self.put("new")
            out, err = child.communicate("go\n", timeout=30)
        self.assertEqual((len(out.splitlines()), err), (2, ""), err)
        self.assertIn(412, {r.status for r in self.server.requests})
        return out.splitlines()

    def test_python_gets_stale(self):
        self.assertRegex(self.lines_of_python()[0], "^StaleError .*m.safetensors.*was replaced")

    def test_python_opens_the_new_object_after_stale(self):
        self.assertEqual(self.lines_of_python()[1], "{2}")


class Faults(Remote):
    """Servers that break, lie or attack."""

    def test_broken_answers_do_not_change_bytes(self):
        self.run_tool("export", DATA / "BIG/step-1", self.dir / "local", "--to", "safetensors")
        actions = {
            "503": object_server.status(503), "500": object_server.status(500),
            "429": object_server.status(429, {"Retry-After": "0"}), "reset": object_server.reset(0),
            "reset later": object_server.reset(1_000_000), "short": object_server.short(),
            "short by half": object_server.short(4 << 20)}

        def one(item):
            name, action = item
            server = self.serve(DATA)
            server.fault = lambda number, path, range: action if number % 20 in (2, 7) else None
            result = self.run_tool("export", f"{server.url}/BIG/step-1", self.dir / name, "--to", "safetensors")
            return name, action.name, server, result

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for name, action, server, result in pool.map(one, actions.items()):
                self.assertGreaterEqual(server.faults()[action], 2, name)
                self.assertEqual((self.dir / name).read_bytes(), (self.dir / "local").read_bytes(), name)
                self.assertEqual(result.stderr, "", name)
                # A range goes on where it stopped.
                self.assertLess(server.sent(), 1.02 * 3 * WEIGHT, name)

    def test_wrong_ranges_are_tried_again(self):
        action = object_server.wrong_range(4096)
        self.server.fault = lambda number, path, range: action if number % 3 else None
        self.same("m.safetensors", "cat", "big")
        self.same("STORE/step-1", "cat", "w")
        self.assertGreater(self.server.faults()["wrong_range"], 3)

    def test_server_that_hangs_holds_up_no_other(self):
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        script = """
import os, sys, threading, time, tensormount as tm
hangs, url, ended = sys.argv[1], sys.argv[2], []
def wait(number):
    try:
        tm.open(f"{hangs}/{number}.safetensors")
    except tm.Error as error:
        ended.append(error)
threads = [threading.Thread(target=wait, args=(n,), daemon=True) for n in range(40)]
for thread in threads: thread.start()
for line in sys.stdin:  # All that are sent at a time have arrived.
    with tm.open(url) as checkpoint:
        print(checkpoint["w"][...].shape, len(ended), flush=True)
    os._exit(0)
"""
        hangs = self.serve(DATA)
        hangs.fault = lambda number, path, range: object_server.delay(60)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY),
                       "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen([sys.executable, "-c", script, hangs.url, f"{self.url}/m.safetensors"], env=environment,
                              text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            self.addCleanup(child.kill)
            self.wait_for("32 requests", lambda: len(hangs.requests) >= 32)
            out, _ = child.communicate("go\n", timeout=15)
        self.assertEqual(out, "(64, 48) 0\n")
        self.assertEqual(len(hangs.requests), 32)

    def test_signals_end_reads_of_a_server_that_hangs(self):
        """At once, and nobody writes to the memory of the read afterwards."""
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        script = """
import os, sys, numpy, tensormount as tm
url, s3 = sys.argv[1:]
opened = tm.open(f"{url}/BIG/step-1")
into = numpy.full((6144, 1024), 7, "f4")
calls = {
    "open": lambda: tm.open(f"{url}/m.safetensors"),
    "read": lambda: opened["w"][...],
    "read into": lambda: opened["w"].read(out=into),
    "bytes": lambda: opened["v"].read_bytes(100, 5000),
    "many": lambda: opened.read_many(["v", "z"]),
    "load": lambda: tm.load({"w": numpy.zeros((6144, 1024), "f4")}, f"{url}/BIG/step-1"),
    "list": lambda: tm.Store(s3).list(),
}
print("ready", flush=True)
sys.stdin.readline()  # The server hangs from now on.
for name, call in calls.items():
    try:
        print(name, flush=True)
        call()
        print("returned")
    except KeyboardInterrupt:
        pass
print("ended", flush=True)
sys.stdin.readline()  # The server answers now.
print((into == 7).all(), opened["w"][0, :2].shape, (into == 7).all())
"""
        gate = threading.Event()
        self.addCleanup(gate.set)
        waiting = []

        def fault(number, path, range):
            if server.held:
                waiting.append(path)
                gate.wait(60)

        server, bucket = self.serve(DATA), self.serve(DATA, s3=True)
        server.held, server.fault = False, fault
        bucket.fault = lambda number, path, range: (waiting.append(path), gate.wait(60)) and None
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY),
                       "PYTHONDONTWRITEBYTECODE": "1", "TENSORMOUNT_PATIENCE": "600",
                       "AWS_ENDPOINT_URL": bucket.url, "AWS_NO_SIGN_REQUEST": "1"}
        with subprocess.Popen([sys.executable, "-c", script, server.url, "s3://bucket/STORE"], env=environment, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            self.addCleanup(child.kill)
            said = []
            self.assertEqual(child.stdout.readline(), "ready\n")
            server.held = True
            child.stdin.write("go\n")
            child.stdin.flush()
            before = 0  # Requests before this call: it may make its own before its name is read here.
            for line in child.stdout:
                said.append(line.strip())
                if said[-1] == "ended":
                    break
                self.wait_for(f"a request of {said[-1]}", lambda: len(waiting) > before)
                before = len(waiting)
                child.send_signal(signal.SIGINT)
            gate.set()
            server.held = False
            out, _ = child.communicate("go\n", timeout=20)
        self.assertEqual(said, ["open", "read", "read into", "bytes", "many", "load", "list", "ended"])
        self.assertEqual(out, "True (2,) True\n")

    def test_readers_that_share_a_request_that_fails(self):
        """One of them asks anew, and the others wait for it: nobody returns memory that nothing was written to."""
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        script = """
import sys, threading, tensormount as tm
url, ends = sys.argv[1], []
def read():
    try:
        with tm.open(url) as checkpoint:
            ends.append(str(len(checkpoint)))
    except tm.Error as error:
        ends.append(type(error).__name__)
read()  # The object is known now, and the rest of its header is not.
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(ends[0], *sorted(ends[1:]))
"""
        rest = []

        def fault(number, path, range):
            if range != "bytes=0-65535":
                rest.append(range)
                if len(rest) <= 2:
                    return self.late_refusal
        self.server.fault = fault
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY),
                       "PYTHONDONTWRITEBYTECODE": "1"}
        out = subprocess.run([sys.executable, "-c", script, f"{self.url}/many.safetensors"], env=environment, text=True,
                             capture_output=True, timeout=30)
        # The one that asked first is refused.
        self.assertEqual(out.stdout.split(), ["PermissionDeniedError", *["1000"] * 7, "PermissionDeniedError"], out.stderr)
        self.assertEqual(len(rest), 3, rest)

    @staticmethod
    def late_refusal(answer):
        object_server.status(403)(answer)
        object_server.delay(0.3)(answer)
    late_refusal.__func__.name = "late_refusal"

    def test_too_long_a_wait_is_not_begun(self):
        self.server.fault = lambda number, path, range: object_server.status(503, {"Retry-After": "100"})
        code, out, err, seconds, peak = self.measured("ls", f"{self.url}/m.safetensors")
        self.assertRegex(err, "DEADLINE_EXCEEDED: .*503 Service Unavailable; no time for another try")
        self.assertLess(seconds, 3)
        self.assertEqual({r.status for r in self.server.requests}, {503})

    def test_hostile_servers_get_a_named_error_quickly(self):
        s = object_server
        loop = self.serve(DATA)
        loop.fault = lambda number, path, range: s.redirect(f"{loop.url}/x{number}")
        # The error if `ls` of a file gets such an answer, and if reads of data files do. None: the right bytes, which
        # their hashes prove.
        cases = {
            "other bytes": (s.wrong_range(), "DATA_LOSS.*asked for the bytes", "DATA_LOSS.*asked for the bytes"),
            "other bytes, hidden": (s.wrong_range(honest=False), "DATA_LOSS", "DATA_LOSS.*checksum mismatch"),
            "larger total": (s.lying_total(), "DATA_LOSS|STALE", None),
            "smaller total": (s.lying_total(-5_000_000), "DATA_LOSS|STALE", "DATA_LOSS|STALE"),
            "endless": (s.endless(), "DATA_LOSS.*more than", "DATA_LOSS.*more"),
            "headers": (s.header_bomb(), "DATA_LOSS.*64 KiB of headers", "DATA_LOSS.*64 KiB of headers"),
            "redirects": (s.redirect(loop.url), "UNAVAILABLE.*more than 10 redirects", "more than 10 redirects"),
            "redirect to a file": (s.redirect("file:///etc/passwd"), "INVALID_ARGUMENT.*neither http", "neither http"),
            "gzip": (s.gzipped(), "UNSUPPORTED.*encoded .gzip.", "UNSUPPORTED.*encoded"),
            "drip": (s.drip(), "DEADLINE_EXCEEDED.*no answer in time", "DEADLINE_EXCEEDED"),
            "silence": (s.delay(20), "DEADLINE_EXCEEDED.*no answer in time", "DEADLINE_EXCEEDED"),
            "503 for ever": (s.status(503), *["(UNAVAILABLE|DEADLINE_EXCEEDED).*503"] * 2),
            "resets for ever": (s.reset(10), *["(UNAVAILABLE|DEADLINE_EXCEEDED).*[Rr]eset"] * 2),
            "418": (s.status(418), "UNSUPPORTED.*418", "UNSUPPORTED.*418"),
            "204": (s.status(204), "UNSUPPORTED.*204", "UNSUPPORTED.*204"),
        }

        def one(case):
            name, first = case
            action, *says = cases[name]
            server = self.serve(DATA)
            env = {"TENSORMOUNT_PATIENCE": "1" if "DEADLINE_EXCEEDED" in (says[0] or "") else "20"}
            if first:
                server.fault = lambda number, path, range: action
                got = self.measured("ls", f"{server.url}/m.safetensors", env=env)
            else:
                server.fault = lambda number, path, range: action if "/data/" in path else None
                got = self.measured("cat", f"{server.url}/BIG/step-1", "w", env=env)
            return name, first, action, says[not first], server, got

        right = self.run_tool("cat", DATA / "BIG/step-1", "w", text=False).stdout
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            waits = pool.submit(self.wait_that_the_server_asks_for)
            cases_of_both = [(name, first) for name in cases for first in (True, False)]
            for name, first, action, says, server, got in pool.map(one, cases_of_both):
                with self.subTest(name, first=first):
                    code, out, err, seconds, peak = got
                    self.assertTrue(right.startswith(out), f"{len(out)} bytes")
                    if says is None:
                        self.assertEqual((code, err, len(out)), (0, "", WEIGHT))
                    else:
                        self.assertEqual(code, 2, err)
                        self.assertRegex(err, f"^tensormount: .*({says})")
                        self.assertEqual(len([l for l in err.splitlines() if "hint:" not in l]), 1, err)
                    self.assertLess(seconds, 10)
                    self.assertGreater(peak, 0)
                    self.assertLess(peak, MOST_PEAK)
                    self.assertGreater(server.faults()[action.name], 0)
                    self.assertTrue(first or all(r.fault for r in server.requests if "/data/" in r.path))
            waits.result()
        self.assertGreaterEqual(len(loop.requests), 10)

    def wait_that_the_server_asks_for(self):
        server = self.serve(DATA)
        server.fault = lambda number, path, range: (
            object_server.status(429, {"Retry-After": "1"}) if number == 1 else None)
        code, out, err, seconds, peak = self.measured("ls", f"{server.url}/m.safetensors")
        self.assertEqual((code, [r.status for r in server.requests]), (0, [429, 206]), err)
        self.assertGreater(seconds, 0.95)

    def test_a_long_answer_is_refused_within_its_range(self):
        self.server.fault = lambda number, path, range: object_server.longer() if "/data/" in path else None
        self.fails("cat", f"{self.url}/BIG/step-1", "w", code="DATA_LOSS", says="more")
        self.assertGreater(self.server.faults()["longer"], 0)

    def test_redirects_are_followed(self):
        other = self.serve(DATA)
        self.server.fault = lambda number, path, range: object_server.redirect(other.url + path, 307)
        self.same("STORE/step-1", "cat", "w")
        self.assertEqual({r.status for r in self.server.requests}, {307})
        self.assertEqual(len(other.requests), len(self.server.requests))
        self.server.fault = lambda number, path, range: (
            object_server.redirect("m.safetensors") if path == "/there" else None)
        self.same("m.safetensors", "cat", "w", url=f"{self.url}/there")

    def test_server_that_is_not_there_is_unavailable(self):
        with ObjectServer(self.dir) as gone:
            pass
        code, out, err, seconds, peak = self.measured("ls", f"{gone.url}/m.safetensors", env={"TENSORMOUNT_PATIENCE": "1"})
        self.assertEqual(code, 2)
        self.assertRegex(err, "^tensormount: (UNAVAILABLE|DEADLINE_EXCEEDED): .*[Cc]onnect")
        self.assertLess(seconds, 5)
        result = self.run_tool("ls", "http://no-such-host.invalid/m.safetensors", expect=2,
                               env={"TENSORMOUNT_PATIENCE": "1"})
        self.assertRegex(result.stderr, "UNAVAILABLE|DEADLINE_EXCEEDED")
        self.assertIn("no-such-host.invalid", result.stderr)


class Tls(Remote):
    def setUp(self):
        super().setUp()
        harness.need("openssl", shutil.which("openssl") is not None, "no openssl to make a certificate")
        self.certificate, key = self.dir / "cert.pem", self.dir / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-keyout", key, "-out", self.certificate, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True, timeout=30)
        self.tls = self.serve(DATA, tls=(self.certificate, key))
        self.trust = {"SSL_CERT_FILE": str(self.certificate)}

    def test_https_is_read(self):
        self.same("STORE/step-1", "cat", "w", url=f"{self.tls.url}/STORE/step-1", env=self.trust)
        self.assertTrue(self.tls.url.startswith("https://"))
        self.assertGreater(len(self.tls.requests), 0)

    def test_unknown_certificate_is_refused(self):
        self.fails("ls", f"{self.tls.url}/m.safetensors", code="PERMISSION_DENIED", says="certificate")
        self.assertEqual(self.tls.requests, [])

    def test_redirect_from_https_to_http_is_refused(self):
        self.tls.fault = lambda number, path, range: object_server.redirect(self.url + path)
        result = self.run_tool("ls", f"{self.tls.url}/m.safetensors", expect=2, env=self.trust)
        self.assertIn("PERMISSION_DENIED", result.stderr)
        self.assertIn("redirects from https to http", result.stderr)
        self.assertGreater(self.tls.faults()["redirect"], 0)
        self.assertEqual(self.server.requests, [])
        # The other direction is followed.
        self.tls.fault = lambda number, path, range: None
        self.server.fault = lambda number, path, range: object_server.redirect(self.tls.url + path)
        self.same("m.safetensors", "ls", env=self.trust)


if __name__ == "__main__":
    harness.main()
