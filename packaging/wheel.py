#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the wheel: the Python package, the library, the command and every library that they need.

usage: wheel.py --parts DIR --out DIR [--patchelf PROGRAM]

The target wheel_parts makes the directory of parts (python/CMakeLists.txt). Prints the path of the wheel. The
same parts give the same bytes.

Bundled libraries are renamed, so that they do not conflict with another copy of RocksDB or its dependencies in
the same process: file name and soname get a hash, and every symbol that a library defines gets a number as its
name, in the library and in its users. New sonames alone are not enough: symbols are looked up in globally
loaded libraries first, and the gflags of RocksDB ends the process if its flags are registered twice. Numbers
save space, because names of C++ are a twentieth of the bundled bytes; a debugger shows less of RocksDB.

The standard C++ library is the system's, as manylinux allows. With a second copy in a process (torch and NumPy
use the system's) neither would catch the exceptions of the other.
"""

import argparse
import base64
import hashlib
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MOST_BYTES = 10_000_000
GLIBC = "2_35"
# The newest symbol versions that the tag allows (policy manylinux_2_35).
NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)}
SYSTEM = re.compile(r"^(lib(c|m|pthread|dl|rt|stdc\+\+|gcc_s)|ld-linux-[-\w]+)\.so\.\d+$")
MPI = re.compile(r"^libmpi\.so\.\d+$")  # Needed only by lib/tensormount/mpi.so; the host's library.
# Packages of header-only libraries that are compiled in.
HEADERS = ["nlohmann-json3-dev", "libcli11-dev"]


def fail(message):
    sys.exit(f"packaging/wheel.py: {message}")


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{' '.join(command[:3])} ...: {done.stderr.strip()}")
    return done.stdout


def needed(path):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", path))


def where(path):
    """Soname to path of all libraries that `path` needs, as the system finds them."""
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", run("ldd", path), re.MULTILINE))


def defined(path):
    """Names of the symbols that a library exports, without their versions."""
    names = set()
    for line in run("nm", "-D", "--defined-only", "-p", path).splitlines():
        kind, name = line.split()[-2:]
        name = name.split("@")[0]
        # Absolute symbols are versions (FUSE_3.0) and ends of sections.
        if kind != "A" and name not in ("_init", "_fini", "_end", "_edata", "__bss_start"):
            names.add(name)
    return names


def bundle(parts, made, patchelf):
    """Copies the parts and the libraries that they need to `made`, renames and strips them. Returns the bundled
    libraries as {name in the wheel: path on this machine}."""
    folder = os.path.join(made, "lib")
    shutil.copytree(parts, made, dirs_exist_ok=True)
    ours = [os.path.join(made, "bin", "tensormount"), os.path.join(folder, "libtensormount.so")]
    mpi = os.path.join(folder, "tensormount", "mpi.so")
    cuda = os.path.join(folder, "tensormount", "libtensormount_cuda.so")
    ours += [part for part in (mpi, cuda) if os.path.exists(part)]

    found = where(os.path.join(parts, "lib", "libtensormount.so"))
    originals = {}  # Soname to path, breadth first.
    waiting = needed(ours[1])
    while waiting:
        soname = waiting.pop(0)
        if soname in originals or SYSTEM.match(soname):
            continue
        if soname not in found:
            fail(f"{soname} is not on this machine")
        originals[soname] = os.path.realpath(found[soname])
        waiting += needed(originals[soname])

    renamed = {}
    symbols = set()
    for soname, path in originals.items():
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()[:8]
        stem, _, version = soname.partition(".so")
        renamed[soname] = f"{stem}-{digest}.so{version}"
        symbols |= defined(path)
    with tempfile.NamedTemporaryFile("w", suffix=".map") as table:
        # Depends only on the bundled libraries, so that the same libraries get the same names.
        mark = hashlib.sha256("".join(sorted(renamed.values())).encode()).hexdigest()[:6]
        table.writelines(
            f"{name} tm_{mark}_{number:x}\n" for number, name in enumerate(sorted(symbols)))
        table.flush()
        for soname, path in originals.items():
            copy = os.path.join(folder, renamed[soname])
            shutil.copyfile(path, copy)
            os.chmod(copy, 0o644)
            ours.append(copy)
        for path in ours:
            run("strip", "--strip-unneeded", path)
            above = os.path.relpath(folder, os.path.dirname(path))
            changes = ["--rename-dynamic-symbols", table.name,
                       # An RPATH comes before LD_LIBRARY_PATH, which may have another build's library.
                       "--force-rpath", "--set-rpath", "$ORIGIN" if above == "." else "$ORIGIN/" + above]
            if os.path.basename(path) in renamed.values():
                changes += ["--set-soname", os.path.basename(path)]
            for soname in needed(path):
                if soname in renamed:
                    changes += ["--replace-needed", soname, renamed[soname]]
                elif not SYSTEM.match(soname) and soname != "libtensormount.so":
                    if not (path == mpi and MPI.match(soname)):
                        fail(f"{path} needs {soname}")
            # In one call, because each call leaves another copy of the names behind.
            run(patchelf, *changes, path)
            clear_unused_names(path)
            check_versions(path)
    return {renamed[soname]: path for soname, path in originals.items()}


def clear_unused_names(path):
    """Zeroes the unused names in the table of dynamic names. patchelf appends new names and leaves the old ones,
    which are larger than all the other libraries compressed."""
    with open(path, "rb") as file:
        data = bytearray(file.read())
    at, = struct.unpack_from("<Q", data, 40)
    size, count, _ = struct.unpack_from("<3H", data, 58)
    sections = [struct.unpack_from("<2I4Q2I2Q", data, at + size * i) for i in range(count)]
    by_kind = {section[1]: section for section in sections}
    dynamic = by_kind[6]  # SHT_DYNAMIC, whose link is the table.
    names = sections[dynamic[6]]
    base, length = names[4], names[5]
    used = set()
    for kind, value in struct.iter_unpack("<2Q", data[dynamic[4]:dynamic[4] + dynamic[5]]):
        if kind in (1, 14, 15, 29):  # DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH
            used.add(value)
    symbols = by_kind[11]  # SHT_DYNSYM
    for entry in struct.iter_unpack("<I20x", data[symbols[4]:symbols[4] + symbols[5]]):
        used.add(entry[0])
    # Versions (SHT_GNU_verneed, SHT_GNU_verdef) are chains of records: type of section, offsets of the
    # fields for auxiliary records and the next record, then of name and next in an auxiliary record.
    for kind, aux_at, next_at, name_at, aux_next in (
            (0x6FFFFFFE, 8, 12, 8, 12), (0x6FFFFFFD, 12, 16, 0, 4)):
        if kind not in by_kind:
            continue
        record = by_kind[kind][4]
        while True:
            if kind == 0x6FFFFFFE:
                used.add(struct.unpack_from("<I", data, record + 4)[0])  # The file.
            aux = record + struct.unpack_from("<I", data, record + aux_at)[0]
            while True:
                used.add(struct.unpack_from("<I", data, aux + name_at)[0])
                step, = struct.unpack_from("<I", data, aux + aux_next)
                if step == 0:
                    break
                aux += step
            step, = struct.unpack_from("<I", data, record + next_at)
            if step == 0:
                break
            record += step
    kept = bytearray(length)
    for offset in used:
        end = data.index(0, base + offset)
        kept[offset:end - base] = data[base + offset:end]
    data[base:base + length] = kept
    with open(path, "r+b") as file:
        file.write(data)


def check_versions(path):
    for kind, version in re.findall(r"Name: ([A-Z]+)_([0-9.]+)", run("readelf", "-VW", path)):
        have = tuple(int(number) for number in version.split("."))
        if kind in NEWEST and have > NEWEST[kind]:
            fail(f"{os.path.basename(path)} needs {kind}_{version}, more than manylinux_{GLIBC} has:"
                 " make the wheel on Debian 12 or Ubuntu 22.04")


def debian(path):
    """(package, version, source and version) of the Debian package of a file, or of that name."""
    package = path
    if path.startswith("/"):
        # dpkg knows a file by its path at installation, from before /lib was a symbolic link.
        for name in (path, path.removeprefix("/usr")):
            done = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True)
            if done.returncode == 0:
                package = done.stdout.split(": ")[0].split(",")[0]
                break
        else:
            fail(f"{path} is of no package, so that its licence is not known")
    said = run("dpkg-query", "-W", "-f",
               "${Package}\t${Version}\t${source:Package} ${source:Version}", package)
    return said.split("\t")


def licences(bundled):
    """Files of the directory licenses/: our license, those of every bundled part, and a list of the parts."""
    with open(os.path.join(ROOT, "LICENSE"), "rb") as file:
        yield "LICENSE", file.read()
    lines = ["Parts of this wheel that others wrote, and the Debian packages that they were taken "
             "from.", "Their sources are the Debian source packages of these names and versions.",
             "Libraries were stripped, got other names (soname and symbols) and a run path;", "they are linked dynamically, and others that are renamed so can "
             "take their places.", ""]
    packages = {}
    for name, path in sorted(bundled.items()):
        packages.setdefault(debian(path)[0], [debian(path), []])[1].append("lib/" + name)
    for package in HEADERS:
        packages[package] = [debian(package), ["compiled in: headers"]]
    for package, ((_, version, source), what) in sorted(packages.items()):
        lines.append(f"{', '.join(what)}: {package} {version}, source {source}: {package}.copyright")
        place = f"/usr/share/doc/{package}/copyright"
        if not os.path.exists(place):
            fail(f"there is no {place}: what is bundled needs its licence")
        with open(place, "rb") as file:
            yield f"{package}.copyright", file.read()
    yield "BUNDLED.txt", ("\n".join(lines) + "\n").encode()


def version():
    with open(os.path.join(ROOT, "CMakeLists.txt"), encoding="utf-8") as file:
        stated = re.search(r"project\(tensormount VERSION ([0-9.]+)", file.read())[1]
    with open(os.path.join(ROOT, "python", "tensormount", "__init__.py"), encoding="utf-8") as file:
        if f'__version__ = "{stated}"' not in file.read():
            fail(f"__version__ of python/tensormount is not {stated}")
    return stated


def metadata(stated):
    with open(os.path.join(ROOT, "docs", "python.md"), encoding="utf-8") as file:
        described = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", file.read())  # Without links, which would lead nowhere.
    return f"""Metadata-Version: 2.1
Name: tensormount
Version: {stated}
Summary: Checkpoints of distributed training as a filesystem
License: Apache-2.0, and of bundled parts those that licenses/BUNDLED.txt names
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Typing :: Typed
Requires-Python: >=3.9
Provides-Extra: numpy
Requires-Dist: numpy; extra == 'numpy'
Requires-Dist: ml_dtypes; extra == 'numpy'
Provides-Extra: remote
Requires-Dist: pycurl>=7.45.4; extra == 'remote'
Description-Content-Type: text/markdown

{described}"""


def package_files():
    """(name in the wheel, bytes, mode) of the Python sources."""
    top = os.path.join(ROOT, "python")
    for folder, folders, files in os.walk(os.path.join(top, "tensormount")):
        # bin and lib are not sources; a developer may have symbolic links there.
        folders[:] = sorted(f for f in folders if f not in ("__pycache__", "bin", "lib"))
        for name in sorted(files):
            if name.endswith((".py", ".pyi")) or name == "py.typed":
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    yield os.path.relpath(path, top), file.read(), 0o644


def record_line(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def deflated(data):
    """`data` compressed by libdeflate: 3 % smaller than by zlib, which the size limit of the wheel needs. The
    output is a gzip file; a zip file needs only the bytes between its header and its last eight bytes."""
    done = subprocess.run(["libdeflate-gzip", "-12", "-c"], input=data, capture_output=True)
    out = done.stdout
    if done.returncode != 0 or out[:4] != b"\x1f\x8b\x08\0":
        fail(f"libdeflate-gzip: {done.stderr.decode()}")
    return out[10:-8]


def write(path, files):
    """Writes a zip file with these (name, bytes, mode), in this order, and a fixed time."""
    with open(path, "wb") as file:
        directory = []
        for name, data, mode in files:
            packed, method = deflated(data), 8
            if len(packed) >= len(data):
                packed, method = data, 0
            text = name.encode()
            # Version needed, flags, method, time and date (1 January 1980), and so on.
            common = struct.pack("<3H2H3I2H", 20, 0, method, 0, 33, zlib.crc32(data), len(packed),
                                 len(data), len(text), 0)
            made_by, attributes = 3 << 8 | 20, (stat.S_IFREG | mode) << 16  # 3: Unix.
            directory.append(b"PK\1\2" + struct.pack("<H", made_by) + common + struct.pack(
                "<3H2I", 0, 0, 0, attributes, file.tell()) + text)
            file.write(b"PK\3\4" + common + text + packed)
        begin = file.tell()
        for entry in directory:
            file.write(entry)
        file.write(b"PK\5\6" + struct.pack("<4H2IH", 0, 0, len(directory), len(directory),
                                           file.tell() - begin, begin, 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--patchelf", default="patchelf")
    arguments = parser.parse_args()

    stated = version()
    tag = f"py3-none-manylinux_{GLIBC}_{os.uname().machine}"
    about = f"tensormount-{stated}.dist-info"
    files = list(package_files())
    with tempfile.TemporaryDirectory() as made:
        bundled = bundle(arguments.parts, made, arguments.patchelf)
        for folder, folders, names in os.walk(made):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    inside = "tensormount/" + os.path.relpath(path, made)
                    files.append((inside, file.read(), 0o755 if "/bin/" in inside else 0o644))
    for name, data in licences(bundled):
        files.append((f"{about}/licenses/{name}", data, 0o644))
    files.append((f"{about}/METADATA", metadata(stated).encode(), 0o644))
    files.append((f"{about}/WHEEL", f"Wheel-Version: 1.0\nGenerator: tensormount\n"
                  f"Root-Is-Purelib: false\nTag: {tag}\n".encode(), 0o644))
    files.append((f"{about}/entry_points.txt",
                  b"[console_scripts]\ntensormount = tensormount._main:main\n\n"
                  b"[fsspec.specs]\ntensormount = tensormount.fsspec:TensormountFileSystem\n\n"
                  b"[vllm.general_plugins]\ntensormount = tensormount.vllm:register\n", 0o644))
    record = "".join(record_line(name, data) for name, data, _ in files)
    files.append((f"{about}/RECORD", (record + f"{about}/RECORD,,\n").encode(), 0o644))

    os.makedirs(arguments.out, exist_ok=True)
    wheel = os.path.join(arguments.out, f"tensormount-{stated}-{tag}.whl")
    part = wheel + ".part"
    write(part, files)
    os.replace(part, wheel)
    size = os.path.getsize(wheel)
    print(f"{wheel} {size / 1e6:.2f} MB")
    if size > MOST_BYTES:
        fail(f"the wheel has {size} bytes, over {MOST_BYTES}")


if __name__ == "__main__":
    main()
