// SPDX-License-Identifier: Apache-2.0
// Views as one mechanism: content of segments, boxes above all, and what all views promise.
#include <algorithm>
#include <cerrno>
#include <numeric>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "fs/views/checkpoint_view.h"
#include "fs/views/view.h"
#include "index/records/commit_record.h"
#include "index/records/index_records.h"
#include "index/records/sst_table.h"
#include "shard/safetensors.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/random_layout.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount::fs {
namespace {

constexpr ServeVerify kModes[] = {ServeVerify::kOff, ServeVerify::kFirst, ServeVerify::kAlways};

using ViewPtr = std::shared_ptr<const CheckpointView>;
using FilePtr = std::shared_ptr<const VirtualFile>;

Result<ViewPtr> OpenView(const std::string& directory, ServeVerify verify = ServeVerify::kOff,
                         std::shared_ptr<SliceItems> slices = nullptr) {
  return CheckpointView::Open(
      HostFileSystem(), directory, Uuid{}, {},
      {.slot = 3, .list_views = true, .verify = verify, .slices = std::move(slices)});
}

Result<std::string> ReadRange(const VirtualFile& file, std::uint64_t offset, std::size_t size) {
  std::string out(size, '?');
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n, file.Read(offset, out.data(), size, nullptr));
  out.resize(n);
  // Where the bytes can be had where they lie, they are the same.
  const auto mapped = file.Map(offset, size);
  std::string joined;
  for (const auto& piece : mapped) {
    joined.append(reinterpret_cast<const char*>(piece.data), piece.size);
  }
  if (!mapped.empty()) {
    EXPECT_TRUE(joined == out) << file.label() << " at " << offset;
  }
  return out;
}

// By path, as the kernel would walk.
Result<Node> WalkPath(const CheckpointView& view, const std::string& path) {
  Node at{.slot = 3, .view = kOwnView, .item = kRootItem};
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    TENSORMOUNT_ASSIGN_OR_RETURN(const Child child,
                                 view.Lookup(at, path.substr(begin, end - begin)));
    at = child.node;
    begin = end + 1;
  }
  return at;
}

Result<FilePtr> OpenPath(const CheckpointView& view, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Node node, WalkPath(view, path));
  return view.OpenFile(node);
}

// Elements per whole bytes.
std::int64_t UnitOf(DType dtype) {
  const int bits = static_cast<int>(InfoOf(dtype).bits);
  return bits >= 8 ? 1 : 8 / std::gcd(8, bits);
}

// A tensor of elements under a byte, and a way to cut it on bytes.
void AddSmallElements(Random& random, BuildSpec& spec) {
  RandomTensor tensor;
  tensor.key = "small" + std::to_string(spec.tensors.size());
  tensor.dtype = random.OneIn(2) ? DType::kF4 : DType::kF6E2M3;
  const std::int64_t unit = UnitOf(tensor.dtype);
  const int rank = static_cast<int>(random.Int(1, 4));
  const int aligned = static_cast<int>(random.Int(0, rank - 1));
  for (int a = 0; a < rank; ++a) {
    tensor.shape.push_back(a == aligned ? unit * random.Int(1, 6) : random.Int(1, 7));
  }
  const std::int64_t elements = CheckedProduct(tensor.shape).value();
  tensor.bytes = random.Bytes(static_cast<std::size_t>(elements) * InfoOf(tensor.dtype).bits / 8);
  Partition partition(static_cast<std::size_t>(spec.writers));
  for (std::int64_t at = 0; at < elements;) {
    const std::int64_t count = std::min(elements - at, unit * random.Int(1, elements / unit));
    const auto writer = static_cast<std::size_t>(random.Int(0, spec.writers - 1));
    partition[writer].push_back(Region::Flat(Box::Whole(tensor.shape), at, count).value());
    at += count;
  }
  spec.tensors.push_back(std::move(tensor));
  spec.partitions.push_back(std::move(partition));
}

// A box with a container, cell by cell and bit by bit.
std::string OracleContainer(const RandomTensor& tensor, const Box& box, const Dims& container) {
  const std::size_t bits = InfoOf(tensor.dtype).bits;
  const std::int64_t cells = CheckedProduct(container).value();
  std::string out(static_cast<std::size_t>(cells) * bits / 8, '\0');
  for (std::int64_t cell = 0; cell < cells; ++cell) {
    std::int64_t rest = cell;
    std::int64_t element = 0;
    std::int64_t step = 1;
    bool inside = true;
    for (int a = container.rank() - 1; a >= 0; --a) {
      const std::int64_t at = rest % container[a];
      rest /= container[a];
      inside = inside && at < box.extent(a);
      element += (box.begin(a) + at) * step;
      step *= tensor.shape[a];
    }
    if (!inside) continue;
    for (std::size_t i = 0; i < bits; ++i) {
      const std::size_t from = static_cast<std::size_t>(element) * bits + i;
      const std::size_t to = static_cast<std::size_t>(cell) * bits + i;
      const int bit = (static_cast<unsigned char>(tensor.bytes[from / 8]) >> (from % 8)) & 1;
      out[to / 8] = static_cast<char>(out[to / 8] | (bit << (to % 8)));
    }
  }
  return out;
}

struct Case {
  Box box;
  Dims container;
};

// `on_bytes`: where rows of tensor and container are whole bytes and the box lies on bytes for
// sure.
Case RandomCase(Random& random, const RandomTensor& tensor, bool on_bytes) {
  const std::int64_t unit = on_bytes ? UnitOf(tensor.dtype) : 1;
  Dims begin;
  Dims extent;
  Case made;
  const int last = tensor.shape.rank() - 1;
  for (int a = 0; a <= last; ++a) {
    const std::int64_t step = a == last ? unit : 1;
    const std::int64_t size = tensor.shape[a] / step;
    const std::int64_t from = random.OneIn(3) ? 0 : random.Int(0, size);
    const std::int64_t most = size - from;
    const std::int64_t count =
        random.OneIn(3) ? most : random.Int(std::min<std::int64_t>(1, most), most);
    begin.push_back(from * step);
    extent.push_back(count * step);
    made.container.push_back((count + (random.OneIn(3) ? random.Int(0, 3) : 0)) * step);
  }
  made.box = Box::Make(begin, extent).value();
  return made;
}

// Reads it in ranges of all sizes.
void CompareFile(Random& random, const VirtualFile& file, const std::string& want) {
  ASSERT_EQ(file.size(), want.size());
  ASSERT_OK_AND_ASSIGN(const std::string all, ReadRange(file, 0, want.size() + 5));
  ASSERT_TRUE(all == want) << file.label();
  const auto size = static_cast<std::int64_t>(want.size());
  for (int i = 0; i < 6; ++i) {
    const auto offset = static_cast<std::size_t>(random.Int(0, size + 3));
    const auto n = static_cast<std::size_t>(random.Int(0, random.OneIn(2) ? 9 : size + 3));
    ASSERT_OK_AND_ASSIGN(const std::string piece, ReadRange(file, offset, n));
    const std::string expected = offset >= want.size() ? std::string() : want.substr(offset, n);
    ASSERT_TRUE(piece == expected) << file.label() << " at " << offset << " + " << n;
  }
}

TEST(ViewBoxes, AnyBoxInAnyContainerEqualsTheOracle) {
  Random random(TestSeed());
  int refused = 0;
  int served = 0;
  for (int round = 0; round < TestScale(5); ++round) {
    SCOPED_TRACE(round);
    TempDir dir;
    BuildSpec spec = RandomSpec(random, 5, 6000);
    for (int i = 0; i < 4; ++i) AddSmallElements(random, spec);
    ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
    for (const ServeVerify verify : kModes) {
      ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(dir.Join("c"), verify));
      for (const RandomTensor& tensor : spec.tensors) {
        ASSERT_OK_AND_ASSIGN(const TensorEntry entry, view->opened().index().Find(tensor.key));
        for (int i = 0; i < 4; ++i) {
          const int last = tensor.shape.rank() - 1;
          const bool rows_on_bytes = last < 0 || tensor.shape[last] % UnitOf(tensor.dtype) == 0;
          const bool on_bytes = rows_on_bytes && random.OneIn(2);
          const Case made = RandomCase(random, tensor, on_bytes);
          SCOPED_TRACE(tensor.key + made.box.ToString() + " in " + made.container.ToString());
          FileSegments segments;
          const Status added = segments.AddBox(entry, made.box, made.container);
          if (!added.ok()) {
            ASSERT_EQ(added.code(), Code::kInvalidArgument);
            ASSERT_LT(InfoOf(tensor.dtype).bits, 8u) << added.message();
            ASSERT_FALSE(on_bytes) << added.message();
            ++refused;
            continue;
          }
          ++served;
          // Behind and before other segments, too.
          FileSegments mixed;
          mixed.AddLiteral(std::string("head"));
          mixed.AddTensor(entry);
          ASSERT_OK(mixed.AddBox(entry, made.box, made.container));
          mixed.AddLiteral(std::string("tail"));
          const std::string want = OracleContainer(tensor, made.box, made.container);
          CompareFile(random, *view->Serve(segments, "box", {}), want);
          CompareFile(random, *view->Serve(mixed, "mixed", {}),
                      "head" + tensor.bytes + want + "tail");
        }
      }
    }
  }
  EXPECT_GT(served, refused);
  EXPECT_GT(refused, 0);
}

TEST(ViewBoxes, BoxesThatDoNotFitAreRefused) {
  Random random(1);
  TempDir dir;
  BuildSpec spec = RandomSpec(random, 0, 0);
  spec.tensors.push_back(
      {.key = "w", .dtype = DType::kF32, .shape = {4, 6}, .bytes = random.Bytes(96)});
  spec.partitions.push_back({{Region(Box::Whole({4, 6}))}});
  spec.partitions.back().resize(static_cast<std::size_t>(spec.writers));
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(dir.Join("c")));
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, view->opened().index().Find("w"));
  FileSegments segments;
  const Box box = Box::Make({1, 2}, {2, 3}).value();
  const std::int64_t huge = std::int64_t{1} << 61;
  EXPECT_THAT(segments.AddBox(entry, box, {2}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(segments.AddBox(entry, box, {2, 2}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(segments.AddBox(entry, box, {2, huge}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(segments.AddBox(entry, Box::Make({3, 2}, {2, 3}).value(), {2, 3}),
              HasCode(Code::kInvalidArgument));
  EXPECT_EQ(segments.size(), 0u);
  EXPECT_TRUE(segments.segments().empty());
}

// Every read that needs a damaged chunk fails, however often it is tried; others go on.
TEST(ViewBoxes, DamageFailsEveryRead) {
  Random random(TestSeed());
  for (int round = 0; round < TestScale(6); ++round) {
    TempDir dir;
    BuildSpec spec;
    const std::int64_t rows = random.Int(8, 40);
    const std::int64_t columns = random.Int(8, 40);
    spec.tensors.push_back(
        {.key = "w", .dtype = DType::kF32, .shape = {rows, columns}, .bytes = {}});
    RandomTensor& tensor = spec.tensors.back();
    tensor.bytes = random.Bytes(static_cast<std::size_t>(rows * columns * 4));
    const std::int64_t cut = random.Int(1, columns - 1);
    spec.partitions.push_back({{Region(Box::Make({0, 0}, {rows, cut}).value())},
                               {Region(Box::Make({0, cut}, {rows, columns - cut}).value())}});
    ASSERT_OK_AND_ASSIGN(const BuiltCheckpoint built,
                         BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
    const std::string file = JoinPath(dir.Join("c"), "data/" + spec.uuid.Short() + "-r1.bin");
    // Behind 32 bytes that are no tensor's: a cell of the right half.
    FlipByte(file, 32 + static_cast<std::uint64_t>(random.Int(0, rows * (columns - cut) * 4 - 1)));
    const Box right = Box::Make({1, cut}, {3, columns - cut}).value();
    const Box left = Box::Make({1, 0}, {3, cut}).value();
    for (const ServeVerify verify : {ServeVerify::kFirst, ServeVerify::kAlways}) {
      ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(dir.Join("c"), verify));
      ASSERT_OK_AND_ASSIGN(const TensorEntry entry, view->opened().index().Find("w"));
      const auto serve = [&](const Box& box) {
        FileSegments segments;
        Dims container = box.extent();
        container[0] += 2;
        EXPECT_OK(segments.AddBox(entry, box, container));
        return view->Serve(std::move(segments), "box", {});
      };
      for (int i = 0; i < 3; ++i) {
        const FilePtr bad = serve(right);
        const Result<std::string> all = ReadRange(*bad, 0, 1 << 20);
        EXPECT_EQ(all.status().ToErrno(), EIO);
        EXPECT_THAT(all, HasMessage("tensor w"));
        // One cell of the leaf is as good as all of it.
        EXPECT_EQ(ReadRange(*bad, 4, 1).status().ToErrno(), EIO);
        EXPECT_TRUE(bad->Map(0, 1 << 20).empty());
        const FilePtr good = serve(left);
        Dims container = left.extent();
        container[0] += 2;
        EXPECT_THAT(ReadRange(*good, 0, 1 << 20),
                    IsOkAndHolds(OracleContainer(tensor, left, container)));
      }
      ASSERT_OK_AND_ASSIGN(const FilePtr whole, OpenPath(*view, "tensors/w"));
      EXPECT_EQ(ReadRange(*whole, 0, 1 << 20).status().ToErrno(), EIO);
      EXPECT_EQ(ReadRange(*whole, 0, 1 << 20).status().ToErrno(), EIO);
    }
  }
}

class ViewsTest : public testing::Test {
 protected:
  std::string Write(const TinySpec& spec) {
    EXPECT_OK(WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), "step-1", spec));
    return dir_.Join("store/step-1");
  }
  TempDir dir_;
};

// Names that views promise are there, and others are not.
TEST_F(ViewsTest, CheckpointJsonListsOnlyExistingPaths) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors.push_back({.key = "tiny", .dtype = DType::kF4, .shape = {8}});
  spec.tensors.push_back({.key = "wide", .dtype = DType::kC128, .shape = {2}});
  ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(Write(spec)));
  ASSERT_OK_AND_ASSIGN(const FilePtr file, OpenPath(*view, "checkpoint.json"));
  ASSERT_OK_AND_ASSIGN(const std::string text, ReadRange(*file, 0, 1 << 20));
  const nlohmann::json json = nlohmann::json::parse(text);
  std::vector<std::string> listed;
  ASSERT_OK(view->List({.slot = 3, .view = kOwnView, .item = kRootItem}, 0,
                       [&](const Child& child, std::uint64_t) {
                         listed.push_back(child.name);
                         return true;
                       }));
  EXPECT_EQ(json["views"], nlohmann::json(listed));
  for (const char* name : {"tensors", "objects", "npy", "extents", "model.safetensors",
                           "common.json", "checkpoint.json"}) {
    EXPECT_THAT(listed, testing::Contains(name));
  }
  EXPECT_EQ(json["not_in_safetensors"], nlohmann::json({"wide"}));
  // The type has no .npy, and the name is not there in this view alone.
  EXPECT_THAT(WalkPath(*view, "npy/tiny.npy"), HasCode(Code::kNotFound));
  EXPECT_OK(WalkPath(*view, "npy/bias.npy"));
  EXPECT_OK(WalkPath(*view, "tensors/tiny"));
}

// Every node of every view, by the numbers that listing it gave.
TEST_F(ViewsTest, ItemsAreStableOrStale) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors.push_back({.key = "a/b/c", .dtype = DType::kU8, .shape = {3}});
  ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(Write(spec)));
  ASSERT_OK_AND_ASSIGN(const ViewPtr again, OpenView(dir_.Join("store/step-1")));
  std::vector<Node> folders = {{.slot = 3, .view = kOwnView, .item = kRootItem}};
  std::size_t files = 0;
  std::map<std::uint64_t, std::string> inodes;
  while (!folders.empty()) {
    const Node folder = folders.back();
    folders.pop_back();
    ASSERT_OK(view->List(folder, 0, [&](const Child& child, std::uint64_t next) {
      EXPECT_NE(next, 0u);
      const std::string path = view->PathOf(child.node);
      EXPECT_TRUE(path.ends_with(child.name)) << path;
      const Result<Attributes> stat = view->Stat(child.node);
      EXPECT_OK(stat);
      if (!stat.ok()) return true;
      EXPECT_EQ(stat.value().inode, child.attributes.inode) << path;
      EXPECT_EQ(again->Stat(child.node).value().inode, child.attributes.inode) << path;
      EXPECT_TRUE(inodes.emplace(child.attributes.inode, path).second) << path;
      const Result<Child> found = view->Lookup(folder, child.name);
      EXPECT_TRUE(found.ok() && found.value().node == child.node) << path;
      if (child.attributes.kind == FileKind::kDirectory) {
        folders.push_back(child.node);
        EXPECT_EQ(view->OpenFile(child.node).status().ToErrno(), EISDIR) << path;
        return true;
      }
      ++files;
      EXPECT_EQ(
          view->List(child.node, 0, [](const Child&, std::uint64_t) { return true; }).ToErrno(),
          ENOTDIR)
          << path;
      EXPECT_EQ(view->Lookup(child.node, "x").status().ToErrno(), ENOTDIR) << path;
      const Result<FilePtr> file = view->OpenFile(child.node);
      EXPECT_OK(file);
      if (!file.ok()) return true;
      EXPECT_EQ(file.value()->size(), child.attributes.size) << path;
      EXPECT_EQ(file.value()->label(), path);
      return true;
    }));
  }
  EXPECT_GT(files, 3 * spec.tensors.size());
  for (std::uint8_t n = 0; n < kMaxViews; ++n) {
    for (const std::uint64_t item : {std::uint64_t{0xFFF} << 12, std::uint64_t{0xFFF0000001},
                                     (std::uint64_t{1} << 39) + 1, kMaxItems - 1}) {
      const Node node{.slot = 3, .view = n, .item = item};
      EXPECT_EQ(view->Stat(node).status().ToErrno(), ESTALE) << int{n} << " " << item;
      EXPECT_FALSE(view->OpenFile(node).ok());
      EXPECT_FALSE(view->Lookup(node, "x").ok());
    }
  }
}

// The kernel may keep the number of a slice of a checkpoint that another one has replaced.
TEST_F(ViewsTest, ForgottenItemNumbersAreNeverReused) {
  const auto items = std::make_shared<SliceItems>();
  ASSERT_OK_AND_ASSIGN(const ViewPtr view,
                       OpenView(Write(DefaultTinySpec()), ServeVerify::kOff, items));
  ASSERT_OK_AND_ASSIGN(const Node slice, WalkPath(*view, "slices/bias[0:4]"));
  EXPECT_EQ(slice.view, CheckpointView::kSlicesView);
  ASSERT_OK(view->Stat(slice));
  ASSERT_OK_AND_ASSIGN(const ViewPtr again, OpenView(dir_.Join("store/step-1")));
  EXPECT_EQ(again->Stat(slice).status().ToErrno(), ESTALE);
  ASSERT_OK_AND_ASSIGN(const Node other, WalkPath(*again, "slices/bias[4:8]"));
  EXPECT_NE(other.item, slice.item);
  EXPECT_OK(again->Stat(other));
  EXPECT_OK(WalkPath(*view, "slices/bias[0:4]"));  // A second reference.
  items->Forget(slice.item, 1);
  EXPECT_OK(view->Stat(slice));
  items->Forget(slice.item, 1);
  EXPECT_EQ(view->Stat(slice).status().ToErrno(), ESTALE);
  EXPECT_EQ(view->OpenFile(slice).status().ToErrno(), ESTALE);
}

TEST_F(ViewsTest, BackingFileEqualsTheShownFile) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors.push_back(
      {.key = "both", .dtype = DType::kU8, .shape = {8, 4}, .parts = 2, .tensor_file = true});
  ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(Write(spec)));
  int whole = 0;
  for (const TinyTensor& tensor : spec.tensors) {
    ASSERT_OK_AND_ASSIGN(const FilePtr file, OpenPath(*view, "tensors/" + tensor.key));
    const Result<std::string> path = file->BackingPath();
    if (!tensor.tensor_file) {
      EXPECT_THAT(path, HasCode(Code::kNotFound)) << tensor.key;
      continue;
    }
    ++whole;
    ASSERT_OK(path);
    EXPECT_TRUE(ReadWholeFile(path.value()) == TinyBytes(tensor)) << tensor.key;
    ASSERT_OK_AND_ASSIGN(const FilePtr npy, OpenPath(*view, "npy/" + tensor.key + ".npy"));
    EXPECT_THAT(npy->BackingPath(), HasCode(Code::kNotFound));
  }
  EXPECT_EQ(whole, 2);
  for (const char* name : {"model.safetensors", "common.json", "checkpoint.json", "objects/config",
                           "extents/bias.json"}) {
    ASSERT_OK_AND_ASSIGN(const FilePtr file, OpenPath(*view, name));
    EXPECT_THAT(file->BackingPath(), HasCode(Code::kNotFound)) << name;
  }
}

// Replaces the first table row of a tensor in the index by bytes that cannot be a row, and puts the
// new index into COMMIT.
void SpoilExtents(const std::string& checkpoint, std::uint32_t ordinal) {
  FileSystem& fs = HostFileSystem();
  const std::string path = checkpoint + "/" + std::string(kIndexName);
  std::vector<std::pair<std::string, std::string>> all;
  SstIdentity identity;
  {
    ASSERT_OK_AND_ASSIGN(const auto table, SstTable::Open(fs, path));
    identity = table->identity();
    ASSERT_OK(table->Scan("", "", [&](std::string_view key, std::string_view value) {
      all.emplace_back(key, value);
      return true;
    }));
  }
  const std::string wanted = index_record::Key(index_record::kExtents, ordinal, 0);
  bool changed = false;
  for (auto& [key, value] : all) {
    if (key != wanted) continue;
    value.assign(value.size(), '\xff');
    changed = true;
  }
  ASSERT_TRUE(changed);
  ASSERT_OK(fs.RemoveFile(path));
  ASSERT_OK_AND_ASSIGN(
      CommitRecord::Entry entry,
      SstTable::Write(fs, path, [&](const SstTable::Emit& emit) -> Result<SstIdentity> {
        for (const auto& [key, value] : all) TENSORMOUNT_RETURN_IF_ERROR(emit(key, value));
        return identity;
      }));
  entry.name = std::string(kIndexName);
  ASSERT_OK_AND_ASSIGN(DecodedCommit commit,
                       DecodeCommit(ReadWholeFile(checkpoint + "/COMMIT"), "COMMIT"));
  for (CommitRecord::Entry& file : commit.record.files) {
    if (file.name == kIndexName) file = entry;
  }
  ASSERT_OK(fs.RemoveFile(checkpoint + "/COMMIT"));
  WriteWholeFile(checkpoint + "/COMMIT", EncodeCommit(commit.record));
}

TEST_F(ViewsTest, DamagedExtentsAreNamedAndTheOthersAreListed) {
  const std::string checkpoint = Write(DefaultTinySpec());
  std::uint32_t ordinal = 0;
  {
    ASSERT_OK_AND_ASSIGN(const auto opened,
                         OpenedCheckpoint::Open(HostFileSystem(), checkpoint, {}));
    ASSERT_OK_AND_ASSIGN(const TensorEntry bias, opened->index().Find("bias"));
    ordinal = bias.ordinal;
  }
  SpoilExtents(checkpoint, ordinal);
  ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(checkpoint));
  ASSERT_OK_AND_ASSIGN(const Node tensors, WalkPath(*view, "tensors"));
  ASSERT_OK_AND_ASSIGN(const Node extents, WalkPath(*view, "extents"));
  const auto names = [&](const Node& folder) {
    std::vector<std::string> all;
    EXPECT_OK(view->List(folder, 0, [&](const Child& child, std::uint64_t) {
      all.push_back(child.name);
      return true;
    }));
    return all.size();
  };
  EXPECT_EQ(names(extents), names(tensors));
  ASSERT_OK_AND_ASSIGN(const FilePtr file, OpenPath(*view, "extents/bias.json"));
  ASSERT_OK_AND_ASSIGN(const std::string text, ReadRange(*file, 0, 1 << 20));
  const nlohmann::json json = nlohmann::json::parse(text);
  EXPECT_EQ(json.at("key"), "bias");
  EXPECT_THAT(json.at("error").get<std::string>(), testing::HasSubstr("DATA_LOSS"));
}

// A foreign file is its own model.safetensors, whatever the order of its tensors and its metadata.
TEST_F(ViewsTest, ForeignSafetensorsFileIsServedUnchanged) {
  std::vector<SafetensorsEntry> entries = {{.key = "z", .dtype = DType::kU8, .shape = {5}},
                                           {.key = "none", .dtype = DType::kF32, .shape = {0}},
                                           {.key = "a", .dtype = DType::kF64, .shape = {2, 2}},
                                           {.key = "m", .dtype = DType::kI16, .shape = {3}}};
  ASSERT_OK_AND_ASSIGN(const std::string header,
                       MakeSafetensorsHeader(entries, {{"who", "somebody"}}));
  Random random(3);
  const std::string bytes = header + random.Bytes(5 + 32 + 6);
  const std::string path = dir_.Join("model.safetensors");
  WriteWholeFile(path, bytes);
  ASSERT_OK_AND_ASSIGN(const ViewPtr view,
                       CheckpointView::OpenForeign(HostFileSystem(), path, {}, {.slot = 3}));
  ASSERT_OK_AND_ASSIGN(const FilePtr file, OpenPath(*view, "model.safetensors"));
  EXPECT_THAT(ReadRange(*file, 0, 1 << 20), IsOkAndHolds(bytes));
  EXPECT_THAT(file->BackingPath(), IsOkAndHolds(path));
  EXPECT_THAT(file->BackingPath(), IsOkAndHolds(path));  // From what was found the first time.
  ASSERT_OK_AND_ASSIGN(const FilePtr tensor, OpenPath(*view, "tensors/a"));
  EXPECT_THAT(tensor->BackingPath(), HasCode(Code::kNotFound));
  // Another header of the same length: no longer the same bytes.
  std::string other = bytes;
  other[other.find("somebody")] = 'X';
  WriteWholeFile(path, other);
  ASSERT_OK_AND_ASSIGN(const ViewPtr fresh,
                       CheckpointView::OpenForeign(HostFileSystem(), path, {}, {.slot = 3}));
  ASSERT_OK_AND_ASSIGN(const FilePtr opened, OpenPath(*fresh, "model.safetensors"));
  WriteWholeFile(path, bytes);
  EXPECT_THAT(opened->BackingPath(), HasCode(Code::kStale));
}

TEST_F(ViewsTest, WholeFilesAreVerifiedOnce) {
  TinySpec spec;
  spec.tensors.push_back(
      {.key = "big", .dtype = DType::kU8, .shape = {3000000}, .seed = 5, .tensor_file = true});
  const std::string object =
      TinyBytes({.key = "o", .dtype = DType::kU8, .shape = {150000}, .seed = 6});
  spec.objects.push_back({.key = "blob", .bytes = object});
  const std::string folder = Write(spec);
  const auto flip = [&](const std::string& part) {
    ASSERT_OK_AND_ASSIGN(const auto files, HostFileSystem().List(folder + "/data"));
    for (const DirectoryEntry& entry : files) {
      const std::string path = folder + "/data/" + entry.name;
      const std::size_t at = ReadWholeFile(path).find(part);
      if (at != std::string::npos) return FlipByte(path, at);
    }
    FAIL() << "no data file holds these bytes";
  };
  const std::string bytes = TinyBytes(spec.tensors[0]);
  for (const ServeVerify verify : kModes) {
    ASSERT_OK_AND_ASSIGN(const ViewPtr view, OpenView(folder, verify));
    for (const auto& [path, part] : {std::pair("tensors/big", bytes.substr(2500000, 64)),
                                     std::pair("objects/blob", object.substr(140000, 64))}) {
      SCOPED_TRACE(path);
      ASSERT_OK_AND_ASSIGN(const FilePtr file, OpenPath(*view, path));
      const auto prove = [&](const VirtualFile::Proceed& proceed = {}) -> Status {
        TENSORMOUNT_ASSIGN_OR_RETURN(const VirtualFile::Backing backing, file->OpenBacking());
        return file->Prove(backing, proceed);
      };
      const auto proof = [&] { return file->ProofOf(file->OpenBacking().value()).value(); };
      EXPECT_TRUE(proof().hashed);
      EXPECT_EQ(proof().unverified_bytes, file->size());
      int asked = 0;
      if (std::string(path) == "tensors/big") {
        const auto second = [&](std::uint64_t done) { return done < (1u << 20); };
        EXPECT_THAT(prove(second), HasCode(Code::kCancelled));
        EXPECT_FALSE(proof().whole);
        EXPECT_EQ(proof().unverified_bytes, file->size() - (1u << 20));
      }
      EXPECT_OK(prove());
      EXPECT_TRUE(proof().whole);
      EXPECT_EQ(proof().unverified_bytes, 0u);
      // Once seen good it is not read again, until the file changes.
      EXPECT_OK(prove([&](std::uint64_t) { return ++asked == 0; }));
      EXPECT_EQ(asked, 0);
      flip(part);
      EXPECT_FALSE(proof().whole);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(prove().ToErrno(), EIO);
      std::string damaged = part;
      damaged[0] = static_cast<char>(damaged[0] ^ 0x40);
      flip(damaged);
      EXPECT_OK(prove());  // What failed was not taken for good.
    }
  }
}

}  // namespace
}  // namespace tensormount::fs
