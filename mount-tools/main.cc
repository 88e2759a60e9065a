// SPDX-License-Identifier: Apache-2.0
// The program `tensormount`, all of which is tm_main (tensormount/c.h): a part of the program
// itself, or of the library beside it, as in the Python wheel.
#include "tensormount/c.h"

int main(int argc, char** argv) { return tm_main(argc, argv); }
