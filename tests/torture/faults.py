# SPDX-License-Identifier: Apache-2.0
"""The n-th call of one file operation fails under one command: what was committed stays whole, what is
said is true, and the next gc and save work."""

import errno
import json
import math
import pathlib
import re
import struct
import subprocess
import sys

import crash_disk
import stores

NAME = "faults"
UNIT = "faults"
TARGET = 5000

HERE = pathlib.Path(__file__).resolve().parent
# In the order of fail_call.c.
OPS = ("open", "read", "write", "sync", "rename", "unlink", "mkdir", "stat", "close", "statfs", "readdir", "flock", "copy",
       "truncate", "link", "mmap", "chmod", "populate")
HOW = {
    "open": ("EIO", "EMFILE", "ENFILE", "EACCES", "ENOSPC", "EDQUOT", "ENOMEM", "EINTR", "ESTALE"),
    "read": ("EIO", "EINTR", "ESTALE", "short", "short"),
    "write": ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EFBIG", "short", "short"),
    "sync": ("EIO", "ENOSPC", "EDQUOT", "EINTR"),
    "rename": ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EINTR"),
    "unlink": ("EIO", "EACCES", "EBUSY", "EINTR"),
    "mkdir": ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EMLINK"),
    "stat": ("EIO", "EACCES", "ENOMEM", "ESTALE"),
    "close": ("EIO", "EDQUOT", "ENOSPC", "EINTR"),
    "statfs": ("EIO", "ENOSYS"),
    "readdir": ("EIO", "ENOMEM", "ESTALE"),
    "flock": ("ENOLCK", "EIO", "EINTR", "EOPNOTSUPP"),
    "copy": ("EIO", "ENOSPC", "EXDEV", "EOPNOTSUPP", "short"),
    "truncate": ("EIO", "ENOSPC", "EFBIG", "EINTR"),
    "link": ("EIO", "EMLINK", "EPERM", "EXDEV"),
    "mmap": ("ENOMEM", "ENODEV", "EACCES"),
    "chmod": ("EPERM", "EIO", "EROFS"),
    "populate": ("EFAULT", "ENOMEM", "EINVAL"),
}
# Errors that last: the same call fails from there on.
LASTING = ("ENOSPC", "EDQUOT", "EMFILE", "ENOLCK", "EOPNOTSUPP", "EIO")

# What only reads: the words, and whether equal runs print equal text.
READERS = {
    "ls": (["ls", "S"], True), "ls_latest": (["ls", "-l", "S/latest"], True), "info": (["info", "S"], True),
    "info_latest": (["info", "S/latest"], True), "verify": (["verify", "S"], True), "verify_json": (["--json", "verify", "S/step-2"], True),
    "fsck": (["fsck", "S"], True), "fsck_data": (["fsck", "S", "--read-data"], True),
    "load": (["load", "S/latest", "--ranks", "2", "--shard", "cols", "--compare", "v3.safetensors"], False),
    "load_adopted": (["load", "S/adopted", "--compare", "v0.safetensors"], False), "cat": (["cat", "S/step-2", "w[3:60,5:40]"], True),
    "export": (["export", "S/step-1", "exported.safetensors", "--to", "safetensors"], False),
    "diff": (["diff", "S/step-1", "S/step-2", "--values"], True),
}
# What writes: the words, the checkpoint that it makes or removes, what that held before and holds after it.
WRITERS = {
    "save": (["import", "v4.safetensors", "S/new", "--ranks", "2"], "new", None, "v4"),
    "save_files": (["import", "v4.safetensors", "S/new", "--ranks", "3", "--placement", "tensor-file"], "new", None, "v4"),
    "save_writers": (["import", "v4.safetensors", "S/new", "--ranks", "2", "--writers", "4"], "new", None, "v4"),
    "save_one": (["import", "v4.safetensors", "S/new", "--placement", "safetensors"], "new", None, "v4"),
    "save_first": (["import", "v4.safetensors", "S/new"], "new", None, "v4"),
    "replace": (["import", "v4.safetensors", "S/step-3", "--ranks", "2", "--if-exists", "replace"], "step-3", "v3", "v4"),
    "adopt": (["adopt", "v4.safetensors", "S/new"], "new", None, "v4"),
    "rm": (["rm", "S/step-3"], "step-3", "v3", None),
    "gc": (["gc", "S", "--grace", "0", "--staging-age", "0"], None, None, None),
    "rebuild": (["fsck", "S", "--rebuild"], None, None, None),
    "publish": (["publish", "S/.staging/published", "--as", "new"], "new", None, "v5"),
}
# What saver.cc saves in the background, the second while the first may be under way.
BACKGROUND = {"new": "v4", "newer": "v5"}
COMMANDS = (*READERS, *WRITERS, "background", "mount_write", "mount_read")
WHOLE = {"adopted": "v0", "step-1": "v1", "step-2": "v2", "step-3": "v3"}


def fault(context, store, op=None, n=0, how="EIO", lasting=False):
    """The environment in which the call fails, and the file with the counts."""
    counts = context.work / "counts"
    counts.unlink(missing_ok=True)
    env = {"LD_PRELOAD": stores.preload(context, "fail_call"), "TORTURE_ROOT": str(store), "TORTURE_COUNTS": str(counts)}
    if op is not None:
        env |= {"TORTURE_OP": op, "TORTURE_N": str(n), "TORTURE_HOW": how if how.islower() else str(getattr(errno, how))}
        if lasting:
            env["TORTURE_REPEAT"] = "1"
    return env, counts


def counted(counts):
    """Op -> calls, and how many failed."""
    if not counts.exists():
        return {}, 0
    numbers = struct.unpack(f"<{len(OPS) + 1}I", counts.read_bytes())
    return dict(zip(OPS, numbers)), numbers[-1]


def words(context, store, some):
    """A command with the store, and files of the family's folder, put in."""
    def put(word):
        if word == "S" or word.startswith("S/"):
            return str(store) + word[1:]
        return str(context.work / word) if word.endswith(".safetensors") else word
    return [context.tool, *map(put, some)]


def command(context, name, store):
    """What is run for a name that is no mount."""
    if name != "background":
        return words(context, store, (READERS.get(name) or WRITERS[name])[0])
    listed = []
    for number, (target, version) in enumerate(BACKGROUND.items()):
        listed.append(f"{number} {store / target} {len(stores.SHAPES)}")
        raw = stores.model(context, version).read_bytes()
        length, = struct.unpack_from("<Q", raw)
        for key, entry in json.loads(raw[8:8 + length]).items():
            listed.append(" ".join(map(str, [key, entry["dtype"].lower(), 8 + length + entry["data_offsets"][0], len(entry["shape"]),
                                             *entry["shape"]])))
    (context.work / "list").write_text("\n".join(listed) + "\n")
    (context.work / "marks").write_text("")
    try:
        saver = crash_disk.saver_program(context)
    except crash_disk.Unavailable as lack:
        context.missing(str(lack))
    return [saver, context.work / "marks", context.work / "list", *(stores.model(context, version) for version in BACKGROUND.values())]


def client(context, *more):
    done = context.run([sys.executable, "-B", str(HERE / "client.py"), *more], timeout=40)
    return json.loads(done.stdout) if done.returncode == 0 else {"errors": [f"exit {done.returncode}: {done.stderr}"], "hung": True}


def make(context):
    """The store that every case begins with, and one whose index is damaged; the points where calls are made."""
    if "points" in context.kept:
        return
    for version in ("v0", "v1", "v2", "v3", "v4", "v5", "later"):
        stores.model(context, version)
    store = context.work / "template"
    at = lambda version, name, *more: stores.must(context, "import", context.work / f"{version}.safetensors", store / name, *more)
    stores.must(context, "adopt", context.work / "v0.safetensors", store / "adopted")
    at("v0", "step-0")
    at("v1", "step-1", "--ranks", 2)
    at("v2", "step-2", "--ranks", 2, "--shard", "cols", "--placement", "rank-shard")
    at("v3", "step-3", "--ranks", 3, "--placement", "tensor-file")
    stores.must(context, "rm", store / "step-0")
    # A save that was killed: what it left is there for fsck and gc.
    env, _ = fault(context, store, "sync", 3, "kill")
    context.run(words(context, store, ["import", "v1.safetensors", "S/killed", "--ranks", "2"]), env=env)
    stores.need_fuse(context)
    staged = stores.Mount(context, store, context.work / "mnt")
    done = client(context, "write", str(staged.at), "v5")
    staged.close()
    if not done["published"]:
        raise RuntimeError(f"{done} {staged.said()}")
    # Published once, so it can be; the store with a staging that waits is made without the publish.
    stores.must(context, "rm", store / "published")
    staging = stores.copy(store, context.work / "staged")
    mount = stores.Mount(context, staging, context.work / "mnt")
    client(context, "stage", str(mount.at), "v5")
    mount.close()
    damaged = stores.copy(store, context.work / "damaged")
    (damaged / "step-2/index/index.sst").write_bytes(b"no index")
    (damaged / "store.json").unlink()
    nothing = context.work / "nothing"
    nothing.mkdir()
    context.kept["templates"] = {"publish": staging, "rebuild": damaged, "save_first": nothing}
    context.kept["template"] = store
    context.kept["said"] = {}
    points = []
    for name in COMMANDS:
        used = begin(context, name)
        env, counts = fault(context, used)
        if name.startswith("mount_"):
            ran, _, _ = through_mount(context, name, used, env)
        else:
            ran = context.run(command(context, name, used), env=env)
            if ran.returncode != (1 if name == "diff" else 0):
                raise RuntimeError(f"{name} without a fault: exit {ran.returncode}: {ran.stderr}")
            context.kept["said"][name] = ran
        calls, _ = counted(counts)
        points += [(name, op, n) for op in OPS for n in range(calls[op])]
    context.kept["points"] = points
    print(f"faults: {len(points)} calls under {len(COMMANDS)} commands")


def begin(context, name):
    """A store for a case; those that only read share one, which must not change."""
    template = context.kept["templates"].get(name, context.kept["template"])
    shared = context.work / "shared"
    if name in READERS or name == "mount_read":
        return shared if shared.exists() else stores.copy(template, shared)
    return stores.copy(template, context.work / "store")


def tree(store):
    return sorted((str(path.relative_to(store)), stat.st_size, stat.st_mtime_ns, stat.st_ino) for path in store.rglob("*")
                  if (stat := path.lstat()))


def through_mount(context, name, store, env):
    """The daemon's end, what the client got, what the daemon said."""
    mount = stores.Mount(context, store, context.work / "mnt", env=env)
    got = {"errors": [], "down": True}
    if mount.is_up:
        got = client(context, "write", str(mount.at), "v5") if name == "mount_write" else client(context, "read", f"{mount.at}/latest")
    status = mount.close()
    return subprocess.CompletedProcess(name, status, b"", mount.said()), got, mount


def point(context, index):
    """Which call fails, and how: all calls in turn, in an order that jumps between commands, from where the seed says.
    Threads and names make some calls more or fewer, so a finding names its call: NAME,OP,N,HOW[,lasting]."""
    if isinstance(index, str):
        name, op, n, how, *lasting = index.split(",")
        return name, op, int(n), how, bool(lasting)
    points = context.kept["points"]
    rng = context.rng(index)
    stride = next(s for s in range(len(points) * 618 // 1000, 2 * len(points)) if math.gcd(s, len(points)) == 1)
    first = context.rng("first").randrange(len(points))
    name, op, n = points[(first + index * stride) % len(points)]
    how = "kill" if rng.random() < 0.08 else rng.choice(HOW[op])
    lasting = how in LASTING and rng.random() < 0.3
    return name, op, n, how, lasting


def run(context, index):
    make(context)
    name, op, n, how, lasting = point(context, index)
    store = begin(context, name)
    env, counts = fault(context, store, op, n, how, lasting)
    before = tree(store) if name in READERS or name == "mount_read" else None
    got = None
    if name.startswith("mount_"):
        done, got, _ = through_mount(context, name, store, env)
    else:
        (context.work / "exported.safetensors").unlink(missing_ok=True)
        done = context.run(command(context, name, store), env=env, timeout=60)
    _, failed = counted(counts)
    again = f"scripts/torture --case faults:{name},{op},{n},{how}{',lasting' if lasting else ''}"

    def wrong(text, more=""):
        more = more.decode(errors="replace") if isinstance(more, bytes) else more
        context.finding(f"{name}, {how}: {text}\n  call {n} of {op}{', and all after it' if lasting else ''}; exit {done.returncode}: "
                        f"{done.stderr.strip()[-700:]}\n  {more[-600:]}", again)

    check_end(done, how, failed, wrong)
    if name in READERS:
        check_reader(context, name, done, context.kept["said"][name], how, wrong)
    elif name == "mount_read":
        check_mount_read(got, wrong)
    elif name == "mount_write":
        check_mount_write(context, store, done, got, how, wrong)
    elif name == "background":
        check_background(context, store, done, wrong)
    else:
        check_writer(context, name, store, done, wrong)
    if before is not None and tree(store) != before:
        wrong("a command that only reads changed the store")
        stores.copy(context.kept["template"], store)
    return 1 if failed else 0


def check_end(done, how, failed, wrong):
    """No crash, no hang, and an error is said."""
    status = done.returncode
    if how == "kill" and failed and status == -9:
        return
    if status == "timeout":
        wrong("it did not end")
    elif status < 0:
        wrong(f"signal {-status}")
    elif status not in (0, 1, 2):
        wrong(f"exit {status} is none of ours")
    elif status == 2 and not (stores.code_is_named(done.stderr) or re.search(rb"not checked: |\b[A-Z_]{5,}: ", done.stdout)):
        wrong("an error without a code and a message", done.stdout)


def check_reader(context, name, done, clean, how, wrong):
    """`clean`: what the command says where nothing fails."""
    if done.returncode == 0 or (done.returncode == 1 and clean.returncode == 1):
        if READERS[name][1] and done.stdout != clean.stdout:
            wrong("success, and other text", done.stdout)
        if name == "export" and (why := stores.wrong_model(context.work / "exported.safetensors", "v1")):
            wrong("success, and other bytes", why)
    elif done.returncode == 1 and not (how == "EIO" and "Input/output error" in done.stderr + done.stdout.decode(errors="replace")):
        # What a disk does not give is damage until it gives it; all else says nothing of the bytes.
        wrong("a healthy checkpoint is called damaged", done.stdout)
    if "tensormount rm" in done.stderr or b"tensormount rm" in done.stdout or "then remove" in done.stderr:
        wrong("it advises to remove a healthy checkpoint", done.stdout)
    if name == "export" and done.returncode != 0 and (context.work / "exported.safetensors").exists():
        # Killed after it was there, or not sure that it lasts: then it is whole.
        why = "it said that it failed" if done.returncode == 2 and "UNKNOWN" not in done.stderr else ""
        if why := why or stores.wrong_model(context.work / "exported.safetensors", "v1"):
            wrong("a failed export left its name", why)


def check_writer(context, name, store, done, wrong):
    _, target, old, new = WRITERS[name]
    whole = {} if name == "save_first" else dict(WHOLE)
    if target is not None:
        whole.pop(target, None)
        unsure = "UNKNOWN" in done.stderr or done.returncode == -9
        allowed = [new] if done.returncode == 0 else [old, new] if unsure else [old]
        check_target(context, store, target, old, new, allowed, wrong)
    check_store(context, store, whole, wrong, healthy=name != "rebuild")


def check_target(context, store, target, old, new, allowed, wrong):
    """Whether a name holds one of the versions that are allowed; None: it may be absent."""
    there = (store / target).exists()
    if there and None in allowed and len(allowed) == 1:
        wrong("it failed, and what it makes is there" if new else "it is said to be removed, and is there",
              f"with {new or old}: {stores.wrong_checkpoint(context, store / target, new or old) or 'whole'}")
    elif not there and None not in allowed:
        wrong("what should be there is gone")
    elif there:
        reasons = [stores.wrong_checkpoint(context, store / target, version) for version in allowed if version is not None]
        if all(reasons):
            wrong("neither what was there nor what was saved", reasons[0])


def check_background(context, store, done, wrong):
    """Each save is what its own verdict says; without one (killed, or an error before) it is what the end allows."""
    told = {int(number): event for event, number in map(str.split, (context.work / "marks").read_text().splitlines())}
    unsure = "UNKNOWN" in done.stderr or done.returncode == -9
    for number, (target, version) in enumerate(BACKGROUND.items()):
        committed = told.get(number) == "done"
        if done.returncode == 0 and not committed:
            wrong(f"success, and no verdict of {target}")
        check_target(context, store, target, None, version, [version] if committed else [None, version] if unsure else [None], wrong)
    check_store(context, store, WHOLE, wrong)


def check_store(context, store, whole, wrong, healthy=True):
    """What was committed is whole, by all that look; a later gc and save work, and the save is the latest."""
    # All by their hashes below; the bytes of one, which Python compares.
    names = sorted(whole)
    if healthy and names and isinstance(context.index, int):
        names = [names[context.index % len(names)]]
    for name in names:
        version = whole[name]
        if why := stores.wrong_checkpoint(context, store / name, version):
            wrong(f"{name}, which was committed before, is not whole", why)
    if not (store / "store.json").exists() and not whole:
        healthy = None  # Not a store yet, or still not.
    if healthy:
        verified = context.run([context.tool, "verify", store])
        if verified.returncode != 0:
            wrong(f"afterwards verify exits {verified.returncode}", verified.stderr[-400:] + verified.stdout.decode(errors="replace")[-400:])
    if healthy is not None:
        looked = context.run([context.tool, "--json", "fsck", store, *([] if healthy else ["--rebuild"])])
        events = [json.loads(line) for line in looked.stdout.splitlines()]
        if looked.returncode == 2 or (healthy and any(event.get("damage") for event in events)):
            wrong(f"afterwards fsck exits {looked.returncode}", looked.stderr[-300:] + looked.stdout.decode(errors="replace")[-700:])
        freed = context.run([context.tool, "gc", store, "--grace", "0", "--staging-age", "0"])
        if freed.returncode != 0:
            wrong(f"a later gc exits {freed.returncode}", freed.stderr)
    later = context.run([context.tool, "import", context.work / "later.safetensors", store / "later", "--ranks", "2"])
    if later.returncode != 0:
        wrong(f"a later save exits {later.returncode}", later.stderr)
    elif why := stores.wrong_checkpoint(context, store / "latest", "later"):
        wrong("latest is not the later save", why)


def check_mount_read(got, wrong):
    if got.get("hung"):
        wrong("the client hangs or fails", str(got["errors"]))
    for key in stores.SHAPES:
        value = got.get(key, "E")
        if not value.startswith("E") and value != stores.content(key, "v3").hex():
            wrong(f"the mount gave other bytes of {key}")


def check_mount_write(context, store, done, got, how, wrong):
    if got.get("hung"):
        wrong("the client hangs or fails", str(got["errors"]))
        return
    new = store / "published"
    if got.get("published"):
        if why := stores.wrong_checkpoint(context, new, "v5"):
            wrong("published, and it is not whole", why)
    elif new.exists():
        if "UNKNOWN" not in done.stderr and done.returncode != -9:
            wrong("the publish failed, and it is there", str(got["errors"]))
        if why := stores.wrong_checkpoint(context, new, "v5"):
            wrong("a publish that failed left it, and it is not whole", why)
    elif got.get("written"):
        # Every close and sync and the done mark were acknowledged: it can be published without this mount.
        later = context.run([context.tool, "publish", store / ".staging/published", "--as", "published"])
        if later.returncode != 0:
            wrong(f"what was acknowledged cannot be published later: exit {later.returncode}", f"{got['errors']} {later.stderr[-500:]}")
        elif why := stores.wrong_checkpoint(context, new, "v5"):
            wrong("what was acknowledged is published later, and it is not whole", why)
    check_store(context, store, WHOLE, wrong)


def plant(context):
    """A write of data that does nothing and says that it did, and a command that hides a failure."""
    make(context)

    def planted(prefix, op, n, how):
        before = len(context.findings)
        store = begin(context, "save")
        env, _ = fault(context, store, op, n, how)
        done = context.run([*prefix, *words(context, store, WRITERS["save"][0])], env=env)
        check_writer(context, "save", store, done, lambda text, more="": context.finding(f"planted, {how}: {text}\n  {more}", ""))
        return len(context.findings) > before

    # Manifests come first or last, as threads have it; of what is short the save itself says so.
    lied = any([planted((), "write", n, "lie") for n in range(2, 12)])
    return lied and planted(("/bin/sh", "-c", '"$@"; exit 0', "sh"), "sync", 4, "EIO")
