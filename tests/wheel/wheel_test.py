#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks into the wheel, installs it into empty environments, and uses it as a stranger would.

usage: wheel_test.py contents FOLDER             its files, tag, size and licences
       wheel_test.py again FOLDER PARTS          the same parts make the same bytes
       wheel_test.py pythons FOLDER              installed and used in every Python from 3.9 on
       wheel_test.py command FOLDER              its command, under mpirun too, and its mounts
       wheel_test.py environments FOLDER DIR ENVIRONMENT...
                                                 for each ENVIRONMENT (.cache/venv) a DIR/venv with the
                                                 wheel, and behind it that one's packages: tests/python
                                                 runs in them (tests/python/CMakeLists.txt)

The newest wheel in FOLDER is taken. Pythons are found below ~/.pyenv/versions and on the PATH.
"""

import argparse
import base64
import concurrent.futures
import csv
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MOST_BYTES = 10_000_000
# Libraries of every glibc system, and the standard C++ library that manylinux_2_35 allows.
SYSTEM = re.compile(r"^(lib(c|m|pthread|dl|rt|stdc\+\+|gcc_s)|ld-linux-[-\w]+)\.so\.\d+$")
NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)}
BUNDLED = ["bz2", "fmt", "fuse3", "gflags", "lz4", "rocksdb", "snappy", "xxhash", "z", "zstd"]
VALUES = struct.pack("<512f", *range(512))


def fail(message):
    sys.exit(f"wheel_test: {message}")


def check(held, message):
    if not held:
        fail(message)


def output(*command, status=0, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != status:
        fail(f"{' '.join(map(str, command))}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def contents(wheel):
    """Names, hashes, tag, size, licences."""
    name = os.path.basename(wheel)
    machine = os.uname().machine
    found = re.fullmatch(r"tensormount-([0-9.]+)-(py3-none-manylinux_2_35_%s)\.whl" % machine, name)
    check(found, f"another name than that of one wheel for all: {name}")
    check(os.path.getsize(wheel) <= MOST_BYTES, f"{os.path.getsize(wheel)} bytes")
    about = f"tensormount-{found[1]}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        check(archive.testzip() is None, "damaged")
        files = {entry.filename: entry for entry in archive.infolist()}
        rows = list(csv.reader(archive.read(f"{about}/RECORD").decode().splitlines()))
        check(sorted(row[0] for row in rows) == sorted(files), "RECORD names other files")
        for path, digest, size in rows[:-1]:
            data = archive.read(path)
            own = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            check((digest, size) == (f"sha256={own}", str(len(data))), f"RECORD is wrong of {path}")
        check(f"Tag: {found[2]}\n" in archive.read(f"{about}/WHEEL").decode(), "another tag")
        described = archive.read(f"{about}/METADATA").decode()
        check("Requires-Python: >=3.9\n" in described, "no Requires-Python")
        check("import tensormount as tm" in described, "METADATA does not describe it")
    check("tensormount/lib/tensormount/mpi.so" in files
          or "mpi" not in os.environ.get("TENSORMOUNT_REQUIRE", ""), "no part with MPI")
    check("tensormount/lib/tensormount/libtensormount_cuda.so" in files
          or "cuda" not in os.environ.get("TENSORMOUNT_REQUIRE", ""), "no part with CUDA")
    python = {os.path.relpath(path, os.path.join(ROOT, "python"))
              for path in glob.glob(os.path.join(ROOT, "python/tensormount/**/*.py"), recursive=True)}
    expected = python | {"tensormount/py.typed", "tensormount/bin/tensormount",
                         "tensormount/lib/libtensormount.so"}
    expected |= {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    optional = {"tensormount/lib/tensormount/mpi.so",
                "tensormount/lib/tensormount/libtensormount_cuda.so"}
    libraries = {}
    for path, entry in files.items():
        bundled = re.fullmatch(r"tensormount/lib/lib(\w+)-[0-9a-f]{8}\.so[.\d]*", path)
        if bundled:
            libraries[bundled[1]] = path
        elif path not in expected | optional and not path.startswith(f"{about}/licenses/"):
            fail(f"an unexpected file: {path}")
        mode = entry.external_attr >> 16
        check(mode == (0o100755 if "/bin/" in path else 0o100644), f"{path}: mode {mode:o}")
    check(expected <= set(files), f"not there: {expected - set(files)}")
    check(sorted(libraries) == BUNDLED, f"other libraries: {sorted(libraries)}")
    with zipfile.ZipFile(wheel) as archive:
        notes = archive.read(f"{about}/licenses/BUNDLED.txt").decode()
        for path in libraries.values():
            line = next((l for l in notes.splitlines() if os.path.basename(path) in l), "")
            licence = line.rpartition(": ")[2]
            check(f"{about}/licenses/{licence}" in files, f"no licence of {path}")
        for header in ("nlohmann-json3-dev", "libcli11-dev"):
            check(f"{about}/licenses/{header}.copyright" in files, f"no licence of {header}")
        check("LGPL" in archive.read(next(n for n in files if "fuse3-3.copyright" in n)).decode(),
              "not the licence of libfuse")
        # What the system calls the RocksDB that is bundled.
        rocksdb = re.sub(r"-[0-9a-f]{8}", "", os.path.basename(libraries["rocksdb"]))
        check(b"Apache License" in archive.read(f"{about}/licenses/LICENSE"), "not our licence")
    return rocksdb


def dynamic_names(path, which):
    lines = output("nm", "-D", which, "-p", path).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.split()[-2] != "A"}


def binaries(package):
    """What they need, of which version, by which path; and that nothing in them has a name that
    another copy of the same library has."""
    paths = [os.path.join(package, "bin/tensormount")] + sorted(
        glob.glob(os.path.join(package, "lib/**/*.so*"), recursive=True))
    sonames = {os.path.basename(path) for path in paths}
    for path in paths:
        said = output("readelf", "-dW", path)
        for soname in re.findall(r"\(NEEDED\).*\[(.*)\]", said):
            mpi = path.endswith("/mpi.so") and re.match(r"libmpi\.so\.\d+$", soname)
            check(soname in sonames or SYSTEM.match(soname) or mpi, f"{path} needs {soname}")
        rpath = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", said)
        check(all(re.fullmatch(r"\$ORIGIN(/\.\.(/lib)?)?", one) for one in rpath), f"{path}: {rpath}")
        check(".symtab" not in output("readelf", "-SW", path), f"{path} is not stripped")
        for kind, version in re.findall(r"Name: ([A-Z]+)_([0-9.]+)", output("readelf", "-VW", path)):
            number = tuple(int(part) for part in version.split("."))
            check(number <= NEWEST.get(kind, number), f"{path} needs {kind}_{version}")
        if "-" in os.path.basename(path):
            odd = {name for name in dynamic_names(path, "--defined-only")
                   if not re.match(r"tm_[0-9a-f]{6}_|_(init|fini|end|edata)$|__bss_start$", name)}
            check(not odd, f"{path} offers names of its own: {sorted(odd)[:5]}")
    for name in dynamic_names(paths[0].replace("bin/tensormount", "lib/libtensormount.so"),
                              "--undefined-only"):
        check("rocksdb" not in name, f"libtensormount.so takes {name} from whoever has it")
    check(os.path.getsize(paths[0]) < 16_384, "the stub is no stub")
    # All that the C header declares, in the library or the part with MPI.
    offered = set()
    for path in paths:
        if os.path.basename(path) in ("libtensormount.so", "mpi.so"):
            offered |= dynamic_names(path, "--defined-only")
    declared = set()
    for header in ("c.h", "c_store.h"):
        with open(os.path.join(ROOT, "include/tensormount", header), encoding="utf-8") as file:
            declared |= set(re.findall(r"^TM_EXPORT [^\n(]*?\b(tm_\w+)\(", file.read(), re.MULTILINE))
    if not any(path.endswith("/mpi.so") for path in paths):
        declared = {name for name in declared if not name.startswith("tm_mpi_")}
    check("tm_main" in declared and declared <= offered, f"not offered: {declared - offered}")


# Run in the environment: open, list, read, refuse, nothing installed besides.
SMOKE = """
import sys, tensormount as tm
with tm.open("STORE/step-1") as ck:
    assert ck.keys() == ["w"] and ck["w"].shape == (16, 32), ck
    assert ck["w"].read_bytes() == open("values", "rb").read()
    try:
        ck["w"][0]
        raise SystemExit("NumPy in an empty environment?")
    except tm.LibraryError as error:
        assert "pip install numpy" in str(error), error
try:
    tm.open("nowhere")
    raise SystemExit("not refused")
except FileNotFoundError as error:
    assert error.code == "NOT_FOUND"
assert tm.library_path().startswith(sys.prefix), tm.library_path()
assert tm.library_version() == tm.__version__
"""

# Beside another RocksDB, whose symbols everybody sees; before and after.
BESIDE = """
import ctypes, sys
def use(lib):
    lib.rocksdb_options_create.restype = lib.rocksdb_open.restype = ctypes.c_void_p
    options = ctypes.c_void_p(lib.rocksdb_options_create())
    lib.rocksdb_options_set_create_if_missing(options, ctypes.c_ubyte(1))
    error = ctypes.c_char_p()
    db = lib.rocksdb_open(options, sys.argv[2].encode(), ctypes.byref(error))
    assert db, error.value
    lib.rocksdb_close(ctypes.c_void_p(db))
def read():
    import tensormount as tm
    with tm.open("STORE/step-1") as ck:
        assert ck["w"].read_bytes() == open("values", "rb").read()
if sys.argv[1] == "after":
    read()
other = ctypes.CDLL(sys.argv[3], mode=ctypes.RTLD_GLOBAL)
use(other)
read()
use(other)
read()
copies = {line.split()[-1] for line in open("/proc/self/maps") if "librocksdb" in line}
assert len(copies) == 2, copies
"""


# The part with MPI, from Python.
MPI = """
import ctypes
from tensormount import _abi
mpi, lib = _abi.mpi_library(), _abi.library()
session, world = ctypes.c_void_p(), ctypes.c_void_p()
assert mpi.tm_mpi_init(ctypes.addressof(session)) == 0, lib.tm_last_error()
assert mpi.tm_mpi_world(session, ctypes.addressof(world)) == 0, lib.tm_last_error()
print(lib.tm_communicator_size(world), flush=True)
lib.tm_communicator_free(world)
mpi.tm_mpi_free(session)
"""


def pip():
    """A Python whose pip installs into other environments (--python: from 22.3 on)."""
    return os.path.join(ROOT, ".cache/venv/bin/python3")


def make_environment(python, folder, wheel):
    # A pip of its own takes longer to unpack than everything else: that of this machine installs there.
    output(python, "-m", "venv", "--without-pip", folder)
    begin = time.monotonic()
    output(pip(), "-m", "pip", "--python", os.path.join(folder, "bin/python"), "install", "-q", "--no-index",
           "--no-deps", "--disable-pip-version-check", wheel)
    return time.monotonic() - begin


def environment_without_ours():
    kept = {name: value for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "TENSORMOUNT_LIBRARY", "TENSORMOUNT_COMMAND")}
    return kept


def command(folder, scratch):
    """The console script: version, list, read, words of refusal, mounts."""
    program = os.path.join(folder, "bin/tensormount")
    options = {"cwd": scratch, "env": environment_without_ours()}
    check(re.fullmatch(r"tensormount [0-9.]+\n", output(program, "--version", **options)), "--version")
    check("w" in output(program, "ls", "-l", "STORE/step-1", **options), "ls")
    check(output(program, "cat", "STORE/step-1", "w[1, 0:3]", "--as", "text", **options).split()
          == ["32", "33", "34"], "cat")
    output(os.path.join(folder, "bin/python"), "-m", "tensormount", "verify", "STORE", **options)
    output(program, "cat", "STORE/step-1", "none", status=2, **options)
    # Who reads only the beginning gets no traceback, and no words about a pipe.
    said = subprocess.run(f"'{program}' cat STORE/step-1 w | head -c 1 > /dev/null", shell=True,
                          capture_output=True, text=True, **options)
    check(said.stderr == "", said.stderr)
    mpi = os.path.join(os.path.dirname(output(
        os.path.join(folder, "bin/python"), "-c",
        "import tensormount._main as m; print(m.program())", **options)), "../lib/tensormount/mpi.so")
    if os.path.exists(mpi) and shutil.which("mpirun"):
        mpirun = dict(options["env"], OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                      OMPI_MCA_rmaps_base_oversubscribe="1")
        said = output("mpirun", "-n", "2", program, "import", "m.safetensors", "STORE/by-mpi",
                      cwd=scratch, env=mpirun, timeout=60)
        check("2 ranks" in said, said)
        said = output("mpirun", "-n", "2", os.path.join(folder, "bin/python"), "-c", MPI, cwd=scratch,
                      env=mpirun, timeout=60)
        check("".join(said.split()) == "22", said)  # mpirun may put the two lines together.
    # Without an MPI, as with another one: refused in words.
    hidden = mpi + ".hidden"
    if os.path.exists(mpi):
        os.rename(mpi, hidden)
    said = subprocess.run([program, "import", "m.safetensors", "STORE/refused"], capture_output=True,
                          text=True, cwd=scratch, env=dict(options["env"], OMPI_COMM_WORLD_SIZE="1"))
    check(said.returncode == 2 and "UNSUPPORTED: MPI" in said.stderr, said.stderr)
    if os.path.exists(hidden):
        os.rename(hidden, mpi)


def mounts(folder, scratch):
    """In the background, in the foreground until Ctrl-C, and by mount(8)'s name."""
    if not os.path.exists("/dev/fuse"):
        if "fuse" in os.environ.get("TENSORMOUNT_REQUIRE", ""):
            fail("there is no /dev/fuse")
        print("-- no /dev/fuse: nothing is mounted")
        return
    program = os.path.join(folder, "bin/tensormount")
    options = {"cwd": scratch, "env": environment_without_ours()}
    point = os.path.join(scratch, "MNT")
    os.mkdir(point)
    tensor = os.path.join(point, "step-1/tensors/w")

    def bytes_are_right():
        with open(tensor, "rb") as file:
            check(file.read() == VALUES, "other bytes on the mount")

    try:
        said = json.loads(output(program, "mount", "--json", "STORE", "MNT", **options))
        bytes_are_right()
        with open(f"/proc/{said['pid']}/comm", encoding="utf-8") as file:
            check(file.read() == "tensormount\n", "the daemon is not the command but an interpreter")
        output(program, "unmount", "MNT", **options)
        check(not os.path.ismount(point), "still mounted")

        served = subprocess.Popen([program, "mount", "-f", "STORE", "MNT"], stdout=subprocess.PIPE,
                                  text=True, **options)
        check("mounted" in served.stdout.readline(), "no mount in the foreground")
        bytes_are_right()
        served.send_signal(signal.SIGINT)
        check(served.wait(timeout=20) == 0, "Ctrl-C is an error")
        check(not os.path.ismount(point), "Ctrl-C does not unmount")
    finally:
        if os.path.ismount(point):
            subprocess.run(["umount", "-l", point], check=False)


def pythons():
    """Every one from 3.9 on, one a version."""
    names = sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python3")))
    names += [found for found in map(shutil.which, ["/usr/bin/python3", "python3"]) if found]
    by_version = {}
    for name in names:
        said = subprocess.run([name, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:3])"],
                              capture_output=True, text=True)
        if said.returncode == 0 and tuple(map(int, said.stdout.split())) >= (3, 9):
            by_version.setdefault(said.stdout.strip(), name)
    return list(by_version.values())


def environment_of(other, folder, wheel):
    """An environment with the wheel, and the packages of another one behind it."""
    make_environment(os.path.join(other, "bin/python3"), folder, wheel)
    site = glob.glob(os.path.join(os.path.abspath(other), "lib/python3*/site-packages"))
    check(site, f"{other} has no packages")
    mine = glob.glob(os.path.join(folder, "lib/python3*/site-packages"))[0]
    with open(os.path.join(mine, "other.pth"), "w", encoding="utf-8") as file:
        file.write(site[0] + "\n")
    # Otherwise most tests are skipped, and nobody sees it.
    output(os.path.join(folder, "bin/python"), "-c", "import numpy, ml_dtypes, tensormount")


def environments(wheel, out, others):
    shutil.rmtree(out, ignore_errors=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda other: environment_of(
            other, os.path.join(out, os.path.basename(other)), wheel), others))


def again(wheel, parts, scratch):
    """The same parts make the same bytes."""
    patchelf = os.path.join(ROOT, ".cache/venv/bin/patchelf")
    output(sys.executable, os.path.join(ROOT, "packaging/wheel.py"), "--parts", parts, "--out", scratch,
           "--patchelf", patchelf if os.path.exists(patchelf) else "patchelf")
    with open(wheel, "rb") as one, open(
            os.path.join(scratch, os.path.basename(wheel)), "rb") as other:
        check(one.read() == other.read(), "the same parts give other bytes")


def installed(python, folder, wheel, scratch):
    """An environment with the wheel alone, and in `scratch` a checkpoint that its command has made."""
    took = make_environment(python, folder, wheel)
    if os.path.exists(os.path.join(scratch, "STORE")):
        return took
    header = json.dumps({"w": {"dtype": "F32", "shape": [16, 32],
                               "data_offsets": [0, len(VALUES)]}}).encode()
    with open(os.path.join(scratch, "m.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + VALUES)
    with open(os.path.join(scratch, "values"), "wb") as file:
        file.write(VALUES)
    output(os.path.join(folder, "bin/tensormount"), "import", "m.safetensors", "STORE/step-1",
           "--ranks", "2", cwd=scratch, env=environment_without_ours())
    return took


def in_all_pythons(wheel, rocksdb, scratch):
    environment = environment_without_ours()
    found = pythons()
    check(found, "there is no Python from 3.9 on")
    for number, python in enumerate(found):
        folder = os.path.join(scratch, f"python-{number}")
        took = installed(python, folder, wheel, scratch)
        mine = os.path.join(folder, "bin/python")
        print(f"-- {output(mine, '--version').strip()}: installed in {took:.1f} s")
        if number == 0:
            binaries(glob.glob(os.path.join(folder, "lib/python3*/site-packages/tensormount"))[0])
        output(mine, "-c", SMOKE, cwd=scratch, env=environment)
        for when in ("before", "after"):
            output(mine, "-c", BESIDE, when, os.path.join(scratch, f"db-{number}-{when}"),
                   rocksdb, cwd=scratch, env=environment)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.partition("usage: ")[2])
    parser.add_argument("part", choices=["contents", "again", "pythons", "command", "environments"])
    parser.add_argument("folder")
    parser.add_argument("more", nargs="*")
    arguments = parser.parse_args()
    wheels = sorted(glob.glob(os.path.join(arguments.folder, "*.whl")), key=os.path.getmtime)
    check(wheels, f"no wheel in {arguments.folder}: scripts/wheel makes one")
    wheel = os.path.abspath(wheels[-1])
    if arguments.part == "environments":
        environments(wheel, arguments.more[0], arguments.more[1:])
        return
    with tempfile.TemporaryDirectory(prefix="tensormount-wheel.",
                                     dir=os.environ.get("TENSORMOUNT_TEST_TMPDIR")) as scratch:
        if arguments.part == "contents":
            contents(wheel)
        elif arguments.part == "again":
            again(wheel, arguments.more[0], scratch)
        elif arguments.part == "pythons":
            in_all_pythons(wheel, contents(wheel), scratch)
        else:
            folder = os.path.join(scratch, "environment")
            installed(pythons()[0], folder, wheel, scratch)
            command(folder, scratch)
            mounts(folder, scratch)
    print("-- fine")


if __name__ == "__main__":
    main()
