// SPDX-License-Identifier: Apache-2.0
// What one process of an MPI job does in matrix_mpi_test: matrix_ranks save|load PATH CUT
// [exchange] Prints one line that begins with "rank N: ".
#include <cstdio>
#include <string>
#include <unistd.h>

#include "tensormount/mpi.h"

#include "tests/matrix/matrix_cases.h"

namespace tensormount {
namespace {

int Main(int argc, char** argv) {
  if (argc < 4) return 2;
  auto session = MpiSession::Init();
  if (!session.ok()) {
    std::printf("%s\n", session.status().ToString().c_str());
    return 1;
  }
  auto comm = session.value()->World();
  if (!comm.ok()) {
    std::printf("%s\n", comm.status().ToString().c_str());
    return 1;
  }
  const std::string mode = argv[1];
  Status status(Code::kInvalidArgument, "no such cut");
  for (const Cut cut : AllCuts()) {
    if (CutName(cut) != argv[3]) continue;
    LoadOptions load;
    if (argc > 4 && std::string(argv[4]) == "exchange") load.path = LoadPath::kExchange;
    status = mode == "save" ? SaveCut(*comm.value(), argv[2], cut)
                            : LoadCut(*comm.value(), argv[2], cut, load);
  }
  std::printf("rank %d: %s\n", comm.value()->rank(), status.ToString().c_str());
  std::fflush(stdout);
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) { return tensormount::Main(argc, argv); }
