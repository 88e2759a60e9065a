// SPDX-License-Identifier: Apache-2.0
#include "collective/validate/wire.h"

#include <unordered_map>
#include <utility>

#include "collective/validate/layout.h"
#include "index/record_coding.h"

namespace tensormount {
namespace {

constexpr std::string_view kMagic("TMLY", 4);
constexpr std::size_t kMaxMessage = std::size_t{1} << 20;
constexpr std::uint32_t kFlatFlag = 1;
constexpr std::uint32_t kReplicaShift = 1;
constexpr std::uint32_t kMaxFlags = kFlatFlag | static_cast<std::uint32_t>(Replica::kCopy)
                                                    << kReplicaShift;
// An object's record without key and dims.
constexpr std::size_t kMinObjectBytes = 4 + 4 + 1 + 1 + 8 + 16;

Status Broken(std::string_view what, std::string_view why) {
  return Status(Code::kDataLoss, std::string(what) + ": " + std::string(why));
}

Result<Dims> ReadDims(ByteReader& in, std::string_view what) {
  const int rank = in.U8();
  if (rank > kMaxRank) return Broken(what, "rank " + std::to_string(rank) + " is too high");
  Dims dims;
  for (int a = 0; a < rank; ++a) dims.push_back(in.I64());
  return dims;
}

void WriteObjectPlace(ByteWriter& out, std::uint32_t item, const StateDict::ObjectItem& object) {
  out.U32(item);
  out.String(object.key);
  EncodeDims(out, object.place.index);
  EncodeDims(out, object.place.grid);
}

void WriteMeta(ByteWriter& out, const StateDict::TensorItem& item) {
  out.String(item.key);
  out.U8(static_cast<std::uint8_t>(item.shard.data.dtype));
  EncodeDims(out, item.shard.global_shape);
}

// What one owner is told.
struct OwnerMessage {
  std::uint32_t tensors = 0;
  std::uint32_t short_shards = 0;
  std::uint32_t long_shards = 0;
  std::uint32_t objects = 0;
  ByteWriter metas;
  ByteWriter shards;
  ByteWriter rest;  // Long shards, then objects.

  bool empty() const { return tensors == 0 && objects == 0; }
  std::string Join() {
    if (empty()) return {};
    ByteWriter out;
    out.bytes().reserve(kMagic.size() + 20 + metas.size() + shards.size() + rest.size());
    out.Raw(kMagic.data(), kMagic.size());
    out.U32(kLayoutVersion);
    out.U32(tensors);
    out.U32(short_shards);
    out.U32(long_shards);
    out.U32(objects);
    for (ByteWriter* part : {&metas, &shards, &rest}) out.Raw(part->bytes().data(), part->size());
    return std::move(out.bytes());
  }
};

}  // namespace

std::uint32_t OwnerOf(std::string_view key, std::uint32_t owners) {
  const std::uint64_t high = Xxh3Low64(key) >> 32;
  return static_cast<std::uint32_t>((high * owners) >> 32);
}

void WriteShardRecord(ByteWriter& out, std::uint32_t tensor, std::uint32_t item,
                      const Region& region, Replica replica) {
  const Box& box = region.box();
  const int slots = ShardSlots(box.rank());
  std::int64_t words[2 + 2 * kMaxRank] = {};
  if (region.is_flat()) {
    words[0] = region.flat_first();
    words[1] = region.volume();
  }
  for (int a = 0; a < box.rank(); ++a) {
    words[2 + a] = box.begin(a);
    words[2 + slots + a] = box.extent(a);
  }
  out.U32(tensor);
  out.U32(item);
  out.U32((region.is_flat() ? kFlatFlag : 0) | static_cast<std::uint32_t>(replica)
                                                   << kReplicaShift);
  out.U32(0);
  out.Raw(words, sizeof(std::int64_t) * static_cast<std::size_t>(2 + 2 * slots));
}

template <int Slots>
bool ReadShardRecord(const char* p, ShardRecord* record) {
  record->tensor = LoadLittle<std::uint32_t>(p);
  record->item = LoadLittle<std::uint32_t>(p + 4);
  const auto flags = LoadLittle<std::uint32_t>(p + 8);
  const auto zero = LoadLittle<std::uint32_t>(p + 12);
  record->first = LoadLittle<std::int64_t>(p + 16);
  record->count = LoadLittle<std::int64_t>(p + 24);
  std::memcpy(record->begin, p + 32, 8 * Slots);
  std::memcpy(record->extent, p + 32 + 8 * Slots, 8 * Slots);
  record->flat = (flags & kFlatFlag) != 0;
  record->replica = static_cast<Replica>((flags >> kReplicaShift) & 3);
  return flags <= kMaxFlags && zero == 0 &&
         (record->flat || (record->first == 0 && record->count == 0));
}
template bool ReadShardRecord<kShortShardRank>(const char*, ShardRecord*);
template bool ReadShardRecord<kMaxRank>(const char*, ShardRecord*);

Result<Region> RegionOf(const ShardRecord& record, const Dims& shape) {
  Dims begin;
  Dims extent;
  for (int a = 0; a < shape.rank(); ++a) {
    begin.push_back(record.begin[a]);
    extent.push_back(record.extent[a]);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
  // Of the box that a range counts in too, though its cells may lie in a smaller one.
  if (!box.Within(shape)) {
    return Status(Code::kDataLoss,
                  "region " + box.ToString() + " lies outside of shape " + shape.ToString());
  }
  if (record.flat) return Region::Flat(box, record.first, record.count);
  return Region(box);
}

LayoutEncoder::LayoutEncoder(const StateDict& state) : state_(state) {
  std::unordered_map<std::string_view, std::uint32_t> numbers;
  tensor_of_.reserve(state.tensors().size());
  for (std::size_t i = 0; i < state.tensors().size(); ++i) {
    const auto next = static_cast<std::uint32_t>(first_item_.size());
    const auto [at, added] = numbers.try_emplace(state.tensors()[i].key, next);
    if (added) first_item_.push_back(i);
    tensor_of_.push_back(at->second);
  }
  object_hashes_.reserve(state.objects().size());
  for (const StateDict::ObjectItem& object : state.objects()) {
    object_hashes_.push_back(Xxh3(object.bytes));
  }
}

LayoutHashes LayoutEncoder::Hashes() const {
  LayoutHashes hashes;
  hashes.tensors = Xxh3(Encode(1, LayoutPart::kTensors)[0]);
  if (state_.objects().empty()) return hashes;
  ByteWriter places;
  for (std::size_t i = 0; i < state_.objects().size(); ++i) {
    WriteObjectPlace(places, static_cast<std::uint32_t>(i), state_.objects()[i]);
  }
  hashes.objects = Xxh3Low64(places.bytes()) | 1;  // Not 0.
  hashes.contents = Xxh3Low64(Encode(1, LayoutPart::kObjects)[0]) | 1;
  return hashes;
}

std::vector<std::string> LayoutEncoder::Encode(std::uint32_t owners, LayoutPart part) const {
  std::vector<OwnerMessage> messages(owners);
  if (part != LayoutPart::kObjects) {
    std::vector<std::uint32_t> owner_of(first_item_.size());
    std::vector<std::uint32_t> number(first_item_.size());  // In the owner's table.
    for (std::size_t t = 0; t < first_item_.size(); ++t) {
      const StateDict::TensorItem& item = state_.tensors()[first_item_[t]];
      owner_of[t] = OwnerOf(item.key, owners);
      OwnerMessage& message = messages[owner_of[t]];
      number[t] = message.tensors++;
      WriteMeta(message.metas, item);
    }
    for (std::size_t i = 0; i < state_.tensors().size(); ++i) {
      const std::uint32_t t = tensor_of_[i];
      const Shard& shard = state_.tensors()[i].shard;
      OwnerMessage& message = messages[owner_of[t]];
      const bool is_short = shard.global_shape.rank() <= kShortShardRank;
      ++(is_short ? message.short_shards : message.long_shards);
      WriteShardRecord(is_short ? message.shards : message.rest, number[t],
                       static_cast<std::uint32_t>(i), shard.region, shard.replica);
    }
  }
  if (part != LayoutPart::kTensors) {
    for (std::size_t i = 0; i < state_.objects().size(); ++i) {
      const StateDict::ObjectItem& object = state_.objects()[i];
      OwnerMessage& message = messages[OwnerOf(object.key, owners)];
      ++message.objects;
      WriteObjectPlace(message.rest, static_cast<std::uint32_t>(i), object);
      message.rest.U64(object.bytes.size());
      message.rest.Hash(object_hashes_[i]);
    }
  }
  std::vector<std::string> encoded;
  encoded.reserve(owners);
  for (OwnerMessage& message : messages) {
    encoded.push_back(message.Join());
    message = {};
  }
  return encoded;
}

std::string EncodeLayout(const StateDict& state, std::uint32_t owner, std::uint32_t owners) {
  return std::move(LayoutEncoder(state).Encode(owners, LayoutPart::kAll)[owner]);
}

Hash128 LayoutFingerprint(const StateDict& state) {
  const LayoutHashes hashes = LayoutEncoder(state).Hashes();
  ByteWriter out;
  out.Hash(hashes.tensors);
  out.U64(hashes.objects);
  return Xxh3(out.bytes());
}

Result<LayoutHeader> ReadLayoutHeader(ByteReader& in, std::string_view what) {
  const std::string_view magic = in.Raw(kMagic.size());
  const std::uint32_t version = in.U32();
  LayoutHeader header;
  header.tensors = in.U32();
  header.short_shards = in.U32();
  header.long_shards = in.U32();
  header.objects = in.U32();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (magic != kMagic || version != kLayoutVersion) {
    return Broken(what, "not a layout of this version");
  }
  // Before anything is sized by these numbers; no sum can overflow.
  const std::uint64_t least = header.short_shards * kShortShardBytes +
                              header.long_shards * kLongShardBytes +
                              header.objects * kMinObjectBytes + header.tensors * std::uint64_t{6};
  if (least > in.left()) return Broken(what, "announces more than there are bytes");
  return header;
}

Result<TensorMeta> ReadMeta(ByteReader& in, std::string_view what) {
  Result<TensorMeta> meta = DecodeMeta(in, what);
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  // Ranks run one version: an element type that is not known is damage.
  if (!meta.ok()) return Status(Code::kDataLoss, meta.status().message());
  return meta;
}

Result<DecodedLayout::ObjectItem> ReadObjectItem(ByteReader& in, std::string_view what) {
  DecodedLayout::ObjectItem object;
  object.item = in.U32();
  object.key = in.String(kMaxKeyBytes);
  TENSORMOUNT_ASSIGN_OR_RETURN(object.index, ReadDims(in, what));
  TENSORMOUNT_ASSIGN_OR_RETURN(object.grid, ReadDims(in, what));
  object.length = in.U64();
  object.hash = in.Hash();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (Status status = CheckKey(object.key); !status.ok()) return Broken(what, status.message());
  if (object.index.rank() != object.grid.rank()) {
    return Broken(what, "object " + object.key + ": index and grid differ in rank");
  }
  for (int a = 0; a < object.grid.rank(); ++a) {
    if (object.index[a] < 0 || object.index[a] >= object.grid[a]) {
      return Broken(what, "object " + object.key + ": index outside of its grid");
    }
  }
  if (!CheckedProduct(object.grid)) {
    return Broken(what, "object " + object.key + ": its grid is too large");
  }
  return object;
}

Result<DecodedLayout> DecodeLayout(std::string_view encoded, std::string_view what) {
  DecodedLayout layout;
  if (encoded.empty()) return layout;
  ByteReader in(encoded, what);
  TENSORMOUNT_ASSIGN_OR_RETURN(const LayoutHeader header, ReadLayoutHeader(in, what));
  layout.tensors.reserve(header.tensors);
  for (std::uint32_t t = 0; t < header.tensors; ++t) {
    TENSORMOUNT_ASSIGN_OR_RETURN(TensorMeta meta, ReadMeta(in, what));
    layout.tensors.push_back(std::move(meta));
  }
  layout.shards.reserve(header.short_shards + header.long_shards);
  for (std::uint64_t i = 0; i < header.short_shards + header.long_shards; ++i) {
    const bool is_short = i < header.short_shards;
    const std::string_view bytes = in.Raw(is_short ? kShortShardBytes : kLongShardBytes);
    TENSORMOUNT_RETURN_IF_ERROR(in.status());
    ShardRecord record;
    const bool sane = is_short ? ReadShardRecord<kShortShardRank>(bytes.data(), &record)
                               : ReadShardRecord<kMaxRank>(bytes.data(), &record);
    if (!sane || record.tensor >= layout.tensors.size()) {
      return Broken(what, "a shard record is damaged");
    }
    const TensorMeta& meta = layout.tensors[record.tensor];
    if ((meta.shape().rank() <= kShortShardRank) != is_short) {
      return Broken(what, "tensor " + meta.key() + ": a shard record of another rank");
    }
    Result<Region> region = RegionOf(record, meta.shape());
    if (!region.ok()) {
      return Broken(what, "tensor " + meta.key() + ": " + region.status().message());
    }
    layout.shards.push_back(
        {record.tensor, record.item, record.replica, std::move(region).value()});
  }
  for (std::uint32_t i = 0; i < header.objects; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(DecodedLayout::ObjectItem object, ReadObjectItem(in, what));
    layout.objects.push_back(std::move(object));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return layout;
}

void WriteStatus(ByteWriter& out, const Status& status) {
  out.U8(static_cast<std::uint8_t>(status.code()));
  if (status.ok()) return;
  out.U32(static_cast<std::uint32_t>(status.ToErrno()));
  out.String(std::string_view(status.message()).substr(0, kMaxMessage));
}

Status ReadStatus(ByteReader& in) {
  const std::uint8_t code = in.U8();
  if (code == 0) return Status();
  const std::uint32_t err = in.U32();
  const std::string_view message = in.String(kMaxMessage);
  if (code > static_cast<std::uint8_t>(Code::kInternal) || err > 4095 || !in.status().ok()) {
    return Status(Code::kDataLoss, "a status that came from another rank is damaged");
  }
  return Status::FromParts(static_cast<Code>(code), static_cast<int>(err), std::string(message));
}

}  // namespace tensormount
