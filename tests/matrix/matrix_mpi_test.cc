// SPDX-License-Identifier: Apache-2.0
// A sample of the matrix over MPI: 2, 3, 4 and 8 processes.
#include <chrono>
#include <string>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/require.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// Empty where MPI jobs can be run here, otherwise why not.
std::string WhyNoMpi() {
  if (::access(BuiltProgram("tests/matrix_ranks").c_str(), X_OK) != 0) return "built without MPI";
  if (RunProcess({"mpirun", "--version"}).exit_code != 0) return "there is no mpirun";
  return "";
}

void ExpectGood(int ranks, const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {
      "mpirun", "--allow-run-as-root", "--oversubscribe",
      "-n",     std::to_string(ranks), BuiltProgram("tests/matrix_ranks")};
  command.insert(command.end(), arguments.begin(), arguments.end());
  ProcessOptions process;
  process.deadline = std::chrono::seconds(100);
  const ProcessOutcome outcome = RunProcess(command, process);
  EXPECT_EQ(outcome.exit_code, 0) << outcome;
  for (int r = 0; r < ranks; ++r) {
    EXPECT_NE(outcome.out.find("rank " + std::to_string(r) + ": OK"), std::string::npos) << outcome;
  }
}

TEST(AcceptanceMatrixMpi, ASampleOnTwoThreeFourAndEightProcesses) {
  if (const std::string why = WhyNoMpi(); !why.empty()) {
    TENSORMOUNT_SKIP_UNLESS_REQUIRED("mpi", why);
  }
  TempDir dir;
  struct Pair {
    int savers;
    const char* saved;
    int loaders;
    const char* loaded;
    const char* path;
  };
  const std::vector<Pair> pairs = {{2, "rows", 3, "columns", "exchange"},
                                   {3, "flat", 8, "grid", "direct"},
                                   {8, "replicated", 4, "layers", "direct"},
                                   {4, "layers", 2, "uneven", "exchange"}};
  for (const Pair& pair : pairs) {
    SCOPED_TRACE(std::string(pair.saved) + " to " + pair.loaded);
    const std::string path = dir.Join(std::string("store/") + pair.saved);
    ExpectGood(pair.savers, {"save", path, pair.saved});
    ExpectGood(pair.loaders, {"load", path, pair.loaded, pair.path});
  }
}

}  // namespace
}  // namespace tensormount
