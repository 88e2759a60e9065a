# SPDX-License-Identifier: Apache-2.0
import os
import select
import signal
import subprocess
import time
import unittest

import harness

# Rank 1 leaves its process id, so that the test can end or stop it when the save has begun.
VICTIM = """
if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then echo $$ > {pid}.new; mv {pid}.new {pid}; fi
exec "$@"
"""


class Mpi(harness.ToolTest):
    def setUp(self):
        harness.need_mpi()
        super().setUp()

    def test_ranks_are_those_of_mpi(self):
        path = self.store / "step-1"
        out = self.run_tool("import", self.model, path, "--shard", "cols", prefix=harness.mpirun(3)).stdout
        self.assertEqual(out.count("committed"), 1)
        self.assertIn("3 ranks", out)
        self.run_tool("load", path, "--compare", self.model, "--shard", "rows", prefix=harness.mpirun(2))
        self.run_tool("verify", path)

    def test_error_is_printed_once_for_all_ranks(self):
        path = self.store / "step-1"
        self.run_tool("import", self.model, path, prefix=harness.mpirun(2))
        again = self.run_tool("import", self.model, path, prefix=harness.mpirun(2), expect=None)
        self.assertNotEqual(again.returncode, 0)
        self.assertEqual(again.stderr.count("ALREADY_EXISTS"), 1, again.stderr)

    def test_ranks_option_is_refused(self):
        result = self.run_tool("import", self.model, self.store / "a", "--ranks", "2", prefix=harness.mpirun(2),
                               expect=None)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("--ranks cannot be used under mpirun", result.stderr)

    def test_killed_or_stopped_rank_is_named(self):
        # Big enough that the ranks are still writing when the victim is hit; where they were not,
        # the checkpoint must be there, whole.
        big = {f"t{i}": ("U8", (16 << 20,), bytes(16 << 20)) for i in range(24)}
        harness.write_safetensors(self.model, big)
        # The second job begins while the survivors of the first wait for their deadline.
        jobs = {}
        for number in [signal.SIGKILL, signal.SIGSTOP]:
            store = self.dir / f"store-{number}"
            pid_file = self.dir / f"pid-{number}"
            script = self.dir / f"victim-{number}.sh"
            script.write_text(VICTIM.format(pid=pid_file))
            runtime = self.dir / f"mpi-{number}"
            runtime.mkdir(mode=0o700)
            command = [*harness.mpirun(3, "--enable-recovery", "--mca", "orte_tmpdir_base", str(runtime)), "sh",
                       str(script), harness.TOOL, "import", str(self.model), str(store / "step"), "--liveness", "2"]
            job = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=self.dir)
            self.addCleanup(self.end, job)
            staging = store / ".staging"
            begun = time.monotonic() + 60
            while not (staging.is_dir() and any(staging.iterdir())) and time.monotonic() < begun:
                time.sleep(0.001)
            victim = int(pid_file.read_text())
            os.kill(victim, number)
            jobs[number] = (store / "step", job, victim, time.monotonic())
        for number, (path, job, victim, struck) in jobs.items():
            # mpirun itself waits for a rank that is stopped: the others' verdict is what counts.
            errors = self.read_until(job, "rank 1", 30)
            waited = time.monotonic() - struck
            if number == signal.SIGSTOP:
                os.kill(victim, signal.SIGKILL)
            job.wait(timeout=60)
            if path.exists():
                self.run_tool("load", path, "--compare", self.model)
                continue
            self.assertRegex(errors, r"tensormount: (DEADLINE_EXCEEDED|UNAVAILABLE): .*rank 1\b")
            self.assertLess(waited, 25)
            # The same save in a new job.
            self.run_tool("import", self.model, path, prefix=harness.mpirun(3))
            self.run_tool("verify", path)

    @staticmethod
    def end(job):
        if job.poll() is None:
            job.kill()
        job.wait()
        job.stderr.close()

    @staticmethod
    def read_until(job, words, seconds):
        text = b""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and words.encode() not in text:
            if select.select([job.stderr], [], [], 0.1)[0]:
                piece = os.read(job.stderr.fileno(), 65536)
                if not piece:
                    break
                text += piece
        return text.decode()


if __name__ == "__main__":
    harness.main()
