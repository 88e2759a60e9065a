# SPDX-License-Identifier: Apache-2.0
"""What `tensormount export` writes, opened by the libraries that the formats belong to."""

import libraries

libraries.need("torch", "safetensors", "zarr")

import numpy as np  # noqa: E402
import safetensors  # noqa: E402
import torch  # noqa: E402
import zarr  # noqa: E402

import formula  # noqa: E402

harness = libraries.harness
# Without the bytes of the large one there is nothing to wait for.
ALL = formula.expected(formula.MODEL)
NUMPY = {"bool": "?", "u8": "u1", "i8": "i1", "i16": "<i2", "u16": "<u2", "i32": "<i4", "i64": "<i8", "f16": "<f2",
         "f32": "<f4", "f64": "<f8", "c64": "<c8"}


def raw_of(tensor):
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Export(libraries.LibraryTest):
    """Of a checkpoint of ours, whose ranks held columns, and of one that torch saved."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        libraries.make("torch", "dcp", cls.made)

    def sources(self):
        plain = self.dir / "plain.safetensors"
        harness.write_safetensors(plain, {key: (formula.DTYPES[dtype][1], shape, formula.raw(key, dtype, shape))
                                          for key, (dtype, shape) in ALL.items()})
        self.run_tool("import", plain, self.dir / "STORE" / "ours", "--ranks", "3", "--shard", "cols")
        return [self.dir / "STORE" / "ours", self.made / "dcp"]

    def exported(self, to, *more, name="out"):
        """(source, what was written) for each source; on three ranks."""
        for number, source in enumerate(self.sources()):
            out = self.dir / f"{number}{name}"
            self.run_tool("export", source, out, "--to", to, "--ranks", "3", *more)
            yield source, out

    def check_tensors(self, found, expected=None):
        expected = ALL if expected is None else expected
        self.assertEqual(set(found), set(expected))
        for key, (dtype, shape) in expected.items():
            self.assertEqual(found[key].dtype, getattr(torch, formula.DTYPES[dtype][2]), key)
            self.assertEqual(tuple(found[key].shape), shape, key)
            self.assertEqual(raw_of(found[key]), formula.raw(key, dtype, shape), key)

    def test_dcp(self):
        for source, out in self.exported("dcp"):
            # Two and three ranks, which hold rows of everything that has rows.
            for count in (2, 3):
                libraries.make("torch", f"load@{out}", self.dir, count)
            self.check_list(out, ALL)
            self.check_load(out, ALL)
            self.run_tool("diff", source, out)

    def test_hugging_face(self):
        for _, out in self.exported("hf", "--hf-part-size", "200K"):
            found = {}
            parts = sorted(out.glob("*.safetensors"))
            self.assertGreater(len(parts), 1)
            self.assertTrue((out / "model.safetensors.index.json").exists())
            for part in parts:
                with safetensors.safe_open(part, "pt") as f:
                    found.update({key: f.get_tensor(key) for key in f.keys()})
            self.check_tensors(found)

    def test_safetensors(self):
        for _, out in self.exported("safetensors", name="out.safetensors"):
            with safetensors.safe_open(out, "pt") as f:
                self.check_tensors({key: f.get_tensor(key) for key in f.keys()})

    def test_torch(self):
        for _, out in self.exported("torch", name="out.pt"):
            found = torch.load(out, weights_only=True)
            flat = {}

            def walk(prefix, value):
                if isinstance(value, torch.Tensor):
                    flat[prefix] = value
                elif isinstance(value, dict):
                    for key, inner in value.items():
                        walk(f"{prefix}.{key}" if prefix else str(key), inner)

            walk("", found)
            self.check_tensors({key: value for key, value in flat.items() if key in ALL})
            mapped = torch.load(out, weights_only=True, mmap=True)
            self.assertEqual(set(mapped), set(found))

    def test_npy(self):
        for _, out in self.exported("npy"):
            files = {str(path.relative_to(out))[:-4]: path for path in out.rglob("*.npy")}
            self.assertEqual(set(files), set(ALL))
            for key, (dtype, shape) in ALL.items():
                array = np.load(files[key], mmap_mode="r" if 0 not in shape else None)
                self.assertEqual(array.shape, shape, key)
                self.assertEqual(np.ascontiguousarray(array).tobytes(), formula.raw(key, dtype, shape), key)
                if dtype in NUMPY:
                    self.assertEqual(array.dtype, np.dtype(NUMPY[dtype]), key)

    def test_zarr(self):
        for _, out in self.exported("zarr"):
            for key, (dtype, shape) in ALL.items():
                if dtype not in NUMPY:
                    continue
                array = zarr.open_array(str(out / key), mode="r")[...]
                self.assertEqual(np.shape(array), shape, key)
                self.assertEqual(np.ascontiguousarray(array).tobytes(), formula.raw(key, dtype, shape), key)


if __name__ == "__main__":
    libraries.main()
