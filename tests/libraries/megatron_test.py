# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron-Core and OLMo-core saved on four ranks, read in place."""

import io

import libraries

libraries.need("torch", "megatron.core", "olmo_core")
import torch  # noqa: E402

import formula  # noqa: E402

# As in make_megatron.py, which only a process of its own can import.
MODEL = {
    "embedding.word_embeddings.weight": ("bf16", (64, 16)),
    "decoder.layers.self_attention.qkv.weight": ("bf16", (4, 24, 16)),
    "decoder.layers.mlp.fc2.weight": ("f32", (4, 16, 20)),
    "decoder.layers.norm.weight": ("f32", (4, 16)),
    "decoder.final_norm.weight": ("f32", (16,)),
    "decoder.experts.weight": ("f16", (2, 2, 6, 8)),
    "output_layer.weight": ("f32", (32, 16)),
    "optimizer.state.exp_avg.output_layer.weight": ("f32", (32, 16)),
    "optimizer.state.turned": ("f32", (12, 8)),
    "optimizer.state.step": ("i64", ()),
    # In the common state, as plain tensors.
    "common_tensor": ("f32", (3, 5)),
    "args.scale": ("f64", (4,)),
}


class Megatron(libraries.LibraryTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # A folder of training steps as Megatron-LM keeps it.
        libraries.make("megatron", cls.made / "iter_0000077")
        (cls.made / "latest_checkpointed_iteration.txt").write_text("77")

    def test_reads_every_tensor(self):
        self.check(self.made / "iter_0000077", MODEL)

    def test_training_directory_mounts_as_a_store(self):
        (line,) = self.json_lines("ls", self.made)
        self.assertEqual(line["checkpoint"], "iter_0000077")
        if libraries.HAVE_FUSE:
            with self.mounted(self.made) as mnt:
                key = "output_layer.weight"
                for step in ("iter_0000077", "latest"):
                    self.assertEqual((mnt / step / "tensors" / key).read_bytes(), formula.raw(key, *MODEL[key]))

    def test_objects_load_with_their_values(self):
        if not libraries.HAVE_FUSE:
            self.skipTest("/dev/fuse cannot be opened")
        with self.mounted(self.made / "iter_0000077") as mnt:
            found = {str(p.relative_to(mnt / "objects")): p for p in (mnt / "objects").rglob("*") if p.is_file()}
            values = []
            for path in found.values():
                if "rng" in str(path):
                    values += torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
            want = [{"seed": 11 * rank, "where": [rank // 2, rank % 2]} for rank in range(4)]
            self.assertEqual(sorted(values, key=lambda v: v["seed"]), want, sorted(found))
            common = (mnt / "common.json").read_text()
            self.assertIn("77", common)

    def test_megatron_loads_exports_and_the_mount(self):
        """export --to torch_dist, of the folder and of a copy of it in a store, and dcp/."""
        source = self.made / "iter_0000077"
        self.run_tool("import", source, self.dir / "STORE" / "copy")
        exports = []
        for number, one in enumerate((source, self.dir / "STORE" / "copy")):
            exports.append(self.dir / f"out{number}")
            self.run_tool("export", one, exports[-1], "--to", "torch_dist", "--ranks", "2")
        self.run_tool("export", source, exports[0], "--to", "torch_dist", "--if-exists", "replace")
        if not libraries.HAVE_FUSE:
            libraries.make("megatron", ",".join(f"load@{one}" for one in [source, *exports]))
            return
        with self.mounted(self.dir / "STORE") as mnt:
            libraries.make("megatron", ",".join(f"load@{one}" for one in [source, *exports, mnt / "copy" / "dcp"]))

    def test_changed_bytes_are_detected(self):
        self.check_refused_when_changed(self.made / "iter_0000077", "__0_0.distcp",
                                        "decoder.layers.self_attention.qkv.weight", MODEL)


class Olmo(libraries.LibraryTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        libraries.make("olmo", cls.made / "step3")

    def test_reads_every_tensor(self):
        expected = formula.expected(formula.MODEL)
        self.check_list(self.made / "step3", expected)
        self.check_load(self.made / "step3", expected)
        self.check_cat(self.made / "step3", expected, list(expected)[::3])
        self.run_tool("verify", self.made / "step3")


if __name__ == "__main__":
    libraries.main()
