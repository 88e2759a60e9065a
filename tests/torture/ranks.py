# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed or stopped before any of their file operations and messages in a save, and before
any message and the proof of a load: the tests of the collective layer, with another seed each time."""

import faults

NAME = "ranks"
UNIT = "kills and stops"
TARGET = 500

# Of save_killed_rank_test with TENSORMOUNT_TEST_SCALE=1; of load_killed_rank_test.
IN_A_SAVE = (5 + 2 + 3 + 2) + (9 + 4 + 5 + 5)
IN_A_LOAD = 2 * (2 * (2 + 4) + 2)


def tried(context, program, index, env=None):
    """A run of a test program, and what is wrong with it."""
    path = context.bin / "tests" / program
    if not path.exists():
        context.missing(f"{path} is not built")
    seed = context.rng(index).randrange(1 << 31)
    env = {"TENSORMOUNT_TEST_SEED": str(seed), "TENSORMOUNT_TEST_SCALE": "1", "TENSORMOUNT_TEST_TMPDIR": str(context.work), **(env or {})}
    done = context.run([path], timeout=180, env=env)
    if done.returncode != 0 or b"[  PASSED  ]" not in done.stdout:
        lines = [line for line in done.stdout.decode(errors="replace").splitlines() if not line.startswith("[ RUN")]
        text = "\n".join(lines)[:2500]
        context.finding(f"{program} exits {done.returncode}\n{text}{done.stderr[-500:]}", f"TENSORMOUNT_TEST_SEED={seed} {path}")


def run(context, index):
    tried(context, "save_killed_rank_test", index)
    tried(context, "load_killed_rank_test", index)
    return IN_A_SAVE + IN_A_LOAD


def plant(context):
    """One write of data in each process is dropped and called done: all ranks say committed, and the disk does not have it."""
    for n in (2, 3, 10, 11):
        env, _ = faults.fault(context, context.work, "write", n, "lie")
        del env["TORTURE_COUNTS"]  # Of each process its own n-th call.
        context.findings.clear()  # What is like a known one would be counted, and not told.
        tried(context, "save_killed_rank_test", n, env)
        if any(word in finding["text"] for finding in context.findings for word in ("damages.empty()", ": rank 0 sees ")):
            return True
    return False
