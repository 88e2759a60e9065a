# SPDX-License-Identifier: Apache-2.0
"""The command `tensormount` of the wheel.

Replaces this process by bin/tensormount of this package, a stub of a few KB that calls tm_main of the library
beside it (tensormount/c.h). A call of tm_main through ctypes would not do: `mount` forks a daemon, which
should not hold an interpreter and its signal handlers; Ctrl-C must reach the command and not Python; and MPI,
mount(8) and `ps` look for a program of that name.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def program() -> str:
    """Path of the program, for symbolic links such as /sbin/mount.tensormount."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "tensormount")


def main() -> NoReturn:
    name = os.path.basename(sys.argv[0])
    argv = [name if name.endswith("tensormount") else "tensormount", *sys.argv[1:]]
    # Python ignores these signals, and exec keeps them ignored: `tensormount ls | head` would report a broken
    # pipe instead of ending.
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
