// SPDX-License-Identifier: Apache-2.0
// Plans that are made in several batches, and plans that must not be used again.
#include <string>

#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "tests/collective/load_testing.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

TEST(LoadBatches, BatchMayEndBetweenTwoTensors) {
  // A batch has 8,192 of them; what a batch does is in every other case.
  if (kSanitized) GTEST_SKIP() << "about an amount: runs without sanitizers";
  TempDir dir;
  std::vector<GlobalTensor> tensors;
  for (int t = 0; t < 8200; ++t) {
    tensors.push_back(MakeGlobal("t" + std::to_string(t), DType::kU8, {3}));
  }
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "replicate", 1));
  const auto wishes = WishesByRule(tensors, "replicate", 3);
  LoadOptions options;
  options.path = LoadPath::kExchange;
  for (const LoadVerify verify : {LoadVerify::kLeaves, LoadVerify::kAuto}) {
    options.verify = verify;
    const auto loaded = LoadWishes(path, tensors, wishes, options);
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
    std::uint64_t received = 0;
    for (const LoadedRank& rank : loaded) received += rank.report.bytes_received;
    EXPECT_EQ(received, 2u * 3 * 8200);
  }
}

std::string SafetensorsFile(const std::string& entries, const std::string& data) {
  std::string header = entries;
  header.resize(128, ' ');
  return std::string("\x80\0\0\0\0\0\0\0", 8) + header + data;
}

TEST(LoadBatches, PlanIsNotReusedForAnotherFileOfTheSameLength) {
  TempDir dir;
  const std::string path = dir.Join("model.safetensors");
  const std::string one(8, '\1');
  const std::string two(8, '\2');
  const std::vector<std::string> files = {
      SafetensorsFile(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                      R"("b":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})",
                      one + two),
      // Another key, another dtype, another place.
      SafetensorsFile(R"({"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                      R"("c":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})",
                      two + one),
      SafetensorsFile(R"({"a":{"dtype":"I8","shape":[8],"data_offsets":[0,8]},)"
                      R"("b":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})",
                      one + two),
      SafetensorsFile(R"({"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                      R"("a":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})",
                      two + one)};
  const std::vector<Code> expected = {Code::kOk, Code::kNotFound, Code::kInvalidArgument,
                                      Code::kOk};
  EXPECT_OK(RunOnThreads(1, [&](Communicator& comm) {
    for (std::size_t i = 0; i < files.size(); ++i) {
      WriteWholeFile(path, files[i]);
      std::string a(8, '\0');
      StateDict request;
      EXPECT_OK(request.AddTensor(
          "a",
          {{8}, Box::Whole({8}), BufferView::Host(DType::kU8, static_cast<void*>(a.data()), {8})}));
      LoadOptions options;
      options.not_requested = Strict::kIgnore;
      const Result<LoadReport> report = Load(request, path, comm, options);
      EXPECT_EQ(report.status().code(), expected[i]) << i << " " << report.status().ToString();
      EXPECT_EQ(a, expected[i] == Code::kOk ? one : std::string(8, '\0')) << i;
    }
    return Status();
  }));
}

}  // namespace
}  // namespace tensormount
