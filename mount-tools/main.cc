// SPDX-License-Identifier: Apache-2.0
// The program `tensormount`. It contains tm_main (tensormount/c.h) or, in the Python wheel, uses
// that of the library.
#include "tensormount/c.h"

int main(int argc, char** argv) { return tm_main(argc, argv); }
