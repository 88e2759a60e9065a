# SPDX-License-Identifier: Apache-2.0
"""A mount whose storage hangs (tests/support/adverse_fs.cc): who does not need it is answered, who is killed ends,
and nobody hears EINTR. Storage hangs until a rule is taken back, so nothing here depends on how fast a machine is."""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time

import harness
from adverse import AdverseFs

# What others do meanwhile, each in a process of its own: one that hangs in the kernel cannot be left otherwise.
OTHERS = """
import os, sys
mnt = sys.argv[1]
for go in (
    lambda: os.listdir(mnt),
    lambda: os.stat(mnt + "/two/tensors/other"),
    lambda: os.path.exists(mnt + "/nope"),
    lambda: open(mnt + "/.tensormount/status").read(),
    lambda: os.statvfs(mnt),
    lambda: open(mnt + "/two/tensors/big", "rb").read(),
    lambda: open(mnt + "/two/tensors/other", "rb").read(),
    lambda: os.listdir(mnt + "/two/tensors"),
):
    go()
"""
FILES = 24
# fsync(2) of a staged file, once the file `go` is there.
SYNC = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
os.write(fd, b"12345678")
print(flush=True)
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
os.fsync(fd)
"""


class WaitsTest(harness.ToolTest):
    def setUp(self):
        harness.need_fuse()
        harness.need("fuse", (harness.BIN / "tests/adverse_fs").exists(), "adverse_fs is not built: no libfuse")
        super().setUp()
        self.host = AdverseFs(harness.BIN / "tests/adverse_fs", self.dir / "host")
        self.store = self.host.at / "STORE"
        raw = bytes((i * 31) % 251 for i in range(1 << 20))
        tensors = {"big": ("U8", (1024, 1024), raw), "other": ("U8", (100,), raw[:100])}
        harness.write_safetensors(self.model, tensors | {f"t{i}": ("U8", (4096,), raw[i:i + 4096]) for i in range(FILES)})
        self.raw = raw
        self.save("one", "--placement", "tensor-file")
        self.save("two")
        self.started = []

    def clean(self):
        # First what hangs.
        if hasattr(self, "host"):
            self.host.close()
        for process in getattr(self, "started", []):
            process.kill()
            process.wait(30)
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()
        super().clean()

    def start(self, *words, **more):
        process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, **more)
        self.started.append(process)
        return process

    def hung(self, what, count=1):
        """Until this many calls hang in storage."""
        self.wait_for(f"{count} that hang in {what}", lambda: sum(line.startswith(f"hang {what}") for line in self.host.met()) >= count)

    def others_are_served(self, mnt):
        other = self.start(sys.executable, "-c", OTHERS, mnt, stderr=subprocess.PIPE)
        try:
            said = other.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:
            self.fail("what needs no storage waits")
        self.assertEqual(other.returncode, 0, said)

    def dies_at_once(self, process, number=signal.SIGKILL):
        self.assertIsNone(process.poll())
        process.send_signal(number)
        try:
            self.assertEqual(process.wait(30), -number)
        except subprocess.TimeoutExpired:
            self.fail(f"signal {number} does not end it")

    def stage(self, mnt, name):
        staging = mnt / ".staging" / name
        staging.mkdir()
        keys = {f"s{i}": {"dtype": "U8", "shape": [8]} for i in range(FILES)}
        (staging / "schema.json").write_text(json.dumps({"tensors": keys}))
        for key in keys:
            (staging / "tensors" / key).write_bytes(b"abcdefgh")
        return staging

    def test_mount_answers_while_a_publish_hangs(self):
        mnt = self.mount(self.store)
        staging = self.stage(mnt, "new")
        self.others_are_served(mnt)
        self.host.rules("hang fsync *")
        publishing = self.start("mv", staging, mnt / "new")
        self.hung("fsync")
        self.others_are_served(mnt)
        # Another publish of the same meanwhile is refused, not waited for.
        other = self.start("mv", "-T", staging, mnt / "other", stderr=subprocess.PIPE)
        self.assertIn("busy", other.communicate(timeout=30)[1].decode())
        self.assertIsNone(publishing.poll())
        self.host.rules()
        self.assertEqual(publishing.wait(60), 0)
        self.assertEqual((mnt / "new/tensors/s1").read_bytes(), b"abcdefgh")
        self.assertEqual(os.listdir(mnt / ".staging"), [])
        self.assertEqual(self.run_tool("cat", self.store / "new", "s1", text=False).stdout, b"abcdefgh")

    def test_late_publish_failure_says_why(self):
        mnt = self.mount(self.store)
        staging = self.stage(mnt, "new")
        self.host.rules("hang fsync *")
        publishing = self.start("mv", staging, mnt / "new", stderr=subprocess.PIPE)
        self.hung("fsync")
        self.host.rules("EIO fsync *")
        self.assertIn("Input/output error", publishing.communicate(timeout=60)[1].decode())
        self.assertEqual(publishing.returncode, 1)
        self.assertFalse((mnt / "new").exists())

    def test_hanging_name_lookups_do_not_block_the_root(self):
        mnt = self.mount(self.store)
        staging = self.stage(mnt, "new")
        time.sleep(2)  # Until the kernel has to ask for the name again, and the mount to look.
        self.host.rules("hang * STORE/.staging/*")
        publishing = self.start("mv", staging, mnt / "new", stderr=subprocess.PIPE)
        self.hung("")
        self.others_are_served(mnt)
        self.dies_at_once(publishing)
        self.host.rules()

    def test_process_waiting_for_a_publish_can_be_killed(self):
        mnt = self.mount(self.store)
        staging = self.stage(mnt, "new")
        self.host.rules("hang fsync *")
        publishing = self.start("mv", staging, mnt / "new")
        self.hung("fsync")
        self.others_are_served(mnt)  # It waits without the root's lock now.
        self.dies_at_once(publishing)
        self.others_are_served(mnt)
        self.host.rules()
        # What had begun ends: published as a whole.
        self.wait_for("the publish", lambda: (mnt / "new").exists())
        self.assertEqual((mnt / "new/tensors/s1").read_bytes(), b"abcdefgh")

    def test_mount_answers_while_many_syncs_hang(self):
        mnt = self.mount(self.store)
        staging, go = self.stage(mnt, "new"), self.dir / "go"
        writers = [self.start(sys.executable, "-c", SYNC, staging / f"tensors/s{i}", go, stdout=subprocess.PIPE) for i in range(FILES)]
        for writer in writers:
            writer.stdout.readline()
        self.host.rules("hang fsync *")
        go.touch()
        self.hung("fsync")
        time.sleep(0.5)  # Until the others have come, and wait for that one or for a thread.
        self.others_are_served(mnt)
        self.dies_at_once(writers[0])
        self.host.rules()
        self.assertEqual([writer.wait(60) for writer in writers[1:]], [0] * (FILES - 1))

    def test_mount_answers_while_many_reads_hang(self):
        for verify in ("first", "off"):
            with self.subTest(verify=verify):
                mnt = self.mount(self.store, "--verify", verify, "--tier", "daemon", name=f"MNT-{verify}")
                before = len(self.host.met())
                self.host.rules("hang read *one/data/*")
                readers = [self.start("cat", mnt / f"one/tensors/t{i}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for i in range(FILES)]
                self.wait_for("the hang", lambda: len(self.host.met()) > before)
                time.sleep(0.5)
                self.others_are_served(mnt)
                self.dies_at_once(readers[0])
                self.dies_at_once(readers[1], signal.SIGTERM)
                self.host.rules()
                self.assertEqual([reader.wait(60) for reader in readers[2:]], [0] * (FILES - 2))

    def test_handled_signals_do_not_interrupt_calls(self):
        """Python makes calls again that were interrupted; C programs do not, so the C library is asked."""
        mnt = self.mount(self.store, "--tier", "daemon")
        staging = self.stage(mnt, "new")
        libc = ctypes.CDLL(None, use_errno=True)
        met = []
        old = signal.signal(signal.SIGALRM, lambda *_: met.append(time.monotonic()))
        signal.siginterrupt(signal.SIGALRM, True)
        self.addCleanup(signal.signal, signal.SIGALRM, old)

        def during(rule, call):
            """What `call` returned, interrupted many times while storage hangs for three seconds."""
            self.host.rules(rule)
            release = self.start(sys.executable, "-c", f"import os,time; time.sleep(3); os.unlink({str(self.host._rules)!r})")
            met.clear()
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            try:
                got = call()
                error = ctypes.get_errno()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            release.wait(20)
            return got, error

        buffer = ctypes.create_string_buffer(1 << 20)
        read = os.open(mnt / "one/tensors/big", os.O_RDONLY)
        written = os.open(staging / "tensors/s1", os.O_RDWR)
        self.addCleanup(os.close, read)
        path = lambda at: os.fsencode(at)
        calls = {
            "pread": ("hang read *one/data/*", lambda: libc.pread(read, buffer, ctypes.c_size_t(1 << 20), ctypes.c_long(0)), None),
            "fsync": ("hang fsync *", lambda: (os.pwrite(written, b"ABCDEFGH", 0), libc.fsync(written))[1], 0),
            "close": ("hang fsync *", lambda: (os.pwrite(written, b"ijklmnop", 0), libc.close(written))[1], 0),
            "mkdir": ("hang mkdir *", lambda: libc.mkdir(path(mnt / ".staging/made"), 0o777), 0),
            "rename": ("hang fsync *", lambda: libc.rename(path(staging), path(mnt / "new")), 0),
        }
        for name, (rule, call, right) in calls.items():
            with self.subTest(call=name):
                got, error = during(rule, call)
                self.assertNotEqual((got, error), (-1, errno.EINTR))
                self.assertTrue(got > 0 if right is None else got == right, (got, os.strerror(error)))
                self.assertGreater(len(met), 0)
        self.assertEqual((mnt / "new/tensors/s1").read_bytes(), b"ijklmnop")


if __name__ == "__main__":
    harness.main()
