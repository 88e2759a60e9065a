// SPDX-License-Identifier: Apache-2.0
// Manifests (docs/format.md, "Manifest"). The encoder and the decoder of each field are side by
// side. Announced sizes are compared with the file before memory is allocated. The encoder refuses
// counts, producers and common values over the limits that the decoder enforces.
#include "index/records/manifest.h"

#include <algorithm>

#include "base/checked.h"
#include "base/coding.h"
#include "index/records/commit_record.h"
#include "index/records/common_state.h"
#include "index/records/record_coding.h"
#include "shard/coding.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

// Constants of docs/format.md, "Manifest".
constexpr std::string_view kManifestMagic{"TMMANIF\0", 8};
constexpr std::size_t kManifestHeaderBytes = 128;
constexpr std::size_t kLeafAlign = 64;
constexpr std::size_t kManifestHashBytes = 16;
static_assert(sizeof(Hash128) == kManifestHashBytes);

constexpr std::uint8_t kHasDigest = 1;
constexpr std::uint8_t kManifestWide = 2;

// Compatible feature bits.
constexpr std::uint64_t kHasPageHashes = 1;
constexpr std::uint64_t kHasValueCounts = 2;
constexpr std::uint64_t kHasTotals = 4;

// The first 128 bytes of a manifest in the order of docs/format.md, "Manifest".
struct Header {
  std::uint32_t version = kFormatVersion;
  std::uint64_t compatible = 0;
  std::uint64_t read_compatible = 0;
  std::uint64_t incompatible = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t records_bytes = 0;
  std::uint64_t leaves_offset = 0;
  std::uint64_t leaves = 0;
  Hash128 records_hash;
  Hash128 leaves_hash;
};

std::string EncodeHeader(const Header& h) {
  ByteWriter out;
  out.Raw(kManifestMagic.data(), kManifestMagic.size());
  out.U32(h.version);
  out.U32(kManifestHeaderBytes);
  out.U64(h.compatible);
  out.U64(h.read_compatible);
  out.U64(h.incompatible);
  out.U64(h.file_bytes);
  out.U64(h.records_bytes);
  out.U64(h.leaves_offset);
  out.U64(h.leaves);
  out.Hash(h.records_hash);
  out.Hash(h.leaves_hash);
  out.U64(0);
  out.Hash(Xxh3(out.bytes()));
  return std::move(out.bytes());
}

Result<Header> DecodeHeader(std::string_view bytes, std::string_view name) {
  const auto bad = [&](std::string_view why) {
    return Status(Code::kDataLoss, std::string(name) + ": " + std::string(why));
  };
  if (bytes.size() < kManifestHeaderBytes) return bad("truncated");
  bytes = bytes.substr(0, kManifestHeaderBytes);
  if (!bytes.starts_with(kManifestMagic)) return bad("the file is not a manifest");
  ByteReader in(bytes.substr(kManifestMagic.size()), name);
  Header h;
  h.version = in.U32();
  const std::uint32_t header_bytes = in.U32();
  h.compatible = in.U64();
  h.read_compatible = in.U64();
  h.incompatible = in.U64();
  h.file_bytes = in.U64();
  h.records_bytes = in.U64();
  h.leaves_offset = in.U64();
  h.leaves = in.U64();
  h.records_hash = in.Hash();
  h.leaves_hash = in.Hash();
  const std::uint64_t reserved = in.U64();
  // The checksum is compared before versions and feature bits, as in COMMIT, so that damage does
  // not look like a newer format.
  if (in.Hash() != Xxh3(bytes.substr(0, kManifestHeaderBytes - kManifestHashBytes))) {
    return bad("checksum mismatch in the header");
  }
  if (h.version != kFormatVersion || header_bytes != kManifestHeaderBytes || reserved != 0 ||
      (h.incompatible & ~kKnownIncompatible) != 0) {
    return Status(Code::kUnsupported,
                  std::string(name) + ": the manifest is written in a newer format");
  }
  // Announced sizes are checked before any allocation. They may be absurd, and their sums may
  // overflow, even if the checksum matches.
  const auto records_end = CheckedAdd<std::uint64_t>(kManifestHeaderBytes, h.records_bytes);
  const auto leaves_bytes = CheckedMul<std::uint64_t>(h.leaves, kManifestHashBytes);
  if (!records_end || !leaves_bytes || h.leaves_offset < *records_end ||
      h.leaves_offset - *records_end >= kLeafAlign ||
      CheckedAdd(h.leaves_offset, *leaves_bytes) != h.file_bytes) {
    return bad("the sizes in the header are inconsistent");
  }
  return h;
}

Status TooLarge(std::string_view what) {
  return Status(Code::kInvalidArgument, "manifest: too many " + std::string(what));
}

// Whether the leaves of a record that begin at `first` can exist in a manifest with `leaves` leaf
// hashes.
bool LeavesExist(std::uint64_t first, std::uint64_t leaves) { return first <= leaves; }

// Decodes the records in the order of docs/format.md, "Manifest". Counts are untrusted, but each
// item takes bytes, and a reader past its end fails the next decoder.
Status DecodeRecords(ByteReader& in, std::string_view name, std::uint64_t leaves, Inventory& out) {
  const auto bad = [&](std::string why) {
    return Status(Code::kDataLoss, std::string(name) + ": " + why);
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(out.info, DecodeInfo(in));
  const std::uint32_t files = in.U32();
  for (std::uint32_t i = 0; i < files; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(FileRecord file, DecodeFile(in));
    out.files.push_back(std::move(file));
  }
  const std::uint32_t tensors = in.U32();
  for (std::uint32_t i = 0; i < tensors; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, DecodeMeta(in, name));
    TensorRecord& tensor = out.tensors.emplace_back(std::move(meta));
    const std::uint8_t flags = in.U8();
    if ((flags & ~(kHasDigest | kManifestWide)) != 0)
      return bad("tensor " + tensor.meta.key() + ": unknown flags");
    tensor.has_digest = (flags & kHasDigest) != 0;
    tensor.digest = in.U64();
    tensor.mtime = in.I64();
    const std::uint64_t rows = in.U64();
    const int rank = tensor.meta.shape().rank();
    const bool wide = (flags & kManifestWide) != 0;
    const auto row_bytes = CheckedMul<std::uint64_t>(rows, ExtentTable(rank, wide).row_bytes());
    // The size is compared with the remaining bytes before table rows are copied.
    if (!row_bytes || *row_bytes > in.left()) {
      return bad("tensor " + tensor.meta.key() + ": truncated");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        tensor.extents, ExtentTable::FromPacked(rank, std::string(in.Raw(*row_bytes)), wide));
  }
  const std::uint32_t objects = in.U32();
  for (std::uint32_t i = 0; i < objects; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(ObjectRecord object, DecodeObject(in, name));
    if (object.has_hash() && !LeavesExist(object.first_leaf, leaves))
      return bad("object " + object.key + ": its leaf hashes are missing");
    out.objects.push_back(std::move(object));
  }
  const std::uint32_t extras = in.U32();
  for (std::uint32_t i = 0; i < extras; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(ExtraRange extra, DecodeExtra(in));
    if (!LeavesExist(extra.first_leaf, leaves)) return bad("an extra range has no leaf hashes");
    out.extras.push_back(extra);
  }
  const std::uint32_t common = in.U32();
  for (std::uint32_t i = 0; i < common; ++i) {
    std::string key(in.String(kMaxCommonRecordName));
    TENSORMOUNT_ASSIGN_OR_RETURN(CommonValue value, DecodeCommon(in, name));
    if (!out.common.emplace(std::move(key), std::move(value)).second) {
      return bad("a common value occurs twice");
    }
  }
  return in.Finish();
}

std::uint64_t BitsOf(LeafExtras extras) {
  return (extras.pages ? kHasPageHashes : 0) | (extras.counts ? kHasValueCounts : 0);
}

LeafExtras ExtrasOf(std::uint64_t compatible) {
  return {.pages = (compatible & kHasPageHashes) != 0,
          .counts = (compatible & kHasValueCounts) != 0};
}

Result<std::string> Encode(const Inventory& inventory, std::span<const Hash128> leaves,
                           std::uint64_t compatible) {
  std::size_t row_bytes = 0;
  for (const TensorRecord& tensor : inventory.tensors) row_bytes += tensor.extents.packed().size();
  ByteWriter out;
  // One allocation in most cases: table rows and leaf hashes are most of the size, and 128 bytes
  // estimate the other fields of a tensor.
  out.bytes().reserve(kManifestHeaderBytes + row_bytes + inventory.tensors.size() * 128 +
                      leaves.size() * kManifestHashBytes + 4096);
  out.bytes().resize(kManifestHeaderBytes, '\0');
  if (inventory.files.size() > UINT32_MAX) return TooLarge("files");
  if (inventory.tensors.size() > UINT32_MAX) return TooLarge("tensors");
  if (inventory.objects.size() > UINT32_MAX) return TooLarge("objects");
  if (inventory.extras.size() > UINT32_MAX) return TooLarge("extra ranges");
  if (inventory.common.size() > UINT32_MAX) return TooLarge("common values");
  // Values that the decoder refuses must not be committed.
  if (inventory.info.producer.size() > kMaxTextBytes) {
    return Status(Code::kInvalidArgument,
                  "the name of the producer has " + std::to_string(inventory.info.producer.size()) +
                      " bytes, at most " + std::to_string(kMaxTextBytes) + " are allowed");
  }
  const auto readable = [&out](std::size_t begin, std::string_view what, auto decode) -> Status {
    ByteReader in(std::string_view(out.bytes()).substr(begin), what);
    const Status read = decode(in).status();
    return read.ok() ? read : Status(Code::kInvalidArgument, "manifest: " + read.message());
  };
  EncodeInfo(out, inventory.info);
  TENSORMOUNT_RETURN_IF_ERROR(
      readable(kManifestHeaderBytes, "info", [](ByteReader& in) { return DecodeInfo(in); }));
  out.U32(static_cast<std::uint32_t>(inventory.files.size()));
  for (const FileRecord& file : inventory.files) {
    if (file.name.size() > kMaxFileNameBytes) {
      return Status(Code::kInvalidArgument,
                    "file " + file.name + ": the name has " + std::to_string(file.name.size()) +
                        " bytes, at most " + std::to_string(kMaxFileNameBytes) + " are allowed");
    }
    const std::size_t begin = out.size();
    EncodeFile(out, file);
    TENSORMOUNT_RETURN_IF_ERROR(
        readable(begin, file.name, [](ByteReader& in) { return DecodeFile(in); }));
  }
  out.U32(static_cast<std::uint32_t>(inventory.tensors.size()));
  for (const TensorRecord& tensor : inventory.tensors) {
    if (tensor.extents.pending()) {
      return Status(Code::kInvalidArgument, "manifest: tensor " + tensor.meta.key() +
                                                ": the location of its bytes is not recorded");
    }
    EncodeMeta(out, tensor.meta);
    out.U8(static_cast<std::uint8_t>((tensor.has_digest ? kHasDigest : 0) |
                                     (tensor.extents.wide() ? kManifestWide : 0)));
    out.U64(tensor.digest);
    out.I64(tensor.mtime);
    out.U64(tensor.extents.size());
    out.Raw(tensor.extents.packed().data(), tensor.extents.packed().size());
  }
  out.U32(static_cast<std::uint32_t>(inventory.objects.size()));
  for (const ObjectRecord& object : inventory.objects) {
    const std::size_t begin = out.size();
    EncodeObject(out, object);
    TENSORMOUNT_RETURN_IF_ERROR(
        readable(begin, object.key, [&](ByteReader& in) { return DecodeObject(in, object.key); }));
  }
  out.U32(static_cast<std::uint32_t>(inventory.extras.size()));
  for (const ExtraRange& extra : inventory.extras) EncodeExtra(out, extra);
  out.U32(static_cast<std::uint32_t>(inventory.common.size()));
  for (const auto& [key, value] : inventory.common) {
    if (key.size() > kMaxCommonRecordName) {
      return Status(Code::kInvalidArgument, "the name of a common value is over " +
                                                std::to_string(kMaxCommonRecordName) + " bytes");
    }
    if (Status status = CheckCommon(value); !status.ok()) {
      return status.WithContext("common value " + key);
    }
    out.String(key);
    EncodeCommon(out, value);
  }
  // The records follow 128 reserved bytes. The header is written there when all sizes and hashes
  // are known.
  Header header;
  header.compatible = compatible;
  header.records_bytes = out.size() - kManifestHeaderBytes;
  header.records_hash = Xxh3(std::string_view(out.bytes()).substr(kManifestHeaderBytes));
  out.bytes().resize((out.size() + kLeafAlign - 1) / kLeafAlign * kLeafAlign, '\0');
  header.leaves_offset = out.size();
  header.leaves = leaves.size();
  header.leaves_hash = Xxh3(leaves.data(), leaves.size_bytes());
  out.Raw(leaves.data(), leaves.size_bytes());
  header.file_bytes = out.size();
  const std::string head = EncodeHeader(header);
  out.bytes().replace(0, kManifestHeaderBytes, head);
  return std::move(out.bytes());
}

}  // namespace

Result<std::string> EncodeManifest(const Inventory& inventory, std::span<const Hash128> leaves,
                                   LeafExtras extras) {
  return Encode(inventory, leaves, BitsOf(extras));
}

Result<std::string> EncodeCoordinatorManifest(const Inventory& merged) {
  const Inventory inventory = CoordinatorInventory(merged);
  if (std::ranges::none_of(inventory.tensors, [](const auto& t) { return t.counts.has_value(); })) {
    return Encode(inventory, {}, 0);
  }
  std::vector<Hash128> totals;
  AppendTotals(inventory.tensors, totals);
  return Encode(inventory, totals, kHasTotals);
}

Result<CheckpointInfo> DecodeManifestInfo(std::string_view begin, std::string_view name) {
  TENSORMOUNT_RETURN_IF_ERROR(DecodeHeader(begin, name).status());
  ByteReader in(begin.substr(kManifestHeaderBytes), name);
  TENSORMOUNT_ASSIGN_OR_RETURN(CheckpointInfo info, DecodeInfo(in));
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return info;
}

Result<CheckpointInfo> ReadManifestInfo(FileSystem& fs, const std::string& directory) {
  const std::string path = JoinPath(directory, kCoordinatorManifest);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs.OpenRead(path));
  std::string begin(kManifestInfoBytes, '\0');
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n, file->ReadAt(0, begin.data(), begin.size()));
  return DecodeManifestInfo(std::string_view(begin).substr(0, n), path);
}

Result<Manifest> DecodeManifest(std::string_view bytes, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Header header, DecodeHeader(bytes, name));
  const auto bad = [&](std::string why) {
    return Status(Code::kDataLoss, std::string(name) + ": " + why);
  };
  if (header.file_bytes != bytes.size()) {
    return bad(std::to_string(bytes.size()) + " bytes, its header says " +
               std::to_string(header.file_bytes));
  }
  const std::string_view records = bytes.substr(kManifestHeaderBytes, header.records_bytes);
  if (Xxh3(records) != header.records_hash) return bad("checksum mismatch in the records");
  const std::size_t records_end = kManifestHeaderBytes + records.size();
  const std::string_view padding = bytes.substr(records_end, header.leaves_offset - records_end);
  if (padding.find_first_not_of('\0') != std::string_view::npos)
    return bad("the padding is not zero");
  const std::string_view leaf_bytes = bytes.substr(header.leaves_offset);
  if (Xxh3(leaf_bytes) != header.leaves_hash) return bad("checksum mismatch in the leaf hashes");
  Manifest manifest;
  manifest.extras = ExtrasOf(header.compatible);
  manifest.leaves.resize(header.leaves);
  if (!leaf_bytes.empty()) {
    std::memcpy(manifest.leaves.data(), leaf_bytes.data(), leaf_bytes.size());
  }
  ByteReader in(records, name);
  if (Status s = DecodeRecords(in, name, header.leaves, manifest.inventory); !s.ok()) {
    return s.message().starts_with(name) ? s : s.WithContext(name);
  }
  if ((header.compatible & kHasTotals) != 0) {
    TakeTotals(manifest.leaves, manifest.inventory);
  } else {
    SumCounts(manifest.leaves, manifest.extras, manifest.inventory);
  }
  return manifest;
}

Result<std::vector<Hash128>> ReadManifestLeaves(File& file, std::uint64_t first,
                                                std::uint64_t count, bool* paged) {
  char head[kManifestHeaderBytes];
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(0, head, sizeof(head)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Header header,
                               DecodeHeader({head, sizeof(head)}, file.path()));
  if (!RangeWithin(first, count, header.leaves)) {
    return Status(Code::kDataLoss, file.path() + ": has " + std::to_string(header.leaves) +
                                       " leaf hashes, not " + std::to_string(count) +
                                       " from number " + std::to_string(first) + " on");
  }
  // The header is untrusted, so the file's size is checked before the allocation.
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  if (info.size < header.file_bytes) {
    return Status(Code::kDataLoss, file.path() + ": " + std::to_string(info.size) +
                                       " bytes, its header says " +
                                       std::to_string(header.file_bytes));
  }
  if (paged != nullptr) {
    *paged = (header.compatible & kHasPageHashes) != 0 && first + count < header.leaves;
  }
  // The header's leaves_hash covers all leaves, so it is not compared here. The caller proves these
  // leaves with its chunk hash.
  std::vector<Hash128> leaves(count);
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(header.leaves_offset + first * kManifestHashBytes,
                                               leaves.data(), count * kManifestHashBytes));
  return leaves;
}

Result<std::optional<std::vector<std::optional<ValueCounts>>>> ReadManifestTotals(File& file) {
  using Totals = std::optional<std::vector<std::optional<ValueCounts>>>;
  char head[kManifestHeaderBytes];
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(0, head, sizeof(head)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Header header,
                               DecodeHeader({head, sizeof(head)}, file.path()));
  if ((header.compatible & kHasTotals) == 0) return Totals();
  const Status bad(Code::kDataLoss, file.path() + ": the value counts are damaged");
  const std::uint64_t size = header.leaves;
  if (size < kTotalsTrailerHashes) return bad;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::vector<Hash128> trailer,
      ReadManifestLeaves(file, size - kTotalsTrailerHashes, kTotalsTrailerHashes));
  const std::optional<std::uint64_t> length = TotalsLength(trailer, size);
  if (!length) return bad;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Hash128> all,
                               ReadManifestLeaves(file, size - *length, *length));
  Totals totals = DecodeTotals(all);
  if (!totals) return bad;
  return totals;
}

Result<std::optional<ValueCounts>> ReadManifestCounts(File& file, const TensorMeta& meta,
                                                      const ChunkRecord& chunk) {
  char head[kManifestHeaderBytes];
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(0, head, sizeof(head)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Header header,
                               DecodeHeader({head, sizeof(head)}, file.path()));
  const LeafExtras extras = ExtrasOf(header.compatible);
  const std::uint64_t leaves = LeafCount(chunk.length);
  if (!extras.counts || !RangeWithin(chunk.first_leaf, leaves, header.leaves)) {
    return std::optional<ValueCounts>();
  }
  const std::uint64_t pages = extras.pages ? PageHashesOf(chunk.length) : 0;
  const std::uint64_t most = header.leaves - chunk.first_leaf;
  const std::uint64_t size = std::min(most, leaves + pages + kLongestCountsRow);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Hash128> section,
                               ReadManifestLeaves(file, chunk.first_leaf, size));
  return CountsOfChunk(section, extras, meta, 0, chunk.length, chunk.hash);
}

}  // namespace tensormount
