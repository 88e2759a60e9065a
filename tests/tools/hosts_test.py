# SPDX-License-Identifier: Apache-2.0
"""The command on filesystems that are not here, played by tests/support/adverse_fs.cc: disks that do not give
a block, hosts without locks or flags of rename, NFS's names for what is open, storage that hangs."""

import errno
import json
import os
import subprocess
import sys
import time

import harness
from adverse import AdverseFs

PAGE = 4096


class HostsTest(harness.ToolTest):
    options = ()

    def setUp(self):
        harness.need_fuse()
        harness.need("fuse", (harness.BIN / "tests/adverse_fs").exists(), "adverse_fs is not built: no libfuse")
        super().setUp()
        self.host = AdverseFs(harness.BIN / "tests/adverse_fs", self.dir / "host", *self.options)
        self.store = self.host.at / "STORE"

    def clean(self):
        # First what hangs.
        if hasattr(self, "host"):
            self.host.close()
        super().clean()

    def start(self, *args):
        return subprocess.Popen([harness.TOOL, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                stdin=subprocess.DEVNULL, cwd=self.dir)

    def refused(self, rule, *args):
        """A save, all that reads it, and its end, under a rule; what was said by name."""
        self.host.rules(rule)
        said = {}
        one = self.store / "one"
        for name, *words in (("save", "import", self.model, one, "--ranks", "2"), ("ls", "ls", self.store), ("verify", "verify", self.store),
                             ("load", "load", one, "--compare", self.model, "--shard", "cols", "--ranks", "3"),
                             ("info", "info", one), ("fsck", "fsck", self.store),
                             ("again", "import", self.model, self.store / "two"), ("rm", "rm", one), *args):
            said[name] = self.run_tool(*words).stderr
        self.run_tool("load", self.store / "latest", "--compare", self.model)
        return said


class BadBlockTest(HostsTest):
    """One unreadable block of a data file."""

    def setUp(self):
        super().setUp()
        # Rows are read straight, columns through mappings.
        raw = bytes((i * 31) % 251 for i in range(1 << 21))
        self.tensors = {"big": ("U8", (2048, 1024), raw), "other": ("U8", (100,), raw[:100])}
        harness.write_safetensors(self.model, self.tensors)
        self.saved = self.save("one", "--ranks", "2", "--placement", "tensor-file")
        self.save("two", "--ranks", "2")
        # The second half's file, but for its name; a block in its middle.
        self.file = sorted((self.saved / "data").glob("*"), key=lambda path: path.stat().st_size)[-1]
        self.bad = self.file.stat().st_size // 2 // PAGE * PAGE
        self.rule = f"EIO read *one/data/{self.file.name} {self.bad} {self.bad + PAGE}"
        self.host.rules(self.rule)

    def check(self, done, status):
        said = done.stderr + done.stdout
        self.assertEqual(done.returncode, status, said)
        self.assertIn(self.file.name, said)
        self.assertIn(f"byte {self.bad}", said)
        self.assertIn("Input/output error", said)
        self.assertNotIn("truncated", said)
        self.assertNotIn("ends here", said)

    def test_errors_name_file_byte_and_cause(self):
        out = self.dir / "out.safetensors"
        for more in ([], ["--ranks", "2"], ["--ranks", "3", "--shard", "cols"], ["--ranks", "2", "--shard", "flat"]):
            self.check(self.run_tool("load", self.saved, *more, expect=None), 2)
        self.check(self.run_tool("load", self.saved, "--compare", self.model, "--shard", "cols", expect=None), 2)
        self.check(self.run_tool("export", self.saved, out, "--to", "safetensors", expect=None), 2)
        self.assertFalse(out.exists())
        self.check(self.run_tool("verify", self.saved, expect=None), 1)
        self.check(self.run_tool("cat", self.saved, "big[:,3:9]", expect=None), 2)
        # What does not need the block, and the checkpoint beside it.
        self.assertEqual(self.run_tool("cat", self.saved, "other", text=False).stdout, self.tensors["other"][2])
        self.assertEqual(self.run_tool("cat", self.saved, "big[0:64,:]", text=False).stdout, self.tensors["big"][2][:64 * 1024])
        self.run_tool("load", self.store / "two", "--compare", self.model)
        self.host.rules()
        self.run_tool("verify", self.saved)

    def test_mount_survives_a_bad_block(self):
        for tier in ("auto", "daemon"):
            self.host.rules(self.rule)
            mnt = self.mount(self.store, "--tier", tier, name=tier)
            with self.assertRaises(OSError) as failed:
                (mnt / "one/tensors/big").read_bytes()
            self.assertEqual(failed.exception.errno, errno.EIO)
            # A program that maps it ends by SIGBUS, as on any disk, or cannot open it; the daemon goes on.
            mapped = subprocess.run([sys.executable, "-c", "import mmap,sys\nwith open(sys.argv[1],'rb') as f:\n"
                                     " sum(mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ))", mnt / "one/tensors/big"], check=False,
                                    capture_output=True)
            self.assertNotEqual(mapped.returncode, 0)
            self.assertEqual((mnt / "one/tensors/other").read_bytes(), self.tensors["other"][2])
            self.assertEqual((mnt / "two/tensors/big").read_bytes(), self.tensors["big"][2])
            if tier == "daemon":  # The kernel reads nothing itself that has not been compared as a whole.
                with open(mnt / "one/tensors/big", "rb") as file:
                    self.assertEqual(file.read(PAGE), self.tensors["big"][2][:PAGE])
            status = json.loads((mnt / ".tensormount/status").read_text())
            os.kill(status["pid"], 0)
            said = (mnt / ".tensormount/errors").read_text()
            for part in (self.file.name, f"byte {self.bad}", "Input/output error"):
                self.assertIn(part, said)
            self.host.rules()
            self.assertEqual((mnt / "one/tensors/big").read_bytes(), self.tensors["big"][2])


class WithoutLocksTest(HostsTest):
    def test_commands_work_and_gc_keeps_open_checkpoints(self):
        for error in ("ENOLCK", "ENOSYS", "EOPNOTSUPP"):
            self.store = self.host.at / error
            said = self.refused(f"{error} lock *")
            # Those that read say so, once, however much they read.
            for name in ("verify", "load", "info"):
                self.assertEqual([said[name].count(text) for text in ("WARNING", "without a lock")], [1, 1], said)
            for since in (self.host.backing / error / ".trash").glob("*.since"):
                os.utime(since, (1, 1))
            self.assertRegex(self.run_tool("gc", self.store).stdout, "no locks.*--grace")
            self.assertEqual(len([entry for entry in (self.store / ".trash").iterdir() if entry.suffix != ".since"]), 1)
            self.run_tool("gc", self.store, "--grace", "0")
            self.assertEqual(list((self.store / ".trash").iterdir()), [])
            doctor = self.run_tool("doctor", "--dir", self.host.at, expect=None).stdout
            self.assertRegex(doctor, r"(?m)^no +file locks")

    def test_mount_publishes_without_locks(self):
        self.save()
        self.host.rules("ENOLCK lock *")
        publish(self.mount(self.store))
        self.assertEqual(self.run_tool("cat", self.store / "new", "w", text=False).stdout, b"12345678")
        self.run_tool("verify", self.store)


def publish(mnt):
    staging = mnt / ".staging/x"
    staging.mkdir()
    (staging / "schema.json").write_text(json.dumps({"tensors": {"w": {"dtype": "u8", "shape": [8]}}, "writers": 1}))
    (staging / "tensors/w").write_bytes(b"12345678")
    (staging / "done/0").touch()
    os.rename(staging, mnt / "new")


class WithoutFlagsTest(HostsTest):
    """NFS knows no flags of rename."""

    def test_save_replace_rm_and_publish_work_or_are_refused(self):
        self.refused("EINVAL flags *")
        done = self.run_tool("import", self.model, self.store / "two", "--if-exists", "replace", expect=None)
        self.assertIn(done.returncode, (0, 2))
        if done.returncode == 2:
            self.assertRegex(done.stderr, "UNSUPPORTED: .*atomically")
        self.run_tool("load", self.store / "two", "--compare", self.model)
        publish(self.mount(self.store))
        self.assertEqual(self.run_tool("cat", self.store / "new", "w", text=False).stdout, b"12345678")
        self.assertRegex(self.run_tool("doctor", "--dir", self.host.at, expect=None).stdout, r"(?m)^no +exchange ")
        self.run_tool("gc", self.store, "--grace", "0", "--staging-age", "0")
        self.run_tool("verify", self.store)

    def test_concurrent_saves_to_one_name_have_one_winner(self):
        self.save("before")
        other = self.dir / "other.safetensors"
        harness.write_safetensors(other, harness.sample_tensors(2))
        # Both have written and are let go at once.
        self.host.rules("EINVAL flags *", "hang fsync STORE/.staging/*")
        saves = [self.start("import", model, self.store / "one") for model in (self.model, other)]
        stuck = lambda: {line.split("/")[2] for line in self.host.met() if line.startswith("hang fsync")}
        self.wait_for("both", lambda: len(stuck()) == 2)
        self.host.rules("EINVAL flags *")
        said = [save.communicate(timeout=60)[1] for save in saves]
        self.assertEqual(sorted(save.returncode for save in saves), [0, 2], said)
        winner, loser = (0, 1) if saves[0].returncode == 0 else (1, 0)
        self.assertIn("ALREADY_EXISTS", said[loser])
        self.run_tool("load", self.store / "one", "--compare", (self.model, other)[winner])
        self.run_tool("verify", self.store)


class SillyRenameTest(HostsTest):
    options = ("--silly",)

    def test_gc_frees_unread_checkpoints(self):
        self.save("one")
        self.save("two", "--ranks", "2")
        self.run_tool("rm", self.store / "one")
        self.run_tool("gc", self.store, "--grace", "0")
        self.assertEqual(list((self.host.backing / "STORE/.trash").iterdir()), [])
        publish(self.mount(self.store))
        self.run_tool("gc", self.store, "--grace", "0", "--staging-age", "0")
        self.assertEqual(self.run_tool("cat", self.store / "new", "w", text=False).stdout, b"12345678")
        self.run_tool("fsck", self.store)
        self.run_tool("verify", self.store)

    def test_gc_keeps_open_files_without_locks(self):
        """Without locks gc is told to go by time: what is open stays, and is said, until it is closed."""
        saved = self.save("one")
        self.save("two")
        data = sorted((saved / "data").iterdir())[0]
        want = data.read_bytes()
        self.host.rules("ENOLCK lock *")
        with open(data, "rb") as reader:
            self.run_tool("rm", saved)
            left = self.run_tool("gc", self.store, "--grace", "0", expect=None)
            self.assertEqual(left.returncode, 2, left.stdout + left.stderr)
            self.assertIn("not removed: .trash/", left.stderr)
            self.assertEqual(reader.read(), want)
            self.run_tool("verify", self.store)
            self.run_tool("fsck", self.store)
        self.run_tool("gc", self.store, "--grace", "0")
        self.assertEqual(list((self.host.backing / "STORE/.trash").iterdir()), [])


class HangingTest(HostsTest):
    def test_mount_answers_while_a_read_hangs(self):
        self.save("one")
        self.save("two")
        mnt = self.mount(self.store, "--verify", "always")  # Nothing is read at open.
        self.host.rules("hang read *one/data/*")
        reader = subprocess.Popen(["cat", mnt / "one/tensors/big"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(reader.kill)
        self.wait_for("the hang", lambda: any(line.startswith("hang read") for line in self.host.met()))
        self.wait_for("the count", lambda: json.loads((mnt / ".tensormount/status").read_text())["reads_running"] > 0)
        self.assertEqual((mnt / "two/tensors/w").read_bytes(), self.tensors["w"][2])
        self.assertEqual(sorted(os.listdir(mnt)), ["latest", "one", "two"])
        self.host.rules()
        self.assertEqual(reader.wait(20), 0)
        self.assertEqual((mnt / "one/tensors/w").read_bytes(), self.tensors["w"][2])

    def test_mount_answers_while_the_store_hangs(self):
        self.save("one")
        mnt = self.mount(self.store)
        self.assertEqual((mnt / "one/tensors/w").read_bytes(), self.tensors["w"][2])
        self.host.rules("hang * STORE*")
        begin = time.monotonic()
        status = json.loads((mnt / ".tensormount/status").read_text())
        self.assertEqual(status["tier"] != "", True)
        self.assertLess(time.monotonic() - begin, 5)
        self.host.rules()
        self.assertEqual((mnt / "one/tensors/w").read_bytes(), self.tensors["w"][2])

    def test_stale_handles_are_not_reported_as_damage(self):
        self.save("one")
        for operation in ("open", "read", "getattr"):
            self.host.rules(f"ESTALE {operation} *one/data/*")
            for words in (("verify", self.store), ("fsck", self.store, "--read-data"), ("load", self.store / "one")):
                done = self.run_tool(*words, expect=None)
                said = done.stdout + done.stderr
                self.assertNotEqual(done.returncode, 1, (operation, words, said))
                self.assertNotIn("damaged", said)
        self.host.rules()
        self.run_tool("verify", self.store)


if __name__ == "__main__":
    harness.main()
