# SPDX-License-Identifier: Apache-2.0
"""rsync and tar on a mount."""

import os
import re

import clients

clients.programs("rsync", "tar")
harness = clients.harness


class Rsync(clients.ClientTest):
    def setUp(self):
        super().setUp()
        self.save("step-1", "--ranks", "2")
        # Step N+1: one tensor with another byte, one new, one gone, everything else cut otherwise.
        self.next = dict(self.tensors)
        dtype, shape, raw = self.next["big"]
        at = len(raw) // 2
        self.next["big"] = (dtype, shape, raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1:])
        self.next["layers.1.new"] = ("U8", (777,), bytes(range(256)) * 3 + bytes(9))
        del self.next["tiny"]
        harness.write_safetensors(self.dir / "next.safetensors", self.next)
        self.save("step-2", "--shard", "cols", "--ranks", "3", model=self.dir / "next.safetensors")

    def rsync(self, step, *more):
        """Files that were (or would be) sent or removed, and the bytes of those sent."""
        out = self.sh("rsync", "-ai", "--delete", "--stats", *more, f"{self.dir}/MNT/{step}/", f"{self.dir}/copy/")
        moved = re.findall(r"^(?:>f\S*|\*deleting) +(.*)$", out, re.M)
        size = re.search(r"Total transferred file size: ([\d,]+) bytes", out).group(1)
        return sorted(moved), int(size.replace(",", ""))

    def test_rsync_transfers_only_changed_files(self):
        with self.mounted(self.store) as mnt:
            def size(step, *names):
                return sum(os.stat(mnt / step / name).st_size for name in names)

            every = sorted(["checkpoint.json", "common.json", *(f"tensors/{key}" for key in self.tensors)])
            self.assertEqual(self.rsync("step-1", "-n"), (every, size("step-1", *every)))
            self.assertFalse((self.dir / "copy").exists())
            self.assertEqual(self.rsync("step-1"), (every, size("step-1", *every)))
            self.check_copy(self.dir / "copy" / "tensors")
            self.assertEqual(self.rsync("step-1"), ([], 0))

            changed = ["checkpoint.json", "tensors/big", "tensors/layers.1.new"]
            want = (sorted([*changed, "tensors/tiny"]), size("step-2", *changed))
            self.assertEqual(self.rsync("step-2", "-n"), want)
            self.check_copy(self.dir / "copy" / "tensors")
            # By contents it is the same as by sizes and times.
            self.assertEqual(self.rsync("step-2", "-n", "-c"), want)
            self.assertEqual(self.rsync("step-2"), want)
            self.check_copy(self.dir / "copy" / "tensors", {k: raw for k, (_, _, raw) in self.next.items()})
            self.assertEqual(self.rsync("step-2"), ([], 0))
            self.assertEqual(self.rsync("step-2", "-c"), ([], 0))

    def test_rsync_sends_only_differences_of_a_file(self):
        with self.mounted(self.store):
            self.rsync("step-1")
            out = self.sh("rsync", "-a", "--no-whole-file", "--inplace", "--stats", f"{self.dir}/MNT/step-2/tensors/big",
                          f"{self.dir}/copy/tensors/big")
            literal = int(re.search(r"Literal data: ([\d,]+)", out).group(1).replace(",", ""))
            self.assertGreater(literal, 0)
            self.assertLess(literal, 100_000)
            self.assertEqual((self.dir / "copy" / "tensors" / "big").read_bytes(), self.next["big"][2])


class Tar(clients.ClientTest):
    def test_tar_creates_extracts_and_compares(self):
        self.save("step-1", "--shard", "flat", "--ranks", "5")
        with self.mounted(self.store / "step-1") as mnt:
            self.sh("tar", "-C", mnt, "-cf", "all.tar", "tensors", "checkpoint.json", "common.json")
            (self.dir / "out").mkdir()
            self.sh("tar", "-C", "out", "-xf", "all.tar")
            self.check_copy(self.dir / "out" / "tensors")
            self.assertEqual((self.dir / "out" / "checkpoint.json").read_bytes(), (mnt / "checkpoint.json").read_bytes())
            # Sizes, times, modes, owners and contents, as tar reads them now.
            self.sh("tar", "-C", mnt, "-df", "all.tar")
            # A second archive is the same.
            self.sh("tar", "-C", mnt, "-cf", "again.tar", "tensors", "checkpoint.json", "common.json")
            self.sh("cmp", "all.tar", "again.tar")
            # Also straight from an archive into a program.
            self.sh(f"tar -C MNT -cf - tensors | tar -xf - -O tensors/big | cmp - out/tensors/big")


if __name__ == "__main__":
    clients.main()
