// SPDX-License-Identifier: Apache-2.0
// Loads, as other ranks cut, of what torch.distributed.checkpoint wrote: chunks whose place is
// found when they are read first, and which may lie transposed.
#include <atomic>
#include <fcntl.h>
#include <filesystem>
#include <mutex>
#include <sys/stat.h>

#include <gmock/gmock.h>

#include "shard/safetensors.h"
#include "tests/adopt/adopted.h"
#include "tests/collective/load_testing.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/subprocess.h"

namespace tensormount {
namespace {

// Its cells are the formula's in its own order, or in that of its transpose.
GlobalTensor Cells(const std::string& key, DType dtype, const Dims& shape,
                   bool transposed = false) {
  GlobalTensor tensor{key, dtype, shape, {}};
  if (!transposed) {
    tensor.bytes = CellRange(dtype, 0, CheckedProduct(shape).value());
    return tensor;
  }
  for (std::int64_t row = 0; row < shape[0]; ++row) {
    for (std::int64_t column = 0; column < shape[1]; ++column) {
      tensor.bytes += CellBytes(dtype, column * shape[0] + row);
    }
  }
  return tensor;
}

LoadOptions By(LoadPath path) {
  LoadOptions options;
  options.path = path;
  options.not_requested = Strict::kIgnore;
  return options;
}

const std::string& Fixture() {
  static const std::string path = SourcePath("tests/golden/foreign/dcp-2.13/global");
  return path;
}

TEST(LoadForeign, LoadsDcpTensorsUnderEverySharding) {
  const std::vector<GlobalTensor> tensors = {Cells("model.rows", DType::kF32, {8, 6}),
                                             Cells("model.columns", DType::kBF16, {4, 8}),
                                             Cells("model.grid", DType::kI64, {6, 8}),
                                             Cells("model.uneven", DType::kF32, {5, 3}),
                                             Cells("model.short", DType::kF32, {2, 3}),
                                             Cells("model.replicated", DType::kF32, {3, 4}),
                                             Cells("model.transposed", DType::kF32, {6, 4}, true),
                                             Cells("plain", DType::kF64, {3}),
                                             Cells("bool", DType::kBool, {7}),
                                             Cells("f8", DType::kF8E4M3, {4, 4}),
                                             Cells("strided", DType::kF32, {4, 5}, true)};
  for (const LoadPath path : {LoadPath::kDirect, LoadPath::kExchange}) {
    for (const char* rule : {"rows", "cols", "grid:2x2", "flat", "replicate"}) {
      SCOPED_TRACE(rule);
      const auto wishes = WishesByRule(tensors, rule, 4);
      const auto loaded = LoadWishes(Fixture(), tensors, wishes, By(path));
      EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
      // What is not known until it is read is read by those who want it.
      for (const LoadedRank& rank : loaded) EXPECT_EQ(rank.report.bytes_received, 0u);
    }
  }
}

TEST(LoadForeign, PackedFilesAreReadOnceAndSent) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {Cells("a", DType::kF32, {40, 25}),
                                             Cells("b", DType::kBF16, {6, 10})};
  std::vector<SafetensorsEntry> entries;
  std::string data;
  for (const GlobalTensor& tensor : tensors) {
    entries.push_back({.key = tensor.key, .dtype = tensor.dtype, .shape = tensor.shape});
    data += tensor.bytes;
  }
  ASSERT_OK_AND_ASSIGN(const std::string header, MakeSafetensorsHeader(entries, {}, 8));
  PutFile(dir.Join("hf/model.safetensors"), header + data);
  for (const char* rule : {"cols", "grid:2x2", "replicate"}) {
    SCOPED_TRACE(rule);
    const auto wishes = WishesByRule(tensors, rule, 4);
    const auto loaded = LoadWishes(dir.Join("hf"), tensors, wishes, By(LoadPath::kExchange));
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
    std::uint64_t read = 0;
    std::uint64_t received = 0;
    for (const LoadedRank& rank : loaded) {
      read += rank.report.bytes_read;
      received += rank.report.bytes_received;
    }
    EXPECT_EQ(read, data.size());
    EXPECT_GT(received, 0u);
  }
}

TEST(LoadForeign, LostDataAreNotTakenForAbsentKeys) {
  TempDir dir;
  std::filesystem::copy(Fixture(), dir.Join("cut"), std::filesystem::copy_options::recursive);
  const std::vector<GlobalTensor> tensors = {Cells("plain", DType::kF64, {3}),
                                             Cells("never", DType::kF64, {3})};
  LoadOptions options = By(LoadPath::kDirect);
  options.not_stored = Strict::kIgnore;
  const auto wishes = WishesByRule(tensors, "replicate", 2);
  EXPECT_OK(LoadWishes(dir.Join("cut"), tensors, wishes, options)[0].status);
  std::filesystem::remove(dir.Join("cut/__2_0.distcp"));  // Has all of "plain".
  for (const LoadedRank& rank : LoadWishes(dir.Join("cut"), tensors, wishes, options)) {
    EXPECT_THAT(rank.status, testing::AllOf(HasCode(Code::kDataLoss), HasMessage("plain")));
  }
}

// A copy of the fixture whose times are long past, so that every change of it shows, and where its
// transposed payloads lie.
class ChangingDcp {
 public:
  explicit ChangingDcp(const std::string& path) : path_(path) {
    std::filesystem::copy(Fixture(), path, std::filesystem::copy_options::recursive);
    for (int r = 0; r < 4; ++r) {
      const timespec past{.tv_sec = 1'600'000'000, .tv_nsec = 0};
      const timespec times[2] = {past, past};
      EXPECT_EQ(utimensat(AT_FDCWD, File(r).c_str(), times, 0), 0);
    }
  }
  // Every element of model.transposed becomes another.
  void Change() const {
    for (const auto& [rank, offset] : {std::pair(0, 8653), {1, 10230}, {2, 7076}}) {
      std::string bytes = ReadWholeFile(File(rank));
      for (std::size_t i = 0; i < 32; ++i) {
        char& byte = bytes.at(static_cast<std::size_t>(offset) + i);
        byte = static_cast<char>(byte ^ 1);
      }
      WriteWholeFile(File(rank), bytes);
    }
  }

 private:
  std::string File(int rank) const { return path_ + "/__" + std::to_string(rank) + "_0.distcp"; }

  std::string path_;
};

TEST(LoadForeign, FileChangedAfterPlanningFailsAllRanksAsStale) {
  const std::vector<GlobalTensor> tensors = {Cells("model.transposed", DType::kF32, {6, 4}, true)};
  TempDir dir;
  for (const LoadPath path : {LoadPath::kDirect, LoadPath::kExchange}) {
    const auto wishes = WishesByRule(tensors, "cols", 4);
    int refused = 0;
    int at = 0;
    // Just before each thing that any rank does with a data file.
    for (bool reached = true; reached; at += 1 + at / 8) {
      SCOPED_TRACE(at);
      const std::string source =
          dir.Join(std::to_string(static_cast<int>(path)) + "." + std::to_string(at));
      const ChangingDcp changing(source);
      std::atomic<int> events{0};
      std::mutex mutex;
      ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
        const bool data = event.path.ends_with(".distcp");
        if (!data || (event.op != FileOp::kOpenRead && event.op != FileOp::kRead)) return Status();
        const std::lock_guard lock(mutex);  // The others wait until all of it is changed.
        if (events++ == at) changing.Change();
        return Status();
      });
      LoadSetup setup;
      setup.options = [&](int) { return By(path); };
      setup.fs = [&](int) -> FileSystem& { return fs; };
      const auto loaded = LoadWishesWith(source, tensors, wishes, setup);
      reached = events > at;
      if (loaded[0].status.ok()) {
        EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
        EXPECT_GT(at, 0);
        continue;
      }
      EXPECT_TRUE(reached);
      // Earlier, ranks that opened another checkpoint than rank 0 did were told so.
      refused += loaded[0].status.message().find(".distcp: changed since") != std::string::npos;
      for (const LoadedRank& rank : loaded) {
        EXPECT_THAT(rank.status, HasCode(Code::kStale));
      }
    }
    EXPECT_GE(refused, 4) << at;  // One before each rank's reading at least.
  }
}

}  // namespace
}  // namespace tensormount
