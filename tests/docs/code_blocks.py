#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes one C++ and one C source of all the C++ and C blocks in README.md and docs/, and of the
examples in the comments of the public headers ("// Example ...:" and indented lines), to be compiled.

A block stands in a file by itself, but for its #include lines, which go to the top. A comment on the
line before the fence says otherwise:

  <!-- compiled in: FRAME -->    statements in the frame of that name, below
  <!-- copied from: FILE -->     is found in that file word for word, and not compiled again

usage: code_blocks.py ROOT OUT.cc OUT.c
"""

import os
import re
import subprocess
import sys

FRAMES = {
    # One rank of a job: who it is, whom it talks to, what it holds.
    "rank": ("void Block{n}(int rank, tensormount::Communicator& comm, void* mine, const tensormount::StateDict& state) {{\n"
             "(void)rank, (void)comm, (void)mine, (void)state;\n{{\n", "\n}\n}\n"),
    # What the examples of the headers use and do not declare.
    "cpp example": ("tensormount::Status Block{n}(int rank, tensormount::Communicator& comm, tensormount::StateDict& state,\n"
                    "void* mine, const tensormount::Shard& shard_of_w, const tensormount::BufferView& m,\n"
                    "const tensormount::BufferView& v, const tensormount::CommonDict& args,\n"
                    "const tensormount::Checkpoint& checkpoint) {{\nusing namespace tensormount;\n"
                    "(void)rank, (void)comm, (void)state, (void)mine, (void)shard_of_w, (void)m, (void)v, (void)args,\n"
                    "(void)checkpoint;\n{{\n", "\n}\nreturn {};\n}\n"),
    "c example": ("#include <stdio.h>\nint Block{n}(void* bytes) {{\n(void)bytes;\n{{\n", "\n}\nreturn 0;\n}\n"),
}
COMMENT = re.compile(r"<!-- (compiled in|copied from): (\S+) -->$")
INCLUDE = re.compile(r"\s*#\s*include\b")


def blocks(text):
    """(line of the first line, language, what the comment says or None, lines)."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"```(\w*)", lines[at])
        if not fence:
            at += 1
            continue
        end = at + 1
        while end < len(lines) and not lines[end].startswith("```"):
            end += 1
        said = COMMENT.match(lines[at - 1]) if at > 0 else None
        yield at + 2, fence[1], said and said.groups(), lines[at + 1:end]
        at = end + 1


def examples(text):
    """As blocks(): the indented lines of a comment after one that begins with "Example"."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not re.match(r"// Example\b.*:$", line):
            continue
        begin = end = at + 2
        while end < len(lines) and lines[end].startswith("//   "):
            end += 1
        if lines[at + 1] != "//" or end == begin:
            sys.exit(f"line {at + 1}: an example without lines that are indented by three")
        yield begin + 1, None, None, [each[len("//   "):] for each in lines[begin:end]]


def main():
    root, out_cc, out_c = sys.argv[1:]
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "*.md", "include/*.h"],
                            capture_output=True, text=True, check=True).stdout.split()
    includes = {"cpp": ["#include <tensormount/tensormount.h>"], "c": ["#include <tensormount/c.h>"]}
    bodies = {"cpp": [], "c": []}
    count = 0
    for path in sorted(listed):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            text = file.read()
        header = path.endswith(".h")
        for line, language, said, lines in examples(text) if header else blocks(text):
            if header:
                language = "c" if path.endswith("/c.h") else "cpp"
                said = ("compiled in", language + " example")
            language = {"c++": "cpp", "cc": "cpp"}.get(language, language)
            if language not in bodies:
                continue
            count += 1
            how, what = said or (None, None)
            if how == "copied from":
                with open(os.path.join(root, what), encoding="utf-8") as file:
                    if "\n".join(lines) not in file.read():
                        sys.exit(f"{path}:{line}: not as it stands in {what}")
                continue
            if how and what not in FRAMES:
                sys.exit(f"{path}:{line}: there is no frame {what}")
            before, after = FRAMES[what] if how else ("", "\n")
            includes[language] += [each for each in lines if INCLUDE.match(each)]
            code = "\n".join("" if INCLUDE.match(each) else each for each in lines)
            bodies[language].append(f'{before.format(n=count)}#line {line} "{path}"\n{code}{after}')
    if count == 0:
        sys.exit("no blocks of code were found")
    for language, out in (("cpp", out_cc), ("c", out_c)):
        main_function = "int main() { return cpp_blocks > 0 ? 0 : 1; }\n" if language == "cpp" else ""
        text = "\n".join(dict.fromkeys(includes[language])) + "\n\n" + "\n".join(bodies[language])
        with open(out, "w", encoding="utf-8") as file:
            file.write(f"// Made by tests/docs/code_blocks.py of {count} blocks.\n{text}\nint {language}_blocks = {count};\n{main_function}")


if __name__ == "__main__":
    main()
