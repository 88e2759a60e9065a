// SPDX-License-Identifier: Apache-2.0
#include "fs/views/served_data.h"

#include <algorithm>
#include <cstring>

#include "base/mapping.h"
#include "shard/box_access.h"
#include "shard/leaf_hash.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

// Verification of whole files goes on in steps of this.
constexpr std::uint64_t kStepBytes = std::uint64_t{1} << 20;
static_assert(kStepBytes % kLeafBytes == 0);

std::uint64_t BlocksOf(std::uint64_t bytes) { return LeafCount(bytes); }

Status Cancel() { return Status(Code::kCancelled, "verification was cancelled"); }

// Calls fn(begin, size) for steps of [begin, end) that begin on multiples of kStepBytes but for
// the first.
Status ForEachStep(std::uint64_t begin, std::uint64_t end, const ServedData::Cancelled& cancelled,
                   const std::function<Status(std::uint64_t, std::size_t)>& fn) {
  while (begin < end) {
    if (cancelled && cancelled()) return Cancel();
    const std::uint64_t stop = std::min(end, (begin / kStepBytes + 1) * kStepBytes);
    TENSORMOUNT_RETURN_IF_ERROR(fn(begin, static_cast<std::size_t>(stop - begin)));
    begin = stop;
  }
  return {};
}

// Where bytes [offset, offset + size) of a box's container come from: places of the tensor, and
// whether there are others, which are zero.
struct ServedRange {
  std::vector<PlacedBox> want;
  // Consecutive bytes of the range that are not all in `want`.
  std::vector<std::pair<std::size_t, std::size_t>> zeros;
};

Result<ServedRange> PlaceRange(const FileContent::BoxSource& source, std::uint64_t offset,
                               std::size_t size) {
  ServedRange placed;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region range, Region::Flat(Box::Whole(source.byte_container),
                                                                static_cast<std::int64_t>(offset),
                                                                static_cast<std::int64_t>(size)));
  const Box filled = Box::Whole(source.byte_box.extent());
  std::int64_t at = 0;
  for (const Box& part : range.Boxes()) {
    const Box held = Intersect(part, filled);
    if (held != part) {
      placed.zeros.emplace_back(static_cast<std::size_t>(at),
                                static_cast<std::size_t>(part.volume()));
    }
    if (!held.empty()) {
      const Dims strides = PackedStrides(part.extent());
      Dims begin;
      std::int64_t to = at;
      for (int a = 0; a < held.rank(); ++a) {
        begin.push_back(source.byte_box.begin(a) + held.begin(a));
        to += (held.begin(a) - part.begin(a)) * strides[a];
      }
      placed.want.push_back({BoxAccess::Make(begin, held.extent()), to, strides});
    }
    at += part.volume();
  }
  return placed;
}

bool AppendIfInMemory(Result<std::vector<ServedData::Piece>> mapped,
                      std::vector<ServedData::Piece>& out) {
  // Why it failed is found out, and told, by the read that follows.
  if (!mapped.ok() || mapped.value().empty() ||
      mapped.value().size() > OpenedCheckpoint::kMaxMapped - out.size()) {
    return false;
  }
  for (const auto& piece : mapped.value()) {
    if (!InMemory(piece.data, piece.size)) return false;
  }
  for (auto& piece : std::move(mapped).value()) out.push_back(std::move(piece));
  return true;
}

}  // namespace

bool ServedData::GoodBlocks::All(std::uint64_t first, std::uint64_t last) const {
  for (std::uint64_t b = first; b <= last; ++b) {
    const std::uint64_t bit = std::uint64_t{1} << (b % 64);
    if ((words[b / 64].load(std::memory_order_acquire) & bit) == 0) return false;
  }
  return true;
}

void ServedData::GoodBlocks::Set(std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t b = first; b <= last; ++b) {
    words[b / 64].fetch_or(std::uint64_t{1} << (b % 64), std::memory_order_release);
  }
}

Result<ServedData::GoodBlocks*> ServedData::Good() const {
  const std::lock_guard lock(mutex_);
  if (good_) return good_.get();
  auto good = std::make_unique<GoodBlocks>();
  const CheckpointIndex& index = opened_.index();
  good->begins.reserve(index.tensor_count() + objects_.parts().size() + 1);
  std::uint64_t blocks = 0;
  TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& entry) {
    good->begins.push_back(blocks);
    blocks += BlocksOf(entry.meta.bytes());
    return true;
  }));
  if (good->begins.size() != index.tensor_count()) {
    return Status(Code::kDataLoss, "index: tensors are missing");
  }
  for (const ObjectContent& part : objects_.parts()) {
    good->begins.push_back(blocks);
    blocks += BlocksOf(part.length);
  }
  good->begins.push_back(blocks);
  good->words = std::vector<std::atomic<std::uint64_t>>(
      static_cast<std::size_t>(blocks / 64 + (blocks % 64 != 0)));
  good_ = std::move(good);
  return good_.get();
}

Status ServedData::ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out,
                              std::size_t size, ReadStats* stats) const {
  switch (verify_) {
    case ServeVerify::kOff:
      return opened_.ReadBytes(tensor, offset, out, size, ReadVerify::kOff, stats);
    case ServeVerify::kAlways:
      return opened_.ReadBytes(tensor, offset, out, size, ReadVerify::kExtendLeaves, stats);
    case ServeVerify::kFirst:
      break;
  }
  return ReadChecked(tensor, offset, out, size, stats);
}

Status ServedData::ReadChecked(const TensorEntry& tensor, std::uint64_t offset, char* out,
                               std::size_t size, ReadStats* stats) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(GoodBlocks* const good, Good());
  if (tensor.ordinal + 1 >= good->begins.size()) {
    return Status(Code::kInternal, "tensor " + tensor.meta.key() + ": not of this checkpoint");
  }
  const std::uint64_t base = good->begins[tensor.ordinal];
  const std::uint64_t first = offset / kLeafBytes;
  const std::uint64_t last = (offset + size - 1) / kLeafBytes;
  if (good->All(base + first, base + last)) {
    return opened_.ReadBytes(tensor, offset, out, size, ReadVerify::kOff, stats);
  }
  // Whole blocks, so that these need not be checked again.
  const std::uint64_t begin = first * kLeafBytes;
  const std::uint64_t end = std::min((last + 1) * kLeafBytes, tensor.meta.bytes());
  if (begin == offset && end == offset + size) {
    TENSORMOUNT_RETURN_IF_ERROR(
        opened_.ReadBytes(tensor, offset, out, size, ReadVerify::kExtendLeaves, stats));
  } else {
    std::vector<char> scratch(static_cast<std::size_t>(end - begin));
    TENSORMOUNT_RETURN_IF_ERROR(opened_.ReadBytes(tensor, begin, scratch.data(), scratch.size(),
                                                  ReadVerify::kExtendLeaves, stats));
    std::memcpy(out, scratch.data() + (offset - begin), size);
  }
  good->Set(base + first, base + last);
  return {};
}

Status ServedData::ReadBox(const FileContent::BoxSource& box, std::uint64_t offset, char* out,
                           std::size_t size, ReadStats* stats) const {
  const ReadVerify verify =
      verify_ == ServeVerify::kOff ? ReadVerify::kOff : ReadVerify::kExtendLeaves;
  return ReadBoxAs(box, offset, out, size, verify, stats);
}

Status ServedData::ReadBoxAs(const FileContent::BoxSource& box, std::uint64_t offset, char* out,
                             std::size_t size, ReadVerify verify, ReadStats* stats) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ServedRange placed, PlaceRange(box, offset, size));
  for (const auto& [at, bytes] : placed.zeros) std::memset(out + at, 0, bytes);
  ReadStats local;
  const Status status = opened_.ReadPlaced(
      box.tensor, placed.want, reinterpret_cast<std::byte*>(out), verify, local, nullptr);
  if (stats != nullptr) stats->Add(local);
  return status;
}

Status ServedData::ReadObject(std::uint32_t number, std::uint64_t offset, char* out,
                              std::size_t size) const {
  if (number >= objects_.parts().size()) {
    return Status(Code::kStale, "the checkpoint has no such object");
  }
  const ObjectContent& part = objects_.parts()[number];
  if (verify_ == ServeVerify::kOff) return opened_.ReadObject(part, offset, out, size);
  return ReadObjectLeaves(part, offset, out, size);
}

Status ServedData::ReadObjectLeaves(const ObjectContent& part, std::uint64_t offset, char* out,
                                    std::size_t size) const {
  // Whole leaves are what ReadObject checks.
  const std::uint64_t begin = offset / kLeafBytes * kLeafBytes;
  const std::uint64_t end =
      std::min((offset + size + kLeafBytes - 1) / kLeafBytes * kLeafBytes, part.length);
  if (begin == offset && end == offset + size) return opened_.ReadObject(part, offset, out, size);
  std::vector<char> scratch(static_cast<std::size_t>(end - begin));
  TENSORMOUNT_RETURN_IF_ERROR(opened_.ReadObject(part, begin, scratch.data(), scratch.size()));
  std::memcpy(out, scratch.data() + (offset - begin), size);
  return {};
}

bool ServedData::MapTensor(const TensorEntry& tensor, std::uint64_t offset, std::size_t size,
                           std::vector<Piece>& out) const {
  if (verify_ != ServeVerify::kOff) return false;
  return AppendIfInMemory(opened_.MapBytes(tensor, offset, size), out);
}

bool ServedData::MapBox(const FileContent::BoxSource& box, std::uint64_t offset, std::size_t size,
                        std::vector<Piece>& out) const {
  if (verify_ != ServeVerify::kOff) return false;
  const Result<ServedRange> placed = PlaceRange(box, offset, size);
  if (!placed.ok() || !placed.value().zeros.empty()) return false;
  return AppendIfInMemory(opened_.MapPlaced(box.tensor, placed.value().want), out);
}

Status ServedData::VerifyTensor(const TensorEntry& tensor, std::uint64_t skip, std::uint64_t length,
                                const Cancelled& cancelled) const {
  std::vector<char> scratch(static_cast<std::size_t>(std::min(length, kStepBytes)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const GoodBlocks* const good, Good());
  if (tensor.ordinal + 1 >= good->begins.size()) {
    return Status(Code::kInternal, "tensor " + tensor.meta.key() + ": not of this checkpoint");
  }
  const std::uint64_t base = good->begins[tensor.ordinal];
  return ForEachStep(skip, skip + length, cancelled, [&](std::uint64_t at, std::size_t size) {
    if (good->All(base + at / kLeafBytes, base + (at + size - 1) / kLeafBytes)) return Status();
    return ReadChecked(tensor, at, scratch.data(), size, nullptr);
  });
}

Status ServedData::VerifyBox(const FileContent::BoxSource& box, const Cancelled& cancelled) const {
  std::vector<char> scratch(static_cast<std::size_t>(std::min(box.bytes, kStepBytes)));
  return ForEachStep(0, box.bytes, cancelled, [&](std::uint64_t at, std::size_t size) {
    return ReadBoxAs(box, at, scratch.data(), size, ReadVerify::kExtendLeaves, nullptr);
  });
}

Status ServedData::VerifyObject(std::uint32_t number, const Cancelled& cancelled) const {
  if (number >= objects_.parts().size()) {
    return Status(Code::kStale, "the checkpoint has no such object");
  }
  const ObjectContent& part = objects_.parts()[number];
  TENSORMOUNT_ASSIGN_OR_RETURN(GoodBlocks* const good, Good());
  const std::uint64_t base = good->begins[opened_.index().tensor_count() + number];
  std::vector<char> scratch(static_cast<std::size_t>(std::min(part.length, kStepBytes)));
  return ForEachStep(0, part.length, cancelled, [&](std::uint64_t at, std::size_t size) {
    const std::uint64_t first = base + at / kLeafBytes;
    const std::uint64_t last = base + (at + size - 1) / kLeafBytes;
    if (good->All(first, last)) return Status();
    TENSORMOUNT_RETURN_IF_ERROR(ReadObjectLeaves(part, at, scratch.data(), size));
    good->Set(first, last);
    return Status();
  });
}

}  // namespace tensormount::fs
