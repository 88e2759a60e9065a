# SPDX-License-Identifier: Apache-2.0
"""What machines and people do to checkpoints without meaning harm."""

import os
import subprocess
import time

import harness


def pattern(n, seed):
    return bytes((i * 31 + seed) % 251 for i in range(n))


class AdversityTest(harness.ToolTest):
    def test_commands_work_with_64_descriptors(self):
        """148 data files are read by a process that may have 64 descriptors."""
        tensors = {f"t{i}": ("U8", (5000,), pattern(5000, i)) for i in range(40)}
        harness.write_safetensors(self.dir / "many.safetensors", tensors)
        many = self.save("many", "--ranks", "150", model=self.dir / "many.safetensors")
        self.assertGreater(len(list((many / "data").iterdir())), 100)
        few = ("prlimit", "--nofile=64:64")
        self.run_tool("load", many, "--compare", self.dir / "many.safetensors", prefix=few)
        self.run_tool("verify", many, prefix=few)
        self.run_tool("export", many, self.dir / "out.safetensors", "--to", "safetensors", prefix=few)
        self.run_tool("load", many, "--compare", self.dir / "out.safetensors")
        harness.need_fuse()
        mnt = self.dir / "MNT"
        mnt.mkdir()
        self.mounts.append(mnt)
        self.run_tool("mount", self.store, mnt, prefix=few)
        for key, (_, _, raw) in tensors.items():
            self.assertEqual((mnt / "many" / "tensors" / key).read_bytes(), raw, key)

    def test_lookalike_keys_stay_separate(self):
        """Equal after normalisation, or but for case: different keys all the same."""
        tensors = {key: ("U8", (100,), pattern(100, i))
                   for i, key in enumerate(("caf\u00e9", "cafe\u0301", "W", "w", "\u00c5", "\u212b"))}
        harness.write_safetensors(self.dir / "alike.safetensors", tensors)
        saved = self.save("alike", "--ranks", "3", model=self.dir / "alike.safetensors")
        self.run_tool("load", saved, "--compare", self.dir / "alike.safetensors")
        self.assertEqual({t["key"] for t in self.json_lines("ls", saved)}, set(tensors))
        mnt = self.mount(self.store)
        for key, (_, _, raw) in tensors.items():
            self.assertEqual((mnt / "alike" / "tensors" / key).read_bytes(), raw, key)
        self.assertEqual(set(os.listdir(mnt / "alike" / "tensors")), set(tensors))
        self.run_tool("export", saved, self.dir / "back.safetensors", "--to", "safetensors")
        self.run_tool("load", saved, "--compare", self.dir / "back.safetensors")

    def test_times_of_other_centuries_are_accepted(self):
        saved = self.save()
        for when in (-1, -(10**9), 2**32 + 5, 2**33):
            for folder, folders, files in os.walk(saved):
                for name in folders + files:
                    os.utime(os.path.join(folder, name), (when, when))
            os.utime(self.model, (when, when))
            self.run_tool("verify", saved)
            self.run_tool("load", saved, "--compare", self.model)
            adopted = self.dir / "adopted" / f"at{when}"
            self.run_tool("adopt", self.model, adopted)
            self.run_tool("load", adopted, "--compare", saved)
            self.run_tool("fsck", self.store)

    def test_latest_follows_saves_when_the_clock_goes_back(self):
        """What is latest is a matter of the order of saves, not of time."""
        first = self.save("step-1")
        future = time.time() + 10**8
        for folder, _, files in os.walk(first):
            for name in files:
                os.utime(os.path.join(folder, name), (future, future))
        self.save("step-2")
        latest = [c["checkpoint"] for c in self.json_lines("ls", self.store) if c["latest"]]
        self.assertEqual(latest, ["step-2"])
        self.assertEqual(self.json_lines("info", self.store)[0]["latest"], "step-2")
        self.run_tool("gc", self.store, "--grace", "0")
        self.run_tool("verify", self.store)

    def test_disk_turned_read_only_fails_the_save_cleanly(self):
        if os.geteuid() != 0:
            self.skipTest("needs root")
        disk = self.dir / "disk"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "none", disk], check=False).returncode:
            self.skipTest("no tmpfs")
        self.mounts.append(disk)
        self.store = disk / "STORE"
        kept = self.save("kept")
        big = {f"t{i}": ("U8", (1 << 20,), pattern(1 << 20, i)) for i in range(40)}
        harness.write_safetensors(self.dir / "big.safetensors", big)
        for delay in (0.0, 0.01, 0.02, 0.04, 0.08):
            save = subprocess.Popen(
                [harness.TOOL, "import", self.dir / "big.safetensors", self.store / f"s{delay}", "--ranks", "2"],
                stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            time.sleep(delay)
            # Refused (busy) while a file is open for writing, as on any disk: an error of the kernel
            # would make it so without asking.
            subprocess.run(["mount", "-o", "remount,ro", disk], check=False, stderr=subprocess.DEVNULL)
            _, said = save.communicate(timeout=60)
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            self.assertIn(save.returncode, (0, 2), said)
            if save.returncode == 2:
                self.assertIn("Read-only file system", said)
                self.assertFalse((self.store / f"s{delay}").exists())
            else:
                self.run_tool("load", self.store / f"s{delay}", "--compare", self.dir / "big.safetensors")
                self.run_tool("rm", self.store / f"s{delay}")
            self.run_tool("gc", self.store, "--grace", "0", "--staging-age", "0")
        self.run_tool("load", kept, "--compare", self.model)
        self.save("after")
        self.run_tool("verify", self.store)


if __name__ == "__main__":
    harness.main()
