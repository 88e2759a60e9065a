# SPDX-License-Identifier: Apache-2.0
"""What _abi.py says of the C interface is what c.h says: a compiled probe and the header's own text."""

import ctypes
import os
import re
import subprocess
import tempfile
import unittest

from support import HEADER
from tensormount import _abi, _dtypes, errors

TEXT = ""
for part in (HEADER, HEADER.replace("c.h", "c_store.h")):
    with open(part, encoding="utf-8") as file:
        TEXT += file.read()
DECLARED = re.sub(r"//[^\n]*", "", TEXT)


class Abi(unittest.TestCase):
    def test_structures_have_the_sizes_and_offsets_of_the_header(self):
        checks = []
        for name, kind in _abi.STRUCTURES.items():
            checks.append((f"sizeof({name})", ctypes.sizeof(kind)))
            for field, *_ in kind._fields_:
                member = getattr(kind, field)
                checks.append((f"offsetof({name}, {field})", member.offset))
                checks.append((f"sizeof((({name}*)0)->{field})", member.size))
        lines = "".join(f'  printf("%zu\\n", (size_t)({what}));\n' for what, _ in checks)
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

    def test_every_structure_of_the_header_is_there_with_all_members(self):
        bodies = dict(
            (name, body)
            for body, name in re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", DECLARED,
                                         re.DOTALL)
        )
        self.assertEqual(sorted(bodies), sorted(_abi.STRUCTURES))
        for name, body in bodies.items():
            members = re.findall(r"\(\*(\w+)\)|(\w+)(?:\[\w+\])?;", body)
            flat = []
            for function, plain in members:
                flat.append(function or plain)
            self.assertEqual(flat, [field for field, *_ in _abi.STRUCTURES[name]._fields_], name)

    def test_functions_take_what_the_header_says(self):
        for name, (_, arguments) in {**_abi._FUNCTIONS, **_abi._MPI_FUNCTIONS}.items():
            found = re.search(r"\b%s\((.*?)\);" % name, DECLARED, re.DOTALL)
            self.assertIsNotNone(found, name)
            given = found[1].strip()
            count = 0 if given == "void" else given.count(",") + 1
            self.assertEqual(len(arguments), count, name)

    def test_every_status_has_its_class(self):
        names = re.findall(r"\bTM_([A-Z_]+) = (\d+)", re.search(
            r"typedef int32_t tm_status;\s*enum \{(.*?)\}", DECLARED, re.DOTALL)[1])
        self.assertEqual([int(number) for _, number in names], list(range(len(errors.CLASSES))))
        for name, number in names[1:]:
            self.assertEqual(errors.CLASSES[int(number)].code, name)
            self.assertEqual(_abi.library().tm_status_name(int(number)).decode(), name)

    def test_every_dtype_has_the_librarys_number_name_and_bits(self):
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
