// SPDX-License-Identifier: Apache-2.0
#include "tests/staging/test_mount.h"

#include <cstdio>

#include "shard/chunk_accumulator.h"
#include "shard/strided_digest.h"

namespace tensormount::fs {
namespace {

std::string Hex(std::uint64_t number) {
  char text[17];
  (void)std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(number));
  return text;
}

std::vector<Hash128> LeavesOf(std::string_view bytes) {
  return HashChunk(bytes.data(), bytes.size()).leaves;
}

}  // namespace

TestMount::TestMount(FileSystem& fs, const Staging& staging, std::uint64_t number)
    : fs_(fs), staging_(staging), incarnation_(Hex(number)) {}

std::uint32_t TestMount::FileNumber(const std::string& name, Placement placement) {
  const auto [it, fresh] =
      file_numbers_.emplace(name, static_cast<std::uint32_t>(file_numbers_.size()));
  if (fresh) {
    JournalRecord record;
    record.kind = JournalRecord::Kind::kFile;
    record.number = it->second;
    record.file_name = name;
    record.placement = placement;
    Append(record);
    files_[name];
  }
  return it->second;
}

std::uint32_t TestMount::Target(const TensorMeta& meta, const Box& box) {
  const auto number = static_cast<std::uint32_t>(targets_.size());
  const auto bytes = RegionBytes(meta.dtype(), meta.shape(), Region(box));
  targets_.push_back({meta, box, bytes.ok() ? bytes.value() : 0});
  JournalRecord record;
  record.kind = JournalRecord::Kind::kTarget;
  record.number = number;
  record.end = targets_.back().bytes;
  record.target = {meta.key(), box, meta.shape(), static_cast<std::uint8_t>(meta.bits())};
  Append(record);
  return number;
}

void TestMount::Extent(std::uint32_t target, StagedExtent extent, std::string_view bytes) {
  const Known& known = targets_[target];
  extent.target = target;
  extent.leaves = LeavesOf(bytes);
  const Region all = ByteRegion(known.meta.dtype(), known.meta.shape(), Region(known.box)).value();
  const Dims shape = ByteShape(known.meta.dtype(), known.meta.shape());
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  for (std::uint64_t i = 0; i < extent.runs; ++i) {
    const Region run =
        Region::Flat(all.box(), static_cast<std::int64_t>(extent.begin + i * extent.stride),
                     static_cast<std::int64_t>(extent.length))
            .value();
    for (const PlacedBox& placed : PlacePacked(run, i * extent.length)) {
      extent.contribution ^= DigestOfPlaced(placed, data, shape);
    }
  }
  JournalRecord record;
  record.kind = JournalRecord::Kind::kExtent;
  record.extent = std::move(extent);
  Append(record);
}

void TestMount::WriteRuns(std::uint32_t target, std::uint64_t begin, std::uint64_t length,
                          std::uint64_t runs, std::uint64_t stride, std::string_view bytes) {
  const std::string name = "data/" + staging_.ShortId() + "-" + incarnation_ + "-pack.bin";
  StagedExtent extent;
  extent.begin = begin;
  extent.length = length;
  extent.runs = runs;
  extent.stride = runs == 1 ? 0 : stride;
  extent.file = FileNumber(name, Placement::kPack);
  std::string& file = files_[name];
  file += "gap";
  extent.offset = file.size();
  file += bytes;
  Extent(target, std::move(extent), bytes);
}

void TestMount::Write(std::uint32_t target, std::uint64_t begin, std::string_view bytes) {
  WriteRuns(target, begin, bytes.size(), 1, 0, bytes);
}

void TestMount::WriteInPlace(std::uint32_t target, std::uint64_t begin, std::string_view bytes) {
  const Known& known = targets_[target];
  const std::string name = "data/" + staging_.ShortId() + "-" + incarnation_ + "-t" +
                           Hex(Xxh3Low64(known.meta.key())) + ".bin";
  StagedExtent extent;
  extent.begin = begin;
  extent.length = bytes.size();
  extent.file = FileNumber(name, Placement::kTensorFile);
  extent.offset = begin;
  std::string& file = files_[name];
  if (file.size() < begin + bytes.size()) file.resize(begin + bytes.size());
  file.replace(begin, bytes.size(), bytes);
  Extent(target, std::move(extent), bytes);
}

void TestMount::Forget(std::uint32_t target, std::uint64_t begin, std::uint64_t end) {
  JournalRecord record;
  record.kind = JournalRecord::Kind::kForget;
  record.number = target;
  record.begin = begin;
  record.end = end;
  Append(record);
}

void TestMount::Object(const std::string& key, const Dims& index, std::string_view bytes) {
  const std::string name = "data/" + staging_.ShortId() + "-" + incarnation_ + "-pack.bin";
  JournalRecord record;
  record.kind = JournalRecord::Kind::kObject;
  record.object.key = key;
  record.object.index = index;
  record.object.file = kNoFile;
  if (!bytes.empty()) {
    record.object.file = FileNumber(name, Placement::kPack);
    std::string& file = files_[name];
    record.object.offset = file.size();
    record.object.length = bytes.size();
    record.object.leaves = LeavesOf(bytes);
    file += bytes;
  }
  Append(record);
}

void TestMount::RemoveObject(const std::string& key, const Dims& index) {
  JournalRecord record;
  record.kind = JournalRecord::Kind::kRemoveObject;
  record.object.key = key;
  record.object.index = index;
  Append(record);
}

void TestMount::Condemn(std::uint32_t target, const std::string& what, const std::string& reason) {
  JournalRecord record;
  record.kind = JournalRecord::Kind::kCondemn;
  record.number = target;
  record.file_name = what;
  record.reason = reason;
  Append(record);
}

Status TestMount::Flush() {
  for (const auto& [name, bytes] : files_) {
    TENSORMOUNT_RETURN_IF_ERROR(fs_.WriteFileDurably(JoinPath(staging_.directory, name), bytes));
  }
  TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(JoinPath(staging_.directory, "data")));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::unique_ptr<JournalWriter> journal,
      JournalWriter::Create(fs_, JoinPath(staging_.directory, "journal/" + journal_name()),
                            staging_.uuid, incarnation_));
  TENSORMOUNT_RETURN_IF_ERROR(journal->Append(records_));
  TENSORMOUNT_RETURN_IF_ERROR(journal->Sync());
  journal_bytes_ = journal->synced_bytes();
  return Status();
}

}  // namespace tensormount::fs
