#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks README.md and docs/: no line of prose is over 120 columns (tables and code may be), and every link to
a file or a heading leads somewhere. So does every reference in a source file: docs/NAME.md, "Heading". The table of
docs/errors.md has one row for each error code, with the facts of the sources.

usage: prose_test.py ROOT
"""

import os
import re
import signal
import subprocess
import sys
import unittest

MAX_COLUMNS = 120
# Tests with references that lead nowhere.
WRONG_ON_PURPOSE = ("tests/docs/prose_test.py", "tests/layering/layering_selftest.py")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# In a comment, which may go on in the next line.
BREAK = r"(?:[ \t]*\n[ \t]*(?://|#|\*)?)?[ \t]*"
REFERENCE = re.compile(rf'\b(docs/[\w-]+\.md)(?:,?{BREAK}"((?:[^"\\\n]|\n[ \t]*(?://|#)){{1,80}}?)")?')


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


def references(text, read):
    """Problems of what a source file says of documents."""
    for found in REFERENCE.finditer(text):
        number = text.count("\n", 0, found.start()) + 1
        other = read(found[1])
        if other is None:
            yield number, f"there is no {found[1]}"
        elif found[2] is not None:
            heading = re.sub(r"\s*\n[ \t]*(?://|#)?[ \t]*", " ", found[2])
            titles = {line.lstrip("#").strip() for _, line in prose(other) if line.startswith("#")}
            if heading not in titles:
                yield number, f'{found[1]} has no heading "{heading}"'


def error_codes(source):
    """What the sources say of each code: {name: (exit statuses, Python classes, errno)}. `source(path)`: its text."""
    status = source("include/tensormount/status.h")
    names = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
             for name in re.findall(r"^  k(\w+)", status[status.index("enum class Code {"):].split("};")[0], re.M)]
    errnos = dict(re.findall(r'^    \{"(\w+)", (\w+)\},', source("base/status.cc"), re.M))
    numbers = dict(re.findall(r"^  TM_(\w+) = (\d+)", source("include/tensormount/c.h"), re.M))
    for number, name in enumerate(names):
        if numbers.get(name) != str(number):
            raise ValueError(f"TM_{name} is {numbers.get(name)} in c.h, and {number} in status.h")
    done, check, failed = (int(re.search(rf"\b{name} = (\d+);", source("mount-tools/terminal.h"))[1])
                           for name in ("kDone", "kCheckFailed", "kFailed"))
    exits = {name: {failed} for name in names}
    exits["OK"] = {done}
    special = {found.upper(): numbers for path, pattern, numbers in (
        ("mount-tools/verify.cc", r"== Code::k(\w+) \? kCheckFailed", {check}),
        ("mount-tools/interrupt.cc", r"== Code::k(\w+) \? 128 \+", {
            128 + getattr(signal, name) for name in re.search(
                r"kSignals\[\] = \{(.*?)\}", source("mount-tools/interrupt.h"))[1].split(", ")}),
    ) for found in re.findall(pattern, source(path))}
    for name in names:
        exits[name] |= special.get(name.replace("_", ""), set())
    classes, codes = {name: [] for name in names}, {}
    errors = source("python/tensormount/errors.py")
    for found in re.finditer(r"^class (\w+)\((\w+).*?(?=^\S)", errors, re.M | re.S):
        own = re.search(r'^    code = "(\w+)"', found[0], re.M)
        codes[found[1]] = own[1] if own else codes.get(found[2])
        if codes[found[1]]:  # Not of Error itself.
            classes[codes[found[1]]].append(found[1])
    by_number = re.findall(r"^    (\w+),", errors[errors.index("\nCLASSES"):].split(")")[0], re.M)
    for name, kind in list(zip(names, by_number))[1:]:
        if codes.get(kind) != name:
            raise ValueError(f"CLASSES of errors.py has {kind} for {name}")
    return {name: (exits[name], set(classes[name]), errnos[name]) for name in names}


def error_table(text, codes):
    """Problems of docs/errors.md, whose rows are code, meaning, exit statuses, classes, errno, retry."""
    seen = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = cells[0].strip("`")
        if not re.match(r"\| `[A-Z_]+` \|", line) or len(cells) != 6:
            continue
        seen.append(name)
        if name not in codes:
            yield number, f"there is no code {name}"
            continue
        exits, classes, err = codes[name]
        for what, written, real in (
                ("exit statuses", {int(one) for one in re.findall(r"\d+", cells[2])}, exits),
                ("classes", set(re.findall(r"`(\w+)`", cells[3])), classes),
                ("errno", cells[4].strip("`"), err)):
            if written != real:
                yield number, f"{name}: {what} {written}, in the sources {real}"
    for name in codes:
        if seen.count(name) != 1:
            yield 1, f"{name} has {seen.count(name)} rows instead of one"


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

    def test_references_in_sources(self):
        files = {"docs/b.md": "## The store as arbiter\n"}
        text = '// See docs/b.md, "The store\n// as arbiter", and docs/b.md,\n// "The store as arbiter".\n'
        self.assertEqual(list(references(text, files.get)), [])
        wrong = 'docs/c.md\n# docs/b.md, "The store"\n'
        self.assertEqual([number for number, _ in references(wrong, files.get)], [1, 2])

    def test_error_codes(self):
        codes = {"OK": ({0}, set(), "0"), "DATA_LOSS": ({1, 2}, {"DataLossError"}, "EIO")}
        rows = ["| `OK` | success | 0 | no exception | 0 | |",
                "| `DATA_LOSS` | bytes are missing | 2; `verify`: 1 | `DataLossError` | `EIO` | no |"]
        self.assertEqual(list(error_table("\n".join(rows), codes)), [])
        self.assertEqual([what for _, what in error_table(rows[0], codes)], ["DATA_LOSS has 0 rows instead of one"])
        for old, new in ((rows[0], rows[0] + "\n" + rows[0]), ("2;", "3;"), ("DataLossError", "Error"),
                         ("EIO", "EINTR"), ("`OK`", "`FINE`")):
            self.assertNotEqual(list(error_table("\n".join(rows).replace(old, new), codes)), [], new)


def main():
    root = sys.argv.pop(1)
    every = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"],
                           capture_output=True, text=True, check=True).stdout.split("\n")
    listed = [path for path in every if path.endswith(".md")]

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
    for path in every:
        if path.endswith((".h", ".cc", ".cu", ".cuh", ".c", ".py", ".txt", ".cmake")) and path not in WRONG_ON_PURPOSE:
            full = os.path.join(root, path)
            if os.path.isfile(full):
                with open(full, encoding="utf-8", errors="replace") as file:
                    for number, what in references(file.read(), read):
                        print(f"{path}:{number}: {what}")
                        bad += 1
    def source(path):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            return file.read()

    codes = error_codes(source)
    for number, what in error_table(read("docs/errors.md") or "", codes):
        print(f"docs/errors.md:{number}: {what}")
        bad += 1
    print(f"{len(listed)} documents, {len(codes)} error codes, {bad} problems")
    ended = unittest.main(exit=False).result.wasSuccessful()
    return 0 if ended and listed and bad == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
