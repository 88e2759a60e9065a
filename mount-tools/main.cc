// SPDX-License-Identifier: Apache-2.0
// The program `tensormount`. tm_main (tensormount/c.h) is linked into it, or in the Python wheel
// comes from the library.
#include "tensormount/c.h"

int main(int argc, char** argv) { return tm_main(argc, argv); }
