#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds docs/parity.md to what there is: every row names a test that exists, or says why there is none.

usage: parity_test.py ROOT
"""

import os
import re
import sys

WHY_NOT = ("not applicable", "not needed", "not built")
PYTHON_TEST = re.compile(r"^    def (test_\w+)\(", re.MULTILINE)
TEST = re.compile(r"^\s*(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)


def tests_of(root):
    """All "Suite.Name" of the C++ tests, all suites, and all scripts and "SCRIPT:test" of them, below root."""
    found = set()
    for folder, _, files in os.walk(os.path.join(root, "tests")):
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith(".py"):
                script = os.path.relpath(path, root)
                found.add(script)
                with open(path, encoding="utf-8") as file:
                    found.update(f"{script}:{test}" for test in PYTHON_TEST.findall(file.read()))
            if not name.endswith(".cc"):
                continue
            with open(path, encoding="utf-8") as file:
                for suite, test in TEST.findall(file.read()):
                    found.update((suite, f"{suite}.{test}"))
    return found


def problems(text, known):
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("| ") or line.startswith(("| ---", "| Theirs")):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3:
            yield number, f"{len(cells)} columns instead of 3"
            continue
        ours, test = cells[1:]
        if not test:
            if not ours.startswith(WHY_NOT) and '"unsupported"' not in ours:
                yield number, "no test, and no reason why"
            continue
        names = re.findall(r"`([^`]+)`", test)
        if not names:
            yield number, f"no test is named in {test!r}"
        for name in names:
            if name not in known:
                yield number, f"there is no test {name}"


def main():
    root = sys.argv[1]
    with open(os.path.join(root, "docs", "parity.md"), encoding="utf-8") as file:
        text = file.read()
    known = tests_of(root)
    # The check itself: a row with a test that does not exist is found.
    assert list(problems("| a | b | `No.SuchTest` |", known))
    assert list(problems("| a | b | |", known))
    found = list(problems(text, known))
    for number, problem in found:
        print(f"docs/parity.md:{number}: {problem}")
    print(f"{len(text.splitlines())} lines, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
