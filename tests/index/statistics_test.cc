// SPDX-License-Identifier: Apache-2.0
#include "index/read/statistics.h"

#include <cstring>
#include <string>
#include <vector>

#include "index/read/compare.h"
#include "index/store/kept_statistics.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

class StatisticsTest : public testing::Test {
 protected:
  // A tensor of several blocks of 64 Ki values, in `parts` chunks.
  std::shared_ptr<OpenedCheckpoint> Make(const std::string& name, int parts, std::uint64_t seed) {
    TinySpec spec;
    spec.tensors = {{.key = "big", .dtype = DType::kBF16, .shape = {700, 701}},
                    {.key = "c", .dtype = DType::kC64, .shape = {300, 333}},
                    {.key = "f4", .dtype = DType::kF4, .shape = {64, 4000}},
                    {.key = "i", .dtype = DType::kI64, .shape = {100000}}};
    for (TinyTensor& tensor : spec.tensors) {
      tensor.seed += seed;
      tensor.parts = InfoOf(tensor.dtype).bits >= 8 ? parts : 1;
    }
    spec.writers = 2;
    const std::string store = dir_.path() + "/STORE";
    EXPECT_OK(WriteTinyCheckpoint(HostFileSystem(), store, name, spec).status());
    auto opened = OpenedCheckpoint::Open(HostFileSystem(), store + "/" + name, {});
    EXPECT_OK(opened.status());
    return opened.ok() ? opened.value() : nullptr;
  }

  // All results, as the bytes that a checkpoint keeps.
  std::string Measure(const OpenedCheckpoint& checkpoint, int threads, std::size_t block_bytes) {
    KeptStatistics all;
    StatisticsOptions options;
    options.threads = threads;
    options.block_bytes = block_bytes;
    const auto summary = MeasureTensors(
        checkpoint, options, [&](const TensorEntry& tensor, const TensorStatistics& one, bool) {
          all.Put(tensor, one);
          return Status();
        });
    EXPECT_OK(summary.status());
    EXPECT_EQ(summary.ok() ? summary.value().tensors : 0, 4U);
    return all.Encode();
  }

  TempDir dir_;
};

TEST_F(StatisticsTest, ThreadsAndBlocksAndShardingsDoNotChangeTheLastBit) {
  const auto a = Make("a", 1, 0);
  const std::string expected = Measure(*a, 1, std::size_t{64} << 20);
  EXPECT_EQ(Measure(*a, 4, 1), expected);
  EXPECT_EQ(Measure(*Make("b", 5, 0), 3, 300000), expected);
  EXPECT_NE(Measure(*Make("c", 1, 1), 1, 300000), expected);
}

TEST_F(StatisticsTest, ChangesDoNotDependOnThreadsAndBlocks) {
  const auto a = Make("a", 3, 0);
  const auto b = Make("b", 2, 9);
  std::vector<std::vector<double>> runs;
  for (const auto& [threads, block_bytes] : {std::pair{1, 64 << 20}, {4, 1}, {3, 300000}}) {
    CompareOptions options;
    options.stats = true;
    options.threads = threads;
    options.block_bytes = static_cast<std::size_t>(block_bytes);
    std::vector<double>& numbers = runs.emplace_back();
    const auto add = [&](const ValueChange& c) {
      for (const double x : {c.changed_share(), c.max_abs, c.mean_abs(), c.l2_change(), c.cosine(),
                             static_cast<double>(c.non_finite)}) {
        numbers.push_back(x);
      }
    };
    const auto summary = CompareCheckpoints(*a, *b, options, [&](const Mismatch& d) {
      EXPECT_TRUE(d.change) << d.key;
      if (d.change) add(*d.change);
      return Status();
    });
    ASSERT_OK(summary.status());
    add(summary.value().change);
    EXPECT_EQ(numbers.size(), 30U);
    EXPECT_EQ(numbers, runs[0]);
  }
}

TEST_F(StatisticsTest, KeptStatisticsWithAWrongByteAreRefused) {
  const auto a = Make("a", 1, 0);
  const std::string good = Measure(*a, 1, 1 << 20);
  const auto decoded = KeptStatistics::Decode(good, "statistics");
  ASSERT_OK(decoded.status());
  EXPECT_EQ(decoded.value().Encode(), good);
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    EXPECT_EQ(KeptStatistics::Decode(bad, "statistics").status().code(), Code::kDataLoss) << i;
    EXPECT_EQ(KeptStatistics::Decode(good.substr(0, i), "statistics").status().code(),
              Code::kDataLoss);
  }
}

TEST_F(StatisticsTest, KeptStatisticsOfAnotherDigestAreNotUsed) {
  const auto a = Make("a", 1, 0);
  const auto other = Make("b", 1, 1);
  KeptStatistics kept;
  const TensorEntry mine = a->index().Find("big").value();
  kept.Put(mine, {.count = 7});
  ASSERT_NE(kept.Find(mine), nullptr);
  EXPECT_EQ(kept.Find(mine)->count, 7U);
  EXPECT_EQ(kept.Find(other->index().Find("big").value()), nullptr);
  TensorEntry plain = mine;
  plain.has_digest = false;
  EXPECT_EQ(kept.Find(plain), nullptr);
  KeptStatistics none;
  none.Put(plain, {.count = 7});
  EXPECT_EQ(none.Find(mine), nullptr);
}

}  // namespace
}  // namespace tensormount
