# SPDX-License-Identifier: Apache-2.0
"""zarr-python 3 and tensorstore on zarr/ of a mount."""

import itertools

import clients

np, zarr, tensorstore = clients.libraries("numpy", "zarr", "tensorstore")

harness = clients.harness

# What zarr/ says of the types of safetensors; unsigned integers where Zarr's core has none.
ZARR = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "U8": "uint8",
        "BOOL": "bool", "BF16": "uint16", "F8_E4M3": "uint8"}


class Zarr(clients.ClientTest):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(5)

        def add(key, dtype, *shape):
            items = int(np.prod(shape, dtype=np.int64))
            high = 2 if dtype == "BOOL" else 256
            size = items * np.dtype(ZARR[dtype]).itemsize
            self.tensors[key] = dtype, shape, rng.integers(0, high, size, dtype=np.uint8).tobytes()

        add("a", "I32", 7, 3, 5)  # And folders of this name.
        add("a/b", "BOOL", 11)
        add("a/b/c", "F16", 1, 1, 2)
        add("100% @home[0]", "U8", 5, 5)
        add("zarr.json", "U8", 4)
        harness.write_safetensors(self.model, self.tensors)

    def known(self):
        """Key and array of what zarr/ has."""
        for key, (dtype, shape, raw) in self.tensors.items():
            if dtype in ZARR:
                yield key, np.frombuffer(raw, ZARR[dtype]).reshape(shape)

    def check(self, key, want, got):
        self.assertEqual(got.dtype, want.dtype, key)
        self.assertEqual(got.shape, want.shape, key)
        self.assertEqual(np.asarray(got).tobytes(), want.tobytes(), key)

    @staticmethod
    def arrays(group):
        """Path and array of all that is below a group."""
        for path, node in group.members(max_depth=None):
            if isinstance(node, zarr.Array):
                yield path, node

    def each_sharding(self):
        for n, (shard, ranks) in enumerate([("rows", 3), ("cols", 4), ("grid:2x2", 4), ("flat", 3), ("replicate", 1)]):
            self.save(f"step-{n}", "--shard", shard, "--ranks", str(ranks))
            with self.mounted(self.store / f"step-{n}", "--views") as mnt:
                yield shard, mnt

    def test_zarr_reads_every_element(self):
        for _, mnt in self.each_sharding():
            want = dict(self.known())
            for consolidated in [True, False]:
                group = zarr.open_group(mnt / "zarr", mode="r", use_consolidated=consolidated)
                self.assertEqual(group.attrs["tensormount_left_out"], ["fp4"])
                found = {}
                for path, array in self.arrays(group):
                    key = array.attrs["tensormount_key"]
                    found[key] = path
                    self.check(key, want[key], array[...])
                self.assertEqual(sorted(found), sorted(want))
                self.assertEqual(found["a"], "a%=")
                self.assertEqual(found["zarr.json"], "zarr%2Ejson")
            # Of one group, and one array, by itself.
            below = zarr.open(mnt / "zarr" / "a", mode="r")
            self.check("a/b/c", want["a/b/c"], below["b/c"][...])
            one = zarr.open(mnt / "zarr" / "w", mode="r")
            self.assertEqual(one.attrs["tensormount_dtype"], "f32")
            self.assertEqual(one[3:40, 5].tobytes(), np.ascontiguousarray(want["w"][3:40, 5]).tobytes())

    def test_tensorstore_reads_every_element(self):
        for _, mnt in self.each_sharding():
            want = dict(self.known())
            group = zarr.open_group(mnt / "zarr", mode="r")
            for path, array in self.arrays(group):
                key = array.attrs["tensormount_key"]
                store = tensorstore.open(
                    {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{mnt}/zarr/{path}/"}},
                    open=True, read=True).result(timeout=60)
                self.check(key, want[key], store.read().result(timeout=60))

    def test_zarr_chunks_are_the_stored_chunks(self):
        def chunks(mnt, key):
            return zarr.open(mnt / "zarr" / key, mode="r").chunks

        for shard, mnt in self.each_sharding():
            if shard == "rows":
                self.assertEqual(chunks(mnt, "w"), (22, 48))
                self.assertEqual(chunks(mnt, "layers.0.attn/qkv"), (10, 7, 5))
            elif shard == "cols":
                self.assertEqual(chunks(mnt, "w"), (64, 12))
                self.assertEqual(chunks(mnt, "layers.0.mlp"), (129, 9))
            elif shard == "grid:2x2":
                self.assertEqual(chunks(mnt, "layers.0.mlp"), (65, 17))
                names = {p.name for p in (mnt / "zarr" / "layers.0.mlp").iterdir()}
                self.assertEqual(names, {"zarr.json", *(f"c.{i}.{j}" for i, j in itertools.product("01", "01"))})
                for name in names - {"zarr.json"}:  # All padded to one size.
                    self.assertEqual((mnt / "zarr" / "layers.0.mlp" / name).stat().st_size, 65 * 17 * 2)
            elif shard == "flat":
                # Runs of whole rows are boxes; others are shown as rows, of which there are few here.
                self.assertEqual(chunks(mnt, "layers.0.mlp"), (43, 33))
                self.assertEqual(chunks(mnt, "a%="), (7, 3, 5))

    def test_zarr_is_listed_with_views_only(self):
        self.save()
        with self.mounted(self.store / "step-1") as mnt:
            self.assertNotIn("zarr", [p.name for p in mnt.iterdir()])
            self.assertIn("w", [p.name for p in (mnt / "zarr").iterdir()])
            self.assertEqual(zarr.open(mnt / "zarr", mode="r")["tiny"].shape, (3,))


if __name__ == "__main__":
    clients.main()
