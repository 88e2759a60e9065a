#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints every message or comment of the product, one per line, so that all can be read at once.

usage: messages.py ROOT [--comments] [--part cpp|python] [--sample N] [--seed TEXT]

A message is a string literal with a space in it: errors, warnings, log lines, help texts. Literals that are
joined (adjacent, by +, or in one f-string) are one message; the code between them is shown in braces, and the
alternatives of a ?: in parentheses as {this | that}. What a function adds to the text that it gets is shown, too, if
the function is in the same file, in JOINED_CALLS or in CONTEXT_CALLS.
Texts that no user reads are not listed: see NO_MESSAGE. --sample prints N messages, chosen at random with the seed
TEXT (default: the commit).
"""

import argparse
import ast
import itertools
import os
import random
import re
import subprocess
import sys

CPP = ("base", "shard", "device", "index", "state", "collective", "gpu", "fs", "lib", "mount-tools")
PYTHON = ("python/tensormount",)
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      |(?P<raw>R"(?P<mark>[^(\s]{0,16})\((?P<body>.*?)\)(?P=mark)")
      |(?P<text>"(?:[^"\\\n]|\\.)*")
      |(?P<char>'(?:[^'\\\n]|\\.)+')
      |(?P<directive>^[ \t]*\#[^\n]*)
      |(?P<word>\w+(?:(?:::|\.|->)\w+)*)
      |(?P<sign>[^\s\w])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE)
# Functions that make one message of their arguments: the number of arguments before the text, and what follows it.
JOINED_CALLS = {"FromErrno": (1, "errno"), "HostError": (1, "errno"), "CudaStatus": (2, "CUDA error"), "FromMpi": (1, "MPI error"),
                "ByteReader": (1, "damage")}
# Functions that put the text before the message of another status.
CONTEXT_CALLS = {"WithContext"}
# Functions whose texts are no messages: a noun (the message has it in the singular or plural, with the number), a key.
NO_MESSAGE_CALLS = {"Counted", "Kept", "KeptByRanks"}
# (files, text): what no user reads as a sentence.
NO_MESSAGE = [(re.compile(files), re.compile(text, re.DOTALL)) for files, text in (
    # Parts of documents for programs: SVG, HTML, JSON, Prometheus.
    (r"fs/pictures/layout_svg\.cc|python/tensormount/_checkpoint\.py", r"^(?:\{[^{}]*\})*<|^ ?[\w-]+=\"|\}? [\w-]+=\"[\w#.-]+\""),
    (r"fs/.*\.cc|collective/layout/spec_dump\.cc", r"^(?:\{head \+ =\}|\{[^{}]*=\})?[\s,{]*\"\w+\": |\"ranks\": \""),
    (r"fs/metrics_text\.cc", r"^# HELP"),
    (r"shard/npy\.cc", r"'descr': "),
    # Names of modules, classes and attributes in pickles, separated by spaces; parts of an assembler file; paths.
    (r"index/archives/pickle_(?:classes|modules)\.cc", r"^\w+(?: \w+)+$"),
    (r"index/archives/torch_tensor\.cc", r"^\{constexpr std::string_view kOwn =\}"),
    (r"gpu/cuda_module\.cc", r"^\.pushsection"),
    (r".*", r"^(?:\{[^{}]*\})?/proc/|^(?:\{[^{}]*\})?(?:data|manifest|journal)/[^ ]*\.(?:bin|tm[mj]|safetensors)$"),
    # Beginnings of what is hashed, the producer of a checkpoint, options of mount(2).
    (r"fs/mount/mount_call\.cc", r"default_permissions|nosuid,nodev"),
    (r".*", r"^tensormount [a-z ]+ v\d+ ?(?:\{.*\})?$|=\}?tensormount \d+\.\d+\.\d+$|rootmode=\d"),
    # Texts that are searched for in files and in the output of libraries.
    (r"gpu/nccl_library\.cc", r"^Duplicate GPU$"),
    (r"fs/mount/callers\.cc", r"^S\w+: %llx$"),
    (r"index/foreign/file_begin\.cc", r"git-lfs\.github\.com"),
    (r"index/foreign/(?:megatron_zarr|olmo)\.cc", r"^(?:megatron|olmo)-core [\w.]+$"),
)]
SENTENCE = re.compile(r"[A-Za-z]{2}.* .*[A-Za-z]{2}|[A-Za-z]{3} |^ [a-z]{2}", re.DOTALL)
# What is the same as its argument in a message.
CONVERTED = re.compile(r"std::(?:to_string|string|string_view) \((\w+(?:(?:::|\.|->)\w+)*)\)")
# A function or lambda that may put its argument into a message.
HELPER = re.compile(
    r"(?:(?:Status|bool|void|std::string|std::optional<\w+>|Result<\w+>)\s+(?:\w+::)?(?P<function>\w+)"
    r"|auto (?P<lambda>\w+) = \[[^\]]*\])"
    r"\s*\((?P<parameters>[^()]*)\)(?:\s*const)?(?:\s*->\s*[\w:<>]+)?\s*\{")
ESCAPE = {"n": "\n", "t": "\t", "0": "\0", '"': '"', "\\": "\\", "'": "'"}


def unescaped(literal):
    return re.sub(r"\\(.)", lambda found: ESCAPE.get(found[1], found[1]), literal[1:-1])


def shown_parts(parts):
    """The text of an expression, given as (is a literal, text) parts, with the code between literals in braces."""
    out = []
    for literal, run in itertools.groupby(parts, lambda part: part[0]):
        texts = [text for _, text in run]
        between = " ".join(texts).strip("+ ")
        if literal:
            out += texts
        elif between:
            out.append("{" + CONVERTED.sub(r"\1", between) + "}")
    return "".join(out)


def joined(parts):
    """The message of an expression; None: it has no sentence."""
    words = " ".join(text for literal, text in parts if literal)
    sentence = SENTENCE.search(words)
    # "{number}{ byte | bytes}" alone is none.
    choices = re.fullmatch(r"\{([^{}]*)\}", words)
    if choices and not any(re.search(r"[A-Za-z]{2}.* .*[A-Za-z]{2}", choice) for choice in choices[1].split("|")):
        return None
    return shown_parts(parts) if sentence else None


class Bracket:
    """What cpp_messages() has read behind one open bracket."""

    def __init__(self, callee="", sign="", start=0):
        self.callee, self.sign, self.start, self.first = callee, sign, start, 0
        self.arguments, self.choices, self.choosing = [], [], False
        self.line, self.parts, self.compared = 0, [], False

    def end(self):
        """(line, parts) of the expression that ends here."""
        ended = (self.line, self.parts)
        self.line, self.parts, self.compared = 0, [], False
        return ended

    def whole_call(self):
        """The message of a call in JOINED_CALLS or CONTEXT_CALLS."""
        before, after = JOINED_CALLS.get(self.callee, (0, "reason"))
        texts = self.arguments[before:]
        parts = []
        for _, argument in texts:
            parts += [*([(True, " ")] if parts else []), *argument]
        return next((line for line, _ in texts if line), 0), [*parts, (True, ": "), (False, after)] if parts else []


def helpers(text):
    """Name to [(position, parameters, message)] of the functions of a source that make a message of an argument."""
    bodies = []
    for found in HELPER.finditer(text):
        depth, end = 1, found.end()
        while depth and end < min(len(text), found.end() + 900):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        names = [re.findall(r"\w+", part)[-1:] for part in found["parameters"].split(",")]
        if depth == 0:
            bodies.append((found["function"] or found["lambda"], found.start(), [name[0] if name else "" for name in names],
                           text[found.end():end - 1]))
    known = {}
    for _ in range(2):  # A helper may call a helper.
        out = {}
        for name, start, parameters, body in bodies:
            messages = [message for _, message in raw_messages(body, known, True)]
            message = next((one for one in messages if any("{" + each + "}" in one for each in parameters if each)
                            and re.search(r"[A-Za-z]{3}|: ", re.sub(r"\{[^{}]*\}", "", one))), None)
            out.setdefault(name, []).append((start, parameters, message))
        # Only names with a message; another function of the same name stays, to hide it where it is nearer.
        known = {name: found for name, found in out.items() if any(message for _, _, message in found)}
    return known


def cpp_messages(text):
    """(line, message) of C++ source."""
    return raw_messages(text, helpers(text))


def raw_messages(text, known, every=False):
    """(line, message) of C++ source. Calls of `known` helpers are shown with the helper's message. `every`: also what is
    no sentence, and messages of helpers without a text."""
    stack = [Bracket()]
    words = ["", ""]  # The word before this token, and the one before that.

    def found(ended):
        message = shown_parts(ended[1]) if every else joined(ended[1])
        return [(ended[0], message)] if message else []

    def of_helper(bracket):
        """The message of a call of a helper, if an argument is a text."""
        same = known[bracket.callee]
        before = [one for one in same if one[0] < bracket.start]
        _, parameters, message = before[-1] if before else same[0] if len(same) == 1 else (0, [], None)
        if message is None:
            return [one for argument in bracket.arguments for one in found(argument)]
        line = next((line for line, _ in bracket.arguments if line), 0)
        texts = dict(zip(parameters, (shown_parts(parts) for _, parts in bracket.arguments)))
        if not every and not any(literal for _, parts in bracket.arguments for literal, _ in parts):
            return []
        message = re.sub(r"\{(\w+)\}", lambda name: texts.get(name[1]) or name[0], message)
        return [(line, message)] if every or SENTENCE.search(re.sub(r"\{[^{}]*\}", "", message)) else []

    for token in TOKEN.finditer(text):
        kind = token.lastgroup if token.lastgroup not in ("mark", "body") else "raw"
        if kind in ("comment", "directive"):
            continue
        buffer = stack[-1]
        if kind in ("text", "raw"):
            if not buffer.compared and buffer.callee not in NO_MESSAGE_CALLS:
                buffer.line = buffer.line or text.count("\n", 0, token.start()) + 1
                buffer.parts.append((True, token["body"] if kind == "raw" else unescaped(token[0])))
        elif token[0] in "([{":
            # `Name(...)`, or `Name variable(...)`.
            names = [re.split(r"::|\.|->", word)[-1] for word in words]
            callee = names[0] if names[0] in JOINED_CALLS or names[1] not in JOINED_CALLS else names[1]
            stack.append(Bracket(callee if token[0] in "({" else "", token[0], token.start()))
        elif token[0] in ")]}":
            inner = stack.pop() if len(stack) > 1 else buffer
            outer = stack[-1]
            line, parts = inner.end()
            shown = (False, "(" + parts[0][1] + ")" if len(parts) == 1 and not parts[0][0] and not inner.arguments else "()")
            if inner.callee in ("string", "string_view") and any(literal for literal, _ in parts) and not inner.choosing:
                outer.line = outer.line or line
                outer.parts[-1:] = parts
                continue
            if token[0] == ")" and inner.callee in known:
                inner.arguments.append((line, parts))
                yield from of_helper(inner)
            elif inner.callee in JOINED_CALLS or inner.callee in CONTEXT_CALLS:
                inner.arguments.append((line, parts))
                yield from found(inner.whole_call())
            elif inner.choosing and not inner.callee and token[0] == ")":
                # A ?: in parentheses, which is a part of a longer message.
                choices = [*inner.choices, parts]
                if any(literal for choice in choices for literal, _ in choice):
                    outer.line = outer.line or line or inner.first
                    shown = (True, "{" + " | ".join(shown_parts(choice) for choice in choices) + "}")
            else:
                yield from found((line, parts))
            if token[0] == "}":
                yield from found(outer.end())
            else:
                outer.parts.append(shown)
        elif token[0] in ",;?:" or token[0] in ("return", "case"):
            ended = buffer.end()
            if token[0] == "," and (buffer.callee in JOINED_CALLS or buffer.callee in CONTEXT_CALLS or buffer.callee in known):
                buffer.arguments.append(ended)
            elif token[0] == ":" and buffer.choosing and not buffer.callee:
                buffer.first = buffer.first or ended[0]
                buffer.choices.append(ended[1])
            else:
                yield from found(ended)
            buffer.choosing = buffer.choosing or (token[0] == "?" and buffer.sign == "(")
        else:
            # What follows == or != is compared, and no message.
            signs = [part for literal, part in buffer.parts[-1:] if not literal]
            buffer.compared = buffer.compared or (token[0] == "=" and signs in (["="], ["!"]))
            if token[0] in "&|" and signs == [token[0]]:
                yield from found(buffer.end())
            else:
                buffer.parts.append((False, token[0]))
        words = [token[0] if kind == "word" and token[0] not in ("return", "case", "if", "co_return") else "", words[0]]


def python_messages(text):
    """(line, message) of Python source, without docstrings."""
    tree = ast.parse(text)
    documents = set()
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documents.add(first.value)
        elif isinstance(node, ast.JoinedStr):
            inside.update(node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [(True, part.value) if isinstance(part, ast.Constant) else (False, ast.unparse(part.value))
                     for part in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documents and node not in inside:
            parts = [(True, node.value)]
        else:
            continue
        message = joined(parts)
        if message is not None:
            yield node.lineno, message


def comments(text, mark):
    """(line, comment). Adjacent lines that begin with the mark are one comment; so is a comment after code."""
    block, begin = [], 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = re.match(rf"\s*{mark}(?!!) ?(.*)", line)
        if found and not found[1].startswith("SPDX"):
            begin = begin or number
            block.append(found[1])
            continue
        if block:
            yield begin, "\n".join(block)
            block, begin = [], 0
        behind = re.search(rf"[;,{{)]\s+{mark} (.*)", line)
        if behind and not found:
            yield number, behind[1] + "\n    " + line[:behind.start() + 1].strip()


def texts(path, text, of_comments):
    python = path.endswith(".py")
    if of_comments:
        return comments(text, "#" if python else "//")
    return python_messages(text) if python else cpp_messages(text)


def messages(root, part=None, of_comments=False):
    """(path, line, message or comment), sorted by path and line."""
    folders = {"cpp": CPP, "python": PYTHON, None: CPP + PYTHON}[part]
    folders += ("include",) if of_comments else ()
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", *folders], capture_output=True, text=True,
                            check=True).stdout.split()
    for path in sorted(set(listed)):
        full = os.path.join(root, path)
        if not os.path.exists(full) or not path.endswith((".h", ".cc", ".cu", ".cuh", ".py")):
            continue
        with open(full, encoding="utf-8") as file:
            text = file.read()
        for line, message in sorted(texts(path, text, of_comments)):
            if of_comments or not any(files.fullmatch(path) and of.search(message) for files, of in NO_MESSAGE):
                yield path, line, message


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--comments", action="store_true", help="comments, not messages")
    parser.add_argument("--part", choices=("cpp", "python"))
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", metavar="TEXT")
    args = parser.parse_args()
    found = list(messages(args.root, args.part, args.comments))
    if args.sample is not None:
        seed = args.seed or subprocess.run(["git", "-C", args.root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        found = sorted(random.Random(seed).sample(found, min(args.sample, len(found))))
    for path, line, message in found:
        print(f"{path}:{line}: " + message.replace("\n", "\\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
