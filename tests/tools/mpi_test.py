# SPDX-License-Identifier: Apache-2.0
import time
import unittest

import harness

# What rank 1 does instead of importing: joins, and dies or hangs soon after.
VICTIM = """
if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then exec timeout -s {signal} 0.{tenths} "$@"; fi
exec "$@"
"""


class Mpi(harness.ToolTest):
    def setUp(self):
        harness.need_mpi()
        super().setUp()

    def test_ranks_are_mpi_s(self):
        path = self.store / "step-1"
        out = self.run_tool("import", self.model, path, "--shard", "cols", prefix=harness.mpirun(3)).stdout
        self.assertEqual(out.count("committed"), 1)
        self.assertIn("3 ranks", out)
        self.run_tool("load", path, "--compare", self.model, "--shard", "rows", prefix=harness.mpirun(2))
        self.run_tool("verify", path)

    def test_one_verdict_and_one_line(self):
        path = self.store / "step-1"
        self.run_tool("import", self.model, path, prefix=harness.mpirun(2))
        again = self.run_tool("import", self.model, path, prefix=harness.mpirun(2), expect=None)
        self.assertNotEqual(again.returncode, 0)
        self.assertEqual(again.stderr.count("ALREADY_EXISTS"), 1, again.stderr)

    def test_ranks_option_is_refused(self):
        result = self.run_tool("import", self.model, self.store / "a", "--ranks", "2", prefix=harness.mpirun(2),
                               expect=None)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("--ranks under mpirun", result.stderr)

    def test_a_killed_or_stopped_rank_is_named(self):
        # A bigger model, so that a save takes longer than the victim lives; where it does not, the
        # checkpoint must be there.
        big = {f"t{i}": ("U8", (8 << 20,), bytes(8 << 20)) for i in range(24)}
        harness.write_safetensors(self.model, big)
        for signal, tenths in [("KILL", 3), ("STOP", 3), ("KILL", 6)]:
            path = self.store / f"step-{signal}-{tenths}"
            script = self.dir / "victim.sh"
            script.write_text(VICTIM.format(signal=signal, tenths=tenths))
            start = time.monotonic()
            result = self.run_tool(
                "import", self.model, path, "--liveness", "3",
                prefix=[*harness.mpirun(3, "--enable-recovery"), "timeout", "-k", "1", "40", "sh", str(script)],
                expect=None)
            self.assertLess(time.monotonic() - start, 60)
            if path.exists():
                self.run_tool("load", path, "--compare", self.model)
                continue
            self.assertRegex(result.stderr, r"rank 1\b", signal)
            # The same save in a new job.
            self.run_tool("import", self.model, path, prefix=harness.mpirun(3))
            self.run_tool("verify", path)


if __name__ == "__main__":
    harness.main()
