#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks tests/deadlines.txt: every test that it names exists, and its deadlines add up to at most 21 seconds.

usage: deadlines.py ROOT       prints one line per problem, exits 1 if there is one
"""

import os
import re
import sys

LIMIT_SECONDS = 21.0
ENTRY = re.compile(r"^(\d+\.\d+)\s+(\w+)\s+(\S+)\s+(\S.*)$")
GTEST = re.compile(r"^\s*(?:TEST|TEST_F|TEST_P|TYPED_TEST)\(\s*(\w+),\s*(\w+)\)", re.M)
PYTHON = re.compile(r"^\s*def (test_\w+)\(", re.M)


def cases(root):
    """Names of all cases below tests/: Suite.Case of GoogleTest, test_name of Python."""
    found = set()
    for folder, _, files in os.walk(os.path.join(root, "tests")):
        for name in files:
            if not name.endswith((".cc", ".h", ".py")):
                continue
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = file.read()
            if name.endswith(".py"):
                found.update(PYTHON.findall(text))
            else:
                found.update(f"{suite}.{case}" for suite, case in GTEST.findall(text))
    return found


def problems(root):
    known = cases(root)
    total = 0.0
    with open(os.path.join(root, "tests", "deadlines.txt"), encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.startswith("#") or not line.strip():
                continue
            entry = ENTRY.match(line)
            if entry is None:
                yield f"tests/deadlines.txt:{number}: not 'seconds program case why'"
                continue
            total += float(entry.group(1))
            # Without the number of a parameter; for Python without the class.
            case = re.sub(r"/\w+$", "", entry.group(3))
            if case not in known and case.rpartition(".")[2] not in known:
                yield f"tests/deadlines.txt:{number}: there is no case {case}"
    if total > LIMIT_SECONDS + 1e-9:
        yield f"tests/deadlines.txt: {total:.1f} s in all, more than {LIMIT_SECONDS:.0f}"


def main():
    found = list(problems(sys.argv[1]))
    for line in found:
        print(line)
    print(f"{len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
