#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that files of one unit can be compiled in one batch (CMAKE_UNITY_BUILD): a name that is local to one .cc
file must not be declared in another, or in a header that one of them may include.

usage: unity_names.py ROOT     prints one line per violation, exits 1 where there is one

A unit is the directory with the nearest CMakeLists.txt, and the files elsewhere that it compiles. Local names are
those in anonymous namespaces and, in named namespaces, static and constant names, types and aliases. Functions of
one name clash even if their parameters differ, because a call could silently change its meaning. Aliases,
using-declarations and macros may be repeated literally.
"""

import collections
import os
import re
import sys

import layering

ALONE = ("examples/", "fuzz/")  # Programs of one source file each.
TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<directive>\#[^\n]*)
      | (?P<text>(?:u8|[uUL])?R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"
               | (?:u8|[uUL])?"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)+')
      | (?P<number>\.?\d(?:'?[\w.])*)
      | (?P<word>operator\s*(?:\(\s*\)|[^\w\s(]+) | [A-Za-z_]\w*)
      | (?P<sign>::|->|[<>=!]=|\S)""",
    re.DOTALL | re.VERBOSE)
WORD = re.compile(r"[A-Za-z_]\w*$")
DEFINE = re.compile(r"#\s*(define|undef)\s+(\w+)(.*)")
# A file of another directory in a CMakeLists.txt.
BORROWED = re.compile(r"(?:\.\./|\$\{PROJECT_SOURCE_DIR\}/)([\w./-]+\.cc)\b")
CLOSING = {"(": ")", "[": "]", "{": "}"}
CLASS_KEYS = ("class", "struct", "union", "enum")
# Words outside of a declarator that are followed by brackets.
WITH_BRACKETS = ("__attribute__", "alignas", "decltype", "noexcept", "template")
NOT_NAMES = CLASS_KEYS + ("auto", "bool", "char", "double", "int", "long", "unsigned", "void")
# Macros that declare a name, and that name.
MACROS = [(r"(MATCHER|ACTION)(_P\d*)?", "{0}"), (r"TEST(_F|_P)?", "{0}_{1}_Test"),
          (r"INSTANTIATE_TEST_SUITE_P", "gtest_{0}{1}_EvalGenerator_")]

# kind: function, variable, type, forward, alias, typedef, using, using namespace, macro. scope: the
# namespaces around it, "" if anonymous. own: local to its file. text: of declarations that may be repeated.
Declaration = collections.namedtuple("Declaration", "name kind scope own text")


def lex(text):
    """The tokens of C++ text, with strings as "", and its preprocessor lines."""
    found = [t for t in TOKEN.finditer(text.replace("\\\n", " ")) if t.lastgroup != "space"]
    tokens = ['""' if t.group("text") else t.group() for t in found if t.lastgroup != "directive"]
    return tokens, [t.group() for t in found if t.lastgroup == "directive"]


def after_group(tokens, at):
    """The position after the bracket that closes the one at `at`, which may be a <."""
    opening, closing, depth = tokens[at], CLOSING.get(tokens[at], ">"), 1
    at += 1
    while at < len(tokens) and depth > 0:
        depth += (tokens[at] == opening) - (tokens[at] == closing)
        at = after_group(tokens, at) if opening == "<" and tokens[at] in CLOSING else at + 1
    return at


def after_declaration(tokens, at):
    """The position after the ; or the function body that ends the declaration at `at`."""
    called = assigned = False
    while at < len(tokens) and tokens[at] != "}":
        token = tokens[at]
        if token == "template" and tokens[at + 1] == "<":
            at = after_group(tokens, at + 1)
        elif token in CLOSING:
            at = after_group(tokens, at)
            called = called or token == "("
            # A brace before , or { belongs to the initializers of a constructor.
            if token == "{" and called and not assigned and tokens[at:at + 1] not in ([","], ["{"]):
                return at
        elif token == ";":
            return at + 1
        else:
            assigned = assigned or token == "="
            at += 1
    return at


def outline(tokens):
    """A declaration without the contents of brackets, attributes and template arguments."""
    out, at = [], 0
    while at < len(tokens):
        token = tokens[at]
        if token in WITH_BRACKETS and tokens[at + 1] in ("(", "<"):
            at = after_group(tokens, at + 1)
        elif tokens[at:at + 2] == ["[", "["] or token == "<" and not {"=", "()", "{}"} & set(out):
            at = after_group(tokens, at)
        elif token in CLOSING:
            out.append(token + CLOSING[token])
            at = after_group(tokens, at)
        else:
            out.append(token)
            at += 1
    return out


def enumerators(tokens):
    """The names between the braces of an enum."""
    at = tokens.index("{")
    words = outline(tokens[at + 1:after_group(tokens, at) - 1])
    return [word for last, word in zip([","] + words, words) if last == "," and WORD.match(word)]


def read_type(tokens, words):
    """(name, kind) pairs of a class, struct, union or enum; None: it declares none of these."""
    cut = next((i for i, w in enumerate(words) if w in ("{}", ":", ";", "()", "=")), len(words) - 1)
    head, stop = words[:cut], words[cut]
    names = [w for w in head if WORD.match(w) and w not in CLASS_KEYS + ("final",)]
    export = len(names) > 1 and names[0].isupper()
    if stop in ("()", "=") or len(names) > 1 + export or "*" in head:
        return None
    kind = "type" if "{}" in words else "forward"
    found = [(names[-1], kind)] if names and "::" not in head else []
    if words[0] == "enum" and words[1] not in CLASS_KEYS and kind == "type":
        found += [(name, "variable") for name in enumerators(tokens)]
    return found


def read_declarator(words):
    """(name, kind) pairs of a function or variable."""
    cut = next((i for i, w in enumerate(words) if w in ("()", "{}", "[]", "=", ";")), len(words))
    name = words[cut - 1] if cut else ""
    if cut < 2 or name in NOT_NAMES or not re.match(r"[A-Za-z_]", name) or words[cut - 2] == "::":
        return []
    return [(name, "function" if words[cut:cut + 1] == ["()"] else "variable")]


def is_own(words, found):
    """Whether a function or variable in a named namespace is local to its file."""
    head = set(words[:words.index(found[0][0])] if found else [])
    constant = head & {"const", "constexpr"} and not head & {"inline", "extern"}
    return "static" in head or bool(constant and found[0][1] == "variable")


def read_declaration(tokens, scope):
    """The Declarations that the tokens of one declaration make."""
    words = outline(tokens)
    if (not words or words[0] in ("static_assert", "friend", "template") or
            words[:2] == ["extern", "template"] or tokens[:3] == ["template", "<", ">"]):
        return []
    text, own = "", "" in scope
    if words[0] in ("using", "namespace", "typedef"):
        names = [word for word in words if WORD.match(word)]
        text, own = " ".join(tokens).replace("using :: ", "using "), True
        if names[1] == "namespace":
            found = [("::".join(names[2:]), "using namespace")]
        elif names[1] == "enum":
            found = []
        elif "=" in words:
            found = [(names[1], "alias")]
        else:
            forward = words[1] in CLASS_KEYS and "{}" not in words
            found = [(names[-1], "forward" if forward else words[0])]
    elif len(words) > 1 and words[1] == "()":
        names = [name for call, name in MACROS if re.fullmatch(call, tokens[0])]
        found = [(name.format(*tokens[2:5:2]), "type") for name in names]
    else:
        found = read_type(tokens, words) if words[0] in CLASS_KEYS else None
        own = own or found is not None
        if found is None:
            found = read_declarator(words)
            own = own or is_own(words, found)
    return [Declaration(name, kind, scope, own, text) for name, kind in found]


def read_scope(tokens, at, scope, out):
    """Adds the declarations of one namespace to `out`; returns the position after its end."""
    while at < len(tokens):
        brace = at + 1
        while brace < len(tokens) and (tokens[brace] == "::" or WORD.match(tokens[brace])):
            brace += 1
        if tokens[at] == "}":
            return at + 1
        if tokens[at] == ";" or tokens[at:at + 2] == ["inline", "namespace"]:
            at += 1
        elif tokens[at] == "namespace" and tokens[brace] == "{":
            names = tuple(name for name in tokens[at + 1:brace] if name != "::") or ("",)
            at = read_scope(tokens, brace + 1, scope + names, out)
        elif tokens[at:at + 3] == ["extern", '""', "{"]:
            at = read_scope(tokens, at + 3, scope, out)
        else:
            begin, at = at, after_declaration(tokens, at)
            out += read_declaration(tokens[begin:at], scope)
    return at


def declarations(text):
    """The declarations of a file in namespaces, and its macros."""
    tokens, directives = lex(text)
    out, macros = [], {}
    read_scope(tokens, 0, (), out)
    for found in filter(None, map(DEFINE.match, directives)):
        macros[found.group(2)] = " ".join(found.group(3).split())
        if found.group(1) == "undef":
            del macros[found.group(2)]
    return out + [Declaration(name, "macro", (), True, text) for name, text in macros.items()]


def enclosing(declaration):
    """The named namespaces around a declaration, and its name. Declarations with equal ones can be confused."""
    return tuple(name for name in declaration.scope if name) + (declaration.name,)


def units(root, paths):
    """The sorted .cc files of each directory whose CMakeLists.txt compiles some."""
    folders = {os.path.dirname(p) for p in paths if os.path.basename(p) == "CMakeLists.txt"}
    found = collections.defaultdict(set)
    for path in paths:
        folder = os.path.dirname(path)
        while folder and folder not in folders:
            folder = os.path.dirname(folder)
        if path.endswith(".cc") and not path.startswith(ALONE):
            found[folder].add(path)
    for folder in folders:
        with open(os.path.join(root, folder, "CMakeLists.txt")) as file:
            borrowed = {os.path.normpath(name) for name in BORROWED.findall(file.read())}
        found[folder] |= {path for path in borrowed if path in paths}
    return [sorted(files) for files in found.values()]


def may_see(top, header):
    """Whether files of the directory `top` may include a header (layering.py)."""
    allowed = layering.MAY_INCLUDE.get(top, [])
    if header.startswith("include/tensormount/"):
        layer = layering.PUBLIC_HEADERS.get(header.removeprefix("include/tensormount/"))
        return top not in layering.LAYERS or layer in allowed
    return header.split("/")[0] in allowed and (top == header.split("/")[0] or
                                                not header.endswith("_internal.h"))


def clash(one, other):
    """Whether two declarations of one name in two files cannot be compiled in one batch."""
    same = one.text == other.text and one.kind == other.kind
    return (one.own or other.own) and not (one.text and same)


def defines(definition, header):
    """Whether a file's declaration may be the definition of a header's declaration with the same name."""
    kinds = {definition.kind, header.kind}
    return "" not in definition.scope and ("forward" in kinds or kinds == {"variable"})


def header_clash(path, declaration, headers):
    """A header that `path` may include and that declares a name with which `declaration` clashes; or None."""
    *scope, name = enclosing(declaration)
    for depth in range(len(scope), -1, -1) if declaration.own else []:
        for header, other in headers[(*scope[:depth], name)]:
            if (may_see(path.split("/")[0], header) and clash(declaration, other) and
                    not (depth == len(scope) and defines(declaration, other))):
                return header
    return None


def unit_violations(files, read, headers):
    """One line for each name of a unit that clashes."""
    seen = collections.defaultdict(list)
    for path, declaration in ((path, d) for path in files for d in read[path]):
        key = enclosing(declaration)
        others = [p for p, d in seen[key] if p != path and clash(declaration, d)]
        other = others[0] if others else header_clash(path, declaration, headers)
        if declaration.kind == "using namespace":
            yield f"{path}: {'::'.join(key)}: using namespace outside of a function"
        elif other:
            yield f"{path}: {'::'.join(key)}: also in {other}"
        seen[key].append((path, declaration))


def violations(root):
    """One line for each clash below root."""
    paths = layering.source_files(root)
    read, headers = {}, collections.defaultdict(list)
    for path in filter(re.compile(r".*\.(h|cc)$").match, paths):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            read[path] = declarations(file.read())
        for declaration in read[path] if path.endswith(".h") else []:
            headers[enclosing(declaration)].append((path, declaration))
    return sorted({line for files in units(root, paths)
                   for line in unit_violations(files, read, headers)})


def main():
    found = violations(sys.argv[1])
    for line in found:
        print(line)
    print(f"{len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
