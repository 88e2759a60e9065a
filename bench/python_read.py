#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares reads from Python with the same reads from C: rows of a tensor in warm files, each into a new array.

usage: python_read.py LIBRARY COMMAND [--rounds N]

LIBRARY: a libtensormount.so, which both use. COMMAND: the program tensormount. Needs the package and NumPy.
Prints, for 4 KiB and 1 MiB, the microseconds of a read from each, in turns (median of the best time of each
round, because other load on the machine only adds time), and the difference.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <tensormount/c.h>
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}
int main(int argc, char** argv) {
  tm_checkpoint* checkpoint = NULL;
  if (argc != 4 || tm_checkpoint_open(argv[1], &checkpoint) != TM_OK) return 1;
  const int64_t rows = atoi(argv[2]);
  double best = 1e9;
  for (int i = 0; i < atoi(argv[3]); ++i) {
    const double begin = now();
    int64_t first[2] = {i * 7 % 700, 0}, extent[2] = {rows, 1024};
    void* data = malloc((size_t)rows * 4096);
    tm_region region = {.struct_size = sizeof(region), .rank = 2, .begin = first, .extent = extent};
    tm_buffer out = {.struct_size = sizeof(out), .dtype = TM_F32, .data = data, .shape = extent,
                     .rank = 2};
    if (tm_checkpoint_read(checkpoint, "w", &region, &out) != TM_OK) return 1;
    free(data);
    const double took = now() - begin;
    if (took < best) best = took;
  }
  printf("%f\n", best);
  tm_checkpoint_close(checkpoint);
  return 0;
}
"""


def by_python(path, rows, reads):
    import tensormount as tm

    with tm.open(path) as checkpoint:
        tensor = checkpoint["w"]
        best = 1e9
        for i in range(reads):
            begin = time.perf_counter()
            first = i * 7 % 700
            array = tensor[first:first + rows]
            del array
            best = min(best, time.perf_counter() - begin)
    return best * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("command")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    library = os.path.abspath(arguments.library)
    os.environ["TENSORMOUNT_LIBRARY"] = library
    include = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "include")
    with tempfile.TemporaryDirectory() as folder:
        import numpy

        numpy.save(os.path.join(folder, "w.npy"), numpy.arange(1 << 20, dtype="f4").reshape(1024, 1024))
        path = os.path.join(folder, "STORE", "step-1")
        subprocess.run([arguments.command, "import", "-q", os.path.join(folder, "w.npy"), path],
                       check=True)
        program = os.path.join(folder, "read")
        with open(program + ".c", "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        subprocess.run(["cc", "-O2", "-I", include, program + ".c", "-o", program, library,
                        "-Wl,-rpath," + os.path.dirname(library)], check=True)
        for name, rows, reads in (("4 KiB", 1, 3000), ("1 MiB", 256, 300)):
            c, python = [], []
            for _ in range(arguments.rounds):
                c.append(float(subprocess.run([program, path, str(rows), str(reads)], check=True,
                                              capture_output=True, text=True).stdout))
                python.append(by_python(path, rows, reads))
            c, python = statistics.median(c), statistics.median(python)
            print(f"{name}: C {c:.1f} us, Python {python:.1f} us: {python - c:.1f} us more, "
                  f"{python / c:.2f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
