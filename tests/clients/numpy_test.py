# SPDX-License-Identifier: Apache-2.0
"""NumPy, ml_dtypes and safetensors on a mount."""

import json

import clients

np, ml_dtypes, safetensors = clients.libraries("numpy", "ml_dtypes", "safetensors")

harness = clients.harness

# What NumPy and ml_dtypes call our types.
ML_DTYPES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


class NumPy(clients.ClientTest):
    def setUp(self):
        super().setUp()
        self.save("step-1", "--shard", "cols", "--ranks", "4")

    def dtype_of(self, name):
        return np.dtype(harness.NUMPY[name] if name in harness.NUMPY else ML_DTYPES[name])

    def known(self):
        """Key, dtype, shape and bytes of what NumPy can hold."""
        for key, (name, shape, raw) in self.tensors.items():
            if name in harness.NUMPY or name in ML_DTYPES:
                yield key, self.dtype_of(name), tuple(shape), raw

    def test_numpy_loads_npy_files(self):
        with self.mounted(self.store / "step-1") as mnt:
            for key, dtype, shape, raw in self.known():
                path = mnt / "npy" / f"{key}.npy"
                for mode in ["r", "c", None]:
                    if not raw and mode:
                        continue  # mmap of nothing.
                    array = np.load(path, mmap_mode=mode, allow_pickle=False)
                    self.assertEqual(array.shape, shape, key)
                    self.assertEqual(array.itemsize, dtype.itemsize, key)
                    # bf16 and fp8 have no name of NumPy's: the file says bytes of this size, as
                    # np.save of an array of ml_dtypes does.
                    self.assertEqual(array.view(dtype).tobytes(), raw, key)

    def test_npy_files_equal_those_of_ml_dtypes(self):
        with self.mounted(self.store / "step-1") as mnt:
            for key, dtype, shape, raw in self.known():
                np.save(self.dir / "own.npy", np.frombuffer(raw, dtype).reshape(shape))
                own = np.load(self.dir / "own.npy")
                ours = np.load(mnt / "npy" / f"{key}.npy")
                self.assertEqual((ours.dtype, ours.shape, ours.tobytes()), (own.dtype, own.shape, own.tobytes()), key)

    def test_memmap_reads_tensor_files(self):
        with self.mounted(self.store / "step-1") as mnt:
            for key, dtype, shape, raw in self.known():
                if not raw:
                    continue
                array = np.memmap(mnt / "tensors" / key, dtype=dtype, mode="r", shape=shape or (1,))
                self.assertEqual(array.tobytes(), raw, key)
            big = np.memmap(mnt / "tensors" / "big", dtype="<f4", mode="r", shape=(1100, 1024))
            want = np.frombuffer(self.tensors["big"][2], "<f4").reshape(1100, 1024)
            self.assertEqual(big[17:900:13, 5:1000:7].tobytes(), want[17:900:13, 5:1000:7].tobytes())
            self.assertEqual(big[::-1].tobytes(), want[::-1].tobytes())
            with self.assertRaises(OSError):
                np.memmap(mnt / "tensors" / "big", dtype="<f4", mode="r+", shape=(1100, 1024))

    def test_fromfile_reads_at_offsets(self):
        raw = self.tensors["big"][2]
        with self.mounted(self.store / "step-1") as mnt:
            for offset, count in [(0, 1), (4, 1000), (4095, 4097), (65535, 65538), (len(raw) - 3, 3)]:
                got = np.fromfile(mnt / "tensors" / "big", dtype="u1", count=count, offset=offset)
                self.assertEqual(got.tobytes(), raw[offset:offset + count])


class SafeTensors(clients.ClientTest):
    def test_safe_open_reads_tensors_and_slices(self):
        self.save("step-1", "--shard", "cols", "--ranks", "4")
        with self.mounted(self.store / "step-1") as mnt:
            self.check_file(mnt / "model.safetensors", {key: key for key in self.tensors})

    def check_file(self, path, names):
        """names: what a tensor is called in the file, by key."""
        with safetensors.safe_open(path, framework="numpy") as opened:
            self.assertEqual(opened.metadata(), {"format": "pt"})
            self.assertEqual(set(opened.keys()), set(names.values()))
            for key, name in names.items():
                dtype, shape, raw = self.tensors[key]
                part = opened.get_slice(name)
                self.assertEqual((tuple(part.get_shape()), part.get_dtype()), (tuple(shape), dtype))
                if dtype not in harness.NUMPY:
                    continue
                self.assertEqual(opened.get_tensor(name).tobytes(), raw, key)
                if len(shape) == 2 and raw:
                    whole = np.frombuffer(raw, harness.NUMPY[dtype]).reshape(shape)
                    rows, cols = shape[0] // 3, shape[1] // 2
                    self.assertEqual(part[rows:, 1:cols].tobytes(), whole[rows:, 1:cols].tobytes(), key)

    def check_model(self, folder, names):
        """A folder as transformers reads it: by its index, each tensor from the file that the index says."""
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        by_part = {}
        for key, name in names.items():
            by_part.setdefault(index["weight_map"].pop(name), {})[key] = name
        self.assertEqual(index["weight_map"], {})
        self.assertEqual(index["metadata"], {"total_size": sum(len(self.tensors[key][2]) for key in names)})
        self.assertEqual({p.name for p in folder.iterdir()}, {*by_part, "model.safetensors.index.json"})
        for part, of_part in by_part.items():
            self.check_file(folder / part, of_part)
        return sorted(by_part)

    def test_hf_directory_holds_one_file(self):
        self.save("step-1", "--shard", "cols", "--ranks", "4")
        with self.mounted(self.store / "step-1") as mnt:
            self.assertEqual([p.name for p in (mnt / "hf").iterdir()], ["model.safetensors"])
            self.check_file(mnt / "hf" / "model.safetensors", {key: key for key in self.tensors})
        # Of a safetensors file it is that file, unless it is cut.
        with self.mounted(self.model) as mnt:
            self.assertEqual((mnt / "hf" / "model.safetensors").read_bytes(), self.model.read_bytes())
        with self.mounted(self.model, "--hf-part-size", "32KiB") as mnt:
            self.assertEqual(len(self.check_model(mnt / "hf", {key: key for key in self.tensors})), 3)

    def test_hf_directory_is_split_into_parts(self):
        self.save("step-1", "--shard", "cols", "--ranks", "4")
        with self.mounted(self.store, "--hf-part-size", "32KiB") as mnt:
            parts = self.check_model(mnt / "step-1" / "hf", {key: key for key in self.tensors})
            self.assertEqual(parts, [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)])

    def test_hf_rules_rename_keys(self):
        self.save("step-1", "--shard", "cols", "--ranks", "4")
        (self.dir / "rules.json").write_text(json.dumps([
            {"match": "layers.*.attn/*", "to": "model.layers.*.self_attn.*.weight"},
            {"key": "big", "to": "lm_head.weight"}, {"match": "w", "to": "w"}, {"drop": "*"}]))
        names = {"layers.0.attn/qkv": "model.layers.0.self_attn.qkv.weight", "big": "lm_head.weight", "w": "w"}
        with self.mounted(self.store, "--hf-rules", "rules.json", "--hf-part-size", "1MB") as mnt:
            self.assertEqual(len(self.check_model(mnt / "latest" / "hf", names)), 2)
            self.assertEqual((mnt / "latest" / "tensors" / "w").read_bytes(), self.tensors["w"][2])
        (self.dir / "rules.json").write_text('[{"key": "big", "to": "w"}]')
        (self.dir / "MNT").mkdir(exist_ok=True)
        refused = self.run_tool("mount", self.store, self.dir / "MNT", "--hf-rules", "rules.json", expect=2)
        self.assertIn("big and w would both be called w", refused.stderr)
        refused = self.run_tool("mount", self.store, self.dir / "MNT", "--hf-part-size", "5 apples", expect=2)
        self.assertIn("5 apples", refused.stderr)


if __name__ == "__main__":
    clients.main()
