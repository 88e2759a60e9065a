# SPDX-License-Identifier: Apache-2.0
"""Foreign files that lie, read by torch and by us: tests/libraries/hostile_test.py with other seeds."""

import pathlib
import re

import stores

NAME = "foreign"
UNIT = "mutants"
TARGET = 2000

ROOT = pathlib.Path(__file__).resolve().parents[2]
AT_ONCE = 40


def tried(context, index):
    python = ROOT / ".cache/venv-libraries/bin/python3"
    if not python.exists():
        context.missing("no virtual environment with torch: scripts/setup --with libraries")
    command = [python, "-B", ROOT / "tests/libraries/hostile_test.py", "--cases", AT_ONCE, "--first", index * AT_ONCE, "--seed", context.seed]
    done = context.run(command, timeout=300, env={"TENSORMOUNT_BIN": str(context.bin), "TENSORMOUNT_TEST_TMPDIR": str(context.work)})
    said = done.stdout.decode(errors="replace")
    counted = re.search(r"^(\d+) cases of seed", said, re.MULTILINE)
    if done.returncode == 77:
        context.missing(f"torch: {said[-300:]}{done.stderr[-300:]}")
    if done.returncode != 0 or counted is None:
        context.finding(f"exit {done.returncode}\n{said[:3000]}{done.stderr[-1000:]}", command)
    return int(counted.group(1)) if counted else 0


def run(context, index):
    return tried(context, index)


def plant(context):
    """A `cat` whose last byte is another one."""
    script = 'if [ "$1" = cat ]; then "$REAL" "$@" > "$0.$$" || exit; head -c -1 "$0.$$"; printf "\\377"; rm "$0.$$"; exit 0; fi\nexec "$REAL" "$@"'
    context.bin = stores.fake_tool(context, script)
    tried(context, 0)
    return bool(context.findings)
