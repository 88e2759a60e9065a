# SPDX-License-Identifier: Apache-2.0
"""What tests that run under torchrun have in common."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import support  # noqa: F401: finds the package.
import tensormount as tm

LIMIT = 300.0


class Ranks:
    """`size` gloo ranks, each of which calls functions of `file` in their order: ("name", argument...)."""

    def __init__(self, file, size, *calls):
        self.what = f"{', '.join(call[0] for call in calls)} on {size} ranks"
        here = os.path.abspath(file)
        package = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
        path = os.pathsep.join(
            filter(None, [os.path.dirname(here), package, os.environ.get("PYTHONPATH")]))
        self.logs = tempfile.TemporaryDirectory()
        self.output = open(os.path.join(self.logs.name, "output"), "w+")
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(size), "--log-dir", self.logs.name, "--redirects", "2", here, json.dumps(calls)],
            stdout=self.output, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
                 "TENSORMOUNT_TEST_PIDS": self.logs.name})

    def wait(self):
        """Until all have ended, and well; what they printed."""
        try:
            status = self.agent.wait(LIMIT)
            if status != 0:
                raise AssertionError(f"{self.what}: {status}\n{self.said()}")
            self.output.seek(0)
            return self.output.read()
        finally:
            self.close()

    def kill_at(self, mark):
        """SIGKILL for all of them once the file `mark` is there."""
        try:
            end = time.monotonic() + LIMIT
            while not os.path.exists(mark):
                if self.agent.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"{self.what}: no {mark}\n{self.said()}")
                time.sleep(0.01)
        finally:
            self.close()

    def close(self):
        self.agent.kill()  # First: it would end the others politely.
        self.agent.wait()
        for name in os.listdir(self.logs.name):
            if name.startswith("pid-"):
                try:
                    os.kill(int(name[4:]), signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self.output.close()
        self.logs.cleanup()

    def said(self):
        found = []
        for folder, _, names in os.walk(self.logs.name):
            for name in names:
                with open(os.path.join(folder, name), errors="replace") as file:
                    found.append(f"{name} {folder}:\n{file.read()[-3000:]}")
        return "\n".join(found)


def torchrun(file, size, *calls):
    """As `Ranks`, until their end; what they printed."""
    return Ranks(file, size, *calls).wait()


def main(functions):
    """Of a file of tests: its tests, or in a rank the functions that are called for."""
    import unittest

    if "TENSORMOUNT_TEST_PIDS" not in os.environ:
        unittest.main()
    import torch.distributed as dist

    own = os.path.join(os.environ["TENSORMOUNT_TEST_PIDS"], f"pid-{os.getpid()}")
    open(own, "w").close()
    for name, *arguments in json.loads(sys.argv[1]):
        if not getattr(functions[name], "without_group", False) and not dist.is_initialized():
            dist.init_process_group("gloo")
        functions[name](*arguments)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os.unlink(own)
    # PyTorch 2.13 aborts now and then at the end of the interpreter: a thread of gloo's drops what
    # is left of an all-gather when there is no interpreter any more (c10d::ProcessGroupGloo::
    # runLoop, PyThread_exit_thread within a destructor).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
