#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the form of README.md and docs/: no line of prose over 120 columns (tables and code may), every
link to a file or heading leads somewhere.

usage: prose_test.py ROOT
"""

import os
import re
import subprocess
import sys
import unittest

MAX_COLUMNS = 120
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(text):
    """(number, line) of what is neither code nor a table."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.lstrip().startswith("|"):
            yield number, line


def outside_code(text):
    """(number, line) of what is not code, tables included."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, re.sub(r"`[^`]*`", "", line)


def anchors(text):
    """What headings can be reached as, by the rule of the common forges."""
    found = set()
    for _, line in prose(text):
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(words.replace(" ", "-"))
    return found


def problems(path, text, read):
    """`read(path)`: the text of another file below the root, "" of a folder or what is no text, or None."""
    for number, line in prose(text):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"
    for number, line in outside_code(text):
        for target in LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            other = read(os.path.normpath(os.path.join(os.path.dirname(path), file))) if file else text
            if other is None:
                yield number, f"there is no {file}"
            elif anchor and anchor not in anchors(other):
                yield number, f"no heading is reached by #{anchor}" + (f" in {file}" if file else "")


class SelfTest(unittest.TestCase):
    """That what is wrong is found."""

    def found(self, text, files=()):
        return [what for _, what in problems("docs/a.md", text, dict(files).get)]

    def test_long_lines(self):
        long = "word " * 30
        self.assertEqual(len(self.found(long)), 1)
        self.assertEqual(self.found(f"| {long} |\n```\n{long}\n```\n"), [])

    def test_links(self):
        files = {"docs/b.md": "# The `B`, of it\n"}
        self.assertEqual(self.found("[b](b.md#the-b-of-it) [web](https://x.y) `[no](link)`", files), [])
        self.assertEqual(len(self.found("[b](c.md) [b](b.md#else) [b](#here)", files)), 3)


def main():
    root = sys.argv.pop(1)
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "*.md"],
                            capture_output=True, text=True, check=True).stdout.split()

    def read(path):
        full = os.path.join(root, path)
        if not path.endswith(".md"):
            return "" if os.path.exists(full) else None
        if not os.path.exists(full):
            return None
        with open(full, encoding="utf-8") as file:
            return file.read()

    bad = 0
    for path in sorted(listed):
        for number, what in problems(path, read(path) or "", read):
            print(f"{path}:{number}: {what}")
            bad += 1
    print(f"{len(listed)} documents, {bad} problems")
    ended = unittest.main(exit=False).result.wasSuccessful()
    return 0 if ended and listed and bad == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
