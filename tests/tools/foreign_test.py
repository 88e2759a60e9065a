# SPDX-License-Identifier: Apache-2.0
"""What other programs saved, as SOURCE of every command; adopt; --root."""

import json
import os
import pathlib
import re
import struct
import subprocess
import zipfile

import numpy as np

import harness

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "golden" / "foreign"


def cells(dtype, *shape):
    """As the generators of the fixtures fill them."""
    return ((np.arange(int(np.prod(shape))) * 7 + 3) % 251).astype(dtype).reshape(shape)


def write_shard(path, key, dtype, array, offsets):
    """As torch's HuggingFaceStorageWriter writes what one rank holds of a tensor."""
    header = json.dumps({
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": offsets}})},
        key: {"dtype": dtype, "shape": list(array.shape), "data_offsets": [0, array.nbytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + array.tobytes())


class Foreign(harness.ToolTest):
    def setUp(self):
        super().setUp()
        self.run = self.dir / "run"
        self.bytes = {"a": os.urandom(24), "b": os.urandom(40)}
        for step in (10, 20):
            folder = self.run / f"iter_{step:07}"
            folder.mkdir(parents=True)
            self.write(folder, "model-00001-of-00002.safetensors", "a", ("F32", (2, 3), self.bytes["a"]))
            self.write(folder, "model-00002-of-00002.safetensors", "b", ("I64", (5,), self.bytes["b"]))
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
                "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}))
        (self.run / "latest_checkpointed_iteration.txt").write_text("10\n")
        self.step = self.run / "iter_0000020"

    def write(self, folder, name, key, tensor):
        harness.write_safetensors(folder / name, {key: tensor})

    def test_every_command_accepts_a_foreign_checkpoint(self):
        self.assertEqual(self.run_tool("ls", self.step).stdout.split(), ["a", "b"])
        lines = self.run_tool("ls", self.run).stdout.splitlines()
        self.assertEqual(lines, ["iter_0000010\tgeneration 10\tlatest", "iter_0000020\tgeneration 20"])
        (info,) = self.json_lines("info", self.run)
        self.assertEqual(info, {"training_directory": str(self.run.resolve()), "checkpoints": 2,
                                "latest": "iter_0000010"})
        (info,) = self.json_lines("info", self.run / "latest")
        self.assertEqual(info["name"], "iter_0000010")
        self.assertEqual(info["producer"], "safetensors")
        self.assertFalse(info["self_contained"])
        self.assertEqual(info["root"], str((self.run / "iter_0000010").resolve()))
        self.assertEqual(self.run_tool("cat", self.step, "b", text=False).stdout, self.bytes["b"])
        self.assertEqual(self.run_tool("cat", self.run, "a", text=False).stdout, self.bytes["a"])
        self.run_tool("load", self.step, "--ranks", "2", "--compare", self.run / "iter_0000010")
        self.run_tool("import", self.run, self.store / "copy", "--ranks", "2")
        self.run_tool("load", self.store / "copy", "--compare", self.step)
        self.run_tool("diff", self.store / "copy", self.step)

    def test_verify_reports_lost_and_duplicate_cells(self):
        lines = self.json_lines("verify", self.run)
        self.assertEqual([l["checkpoint"] for l in lines], ["iter_0000010", "iter_0000020"])
        self.assertTrue(all(l["whole"] and l["bytes"] == 64 for l in lines), lines)
        # A shard that is lost leaves a hole; cells that are stored twice are damage too.
        for folder, offsets in (("hole", (0, 4)), ("twice", (0, 1))):
            (self.dir / folder).mkdir()
            for i, offset in enumerate(offsets):
                path = self.dir / folder / f"shard-{i + 1:05}-model-00001-of-00001.safetensors"
                write_shard(path, "w", "U8", np.array([120, 121], "u1"), [offset])
        result = self.run_tool("verify", self.dir / "hole", expect=1)
        self.assertIn("tensor w", result.stdout)
        self.assertIn("[2:4] is not stored", result.stdout)
        result = self.run_tool("verify", self.dir / "twice", expect=1)
        self.assertIn("[1:2] is stored twice", result.stdout)
        self.assertIn("shard-00002-model-00001-of-00001.safetensors", result.stdout)
        os.truncate(self.step / "model-00002-of-00002.safetensors", 30)
        self.assertIn("model-00002-of-00002", self.run_tool("verify", self.step, expect=1).stdout)

    def test_verify_checks_the_crcs_of_archives(self):
        path = self.dir / "x.npz"
        np.savez(path, first=np.arange(1000, dtype=np.int32), second=np.arange(2000, dtype=np.int32))
        self.run_tool("verify", path)
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("second.npy")
        self.flip(path, info.header_offset + 1000)
        result = self.run_tool("verify", path, expect=1)
        self.assertIn("tensor second [0:2000]", result.stdout)
        self.assertNotIn("first", result.stdout)
        self.assertIn("x.npz", result.stdout)

    def test_adopt_hashes_and_lists_a_checkpoint(self):
        (adopted,) = self.json_lines("adopt", self.step, self.store / "step-20")
        self.assertEqual(adopted["bytes"], 64)
        self.assertEqual(adopted["bytes_hashed"], 64)
        self.assertEqual(adopted["format"], "safetensors")
        self.assertFalse(adopted["self_contained"])
        path = self.store / "step-20"
        said = self.run_tool("info", path).stdout
        self.assertIn(f"self-contained no: the data stay in the original files under {self.step.resolve()}", said)
        self.assertIn("safetensors", said)
        self.run_tool("verify", path)
        self.assertEqual(self.run_tool("cat", path, "a", text=False).stdout, self.bytes["a"])
        self.run_tool("load", path, "--ranks", "2", "--compare", self.step)
        self.assertIn("ALREADY_EXISTS", self.run_tool("adopt", self.step, path, expect=2).stderr)
        said = self.run_tool("adopt", self.run, path, "--if-exists", "replace", "--quick").stdout
        self.assertIn("no data was read", said)
        self.assertIn("not self-contained", said)
        self.assertEqual(json.loads(self.run_tool("info", path, "--json").stdout)["root"],
                         str((self.run / "iter_0000010").resolve()))
        (self.dir / "no").mkdir()
        self.assertIn("UNSUPPORTED", self.run_tool("adopt", self.dir / "no", self.store / "x", expect=2).stderr)
        self.assertIn("INVALID_ARGUMENT", self.run_tool("adopt", path, self.store / "x", expect=2).stderr)
        self.assertIn("INVALID_ARGUMENT",
                      self.run_tool("adopt", self.step, self.store / "x", "--if-exists", "maybe", expect=2).stderr)
        self.assertFalse((self.store / "x").exists())

    def test_root_option_allows_links(self):
        hub = self.dir / "hub"
        (hub / "kept").mkdir(parents=True)
        (hub / "links" / "s").mkdir(parents=True)
        harness.write_safetensors(hub / "kept" / "0123", {"w": ("U8", (4,), b"abcd")})
        (hub / "links" / "s" / "model.safetensors").symlink_to("../../kept/0123")
        source = hub / "links" / "s"
        for command in (["ls"], ["info"], ["cat", "w"], ["verify"], ["load"]):
            args = [command[0], source, *command[1:]]
            failed = self.run_tool(*args, expect=2)
            self.assertIn("PERMISSION_DENIED", failed.stderr)
            self.assertIn("--root", failed.stderr)
            self.run_tool(*args, "--root", "/nowhere/at/all", expect=2)
            self.run_tool(*args, "--root", self.dir / "run", "--root", hub)
            self.run_tool(*args, "--root", hub / "kept", "--root", self.dir / "run")
        self.run_tool("adopt", source, self.store / "s", "--root", hub)
        self.assertEqual(self.run_tool("cat", self.store / "s", "w").stdout, "abcd")

    def test_error_names_the_pickled_call(self):
        # A pickle that would run a program where it is loaded: it is listed.
        torch = self.dir / "m.pt"
        evil = b"\x80\x02}q\x00X\x01\x00\x00\x00kcposix\nsystem\nX\x04\x00\x00\x00echo\x85Rs."
        with zipfile.ZipFile(torch, "w") as archive:
            archive.writestr("m/data.pkl", evil)
            archive.writestr("m/byteorder", "little")
            archive.writestr("m/version", "3\n")
        failed = self.run_tool("ls", torch, expect=2)
        self.assertIn("posix.system", failed.stderr)

    def test_pickled_object_is_listed_and_not_built(self):
        source = FIXTURES / "dcp-2.13" / "global"
        for command in (["info", source, "opaque"], ["cat", source, "opaque", "--as", "text"]):
            self.assertEqual(self.run_tool(*command).stdout.split()[-1], "torch.float32")
        raw = self.run_tool("cat", source, "opaque", text=False).stdout
        self.assertEqual(raw[:4], b"PK\3\4")
        (info,) = self.json_lines("info", source, "opaque")
        self.assertEqual((info["object"], info["bytes"], info["text"]), ("opaque", len(raw), "torch.float32\n"))
        self.assertEqual((source / info["file"]).read_bytes()[info["offset"]:][:len(raw)], raw)
        # The same bytes but for what they ask to be called.
        evil = self.dir / "evil"
        evil.mkdir()
        mark = self.dir / "was called"
        program = f"touch '{mark}'".encode()
        pickled = (b"\x80\x02cposix\nsystem\nX" + struct.pack("<I", len(program)) + program + b"\x85R.")
        self.write_objects(evil, {"o": pickled})
        said = self.run_tool("cat", evil, "o", "--as", "text").stdout
        self.assertIn(said, self.run_tool("info", evil, "o").stdout)
        self.assertIn("posix.system", said)
        self.assertIn("not called", said)
        self.assertIn("touch", said)
        self.assertFalse(mark.exists())

    def write_objects(self, folder, objects):
        """A DCP checkpoint of nothing else, by stand-ins for torch's classes."""
        import io
        import pickle
        import sys
        import types

        def stand_in(where, name):
            parts = where.split(".")
            for i in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
            made = type(name, (), {"__module__": where})
            setattr(sys.modules[where], name, made)
            return made

        def record(cls, **state):
            made = cls()
            made.__dict__.update(state)
            return made

        where = "torch.distributed.checkpoint."
        before = set(sys.modules)
        classes = [stand_in(where + "metadata", name) for name in ("Metadata", "BytesStorageMetadata", "MetadataIndex")]
        metadata, described, index = classes
        stored = stand_in(where + "filesystem", "_StorageInfo")
        states, storage, data = {}, {}, b""
        for name, pickled in objects.items():
            item = io.BytesIO()
            with zipfile.ZipFile(item, "w") as archive:
                for inner, raw in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
                    archive.writestr(f"archive/{inner}", raw)
            states[name] = record(described)
            storage[record(index, fqn=name, offset=None, index=None)] = record(
                stored, relative_path="__0_0.distcp", offset=len(data), length=len(item.getvalue()))
            data += item.getvalue()
        (folder / "__0_0.distcp").write_bytes(data)
        (folder / ".metadata").write_bytes(pickle.dumps(record(
            metadata, state_dict_metadata=states, planner_data=None, storage_data=storage), protocol=2))
        for name in set(sys.modules) - before:
            del sys.modules[name]


class WhichRankHoldsWhat(harness.ToolTest):
    """info KEY, layout and diff of shares that others wrote."""

    def holders(self, source, key):
        """Region: (holder, file, strides) for each chunk, as layout says it and info agrees."""
        (layout,) = self.json_lines("layout", source, key)
        (info,) = self.json_lines("info", source, key)
        self.assertEqual(layout["elements_in_chunks"], layout["elements"])
        names = ("region", "file", "offset", "length", "strides")
        self.assertEqual([[c.get(name) for name in names] for c in layout["chunks"]],
                         [[e.get(name) for name in names] for e in info["extents"]])
        self.assertNotIn("hash", info["extents"][0])
        for chunk in layout["chunks"]:
            self.assertEqual(chunk["strided"], "strides" in chunk)
            self.assertLessEqual(chunk["offset"] + chunk["length"], (source / chunk["file"]).stat().st_size)
        return {c["region"]: (layout["holders"][c["holder"]]["name"], c["file"], c.get("strides"))
                for c in layout["chunks"]}

    def assert_drawn(self, source, key, *ranks):
        text = self.run_tool("layout", source, key).stdout
        drawn = "\n".join(line for line in text.splitlines() if "│" in line)
        self.assertEqual(re.findall(r"rank \d", drawn), [f"rank {r}" for r in ranks])
        return text

    def check_same(self, source, arrays):
        """diff with a file of the same values, and with one of which an element is another."""
        names = {"<f4": "F32", "<i8": "I64", "<f8": "F64"}
        path = self.dir / "same.safetensors"
        write = lambda: harness.write_safetensors(path, {
            key: (names[a.dtype.str], a.shape, a.tobytes()) for key, a in arrays.items()})
        write()
        for key in arrays:
            (same,) = self.json_lines("diff", source, path, "--keys", key)
            self.assertEqual((same["same"], same["equal"], same["by_bytes"]), (True, 1, 1), key)
        key, array = next(iter(arrays.items()))
        arrays = {**arrays, key: array.copy()}
        arrays[key][1, 2] += 1
        write()
        (line, _) = self.run_tool("diff", source, path, "--keys", key, expect=1).stdout.splitlines()
        self.assertRegex(line, rf"^~ {re.escape(key)} \w+ \[[\d, ]+\]: bytes differ, first at \[1, 2\]$")

    def test_layout_shows_ranks_of_dcp(self):
        source = FIXTURES / "dcp-2.13" / "global"
        self.assertEqual(self.holders(source, "model.transposed"), {
            f"[{2 * r}:{2 * r + 2}, 0:4]": (f"rank {r}", f"__{r}_0.distcp", [4, 8]) for r in range(3)})
        text = self.assert_drawn(source, "model.transposed", 0, 1, 2)
        self.assertRegex(text, r"(?m)^\[2:4, 0:4\] +rank 1 +__1_0\.distcp +\d+ +32 +strided \[4, 8\] +no hash$")
        self.assertRegex(self.run_tool("info", source, "strided").stdout,
                         r"(?m)^chunk +\[0:4, 0:5\] in __2_0\.distcp at \d+, 80 B, strides \[4, 16\]$")
        self.assertEqual(self.holders(source, "model.grid"), {
            f"[{3 * (r // 2)}:{3 * (r // 2) + 3}, {4 * (r % 2)}:{4 * (r % 2) + 4}]":
            (f"rank {r}", f"__{r}_0.distcp", None) for r in range(4)})
        self.check_same(source, {
            "model.transposed": np.ascontiguousarray(cells("<f4", 4, 6).T), "model.grid": cells("<i8", 6, 8),
            "strided": np.ascontiguousarray(cells("<f4", 5, 4).T), "plain": cells("<f8", 3)})

    def test_layout_shows_ranks_of_olmo(self):
        # As 0.1 wrote: runs of the flattened tensor, or boxes; 1.0 writes DCP.
        folder = self.dir / "olmo"
        folder.mkdir()
        runs, boxes = cells("<f4", 7, 5), cells("<i8", 4, 6)
        files = [f"rank_{r}.safetensors" for r in range(2)]
        for name, run, box in zip(files, np.split(runs.reshape(-1), [17]), np.split(boxes, [2], axis=1)):
            harness.write_safetensors(folder / name, {"runs": ("F32", run.shape, run.tobytes()),
                                                      "boxes": ("I64", (box.size,), box.tobytes())})
        spec = {"is_sharded": True, "shard_spec_per_file": None}
        (folder / "metadata.json").write_text(json.dumps({"tensors": {
            "runs": {**spec, "shape": [7, 5], "dtype": "F32", "shard_spec_per_file": {
                files[0]: {"flattened_offsets": [[0, 17]]}, files[1]: {"flattened_offsets": [[17, 35]]}}},
            "boxes": {**spec, "shape": [4, 6], "dtype": "I64", "shard_spec_per_file": {
                files[r]: {"flattened_offsets": None, "local_shape": [4, 2 + 2 * r], "global_offset": [0, 2 * r]}
                for r in range(2)}}}}))
        self.assertEqual(self.holders(folder, "runs"), {
            "[0:4, 0:5] flat 0:17": ("rank 0", files[0], None), "[3:7, 0:5] flat 2:20": ("rank 1", files[1], None)})
        self.assertEqual(self.holders(folder, "boxes"), {
            "[0:4, 0:2]": ("rank 0", files[0], None), "[0:4, 2:6]": ("rank 1", files[1], None)})
        self.assert_drawn(folder, "boxes", 0, 1)
        self.check_same(folder, {"runs": runs, "boxes": boxes})
        source = FIXTURES / "dcp-old" / "olmo" / "step100"
        self.assertEqual(self.holders(source, "turned"), {
            f"[0:5, {2 * r}:{2 * r + 2}]": (f"rank {r}", f"model_and_optim/__{r}_0.distcp", [4, 20]) for r in range(2)})
        self.check_same(source, {"turned": cells("<f4", 5, 4), "rows": cells("<f4", 4, 6)})

    def test_layout_shows_ranks_of_hugging_face_shards(self):
        folder = self.dir / "hf"
        folder.mkdir()
        whole = cells("<f4", 4, 6)
        files = [f"shard-{r + 1:05}-model-00001-of-00001.safetensors" for r in range(3)]
        for rank, name in enumerate(files):
            write_shard(folder / name, "w", "F32", np.ascontiguousarray(whole[:, 2 * rank:2 * rank + 2]),
                        [0, 2 * rank])
        self.assertEqual(self.holders(folder, "w"), {
            f"[0:4, {2 * r}:{2 * r + 2}]": (f"rank {r}", files[r], None) for r in range(3)})
        self.assert_drawn(folder, "w", 0, 1, 2)
        self.check_same(folder, {"w": whole})


class LinksOut(harness.ToolTest):
    """A link out of the folder that is named, and what huggingface_hub keeps."""

    def setUp(self):
        harness.need_fuse()
        super().setUp()
        self.hub = self.dir / "models--org--name"
        self.source = self.hub / "links" / "0123abcd"
        self.source.mkdir(parents=True)
        (self.hub / "blobs").mkdir()
        harness.write_safetensors(self.hub / "blobs" / "89ab", self.tensors)
        (self.source / "model.safetensors").symlink_to("../../blobs/89ab")
        self.mnt = self.dir / "MNT"
        self.mnt.mkdir()
        self.mounts.append(self.mnt)

    def check(self):
        for key in ("w", "big", "steps"):
            self.assertEqual((self.mnt / "tensors" / key).read_bytes(), self.tensors[key][2], key)
        self.run_tool("unmount", self.mnt)

    def check_refused(self, failed):
        self.assertIn("PERMISSION_DENIED", failed.stderr)
        self.assertIn("--root", failed.stderr)
        self.assertFalse(os.path.ismount(self.mnt))

    def test_mount_command_needs_a_root_for_links_out(self):
        self.check_refused(self.run_tool("mount", self.source, self.mnt, expect=2))
        self.check_refused(self.run_tool("mount", self.source, self.mnt, "--root", self.source.parent, expect=2))
        self.run_tool("mount", self.source, self.mnt, "--root", self.hub)
        self.check()

    def test_hub_cache_needs_no_root(self):
        snapshots = self.hub / "snapshots"
        (self.hub / "links").rename(snapshots)
        self.run_tool("mount", snapshots / "0123abcd", self.mnt)
        self.check()

    def test_mount_helper_accepts_roots(self):
        def helper(*options):
            return subprocess.run([str(harness.BIN / "mount.tensormount"), str(self.source), str(self.mnt), "-o",
                                   ",".join(("ro", *options))], timeout=60, capture_output=True, text=True)

        failed = helper()
        self.assertNotEqual(failed.returncode, 0)
        self.check_refused(failed)
        done = helper(f"root={self.dir / 'STORE'}", f"root={self.hub}")
        self.assertNotEqual(done.returncode, 0)  # There is no such folder.
        done = helper(f"root={self.dir / 'MNT'}", f"root={self.hub}", "noatime")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.check()


if __name__ == "__main__":
    harness.main()
