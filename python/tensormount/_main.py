# SPDX-License-Identifier: Apache-2.0
"""The command `tensormount` of the wheel.

Becomes the program bin/tensormount of this package, a stub of a few KB whose main is tm_main of the
library beside it (tensormount/c.h). Not tm_main by ctypes in this process: `mount` forks and serves
for days, which a daemon should do without an interpreter and its handlers in it; Ctrl-C must reach
the command and not Python; and MPI, mount(8) and `ps` find a program by that name. It costs one exec.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def program() -> str:
    """Path of the program, for links to it: /sbin/mount.tensormount is one."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "tensormount")


def main() -> NoReturn:
    name = os.path.basename(sys.argv[0])
    argv = [name if name.endswith("tensormount") else "tensormount", *sys.argv[1:]]
    # Python ignores these, and who is ignored stays so: `tensormount ls | head` would say "broken
    # pipe" instead of ending.
    for ignored in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, ignored), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program(), argv)
    except OSError as error:
        sys.stderr.write(f"tensormount: UNSUPPORTED: {program()}: {error.strerror}: this package was "
                         "not installed from a wheel\n")
        sys.exit(2)
