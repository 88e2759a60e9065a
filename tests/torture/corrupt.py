# SPDX-License-Identifier: Apache-2.0
"""Every region of every file of a store is changed, cut, removed or replaced: right bytes or an error,
verify names the file, and what fsck --rebuild calls sound is."""

import math
import os
import shutil

import faults
import stores

NAME = "corrupt"
UNIT = "regions"
TARGET = 3000

# Layout -> how its checkpoint is made from the model of that version.
LAYOUTS = {
    "auto": ["import", "--ranks", "2"],
    "shards": ["import", "--ranks", "2", "--shard", "cols", "--placement", "rank-shard"],
    "files": ["import", "--ranks", "3", "--placement", "tensor-file"],
    "one": ["import", "--placement", "safetensors"],
    "adopted": ["adopt"],
    "derived": ["import", "--ranks", "2"],
    "mounted": None,
}
WHOLE_FILE = ("cut", "empty", "longer", "removed", "folder", "fifo", "link", "loop")
REGION = ("flip", "zero", "random", "moved")


def make(context):
    """A store for each layout, and all regions in them, every file as a whole among them."""
    if "regions" in context.kept:
        return
    regions = []
    for layout, how in LAYOUTS.items():
        folder = context.work / layout
        folder.mkdir(exist_ok=True)
        store = folder / "S"
        stores.write_model(folder / "model.safetensors", layout)
        shutil.copy(folder / "model.safetensors", context.work / f"{layout}-truth.safetensors")
        if how is None:
            stores.must(context, "import", folder / "model.safetensors", store / "first")
            stores.must(context, "rm", store / "first")
            stores.must(context, "gc", store, "--grace", "0")
            stores.need_fuse(context)
            mount = stores.Mount(context, store, context.work / "mnt")
            done = faults.client(context, "write", str(mount.at), layout)
            mount.close()
            if not done["published"]:
                raise RuntimeError(str(done))
        else:
            stores.must(context, how[0], folder / "model.safetensors", store / "published", *how[1:])
        if layout == "derived":
            (store / "published/index/index.sst").unlink()
            stores.must(context, "fsck", store, "--rebuild")
        # By where they stand and how long they are: names hold the random id of a save.
        files = sorted((path.relative_to(folder) for path in folder.rglob("*")
                        if path.is_file() and (how == ["adopt"] or path.name != "model.safetensors")),
                       key=lambda path: (str(path.parent), (folder / path).stat().st_size, str(path)))
        for path in files:
            size = (folder / path).stat().st_size
            step = 512 if path.parent.name == "data" or path.suffix == ".safetensors" else 128
            regions += [(layout, path, at, min(step, size - at)) for at in range(0, size, step)]
            regions += [(layout, path, None, way) for way in WHOLE_FILE]
    context.kept["regions"] = regions
    print(f"corrupt: {len(regions)} regions in {len(LAYOUTS)} layouts")


def keep_times(path, times, rng):
    """Mostly as a disk changes bytes: nobody sees it by the time."""
    if rng.random() < 0.7:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def change(path, at, how, rng):
    """Does it, and says what it did; None: nothing would differ."""
    if at is None:
        times, size = path.stat(), path.stat().st_size
        if (how in ("cut", "empty") and size == 0) or (how == "cut" and size == 1):
            return None
        if how in ("cut", "empty"):
            cut = rng.randrange(1, size) if how == "cut" else 0
            os.truncate(path, cut)
            keep_times(path, times, rng)
            return f"cut to {cut} of {size} bytes"
        if how == "longer":
            with open(path, "ab") as file:
                file.write(rng.randbytes(rng.choice((1, 7, 4096))))
            keep_times(path, times, rng)
            return "made longer"
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "loop":
            path.symlink_to(path.name)
        elif how == "link":
            path.symlink_to("/etc/passwd")
        return how if how == "removed" else f"made a {how}"
    raw = bytearray(path.read_bytes())
    old = bytes(raw)
    way = rng.choice(REGION)
    if way == "flip":
        raw[at + rng.randrange(how)] ^= 1 << rng.randrange(8)
    elif way == "zero":
        raw[at:at + how] = bytes(how)
    elif way == "random":
        raw[at:at + how] = rng.randbytes(how)
    else:
        other = rng.randrange(max(1, len(raw) - how))
        raw[at:at + how] = old[other:other + how]
    if raw == old:
        way = "flip"
        raw[at] ^= 0x80
    times = path.stat()
    path.chmod(0o644)
    path.write_bytes(raw)
    keep_times(path, times, rng)
    return f"{way} of {how} bytes at {at}"


def run(context, index):
    make(context)
    regions = context.kept["regions"]
    rng = context.rng(index)
    stride = next(s for s in range(len(regions) * 618 // 1000, 2 * len(regions)) if math.gcd(s, len(regions)) == 1)
    first = context.rng("first").randrange(len(regions))
    layout, path, at, how = regions[(first + index * stride) % len(regions)]
    case = stores.copy(context.work / layout, context.work / "case")
    if layout == "adopted":
        # Adopted is what stands at an absolute path: so the template itself is changed, and put back.
        shutil.rmtree(case)
        kept = stores.copy(context.work / layout, context.work / "kept")
        try:
            return one(context, index, layout, context.work / layout, path, at, how, rng)
        finally:
            shutil.rmtree(context.work / layout)
            kept.rename(context.work / layout)
    return one(context, index, layout, case, path, at, how, rng)


def one(context, index, layout, folder, path, at, how, rng):
    vouched = counts_for_verify(folder, path, at)
    did = change(folder / path, at, how, rng)
    if did is None:
        return 0
    store = folder / "S"
    checkpoint = store / "published"
    name = path.name.split("-", 1)[-1] if path.parent.name == "data" else path.name
    last = None

    def wrong(text, more=""):
        what = did.partition(" of ")[0] if at is not None else did.partition(" to ")[0]
        context.finding(f"{layout}: {path.parent.name}/{name}: {what}: {text}\n  {path}: {did}\n  exit {last.returncode}: "
                        f"{last.stderr.strip()[-500:]} {more} {last.stdout.decode(errors='replace')[-500:]}",
                        f"scripts/torture --seed {context.seed} --case corrupt:{index}")

    def ran(*words, timeout=40):
        nonlocal last
        last = context.run([context.tool, *words], timeout=timeout)
        faults.check_end(last, "", 0, wrong)
        return last

    if vouched:
        done = ran("--json", "verify", checkpoint)
        said = done.stderr + done.stdout.decode(errors="replace")
        if done.returncode == 0:
            wrong("verify calls it whole")
        elif path.parts[-1] not in said and path.parent.name not in said and "COMMIT" not in said:
            wrong("verify does not name it")
    read_right(context, layout, store, checkpoint, rng, ran, wrong)
    if rng.random() < 0.35:
        done = ran("fsck", store, "--rebuild", "--read-data")
        if done.returncode == 0:
            done, out = stores.exported(context, checkpoint)
            if done.returncode != 0 or stores.wrong_model(out, layout):
                wrong(f"fsck calls it sound, and export exits {done.returncode}: {done.stderr[-300:]} {stores.wrong_model(out, layout)}")
            done = context.run([context.tool, "import", context.work / "auto-truth.safetensors", store / "later"])
            if done.returncode != 0:
                wrong(f"fsck calls it sound, and a save exits {done.returncode}: {done.stderr[-300:]}")
    return 1


def counts_for_verify(folder, path, at):
    """Not what nothing vouches for: leftovers of a staging of mounts, which gc removes, an index made again
    beside one that is lost anyway, what is of the store, and of an adopted file what is no tensor's."""
    if path.name == "model.safetensors" and at is not None:
        with open(folder / path, "rb") as file:
            return at >= 8 + int.from_bytes(file.read(8), "little")
    return path.name in ("model.safetensors", "COMMIT") or path.parts[1] == "published" and path.parts[2] in ("data", "manifest", "index")


def read_right(context, layout, store, checkpoint, rng, ran, wrong):
    way = rng.choice(("export", "load", "cat", "mount", "export"))
    if way == "export":
        out = context.work / "exported.safetensors"
        out.unlink(missing_ok=True)
        done = ran("export", checkpoint, out, "--to", "safetensors")
        if done.returncode == 0 and (why := stores.wrong_model(out, layout)):
            wrong(f"exported: {why}")
    elif way == "load":
        done = ran("load", checkpoint, "--ranks", "2", "--shard", rng.choice(("rows", "cols", "flat")), "--compare",
                   context.work / f"{layout}-truth.safetensors")
        if done.returncode == 1:
            wrong("load gives other bytes")
    elif way == "cat":
        key = rng.choice([key for key in stores.SHAPES if key != "one"])
        done = ran("cat", checkpoint, key)
        if done.returncode == 0 and done.stdout != stores.content(key, layout):
            wrong(f"cat gives other bytes of {key}")
    else:
        mount = stores.Mount(context, store, context.work / "mnt")
        got = faults.client(context, "read", f"{mount.at}/published") if mount.is_up else {}
        if mount.close() == "timeout" or got.get("hung"):
            wrong(f"the mount hangs: {mount.said()[-300:]}")
        for key, value in got.items():
            if key in stores.SHAPES and value is not None and not value.startswith("E") and value != stores.content(key, layout).hex():
                wrong(f"the mount gives other bytes of {key}")


def plant(context):
    """A command that exports another byte, and a verify that always says whole."""
    make(context)
    real = context.bin
    flip = 'if [ "$1" = export ]; then "$REAL" "$@" || exit; printf X | dd of="$3" bs=1 seek=700 conv=notrunc 2> /dev/null; exit 0; fi\n'
    blind = '[ "$2" != verify ] || exit 0\n'
    found = []
    for script in (flip, blind):
        context.bin = stores.fake_tool(context, script + 'exec "$REAL" "$@"')
        before = len(context.findings)
        for index in range(30):
            run(context, index)
        context.bin = real
        found.append(len(context.findings) > before)
    return all(found)
