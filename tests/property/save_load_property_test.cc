// SPDX-License-Identifier: Apache-2.0
// Saved under any cut on any number of ranks, loaded under any other on any other number: every
// cell is what it was, nothing else is touched, and a tensor's digest does not depend on the cut.
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/load.h"
#include "tensormount/save.h"

#include "base/file_system.h"
#include "base/hash.h"
#include "collective/layout/layout_exchange.h"
#include "index/read/checkpoint.h"
#include "tests/support/random_layout.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

struct Rank {
  StateDict dict;
  std::vector<std::pair<std::size_t, ShardMemory>> shards;  // Of which tensor.
};

std::vector<Rank> MakeRanks(Random& random, const std::vector<RandomTensor>& tensors,
                            const std::vector<Partition>& cuts, int n, bool filled) {
  std::vector<Rank> ranks(static_cast<std::size_t>(n));
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      for (const Region& region : cuts[t][r]) {
        ranks[r].shards.emplace_back(t, MakeShardMemory(random, tensors[t], region, filled));
        EXPECT_OK(ranks[r].dict.AddTensor(
            tensors[t].key, {tensors[t].shape, region, ranks[r].shards.back().second.view}));
      }
    }
  }
  return ranks;
}

std::string Describe(const std::vector<RandomTensor>& tensors, const std::vector<Partition>& cuts) {
  std::string text;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    text += tensors[t].key + " " + std::string(InfoOf(tensors[t].dtype).name) + " " +
            tensors[t].shape.ToString() + ":";
    for (const std::vector<Region>& regions : cuts[t]) {
      text += " {";
      for (const Region& region : regions) text += region.ToString() + "; ";
      text += "}";
    }
    text += "\n";
  }
  return text;
}

// Every byte of `after` that is not a cell is as in a shard that nothing was loaded into.
void ExpectOnlyCellsChanged(const RandomTensor& tensor, ShardMemory& shard) {
  ShardMemory blank = shard;
  blank.view.data =
      blank.memory.data() + (static_cast<std::byte*>(shard.view.data) - shard.memory.data());
  const auto size = static_cast<std::int64_t>(tensor.element_bytes());
  for (std::int64_t i = 0; i < shard.region.volume(); ++i) {
    std::int64_t rest = i;
    std::int64_t offset = 0;
    for (int a = shard.view.shape.rank() - 1; a >= 0; --a) {
      offset += rest % shard.view.shape[a] * shard.view.strides[a];
      rest /= shard.view.shape[a];
    }
    std::byte* cell = static_cast<std::byte*>(blank.view.data) + offset * size;
    std::fill(cell, cell + size, std::byte{0xA5});
  }
  for (const std::byte b : blank.memory) {
    ASSERT_EQ(b, std::byte{0xA5}) << tensor.key << ": a byte between cells was written";
  }
}

TEST(SaveLoadProperty, AnyShardingLoadsAsAnyOther) {
  const std::vector<int> kRanks = {1, 2, 3, 4, 8};
  Random random(TestSeed());
  for (int i = 0; i < TestScale(40); ++i) {
    TempDir dir;
    const std::string path = dir.Join("store/step");
    const int savers = random.Pick(kRanks);
    const auto owners = static_cast<std::uint32_t>(random.Int(0, 4));  // 0: as its boxes ask.
    ForceOwners(owners);
    const int loaders = random.Pick(kRanks);
    std::vector<RandomTensor> tensors;
    std::vector<Partition> cuts;
    std::vector<Partition> wishes;
    const bool holes = random.OneIn(3);
    for (int t = 0; t < 4; ++t) {
      // Some over the 64 KiB of a leaf and of a pack.
      const std::uint64_t size = random.OneIn(5) ? 400'000 : 3'000;
      tensors.push_back(MakeRandomTensor(random, "t" + std::to_string(t), size));
      cuts.push_back(RandomPartition(random, tensors.back().shape, savers));
      wishes.push_back(RandomRequest(random, tensors.back().shape, loaders, holes));
    }
    SCOPED_TRACE("case " + std::to_string(i) + ", saved on " + std::to_string(savers) +
                 ", planned by " + std::to_string(owners) + ":\n" + Describe(tensors, cuts) +
                 "loaded on " + std::to_string(loaders) + ":\n" + Describe(tensors, wishes));

    std::vector<Rank> saving = MakeRanks(random, tensors, cuts, savers, true);
    SaveOptions save;
    save.placement = random.OneIn(3) ? PlacementRule::kRankShard : PlacementRule::kAuto;
    ASSERT_OK(RunOnThreads(savers, [&](Communicator& comm) {
      return Save(saving[static_cast<std::size_t>(comm.rank())].dict, path, comm, save).status();
    }));

    ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), path, {}));
    for (const RandomTensor& tensor : tensors) {
      ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(tensor.key));
      EXPECT_EQ(entry.digest, Crc64Bitwise(0, tensor.bytes.data(), tensor.bytes.size()));
    }

    std::vector<Rank> loading = MakeRanks(random, tensors, wishes, loaders, false);
    LoadOptions load;
    load.not_requested = Strict::kIgnore;
    load.verify = random.OneIn(3)   ? LoadVerify::kLeaves
                  : random.OneIn(3) ? LoadVerify::kEnd
                                    : LoadVerify::kAuto;
    load.path =
        random.Pick(std::vector<LoadPath>{LoadPath::kAuto, LoadPath::kDirect, LoadPath::kExchange});
    std::vector<LoadReport> reports(static_cast<std::size_t>(loaders));
    ASSERT_OK(RunOnThreads(loaders, [&](Communicator& comm) {
      const auto r = static_cast<std::size_t>(comm.rank());
      TENSORMOUNT_ASSIGN_OR_RETURN(reports[r], Load(loading[r].dict, path, comm, load));
      return Status();
    }));
    for (std::size_t r = 0; r < loading.size(); ++r) {
      std::uint64_t wanted = 0;
      for (auto& [t, shard] : loading[r].shards) {
        ASSERT_TRUE(CellsOf(tensors[t], shard) == OracleBytes(tensors[t], shard.region))
            << "rank " << r << ", " << tensors[t].key << " " << shard.region.ToString();
        ExpectOnlyCellsChanged(tensors[t], shard);
        wanted += static_cast<std::uint64_t>(shard.region.volume()) * tensors[t].element_bytes();
      }
      EXPECT_EQ(reports[r].bytes_wanted, wanted);
      EXPECT_EQ(reports[r].bytes_by_leaf + reports[r].bytes_by_digest + reports[r].bytes_unverified,
                wanted);
    }
  }
}

}  // namespace
}  // namespace tensormount
