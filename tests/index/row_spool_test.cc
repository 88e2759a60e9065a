// SPDX-License-Identifier: Apache-2.0
#include "index/records/row_spool.h"

#include <cerrno>
#include <map>
#include <string>
#include <vector>

#include "index/records/file_roots.h"
#include "index/records/inventory.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// 0 to n - 1.
std::size_t Below(Random& random, std::size_t n) { return random.Next() % n; }

std::string SpoolManifest(std::size_t i) { return "manifest/r" + std::to_string(i) + ".tmm"; }

// What writers of a checkpoint say whose tensors are cut into rows, which they share out by chance:
// each row in a file of its writer, in a tensor's own file that all write, or strided in a foreign
// file, so that tables are wide in some manifests and narrow in others.
std::vector<Inventory> RandomWriters(Random& random, bool foreign) {
  const int writers = static_cast<int>(Below(random, 6)) + 1;
  const int tensors = static_cast<int>(Below(random, 7));
  std::vector<Inventory> all(static_cast<std::size_t>(writers));
  std::vector<std::uint64_t> ends(static_cast<std::size_t>(writers), 0);
  for (int w = 0; w < writers; ++w) {
    Inventory& writer = all[static_cast<std::size_t>(w)];
    writer.info.uuid = {1, 2};
    writer.files.push_back(
        {.name = "data/r" + std::to_string(w), .placement = Placement::kRankShard});
  }
  for (int t = 0; t < tensors; ++t) {
    const std::string key = "t" + std::to_string(Below(random, 1000)) + "." + std::to_string(t);
    const auto rows = static_cast<std::int64_t>(Below(random, 9));
    const bool shared = Below(random, 2) == 0;
    const TensorMeta meta = TensorMeta::Make(key, DType::kF32, {rows, 8}).value();
    for (Inventory& writer : all) writer.tensors.emplace_back(meta).has_digest = true;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::size_t w = Below(random, all.size());
      Inventory& writer = all[w];
      ChunkRecord chunk;
      chunk.region = Region(Box::Make({row, 0}, {1, 8}).value());
      chunk.length = 32;
      chunk.hash = {random.Next(), random.Next()};
      chunk.first_leaf = Below(random, 100);
      chunk.offset = ends[w];
      const auto own_file = [&](const std::string& name, Placement placement,
                                std::uint64_t length) {
        for (std::uint32_t f = 0; f < writer.files.size(); ++f) {
          if (writer.files[f].name == name) return f;
        }
        writer.files.push_back({.name = name, .placement = placement, .length = length});
        return static_cast<std::uint32_t>(writer.files.size() - 1);
      };
      if (shared) {
        chunk.file =
            own_file("data/" + key, Placement::kTensorFile, static_cast<std::uint64_t>(rows) * 32);
        chunk.offset = static_cast<std::uint64_t>(row) * 32;
      } else if (foreign && Below(random, 2) == 0) {
        chunk.file = own_file("foreign", Placement::kForeign, 4096);
        chunk.offset = static_cast<std::uint64_t>(row);
        chunk.length = 4 + 7 * 8;
        chunk.strides = {64, 8};
      } else {
        ends[w] += 32;
      }
      writer.tensors.back().extents.Append(chunk);
    }
  }
  for (std::size_t w = 0; w < all.size(); ++w) {
    all[w].files[0].length = ends[w] + 16;
    all[w].extras.push_back({.file = 0, .offset = ends[w], .length = 16, .hash = {w, 1}});
  }
  return all;
}

Status AddAll(InventoryMerger& merger, const std::vector<Inventory>& writers) {
  for (std::size_t i = 0; i < writers.size(); ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(merger.Add(writers[i], SpoolManifest(i)));
  }
  return Status();
}

TEST(RowSpool, SpooledMergeEqualsTheMergeInMemory) {
  const TempDir dir;
  const std::string path = dir.Join("rows");
  int with_file = 0;
  int with_shared = 0;
  for (int round = 0; round < TestScale(300); ++round) {
    Random random(static_cast<std::uint64_t>(round));
    const std::vector<Inventory> writers = RandomWriters(random, round % 3 == 0);
    InventoryMerger whole;
    ASSERT_OK(AddAll(whole, writers));
    ASSERT_OK_AND_ASSIGN(const Inventory want, whole.Finish());
    const std::uint64_t memory = Below(random, 3) * Below(random, 2000);
    {
      ObservedFileSystem counting(HostFileSystem(), {}, [&](const FileEvent& event) {
        with_file += event.op == FileOp::kCreate ? 1 : 0;
      });
      InventoryMerger spilling(counting, path, memory);
      ASSERT_OK(AddAll(spilling, writers));
      EXPECT_FALSE(HostFileSystem().Exists(path));
      ASSERT_OK_AND_ASSIGN(Inventory tables, spilling.FinishTables());
      ASSERT_EQ(tables.tensors.size(), want.tensors.size());
      std::size_t next = 0;
      ASSERT_OK(spilling.TakeRows(tables, [&](TensorRecord& tensor) {
        const TensorRecord& other = want.tensors[next++];
        EXPECT_EQ(tensor.meta.key(), other.meta.key());
        EXPECT_EQ(tensor.extents.wide(), other.extents.wide());
        EXPECT_EQ(tensor.extents.packed(), other.extents.packed());
        return Status();
      }));
      EXPECT_EQ(next, want.tensors.size());
      for (std::size_t f = 0; f < want.files.size(); ++f) {
        EXPECT_EQ(tables.files[f].name, want.files[f].name);
        EXPECT_EQ(tables.files[f].root, want.files[f].root);
      }
      EXPECT_EQ(ContentRoot(tables), ContentRoot(want));
    }
    // Roots are those of the files whole, however many manifests name them.
    ASSERT_OK_AND_ASSIGN(const std::vector<FileRoot> roots, FileRootsOf(want));
    for (std::size_t f = 0; f < want.files.size(); ++f) {
      EXPECT_EQ(want.files[f].root, roots[f].root) << want.files[f].name;
      with_shared += want.files[f].placement == Placement::kTensorFile ? 1 : 0;
    }
  }
  EXPECT_GT(with_file, 20);
  EXPECT_GT(with_shared, 20);
}

TEST(RowSpool, OverlappingRangesOfTwoWritersAreRefused) {
  std::vector<Inventory> writers(2);
  for (std::size_t w = 0; w < 2; ++w) {
    writers[w].info.uuid = {1, 2};
    writers[w].files.push_back(
        {.name = "data/w", .placement = Placement::kTensorFile, .length = 64});
    TensorRecord& tensor =
        writers[w].tensors.emplace_back(TensorMeta::Make("w", DType::kF32, {2, 8}).value());
    ChunkRecord chunk;
    chunk.region = Region(Box::Make({static_cast<std::int64_t>(w), 0}, {1, 8}).value());
    chunk.length = 32;
    chunk.offset = w * 31;
    tensor.extents.Append(chunk);
  }
  InventoryMerger merger;
  ASSERT_OK(AddAll(merger, writers));
  EXPECT_THAT(merger.Finish(), HasMessage("data/w: the range of 32 bytes at byte 31 overlaps"));
}

TEST(RowSpool, FullDiskIsReported) {
  const TempDir dir;
  Random random(7);
  std::vector<Inventory> writers;
  while (writers.size() < 3 || writers[0].tensors.empty()) writers = RandomWriters(random, false);
  for (const FileOp op : {FileOp::kCreate, FileOp::kWrite, FileOp::kRead}) {
    SCOPED_TRACE(std::string(FileOpName(op)));
    ObservedFileSystem failing(HostFileSystem(), [&](const FileEvent& event) {
      return event.op == op
                 ? Status::FromErrno(op == FileOp::kRead ? EIO : ENOSPC, "injected", event.path)
                 : Status();
    });
    InventoryMerger merger(failing, dir.Join("rows"), 0);
    Status status = AddAll(merger, writers);
    if (op == FileOp::kRead) {
      ASSERT_OK(status);
      status = merger.Finish().status();
      EXPECT_THAT(status, HasCode(Code::kDataLoss));
    } else {
      EXPECT_THAT(status, HasCode(Code::kResourceExhausted));
    }
    EXPECT_THAT(status, HasMessage("rows"));
  }
  EXPECT_FALSE(HostFileSystem().Exists(dir.Join("rows")));
}

}  // namespace
}  // namespace tensormount
