// SPDX-License-Identifier: Apache-2.0
// Types shared by all parts of an inventory, and the content root, which COMMIT vouches for. The
// root hashes the logical content in a fixed order, so it does not depend on the order of writers.
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

// 23 bytes: the terminating NUL is included.
constexpr std::string_view kContentDomain{"tensormount content v1", 23};
constexpr std::size_t kRootBlock = 32 * 1024;

}  // namespace

Uuid Uuid::Random() {
  Uuid uuid;
  unsigned char bytes[16];
  std::size_t got = 0;
  while (got < sizeof(bytes)) {
    // Interrupted and short calls are repeated. getrandom has no other errors with these arguments.
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

RootHasher::RootHasher(const Inventory& inventory) : inventory_(inventory) {
  AddBytes(kContentDomain);
  field_.U64(inventory.tensors.size());
  field_.U64(inventory.objects.size());
  field_.U64(inventory.common.size());
  AddField();
}

void RootHasher::AddBytes(std::string_view bytes) {
  if (pending_.size() + bytes.size() > kRootBlock) Flush();
  if (bytes.size() > kRootBlock) {
    stream_.Update(bytes.data(), bytes.size());
  } else {
    pending_.append(bytes);
  }
}

void RootHasher::AddField() {
  AddBytes(field_.bytes());
  field_.bytes().clear();
}

void RootHasher::Flush() {
  stream_.Update(pending_.data(), pending_.size());
  pending_.clear();
}

// Hashes what readers see. A table row is hashed from its flags on, so that moving a chunk to
// another file or renumbering files keeps the root.
void RootHasher::Add(const TensorRecord& tensor) {
  EncodeMeta(field_, tensor.meta);
  field_.U64(tensor.extents.size());
  AddField();
  const std::string_view rows = tensor.extents.packed();
  const std::size_t row_bytes = tensor.extents.row_bytes();
  for (std::size_t at = 0; at < rows.size(); at += row_bytes) {
    AddBytes(rows.substr(at + extent_row::kFlags, row_bytes - extent_row::kFlags));
  }
}

Hash128 RootHasher::Finish() {
  for (const ObjectRecord& object : inventory_.objects) {
    field_.String(object.key);
    EncodeDims(field_, object.index);
    EncodeDims(field_, object.grid);
    field_.U64(object.length);
    field_.Hash(object.hash);
    AddField();
  }
  for (const auto& [key, value] : inventory_.common) {
    field_.String(key);
    EncodeCommon(field_, value);
    AddField();
  }
  Flush();
  return stream_.Value();
}

Hash128 ContentRoot(const Inventory& inventory) {
  RootHasher hasher(inventory);
  for (const TensorRecord& tensor : inventory.tensors) hasher.Add(tensor);
  return hasher.Finish();
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
    t.counts = tensor.counts;
  }
  for (ObjectRecord object : merged.objects) {
    // The coordinator only lists the objects; the writer's manifest has their position.
    object.file = kNoFile;
    object.offset = 0;
    if (object.has_hash()) object.manifest = 0;
    object.first_leaf = 0;
    out.objects.push_back(std::move(object));
  }
  return out;
}

}  // namespace tensormount
