#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants violations in a copy of the tree, one at a time, and checks that each is reported.

usage: layering_selftest.py ROOT
"""

import os
import shutil
import sys
import tempfile

import layering

SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
PURPOSE = SPDX + "// For planted_too.h.\n"
GUARD = SPDX + "#ifndef {0}\n#define {0}\n{1}\n#endif\n"

# File, its text, and a part of the expected message.
PLANTED = [
    ("base/planted.cc", PURPOSE + '#include "shard/copy_plan.h"\n', "base must not include"),
    ("index/planted.cc", PURPOSE + '#include "collective/comm/collective.h"\n', "index must not include"),
    ("index/read/planted.cc", PURPOSE + '#include "index/store/store.h"\n', "index/read must not include"),
    ("collective/load/planted.cc", PURPOSE + '#include "collective/save/data_writer.h"\n', "collective/load must not"),
    ("fs/planted.cc", PURPOSE + '#include "gpu/cuda_device.h"\n', "fs must not include"),
    ("gpu/planted.cc", PURPOSE + '#include "fs/vfs.h"\n', "gpu must not include"),
    ("shard/planted.cc", PURPOSE + '#include "tensormount/communicator.h"\n', "which collective"),
    ("base/planted.cc", PURPOSE + '#include "tensormount/unheard_of.h"\n', "has no layer"),
    ("examples/planted.cc", PURPOSE + '#include "base/hash.h"\n', "examples must not include"),
    ("state/planted.cc", PURPOSE + '#include "examples/models/tree.h"\n', "state must not include"),
    ("fs/planted.cc", PURPOSE + "#include <rocksdb/db.h>\n", "<rocksdb/db.h> belongs into"),
    ("fs/vfs_planted.cc", PURPOSE + "#include <fuse3/fuse_lowlevel.h>\n", "belongs into"),
    ("fs/vfs_planted.cc", PURPOSE + "#  include <linux/fuse.h>\n", "belongs into"),
    ("collective/planted.cc", PURPOSE + "#include <mpi.h>\n", "<mpi.h> belongs into"),
    ("shard/planted.cc", PURPOSE + "#include <xxhash.h>\n", "<xxhash.h> belongs into"),
    ("shard/planted.h", GUARD.format("TENSORMOUNT_SHARD_PLANTED_H_", "#include <fmt/format.h>"),
     "third-party header"),
    ("include/tensormount/planted.h",
     GUARD.format("TENSORMOUNT_PLANTED_H_", "#include <nlohmann/json.hpp>"), "third-party header"),
    ("include/tensormount/planted.h",
     GUARD.format("TENSORMOUNT_PLANTED_H_", '#include "base/hash.h"'), "include must not include"),
    ("base/planted.h", GUARD.format("WRONG_H_", ""), "include guard"),
    ("base/planted.cc", "int planted;\n// For planted_too.h.\n", "SPDX"),
    ("scripts/planted", "#!/bin/sh\n", "SPDX"),
    ("base/planted.cc", PURPOSE + "//\n" * layering.MAX_LINES, "over"),
    ("docs/planted.md", "see /ho" "me/someone/x\n", "a path of one machine"),
    ("docs/planted.md", "from pypi.o" "rg\n", "host name"),
    ("python/planted.py", "#!" "SPDX-License-Identifier: Apache-2.0\n<<<<<<< HEAD\n", "of a merge"),
    ("base/planted.cc", PURPOSE + "// TO" "DO: more\n", "unfinished"),
    ("base/planted.cc", PURPOSE + '#include "hash.h"\n', "has no folder"),
    ("mount-tools/planted.cc", PURPOSE + "FileSystem& fs = HostFileSystem();\n", "names HostFileSystem"),
    ("fs/planted.cc", PURPOSE + "std::vector<std::thread> threads;\n", "does not block signals"),
    ("index/planted.cc", PURPOSE + "std::jthread thread([] {});\n", "does not block signals"),
    ("index/planted.cc", PURPOSE + "auto done = std::async([] {});\n", "does not block signals"),
    ("include/tensormount/planted.h",
     GUARD.format("TENSORMOUNT_PLANTED_H_", "FileSystem& HostFileSystem();"), "names HostFileSystem"),
    ("base/planted.cc", SPDX + "int planted;\n", "no comment that says"),
    ("base/planted.cc", SPDX + "// Says little.\n", "has no planted.h"),
]


def main():
    missed = 0
    with tempfile.TemporaryDirectory() as copy:
        for path in layering.source_files(sys.argv[1]):
            os.makedirs(os.path.join(copy, os.path.dirname(path)), exist_ok=True)
            shutil.copyfile(os.path.join(sys.argv[1], path), os.path.join(copy, path))
        before = layering.source_files(copy)
        for path, text, expected in PLANTED:
            full = os.path.join(copy, path)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "w") as file:
                file.write(text)
            # The walk must find the file. Another test checks that all other files are clean.
            new = [name for name in layering.source_files(copy) if name not in before]
            caught = [line for name in new for line in layering.file_violations(copy, name)]
            os.remove(full)
            if not any(v.startswith(path + ":") and expected in v for v in caught):
                missed += 1
                print(f"not caught: {path}: {expected!r}: {caught}")
            if len(caught) != 1:
                missed += 1
                print(f"expected one violation: {path}: {caught}")
    print(f"{len(PLANTED)} planted, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
