// SPDX-License-Identifier: Apache-2.0
// Wrong input and full disks: refused with code, object and reason on every rank, and nothing is
// left behind.
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <vector>

#include <gtest/gtest.h>

#include "index/read/checkpoint.h"
#include "tests/collective/save_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/device_mode.h"
#include "tests/support/no_devices.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

class SaveErrorsTest : public testing::Test {
 protected:
  std::string Store() const { return dir_.Join("store"); }
  std::string Path(const std::string& name) const { return dir_.Join("store/" + name); }

  // Four ranks save `w` by rows of 2, the regions that `cut` makes of them.
  Status SaveRows(const std::function<Region(int rank)>& cut) {
    return OneVerdict(
        SaveOnThreads(Path("a"), 4, [&](int rank, RankState& state) { state.Add(w_, cut(rank)); }));
  }
  static Region Row(int rank) { return B({2 * rank, 0}, {2, 8}); }

  TempDir dir_;
  const RandomTensor w_ = MakeTensor("w", DType::kF32, {8, 8});
};

TEST_F(SaveErrorsTest, GapOfOneElementIsReported) {
  const Status status = OneVerdict(SaveOnThreads(Path("a"), 4, [&](int rank, RankState& state) {
    if (rank != 2) return state.Add(w_, Row(rank));
    state.Add(w_, B({4, 0}, {1, 8}));
    state.Add(w_, B({5, 0}, {1, 3}));
    state.Add(w_, B({5, 4}, {1, 4}));
  }));
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_EQ(status.message(),
            "tensor w: [5:6, 3:4] is held by no rank; parts are held by ranks 0-3");
  EXPECT_FALSE(HostFileSystem().Exists(Store())) << "no store is made for a save that is refused";
}

TEST_F(SaveErrorsTest, OverlapOfOneElementIsReported) {
  const Status status = OneVerdict(SaveOnThreads(Path("a"), 4, [&](int rank, RankState& state) {
    state.Add(w_, Row(rank));
    if (rank == 3) state.Add(w_, B({3, 7}, {1, 1}));
  }));
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_EQ(status.message(),
            "tensor w: [3:4, 7:8] is held by rank 1 and rank 3 (rank 1: [2:4, 0:8], rank 3: [3:4, "
            "7:8]: one box contains another: not sharded on some ranks?)");
}

TEST_F(SaveErrorsTest, DifferingDtypeAndShapeAreReported) {
  const RandomTensor other = MakeTensor("w", DType::kI32, {8, 8});
  Status status = OneVerdict(SaveOnThreads(Path("a"), 4, [&](int rank, RankState& state) {
    state.Add(rank == 2 ? other : w_, Row(rank));
  }));
  EXPECT_EQ(status.message(), "tensor w: dtype is f32 on ranks 0, 1, 3 and i32 on rank 2");
  const RandomTensor longer = MakeTensor("w", DType::kF32, {9, 8});
  status = OneVerdict(SaveOnThreads(Path("a"), 4, [&](int rank, RankState& state) {
    state.Add(rank == 3 ? longer : w_, Row(rank));
  }));
  EXPECT_THAT(status,
              HasMessage("tensor w: shape is [8, 8] on ranks 0, 1, 2 and [9, 8] on rank 3"));
  EXPECT_THAT(Inside(Store()), IsEmpty());
}

TEST_F(SaveErrorsTest, ErrorNamesDifferingOptionsAndRanks) {
  const auto save = [&](const std::function<void(SaveOptions&)>& change) {
    std::vector<Result<SaveReport>> results(2, Status(Code::kInternal, "did not run"));
    EXPECT_OK(RunOnThreads(2, [&](Communicator& comm) {
      SaveOptions options;
      if (comm.rank() == 1) change(options);
      StateDict state;
      results[static_cast<std::size_t>(comm.rank())] = Save(state, Path("a"), comm, options);
      return Status();
    }));
    return OneVerdict(results);
  };
  EXPECT_THAT(save([](SaveOptions& o) { o.strategy = SaveStrategy::kMain; }),
              HasMessage("option strategy is parallel on rank 0 and main on rank 1"));
  EXPECT_THAT(save([](SaveOptions& o) { o.replicas = ReplicaCheck::kFull; }),
              HasMessage("option replicas is rotating on rank 0 and full on rank 1"));
  EXPECT_THAT(save([](SaveOptions& o) { o.if_exists = IfExists::kReplace; }),
              HasMessage("option if_exists is fail on rank 0 and replace on rank 1"));
  EXPECT_THAT(save([](SaveOptions& o) { o.reuse_plan = false; }),
              HasMessage("option reuse_plan is on on rank 0 and off on rank 1"));
  EXPECT_THAT(save([](SaveOptions& o) { o.page_hashes = true; }),
              HasMessage("option page_hashes is off on rank 0 and on on rank 1"));
  EXPECT_THAT(save([](SaveOptions& o) { o.ephemeral = true; }),
              HasMessage("option ephemeral is off on rank 0 and on on rank 1"));
  EXPECT_THAT(save([](SaveOptions& o) { o.retention = RetentionRules::OfStore(); }),
              HasMessage("option retention is not set on rank 0 and policy on rank 1"));
}

TEST_F(SaveErrorsTest, FailedAddFailsTheSaveOnEveryRank) {
  const Status status = OneVerdict(SaveOnThreads(Path("a"), 3, [&](int rank, RankState& state) {
    if (rank != 1) return;
    EXPECT_FALSE(state.dict.AddObject("o", "x", {.index = {3}, .grid = {3}}).ok());
  }));
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(status, HasMessage("rank 1: object o: index [3] lies outside of grid [3]"));
}

TEST_F(SaveErrorsTest, StateDictRefusesInvalidEntries) {
  StateDict dict;
  std::vector<float> data(64);
  const auto view = [&](const Dims& shape) {
    return BufferView::Host(DType::kF32, static_cast<void*>(data.data()), shape);
  };
  EXPECT_THAT(dict.AddTensor("w", {{8, 8}, B({7, 0}, {2, 8}), view({2, 8})}),
              HasMessage("tensor w: region [7:9, 0:8] lies outside of shape [8, 8]"));
  EXPECT_FALSE(dict.AddTensor("w", {{8, 8}, B({0, 0}, {2, 8}), view({8, 2})}).ok());
  EXPECT_FALSE(dict.AddTensor("w", {{8, 8}, B({0}, {2}), view({2})}).ok());
  EXPECT_FALSE(dict.AddTensor("", {{8}, B({0}, {8}), view({8})}).ok());
  EXPECT_FALSE(dict.AddTensor(std::string(3000, 'k'), {{8}, B({0}, {8}), view({8})}).ok());
  BufferView device = view({8});
  device.device = {DeviceKind::kCuda, 7};
  if (DeviceMode()) {
    EXPECT_THAT(dict.AddTensor("w", {{8}, B({0}, {8}), device}), HasCode(Code::kUnavailable));
  } else {
    const NoDevices none_here;
    EXPECT_THAT(dict.AddTensor("w", {{8}, B({0}, {8}), device}), HasCode(Code::kUnsupported));
  }
  BufferView null = view({8});
  null.data = nullptr;
  EXPECT_THAT(dict.AddTensor("w", {{8}, B({0}, {8}), null}),
              HasMessage("tensor w: the buffer is null"));
  // Half a byte of fp4.
  BufferView nibble = BufferView::Host(DType::kF4, static_cast<void*>(data.data()), {3});
  EXPECT_THAT(dict.AddTensor("w", {{8}, B({0}, {3}), nibble}), HasCode(Code::kInvalidArgument));
  ASSERT_OK(dict.AddTensor("w", {{8}, B({0}, {4}), view({4})}));
  EXPECT_THAT(dict.AddTensor("w", {{9}, B({4}, {4}), view({4})}),
              HasMessage("tensor w: added with shape [8] and with [9]"));
  ASSERT_OK(dict.AddObject("o", "x"));
  EXPECT_THAT(dict.AddObject("o", "x"), HasMessage("object o: added twice"));
  EXPECT_THAT(dict.status(), HasMessage("lies outside")) << "the first failure stays";
}

TEST_F(SaveErrorsTest, ExistingOrReservedNameIsRefused) {
  ASSERT_OK(SaveRows(Row));
  const Status status = SaveRows(Row);
  EXPECT_THAT(status, HasCode(Code::kAlreadyExists));
  EXPECT_THAT(Inside(Store()), ElementsAre("a"));
  for (const char* name : {"latest", ".hidden", "store.json"}) {
    EXPECT_THAT(OneVerdict(SaveOnThreads(Path(name), 2, [](int, RankState&) {})),
                HasCode(Code::kInvalidArgument));
  }
  EXPECT_THAT(OneVerdict(SaveOnThreads("a", 2, [](int, RankState&) {})),
              HasMessage("the path must be STORE/NAME"));
}

TEST_F(SaveErrorsTest, ReplicaMismatchErrorNamesKeyBoxAndRanks) {
  RandomTensor other = w_;
  other.bytes[100] ^= 1;  // Row 3.
  SaveOptions options;
  options.replicas = ReplicaCheck::kFull;
  const auto save = [&](const SaveOptions& o) {
    return OneVerdict(SaveOnThreads(
        Path("a"), 2,
        [&](int rank, RankState& state) {
          state.Add(rank == 1 ? other : w_, Box::Whole(w_.shape));
        },
        o));
  };
  for (const ReplicaCheck check : {ReplicaCheck::kFull, ReplicaCheck::kRotating}) {
    options.replicas = check;
    const Status status = save(options);
    EXPECT_THAT(status, HasCode(Code::kDataLoss));
    EXPECT_EQ(status.message(),
              "tensor w: [0:4, 0:8] differs between the replicas on rank 0 and rank 1");
    EXPECT_THAT(Inside(Store()), IsEmpty());
  }
  options.replicas = ReplicaCheck::kOff;
  EXPECT_OK(save(options));
}

TEST_F(SaveErrorsTest, DifferingObjectsAreReported) {
  const Status status = OneVerdict(SaveOnThreads(Path("a"), 2, [&](int rank, RankState& state) {
    ASSERT_OK(state.dict.AddObject("config", rank == 0 ? "a" : "b"));
  }));
  EXPECT_EQ(status.message(), "object config: contents differ between rank 0 and rank 1");
}

// Rank 0 differs, then agrees, then differs from what the base has: its copy is stored each time.
TEST_F(SaveErrorsTest, WarnStoresTheLowestRanksCopyAndReportsTheDifference) {
  const RandomTensor large = MakeTensor("large", DType::kU8, {1 << 20});
  RandomTensor changed = large;
  for (char& byte : changed.bytes) byte = static_cast<char>(byte ^ 0x5a);
  SaveOptions options;
  options.replicas = ReplicaCheck::kWarn;
  int step = 0;
  for (const bool differs : {true, false, true, true}) {
    const RandomTensor& first = differs ? changed : large;
    const std::string config = differs ? "of rank 0" : "common";
    const std::string path = Path("step-" + std::to_string(++step));
    const auto results = SaveOnThreads(
        path, 3,
        [&](int rank, RankState& state) {
          state.Add(rank == 0 ? first : large, Box::Whole(large.shape));
          ASSERT_OK(state.dict.AddObject("config", rank == 0 ? config : "common"));
        },
        options);
    ASSERT_OK(OneVerdict(results));
    for (const Result<SaveReport>& result : results) {
      const std::vector<std::string>& warnings = result.value().warnings;
      ASSERT_EQ(warnings.size(), differs ? 2 : 0) << step;
      if (!differs) continue;
      EXPECT_EQ(warnings[0],
                "object config: contents differ between rank 0 and rank 1; the lowest rank's are "
                "stored");
      EXPECT_THAT(warnings[1], testing::HasSubstr("tensor large: [0:"));
      EXPECT_THAT(warnings[1], testing::HasSubstr("differs between the replicas on rank 0 and"));
    }
    EXPECT_EQ(ReadAll(path)["large"], first.bytes) << step;
    ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), path, {}));
    ASSERT_OK_AND_ASSIGN(const auto objects, opened->index().Objects());
    ASSERT_EQ(objects.size(), 1);
    std::string stored(static_cast<std::size_t>(objects[0].length), '\0');
    ASSERT_OK(opened->ReadObject(objects[0], 0, stored.data(), stored.size()));
    EXPECT_EQ(stored, config) << step;
  }
}

TEST_F(SaveErrorsTest, NewerStoreIsRefused) {
  ASSERT_OK(SaveRows(Row));
  std::string superblock = ReadWholeFile(Path("store.json"));
  const std::size_t at = superblock.find("\"incompatible");
  if (at == std::string::npos) GTEST_SKIP() << "the superblock has no field of this name";
  const std::size_t digit = superblock.find_first_of("0123456789", superblock.find(':', at));
  superblock[digit] = '4';
  ASSERT_EQ(chmod(Path("store.json").c_str(), 0644), 0);
  WriteWholeFile(Path("store.json"), superblock);
  EXPECT_THAT(OneVerdict(SaveOnThreads(Path("b"), 2, [](int, RankState&) {})),
              HasCode(Code::kUnsupported));
}

// A disk that is full from the n-th operation that needs space on, for one rank.
class FullDisk {
 public:
  FullDisk() : fs_(HostFileSystem(), [this](const FileEvent& e) { return Before(e); }) {}

  FileSystem& fs() { return fs_; }
  void FullFrom(int n) {
    full_from_ = n;
    seen_ = 0;
  }
  int seen() const { return seen_; }

 private:
  Status Before(const FileEvent& event) {
    switch (event.op) {
      case FileOp::kWrite:
      case FileOp::kOpenShared:
        break;
      case FileOp::kCreate:
      case FileOp::kCreateDirectory:
        // What is there already needs no space.
        if (HostFileSystem().Exists(event.path)) return Status();
        break;
      default:
        return Status();
    }
    if (seen_++ < full_from_) return Status();
    return Status::FromErrno(ENOSPC, "write", event.path);
  }

  std::atomic<int> full_from_{1 << 30};
  std::atomic<int> seen_{0};
  ObservedFileSystem fs_;
};

TEST_F(SaveErrorsTest, FullDiskOnAnyRankFailsAllAndLeavesNothing) {
  constexpr int kRanks = 3;
  const RandomTensor big = MakeTensor("big", DType::kF32, {2048, 600});  // A shared tensor file.
  const RandomTensor cols = MakeTensor("cols", DType::kF32, {64, 600});
  std::vector<FullDisk> disks(kRanks);
  SaveOptions options;
  options.reuse = Reuse::kOff;
  const auto save = [&](const std::string& name) {
    return OneVerdict(SaveOnThreads(
        Path(name), kRanks,
        [&](int rank, RankState& state) {
          state.Add(big, B({683 * rank, 0}, {rank == 2 ? 682 : 683, 600}));
          state.Add(cols, B({0, 200 * rank}, {64, 200}));
          state.Add(w_, Box::Whole(w_.shape));
          ASSERT_OK(state.dict.AddObject("o", "bytes"));
        },
        options,
        [&](int rank) -> FileSystem& { return disks[static_cast<std::size_t>(rank)].fs(); }));
  };
  ASSERT_OK(save("old"));
  Random random(TestSeed());
  // Of a save into a store that exists.
  for (FullDisk& disk : disks) disk.FullFrom(1 << 30);
  ASSERT_OK(save("second"));
  std::vector<int> counts;
  for (FullDisk& disk : disks) counts.push_back(disk.seen());
  ASSERT_OK(HostFileSystem().RemoveTree(Path("second")));
  for (std::size_t r = 0; r < kRanks; ++r) {
    const int operations = counts[r];
    ASSERT_GT(operations, 4);
    std::vector<int> points = {0, 1, operations - 1};
    for (int i = 0; i < TestScale(6); ++i) {
      points.push_back(static_cast<int>(random.Int(0, operations - 1)));
    }
    for (const int point : points) {
      SCOPED_TRACE("rank " + std::to_string(r) + ", operation " + std::to_string(point));
      disks[r].FullFrom(point);
      const Status status = save("new");
      const int seen = disks[r].seen();
      disks[r].FullFrom(1 << 30);
      if (DeviceMode() && seen <= point) {
        // The size of the pieces in which devices give their bytes varies, so that this save needed
        // fewer operations than the one whose operations were counted.
        ASSERT_GE(point, operations - 2);
        ASSERT_OK(status);
        ASSERT_OK(HostFileSystem().RemoveTree(Path("new")));
        continue;
      }
      EXPECT_THAT(status, HasCode(Code::kResourceExhausted));
      EXPECT_THAT(status, HasMessage("rank " + std::to_string(r) + ": "));
      EXPECT_THAT(status, HasMessage("No space left on device"));
      EXPECT_THAT(Inside(Store()), ElementsAre("old"));
    }
    EXPECT_EQ(ReadAll(Path("old")).at("big"), big.bytes);
    ASSERT_OK(save("next" + std::to_string(r)));
    EXPECT_EQ(ReadAll(Path("next" + std::to_string(r))).at("cols"), cols.bytes);
    ASSERT_OK(HostFileSystem().RemoveTree(Path("next" + std::to_string(r))));
    for (FullDisk& disk : disks) disk.FullFrom(1 << 30);
  }
}

TEST_F(SaveErrorsTest, CheckpointThatNoReaderAcceptsIsRefused) {
  // Longer than the format allows is never called committed.
  SaveOptions options;
  options.producer = std::string(4096, 'p');
  const auto save = [&](const std::string& name, std::size_t value) {
    return OneVerdict(SaveOnThreads(
        Path(name), 2,
        [&](int, RankState& state) {
          (void)state.dict.SetCommon("value", std::string(value, 'v'));  // The save says it.
        },
        options));
  };
  constexpr std::size_t kMost = std::size_t{64} << 20;
  ASSERT_OK(save("longest", 1));
  auto opened = OpenedCheckpoint::Open(HostFileSystem(), Path("longest"), {});
  ASSERT_OK(opened);
  EXPECT_EQ(opened.value()->index().info().producer, options.producer);
  Status status = save("a", kMost + 1);
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(status, HasMessage("common value value"));
  options.producer += 'p';
  status = save("a", 1);
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(status, HasMessage("producer"));
  EXPECT_THAT(Inside(Store()), ElementsAre("longest"));
}

TEST_F(SaveErrorsTest, DamagedParentIndexDoesNotStopTheSave) {
  SaveControl control;
  const auto save = [&](const std::string& name) {
    return OneVerdict(SaveOnThreads(
        Path(name), 4,
        [&](int rank, RankState& state) {
          state.Add(w_, Row(rank));
          // Long enough that the first block of the index is not in its tail, which open checks.
          ASSERT_OK(state.dict.SetCommon("long", std::string(200'000, 'v')));
        },
        {}, {}, control));
  };
  const auto mtime = [&](const std::string& name) -> std::int64_t {
    auto opened = OpenedCheckpoint::Open(HostFileSystem(), Path(name), {});
    EXPECT_OK(opened);
    if (!opened.ok()) return -1;
    auto entry = opened.value()->index().Find("w");
    EXPECT_OK(entry);
    return entry.ok() ? entry.value().mtime : -1;
  };
  const auto flip = [&](const std::string& path, std::streamoff at) {
    std::filesystem::permissions(path, std::filesystem::perms::owner_write,
                                 std::filesystem::perm_options::add);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char c = static_cast<char>(file.get() ^ 0x40);
    file.seekp(at);
    file.put(c);
    ASSERT_TRUE(file.good()) << path;
  };
  control.now = 1000;
  ASSERT_OK(save("a"));
  flip(Path("a/index/index.sst"), 1000);
  control.now = 2000;
  ASSERT_OK(save("b"));
  EXPECT_EQ(mtime("b"), 1000) << "the manifests still say what the parent holds";
  flip(Path("b/index/index.sst"), 1000);
  flip(Path("b/manifest/coordinator.tmm"), 1000);
  control.now = 1500;
  ASSERT_OK(save("c"));
  EXPECT_EQ(mtime("c"), 2001) << "unknown counts as changed, and never goes back";
  EXPECT_EQ(ReadAll(Path("c")).at("w"), w_.bytes);
}

TEST_F(SaveErrorsTest, FailedSyncFailsTheSave) {
  for (const char* part : {"data/", "manifest/r1", "COMMIT"}) {
    std::atomic<bool> failed{false};
    ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) -> Status {
      if (event.op != FileOp::kSync || event.path.find(part) == std::string::npos) return Status();
      failed = true;
      return Status::FromErrno(EIO, "sync", event.path);
    });
    const Status status = OneVerdict(SaveOnThreads(
        Path("a"), 2,
        [&](int rank, RankState& state) {
          state.Add(w_, B({4 * rank, 0}, {4, 8}));
        },
        {}, [&](int) -> FileSystem& { return fs; }));
    EXPECT_TRUE(failed) << part;
    EXPECT_THAT(status, HasMessage("Input/output error")) << part;
    EXPECT_THAT(Inside(Store()), IsEmpty());
  }
}

}  // namespace
}  // namespace tensormount
