# SPDX-License-Identifier: Apache-2.0
"""What crash.py stands on: disks that remember their writes, and the states a power cut may leave of them."""

import ctypes
import os
import pathlib
import random
import shutil
import struct
import subprocess
import threading
import time

MIB = 1 << 20
HERE = pathlib.Path(__file__).resolve()
LIBC = ctypes.CDLL(None, use_errno=True)

# mkfs, MiB, the sector, and variants: more options of mkfs and those of mount. The sector is what a disk may tear: larger for
# btrfs, whose only superblock that counts is one block of 4 KiB, and for XFS, which after a power cut believes the log sequence
# number in the first sector of a metadata block and does not replay what the others lack (no blocks of 1 KiB, for the same reason:
# folders have 4 KiB, which then may lie on two pages and be written one by one).
FILESYSTEMS = {
    "ext4": (["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"], 64, 512,
             [([], ""), (["-b", "4096"], ""), ([], "data=journal"), (["-b", "4096"], "data=writeback"), ([], "nodelalloc,commit=1")]),
    "ext2": (["mkfs.ext2", "-q", "-F"], 64, 512, [([], ""), (["-b", "4096"], "")]),
    "xfs": (["mkfs.xfs", "-q", "-f"], 320, 4096, [([], "nouuid"), (["-i", "size=2048"], "nouuid"), (["-m", "reflink=0"], "nouuid")]),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], 160, 4096,
              [([], ""), ([], "compress-force=zstd"), ([], "flushoncommit,commit=1"), ([], "nodatacow"), (["-m", "single"], "")]),
}


class Unavailable(Exception):
    """What this machine lacks for one filesystem, by name."""


class NothingWorks(Unavailable):
    """What it lacks for all of them."""


def call(context, *command, timeout=60, env=None):
    """Never raises: 124 is a deadline that passed."""
    command = [str(part) for part in command]
    try:
        result = context.run(command, timeout, env)
    except subprocess.TimeoutExpired:
        result = None
    if result is None or not isinstance(result.returncode, int):
        return subprocess.CompletedProcess(command, 124, "", f"no end after {timeout} s")
    return result


def told(result):
    def text(raw):
        return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""

    return f"status {result.returncode}: {(text(result.stdout) + text(result.stderr)).strip()[-600:]}"


def out(result):
    return result.stdout.decode(errors="replace") if isinstance(result.stdout, bytes) else result.stdout


def must(result):
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(result.args)}: {told(result)}")
    return result


def need(program):
    if shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
        raise Unavailable(f"no {program}")


def copy_sparse(source, target):
    """`target` becomes a copy of `source`, holes stay holes."""
    with open(source, "rb") as src, open(target, "wb") as dst:
        size = os.fstat(src.fileno()).st_size
        os.ftruncate(dst.fileno(), size)
        at = 0
        while at < size:
            try:
                at = os.lseek(src.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(src.fileno(), at, os.SEEK_HOLE)
            os.lseek(dst.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(dst.fileno(), src.fileno(), at, end - at)


def mount(context, case, image, folder):
    options = ",".join(filter(None, ["loop", case["variant"][1]]))
    return call(context, "mount", "-t", case["fs"], "-o", options, image, folder)


def unmount(context, folder):
    end = time.monotonic() + 20
    while True:
        result = call(context, "umount", folder)
        if result.returncode == 0 or not os.path.ismount(folder):
            return
        if time.monotonic() > end:
            call(context, "umount", "-l", folder)
            raise RuntimeError(f"umount {folder}: {told(result)}")
        time.sleep(0.05)


def program(context, name, source, *flags):
    """The target `name`, or the same made here where nobody built it."""
    built = pathlib.Path(context.bin) / "tests" / name
    if built.exists():
        return built
    made = pathlib.Path(context.work) / name
    if not made.exists():
        if shutil.which("c++") is None:
            raise NothingWorks(f"no {name}, and no c++ to make it")
        partial = made.with_suffix(f".{os.getpid()}")
        result = call(context, "c++", "-std=c++20", "-O1", HERE.with_name(source), "-o", partial, *flags, timeout=240)
        if result.returncode != 0:
            raise NothingWorks(f"no {name}, and it cannot be made here: {told(result)}")
        partial.rename(made)
    return made


def recorder_program(context):
    return program(context, "torture_recorder", "recorder.cc", "-I/usr/include/fuse3", "-lfuse3")


def saver_program(context):
    library = pathlib.Path(context.bin) / "lib"
    return program(context, "torture_saver", "saver.cc", f"-I{HERE.parents[2] / 'include'}", f"-L{library}", "-ltensormount",
                   f"-Wl,-rpath,{library}")


class Disk:
    """A new filesystem on a recorder: below `folder` base.img (as mkfs made it), log, and root, its mount."""

    def __init__(self, context, folder, case):
        self.context, self.folder, self.case = context, folder, case
        self.root, self.at = folder / "root", folder / "disk"
        self.lock = threading.Lock()

    def make_base(self):
        if os.geteuid() != 0:
            raise NothingWorks("only root may mount")
        command, size, _, _ = FILESYSTEMS[self.case["fs"]]
        need(command[0])
        base = self.folder / "base.img"
        with open(base, "wb") as file:
            os.ftruncate(file.fileno(), size * MIB)
        made = call(self.context, *command, *self.case["variant"][0], base)
        if made.returncode != 0:
            raise Unavailable(f"{command[0]}: {told(made)}")
        call(self.context, "fallocate", "--dig-holes", base)
        return base

    def __enter__(self):
        base, live = self.make_base(), self.folder / "live.img"
        self.at.mkdir()
        self.root.mkdir()
        copy_sparse(base, live)
        self.server = subprocess.Popen(
            [str(recorder_program(self.context)), str(self.at), str(live), str(self.folder / "log")], stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 20
            while not (self.at / "mark").exists():
                if self.server.poll() is not None or time.monotonic() > end:
                    raise NothingWorks("the recorder does not mount: no /dev/fuse?")
                time.sleep(0.01)
            result = mount(self.context, self.case, self.at / "disk", self.root)
            if result.returncode != 0:
                raise Unavailable(f"{self.case['fs']} cannot be mounted: {told(result)}")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        try:
            unmount(self.context, self.root)
        finally:
            self.end()

    def end(self):
        if os.path.ismount(self.at):
            unmount(self.context, self.at)
        try:
            self.server.wait(20)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        (self.folder / "live.img").unlink(missing_ok=True)

    def mark(self, text):
        with self.lock, open(self.at / "mark", "wb", buffering=0) as file:
            file.write(text.encode())


class Noise(threading.Thread):
    """What other programs and the kernel's own time do to the order of writes: files that are written
    back without a flush, and commits of the journal that no operation of ours asked for."""

    def __init__(self, root, seed):
        super().__init__(daemon=True)
        self.root, self.rng, self.over = root, random.Random(seed), threading.Event()

    def run(self):
        while not self.over.wait(self.rng.uniform(0.002, 0.03)):
            try:
                self.step()
            except OSError:
                pass  # A file that went away meanwhile.

    def step(self):
        kind = self.rng.random()
        if kind < 0.2:
            fd = os.open(self.root, os.O_RDONLY)
            LIBC.syncfs(fd)
        elif kind < 0.4:
            fd = os.open(f"{self.root}/noise", os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(fd, self.rng.randbytes(4096), 4096 * self.rng.randrange(16))
            os.fdatasync(fd)
        else:
            files = [os.path.join(folder, name) for folder, _, names in os.walk(f"{self.root}/S") for name in names]
            if not files:
                return
            fd = os.open(self.rng.choice(files), os.O_RDONLY | os.O_NONBLOCK)
            LIBC.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)
        os.close(fd)


class Log:
    def __init__(self, path):
        self.raw = pathlib.Path(path).read_bytes()
        self.records, at = [], 0
        while at < len(self.raw):
            kind, offset, length = struct.unpack_from("<QQQ", self.raw, at)
            self.records.append((chr(kind), offset, at + 24, length))
            at += 24 + length
        self.flushes = [i for i, record in enumerate(self.records) if record[0] == "F"]
        self.marks = [(i, bytes(self.raw[r[2]:r[2] + r[3]]).decode().split()) for i, r in enumerate(self.records)
                      if r[0] == "M"]

    def apply(self, fd, numbers):
        view = memoryview(self.raw)
        for number in numbers:
            kind, offset, at, length = self.records[number]
            if kind == "W":
                os.pwrite(fd, view[at:at + length], offset)


def choose_states(log, rng, count, flushes, sector):
    """(cut, first record of the open epoch, [(record, kept sectors or None for all)] in order, kind). No state twice: as
    many as there are marks and bytes to tell them apart."""
    first = next((i for i, text in log.marks if text[0] == "begin"), 0)
    done = [i + 1 for i, text in log.marks if text[0] == "done"]
    states, seen = [], set()
    for _ in range(count * 20):
        where = rng.random()
        if where < 0.35 and done:  # Soon after an acknowledgement: what it promised may not be among what is open.
            cut = rng.choice(done)
            cut = rng.randint(cut, next((i for i in flushes if i >= cut), len(log.records)))
        elif where < 0.65 and flushes:  # All of an epoch open.
            cut = rng.choice([i for i in flushes if i >= first] or [len(log.records)])
        else:
            cut = rng.randint(first, len(log.records))
        epoch = max((i + 1 for i in flushes if i < cut), default=0)
        writes = [i for i in range(epoch, cut) if log.records[i][0] == "W"]
        kind = rng.choice(["none", "all", "some", "some", "torn"])
        if kind == "none":
            kept = []
        elif kind == "all":
            kept = [(i, None) for i in writes]
        else:
            share = rng.choice([0.1, 0.5, 0.9])
            kept = [(i, None) for i in writes if rng.random() < share]
            rng.shuffle(kept)
            if kind == "torn":
                kept = [(i, torn(log.records[i][3], rng, sector) if rng.random() < 0.6 else None) for i, _ in kept]
        key = (epoch, sum(i < cut for i, _ in log.marks), repr(kept))
        if key in seen:
            continue
        seen.add(key)
        states.append((cut, epoch, kept, kind))
        if len(states) == count:
            break
    return sorted(states, key=lambda state: state[1])


def torn(length, rng, sector):
    """Which sectors of a write reached the disk: some, or the first ones."""
    sectors = range(0, length, sector)
    if rng.random() < 0.5:
        return list(sectors)[:rng.randint(0, len(sectors))]
    return [at for at in sectors if rng.random() < 0.5]

def materialise(log, kept, sector, fd):
    """The open epoch of a state, over an image of all earlier ones."""
    for record, sectors in kept:
        if sectors is None:
            log.apply(fd, [record])
            continue
        _, offset, begin, length = log.records[record]
        for part in sectors:
            os.pwrite(fd, log.raw[begin + part:begin + min(part + sector, length)], offset + part)
