# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors as files: NumPy, head and cmp on slices/ of a mount."""

import concurrent.futures
import os

import clients

np = clients.libraries("numpy")

harness = clients.harness


class Slices(clients.ClientTest):
    def setUp(self):
        super().setUp()
        self.save("step-1", "--shard", "cols", "--ranks", "4")
        dtype, shape, raw = self.tensors["big"]
        self.big = np.frombuffer(raw, harness.NUMPY[dtype]).reshape(shape)

    def test_numpy_reads_boxes(self):
        cases = [("[0:1100]", np.s_[0:1100]), ("[5:700,100:300]", np.s_[5:700, 100:300]), ("@:,7", np.s_[:, 7]),
                 ("[-1]", np.s_[-1]), ("@3,4", np.s_[3, 4]), ("[10:10]", np.s_[10:10]), ("[ : , 1000: ]", np.s_[:, 1000:])]
        with self.mounted(self.store / "step-1") as mnt:
            folder = mnt / "slices"
            for text, index in cases:
                want = np.ascontiguousarray(self.big[index])
                raw = (folder / f"big{text}").read_bytes()
                self.assertEqual(raw, want.tobytes(), text)
                self.assertEqual((folder / f"big{text}").stat().st_size, want.nbytes, text)
                for mode in ["r", None] if want.size else [None]:
                    array = np.load(folder / f"big{text}.npy", mmap_mode=mode)
                    self.assertEqual(array.shape, self.big[index].shape, text)
                    self.assertEqual(array.tobytes(), want.tobytes(), text)
            self.assertEqual(os.listdir(folder), [])

    def test_spellings_of_one_box_share_an_inode(self):
        with self.mounted(self.store / "step-1", "--views") as mnt:
            folder = mnt / "slices"
            inodes = {os.stat(folder / f"big{text}").st_ino for text in ["[1:2,:]", "[1]", "@1", "@-1099,0:1024"]}
            self.assertEqual(len(inodes), 1)
            self.assertEqual(os.getxattr(folder / "big@1", "user.tensormount.box"), b"[1:2, 0:1024]")
            self.assertEqual(os.stat(folder / "big@1").st_mtime, os.stat(mnt / "tensors/big").st_mtime)

    def test_invalid_boxes_do_not_exist(self):
        with self.mounted(self.store / "step-1") as mnt:
            for name in ["big", "big[1101]", "big[0:1101]", "big[::2]", "none[0]", "big[0,0,0]"]:
                self.assertFalse((mnt / "slices" / name).exists(), name)
            with self.assertRaisesRegex(OSError, "Invalid argument"):
                os.stat(mnt / "slices" / "fp4[:,1:2]")
            self.assertEqual((mnt / "slices" / "fp4[:,2:4]").stat().st_size, 6)

    def test_concurrent_boxes_read_exactly(self):
        rng = np.random.default_rng(3)
        with self.mounted(self.store / "step-1") as mnt:

            def one(corner):
                r, c = map(int, corner)
                rows, columns = min(r + 64, 1100), min(c + 32, 1024)
                got = np.load(mnt / "slices" / f"big[{r}:{rows},{c}:{columns}].npy")
                return np.array_equal(got.view("u4"), self.big[r:rows, c:columns].view("u4"))

            corners = np.stack([rng.integers(0, 1099, 400), rng.integers(0, 1023, 400)], axis=1)
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                self.assertTrue(all(pool.map(one, corners)))


if __name__ == "__main__":
    clients.main()
