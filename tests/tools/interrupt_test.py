# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and its like on commands that write: nothing is left of what they wrote, and they end as a shell expects."""

import os
import signal
import subprocess
import time

import harness

MIB = 1 << 20


class Interrupted(harness.ToolTest):
    def setUp(self):
        super().setUp()
        # Zeros with nothing behind them: reading and writing take a while, making them does not.
        self.large = self.dir / "large.safetensors"

    def make_large(self, mib):
        header = b",".join(b'"t%d":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}'
                           % (i, 8 * MIB, 8 * MIB * i, 8 * MIB * (i + 1)) for i in range(mib // 8))
        header = b"{" + header + b"}"
        header += b" " * (-len(header) % 8)
        with open(self.large, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + mib * MIB)

    def interrupted(self, begun, sent, *args, prefix=()):
        """Sends the signal once `begun()`; what the command said then. A fast machine needs more to do."""
        for mib in (128, 512, 2048):
            self.make_large(mib)
            job = subprocess.Popen([*prefix, harness.TOOL, *map(str, args)], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, cwd=self.dir)
            while job.poll() is None and not begun():
                time.sleep(0.001)
            job.send_signal(sent)
            out, err = job.communicate(timeout=60)
            if job.returncode != 0:
                return job.returncode, out, err
            self.run_tool("rm", args[2]) if str(self.store) in str(args[2]) else self.remove(args[2])
        self.fail("always done before the signal came")

    def remove(self, path):
        self.assertTrue(path.exists())
        subprocess.run(["rm", "-r", str(path)], check=True)

    def temporary(self):
        return [name for name in os.listdir(self.dir) if name.endswith(".tmp")]

    def test_interrupted_export_removes_its_files(self):
        for sent, how in ((signal.SIGINT, ["npy"]), (signal.SIGTERM, ["safetensors"]),
                          (signal.SIGHUP, ["dcp", "--ranks", "3"])):
            out = self.dir / "out"
            status, _, err = self.interrupted(self.temporary, sent, "export", self.large, out, "--to", *how)
            self.assertEqual(status, 128 + sent, err)
            self.assertEqual(self.temporary(), [], err)
            self.assertFalse(out.exists())
            self.assertIn("tensormount: CANCELLED: ", err)
            self.assertIn("interrupted", err)
            self.assertIn("the files written so far were removed", err)
            self.assertEqual(len(err.splitlines()), 1, err)

    def staged(self):
        try:
            return [name for name in os.listdir(self.store / ".staging") if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def test_interrupted_import_and_adopt_free_the_name(self):
        self.save("step-0")
        for sent, command in ((signal.SIGINT, ["import", self.large, self.store / "step-1", "--ranks", "2"]),
                              (signal.SIGTERM, ["adopt", self.large, self.store / "step-1"])):
            status, _, err = self.interrupted(self.staged, sent, *command)
            self.assertEqual(status, 128 + sent, err)
            self.assertIn("tensormount: CANCELLED: ", err)
            self.assertEqual(len(err.splitlines()), 1, err)
            names = [line.split()[0] for line in self.run_tool("ls", self.store).stdout.splitlines()]
            self.assertEqual(names, ["step-0"])
            self.assertEqual(self.staged(), [])
            self.run_tool("fsck", self.store)
            # The name is free.
            self.save("step-1")
            self.run_tool("rm", self.store / "step-1")

    def test_export_under_nohup_ignores_sighup(self):
        self.make_large(256)
        job = subprocess.Popen(["nohup", harness.TOOL, "export", str(self.large), "out", "--to", "npy"], cwd=self.dir,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while job.poll() is None and not self.temporary():
            time.sleep(0.001)
        job.send_signal(signal.SIGHUP)
        self.assertEqual(job.wait(60), 0)
        self.assertEqual(len(os.listdir(self.dir / "out")), 32)


if __name__ == "__main__":
    harness.main()
