# SPDX-License-Identifier: Apache-2.0
"""Real servers for the long suite of remote reads (scripts/test --remote): nginx, moto, Python's http.server."""

import concurrent.futures
import http.client
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import unittest
from urllib.parse import quote, urlencode

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

# How many times as much as usual the tests repeat.
SCALE = float(os.environ.get("TENSORMOUNT_TEST_SCALE", "1"))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for_port(port, process=None, seconds=30):
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > end or (process and process.poll() is not None):
                raise
            time.sleep(0.02)


class Nginx:
    """nginx for the files of `root`, with a `server` block of its own.

    `server` is what the block holds besides, `http` what the block around it holds. In both, PORT and ROOT are replaced.
    `requests()` reads the access log: (status, path, range) of each request.
    """

    def __init__(self, folder, root, server="", http="", listen="", location="", more=""):
        self.folder, self.port = pathlib.Path(folder), free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.url = f"{'https' if 'ssl' in listen else 'http'}://127.0.0.1:{self.port}"
        user = "user root;" if os.geteuid() == 0 else ""
        temporary = " ".join(f"{kind}_temp_path {folder}/{kind};"
                             for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        text = f"""
{user} worker_processes 2; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  {temporary}
  log_format requests '$status\t$uri\t$http_range\t$connection_requests';
  access_log {folder}/access.log requests;
  sendfile on; tcp_nopush on; keepalive_timeout 65; keepalive_requests 100000;
  default_type application/octet-stream;
  {http}
  server {{
    listen 127.0.0.1:{self.port} {listen};
    root {root};
    {server}
    location / {{ {location} }}
  }}
  {more}
}}
"""
        (self.folder / "nginx.conf").write_text(text.replace("PORT", str(self.port)).replace("ROOT", str(root)))
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def start(self):
        program = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        if program is None:
            raise unittest.SkipTest("no nginx: scripts/setup --with remote")
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                [program, "-e", self.folder / "error.log", "-p", self.folder, "-c", self.folder / "nginx.conf"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        try:
            wait_for_port(self.port, self.process)
        except OSError:
            raise AssertionError((self.folder / "output").read_text()) from None

    def stop(self):
        """At once: open connections break."""
        if self.process:
            self.process.terminate()
            try:
                self.process.wait(10)
            finally:
                self.process.kill()
            self.process = None

    def workers(self):
        out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True).stdout
        return [int(line) for line in out.split()]

    def requests(self):
        file = self.folder / "access.log"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        found = []
        for line in lines:
            status, path, range, count = line.split("\t")
            found.append((int(status), path, range, int(count)))
        return found

    def statuses(self):
        return [request[0] for request in self.requests()]


def certificates(folder, days=2, name="IP:127.0.0.1"):
    """A private authority and a certificate that it signed: (its file, (the certificate, its key))."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*args):
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, timeout=30, cwd=folder)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-days", 3, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=private authority")
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    (folder / "names").write_text(f"subjectAltName={name}\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", days,
            "-extfile", "names", "-out", "server.pem")
    return folder / "ca.pem", (folder / "server.pem", folder / "server.key")


class Moto:
    """moto's server of S3, in the environment .cache/venv-remote (TENSORMOUNT_MOTO: another command).

    Until `check_signatures` it accepts every key, but no anonymous reads of private objects.
    """

    def __init__(self, folder):
        self.folder, self.port = pathlib.Path(folder), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = os.environ.get("TENSORMOUNT_MOTO", str(ROOT / ".cache/venv-remote/bin/moto_server"))

    def __enter__(self):
        if not os.path.exists(self.command):
            raise unittest.SkipTest(f"no {self.command}: scripts/setup --with remote")
        with open(self.folder / "moto.log", "ab") as output:
            self.process = subprocess.Popen([self.command, "-H", "127.0.0.1", "-p", str(self.port)],
                                            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                            start_new_session=True)
        wait_for_port(self.port, self.process, 60)
        return self

    def __exit__(self, *error):
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()

    def ask(self, method, path, body=b"", headers=None, service="s3", expect=200, connection=None):
        connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        scope = f"AKID/20260101/us-east-1/{service}/aws4_request"
        connection.request(method, path, body, {
            "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != expect:
            raise AssertionError(f"moto: {method} {path}: {answer.status} {text[:500]}")
        return text

    def put(self, key, body, headers=None, connection=None):
        self.ask("PUT", "/" + quote(key), body, headers, connection=connection)

    def upload(self, folder, prefix):
        """The files of a folder."""
        files = [file for file in sorted(pathlib.Path(folder).rglob("*")) if file.is_file()]

        def some(part):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            for file in part:
                self.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes(), connection=connection)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(some, [files[0::2], files[1::2]]))

    def iam(self, service="iam", **fields):
        """One call of IAM or STS; the text of the answer."""
        return self.ask("POST", "/", urlencode(fields).encode(), {
            "Content-Type": "application/x-www-form-urlencoded"}, service=service).decode()

    def make_user(self, name, policy):
        """(id, secret) of a user whom the policy allows something."""
        self.iam(Action="CreateUser", UserName=name)
        self.iam(Action="PutUserPolicy", UserName=name, PolicyName="all", PolicyDocument=policy)
        text = self.iam(Action="CreateAccessKey", UserName=name)
        return (re.search("<AccessKeyId>(.*?)</AccessKeyId>", text)[1],
                re.search("<SecretAccessKey>(.*?)</SecretAccessKey>", text)[1])

    def check_signatures(self):
        self.ask("POST", "/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"})


class PlainServer:
    """`python3 -m http.server`: it knows no ranges."""

    def __init__(self, root):
        self.root, self.port = root, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self.log = open(self.root / "http.server.log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "http.server", str(self.port), "--bind", "127.0.0.1", "-d", str(self.root)],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True)
        wait_for_port(self.port, self.process)
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.log.close()

    def requests(self):
        self.log.seek(0)
        return re.findall(r'"(\w+) (\S+) HTTP', self.log.read())
