# SPDX-License-Identifier: Apache-2.0
"""Readers of every kind beside publish, replace, rm and gc: each read is exact or names what is gone.

usage: beside.py reader MNT SECONDS SEED FILE    reads in a process of its own; prints JSON, FILE is scratch"""

import errno
import functools
import json
import mmap
import os
import pathlib
import random
import subprocess
import sys
import threading
import time
import traceback

import stores

NAME = "beside"
UNIT = "reads"
TARGET = 3_000_000

SECONDS = 6
THREADS = 6
KEYS = [key for key in stores.LARGE if key not in ("empty", "one")]
GONE = (errno.ESTALE, errno.ENOENT)


@functools.lru_cache(maxsize=400)
def content(key, version):
    return stores.content(key, version)


def version_in(head, key, name):
    """Which version of the checkpoint these first bytes are of; each says so itself."""
    text = head.decode(errors="replace")
    version = text.partition(" of ")[2].partition(" is here")[0]
    return version if text.startswith(f"{key} of {name}.") else None


def read_file(path, key, name, rng, counts, scratch):
    """Some reads of one open file, by pread or through a mapping; what is wrong."""
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        head = os.pread(fd, 64, 0)
        version = version_in(head, key, name)
        if version is None:
            return f"{name}/{key}: begins with {head!r}"
        want = content(key, version)
        mapped = None
        if rng.random() < 0.1:
            # With a length of our own: mmap takes none for nothing (EINVAL) where the file is gone and has no size.
            mapped = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_PRIVATE, mmap.PROT_READ)
        view = memoryview(mapped) if mapped else None
        try:
            for _ in range(20):
                at, size = rng.randrange(len(want)), rng.choice((16, 300, 4096, 70_000))
                if view is None:
                    got = os.pread(fd, size, at)
                else:
                    # Written from the mapping: a page that is not there is EFAULT and no SIGBUS.
                    n = os.pwrite(scratch, view[at:at + size], 0)
                    got = os.pread(scratch, n, 0)
                    counts["mapped"] += 1
                counts["reads"] += 1
                if got != want[at:at + size]:
                    return f"{version}/{key} at {at} + {size}: {len(got)} bytes, others than were saved"
        finally:
            if view is not None:
                view.release()
                mapped.close()
    return None


def reader(mnt, seconds, seed, scratch_path):
    end = time.monotonic() + seconds
    wrong, counts = [], {"reads": 0, "mapped": 0, "gone": 0}

    def loop(number):
        rng = random.Random(f"{seed} {number}")
        scratch = os.open(f"{scratch_path}.{number}", os.O_RDWR | os.O_CREAT)
        mine = {"reads": 0, "mapped": 0, "gone": 0}
        while time.monotonic() < end and not wrong:
            try:
                names = [name for name in os.listdir(mnt) if name.startswith("step-")]
                name = rng.choice(names) if names else "step-0"
                key = rng.choice(KEYS)
                if fault := read_file(f"{mnt}/{name}/tensors/{key}", key, name, rng, mine, scratch):
                    wrong.append(fault)
            except OSError as error:
                # A mapping of what was removed: its pages cannot be had.
                if error.errno not in GONE and not (error.errno == errno.EFAULT):
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    wrong.append(f"{errno.errorcode.get(error.errno)}: {error}: {where.line}")
                mine["gone"] += 1
        os.close(scratch)
        for key, value in mine.items():
            counts[key] += value

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({**counts, "wrong": wrong[:3]}))


class Session:
    """A store that is written to, a mount of it, readers, and commands that read."""

    def __init__(self, context, index, damage=None):
        self.context, self.index, self.damage = context, index, damage
        self.rng = context.rng(index)
        self.folder = context.work / f"session-{index}"
        self.folder.mkdir()
        self.store = self.folder / "S"
        self.versions = 0
        self.names = []
        self.commands = 0
        self.wrote = 0

    def wrong(self, text):
        self.context.finding(text, f"scripts/torture --seed {self.context.seed} --case beside:{self.index}")

    def save(self, name, *more):
        self.versions += 1
        path = self.folder / "in.safetensors"
        stores.write_model(path, f"{name}.{self.versions}", stores.LARGE)
        if self.damage == "content" and self.versions > 2:
            raw = bytearray(path.read_bytes())
            for at in range(len(raw) - 250_000, len(raw), 97):
                raw[at] ^= 1
            path.write_bytes(raw)
        self.write("import", path, self.store / name, "--ranks", self.rng.choice((1, 2, 3)), "--shard", self.rng.choice(("rows", "cols", "flat")),
                   "--placement", self.rng.choice(("auto", "tensor-file", "rank-shard")), *more)

    def write(self, *words):
        done = self.context.run([self.context.tool, *words])
        self.wrote += 1
        if done.returncode != 0:
            self.wrong(f"{words[0]} beside readers exits {done.returncode}: {done.stderr[-500:]}")

    def step(self):
        what = self.rng.random()
        if what < 0.45 or len(self.names) < 3:
            name = f"step-{self.versions + 1}"
            self.save(name)
            self.names.append(name)
        elif what < 0.65:
            self.save(self.rng.choice(self.names), "--if-exists", "replace")
        elif what < 0.85:
            name = self.names.pop(self.rng.randrange(len(self.names)))
            self.write("rm", self.store / name)
        else:
            self.write("gc", self.store, "--grace", "0")

    def read_by_command(self, rng, number):
        """A command that reads. Success, or what was asked for is gone."""
        names = list(self.names) or ["step-1"]
        name = rng.choice(names)
        out = self.folder / f"out-{number}.safetensors"
        out.unlink(missing_ok=True)
        words = rng.choice((["load", self.store / name, "--ranks", "2"], ["verify", self.store / name], ["verify", self.store], ["fsck", self.store],
                            ["export", self.store / name, out, "--to", "safetensors"], ["cat", self.store / name, "large"],
                            ["ls", self.store], ["info", self.store / "latest"], ["export", self.store / "latest", out, "--to", "safetensors"]))
        done = self.context.run([self.context.tool, *words], timeout=60)
        said = done.stderr + (done.stdout.decode(errors="replace") if words[0] != "cat" else "")
        self.commands += 1
        if done.returncode == 0:
            raw = {}
            if words[0] == "cat":
                raw = {"large": done.stdout}
            elif words[0] == "export":
                raw = {key: data for key, data in stores.read_model(out).items() if key in KEYS}
            versions = {version_in(data[:64], key, data[:64].decode().partition(" of ")[2].partition(".")[0]) for key, data in raw.items()}
            if len(versions) > 1 or any(data != content(key, version) for version in versions for key, data in raw.items()):
                self.wrong(f"{words[0]} gives other bytes, of {versions}")
        elif done.returncode != 2 or not any(code in said for code in ("NOT_FOUND", "STALE", "not checked")):
            self.wrong(f"{words[0]} beside writers exits {done.returncode}: {said[-900:]}")
        if "DATA_LOSS" in said or "damaged" in said:
            self.wrong(f"{words[0]} calls a healthy checkpoint damaged: {said[-900:]}")

    def run(self):
        """How many reads."""
        stores.need_fuse(self.context)
        for name in ("step-1", "step-2", "step-3"):
            self.save(name)
            self.names.append(name)
        mount = stores.Mount(self.context, self.store, self.folder / "mnt")
        end = time.monotonic() + SECONDS
        me = [sys.executable, "-B", __file__, "reader", str(mount.at), str(SECONDS)]
        readers = [subprocess.Popen([*me, f"{self.context.seed} {self.index} {i}", str(self.folder / f"scratch-{i}")], stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE) for i in range(2)]

        def commands():
            rng = random.Random(f"{self.context.seed} {self.index} commands")
            while time.monotonic() < end:
                try:
                    self.read_by_command(rng, 0)
                except Exception as error:  # pylint: disable=broad-except
                    self.wrong(f"what a command gave cannot be read: {error!r}")

        thread = threading.Thread(target=commands)
        thread.start()
        if self.damage == "store":
            self.spoil()
        while time.monotonic() < end:
            self.step()
        thread.join()
        reads = 0
        outputs = []
        for process in readers:
            try:
                outputs.append(process.communicate(timeout=40))
            except subprocess.TimeoutExpired:
                process.kill()
                outputs.append(process.communicate())
        try:
            errors = (mount.at / ".tensormount/errors").read_text()[-1500:]
        except OSError as error:
            errors = str(error)
        for process, (out, error) in zip(readers, outputs):
            try:
                said = json.loads(out)
                reads += said["reads"]
                for text in said["wrong"]:
                    self.wrong(f"a read through the mount: {text}\n{mount.said()[-500:]}{errors}")
            except ValueError:
                self.wrong(f"a reader of the mount hangs or ends with {process.returncode}: {error.decode()[-500:]}")
        status = mount.close()
        if status != 0:
            self.wrong(f"the mount ends with {status}: {mount.said()[-500:]}")
        done = self.context.run([self.context.tool, "verify", self.store])
        if done.returncode != 0:
            self.wrong(f"afterwards verify exits {done.returncode}: {done.stderr[-300:]}{done.stdout.decode()[-500:]}")
        return reads + self.commands

    def spoil(self):
        """A byte of every published data file changes behind all backs."""
        for path in self.store.glob("step-*/data/*"):
            raw = bytearray(path.read_bytes())
            raw[-len(raw) // 3] ^= 1
            path.chmod(0o644)
            path.write_bytes(raw)


def run(context, index):
    session = Session(context, index)
    try:
        return session.run()
    finally:
        stores.shutil.rmtree(session.folder, ignore_errors=True)


def plant(context):
    """Bytes that change in a published file, and a checkpoint that holds others than it says."""
    found = []
    for number, damage in enumerate(("store", "content")):
        before = len(context.findings)
        Session(context, f"planted-{number}", damage).run()
        found.append(len(context.findings) > before)
    return all(found)


if __name__ == "__main__":
    reader(sys.argv[2], float(sys.argv[3]), sys.argv[4], pathlib.Path(sys.argv[5]))
