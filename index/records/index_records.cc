// SPDX-License-Identifier: Apache-2.0
// Keys and values of the index (docs/format.md, "Index"). A key is the letter of its kind, then
// big-endian numbers or a name, so that byte order is the order of listings.
#include "index/records/index_records.h"

#include "base/coding.h"
#include "index/records/record_coding.h"
#include "index/records/safetensors_order.h"
#include "shard/coding.h"

namespace tensormount::index_record {
namespace {

// Flags of a kTensor record.
constexpr std::uint8_t kRecordHasDigest = 1;
constexpr std::uint8_t kInSafetensors = 2;
constexpr std::uint8_t kRecordWide = 4;
constexpr std::uint8_t kPending = 8;  // Only in memory; ForEach refuses pending chunks on disk.

void AppendBig32(std::string& out, std::uint32_t v) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>((v >> shift) & 255);
}

}  // namespace

std::string Key(char kind) { return std::string(1, kind); }

std::string Key(char kind, std::uint32_t number) {
  std::string key(1, kind);
  AppendBig32(key, number);
  return key;
}

std::string Key(char kind, std::uint32_t number, std::uint32_t page) {
  std::string key = Key(kind, number);
  AppendBig32(key, page);
  return key;
}

std::string Key(char kind, std::string_view name) {
  std::string key(1, kind);
  key += name;
  return key;
}

std::uint32_t LoadBig32(const char* p) {
  std::uint32_t v = 0;
  for (int i = 0; i < 4; ++i) v = (v << 8) | static_cast<unsigned char>(p[i]);
  return v;
}

TensorPass AllTensors(const Inventory& inventory) {
  return [&inventory](const TensorUse& use) {
    for (const TensorRecord& tensor : inventory.tensors) TENSORMOUNT_RETURN_IF_ERROR(use(tensor));
    return Status();
  };
}

Status ForEach(const Inventory& inventory, bool to_memory, const TensorPass& pass,
               const std::function<Status(std::string_view, std::string_view)>& fn) {
  if (inventory.tensors.size() >= UINT32_MAX || inventory.files.size() >= UINT32_MAX ||
      inventory.extras.size() >= UINT32_MAX || inventory.objects.size() >= UINT32_MAX) {
    return Status(Code::kInvalidArgument,
                  "index: the checkpoint has too many tensors, files or objects (2^32 or more)");
  }
  SafetensorsOrder layout;
  if (!to_memory) {
    std::vector<const TensorMeta*> metas;
    metas.reserve(inventory.tensors.size());
    for (const TensorRecord& tensor : inventory.tensors) metas.push_back(&tensor.meta);
    TENSORMOUNT_ASSIGN_OR_RETURN(layout, LayOutSafetensors(metas));
  }
  Counts counts;
  counts.tensors = static_cast<std::uint32_t>(inventory.tensors.size());
  counts.safetensors_header_bytes = layout.header.size();

  // Kinds follow in the order of their letters, because SstFileWriter needs rising keys. Each
  // tensor's extents may be freed as soon as they were passed on.
  ByteWriter value;
  for (const auto& [key, common] : inventory.common) {
    value.bytes().clear();
    EncodeCommon(value, common);
    TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kCommon, key), value.bytes()));
  }
  // Properties of each tensor's extents, found in the pass, for the tensor records that follow.
  struct Passed {
    std::uint64_t chunks = 0;
    bool wide = false;
    bool pending = false;
  };
  std::vector<Passed> passed;
  passed.reserve(counts.tensors);
  const TensorUse write = [&](const TensorRecord& tensor) -> Status {
    const ExtentTable& extents = tensor.extents;
    if (extents.pending() && !to_memory) {
      return Status(Code::kInvalidArgument, "index: tensor " + tensor.meta.key() +
                                                ": the location of its bytes is not recorded");
    }
    const auto i = static_cast<std::uint32_t>(passed.size());
    passed.push_back({extents.size(), extents.wide(), extents.pending()});
    counts.tensor_bytes += tensor.meta.bytes();
    counts.chunks += extents.size();
    const std::size_t row = extents.row_bytes();
    // A page holds whole table rows.
    const std::size_t page = kPageBytes / row * row;
    const std::string_view rows = extents.packed();
    for (std::size_t at = 0; at < rows.size(); at += page) {
      TENSORMOUNT_RETURN_IF_ERROR(
          fn(Key(kExtents, i, static_cast<std::uint32_t>(at / page)), rows.substr(at, page)));
    }
    return Status();
  };
  TENSORMOUNT_RETURN_IF_ERROR(pass(write));
  if (passed.size() != counts.tensors) {
    return Status(Code::kInternal, "index: internal error: only " + std::to_string(passed.size()) +
                                       " of " + std::to_string(counts.tensors) +
                                       " tensors were written to the index");
  }
  for (std::uint32_t i = 0; i < inventory.files.size(); ++i) {
    value.bytes().clear();
    EncodeFile(value, inventory.files[i]);
    TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kFile, i), value.bytes()));
  }
  for (std::size_t at = 0; at < layout.header.size(); at += kPageBytes) {
    TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kSafetensors, static_cast<std::uint32_t>(at / kPageBytes)),
                                   std::string_view(layout.header).substr(at, kPageBytes)));
  }
  counts.files = static_cast<std::uint32_t>(inventory.files.size());
  counts.manifests = static_cast<std::uint32_t>(inventory.manifests.size());
  value.bytes().clear();
  EncodeInfoRecord(value, inventory.info, counts);
  TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kInfo), value.bytes()));
  for (std::uint32_t i = 0; i < counts.tensors; ++i) {
    // Big-endian like ordinals in keys.
    std::string number;
    AppendBig32(number, i);
    TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kKey, inventory.tensors[i].meta.key()), number));
  }
  for (std::uint32_t i = 0; i < inventory.manifests.size(); ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kManifest, i), inventory.manifests[i]));
  }
  std::uint32_t part = 0;
  for (std::size_t i = 0; i < inventory.objects.size(); ++i) {
    const ObjectRecord& object = inventory.objects[i];
    // Parts of an object are neighbours; the part number counts from 0.
    part = i > 0 && inventory.objects[i - 1].key == object.key ? part + 1 : 0;
    value.bytes().clear();
    EncodeObject(value, object);
    std::string key = Key(kObject, object.key);
    key += '\0';
    AppendBig32(key, part);
    TENSORMOUNT_RETURN_IF_ERROR(fn(key, value.bytes()));
  }
  for (std::uint32_t i = 0; i < counts.tensors; ++i) {
    const TensorRecord& tensor = inventory.tensors[i];
    value.bytes().clear();
    EncodeTensor(value, {.ordinal = i,
                         .meta = tensor.meta,
                         .digest = tensor.digest,
                         .has_digest = tensor.has_digest,
                         .mtime = tensor.mtime,
                         .chunks = passed[i].chunks,
                         .safetensors_offset = to_memory ? 0 : layout.offsets[i],
                         .in_safetensors = !to_memory && layout.held[i],
                         .wide = passed[i].wide,
                         .pending = passed[i].pending});
    TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kTensor, i), value.bytes()));
  }
  for (std::uint32_t i = 0; i < inventory.extras.size(); ++i) {
    value.bytes().clear();
    EncodeExtra(value, inventory.extras[i]);
    TENSORMOUNT_RETURN_IF_ERROR(fn(Key(kExtra, i), value.bytes()));
  }
  return Status();
}

void EncodeTensor(ByteWriter& out, const TensorEntry& entry) {
  EncodeMeta(out, entry.meta);
  out.U8(static_cast<std::uint8_t>(
      (entry.has_digest ? kRecordHasDigest : 0) | (entry.in_safetensors ? kInSafetensors : 0) |
      (entry.wide ? kRecordWide : 0) | (entry.pending ? kPending : 0)));
  out.U64(entry.digest);
  out.I64(entry.mtime);
  out.U64(entry.chunks);
  out.U64(entry.safetensors_offset);
}

void EncodeInfoRecord(ByteWriter& out, const CheckpointInfo& info, const Counts& counts) {
  out.U32(kVersion);
  EncodeInfo(out, info);
  out.U32(counts.tensors);
  out.U64(counts.tensor_bytes);
  out.U64(counts.chunks);
  out.U64(counts.safetensors_header_bytes);
  out.U32(counts.files);
  out.U32(counts.manifests);
}

Result<TensorEntry> DecodeTensor(std::string_view value, std::uint32_t ordinal, bool from_memory) {
  const std::string what = "index: tensor " + std::to_string(ordinal);
  ByteReader in(value, what);
  TensorEntry entry;
  entry.ordinal = ordinal;
  TENSORMOUNT_ASSIGN_OR_RETURN(entry.meta, DecodeMeta(in, what));
  const std::uint8_t flags = in.U8();
  entry.digest = in.U64();
  entry.mtime = in.I64();
  entry.chunks = in.U64();
  entry.safetensors_offset = in.U64();
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  const int known = kRecordHasDigest | kInSafetensors | kRecordWide | (from_memory ? kPending : 0);
  if ((flags & ~known) != 0) {
    return Status(Code::kDataLoss, what + ": unknown flags");
  }
  entry.has_digest = (flags & kRecordHasDigest) != 0;
  entry.in_safetensors = (flags & kInSafetensors) != 0;
  entry.wide = (flags & kRecordWide) != 0;
  entry.pending = (flags & kPending) != 0;
  return entry;
}

Result<Counts> DecodeInfoRecord(std::string_view value, bool from_memory, CheckpointInfo& info) {
  ByteReader in(value, "index: info");
  // The version of the index only. kUnsupported makes the opener rebuild the index from the
  // manifests, which have a version of their own.
  if (const std::uint32_t version = in.U32(); version != kVersion) {
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    return Status(Code::kUnsupported,
                  "index: written in a newer format: version " + std::to_string(version));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(info, DecodeInfo(in, from_memory));
  Counts counts;
  counts.tensors = in.U32();
  counts.tensor_bytes = in.U64();
  counts.chunks = in.U64();
  counts.safetensors_header_bytes = in.U64();
  counts.files = in.U32();
  counts.manifests = in.U32();
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return counts;
}

}  // namespace tensormount::index_record
