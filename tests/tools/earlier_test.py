#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the program of November 2026 wrote do all that today's do.

tests/golden/november.tar.xz is a store that commit 13d9962 wrote: `import` of one model of eight tensors with
`--shard rows` on 3 ranks, `cols` on 2 (`--placement rank-shard`), `replicate` on 3 and `grid:2x2` on 4; `mounted`,
which was saved through a mount in slices, partly overwritten, with objects and common values; and `unpublished`, the
same saved again and not published. november.sha256 has what a mount of then showed of it, with --views.
"""

import hashlib
import shutil
import subprocess
import tarfile
import unittest

from harness import ToolTest, pathlib

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
NAMES = ("columns", "lr", "mounted", "replicated", "rows")


def shown():
    """(path below the mount, its SHA-256)"""
    for line in (GOLDEN / "november.sha256").read_text().splitlines():
        digest, path = line.split("  ", 1)
        yield path, digest


class EarlierTest(ToolTest):
    def setUp(self):
        super().setUp()
        with tarfile.open(GOLDEN / "november.tar.xz") as archive:
            archive.extractall(self.store)

    def verify_all(self):
        for name in NAMES:
            self.assertIn(f"{name}: whole", self.run_tool("verify", self.store / name).stdout)

    def assert_shown(self):
        mnt = self.mount(self.store, "--views")
        now = {path: hashlib.sha256((mnt / path).read_bytes()).hexdigest() for path, _ in shown()}
        self.assertEqual(now, dict(shown()))
        return mnt

    def test_earlier_checkpoints_verify(self):
        self.verify_all()
        self.assertIn("sound", self.run_tool("fsck", "--read-data", self.store).stdout)

    def test_mount_shows_earlier_bytes_in_every_view(self):
        mnt = self.assert_shown()
        box = (mnt / "rows/slices/layers.0.weight[1:23,2:5]").read_bytes()
        self.assertEqual(hashlib.sha256(box).hexdigest(),
                         "41b49be4223770c88b1ba5f16032c8a94d46fa189b07f915e4428ef5bcfaa732")
        self.run_tool("unmount", mnt)

    def test_lost_index_of_an_earlier_release_is_rebuilt(self):
        for name in NAMES:
            shutil.rmtree(self.store / name / "index")
        self.assertIn("sound", self.run_tool("fsck", self.store, "--rebuild").stdout)
        self.verify_all()
        self.run_tool("unmount", self.assert_shown())

    def test_earlier_staging_can_be_published(self):
        self.run_tool("publish", self.store / ".staging/unpublished")
        self.run_tool("verify", self.store / "unpublished")
        compared = self.run_tool("diff", self.store / "mounted", self.store / "unpublished").stdout
        self.assertIn("no difference: 7 equal", compared)
        mnt = self.mount(self.store, "--views")
        for kind in ("tensors", "objects", "npy"):
            compared = subprocess.run(["diff", "-r", mnt / "mounted" / kind, mnt / "unpublished" / kind], check=False)
            self.assertEqual(compared.returncode, 0, kind)
        self.run_tool("unmount", mnt)


if __name__ == "__main__":
    unittest.main()
