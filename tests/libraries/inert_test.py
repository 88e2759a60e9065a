# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints of others runs nothing, asks no network and opens nothing outside of them.

Under strace: every program started, socket made and file opened by the commands and by a mount, on
checkpoints that torch saved and on ones made to do harm.
"""

import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile

import libraries

libraries.need("torch")
import torch  # noqa: E402

import formula  # noqa: E402
import make_torch  # noqa: E402

harness = libraries.harness
ALL = formula.expected(formula.MODEL)
CALLS = "trace=execve,execveat,socket,connect,open,openat,openat2,creat"

# What any program opens that is linked dynamically and runs here.
SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/fuse", "/dev/urandom", "/etc/ld.so.", "/lib", "/usr/lib",
          "/usr/local/lib", "/usr/share/", "/etc/fuse.conf", "/etc/localtime", "/etc/mtab", "/run/mount")


# Runs a program and prints its peak memory in KiB.
MEASURE = """
import os, sys
child = os.fork()
if child == 0:
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    os.execv(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Evil:
    """A pickle that asks for a program to be run."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def can_trace():
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], check=False).returncode == 0


class Inert(libraries.LibraryTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        libraries.make("torch", "dcp,hf_shards", cls.made)
        torch.save({key: make_torch.tensor(key, *spec) for key, spec in ALL.items()}, cls.made / "model.pt")

    def setUp(self):
        super().setUp()
        harness.need("strace", can_trace(), "strace cannot be used here")

    def traced(self, *args, expect=0, seconds=60):
        """Runs the command; the lines of what it and its children asked for."""
        log = self.dir / "strace.log"
        done = subprocess.run(["strace", "-ff", "-y", "-qq", "-s", "4096", "-e", CALLS, "-o", str(log), harness.TOOL,
                               *map(str, args)], capture_output=True, text=True, errors="replace", timeout=seconds,
                              cwd=self.dir, stdin=subprocess.DEVNULL)
        if expect is not None:
            self.assertEqual(done.returncode, expect, f"{args}\n{done.stdout}\n{done.stderr}")
        return self.logged(log), done

    def logged(self, log):
        """The lines of all threads, which have a file each; taken away."""
        lines = []
        for path in sorted(log.parent.glob(log.name + ".*")):
            lines += path.read_text(errors="replace").splitlines()
            path.unlink()
        return lines

    def check_inert(self, lines, allowed):
        executed, opened = 0, 0
        allowed = [os.path.realpath(folder) for folder in (*allowed, harness.BIN)]
        for line in lines:
            call = re.search(r"^(\w+)\(", line)
            if call is None:
                continue
            name = call[1]
            if name.startswith("exec"):
                executed += 1
                continue
            self.assertNotIn(name, ("socket", "connect"), line)
            # What was opened in the end, whatever links led there; a refused open opened nothing.
            done = re.search(r" = (?:\d+<(.*)>|-1 .*|\? .*|\?)$", line)
            self.assertIsNotNone(done, line)
            opened += 1
            if done[1] is None or done[1].startswith(SYSTEM):
                continue
            # The folder of a source that is one file: as a place to start from only.
            if "O_PATH|O_DIRECTORY" in line and any(done[1] == os.path.dirname(folder) for folder in allowed):
                continue
            self.assertTrue(any(done[1] == folder or done[1].startswith(folder + "/") for folder in allowed), line)
        self.assertEqual(executed, 1)
        self.assertGreater(opened, 0)

    def sources(self):
        return [(self.made / name, "model.layers.0.attn.qkv") for name in ("dcp", "hf_shards", "model.pt")]

    def test_commands_do_not_execute_pickles(self):
        for source, key in self.sources():
            for args in (["ls", source], ["info", source], ["cat", source, key + "[0:5]"], ["verify", source],
                         ["load", source, "--ranks", "2"]):
                lines, _ = self.traced(*args)
                self.check_inert(lines, [source])

    def test_mount_does_not_execute_pickles(self):
        harness.need_fuse()
        if os.geteuid() != 0:
            self.skipTest("others than root mount with the help of fusermount3")
        for source, key in self.sources():
            mnt, log = self.dir / "MNT", self.dir / "strace.log"
            mnt.mkdir(exist_ok=True)
            self.mounts.append(mnt)
            daemon = subprocess.Popen(["strace", "-ff", "-y", "-qq", "-e", CALLS, "-o", str(log), harness.TOOL,
                                       "mount", "-f", str(source), str(mnt)], cwd=self.dir, stdin=subprocess.DEVNULL)
            try:
                self.wait_for("the mount", lambda: (mnt / "tensors").exists(), 30)
                self.assertEqual((mnt / "tensors" / key).read_bytes(), formula.raw(key, *ALL[key]))
                list(mnt.rglob("*"))
            finally:
                subprocess.run([harness.TOOL, "unmount", str(mnt)], check=False, timeout=60, capture_output=True)
                daemon.wait(60)
            self.check_inert(self.logged(log), [source, mnt])

    def hostile(self):
        """(source, what must not be opened)."""
        marker = self.dir / "RAN"
        evil = pickle.dumps(Evil(marker))
        folder = self.dir / "evil"
        folder.mkdir()
        (folder / ".metadata").write_bytes(evil)
        (folder / "__0_0.distcp").write_bytes(b"x")
        yield folder
        path = self.dir / "evil.pt"
        torch.save({"w": torch.zeros(3), "x": Evil(marker)}, path)
        yield path
        with zipfile.ZipFile(self.dir / "evil2.pt", "w") as archive:
            archive.writestr("archive/data.pkl", evil)
            archive.writestr("archive/version", "3\n")
        yield self.dir / "evil2.pt"
        # A good checkpoint, one of whose files has become a link to somewhere else.
        secret = self.dir / "elsewhere" / "secret"
        secret.parent.mkdir()
        shutil.copy(self.made / "dcp" / "__1_0.distcp", secret)
        linked = self.dir / "linked"
        shutil.copytree(self.made / "dcp", linked)
        (linked / "__1_0.distcp").unlink()
        (linked / "__1_0.distcp").symlink_to(secret)
        yield linked
        # The same by what the metadata say.
        outside = self.dir / "outside"
        shutil.copytree(self.made / "dcp", outside)
        name = b"../elsewhere"
        raw = (outside / ".metadata").read_bytes()
        self.assertIn(b"\x8c\x0c__1_0.distcp", raw)
        (outside / ".metadata").write_bytes(raw.replace(b"\x8c\x0c__1_0.distcp", b"\x8c\x0c" + name))
        yield outside

    def test_hostile_checkpoints_execute_nothing(self):
        for source in self.hostile():
            for args in (["ls", source], ["info", source], ["verify", source], ["load", source],
                         ["cat", source, "model.layers.0.attn.qkv"]):
                lines, done = self.traced(*args, expect=None)
                self.check_inert(lines, [source])
                self.assertFalse((self.dir / "RAN").exists(), args)
                self.assertNotIn(done.returncode, (-11, -6, 134, 139), args)
                if args[0] in ("verify", "load") and source.suffix == "":
                    self.assertNotEqual(done.returncode, 0, args)

    def test_bad_files_end_within_time_and_memory(self):
        """Files that only lie: each under a deadline and a bound of memory."""
        paths = [path for path in sorted((libraries.HERE.parent / "golden" / "bad").rglob("*")) if path.is_file()]
        for path in paths[:: max(1, len(paths) // 40)]:
            lines, done = self.traced("verify", path, expect=None, seconds=30)
            self.check_inert(lines, [path.parent])
            self.assertGreaterEqual(done.returncode, 0, path)

    def test_commands_use_at_most_64_mib(self):
        """At most 64 MiB besides what describes the checkpoint."""
        for source in [source for source, _ in self.sources()]:
            for command in ("ls", "verify"):
                # From a small process: what it had before exec counts, too.
                done = subprocess.run([sys.executable, "-I", "-S", "-c", MEASURE, harness.TOOL, command, str(source)],
                                      capture_output=True, text=True, timeout=60, check=True)
                self.assertLess(int(done.stdout) * 1024, 64 << 20, (source, command))


if __name__ == "__main__":
    libraries.main()
