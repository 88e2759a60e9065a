# SPDX-License-Identifier: Apache-2.0
"""Programs that use the Python package carelessly: from threads that close what others use, with signal
handlers that raise, Ctrl-C, forks, and ends of the interpreter in the middle; values and destinations at random."""

import os
import shutil
import signal
import subprocess
import time

import faults
import stores

NAME = "python"
UNIT = "lives"
TARGET = 300

WAYS = ("threads", "alarms", "interrupts", "forks", "ends")
LIMIT = 90


def live(context, seed, way, rng, env=None):
    """Exit status (or "timeout"), what it printed, and what it said besides."""
    shutil.rmtree(context.work / "life", ignore_errors=True)
    (context.work / "life").mkdir()
    python, package = stores.package(context)
    out_path, err_path = context.work / "out", context.work / "err"
    with open(out_path, "wb") as out, open(err_path, "wb") as err:
        child = subprocess.Popen([python, stores.HERE / "python_life.py", context.work / "life", str(seed), way], stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=err, start_new_session=True, env={**os.environ, **package, "PYTHONFAULTHANDLER": "1", **(env or {})})
    end, begin = time.monotonic() + LIMIT, None
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
        if way == "interrupts":
            # Before it lives Python ends itself by the signal, and well after as well.
            if begin is None and b"lives" in out_path.read_bytes():
                begin = time.monotonic()
            if begin is not None and time.monotonic() < begin + 1.5 and rng.random() < 0.1:
                child.send_signal(signal.SIGINT)
    status = child.returncode
    if status is None:
        status = "timeout"
    # Of children too.
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    return status, out_path.read_text(errors="replace"), err_path.read_text(errors="replace")


def check(context, seed, said, wrong):
    """What was acknowledged, by another process."""
    lines = [line.split() for line in said.splitlines()]
    removed = {line[1] for line in lines if line and line[0] == "removes"}
    listed = "".join(f"{line[1]} {line[2]}\n" for line in lines if line and line[0] == "saved" and line[1] not in removed)
    python, env = stores.package(context)
    done = subprocess.run([python, stores.HERE / "python_life.py", context.work / "life", str(seed), "check"], input=listed, text=True,
                          capture_output=True, timeout=120, check=False, env={**os.environ, **env})
    if done.returncode != 0 or done.stdout:
        wrong("what was acknowledged is not what was saved", done.stdout[:1500] + done.stderr[-800:])


def tried(context, index, env=None):
    rng = context.rng(index)
    way, seed = rng.choice(WAYS), f"{context.seed}-{index}"

    def wrong(text, more=""):
        context.finding(f"{way}: {text}\n  {more}", f"scripts/torture --seed {context.seed} --case python:{index}")

    status, out, err = live(context, seed, way, rng, env)
    if status != 0:
        wrong(f"it ended with {status}", err[-2500:])
    elif way != "ends" and "over" not in out:
        wrong("it ended before its end", err[-1500:])
    for line in out.splitlines():
        if line.startswith("WRONG"):
            wrong(line, err[-500:])
    # What a handler raises in a finalizer Python ignores, and says so.
    if "Fatal Python error" in err or "Exception ignored" in err and way not in ("alarms", "interrupts"):
        wrong("a fatal error or an exception that was ignored", err[-2500:])
    check(context, seed, out, wrong)


def run(context, index):
    tried(context, index)
    return 1


def plant(context):
    """Writes of data that are dropped and called done."""
    for n in range(3):
        env, _ = faults.fault(context, context.work / "life", "write", 5 + n, "lie", lasting=True)
        env.pop("TORTURE_COUNTS", None)
        tried(context, n, env)
        if context.findings:
            return True
    return False
