# SPDX-License-Identifier: Apache-2.0
"""A store over many steps, by commands that run beside each other and are killed: saves with a base, replaced,
derived and copied ones, rules, policies, pins, collections, repairs of damaged files. What a command said is so, what
is pinned or held stays, and every checkpoint that is there reads as it was."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import stores

NAME = "steps"
UNIT = "commands"
TARGET = 4000

ROUNDS = 12
KEYS = {"a.b": 1001, "empty": 0, "layers/0/w": 19_200, "layers/1/w": 90_000, "one": 8, "w": 12_288}


def write_state(path, versions):
    """A .safetensors file; `versions`: key -> version."""
    stores.write_safetensors(path, {key: ("U8", (KEYS[key],), content(key, version)) for key, version in versions.items()})


def content(key, version):
    return stores.numbered_lines(key, version, KEYS[key])


class Model:
    """What must be, and what may be, in a store. A name has the states that it may be in: each is what the
    checkpoint holds (key -> version), or None where it may be absent."""

    def __init__(self):
        self.may = {}  # Name -> list of states.
        self.pinned = {}  # Name -> True, False, or None where a pin that was killed leaves it open.

    def certain(self, name):
        states = self.may.get(name, [None])
        return states[0] if len(states) == 1 else None

    def names(self, only_certain=False):
        return [name for name in self.may if not only_certain or self.certain(name) is not None]


class Command:
    """One command of a round: what it is, which names it changes, and what they hold when it succeeds."""

    def __init__(self, words, after=None, pins=None, removes=(), model_of="store", reads=None):
        self.words, self.after, self.pins, self.removes, self.model_of = words, after or {}, pins or {}, removes, model_of
        self.reads = reads  # The checkpoint that a new one is made of.


def some_command(context, rng, model, other, folder, number):
    """A command, or None where the store has nothing for it. `number` is not taken twice."""
    store, copies = folder / "S", folder / "T"
    names = model.names(only_certain=True)
    kind = rng.choice(("save", "save", "save", "save", "replace", "derive", "rm", "pin", "unpin", "prune", "policy", "gc", "gc", "copy", "copy"))
    if kind in ("save", "replace"):
        base = model.certain(names[-1]) if names else None
        versions = dict(base if base else {key: number for key in KEYS})
        for key in rng.sample(sorted(KEYS), rng.randrange(1, 3)):
            versions[key] = number
        versions = {key: versions[key] for key in sorted(versions)} if set(versions) == set(KEYS) else {key: number for key in KEYS}
        source = folder / f"{number}.safetensors"
        write_state(source, versions)
        if kind == "replace" and names:
            name = rng.choice(names)
            return Command(["import", source, store / name, "--if-exists", "replace"], {name: versions})
        more = rng.choice(([], ["--ranks", "3"], ["--reuse", "off"], ["--placement", "rank-shard"], ["--full-every", "2"]))
        if rng.random() < 0.3:
            more = [*more, "--retain", rng.choice(("last=3", "policy", "last=2,every=4"))]
            return Command(["import", source, store / f"s-{number}", *more], {f"s-{number}": versions}, removes=tuple(model.names()))
        return Command(["import", source, store / f"s-{number}", *more], {f"s-{number}": versions})
    if not names:
        return None
    name = rng.choice(names)
    if kind == "derive":
        drop = rng.choice(sorted(KEYS))
        kept = {key: version for key, version in model.certain(name).items() if key != drop}
        return Command(["derive", store / f"d-{number}", "--from", store / name, "--drop", drop], {f"d-{number}": kept}, reads=name)
    if kind == "rm":
        return Command(["rm", store / name], removes=(name,))
    if kind == "pin":
        return Command(["pin", store / name, "--reason", f"number {number}"], pins={name: True})
    if kind == "unpin":
        return Command(["unpin", store / name], pins={name: False})
    if kind == "prune":
        rules = rng.choice((["--keep-last", "2"], ["--rules", "last=1,every=3"], [], ["--keep-last", "3", "--match", "s-*"]))
        return Command(["prune", store, *rules], removes=tuple(model.names()))
    if kind == "policy":
        return Command(rng.choice((["prune", store, "--keep-last", "4", "--set-policy"], ["prune", store, "--clear-policy"])))
    if kind == "copy":
        return Command(["copy", store / name, copies], {name: model.certain(name)} if name not in other.may else {}, model_of="other")
    return Command(["gc", store, *rng.choice(([], ["--grace", "0"], ["--grace", "0", "--staging-age", "0"]))])


def start(context, command, log):
    with open(log, "wb") as out:
        return subprocess.Popen([context.tool, *map(str, command.words)], stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def there(context, store):
    """Name -> whether it is pinned, as `ls` prints it; none if there is no store yet."""
    # A command that was killed while it created the store leaves the directory, and at most hidden files in it.
    if not store.exists() or all(path.name.startswith(".") for path in store.iterdir()):
        return {}
    done = context.run([context.tool, "--json", "ls", "-l", store])
    if done.returncode != 0:
        return f"ls exits {done.returncode}: {done.stderr}"
    entries = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    return {entry["checkpoint"]: entry["pinned"] for entry in entries if "checkpoint" in entry}


def wrong_state(context, checkpoint, states):
    """Why a checkpoint holds none of `states`; empty: it does."""
    done, out = stores.exported(context, checkpoint)
    if done.returncode != 0:
        return f"export exits {done.returncode}: {done.stderr.strip()[-600:]}"
    got = stores.read_model(out)
    why = ""
    for versions in states:
        if versions is None:
            continue
        bad = sorted(set(got) ^ set(versions)) or [key for key, version in versions.items() if got[key] != content(key, version)]
        if not bad:
            return ""
        why = f"{', '.join(bad)}: other bytes, or not there"
    return why or "it should not be there"


def settle(context, model, store, touched, wrong):
    """After a round: looks, says what is wrong, and makes certain what was open. `touched`: names that commands of the
    round may have changed or removed."""
    found = there(context, store)
    if isinstance(found, str):
        return wrong(found)
    for name in set(model.may) | set(found):
        states = model.may.get(name, [None])
        if name not in found:
            if None not in states:
                wrong(f"{name} should be there, and is not")
            model.may.pop(name, None)
            model.pinned.pop(name, None)
            continue
        if why := wrong_state(context, store / name, states):
            wrong(f"{name}: {why}", f"it may hold {states}")
            model.may.pop(name, None)
            continue
        if len(states) > 1:
            model.may[name] = [next(s for s in states if s is not None and not wrong_state(context, store / name, [s]))]
        pinned = model.pinned.get(name, False)
        if pinned is not None and found[name] is not None and bool(found[name]) != pinned:
            wrong(f"{name} is {'' if found[name] else 'not '}pinned, and should {'' if pinned else 'not '}be")
        model.pinned[name] = bool(found[name])
    return None


def apply(model, command, status):
    """What a command that ended with `status` (0, 2, or "killed") leaves open. Commands of one round may undo each
    other's: what two of them touch is open in any case (run does that)."""
    for name, versions in command.after.items():
        before = model.may.get(name, [None])
        if status == 0:
            model.may[name] = [versions]
        elif status == "killed":
            model.may[name] = before + [versions]
    for name in command.removes:
        if model.pinned.get(name) is True and name not in command.pins:
            continue  # Whatever removes it, a pin holds it.
        if name in model.may and None not in model.may[name] and name not in command.after:
            model.may[name] = [*model.may[name], None]
    if command.words[0] == "rm" and status == 0:
        for name in command.removes:
            model.may[name] = [None]
    for name, pinned in command.pins.items():
        if status == 0:
            model.pinned[name] = pinned
        elif status == "killed":
            model.pinned[name] = None


def damage(file, rng):
    """Flips a few bytes, as a disk does: mode and time stay."""
    before = file.stat()
    file.chmod(0o644)
    with open(file, "r+b") as out:
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(before.st_size)
            out.seek(at)
            byte = out.read(1)[0]
            out.seek(at)
            out.write(bytes([byte ^ rng.randrange(1, 256)]))
    file.chmod(before.st_mode & 0o7777)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def damage_and_repair(context, rng, models, folder, wrong, history):
    """A file of a checkpoint that has a copy is damaged; a repair, sometimes after one that was killed, makes it whole
    for all that share it. Whether all read as before settle finds out."""
    store, copies = folder / "S", folder / "T"
    names = [name for name in models["store"].names(only_certain=True)
             if models["other"].certain(name) == models["store"].certain(name)]
    files = [file for name in names for file in sorted((store / name / "data").iterdir()) if file.stat().st_size > 0]
    if not files:
        return
    file = rng.choice(files)
    name = file.parent.parent.name
    shared = [other for other in store.glob(f"*/data/{file.name}") if other.samefile(file)]
    damage(file, rng)
    repair = Command(["repair", store / name, "--from", copies / name])
    history.append(f"bytes of {file} flipped, of {len(shared)} names; {' '.join(map(str, repair.words))}")
    if rng.random() < 0.5:
        child = start(context, repair, folder / "log-killed")
        time.sleep(rng.random() ** 2 * 0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
    beside = start(context, Command(["gc", store, "--grace", "0", "--staging-age", "0"]), folder / "log-beside")
    done = context.run([context.tool, *repair.words])
    if beside.wait(60) != 0:
        wrong(f"gc beside a repair ends with {beside.returncode}", (folder / "log-beside").read_text(errors="replace"))
    if done.returncode != 0:
        wrong(f"repair exits {done.returncode}", done.stdout.decode(errors="replace")[-800:] + done.stderr)
    for other in shared:
        if not other.samefile(file):
            wrong(f"{other} is not the file that was repaired")
        done = context.run([context.tool, "verify", other.parent.parent])
        if done.returncode != 0:
            wrong(f"after a repair of {name} verify of {other.parent.parent.name} exits {done.returncode}",
                  done.stdout.decode(errors="replace")[-800:] + done.stderr)


def run(context, index):
    rng = context.rng(index)
    folder = context.work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    models = {"store": Model(), "other": Model()}
    number, history = 0, []

    def wrong(text, more=""):
        context.finding(f"{text}\n  {more}\n  " + "\n  ".join(history[-6:]), f"scripts/torture --seed {context.seed} --case steps:{index}")

    found_before = len(context.findings)
    for _ in range(ROUNDS):
        round_, taken = [], set()
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            number += 1
            command = some_command(context, rng, models["store"], models["other"], folder, number)
            # Two that make one name, or pin and unpin it, have no one outcome.
            names = set(command.after) | set(command.pins) | ({*command.removes} if command and command.words[0] == "rm" else set()) if command else set()
            if command is None or names & taken:
                continue
            # One that is replaced beside it may be read before or after.
            if any(command.reads in other.after or other.reads in command.after for other in round_):
                continue
            taken |= names
            round_.append(command)
        logs = [folder / f"log-{i}" for i in range(len(round_))]
        children = [start(context, command, log) for command, log in zip(round_, logs)]
        kills = [child for child in children if rng.random() < 0.3]
        if kills:
            time.sleep(rng.random() ** 2 * 0.25)
        for child in kills:
            child.send_signal(signal.SIGKILL)
        for command, child, log in zip(round_, children, logs):
            try:
                status = child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                status = child.wait()
                wrong(f"{command.words[0]} did not end")
            said = log.read_text(errors="replace")
            history.append(f"{' '.join(map(str, command.words))}: {status}: {said.strip()[-300:]}")
            if status == -signal.SIGKILL:
                status = "killed"
            elif status not in (0, 1, 2):
                wrong(f"{command.words[0]} ends with {status}", said[-800:])
            if status == 2 and not stores.code_is_named(said):
                wrong(f"{command.words[0]}: an error without a code", said[-800:])
            if "DATA_LOSS" in said:
                wrong(f"{command.words[0]}: a healthy store is called damaged", said[-800:])
            apply(models[command.model_of], command, status if not (status == 2 and "UNKNOWN" in said) else "killed")
        # What several commands of the round may have touched, in either order.
        removed = {name for command in round_ for name in command.removes}
        pinned = {name for command in round_ for name, on in command.pins.items() if on}
        unpinned = {name for command in round_ for name, on in command.pins.items() if not on}
        for name in removed:
            if len(round_) > 1 and (name in unpinned or name in pinned or any(name in c.after for c in round_)):
                states = models["store"].may.get(name, [None])
                if None not in states:
                    models["store"].may[name] = [*states, None]
        # Rules remove what was made beside them as well.
        if len(round_) > 1 and any(command.words[0] == "prune" or "--retain" in command.words for command in round_):
            for command in round_:
                for name in command.after:
                    if command.model_of == "store" and None not in models["store"].may.get(name, [None]):
                        models["store"].may[name] = [*models["store"].may[name], None]
        settle(context, models["store"], folder / "S", removed, wrong)
        settle(context, models["other"], folder / "T", set(), wrong)
        if len(context.findings) == found_before and rng.random() < 0.3:
            damage_and_repair(context, rng, models, folder, wrong, history)
            settle(context, models["store"], folder / "S", set(), wrong)
        if len(context.findings) > found_before:
            break
    if len(context.findings) == found_before:
        last_look(context, models["store"], folder, wrong)
    return number


def last_look(context, model, folder, wrong):
    """All is well with the store, gc works and leaves what is there, and a save works and is the latest."""
    store = folder / "S"
    if not store.exists():
        return
    done = context.run([context.tool, "gc", store, "--grace", "0", "--staging-age", "0"])
    if done.returncode != 0:
        wrong(f"gc exits {done.returncode}", done.stderr)
    done = context.run([context.tool, "fsck", store])
    if done.returncode not in (0,):
        wrong(f"after gc, fsck exits {done.returncode}", done.stdout.decode(errors="replace")[-800:] + done.stderr)
    settle(context, model, store, set(), wrong)
    source = folder / "last.safetensors"
    write_state(source, {key: "last" for key in KEYS})
    done = context.run([context.tool, "import", source, store / "last"])
    if done.returncode != 0:
        wrong(f"a save exits {done.returncode}", done.stderr)
    elif why := wrong_state(context, store / "latest", [{key: "last" for key in KEYS}]):
        wrong(f"latest: {why}")


def plant(context):
    """A gc that empties a file of a checkpoint that is there."""
    script = ('if [ "$1" = gc ]; then "$REAL" "$@"; code=$?; f=$(ls -d "$2"/*/data/* 2>/dev/null | tail -1); [ -n "$f" ] && : > "$f"; '
              'exit $code; fi\nexec "$REAL" "$@"')
    real, context.bin = context.bin, stores.fake_tool(context, script)
    for index in range(6):
        run(context, index)
        if context.findings:
            break
    context.bin = pathlib.Path(real)
    return bool(context.findings)
