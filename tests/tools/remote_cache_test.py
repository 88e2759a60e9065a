# SPDX-License-Identifier: Apache-2.0
"""The cache on disk of what is read from servers: which bytes are asked for, and what disks and processes do to it."""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import time

import harness
import object_server
from adverse import AdverseFs
from remote_sources import DATA, LIBRARY, Remote, ROOT, TOKEN, WEIGHT, linked, setUpModule  # noqa: F401

BLOCK = 1 << 20
BIG = 1100 * 1024 * 4  # Bytes of the tensor "big" of m.safetensors.
MOST_OPENING = 640 << 10  # Bytes of the answers that tell the versions of a source's files; less than a block.


class Cached(Remote):
    def setUp(self):
        super().setUp()
        self.cache = self.dir / "cache"

    def files(self, cache=None):
        """The files of blocks."""
        blocks = (cache or self.cache) / "blocks"
        return [file for file in blocks.iterdir() if file.name != "usage"] if blocks.exists() else []

    def again(self, source, *args, env=None, **more):
        """The command prints the same as for the local source; returns the bytes that the server sent."""
        self.server.forget()
        self.same(source, *args, env={"TENSORMOUNT_CACHE": str(self.cache), **(env or {})}, **more)
        return self.server.sent()

    def load(self, source, *more, keys="[vw]", warns=""):
        """Loads and compares with the local source; returns the bytes that the server sent.

        48 MiB by default: more than 64 MiB may be dropped where the disk is slower than the server.
        """
        self.server.forget()
        result = self.run_tool("load", f"{self.url}/{source}", "--compare", DATA / source, "--keys", keys,
                               "--cache", self.cache, *more)
        self.assertRegex(result.stderr, f"^{warns}$")
        return self.server.sent()


class Hits(Cached):
    def test_the_second_run_asks_for_no_data(self):
        for source in ("BIG/step-1", "big.safetensors"):
            with self.subTest(source):
                first = self.load(source, keys="w")
                self.assertGreaterEqual(first, WEIGHT)
                self.assertLessEqual(first, WEIGHT + 2 * BLOCK + MOST_OPENING)
                self.assertLess(self.load(source, keys="w"), MOST_OPENING)
                # Boxes, and columns, of what is there.
                for box in ("w[17:19, 3:1000]", "w[:, 5]"):
                    self.assertLess(self.again(source, "cat", box), MOST_OPENING, box)
                # The rest of the object is asked for, and what is there is not.
                self.assertLess(self.load(source, keys="*"), 2 * WEIGHT + 4 * BLOCK + MOST_OPENING)
                self.assertLess(self.load(source, "--ranks", "2", "--shard", "cols"), MOST_OPENING)
                self.assertLess(self.again(source, "verify"), MOST_OPENING)

    def test_long_reads_stay_few_requests(self):
        self.load("big.safetensors", keys="*")
        ranges = [r.range for r in self.server.requests if r.range != "bytes=0-65535"]
        self.assertLessEqual(len(ranges), 3 * (WEIGHT // (8 << 20) + 3), ranges)

    def test_many_small_tensors(self):
        self.assertGreater(self.again("MANY/step-1", "verify"), 0)
        self.assertLess(self.again("MANY/step-1", "verify"), MOST_OPENING)

    def test_the_cache_is_off_without_an_option(self):
        self.run_tool("cat", f"{self.url}/m.safetensors", "big", text=False)
        self.run_tool("cat", f"{self.url}/m.safetensors", "big", "--cache", "none", text=False,
                      env={"TENSORMOUNT_CACHE": str(self.cache)})
        self.assertFalse(self.cache.exists())
        self.assertFalse(pathlib.Path(os.environ["HOME"], ".cache").exists())

    def test_objects_without_an_etag_are_not_kept(self):
        self.server.sends = ["Last-Modified"]
        for _ in range(2):
            self.assertGreaterEqual(self.again("m.safetensors", "cat", "big"), BIG)
        self.assertEqual(self.files(), [])

    def test_python_uses_the_cache(self):
        if not LIBRARY.exists():
            self.skipTest(f"{LIBRARY} was not built")
        script = ("import sys, tensormount as tm\n"
                  "with tm.open(sys.argv[1]) as c:\n    print(hash(c['big'][:].tobytes()))")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY),
                       "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "1", "TENSORMOUNT_CACHE": str(self.cache)}
        printed, sent = set(), []
        for _ in range(2):
            self.server.forget()
            printed.add(subprocess.run([sys.executable, "-c", script, f"{self.url}/m.safetensors"], env=environment,
                                       check=True, capture_output=True, timeout=30).stdout)
            sent.append(self.server.sent())
        self.assertEqual(len(printed), 1)
        self.assertGreater(sent[0], BIG)
        self.assertLess(sent[1], MOST_OPENING)

    def test_objects_behind_the_hub_are_kept(self):
        folder = self.dir / "www"
        linked(DATA / "m.safetensors", folder / "org/model" / ("1" * 40) / "model.safetensors")
        cdn = self.serve(folder)
        hub = self.serve(folder, hub=cdn)
        hub.revisions, hub.token = {"org/model": {"main": "1" * 40}}, TOKEN
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        for least, most in ((BIG, BIG + 2 * BLOCK), (1, MOST_OPENING)):
            cdn.forget()
            self.again("m.safetensors", "cat", "big", url="hf://org/model", env=env)
            self.assertGreaterEqual(cdn.sent(), least)
            self.assertLess(cdn.sent(), most)
        for file in [*self.files(), self.cache / "blocks/usage"]:
            self.assertNotIn(TOKEN.encode(), file.read_bytes())


class Mounts(Cached):
    def read(self, *options, env=None):
        """The bytes of the tensor in a new mount; what the server sent; what the command wrote."""
        harness.need_fuse()
        self.server.forget()
        mnt = self.dir / "MNT"
        mnt.mkdir(exist_ok=True)
        self.mounts.append(mnt)
        said = self.run_tool("mount", f"{self.url}/BIG/step-1", mnt, *options, env=env).stderr
        try:
            data = (mnt / "tensors" / "w").read_bytes()
        finally:
            self.run_tool("unmount", mnt)
        return data, self.server.sent(), said

    def test_mounts_have_a_cache_by_default(self):
        right = self.run_tool("cat", DATA / "BIG/step-1", "w", text=False).stdout
        env = {"XDG_CACHE_HOME": str(self.dir / "xdg")}
        data, sent, said = self.read(env=env)
        self.assertEqual((data == right, said), (True, ""))
        self.assertGreaterEqual(sent, WEIGHT)
        self.wait_for("the daemon to end", lambda: len(self.files(self.dir / "xdg/tensormount")) >= WEIGHT // BLOCK)
        data, sent, said = self.read(env=env)
        self.assertEqual((data == right, said), (True, ""))
        self.assertLess(sent, MOST_OPENING)
        # A relative path counts from where the command ran; ~/.cache is the place without XDG_CACHE_HOME.
        data, sent, said = self.read("--cache", "xdg/tensormount", env={"HOME": str(self.dir)})
        self.assertLess(sent, MOST_OPENING)
        self.read("--cache", "none", env={"HOME": str(self.dir)})
        self.assertFalse((self.dir / ".cache").exists())
        self.read(env={"HOME": str(self.dir)})
        self.assertTrue((self.dir / ".cache/tensormount/blocks").is_dir())

    def test_a_mount_without_a_place_for_its_cache_warns(self):
        (self.dir / "file").touch()
        for env in ({"XDG_CACHE_HOME": str(self.dir / "file")}, {"HOME": ""}):
            data, sent, said = self.read(env=env)
            self.assertEqual(len(data), WEIGHT)
            self.assertRegex(said, "^tensormount: warning: .*the mount has no cache.*\n$")

    def test_mounts_of_directories_have_none(self):
        harness.need_fuse()
        mnt = self.dir / "LOCAL"
        mnt.mkdir()
        self.mounts.append(mnt)
        self.run_tool("mount", DATA / "BIG/step-1", mnt, env={"HOME": str(self.dir)})
        self.run_tool("unmount", mnt)
        self.assertFalse((self.dir / ".cache").exists())


class Versions(Cached):
    def setUp(self):
        super().setUp()
        self.folder = self.dir / "www"
        self.folder.mkdir()
        for name, byte in (("old", 1), ("new", 2)):
            harness.write_safetensors(self.dir / name, {"w": ("U8", (5_000_000,), bytes([byte]) * 5_000_000)})
        self.server = self.serve(self.folder)
        self.url = self.server.url
        self.put("old")

    def put(self, name):
        self.server.replace("m.safetensors", (self.dir / name).read_bytes())

    def cat(self):
        return set(self.run_tool("cat", f"{self.url}/m.safetensors", "w", "--cache", self.cache, text=False).stdout)

    def test_a_replaced_object_is_another_one(self):
        self.assertEqual(self.cat(), {1})
        self.put("new")
        self.assertEqual(self.cat(), {2})
        self.server.forget()
        self.assertEqual(self.cat(), {2})
        self.assertLess(self.server.sent(), MOST_OPENING)

    def test_bytes_are_never_mixed(self):
        self.cat()
        # Half of the blocks are gone: the old object is read from disk, then the new one answers.
        for file in self.files():
            if int(file.name.rpartition("-")[2]) >= 2:
                file.unlink()
        self.server.conditions = False
        self.server.fault = lambda number, path, range: self.put("new") if number == 2 else None
        self.server.forget()
        result = self.run_tool("cat", f"{self.url}/m.safetensors", "w", "--cache", self.cache, text=False, expect=2)
        self.assertIn(b"STALE", result.stderr)
        self.assertLessEqual(set(result.stdout), {1})
        self.server.fault = lambda number, path, range: None
        self.assertEqual(self.cat(), {2})


class Adverse(Cached):
    def test_damaged_blocks_are_asked_for_again(self):
        self.load("BIG/step-1")
        files = self.files()
        for number, file in enumerate(files):
            if number % 3 == 0:
                harness.ToolTest.flip(file, file.stat().st_size // 2)
            elif number % 3 == 1:
                os.truncate(file, number * 1000)
        self.load("BIG/step-1", warns="tensormount: WARNING: .*reported once.*\n")
        self.assertLess(self.load("BIG/step-1"), MOST_OPENING)
        self.assertEqual(len(self.files()), len(files))

    def test_killed_processes_leave_a_usable_cache(self):
        for wait in (0.03, 0.06, 0.1):
            with subprocess.Popen([harness.TOOL, "load", f"{self.url}/BIG/step-1", "--cache", self.cache],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
                time.sleep(wait)
                child.kill()
        self.load("BIG/step-1")
        self.assertLess(self.load("BIG/step-1"), MOST_OPENING)

    def test_the_bound_holds(self):
        for _ in range(2):
            self.load("BIG/step-1", "--cache-size", "16MiB")
            total = sum(file.stat().st_size for file in self.files())
            self.assertLessEqual(total, 16 << 20)
            self.assertGreater(total, 8 << 20)

    def test_processes_share_a_cache(self):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for run in [pool.submit(self.load, "BIG/step-1") for _ in range(3)]:
                run.result()
        self.assertLess(self.load("BIG/step-1"), MOST_OPENING)

    def test_directories_that_others_may_write_are_refused(self):
        self.cache.mkdir()
        self.cache.chmod(0o770)
        url = f"{self.url}/m.safetensors"
        self.fails("ls", url, "--cache", self.cache, code="PERMISSION_DENIED", says="other users may write")
        result = self.run_tool("ls", url, env={"TENSORMOUNT_CACHE": str(self.cache)})
        self.assertRegex(result.stderr, "^tensormount: WARNING: .*other users may write.*; no cache is used\n$")
        self.assertEqual(list(self.cache.iterdir()), [])
        link = self.dir / "link"
        link.symlink_to(DATA)
        self.fails("ls", url, "--cache", link, code="PERMISSION_DENIED", says="symbolic link")
        self.fails("ls", url, "--cache", "/proc/none", code="NOT_FOUND", says="/proc/none")

    def test_sizes_are_checked(self):
        url = f"{self.url}/m.safetensors"
        self.fails("ls", url, "--cache-size", "1GiB", code="INVALID_ARGUMENT", says="needs --cache DIR")
        for size, says in (("1MiB", "at least 16MiB"), ("many", "not a number of bytes")):
            self.fails("ls", url, "--cache", self.cache, "--cache-size", size, code="INVALID_ARGUMENT", says=says)
        self.assertFalse(self.cache.exists())

    def host(self):
        """A file system that fails as its rules say, with the cache on it."""
        harness.need("fuse", (harness.BIN / "tests/adverse_fs").exists(), "adverse_fs is not built: no libfuse")
        harness.need_fuse()
        host = AdverseFs(harness.BIN / "tests/adverse_fs", self.dir / "host")
        self.addCleanup(host.close)
        self.cache = host.at / "cache"
        return host

    def test_a_mount_that_ends_writes_what_waits(self):
        self.host().rules("wait:0.05 create */.new-*")
        mnt = self.mount(f"{self.url}/STORE/step-1", "--cache", self.cache)
        self.assertEqual(len((mnt / "tensors/big").read_bytes()), BIG)
        self.run_tool("unmount", mnt)
        self.wait_for("the last block", lambda: len(self.files()) >= BIG // BLOCK)

    def test_disks_that_fail_end_the_cache_and_no_read(self):
        host = self.host()
        for rule, says in (("ENOSPC write */.new-*", "No space left"), ("EROFS create *", "Read-only"),
                           ("EDQUOT write *usage", "quota"), ("ENOLCK lock *", "lock")):
            with self.subTest(rule):
                host.rules(rule)
                self.load("BIG/step-1", warns=f"tensormount: WARNING: .*keeps nothing more: .*{says}.*\n")
                self.assertEqual(self.files(), [])
        host.rules()
        self.load("BIG/step-1")
        host.rules("EIO read */blocks/*-7")
        sent = self.load("BIG/step-1", warns="tensormount: WARNING: .*no longer used: .*error.*\n")
        self.assertGreater(sent, WEIGHT)
        host.rules()
        self.assertLess(self.load("BIG/step-1"), MOST_OPENING)

    def test_a_directory_that_is_removed_under_a_mount(self):
        harness.need_fuse()
        mnt = self.mount(f"{self.url}/BIG/step-1", "--cache", self.cache, "--log", self.dir / "log")
        right = self.run_tool("cat", DATA / "BIG/step-1", "v", text=False).stdout
        self.assertEqual((mnt / "tensors/v").read_bytes(), right)
        self.wait_for("blocks", lambda: len(self.files()) >= WEIGHT // BLOCK)
        shutil.rmtree(self.cache)
        right = self.run_tool("cat", DATA / "BIG/step-1", "w", text=False).stdout
        self.assertEqual((mnt / "tensors/w").read_bytes(), right)
        self.run_tool("unmount", mnt)
        self.wait_for("the log", lambda: "its directory was removed" in (self.dir / "log").read_text())
        self.assertFalse(self.cache.exists())


if __name__ == "__main__":
    harness.main()
