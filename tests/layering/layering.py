#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks which directories include which, and the form of source files.

usage: layering.py ROOT        prints one line per violation, exits 1 if there is one
"""

import fnmatch
import os
import re
import subprocess
import sys

# The directories that each directory may include (docs/architecture.md).
LAYERS = ["base", "shard", "device", "index", "state", "collective"]
MAY_INCLUDE = {layer: LAYERS[: i + 1] for i, layer in enumerate(LAYERS)}
MAY_INCLUDE["remote"] = ["base", "remote"]
MAY_INCLUDE["gpu"] = ["base", "shard", "device", "gpu"]
MAY_INCLUDE["fs"] = LAYERS + ["fs"]
MAY_INCLUDE["lib"] = LAYERS + ["fs", "remote", "lib"]
MAY_INCLUDE["mount-tools"] = LAYERS + ["fs", "remote", "mount-tools"]
MAY_INCLUDE["bench"] = LAYERS + ["gpu", "fs", "remote", "bench"]
MAY_INCLUDE["fuzz"] = LAYERS + ["fuzz"]
MAY_INCLUDE["tests"] = LAYERS + ["gpu", "fs", "remote", "mount-tools", "bench", "examples", "tests"]
MAY_INCLUDE["examples"] = ["examples"]  # And public headers.
MAY_INCLUDE["include"] = []

# Subdirectories and their levels: a file includes only its own subdirectory, those of lower levels, and
# headers of the directory above.
ROOMS = {
    "index": {"archives": 0, "records": 0, "read": 1, "store": 2, "foreign": 3},
    "collective": {"comm": 0, "layout": 1, "save": 2, "load": 2, "async": 3},
    "fs": {"formats": 0, "pictures": 0, "save": 0, "views": 1, "staging": 2, "export": 2, "mount": 3},
}

# The layer that implements each public header. Lower layers must not include the header.
PUBLIC_HEADERS = {
    "export.h": "base",
    "visibility.h": "base",
    "visibility.h": "base",
    "status.h": "base",
    "box.h": "shard",
    "buffer.h": "shard",
    "dtype.h": "shard",
    "checkpoint.h": "index",
    "common_value.h": "index",
    "name_map.h": "index",
    "retention.h": "index",
    "store.h": "index",
    "store_copy.h": "index",
    "store_repair.h": "index",
    "communicator.h": "collective",
    "tcp_group.h": "collective",
    "async_load.h": "collective",
    "async_save.h": "collective",
    "c.h": "lib",
    "c_store.h": "lib",
    "callback_communicator.h": "collective",
    "derive.h": "index",
    "event.h": "collective",
    "key_map.h": "index",
    "log.h": "base",
    "mapping_guard.h": "base",
    "load.h": "collective",
    "mpi.h": "collective",
    "save.h": "collective",
    "shard.h": "state",
    "state_dict.h": "state",
    "validate.h": "collective",
    "tcp_group.h": "collective",
    "tensormount.h": "lib",
}

# Third-party headers and the only files that may include them.
THIRD_PARTY = [
    (r"rocksdb/", ["index/records/*.cc", "tests/index/*.cc"]),
    (r"(fuse3?/|fuse|linux/fuse)", ["fs/mount/fuse_bridge*", "fs/mount/fuse_*_ops.cc", "fs/mount/mount_session.cc", "fs/mount/fuse_shim*.cc",
                                    "bench/null_fuse.cc", "tests/support/adverse_fs.cc", "tests/torture/recorder.cc"]),
    (r"mpi\.h", ["collective/comm/mpi_communicator.cc", "tests/mpi/*.cc"]),
    (r"xxh", ["base/hash.cc"]),
    (r"zlib", ["base/crc32.cc"]),
    (r"(cuda|nccl|cufile|nvml)", ["gpu/*.cu", "tests/gpu/cuda_header_check.cc", "tests/gpu/nccl_header_check.cc"]),
    (r"nlohmann/(?!json_fwd\.hpp)", ["*.cc"]),
    (r"fmt/", ["*.cc"]),
    (r"CLI/", ["mount-tools/*.cc", "bench/*.cc"]),
    (r"(gtest|gmock)/", ["tests/*.cc", "tests/*.h"]),
    (r"benchmark/", ["bench/*.cc", "tests/*.cc"]),
]

# Names that only some files may use; the message says what to use instead.
DOORS = [
    (r"\bLeafHasher\b", ["shard/*", "tests/*"], "a stored range is hashed with ChunkAccumulator"),
]
# Threads of the product block signals (base/thread.h). The exception runs the caller's code.
STARTS_THREADS = re.compile(r"\bstd::(j?thread\b(?!::)|async\b)|\bpthread_create\b|\bthrd_create\b")
START_BARE_THREADS = ["base/thread.h", "collective/comm/thread_communicator.cc"]
# The only product code that names HostFileSystem. All other code is given a file system, or calls FileSystemFor.
NAME_THE_HOST = ["base/file_system.h", "base/file_system_for.cc", "base/host_file_system.cc"]
NAMES_THE_HOST = re.compile(r"\bHostFileSystem\b")

MAX_LINES = 1000
PRODUCT = ("include", "base", "shard", "device", "index", "state", "collective", "gpu", "fs", "lib", "mount-tools")
NAMES_HEADER = re.compile(r"\b\w+\.h\b")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# Split strings, so that this file passes its own check.
MACHINE_PATH = re.compile(r"(?<![\w./$}-])/(?:wo" r"rk|ho" r"me/\w+|ro" r"ot)/")
REGISTRY = re.compile(r"pypi\.o" r"rg|pythonhos" r"ted|deb\.deb" r"ian\.org|registry\.np" r"mjs")
MERGE_MARK = re.compile(r"(<{7}|>{7}) ")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")


def source_files(root):
    """Paths relative to `root`: the files that git tracks, or all files if there is no repository."""
    if os.path.exists(os.path.join(root, ".git")):
        out = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True)
        names = out.stdout.decode().split("\0")
        return sorted(n for n in names if n and os.path.isfile(os.path.join(root, n)))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in (".git", "build", ".cache")]
        found += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    return sorted(found)


def matches(path, patterns):
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def guard_of(path):
    name = path.removeprefix("include/")
    if name.startswith("tensormount/"):
        name = name.removeprefix("tensormount/")
    return "TENSORMOUNT_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper() + "_"


def check_include(path, quoted, header):
    top = path.split("/")[0]
    # Headers that only the files of one component share may include what these files may.
    is_layer_header = path.endswith(".h") and top != "tests" and not path.endswith("_internal.h")
    for prefix, allowed in THIRD_PARTY:
        if re.match(prefix, header) and not quoted:
            if is_layer_header and not header.startswith(("cuda", "nccl")):
                return f"third-party header <{header}> in a header"
            if not matches(path, allowed):
                return f"<{header}> belongs into {', '.join(allowed)} only"
    if not quoted:
        return None
    folder, _, rest = header.partition("/")
    if not rest:
        return f'"{header}" has no folder: write it from the root of the repository'
    if folder == "tensormount":
        if top in LAYERS:
            layer = PUBLIC_HEADERS.get(rest)
            if layer is None:
                return f'public header "{header}" has no layer: add it to PUBLIC_HEADERS'
            if layer not in MAY_INCLUDE[top]:
                return f'{top} includes "{header}", which {layer} implements'
        return None
    if top in MAY_INCLUDE and folder not in MAY_INCLUDE[top]:
        return f'{top} must not include "{header}"'
    rooms = ROOMS.get(folder, {}) if folder == top else {}
    mine, theirs = path.split("/")[1], rest.split("/")[0]
    if mine in rooms and theirs in rooms and mine != theirs and rooms[theirs] >= rooms[mine]:
        return f'{top}/{mine} must not include "{header}"'
    return None


def check_purpose(root, path, lines):
    """A source begins with its purpose. If it has no header of its own, it names the header of its definitions."""
    purpose = []
    for line in lines[1:]:
        if not line.startswith("//"):
            break
        purpose.append(line)
    if not purpose:
        yield 2, "no comment that says what the file is for"
        return
    name = os.path.basename(path)[:-3] + ".h"
    own = os.path.join(root, os.path.dirname(path), name), os.path.join(root, "include/tensormount", name)
    if not any(os.path.exists(header) for header in own) and not NAMES_HEADER.search(" ".join(purpose)):
        yield 2, f"has no {name}: its first comment must name the header that declares it"


def check_file(root, path):
    with open(os.path.join(root, path), "rb") as file:
        raw = file.read()
    if b"\0" in raw[:4096] or path == "LICENSE":
        return
    lines = raw.decode("utf-8", "replace").splitlines()
    base = os.path.basename(path)
    code = path.endswith((".h", ".cc", ".cu", ".cuh"))
    script = bool(lines) and lines[0].startswith("#!")
    if code or script or path.endswith((".py", ".cmake", ".sh")) or base == "CMakeLists.txt":
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
            yield 1, "no SPDX-License-Identifier line at its top"
        if len(lines) > MAX_LINES:
            yield len(lines), f"over {MAX_LINES} lines"
    if path.endswith(".h") and f"#ifndef {guard_of(path)}" not in lines:
        yield 1, f"include guard is not {guard_of(path)}"
    product = code and path.split("/")[0] in PRODUCT
    if product and path.endswith(".cc"):
        yield from check_purpose(root, path, lines)
    for number, line in enumerate(lines, 1):
        if MACHINE_PATH.search(line):
            yield number, "a path of one machine"
        if REGISTRY.search(line):
            yield number, "a registry's host name"
        if MERGE_MARK.match(line):
            yield number, "a mark of a merge that was not finished"
        for name, allowed, instead in DOORS if code else []:
            if re.search(name, line) and not matches(path, allowed):
                yield number, instead
        if product and NAMES_THE_HOST.search(line.split("//")[0]) and not matches(path, NAME_THE_HOST):
            yield number, "names HostFileSystem: take a FileSystem as an argument, or FileSystemFor"
        if product and STARTS_THREADS.search(line.split("//")[0]) and not matches(path, START_BARE_THREADS):
            yield number, "starts a thread that does not block signals: use Thread or StartAsync of base/thread.h"
        if code and UNFINISHED.search(line):
            yield number, "unfinished: " + line.strip()
        found = INCLUDE.match(line) if code else None
        if found:
            problem = check_include(path, found.group(1) == '"', found.group(2))
            if problem:
                yield number, problem


def file_violations(root, path):
    return [f"{path}:{number}: {problem}" for number, problem in check_file(root, path)]


def main():
    root = sys.argv[1]
    found = [line for path in source_files(root) for line in file_violations(root, path)]
    for line in found:
        print(line)
    print(f"{len(source_files(root))} files, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
