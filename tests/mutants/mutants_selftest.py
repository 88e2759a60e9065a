#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants all faults of a small program, compiles it once, and sees each of them, and nothing else,
change what the program prints.

usage: mutants_selftest.py ROOT COMPILER
"""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT, COMPILER = os.path.abspath(sys.argv[1]), sys.argv[2]
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import mutations

LOADER = importlib.machinery.SourceFileLoader("mutants", os.path.join(ROOT, "scripts", "mutants"))
mutants = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutants", LOADER))
LOADER.exec_module(mutants)

PROGRAM = r"""// A program with a place for each kind of fault.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <vector>
enum class Code { kInvalidArgument, kDataLoss, kNotFound, kUnavailable };
constexpr int kSize = 3 + 4;
static_assert(kSize == 7 && kSize < 8);
struct Point {
  Point(int a, int b) : x(a), y{b} { sum = a; }
  Point& operator=(const Point&) = default;
  bool Within(int size) const { return x < size && y < size; }
  int x = 1;
  int y = 2;
  int sum = 0;
};
constexpr int Twice(int a) { return a * 2; }
static_assert(Twice(4) == 8);
Code Check(int a) {
  if (a == 3) return Code::kNotFound;
  return Code::kUnavailable;
}
int Least(int a, int b) {
  std::vector<int> all;
  all.reserve(2);
  all.push_back(std::min(a, b));  // a < b
  all.push_back(7);
  return all[0];
}
int Error(bool bad) {
  if (bad) return EINVAL;
  return true ? 5 : 6;
}
int Name(int a) {
  switch (a) {
    case 1 + 1: return 40;
    default: return 41;
  }
}
int main() {
  const std::map<int, std::vector<int>> nothing;
  Point p(1, 2);
  int total = 0;
  for (int i = 0; i < 4; ++i) {
    total += i;
    if (i == 2)
      continue;
    else
      total += 10;
  }
  while (total % 2 == 0) total = total / 2;
  const char* text = "a < b && c == d";
  if (const int many = total; many != 9 || nothing.empty()) ++total;
  std::printf("%d %d %d %d\n", total, p.sum, p.Within(2), p.Within(3));
  std::printf("%d %d %d %d\n", static_cast<int>(Check(3)), static_cast<int>(Check(4)), Least(3, 4), Least(4, 3));
  std::printf("%d %d %d %d %s\n", Error(true), Error(false), Name(2), Twice(total), text);
}
"""

# Line, kind and change of all faults of it.
EXPECTED = """
11 dropped dropped
13 bound < -> <=
13 bound < -> <=
13 logic && -> ||
18 arithmetic * -> +
18 literal 2 -> 3
21 equal == -> !=
21 error kNotFound -> kUnavailable
21 literal 3 -> 4
21 negated negated
21 unchecked never
22 error kUnavailable -> kInvalidArgument
27 dropped dropped
27 minmax min -> max
""".strip().splitlines()


def placed(text, path="base/a.cc"):
    """All faults of a text, numbered; they may lie in each other."""
    found = mutations.find(path, text)
    for number, mutant in enumerate(found, 1):
        mutant.number = number
    return found


def names(text):
    return sorted(f"{m.line} {m.kind} {m.note}" for m in placed(text))


def in_function(text):
    return "//\nint F(int a, int b) {\n" + text + "\n}\n"


class Finding(unittest.TestCase):
    def test_finds_what_is_named(self):
        found = names(PROGRAM)
        for line in EXPECTED:
            self.assertIn(line, found)
        # Nothing of these lines: declarations, constants, labels, memory asked for early.
        for line in (1, 7, 8, 9, 12, 14, 15, 16, 19, 26, 36, 41, 53):
            self.assertFalse([f for f in found if f.startswith(f"{line} ")], line)

    def test_leaves_alone(self):
        for text in ("  std::vector<int> v;", "  Foo<3> v(a, b);", "  // a < b;", '  const char* t = "a < b";',
                     "  constexpr int k = 3 + 4;", "  static_assert(3 < 4);", "  using T = A<1, 2>;",
                     "  v.reserve(3);", "  LogWarning(3);", "  goto end;", "  auto&& r = a;",
                     "#define X a < b"):
            self.assertEqual(names(in_function(text)), [], text)
        self.assertEqual(names("//\nstruct A {\n  void F(int a);\n  int b = 3;\n};\nint c = 4;\n"), [])

    def test_operators_change_where_they_stand(self):
        (less,) = [m for m in placed(in_function("  return a < b;")) if m.kind == "bound"]
        self.assertEqual(less.changed, "a <= b")
        (least,) = placed(in_function("  x = std::max(a, b);"))[1:]
        self.assertEqual(least.changed, "x = std::min(a, b);")

    def test_keys_outlive_other_changes_of_a_file(self):
        text = in_function("  if (a < b) return 1;")
        before = [m.key for m in placed(text)]
        after = [m.key for m in placed("//\nint G;\n" + text)]
        self.assertEqual(before, after)
        twice = placed(in_function("  if (a < b) return 1;\n  if (a < b) return 1;"))
        self.assertEqual(len({m.key for m in twice}), len(twice))


class Choosing(unittest.TestCase):
    def choose(self, seed, count):
        by_folder = {"base": placed(PROGRAM, "base/a.cc"),
                     "fs": placed(PROGRAM, "fs/a.cc") + placed(PROGRAM, "fs/b.cc") + placed(PROGRAM, "fs/c.cc")}
        return mutations.choose(by_folder, {"base": 100, "fs": 300}, seed, count)

    def test_spread_by_size_and_never_two_in_one_place(self):
        chosen = self.choose(1, 20)
        self.assertEqual([m.number for m in chosen], list(range(1, 21)))
        self.assertEqual(len([m for m in chosen if m.path.startswith("base/")]), 5)
        for a in chosen:
            for b in chosen:
                if a is not b and a.path == b.path:
                    self.assertFalse(a.begin < b.end and b.begin < a.end)
        self.assertGreaterEqual(len({m.kind for m in chosen}), 6)

    def test_a_seed_repeats_and_another_differs(self):
        keys = [[m.key for m in self.choose(seed, 12)] for seed in (1, 1, 2)]
        self.assertEqual(keys[0], keys[1])
        self.assertNotEqual(keys[0], keys[2])


class Rewriting(unittest.TestCase):
    """Compiles the program with faults in it; each variant of a place in a program of its own."""

    def test_each_fault_does_what_it_says_and_no_other(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "base"))
            header = mutants.HEADER % {"size": 4096}
            with open(os.path.join(folder, mutants.HEADER_PATH), "w", encoding="utf-8") as file:
                file.write(header)
            chosen = self.without_overlap(placed(PROGRAM))
            text = mutations.rewrite(PROGRAM, chosen, f'#include "{mutants.HEADER_PATH}"')
            # Messages of the compiler are matched by line.
            self.assertEqual(text.count("\n"), PROGRAM.count("\n"))
            self.assertEqual(text.count("TM_MUTANT("), len(chosen))
            plain, with_faults = self.build(folder, "plain", PROGRAM), self.build(folder, "faults", text)
            usual = self.run_with(plain, 0)
            self.assertEqual(usual[0], 0)
            self.assertEqual(self.run_with(with_faults, 0), usual)
            self.assertEqual(self.run_with(with_faults, 4000), usual)
            self.assertEqual(usual[1].splitlines()[1:], ["2 3 3 3", "22 5 40 20 a < b && c == d"])
            reached = self.reach(folder, with_faults)
            by_line = {}
            for mutant in chosen:
                result = self.run_with(with_faults, mutant.number)
                by_line[(mutant.line, mutant.kind)] = result
                # The switch never comes to its last label.
                self.assertEqual(mutant.number in reached, mutant.line != 38, mutant.line)
            self.assertEqual(by_line[(11, "dropped")][1].split()[1], "0")
            self.assertEqual(by_line[(13, "logic")][1].split()[2:4], ["1", "1"])
            self.assertEqual(by_line[(21, "unchecked")][1].split()[4], "3")
            self.assertEqual(by_line[(22, "error")][1].split()[5], "0")
            self.assertEqual(by_line[(27, "minmax")][1].split()[6:8], ["4", "4"])
            self.assertEqual(len(by_line), len(chosen))
            self.assertGreaterEqual(sum(r != usual for r in by_line.values()), len(chosen) - 3)

    @staticmethod
    def without_overlap(found):
        """One fault a place, of the kinds that the program is asked about."""
        wanted = {11: "dropped", 13: "logic", 21: "unchecked", 22: "error", 27: "minmax"}
        chosen = []
        for mutant in found:
            if wanted.get(mutant.line, mutant.kind) != mutant.kind or mutant.line > 47:
                continue
            if all(mutant.begin >= m.end or m.begin >= mutant.end for m in chosen):
                chosen.append(mutant)
        return chosen

    def build(self, folder, name, text):
        source, program = os.path.join(folder, name + ".cc"), os.path.join(folder, name)
        with open(source, "w", encoding="utf-8") as file:
            file.write(text)
        done = subprocess.run([COMPILER, "-std=c++20", "-O0", "-w", "-I", folder, source, "-o", program],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return program

    def run_with(self, program, number):
        try:
            done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=2,
                                  env=dict(os.environ, TENSORMOUNT_MUTANT=str(number)))
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout

    def reach(self, folder, program):
        path = os.path.join(folder, "reach")
        with open(path, "wb") as file:
            file.write(bytes(4096))
        subprocess.run([program], capture_output=True, check=True,
                       env=dict(os.environ, TENSORMOUNT_MUTANT_REACH=path))
        with open(path, "rb") as file:
            return {number for number, byte in enumerate(file.read()) if byte}


class Trying(unittest.TestCase):
    """What becomes of a fault, by what its one test gives: None is too long."""

    class Test:
        name, folder, googletest = "test", None, False

        def run_of(self, cases):
            return cases

    class Reach:
        def fingerprint(self, _):
            return {"test": "mark"}

        def units(self, _):
            return [(Trying.Test(), ["case"], 0.1)]

    def verdict(self, *results):
        class Place:
            path, left = None, list(results)

            def run(self, *_):
                return self.left.pop(0)

        mutant = mutations.Mutant("README.md", "bound", 0, 1, "condition", "<", "<=", "< -> <=")
        entry = mutants.try_mutant(self.Reach(), Place(), mutant, {})
        self.assertEqual(Place.left, [])
        return entry["verdict"], entry["how"]

    def test_verdicts(self):
        self.assertEqual(self.verdict(0), ("survived", ""))
        self.assertEqual(self.verdict(77), ("survived", ""))
        self.assertEqual(self.verdict(1, 0), ("caught", "failure"))
        self.assertEqual(self.verdict(-11, 0), ("caught", "crash"))
        self.assertEqual(self.verdict(1, 1), ("survived", ""))  # Without the fault too.

    def test_a_timeout_counts_only_when_it_repeats(self):
        self.assertEqual(self.verdict(None, 0, None), ("caught", "too long"))
        self.assertEqual(self.verdict(None, 0, 0), ("survived", ""))
        self.assertEqual(self.verdict(None, None), ("survived", ""))


class Programs(unittest.TestCase):
    def test_not_every_one_is_of_googletest(self):
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "bin", "tests"))
            for content, cases in (("--gtest_list_tests", True), ("in C", False)):
                path = os.path.join(folder, "bin", "tests", "program")
                with open(path, "w", encoding="utf-8") as file:
                    file.write(content)
                test = mutants.Test({"name": "program", "command": [path]})
                self.assertEqual(test.googletest, cases)
                if not cases:
                    self.assertEqual(test.run_of(test.cases()), [path])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
