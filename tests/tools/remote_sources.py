# SPDX-License-Identifier: Apache-2.0
"""Sources and helpers of remote_test.py, remote_buckets_test.py and remote_cache_test.py."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np

import harness
from object_server import ObjectServer

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = harness.BIN.parent / "lib" / "libtensormount.so"
WEIGHT = 24 << 20  # Bytes of each tensor of big.safetensors.
MOST_PEAK = 300 << 20
TOKEN = "hf_abcdefghSECRET"
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
OPENED = ["COMMIT", "store.json", "index.sst"]

# Runs a command and writes its peak of memory. Of a child of ours the kernel would report what we had when it began.
LAUNCHER = """
import os, sys
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(pid, 0)
with open(sys.argv[1], "w") as file:
    file.write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status) & 255)
"""

# A folder with the sources below, which tests do not change.
DATA = pathlib.Path(tempfile.mkdtemp(prefix="remote-", dir=os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None))


def setUpModule():
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Clients go away while a server in this process writes to them.
    # Nothing of the machine may be found: no credentials, no proxies.
    for name in list(os.environ):
        if re.match("AWS_|HF_|XDG_|TENSORMOUNT_PATIENCE|TENSORMOUNT_CACHE|SSL_CERT|CURL_CA|.*_proxy$", name, re.IGNORECASE):
            del os.environ[name]
    unittest.addModuleCleanup(shutil.rmtree, DATA, ignore_errors=True)
    (DATA / "home").mkdir()
    os.environ.update(HOME=str(DATA / "home"), AWS_EC2_METADATA_DISABLED="true", TENSORMOUNT_PATIENCE="20")

    tensors = harness.sample_tensors()
    harness.write_safetensors(DATA / "m.safetensors", tensors)
    harness.write_safetensors(DATA / "other.safetensors", harness.sample_tensors(2))
    rng = np.random.default_rng(7)
    harness.write_safetensors(DATA / "big.safetensors", {
        "v": ("F32", (6144, 1024), rng.bytes(WEIGHT)), "w": ("F32", (6144, 1024), rng.bytes(WEIGHT)),
        "z": ("F32", (6144, 1024), rng.bytes(WEIGHT))})
    harness.write_safetensors(DATA / "many.safetensors", {
        f"layers.{i}.weight": ("F32", (4,), rng.bytes(16)) for i in range(1000)})
    for source, name in (("m", "STORE/step-1"), ("other", "STORE/step-2"), ("big", "BIG/step-1"),
                         ("many", "MANY/step-1")):
        subprocess.run([harness.TOOL, "import", DATA / f"{source}.safetensors", DATA / name, "--ranks", "2"],
                       check=True, capture_output=True, timeout=60)
    hub = DATA / "hf"
    hub.mkdir()
    keys = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": keys[i::2] for i in range(2)}
    for name, of in parts.items():
        harness.write_safetensors(hub / name, {key: tensors[key] for key in of})
    (hub / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": {key: name for name, of in parts.items() for key in of}}))
    (hub / "config.json").write_text("{}")
    shutil.copytree(ROOT / "tests" / "golden" / "foreign" / "dcp-2.13" / "global", DATA / "dcp")
    (DATA / "empty.safetensors").touch()


def linked(source, to):
    """The same files at another place, without a copy."""
    if source.is_dir():
        shutil.copytree(source, to, copy_function=os.link)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, to)


class Remote(harness.ToolTest):
    SOURCES = ["STORE/step-1", "m.safetensors", "hf", "dcp"]

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="remote-", dir=DATA))
        self.mounts = []
        self.addCleanup(self.clean)
        self.server = self.serve(DATA)
        self.url = self.server.url

    def serve(self, folder, **more):
        server = ObjectServer(folder, **more)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def measured(self, *args, env=None, limit=30):
        """(status, standard output, standard error, seconds, peak of memory in bytes) of the command."""
        with tempfile.TemporaryDirectory(dir=self.dir) as folder:
            begun = time.monotonic()
            child = subprocess.Popen([sys.executable, "-S", "-E", "-c", LAUNCHER, f"{folder}/peak", harness.TOOL,
                                      *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, cwd=self.dir, env={**os.environ, **(env or {})},
                                     start_new_session=True)
            try:
                out, err = child.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                out, err = child.communicate()
                err += f"killed after {limit} s".encode()
            seconds = time.monotonic() - begun
            peak = pathlib.Path(folder, "peak")
            return (child.returncode, out, err.decode(errors="replace"), seconds,
                    int(peak.read_text()) << 10 if peak.exists() else 0)

    def run_tool(self, *args, timeout=20, **more):
        return super().run_tool(*args, timeout=timeout, **more)

    def same(self, source, *args, url=None, env=None, mask=None):
        """The command prints of the URL what it prints of the local source; returns what it printed."""
        url = url or f"{self.url}/{source}"
        local = self.run_tool(args[0], DATA / source, *args[1:], text=False).stdout
        remote = self.run_tool(args[0], url, *args[1:], text=False, env=env).stdout
        for place, at in ((url, DATA / source), (url.rpartition("/")[0], (DATA / source).parent)):
            remote = remote.replace(place.encode(), str(at).encode())
        if mask:
            local, remote = (re.sub(mask, b"", text) for text in (local, remote))
        self.assertEqual(remote, local, args)
        self.assertTrue(local)
        return local

    def paths(self, server=None):
        return [r.path for r in (server or self.server).requests]
