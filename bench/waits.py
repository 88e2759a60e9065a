# SPDX-License-Identifier: Apache-2.0
"""Measures how long other calls wait on a mount while its storage is slow: the longest wait for each kind of call.

  python3 bench/waits.py BIN [--call-s 0.4 3] [--seconds 8] [--dir /dev/shm]

BIN is a build's bin/ (tensormount and tests/adverse_fs). The store is below adverse_fs, in which chosen calls take
--call-s: while one process publishes (every call below .staging/, every fsync), 24 call fsync, 8 verify at their
first open (every read of one checkpoint), or 12 read from a disk that hangs for ever. The load is killed at the end.
Prints one line of JSON for each load: longest waits in seconds, number of calls of each kind, duration of SIGKILL.
The first line is for a mount without load.
"""

import argparse
import itertools
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/support"))
from adverse import AdverseFs  # noqa: E402

WRITER = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
os.write(fd, bytes(4096))
while not os.path.exists(sys.argv[2]): time.sleep(0.05)
os.fsync(fd)
"""


def write_model(path):
    raw = os.urandom(4 << 20)
    tensors = {"big": raw, "small": raw[:1000], **{f"t{i}": raw[:1 << 19] for i in range(24)}}
    header, at = {}, 0
    for key, data in tensors.items():
        header[key] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


class Mount:
    def __init__(self, bin_, folder):
        self.tool, self.folder = str(bin_ / "tensormount"), folder
        self.host = AdverseFs(bin_ / "tests/adverse_fs", folder / "host")
        self.store, self.at = self.host.at / "STORE", folder / "mnt"
        self.at.mkdir()
        write_model(folder / "model.safetensors")
        for name in ("one", "two"):
            subprocess.run([self.tool, "import", str(folder / "model.safetensors"), str(self.store / name)], check=True,
                           stdout=subprocess.DEVNULL)
        # The daemon's tier: passthrough files would not involve the daemon.
        self.daemon = subprocess.Popen([self.tool, "mount", str(self.store), str(self.at), "--foreground", "--tier", "daemon"])
        while not os.path.ismount(self.at):
            time.sleep(0.01)

    def stage(self, name):
        staging = self.at / ".staging" / name
        staging.mkdir()
        (staging / "schema.json").write_text(json.dumps({"tensors": {f"s{i}": {"dtype": "U8", "shape": [4096]} for i in range(24)}}))
        for i in range(24):
            (staging / f"tensors/s{i}").write_bytes(bytes(4096))
        return staging

    def close(self):
        subprocess.run(["umount", "-l", str(self.at)], check=False)
        self.daemon.kill()
        self.daemon.wait()
        self.host.close()


def read(path, offset, size):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.pread(fd, size, offset)
    finally:
        os.close(fd)


def probes(mnt):
    count = itertools.count()
    kept = os.open(mnt / "one/tensors/small", os.O_RDONLY)
    read(mnt / "two/tensors/big", 0, 4096)
    os.pread(kept, 1000, 0)
    return {
        "ls": lambda: os.listdir(mnt),
        "stat": lambda: os.stat(mnt / "two/tensors/small"),
        "stat of no file": lambda: os.path.exists(mnt / f"none{next(count)}"),
        "cat status": lambda: (mnt / ".tensormount/status").read_bytes(),
        "df": lambda: os.statvfs(mnt),
        "cached read": lambda: os.pread(kept, 1000, 0),
        "read of another": lambda: read(mnt / "two/tensors/big", next(count) % 60 * 65536, 65536),
    }


def start(*words):
    return subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# Each returns the rules of adverse_fs, and a function that starts the load after they are set.
def nothing(mount, call_s):
    return [], lambda: []


def publish(mount, call_s):
    staging = mount.stage("published")
    time.sleep(3)  # Until the kernel looks names up again.
    return ([f"wait:{call_s} * STORE/.staging/*", f"wait:{call_s} fsync *"],
            lambda: [start("mv", staging, mount.at / "published")])


def syncs(mount, call_s):
    staging, go = mount.stage("synced"), mount.folder / "go"
    writers = [start(sys.executable, "-c", WRITER, staging / f"tensors/s{i}", go) for i in range(24)]
    time.sleep(4)  # Until all have written.
    return [f"wait:{call_s} fsync *"], lambda: (go.touch(), writers)[1]


def verifies(mount, call_s):
    return ([f"wait:{call_s} read *one/data/*"],
            lambda: [start("cat", mount.at / f"one/tensors/t{i}") for i in range(8)])


def hangs(mount, call_s):
    return (["hang read *one/data/*"], lambda: [start("cat", mount.at / f"one/tensors/t{i}") for i in range(12)])


def measure(mount, load, call_s, seconds):
    rules, begin = load(mount, call_s)
    calls = probes(mount.at)
    worst, counts, since = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0), {}
    stop = threading.Event()

    def again_and_again(name):
        while not stop.is_set():
            since[name] = time.monotonic()
            calls[name]()
            worst[name] = max(worst[name], time.monotonic() - since.pop(name))
            counts[name] += 1
            time.sleep(0.02)

    mount.host.rules(*rules)
    loaders = begin()
    threads = [threading.Thread(target=again_and_again, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    for name, begun in list(since.items()):  # Calls that still wait.
        worst[name] = max(worst[name], time.monotonic() - begun)
    kills = []
    for loader in loaders:
        if loader.poll() is None:
            begun = time.monotonic()
            loader.kill()
            try:
                loader.wait(30)
            except subprocess.TimeoutExpired:
                pass
            kills.append(time.monotonic() - begun)
    stop.set()
    mount.host.rules()
    for thread in threads:
        thread.join(60)
    for loader in loaders:
        loader.wait(120)
    print(json.dumps({"bench": "waits", "load": load.__name__, "call_s": call_s,
                      "worst_s": {name: round(value, 3) for name, value in worst.items()}, "calls": counts,
                      "killed": len(kills), "worst_kill_s": round(max(kills, default=0), 3)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--call-s", type=float, nargs="+", default=[0.4, 3])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--dir", default="/dev/shm")
    args = parser.parse_args()
    for call_s in args.call_s:
        for load in (nothing, publish, syncs, verifies, hangs):
            with tempfile.TemporaryDirectory(dir=args.dir) as folder:
                mount = Mount(args.bin.resolve(), pathlib.Path(folder))
                try:
                    measure(mount, load, call_s, args.seconds)
                finally:
                    mount.close()


if __name__ == "__main__":
    main()
