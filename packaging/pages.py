#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates man pages and bash completion from the output of `tensormount --help`.

usage: pages.py TENSORMOUNT FOLDER

Writes FOLDER/man/tensormount.1.gz, FOLDER/man/tensormount-COMMAND.1.gz for each command, and
FOLDER/completion/tensormount.
"""

import dataclasses
import gzip
import pathlib
import re
import subprocess
import sys

SECTION = re.compile(r"^([A-Z][A-Za-z ]*):$")
ITEM = re.compile(r"^  (\S.*?)(?: {2,}(\S.*))?$")
MORE = re.compile(r"^ {8,}(\S.*)$")
# The words that an option takes, at the end of its text: "If the checkpoint exists: fail or replace".
ONE_OF = re.compile(r"(?:^|: )((?:[a-z0-9_-]+, )*[a-z0-9_-]+ or [a-z0-9_-]+)(?:\s\(required\))?$")
NOT_BUILT = "Not implemented yet"


@dataclasses.dataclass
class Help:
    what: str
    usage: str
    items: dict = dataclasses.field(default_factory=dict)  # Section -> [(name, text)]
    example: str = ""


def read_help(tool, *command):
    out = subprocess.run([tool, *command, "--help"], stdout=subprocess.PIPE, check=True, text=True, timeout=60).stdout
    before, usage = out.split("Usage: ", 1)
    usage, _, rest = usage.partition("\n")
    page = Help(" ".join(before.split()), usage.strip())
    section = None
    for line in rest.splitlines():
        match = SECTION.match(line)
        if match:
            section = match.group(1)
            page.items.setdefault(section, [])
        elif section == "Example":
            page.example += line + "\n"
        elif not line.strip():
            continue
        elif section is None:
            page.usage += " " + line.strip()
        elif MORE.match(line):
            name, text = page.items[section][-1]
            page.items[section][-1] = (name, f"{text} {line.strip()}".strip())
        else:
            name, text = ITEM.match(line).groups()
            page.items[section].append((name, text or ""))
    return page


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line.startswith((".", "'")) else line for line in text.split("\n"))


def option_roff(name):
    """An option in roff: names ("-q,--quiet") in bold, the type after them plain."""
    names, _, kind = name.partition(" ")
    return "\\fB" + roff(names.replace(",", ", ")) + "\\fR" + (" " + roff(kind) if kind else "")


def man_page(name, version, page, commands):
    upper = roff(name.upper())
    lines = [f'.TH "{upper}" 1 "" "{roff(version)}" "tensormount"', ".SH NAME", f"{roff(name)} \\- {roff(page.what)}",
             ".SH SYNOPSIS", f"\\fB{roff(page.usage)}\\fR"]
    for section, items in page.items.items():
        if section in (NOT_BUILT, "Example") or not items:
            continue
        lines.append(f".SH {'ARGUMENTS' if section == 'Positionals' else 'COMMANDS' if section == 'Subcommands' else section.upper()}")
        for item, text in items:
            if section == "Subcommands":
                item = f"\\fBtensormount\\-{roff(item)}\\fR(1)"
            else:
                item = option_roff(item)
            lines += [".TP", item, roff(text) or "\\&"]
    if page.example:
        lines += [".SH EXAMPLE", ".nf", roff(page.example.rstrip("\n")), ".fi"]
    lines += [".SH EXIT STATUS", ".TP", "0", "success", ".TP", "1", "the check failed: damage or a difference was found",
              ".TP", "2", "any other failure", ".TP", "130, 143, 129", "interrupted by Ctrl\\-C, SIGTERM or SIGHUP"]
    lines.append(".SH SEE ALSO")
    if commands:
        lines.append(roff("The directory share/doc/tensormount of this installation: cli.md, operations.md, mounting.md"))
    else:
        lines.append("\\fBtensormount\\fR(1)")
    return "\n".join(lines) + "\n"


def options_of(page):
    """Option -> the words that it takes; None: it takes no value; []: it takes any value."""
    options = {}
    for section, items in page.items.items():
        if section in ("Positionals", "Subcommands", NOT_BUILT):
            continue
        for item, text in items:
            names, _, kind = item.partition(" ")
            words = None
            if kind:
                one_of = ONE_OF.search(text)
                words = re.split(r", | or ", one_of.group(1)) if one_of else []
            for name in names.split(","):
                options[name] = words
    return options


COMPLETION = """\
# SPDX-License-Identifier: Apache-2.0
# bash completion of tensormount(1): commands, options, and the words that options take.
_tensormount() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command= before=- word
  # "--to=hf" are three words to bash.
  if [ "$current" = = ]; then
    current=
  elif [ "$previous" = = ] && [ "$COMP_CWORD" -ge 2 ]; then
    previous=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    # The value of an option that stands before the command.
    if [[ " {taking} " == *" $before "* ]]; then before=; continue; fi
    before=$word
    case $word in
      -*) ;;
      *) command=$word; break ;;
    esac
  done
  COMPREPLY=()
  case $command:$previous in
{values}
    *) ;;
  esac
  local words=
  case $command in
{commands}
    *) words='{all} {common}' ;;
  esac
  if [ -z "$command" ] || [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  fi
}}
# Where nothing is offered: files.
complete -o default -F _tensormount tensormount
"""


def completion(main, pages):
    common = options_of(main)
    values, commands = [], []
    for option, words in common.items():
        if words:
            values.append(f"    :{option}) COMPREPLY=($(compgen -W '{' '.join(words)}' -- \"$current\")); return ;;")
    for command, page in pages.items():
        options = {**common, **options_of(page)}
        del options["--version"]
        for option, words in options.items():
            if words:
                values.append(f"    {command}:{option}) COMPREPLY=($(compgen -W '{' '.join(words)}' -- \"$current\")); return ;;")
        commands.append(f"    {command}) words='{' '.join(options)}' ;;")
    return COMPLETION.format(values="\n".join(values), commands="\n".join(commands), all=" ".join(pages),
                             taking=" ".join(option for option, words in common.items() if words is not None),
                             common=" ".join(common))


def main():
    tool, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    version = subprocess.run([tool, "--version"], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    program = read_help(tool)
    pages = {name: read_help(tool, name) for name, _ in program.items["Subcommands"]}
    for name in ("man", "completion"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for old in (folder / "man").iterdir():
        old.unlink()  # The command may not exist any more.
    texts = {"tensormount": man_page("tensormount", version, program, pages)}
    for name, page in pages.items():
        texts[f"tensormount-{name}"] = man_page(f"tensormount-{name}", version, page, {})
    for name, text in texts.items():
        # mtime=0: the same input gives the same bytes.
        (folder / "man" / f"{name}.1.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    (folder / "completion" / "tensormount").write_text(completion(program, pages))


if __name__ == "__main__":
    main()
