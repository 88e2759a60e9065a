# SPDX-License-Identifier: Apache-2.0
"""Runs a program whose calls of torch.distributed.checkpoint save to and load from tensormount
(`tensormount.torch.patch_dcp`), without a change to it:

    torchrun --nproc-per-node 8 -m tensormount.patched train.py ARGUMENT...
    python -m tensormount.patched --store OUT/store -m my.trainer ARGUMENT...
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options of this program, and the program to run with its own arguments."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-m":
        alone = "=" in arguments[at] or arguments[at] in ("-h", "--help")
        at += 1 if alone else 2
    return arguments[:at], arguments[at:]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tensormount.patched", description=__doc__,
        usage="%(prog)s [--store STORE [--root DIR]] (SCRIPT | -m MODULE) ARGUMENT...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--store", metavar="STORE",
        help="one store for all checkpoints (default: each checkpoint is in its own directory)",
    )
    parser.add_argument(
        "--root", metavar="DIR",
        help="with --store: the directory below which all checkpoints are saved (default: the one that STORE is in)",
    )
    own, program = _split(sys.argv[1:])
    given = parser.parse_args(own)
    module = program[:1] == ["-m"]
    if len(program) < (2 if module else 1):
        parser.error("a script, or -m MODULE, is missing")
    from tensormount.torch import patch_dcp

    patch_dcp(given.store, root=given.root)  # Never undone, because an async save may go on after the script.
    if module:
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
