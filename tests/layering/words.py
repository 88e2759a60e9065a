#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the names of types to the glossary of docs/architecture.md ("Words").

usage: words.py ROOT        prints one line per violation, exits 1 where there is one

No type of the product has a retired word in its name, and each type that the glossary names exists.
"""

import os
import re
import subprocess
import sys

FOLDERS = ("base", "shard", "device", "index", "state", "collective", "gpu", "fs", "lib", "mount-tools", "include")
# Words that named a dozen things each: what is it a piece of, which place, how do two differ?
RETIRED = {"Piece", "Pieces", "Place", "Places", "Difference", "Differences", "Content", "Contents"}
TYPE = re.compile(r"^\s*(?:class|struct|enum class|enum|union)\s+(?:TENSORMOUNT_EXPORT\s+)?(?:\[\[\w+\]\]\s+)?(\w+)\b(?!.*\boperator\b)|^\s*using\s+(\w+)\s*=")
WORD = re.compile(r"[A-Z][a-z0-9]*")
TERM = re.compile(r"`(\w+)`")


def product(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", *FOLDERS], capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split() if path.endswith((".h", ".cc")) and os.path.exists(os.path.join(root, path))]


def types_in(text):
    """(line, name) of each type that is declared or named there."""
    for number, line in enumerate(text.splitlines(), 1):
        found = TYPE.match(line)
        if found:
            yield number, found[1] or found[2]


def retired(name):
    return sorted(RETIRED & set(WORD.findall(name)))


def glossary(text):
    """(line, type) that its table names in its second column."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            inside = line == "## Words"
        cells = line.split(" | ")
        if inside and len(cells) > 1:
            yield from ((number, name) for name in TERM.findall(cells[1]))


def violations(files, architecture):
    """`files`: path to text."""
    known = set()
    for path, text in sorted(files.items()):
        for number, name in types_in(text):
            known.add(name)
            for word in retired(name):
                yield f'{path}:{number}: {name}: "{word}" says too little: see "Words" in docs/architecture.md'
    terms = list(glossary(architecture))
    if not terms:
        yield 'docs/architecture.md: "Words" names no type'
    for number, name in terms:
        if name not in known:
            yield f"docs/architecture.md:{number}: there is no type {name}"


def self_test():
    """What the checks must find, and must not."""
    words = "## Words\n| inventory | `Inventory` | all |\n"
    bad = {"a.h": "struct MappedPiece {\n  using Place = int;\n};\nclass Inventory;\n", "b.h": "enum class Placement { kA };\n"}
    found = list(violations(bad, words))
    assert len(found) == 2 and "MappedPiece" in found[0] and "Place" in found[1], found
    assert len(list(violations({}, words))) == 1
    assert len(list(violations(bad, ""))) == 3


def main():
    self_test()
    root = sys.argv[1]
    files = {}
    for path in product(root):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            files[path] = file.read()
    with open(os.path.join(root, "docs", "architecture.md"), encoding="utf-8") as file:
        found = list(violations(files, file.read()))
    for line in found:
        print(line)
    print(f"{len(files)} files, {len(found)} violations")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
