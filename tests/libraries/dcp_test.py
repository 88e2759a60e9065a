# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that torch.distributed.checkpoint saved on four ranks, read in place."""

import io

import libraries

libraries.need("torch")
import torch  # noqa: E402

import formula  # noqa: E402
import make_torch  # noqa: E402

ALL = formula.expected(formula.MODEL)


class Dcp(libraries.LibraryTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        libraries.make("torch", "dcp,dcp_files,dcp_threads,dcp_ranks_only,dcp_twice,hf_shards,hf_consolidated",
                       cls.made)

    def test_reads_one_file_per_rank(self):
        self.check(self.made / "dcp", ALL)

    def test_reads_one_file_per_item(self):
        self.check(self.made / "dcp_files", ALL, adopted=False)

    def test_reads_several_writers_per_rank(self):
        self.check_list(self.made / "dcp_threads", ALL)
        self.check_load(self.made / "dcp_threads", ALL)

    def test_leftover_files_are_ignored(self):
        some = dict(list(ALL.items())[:5])
        self.check_list(self.made / "dcp_twice", some)
        self.check_load(self.made / "dcp_twice", some)

    def test_reads_one_checkpoint_per_rank(self):
        lines = self.json_lines("ls", self.made / "dcp_ranks_only")
        for rank in range(4):
            spec = ("f32", (5, 3))
            (key,) = [line["key"] for line in lines if line["key"].endswith(f"model.of_rank{rank}")]
            self.assertEqual(self.run_tool("cat", self.made / "dcp_ranks_only", key, text=False).stdout,
                             formula.raw(f"model.of_rank{rank}", *spec))
        self.assertEqual(len(lines), 8)

    def test_objects_have_the_saved_bytes(self):
        if not libraries.HAVE_FUSE:
            self.skipTest("/dev/fuse cannot be opened")
        with self.mounted(self.made / "dcp") as mnt:
            found = {p.name: p for p in (mnt / "objects").rglob("*") if p.is_file()}
            self.assertEqual(set(formula.OBJECT_VALUES), set(found))
            for key, value in formula.OBJECT_VALUES.items():
                self.assertEqual(torch.load(io.BytesIO(found[key].read_bytes()), weights_only=False), value, key)

    def test_changed_bytes_are_detected(self):
        self.check_refused_when_changed(self.made / "dcp", "__0_0.distcp", "model.layers.0.attn.qkv", ALL)

    def test_reads_hugging_face_shards(self):
        self.check(self.made / "hf_shards", self.hugging_face())

    def test_reads_hugging_face_consolidated_files(self):
        self.check(self.made / "hf_consolidated", self.hugging_face())

    def hugging_face(self):
        return formula.expected(make_torch.HF)


if __name__ == "__main__":
    libraries.main()
