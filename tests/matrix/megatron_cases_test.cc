// SPDX-License-Identifier: Apache-2.0
// The cases of Megatron-Core's tests/unit_tests/dist_checkpointing that are about what is saved and
// loaded, by their names there.
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/matrix/named_cases.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// A grid of tensor-parallel times pipeline-parallel ranks.
struct Grid {
  int tp;
  int pp;
  int size() const { return tp * pp; }
};

TEST(MegatronCases, TestPartitionChangeSaveLoad) {
  // keyA: a 2 x 4 grid of single cells; keyB: (4, 5, 80) with value 100 * x + z, saved by 2 x 4
  // ranks along axes 2 and 0, read whole, then by rows of a prepended axis on another grid.
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const Dims shape_a = {2, 4};
  const Dims shape_b = {4, 5, 80};
  const auto value_a = [](const Dims& at) { return static_cast<float>(10 * at[0] + at[1]); };
  const auto value_b = [](const Dims& at) { return static_cast<float>(100 * at[0] + at[2]); };
  const Grid saved = {2, 4};
  ASSERT_OK(RunOnThreads(saved.size(), [&](Communicator& comm) -> Status {
    const int tp = comm.rank() % saved.tp;
    const int pp = comm.rank() / saved.tp;
    CaseState rank;
    rank.Add("keyA", shape_a, BoxAt({tp, pp}, {1, 1}), value_a);
    rank.Add("keyB", shape_b, BoxAt({pp, 0, 40 * tp}, {1, 5, 40}), value_b);
    return Save(rank.state, path, comm).status();
  }));
  ASSERT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    CaseState rank;
    rank.Add("keyA", shape_a, Box::Whole(shape_a), {});
    rank.Add("keyB", shape_b, Box::Whole(shape_b), {});
    TENSORMOUNT_RETURN_IF_ERROR(Load(rank.state, path, comm).status());
    TENSORMOUNT_RETURN_IF_ERROR(rank.Check("keyA", value_a));
    return rank.Check("keyB", value_b);
  }));
  for (const Grid loaded : {Grid{4, 2}, Grid{1, 4}, Grid{8, 1}}) {
    ASSERT_OK(RunOnThreads(
        loaded.size(),
        [&](Communicator& comm) -> Status {
          const int tp = comm.rank() % loaded.tp;
          const int pp = comm.rank() / loaded.tp;
          const std::int64_t layers = 4 / loaded.pp;
          const std::int64_t width = 80 / loaded.tp;
          std::vector<std::vector<float>> memory;
          StateDict state;
          for (std::int64_t i = 0; i < layers; ++i) {
            memory.emplace_back(static_cast<std::size_t>(5 * width), -1.0f);
            const std::vector<AxisFragment> fragments = {{0, pp * layers + i, 4},
                                                         {2, tp, loaded.tp}};
            TENSORMOUNT_ASSIGN_OR_RETURN(
                const Shard shard,
                ShardFromOffsets(BufferView::Host(DType::kF32, memory.back().data(), {5, width}),
                                 fragments, /*prepended_axes=*/1));
            TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("keyB", shard));
          }
          LoadOptions options;
          options.not_requested = Strict::kIgnore;
          TENSORMOUNT_RETURN_IF_ERROR(Load(state, path, comm, options).status());
          for (std::int64_t i = 0; i < layers; ++i) {
            for (std::int64_t y = 0; y < 5; ++y) {
              for (std::int64_t z = 0; z < width; ++z) {
                const float found =
                    memory[static_cast<std::size_t>(i)][static_cast<std::size_t>(y * width + z)];
                const auto wanted = static_cast<float>(100 * (pp * layers + i) + tp * width + z);
                if (found != wanted) return Status(Code::kDataLoss, "keyB differs");
              }
            }
          }
          return {};
        }))
        << loaded.tp << " x " << loaded.pp;
  }
}

TEST(MegatronCases, TestUneven1dSharding) {
  struct Case {
    std::vector<std::int64_t> saved;
    std::vector<std::int64_t> loaded;
  };
  const std::vector<Case> cases = {
      {{1, 5, 7, 3, 6, 2, 5, 4}, {14, 3, 6, 3, 1, 1, 2, 3}},
      {{15, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 3, 3, 3, 3, 3}},
      {{0, 0, 0, 3, 3, 3, 3, 3}, {15, 0, 0, 0, 0, 0, 0, 0}},
  };
  for (const Case& c : cases) {
    TempDir dir;
    const std::string path = dir.Join("store/step");
    const Dims shape = {std::accumulate(c.saved.begin(), c.saved.end(), std::int64_t{0}), 3};
    const auto value = [](const Dims& at) { return static_cast<float>(at[0] * 10 + at[1]); };
    const auto add = [&](CaseState& rank, const std::vector<std::int64_t>& sizes, int r,
                         const CaseState::Value& fill) {
      const std::int64_t begin = std::accumulate(sizes.begin(), sizes.begin() + r, std::int64_t{0});
      const std::int64_t size = sizes[static_cast<std::size_t>(r)];
      // Two shards of the key on each rank: test_uneven_1d_sharding_multiple_shards.
      rank.Add("w", shape, BoxAt({begin, 0}, {size / 2, 3}), fill);
      rank.Add("w", shape, BoxAt({begin + size / 2, 0}, {size - size / 2, 3}), fill);
    };
    ASSERT_OK(RunOnThreads(8, [&](Communicator& comm) {
      CaseState rank;
      add(rank, c.saved, comm.rank(), value);
      return Save(rank.state, path, comm).status();
    }));
    ASSERT_OK(RunOnThreads(8, [&](Communicator& comm) -> Status {
      CaseState rank;
      add(rank, c.loaded, comm.rank(), {});
      TENSORMOUNT_RETURN_IF_ERROR(Load(rank.state, path, comm).status());
      return rank.Check("w", value);
    }));
  }
}

// (8, 5, 40) cut by tensor times pipeline ranks, each cell cut again into flat slices of different
// lengths for four data-parallel ranks.
TEST(MegatronCases, TestFlattenedPartitionChangeSaveLoad) {
  constexpr int kDataParallel = 4;
  const Dims shape = {8, 5, 40};
  const auto value = [](const Dims& at) {
    return static_cast<float>(at[0] * 1000 + at[1] * 100 + at[2]);
  };
  const auto add = [&](CaseState& rank, const Grid& grid, int r, const CaseState::Value& fill) {
    const int dp = r % kDataParallel;
    const int tp = r / kDataParallel % grid.tp;
    const int pp = r / kDataParallel / grid.tp;
    const Dims local = {8 / grid.pp, 5, 40 / grid.tp};
    const Box cell = Box::Make({pp * local[0], 0, tp * local[2]}, local).value();
    const std::int64_t volume = cell.volume();
    // Borders that are not multiples of anything; the last slice of cell 0 is empty.
    const auto edge = [&](int i) -> std::int64_t {
      if (i == 0) return 0;
      if (i == kDataParallel || (i == kDataParallel - 1 && tp == 0 && pp == 0)) return volume;
      return volume * i / kDataParallel + (i % 2 == 0 ? 3 : -5) + tp + pp;
    };
    rank.Add("w", shape, Region::Flat(cell, edge(dp), edge(dp + 1) - edge(dp)).value(), fill);
  };
  struct Change {
    Grid from;
    Grid to;
  };
  for (const Change& change : {Change{{2, 4}, {2, 2}}, Change{{2, 4}, {4, 2}},
                               Change{{8, 1}, {1, 2}}, Change{{1, 1}, {2, 1}}}) {
    SCOPED_TRACE(std::to_string(change.from.tp) + " x " + std::to_string(change.from.pp) + " to " +
                 std::to_string(change.to.tp) + " x " + std::to_string(change.to.pp));
    TempDir dir;
    const std::string path = dir.Join("store/step");
    ASSERT_OK(RunOnThreads(change.from.size() * kDataParallel, [&](Communicator& comm) {
      CaseState rank;
      add(rank, change.from, comm.rank(), value);
      return Save(rank.state, path, comm).status();
    }));
    ASSERT_OK(RunOnThreads(change.to.size() * kDataParallel, [&](Communicator& comm) -> Status {
      CaseState rank;
      add(rank, change.to, comm.rank(), {});
      TENSORMOUNT_RETURN_IF_ERROR(Load(rank.state, path, comm).status());
      return rank.Check("w", value);
    }));
  }
}

TEST(MegatronCases, TestFlattenedTensorsAreProperlyValidated) {
  TempDir dir;
  const Dims shape = {4, 10};
  const auto value = [](const Dims&) { return 1.0f; };
  const auto save = [&](std::int64_t second_first, std::int64_t second_count) {
    return RunOnThreads(2, [&](Communicator& comm) {
      CaseState rank;
      const Region mine = comm.rank() == 0
                              ? Region::Flat(Box::Whole(shape), 0, 17).value()
                              : Region::Flat(Box::Whole(shape), second_first, second_count).value();
      rank.Add("w", shape, mine, value);
      return Save(rank.state, dir.Join("store/step"), comm).status();
    });
  };
  const Status hole = save(19, 21);
  EXPECT_THAT(hole, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(hole, HasMessage("tensor w: [1:2, 7:9] is held by no rank"));
  const Status overlap = save(15, 25);
  EXPECT_THAT(overlap, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(overlap, HasMessage("tensor w: [1:2, 5:7] is held by rank 0 and rank 1"));
}

TEST(MegatronCases, TestMultiProcessSaveAndEmptyLoad) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const auto value = [](const Dims& at) { return static_cast<float>(at[0]); };
  ASSERT_OK(RunOnThreads(4, [&](Communicator& comm) {
    CaseState rank;
    rank.Add("w", {4}, BoxAt({comm.rank()}, {1}), value);
    rank.state.SetCommon("iteration", 7);
    return Save(rank.state, path, comm).status();
  }));
  // test_empty_load: nothing is asked for, common state comes all the same.
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const LoadReport report, Load(StateDict(), path, comm));
    TENSORMOUNT_ASSIGN_OR_RETURN(const CommonValue iteration, report.common("iteration"));
    if (!(iteration == CommonValue(7))) return Status(Code::kDataLoss, "iteration differs");
    return {};
  }));
}

// test_load_error_msg: no folder, a folder that is no checkpoint, a key that is not stored: three
// messages, each naming what it is about.
TEST(MegatronCases, TestLoadErrorMsg) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const auto load = [&](const std::string& from, const std::string& key) {
    return RunOnThreads(2, [&](Communicator& comm) {
      CaseState rank;
      rank.Add(key, {4}, BoxAt({0}, {4}), {});
      return Load(rank.state, from, comm).status();
    });
  };
  EXPECT_THAT(load(path, "w"), HasCode(Code::kNotFound));
  EXPECT_THAT(load(path, "w"), HasMessage(path));
  ASSERT_OK(RunOnThreads(1, [&](Communicator& comm) {
    CaseState rank;
    rank.Add("w", {4}, BoxAt({0}, {4}), [](const Dims&) { return 0.0f; });
    return Save(rank.state, path, comm).status();
  }));
  const Status unknown = load(path, "unknown.key");
  EXPECT_THAT(unknown, HasCode(Code::kNotFound));
  EXPECT_THAT(unknown, HasMessage("unknown.key"));
  const Status no_checkpoint = load(dir.path(), "w");
  EXPECT_FALSE(no_checkpoint.ok());
  EXPECT_NE(no_checkpoint.message(), unknown.message());
}

// test_cpu_tensors_dont_take_too_much_space: a small view of a large tensor is small on disk.
TEST(MegatronCases, TestCpuTensorsDontTakeTooMuchSpace) {
  TempDir dir;
  std::vector<float> large(1'000'000, 1.0f);
  ASSERT_OK(RunOnThreads(1, [&](Communicator& comm) -> Status {
    const BufferView whole = BufferView::Host(DType::kF32, large.data(), {1000, 1000});
    TENSORMOUNT_ASSIGN_OR_RETURN(const BufferView part,
                                 SliceView(whole, Box::Make({10, 10}, {4, 5}).value()));
    StateDict state;
    TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
        "w", Shard{.global_shape = {4, 5}, .region = Box::Whole({4, 5}), .data = part}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const SaveReport report,
                                 Save(state, dir.Join("store/step"), comm));
    EXPECT_LT(report.bytes_written, 10'000u);
    return {};
  }));
}

}  // namespace
}  // namespace tensormount
