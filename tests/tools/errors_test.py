# SPDX-License-Identifier: Apache-2.0
"""Wrong input and damage: code, object and reason on one line, the right exit status, nothing left."""

import json
import os
import shutil
import unittest

import harness


class Errors(harness.ToolTest):
    def test_taken_and_invalid_names_are_refused(self):
        self.save("step-1")
        before = sorted(p for p in self.store.rglob("*"))
        self.fails("import", self.model, self.store / "step-1", code="ALREADY_EXISTS", says="step-1")
        for name in ["latest", "store.json", ".hidden"]:
            self.fails("import", self.model, self.store / name, code="INVALID_ARGUMENT", says=name)
        visible = [p for p in before if ".generations" not in str(p)]
        after = [p for p in sorted(self.store.rglob("*")) if ".generations" not in str(p)]
        self.assertEqual(after, visible)
        self.run_tool("import", self.model, self.store / "step-1", "--if-exists", "replace", "--shard", "cols")
        self.run_tool("load", self.store / "step-1", "--compare", self.model)

    def test_usage_errors_say_what_to_do(self):
        self.fails("import", self.dir / "missing", self.store / "a", code="NOT_FOUND", says="missing")
        (self.dir / "other").mkdir()
        self.fails("ls", self.dir / "other", code="UNSUPPORTED", says="the directory is empty")
        (self.dir / "other" / "notes.txt").write_text("x")
        self.fails("ls", self.dir / "other", code="UNSUPPORTED", says="no COMMIT, no store.json")
        self.fails("compact", "a", "b", code="UNSUPPORTED", says="compact")
        self.fails("import", self.model, self.store / "a", "--map", "x", code="NOT_FOUND", says="x")
        self.fails("nonsense", code="INVALID_ARGUMENT", says="")
        self.fails("import", self.model, self.store / "a", "--ranks", "3", "--shard", "grid:2x2",
                   code="INVALID_ARGUMENT", says="is for 4 ranks, but there are 3")
        self.fails("import", self.model, self.store / "a", "--shard", "diagonal", code="INVALID_ARGUMENT",
                   says="diagonal")
        self.assertFalse(self.store.exists())
        for command in ["mount", "import", "adopt", "load", "ls", "info", "cat", "diff", "layout", "verify", "rm", "gc", "fsck", "doctor"]:
            self.assertIn("Example:", self.run_tool(command, "--help").stdout)

    def test_file_option_warns_for_a_source_that_is_no_foreign_directory(self):
        path = self.save("step-1")
        for source in (path, self.model):
            result = self.run_tool("load", source, "--file", "nothere")
            self.assertIn("warning: --file nothere is ignored", result.stderr)

    def test_flipped_byte_error_names_its_place(self):
        path = self.save("step-1", "--shard", "cols", "--ranks", "2", "--placement", "rank-shard")
        (w,) = self.json_lines("info", path, "big")
        extent = w["extents"][1]
        self.flip(path / extent["file"], extent["offset"] + 70000)
        result = self.run_tool("verify", path, expect=1)
        self.assertIn(f"tensor big {extent['region']}", result.stdout)
        self.assertIn(extent["file"], result.stdout)
        for rule in ["cols", "rows"]:
            failed = self.run_tool("load", path, "--shard", rule, "--ranks", "2", expect=2)
            self.assertIn("DATA_LOSS", failed.stderr)
            self.assertIn("tensor big", failed.stderr)
            self.assertIn(extent["region"], failed.stderr)
        for key in ["big", "big[40:50, 600]"]:  # Not the byte, but its leaf.
            failed = self.run_tool("cat", path, key, expect=2, text=False)
            self.assertIn(b"DATA_LOSS", failed.stderr)
            self.assertIn(b"tensor big", failed.stderr)
        self.run_tool("verify", "--quick", path)  # No data are read.

    def test_truncated_or_missing_data_file_is_reported(self):
        path = self.save()
        data = max((path / "data").iterdir(), key=lambda p: p.stat().st_size)
        os.chmod(data, 0o644)
        os.truncate(data, data.stat().st_size - 1)
        self.assertIn(data.name, self.run_tool("verify", "--quick", path, expect=1).stdout)
        data.unlink()
        self.assertIn(data.name, self.run_tool("verify", path, expect=1).stdout)
        self.assertIn("DATA_LOSS", self.run_tool("load", path, expect=2).stderr)

    def test_damaged_commit_record_is_reported(self):
        path = self.save()
        commit = path / "COMMIT"
        size = commit.stat().st_size
        good = commit.read_bytes()
        self.flip(commit, 40)
        result = self.run_tool("verify", path, expect=1)
        self.assertIn("COMMIT", result.stdout)
        listed = self.run_tool("ls", path)  # Opened, with a warning.
        self.assertIn("warning", listed.stderr)
        self.assertEqual(listed.stdout.split(), sorted(self.tensors))
        broken = bytearray(good)
        broken[40] ^= 1
        broken[size - 60] ^= 1
        broken[size // 2 + 40] ^= 1
        for at in range(0, size, 16):
            broken[at] ^= 0x80
        commit.write_bytes(bytes(broken))
        self.fails("ls", path, code="DATA_LOSS", says="COMMIT")
        self.run_tool("verify", path, expect=1)

    def test_damaged_latest_is_skipped_with_a_warning(self):
        self.save("step-1")
        path = self.save("step-2")
        (path / "COMMIT").write_bytes(b"nonsense")
        for command in ["info", "ls", "verify"]:
            result = self.run_tool(command, self.store / "latest")
            self.assertIn("warning: checkpoint step-2 was skipped", result.stderr)
        result = self.run_tool("info", self.store)
        self.assertIn("warning: checkpoint step-2 was skipped", result.stderr)
        self.assertEqual(self.json_lines("info", self.store)[0]["latest"], "step-1")
        self.assertIn("DATA_LOSS", self.run_tool("ls", self.store, expect=1).stdout)
        (path / "COMMIT").unlink()  # Lost: that is damage too, but of a folder of somebody's it is none.
        self.assertIn("step-2", self.run_tool("info", self.store).stderr)
        shutil.rmtree(path)
        path.mkdir()
        self.assertEqual(self.run_tool("info", self.store).stderr, "")
        self.assertIn("the directory is not a checkpoint: it has no COMMIT", self.run_tool("ls", self.store).stdout)
        self.assertIn("a directory that is not a checkpoint", self.run_tool("fsck", self.store).stdout)

    def test_newer_latest_checkpoint_is_refused(self):
        self.save("step-1")
        path = self.save("step-2")
        newer = harness.pathlib.Path(__file__).resolve().parents[1] / "golden/bad/UNSUPPORTED-incompatible-bit.commit"
        shutil.copyfile(newer, path / "COMMIT")
        for command in [["info", self.store], ["load", self.store / "latest"], ["ls", self.store / "latest"]]:
            self.fails(*command, code="UNSUPPORTED", says="step-2")
        self.assertIn("step-1", self.run_tool("ls", self.store, expect=2).stdout)
        found = self.run_tool("fsck", self.store, expect=2).stdout
        self.assertIn("newer version", found)
        self.assertNotIn("`rm`", found)
        self.save("step-3")  # Saves go on.

    def test_lost_superblock_is_rebuilt_by_fsck(self):
        path = self.save("step-1")
        superblock = self.store / "store.json"
        for text in ["", "{\"format\": \"tens", None]:
            os.chmod(superblock, 0o644)
            superblock.write_text(text) if text is not None else superblock.unlink()
            found = self.run_tool("fsck", self.store, expect=1)
            self.assertIn("store.json", found.stdout)
            self.assertIn("--rebuild", found.stdout)
            self.run_tool("fsck", self.store, "--rebuild")
            self.run_tool("fsck", self.store)
            self.assertEqual(len(self.json_lines("ls", self.store)), 1)
            self.save("after")
            self.run_tool("rm", self.store / "after")
        self.fails("fsck", self.dir, code="NOT_FOUND", says="not a store")

    def test_error_names_the_store_without_superblock(self):
        path = self.save("step-1")
        (self.store / "store.json").unlink()
        self.fails("ls", self.store, code="UNSUPPORTED", says="fsck")
        self.fails("gc", self.store, code="NOT_FOUND", says="--rebuild")
        self.assertFalse((self.store / "store.json").exists())
        # One that was brought by hand; one of which no COMMIT can be read; the store's own folders.
        brought, broken, bare = (self.dir / name for name in ["brought", "broken", "bare"])
        for folder in [brought, broken]:
            shutil.copytree(path, folder / "grid")
        os.chmod(broken / "grid" / "COMMIT", 0o644)
        (broken / "grid" / "COMMIT").write_bytes(b"")
        (bare / ".staging").mkdir(parents=True)
        for folder, after in [(brought, 0), (broken, 1), (bare, 0)]:
            with self.subTest(folder=folder.name):
                self.fails("ls", folder, code="UNSUPPORTED", says="--rebuild")
                self.assertIn("store.json", self.run_tool("fsck", folder, expect=1).stdout)
                self.assertFalse((folder / "store.json").exists())
                self.run_tool("fsck", folder, "--rebuild", expect=after)
                self.assertTrue((folder / "store.json").exists())
                self.run_tool("fsck", folder, expect=after)
        self.assertEqual(len(self.json_lines("ls", brought)), 1)
        # Nothing is written into what is none: other folders, a checkpoint itself, links to stores.
        other = self.dir / "no-store"
        (other / "sub").mkdir(parents=True)
        (other / "sub" / "COMMIT").write_text("of another program\n")
        (other / "link").symlink_to(path)
        (other / ".generations").symlink_to(self.store / ".generations")
        for folder in [other, path]:
            self.fails("fsck", folder, "--rebuild", code="NOT_FOUND", says="not a store")
            self.assertFalse((folder / "store.json").exists())

    def test_gc_counts_claims_in_one_line(self):
        for n in range(3):
            self.save(f"step-{n}")
        for dry in [["--dry-run"], []]:
            (told,) = self.json_lines("gc", self.store, "--dry-run")
            self.assertEqual(sorted(told["removed"]), [".generations/1", ".generations/2"])
            lines = self.run_tool("gc", self.store, *dry).stdout.splitlines()
            self.assertEqual(len(lines), 2, lines)
            self.assertTrue(lines[0].endswith("2 generation numbers of earlier saves in .generations/"), lines)
        self.save("step-3")
        self.assertIn("removed 1 generation number of", self.run_tool("gc", self.store).stdout)

    def test_counts_of_one_are_printed_in_the_singular(self):
        model = self.dir / "one.safetensors"
        head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        model.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
        told = self.run_tool("import", model, self.store / "one").stdout
        for command in ["verify", "info"]:
            told += self.run_tool(command, self.store / "one").stdout
        told += self.run_tool("adopt", model, self.store / "adopted").stdout
        told += self.run_tool("load", self.store / "one").stdout
        self.assertNotRegex(told, r"(?<![.0-9])1 (tensors|chunks|files|data files|ranks)\b")
        self.assertRegex(told, r"1 tensor, 1 chunk,")

    def test_damaged_index_is_replaced_and_reported(self):
        path = self.save("step-1")
        other = self.save("step-2", "--shard", "cols", "--ranks", "2")
        index = next((path / "index").iterdir())
        good = index.read_bytes()
        answers = self.run_tool("--json", "ls", path).stdout
        os.chmod(index, 0o644)
        # Of another checkpoint, damaged in its tail, gone: the same answers from the manifests.
        for damage in ["other", "tail", "gone"]:
            if damage == "other":
                shutil.copyfile(next((other / "index").iterdir()), index)
            elif damage == "tail":
                index.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
            else:
                index.unlink()
            result = self.run_tool("--json", "ls", path)
            self.assertEqual(result.stdout, answers, damage)
            self.assertIn("warning", result.stderr, damage)
            self.run_tool("load", path, "--compare", self.model)
            self.run_tool("verify", path, expect=1)

    def test_newer_store_is_refused(self):
        self.save()
        superblock = self.store / "store.json"
        text = json.loads(superblock.read_text())
        text["incompatible"] = 4
        os.chmod(superblock, 0o644)
        superblock.write_text(json.dumps(text))
        self.fails("ls", self.store, code="UNSUPPORTED", says="4")
        self.fails("import", self.model, self.store / "x", code="UNSUPPORTED", says="4")

    def test_invalid_safetensors_file_is_refused(self):
        raw = bytearray(self.model.read_bytes())
        raw[8:9] = b"["
        (self.dir / "bad.safetensors").write_bytes(raw)
        self.fails("ls", self.dir / "bad.safetensors", code="DATA_LOSS", says="bad.safetensors")
        (self.dir / "short.safetensors").write_bytes(self.model.read_bytes()[:-1])
        self.fails("verify", self.dir / "short.safetensors", code="DATA_LOSS", says="short.safetensors", status=1)

    def test_checkpoints_are_removed_collected_and_checked(self):
        self.save("step-1")
        self.save("step-2")
        self.assertIn("would remove", self.run_tool("rm", "--dry-run", self.store / "step-1").stdout)
        self.fails("rm", self.store / "step-1", self.store / "no", code="NOT_FOUND", says="nothing was removed")
        self.assertEqual(len(self.json_lines("ls", self.store)), 2)
        self.run_tool("rm", self.store / "step-1")
        (left,) = self.json_lines("ls", self.store)
        self.assertEqual(left["checkpoint"], "step-2")
        (kept,) = self.json_lines("gc", self.store)
        self.assertEqual(kept["bytes_freed"], 0)  # Within its grace.
        (freed,) = self.json_lines("gc", self.store, "--grace", "0")
        self.assertGreater(freed["bytes_freed"], 4_000_000)
        self.run_tool("fsck", self.store)
        next((self.store / "step-2" / "index").iterdir()).unlink()
        self.run_tool("fsck", self.store, expect=1)
        self.run_tool("fsck", self.store, "--rebuild")
        self.run_tool("load", self.store / "step-2", "--compare", self.model)

    def test_non_utf_8_name_is_listed_as_valid_json(self):
        # Folders may be called anything; JSON may not.
        self.save(os.fsdecode(b"step-\xff"), "-q")
        (listed,) = self.json_lines("ls", self.store)
        self.assertEqual(listed["checkpoint"], "step-\ufffd")

    def test_doctor_reports_and_leaves_no_files(self):
        lines = self.json_lines("doctor", "--dir", self.dir)
        self.assertTrue({"fuse", "mpi", "kernel", "rename without replacing"} <= {l["name"] for l in lines})
        self.assertEqual([p.name for p in self.dir.iterdir()], ["model.safetensors"])


if __name__ == "__main__":
    harness.main()
