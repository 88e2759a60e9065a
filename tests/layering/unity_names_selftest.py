#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants names in a small tree, one pair of files at a time, and checks that exactly the names that cannot be
compiled in one batch are reported.

usage: unity_names_selftest.py ROOT
"""

import os
import sys
import tempfile

import layering
import unity_names


def own(text):
    """Text in the anonymous namespace of tensormount."""
    return named("namespace {\n" + text + "\n}  // namespace")


def named(text, name="tensormount"):
    """Text in a named namespace."""
    return f"namespace {name} {{\n{text}\n}}  // namespace {name}\n"


FOLDERS = ["base", "bench", "index", "examples", "fuzz", "tests", "tests/index"]
A, B, SUB, HEADER = "index/a.cc", "index/b.cc", "index/adopt/c.cc", "index/h.h"
FUNCTION = own("int Planted(int a) { return a; }")

# A part of the report (None: no report), and the files.
PLANTED = [
    ("tensormount::Planted", {A: FUNCTION, B: FUNCTION}),
    ("tensormount::Planted", {A: FUNCTION,
                              SUB: own("void Planted(const char* text, int = 1 << 3);")}),
    ("tensormount::Planted", {A: FUNCTION,
                              B: own("template <typename T = int>\nMap<int, T> Planted(T t) {}")}),
    ("tensormount::Planted", {A: FUNCTION,
                              B: own("__attribute__((cold)) [[nodiscard]] int Planted() {}")}),
    ("tensormount::Planted", {A: FUNCTION, B: named("static int Planted() { return 1; }")}),
    ("tensormount::Planted", {A: FUNCTION, B: named("int Planted() { return 1; }")}),
    ("tensormount::Planted", {A: own("struct Planted {\n  int a = 1;\n};"),
                              B: own("class Planted final : public Other<int> {};")}),
    ("tensormount::Planted", {A: named("struct Planted {};"), B: named("struct Planted {};")}),
    ("tensormount::Planted", {A: own("enum class Planted : int { kA };"), B: FUNCTION}),
    ("tensormount::kB", {A: own("enum { kA = 1 << 20, kB };"), B: own("const int kB = 1;")}),
    ("tensormount::kPlanted", {A: own("constexpr int kPlanted = 1 << 20;"),
                               B: named("constexpr int kPlanted{2};")}),
    ("tensormount::planted", {A: own("std::array<int, 3> planted;"),
                              B: own("thread_local int planted[3];")}),
    ("tensormount::Planted", {A: own("using Planted = int;"), B: own("using Planted = long;")}),
    ("tensormount::Planted", {A: named("using Planted = int;"), B: named("using Planted = long;")}),
    ("tensormount::Planted", {A: own("using one::Planted;"), B: own("using other::Planted;")}),
    ("PLANTED", {A: "#define PLANTED(a) \\\n  do { a; } while (false)\n",
                 B: "#define PLANTED(a) a\n"}),
    ("using namespace", {A: named("using namespace std::literals;")}),
    ("tensormount::Planted", {A: own("MATCHER_P(Planted, a, \"\") { return arg == a; }"),
                              B: FUNCTION}),
    ("tensormount::Suite_Planted_Test", {A: own("TEST(Suite, Planted) { EXPECT_EQ(1, 1); }"),
                                         B: own("TEST_F(Suite, Planted) {}")}),
    ("tensormount::Planted", {A: own("Owner::Owner() : a_{1}, b_(2) { Call(); }\nint Planted();"),
                              B: FUNCTION}),
    # With headers.
    ("also in index/h.h", {A: FUNCTION, HEADER: named("void Planted(const char* text);")}),
    ("also in index/h.h", {A: FUNCTION, HEADER: named("inline constexpr int Planted = 1;")}),
    ("also in index/h.h", {A: own("struct Planted {};"), HEADER: named("struct Planted;")}),
    ("also in index/h.h", {A: named("struct Planted {};"), HEADER: named("struct Planted {};")}),
    ("also in base/h.h", {A: FUNCTION, "base/h.h": named("bool Planted();")}),
    ("also in include/tensormount/store.h",
     {A: FUNCTION, "include/tensormount/store.h": named("bool Planted();")}),
    ("also in index/h.h", {"tests/index/a.cc": FUNCTION, HEADER: named("bool Planted();")}),
    ("also in tests/fs/h.h", {"tests/index/a.cc": FUNCTION,
                              "tests/fs/h.h": named("bool Planted();")}),
    # A local name in an inner namespace would hide the header's name from the other files.
    ("also in base/h.h", {A: named("namespace {\nint Planted = 1;\n}", "tensormount::pickle"),
                          "base/h.h": named("bool Planted();")}),
    # A directory that compiles files of other directories.
    ("tensormount::Planted", {"base/a.cc": FUNCTION, A: FUNCTION,
                              "fuzz/CMakeLists.txt": "library(x ../base/a.cc ../index/a.cc)\n"}),
    # Allowed.
    (None, {"base/a.cc": FUNCTION, A: FUNCTION, "tests/index/a.cc": FUNCTION}),
    (None, {"examples/a.cc": FUNCTION, "examples/b.cc": FUNCTION}),
    (None, {"fuzz/a_fuzz.cc": FUNCTION + "using namespace tensormount;\n",
            "fuzz/b_fuzz.cc": FUNCTION}),
    (None, {A: own("using Planted = std::vector<int>;"),
            B: own("using Planted = std::vector<int>;")}),
    (None, {A: own("using testing::_;"), B: own("using ::testing::_;")}),
    (None, {A: own("int A() {\n  using namespace std;\n  int planted = 1;\n}"),
            B: own("int planted = 1;")}),
    (None, {A: "#define PLANTED 1\n", B: "#define PLANTED   1\n"}),
    (None, {A: "#define PLANTED 1\n#undef PLANTED\n", B: "#define PLANTED 2\n"}),
    (None, {A: FUNCTION, B: "namespace tensormount::pickle {\n" + FUNCTION + "}\n"}),
    (None, {A: own("int Planted();\nint Planted(int a) { return a; }")}),
    (None, {A: named("int Planted() {}\nstruct Type {};\nconst int kA = 1;\nstruct Type::Rep {};"),
            HEADER: named("int Planted();\nstruct Type;\nextern const int kA;\nstruct Rep {};")}),
    (None, {A: own("struct Rep {};"),
            B: named("struct Owner::Rep {};\nint Owner::Rep(int a) { return a; }")}),
    (None, {A: FUNCTION,
            B: own("// int Planted();\nconst char* text = R\"(int Planted();)\" \"{\";")}),
    (None, {A: FUNCTION, "bench/h.h": named("bool Planted();")}),
    (None, {A: FUNCTION, "base/h_internal.h": named("bool Planted();")}),
    (None, {A: own("template <> void Planted<int>() {}\ntemplate class Planted<long>;"),
            B: FUNCTION}),
]


def reported(files):
    """The report for a tree with these files and a CMakeLists.txt in each of FOLDERS."""
    with tempfile.TemporaryDirectory() as tree:
        for path, text in ({f"{f}/CMakeLists.txt": "" for f in FOLDERS} | files).items():
            os.makedirs(os.path.join(tree, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(tree, path), "w") as file:
                file.write(text)
        return unity_names.violations(tree)


def main():
    missed = 0
    for expected, files in PLANTED:
        found = reported(files)
        if len(found) != (expected is not None) or not all(expected in line for line in found):
            missed += 1
            print(f"expected {expected!r}: {found}: {files}")
    # In the real tree, names are found in every file that has local names.
    for path in layering.source_files(sys.argv[1]):
        if path.endswith(".cc"):
            with open(os.path.join(sys.argv[1], path), encoding="utf-8") as file:
                text = file.read()
            if "namespace {\n" in text and not any(d.own for d in unity_names.declarations(text)):
                missed += 1
                print(f"no names read of {path}")
    print(f"{len(PLANTED)} planted, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
