# SPDX-License-Identifier: Apache-2.0
"""A short life of a program that uses the Python package carelessly; started by python.py.

usage: python_life.py FOLDER SEED WAY      lives, and prints "saved NAME NUMBER" of each save that is acknowledged
       python_life.py FOLDER SEED check    reads such lines, and compares each checkpoint with what was saved

What it should not see it prints as a line "WRONG ..." and goes on. All values follow from SEED and NUMBER."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback

import numpy as np
import numpy.random  # At once: a signal within the import is not ours.

import tensormount as tm

FOLDER, SEED, WAY = sys.argv[1:]
STORE = os.path.join(FOLDER, "S")
SECONDS = 2.0
# What a program meets that closes, removes and forks while it works.
EXPECTED = (tm.Error,)
DTYPES = ["f4", "f2", "f8", "i1", "u2", "i8", "?", "c8"]


class Ring(Exception):
    """Of a signal."""


def say(text):
    os.write(1, (text.replace("\n", " | ") + "\n").encode(errors="backslashreplace"))


# ---- Values --------------------------------------------------------------------------------------


def array(rng):
    """Of any shape and dtype, laid out in any way."""
    shape = [rng.choice((0, 1, 2, 3, 7)) for _ in range(rng.randrange(4))]
    if rng.random() < 0.1:
        shape = [rng.randrange(30_000, 90_000), 3]
    dtype = np.dtype(rng.choice(DTYPES))
    made = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    way = rng.random()
    if way < 0.2 and made.ndim > 1:
        return np.asfortranarray(made)
    if way < 0.4 and made.ndim > 0 and made.size < 1000:
        return np.repeat(made, 2, axis=0)[::2]
    if way < 0.5:
        made.setflags(write=False)
    return made


def plain(rng):
    return rng.choice([
        None, True, 0, -1, (1 << 62), -(1 << 63), 0.1, float("inf"), float("nan"), -0.0, "", "größe", "\0", b"", b"\0\xff", "x" * 3000,
        [], (), {}, [1, [2, [3]]], (1, (2.5, None)), {"deep": {"er": (1,)}}, {3: "three", -1: [0]}])


def odd(rng):
    """What a save may refuse, or must give back as it is."""
    return rng.choice([
        1 << 80, {1, 2}, object(), complex(1, 2), "\ud800", {(1, 2): 3}, {None: 1}, {1: "a", "1": "b"}, np.float32(0.1), np.int64(7),
        np.datetime64("2026-11-28"), np.array(["text"]), np.array([None, 1], dtype=object), np.array("2026", dtype="M8[Y]"), range(3),
        bytearray(b"xyz"), memoryview(b"xyz"), float, lambda: 0, {"a.b": 1, "a": {"b": 2}}, {"": 1}, {"/": 1, "..": 2}, [[[[[[[[1]]]]]]]]])


def state_of(number):
    """The state that is saved as NUMBER, and whether it holds something odd."""
    rng = random.Random(f"{SEED} {number}")
    arrays = []

    def value(depth):
        kind = rng.random()
        if depth < 3 and kind < 0.35:
            many = [value(depth + 1) for _ in range(rng.randrange(4))]
            if rng.random() < 0.5:
                return dict(zip((f"k{i}" if rng.random() < 0.8 else i for i in range(len(many))), many))
            return many if rng.random() < 0.7 else tuple(many)
        if kind < 0.75:
            if arrays and rng.random() < 0.2:
                return rng.choice(arrays)
            arrays.append(array(rng))
            return arrays[-1]
        return plain(rng)

    state = {"w": array(rng), "model": value(0), "more": [value(1)], "number": number}
    is_odd = rng.random() < 0.15
    if is_odd:
        state["odd"] = odd(rng)
    return state, is_odd


def difference(a, b, at=""):
    """Where what was read is not what was saved; None."""
    if isinstance(a, np.ndarray) and not (a.dtype == object or a.dtype.kind in "USM"):
        same = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return None if same else f"{at}: {a!r:.100} and {b!r:.100}"
    if type(a) is not type(b):
        return f"{at}: {a!r:.100} and {b!r:.100}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{at}: keys {list(a)!r:.100} and {list(b)!r:.100}"
        return next(filter(None, (difference(a[key], b[key], f"{at}[{key!r}]") for key in a)), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)}"
        return next(filter(None, (difference(x, y, f"{at}[{i}]") for i, (x, y) in enumerate(zip(a, b)))), None)
    if isinstance(a, float):
        return None if repr(a) == repr(b) else f"{at}: {a!r} and {b!r}"
    return None if a is b or a == b else f"{at}: {a!r:.100} and {b!r:.100}"


# ---- What it does --------------------------------------------------------------------------------


class Life:
    """The deeds of one thread. `shared`: what all threads use and some close."""

    def __init__(self, number, shared):
        self.rng = random.Random(f"{SEED} life {number}")
        self.number, self.shared, self.count = number, shared, 0
        self.jobs, self.saved = [], []

    def deed(self):
        try:
            self.rng.choice((self.save, self.save, self.save_behind, self.save_behind, self.wait, self.load, self.load, self.read, self.read,
                             self.look_after, self.close_something))()
        except EXPECTED:
            pass

    def next_state(self):
        self.count += 1
        number = self.number * 1_000_000 + self.count
        return number, f"n{number}", *state_of(number)

    def group(self):
        return self.rng.choice((None, self.shared["group"]))

    def acknowledged(self, name, number):
        say(f"saved {name} {number}")
        self.saved.append((name, number))

    def save(self):
        number, name, state, is_odd = self.next_state()
        try:
            tm.save(state, f"{STORE}/{name}", self.group())
        except (TypeError, ValueError) as error:
            if not is_odd:
                raise
            if not str(error):
                say(f"WRONG no word of why {state['odd']!r:.80} is refused")
            return
        self.acknowledged(name, number)

    def save_behind(self):
        number, name, state, is_odd = self.next_state()
        how = self.rng.random()
        saver = self.shared["saver"]
        try:
            job = saver.save(state, f"{STORE}/{name}") if how < 0.3 else tm.async_save(state, f"{STORE}/{name}", self.group())
        except (TypeError, ValueError):
            if not is_odd:
                raise
            return
        # They may be changed now. What is read-only was theirs, and ties would be filled twice.
        for leaf in (state["w"],):
            if leaf.flags.writeable:
                leaf[...] = 1
        if how < 0.4:
            job.cancel()
        if how < 0.6:
            self.jobs.append((job, name, number))
        elif how < 0.8:
            job.wait(60)
            self.acknowledged(name, number)

    def wait(self):
        if self.jobs:
            job, name, number = self.jobs.pop()
            job.wait(60)
            self.acknowledged(name, number)

    def load(self):
        if not self.saved:
            return
        name, number = self.rng.choice(self.saved)
        state, is_odd = state_of(number)
        if is_odd:
            return
        # A destination within more memory, whose other cells stay as they are.
        want = state["w"]
        around = np.full([2 * n + 1 for n in want.shape], 77).astype(want.dtype)
        inside = around[tuple(slice(1, 2 * n + 1, 2) for n in want.shape)] if want.ndim else around
        outside = np.ones(around.shape, dtype=bool)
        outside[tuple(slice(1, 2 * n + 1, 2) for n in want.shape)] = False
        before = around[outside].tobytes()
        request = {"w": inside, "number": -1}
        if self.rng.random() < 0.3:
            job = tm.async_load(request, f"{STORE}/{name}", self.group(), not_requested="ignore")
            if self.rng.random() < 0.3:
                job.cancel()
            job.wait(60)
        else:
            tm.load(request, f"{STORE}/{name}", self.group(), not_requested="ignore")
        if (why := difference(want, inside.copy())) or request["number"] != number:
            say(f"WRONG load of {name}: {why}, number {request['number']}")
        if around[outside].tobytes() != before:
            say(f"WRONG load of {name} wrote beside its destination")

    def read(self):
        if not self.saved:
            return
        name, number = self.rng.choice(self.saved)
        want = state_of(number)[0]["w"]
        with tm.open(f"{STORE}/{name}") as checkpoint:
            self.shared["checkpoint"] = checkpoint
            tensor = checkpoint["w"]
            index = tuple(slice(self.rng.randrange(n + 1), self.rng.randrange(n + 1), self.rng.choice((1, 2))) for n in want.shape)
            part = np.asarray(want[index])
            if self.rng.random() < 0.5:
                out = np.full(part.shape[:-1] + (2 * part.shape[-1],) if part.ndim else (), 5).astype(want.dtype)
                out = out[..., ::2] if part.ndim else out
                found = tensor.read(index, out=out)
                if found is not out:
                    say("WRONG read gave back another array than `out`")
            else:
                found = tensor[index]
            if why := difference(part, np.asarray(found)):
                say(f"WRONG {name}[{index}]: {why}")

    def look_after(self):
        store = tm.Store(STORE)
        what = self.rng.randrange(7)
        if what == 0:
            store.list()
        elif what == 1:
            store.gc()
        elif what == 2 and self.saved:
            tm.verify(f"{STORE}/{self.rng.choice(self.saved)[0]}")
        elif what == 3 and len(self.saved) > 3:
            name, number = self.saved.pop(0)
            say(f"removes {name} {number}")
            store.remove(name)
        elif what == 4 and self.saved:
            tm.export(f"{STORE}/{self.rng.choice(self.saved)[0]}", f"{FOLDER}/out-{self.number}.npz", self.group(), format="npz")
        elif what == 5 and self.saved:
            tm.validate({"w": np.ones(3)}, self.group())
        elif what == 6 and self.saved:
            checkpoint = tm.open(f"{STORE}/{self.saved[-1][0]}")
            if self.rng.random() < 0.5:
                checkpoint.state()

    def close_something(self):
        what = self.rng.choice(("group", "saver", "checkpoint", "nothing", "nothing"))
        if what == "group":
            self.shared["group"].close()
            self.shared["group"] = tm.Group.single()
        elif what == "saver":
            self.shared["saver"].close()
            self.shared["saver"] = tm.Saver()
        elif what == "checkpoint" and self.shared["checkpoint"] is not None:
            self.shared["checkpoint"].close()

    def live(self, seconds, interrupts=()):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.deed()
            except interrupts:
                pass
            except Exception:
                say("WRONG " + traceback.format_exc()[-1500:])
                return


def threads(shared, daemon=False):
    found = [threading.Thread(target=Life(number, shared).live, args=(SECONDS,), daemon=daemon) for number in range(3)]
    for one in found:
        one.start()
    return found


def alarms(shared):
    """Signal handlers that raise, at any moment."""
    rng = random.Random(f"{SEED} alarms")
    life, end = Life(0, shared), time.monotonic() + SECONDS
    armed = False

    def ring(*_):
        if armed:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.05))
            raise Ring

    signal.signal(signal.SIGALRM, ring)
    while time.monotonic() < end:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.05))
            life.live(0.3, (Ring,))
            armed = False
        except Ring:
            armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)


def interrupts(shared):
    """Ctrl-C, which python.py sends."""
    life, end = Life(0, shared), time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            say("lives")
            life.live(end - time.monotonic(), (KeyboardInterrupt,))
        except KeyboardInterrupt:
            pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def forks(shared):
    rng = random.Random(f"{SEED} forks")
    life = Life(0, shared)
    for number in range(1, 5):
        life.live(SECONDS / 8)
        child = os.fork()
        if child == 0:
            way = rng.random()
            try:
                Life(number, shared if way < 0.5 else fresh()).live(SECONDS / 8)
                if way < 0.3:
                    sys.exit(0)
            except BaseException as error:
                if not isinstance(error, SystemExit):
                    say("WRONG in a child: " + traceback.format_exc()[-1500:])
                    os._exit(1)
                raise
            os._exit(0)
        life.live(SECONDS / 16)
        end = time.monotonic() + 40
        done = (0, 0)
        while done[0] == 0 and time.monotonic() < end:
            done = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if done[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            say("WRONG a child did not end")
        elif done[1] != 0:
            say(f"WRONG a child ended with {done[1]}")


def ends(shared):
    """Daemon threads work on while the interpreter ends."""
    rng = random.Random(f"{SEED} ends")
    threads(shared, daemon=True)
    life = Life(7, shared)
    life.live(rng.random())
    for _ in range(rng.randrange(3)):
        with contextlib.suppress(*EXPECTED, TypeError, ValueError):
            life.save_behind()
    way = rng.randrange(4)
    say(f"ends {way}")
    if way == 1:
        sys.exit(0)
    if way == 2:
        os._exit(0)
    if way == 3:
        raise SystemExit(0)


def fresh():
    return {"group": tm.Group.single(), "saver": tm.Saver(), "checkpoint": None}


def check():
    for line in sys.stdin:
        name, number = line.split()
        state, _ = state_of(int(number))
        try:
            with tm.open(f"{STORE}/{name}") as checkpoint:
                found = checkpoint.state()
                whole = checkpoint.verify()
        except Exception:
            say(f"WRONG {name} that was acknowledged: {traceback.format_exc()[-800:]}")
            continue
        if why := difference(state, found):
            say(f"WRONG {name} that was acknowledged: {why}")
        if not whole["whole"]:
            say(f"WRONG {name} that was acknowledged is not whole: {whole}")


def main():
    if WAY == "check":
        return check()
    shared = fresh()
    if WAY == "threads":
        for one in threads(shared):
            one.join()
    else:
        {"alarms": alarms, "interrupts": interrupts, "forks": forks, "ends": ends}[WAY](shared)
    say("over")
    return None


if __name__ == "__main__":
    main()
