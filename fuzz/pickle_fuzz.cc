// SPDX-License-Identifier: Apache-2.0
#include "fuzz/walk.h"
#include "index/archives/pickle.h"
#include "index/foreign/value_budget.h"

using namespace tensormount;

// The machine must stay within its memory, and whatever it makes must be safe to look at.
extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  pickle::Options options;
  for (const auto unknown :
       {pickle::Unknown::kRefuse, pickle::Unknown::kInert, pickle::Unknown::kForeignClasses}) {
    options.unknown = unknown;
    options.trailing_bytes = unknown == pickle::Unknown::kInert;
    const Result<pickle::Document> document = pickle::Parse(bytes, options);
    if (!document.ok()) continue;
    if (document.value().memory() > (std::size_t{48} << 20) + 6 * size + 64) std::abort();
    int left = 2000;
    Walk(document.value().root(), 0, left);
    if (pickle::Describe(document.value(), 100).size() > 200000) std::abort();
    // What holds the same value over and over is unfolded up to the budget only.
    (void)ValueBudget(20000).Convert(document.value().root());
  }
  return 0;
}
