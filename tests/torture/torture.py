#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Goes round the families of tests/torture until each has done what it shall, or the time is over.

usage: torture.py [--bin FOLDER] [--seed S] [--minutes M] [--family F]... [--jobs N] [--state FILE]
                  [--json] [--case F:INDEX | --plant]

A family is a module here with NAME, UNIT (what it counts), TARGET (how many), run(context, index),
which does case `index` and returns how many units it did, and plant(context), which says whether a
fault that was made on purpose was found. All of a case follows from the seed and its index.

As many families are run beside each other as there are cores (--jobs): each case of a family is over
before the next begins. It goes on where the state file stopped. Exit status 1: something was found, or
with --plant was not. What is short at the end of the time is said and is no failure."""

import argparse
import importlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import stores

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAMILIES = ("faults", "hosts", "crash", "corrupt", "beside", "ranks", "foreign", "steps", "python", "wire")
TURN_SECONDS = 20
BROKEN_AT_MOST = 5


class Missing(Exception):
    """What a family needs is not on this machine."""


class Context:
    """What a family is given. Findings are collected; nothing that is wrong ends the run."""

    def __init__(self, family, seed, bin_folder, work, findings):
        self.family = family
        self.seed = seed
        self.bin = pathlib.Path(bin_folder)
        self.work = pathlib.Path(work)
        self.findings = findings
        self.index = None
        self.broken = 0  # Cases that failed themselves.
        self.kept = {}  # What a family made once and uses in every case.
        self.work.mkdir(parents=True, exist_ok=True)

    @property
    def tool(self):
        return str(self.bin / "tensormount")

    def missing(self, text):
        raise Missing(text)

    def rng(self, index):
        return random.Random(f"{self.seed} {self.family} {index}")

    def run(self, command, timeout=60, env=None, **more):
        """A child with a deadline. One that passed it was killed and has the status "timeout"."""
        with subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, env={**os.environ, **(env or {})}, start_new_session=True,
                              **more) as child:
            try:
                out, error = child.communicate(timeout=timeout)
                status = child.returncode
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                out, error = child.communicate()
                status = "timeout"
        return subprocess.CompletedProcess(command, status, out, error.decode(errors="replace"))

    def finding(self, text, command):
        """What is like one that is known (its first line, without numbers and hashes) is counted with it."""
        command = command if isinstance(command, str) else " ".join(map(str, command))
        kind = re.sub(r"/\S*|[0-9a-f]{8,}|[0-9]+", "#", text.partition("\n")[0])[:160]
        for known in self.findings:
            if (known["family"], known["kind"]) == (self.family, kind):
                known["again"].append(self.index)
                return
        self.findings.append({"family": self.family, "index": self.index, "seed": self.seed, "kind": kind, "text": text,
                              "command": command, "again": []})
        if self.index == "planted":
            return
        print(f"FOUND by {self.family}:{self.index} of seed {self.seed}: {text}\n  {command}", flush=True)


def load_family(name):
    """The module, or None: another engineer's may not be there yet."""
    if not (HERE / f"{name}.py").exists():
        return None
    return importlib.import_module(name)


def one_case(module, context, index):
    """The units done. A case that breaks is a finding too: nothing may hide behind it."""
    context.index = index
    try:
        return module.run(context, index)
    except Missing:
        raise
    except Exception:  # pylint: disable=broad-except
        context.broken += 1
        if context.broken > BROKEN_AT_MOST:
            raise Missing("its cases fail") from None
        context.finding("the case itself failed: " + traceback.format_exc()[-1500:], f"--case {module.NAME}:{index}")
        return 0


def plant(modules, contexts):
    """The names of the families that did not find what was planted."""
    blind = []
    for name, module in modules.items():
        inner = Context(name, contexts[name].seed, contexts[name].bin, contexts[name].work, [])
        inner.index = "planted"
        begin = time.monotonic()
        try:
            found = module.plant(inner)
        except Missing as missing:
            print(f"{name}: not here: {missing}")
            continue
        except Exception:  # pylint: disable=broad-except
            traceback.print_exc()
            found = False
        first = inner.findings[0]["text"].partition("\n")[0][:150] if inner.findings else ""
        print(f"{name}: planted fault {'found' if found else 'NOT FOUND'}, {time.monotonic() - begin:.1f} s: {first}", flush=True)
        if not found:
            blind.append(name)
    return blind


class State:
    """What was done before, in a file that is replaced as a whole."""

    def __init__(self, path, seed):
        self.path = pathlib.Path(path)
        old = json.loads(self.path.read_text()) if self.path.exists() else {}
        if seed is not None and old.get("seed") != seed:
            old = {}
        self.seed = old.get("seed", seed if seed is not None else random.SystemRandom().randrange(1 << 32))
        self.families = old.get("families", {})
        self.findings = old.get("findings", [])

    def of(self, name):
        return self.families.setdefault(name, {"next": 0, "units": 0, "seconds": 0.0})

    def save(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"seed": self.seed, "families": self.families, "findings": self.findings}, indent=1))
        new.replace(self.path)


class Round:
    """Families in turn, some beside each other, until every one has its units or the time is over."""

    def __init__(self, modules, contexts, state, minutes, at_once):
        self.modules, self.contexts, self.state, self.at_once = modules, contexts, state, at_once
        self.end = time.monotonic() + minutes * 60
        self.missing = {}  # What is not on this machine, by family.
        self.waiting = list(modules)
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def run(self):
        threads = [threading.Thread(target=self.work) for _ in range(min(self.at_once, len(self.modules)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # Of SIGTERM too: no case goes on while what it stands on is removed.
            self.stop.set()
            for thread in threads:
                thread.join()
        return self.missing

    def is_over(self):
        return self.stop.is_set() or time.monotonic() >= self.end

    def share(self, name):
        """How much of it is done: they shall end together. What does cases and counts none comes last."""
        done = self.state.of(name)
        return done["units"] / self.modules[name].TARGET if done["units"] or not done["next"] else 1

    def work(self):
        while not self.is_over():
            with self.lock:
                if not self.waiting:
                    return  # Each of the families that are left has somebody.
                name = min(self.waiting, key=self.share)
                self.waiting.remove(name)
            if self.turn(name):
                with self.lock:
                    self.waiting.append(name)

    def turn(self, name):
        """Some cases of a family; whether there is more to do."""
        module, done = self.modules[name], self.state.of(name)
        begin = time.monotonic()
        try:
            while done["units"] < module.TARGET and not self.is_over() and time.monotonic() < begin + TURN_SECONDS:
                done["units"] += one_case(module, self.contexts[name], done["next"])
                done["next"] += 1
        except Missing as what:
            self.missing[name] = str(what)
        with self.lock:
            done["seconds"] += time.monotonic() - begin
            self.state.save()
            print(f"{name}: {done['units']} of {module.TARGET} {module.UNIT}, {done['next']} cases, "
                  f"{done['seconds']:.0f} s, {len(self.state.findings)} findings of all", flush=True)
        return done["units"] < module.TARGET and name not in self.missing


def scratch_base():
    """Memory where there is any: what is tried here are calls, not disks."""
    given = os.environ.get("TENSORMOUNT_TEST_TMPDIR")
    return given or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--state", default=str(ROOT / "build/torture-state.json"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", metavar="F:INDEX")
    parser.add_argument("--plant", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # What was made is removed, the state is kept.

    names = [options.case.partition(":")[0]] if options.case else options.family or FAMILIES
    modules = {name: module for name in names if (module := load_family(name)) is not None}
    for name in names:
        if name not in modules:
            print(f"{name}: there is no tests/torture/{name}.py")
    state = State(options.state, options.seed)
    findings = [] if options.case else state.findings
    print(f"seed {state.seed}", flush=True)
    begin = time.monotonic()
    # Others' eyes must get through where a family acts as another user.
    work = pathlib.Path(tempfile.mkdtemp(prefix="torture-", dir=scratch_base())).resolve()
    work.chmod(0o711)
    contexts = {name: Context(name, state.seed, options.bin, work / name, findings) for name in modules}
    try:
        if options.plant:
            return 1 if plant(modules, contexts) else 0
        if options.case:
            (name, module), = modules.items()
            index = options.case.partition(":")[2]
            print(f"{one_case(module, contexts[name], int(index) if index.isdigit() else index)} {module.UNIT}")
            return 1 if findings else 0
        missing = Round(modules, contexts, state, options.minutes, options.jobs).run()
    finally:
        for mount in list(stores.Mount.all):
            mount.close()
        for context in contexts.values():
            # What a finding says to look at stays.
            if not any(str(context.work) in finding["command"] for finding in findings):
                shutil.rmtree(context.work, ignore_errors=True)
        if not any(work.iterdir()):
            work.rmdir()

    counts = {name: {**state.of(name), "unit": module.UNIT, "target": module.TARGET} for name, module in modules.items()}
    for name, count in counts.items():
        if count["units"] < count["target"]:
            print(f"short: {name} did {count['units']} of {count['target']} {count['unit']}" +
                  (f": {missing[name]}" if name in missing else ""))
    if options.json:
        print(json.dumps({"seed": state.seed, "seconds": round(time.monotonic() - begin, 1), "families": counts,
                          "missing": missing, "findings": findings}))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.modules["torture"] = sys.modules[__name__]  # Families that import Missing get this one.
    sys.exit(main())
