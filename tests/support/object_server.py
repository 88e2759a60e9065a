# SPDX-License-Identifier: Apache-2.0
"""A stand-in for servers of objects: HTTP with ranges, S3, the Hugging Face hub. Needs no package.

    with ObjectServer(folder) as server:
        server.fault = lambda number, path, range: status(503) if number == 3 else None

It serves the files of a folder on 127.0.0.1, records every request, and breaks the answers that `fault` chooses. It
checks signatures by code of its own, and is stricter than real servers. It has no limits and is not safe to expose.
"""

import base64
import calendar
import collections
import email.utils
import gzip
import hashlib
import hmac
import http.server
import json
import os
import pathlib
import re
import socket
import ssl
import struct
import tempfile
import threading
import time
from urllib.parse import quote, quote_plus, unquote
from xml.sax.saxutils import escape

import bucket_writes

# One request. `fault`: the name of the action that changed its answer. `status`, `sent`: the code and the bytes of the
# body that were sent, without those of `endless`. `body`: what the client sent.
Request = collections.namedtuple("Request", "number method path query range status headers fault body sent")


class Answer:
    """What is sent. Actions change it. `span` is the part of the object that was asked for."""

    def __init__(self, code, headers=None, body=b"", file=None, size=0, span=(0, 0)):
        self.code, self.headers, self.body = code, dict(headers or {}), body
        self.file, self.size, self.span = file, size, span
        self.cut = None  # Bytes of the body that are sent before `end`: "close" or "reset".
        self.end = None
        self.delay = 0
        self.endless = self.slow = False

    def part(self, first, last):
        """Bytes of the object, as it was when it was opened."""
        return os.pread(self.file.fileno(), last - first, first) if self.file else b""


def etag_of(info):
    return f'"{info.st_size:x}-{info.st_mtime_ns:x}-{info.st_ino:x}"'


def action(function):
    """f(answer, ...) becomes an action: f(...) is what `fault` returns, and has the name of the function."""
    def made(*args, **more):
        def change(answer):
            function(answer, *args, **more)
        change.name = function.__name__
        return change
    return made


@action
def status(answer, code, headers=None, body=b""):
    answer.code, answer.headers, answer.body = code, dict(headers or {}), body

@action
def reset(answer, after=0):  # Breaks the connection after so many bytes of the body.
    answer.cut, answer.end = after, "reset"

@action
def short(answer, by=1):  # Fewer bytes than Content-Length says.
    answer.cut, answer.end = max(len(answer.body) - by, 0), "close"

@action
def longer(answer, by=1 << 20):  # More bytes than the range has; Content-Length agrees with the body.
    answer.body += bytes(by)

@action
def wrong_range(answer, by=1, honest=True):  # Other bytes; if not `honest`, the head is that of the right ones.
    first, last = (end + (by if answer.span[1] + by <= answer.size else -by) for end in answer.span)
    answer.body = answer.part(max(first, 0), last)
    if honest:
        answer.headers["Content-Range"] = f"bytes {max(first, 0)}-{last - 1}/{answer.size}"

@action
def lying_total(answer, by=1000):  # Content-Range has another size of the object.
    answer.headers["Content-Range"] = f"bytes {answer.span[0]}-{answer.span[1] - 1}/{answer.size + by}"

@action
def no_ranges(answer):  # Ignores Range, as plain servers do: 200 and the whole object.
    if answer.file:
        answer.code, answer.body = 200, answer.part(0, answer.size)
        without("Content-Range", "Accept-Ranges")(answer)

@action
def delay(answer, seconds):
    answer.delay = seconds

@action
def endless(answer):
    answer.endless = True

@action
def drip(answer):  # One byte a second.
    answer.slow = True

@action
def header_bomb(answer, size=8 << 20):
    answer.headers.update({f"X-Bomb-{i}": "b" * 1000 for i in range(size // 1000)})

@action
def redirect(answer, url, code=302):
    answer.code, answer.headers, answer.body = code, {"Location": url}, b""

@action
def without(answer, *names):  # For example "ETag".
    for name in names:
        answer.headers.pop(name, None)

@action
def having(answer, headers):
    answer.headers.update(headers)

@action
def gzipped(answer):
    answer.body = gzip.compress(answer.body, 1)
    answer.headers["Content-Encoding"] = "gzip"


class ObjectServer:
    """See above. `hub`: the server that its redirects lead to. `tls`: files of a certificate and its key."""

    def __init__(self, folder, s3=False, hub=None, tls=None):
        self.folder, self.s3, self.hub = pathlib.Path(folder), s3, hub
        self.requests = []
        self.fault = lambda number, path, range: None  # Called before the object is opened: it may replace it.
        self.answer = lambda method, path, headers, body: None  # An Answer for a path that is no file.
        self.sends = ["ETag", "Last-Modified"]
        self.conditions = True  # Whether it knows If-Match and If-Unmodified-Since.
        # Of S3.
        self.keys = {"AKIDEXAMPLE": ("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "")}  # id -> secret, session token
        self.region = "us-east-1"
        self.public = False
        self.page = 1000
        self.markers = set()  # Keys of empty objects that end with "/", as consoles make them.
        self.space = "+"  # A space in listings: "+" (as MinIO writes it) or "%20".
        self.bucket = bucket_writes.Writes(self)
        # Of the hub.
        self.token = None
        self.revisions = {}  # "ORG/MODEL" -> revision -> commit; the files are in folder/ORG/MODEL/COMMIT.
        self._lock, self._count, self.stopping = threading.Lock(), 0, threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True,
                                                      do_handshake_on_connect=False)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def replace(self, path, data):
        """Replaces an object in one step; its ETag changes."""
        with tempfile.NamedTemporaryFile(dir=self.folder.parent, delete=False) as new:
            new.write(data)
        os.replace(new.name, self.folder / path.lstrip("/"))

    def forget(self):
        """Begins the records, and the numbers of requests, anew."""
        with self._lock:
            self.requests, self._count = [], 0

    def faults(self):
        """How often each action changed an answer."""
        return collections.Counter(r.fault for r in self.requests if r.fault)

    def sent(self, of=""):
        """Bytes of the bodies of answers for paths that hold `of`."""
        return sum(r.sent for r in self.requests if of in r.path)

    def handle(self, method, raw, headers, body):
        """The answer to a request; called by the threads of connections."""
        with self._lock:
            self._count += 1
            number = self._count
        raw_path, _, query = raw.partition("?")
        path = unquote(raw_path)
        change = self.fault(number, path, headers.get("Range"))
        answer = self.answer(method, path, headers, body)
        if answer is None and self.s3:
            answer = self._refusal(method, raw_path, query, headers, body)
            answer = answer or self.bucket.handle(method, path, query, headers, body)
            answer = answer or (self._listing(path, query) if method == "GET" else None)
        if answer is None and self.hub:
            answer = self._hub(path, headers)
        if answer is None:
            answer = self._file(path, headers)
        if change:
            change(answer)
        if not answer.endless:
            answer.headers.setdefault("Content-Length", str(len(answer.body)))
        if method == "HEAD":
            answer.body = b""
        sent = len(answer.body[:answer.cut])
        with self._lock:
            self.requests.append(Request(number, method, path, query, headers.get("Range"), answer.code, headers,
                                         change.name if change else None, body, sent))
        return answer

    def _error(self, code, name, text, **headers):
        xml = f'<?xml version="1.0"?>\n<Error><Code>{name}</Code><Message>{text}</Message></Error>'
        return Answer(code, {"Content-Type": "application/xml", **headers}, xml.encode() if self.s3 else b"")

    def _file(self, path, headers):
        file = self.folder / path.lstrip("/")
        if ".." in file.parts or not file.is_file():
            return self._error(404, "NoSuchKey", "The specified key does not exist.")
        opened = open(file, "rb")  # One descriptor, so that bytes and ETag are of one object. The handler closes it.
        info = os.fstat(opened.fileno())
        size, etag = info.st_size, etag_of(info)
        named = {"ETag": etag, "Last-Modified": email.utils.formatdate(info.st_mtime + self.bucket.older, usegmt=True)}
        answer = Answer(200, {name: named[name] for name in self.sends} | {"Accept-Ranges": "bytes"}, b"", opened,
                        size, (0, size))
        answer.headers |= self.bucket.headers_of(path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        unless = headers.get("If-Unmodified-Since")
        refused = None
        if self.conditions and (headers.get("If-Match", etag) not in (etag, "*") or (
                unless and email.utils.parsedate_to_datetime(unless).timestamp() < int(info.st_mtime))):
            refused = self._error(412, "PreconditionFailed", "At least one of the preconditions did not hold.")
        elif asked and int(asked[1]) >= size:  # Without an ETag, as S3 and nginx answer.
            refused = self._error(416, "InvalidRange", "The requested range is not satisfiable",
                                  **{"Content-Range": f"bytes */{size}"})
        elif asked:
            answer.code, answer.span = 206, (int(asked[1]), min(int(asked[2] or size) + 1, size))
            answer.headers["Content-Range"] = f"bytes {answer.span[0]}-{answer.span[1] - 1}/{size}"
        if refused:
            opened.close()
            return refused
        answer.body = answer.part(*answer.span)
        return answer

    def _refusal(self, method, raw_path, query, headers, body):
        """Checks the signature (version 4), as the documentation of AWS has it. None: the request may pass."""
        if "Authorization" not in headers:
            return None if self.public else self._error(403, "AccessDenied", "Access Denied")
        given = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?"
                             r"SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})", headers["Authorization"])
        if not given:
            return self._error(400, "AuthorizationHeaderMalformed", "The authorization header is malformed")
        key, day, region, names, signature = given.groups()
        if key not in self.keys:
            return self._error(403, "InvalidAccessKeyId", "The AWS Access Key Id does not exist in our records.")
        secret, token = self.keys[key]
        if headers.get("x-amz-security-token", "") != token:
            return self._error(400, "InvalidToken", "The provided token is malformed or otherwise invalid.")
        if region != self.region:
            return self._error(400, "AuthorizationHeaderMalformed", "The region is wrong",
                               **{"x-amz-bucket-region": self.region})
        when = headers.get("x-amz-date", "")
        try:
            seconds = calendar.timegm(time.strptime(when, "%Y%m%dT%H%M%SZ"))
        except ValueError:
            seconds = 0
        if abs(time.time() - seconds) > 900 or not when.startswith(day):
            return self._error(403, "RequestTimeTooSkewed", "The difference of the clocks is too large.")
        digest = headers.get("x-amz-content-sha256")
        if digest not in (hashlib.sha256(body).hexdigest(), "UNSIGNED-PAYLOAD"):
            return self._error(400, "XAmzContentSHA256Mismatch", "The provided x-amz-content-sha256 is wrong.")
        signed = names.split(";")
        if not {"host", *(n.lower() for n in headers if n.lower().startswith("x-amz-"))} <= set(signed):
            return self._error(403, "AccessDenied", "There were headers present that were not signed")
        pairs = sorted(tuple(quote(unquote(part), safe="-_.~") for part in (*pair.split("=", 1), "")[:2])
                       for pair in query.split("&") if pair)
        canonical = "\n".join([
            method, quote(unquote(raw_path), safe="/-_.~"), "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join(headers.get(name, '').split())}" for name in sorted(signed)), "", names, digest])
        scope = f"{day}/{region}/s3/aws4_request"
        mac = ("AWS4" + secret).encode()
        for part in (*scope.split("/"),
                     "\n".join(["AWS4-HMAC-SHA256", when, scope, hashlib.sha256(canonical.encode()).hexdigest()])):
            mac = hmac.new(mac, part.encode(), hashlib.sha256).digest()
        if not hmac.compare_digest(mac.hex(), signature):
            return self._error(403, "SignatureDoesNotMatch", "The signature does not match the one we calculated.")
        return None

    def _listing(self, path, query):
        """ListObjectsV2. None: the path is that of an object."""
        bucket, _, key = path.lstrip("/").partition("/")
        root = self.folder / bucket
        if not bucket or not root.is_dir():
            return self._error(404, "NoSuchBucket", "The specified bucket does not exist")
        if key:
            return None
        given = {name: unquote(value) for name, _, value in (pair.partition("=") for pair in query.split("&"))}
        if given.get("list-type") != "2":
            return self._error(400, "InvalidArgument", "only list-type=2")
        prefix, delimiter = given.get("prefix", ""), given.get("delimiter", "")
        files = {str(file.relative_to(root)): file for file in root.rglob("*") if file.is_file()}
        keys = set(files) | self.markers
        found = set()  # The key, or its begin up to the delimiter.
        for name in (name for name in keys if name.startswith(prefix)):
            end = name.find(delimiter, len(prefix)) if delimiter else -1
            found.add((name, "Contents", "Key") if end < 0 else (name[:end + 1], "CommonPrefixes", "Prefix"))
        after = base64.b64decode(given.get("continuation-token", ""))
        found = sorted((entry for entry in found if entry[0].encode() > after), key=lambda entry: entry[0].encode())
        page = found[:min(int(given.get("max-keys", "1000")), self.page)]

        def shown(name):
            url = given.get("encoding-type") == "url"
            return quote_plus(name, safe="/").replace("+", self.space) if url else escape(name)
        xml = ['<?xml version="1.0"?>\n<ListBucketResult><Name>', bucket, "</Name><Prefix>", shown(prefix), "</Prefix>"]
        if given.get("encoding-type") == "url":
            xml.append("<EncodingType>url</EncodingType>")
        for name, kind, what in page:
            file = files.get(name) if kind == "Contents" else None
            more = ""
            if file:
                info = file.stat()
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(info.st_mtime + self.bucket.older))
                more = f"<LastModified>{when}</LastModified><ETag>{escape(etag_of(info))}</ETag><Size>{info.st_size}</Size>"
            xml.append(f"<{kind}><{what}>{shown(name)}</{what}>{more}</{kind}>")
        if len(page) < len(found):
            token = base64.b64encode(page[-1][0].encode()).decode()  # With "=", "+" and "/", which need encoding.
            xml.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
        xml.append(f"<IsTruncated>{str(len(page) < len(found)).lower()}</IsTruncated></ListBucketResult>")
        return Answer(200, {"Content-Type": "application/xml"}, "".join(xml).encode())

    def _hub(self, path, headers):
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return Answer(401, {"X-Error-Code": "RepoNotFound"}, b"Invalid username or password.")
        if asked := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            commit = self.revisions.get(asked[1], {}).get(asked[2], asked[2])
            root = self.folder / asked[1] / commit
            if not root.is_dir():
                return Answer(404, {"X-Error-Code": "RevisionNotFound"}, b"Invalid rev id")
            names = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
            return Answer(200, {"Content-Type": "application/json"}, json.dumps(
                {"id": asked[1], "sha": commit, "siblings": [{"rfilename": name} for name in names]}).encode())
        small = "/api/resolve-cache/models"  # Where small files are, which stay on the hub.
        if path.startswith(small + "/"):
            return self._file(path[len(small):], headers)
        asked = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+/.+)", path)
        file = self.folder / asked[1] / asked[2] if asked else self.folder
        if not file.is_file():
            return Answer(404, {"X-Error-Code": "EntryNotFound"})
        place = quote(f"/{asked[1]}/{asked[2]}")
        if file.suffix == ".json":
            return Answer(307, {"Location": small + place})
        linked = hashlib.sha256(file.read_bytes()).hexdigest()
        return Answer(302, {"Location": f"{self.hub.url}{place}?Signature=SIGNEDURL", "X-Linked-ETag": f'"{linked}"',
                            "X-Linked-Size": str(file.stat().st_size)})


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass  # Clients that go away.


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def _serve(self):
        owner = self.server.owner
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = owner.handle(self.command, self.path, self.headers, body)
        try:
            self._send(answer, owner.stopping)
        finally:
            if answer.file:
                answer.file.close()

    def _send(self, answer, stopping):
        stopping.wait(answer.delay)
        if answer.endless:
            answer.headers["Transfer-Encoding"] = "chunked"
        answer.headers.setdefault("Date", email.utils.formatdate(usegmt=True))
        head = [f"HTTP/1.1 {answer.code} {self.responses.get(answer.code, ('',))[0]}",
                *(f"{name}: {value}" for name, value in answer.headers.items()), "", ""]
        self.wfile.write("\r\n".join(head).encode("latin-1"))
        while answer.endless and not stopping.is_set():
            self.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        if answer.slow:
            for byte in answer.body:
                self.wfile.write(bytes([byte]))
                if stopping.wait(1):
                    break
        else:
            self.wfile.write(answer.body[:answer.cut])
        self.close_connection = self.close_connection or answer.end is not None
        if answer.end == "reset":
            time.sleep(0.002)  # For the bytes to be read: a reset overtakes them.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve
