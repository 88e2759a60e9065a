// SPDX-License-Identifier: Apache-2.0
#include "mount-tools/cli.h"

int main(int argc, char** argv) { return tensormount::tools::Main(argc, argv); }
