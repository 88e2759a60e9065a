# SPDX-License-Identifier: Apache-2.0
"""Commands on a store below tests/support/adverse_fs.cc, a stand-in for NFS, Lustre and dying disks, by random
rules: the promises of the family faults."""

import shutil
import subprocess
import sys

import faults
import stores

sys.path.insert(0, str(faults.HERE.parent / "support"))
from adverse import AdverseFs

NAME = "hosts"
UNIT = "commands"
TARGET = 500

ERRORS = {"read": ("EIO", "ESTALE"), "open": ("EIO", "ESTALE", "EACCES"), "lookup": ("EIO", "ESTALE", "EACCES"), "getattr": ("EIO", "ESTALE"),
          "readdir": ("EIO", "ESTALE"), "write": ("EIO", "ENOSPC", "EDQUOT"), "fsync": ("EIO", "ENOSPC"), "rename": ("EIO", "ESTALE"),
          "unlink": ("EIO", "EBUSY"), "rmdir": ("EIO", "EBUSY"), "create": ("EIO", "ENOSPC"), "mkdir": ("EIO", "EDQUOT"),
          "flush": ("EIO", "EDQUOT"), "setattr": ("EPERM", "EIO"), "link": ("EPERM",), "statfs": ("EIO", "ENOSYS")}
GLOBS = ("S/*/data/*", "S/*/index/*", "S/*/manifest/*", "S/*/COMMIT", "S/.staging*", "S/.trash*", "S/store.json", "S/step-2*", "S")


def some_rules(rng):
    """Traits of a host, which do no harm, and perhaps what fails."""
    traits = [rule for rule in ("ENOLCK lock *", "EOPNOTSUPP lock *", "EINVAL flags *") if rng.random() < 0.4]
    if rng.random() < 0.3:
        traits.append(f"wait:0.05 {rng.choice(('open', 'read', 'fsync', 'rename', 'readdir'))} {rng.choice(GLOBS)}")
    faulty = []
    if rng.random() < 0.7:
        operation = rng.choice(sorted(ERRORS))
        at = rng.choice(("", "", f" {rng.randrange(5) * 4096} {rng.randrange(5, 9) * 4096}")) if operation in ("read", "write") else ""
        faulty.append(f"{rng.choice(ERRORS[operation])} {operation} {rng.choice(GLOBS)}{at}")
    return traits, faulty


def run(context, index, planted=None):
    stores.need_fuse(context)
    program = context.bin / "tests/adverse_fs"
    if not program.exists():
        context.missing("tests/adverse_fs is not built")
    faults.make(context)
    rng = context.rng(index)
    name = rng.choice((*faults.READERS, *faults.WRITERS, *faults.WRITERS, "mount_read", "mount_write"))
    traits, faulty = some_rules(rng)
    silly = rng.random() < 0.5
    if planted:
        name, traits, faulty, silly = planted
    # EIO is the one that may be called damage.
    how = "EIO" if any(rule.startswith("EIO ") for rule in faulty) else "others"
    folder = context.work / "host"
    host = AdverseFs(program, folder, *(["--silly"] if silly else []))
    try:
        store = stores.copy(context.kept["templates"].get(name, context.kept["template"]), host.backing / "S")
        shown = host.at / "S"
        host.rules(*traits, *faulty)
        got = None
        if name.startswith("mount_"):
            done, got, _ = faults.through_mount(context, name, shown, {})
        else:
            (context.work / "exported.safetensors").unlink(missing_ok=True)
            hide = ("/bin/sh", "-c", '"$@"; exit 0', "sh") if planted else ()
            done = context.run([*hide, *faults.words(context, shown, (faults.READERS.get(name) or faults.WRITERS[name])[0])], timeout=60)
        met = host.met()
        host.rules(*traits)

        def wrong(text, more=""):
            more = more.decode(errors="replace") if isinstance(more, bytes) else more
            context.finding(f"{name}, {how}: {text}\n  {traits + faulty}{' with .nfs names' if silly else ''}; exit {done.returncode}: "
                            f"{done.stderr.strip()[-700:]}\n  {more[-600:]}", f"scripts/torture --seed {context.seed} --case hosts:{index}")

        failed = [line for line in met if any(line.startswith(" ".join(rule.split()[:2]) + " ") for rule in faulty)]
        faults.check_end(done, how, failed, wrong)
        if not failed and not planted and not name.startswith("mount_"):
            # A host's traits alone: all works, but what it cannot do at all, and gc, which cannot see readers.
            clean = 1 if name == "diff" else 0
            if done.returncode != clean and "UNSUPPORTED" not in done.stderr:
                wrong(f"nothing failed, and it exits {done.returncode}")
        if name in faults.READERS:
            if failed:
                faults.check_reader(context, name, done, as_shown(context, name, shown), how, wrong)
        elif name == "mount_read":
            faults.check_mount_read(got, wrong)
        elif name == "mount_write":
            faults.check_mount_write(context, shown, done, got, how, wrong)
        else:
            faults.check_writer(context, name, shown, done, wrong)
        if name in faults.READERS or name == "mount_read":
            faults.check_store(context, shown, faults.WHOLE, wrong)
        return 1
    finally:
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


def as_shown(context, name, shown):
    """What the command says of the same store when nothing fails there; of an export only that it would end well."""
    if name == "export":  # It would put its file where the one that failed is looked for.
        return subprocess.CompletedProcess(name, 0, b"", "")
    return context.run(faults.words(context, shown, faults.READERS[name][0]))


def plant(context):
    """A disk that drops writes of data and says that it did them, and one that fails, under a command that hides it."""
    found = []
    for rule in ("lie write S/.staging/*data/*", "EIO fsync S/.staging/*data/*"):
        before = len(context.findings)
        run(context, f"planted {rule}", ("save", ["EINVAL flags *"], [rule], True))
        found.append(len(context.findings) > before)
    return all(found)
