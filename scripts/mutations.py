# SPDX-License-Identifier: Apache-2.0
"""Finds places for one-line faults in C++ text and rewrites it so that each is chosen at run time;
scripts/mutants builds and runs what this makes.

A place is a condition, what is returned, an initial value, or a whole statement. A fault duplicates it
and changes one thing in the copy: `if (a < b)` becomes `if ((TM_MUTANT(7) ? bool(a <= b) : bool(a < b)))`.
Lines keep their numbers. What is constant at compile time, comments and texts are left alone.
"""

import bisect
import hashlib
import re

TOKEN = re.compile(r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)")
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
  | (?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op><=>|->\*|<<=|>>=|\.\.\.|::|->|\+\+|--|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|<<|[^\s\w])
""", re.X | re.S | re.M)

OPEN, CLOSE = "([{", ")]}"
# What each operator becomes; only where clang-format put spaces around it, so that it is no template
# bracket, pointer, reference or sign.
OPERATORS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||",
             "||": "&&", "+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "+=": "-=", "-=": "+=",
             "|": "&", "|=": "&="}
OPERATOR_KINDS = {"<": "bound", "<=": "bound", ">": "bound", ">=": "bound", "==": "equal",
                  "!=": "equal", "&&": "logic", "||": "logic"}
ERRORS = ["EINVAL", "EIO", "ENOENT", "EEXIST", "EACCES", "ENOSPC", "EBUSY", "EROFS", "EISDIR"]
CODES = ["kInvalidArgument", "kDataLoss", "kNotFound", "kUnavailable"]
# Not a fault of what is computed: memory asked for early, what is said in passing.
NEVER = re.compile(r"\b(reserve|shrink_to_fit|Log\w*|LOG\w*|static_assert|assert|Prefetch\w*|madvise|"
                   r"co_await|co_return|co_yield|va_\w+|TM_MUTANT)\b")
NOT_EXPRESSIONS = {"return", "if", "else", "for", "while", "do", "switch", "case", "default", "break",
                   "continue", "goto", "using", "typedef", "template", "struct", "class", "enum",
                   "union", "namespace", "public", "private", "protected", "friend", "static",
                   "constexpr", "consteval", "extern", "throw", "try", "catch", "static_assert",
                   "delete", "operator", "asm"}
# How often each kind is taken, of all that are found.
WEIGHTS = {"bound": 18, "equal": 10, "logic": 10, "negated": 10, "unchecked": 14, "dropped": 16,
           "arithmetic": 9, "literal": 6, "error": 7, "minmax": 4, "boolean": 3, "forced": 3}


class Token:
    __slots__ = ("kind", "text", "begin", "end", "mate")

    def __init__(self, kind, text, begin):
        self.kind, self.text, self.begin, self.end = kind, text, begin, begin + len(text)
        self.mate = None


def tokens_of(text):
    """Tokens without comments, directives and space; brackets know their mates."""
    tokens, stack = [], []
    for match in TOKEN.finditer(text):
        if match.lastgroup in ("comment", "directive"):
            continue
        kind = "string" if match.group("raw") else match.lastgroup
        token = Token(kind, match.group(0), match.start())
        if kind == "op" and token.text in OPEN:
            stack.append(len(tokens))
        elif kind == "op" and token.text in CLOSE and stack:
            opened = stack.pop()
            token.mate = opened
            tokens[opened].mate = len(tokens)
        tokens.append(token)
    return tokens


class Mutant:
    """One fault: text[begin:end] is replaced. `shape` says how, `changed` is the faulty copy."""

    def __init__(self, path, kind, begin, end, shape, original, changed, note):
        self.path, self.kind, self.begin, self.end = path, kind, begin, end
        self.shape, self.original, self.changed, self.note = shape, original, changed, note
        self.number = self.line = self.last_line = 0
        self.text = self.key = ""

    def replacement(self):
        on = f"TM_MUTANT({self.number})"
        if self.shape == "condition":
            return f"({on} ? static_cast<bool>({self.changed}) : static_cast<bool>({self.original}))"
        if self.shape == "value":
            return f"({on} ? ({self.changed}) : ({self.original}))"
        return f"{{ if ({on}) {{ {self.changed} }} else {{ {self.original} }} }}"


class Finder:
    def __init__(self, path, text):
        self.path, self.text, self.tokens = path, text, tokens_of(text)
        self.found = []
        self.code = self.code_scopes()

    def code_scopes(self):
        """For each token whether its innermost brace is the body of a function or a block in one."""
        inside, stack, start = [], [False], 0
        for i, token in enumerate(self.tokens):
            if token.text == "}" and token.kind == "op" and len(stack) > 1:
                stack.pop()
            inside.append(stack[-1])
            if token.kind != "op":
                continue
            if token.text == "{":
                stack.append(self.opens_code(start, i, stack[-1]))
            if token.text in "{};":
                start = i + 1
        return inside

    def opens_code(self, start, brace, inside):
        head = self.tokens[start:brace]
        names = {t.text for t in head if t.kind == "name"}
        last = head[-1].text if head else ""
        if names & {"namespace", "enum"}:
            return False
        if last in (")", "else", "do", "try", "const", "override", "final", "noexcept", "mutable"):
            if last == "final" and names & {"class", "struct", "union"}:
                return False
            return True
        if names & {"class", "struct", "union"} and "(" not in [t.text for t in head]:
            return False
        if not head:  # A block of its own, or the body behind a member initialised by braces.
            return inside or (brace > 0 and self.tokens[brace - 1].text == "}")
        return "->" in [t.text for t in head] and ")" in [t.text for t in head] and \
            "=" not in [t.text for t in head[-3:]]

    def find(self):
        i, tokens = 0, self.tokens
        while i < len(tokens):
            token = tokens[i]
            if self.code[i]:
                following = tokens[i + 1].text if i + 1 < len(tokens) else ""
                if token.text in ("if", "while") and following == "(" and tokens[i + 1].mate:
                    self.condition(i + 2, tokens[i + 1].mate, token.text)
                elif token.text == "for" and following == "(" and tokens[i + 1].mate:
                    self.loop(i + 2, tokens[i + 1].mate)
                elif token.text == "return":
                    end = self.semicolon(i)
                    if end and end > i + 1:
                        self.value(i + 1, end)
                elif self.begins_statement(i):
                    self.statement(i)
            i += 1
        return self.found

    def semicolon(self, i):
        """Index of the `;` that ends what begins at i; None where a bracket closes before."""
        while i < len(self.tokens):
            token = self.tokens[i]
            if token.kind == "op":
                if token.text == ";":
                    return i
                if token.text in CLOSE:
                    return None
                if token.text in OPEN:
                    if token.mate is None:
                        return None
                    i = token.mate
            i += 1
        return None

    def begins_statement(self, i):
        if i == 0 or self.tokens[i].text in NOT_EXPRESSIONS:
            return False
        before = self.tokens[i - 1]
        if before.text in ("{", "}", ";", "else", "do") and before.kind in ("op", "name"):
            return True
        if before.text != ")" or before.mate is None:
            return False
        return self.tokens[before.mate - 1].text in ("if", "for", "while")

    def top(self, first, end):
        """Indices of the tokens in [first, end) that no bracket encloses."""
        i = first
        while i < end:
            yield i
            token = self.tokens[i]
            if token.kind == "op" and token.text in OPEN and token.mate:
                i = token.mate
            else:
                i += 1

    def slice(self, first, end):
        return self.text[self.tokens[first].begin:self.tokens[end - 1].end]

    def usable(self, first, end):
        if first >= end:
            return False
        text = self.slice(first, end)
        # Comments would swallow what is put behind them; bodies of lambdas are places themselves.
        return (text.count("\n") <= 5 and "//" not in text and ";" not in text.rstrip(";")
                and not NEVER.search(text))

    def add(self, kind, first, end, shape, changed, note):
        begin, stop = self.tokens[first].begin, self.tokens[end - 1].end
        self.found.append(Mutant(self.path, kind, begin, stop, shape, self.text[begin:stop], changed,
                                 note))

    def condition(self, first, end, keyword):
        for i in self.top(first, end):
            if self.tokens[i].text == ";":
                first = i + 1
        if not self.usable(first, end) or any(self.tokens[i].text == "=" for i in self.top(first, end)):
            return
        self.changes(first, end, "condition")
        text = self.slice(first, end)
        if keyword == "if":
            self.add("negated", first, end, "condition", f"!({text})", "negated")
            after = self.tokens[end + 1:end + 3]
            if any(t.text in ("return", "continue", "break") for t in after):
                self.add("unchecked", first, end, "condition", f"false && ({text})", "never")
            else:
                self.add("forced", first, end, "condition", f"true || ({text})", "always")

    def loop(self, first, end):
        parts = [i for i in self.top(first, end) if self.tokens[i].text == ";"]
        if len(parts) == 2 and self.usable(parts[0] + 1, parts[1]):
            self.changes(parts[0] + 1, parts[1], "condition")

    def value(self, first, end):
        if self.tokens[first].text != "{" and self.usable(first, end):
            self.changes(first, end, "value")

    def statement(self, first):
        end = self.semicolon(first)
        if not end or end == first or not self.usable(first, end + 1):
            return
        top = list(self.top(first, end))
        texts = [self.tokens[i].text for i in top]
        if texts[0].startswith("TENSORMOUNT_ASSIGN_OR_RETURN"):
            opened = first + 1
            commas = [i for i in self.top(opened + 1, self.tokens[opened].mate)
                      if self.tokens[i].text == ","]
            if len(commas) == 1:
                self.value(commas[0] + 1, self.tokens[opened].mate)
            return
        if re.fullmatch(r"[A-Z0-9_]+", texts[0]) and texts[0] != "TENSORMOUNT_RETURN_IF_ERROR":
            return
        if self.is_declaration(top):
            if "=" in texts and not set(texts) & {"constexpr", "static", "["}:
                self.value(top[texts.index("=")] + 1, end)
            return
        if texts[0] in ("{", "~", "[", "case"):
            return
        self.add("dropped", first, end + 1, "statement", "", "dropped")
        if texts[0] != "(":
            self.changes(first, end + 1, "statement")

    def is_declaration(self, top):
        """Two names beside each other, or a name behind a template or a pointer, before any `=`."""
        previous = None
        for i in top:
            token = self.tokens[i]
            if token.text in ("=", "(", "{", "+=", "-=", ";"):
                break
            if token.text in ("const", "auto"):
                return True
            if token.kind == "name" and previous is not None:
                if previous.kind == "name" or previous.text in (">", "&", "*", "&&"):
                    return True
            if token.text == "<" and previous is not None and previous.end == token.begin:
                return True
            previous = token
        # `Type name(arguments)` has two names; `name(arguments)` is a call.
        return False

    def spaced(self, token):
        return self.text[token.begin - 1:token.begin].isspace() and \
            self.text[token.end:token.end + 1].isspace()

    def changes(self, first, end, shape):
        begin = self.tokens[first].begin
        text = self.slice(first, end)
        has_text = any(t.kind == "string" for t in self.tokens[first:end])

        def put(kind, token, new):
            changed = text[:token.begin - begin] + new + text[token.end - begin:]
            self.add(kind, first, end, shape, changed, f"{token.text} -> {new}")

        for i in range(first, end):
            token = self.tokens[i]
            before = self.tokens[i - 1] if i else None
            if token.kind == "op" and token.text in OPERATORS and self.spaced(token):
                kind = OPERATOR_KINDS.get(token.text, "arithmetic")
                if kind == "arithmetic" and (has_text or before.text in ("auto", "const")):
                    continue
                put(kind, token, OPERATORS[token.text])
            elif token.text in ("++", "--") and shape == "statement" and not has_text:
                put("arithmetic", token, {"++": "--", "--": "++"}[token.text])
            elif token.kind == "number" and not has_text and re.fullmatch(r"\d{1,4}u?", token.text) \
                    and before.text not in ("<", "<<", ">>"):
                put("literal", token, {"0": "1", "1": "2"}.get(token.text) or
                    str(int(token.text.rstrip("u")) + 1))
            elif token.kind == "name" and token.text in ("min", "max") and before.text == "::":
                put("minmax", token, {"min": "max", "max": "min"}[token.text])
            elif token.kind == "name" and token.text in ("true", "false"):
                put("boolean", token, {"true": "false", "false": "true"}[token.text])
            elif token.kind == "name" and token.text in ERRORS:
                put("error", token, ERRORS[(ERRORS.index(token.text) + 1) % len(ERRORS)])
            elif token.kind == "name" and token.text in CODES and before.text == "::":
                put("error", token, CODES[(CODES.index(token.text) + 1) % len(CODES)])


def find(path, text):
    """All faults that the text of a file has a place for, with line numbers and lasting keys."""
    starts = [0] + [m.end() for m in re.finditer("\n", text)]
    lines = text.split("\n")
    found = Finder(path, text).find()
    seen = {}
    for mutant in found:
        mutant.line = bisect.bisect_right(starts, mutant.begin)
        mutant.last_line = bisect.bisect_right(starts, mutant.end - 1)
        mutant.text = lines[mutant.line - 1].strip()
        same = (mutant.text, mutant.kind, mutant.changed)
        seen[same] = seen.get(same, 0) + 1
        mark = hashlib.sha256("\0".join([path, *same, str(seen[same])]).encode()).hexdigest()
        mutant.key = mark[:12]
    return found


def rank(seed, mutant):
    return hashlib.sha256(f"{seed}:{mutant.key}".encode()).digest()


def choose(by_folder, lines, seed, count):
    """`count` faults of {folder: [Mutant]}, by the folders' numbers of lines; never two in one place.

    Sorted so that each beginning of the list is spread alike; numbered from 1.
    """
    total = sum(lines.values())
    ordered = []
    for folder, mutants in by_folder.items():
        kinds = {}
        for mutant in sorted(mutants, key=lambda m: rank(seed, m)):
            kinds.setdefault(mutant.kind, []).append(mutant)
        # The kinds take turns by weight, as long as they last.
        turns = []
        for kind, members in kinds.items():
            turns += [((n + 0.5) / WEIGHTS[kind], kind, m) for n, m in enumerate(members)]
        taken, n = {}, 0
        for _, _, mutant in sorted(turns, key=lambda turn: turn[:2]):
            spans = taken.setdefault(mutant.path, [])
            # Places may enclose each other only from outside a file's other faults.
            if any(mutant.begin < end and begin < mutant.end for begin, end in spans):
                continue
            spans.append((mutant.begin, mutant.end))
            ordered.append(((n + 0.5) * total / max(1, lines[folder]), folder, mutant))
            n += 1
    chosen = [mutant for _, _, mutant in sorted(ordered, key=lambda each: each[:2])][:count]
    for number, mutant in enumerate(chosen, 1):
        mutant.number = number
    return chosen


def rewrite(text, mutants, include):
    """The text with all these faults of it in it; its first line, a comment, gives way to an include."""
    for mutant in sorted(mutants, key=lambda m: m.begin, reverse=True):
        new = mutant.replacement()
        # As many lines as before: messages of the compiler are matched by line.
        new = new.replace("\n", " ") + "\n" * text[mutant.begin:mutant.end].count("\n")
        text = text[:mutant.begin] + new + text[mutant.end:]
    first, rest = text.split("\n", 1)
    if not first.startswith("//"):
        raise ValueError("a file begins with a line of comment")
    return f"{include}\n{rest}"
