# SPDX-License-Identifier: Apache-2.0
"""NumPy, ml_dtypes and safetensors on a mount."""

import json
import unittest

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

    def test_load_of_npy(self):
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

    def test_npy_is_what_ml_dtypes_saves(self):
        with self.mounted(self.store / "step-1") as mnt:
            for key, dtype, shape, raw in self.known():
                np.save(self.dir / "own.npy", np.frombuffer(raw, dtype).reshape(shape))
                own = np.load(self.dir / "own.npy")
                ours = np.load(mnt / "npy" / f"{key}.npy")
                self.assertEqual((ours.dtype, ours.shape, ours.tobytes()), (own.dtype, own.shape, own.tobytes()), key)

    def test_memmap_of_tensors(self):
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

    def test_fromfile_and_offsets(self):
        raw = self.tensors["big"][2]
        with self.mounted(self.store / "step-1") as mnt:
            for offset, count in [(0, 1), (4, 1000), (4095, 4097), (65535, 65538), (len(raw) - 3, 3)]:
                got = np.fromfile(mnt / "tensors" / "big", dtype="u1", count=count, offset=offset)
                self.assertEqual(got.tobytes(), raw[offset:offset + count])


class SafeTensors(clients.ClientTest):
    def test_safe_open_and_get_slice(self):
        self.save("step-1", "--shard", "cols", "--ranks", "4")
        with self.mounted(self.store / "step-1") as mnt:
            self.check_file(mnt / "model.safetensors", set(self.tensors))

    def check_file(self, path, keys):
        with safetensors.safe_open(path, framework="numpy") as opened:
            self.assertEqual(set(opened.keys()), keys)
            for key in keys:
                dtype, shape, raw = self.tensors[key]
                if dtype not in harness.NUMPY:
                    continue
                self.assertEqual(opened.get_tensor(key).tobytes(), raw, key)
                part = opened.get_slice(key)
                self.assertEqual(tuple(part.get_shape()), tuple(shape))
                if len(shape) == 2 and raw:
                    whole = np.frombuffer(raw, harness.NUMPY[dtype]).reshape(shape)
                    rows, cols = shape[0] // 3, shape[1] // 2
                    self.assertEqual(part[rows:, 1:cols].tobytes(), whole[rows:, 1:cols].tobytes(), key)


if __name__ == "__main__":
    clients.main()
