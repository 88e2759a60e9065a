# SPDX-License-Identifier: Apache-2.0
"""A mount of a checkpoint behind nginx, while nginx stops, hangs and comes back."""

import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from servers import Nginx

import harness
from remote_sources import DATA, Remote, setUpModule  # noqa: F401

GONE = (errno.EAGAIN, errno.ETIMEDOUT)
PATIENCE = 3


class OverNginx(Remote):
    def setUp(self):
        super().setUp()
        harness.need_fuse()
        self.real = Nginx(self.dir / "nginx", DATA)
        self.real.__enter__()
        self.addCleanup(self.real.__exit__)
        os.environ["TENSORMOUNT_PATIENCE"] = str(PATIENCE)
        self.addCleanup(os.environ.__setitem__, "TENSORMOUNT_PATIENCE", "20")

    def mounted(self, source="BIG/step-1"):
        return self.mount(f"{self.real.url}/{source}", name=f"MNT{len(self.mounts)}")

    def read(self, file, offset=0, size=1 << 16):
        """Bytes, or the errno, without the page cache."""
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return os.pread(descriptor, size, offset)
        except OSError as error:
            return error.errno
        finally:
            os.close(descriptor)


class States:
    """Samples the state of processes and their threads: how long one of them was in D at a stretch."""

    def __init__(self, *pids):
        self.pids, self.longest, self.since, self.stop = pids, 0.0, {}, threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stop.set()
        self.thread.join()

    def work(self):
        while not self.stop.wait(0.02):
            for pid in self.pids:
                for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"):
                    try:
                        state = stat.read_text().rpartition(")")[2].split()[0]
                    except OSError:
                        continue
                    if state == "D":
                        begun = self.since.setdefault(stat, time.monotonic())
                        self.longest = max(self.longest, time.monotonic() - begun)
                    else:
                        self.since.pop(stat, None)


class Mounted(OverNginx):
    def test_views_have_the_bytes_of_the_files(self):
        local = self.mount(DATA / "STORE/step-1", name="LOCAL")
        remote = self.mounted("STORE/step-1")
        names = sorted(str(p.relative_to(local)) for p in local.rglob("*") if p.is_file() and ".tensormount" not in p.parts)
        self.assertEqual(names, sorted(str(p.relative_to(remote)) for p in remote.rglob("*")
                                       if p.is_file() and ".tensormount" not in p.parts))
        self.assertGreater(len(names), 10)
        for name in names:
            self.assertEqual((remote / name).read_bytes(), (local / name).read_bytes(), name)

    def test_server_that_stops_and_comes_back(self):
        mnt = self.mounted()
        file = mnt / "npy" / "w.npy"
        expected = file.read_bytes()
        offsets = [1 << 20, 5 << 20, 23 << 20]
        other = mnt / "npy" / "v.npy"  # Not read yet.
        for turn in range(3):
            self.real.stop()
            begun = time.monotonic()
            self.assertIn(self.read(other, offsets[turn]), GONE)
            self.assertLess(time.monotonic() - begun, PATIENCE + 5)
            # Names and sizes are known without the server.
            self.assertEqual(sorted(os.listdir(mnt / "npy")), ["v.npy", "w.npy", "z.npy"])
            self.assertEqual(os.stat(other).st_size, os.stat(file).st_size)
            self.real.start()
            self.wait_for("the server", lambda: isinstance(self.read(other, offsets[turn]), bytes))
        self.assertEqual(file.read_bytes(), expected)
        self.assertEqual(len(other.read_bytes()), len(expected))

    def test_server_that_hangs_and_goes_on(self):
        mnt = self.mounted()
        file = mnt / "npy" / "v.npy"
        expected = (self.mount(DATA / "BIG/step-1", name="LOCAL") / "npy" / "v.npy").read_bytes()
        self.assertEqual(self.read(file), expected[:1 << 16])
        processes = [self.real.process.pid, *self.real.workers()]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            self.assertIn(self.read(file, 12 << 20), GONE)
            self.assertLess(time.monotonic() - begun, PATIENCE + 5)
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)
        self.wait_for("the server", lambda: isinstance(self.read(file, 12 << 20), bytes))
        self.assertEqual(file.read_bytes(), expected)

    def test_readers_can_be_killed_while_the_server_hangs(self):
        """A reader of a mount whose server hangs ends by SIGKILL at once. Prints how long readers and daemon were in D."""
        os.environ["TENSORMOUNT_PATIENCE"] = "20"
        mnt = self.mounted()
        file = mnt / "npy" / "v.npy"
        script = ("import os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('open', flush=True)\n"
                  "os.pread(fd, 1 << 20, int(sys.argv[2]))")
        processes = [self.real.process.pid, *self.real.workers()]
        daemon = int(subprocess.run(["pgrep", "-f", f"mount {self.real.url}/BIG/step-1 {mnt}"], capture_output=True,
                                    text=True).stdout.split()[0])
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            readers = [subprocess.Popen([sys.executable, "-S", "-E", "-c", script, file, str(n << 20)],
                                        stdout=subprocess.PIPE) for n in range(2, 10)]
            for reader in readers:
                self.assertEqual(reader.stdout.readline(), b"open\n")
            with States(daemon) as states, States(*[reader.pid for reader in readers]) as reading:
                time.sleep(1)
                self.assertEqual([reader.poll() for reader in readers], [None] * 8)  # They wait.
                begun = time.monotonic()
                for reader in readers:
                    reader.send_signal(signal.SIGKILL)
                for reader in readers:
                    reader.wait(5)
                    reader.stdout.close()
                self.assertLess(time.monotonic() - begun, 3)
                begun = time.monotonic()
                self.run_tool("unmount", mnt, timeout=40)
                took = time.monotonic() - begun
            print(f"unmounted {took:.1f} s after its readers; in D at a stretch: the daemon {states.longest:.2f} s, "
                  f"a reader {reading.longest:.2f} s")
            self.assertLess(states.longest, 1)
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)

    def test_many_readers_while_the_server_comes_and_goes(self):
        """Every read gives the right bytes or EAGAIN, ETIMEDOUT."""
        os.environ["TENSORMOUNT_PATIENCE"] = "1"
        # More than the mount keeps in memory.
        words = np.random.default_rng(1).bytes(4 << 20)
        harness.write_safetensors(DATA / "huge.safetensors", {
            f"w{n}": ("U8", (48 << 20,), (bytes([n]) + words)[:4 << 20] * 12) for n in range(10)})
        self.addCleanup(os.unlink, DATA / "huge.safetensors")
        mnt = self.mounted("huge.safetensors")
        local = self.mount(DATA / "huge.safetensors", name="LOCAL")
        expected = {f"w{n}.npy": (local / "npy" / f"w{n}.npy").read_bytes() for n in range(10)}
        end, counts, wrong = time.monotonic() + 15, {"bytes": 0, "short": 0, **dict.fromkeys(GONE, 0)}, []

        def work(seed):
            rng = random.Random(seed)
            while time.monotonic() < end:
                name = rng.choice(list(expected))
                size = rng.choice([1, 4096, 100_000, 3 << 20])
                at = rng.randrange(len(expected[name]))
                got = self.read(mnt / "npy" / name, at, size)
                if isinstance(got, bytes):
                    right = expected[name][at:at + size]
                    # A read that fails later than at its first byte is short.
                    counts["bytes" if got == right else "short"] += 1
                    if not got or not right.startswith(got):
                        wrong.append((name, at, size, len(got)))
                else:
                    counts[got] = counts.get(got, 0) + 1
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        while time.monotonic() < end - 3:
            time.sleep(1)
            self.real.stop()
            time.sleep(1.5)
            self.real.start()
        for thread in threads:
            thread.join(30)
        print(f"reads beside restarts: {counts}")
        self.assertEqual(wrong, [])
        self.assertEqual(set(counts), {"bytes", "short", *GONE})
        self.assertGreater(counts["bytes"], 100)
        self.assertGreater(sum(counts[code] for code in GONE), 0)
        self.assertEqual((mnt / "npy" / "w3.npy").read_bytes(), expected["w3.npy"])


if __name__ == "__main__":
    harness.main()
