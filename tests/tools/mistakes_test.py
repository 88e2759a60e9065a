# SPDX-License-Identifier: Apache-2.0
"""What the command says of mistakes: mistakes.py has them. And what else is told in words: JSON errors,
URLs, stores within stores, mount paths as sources."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import mistakes
from harness import TOOL, ToolTest, need_fuse


class Mistakes(unittest.TestCase):
    def test_every_error_names_object_reason_and_remedy(self):
        base = os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None
        with tempfile.TemporaryDirectory(dir=base) as name:
            folder = pathlib.Path(name)
            mistakes.make_world(TOOL, folder)
            before = sorted(str(p) for p in folder.rglob("*") if ".generations" not in str(p))
            for words, says in mistakes.commands():
                with self.subTest(command=" ".join(words)):
                    status, error = mistakes.answer(TOOL, folder, words)
                    self.assertEqual(status, 2, error)
                    for text in says:
                        self.assertIn(text, error)
                    self.assertLessEqual(len(error.splitlines()), 2, error)
                    status, error = mistakes.answer(TOOL, folder, ["--json", *words])
                    self.assertEqual(status, 2, error)
                    told = json.loads(error.splitlines()[-1])["error"]
                    always = {"code", "status", "errno", "message"}
                    self.assertLessEqual(always, told.keys())
                    self.assertLessEqual(told.keys() - always,
                                         {"hint", "rank", "key", "box", "file", "cause"})
            after = sorted(str(p) for p in folder.rglob("*") if ".generations" not in str(p))
            self.assertEqual(after, before)  # Nothing was made, and nothing went.


class InWords(ToolTest):
    def test_saves_into_a_checkpoint_are_refused(self):
        path = self.save("step-1")
        self.fails("import", self.model, path / "c", code="INVALID_ARGUMENT", says="is a checkpoint")
        self.fails("import", self.model, path / "data" / "c", code="INVALID_ARGUMENT", says="is a checkpoint")
        os.symlink(path, self.dir / "link")
        self.fails("import", self.model, self.dir / "link" / "c", code="INVALID_ARGUMENT", says="is a checkpoint")
        self.run_tool("verify", path)

    def test_store_within_a_store_works(self):
        self.save("step-1")
        inner = self.store / "old"
        inner.mkdir()
        (inner / "store.json").write_bytes((self.store / "store.json").read_bytes())
        self.run_tool("import", self.model, inner / "step-1")

    def test_url_as_a_path_is_refused(self):
        # Who has such a folder names it so.
        self.run_tool("import", self.model, "./s3:/bucket/x")
        self.run_tool("ls", "./s3:/bucket/x")
        self.fails("ls", "ftp://bucket/x", code="UNSUPPORTED", says="a URL")

    def test_first_checkpoint_can_be_saved_through_a_mount(self):
        need_fuse()
        made = self.run_tool("init", "new/store", "--json")
        self.assertTrue(json.loads(made.stdout)["made"])
        self.assertFalse(json.loads(self.run_tool("init", "new/store", "--json").stdout)["made"])
        mnt = self.mount(self.dir / "new" / "store")
        staging = mnt / ".staging" / "a"
        staging.mkdir(parents=True)
        (staging / "schema.json").write_text('{"tensors": {"w": {"dtype": "U8", "shape": [5]}}}')
        (staging / "tensors" / "w").write_bytes(b"hello")
        os.rename(staging, mnt / "a")
        self.assertEqual((mnt / "a" / "tensors" / "w").read_bytes(), b"hello")

    def test_error_says_why_an_unprivileged_user_cannot_mount(self):
        need_fuse()
        if os.geteuid() != 0 or not shutil.which("fusermount3") or not shutil.which("setpriv"):
            self.skipTest("needs root, fusermount3 and setpriv")
        conf = pathlib.Path("/etc/fuse.conf")
        if conf.exists() and "user_allow_other" in conf.read_text().split("\n"):
            self.skipTest("ordinary users may mount for others here")
        self.save("step-1")
        self.dir.chmod(0o755)
        mnt = self.dir / "MNT"
        mnt.mkdir()
        os.chown(mnt, 65534, 65534)
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        failed = self.run_tool("mount", self.store, mnt, "--allow-other", prefix=user, expect=2)
        # Of /dev/fuse that is closed to them, or of the option: fusermount3's own words, in the error.
        self.assertRegex(failed.stderr, r"PERMISSION_DENIED: mount .*: .*(/dev/fuse|user_allow_other)")
        self.assertEqual(len(failed.stderr.splitlines()), 1, failed.stderr)
        doctor = self.run_tool("doctor", prefix=user, expect=None).stdout
        self.assertIn("no  allow_other", doctor)
        self.assertIn("add the line user_allow_other to /etc/fuse.conf", doctor)
        self.assertIn("yes allow_other", self.run_tool("doctor", "--dir", self.dir).stdout)

    def test_export_hints_at_the_mount_only_if_it_fits(self):
        self.save("step-1")
        hint = "a mount shows the same bytes"
        self.assertIn(hint, self.run_tool("export", self.store / "step-1", "a.safetensors", "--to", "safetensors").stdout)
        rules = self.dir / "rules.json"
        rules.write_text(json.dumps([{"match": "w", "to": "v"}]))
        done = self.run_tool("export", self.store / "step-1", "b.safetensors", "--to", "safetensors", "--map", rules)
        self.assertNotIn(hint, done.stdout)

    def test_mount_paths_resolve_to_their_source(self):
        need_fuse()
        path = self.save("step-1")
        mnt = self.mount(self.store)
        for source, meant in [(mnt, self.store), (mnt / "step-1", path), (mnt / "latest", path)]:
            self.assertEqual(self.run_tool("ls", source).stdout, self.run_tool("ls", meant).stdout)
        self.run_tool("verify", mnt / "step-1")
        self.run_tool("diff", mnt / "step-1", self.model)
        self.fails("ls", mnt / "step-1" / "tensors", code="UNSUPPORTED", says="")
        # A folder with such a file that is no mount leads nowhere.
        fake = self.dir / "fake" / ".tensormount"
        fake.mkdir(parents=True)
        (fake / "status").write_text(json.dumps({"source": str(self.store)}))
        self.fails("ls", self.dir / "fake", code="UNSUPPORTED", says="fake")


if __name__ == "__main__":
    unittest.main()
