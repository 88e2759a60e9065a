#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks names of types against the glossary of docs/architecture.md ("Words"), and messages and documents for
phrases that new users did not understand.

usage: words.py ROOT        prints one line per violation, exits 1 if there is one

No type of the product has a retired word in its name, and each type that the glossary names exists. No message
(messages.py) and no document has a retired phrase; messages say "directory", not "folder".
"""

import os
import re
import subprocess
import sys

import messages

FOLDERS = ("base", "shard", "device", "index", "state", "collective", "gpu", "fs", "lib", "mount-tools", "include")
# Words that each named a dozen different things.
RETIRED = {"Piece", "Pieces", "Place", "Places", "Difference", "Differences", "Content", "Contents"}
PHRASES = re.compile(r"\bof others\b(?! of)|\bas good as none\b|\b(?:is|are|was|were|be) said\b|\bhears? (?:`)?E[A-Z]"
                     r"|\bhow-manieth\b|\bbefell\b|\bnobody says\b|\b(?:removed|renamed) or not\b|\bis no success\b"
                     r"|\btakes leave\b")
IN_MESSAGES = re.compile(r"\bfolders?\b")
TYPE = re.compile(r"^\s*(?:class|struct|enum class|enum|union)\s+(?:TENSORMOUNT_EXPORT\s+)?(?:\[\[\w+\]\]\s+)?(\w+)\b(?!.*\boperator\b)|^\s*using\s+(\w+)\s*=")
WORD = re.compile(r"[A-Z][a-z0-9]*")
# A name after a type, before "(", ";", "=", "{" or ",": functions, members, constants, enumerators.
DECLARED = re.compile(r"^\s*(?:[\w:<>,*&\[\] ]+[\s*&])?(~?[A-Za-z_]\w+)\s*(?=[({;=,]|$)")
CAMEL_FRAGMENT = re.compile(r"^(?:Who|Whom|Whose|Why|Which|What|Where|Instead|About|Again|Beside|Told|Tell|Judge|Doubt)(?:[A-Z]\w*)?$"
                            r"|^Look(?:At|Here|Around|For|Who)?$|^LookAt[A-Z]|^(?:Gone|Over|Heard|Asked|Said|Became|Befell)$"
                            r"|^k?[A-Z]\w*(?:Here|There|Asked|Told|Said|Instead)$|[a-z]IfThere$")
SNAKE_FRAGMENT = re.compile(r"^_?(?:who|why_not|told|said|heard|befell|in_a_row|lies|header_lies|as_said|what_[a-z_]+)_?$|_(?:told|said|lies)_?$")
CPP_TEST = re.compile(r"^(?:TYPED_)?TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", re.MULTILINE)
TEST_FRAGMENT = re.compile(r"^(?:What|Who|Whom|Whose|Where|Which|Of|As)[A-Z]|(?:Said|Told|Hears|Here)$")
PYTHON_NAME = re.compile(r"^\s*(?:def|class)\s+(\w+)", re.MULTILINE)
PYTHON_TEST_FRAGMENT = re.compile(r"^test_(?:what|who|whom|whose|where|which|of|as)_|_(?:said|told|hears|here)$")
TERM = re.compile(r"`(\w+)`")


def sources(root):
    """Path to text, of the sources of the product and of the tests."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", *FOLDERS, "tests", "python"],
                            capture_output=True, text=True, check=True).stdout.split()
    files = {}
    for path in listed:
        if path.endswith((".h", ".cc", ".cu", ".py")) and os.path.exists(os.path.join(root, path)):
            with open(os.path.join(root, path), encoding="utf-8") as file:
                files[path] = file.read()
    return files


def types_in(text):
    """(line, name) of each type that the text declares."""
    for number, line in enumerate(text.splitlines(), 1):
        found = TYPE.match(line)
        if found:
            yield number, found[1] or found[2]


def retired(name):
    return sorted(RETIRED & set(WORD.findall(name)))


def glossary(text):
    """(line, type) for each type in the second column of the table of words."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            inside = line == "## Words"
        cells = line.split(" | ")
        if inside and len(cells) > 1:
            yield from ((number, name) for name in TERM.findall(cells[1]))


def phrases(path, line, text, in_message):
    found = PHRASES.search(text) or (in_message and IN_MESSAGES.search(re.sub(r"\{[^{}]*\}|\b\w+=", "", text)))
    if found:
        yield f'{path}:{line}: "{found[0]}" is hard to understand, or not the word of this project: see "Words" in docs/architecture.md'


def text_violations(root):
    for path, line, message in messages.messages(root):
        yield from phrases(path, line, message, True)
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "README.md", "docs/*.md"],
                            capture_output=True, text=True, check=True).stdout.split()
    for path in sorted(set(listed)):
        full = os.path.join(root, path)
        if os.path.exists(full):
            with open(full, encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    yield from phrases(path, number, text, False)


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


def is_fragment(name):
    camel = re.match(r"k?[A-Z]", name)
    return bool((CAMEL_FRAGMENT if camel else SNAKE_FRAGMENT).search(name))


def declared_in(text):
    """(line, name) of what a C++ file declares, as far as one line tells."""
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0].rstrip()
        found = DECLARED.match(code)
        if found and not re.match(r"^\s*(?:return|case|throw|else|goto|delete|new|using|#)\b", code):
            yield number, found[1]


def name_violations(files):
    """Names that are fragments of sentences. `files`: path to text, of the product and of tests."""
    for path, text in sorted(files.items()):
        in_tests = path.startswith("tests/")
        if path.endswith(".py"):
            for found in PYTHON_NAME.finditer(text):
                name = found[1]
                bad = PYTHON_TEST_FRAGMENT.search(name) if name.startswith("test_") else not in_tests and is_fragment(name)
                if bad:
                    yield f"{path}:{text.count(chr(10), 0, found.start(1)) + 1}: {name}: a fragment of a sentence says too little"
        elif in_tests:
            for found in CPP_TEST.finditer(text):
                if TEST_FRAGMENT.search(found[2]):
                    line = text.count("\n", 0, found.start()) + 1
                    yield f"{path}:{line}: {found[1]}.{found[2]}: a test is named by what broke when it fails"
        else:
            for line, name in declared_in(text):
                # Names of one function change where it changes anyway.
                local = name[:1].islower() and not name.endswith("_") and path.endswith(".cc")
                if is_fragment(name) and not local:
                    yield f"{path}:{line}: {name}: a fragment of a sentence says too little"


def self_test():
    """Texts that the checks must report, and texts that they must not."""
    words = "## Words\n| inventory | `Inventory` | all |\n"
    bad = {"a.h": "struct MappedPiece {\n  using Place = int;\n};\nclass Inventory;\n", "b.h": "enum class Placement { kA };\n"}
    found = list(violations(bad, words))
    assert len(found) == 2 and "MappedPiece" in found[0] and "Place" in found[1], found
    assert len(list(violations({}, words))) == 1
    assert len(list(violations(bad, ""))) == 3
    # messages.py finds the messages.
    source = 'Status(Code::kX, "read " + name + ": it failed" /* "not this one" */);  // "nor this one"\nint a = f("key");\n'
    assert list(messages.cpp_messages(source)) == [(1, "read {name}: it failed")], list(messages.cpp_messages(source))
    for source, message in (
            ('E(Code::kX, "read " + n + (late ? " late" : " now") + ": it failed");', "read {n}{ late |  now}: it failed"),
            ('FromErrno(errno, "open", path);', "open {path}: {errno}"),
            ('s.WithContext("load " + path);', "load {path}: {reason}"),
            ('Status Bad(const char* why) {\n  return Status(Code::kX, "the row: " + std::string(why));\n}\nBad("has no end");',
             "the row: has no end"),
            ('if (word == "not this one") return Status(Code::kX, "but this one");', "but this one"),
            ('Counted(n, "not this one");', None)):
        found = [text for _, text in messages.cpp_messages(source)]
        assert message in found if message else not found, (source, found)
    source = 'def f(name):\n    "Not this one."\n    raise E(f"read {name}: it failed")\n'
    assert list(messages.python_messages(source)) == [(3, "read {name}: it failed")]
    for text in ("a format of others", "who may not write hears `EACCES`", "as good as none", "what is said"):
        assert list(phrases("a.md", 1, text, False)), text
    assert list(phrases("a.cc", 1, "no such folder", True))
    assert not list(phrases("a.cc", 1, "{folder.path ()}: folder=X of the others", True))


def main():
    self_test()
    root = sys.argv[1]
    every = sources(root)
    files = {path: text for path, text in every.items() if path.split("/")[0] in FOLDERS and path.endswith((".h", ".cc"))}
    with open(os.path.join(root, "docs", "architecture.md"), encoding="utf-8") as file:
        found = [*violations(files, file.read()), *name_violations(every), *text_violations(root)]
    for line in found:
        print(line)
    print(f"{len(files)} files, {len(found)} violations")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
