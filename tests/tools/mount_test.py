# SPDX-License-Identifier: Apache-2.0
"""The mount as users of the command see it. What each file operation does is tested in tests/mount."""

import json
import os
import signal
import subprocess
import unittest

import numpy as np
from safetensors import safe_open

import harness


class Mount(harness.ToolTest):
    def setUp(self):
        harness.need_fuse()
        super().setUp()

    def test_log_level_selects_messages(self):
        path = self.save()
        log = self.dir / "log"
        for level, lines in ((None, 1), ("debug", 1), ("info", 1), ("warning", 0), ("error", 0)):
            log.unlink(missing_ok=True)
            mnt = self.mount(path, "--log", log, *(("--log-level", level) if level else ()))
            self.run_tool("unmount", mnt)
            self.assertEqual(log.read_text().count("INFO: mounted "), lines, level)
        for where in (("--log-level", "loud", "ls", path), ("ls", path, "--log-level", "INFO"),
                      ("ls", path, "--log-level", "")):
            bad = self.run_tool(*where, expect=2)
            self.assertIn("INVALID_ARGUMENT", bad.stderr)
            self.assertIn("must be debug, info, warning or error", bad.stderr)

    def test_stats_reads_long_answers(self):
        mnt = self.dir / "other"
        mnt.mkdir()
        self.mounts.append(mnt)
        if subprocess.run(["mount", "-t", "tmpfs", "none", mnt], check=False, capture_output=True).returncode != 0:
            self.skipTest("tmpfs cannot be mounted")
        stats = mnt / ".tensormount" / "stats"
        stats.parent.mkdir()
        stats.write_text(json.dumps({"uptime_seconds": 7, "more": "x" * (3 << 20)}))
        (seen,) = self.json_lines("stats", mnt)
        self.assertEqual(seen["uptime_seconds"], 7)
        with open(stats, "wb") as file:
            file.truncate(65 << 20)
        self.fails("stats", mnt, code="INVALID_ARGUMENT", says="the answer has more than 64 MiB")

    def test_every_view_shows_every_tensor(self):
        self.save("step-1", "--shard", "cols", "--ranks", "4")
        mnt = self.mount(self.store)
        root = mnt / "latest"
        with safe_open(root / "model.safetensors", framework="numpy") as opened:
            for key, (dtype, shape, raw) in self.tensors.items():
                self.assertEqual((root / "tensors" / key).read_bytes(), raw, key)
                if dtype in harness.NUMPY:
                    array = np.load(root / "npy" / f"{key}.npy", mmap_mode="r" if raw else None)
                    self.assertEqual((array.shape, array.tobytes()), (shape, raw), key)
                    self.assertEqual(opened.get_tensor(key).tobytes(), raw, key)
        self.assertEqual(sorted(p.name for p in root.iterdir()),
                         ["checkpoint.json", "common.json", "objects", "tensors"])

    def test_rsync_transfers_only_changed_files(self):
        self.save("step-1", "--ranks", "2")
        changed = dict(self.tensors)
        dtype, shape, raw = changed["w"]
        changed["w"] = (dtype, shape, bytes([raw[0] ^ 1]) + raw[1:])
        harness.write_safetensors(self.dir / "m2.safetensors", changed)
        self.save("step-2", "--shard", "flat", "--ranks", "3", model=self.dir / "m2.safetensors")
        mnt = self.mount(self.store)

        def rsync(step):
            out = subprocess.run(["rsync", "-ai", f"{mnt}/{step}/", f"{self.dir}/copy/"], check=True,
                                 capture_output=True, text=True, timeout=60).stdout
            return sorted(l.split(maxsplit=1)[1] for l in out.splitlines() if l.startswith(">f"))

        self.assertEqual(len(rsync("step-1")), len(self.tensors) + 2)
        self.assertEqual(rsync("step-1"), [])
        self.assertEqual(rsync("step-2"), ["checkpoint.json", "tensors/w"])
        self.assertEqual(rsync("step-2"), [])

    def test_publish_and_removal_appear(self):
        self.save("step-1")
        mnt = self.mount(self.store)
        self.save("step-2", "--ranks", "2")
        self.wait_for("step-2", lambda: os.path.realpath(mnt / "latest").endswith("step-2"))
        with open(mnt / "step-1" / "tensors" / "w", "rb") as held:
            self.run_tool("rm", self.store / "step-1")
            self.wait_for("the removal", lambda: not (mnt / "step-1").exists())
            self.assertEqual(held.read(), self.tensors["w"][2])

    def test_invalid_mounts_are_refused(self):
        self.save()
        full = self.dir / "full"
        full.mkdir()
        (full / "x").touch()
        self.assertIn("not empty", self.run_tool("mount", self.store, full, expect=2).stderr)
        self.assertIn("NOT_FOUND", self.run_tool("mount", self.dir / "no", full, expect=2).stderr)
        self.assertIn("NOT_FOUND", self.run_tool("mount", self.store, full, "--hf-rules", "x", expect=2).stderr)
        self.assertIn("nothing is mounted", self.run_tool("unmount", full, expect=2).stderr)
        mnt = self.mount(self.store / "step-1")
        with self.assertRaises(OSError) as caught:
            (mnt / "tensors" / "w").write_bytes(b"x")
        self.assertEqual(caught.exception.errno, 30)  # EROFS

    def test_daemon_unmounts_on_signals_and_on_command(self):
        self.save()
        for how in [signal.SIGTERM, signal.SIGINT, "unmount", "fusermount3"]:
            mnt = self.mount(self.store)
            pid = self.daemon_of(mnt)
            if how == "unmount":
                self.run_tool("unmount", mnt)
            elif how == "fusermount3":
                subprocess.run(["fusermount3", "-u", str(mnt)], check=True, timeout=30)
            else:
                os.kill(pid, how)
            self.wait_for("the unmount", lambda: not os.path.ismount(mnt))
            self.wait_for("the daemon's end", lambda: harness.has_ended(pid))

    def daemon_of(self, mnt):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    words = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\0")
                except OSError:
                    continue
                if words[:2] == [harness.TOOL.encode(), b"mount"] and str(mnt).encode() in words:
                    return int(entry)
        raise AssertionError("no daemon")

    def test_mount_helper_accepts_mount_8_options(self):
        self.save()
        mnt = self.dir / "MNT"
        mnt.mkdir()
        self.mounts.append(mnt)
        helper = str(harness.BIN / "mount.tensormount")
        subprocess.run([helper, str(self.store), str(mnt), "-o", "ro,views,noatime,nofail"], check=True, timeout=60,
                       capture_output=True)
        self.assertIn("npy", os.listdir(mnt / "step-1"))
        self.run_tool("unmount", mnt)

    def test_mount_helper_translates_mount_8_options(self):
        self.save()
        mnt = self.dir / "MNT"
        mnt.mkdir()
        self.mounts.append(mnt)

        def helper(*args):
            return subprocess.run([str(harness.BIN / "mount.tensormount"), str(self.store), str(mnt), *args],
                                  timeout=60, capture_output=True).returncode

        self.assertEqual(helper("-f", "-o", "ro,views"), 0)  # Fake.
        self.assertFalse(os.path.ismount(mnt))
        self.assertNotEqual(helper("-o", "whatisthis"), 0)
        self.assertFalse(os.path.ismount(mnt))
        generic = "defaults,nofail,_netdev,noauto,user=x,x-systemd.automount,X-mount.mkdir,comment=c"
        # The last of ro and rw holds; -s drops what nobody knows.
        for args, writable in [(["-o", generic], True), (["-snv", "-o", f"rw,whatisthis,{generic},ro"], False),
                               (["-r"], False), (["-t", "tensormount", "-N", "1", "-o", "ro,rw"], True)]:
            self.assertEqual(helper(*args), 0, args)
            self.assertEqual((mnt / ".staging").is_dir(), writable, args)
            self.run_tool("unmount", mnt)

    def test_damage_is_an_error_and_is_reported(self):
        path = self.save("step-1", "--placement", "rank-shard")
        (w,) = self.json_lines("info", path, "big")
        extent = w["extents"][0]
        self.flip(path / extent["file"], extent["offset"] + 200_000)
        mnt = self.mount(self.store, "--verify", "always")
        with self.assertRaises(OSError) as caught:
            (mnt / "step-1" / "tensors" / "big").read_bytes()
        self.assertEqual(caught.exception.errno, 5)  # EIO
        self.assertIn("tensor big", (mnt / ".tensormount" / "errors").read_text())
        self.assertEqual((mnt / "step-1" / "tensors" / "w").read_bytes(), self.tensors["w"][2])


if __name__ == "__main__":
    harness.main()
