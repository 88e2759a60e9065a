// SPDX-License-Identifier: Apache-2.0
// Layouts as messages: each key once, then regions as numbers. The encoder reads a StateDict once
// and makes hashes and messages from the same bytes.
#include "collective/layout/wire.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/errors.h"
#include "collective/layout/layout.h"
#include "shard/coding.h"

namespace tensormount {
namespace {

constexpr std::string_view kLayoutMagic("TMLY", 4);
constexpr std::size_t kHeaderBytes = 24;
constexpr std::uint32_t kFlatFlag = 1;
constexpr std::uint32_t kReplicaShift = 1;
constexpr std::uint32_t kMaxFlags = kFlatFlag | static_cast<std::uint32_t>(Replica::kCopy)
                                                    << kReplicaShift;
// Size of an object's record without the bytes of its key and dims.
constexpr std::size_t kMinObjectBytes = 4 + 4 + 1 + 1 + 8 + 16;

void WriteObjectPlace(ByteWriter& out, std::uint32_t item, const StateDict::ObjectItem& object) {
  out.U32(item);
  out.String(object.key);
  EncodeDims(out, object.place.index);
  EncodeDims(out, object.place.grid);
}

std::uint32_t OwnerOfHash(std::uint64_t hash, std::uint32_t owners) {
  return static_cast<std::uint32_t>(((hash >> 32) * owners) >> 32);
}

// A hash table that maps a key to the number of the first item with that key.
class KeyTable {
 public:
  explicit KeyTable(std::size_t keys) : slots_(std::bit_ceil(2 * keys + 2), kNone) {}

  // Returns the number of an equal key, found by `equal(number)`, or adds and returns `fresh`.
  template <typename Equal>
  std::uint32_t FindOrAdd(std::uint64_t hash, std::uint32_t fresh, Equal equal) {
    for (std::size_t at = hash & (slots_.size() - 1);; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at] == kNone) return slots_[at] = fresh;
      if (equal(slots_[at])) return slots_[at];
    }
  }

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::vector<std::uint32_t> slots_;
};

}  // namespace

// The message for one owner (a rank that checks keys), and the counts in its header.
struct LayoutEncoder::Message {
  std::uint32_t tensors = 0;
  std::uint32_t short_shards = 0;
  std::uint32_t long_shards = 0;
  std::uint32_t objects = 0;
  std::size_t bytes = kHeaderBytes;
  std::string out;

  void Begin() {
    if (bytes == kHeaderBytes) return;
    ByteWriter header;
    header.bytes().reserve(bytes);
    header.Raw(kLayoutMagic.data(), kLayoutMagic.size());
    header.U32(kLayoutVersion);
    header.U32(tensors);
    header.U32(short_shards);
    header.U32(long_shards);
    header.U32(objects);
    out = std::move(header.bytes());
  }
};

std::uint32_t OwnerOf(std::string_view key, std::uint32_t owners) {
  return OwnerOfHash(Xxh3Low64(key), owners);
}

void WriteShardRecord(std::string& out, std::uint32_t tensor, std::uint32_t item,
                      const Region& region, Replica replica) {
  const Box& box = region.box();
  const auto slots = static_cast<std::size_t>(ShardSlots(box.rank()));
  std::int64_t words[4 + 2 * kMaxRank];
  std::fill(words, words + 4 + 2 * slots, 0);
  const std::uint32_t flags =
      (region.is_flat() ? kFlatFlag : 0) | static_cast<std::uint32_t>(replica) << kReplicaShift;
  words[0] = static_cast<std::int64_t>(tensor | std::uint64_t{item} << 32);
  words[1] = flags;
  if (region.is_flat()) {
    words[2] = region.flat_first();
    words[3] = region.volume();
  }
  for (int a = 0; a < box.rank(); ++a) {
    words[4 + static_cast<std::size_t>(a)] = box.begin(a);
    words[4 + slots + static_cast<std::size_t>(a)] = box.extent(a);
  }
  out.append(reinterpret_cast<const char*>(words), sizeof(std::int64_t) * (4 + 2 * slots));
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
  // A flat range is numbered within its box, so the whole box must lie in the tensor, even if the
  // range's cells lie in a smaller box.
  if (!box.Within(shape)) {
    return Status(Code::kDataLoss,
                  "region " + box.ToString() + " lies outside of shape " + shape.ToString());
  }
  if (record.flat) return Region::Flat(box, record.first, record.count);
  return Region(box);
}

LayoutEncoder::LayoutEncoder(const StateDict& state) {
  const std::vector<StateDict::TensorItem>& items = state.tensors();
  KeyTable table(items.size());
  std::vector<std::size_t> first_item;
  ByteWriter metas;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const StateDict::TensorItem& item = items[i];
    const std::uint64_t hash = Xxh3Low64(item.key);
    const auto fresh = static_cast<std::uint32_t>(first_item.size());
    const std::uint32_t tensor = table.FindOrAdd(hash, fresh, [&](std::uint32_t t) {
      return tensor_keys_[t] == hash && items[first_item[t]].key == item.key;
    });
    if (tensor == fresh) {
      first_item.push_back(i);
      tensor_keys_.push_back(hash);
      EncodeMeta(metas, item.key, item.shard.data.dtype, item.shard.global_shape);
      metas_.ends.push_back(metas.size());
      metas_.subjects.push_back(tensor);
    }
    Records& shards =
        item.shard.global_shape.rank() <= kShortShardRank ? short_shards_ : long_shards_;
    WriteShardRecord(shards.bytes, tensor, static_cast<std::uint32_t>(i), item.shard.region,
                     item.shard.replica);
    shards.subjects.push_back(tensor);
  }
  metas_.bytes = std::move(metas.bytes());

  ByteWriter objects;
  ByteWriter places;
  for (std::uint32_t i = 0; i < state.objects().size(); ++i) {
    const StateDict::ObjectItem& object = state.objects()[i];
    object_keys_.push_back(Xxh3Low64(object.key));
    WriteObjectPlace(places, i, object);
    WriteObjectPlace(objects, i, object);
    objects.U64(object.bytes.size());
    objects.Hash(Xxh3(object.bytes));
    objects_.ends.push_back(objects.size());
    objects_.subjects.push_back(i);
  }
  objects_.bytes = std::move(objects.bytes());
  places_ = std::move(places.bytes());
}

LayoutHashes LayoutEncoder::Hashes() const {
  Xxh3Stream tensors;
  for (const Records* records : {&metas_, &short_shards_, &long_shards_}) {
    const std::uint64_t size = records->size();
    tensors.Update(&size, sizeof(size));
    tensors.Update(records->bytes.data(), records->bytes.size());
  }
  LayoutHashes hashes;
  hashes.tensors = tensors.Value();
  if (objects_.size() == 0) return hashes;
  hashes.objects = Xxh3Low64(places_) | 1;  // Never 0, which means no objects.
  hashes.contents = Xxh3Low64(objects_.bytes) | 1;
  return hashes;
}

std::vector<std::string> LayoutEncoder::Encode(std::uint32_t owners, LayoutPart part) const {
  std::vector<Message> messages(owners);
  std::vector<std::uint32_t> owner_of;  // By tensor: the rank that checks its key.
  std::vector<std::uint32_t> number;    // By tensor: its number in the message.
  const bool tensors = part != LayoutPart::kObjects;
  const bool objects = part != LayoutPart::kTensors;
  const auto owner_of_object = [&](std::size_t i) { return OwnerOfHash(object_keys_[i], owners); };
  // Counts the records of each message first, so that its memory is allocated once.
  for (std::size_t t = 0; tensors && t < metas_.size(); ++t) {
    owner_of.push_back(OwnerOfHash(tensor_keys_[t], owners));
    Message& message = messages[owner_of[t]];
    number.push_back(message.tensors++);
    message.bytes += metas_.at(t, 0).size();
  }
  for (std::size_t i = 0; tensors && i < short_shards_.size(); ++i) {
    Message& message = messages[owner_of[short_shards_.subjects[i]]];
    ++message.short_shards;
    message.bytes += kShortShardBytes;
  }
  for (std::size_t i = 0; tensors && i < long_shards_.size(); ++i) {
    Message& message = messages[owner_of[long_shards_.subjects[i]]];
    ++message.long_shards;
    message.bytes += kLongShardBytes;
  }
  for (std::size_t i = 0; objects && i < objects_.size(); ++i) {
    Message& message = messages[owner_of_object(i)];
    ++message.objects;
    message.bytes += objects_.at(i, 0).size();
  }
  for (Message& message : messages) message.Begin();

  const auto add_shards = [&](const Records& shards, std::size_t each) {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const std::uint32_t t = shards.subjects[i];
      std::string& out = messages[owner_of[t]].out;
      const std::size_t at = out.size();
      out.append(shards.at(i, each));
      StoreLittle(&out[at], number[t]);
    }
  };
  if (tensors) {
    for (std::size_t t = 0; t < metas_.size(); ++t) {
      messages[owner_of[t]].out.append(metas_.at(t, 0));
    }
    add_shards(short_shards_, kShortShardBytes);
    add_shards(long_shards_, kLongShardBytes);
  }
  for (std::size_t i = 0; objects && i < objects_.size(); ++i) {
    messages[owner_of_object(i)].out.append(objects_.at(i, 0));
  }
  std::vector<std::string> encoded;
  encoded.reserve(owners);
  for (Message& message : messages) encoded.push_back(std::move(message.out));
  return encoded;
}

std::string EncodeLayout(const StateDict& state, std::uint32_t owner, std::uint32_t owners) {
  return std::move(LayoutEncoder(state).Encode(owners, LayoutPart::kAll)[owner]);
}

Result<LayoutHeader> ReadLayoutHeader(ByteReader& in, std::string_view what) {
  const std::string_view magic = in.Raw(kLayoutMagic.size());
  const std::uint32_t version = in.U32();
  LayoutHeader header;
  header.tensors = in.U32();
  header.short_shards = in.U32();
  header.long_shards = in.U32();
  header.objects = in.U32();
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  if (magic != kLayoutMagic || version != kLayoutVersion) {
    return DataLoss(what, "the message is not a layout in the format of this version");
  }
  // Checked before memory is allocated for these counts; the sum cannot overflow.
  const std::uint64_t least = header.short_shards * kShortShardBytes +
                              header.long_shards * kLongShardBytes +
                              header.objects * kMinObjectBytes + header.tensors * std::uint64_t{6};
  if (least > in.left())
    return DataLoss(what, "the message is too short for the entries that it announces");
  return header;
}

Result<TensorMeta> ReadMeta(ByteReader& in, std::string_view what) {
  Result<TensorMeta> meta = DecodeMeta(in, what);
  // All ranks run one version, so an unknown element type is damage.
  if (!meta.ok()) return Status(Code::kDataLoss, meta.status().message());
  return meta;
}

Result<DecodedLayout::ObjectItem> ReadObjectItem(ByteReader& in, std::string_view what) {
  DecodedLayout::ObjectItem object;
  object.item = in.U32();
  object.key = in.String(kMaxKeyBytes);
  TENSORMOUNT_RETURN_IF_ERROR(DecodeGridPosition(in, what, object.key, object.index, object.grid));
  object.length = in.U64();  // If the bytes end here, the caller's Finish fails.
  object.hash = in.Hash();
  if (Status status = CheckKey(object.key); !status.ok()) return DataLoss(what, status.message());
  if (!CheckedProduct(object.grid)) {
    return DataLoss(what, "object " + object.key + ": its grid " + object.grid.ToString() +
                              " has too many parts");
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
      return DataLoss(what, "a shard record is damaged");
    }
    const TensorMeta& meta = layout.tensors[record.tensor];
    if ((meta.shape().rank() <= kShortShardRank) != is_short) {
      return DataLoss(what, "tensor " + meta.key() +
                                ": a shard record has another number of axes than the tensor");
    }
    Result<Region> region = RegionOf(record, meta.shape());
    if (!region.ok()) {
      return DataLoss(what, "tensor " + meta.key() + ": " + region.status().message());
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

}  // namespace tensormount
