// SPDX-License-Identifier: Apache-2.0
// What the parts of an inventory have in common, and its hashes: the roots of data files, and the
// content root, which is what COMMIT vouches for. Roots are over lengths and hashes in a fixed
// order, so that they do not depend on how many ranks wrote what.
#include "index/records/inventory.h"

#include <algorithm>
#include <cerrno>
#include <sys/random.h>

#include "base/coding.h"
#include "index/records/extent_row.h"
#include "index/records/record_coding.h"
#include "shard/coding.h"

namespace tensormount {
namespace {

constexpr std::string_view kContentDomain{"tensormount content v1", 23};  // With its NUL.
constexpr std::string_view kFileDomain{"tensormount file v1", 20};

// Collects small fields and hashes them in blocks.
// Fields of a few bytes each, millions of them: one call of the hash for each would cost more than
// the hashing.
class RootHasher {
 public:
  void Add(std::string_view bytes) {
    if (pending_.size() + bytes.size() > kBlock) Flush();
    if (bytes.size() > kBlock) {
      stream_.Update(bytes.data(), bytes.size());
    } else {
      pending_.append(bytes);
    }
  }
  Hash128 Value() {
    Flush();
    return stream_.Value();
  }

 private:
  static constexpr std::size_t kBlock = 32 * 1024;
  void Flush() {
    stream_.Update(pending_.data(), pending_.size());
    pending_.clear();
  }
  Xxh3Stream stream_;
  std::string pending_;
};

// A stored range as a file root hashes it.
struct RangeHash {
  std::uint64_t offset;
  std::uint64_t length;
  Hash128 hash;
};
static_assert(sizeof(RangeHash) == 32);  // Hashed as it lies: u64 offset, u64 length, hash.

Status BadRange(const FileRecord& file, const RangeHash& range, std::string_view why) {
  return Status(Code::kDataLoss, file.name + ": the piece of " + std::to_string(range.length) +
                                     " bytes at " + std::to_string(range.offset) + " " +
                                     std::string(why));
}

// Calls fn(file, range, has_hash) for every stored range: the chunks of tensors, the parts of
// objects, and the extra ranges. Their order is that of the inventory, not that of the files.
template <typename Fn>
Status ForEachStoredRange(const Inventory& inventory, Fn fn) {
  for (const TensorRecord& tensor : inventory.tensors) {
    const std::string_view rows = tensor.extents.packed();
    const std::size_t row_bytes = tensor.extents.row_bytes();
    for (std::size_t at = 0; at < rows.size(); at += row_bytes) {
      const char* row = rows.data() + at;
      const Hash128 hash{LoadLittle<std::uint64_t>(row + extent_row::kHash),
                         LoadLittle<std::uint64_t>(row + extent_row::kHash + 8)};
      TENSORMOUNT_RETURN_IF_ERROR(
          fn(LoadLittle<std::uint32_t>(row + extent_row::kFile),
             RangeHash{LoadLittle<std::uint64_t>(row + extent_row::kOffset),
                       LoadLittle<std::uint64_t>(row + extent_row::kLength), hash},
             (LoadLittle<std::uint32_t>(row + extent_row::kFlags) & extent_row::kHasHash) != 0));
    }
  }
  for (const ObjectRecord& object : inventory.objects) {
    TENSORMOUNT_RETURN_IF_ERROR(
        fn(object.file, RangeHash{object.offset, object.length, object.hash}, object.has_hash()));
  }
  for (const ExtraRange& extra : inventory.extras) {
    TENSORMOUNT_RETURN_IF_ERROR(
        fn(extra.file, RangeHash{extra.offset, extra.length, extra.hash}, true));
  }
  return Status();
}

}  // namespace

Uuid Uuid::Random() {
  Uuid uuid;
  unsigned char bytes[16];
  std::size_t got = 0;
  while (got < sizeof(bytes)) {
    // Interrupted calls and short ones are tried again; there is no answer without randomness.
    const ssize_t n = getrandom(bytes + got, sizeof(bytes) - got, 0);
    if (n > 0) got += static_cast<std::size_t>(n);
  }
  uuid.high = LoadLittle<std::uint64_t>(bytes);
  uuid.low = LoadLittle<std::uint64_t>(bytes + 8);
  return uuid;
}

std::optional<Uuid> Uuid::Parse(std::string_view hex) {
  if (hex.size() != 32) return std::nullopt;
  std::uint64_t halves[2] = {0, 0};
  for (std::size_t i = 0; i < hex.size(); ++i) {
    const char c = hex[i];
    std::uint64_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<std::uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<std::uint64_t>(c - 'a' + 10);
    } else {
      return std::nullopt;
    }
    halves[i / 16] = (halves[i / 16] << 4) | digit;
  }
  return Uuid{halves[0], halves[1]};
}

std::string Uuid::ToString() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const std::uint64_t half : {high, low}) {
    for (int shift = 60; shift >= 0; shift -= 4) out += kDigits[(half >> shift) & 15];
  }
  return out;
}

std::string_view PlacementName(Placement p) {
  switch (p) {
    case Placement::kTensorFile:
      return "tensor-file";
    case Placement::kRankShard:
      return "rank-shard";
    case Placement::kPack:
      return "pack";
    case Placement::kForeign:
      return "foreign";
    case Placement::kSafetensors:
      return "safetensors";
  }
  return "unknown";
}

// Over what readers see and nothing else. Moving a chunk to another file, or renumbering files,
// leaves it as it is: of a row only what stands from its flags on is hashed.
Hash128 ContentRoot(const Inventory& inventory) {
  RootHasher hasher;
  hasher.Add(kContentDomain);
  ByteWriter field;
  const auto add_field = [&] {
    hasher.Add(field.bytes());
    field.bytes().clear();
  };
  field.U64(inventory.tensors.size());
  field.U64(inventory.objects.size());
  field.U64(inventory.common.size());
  add_field();
  for (const TensorRecord& tensor : inventory.tensors) {
    EncodeMeta(field, tensor.meta);
    field.U64(tensor.extents.size());
    add_field();
    const std::string_view rows = tensor.extents.packed();
    const std::size_t row_bytes = tensor.extents.row_bytes();
    for (std::size_t at = 0; at < rows.size(); at += row_bytes) {
      hasher.Add(rows.substr(at + extent_row::kFlags, row_bytes - extent_row::kFlags));
    }
  }
  for (const ObjectRecord& object : inventory.objects) {
    field.String(object.key);
    EncodeDims(field, object.index);
    EncodeDims(field, object.grid);
    field.U64(object.length);
    field.Hash(object.hash);
    add_field();
  }
  for (const auto& [key, value] : inventory.common) {
    field.String(key);
    EncodeCommon(field, value);
    add_field();
  }
  return hasher.Value();
}

// A counting sort by file, then a sort by offset inside of each: two passes over the rows, 32 bytes
// each in between, where one map by file would take an allocation a range. O(n), plus a sort of
// files whose ranges are not in order yet. Overlaps and ends are checked on the way, because a root
// over overlapping ranges would vouch for nothing.
Status ComputeFileRoots(Inventory& inventory) {
  const std::size_t files = inventory.files.size();
  std::vector<std::size_t> begin(files + 1, 0);
  TENSORMOUNT_RETURN_IF_ERROR(ForEachStoredRange(
      inventory, [&](std::uint32_t file, const RangeHash& range, bool has_hash) -> Status {
        if (file >= files) {
          return Status(Code::kDataLoss,
                        "file number " + std::to_string(file) + " is not in the file table");
        }
        const FileRecord& record = inventory.files[file];
        if (range.offset > record.length || range.length > record.length - range.offset) {
          return BadRange(record, range,
                          "reaches past the end of its " + std::to_string(record.length));
        }
        if (!has_hash && record.placement != Placement::kForeign) {
          return BadRange(record, range, "has no hash");
        }
        ++begin[file + 1];
        return Status();
      }));
  // Now begin[f] is where the ranges of file f begin in `ranges`.
  for (std::size_t f = 0; f < files; ++f) begin[f + 1] += begin[f];
  std::vector<RangeHash> ranges(begin[files]);
  std::vector<std::size_t> next(begin.begin(), begin.end() - 1);
  TENSORMOUNT_RETURN_IF_ERROR(ForEachStoredRange(
      inventory, [&](std::uint32_t file, const RangeHash& range, bool) -> Status {
        ranges[next[file]++] = range;
        return Status();
      }));
  const auto less = [](const RangeHash& a, const RangeHash& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.length < b.length;
  };
  for (std::size_t f = 0; f < files; ++f) {
    FileRecord& file = inventory.files[f];
    file.root = Hash128{};
    // Its ranges may overlap: tensors that share a storage.
    if (file.placement == Placement::kForeign) continue;
    const auto first = ranges.begin() + static_cast<std::ptrdiff_t>(begin[f]);
    const auto last = ranges.begin() + static_cast<std::ptrdiff_t>(begin[f + 1]);
    if (!std::is_sorted(first, last, less)) std::sort(first, last, less);
    const auto end = std::remove_if(first, last, [](const RangeHash& p) { return p.length == 0; });
    for (auto it = first; it != end && it + 1 != end; ++it) {
      if (it->offset + it->length > (it + 1)->offset) {
        return BadRange(file, *(it + 1), "overlaps the one before it");
      }
    }
    const std::size_t count = static_cast<std::size_t>(end - first);
    ByteWriter head;
    head.Raw(kFileDomain.data(), kFileDomain.size());
    head.U64(file.length);
    head.U64(count);
    Xxh3Stream stream;
    stream.Update(head.bytes().data(), head.size());
    if (count != 0) stream.Update(&*first, count * sizeof(RangeHash));
    file.root = stream.Value();
  }
  return Status();
}

Inventory CoordinatorInventory(const Inventory& merged) {
  Inventory out;
  out.info = merged.info;
  out.common = merged.common;
  out.tensors.reserve(merged.tensors.size());
  for (const TensorRecord& tensor : merged.tensors) {
    TensorRecord& t = out.tensors.emplace_back(tensor.meta);
    t.digest = tensor.digest;
    t.has_digest = tensor.has_digest;
    t.mtime = tensor.mtime;
  }
  for (ObjectRecord object : merged.objects) {
    // The coordinator only lists what there must be; where it is stands in the manifest of its
    // writer.
    object.file = kNoFile;
    object.offset = 0;
    if (object.has_hash()) object.manifest = 0;
    object.first_leaf = 0;
    out.objects.push_back(std::move(object));
  }
  return out;
}

}  // namespace tensormount
