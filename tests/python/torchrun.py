# SPDX-License-Identifier: Apache-2.0
"""What tests of several torch processes have in common.

usage: torchrun.py     the fork server of `Ranks`, for `Ranks` alone
"""

import atexit
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

LIMIT = 300.0 if float(os.environ.get("TENSORMOUNT_TEST_SCALE", "1")) > 1 else 200.0
# What the fork server imports. An import of these takes two to three seconds of CPU time.
IMPORTED_BEFORE_THE_FORK = ("torch._dynamo", "torch.distributed.checkpoint")


class ForkServer:
    """A process that has imported torch. It starts ranks by fork, and ends when this process does."""

    shared = None

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__)], stdin=subprocess.PIPE,
                                        env={**os.environ, "OMP_NUM_THREADS": "1"})
        atexit.register(self.close)

    def start(self, request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def close(self):
        self.process.stdin.close()
        self.process.wait(LIMIT)

    @classmethod
    def get(cls):
        if cls.shared is None or cls.shared.process.poll() is not None:
            cls.shared = cls()
        return cls.shared


class Forked:
    """Ranks that the fork server started, with the methods of Popen that `Ranks` uses."""

    def __init__(self, size, logs, file, calls, environment):
        self.logs = logs
        self.server = ForkServer.get()
        self.server.start({"size": size, "logs": logs, "file": file, "calls": calls, "cwd": os.getcwd(),
                           "environment": environment})

    def read(self, name):
        try:
            with open(os.path.join(self.logs, name)) as file:
                return int(file.read())
        except FileNotFoundError:
            if self.server.process.poll() is not None:
                raise AssertionError("the fork server of tests/python/torchrun.py ended") from None
            return None

    def poll(self):
        return self.read("status")

    def wait(self, limit=LIMIT):
        end = time.monotonic() + limit
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("torchrun.py", limit)
            time.sleep(0.01)
        return status

    def kill(self):
        while (pid := self.read("agent")) is None:
            time.sleep(0.01)
        if self.poll() is None:
            os.kill(pid, signal.SIGKILL)


class Ranks:
    """`size` gloo ranks, each of which calls functions of `file` in their order: ("name", argument...).

    With `real` they are started by torchrun itself, otherwise by the fork server.
    """

    def __init__(self, file, size, *calls, real=False):
        import support  # noqa: F401: finds the package.
        import tensormount as tm

        self.what = f"{', '.join(call[0] for call in calls)} on {size} ranks"
        here = os.path.abspath(file)
        package = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
        path = [os.path.dirname(here), package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.logs = tempfile.TemporaryDirectory()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1",
                       "TENSORMOUNT_TEST_PIDS": self.logs.name}
        self.output = open(os.path.join(self.logs.name, "output"), "w+")
        if real:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
                 "--log-dir", self.logs.name, "--redirects", "2", here, json.dumps(calls)],
                stdout=self.output, stderr=subprocess.STDOUT, env=environment)
        else:
            self.agent = Forked(size, self.logs.name, here, json.dumps(calls), environment)

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


def put(logs, name, number):
    """Writes a number to a file of that name, so that no reader sees half of it."""
    path = os.path.join(logs, name)
    with open(path + ".new", "w") as file:
        file.write(str(number))
    os.rename(path + ".new", path)


def serve():
    """Starts an agent for each request, and writes down which one it is and how it ended."""
    for module in IMPORTED_BEFORE_THE_FORK:
        __import__(module)
    requests = os.fdopen(0, "rb", buffering=0)
    pending = b""
    agents = {}
    while True:
        ready, _, _ = select.select([requests], [], [], 0.01 if agents else None)
        if ready:
            read = requests.read(1 << 16)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                agent = os.fork()
                if agent == 0:
                    start(**request)
                agents[agent] = request["logs"]
                put(request["logs"], "agent", agent)
        for agent, logs in list(agents.items()):
            found, status = os.waitpid(agent, os.WNOHANG)
            if found != 0:
                del agents[agent]
                put(logs, "status", os.waitstatus_to_exitcode(status))


def start(size, logs, file, calls, cwd, environment):
    """The ranks as children of this process, which ends with 1 once one has failed, and the others are killed."""
    status = 1
    try:
        output = os.open(os.path.join(logs, "output"), os.O_WRONLY | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[1:1] = environment["PYTHONPATH"].split(os.pathsep)
        status = run_ranks(size, logs, file, calls)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def free_port():
    """A port that the system gives to nobody by itself: outside of its usual range (32768 to 60999)."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:
                continue
            return port


def run_ranks(size, logs, file, calls):
    port = free_port()
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
    serve()
