#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Crash states of real filesystems: what a power cut leaves of a store on ext4, ext2, XFS and btrfs.

usage: crash.py --seed S --index I [--count N] --bin DIR [--work DIR] [--states K] [--keep] [--workload W]
       crash.py --replay FOLDER [--state K] --bin DIR      what a finding kept, once more
       crash.py --plant --bin DIR [--workload W]           the planted faults, which must be found

A case records one workload on one filesystem: the filesystem stands on a loop device on the file of
`recorder`, which keeps each write and each flush in order, with a mark before and after each operation.
A crash state after record p is all writes up to the last flush that was answered before p, and of the
later ones up to p any part: none, all, some in any order, some torn by sectors. A state is mounted (ext2
after e2fsck), and every operation that had been acknowledged must hold; the others are done or not, whole.

Cases take turns with file systems and workloads; --workload takes one alone, and is the only way to "dcp": saves by
torch.distributed.checkpoint, which need the environment of scripts/setup --with libraries.

As root: it mounts. Nothing is left behind: loop devices clear themselves.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from crash_disk import (FILESYSTEMS, MIB, Disk, Log, Noise, NothingWorks, Unavailable, call, choose_states, copy_sparse, materialise, mount,
                        must, need, out, saver_program, told, unmount)

NAME = "crash"
UNIT = "states"
TARGET = 5000
STATES = 40

HERE = pathlib.Path(__file__).resolve()
SIZES = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}

WORKLOADS = ["library", "replace", "remove", "mount", "repair", "pair", "mixed", "background"]
ROOT = HERE.parents[2]
PYTHON = ROOT / ".cache/venv-libraries/bin/python3"


# --- what is saved ---------------------------------------------------------------------------------


def write_model(path, rng):
    """Few tensors of random shape, type and bytes."""
    tensors = {}
    for number in range(rng.randint(1, 5)):
        dtype = rng.choice(sorted(SIZES))
        rows, columns = rng.randint(1, 130), rng.choice([1, 3, 33, 256, 1000, *([4000] if rng.random() < 0.1 else [])])
        key = rng.choice(["w", "bias", "layers/0/a", "layers/1/a"]) + str(number)
        tensors[key] = (dtype, [rows, columns], rng.randbytes(rows * columns * SIZES[dtype]))
    if rng.random() < 0.3:
        tensors["step"] = ("F64", [], rng.randbytes(8))
    header, at = {}, 0
    for key, (dtype, shape, raw) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def read_model(path):
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    begin = 8 + length
    return {key: (entry["dtype"], entry["shape"], raw[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]])
            for key, entry in json.loads(raw[8:begin]).items()}


def child_stage(staging, model, seed):
    """What two ranks do in a staging, up to their marks: each writes half of the rows of each tensor."""
    rng = random.Random(int(seed))
    tensors = read_model(model)
    os.mkdir(staging)
    schema = {"tensors": {key: {"dtype": dtype.lower(), "shape": shape} for key, (dtype, shape, _) in tensors.items()},
              "writers": 2}
    with open(f"{staging}/schema.json", "w") as file:
        json.dump(schema, file)
    parts = [[], []]
    for key, (dtype, shape, raw) in tensors.items():
        if not shape or shape[0] < 2:
            parts[rng.randrange(2)].append((key, None, 0, raw))
            continue
        cut, row = rng.randrange(1, shape[0]), shape[1] * SIZES[dtype]
        parts[0].append((key, f"[0:{cut},:]", 0, raw[:cut * row]))
        parts[1].append((key, f"[{cut}:{shape[0]},:]", cut * row, raw[cut * row:]))
    for rank, mine in enumerate(parts):
        for key, box, offset, raw in mine:
            slice_file = box is not None and rng.random() < 0.5
            path = f"{staging}/slices/{key}{box}" if slice_file else f"{staging}/tensors/{key}"
            fd = os.open(path, os.O_WRONLY | (os.O_CREAT if slice_file else 0), 0o644)
            at, step = 0, rng.choice([4096, 65536, MIB])
            while at < len(raw):
                at += os.pwrite(fd, raw[at:at + step], at + (0 if slice_file else offset))
            os.close(fd)
        with open(f"{staging}/done/{rank}", "w"):
            pass


def child_read(folder, model):
    """Whether a mount shows what was saved."""
    for key, (_, _, raw) in read_model(model).items():
        if pathlib.Path(f"{folder}/tensors/{key}").read_bytes() != raw:
            raise SystemExit(f"tensor {key} has other bytes")


# --- workloads -------------------------------------------------------------------------------------
# An operation: {"what", "name", "version", ...}. "version" is what its name has when it is done (None:
# nothing, absent: as before); operations of one "lane" come one after another, lanes run beside each other.


def save_options(rng):
    ranks = rng.choice([1, 2, 3, 4])
    placements = ["auto", "tensor-file", "rank-shard"] + (["safetensors"] if ranks == 1 else [])
    return ["--ranks", str(ranks), "--shard", rng.choice(["rows", "cols", "flat", "replicate"]),
            "--placement", rng.choice(placements), "--writers", rng.choice(["1", "4"])]


def make_operations(workload, rng):
    operations, versions = [], 0
    live = []

    def add(what, lane=0, **more):
        operations.append({"what": what, "lane": lane, **more})

    def new_version():
        nonlocal versions
        versions += 1
        return versions - 1

    def save(name=None, lane=0):
        name = name or f"step-{versions}"
        add("save", lane, name=name, version=new_version(), options=save_options(rng))
        if name not in live:
            live.append(name)

    def replace():
        add("save", name=rng.choice(live), version=new_version(), options=[*save_options(rng), "--if-exists", "replace"])

    def remove():
        name = live.pop(rng.randrange(len(live)))
        add("rm", name=name, version=None)
        if rng.random() < 0.5:
            save(name)

    def gc():
        add("gc", options=rng.choice([[], ["--grace", "0"]]))

    def through_mount():
        name, version = f"step-{versions}", new_version()
        add("stage", name=name, staged=version, seed=rng.randrange(1 << 30))
        add("publish", name=name, version=version, by=rng.choice(["mv", "tool"]))
        live.append(name)

    def repair():
        add("damage", name=rng.choice(live))
        add("fsck", options=["--rebuild"])

    steps = {
        "library": [save], "replace": [save, replace, replace], "remove": [save, remove, gc],
        "mount": [through_mount], "repair": [repair, save], "pair": [],
        "mixed": [save, replace, remove, gc, through_mount, repair], "background": [], "dcp": [],
    }[workload]
    if workload == "pair":
        for lane in (0, 1):
            for _ in range(3):
                save(lane=lane)
        return operations, versions
    if workload in ("background", "dcp"):  # One program, which marks them itself.
        for _ in range(rng.randint(3, 6)):
            add(workload, name=f"step-{versions}", version=new_version())
        return operations, versions
    save()  # A mount wants a store.
    for _ in range(rng.randint(3, 6)):
        step = rng.choice(steps)
        if step in (replace, remove, repair) and not live:
            step = save
        step()
    return operations, versions


class Worker:
    """Performs the operations of a case on a disk, with a mark before and after each."""

    def __init__(self, context, disk, case, preload=None):
        self.context, self.disk, self.case, self.fs = context, disk, case, case["fs"]
        self.tool = pathlib.Path(context.bin) / "tensormount"
        self.folder, self.store, self.mnt = disk.folder, disk.root / "S", disk.folder / "mnt"
        self.mnt.mkdir()
        self.env = {"LD_PRELOAD": str(preload)} if preload else None
        self.faults = []

    def work(self):
        noise = Noise(self.disk.root, self.case["noise"]) if self.case["noise"] is not None else None
        if noise:
            noise.start()
        lanes = sorted({operation["lane"] for operation in self.case["operations"]})
        threads = [threading.Thread(target=self.lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if noise:
            noise.over.set()
            noise.join()
        if os.path.ismount(self.mnt):
            unmount(self.context, self.mnt)

    def lane(self, lane):
        rng = random.Random(self.case["noise"] or 0)
        for number, operation in enumerate(self.case["operations"]):
            if operation["lane"] != lane:
                continue
            if operation["what"] == "background":
                self.save_in_background()  # A save begins while another is under way.
                return
            if operation["what"] == "dcp":
                self.save_by_dcp()
                return
            self.disk.mark(f"begin {number}")
            result = self.perform(operation)
            if result.returncode == 0:
                self.disk.mark(f"done {number}")
            else:
                self.disk.mark(f"fail {number}")
                if not (self.fs == "ext2" and "replace" in operation.get("options", []) and "UNSUPPORTED" in told(result)):
                    self.faults.append(f"{operation}: {told(result)}")
            if self.case["noise"] is not None and rng.random() < 0.3:
                time.sleep(0.05)

    def save_in_background(self):
        listed, models = [], []
        for number, operation in enumerate(self.case["operations"]):
            models.append(self.folder / f"v{operation['version']}")
            raw = models[-1].read_bytes()
            begin = 8 + struct.unpack_from("<Q", raw)[0]
            tensors = json.loads(raw[8:begin])
            listed.append(f"{number} {self.store / operation['name']} {len(tensors)}")
            for key, entry in tensors.items():
                listed.append(" ".join(map(str, [key, entry["dtype"].lower(), begin + entry["data_offsets"][0],
                                                 len(entry["shape"]), *entry["shape"]])))
        (self.folder / "list").write_text("\n".join(listed) + "\n")
        result = call(self.context, saver_program(self.context), self.disk.at / "mark", self.folder / "list", *models, env=self.env)
        if result.returncode != 0 or result.stderr:
            self.faults.append(f"background saves: {told(result)}")

    def save_by_dcp(self):
        library = pathlib.Path(self.context.bin).parent / "lib" / "libtensormount.so"
        env = {"PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(library), "OMP_NUM_THREADS": "1", **(self.env or {})}
        arguments = []
        for number, operation in enumerate(self.case["operations"]):
            arguments += [number, self.store / operation["name"], self.folder / f"v{operation['version']}"]
        result = call(self.context, PYTHON, HERE.with_name("dcp_saver.py"), self.disk.at / "mark", self.folder / "rendezvous",
                      *arguments, env=env)
        if result.returncode != 0:
            self.faults.append(f"saves by DCP: {told(result)}")

    def perform(self, operation):
        def tool(*arguments):
            return call(self.context, self.tool, *arguments, env=self.env)

        what, options = operation["what"], operation.get("options", [])
        name = operation.get("name")
        if what == "save":
            return tool("import", self.folder / f"v{operation['version']}", self.store / name, *options)
        if what == "rm":
            return tool("rm", self.store / name)
        if what in ("gc", "fsck"):
            return tool(what, self.store, *options)
        if what == "damage":  # Not an operation of ours: the index of one has other bytes from here on.
            with open(self.store / name / "index" / "index.sst", "rb") as file:
                raw = bytearray(file.read())
            raw[len(raw) // 2] ^= 1
            os.chmod(self.store / name / "index" / "index.sst", 0o644)
            with open(self.store / name / "index" / "index.sst", "r+b") as file:
                file.write(raw)
            return subprocess.CompletedProcess([], 0, "", "")
        staging = self.mnt / ".staging" / name
        if what == "stage":
            if not os.path.ismount(self.mnt):
                self.store.mkdir(exist_ok=True)
                if not os.path.exists(self.store / "store.json"):
                    tool("fsck", self.store, "--rebuild")
                result = tool("mount", self.store, self.mnt)
                if result.returncode != 0:
                    return result
            return call(self.context, sys.executable, HERE, "--child", "stage", staging,
                        self.folder / f"v{operation['staged']}", operation["seed"])
        if operation["by"] == "mv":
            return call(self.context, "mv", "-T", staging, self.mnt / name)
        return tool("publish", self.store / ".staging" / name)


# --- crash states ----------------------------------------------------------------------------------


def expected(case, log, cut):
    """After the cut: what each name may have, the likeliest first; what is staged and promised; whether an index was
    damaged by us that no fsck has mended yet."""
    state = {}
    for position, (event, number) in log.marks:
        if position < cut:
            state[int(number)] = event
    names, staged, damaged = {}, {}, False
    for number, operation in enumerate(case["operations"]):
        event = state.get(number)
        if event is None:
            continue
        name = operation.get("name")
        if operation["what"] in ("damage", "fsck"):
            damaged = operation["what"] == "damage" or damaged and event != "done"
        if operation["what"] == "stage":
            names.setdefault(name, [None])
            if event == "done":
                staged[name] = operation["staged"]
        if "version" in operation:
            before = names.get(name, [None])
            version = operation["version"]
            names[name] = [version] if event == "done" else [version, *(v for v in before if v != version)]
            if event == "done":
                staged.pop(name, None)
    return names, staged, damaged


class Checker:
    """Mounts a state and looks at it as an operator after the reboot does."""

    def __init__(self, context, folder, case):
        self.context, self.folder, self.case = context, folder, case
        self.tool = pathlib.Path(context.bin) / "tensormount"
        self.root, self.mnt = folder / "after", folder / "after-mnt"
        self.root.mkdir(exist_ok=True)
        self.mnt.mkdir(exist_ok=True)
        self.store = self.root / "S"
        self.new_model = folder / "new"
        write_model(self.new_model, random.Random(7))

    def run(self, *arguments):
        return call(self.context, self.tool, *arguments)

    def mount(self, image):
        """None, or why the filesystem itself is beyond its own repair."""
        fs = self.case["fs"]
        if fs == "ext2":
            repaired = call(self.context, "e2fsck", "-f", "-y", image)
            if repaired.returncode >= 4:
                return f"e2fsck: {told(repaired)}"
        result = mount(self.context, self.case, image, self.root)
        return None if result.returncode == 0 else f"mount: {told(result)}"

    def model(self, version):
        return self.folder / f"v{version}"

    def loads(self, name, model):
        return self.run("load", self.store / name, "--ranks", 2, "--compare", model)

    def check(self, names, staged, damaged, rng):
        """What is wrong, in words."""
        wrong = []
        named = set()
        listed = self.run("--json", "ls", self.store)
        shown = set()
        if listed.returncode in (0, 1):
            shown = {json.loads(line).get("checkpoint") for line in out(listed).splitlines()} - {None}
        elif (any(None not in versions for versions in names.values()) or staged
              or listed.returncode not in (0, 2)):
            wrong.append(f"ls: {told(listed)}")
        for name in shown - set(names):
            wrong.append(f"{name} is there, and nobody saved it")
        for name, versions in names.items():
            if name not in shown:
                if None not in versions:
                    wrong.append(f"{name}: was saved and acknowledged, and is not there")
                continue
            if versions == [None]:
                wrong.append(f"{name}: was removed or never published, and is there")
                continue
            results = []
            for version in versions:
                if version is not None:
                    results.append(self.loads(name, self.model(version)))
                    if results[-1].returncode == 0:
                        break
            else:
                # Without a journal what was in flight may be damaged, as long as it says so.
                if self.case["fs"] == "ext2" and len(versions) > 1 and all(r.returncode == 2 for r in results):
                    named.add(name)
                    print(f"crash: ext2: in flight, and says what it lacks: {name}: {told(results[0])[:200]}", file=sys.stderr)
                else:
                    wrong.append(f"{name}: neither of versions {versions}: " + "; ".join(map(told, results)))
        for name, version in staged.items():
            if name in shown:
                continue
            result = self.run("publish", self.store / ".staging" / name)
            if result.returncode == 0:
                result = self.loads(name, self.model(version))
            if result.returncode != 0:
                wrong.append(f"staging {name}, all of whose writers had their marks: {told(result)}")
        if rng.random() < 0.125 and shown - named:
            wrong += self.check_mount(names, shown - named)
        if damaged and shown:
            result = self.run("fsck", self.store, "--rebuild")
            if result.returncode != 0:
                wrong.append(f"fsck --rebuild afterwards: {told(result)}")
        for arguments in (["gc", self.store, *rng.choice([[], ["--grace", "0"]])],
                          ["import", self.new_model, self.store / "after", "--ranks", 2],
                          ["load", self.store / "after", "--compare", self.new_model],
                          ["verify", self.store]):
            if arguments[0] == "gc" and not shown and not os.path.exists(self.store / "store.json"):
                continue  # The power went before the store was one.
            result = self.run(*arguments)
            if arguments[0] == "gc" and result.returncode == 2 and self.case["fs"] == "ext2":
                # Without a journal a name may lead to another inode: what fsck says of it helps.
                for lost in self.no_folders():
                    os.unlink(self.store / lost)
                result = self.run(*arguments)
            if result.returncode != 0 and not (arguments[0] == "verify" and named):
                wrong.append(f"{arguments[0]} afterwards: {told(result)}")
        return wrong

    def no_folders(self):
        """What fsck names as no folder any more, and as to be removed."""
        found = map(json.loads, out(self.run("--json", "fsck", self.store)).splitlines())
        return [line["object"] for line in found
                if line.get("damage") and "not a directory" in line["problem"] and "remove it" in line["remedy"]]

    def check_mount(self, names, shown):
        result = self.run("mount", self.store, self.mnt)
        if result.returncode != 0:
            return [f"mount: {told(result)}"]
        try:
            wrong = []
            for name in sorted(shown & set(names)):
                results = [call(self.context, sys.executable, HERE, "--child", "read", self.mnt / name, self.model(version))
                           for version in names[name] if version is not None]
                if all(result.returncode != 0 for result in results):
                    wrong.append(f"{name} in a mount: " + "; ".join(map(told, results)))
            return wrong
        finally:
            unmount(self.context, self.mnt)


def look(context, folder, case, log, rolling, state, number):
    """One state, over an image of all its earlier epochs: (what is wrong, why it cannot be mounted)."""
    cut, _, kept, _ = state
    # A new file each time: a loop device that somebody still has open keeps its pages of the old one.
    handle, image = tempfile.mkstemp(prefix="state-", suffix=".img", dir=folder)
    checker = Checker(context, folder, case)
    try:
        copy_sparse(rolling, image)
        materialise(log, kept, FILESYSTEMS[case["fs"]][2], handle)
        problem = checker.mount(image)
        if problem is not None:
            return [], problem
        return checker.check(*expected(case, log, cut), random.Random(f"{case['seed']} {case['index']} {number}")), None
    finally:
        os.close(handle)
        if os.path.ismount(checker.root):
            unmount(context, checker.root)
        os.unlink(image)


def check_states(context, folder, count=STATES, only=None, ignore_flushes=False, report=None):
    """The states of a recorded run. Returns (checked, not mountable)."""
    case = json.loads((folder / "case.json").read_text())
    log = Log(folder / "log")
    if not log.flushes:
        raise Unavailable(f"{case['fs']}: no flush reached the recorder")
    rng = random.Random(f"{case['seed']} {case['index']} states")
    states = choose_states(log, rng, count, [] if ignore_flushes else log.flushes, FILESYSTEMS[case["fs"]][2])
    rolling = folder / "rolling.img"
    copy_sparse(folder / "base.img", rolling)
    at, checked, unmountable = 0, 0, []
    with open(rolling, "r+b", buffering=0) as file:
        for number, state in enumerate(states):
            cut, epoch, _, kind = state
            log.apply(file.fileno(), range(at, epoch))
            at = max(at, epoch)
            if only is not None and number != only:
                continue
            wrong, problem = look(context, folder, case, log, rolling, state, number)
            if problem is not None and kind == "torn" and case["fs"] != "btrfs":  # Its superblock may be torn.
                unmountable.append(f"state {number} ({kind}): {problem}")
                continue
            checked += 1
            if problem is not None:
                wrong = [f"{case['fs']} itself cannot be mounted: {problem}"]
            if wrong:
                again = "also" if any(look(context, folder, case, log, rolling, state, number)) else "NOT"
                wrong.append(f"({again} when the same state was looked at once more)")
                report(number, f"{case['fs']} {case['workload']} index {case['index']} state {number} ({kind}, cut {cut}, "
                               f"epoch {epoch}): {'; '.join(wrong)}")
    return checked, unmountable


# --- cases -----------------------------------------------------------------------------------------


def make_case(context, index, fs=None, workload=None):
    rng = context.rng(index)
    fs = fs or list(FILESYSTEMS)[index % len(FILESYSTEMS)]
    workload = workload or WORKLOADS[index // len(FILESYSTEMS) % len(WORKLOADS)]
    operations, versions = make_operations(workload, rng)
    return {"seed": context.seed, "index": index, "fs": fs, "workload": workload, "operations": operations,
            "versions": versions, "noise": rng.randrange(1 << 30) if rng.random() < 0.6 else None,
            "variant": rng.choice(FILESYSTEMS[fs][3])}, rng


def record(context, folder, case, rng, preload=None):
    if case["workload"] == "dcp" and not PYTHON.exists():
        raise NothingWorks("no virtual environment with torch: scripts/setup --with libraries")
    for version in range(case["versions"]):
        write_model(folder / f"v{version}", rng)
    with Disk(context, folder, case) as disk:
        worker = Worker(context, disk, case, preload)
        worker.work()
    (folder / "case.json").write_text(json.dumps(case))
    return worker.faults


def keep(folder, kept):
    """What replay needs, where it outlives the scratch."""
    kept.mkdir(parents=True, exist_ok=True)
    for file in [folder / "log", folder / "case.json", *folder.glob("v*")]:
        shutil.copy(file, kept)
    copy_sparse(folder / "base.img", kept / "base.img")


def run(context, index, count=STATES, workload=None):
    """One recorded run and its crash states. Returns how many states were checked."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"crash-{index}-", dir=context.work))
    kept = pathlib.Path(tempfile.gettempdir()) / "tensormount-crash" / f"{context.seed}-{index}"
    command = f"python3 tests/torture/crash.py --bin DIR --seed {context.seed} --index {index}"
    if workload:
        command += f" --workload {workload}"
    wrong = 0

    def report(number, text):
        nonlocal wrong
        wrong += 1
        if wrong == 1:
            keep(folder, kept)
        if wrong <= 3:  # One cause shows in many states of a run.
            context.finding(text, f"{command}; the same bytes: crash.py --bin DIR --replay {kept} --state {number}")

    try:
        case, rng = make_case(context, index, workload=workload)
        for fault in record(context, folder, case, rng):
            context.finding(f"{case['fs']} {case['workload']} index {index}: without any crash: {fault}", command)
        checked, unmountable = check_states(context, folder, count, report=report)
        text = f"crash: {index}: {case['fs']} {case['workload']}: {checked} states of {' '.join(case['variant'][0])}/{case['variant'][1]}"
        if wrong:
            text += f", {wrong} of them wrong"
        if unmountable:
            text += f", {len(unmountable)} that {case['fs']} itself does not mount ({unmountable[0][:200]})"
        print(text, file=sys.stderr, flush=True)
        return checked
    except Unavailable as lack:
        fs = list(FILESYSTEMS)[index % len(FILESYSTEMS)]
        print(f"crash: {index}: NOT RUN on {fs}: {lack}", file=sys.stderr, flush=True)
        if isinstance(lack, NothingWorks) and hasattr(context, "missing"):
            context.missing(str(lack))
        return 0
    finally:
        (folder / "rolling.img").unlink(missing_ok=True)
        if not getattr(context, "keep", False):
            shutil.rmtree(folder, ignore_errors=True)


NO_SYNC = """
int fsync(int fd) { (void)fd; return 0; }
int fdatasync(int fd) { (void)fd; return 0; }
int syncfs(int fd) { (void)fd; return 0; }
int msync(void* at, unsigned long size, int flags) { (void)at; (void)size; (void)flags; return 0; }
"""


def plant(context, workload="library"):
    """Two faults that must be found: a disk whose flushes are forgotten, and a tool that syncs nothing."""
    results = []
    for fault in ("flushes", "sync"):
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"crash-plant-{fault}-", dir=context.work))
        try:
            found, preload = [], None
            if fault == "sync":
                need("cc")
                preload = folder / "no_sync.so"
                (folder / "no_sync.c").write_text(NO_SYNC)
                must(call(context, "cc", "-shared", "-fPIC", folder / "no_sync.c", "-o", preload))
            case, rng = make_case(context, 0, "ext4", workload)
            case["noise"] = None
            record(context, folder, case, rng, preload)
            check_states(context, folder, 12, ignore_flushes=fault == "flushes",
                         report=lambda number, text: found.append(text))
            if found:
                context.finding(found[0], "planted")
            print(f"crash: planted {fault}: {len(found)} found{': ' + found[0][:300] if found else ''}", file=sys.stderr)
            results.append(any("was saved and acknowledged, and is not there" in text for text in found))
        except Unavailable as lack:
            print(f"crash: planted {fault}: NOT RUN: {lack}", file=sys.stderr)
            results.append(False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return all(results)


def own_context(arguments, work):
    """What tests/torture/torture.py gives, for a run of this file alone."""
    context = types.SimpleNamespace(seed=arguments.seed, bin=arguments.bin, work=work, keep=arguments.keep, findings=0)

    def run_command(command, timeout, env=None):
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout,
                              stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})})

    def finding(text, command):
        context.findings += 1
        print(f"FINDING {text}\n  {command}", flush=True)

    context.run, context.finding = run_command, finding
    context.rng = lambda index: random.Random(f"{arguments.seed} {NAME} {index}")
    return context


def main():
    if sys.argv[1:2] == ["--child"]:
        {"stage": child_stage, "read": child_read}[sys.argv[2]](*sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--states", type=int, default=STATES)
    parser.add_argument("--state", type=int)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--replay", type=pathlib.Path)
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--workload", choices=[*WORKLOADS, "dcp"])
    parser.add_argument("--keep", action="store_true", help="also what found nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that what is mounted goes.
    arguments.bin = arguments.bin.resolve()
    work = arguments.work or pathlib.Path(tempfile.mkdtemp(prefix="crash-", dir="/dev/shm"))
    work.mkdir(parents=True, exist_ok=True)
    context = own_context(arguments, work)
    begin = time.monotonic()
    checked = 0
    try:
        if arguments.plant:
            return 0 if plant(context, arguments.workload or "library") else 1
        if arguments.replay:
            checked, unmountable = check_states(
                context, arguments.replay, arguments.states, arguments.state,
                report=lambda number, text: context.finding(text, "as called"))
            print(*unmountable, sep="\n", file=sys.stderr)
        else:
            for index in range(arguments.index, arguments.index + arguments.count):
                checked += run(context, index, arguments.states, arguments.workload)
        print(f"{checked} states, {context.findings} findings, {time.monotonic() - begin:.0f} s")
        return 1 if context.findings or checked == 0 else 0
    finally:
        if arguments.work is None and not context.findings and not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
