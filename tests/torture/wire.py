# SPDX-License-Identifier: Apache-2.0
"""One bit of what a rank sends flips on the way, in a header or in what follows it (flip_wire.c): each rank
ends in time, with an error that is named or with the right bytes."""

import json
import os
import shutil
import subprocess
import time

import faults
import stores

NAME = "wire"
UNIT = "flips"
TARGET = 400

RANKS = 3
LIMIT = 75  # Seconds; a rank has ended by then, whatever it waits for (wire_ranks.TIMES).


def job(context, elements, environments):
    """What each rank printed, its exit status (or "timeout") and what it said besides."""
    folder = context.work / "job"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "meet").mkdir(parents=True)
    python, env = stores.package(context)
    ranks = [subprocess.Popen([python, stores.HERE / "wire_ranks.py", folder, str(rank), str(RANKS), str(elements)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, env={**os.environ, **env, **environments.get(rank, {})})
             for rank in range(RANKS)]
    end, found = time.monotonic() + LIMIT, []
    for rank in ranks:
        try:
            out, err = rank.communicate(timeout=max(0.1, end - time.monotonic()))
            status = rank.returncode
        except subprocess.TimeoutExpired:
            rank.kill()
            out, err = rank.communicate()
            status = "timeout"
        found.append(([json.loads(line) for line in out.splitlines()], status, err))
    return folder, found


def sizes(context):
    """Elements -> bytes that each rank sends where nothing flips."""
    if "sizes" not in context.kept:
        context.kept["sizes"] = {}
        for elements in (60, 6_000):
            counts = [context.work / f"sent-{rank}" for rank in range(RANKS)]
            _, found = job(context, elements, {rank: {"LD_PRELOAD": stores.preload(context, "flip_wire"), "TORTURE_WIRE_COUNT": str(counts[rank])}
                                               for rank in range(RANKS)})
            if any(status != 0 or len(lines) != 5 or any(line[1] != "ok" for line in lines) for lines, status, _ in found):
                raise RuntimeError(f"without a flip: {found}")
            context.kept["sizes"][elements] = [int(count.read_text()) for count in counts]
    return context.kept["sizes"]


def check(context, folder, found, wrong):
    verdicts = {}
    for rank, (lines, status, err) in enumerate(found):
        if status != 0:
            wrong(f"rank {rank} ended with {status}", err[-1500:])
        for call, verdict, said in lines:
            if verdict.startswith(("WRONG", "RAISED")) or verdict != "ok" and not said:
                wrong(f"{call}: {verdict}", f"rank {rank}: {said}")
            verdicts.setdefault(call, set()).add(verdict)
    for version in (1, 2):
        said = verdicts.get(f"save {version}", set())
        at = folder / "store" / str(version)
        if "ok" in said and not said <= {"ok", "UnknownOutcomeError"}:
            wrong("a save is good to some ranks and not to others", f"{said}")
        if "ok" in said and not at.exists():
            wrong("a save that was called good is not there")
        if said and "ok" not in said and "UnknownOutcomeError" not in said and at.exists():
            wrong("a save that was called failed is there", f"{said}")
        if at.exists() and (why := what_differs(context, at, version)):
            wrong("what was committed is not what was saved", why)


def what_differs(context, at, version):
    """By a process without others, in which nothing flips."""
    python, env = stores.package(context)
    text = ("import sys, numpy as np, tensormount as tm, wire_ranks as w\n"
            "at, version, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
            "c = tm.open(at)\n"
            "e = c['all'].shape[0]\n"
            "want = {f'only.{r}': np.full(e // 4 + 1, r + version, dtype=np.int16) for r in range(size)}\n"
            "want['all'] = np.arange(e) * 3 + version\n"
            "want['rows'] = np.arange(size * e, dtype=np.float32).reshape(size, e) + version\n"
            "assert sorted(c.keys()) == sorted(want), c.keys()\n"
            "assert all(np.array_equal(c[k][...], v) for k, v in want.items())\n"
            "assert c.common['step'] == version, c.common\n"
            "assert tm.verify(at)['whole']\n")
    done = context.run([python, "-c", text, at, version, RANKS], env=env)
    return done.stderr[-800:] if done.returncode != 0 else ""


def run(context, index):
    rng = context.rng(index)
    elements, sent = rng.choice(sorted(sizes(context).items()))
    rank, bit = rng.randrange(RANKS), rng.randrange(8)
    byte = rng.randrange(sent[rank])
    folder, found = job(context, elements, {rank: {"LD_PRELOAD": stores.preload(context, "flip_wire"), "TORTURE_WIRE_FLIP": f"{byte} {bit}"}})

    def wrong(text, more=""):
        context.finding(f"{text}\n  bit {bit} of byte {byte} of {sent[rank]} that rank {rank} sends, {elements} elements\n  {more}\n  "
                        f"{[lines for lines, _, _ in found]}", f"scripts/torture --seed {context.seed} --case wire:{index}")

    check(context, folder, found, wrong)
    return 1


def plant(context):
    """A write that is dropped and called done, under a save that is called good."""
    sizes(context)
    root = context.work / "job"
    for n in range(12):
        env, _ = faults.fault(context, root, "write", n, "lie")
        env.pop("TORTURE_COUNTS", None)
        folder, found = job(context, 6_000, {0: env})
        check(context, folder, found, lambda text, more="": context.finding(f"{text}\n  {more}", "planted"))
        if any("what was committed" in finding["text"] or "ended with" in finding["text"] for finding in context.findings):
            return True
    return False
