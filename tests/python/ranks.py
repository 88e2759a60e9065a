# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: one function in each, which finds the others through a folder.

The function is named as "module:function", is called with (group, rank, size, *arguments) and prints
what it has to say; what it raises is printed as "RAISED Class: text" and ends the rank with 3.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile

import tensormount as tm
from tensormount.testing import threads  # noqa: F401: for what needs no process each.

LIMIT = 180.0


class Rank:
    def __init__(self, process, number):
        self.process = process
        self.number = number

    def result(self, limit=LIMIT):
        """Exit status and standard output."""
        try:
            out, err = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"rank {self.number} did not end\n{out}\n{err}") from None
        if self.process.returncode not in (0, 3):
            sys.stderr.write(f"rank {self.number}: {self.process.returncode}\n{err}\n")
        return self.process.returncode, out


def start(function, size, *arguments, **environment):
    """Starts `size` ranks."""
    folder = tempfile.mkdtemp(dir=os.environ.get("TENSORMOUNT_TEST_TMPDIR"))
    here = os.path.dirname(os.path.abspath(__file__))
    package = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
    path = os.pathsep.join(filter(None, [here, package, os.environ.get("PYTHONPATH")]))
    found = []
    for number in range(size):
        process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), function, folder, str(number), str(size),
             json.dumps(arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment})
        found.append(Rank(process, number))
    return found


def end(ranks):
    """None is left, whatever a test found."""
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


def run(function, size, *arguments, limit=LIMIT, **environment):
    """Runs them to their end; AssertionError where one failed. What each printed."""
    ranks = start(function, size, *arguments, **environment)
    try:
        results = [rank.result(limit) for rank in ranks]
    finally:
        end(ranks)
    for number, (status, out) in enumerate(results):
        if status != 0:
            raise AssertionError(f"rank {number} ended with {status}: {out}")
    return [out for _, out in results]


def main():
    name, folder, number, size, arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    call = getattr(importlib.import_module(module), function)
    rank, size = int(number), int(size)
    try:
        with tm.Group.from_folder(folder, rank, size, timeout=60) as group:
            call(group, rank, size, *json.loads(arguments))
    except Exception as error:
        print(f"RAISED {type(error).__name__}: {error}", flush=True)
        if isinstance(error, AssertionError):
            import traceback

            print(traceback.format_exc(), flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
