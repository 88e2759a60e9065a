# SPDX-License-Identifier: Apache-2.0
"""packaging/abi_tables.py: its output is in the tree, its numbers are the compiler's, and it refuses what it
does not know."""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import ROOT, needs

sys.path.insert(0, os.path.join(ROOT, "packaging"))
try:
    import abi_tables
except ImportError:
    abi_tables = None  # No pycparser: all is skipped.

GOOD = """\
#include <stddef.h>
#include <stdint.h>
#if defined(__GNUC__)
#define TM_EXPORT __attribute__((visibility("default")))
#else
#define TM_EXPORT
#endif
typedef int32_t tm_status;
enum { TM_LENGTH = 1 << 2, TM_NEXT, TM_LESS = -3 };
typedef struct tm_handle tm_handle;
typedef void (*tm_hook)(void* context, const char* line);
typedef struct tm_part {
  uint32_t struct_size;
  int64_t dims[TM_LENGTH];
} tm_part;
typedef struct tm_all_kinds {
  double seconds;  // Not int64_t other;
  const char* text;
  const char* const* texts;
  const int64_t* numbers;
  void* memory;
  const tm_part* part;
  tm_part** parts;
  tm_handle* handle;
  tm_hook hook;
  int (*call)(void* context);
  char* filled;
  uint8_t uuid[2][16];
  tm_status status;
} tm_all_kinds;
TM_EXPORT tm_status tm_do(tm_handle* handle, const char* text, const char* const* texts, char** out,
                          const tm_part* part, tm_hook hook, size_t size, int* fd);
TM_EXPORT const char* tm_name(void);
TM_EXPORT const void* tm_data(const tm_handle* handle);
TM_EXPORT void tm_mpi_free(tm_handle* handle);
"""


@needs("pycparser")
class Tables(unittest.TestCase):
    def setUp(self):
        self.include = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.include)
        os.mkdir(os.path.join(self.include, "tensormount"))

    def read(self, text):
        with open(os.path.join(self.include, abi_tables.HEADER), "w", encoding="utf-8") as file:
            file.write(text)
        return abi_tables.interface(self.include)

    def refused(self, declaration, *words):
        """That this declaration, behind good ones, is refused in these words."""
        with self.assertRaises(abi_tables.HeaderError) as caught:
            self.read(GOOD + declaration + "\n")
        for word in ("tensormount/c.h:%d:" % (GOOD.count("\n") + 1), *words):
            self.assertIn(word, str(caught.exception))

    def test_committed_tables_match_the_headers(self):
        made = abi_tables.text(abi_tables.interface(os.path.join(ROOT, "include")))
        with open(abi_tables.OUT, encoding="utf-8") as file:
            self.assertTrue(made == file.read(), "c.h has changed: python3 packaging/abi_tables.py")

    def test_changed_header_changes_the_tables(self):
        before = abi_tables.text(self.read(GOOD))
        for old, new in (("int64_t dims[", "int32_t dims["), ("double seconds;", "double minutes;"),
                         ("size_t size, int* fd", "size_t size"), ("TM_LESS = -3", "TM_LESS = -2")):
            with self.subTest(new=new):
                self.assertNotEqual(abi_tables.text(self.read(GOOD.replace(old, new))), before)

    def test_number_types_have_the_size_and_sign_of_c(self):
        kinds = {"floating": "({0})0.5 != 0", "signed": "({0})-1 < 0", "bytes": "sizeof({0})"}
        program = os.path.join(self.include, "probe")
        lines = "".join(f'  printf("{name} {what} %d\\n", (int)({said.format(name)}));\n'
                        for name in abi_tables.NUMBERS for what, said in kinds.items())
        with open(program + ".c", "w", encoding="utf-8") as file:
            file.write(f"#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\nint main(void) {{\n{lines}}}\n")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c99", program + ".c", "-o", program], check=True)
        for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
            name, what, number = line.split()
            kind = getattr(ctypes, abi_tables.NUMBERS[name])
            of_python = {"floating": kind is ctypes.c_double, "signed": kind(-1).value < 0,
                         "bytes": ctypes.sizeof(kind)}
            self.assertEqual(of_python[what], int(number), line)

    def test_every_kind_of_declaration_is_parsed(self):
        found = self.read(GOOD)
        self.assertEqual(found.constants, {"TM_LENGTH": 4, "TM_NEXT": 5, "TM_LESS": -3})
        self.assertEqual(found.structures, {
            "tm_part": [("struct_size", "c_uint32"), ("dims", "c_int64 * 4")],
            "tm_all_kinds": [
                ("seconds", "c_double"), ("text", "c_char_p"), ("texts", "POINTER(c_char_p)"),
                ("numbers", "c_void_p"), ("memory", "c_void_p"), ("part", "POINTER(Part)"),
                ("parts", "c_void_p"), ("handle", "c_void_p"), ("hook", "c_void_p"), ("call", "c_void_p"),
                ("filled", "c_void_p"), ("uuid", "c_uint8 * 16 * 2"), ("status", "c_int32")]})
        self.assertEqual(found.functions, {
            "tm_do": ("c_int32", ["c_void_p", "c_char_p", "c_void_p", "c_void_p", "c_void_p", "c_void_p",
                                  "c_size_t", "c_void_p"]),
            "tm_name": ("c_char_p", []),
            "tm_data": ("c_void_p", ["c_void_p"]),
            "tm_mpi_free": ("None", ["c_void_p"])})

    def test_generated_text_is_a_working_module(self):
        made = {}
        exec(abi_tables.text(self.read(GOOD)), made)
        self.assertEqual((made["TM_NEXT"], made["Part"].__doc__), (5, "tm_part"))
        self.assertEqual(ctypes.sizeof(made["AllKinds"]), 8 * 11 + 32 + 8)
        self.assertEqual(made["FUNCTIONS"]["tm_name"], (ctypes.c_char_p, []))
        self.assertEqual(list(made["MPI_FUNCTIONS"]), ["tm_mpi_free"])

    def test_error_names_the_unsupported_type(self):
        for member, why in (
            ("long size;", "no rule for the type long"),
            ("const void nothing;", "no rule for the type void"),
            ("uint16_t port;", "no rule for the type uint16_t"),
            ("char letter;", "no rule for the type char"),
            ("uint32_t flags : 3;", "no rule for a bit-field"),
            ("union { int32_t a; int64_t b; } either;", "no rule for a union by value"),
            ("struct { int32_t a; } inner;", "no rule for a struct by value"),
            ("enum { TM_A } choice;", "no rule for a enum by value"),
            ("tm_part part;", "no rule for the type tm_part"),
            ("int64_t dims[TM_UNHEARD];", "no rule for this constant (TM_UNHEARD)"),
            ("int64_t dims[sizeof(int)];", "no rule for this constant"),
            ("int64_t rest[];", "no rule for an array that is not of a known length"),
        ):
            with self.subTest(member):
                name = member.split()[-1].strip(";") if ":" not in member and "[" not in member else ""
                self.refused(f"typedef struct tm_odd {{ {member} }} tm_odd;", f"tm_odd.{name}", why)
        with self.assertRaisesRegex(abi_tables.HeaderError, "a type that is not declared"):
            self.read(GOOD + "typedef struct tm_odd { FILE* file; } tm_odd;")

    def test_error_names_the_unsupported_declaration(self):
        for declaration, words in (
            ("TM_EXPORT tm_status tm_log(const char* format, ...);", ("tm_log", "variable number of arguments")),
            ("TM_EXPORT tm_part tm_get(void);", ("tm_get", "no rule for the type tm_part")),
            ("TM_EXPORT void tm_set(const int64_t dims[4]);", ("tm_set", "no rule for an array")),
            ("TM_EXPORT float tm_rate(void);", ("tm_rate", "no rule for the type float")),
            ("extern int32_t tm_count;", ("tm_count", "no rule for a declaration of this kind")),
            ("static inline int tm_one(void) { return 1; }", ("no rule for a declaration of this kind",)),
            ("typedef union { int32_t a; } tm_either;", ("tm_either", "no rule for a union by value")),
            ("enum { TM_SIZE = sizeof(int) };", ("TM_SIZE", "no rule for this constant")),
        ):
            with self.subTest(declaration):
                self.refused(declaration, *words)

    def test_command_fails_with_the_preprocessor_error(self):
        self.read(GOOD)
        with open(os.path.join(self.include, abi_tables.HEADER), "a", encoding="utf-8") as file:
            file.write("#include <stdbool.h>\n")
        out = os.path.join(self.include, "tables.py")
        done = subprocess.run([sys.executable, abi_tables.__file__, "--include", self.include, "--out", out],
                              capture_output=True, text=True)
        self.assertEqual((done.returncode, os.path.exists(out)), (1, False))
        self.assertIn("stdbool.h", done.stderr)
        self.assertIn("packaging/abi_tables.py: the preprocessor fails", done.stderr)


if __name__ == "__main__":
    unittest.main()
