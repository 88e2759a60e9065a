// SPDX-License-Identifier: Apache-2.0
// The cases of OLMo-core's checkpoint_test.py that are about what is saved and loaded, by their
// names there.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/matrix/named_cases.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

float ByIndex(const Dims& at) {
  float value = 1.0f;
  for (const std::int64_t i : at) value = value * 100.0f + static_cast<float>(i);
  return value;
}

// Flat splits of (2, 3): ranks hold so many elements each.
TEST(OlmoCases, SaveAndLoadCheckpointWithDifferentShardingSpec) {
  const Dims shape = {2, 3};
  struct Case {
    std::vector<std::int64_t> saved;
    std::vector<std::int64_t> loaded;
  };
  for (const Case& c : {Case{{3, 3}, {2, 4}}, Case{{3, 3}, {4, 2}}, Case{{6, 0}, {4, 2}}}) {
    TempDir dir;
    const std::string path = dir.Join("store/step");
    const auto region = [&](const std::vector<std::int64_t>& sizes, int rank) {
      return Region::Flat(Box::Whole(shape), rank == 0 ? 0 : sizes[0],
                          sizes[static_cast<std::size_t>(rank)])
          .value();
    };
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) {
      CaseState rank;
      rank.Add("x", shape, region(c.saved, comm.rank()), ByIndex);
      return Save(rank.state, path, comm).status();
    }));
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
      CaseState rank;
      rank.Add("x", shape, region(c.loaded, comm.rank()), {});
      TENSORMOUNT_RETURN_IF_ERROR(Load(rank.state, path, comm).status());
      return rank.Check("x", ByIndex);
    }));
  }
}

TEST(OlmoCases, SaveAndLoadFromRegularToShardedTensorAndBack) {
  TempDir dir;
  const Dims shape = {6, 4};
  const auto part = [&](bool sharded, int rank) -> Region {
    return sharded ? BoxAt({3 * rank, 0}, {3, 4}) : Region(Box::Whole(shape));
  };
  for (const bool sharded : {false, true}) {
    const std::string path = dir.Join(sharded ? "store/sharded" : "store/regular");
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) {
      CaseState rank;
      rank.Add("x", shape, part(sharded, comm.rank()), ByIndex);
      return Save(rank.state, path, comm).status();
    }));
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
      CaseState rank;
      rank.Add("x", shape, part(!sharded, comm.rank()), {});
      TENSORMOUNT_RETURN_IF_ERROR(Load(rank.state, path, comm).status());
      return rank.Check("x", ByIndex);
    }));
  }
}

// Shard(0) to Shard(1).
TEST(OlmoCases, SaveAndLoadCheckpointWithDifferentDtensorTopology) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const Dims shape = {16, 8};
  ASSERT_OK(RunOnThreads(4, [&](Communicator& comm) {
    CaseState rank;
    rank.Add("x", shape, BoxAt({4 * comm.rank(), 0}, {4, 8}), ByIndex);
    return Save(rank.state, path, comm).status();
  }));
  ASSERT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
    CaseState rank;
    rank.Add("x", shape, BoxAt({0, 2 * comm.rank()}, {16, 2}), {});
    TENSORMOUNT_RETURN_IF_ERROR(Load(rank.state, path, comm).status());
    return rank.Check("x", ByIndex);
  }));
}

// Keys that exist on some ranks only, added in another order on each.
TEST(OlmoCases, SaveAndLoadWithDifferentDataAcrossRanks) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const auto keys_of = [](int rank) {
    std::vector<std::string> keys = {"shared", "only." + std::to_string(rank)};
    if (rank % 2 == 1) std::swap(keys[0], keys[1]);
    return keys;
  };
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) {
    CaseState rank;
    for (const std::string& key : keys_of(comm.rank())) {
      rank.Add(key, {5}, Box::Whole({5}), ByIndex);
    }
    return Save(rank.state, path, comm).status();
  }));
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    CaseState rank;
    for (const std::string& key : keys_of((comm.rank() + 1) % 3)) {
      rank.Add(key, {5}, Box::Whole({5}), {});
    }
    TENSORMOUNT_RETURN_IF_ERROR(Load(rank.state, path, comm).status());
    for (const std::string& key : keys_of((comm.rank() + 1) % 3)) {
      TENSORMOUNT_RETURN_IF_ERROR(rank.Check(key, ByIndex));
    }
    return {};
  }));
}

// No process group at all: the whole tensor by one reader.
TEST(OlmoCases, SaveAndUnshardDtensorWithoutRanks) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const Dims shape = {6, 5};
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) {
    CaseState rank;
    rank.Add("x", shape, BoxAt({2 * comm.rank(), 0}, {2, 5}), ByIndex);
    return Save(rank.state, path, comm).status();
  }));
  const std::unique_ptr<Communicator> self = MakeSelfCommunicator();
  CaseState all;
  all.Add("x", shape, Box::Whole(shape), {});
  ASSERT_OK(Load(all.state, path, *self));
  EXPECT_OK(all.Check("x", ByIndex));
}

}  // namespace
}  // namespace tensormount
