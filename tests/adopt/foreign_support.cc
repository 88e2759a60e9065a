// SPDX-License-Identifier: Apache-2.0
#include "tests/adopt/foreign_support.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>

#include "base/coding.h"
#include "tests/support/status_matchers.h"
#include "tests/support/unmapped_file.h"

namespace tensormount {
namespace {

// Is cut to nothing once somebody has asked for its descriptor.
class CutFile : public UnmappedFile {
 public:
  using UnmappedFile::UnmappedFile;
  int descriptor() const override {
    asked_ = true;
    return base_->descriptor();
  }
  Result<FileInfo> Stat() override {
    const Result<FileInfo> info = base_->Stat();
    if (asked_) (void)!truncate(path().c_str(), 0);
    return info;
  }

 private:
  mutable std::atomic<bool> asked_{false};
};

std::size_t At(std::int64_t n) { return static_cast<std::size_t>(n); }

// Calls fn(coordinates, elements) for the first element of every row of a box, in row-major order.
template <typename Fn>
void ForEachRow(const Box& box, Fn fn) {
  if (box.empty()) return;
  Dims at = box.begin();
  const int last = box.rank() - 1;
  const std::int64_t elements = last < 0 ? 1 : box.end(last) - box.begin(last);
  while (true) {
    fn(at, elements);
    int a = last - 1;
    for (; a >= 0; --a) {
      if (++at[a] < box.end(a)) break;
      at[a] = box.begin(a);
    }
    if (a < 0) return;
  }
}

std::size_t Linear(const Dims& at, const Dims& shape) {
  std::int64_t n = 0;
  for (int a = 0; a < shape.rank(); ++a) n = n * shape[a] + at[a];
  return At(n);
}

}  // namespace

Result<std::unique_ptr<File>> UnmappedFileSystem::OpenReadBeneath(const std::string& directory,
                                                                  const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                               HostFileSystem().OpenReadBeneath(directory, name));
  return std::unique_ptr<File>(std::make_unique<UnmappedFile>(std::move(file)));
}

Result<std::unique_ptr<File>> CutFileSystem::OpenReadBeneath(const std::string& directory,
                                                             const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                               HostFileSystem().OpenReadBeneath(directory, name));
  return std::unique_ptr<File>(std::make_unique<CutFile>(std::move(file)));
}

Status HandMade::Resolver::Resolve(const TensorMeta&, File& file, ChunkRecord& chunk) const {
  ++calls;
  if (!failure.ok()) return failure;
  char byte = 0;  // Items are really looked at.
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(0, &byte, 1));
  const ChunkRecord& item = items.at(chunk.offset);
  chunk.offset = item.offset;
  chunk.length = item.length;
  chunk.strides = item.strides;
  return Status();
}

HandMade::HandMade(const std::string& root, Random& random, std::vector<std::uint64_t> sizes)
    : root_(root) {
  EXPECT_OK(HostFileSystem().CreateDirectories(JoinPath(root, "part")));
  inventory_.info.uuid = Uuid::Random();
  inventory_.info.producer = "by hand";
  inventory_.info.world_size = 1;
  inventory_.info.self_contained = false;
  inventory_.info.root = root;
  for (std::size_t f = 0; f < sizes.size(); ++f) {
    FileRecord record;
    record.name = "part/" + std::to_string(f) + ".bin";
    record.placement = Placement::kForeign;
    files_.push_back(random.Bytes(sizes[f]));
    WriteWholeFile(JoinPath(root, record.name), files_.back());
    const FileInfo info = HostFileSystem().Stat(JoinPath(root, record.name)).value();
    record.length = info.size;
    record.mtime_seconds = info.mtime_seconds;
    record.mtime_nanoseconds = info.mtime_nanoseconds;
    inventory_.files.push_back(record);
  }
}

std::string HandMade::FilePath(std::uint32_t file) const {
  return JoinPath(root_, inventory_.files[file].name);
}

void HandMade::Add(const std::string& key, DType dtype, const Dims& shape,
                   std::vector<Window> windows) {
  TensorRecord& tensor =
      inventory_.tensors.emplace_back(TensorMeta::Make(key, dtype, shape).value());
  std::string bytes(tensor.meta.bytes(), '\0');
  const std::int64_t element = InfoOf(dtype).bits / 8;
  for (const Window& window : windows) {
    ChunkRecord chunk;
    chunk.region = window.region;
    chunk.file = window.file;
    chunk.offset = window.offset;
    chunk.strides = window.strides;
    chunk.has_hash = false;
    const std::string& file = files_[window.file];
    std::int64_t packed = 0;
    std::int64_t end = 0;
    for (const Box& box : window.region.Boxes()) {
      ForEachRow(box, [&](const Dims& at, std::int64_t elements) {
        std::int64_t from = packed * element;
        std::int64_t step = element;
        packed += elements;
        if (window.strides.rank() > 0) {
          from = 0;
          for (int a = 0; a < box.rank(); ++a) from += (at[a] - box.begin(a)) * window.strides[a];
          if (box.rank() > 0) step = window.strides[box.rank() - 1];
        }
        end = std::max(end, from + (elements - 1) * step + element);
        const char* source = file.data() + window.offset + from;
        char* target = bytes.data() + Linear(at, shape) * At(element);
        for (std::int64_t i = 0; i < elements; ++i) {
          std::memcpy(target + i * element, source + i * step, At(element));
        }
      });
    }
    chunk.length = static_cast<std::uint64_t>(end);
    if (window.pending) {
      const std::uint64_t item = resolver_->items.size();
      resolver_->items[item] = chunk;
      chunk.pending = true;
      chunk.offset = item;
      chunk.length = 1;
      chunk.strides = Dims();
    }
    tensor.extents.Append(chunk);
  }
  tensor.extents.Sort();
  bytes_[key] = std::move(bytes);
}

void HandMade::AddObject(const std::string& key, std::uint32_t file, std::uint64_t offset,
                         std::uint64_t length) {
  ObjectRecord object;
  object.key = key;
  object.file = file;
  object.offset = offset;
  object.length = length;
  object.manifest = kNoManifest;
  inventory_.objects.push_back(object);
}

ForeignInventory HandMade::Found() const {
  ForeignInventory found;
  found.inventory = inventory_;
  found.resolver = [resolver = resolver_](const TensorMeta& meta, File& file, ChunkRecord& chunk) {
    return resolver->Resolve(meta, file, chunk);
  };
  std::sort(
      found.inventory.tensors.begin(), found.inventory.tensors.end(),
      [](const TensorRecord& a, const TensorRecord& b) { return a.meta.key() < b.meta.key(); });
  return found;
}

Result<std::shared_ptr<OpenedCheckpoint>> HandMade::Open(FileSystem& fs) const {
  return OpenedCheckpoint::OpenForeign(fs, Found(), root_, {});
}

void AddManyKinds(HandMade& made) {
  const auto whole = [](const Dims& shape) { return Region(Box::Whole(shape)); };
  const auto box = [](const Dims& begin, const Dims& extent) {
    return Region(Box::Make(begin, extent).value());
  };
  made.Add("scalar", DType::kF64, {}, {{whole({}), 1, 7, {}}});
  made.Add("packed", DType::kF32, {30, 41}, {{whole({30, 41}), 0, 1001, {}}});
  made.Add("transposed", DType::kF32, {37, 53}, {{whole({37, 53}), 0, 16, {4, 37 * 4}}});
  made.Add("permuted", DType::kBF16, {5, 7, 11}, {{whole({5, 7, 11}), 1, 9, {2, 110, 10}}});
  made.Add("padded", DType::kI16, {6, 10}, {{whole({6, 10}), 1, 3, {32, 2}}});
  made.Add("spread", DType::kU8, {6, 10}, {{whole({6, 10}), 1, 3, {100, 3}}});
  made.Add("one row for all", DType::kF32, {9, 8}, {{whole({9, 8}), 1, 64, {0, 4}}});
  made.Add("one for all", DType::kF64, {4, 5}, {{whole({4, 5}), 1, 640, {0, 0}}});
  // Rows that overlap: a sliding window.
  made.Add("sliding", DType::kI32, {20, 8}, {{whole({20, 8}), 1, 4096, {4, 4}}});
  made.Add("shared a", DType::kF32, {10, 10}, {{whole({10, 10}), 1, 8192, {40, 4}}});
  made.Add("shared b", DType::kF32, {10, 10}, {{whole({10, 10}), 1, 8212, {4, 40}}});
  made.Add("two", DType::kF32, {64, 32},
           {{box({0, 0}, {40, 32}), 0, 400, {4, 160}}, {box({40, 0}, {24, 32}), 1, 12000, {}}});
  made.Add("columns", DType::kU16, {50, 60},
           {
               {box({0, 0}, {50, 20}), 0, 77, {2, 100}},
               {box({0, 20}, {50, 40}), 1, 100, {}},
           });
  made.Add("flat", DType::kI32, {11, 13},
           {{Region::Flat(Box::Whole({11, 13}), 0, 40).value(), 1, 20000, {}},
            {Region::Flat(Box::Whole({11, 13}), 40, 103).value(), 0, 20000, {}}});
  // Past what is read at once.
  made.Add("large", DType::kF32, {600, 700}, {{whole({600, 700}), 0, 5, {4, 2400}}});
  made.Add("large planes", DType::kU8, {2, 1200, 1000},
           {{whole({2, 1200, 1000}), 0, 11, {1200000, 1, 1200}}});
  made.Add("large long runs", DType::kU8, {3, 5, 120000},
           {{whole({3, 5, 120000}), 0, 100, {120000, 360000, 1}}});
  made.Add("large padded", DType::kF32, {900, 256}, {{whole({900, 256}), 0, 50, {1600, 4}}});
  made.Add("pending", DType::kF32, {20, 30}, {{whole({20, 30}), 0, 256, {4, 80}, true}});
  made.Add("pending packed", DType::kF32, {20, 30},
           {{box({0, 0}, {10, 30}), 0, 512, {}, true},
            // The strides of packed rows are as good as none.
            {box({10, 0}, {10, 30}), 1, 512, {120, 4}, true}});
  made.AddObject("object", 1, 1000, 70000);
}

void CompareWithHandMade(Random& random, const OpenedCheckpoint& opened, const HandMade& made,
                         int reads) {
  for (const auto& [key, bytes] : made.all_bytes()) {
    SCOPED_TRACE(key);
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened.index().Find(key));
    const TensorMeta& meta = entry.meta;
    const Dims& shape = meta.shape();
    const std::size_t element = meta.bits() / 8;
    for (int n = 0; n <= reads; ++n) {
      const auto verify = static_cast<ReadVerify>(n % 3);
      Dims begin;
      Dims extent;
      for (int a = 0; a < shape.rank(); ++a) {
        const std::int64_t from = n == 0 ? 0 : random.Int(0, shape[a] - 1);
        begin.push_back(from);
        extent.push_back(n == 0 ? shape[a] : random.Int(1, shape[a] - from));
      }
      const Box box = Box::Make(begin, extent).value();
      std::string want;
      ForEachRow(box, [&, &bytes = bytes](const Dims& at, std::int64_t elements) {
        want.append(bytes, Linear(at, shape) * element, At(elements) * element);
      });
      std::string got(want.size(), '?');
      ReadStats stats;
      Crc64 digest = 0;
      ASSERT_OK(opened.Read(entry, Region(box), BufferView::Host(meta.dtype(), got.data(), extent),
                            verify, &stats, &digest));
      ASSERT_EQ(got, want) << box.ToString();
      ASSERT_EQ(stats.bytes_wanted, want.size());
      ASSERT_LE(stats.bytes_by_leaf, want.size());
      if (n == 0) {
        ASSERT_EQ(digest, Crc64Extend(0, bytes.data(), bytes.size()));
      }
      const auto size = static_cast<std::int64_t>(bytes.size());
      const std::int64_t first = random.Int(0, size - 1);
      const std::size_t count = At(random.Int(1, std::min<std::int64_t>(size - first, 200000)));
      got.assign(count, '?');
      ASSERT_OK(opened.ReadBytes(entry, static_cast<std::uint64_t>(first), got.data(), count,
                                 verify, &stats));
      ASSERT_EQ(got, bytes.substr(At(first), count));
      ASSERT_OK_AND_ASSIGN(
          const auto mapped,
          opened.MapBytes(entry, static_cast<std::uint64_t>(first), count, ReadVerify::kOff));
      EXPECT_TRUE(mapped.empty());
    }
  }
}

}  // namespace tensormount
