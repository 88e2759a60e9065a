// SPDX-License-Identifier: Apache-2.0
// A sample of the matrix over MPI: 2, 3, 4 and 8 processes.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/mpi_job.h"
#include "tests/support/require.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

void ExpectGood(int ranks, const std::vector<std::string>& arguments) {
  const ProcessOutcome outcome = StartMpi("tests/matrix_ranks", ranks, arguments)->Wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome;
  for (int r = 0; r < ranks; ++r) {
    EXPECT_NE(outcome.out.find("rank " + std::to_string(r) + ": OK"), std::string::npos) << outcome;
  }
}

TEST(AcceptanceMatrixMpi, SampledPairsLoadExactlyOnUpToEightProcesses) {
  if (const std::string why = WhyNoMpi("tests/matrix_ranks"); !why.empty()) {
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
