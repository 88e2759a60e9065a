// SPDX-License-Identifier: Apache-2.0
// Compares leaves of stored ranges with their recorded hashes, whatever their source is. Only bytes
// with matching hashes, and bytes of the old file, are written to a new file.
#include "index/store/repair_ranges.h"

#include <algorithm>

#include "base/checked.h"
#include "base/errors.h"
#include "index/read/verify_ranges.h"
#include "shard/chunk_accumulator.h"
#include "shard/leaf_hash.h"

namespace tensormount {

// The hashes in the record of a range. `known` is false if the record has no hash.
struct RecordedHash {
  Hash128 root;
  std::uint32_t manifest = kNoManifest;
  std::uint64_t first_leaf = 0;
  bool known = false;
};

namespace {

// Number of leaves that are read and compared at once: 1 MiB.
constexpr std::uint64_t kRepairLeaves = 16;
constexpr const char* kOtherBytes =
    "the other checkpoint has different bytes there, or is damaged itself";
constexpr RepairSource::Way kWays[] = {RepairSource::Way::kSameFile, RepairSource::Way::kContent};

RecordedHash RecordedHashOf(const Inventory& inventory, const ScanRange& range) {
  const auto of = [](const auto& record, bool known) {
    return RecordedHash{record.hash, record.manifest, record.first_leaf, known};
  };
  switch (range.kind) {
    case ScanRange::Kind::kChunk: {
      const auto chunk = inventory.tensors[range.owner].extents.At(range.row);
      return chunk.ok() ? of(chunk.value(), chunk.value().has_hash) : RecordedHash();
    }
    case ScanRange::Kind::kObject:
      return of(inventory.objects[range.owner], inventory.objects[range.owner].has_hash());
    case ScanRange::Kind::kExtra:
      break;
  }
  return of(inventory.extras[range.owner], true);
}

// Number of bytes of leaves [first, first + count) of a range.
std::size_t WindowBytes(const ScanRange& range, std::uint64_t first, std::uint64_t count) {
  return static_cast<std::size_t>(std::min(count * kLeafBytes, range.length - first * kLeafBytes));
}

// Returns the error if it ends the repair, else OK. Without memory or descriptors the source cannot
// be read, although it may have the bytes.
Status EndsRepair(const Status& read) {
  const bool ends = read.code() == Code::kResourceExhausted || read.code() == Code::kCancelled;
  return ends ? read : Status();
}

}  // namespace

RangeRepair::RangeRepair(const Inventory& inventory, const Leaves& leaves, RepairSource& source,
                         std::string from, Progress progress)
    : inventory_(inventory),
      leaves_(leaves),
      source_(source),
      from_(std::move(from)),
      progress_(std::move(progress)),
      buffer_(static_cast<std::size_t>(kRepairLeaves * kLeafBytes)),
      fetched_(buffer_.size()) {}

RepairLeft RangeRepair::RemainingDamage(const ScanRange& range, std::uint64_t at,
                                        const std::string& reason) const {
  return {.file = inventory_.files[range.file].name,
          .object = RangeName(inventory_, range),
          .offset = range.offset + at,
          .reason = from_ + ": " + reason};
}

// The leaf hashes of a range. Empty if only the root is known.
std::span<const Hash128> RangeRepair::LeavesOf(const ScanRange& range,
                                               const RecordedHash& recorded) const {
  if (recorded.manifest >= inventory_.manifests.size()) return {};
  const auto known = leaves_.find(inventory_.manifests[recorded.manifest]);
  const std::uint64_t count = LeafCount(range.length);
  if (known == leaves_.end() || !RangeWithin(recorded.first_leaf, count, known->second.size())) {
    return {};
  }
  const auto leaves =
      std::span<const Hash128>(known->second)
          .subspan(static_cast<std::size_t>(recorded.first_leaf), static_cast<std::size_t>(count));
  return ChunkRoot(leaves, range.length) == recorded.root ? leaves : std::span<const Hash128>();
}

// Reads leaves [first, first + count) of the old file into buffer_. is_present_ tells which leaves
// could be read.
Status RangeRepair::ReadOld(File* old, const ScanRange& range, std::uint64_t first,
                            std::uint64_t count) {
  is_present_.assign(static_cast<std::size_t>(count), false);
  if (old == nullptr) return Status();
  const std::uint64_t at = range.offset + first * kLeafBytes;
  const Result<std::size_t> read =
      old->ReadAt(at, buffer_.data(), WindowBytes(range, first, count));
  if (read.ok()) {
    for (std::size_t i = 0; i < is_present_.size(); ++i) {
      is_present_[i] = WindowBytes(range, first, i + 1) <= read.value();
    }
    return Status();
  }
  if (!ProvesDamage(read.status())) return read.status();
  // The leaves are read again one by one, so that a bad sector costs only its own leaf.
  for (std::size_t i = 0; i < is_present_.size(); ++i) {
    const std::size_t n = WindowBytes(range, first + i, 1);
    const Result<std::size_t> one =
        old->ReadAt(at + i * kLeafBytes, buffer_.data() + i * kLeafBytes, n);
    if (!one.ok() && !ProvesDamage(one.status())) return one.status();
    is_present_[i] = one.ok() && one.value() == n;
  }
  return Status();
}

Result<std::uint64_t> RangeRepair::BadBytes(File* file, const ScanRange& range,
                                            bool report_progress) {
  const RecordedHash recorded = RecordedHashOf(inventory_, range);
  if (!recorded.known) return std::uint64_t{0};
  const std::span<const Hash128> leaves = LeavesOf(range, recorded);
  const std::uint64_t count = LeafCount(range.length);
  std::vector<Hash128> found(static_cast<std::size_t>(count));
  std::uint64_t bad = 0;
  bool all_read = true;
  for (std::uint64_t first = 0; first < count; first += kRepairLeaves) {
    const std::uint64_t n = std::min(kRepairLeaves, count - first);
    TENSORMOUNT_RETURN_IF_ERROR(ReadOld(file, range, first, n));
    for (std::size_t i = 0; i < is_present_.size(); ++i) {
      const auto leaf = static_cast<std::size_t>(first + i);
      const std::size_t size = WindowBytes(range, leaf, 1);
      if (is_present_[i]) found[leaf] = Xxh3(buffer_.data() + i * kLeafBytes, size);
      all_read = all_read && is_present_[i];
      if (leaves.empty() || !is_present_[i] || found[leaf] != leaves[leaf]) bad += size;
    }
    if (report_progress) TENSORMOUNT_RETURN_IF_ERROR(progress_(WindowBytes(range, first, n)));
  }
  if (all_read && ChunkRoot(found, range.length) == recorded.root) return std::uint64_t{0};
  return bad;
}

Status RangeRepair::CopyUncovered(File* old, File* out, std::uint64_t from, std::uint64_t to) {
  if (old == nullptr || out == nullptr) return Status();
  for (std::uint64_t at = from; at < to;) {
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), to - at));
    const Result<std::size_t> read = old->ReadAt(at, buffer_.data(), n);
    if (!read.ok() && !ProvesDamage(read.status())) return read.status();
    if (read.ok() && read.value() > 0) {
      TENSORMOUNT_RETURN_IF_ERROR(out->WriteAt(at, buffer_.data(), read.value()));
    }
    at += n;
  }
  return Status();
}

Result<std::optional<RepairLeft>> RangeRepair::RepairRange(const ScanRange& range, File* old,
                                                           File* out, std::uint64_t& repaired) {
  const RecordedHash recorded = RecordedHashOf(inventory_, range);
  const std::span<const Hash128> leaves = LeavesOf(range, recorded);
  if (leaves.empty()) return RepairByRoot(range, recorded.root, old, out, repaired);
  const std::uint64_t count = LeafCount(range.length);
  std::optional<std::uint64_t> first_left;
  std::string reason;
  for (std::uint64_t first = 0; first < count; first += kRepairLeaves) {
    const std::uint64_t n = std::min(kRepairLeaves, count - first);
    TENSORMOUNT_RETURN_IF_ERROR(ReadOld(old, range, first, n));
    const auto good = [&](std::uint64_t i) {
      return is_present_[static_cast<std::size_t>(i)] &&
             Xxh3(buffer_.data() + i * kLeafBytes, WindowBytes(range, first + i, 1)) ==
                 leaves[static_cast<std::size_t>(first + i)];
    };
    // Adjacent bad leaves are read together.
    for (std::uint64_t i = 0; i < n; ++i) {
      std::uint64_t end = i;
      while (end < n && !good(end)) ++end;
      if (end == i) continue;
      TENSORMOUNT_RETURN_IF_ERROR(
          Fetch(range, leaves, first + i, end - i, first, reason, repaired));
      i = end;
    }
    for (std::uint64_t i = 0; i < n; ++i) {
      if (!first_left && !good(i)) first_left = (first + i) * kLeafBytes;
      if (out == nullptr || !is_present_[static_cast<std::size_t>(i)]) continue;
      TENSORMOUNT_RETURN_IF_ERROR(out->WriteAt(range.offset + (first + i) * kLeafBytes,
                                               buffer_.data() + i * kLeafBytes,
                                               WindowBytes(range, first + i, 1)));
    }
  }
  if (!first_left) return std::optional<RepairLeft>();
  return std::optional<RepairLeft>(RemainingDamage(range, *first_left, reason));
}

// Reads the bad leaves [first, first + count) from the source. Leaves with matching hashes are
// copied to their positions in buffer_, which begins at leaf `window`. `reason` receives the reason
// why a leaf could not be read or does not match.
Status RangeRepair::Fetch(const ScanRange& range, std::span<const Hash128> leaves,
                          std::uint64_t first, std::uint64_t count, std::uint64_t window,
                          std::string& reason, std::uint64_t& repaired) {
  std::vector<bool> got(static_cast<std::size_t>(count), false);
  for (const RepairSource::Way way : kWays) {
    if (std::find(got.begin(), got.end(), false) == got.end()) break;
    const Status all = source_.Read(way, range, first * kLeafBytes, fetched_.data(),
                                    WindowBytes(range, first, count));
    TENSORMOUNT_RETURN_IF_ERROR(EndsRepair(all));
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i]) continue;
      const auto leaf = static_cast<std::size_t>(first + i);
      const std::size_t size = WindowBytes(range, leaf, 1);
      std::byte* const bytes = fetched_.data() + i * kLeafBytes;
      // If the leaves cannot be read together, each is read alone, so that a bad sector costs only
      // its own leaf.
      const Status read =
          all.ok() || count == 1 ? all : source_.Read(way, range, leaf * kLeafBytes, bytes, size);
      TENSORMOUNT_RETURN_IF_ERROR(EndsRepair(read));
      if (!read.ok()) {
        if (way == RepairSource::Way::kContent) reason = read.message();
        continue;
      }
      if (Xxh3(bytes, size) != leaves[leaf]) {
        reason = kOtherBytes;
        continue;
      }
      got[i] = true;
      const auto at = static_cast<std::size_t>(leaf - window);
      std::copy_n(bytes, size, buffer_.data() + at * kLeafBytes);
      is_present_[at] = true;
      repaired += size;
    }
  }
  return Status();
}

// Repairs a range of which only the root is known. Bytes of the source are used only if the whole
// range matches the root.
Result<std::optional<RepairLeft>> RangeRepair::RepairByRoot(const ScanRange& range,
                                                            const Hash128& root, File* old,
                                                            File* out, std::uint64_t& repaired) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bad, BadBytes(old, range, false));
  std::optional<RepairLeft> left;
  for (const RepairSource::Way way : kWays) {
    if (bad == 0) break;
    const Status proved = CopyIfRootMatches(way, range, root, nullptr);
    TENSORMOUNT_RETURN_IF_ERROR(EndsRepair(proved));
    if (proved.ok()) {
      if (out != nullptr) TENSORMOUNT_RETURN_IF_ERROR(CopyIfRootMatches(way, range, root, out));
      repaired += range.length;
      return std::optional<RepairLeft>();
    }
    left = RemainingDamage(range, 0, proved.message());
  }
  TENSORMOUNT_RETURN_IF_ERROR(CopyUncovered(old, out, range.offset, range.offset + range.length));
  return left;
}

Status RangeRepair::CopyIfRootMatches(RepairSource::Way way, const ScanRange& range,
                                      const Hash128& root, File* out) {
  const auto read = [&](std::uint64_t at, std::span<std::byte> block) {
    return source_.Read(way, range, at, block.data(), block.size());
  };
  const auto write = [&](std::uint64_t at, std::span<const std::byte> block) {
    return out == nullptr ? Status() : out->WriteAt(range.offset + at, block.data(), block.size());
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkHashes found,
                               PassChunk(range.length, fetched_, read, write));
  return found.root == root ? Status() : DataLoss(kOtherBytes);
}

}  // namespace tensormount
