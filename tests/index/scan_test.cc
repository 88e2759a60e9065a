// SPDX-License-Identifier: Apache-2.0
// The one scan that verify, verify of foreign checkpoints and adoption are made of.
#include "index/read/scan.h"

#include <algorithm>
#include <mutex>
#include <set>

#include "index/read/checkpoint.h"
#include "shard/leaf_hash.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

class ScanTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Random random(TestSeed());
    ASSERT_OK_AND_ASSIGN(
        built_, BuildCheckpoint(HostFileSystem(), dir_.Join("c"), RandomSpec(random, 12, 300000)));
    ranges_ = RangesOf(built_.inventory);
  }
  Scan::Files Files() {
    return {.open =
                [this](std::uint32_t file) {
                  const std::lock_guard lock(mutex_);
                  opened_.push_back(file);
                  return HostFileSystem().OpenRead(
                      JoinPath(built_.directory, built_.inventory.files[file].name));
                },
            .check = [](std::uint32_t, File&) { return Status(); }};
  }
  Scan MakeScan(int threads) { return {built_.inventory, Files(), threads, nullptr}; }

  TempDir dir_;
  BuiltCheckpoint built_;
  std::vector<ScanRange> ranges_;
  std::mutex mutex_;
  std::vector<std::uint32_t> opened_;
};

TEST_F(ScanTest, VisitsEachRangeOnceWithItsRecordedHashes) {
  for (const int threads : {1, 4}) {
    std::vector<int> told(ranges_.size());
    std::vector<Crc64> digests(built_.inventory.tensors.size());
    Scan scan = MakeScan(threads);
    ASSERT_OK(scan.Run(ranges_, [&](std::size_t i, ScanFinding& found) {
      const std::lock_guard lock(mutex_);
      ++told[i];
      const ScanRange& range = ranges_[i];
      EXPECT_EQ(found.step, ScanFinding::Step::kNone) << found.failure.ToString();
      Hash128 wanted;
      if (range.kind == ScanRange::Kind::kChunk) {
        const TensorRecord& tensor = built_.inventory.tensors[range.owner];
        wanted = tensor.extents.At(range.row).value().hash;
        digests[range.owner] ^= found.read.contribution;
      } else if (range.kind == ScanRange::Kind::kObject) {
        wanted = built_.inventory.objects[range.owner].hash;
      } else {
        wanted = built_.inventory.extras[range.owner].hash;
      }
      EXPECT_EQ(ChunkRoot(found.read.leaves, range.length), wanted)
          << RangeName(built_.inventory, range);
      return Status();
    }));
    EXPECT_EQ(std::count(told.begin(), told.end(), 1), static_cast<std::ptrdiff_t>(told.size()));
    for (std::size_t t = 0; t < digests.size(); ++t) {
      EXPECT_EQ(digests[t], built_.inventory.tensors[t].digest);
    }
    std::uint64_t bytes = 0;
    for (const ScanRange& range : ranges_) bytes += range.length;
    EXPECT_EQ(scan.bytes(), bytes);
  }
}

TEST_F(ScanTest, OneThreadReadsFilesInOrderAndOpensEachOnce) {
  std::vector<std::pair<std::uint32_t, std::uint64_t>> seen;
  std::reverse(ranges_.begin(), ranges_.end());
  ASSERT_OK(MakeScan(1).Run(ranges_, [&](std::size_t i, ScanFinding&) {
    seen.emplace_back(ranges_[i].file, ranges_[i].offset);
    return Status();
  }));
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(std::set(opened_.begin(), opened_.end()).size(), opened_.size());
}

TEST_F(ScanTest, VisitorFailureEndsTheScan) {
  int visits = 0;
  EXPECT_THAT(MakeScan(1).Run(ranges_,
                              [&](std::size_t, ScanFinding&) {
                                ++visits;
                                return Status(Code::kBusy, "enough");
                              }),
              HasCode(Code::kBusy));
  EXPECT_EQ(visits, 1);
}

TEST_F(ScanTest, ReportsTheStepThatFailed) {
  using Step = ScanFinding::Step;
  const auto steps = [&](Scan::Files files) {
    std::set<Step> found;
    EXPECT_OK(Scan(built_.inventory, std::move(files), 1, nullptr)
                  .Run(ranges_, [&](std::size_t, ScanFinding& finding) {
                    EXPECT_EQ(finding.failure.ok(), finding.step == Step::kNone);
                    found.insert(finding.step);
                    return Status();
                  }));
    return found;
  };
  Scan::Files closed = Files();
  closed.open = [](std::uint32_t) -> Result<std::unique_ptr<File>> {
    return Status(Code::kNotFound, "gone");
  };
  EXPECT_EQ(steps(closed), std::set{Step::kOpen});
  Scan::Files changed = Files();
  changed.check = [](std::uint32_t, File&) { return Status(Code::kStale, "changed"); };
  EXPECT_EQ(steps(changed), std::set{Step::kCheck});
  // Behind the end of its file, and in no file.
  ranges_.resize(2);
  ranges_[0] = {.kind = ScanRange::Kind::kObject, .file = 0, .offset = 1u << 30, .length = 8};
  ranges_[1] = {.kind = ScanRange::Kind::kObject, .file = 1000, .length = 8};
  EXPECT_EQ(steps(Files()), (std::set{Step::kRead, Step::kRecord}));
  // A file that changed is the reason why bytes of it are missing.
  ranges_.resize(1);
  EXPECT_EQ(steps(changed), std::set{Step::kCheck});
}

}  // namespace
}  // namespace tensormount
