# SPDX-License-Identifier: Apache-2.0
"""The tables for ctypes agree with the compiled headers, and with the text of these."""

import ctypes
import os
import re
import subprocess
import tempfile
import unittest

from support import HEADER
from tensormount import _abi, _abi_tables, _dtypes, _jobs, _load, _save, errors

TEXT = ""
for part in (HEADER, HEADER.replace("c.h", "c_store.h")):
    with open(part, encoding="utf-8") as file:
        TEXT += file.read()
DECLARED = re.sub(r"//[^\n]*", "", TEXT)

# Name in the header to class.
STRUCTURES = {kind.__doc__: kind for kind in vars(_abi_tables).values()
              if isinstance(kind, type) and ctypes.Structure in kind.__bases__}
CONSTANTS = {name: number for name, number in vars(_abi_tables).items() if name.startswith("TM_")}
# Words that callers write, in the order of the enumerators that they stand for: the first number, and what
# the names of these begin with.
CHOICES = (
    (_save._PLACEMENTS, 0, "TM_PLACE_"),
    (_save._REPLICAS, 0, "TM_REPLICAS_"),
    (_save._STRATEGIES, 0, "TM_SAVE_"),
    (_save._COMMON, 0, "TM_COMMON_"),
    (_save._STATES, 0, "TM_JOB_"),
    (_load._STRICT, 1, "TM_STRICT_"),
    (_load._VERIFY, 0, "TM_VERIFY_"),
    (_load._PATHS, 0, "TM_LOAD_"),
    (_load._VIA, 0, "TM_VIA_"),
    (_load._GROW, 0, "TM_GROW_"),
    (_load._GRID, 0, "TM_GRID_"),
    (_jobs._EVENT_KINDS, 0, "TM_EVENT_"),
)


class Abi(unittest.TestCase):
    def test_structures_and_constants_match_the_header(self):
        checks = list(CONSTANTS.items())
        for name, kind in STRUCTURES.items():
            checks.append((f"sizeof({name})", ctypes.sizeof(kind)))
            for field, *_ in kind._fields_:
                member = getattr(kind, field)
                checks.append((f"offsetof({name}, {field})", member.offset))
                checks.append((f"sizeof((({name}*)0)->{field})", member.size))
        lines = "".join(f'  printf("%lld\\n", (long long)({what}));\n' for what, _ in checks)
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "probe")
            with open(program + ".c", "w", encoding="utf-8") as source:
                source.write('#include <stdio.h>\n#include <tensormount/c.h>\n'
                             f"int main(void) {{\n{lines}  return 0;\n}}\n")
            include = os.path.dirname(os.path.dirname(HEADER))
            subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-I", include, program + ".c",
                            "-o", program], check=True)
            found = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        for (what, expected), number in zip(checks, found.split()):
            self.assertEqual(int(number), expected, what)

    def test_every_structure_has_all_members(self):
        bodies = dict(
            (name, body)
            for body, name in re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", DECLARED,
                                         re.DOTALL)
        )
        self.assertEqual(sorted(bodies), sorted(STRUCTURES))
        for name, body in bodies.items():
            members = re.findall(r"\(\*(\w+)\)|(\w+)(?:\[\w+\])?;", body)
            flat = []
            for function, plain in members:
                flat.append(function or plain)
            self.assertEqual(flat, [field for field, *_ in STRUCTURES[name]._fields_], name)

    def test_functions_have_the_argument_counts_of_the_header(self):
        functions = {**_abi.FUNCTIONS, **_abi.MPI_FUNCTIONS}
        self.assertEqual(sorted(functions), sorted(re.findall(r"\bTM_EXPORT [^(;]*?(tm_\w+)\(", DECLARED)))
        for name, (_, arguments) in functions.items():
            found = re.search(r"\b%s\((.*?)\);" % name, DECLARED, re.DOTALL)
            self.assertIsNotNone(found, name)
            given = found[1].strip()
            count = 0 if given == "void" else given.count(",") + 1
            self.assertEqual(len(arguments), count, name)

    def test_choices_match_the_enumerators(self):
        for words, first, prefix in CHOICES:
            for number, word in enumerate(words, first):
                self.assertEqual(CONSTANTS[prefix + word.upper().replace("-", "_")], number, word)

    def test_every_status_has_its_exception_class(self):
        names = re.findall(r"\bTM_([A-Z_]+) = (\d+)", re.search(
            r"typedef int32_t tm_status;\s*enum \{(.*?)\}", DECLARED, re.DOTALL)[1])
        self.assertEqual([int(number) for _, number in names], list(range(len(errors.CLASSES))))
        for name, number in names[1:]:
            self.assertEqual(errors.CLASSES[int(number)].code, name)
            self.assertEqual(_abi.library().tm_status_name(int(number)).decode(), name)

    def test_every_dtype_matches_the_library(self):
        lib = _abi.library()
        number = 1
        while lib.tm_dtype_name(number) is not None:
            row = _dtypes.info(number)
            self.assertEqual(row.name, lib.tm_dtype_name(number).decode())
            self.assertEqual(row.bits, lib.tm_dtype_bits(number))
            number += 1
        self.assertEqual(len(_dtypes.all_dtypes()), number - 1)
        with self.assertRaises(errors.UnsupportedError):
            _dtypes.info(number)


if __name__ == "__main__":
    unittest.main()
