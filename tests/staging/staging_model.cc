// SPDX-License-Identifier: Apache-2.0
#include "tests/staging/staging_model.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "shard/chunk_accumulator.h"
#include "tests/support/cells.h"
#include "tests/support/status_matchers.h"

namespace tensormount::fs {
namespace {

// Where each byte of a target stands in its tensor.
std::vector<std::uint64_t> Positions(const TensorMeta& meta, const Box& box) {
  const Result<Region> region = ByteRegion(meta.dtype(), meta.shape(), box);
  if (!region.ok()) return {};
  std::vector<std::uint64_t> positions(static_cast<std::size_t>(region.value().volume()));
  ForEachCellRow(ByteShape(meta.dtype(), meta.shape()), region.value(),
                 [&](std::int64_t position, std::int64_t element, std::int64_t length) {
                   std::uint64_t* const row = positions.data() + position;
                   std::iota(row, row + length, static_cast<std::uint64_t>(element));
                 });
  return positions;
}

}  // namespace

Staging MakeTestStaging(FileSystem& fs, const std::string& directory) {
  for (const char* name : {"", "/data", "/manifest", "/journal"}) {
    EXPECT_OK(fs.CreateDirectory(directory + name));
  }
  Staging staging;
  staging.directory = directory;
  staging.name = "step";
  staging.uuid = {0x1111222233334444, 0x5555666677778888};
  return staging;
}

std::string JournalPath(const Staging& staging) {
  return staging.directory + "/journal/" + kTestIncarnation + ".tmj";
}

void KnownBytes::Write(std::uint64_t at, std::string_view data) {
  bytes.replace(at, data.size(), data);
  std::fill_n(known.begin() + static_cast<std::ptrdiff_t>(at), data.size(), '\1');
}

void KnownBytes::Forget(std::uint64_t begin, std::uint64_t end) {
  std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
            bytes.begin() + static_cast<std::ptrdiff_t>(end), '\0');
  std::fill(known.begin() + static_cast<std::ptrdiff_t>(begin),
            known.begin() + static_cast<std::ptrdiff_t>(end), '\0');
}

std::uint64_t KnownBytes::count() const {
  return static_cast<std::uint64_t>(std::ranges::count(known, '\1'));
}

std::vector<ByteRange> KnownBytes::Ranges() const {
  std::vector<ByteRange> ranges;
  for (std::size_t at = known.find('\1'); at != std::string::npos;) {
    const std::size_t end = std::min(known.find('\0', at), known.size());
    ranges.push_back({at, end});
    at = end < known.size() ? known.find('\1', end) : std::string::npos;
  }
  return ranges;
}

std::string TargetName(const std::string& key, const Box& box) { return key + box.ToString(); }
std::string ObjectName(const std::string& key, const Dims& index) { return key + index.ToString(); }

StagedInventory Resolve(FileSystem& fs, const std::string& directory, const Journal& journal,
                        const std::vector<TensorMeta>& tensors) {
  StagedInventory inventory;
  struct Target {
    std::string name;
    std::vector<std::uint64_t> positions;
    std::uint64_t tensor_bytes = 0;
  };
  std::vector<Target> targets;
  std::vector<std::string> files;
  const auto read = [&](std::uint32_t file, std::uint64_t offset, std::uint64_t length) {
    std::string data(length, '\0');
    const auto opened = fs.OpenRead(directory + "/" + files[file]);
    EXPECT_OK(opened);
    if (opened.ok()) {
      EXPECT_OK(opened.value()->ReadExactAt(offset, data.data(), length));
    }
    return data;
  };
  const auto check_leaves = [](const std::string& data, const std::vector<Hash128>& leaves) {
    EXPECT_EQ(HashChunk(data.data(), data.size()).leaves, leaves);
  };
  for (const JournalRecord& record : journal.records) {
    switch (record.kind) {
      case JournalRecord::Kind::kFile:
        files.push_back(record.file_name);
        break;
      case JournalRecord::Kind::kTarget: {
        const auto meta = std::ranges::find(tensors, record.target.key, &TensorMeta::key);
        if (meta == tensors.end()) {
          ADD_FAILURE() << "tensor " << record.target.key;
          return inventory;
        }
        targets.push_back({TargetName(record.target.key, record.target.box),
                           Positions(*meta, record.target.box), meta->bytes()});
        EXPECT_EQ(targets.back().positions.size(), record.end);
        inventory.targets.try_emplace(targets.back().name, record.end);
        break;
      }
      case JournalRecord::Kind::kExtent: {
        const StagedExtent& e = record.extent;
        ++inventory.extents;
        const std::string data = read(e.file, e.offset, e.bytes());
        check_leaves(data, e.leaves);
        const Target& target = targets[e.target];
        Crc64 contribution = 0;
        for (std::uint64_t i = 0; i < e.runs; ++i) {
          const std::uint64_t at = e.begin + i * e.stride;
          const std::string_view run = std::string_view(data).substr(i * e.length, e.length);
          inventory.targets[target.name].Write(at, run);
          for (std::uint64_t from = 0; from < e.length;) {
            std::uint64_t to = from + 1;
            while (to < e.length &&
                   target.positions[at + to] == target.positions[at + to - 1] + 1) {
              ++to;
            }
            contribution ^= Crc64Shift(target.tensor_bytes - target.positions[at + to - 1] - 1)
                                .Apply(Crc64Extend(0, run.data() + from, to - from));
            from = to;
          }
        }
        EXPECT_EQ(contribution, e.contribution);
        break;
      }
      case JournalRecord::Kind::kForget:
        inventory.targets[targets[record.number].name].Forget(record.begin, record.end);
        break;
      case JournalRecord::Kind::kObject: {
        const StagedObject& o = record.object;
        std::string data = o.length == 0 ? "" : read(o.file, o.offset, o.length);
        check_leaves(data, o.leaves);
        inventory.objects[ObjectName(o.key, o.index)] = std::move(data);
        break;
      }
      case JournalRecord::Kind::kRemoveObject:
        inventory.objects.erase(ObjectName(record.object.key, record.object.index));
        break;
      case JournalRecord::Kind::kCondemn:
        inventory.condemned.push_back(record.file_name);
        break;
    }
  }
  return inventory;
}

}  // namespace tensormount::fs
