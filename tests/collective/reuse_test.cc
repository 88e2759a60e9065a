// SPDX-License-Identifier: Apache-2.0
// Steps that share data files: what did not change is linked and not written, what changed is
// written, whatever the cuts; and every step reads as what was saved.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/async_save.h"
#include "tensormount/derive.h"
#include "tensormount/save.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/store/linking.h"
#include "tests/collective/save_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/device_mode.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// How ranks hold a tensor.
using HowCut = std::function<Region(const Dims& shape, int rank, int ranks)>;

Region RowsOfRank(const Dims& shape, int rank, int ranks) {
  const std::int64_t step = (shape[0] + ranks - 1) / ranks;
  const std::int64_t begin = std::min(shape[0], rank * step);
  Dims from = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  from[0] = begin;
  extent[0] = std::min(step, shape[0] - begin);
  return B(from, extent);
}

Region ColumnsOfRank(const Dims& shape, int rank, int ranks) {
  if (shape.rank() < 2) return RowsOfRank(shape, rank, ranks);
  const std::int64_t step = (shape[1] + ranks - 1) / ranks;
  const std::int64_t begin = std::min(shape[1], rank * step);
  Dims from = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  from[1] = begin;
  extent[1] = std::min(step, shape[1] - begin);
  return B(from, extent);
}

Region FlatPartOfRank(const Dims& shape, int rank, int ranks) {
  const Box whole = Box::Whole(shape);
  const std::int64_t step = (whole.volume() + ranks - 1) / ranks;
  const std::int64_t first = std::min(whole.volume(), rank * step);
  return Region::Flat(whole, first, std::min(step, whole.volume() - first)).value();
}

Region AllOnEach(const Dims& shape, int, int) { return Box::Whole(shape); }

// Files of a checkpoint's data/ by name, with their inodes.
std::map<std::string, FileInfo> FilesWithInodes(const std::string& path) {
  std::map<std::string, FileInfo> files;
  FileSystem& fs = HostFileSystem();
  for (const DirectoryEntry& e : fs.List(path + "/data").value()) {
    files[e.name] = fs.LinkStat(path + "/data/" + e.name).value();
  }
  return files;
}

void ExpectSound(const std::string& path) {
  const Result<VerifyReport> report = VerifyCheckpoint(HostFileSystem(), path, {});
  ASSERT_OK(report);
  for (const VerifyReport::Damage& damage : report.value().damages) {
    ADD_FAILURE() << path << ": " << damage.object << ": " << damage.file << ": " << damage.reason;
  }
}

class ReuseTest : public testing::Test {
 protected:
  std::string Path(int step) const { return dir_.Join(store_ + "/step-" + std::to_string(step)); }

  // Frozen tensors of all kinds of files, and a trainable one of each.
  void MakeModel() {
    model_ = {MakeTensor("base.embed", DType::kF32, {4096, 300}),  // A file of its own.
              MakeTensor("base.w", DType::kBF16, {512, 1000}),     // The rank shard.
              MakeTensor("base.v", DType::kF32, {300, 500}),       // Likewise.
              MakeTensor("base.norm", DType::kF32, {1000}),        // The pack.
              MakeTensor("base.bias", DType::kU8, {3000}),         // Likewise.
              MakeTensor("base.scale", DType::kF64, {}),           // No axis.
              MakeTensor("base.none", DType::kF32, {0, 7}),        // No cell.
              MakeTensor("lora.a", DType::kF32, {64, 8}),          // The pack.
              MakeTensor("lora.b", DType::kBF16, {512, 100})};     // The rank shard.
  }
  RandomTensor& Find(const std::string& key) {
    for (RandomTensor& t : model_) {
      if (t.key == key) return t;
    }
    throw std::runtime_error(key);
  }
  void Change(const std::string& key, std::size_t at) {
    std::string& bytes = Find(key).bytes;
    bytes[at % bytes.size()] = static_cast<char>(bytes[at % bytes.size()] ^ 1);
  }

  Result<SaveReport> SaveStep(int step, int ranks, const HowCut& cut,
                              const SaveOptions& options = {},
                              const std::function<FileSystem&(int)>& fs_of = {}) {
    const auto results = SaveOnThreads(
        Path(step), ranks,
        [&](int rank, RankState& state) {
          for (const RandomTensor& t : model_) {
            const Region region = t.shape.rank() == 0 || t.bytes.empty()
                                      ? AllOnEach(t.shape, rank, ranks)
                                      : cut(t.shape, rank, ranks);
            state.Add(t, region, strided_);
          }
          if (rank == 0) {
            ASSERT_OK(state.dict.AddObject("rng", rng_, {}));
          }
          ASSERT_OK(state.dict.SetCommon("iteration", iteration_));
        },
        options, fs_of);
    const Status verdict = OneVerdict(results);
    if (!verdict.ok()) return verdict;
    for (const auto& r : results) {
      EXPECT_EQ(r.value().reused.tensors, results[0].value().reused.tensors);
      EXPECT_EQ(r.value().reused.files_linked, results[0].value().reused.files_linked);
      EXPECT_EQ(r.value().reused.note, results[0].value().reused.note);
    }
    return results[0];
  }

  void ExpectReads(int step) {
    SCOPED_TRACE(Path(step));
    std::map<std::string, std::string> wanted;
    for (const RandomTensor& t : model_) wanted[t.key] = t.bytes;
    EXPECT_EQ(ReadAll(Path(step)), wanted);
    ExpectSound(Path(step));
  }

  TempDir dir_;
  std::string store_ = "store";
  std::vector<RandomTensor> model_;
  Random* strided_ = nullptr;
  std::string rng_ = "state of the generator";
  std::int64_t iteration_ = 1;
};

TEST_F(ReuseTest, UnchangedStateIsHardLinked) {
  MakeModel();
  ASSERT_OK_AND_ASSIGN(const SaveReport first, SaveStep(1, 2, RowsOfRank));
  EXPECT_EQ(first.reused.base, "");
  EXPECT_EQ(first.reused.tensors, 0u);
  ASSERT_OK_AND_ASSIGN(const SaveReport second, SaveStep(2, 2, RowsOfRank));
  EXPECT_EQ(second.reused.base, "step-1");
  EXPECT_EQ(second.reused.note, "");
  EXPECT_EQ(second.reused.tensors, model_.size());
  EXPECT_EQ(second.reused.objects, 1u);
  EXPECT_EQ(second.bytes_written, 0u);
  EXPECT_EQ(second.reused.bytes_by_comparison, 0u);
  EXPECT_EQ(second.reused.bytes_by_leaf, second.bytes + rng_.size());
  const auto one = FilesWithInodes(Path(1));
  const auto two = FilesWithInodes(Path(2));
  ASSERT_EQ(one.size(), two.size());
  EXPECT_EQ(second.reused.files_linked, one.size());
  for (const auto& [name, info] : one) {
    ASSERT_TRUE(two.contains(name)) << name;
    EXPECT_EQ(two.at(name).inode, info.inode) << name;
    EXPECT_EQ(two.at(name).links, 2u) << name;
    EXPECT_EQ(two.at(name).mode, 0444u) << name;
  }
  ExpectReads(1);
  ExpectReads(2);
  // Nothing of one is in the other.
  ASSERT_OK(HostFileSystem().RemoveTree(Path(1)));
  ExpectReads(2);
}

TEST_F(ReuseTest, OnlyChangedTensorsAreWritten) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  std::map<int, std::vector<RandomTensor>> steps;
  for (int step = 2; step < 6; ++step) {
    Change("lora.a", static_cast<std::size_t>(step));
    Change("lora.b", static_cast<std::size_t>(step) * 7000);
    iteration_ = step;
    ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(step, 2, RowsOfRank));
    EXPECT_EQ(report.reused.tensors, model_.size() - 2);
    EXPECT_LT(report.bytes_written,
              Find("lora.a").bytes.size() + Find("lora.b").bytes.size() + 16384);
    EXPECT_EQ(report.reused.files_copied, 0u);
    steps[step] = model_;
  }
  for (const auto& [step, model] : steps) {
    model_ = model;
    ExpectReads(step);
  }
  // Without the step that wrote the frozen ones the others are as they were.
  ASSERT_OK(HostFileSystem().RemoveTree(Path(1)));
  ExpectReads(5);
}

TEST_F(ReuseTest, ReshardedSaveComparesBytesAndReuses) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  int step = 1;
  const auto expect = [&](int ranks, const HowCut& cut, bool by_comparison) {
    SCOPED_TRACE(step);
    ++step;
    Change("lora.b", static_cast<std::size_t>(step) * 999);
    ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(step, ranks, cut));
    // What is on a device and lies otherwise is written rather than brought to the host.
    if (!DeviceMode()) {
      EXPECT_EQ(report.reused.tensors, model_.size() - 1) << report.reused.note;
      EXPECT_EQ(report.reused.bytes_by_comparison > 0, by_comparison);
    }
    ExpectReads(step);
  };
  expect(2, RowsOfRank, false);
  expect(3, RowsOfRank, true);
  expect(4, FlatPartOfRank, true);
  expect(2, ColumnsOfRank, true);
  expect(1, RowsOfRank, false);  // Whole leaves, all of them.
  expect(3, AllOnEach, true);
}

// A byte anywhere, under any cut: never taken for the same.
TEST_F(ReuseTest, AnyChangedByteIsDetected) {
  Random random(TestSeed());
  for (int round = 0; round < TestScale(6); ++round) {
    SCOPED_TRACE(round);
    MakeModel();
    const int at = round * 10;
    const std::vector<HowCut> cuts = {RowsOfRank, ColumnsOfRank, FlatPartOfRank, AllOnEach};
    ASSERT_OK(SaveStep(at, static_cast<int>(random.Int(1, 3)),
                       cuts[static_cast<std::size_t>(random.Int(0, 3))]));
    for (int step = at + 1; step < at + 4; ++step) {
      std::set<std::string> changed;
      for (RandomTensor& t : model_) {
        if (t.bytes.empty() || !random.OneIn(3)) continue;
        Change(t.key, static_cast<std::size_t>(random.Next()));
        changed.insert(t.key);
      }
      if (random.OneIn(2)) strided_ = &random;
      ASSERT_OK_AND_ASSIGN(const SaveReport report,
                           SaveStep(step, static_cast<int>(random.Int(1, 4)),
                                    cuts[static_cast<std::size_t>(random.Int(0, 3))]));
      strided_ = nullptr;
      EXPECT_LE(report.reused.tensors, model_.size() - changed.size());
      // One may want a file of its own that is in pieces.
      if (!DeviceMode()) {
        EXPECT_GE(report.reused.tensors + 1, model_.size() - changed.size());
      }
      ExpectReads(step);
    }
  }
}

TEST_F(ReuseTest, ReuseOffWritesAllFiles) {
  MakeModel();
  SaveOptions off;
  off.reuse = Reuse::kOff;
  ASSERT_OK(SaveStep(1, 2, RowsOfRank, off));
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 2, RowsOfRank, off));
  EXPECT_EQ(report.reused.base, "");
  EXPECT_EQ(report.reused.tensors, 0u);
  for (const auto& [name, info] : FilesWithInodes(Path(2))) {
    EXPECT_TRUE(name.starts_with(report.uuid.substr(0, 8))) << name;
    EXPECT_EQ(info.links, 1u);
  }
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), Path(2), {}));
  EXPECT_EQ(ConsecutiveLinkedSaves(opened->index()), 0u);
  ExpectReads(2);
}

TEST_F(ReuseTest, NamedBaseIsUsed) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  const std::vector<RandomTensor> old = model_;
  for (RandomTensor& t : model_) {
    if (!t.bytes.empty()) Change(t.key, 0);
  }
  ASSERT_OK(SaveStep(2, 2, RowsOfRank));
  model_ = old;
  SaveOptions options;
  options.reuse_from = "step-1";
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(3, 2, RowsOfRank, options));
  EXPECT_EQ(report.reused.base, "step-1");
  EXPECT_EQ(report.reused.tensors, model_.size());
  ExpectReads(3);
  options.reuse_from = "step-9";
  EXPECT_THAT(SaveStep(4, 2, RowsOfRank, options), HasCode(Code::kNotFound));
  options.reuse_from = "a/b";
  EXPECT_THAT(SaveStep(4, 2, RowsOfRank, options), HasCode(Code::kInvalidArgument));
  EXPECT_EQ(Inside(dir_.Join("store")), (std::vector<std::string>{"step-1", "step-2", "step-3"}));
}

TEST_F(ReuseTest, FullEveryWritesEveryNthCheckpointInFull) {
  MakeModel();
  SaveOptions options;
  options.full_every = 3;
  std::vector<bool> reused;
  for (int step = 1; step < 9; ++step) {
    ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(step, 1, RowsOfRank, options));
    reused.push_back(report.reused.tensors > 0);
    if (step > 1 && !reused.back()) {
      EXPECT_NE(report.reused.note, "");
    }
  }
  EXPECT_EQ(reused, (std::vector<bool>{false, true, true, false, true, true, false, true}));
  options.full_every = 1;
  ASSERT_OK_AND_ASSIGN(SaveReport report, SaveStep(9, 1, RowsOfRank, options));
  EXPECT_EQ(report.reused.tensors, 0u);
  options.full_every = 0;
  for (int step = 10; step < 14; ++step) {
    ASSERT_OK_AND_ASSIGN(report, SaveStep(step, 1, RowsOfRank, options));
    EXPECT_EQ(report.reused.tensors, model_.size());
  }
  ExpectReads(13);
}

// Most of the pack and of the rank shard changes: what is left of them is copied once, and linked
// from then on.
TEST_F(ReuseTest, LiveRestOfAMostlyDeadFileIsCopiedOnce) {
  model_.clear();
  for (int i = 0; i < 10; ++i) {
    model_.push_back(MakeTensor("small." + std::to_string(i), DType::kF32, {100 + i}));
    model_.push_back(MakeTensor("middle." + std::to_string(i), DType::kBF16, {100, 500 + i}));
  }
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  for (int step = 2; step < 5; ++step) {
    for (int i = 0; i < 7; ++i) {
      Change("small." + std::to_string(i), static_cast<std::size_t>(step));
      Change("middle." + std::to_string(i), static_cast<std::size_t>(step));
    }
    ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(step, 2, RowsOfRank));
    EXPECT_EQ(report.reused.tensors, 6u);
    if (step == 2) {
      EXPECT_EQ(report.reused.bytes_copied, report.reused.bytes);
      EXPECT_EQ(report.reused.files_linked, 0u);
    } else {
      EXPECT_EQ(report.reused.bytes_copied, 0u) << step;
      EXPECT_EQ(report.reused.bytes_linked, report.reused.bytes);
    }
    ExpectReads(step);
  }
  // Nothing is dead in what it has.
  std::uint64_t stored = 0;
  for (const auto& [name, info] : FilesWithInodes(Path(4))) stored += info.size;
  std::uint64_t wanted = rng_.size();
  for (const RandomTensor& t : model_) wanted += t.bytes.size();
  EXPECT_LT(stored, wanted + 16384);
}

TEST_F(ReuseTest, FilesAreCopiedWhenHardLinksFail) {
  for (const int error : {EXDEV, EMLINK, EPERM, EACCES, EDQUOT, EOPNOTSUPP}) {
    SCOPED_TRACE(error);
    store_ = "store-" + std::to_string(error);
    MakeModel();
    ASSERT_OK(SaveStep(1, 2, RowsOfRank));
    std::atomic<int> asked{0};
    ObservedFileSystem refuses(HostFileSystem(), [&](const FileEvent& e) {
      // Every second one.
      if (e.op != FileOp::kLink || asked++ % 2 != 0) return Status();
      return Status::FromErrno(error, "link " + e.path + " to", e.path2);
    });
    ASSERT_OK_AND_ASSIGN(
        const SaveReport report,
        SaveStep(2, 2, RowsOfRank, {}, [&](int) -> FileSystem& { return refuses; }));
    EXPECT_EQ(report.reused.tensors, model_.size());
    EXPECT_GT(report.reused.files_copied, 0u);
    EXPECT_GT(report.reused.files_linked, 0u);
    EXPECT_EQ(report.reused.files_copied + report.reused.files_linked,
              FilesWithInodes(Path(1)).size());
    EXPECT_NE(report.reused.note.find("links were refused"), std::string::npos);
    EXPECT_EQ(report.reused.note.find("/proc/"), std::string::npos) << report.reused.note;
    for (const auto& [name, info] : FilesWithInodes(Path(2))) EXPECT_EQ(info.mode, 0444u) << name;
    ExpectReads(2);
  }
}

// Rank 0 looks whether the base can be used, and goes on with what it opened for that. It opens the
// checkpoint once more, to publish: mtimes of files are decided against it.
TEST_F(ReuseTest, EveryRankOpensTheBaseOnce) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  std::array<std::atomic<int>, 2> opened{};
  const auto counts = [&](std::size_t rank) {
    return [&opened, rank](const FileEvent& e) {
      const bool of_base = e.path.find("/index/") != std::string::npos &&
                           e.path.find(".staging") == std::string::npos;
      if (e.op == FileOp::kOpenRead && of_base) ++opened[rank];
      return Status();
    };
  };
  ObservedFileSystem first(HostFileSystem(), counts(0));
  ObservedFileSystem second(HostFileSystem(), counts(1));
  ASSERT_OK_AND_ASSIGN(const SaveReport report,
                       SaveStep(2, 2, RowsOfRank, {}, [&](int rank) -> FileSystem& {
                         return rank == 0 ? first : second;
                       }));
  EXPECT_EQ(report.reused.tensors, model_.size());
  EXPECT_GT(opened[1], 0);
  EXPECT_EQ(opened[0], 2 * opened[1]);
}

// A copy of damaged bytes would be damage of the new checkpoint alone, which has the right ones.
TEST_F(ReuseTest, DamagedFileIsNotCopiedWhenHardLinksFail) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  for (const auto& [name, info] : FilesWithInodes(Path(1))) {
    if (name.find("-t") != std::string::npos) FlipByte(Path(1) + "/data/" + name, 5000);
  }
  ObservedFileSystem refuses(HostFileSystem(), [](const FileEvent& e) {
    return e.op == FileOp::kLink ? Status::FromErrno(EPERM, "link", e.path2) : Status();
  });
  ASSERT_OK_AND_ASSIGN(const SaveReport report,
                       SaveStep(2, 2, RowsOfRank, {}, [&](int) -> FileSystem& { return refuses; }));
  EXPECT_EQ(report.reused.tensors, 0u);
  EXPECT_NE(report.reused.note.find("checksum mismatch"), std::string::npos) << report.reused.note;
  ExpectReads(2);
}

// Whoever may write to a file of one checkpoint would change the other, too.
TEST_F(ReuseTest, UnsealedFileIsCopied) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  for (const auto& [name, info] : FilesWithInodes(Path(1))) {
    ASSERT_EQ(chmod((Path(1) + "/data/" + name).c_str(), 0666), 0);
  }
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 2, RowsOfRank));
  EXPECT_EQ(report.reused.files_linked, 0u);
  EXPECT_GT(report.reused.files_copied, 0u);
  EXPECT_NE(report.reused.note.find("unsealed file"), std::string::npos) << report.reused.note;
  for (const auto& [name, info] : FilesWithInodes(Path(2))) EXPECT_TRUE(info.sealed()) << name;
  ExpectReads(2);
  ASSERT_OK_AND_ASSIGN(const SaveReport next, SaveStep(3, 2, RowsOfRank));
  EXPECT_EQ(next.reused.files_copied, 0u);
}

TEST_F(ReuseTest, FilesOutsideTheBaseAreNotLinked) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  std::filesystem::rename(Path(1) + "/data", dir_.Join("elsewhere"));
  std::filesystem::create_directory_symlink(dir_.Join("elsewhere"), Path(1) + "/data");
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 2, RowsOfRank));
  EXPECT_EQ(report.reused.tensors, 0u);
  ExpectReads(2);
}

// Its header is longer than what it speaks of, and no reason to give up its form.
TEST_F(ReuseTest, SmallFileWithALongHeaderIsLinked) {
  for (int i = 0; i < 64; ++i) {
    model_.push_back(MakeTensor("norm." + std::to_string(i), DType::kBF16, {32}));
  }
  SaveOptions options;
  options.placement = PlacementRule::kSafetensors;
  for (int step = 1; step < 4; ++step) {
    ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(step, 1, RowsOfRank, options));
    ExpectReads(step);
    // A file of tensors, and a pack for the object.
    EXPECT_EQ(report.reused.tensors, step == 1 ? 0u : 64u);
    EXPECT_EQ(report.reused.files_linked, step == 1 ? 0u : 2u);
    EXPECT_EQ(FilesWithInodes(Path(step)).begin()->second.inode,
              FilesWithInodes(Path(1)).begin()->second.inode);
  }
}

TEST_F(ReuseTest, UnreadableNamedBaseOnlyDisablesReuse) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  ASSERT_OK(SaveStep(2, 2, RowsOfRank));
  ASSERT_EQ(truncate((Path(1) + "/COMMIT").c_str(), 0), 0);
  SaveOptions options;
  options.reuse_from = "step-1";
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(3, 2, RowsOfRank, options));
  EXPECT_EQ(report.reused.tensors, 0u);
  EXPECT_NE(report.reused.note, "");
  ExpectReads(3);
  // A folder that is none is no base that is there.
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("store/folder")));
  options.reuse_from = "folder";
  EXPECT_THAT(SaveStep(4, 2, RowsOfRank, options), HasCode(Code::kNotFound));
  options.reuse_from = "";
  options.inherit = "step-1";
  EXPECT_THAT(SaveStep(4, 2, RowsOfRank, options), HasCode(Code::kDataLoss));
}

// Two tensors of one name: whoever reads it would get either.
TEST_F(ReuseTest, LayerNameIsNotInheritedTwice) {
  const RandomTensor stack = MakeTensor("stack.w", DType::kF32, {5, 7});
  const RandomTensor layer = MakeTensor("layers.3.w", DType::kF32, {7});
  const RandomTensor beyond = MakeTensor("layers.5.w", DType::kF32, {7});
  const auto save = [&](int step, const RandomTensor& tensor, const char* inherit) {
    SaveOptions options;
    options.inherit = inherit;
    return OneVerdict(SaveOnThreads(
        Path(step), 1,
        [&](int, RankState& state) {
          state.Add(tensor, Box::Whole(tensor.shape));
          if (tensor.shape.rank() == 2) {
            ASSERT_OK(state.dict.NameLayers(tensor.key, "layers.{}.w"));
          }
        },
        options));
  };
  ASSERT_OK(save(1, stack, ""));
  ASSERT_OK(save(2, layer, ""));
  const Status twice = save(3, layer, "step-1");
  EXPECT_THAT(twice, HasCode(Code::kInvalidArgument));
  EXPECT_NE(twice.message().find("is already the name of layer 3 of tensor stack.w"),
            std::string::npos);
  EXPECT_THAT(save(3, stack, "step-2"), HasCode(Code::kInvalidArgument));
  RandomTensor other = stack;
  other.key = "stack.v";
  EXPECT_THAT(save(3, other, "step-1"), HasCode(Code::kInvalidArgument));
  EXPECT_OK(save(3, beyond, "step-1"));
  // By derive, too.
  DeriveOptions renames;
  ASSERT_OK_AND_ASSIGN(renames.rename,
                       KeyMap::Make({{KeyMap::Rule::Kind::kKey, "layers.5.w", "layers.4.w"}}));
  EXPECT_THAT(Derive(Path(4), "step-3", renames), HasCode(Code::kInvalidArgument));
  renames.drop = {"stack.w"};
  EXPECT_OK(Derive(Path(4), "step-3", renames));
}

// A file that other programs open by the names in its header has no false ones.
TEST_F(ReuseTest, SafetensorsFileWithOldNamesIsNotLinked) {
  MakeModel();
  SaveOptions options;
  options.placement = PlacementRule::kSafetensors;
  ASSERT_OK(SaveStep(1, 1, RowsOfRank, options));
  DeriveOptions renames;
  ASSERT_OK_AND_ASSIGN(renames.rename,
                       KeyMap::Make({{KeyMap::Rule::Kind::kPrefix, "lora.", "ada."}}));
  ASSERT_OK(Derive(Path(2), "step-1", renames));
  for (RandomTensor& t : model_) {
    if (t.key.starts_with("lora.")) t.key = "ada." + t.key.substr(5);
  }
  ExpectReads(2);
  options.reuse_from = "step-2";
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(3, 1, RowsOfRank, options));
  EXPECT_EQ(report.reused.tensors, 0u);
  ExpectReads(3);
  std::string headers;
  for (const auto& [name, info] : FilesWithInodes(Path(3))) {
    if (!name.ends_with(".safetensors")) continue;
    headers += ReadWholeFile(Path(3) + "/data/" + name).substr(0, 4096);
  }
  EXPECT_NE(headers.find("ada.a"), std::string::npos);
  EXPECT_EQ(headers.find("lora.a"), std::string::npos);
}

// Whatever goes wrong with the base, the save is as good as one without it.
TEST_F(ReuseTest, UnusableBaseDoesNotFailTheSave) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  int step = 1;
  for (const FileOp op : {FileOp::kLink, FileOp::kOpenRead, FileOp::kRead}) {
    for (const int who : {0, 1}) {
      SCOPED_TRACE(std::string(FileOpName(op)) + " " + std::to_string(who));
      ObservedFileSystem fails(HostFileSystem(), [&](const FileEvent& e) {
        const bool of_base = e.path.find("step-1/") != std::string::npos ||
                             e.path.find("/proc/self/fd") != std::string::npos;
        return e.op == op && of_base ? Status::FromErrno(EIO, "use", e.path) : Status();
      });
      Change("lora.a", static_cast<std::size_t>(++step));
      ASSERT_OK_AND_ASSIGN(
          const SaveReport report, SaveStep(step, 2, RowsOfRank, {}, [&](int rank) -> FileSystem& {
            return rank == who ? static_cast<FileSystem&>(fails) : HostFileSystem();
          }));
      EXPECT_EQ(report.reused.tensors, 0u);
      // A rank 0 that cannot read COMMIT knows of no base.
      if (op == FileOp::kLink || who != 0) {
        EXPECT_NE(report.reused.note, "");
      }
      for (const auto& [name, info] : FilesWithInodes(Path(step))) {
        EXPECT_TRUE(name.starts_with(report.uuid.substr(0, 8))) << name;
      }
      ExpectReads(step);
      ASSERT_OK(HostFileSystem().RemoveTree(Path(step)));
    }
  }
}

// Bytes that are looked at are compared with their hashes: what is damaged is written anew.
TEST_F(ReuseTest, DamagedBaseBytesAreNotReused) {
  if (DeviceMode()) GTEST_SKIP() << "devices compare hashes and write what lies otherwise";
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  for (const auto& [name, info] : FilesWithInodes(Path(1))) {
    if (name.find("-t") != std::string::npos) FlipByte(Path(1) + "/data/" + name, 5000);
  }
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 2, ColumnsOfRank));
  EXPECT_EQ(report.reused.tensors, model_.size() - 1);
  ExpectReads(2);
}

TEST_F(ReuseTest, TruncatedFileIsNotLinked) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  for (const auto& [name, info] : FilesWithInodes(Path(1))) {
    const std::string file = Path(1) + "/data/" + name;
    if (name.find("-t") == std::string::npos) continue;
    ASSERT_EQ(chmod(file.c_str(), 0644), 0);
    ASSERT_EQ(truncate(file.c_str(), static_cast<off_t>(info.size - 1)), 0);
  }
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 2, RowsOfRank));
  EXPECT_EQ(report.reused.tensors, 0u);
  EXPECT_NE(report.reused.note.find("-t"), std::string::npos) << report.reused.note;
  ExpectReads(2);
}

// Fine-tuning: 2 % of the bytes are trained. Whatever ranks save and however they cut, ten steps
// take no more than the base and ten times what is trained.
TEST_F(ReuseTest, TenStepsOfFineTuningCostTheBaseAndTheAdapters) {
  model_.clear();
  for (int layer = 0; layer < Amount(8, 1); ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    model_.push_back(MakeTensor(name + ".w", DType::kF32, {1100, 1000}));  // A file of its own.
    model_.push_back(MakeTensor(name + ".v", DType::kBF16, {300, 400}));   // The rank shard.
    model_.push_back(MakeTensor(name + ".norm", DType::kF32, {1000}));     // The pack.
    model_.push_back(MakeTensor(name + ".lora.a", DType::kBF16, {300, 100}));
    model_.push_back(MakeTensor(name + ".lora.b", DType::kF32, {64, 100}));
  }
  std::uint64_t base = 0;
  std::uint64_t adapters = 0;
  for (const RandomTensor& t : model_) {
    (t.key.find("lora") == std::string::npos ? base : adapters) += t.bytes.size();
  }
  const double part = static_cast<double>(adapters) / static_cast<double>(base + adapters);
  EXPECT_NEAR(part, 0.02, 0.005);
  Random random(TestSeed());
  std::vector<std::vector<RandomTensor>> steps;
  for (int step = 1; step <= 10; ++step) {
    for (RandomTensor& t : model_) {
      if (t.key.find("lora") != std::string::npos) t.bytes = random.Bytes(t.bytes.size());
    }
    iteration_ = step;
    // The sharding changes half way.
    ASSERT_OK(SaveStep(step, step <= 5 ? 2 : 4, step <= 5 ? RowsOfRank : FlatPartOfRank));
    steps.push_back(model_);
  }
  std::map<std::uint64_t, std::uint64_t> stored;  // Of all steps, each inode once.
  std::uint64_t records = 0;
  for (int step = 1; step <= 10; ++step) {
    for (const auto& [name, info] : FilesWithInodes(Path(step))) stored[info.inode] = info.size;
    for (const char* folder : {"/manifest", "/index"}) {
      for (const DirectoryEntry& e : HostFileSystem().List(Path(step) + folder).value()) {
        records += HostFileSystem().LinkStat(Path(step) + folder + "/" + e.name).value().size;
      }
    }
  }
  std::uint64_t data = 0;
  for (const auto& [inode, size] : stored) data += size;
  const double wanted = static_cast<double>(base + 10 * adapters);
  EXPECT_LE(static_cast<double>(data), 1.02 * wanted);
  EXPECT_LE(static_cast<double>(records), 0.06 * wanted) << "tensors are small here";
  for (const int step : {1, 5, 6, 10}) {
    model_ = steps[static_cast<std::size_t>(step) - 1];
    ExpectReads(step);
  }
}

// What is staged is compared and linked as what is saved at once.
TEST_F(ReuseTest, AsyncSaveReusesTheBase) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  Change("lora.a", 1);
  std::vector<RankState> states(2);
  std::vector<Result<SaveReport>> results(2, Status(Code::kInternal, "did not run"));
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    RankState& state = states[static_cast<std::size_t>(comm.rank())];
    for (const RandomTensor& t : model_) {
      const bool whole = t.shape.rank() == 0 || t.bytes.empty();
      state.Add(t, whole ? Region(Box::Whole(t.shape)) : RowsOfRank(t.shape, comm.rank(), 2));
    }
    if (comm.rank() == 0) {
      EXPECT_OK(state.dict.AddObject("rng", rng_, {}));
    }
    const OnDevices moved(state.dict);
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, AsyncSave(moved.dict(), Path(2), comm));
    results[static_cast<std::size_t>(comm.rank())] = handle.WaitCommitted();
    return Status();
  }));
  ASSERT_OK(results[0]);
  EXPECT_EQ(results[0].value().reused.tensors, model_.size() - 1);
  ExpectReads(2);
}

// A link does not bring back a form that this save would not give the tensor.
TEST_F(ReuseTest, ReuseKeepsThePlacementOfTheSave) {
  MakeModel();
  const auto placement = [&](int step, const std::string& key) {
    const auto opened = OpenedCheckpoint::Open(HostFileSystem(), Path(step), {});
    EXPECT_OK(opened);
    const CheckpointIndex& index = opened.value()->index();
    const ChunkRecord chunk = index.Extents(index.Find(key).value().ordinal).value()->At(0).value();
    return index.files()[chunk.file].placement;
  };
  SaveOptions options;
  options.placement = PlacementRule::kRankShard;
  ASSERT_OK(SaveStep(1, 2, RowsOfRank, options));
  EXPECT_EQ(placement(1, "base.embed"), Placement::kRankShard);
  ASSERT_OK(SaveStep(2, 2, RowsOfRank));
  EXPECT_EQ(placement(2, "base.embed"), Placement::kTensorFile);
  ASSERT_OK(SaveStep(3, 1, RowsOfRank, options));
  EXPECT_EQ(placement(3, "base.embed"), Placement::kRankShard);
  options.placement = PlacementRule::kTensorFile;
  ASSERT_OK(SaveStep(4, 2, RowsOfRank, options));
  EXPECT_EQ(placement(4, "base.norm"), Placement::kTensorFile);
  // One file that is the model: linked as a whole, or written as a whole.
  options.placement = PlacementRule::kSafetensors;
  for (int step = 5; step < 9; ++step) {
    if (step == 7) Change("lora.a", 1);
    ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(step, 1, RowsOfRank, options));
    EXPECT_EQ(placement(step, "base.norm"), Placement::kSafetensors);
    EXPECT_EQ(report.reused.tensors, step == 6 || step == 8 ? model_.size() : 0u) << step;
    ExpectReads(step);
  }
}

TEST_F(ReuseTest, SavesOfFewerKeysInheritTheRest) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  const std::vector<RandomTensor> all = model_;
  std::erase_if(model_, [](const RandomTensor& t) { return !t.key.starts_with("lora."); });
  Change("lora.a", 3);
  Change("lora.b", 5);
  const std::vector<RandomTensor> lora = model_;
  SaveOptions options;
  options.inherit = "step-1";
  rng_ = "another state";
  iteration_ = 2;
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 3, RowsOfRank, options));
  EXPECT_EQ(report.reused.tensors, all.size() - 2);
  model_ = all;
  for (const RandomTensor& t : lora) Find(t.key) = t;
  ExpectReads(2);
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), Path(2), {}));
  EXPECT_THAT(opened->index().CommonRecord("iteration"), IsOkAndHolds(CommonValue(2)));

  // Without reuse what the ranks have is written, and the rest is inherited all the same.
  model_ = lora;
  options.reuse = Reuse::kOff;
  ASSERT_OK_AND_ASSIGN(const SaveReport off, SaveStep(3, 1, ColumnsOfRank, options));
  EXPECT_EQ(off.reused.tensors, all.size() - 2);
  EXPECT_GE(off.bytes_written, lora[0].bytes.size() + lora[1].bytes.size());

  // A base that is not there, or cannot be read, fails the save.
  options.inherit = "nothing";
  EXPECT_THAT(SaveStep(4, 2, RowsOfRank, options), HasCode(Code::kNotFound));
  options.inherit = "step-1";
  ObservedFileSystem fails(HostFileSystem(), [&](const FileEvent& e) {
    return e.op == FileOp::kLink ? Status::FromErrno(EIO, "link", e.path2) : Status();
  });
  EXPECT_FALSE(SaveStep(4, 2, RowsOfRank, options, [&](int) -> FileSystem& { return fails; }).ok());
  EXPECT_EQ(Inside(dir_.Join("store")), (std::vector<std::string>{"step-1", "step-2", "step-3"}));
}

TEST_F(ReuseTest, AKeyThatBecomesAnObjectIsNotBoth) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 1, RowsOfRank));
  SaveOptions options;
  options.inherit = "step-1";
  const auto results = SaveOnThreads(
      Path(2), 1,
      [&](int, RankState& state) {
        ASSERT_OK(state.dict.AddObject("base.norm", "no tensor any more", {}));
        state.Add(MakeTensor("rng", DType::kU8, {10}), Box::Whole(Dims{10}));
      },
      options);
  ASSERT_OK(OneVerdict(results));
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), Path(2), {}));
  EXPECT_THAT(opened->index().Find("base.norm"), HasCode(Code::kNotFound));
  EXPECT_THAT(opened->index().Find("rng"), IsOk());
  ASSERT_OK_AND_ASSIGN(const auto objects, opened->index().Objects());
  ASSERT_EQ(objects.size(), 1u);
  EXPECT_EQ(objects[0].key, "base.norm");
  ExpectSound(Path(2));
}

TEST_F(ReuseTest, PageHashesAreInherited) {
  MakeModel();
  SaveOptions options;
  options.page_hashes = true;
  ASSERT_OK(SaveStep(1, 2, ColumnsOfRank, options));
  Change("lora.a", 1);
  ASSERT_OK(SaveStep(2, 2, ColumnsOfRank));
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), Path(2), {}));
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("base.embed"));
  ReadStats stats;
  std::string row(1200, '\0');
  ASSERT_OK(opened->ReadBytes(entry, 0, row.data(), row.size(), ReadVerify::kExtendLeaves, &stats));
  // Two chunks of columns, each proved by one page or two instead of a leaf.
  EXPECT_LE(stats.bytes_read, 4u * 4096u);
  ExpectReads(2);
}

// Whether something of step 1 is opened or read.
bool IsOfStepOne(const FileEvent& e) {
  return e.path.find("step-1/") != std::string::npos ||
         e.path.find("/proc/self/fd") != std::string::npos;
}

// A file system for each rank that counts manifests of step 1 that it opens.
class ManifestCounters {
 public:
  explicit ManifestCounters(int ranks) : opened_(static_cast<std::size_t>(ranks)) {
    for (std::atomic<int>& opened : opened_) {
      fs_.push_back(
          std::make_unique<ObservedFileSystem>(HostFileSystem(), [&opened](const FileEvent& e) {
            const bool manifest = e.path.find("manifest/") != std::string::npos;
            if (e.op == FileOp::kOpenRead && manifest && IsOfStepOne(e)) ++opened;
            return Status();
          }));
    }
  }
  FileSystem& Of(int rank) { return *fs_[static_cast<std::size_t>(rank)]; }
  int opened(int rank) const { return opened_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<std::atomic<int>> opened_;
  std::vector<std::unique_ptr<FileSystem>> fs_;
};

// One tensor in thousands of parts, those of a rank between those of the others.
TEST_F(ReuseTest, TensorInThousandsOfPartsIsReused) {
  constexpr std::int64_t kRows = 1200;
  RandomTensor w = MakeTensor("w", DType::kF32, {kRows, 16});
  const RandomTensor other = MakeTensor("x", DType::kF32, {kRows, 16});
  const auto save = [&](int step, int ranks, std::int64_t rows) {
    const auto results = SaveOnThreads(Path(step), ranks, [&](int rank, RankState& state) {
      for (const RandomTensor* t : std::initializer_list<const RandomTensor*>{&w, &other}) {
        for (std::int64_t i = rank * rows; i < kRows; i += ranks * rows) {
          state.Add(*t, B({i, 0}, {rows, 16}));
        }
      }
    });
    EXPECT_OK(OneVerdict(results));
    EXPECT_EQ(ReadAll(Path(step)),
              (std::map<std::string, std::string>{{"w", w.bytes}, {"x", other.bytes}}));
    return results[0].value().reused;
  };
  const std::uint64_t bytes = w.bytes.size() + other.bytes.size();
  EXPECT_EQ(save(1, 2, 1).tensors, 0u);
  EXPECT_EQ(save(2, 2, 1).bytes_by_leaf, bytes);
  // Pairs of rows that one rank had, and no leaf is whole in more than one row.
  const ReuseReport pairs = save(3, 1, 2);
  EXPECT_EQ(pairs.tensors, 2u);
  EXPECT_EQ(pairs.bytes_by_leaf, bytes);
  // Rows again, of which all are in some pair.
  EXPECT_EQ(save(4, 3, 1).tensors, 2u);
  w.bytes.back() = static_cast<char>(w.bytes.back() ^ 1);
  EXPECT_EQ(save(5, 3, 1).tensors, 1u);
  EXPECT_EQ(save(6, 2, 3).tensors, 2u);
}

// Each rank looks at the extents that it has cells of, and all of them together at all.
TEST_F(ReuseTest, EachRankReadsPageHashesOfItsExtentsOnly) {
  constexpr int kRanks = 8;
  model_.clear();
  for (int i = 0; i < 6; ++i) {
    model_.push_back(MakeTensor("w" + std::to_string(i), DType::kU8, {kRanks, 70'000}));
  }
  SaveOptions paged;
  paged.page_hashes = true;
  ASSERT_OK(SaveStep(1, kRanks, RowsOfRank, paged));
  for (const auto cut : {RowsOfRank, FlatPartOfRank}) {
    ManifestCounters counters(kRanks);
    ASSERT_OK_AND_ASSIGN(const SaveReport report,
                         SaveStep(2, kRanks, cut, paged,
                                  [&](int rank) -> FileSystem& { return counters.Of(rank); }));
    EXPECT_EQ(report.reused.tensors, model_.size());
    // Once to compare, and its share of the linking.
    for (int rank = 1; rank < kRanks; ++rank) EXPECT_LE(counters.opened(rank), 2) << rank;
    ASSERT_OK(HostFileSystem().RemoveTree(Path(2)));
  }
  // What has none is written, whoever has it.
  store_ = "plain";
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 3, RowsOfRank, paged));
  EXPECT_EQ(report.reused.tensors, 0u);
}

// More of them than stay open: most do.
TEST_F(ReuseTest, BaseManifestsStayOpen) {
  constexpr int kRanks = Amount(36, 16);
  constexpr int kTensors = 6;
  model_.clear();
  for (int i = 0; i < kTensors; ++i) {
    model_.push_back(MakeTensor("w" + std::to_string(i), DType::kU8, {kRanks, 66'000}));
  }
  ASSERT_OK(SaveStep(1, kRanks, RowsOfRank));
  ManifestCounters counters(1);
  ASSERT_OK_AND_ASSIGN(
      const SaveReport report,
      SaveStep(2, 1, RowsOfRank, {}, [&](int rank) -> FileSystem& { return counters.Of(rank); }));
  EXPECT_EQ(report.reused.tensors, model_.size());
  EXPECT_EQ(report.reused.bytes_by_comparison, 0u);
  // Each to compare the first tensor, few for each of the others; each again to link.
  EXPECT_LT(counters.opened(0), 2 * kRanks + kTensors * 8);
}

// The others wait for a rank whose base does not answer: it leaves what it has not compared yet.
TEST_F(ReuseTest, SlowBaseDoesNotFailTheSave) {
  model_.clear();
  for (int i = 0; i < 20; ++i) {
    model_.push_back(MakeTensor("w" + std::to_string(i), DType::kU8, {1000, 100}));
  }
  SaveOptions options;
  options.placement = PlacementRule::kTensorFile;  // So that nothing is copied from the base.
  ASSERT_OK(SaveStep(1, 2, RowsOfRank, options));
  std::atomic<int> reads{0};
  Result<SaveReport> saved = Status(Code::kInternal, "not yet");
  // A machine that stands still for seconds is no failure: it is given more time then.
  for (const int seconds : {8, 60}) {
    options.timeouts.arrival = std::chrono::seconds(seconds);
    reads = 0;
    ObservedFileSystem slow(HostFileSystem(), [&](const FileEvent& e) {
      const bool data = e.path.find("data/") != std::string::npos;
      if (e.op == FileOp::kRead && data && IsOfStepOne(e)) {
        ++reads;
        std::this_thread::sleep_for(std::chrono::milliseconds(75 * seconds));
      }
      return Status();
    });
    saved = SaveStep(2, 3, RowsOfRank, options, [&](int rank) -> FileSystem& {
      return rank == 1 ? static_cast<FileSystem&>(slow) : HostFileSystem();
    });
    if (saved.status().code() != Code::kDeadlineExceeded) break;
  }
  ASSERT_OK(saved);
  EXPECT_GT(reads, 0);
  EXPECT_LT(reads, 12);
  EXPECT_LT(saved.value().reused.tensors, model_.size());
  ExpectReads(2);
}

TEST_F(ReuseTest, ValidationOffReusesNothing) {
  MakeModel();
  ASSERT_OK(SaveStep(1, 2, RowsOfRank));
  SaveOptions options;
  options.validate = false;
  ASSERT_OK_AND_ASSIGN(const SaveReport report, SaveStep(2, 2, RowsOfRank, options));
  EXPECT_EQ(report.reused.tensors, 0u);
  // Half of a tensor that the base has as a whole does not become whole by it.
  options.inherit = "step-1";
  const auto results = SaveOnThreads(
      Path(3), 1,
      [&](int, RankState& state) {
        const RandomTensor& t = Find("base.w");
        state.Add(t, RowsOfRank(t.shape, 0, 2));
      },
      options);
  EXPECT_THAT(OneVerdict(results), HasCode(Code::kDataLoss));
}

}  // namespace
}  // namespace tensormount
