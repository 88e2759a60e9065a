# SPDX-License-Identifier: Apache-2.0
"""What tests of several torch processes have in common.

usage: torchrun.py SIZE LOGS FILE CALLS     starts ranks as torchrun does, for `Ranks` alone
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

LIMIT = 300.0


class Ranks:
    """`size` gloo ranks, each of which calls functions of `file` in their order: ("name", argument...).

    With `real` they are started by torchrun itself. Otherwise by this file, which imports torch once and
    forks: an import takes three seconds of CPU time, and torchrun makes one more than there are ranks.
    """

    def __init__(self, file, size, *calls, real=False):
        import support  # noqa: F401: finds the package.
        import tensormount as tm

        self.what = f"{', '.join(call[0] for call in calls)} on {size} ranks"
        here = os.path.abspath(file)
        package = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
        path = os.pathsep.join(
            filter(None, [os.path.dirname(here), package, os.environ.get("PYTHONPATH")]))
        self.logs = tempfile.TemporaryDirectory()
        self.output = open(os.path.join(self.logs.name, "output"), "w+")
        how = [os.path.abspath(__file__), str(size), self.logs.name]
        if real:
            how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "--log-dir",
                   self.logs.name, "--redirects", "2"]
        self.agent = subprocess.Popen(
            [sys.executable, *how, here, json.dumps(calls)],
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


def torchrun(file, size, *calls, real=False):
    """As `Ranks`, until their end; what they printed."""
    return Ranks(file, size, *calls, real=real).wait()


def start(size, logs, file, calls):
    """The ranks as children of this process; 1 once one has failed, and the others are killed."""
    import torch._dynamo  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    children = set()
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                error = os.open(os.path.join(logs, f"stderr-{rank}"), os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(error, 2)
                sys.argv = [file, calls]
                sys.path[0] = os.path.dirname(file)
                runpy.run_path(file, run_name="__main__")
                status = 0
            except BaseException:  # SystemExit, too.
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status != 0:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


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


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), *sys.argv[2:]))
