# SPDX-License-Identifier: Apache-2.0
"""Servers that attack, at the level of bytes, many at once: a named error within the deadline, and bounded memory.

What a server does to whole answers is in tests/tools/remote_test.py (Faults).
"""

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

from servers import ROOT

import harness
from object_server import Answer
from remote_sources import DATA, LIBRARY, MOST_PEAK, Remote, setUpModule  # noqa: F401

PATIENCE = 3
LONGEST = 30  # Seconds of a command, on a busy machine.


class RawServer:
    """Calls `talk(connection, head)` for each request; what it yields is sent."""

    def __init__(self, talk):
        self.talk, self.count, self.stopping = talk, 0, False
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with contextlib.suppress(OSError), connection:
            pending = b""
            while not self.stopping:
                while b"\r\n\r\n" not in pending:
                    data = connection.recv(65536)
                    if not data:
                        return
                    pending += data
                head, _, pending = pending.partition(b"\r\n\r\n")
                self.count += 1
                for data in self.talk(head.decode("latin-1")):
                    if data is None or self.stopping:
                        return
                    connection.sendall(data)

    def close(self):
        self.stopping = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def answer(*headers, body=b"", status="206 Partial Content"):
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


OK = ('ETag: "e"', "Content-Range: bytes 0-65535/1000000")


def drip(data, seconds):
    for byte in data:
        yield bytes([byte])
        time.sleep(seconds)


def after(head, forever):
    """One answer that does not end."""
    yield head
    yield from itertools.repeat(forever)


def redirects(head):
    number = int(re.search(r"GET /(?:x(\d+))?", head)[1] or 0)
    if number == 1_000_000:
        yield answer("Content-Length: 0", status="404 Not Found")
    yield answer(f"Location: /x{number + 1}", "Content-Length: 0", status="302 Found")


ANY = "UNAVAILABLE|DEADLINE_EXCEEDED|DATA_LOSS|UNSUPPORTED|STALE|INVALID_ARGUMENT|NOT_FOUND"
# What a server does with each request, and what `ls` of a file says then.
TALKS = {
    "a million redirects": (redirects, "UNAVAILABLE: .*more than 10 redirects"),
    "early hints for ever": (lambda head: itertools.repeat(b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"),
                             "DATA_LOSS: .*64 KiB of headers"),
    "a header without an end": (lambda head: after(b"HTTP/1.1 206 Partial Content\r\nX: ", b"a" * 65536), ANY),
    "headers without an end": (lambda head: after(b"HTTP/1.1 206 Partial Content\r\n", b"X: a\r\n" * 1000),
                               "DATA_LOSS: .*64 KiB of headers"),
    "a status line without an end": (lambda head: after(b"HTTP/1.1 206 ", b"a" * 65536), ANY),
    "noise": (lambda head: after(b"", os.urandom(65536)), ANY),
    "HTTP/0.9": (lambda head: iter([b"<html>hello</html>", None]), ANY),
    "HTTP/9.9": (lambda head: iter([b"HTTP/9.9 200 OK\r\nContent-Length: 0\r\n\r\n"]), ANY),
    "no answer, the connection ends": (lambda head: iter([None]), "UNAVAILABLE|DEADLINE_EXCEEDED"),
    "one byte of the head every 200 ms": (lambda head: drip(answer(*OK, "Content-Length: 65536"), 0.2),
                                          "DEADLINE_EXCEEDED: .*no answer in time"),
    "2 KiB of the body in a second": (
        lambda head: itertools.chain([answer(*OK, "Content-Length: 65536")],
                                     (time.sleep(0.1) or b"a" * 200 for _ in itertools.count())),
        "DEADLINE_EXCEEDED: .*no answer in time"),
    "a chunk without an end": (lambda head: after(answer(*OK, "Transfer-Encoding: chunked") + b"ffffffffffffff0\r\n",
                                                  b"a" * 65536), "DATA_LOSS: .*more than"),
    "a chunk's size that is too large": (lambda head: iter([answer(*OK, "Transfer-Encoding: chunked") + b"f" * 40 + b"\r\n",
                                                            None]), ANY),
    "a chunk's extension without an end": (lambda head: after(answer(*OK, "Transfer-Encoding: chunked") + b"1;x=",
                                                              b"a" * 65536), ANY),
    "trailers without an end": (lambda head: after(
        answer(*OK, "Transfer-Encoding: chunked") + b"10000\r\n" + bytes(65536) + b"\r\n0\r\n", b"X: a\r\n" * 1000), ANY),
    "a negative length": (lambda head: iter([answer(*OK, "Content-Length: -1"), None]), ANY),
    "a length of 20 digits": (lambda head: after(answer(*OK, "Content-Length: " + "9" * 20), b"a" * 65536), ANY),
    "two lengths": (lambda head: iter([answer(*OK, "Content-Length: 65536", "Content-Length: 1", body=bytes(65536))]), ANY),
    "a body that is compressed on its way": (lambda head: after(answer(*OK, "Transfer-Encoding: gzip, chunked"),
                                                                b"10\r\n" + bytes(16) + b"\r\n"), ANY),
    "a redirect of 60 KB": (
        lambda head: iter([answer("Location: /" + "a" * 60_000, "Content-Length: 0", status="302 Found")]), ANY),
    "a redirect to nowhere": (lambda head: iter([answer("Location: http://", "Content-Length: 0", status="302 Found")]),
                              "INVALID_ARGUMENT|UNSUPPORTED"),
    "an error of 10 GB": (lambda head: after(answer("Content-Length: 10000000000", status="403 Forbidden"), b"a" * 65536),
                          "PERMISSION_DENIED: .*403 Forbidden"),
    "wait for 10^20 seconds": (lambda head: iter([answer("Retry-After: " + "9" * 20, "Content-Length: 0",
                                                         status="503 Service Unavailable")]),
                               "(UNAVAILABLE|DEADLINE_EXCEEDED): .*503"),
    "wait until 2099": (
        lambda head: iter([answer("Retry-After: Fri, 01 Jan 2099 00:00:00 GMT", "Content-Length: 0",
                                  status="503 Service Unavailable")]), "(UNAVAILABLE|DEADLINE_EXCEEDED): .*503"),
}

# Sizes of objects that are not true. `{}`: "bytes FIRST-LAST" of what was asked for.
SIZES = ["{}/9223372036854775807", "{}/9223372036854775808", "{}/18446744073709551616", "{}/1" + "0" * 40, "{}/-1",
         "{}/*", "{}/4611686018427387904", "{}/1099511627776", "bytes 0-18446744073709551615/18446744073709551616",
         "bytes */0", "{}"]


class Hostile(Remote):
    def attacked(self, cases, run, expected=None):
        """Runs all cases at once; each must end in time with one line of error, or with the expected output, in little
        memory."""
        peaks = {}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for name, says, (code, out, err, seconds, peak) in pool.map(run, cases):
                with self.subTest(name):
                    lines = [line for line in err.splitlines() if "hint:" not in line and "warning:" not in line]
                    if code == 0 and out == expected:
                        continue
                    self.assertEqual(code, 2, (err, out[:200]))
                    self.assertEqual(len(lines), 1, err)
                    self.assertRegex(lines[0], f"^tensormount: ({says})")
                    self.assertLess(len(err), 2000)
                    self.assertLess(seconds, 90 if name == "pages of nothing" else LONGEST)
                    self.assertLess(peak, MOST_PEAK)
                    peaks[name] = (peak >> 20, round(seconds, 1), lines[0][:150])
        for name, (peak, seconds, line) in peaks.items():
            print(f"  {name}: {peak} MiB, {seconds} s: {line}")

    def raw(self, talk):
        server = RawServer(talk)
        self.addCleanup(server.close)
        return server

    def test_bytes(self):
        servers = {}

        def run(name):
            talk, says = TALKS[name]
            servers[name] = self.raw(talk)
            return name, says, self.measured("ls", f"{servers[name].url}/m.safetensors",
                                             env={"TENSORMOUNT_PATIENCE": str(PATIENCE)})
        self.attacked(TALKS, run)
        self.assertEqual(servers["a million redirects"].count, 11)

    def test_clients_at_once(self):
        """The same attacks on 48 clients at once."""
        servers = {name: self.raw(TALKS[name][0]) for name in TALKS if "every" not in name}
        cases = [(name, number) for number in range(3) for name in servers][:48]

        def run(case):
            return f"{case[0]} {case[1]}", TALKS[case[0]][1], self.measured(
                "cat", f"{servers[case[0]].url}/m.safetensors", "w", env={"TENSORMOUNT_PATIENCE": str(PATIENCE)})
        with concurrent.futures.ThreadPoolExecutor(48) as pool:
            for name, says, (code, out, err, seconds, peak) in pool.map(run, cases):
                with self.subTest(name):
                    self.assertEqual((code, out), (2, b""), err)
                    self.assertRegex(err, f"tensormount: ({says})")
                    self.assertLess(seconds, LONGEST)
                    self.assertLess(peak, MOST_PEAK)

    def test_sizes_that_are_not_true(self):
        sources = {"m.safetensors": "m.safetensors", "STORE/step-1": "COMMIT", "STORE/step-1 index": "index.sst",
                   "hf": "model.safetensors.index.json", "dcp": ".metadata"}

        def lying(size):
            def change(answer):
                got = answer.headers.get("Content-Range")
                if got:
                    answer.headers["Content-Range"] = size.format(got.partition("/")[0])
            change.name = "lying"
            return change

        def run(case):
            source, size = case
            server = self.serve(DATA)
            server.fault = lambda number, path, range: lying(size) if path.endswith(sources[source]) else None
            got = self.measured("ls", f"{server.url}/{source.split()[0]}", env={"TENSORMOUNT_PATIENCE": str(PATIENCE)})
            self.assertGreater(server.faults()["lying"], 0, case)
            return f"{source} {size}", ANY, got
        # An index that cannot be read is built again from the manifests.
        expected = self.run_tool("ls", DATA / "STORE/step-1", text=False).stdout
        self.attacked(itertools.product(sources, SIZES), run, expected)

    def test_listings(self):
        def page(entries, token=None):
            return ('<?xml version="1.0"?><ListBucketResult><EncodingType>url</EncodingType>' + entries +
                    (f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>" if token
                     else "<IsTruncated>false</IsTruncated>") + "</ListBucketResult>").encode()
        numbers = itertools.count()
        many = "".join(f"<Contents><Key>x/{'k' * 900}{i:06}</Key></Contents>" for i in range(1000))
        bombs = {
            # Amazon may send empty pages, too: these end a minute after the patience of one request.
            "pages of nothing": lambda: page("", f"t{next(numbers)}"),
            "entries without an end": lambda: page("".join(
                f"<CommonPrefixes><Prefix>x/{next(numbers)}/</Prefix></CommonPrefixes>" for _ in range(1000)),
                f"t{next(numbers)}"),
            "two pages in turn": lambda: page("<Contents><Key>x/a</Key></Contents>", f"t{next(numbers) % 2}"),
            "17 MB": lambda: page(many * 19),
            "nesting": lambda: page("<Contents>" * 1_000_000),
            "entities": lambda: b'<!DOCTYPE l [<!ENTITY a "lol">' + b"".join(
                b'<!ENTITY a%d "%s">' % (i, b"&a%d;" % (i - 1) * 10) for i in range(1, 10)) +
                page("<Contents><Key>x/&a9;</Key></Contents>"),
            "no listing": lambda: b"<html></html>",
            "a token of 1 MB": lambda: page("", "t" * 1_000_000),
        }

        def run(name):
            server = self.serve(self.dir)
            server.answer = lambda method, path, headers, body: (
                None if "Range" in headers else Answer(200, {"Content-Type": "application/xml"}, bombs[name]()))
            return name, ANY, self.measured("ls", "s3://bucket/x", env={
                "AWS_ENDPOINT_URL": server.url, "AWS_NO_SIGN_REQUEST": "1", "TENSORMOUNT_PATIENCE": str(PATIENCE)}, limit=90)
        self.attacked(bombs, run)

    def test_answers_of_the_hub(self):
        sha = "a" * 40
        names = [{"rfilename": f"{'n' * 30}{i}"} for i in range(2_000)]
        bombs = {
            "nesting": b"[" * 900_000,
            "nesting of objects": b'{"a":' * 190_000,
            "2,000 files": json.dumps({"sha": sha, "siblings": names}).encode(),
            "names that lead out": json.dumps({"sha": sha, "siblings": [{"rfilename": "../../x"},
                                                                        {"rfilename": "/etc/passwd"}]}),
            "a commit that leads out": json.dumps({"sha": "../../../x", "siblings": [{"rfilename": "model.safetensors"}]}),
            "a commit of 1 MB": json.dumps({"sha": "a" * 1_000_000, "siblings": []}),
            "numbers": json.dumps({"sha": 1e300, "siblings": 7}),
            "no JSON": b"\xff\xfe{}",
        }

        def run(name):
            server = self.serve(self.dir)
            body = bombs[name] if isinstance(bombs[name], bytes) else bombs[name].encode()
            server.answer = lambda method, path, headers, _: Answer(200, {}, body) if path.startswith("/api/") else None
            return name, ANY, self.measured("ls", "hf://org/model", env={
                "HF_ENDPOINT": server.url, "TENSORMOUNT_PATIENCE": str(PATIENCE)})
        self.attacked(bombs, run)


# One process reads from servers that attack and from one that does not.
TOGETHER = """
import json, resource, sys, threading, time
import tensormount as tm
good, local, seconds, *bad = sys.argv[1:]
with tm.open(local) as checkpoint:
    expected = {key: checkpoint[key][...] for key in ("w", "v", "z")}
ended, longest, errors, reads = [], 0.0, [], 0
def attack(url):
    begun = time.monotonic()
    try:
        with tm.open(url) as checkpoint: errors.append(url + ": opened")
    except tm.Error as error:
        ended.append((time.monotonic() - begun, type(error).__name__, str(error)[:200]))
    except BaseException as error:
        errors.append(f"{url}: {error!r}")
threads = [threading.Thread(target=attack, args=(url,)) for url in bad for _ in range(4)]
[t.start() for t in threads]
time.sleep(0.3)
end = time.monotonic() + float(seconds)
while time.monotonic() < end:
    begun = time.monotonic()
    with tm.open(good) as checkpoint:
        for key, value in expected.items():
            for begin in (0, 3000):
                if checkpoint[key][begin:begin + 1500].tobytes() != value[begin:begin + 1500].tobytes():
                    errors.append("wrong " + key)
    longest = max(longest, time.monotonic() - begun)
    reads += 1
[t.join() for t in threads]
print(json.dumps([longest, reads, errors, ended, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


class Together(Remote):
    def test_attacks_do_not_disturb_reads_from_another_server(self):
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        # libcurl spends its whole time on these extensions, which no option of it limits.
        servers = [RawServer(talk) for name, (talk, _) in TALKS.items() if "extension" not in name]
        for server in servers:
            self.addCleanup(server.close)
        # Servers that never answer, more than requests that are sent at a time.
        silent = [RawServer(lambda head: (time.sleep(0.1) or b"" for _ in range(1000))) for _ in range(4)]
        for server in silent:
            self.addCleanup(server.close)
        urls = [f"{server.url}/{n}.safetensors" for n, server in enumerate(servers)]
        urls += [f"{server.url}/{n}.safetensors" for server in silent for n in range(12)]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY),
               "PYTHONDONTWRITEBYTECODE": "1", "TENSORMOUNT_PATIENCE": "10", "OMP_NUM_THREADS": "1"}
        result = subprocess.run([sys.executable, "-W", "ignore", "-c", TOGETHER, f"{self.url}/BIG/step-1",
                                 str(DATA / "BIG/step-1"), "4", *urls], env=env, capture_output=True, text=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
        longest, reads, errors, ended, peak = json.loads(result.stdout)
        print(f"{len(ended)} attacked opens in one process beside {reads} good ones, the slowest of which took "
              f"{longest:.2f} s; the attacks ended after {max(e[0] for e in ended):.1f} s at most; peak {peak >> 10} MiB")
        self.assertEqual(errors, [])
        self.assertEqual(len(ended), 4 * len(urls))
        self.assertLess(max(e[0] for e in ended), LONGEST)
        self.assertLess(peak << 10, 2 * MOST_PEAK)
        # They did not wait for those that hang.
        self.assertLess(longest, 9)


if __name__ == "__main__":
    harness.main()
