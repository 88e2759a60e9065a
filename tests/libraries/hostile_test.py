# SPDX-License-Identifier: Apache-2.0
"""Files that lie, asked of torch and of us: the same bytes for every key, or a refusal by name.

usage: hostile_test.py [--cases N] [--seed S] [--first NUMBER] [--keep FOLDER] [--verbose]
       N cases (200) from a seed, the same every time; those that differ stay in FOLDER

A key that torch has and we lack needs an error or a warning that names it or what it stands in. Where
torch.load of a file gives other tensors with weights_only than without, we must refuse too."""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading

import libraries

libraries.need("torch")

import hostile_cases  # noqa: E402

TOOL = libraries.harness.TOOL
HERE = pathlib.Path(__file__).resolve().parent
REFUSALS = ("DATA_LOSS", "UNSUPPORTED", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED")
ASK_SECONDS = 120
AT_ONCE = 8


class Torch:
    """The process that asks torch, without a network where root may take it away."""

    def __init__(self, tmp):
        words = [sys.executable, "-B", "-W", "ignore", str(HERE / "ask_torch.py")]
        if os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0:
            words = ["unshare", "-n", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp)}
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp)
        self.answers = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def ask(self, paths):
        self.process.stdin.write("\t".join(map(str, paths)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        answer = self.answers.get(timeout=ASK_SECONDS)
        assert answer is not None, "the process that asks torch has ended"
        return answer["loads"]

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(*words):
    return subprocess.run([TOOL, *map(str, words)], capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False)


def refused(done):
    """Whether a run ended with a refusal by name; anything else but success is a fault of its own."""
    if done.returncode == 0:
        return False
    said = done.stderr.decode(errors="replace")
    if done.returncode == 2 and any(text in said for code in REFUSALS
                                    for text in (f"tensormount: {code}: ", f'{{"error":{{"code":"{code}"')):
        return True
    raise AssertionError(f"exit {done.returncode}: {said[-500:]}")


def ours(path):
    """None: refused. Else tensors by key (bytes None: reading is refused), and warnings."""
    listed = run("--json", "ls", path)
    if refused(listed):
        return None
    out = {}
    for line in map(json.loads, listed.stdout.decode().splitlines()):
        large = line["bytes"] > 1 << 26
        done = None if large else run("cat", path, line["key"])
        out[line["key"]] = (line["dtype"], line["shape"], None if large or refused(done) else done.stdout.hex())
    return out, listed.stderr.decode(errors="replace").splitlines()


def spelled(parts):
    quoted = (part.replace("\\", "\\\\").replace('"', '\\"') for part in parts)
    return "".join(f'["{part}"]' for part in quoted)


def loosely(name):
    """A spelled name without what tells numbers from texts."""
    return name.rstrip("'").replace('"', "")


def is_named(key, parts):
    if None in parts:
        return False
    return key == ".".join(parts) or loosely(key) == loosely(spelled(parts))


def is_excused(parts, warnings):
    """Whether a warning speaks of what is left out there."""
    for n in range(len(parts) + 1):
        if None in parts[:n]:
            break
        at = ".".join(parts[:n])
        for warning in warnings:
            text = warning.removeprefix("tensormount: warning: ")
            if text.startswith((f"tensor {at}: left out", f"common value {at}: left out")):
                return True
            if re.match(rf"item \d+ of {re.escape(at or 'the file')}(, .*,)? is left out: its ", text, re.S):
                return True
            if "tensors left out: " in text and "(the first: " in text:
                return True
    return False


def same_tensors(one, other):
    key = lambda tensor: json.dumps(tensor)
    return sorted(one, key=key) == sorted(other, key=key)


def compare(loads, mine, stem, anywhere):
    """What is wrong, a line each. `anywhere`: torch may fail over what nothing refers to."""
    if mine is None:
        return []
    shown, warnings = mine
    good = {name: load["tensors"] for name, load in loads.items() if "tensors" in load}
    if not good:
        # What is wrong with one tensor is the end of all for torch; we leave that out.
        if not shown or warnings or anywhere:
            return []
        return [f"torch refuses all of it ({' | '.join(load['error'] for load in loads.values())}), we show {sorted(shown)}"]
    faults = []
    theirs = good.get("False", next(iter(good.values())))
    theirs = [(parts or [stem], *rest) for parts, *rest in theirs]
    for load in good.values():
        if not same_tensors(load, good.get("False", load)):
            faults.append("torch reads other tensors with weights_only than without, and we read it")
    left = set(shown)
    for parts, dtype, shape, data in theirs:
        named = [key for key in shown if is_named(key, parts)]
        if not named and data is not None and not data.startswith("!") and not is_excused(parts, warnings):
            faults.append(f"{parts} is missing without a warning")
        for key in named:
            left.discard(key)
            got = shown[key]
            if got[2] is None:
                continue
            if data is not None and data.startswith("!"):
                faults.append(f"{key}: torch refuses to read it ({data}), we read {got[2][:64]}")
            elif data is not None and (dtype, shape, data) != (got[0], got[1], got[2]) and not any(
                    is_named(key, p) and (d, s, b) == got for p, d, s, b in theirs):
                faults.append(f"{key}: torch has {dtype} {shape} {data[:64]}, we {got[0]} {got[1]} {got[2][:64]}")
    for key in sorted(left):
        faults.append(f"torch has no {key}")
    return faults


def check(options, folder):
    """The number of cases that differ."""
    torch = Torch(folder)
    bad = 0
    ways, counts = collections.Counter(), collections.Counter()
    waiting, asked = collections.deque(), []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        def finish():
            nonlocal bad
            number, done, path, mine = waiting.popleft()
            loads = torch.answer()
            try:
                mine = mine.result()
                faults = compare(loads, mine, "c", "flipped" in done)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                faults = [f"we fail: {error}"]
            counts["refused" if mine is None else "with warnings" if mine and mine[1] else "read"] += 1
            counts["torch refuses"] += all("error" in load for load in loads.values())
            ways.update(done)
            if faults:
                bad += 1
                print(f"case {number} of seed {options.seed} ({', '.join(done)}):", *faults, sep="\n  ", flush=True)
                if options.keep:
                    kept = pathlib.Path(options.keep) / f"{options.seed}-{number}"
                    shutil.rmtree(kept, ignore_errors=True)
                    shutil.copytree(path.parent if path.is_file() else path, kept)
            elif options.verbose:
                print(number, done, loads, mine)
            shutil.rmtree(path.parent if path.is_file() else path)

        for number in range(options.first, options.first + options.cases):
            done, files = hostile_cases.case(options.seed, number)
            path = folder / f"case{number}"
            path.mkdir()
            for name, data in files.items():
                (path / name).write_bytes(data)
            if "c.pt" in files:
                path = path / "c.pt"
            waiting.append((number, done, path, pool.submit(ours, path)))
            asked.append(path)
            if len(asked) == AT_ONCE:
                torch.ask(asked)
                asked = []
            while len(waiting) > 4 * AT_ONCE:
                finish()
        if asked:
            torch.ask(asked)
        while waiting:
            finish()
    torch.close()
    print(f"{options.cases} cases of seed {options.seed}: {bad} differ; " +
          ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(", ".join(f"{n} {what}" for what, n in sorted(ways.items())))
    return bad


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=os.environ.get("TENSORMOUNT_TEST_TMPDIR") or None) as folder:
        bad = check(options, pathlib.Path(folder))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
