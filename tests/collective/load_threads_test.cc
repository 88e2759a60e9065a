// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "tests/collective/load_testing.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// The data are not in the page cache: large targets are then read in parts, each when its data are
// brought, and ranks begin with different ones. In the same state as LoadIsExact..., and in files
// of the ranks.
TEST(Load, ColdDataLoadTheSame) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {
      MakeGlobal("wide", DType::kU8, {6'000, 7'000}), MakeGlobal("a", DType::kU16, {1200, 1100}),
      MakeGlobal("b", DType::kU8, {5'000'000}), MakeGlobal("small", DType::kU16, {3, 10})};
  for (const PlacementRule placement : {PlacementRule::kTensorFile, PlacementRule::kRankShard}) {
    SaveOptions options;
    options.placement = placement;
    const std::string path = dir.Join("store/step" + std::to_string(static_cast<int>(placement)));
    ASSERT_OK(SaveByRule(path, tensors, "rows", 2, options));
    for (const auto& [rule, ranks] : std::vector<std::pair<const char*, int>>{
             {"rows", 1}, {"rows", 2}, {"cols", 3}, {"flat", 2}, {"replicate", 2}}) {
      for (const LoadVerify verify : {LoadVerify::kAuto, LoadVerify::kOff, LoadVerify::kEnd}) {
        for (const std::string& file : DataFiles(path)) {
          const int fd = open(file.c_str(), O_RDONLY);
          ASSERT_GE(fd, 0);
          ASSERT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
          close(fd);
        }
        LoadOptions load;
        load.path = LoadPath::kDirect;
        load.verify = verify;
        load.threads = 2;
        const auto wishes = WishesByRule(tensors, rule, ranks);
        EXPECT_EQ(WhatIsWrong(tensors, wishes, LoadWishes(path, tensors, wishes, load)), "")
            << rule << " of " << ranks;
      }
    }
  }
}

// Large tensors and many small ones, whole, in columns and converted: the same bytes however many
// threads read them, the same sums, and damage is found by any of them.
TEST(Load, LoadIsExactWithAnyNumberOfThreads) {
  TempDir dir;
  std::vector<GlobalTensor> tensors = {MakeGlobal("a", DType::kF32, {1200, 1100}),
                                       MakeGlobal("b", DType::kU8, {5'000'000}),
                                       MakeGlobal("c", DType::kF32, {1100, 1200})};
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(MakeGlobal("small." + std::to_string(i), DType::kU16, {3, 10 + i}));
  }
  for (const std::size_t t : {0u, 2u}) {
    for (std::size_t i = 0; i < tensors[t].bytes.size() / 4; ++i) {
      const auto value = static_cast<float>(i * 13 % 9973) / 8;
      std::memcpy(tensors[t].bytes.data() + 4 * i, &value, 4);
    }
  }
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  struct Way {
    const char* rule;
    int ranks;
    LoadVerify verify;
  };
  for (const Way& way : {Way{"rows", 1, LoadVerify::kAuto}, Way{"rows", 1, LoadVerify::kLeaves},
                         Way{"cols", 2, LoadVerify::kAuto}, Way{"flat", 2, LoadVerify::kOff}}) {
    std::atomic<std::uint64_t> counted{0};
    LoadOptions options;
    options.path = LoadPath::kDirect;
    options.verify = way.verify;
    options.threads = 3;
    options.progress = &counted;
    const auto wishes = WishesByRule(tensors, way.rule, way.ranks);
    const auto loaded = LoadWishes(path, tensors, wishes, options);
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "") << way.rule;
    std::uint64_t read = 0;
    for (const LoadedRank& rank : loaded) read += rank.report.bytes_read;
    EXPECT_EQ(counted, read);
  }
  std::vector<GlobalTensor> halves = {tensors[0], tensors[2]};
  for (GlobalTensor& tensor : halves) {
    tensor.dtype = DType::kF64;
    std::string wide(2 * tensor.bytes.size(), '\0');
    for (std::size_t i = 0; i < tensor.bytes.size() / 4; ++i) {
      float stored = 0;
      std::memcpy(&stored, tensor.bytes.data() + 4 * i, 4);
      const double value = stored;
      std::memcpy(wide.data() + 8 * i, &value, 8);
    }
    tensor.bytes = std::move(wide);
  }
  LoadOptions convert;
  convert.threads = 3;
  convert.not_requested = Strict::kIgnore;
  convert.rules = {{"*", {.convert_dtype = true}}};
  const auto wishes = WishesByRule(halves, "rows", 1);
  const auto loaded = LoadWishes(path, halves, wishes, convert);
  ASSERT_OK(loaded[0].status);
  EXPECT_TRUE(loaded[0].buffers[0] == halves[0].bytes);
  EXPECT_TRUE(loaded[0].buffers[1] == halves[1].bytes);
  EXPECT_GT(loaded[0].report.peak_buffer_bytes, 0u);

  for (const std::string& file : DataFiles(path)) {
    if (std::filesystem::file_size(file) > 100'000) FlipByte(file, 70'000);
  }
  for (const int threads : {1, 3}) {
    LoadOptions options;
    options.threads = threads;
    for (const LoadedRank& rank :
         LoadWishes(path, tensors, WishesByRule(tensors, "rows", 1), options)) {
      EXPECT_THAT(rank.status, HasCode(Code::kDataLoss)) << threads;
    }
  }
}

}  // namespace
}  // namespace tensormount
