// SPDX-License-Identifier: Apache-2.0
// What is saved comes back, whatever the dtype, the cut, the placement and the strides.
#include "tensormount/save.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/stat.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/byte_range.h"
#include "base/file_system.h"
#include "base/hash.h"
#include "bench/counting_communicator.h"
#include "collective/layout/layout_exchange.h"
#include "index/foreign/open_source.h"
#include "index/read/checkpoint.h"
#include "index/records/manifest.h"
#include "shard/safetensors.h"
#include "tests/collective/save_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/device_mode.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

// Rank r's rows, ceil-sized.
Region RowsOf(const Dims& shape, int rank, int ranks) {
  const std::int64_t step = (shape[0] + ranks - 1) / ranks;
  const std::int64_t begin = std::min(shape[0], rank * step);
  Dims from = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  from[0] = begin;
  extent[0] = std::min(step, shape[0] - begin);
  return B(from, extent);
}

Region Columns(const Dims& shape, int rank, int ranks) {
  const std::int64_t step = shape[1] / ranks;
  return B({0, rank * step}, {shape[0], step});
}

Region FlatPart(const Dims& shape, int rank, int ranks) {
  const Box whole = Box::Whole(shape);
  const std::int64_t step = (whole.volume() + ranks - 1) / ranks;
  const std::int64_t first = std::min(whole.volume(), rank * step);
  return Region::Flat(whole, first, std::min(step, whole.volume() - first)).value();
}

void ExpectWhole(const std::string& path) {
  const Result<VerifyReport> report = VerifyCheckpoint(HostFileSystem(), path, {});
  ASSERT_OK(report);
  for (const VerifyReport::Damage& damage : report.value().damages) {
    ADD_FAILURE() << damage.object << ": " << damage.file << ": " << damage.reason;
  }
}

std::vector<std::string> FilesInData(const std::string& path) {
  std::vector<std::string> names;
  for (const DirectoryEntry& e : HostFileSystem().List(path + "/data").value()) {
    names.push_back(e.name);
  }
  return names;
}

// The only data file whose name contains `part`.
std::string DataFile(const std::string& path, const std::string& part) {
  std::string found;
  for (const std::string& name : FilesInData(path)) {
    if (name.find(part) == std::string::npos) continue;
    EXPECT_TRUE(found.empty()) << found << " and " << name;
    found = path + "/data/" + name;
  }
  EXPECT_FALSE(found.empty()) << part;
  return found;
}

void ExpectSealed(const std::string& file) {
  struct stat st = {};
  ASSERT_EQ(stat(file.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0222, 0u) << file;
}

class SaveTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return dir_.Join("store/" + name); }
  TempDir dir_;
};

TEST_F(SaveTest, SavesEveryDtypeUnderEveryPlacement) {
  std::vector<RandomTensor> tensors;
  for (const DTypeInfo& info : AllDTypes()) {
    tensors.push_back(MakeTensor("t." + std::string(info.name), info.dtype, {8, 16}));
  }
  const std::map<std::string, PlacementRule> rules = {{"auto", PlacementRule::kAuto},
                                                      {"file", PlacementRule::kTensorFile},
                                                      {"shard", PlacementRule::kRankShard}};
  for (const auto& [name, rule] : rules) {
    SaveOptions options;
    options.placement = rule;
    const auto results = SaveOnThreads(
        Path(name), 2,
        [&](int rank, RankState& state) {
          for (const RandomTensor& t : tensors) {
            const Region rows = RowsOf(t.shape, rank, 2);
            ShardMemory memory;
            memory.region = rows;
            // Rows are whole bytes for every dtype here, so halves of the bytes are halves of rows.
            const std::string half = t.bytes.substr(
                static_cast<std::size_t>(rank) * t.bytes.size() / 2, t.bytes.size() / 2);
            const auto* data = reinterpret_cast<const std::byte*>(half.data());
            memory.memory.assign(data, data + half.size());
            memory.view =
                BufferView::Host(t.dtype, static_cast<void*>(memory.memory.data()), {4, 16});
            state.memory.push_back(std::move(memory));
            EXPECT_OK(state.dict.AddTensor(t.key, {t.shape, rows, state.memory.back().view}));
          }
        },
        options);
    ASSERT_OK(OneVerdict(results));
    const auto read = ReadAll(Path(name));
    ASSERT_EQ(read.size(), tensors.size());
    for (const RandomTensor& t : tensors) EXPECT_EQ(read.at(t.key), t.bytes) << t.key << name;
    ExpectWhole(Path(name));
    for (const std::string& file : FilesInData(Path(name)))
      ExpectSealed(Path(name) + "/data/" + file);
  }
  EXPECT_EQ(FilesInData(Path("auto")).size(), 2u) << "a pack of each rank";
  EXPECT_EQ(FilesInData(Path("file")).size(), tensors.size());
  EXPECT_EQ(FilesInData(Path("shard")).size(), 2u);
}

TEST_F(SaveTest, TensorFileEqualsTheTensorUnderEverySharding) {
  const RandomTensor big = MakeTensor("big", DType::kBF16, {2050, 1024});
  const std::map<std::string, Region (*)(const Dims&, int, int)> cuts = {
      {"rows", &RowsOf}, {"flat", &FlatPart}, {"replicas", [](const Dims& shape, int, int) {
                                                 return Region(Box::Whole(shape));
                                               }}};
  SaveOptions options;
  options.reuse = Reuse::kOff;
  for (const auto& [name, cut] : cuts) {
    const auto results = SaveOnThreads(
        Path(name), 4,
        [&, &cut = cut](int rank, RankState& state) { state.Add(big, cut(big.shape, rank, 4)); },
        options);
    ASSERT_OK(OneVerdict(results));
    const std::string file = DataFile(Path(name), "-t");
    EXPECT_TRUE(ReadWholeFile(file) == big.bytes) << name;
    ExpectSealed(file);
    EXPECT_EQ(ReadAll(Path(name)).at("big"), big.bytes);
    ExpectWhole(Path(name));
    const SaveReport& report = results[0].value();
    EXPECT_EQ(report.bytes, big.bytes.size());
    EXPECT_EQ(report.bytes_written, big.bytes.size());
    EXPECT_EQ(report.tensors, 1u);
    std::uint64_t here = 0;
    for (const auto& r : results) here += r.value().bytes_written_here;
    EXPECT_EQ(here, report.bytes_written);
    EXPECT_EQ(report.replica_bytes, name == "replicas" ? 3 * big.bytes.size() : 0);
    EXPECT_EQ(report.replica_bytes_compared, name == "replicas" ? big.bytes.size() : 0);
  }
}

TEST_F(SaveTest, DigestIsTheSameUnderEveryCut) {
  const RandomTensor w = MakeTensor("w", DType::kF32, {96, 64});
  const std::map<std::string, Region (*)(const Dims&, int, int)> cuts = {
      {"rows", &RowsOf},
      {"cols", &Columns},
      {"flat", &FlatPart},
      {"grid", [](const Dims&, int rank, int) {
         return Region(B({48 * (rank / 2), 32 * (rank % 2)}, {48, 32}));
       }}};
  for (const auto& [name, cut] : cuts) {
    ASSERT_OK(OneVerdict(SaveOnThreads(Path(name), 4, [&, &cut = cut](int rank, RankState& state) {
      state.Add(w, cut(w.shape, rank, 4));
    })));
    EXPECT_EQ(ReadAll(Path(name)).at("w"), w.bytes) << name;  // Checks the digest too.
  }
}

TEST_F(SaveTest, RankShardIsASelfDescribingSafetensorsFile) {
  const RandomTensor w = MakeTensor("w", DType::kF32, {6, 4});
  const RandomTensor c = MakeTensor("c", DType::kC128, {3});
  SaveOptions options;
  options.placement = PlacementRule::kRankShard;
  ASSERT_OK(OneVerdict(SaveOnThreads(
      Path("a"), 2,
      [&](int rank, RankState& state) {
        state.Add(w, FlatPart({6, 4}, rank, 2));
        if (rank == 1) state.Add(c, Box::Whole(c.shape));
      },
      options)));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<File> file,
                       HostFileSystem().OpenRead(DataFile(Path("a"), "-r1.safetensors")));
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(*file));
  ASSERT_EQ(header.entries.size(), 2u);
  EXPECT_EQ(header.data_offset % 4096, 0u);
  EXPECT_EQ(header.entries[0].key, "c#0") << "wide elements first";
  EXPECT_EQ(header.entries[0].dtype, DType::kU8);
  EXPECT_EQ(header.entries[0].shape, (Dims{48}));
  EXPECT_EQ(header.entries[1].key, "w#1");
  EXPECT_EQ(header.metadata.at("c#0"), "c128 [3] [0:3]");
  EXPECT_EQ(header.metadata.at("w#1"), "f32 [6, 4] [3:6, 0:4]");
}

// Tensor files, rank shards and a pack are divided among writers, and make the same checkpoint.
TEST_F(SaveTest, SeveralWritersMakeTheCheckpointOfOne) {
  std::vector<RandomTensor> tensors;
  for (int t = 0; t < 6; ++t) {
    tensors.push_back(MakeTensor("row" + std::to_string(t), DType::kF32, {300 + 40 * t, 1024}));
    tensors.push_back(MakeTensor("column" + std::to_string(t), DType::kBF16, {90 + t, 200}));
    tensors.push_back(MakeTensor("small" + std::to_string(t), DType::kU8, {7 + t}));
  }
  const RandomTensor none = MakeTensor("none", DType::kF32, {0, 2});
  const auto save = [&](const std::string& name, int writers) {
    SaveOptions options;
    options.writers = writers;
    options.page_hashes = true;
    options.reuse = Reuse::kOff;
    const auto results = SaveOnThreads(
        Path(name), 2,
        [&](int rank, RankState& state) {
          for (const RandomTensor& t : tensors) {
            if (t.key.starts_with("column")) {
              state.Add(t, Columns(t.shape, rank, 2));
            } else if (t.key.starts_with("row") || rank == 1) {
              state.Add(t, t.key.starts_with("row") ? RowsOf(t.shape, rank, 2)
                                                    : Region(Box::Whole(t.shape)));
            }
          }
          if (rank == 0) state.Add(none, Box::Whole(none.shape));
          EXPECT_OK(state.dict.AddObject("rng", std::to_string(rank), {{rank}, {2}}));
        },
        options);
    EXPECT_OK(OneVerdict(results));
    ExpectWhole(Path(name));
    for (const std::string& file : FilesInData(Path(name))) {
      ExpectSealed(Path(name) + "/data/" + file);
      if (!file.ends_with(".safetensors")) continue;
      EXPECT_OK(OpenNamed(HostFileSystem(), Path(name) + "/data/" + file, {})) << file;
    }
    const auto opened = OpenedCheckpoint::Open(HostFileSystem(), Path(name), {});
    EXPECT_OK(opened);
    EXPECT_EQ(opened.value()->index().Objects().value().size(), 2u);
    return opened.value()->commit()->record.content_root;
  };
  const Hash128 root = save("one", 1);
  const std::size_t files = FilesInData(Path("one")).size();
  for (const int writers : {2, 3, 16}) {
    SCOPED_TRACE(writers);
    const std::string name = "w" + std::to_string(writers);
    EXPECT_EQ(save(name, writers), root);
    const auto read = ReadAll(Path(name));
    for (const RandomTensor& t : tensors) EXPECT_TRUE(read.at(t.key) == t.bytes) << t.key;
    // Each rank's shard is several files; all other files are those of one writer.
    const int shards = std::min(writers, 6);
    EXPECT_EQ(FilesInData(Path(name)).size(), files + static_cast<std::size_t>(2 * (shards - 1)));
  }
  // Few bytes are not divided unless the caller asks for it.
  EXPECT_EQ(save("default", 0), root);
  EXPECT_EQ(FilesInData(Path("default")).size(), files);
}

TEST_F(SaveTest, SafetensorsPlacementWritesTheModelToOneFile) {
  const RandomTensor a = MakeTensor("a", DType::kF32, {5});
  const RandomTensor b = MakeTensor("b", DType::kBF16, {3, 2});
  const RandomTensor none = MakeTensor("none", DType::kF32, {0, 2});
  SaveOptions options;
  options.placement = PlacementRule::kSafetensors;
  options.writers = 3;
  ASSERT_OK(OneVerdict(SaveOnThreads(
      Path("a"), 2,
      [&](int rank, RankState& state) {
        if (rank == 0) return;
        for (const RandomTensor* t : {&a, &b, &none}) state.Add(*t, Box::Whole(t->shape));
      },
      options)));
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenNamed(HostFileSystem(), DataFile(Path("a"), ".safetensors"), {}));
  EXPECT_EQ(opened->index().tensor_count(), 3u);
  EXPECT_EQ(ReadAll(Path("a")).at("b"), b.bytes);
  ExpectWhole(Path("a"));
}

TEST_F(SaveTest, SavesObjectsCommonValuesScalarsAndEmptyTensors) {
  const RandomTensor scalar = MakeTensor("scalar", DType::kF64, {});
  const RandomTensor none = MakeTensor("none", DType::kF32, {4, 0});
  const auto results = SaveOnThreads(Path("a"), 3, [&](int rank, RankState& state) {
    ASSERT_OK(state.dict.AddObject("rng", "state " + std::to_string(rank),
                                   {.index = {rank}, .grid = {3}}));
    ASSERT_OK(state.dict.AddObject("config", "{}"));
    ASSERT_OK(state.dict.AddObject("nothing", ""));
    ASSERT_OK(state.dict.SetCommon("iteration", 1000));
    if (rank == 2) {
      ASSERT_OK(state.dict.SetCommon("late", "set by rank 2"));
    }
    state.Add(scalar, Region());
    if (rank == 1) state.Add(none, Box::Whole(none.shape));
  });
  ASSERT_OK(OneVerdict(results));
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), Path("a"), {}));
  ASSERT_OK_AND_ASSIGN(const auto common, opened->index().CommonRecords());
  EXPECT_EQ(common.at("iteration"), CommonValue(std::int64_t{1000}));
  EXPECT_EQ(common.at("late"), CommonValue("set by rank 2"));
  ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts("rng"));
  ASSERT_EQ(parts.size(), 3u);
  for (int r = 0; r < 3; ++r) {
    std::string bytes(parts[static_cast<std::size_t>(r)].length, '\0');
    ASSERT_OK(
        opened->ReadObject(parts[static_cast<std::size_t>(r)], 0, bytes.data(), bytes.size()));
    EXPECT_EQ(bytes, "state " + std::to_string(r));
  }
  ASSERT_OK_AND_ASSIGN(const auto nothing, opened->index().ObjectParts("nothing"));
  EXPECT_EQ(nothing[0].length, 0u);
  const auto read = ReadAll(Path("a"));
  EXPECT_EQ(read.at("scalar"), scalar.bytes);
  EXPECT_EQ(read.at("none"), "");
  EXPECT_EQ(opened->index().info().world_size, 3u);
  EXPECT_EQ(opened->index().info().producer, "tensormount 0.1");
  ExpectWhole(Path("a"));
}

TEST_F(SaveTest, ManifestsHaveTheSaveUuidAndProgressCountsBytes) {
  const RandomTensor w = MakeTensor("w", DType::kF32, {256, 600});
  std::atomic<std::uint64_t> written{0};
  SaveOptions options;
  options.progress = &written;
  const auto results = SaveOnThreads(
      Path("a"), 2,
      [&](int rank, RankState& state) {
        state.Add(w, Box::Make({128 * rank, 0}, {128, 600}).value());
        ASSERT_OK(state.dict.AddObject("o", "bytes"));
      },
      options);
  ASSERT_OK(OneVerdict(results));
  EXPECT_EQ(written, results[0].value().bytes_written);
  for (const char* name : {"manifest/r0.tmm", "manifest/r1.tmm"}) {
    auto bytes = HostFileSystem().ReadFile(Path("a") + "/" + name, 1 << 20);
    ASSERT_OK(bytes);
    auto manifest = DecodeManifest(bytes.value(), name);
    ASSERT_OK(manifest);
    EXPECT_EQ(manifest.value().inventory.info.uuid.ToString(), results[0].value().uuid) << name;
  }
}

TEST_F(SaveTest, EmptyStateIsSaved) {
  ASSERT_OK(OneVerdict(SaveOnThreads(Path("empty"), 2, [](int, RankState&) {})));
  EXPECT_TRUE(ReadAll(Path("empty")).empty());
}

// Replicas are compared at the owner of the key, with which alone a rank speaks: once every rank
// sent a message to every other in each save that had any.
TEST_F(SaveTest, MessagesGrowLinearlyWithRanks) {
  ForceOwners(1);
  const auto messages = [&](int ranks, std::uint64_t(&of_saves)[2]) {
    const RandomTensor cut = MakeTensor("cut", DType::kF32, {ranks, 3});
    const RandomTensor everywhere = MakeTensor("everywhere", DType::kF32, {40});
    std::atomic<std::uint64_t> sent[2] = {0, 0};
    EXPECT_OK(RunOnThreads(ranks, [&](Communicator& inner) -> Status {
      CountingCommunicator comm(inner);
      RankState state;
      state.Add(cut, Box::Make({comm.rank(), 0}, {1, 3}).value());
      state.Add(everywhere, Box::Whole(everywhere.shape));
      for (int save = 0; save < 2; ++save) {
        const std::string name = std::to_string(ranks) + "-" + std::to_string(save);
        TENSORMOUNT_ASSIGN_OR_RETURN(const SaveReport report, Save(state.dict, Path(name), comm));
        EXPECT_GT(report.replica_bytes_compared, 0u);
        sent[save] += comm.TakeMessages();
      }
      const std::set<int> peers = comm.peers();
      EXPECT_TRUE(comm.rank() == 0 || peers == std::set<int>{0}) << peers.size();
      return Status();
    }));
    for (int save = 0; save < 2; ++save) of_saves[save] = sent[save];
  };
  std::uint64_t few[2];
  std::uint64_t many[2];
  messages(5, few);
  messages(17, many);
  ForceOwners(0);
  // Four times as many other ranks. Reminders of a slow moment come on top.
  for (int save = 0; save < 2; ++save) EXPECT_LE(many[save], 6 * few[save]) << save;
}

TEST_F(SaveTest, ReplaceExistingExchangesAtomically) {
  const RandomTensor one = MakeTensor("one", DType::kF32, {5});
  const RandomTensor two = MakeTensor("two", DType::kF32, {5});
  const auto save = [&](const RandomTensor& t, const SaveOptions& options) {
    return OneVerdict(SaveOnThreads(
        Path("a"), 2, [&](int, RankState& state) { state.Add(t, Box::Whole(t.shape)); }, options));
  };
  SaveOptions replace;
  replace.if_exists = IfExists::kReplace;
  ASSERT_OK(save(one, {}));
  EXPECT_THAT(save(two, {}), HasCode(Code::kAlreadyExists));
  EXPECT_EQ(ReadAll(Path("a")).count("one"), 1u);
  ASSERT_OK(save(two, replace));
  EXPECT_EQ(ReadAll(Path("a")).count("two"), 1u);
  EXPECT_EQ(ReadAll(Path("a")).size(), 1u);
}

// The page cache keeps what one aligned write brings as one page: between two multiples of 256 KiB
// of a file there is one write for each chunk, of memory of any strides.
TEST_F(SaveTest, LargeChunksAreWrittenByAlignedBlocks) {
  if (DeviceMode()) GTEST_SKIP() << "blocks of the pinned memory of these devices are smaller";
  constexpr std::uint64_t kBlock = 256 * 1024;
  constexpr int kRanks = 3;
  const RandomTensor w = MakeTensor("w", DType::kBF16, {750, 1000});
  SaveOptions options;
  options.placement = PlacementRule::kTensorFile;
  options.reuse = Reuse::kOff;
  for (const bool strided : {false, true}) {
    std::mutex mutex;
    std::map<std::string, std::vector<ByteRange>> writes;
    ObservedFileSystem fs(HostFileSystem(), {}, [&](const FileEvent& event) {
      if (event.op != FileOp::kWrite || event.path.find("/data/") == std::string::npos) return;
      const std::lock_guard lock(mutex);
      writes[event.path].push_back({event.offset, event.offset + event.size});
    });
    Random random(TestSeed());
    const std::string path = Path(strided ? "b" : "a");
    ASSERT_OK(OneVerdict(SaveOnThreads(
        path, kRanks,
        [&](int rank, RankState& state) {
          state.Add(w, RowsOf(w.shape, rank, kRanks), strided ? &random : nullptr);
        },
        options, [&](int) -> FileSystem& { return fs; })));
    ASSERT_EQ(writes.size(), 1u);
    std::vector<ByteRange>& all = writes.begin()->second;
    std::sort(all.begin(), all.end(),
              [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
    // Three chunks of 500,000 bytes, cut where a block ends.
    EXPECT_THAT(all,
                ElementsAre(ByteRange{0, kBlock}, ByteRange{kBlock, 500000},
                            ByteRange{500000, 2 * kBlock}, ByteRange{2 * kBlock, 3 * kBlock},
                            ByteRange{3 * kBlock, 1000000}, ByteRange{1000000, 4 * kBlock},
                            ByteRange{4 * kBlock, 5 * kBlock}, ByteRange{5 * kBlock, 1500000}));
    EXPECT_EQ(ReadAll(path).at("w"), w.bytes);
  }
}

TEST_F(SaveTest, RandomShardingsAndStridesRoundTrip) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(25); ++i) {
    const int n = static_cast<int>(random.Int(1, 4));
    std::vector<RandomTensor> tensors;
    std::vector<Partition> partitions;
    for (int t = 0; t < 5; ++t) {
      const std::uint64_t size = random.OneIn(5) ? 200000 : 3000;
      tensors.push_back(MakeRandomTensor(random, "t" + std::to_string(t), size));
      partitions.push_back(RandomPartition(random, tensors.back().shape, n));
    }
    SaveOptions options;
    options.placement = random.OneIn(2) ? PlacementRule::kAuto : PlacementRule::kRankShard;
    options.replicas = random.OneIn(2) ? ReplicaCheck::kFull : ReplicaCheck::kRotating;
    options.page_hashes = random.OneIn(2);
    options.writers = static_cast<int>(random.Int(0, 4));
    const std::string path = Path("c" + std::to_string(i));
    ASSERT_OK(OneVerdict(SaveOnThreads(
        path, n,
        [&](int rank, RankState& state) {
          for (std::size_t t = 0; t < tensors.size(); ++t) {
            for (const Region& region : partitions[t][static_cast<std::size_t>(rank)]) {
              state.Add(tensors[t], region, &random);
            }
          }
        },
        options)));
    const auto read = ReadAll(path);
    ASSERT_EQ(read.size(), tensors.size());
    for (const RandomTensor& t : tensors) {
      EXPECT_TRUE(read.at(t.key) == t.bytes) << t.key << " " << t.shape.ToString();
    }
  }
}

}  // namespace
}  // namespace tensormount
