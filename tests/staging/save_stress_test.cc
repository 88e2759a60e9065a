// SPDX-License-Identifier: Apache-2.0
// Whole saves through StagingTree, with several mounts and threads at once, and power cuts.
#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <memory>
#include <thread>

#include "fs/mount_stats.h"
#include "fs/save/staging_writer.h"
#include "fs/staging/staged_checkpoint.h"
#include "fs/staging/staging_tree.h"
#include "tests/staging/staging_test_support.h"
#include "tests/staging/walk.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/power_cut.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

// A tensor of two axes as units of whole bytes: one element, or two of four bits.
struct Shape {
  std::string key;
  std::string dtype;
  std::int64_t rows = 0;
  std::int64_t columns = 0;  // In units.
  std::int64_t unit_bytes = 1;
  std::int64_t unit_elements = 1;
  std::int64_t bytes() const { return rows * columns * unit_bytes; }
};
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {
      {"w", "f32", 64, 300, 4, 1},
      {"layers/0/big", "u8", 4500, 1000, 1, 1},  // Has a file of its own.
      {"q b.\xc3\xbc/f4", "f4", 70, 111, 1, 2},
      {"last", "u8", 2, 5, 1, 1},
  };
  return shapes;
}

std::string SchemaText() {
  std::string text = R"({"objects": {"rng": {"grid": [2]}}, "tensors": {
      "scalar": {"dtype": "f64", "shape": []}, "none": {"dtype": "f32", "shape": [0, 3]})";
  for (const Shape& s : Shapes()) {
    text += ", \"" + s.key + R"(": {"dtype": ")" + s.dtype + R"(", "shape": [)" +
            std::to_string(s.rows) + ", " + std::to_string(s.columns * s.unit_elements) + "]}";
  }
  return text + "}}";
}

std::string Formula(const Shape& shape) {
  return Random(Xxh3Low64(shape.key)).Bytes(static_cast<std::size_t>(shape.bytes()));
}

// A staging and programs that write to it through trees.
class Programs {
 public:
  Programs() {
    for (const Shape& s : Shapes()) wanted_.push_back(Formula(s));
  }
  const std::string& wanted(std::size_t i) const { return wanted_[i]; }

  static Result<StagingTree::Node> At(StagingTree& tree, std::string_view path) {
    return WalkStaging(tree, path);
  }
  static Result<std::shared_ptr<WriteHandle>> Open(StagingTree& tree, const std::string& path,
                                                   int flags) {
    const std::size_t slash = path.rfind('/');
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto folder, At(tree, path.substr(0, slash)));
    const std::string name = path.substr(slash + 1);
    const auto there = tree.Lookup(folder.item, name);
    if (there.ok()) return tree.Open(there.value().item, flags);
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made, tree.Create(folder.item, name, flags));
    return std::move(made.handle);
  }
  static Status Put(StagingTree& tree, const std::string& path, std::string_view bytes,
                    std::uint64_t offset = 0, int flags = O_WRONLY | O_CREAT) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto handle, Open(tree, path, flags));
    TENSORMOUNT_RETURN_IF_ERROR(handle->Write(offset, bytes.data(), bytes.size()));
    return handle->Flush();
  }
  static Status Begin(StagingTree& tree) {
    const auto made = tree.MakeDirectory(StagingTree::kRoot, "s");
    TENSORMOUNT_RETURN_IF_ERROR(made.status());
    return Put(tree, "s/schema.json", SchemaText(), 0, O_WRONLY | O_CREAT | O_TRUNC);
  }

  // Bytes [begin, end) of rows and columns of units, as slices/ wants them.
  std::string Packed(std::size_t i, std::int64_t row, std::int64_t rows, std::int64_t column,
                     std::int64_t columns) const {
    const Shape& s = Shapes()[i];
    std::string bytes;
    for (std::int64_t r = row; r < row + rows; ++r) {
      bytes += wanted_[i].substr(static_cast<std::size_t>((r * s.columns + column) * s.unit_bytes),
                                 static_cast<std::size_t>(columns * s.unit_bytes));
    }
    return bytes;
  }
  static std::string SliceOf(std::size_t i, std::int64_t row, std::int64_t rows,
                             std::int64_t column, std::int64_t columns) {
    const Shape& s = Shapes()[i];
    return "s/slices/" + s.key + "[" + std::to_string(row) + ":" + std::to_string(row + rows) +
           "," + std::to_string(column * s.unit_elements) + ":" +
           std::to_string((column + columns) * s.unit_elements) + "]";
  }

  // A program with one file open: writes here and there, now and then something else first.
  Status WriteSome(StagingTree& tree, Random& random, bool garbage) const {
    const auto i = static_cast<std::size_t>(random.Int(0, 2));
    const Shape& s = Shapes()[i];
    std::string path = "s/tensors/" + s.key;
    std::string bytes = wanted_[i];
    if (random.OneIn(2)) {
      const std::int64_t row = random.Int(0, s.rows - 1);
      const std::int64_t rows = random.Int(1, s.rows - row);
      const std::int64_t column = random.OneIn(2) ? 0 : random.Int(0, s.columns - 1);
      const std::int64_t columns = column == 0 ? s.columns : random.Int(1, s.columns - column);
      path = SliceOf(i, row, rows, column, columns);
      bytes = Packed(i, row, rows, column, columns);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto handle, Open(tree, path, O_RDWR));
    for (std::int64_t n = random.Int(1, 4); n > 0; --n) {
      const std::int64_t most = random.OneIn(3) ? 300'000 : random.OneIn(2) ? 3000 : 70'000;
      const auto all = static_cast<std::int64_t>(bytes.size());
      const std::int64_t size = random.Int(1, std::min(all, most));
      std::int64_t at = random.Int(0, all - size);
      if (random.OneIn(2)) at -= at % std::min<std::int64_t>(65536, 1 + at);
      const auto from = static_cast<std::size_t>(at);
      const auto count = static_cast<std::size_t>(size);
      if (garbage && random.OneIn(3)) {
        const std::string wrong = random.Bytes(count);
        TENSORMOUNT_RETURN_IF_ERROR(handle->Write(from, wrong.data(), count));
        if (random.OneIn(2)) TENSORMOUNT_RETURN_IF_ERROR(handle->Sync());
        if (random.OneIn(4)) TENSORMOUNT_RETURN_IF_ERROR(handle->Truncate(from));
      }
      TENSORMOUNT_RETURN_IF_ERROR(handle->Write(from, bytes.data() + from, count));
      if (random.OneIn(4)) TENSORMOUNT_RETURN_IF_ERROR(handle->Sync());
    }
    // One that dies before: without.
    return random.OneIn(8) && !garbage ? Status() : handle->Flush();
  }
  // Everything but "last", by `count` programs.
  Status WriteAll(StagingTree& tree, std::int64_t part, std::int64_t count) const {
    for (std::size_t i = 0; i < 3; ++i) {
      const Shape& s = Shapes()[i];
      const std::int64_t begin = s.rows * part / count;
      const std::int64_t rows = s.rows * (part + 1) / count - begin;
      if (part % 2 == 0) {
        TENSORMOUNT_RETURN_IF_ERROR(
            Put(tree, SliceOf(i, begin, rows, 0, s.columns), Packed(i, begin, rows, 0, s.columns)));
      } else {
        TENSORMOUNT_RETURN_IF_ERROR(
            Put(tree, "s/tensors/" + s.key, Packed(i, begin, rows, 0, s.columns),
                static_cast<std::uint64_t>(begin * s.columns * s.unit_bytes)));
      }
    }
    if (part == 0) TENSORMOUNT_RETURN_IF_ERROR(Put(tree, "s/tensors/scalar", "12345678"));
    return Put(tree, "s/objects/rng/" + std::to_string(part % 2),
               "state of " + std::to_string(part % 2));
  }
  Status WriteLast(StagingTree& tree) const { return Put(tree, "s/tensors/last", wanted_[3]); }

 private:
  std::vector<std::string> wanted_;
};

class SaveStressTest : public StagingTest {
 protected:
  std::unique_ptr<StagingTree> Mount(FileSystem& fs, const std::string& store) {
    auto made = StagingTree::Make(fs, store, stats_);
    EXPECT_OK(made);
    return std::move(made).value();
  }
  void ExpectSaved(FileSystem& fs, const std::string& path) {
    const auto report = VerifyCheckpoint(fs, path, VerifyOptions{.threads = 1});
    ASSERT_OK(report);
    for (const auto& d : report.value().damages) {
      FAIL() << d.object << ": " << d.file << ": " << d.reason;
    }
    const auto opened = OpenedCheckpoint::Open(fs, path, OpenedCheckpoint::Options());
    ASSERT_OK(opened);
    for (std::size_t i = 0; i < Shapes().size(); ++i) {
      const auto entry = opened.value()->index().Find(Shapes()[i].key);
      ASSERT_OK(entry);
      std::string bytes(save_.wanted(i).size(), '?');
      ASSERT_OK(opened.value()->ReadBytes(entry.value(), 0, bytes.data(), bytes.size(),
                                          ReadVerify::kExtendLeaves, nullptr));
      ASSERT_TRUE(bytes == save_.wanted(i)) << Shapes()[i].key;
      ASSERT_EQ(entry.value().digest, Crc64Extend(0, bytes.data(), bytes.size()));
    }
  }

  Programs save_;
  MountStats stats_;
};

TEST_F(SaveStressTest, ConcurrentWritersAndPublishersStayConsistent) {
  Random seeds(TestSeed());
  for (int round = 0; round < TestScale(1); ++round) {
    const std::string path = dir_.Join("store" + std::to_string(round));
    ASSERT_OK(Store::OpenOrCreate(fs(), path));
    // One that may rewrite, one that dies half-way, one that comes instead.
    const auto a = Mount(fs(), path);
    auto b = Mount(fs(), path);
    const auto c = Mount(fs(), path);
    ASSERT_OK(Programs::Begin(*a));
    std::atomic<bool> stop{false};
    std::thread publisher([&] {
      while (!stop) {
        const int error = c->Publish("s", "s").ToErrno();
        ASSERT_TRUE(error == EBUSY || error == EIO) << error;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    });
    for (StagingTree* second : {b.get(), c.get()}) {
      std::vector<std::thread> programs;
      for (int t = 0; t < 4; ++t) {
        programs.emplace_back([&, t, seed = seeds.Next()] {
          Random random(seed);
          for (int i = 0; i < 12; ++i) {
            ASSERT_OK(save_.WriteSome(t % 2 == 0 ? *a : *second, random, t % 2 == 0));
          }
        });
      }
      for (std::thread& program : programs) program.join();
      b.reset();  // As if it were killed: nothing is synced.
    }
    ASSERT_OK(save_.WriteAll(*a, 0, 2));
    ASSERT_OK(save_.WriteAll(*c, 1, 2));
    stop = true;
    publisher.join();
    ASSERT_OK(save_.WriteLast(*c));
    const auto last = Programs::At(*c, "s/tensors/last");
    ASSERT_OK(last);
    ASSERT_OK(a->Publish("s", "s"));
    std::this_thread::sleep_for(StagedCheckpoint::kMaxAge * 21 / 20);
    ASSERT_NO_FATAL_FAILURE(ExpectSaved(fs(), path + "/s"));
    EXPECT_EQ(c->Open(last.value().item, O_WRONLY).status().ToErrno(), ESTALE);
  }
}

TEST_F(SaveStressTest, SaveCanBeFinishedAfterAnyPowerCut) {
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  const std::string path = dir_.Join("live/store");
  ASSERT_OK(Store::OpenOrCreate(live, path));
  const std::size_t empty = live.op_count();
  Random random(TestSeed());
  {
    const auto a = Mount(live, path);
    const auto b = Mount(live, path);
    ASSERT_OK(Programs::Begin(*a));
    for (int i = 0; i < 6; ++i) ASSERT_OK(save_.WriteSome(i % 2 == 0 ? *a : *b, random, false));
    ASSERT_OK(save_.WriteAll(*a, 0, 2));
    ASSERT_OK(save_.WriteAll(*b, 1, 2));
    ASSERT_OK(save_.WriteLast(*b));
    ASSERT_OK(a->Publish("s", "s"));
  }
  const std::size_t end = live.op_count();
  const std::size_t step = 1 + (end - empty) / static_cast<std::size_t>(TestScale(15));
  for (std::size_t k = end;; k -= step) {
    SCOPED_TRACE("power cut after " + live.Describe(k - 1));
    const std::string after = dir_.Join("after");
    ASSERT_OK(live.Materialise(k, random, after));
    {
      PowerCutFileSystem cut(after);
      const std::string store = after + "/store";
      if (!cut.Exists(store + "/s")) {
        ASSERT_NE(k, end);
        const auto c = Mount(cut, store);
        const auto begun = Programs::Begin(*c);
        ASSERT_TRUE(begun.ok() || begun.ToErrno() == EEXIST) << begun.ToString();
        if (!begun.ok()) {
          ASSERT_OK(
              Programs::Put(*c, "s/schema.json", SchemaText(), 0, O_WRONLY | O_CREAT | O_TRUNC));
        }
        ASSERT_OK(save_.WriteAll(*c, 0, 2));
        ASSERT_OK(save_.WriteAll(*c, 1, 2));
        ASSERT_OK(save_.WriteLast(*c));
        ASSERT_OK(c->Publish("s", "s"));
      }
      ASSERT_NO_FATAL_FAILURE(ExpectSaved(cut, store + "/s"));
    }
    ASSERT_OK(HostFileSystem().RemoveTree(after));
    if (k < empty + step) break;
  }
}

// Bytes that no record names may end a data file, and be lost when the power is cut.
TEST_F(SaveStressTest, UnsyncedBytesOfAKilledMountDamageNothing) {
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  const std::string path = dir_.Join("live/store");
  ASSERT_OK(Store::OpenOrCreate(live, path));
  auto a = Mount(live, path);
  const auto b = Mount(live, path);
  ASSERT_OK(Programs::Begin(*a));
  ASSERT_OK(save_.WriteLast(*a));
  for (const char* name : {"s/tensors/w", "s/tensors/layers/0/big"}) {
    const auto handle = Programs::Open(*a, name, O_WRONLY);
    ASSERT_OK(handle);
    const std::string& bytes = save_.wanted(std::string_view(name).ends_with("w") ? 0 : 1);
    ASSERT_OK(handle.value()->Write(0, bytes.data(), 9000));
    ASSERT_OK(handle.value()->Sync());
    ASSERT_OK(handle.value()->Write(9000, bytes.data() + 9000, 60'000));
  }
  a.reset();
  ASSERT_OK(save_.WriteAll(*b, 0, 2));
  ASSERT_OK(save_.WriteAll(*b, 1, 2));
  ASSERT_OK(b->Publish("s", "s"));
  Random random(TestSeed());
  for (int i = 0; i < TestScale(8); ++i) {
    const std::string after = dir_.Join("after");
    ASSERT_OK(live.Materialise(live.op_count(), random, after));
    ASSERT_NO_FATAL_FAILURE(ExpectSaved(HostFileSystem(), after + "/store/s"));
    ASSERT_OK(HostFileSystem().RemoveTree(after));
  }
}

TEST_F(SaveStressTest, RefusedWriteCanBeRepeated) {
  const std::string path = dir_.Join("store");
  ASSERT_OK(Store::OpenOrCreate(fs(), path));
  std::atomic<FileOp> fails{FileOp::kLock};
  std::atomic<int> left{0};
  std::string below = "/data/";
  ObservedFileSystem disk(HostFileSystem(), [&](const FileEvent& e) {
    if (e.op != fails || e.path.find(below) == std::string::npos || left.load() == 0) {
      return Status();
    }
    --left;
    return Status::FromErrno(EIO, "injected", e.path);
  });
  const auto a = Mount(disk, path);
  ASSERT_OK(Programs::Begin(*a));
  // The journal cannot be made at first.
  below = "/journal/";
  fails = FileOp::kSync;
  left = 1;
  EXPECT_EQ(save_.WriteLast(*a).ToErrno(), EIO);
  ASSERT_OK(save_.WriteLast(*a));
  ASSERT_OK(save_.WriteAll(*a, 0, 2));
  ASSERT_OK(save_.WriteAll(*a, 1, 2));
  // What was synced before must not pass for what was refused.
  below = "/data/";
  left = 1;
  EXPECT_EQ(save_.WriteLast(*a).ToErrno(), EIO);
  EXPECT_EQ(save_.WriteLast(*a).ToErrno(), EIO);
  EXPECT_EQ(a->Publish("s", "s").ToErrno(), EIO);
  EXPECT_EQ(Mount(fs(), path)->Publish("s", "s").ToErrno(), EIO);
  // Forgotten as a whole it may be written anew.
  ASSERT_OK(Programs::Put(*a, "s/tensors/last", save_.wanted(3), 0, O_WRONLY | O_TRUNC));
  ASSERT_OK(a->Publish("s", "s"));
  ASSERT_NO_FATAL_FAILURE(ExpectSaved(fs(), path + "/s"));
}

TEST_F(SaveStressTest, WriteMissingFromTheJournalIsNotPublished) {
  const std::string path = dir_.Join("store");
  ASSERT_OK(Store::OpenOrCreate(fs(), path));
  std::atomic<bool> full{false};
  ObservedFileSystem disk(HostFileSystem(), [&](const FileEvent& e) {
    return full && e.op == FileOp::kWrite && e.path.find("/journal/") != std::string::npos
               ? Status::FromErrno(ENOSPC, "injected", e.path)
               : Status();
  });
  const auto a = Mount(disk, path);
  ASSERT_OK(Programs::Begin(*a));
  ASSERT_OK(save_.WriteAll(*a, 0, 2));
  ASSERT_OK(save_.WriteAll(*a, 1, 2));
  ASSERT_OK(save_.WriteLast(*a));
  full = true;
  EXPECT_EQ(Programs::Put(*a, "s/tensors/last", "xyz").ToErrno(), ENOSPC);
  full = false;
  EXPECT_EQ(a->Publish("s", "s").ToErrno(), EIO);
}

TEST_F(SaveStressTest, WithdrawnSchemaLeavesNothingBehind) {
  const std::string path = dir_.Join("store");
  ASSERT_OK(Store::OpenOrCreate(fs(), path));
  const auto a = Mount(fs(), path);
  ASSERT_OK(a->MakeDirectory(StagingTree::kRoot, "s"));
  const int fresh = O_WRONLY | O_CREAT | O_TRUNC;
  ASSERT_OK(Programs::Put(*a, "s/schema.json",
                          R"({"tensors": {"w": {"dtype": "u8", "shape": [4, 30]},
                              "v": {"dtype": "u8", "shape": [200]},
                              "x": {"dtype": "f32", "shape": [10]},
                              "gone": {"dtype": "u8", "shape": [9]}}})",
                          0, fresh));
  const std::string bytes = Random(5).Bytes(240);
  for (const char* name : {"s/tensors/v", "s/slices/w[1:3,:]", "s/tensors/x", "s/tensors/gone"}) {
    ASSERT_OK(Programs::Put(*a, name, bytes.substr(0, 9)));
  }
  const auto folder = Programs::At(*a, "s");
  ASSERT_OK(folder);
  ASSERT_OK(a->Unlink(folder.value().item, "schema.json"));
  // Another size, another shape around the same box, another type.
  ASSERT_OK(Programs::Put(*a, "s/schema.json",
                          R"({"tensors": {"w": {"dtype": "u8", "shape": [5, 30]},
                              "v": {"dtype": "u8", "shape": [100]},
                              "x": {"dtype": "f64", "shape": [10]}}})",
                          0, fresh));
  EXPECT_EQ(Programs::Put(*a, "s/tensors/v", bytes).ToErrno(), EFBIG);
  ASSERT_OK(Programs::Put(*a, "s/tensors/v", bytes.substr(0, 100)));
  ASSERT_OK(Programs::Put(*a, "s/tensors/x", bytes.substr(0, 80)));
  ASSERT_OK(Programs::Put(*a, "s/slices/w[1:3,:]", bytes.substr(30, 60)));
  ASSERT_OK(Programs::Put(*a, "s/slices/w[0,:]", bytes.substr(0, 30)));
  ASSERT_OK(Programs::Put(*a, "s/slices/w[3:,:]", bytes.substr(90, 60)));
  ASSERT_OK(a->Publish("s", "s"));
  EXPECT_TRUE(IsSound("s"));
  EXPECT_EQ(BytesOf("s", "v"), bytes.substr(0, 100));
  EXPECT_EQ(BytesOf("s", "w"), bytes.substr(0, 150));
  EXPECT_EQ(BytesOf("s", "x"), bytes.substr(0, 80));
}

TEST_F(SaveStressTest, BytesWrittenToAnotherShapeAreNotPublished) {
  const std::string path = dir_.Join("store");
  ASSERT_OK(Store::OpenOrCreate(fs(), path));
  const auto a = Mount(fs(), path);
  auto b = Mount(fs(), path);
  ASSERT_OK(a->MakeDirectory(StagingTree::kRoot, "s"));
  const int fresh = O_WRONLY | O_CREAT | O_TRUNC;
  ASSERT_OK(Programs::Put(*a, "s/schema.json",
                          R"({"tensors": {"w": {"dtype": "u8", "shape": [4, 30]}}})", 0, fresh));
  ASSERT_OK(Programs::Put(*b, "s/slices/w[1:3,:]", std::string(60, 'b')));
  b.reset();
  const auto folder = Programs::At(*a, "s");
  ASSERT_OK(folder);
  ASSERT_OK(a->Unlink(folder.value().item, "schema.json"));
  ASSERT_OK(Programs::Put(*a, "s/schema.json",
                          R"({"tensors": {"w": {"dtype": "u8", "shape": [5, 30]}}})", 0, fresh));
  ASSERT_OK(Programs::Put(*a, "s/slices/w[0,:]", std::string(30, 'a')));
  ASSERT_OK(Programs::Put(*a, "s/slices/w[3:,:]", std::string(60, 'a')));
  EXPECT_EQ(a->Publish("s", "s").ToErrno(), EIO);
}

TEST_F(SaveStressTest, MountReleasesStagingsPublishedElsewhere) {
  const std::string path = dir_.Join("store");
  ASSERT_OK(Store::OpenOrCreate(fs(), path));
  const auto a = Mount(fs(), path);
  const auto b = Mount(fs(), path);
  for (int i = 0; i < 5; ++i) {
    ASSERT_OK(Programs::Begin(*a));
    ASSERT_OK(save_.WriteAll(*b, 0, 1));
    ASSERT_OK(Programs::Put(*b, "s/objects/rng/1", "x"));
    ASSERT_OK(save_.WriteLast(*b));
    ASSERT_OK(a->Publish("s", "step-" + std::to_string(i)));
    // Another name each time, as trainers have it, so that the old one is never looked up again.
    ASSERT_OK(a->MakeDirectory(StagingTree::kRoot, "next-" + std::to_string(i)));
    std::this_thread::sleep_for(StagedCheckpoint::kMaxAge * 21 / 20);
    ASSERT_OK(b->Lookup(StagingTree::kRoot, "next-" + std::to_string(i)));
    EXPECT_NE(b->StatusFields().find("\"staged_files\": 0,"), std::string::npos);
  }
}

TEST_F(SaveStressTest, SavesAndReadsUseFewDescriptors) {
  const auto store = Store::OpenOrCreate(fs(), dir_.Join("store"));
  ASSERT_OK(store);
  const auto staging = CreateStaging(store.value(), fs(), "s");
  ASSERT_OK(staging);
  const auto writer = std::make_shared<StagingWriter>(fs(), staging.value(), "0123456789abcdef");
  const auto open_files = [] { return HostFileSystem().List("/proc/self/fd").value().size(); };
  const std::size_t before = open_files();
  std::vector<std::shared_ptr<TargetWriter>> targets;
  const std::string data(70'000, 'x');
  for (int i = 0; i < 200; ++i) {
    const TensorMeta meta =
        TensorMeta::Make("w" + std::to_string(i), DType::kU8, {5 << 20}).value();
    targets.push_back(writer->OpenTarget(meta, Box::Whole(meta.shape())).value());
    ASSERT_OK(targets.back()->Write(0, data.data(), data.size()));
  }
  for (const auto& target : targets) ASSERT_OK(target->Write(70'000, data.data(), data.size()));
  EXPECT_LE(open_files(), before + 150);
  for (const auto& target : targets) ASSERT_OK(target->Sync());
  std::string read(140'000, '\0');
  for (const auto& target : targets) {
    ASSERT_OK(target->Read(0, read.data(), read.size()));
    ASSERT_TRUE(read == data + data);
  }
  EXPECT_LE(open_files(), before + 150);
}

}  // namespace
}  // namespace tensormount::fs
