// SPDX-License-Identifier: Apache-2.0
// Reads bytes of stored ranges from another checkpoint: from the same file if the other checkpoint
// has it, or from the cells of tensors, whatever the sharding and format of the other checkpoint.
// If the other checkpoint does not have the file, safetensors headers are rebuilt from the records.
#include "index/store/repair_source.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/errors.h"
#include "shard/chunk_accumulator.h"
#include "shard/leaf_hash.h"
#include "shard/safetensors.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

// A chunk of a safetensors file, as listed in its header.
struct ShardEntry {
  std::uint64_t offset = 0;
  std::uint32_t tensor = 0;
  ChunkRecord chunk;
  std::uint32_t part = 0;  // The n of KEY#n.
};

// The rank in the name of a rank shard: 12 for "data/1f00abcd-r12.safetensors". Other names get a
// number that sorts last.
std::uint64_t RankOfShard(const std::string& name) {
  const std::size_t at = name.rfind("-r");
  std::uint64_t rank = UINT64_MAX;
  if (at != std::string::npos) {
    (void)std::from_chars(name.data() + at + 2, name.data() + name.size(), rank);
  }
  return rank;
}

// The short uuid in "data/<short uuid>-...".
std::string_view WriterInName(std::string_view name) {
  constexpr std::string_view kData = "data/";
  if (!name.starts_with(kData)) return {};
  name.remove_prefix(kData.size());
  return name.substr(0, name.find('-'));
}

}  // namespace

Result<std::unique_ptr<RepairSource>> RepairSource::Make(std::shared_ptr<OpenedCheckpoint> other,
                                                         const Inventory& inventory,
                                                         const CommitRecord& commit,
                                                         const std::set<Uuid>& writers) {
  std::unique_ptr<RepairSource> source(
      new RepairSource(std::move(other), inventory, commit, writers));
  TENSORMOUNT_ASSIGN_OR_RETURN(source->objects_, source->other_->index().Objects());
  return source;
}

Status RepairSource::Read(Way way, const ScanRange& range, std::uint64_t at, std::byte* out,
                          std::size_t size) {
  if (way == Way::kSameFile) return ReadSameFile(range, at, out, size);
  switch (range.kind) {
    case ScanRange::Kind::kChunk:
      return ReadTensor(range, at, out, size);
    case ScanRange::Kind::kObject:
      return ReadObject(inventory_.objects[range.owner], at, out, size);
    case ScanRange::Kind::kExtra:
      break;
  }
  return ReadHeader(range, at, out, size);
}

Status RepairSource::ReadSameFile(const ScanRange& range, std::uint64_t at, std::byte* out,
                                  std::size_t size) {
  if (open_number_ != range.file) {
    const CommitRecord::Entry* own = commit_.Find(inventory_.files[range.file].name);
    const DecodedCommit* commit = other_->commit();
    const CommitRecord::Entry* there =
        own == nullptr || commit == nullptr ? nullptr : commit->record.Find(own->name);
    if (there == nullptr || there->length != own->length || there->hash != own->hash) {
      return Status(Code::kNotFound, "the other checkpoint has no such file");
    }
    const std::vector<FileRecord>& files = other_->index().files();
    const auto found = std::find_if(files.begin(), files.end(),
                                    [&](const FileRecord& f) { return f.name == own->name; });
    if (found == files.end())
      return Status(Code::kNotFound, "the other checkpoint has no such file");
    TENSORMOUNT_ASSIGN_OR_RETURN(
        open_, other_->OpenFile(static_cast<std::uint32_t>(found - files.begin())));
    open_number_ = range.file;
  }
  return open_->ReadExactAt(range.offset + at, out, size);
}

Status RepairSource::ReadTensor(const ScanRange& range, std::uint64_t at, std::byte* out,
                                std::size_t size) {
  const TensorRecord& tensor = inventory_.tensors[range.owner];
  const TensorMeta& meta = tensor.meta;
  const Result<TensorEntry> entry = other_->index().Find(meta.key());
  if (entry.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, "the other checkpoint has no tensor of this name");
  }
  TENSORMOUNT_RETURN_IF_ERROR(entry.status());
  const TensorMeta& there = entry.value().meta;
  if (there.dtype() != meta.dtype() || !(there.shape() == meta.shape())) {
    return Status(Code::kNotFound, "the tensor of the other checkpoint is " +
                                       std::string(InfoOf(there.dtype()).name) + " " +
                                       there.shape().ToString() + ", not " +
                                       std::string(InfoOf(meta.dtype()).name) + " " +
                                       meta.shape().ToString());
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, tensor.extents.At(range.row));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                               ByteRegion(meta.dtype(), meta.shape(), chunk.region));
  const auto all = static_cast<std::uint64_t>(bytes.volume());
  if (!RangeWithin(at, size, all))
    return DataLoss("the chunk of the other checkpoint is longer than its region");
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Region part,
      Region::Flat(bytes.box(), bytes.flat_first() + static_cast<std::int64_t>(at),
                   static_cast<std::int64_t>(size)));
  ReadStats stats;
  return other_->ReadPlaced(entry.value(), PlacePacked(part, 0), out, ReadVerify::kOff, stats,
                            nullptr);
}

Status RepairSource::ReadObject(const ObjectRecord& object, std::uint64_t at, std::byte* out,
                                std::size_t size) const {
  const auto found = std::find_if(objects_.begin(), objects_.end(), [&](const ObjectRecord& o) {
    return o.key == object.key && o.index == object.index;
  });
  if (found == objects_.end())
    return Status(Code::kNotFound, "the other checkpoint has no such object");
  if (found->length != object.length) {
    return Status(Code::kNotFound, "the object of the other checkpoint has " +
                                       std::to_string(found->length) + " bytes, not " +
                                       std::to_string(object.length));
  }
  return other_->ReadObject(*found, at, out, size, ReadVerify::kOff);
}

// Reads bytes of a header, which is built once for the whole range and kept in headers_.
Status RepairSource::ReadHeader(const ScanRange& range, std::uint64_t at, std::byte* out,
                                std::size_t size) {
  const auto [made, fresh] = headers_.try_emplace(range.owner);
  if (fresh) made->second = MakeHeader(range);
  const std::string& header = made->second;
  if (header.empty()) {
    return Status(Code::kNotFound,
                  "these bytes belong to no tensor of this checkpoint: only a copy of it has them");
  }
  if (!RangeWithin(at, size, header.size()))
    return DataLoss("the range is not within the header that this checkpoint's records describe");
  std::memcpy(out, header.data() + at, size);
  return Status();
}

std::string RepairSource::MakeHeader(const ScanRange& range) const {
  const FileRecord& file = inventory_.files[range.file];
  const Hash128& wanted = inventory_.extras[range.owner].hash;
  const auto is_it = [&](const std::string& header) {
    return header.size() == range.length && HashChunk(header.data(), header.size()).root == wanted;
  };
  if (range.offset != 0) return {};
  if (file.placement == Placement::kSafetensors) {
    std::string header = ModelHeader(range.file);
    return is_it(header) ? header : std::string();
  }
  if (file.placement != Placement::kRankShard) return {};
  for (const Uuid& writer : writers_) {
    if (writer.Short() != WriterInName(file.name)) continue;
    for (const bool by_row : {false, true}) {
      std::string header = ShardHeader(range.file, writer, by_row);
      if (is_it(header)) return header;
    }
  }
  return {};
}

// The header of a rank shard, as DataWriter of collective/save writes it. The n of KEY#n counts a
// tensor's chunks in the order of the save's plan. This is mostly the order of ranks; with
// `by_row`, the order of extents in the index is used.
std::string RepairSource::ShardHeader(std::uint32_t file, const Uuid& writer, bool by_row) const {
  std::vector<ShardEntry> entries;
  for (std::uint32_t t = 0; t < inventory_.tensors.size(); ++t) {
    const ExtentTable& extents = inventory_.tensors[t].extents;
    std::vector<std::tuple<std::uint64_t, std::uint64_t, ChunkRecord>> rows;
    bool here = false;
    for (std::size_t i = 0; i < extents.size(); ++i) {
      const Result<ChunkRecord> chunk = extents.At(i);
      if (!chunk.ok() || chunk.value().file >= inventory_.files.size()) return {};
      here = here || chunk.value().file == file;
      const std::uint64_t rank = RankOfShard(inventory_.files[chunk.value().file].name);
      rows.emplace_back(by_row ? i : rank, chunk.value().offset, chunk.value());
    }
    if (!here) continue;
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
      return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
    });
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const ChunkRecord& chunk = std::get<2>(rows[i]);
      if (chunk.file != file) continue;
      entries.push_back({.offset = chunk.offset,
                         .tensor = t,
                         .chunk = chunk,
                         .part = static_cast<std::uint32_t>(i)});
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const ShardEntry& a, const ShardEntry& b) { return a.offset < b.offset; });
  std::map<std::string, std::string> metadata;
  metadata["tensormount"] = "rank shard of checkpoint " + writer.ToString();
  std::vector<SafetensorsEntry> listed;
  for (const ShardEntry& one : entries) {
    const TensorMeta& meta = inventory_.tensors[one.tensor].meta;
    SafetensorsEntry& entry = listed.emplace_back();
    entry.key = meta.key() + "#" + std::to_string(one.part);
    entry.dtype = meta.dtype();
    if (InfoOf(meta.dtype()).safetensors.empty()) {
      entry.dtype = DType::kU8;
      entry.shape = Dims{static_cast<std::int64_t>(one.chunk.length)};
    } else if (one.chunk.region.is_flat()) {
      entry.shape = Dims{one.chunk.region.volume()};
    } else {
      entry.shape = one.chunk.region.box().extent();
    }
    metadata[entry.key] = std::string(InfoOf(meta.dtype()).name) + " " + meta.shape().ToString() +
                          " " + one.chunk.region.ToString();
  }
  Result<std::string> header = MakeSafetensorsHeader(listed, metadata);
  return header.ok() ? std::move(header).value() : std::string();
}

// The header of a file with whole tensors under their own keys. Empty tensors come first.
std::string RepairSource::ModelHeader(std::uint32_t file) const {
  std::vector<std::pair<std::uint64_t, const TensorMeta*>> tensors;
  std::vector<SafetensorsEntry> listed;
  for (const TensorRecord& tensor : inventory_.tensors) {
    if (tensor.extents.size() == 0) {
      listed.push_back({tensor.meta.key(), tensor.meta.dtype(), tensor.meta.shape(), 0, 0});
      continue;
    }
    const Result<ChunkRecord> chunk = tensor.extents.At(0);
    if (!chunk.ok()) return {};
    if (chunk.value().file == file) tensors.emplace_back(chunk.value().offset, &tensor.meta);
  }
  std::sort(tensors.begin(), tensors.end());
  for (const auto& [offset, meta] : tensors) {
    listed.push_back({meta->key(), meta->dtype(), meta->shape(), 0, 0});
  }
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  Result<std::string> header = MakeSafetensorsHeader(listed, metadata);
  return header.ok() ? std::move(header).value() : std::string();
}

}  // namespace tensormount
