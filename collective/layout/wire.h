// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_WIRE_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/shard.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/coding.h"
#include "base/hash.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// The encoding of a layout in messages between ranks: little-endian, never on disk. Ranks that run
// different versions of this software are refused earlier (layout_round.h has its own version).
// Records have fixed sizes, because a rank of a large job reads millions of them: 96 bytes for
// tensors of four axes or fewer (nearly all), 288 for the rest.
//
//   header    "TMLY", u32 version, u32 tensors, u32 short shards, u32 long shards, u32 objects
//   tensors   each: string key, u8 dtype, dims shape. Interned: a key appears once, however many
//             shards of it follow.
//   shards    96 bytes each for tensors of at most 4 axes, then 288 each for others (below)
//   objects   each: u32 position in the rank's state dict, string key, dims index, dims grid,
//             u64 length, hash of the bytes
// string: u32 length, bytes. dims: u8 number of axes, an i64 for each axis.
inline constexpr std::uint32_t kLayoutVersion = 1;
inline constexpr std::size_t kShortShardBytes = 96;
inline constexpr std::size_t kLongShardBytes = 288;
inline constexpr int kShortShardRank = 4;
constexpr int ShardSlots(int rank) { return rank <= kShortShardRank ? kShortShardRank : kMaxRank; }

// One shard:
//   u32 tensor      position in the table of tensors
//   u32 item        position in the rank's state dict
//   u32 flags       bit 0: a flat range; bits 1-2: Replica
//   u32 zero
//   i64 flat_first, i64 flat_count    (zero for boxes)
//   i64 begin[4 or 16], i64 extent[4 or 16]    (zero beyond the tensor's axes)
struct ShardRecord {
  std::uint32_t tensor = 0;
  std::uint32_t item = 0;
  bool flat = false;
  Replica replica = Replica::kUnlabelled;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t begin[kMaxRank] = {};
  std::int64_t extent[kMaxRank] = {};
};

void WriteShardRecord(std::string& out, std::uint32_t tensor, std::uint32_t item,
                      const Region& region, Replica replica);
// Reads the record of `Slots` axes at `p`. Returns false if flags or zero fields are wrong. The
// caller checks tensor numbers and regions.
template <int Slots>
bool ReadShardRecord(const char* p, ShardRecord* record);
extern template bool ReadShardRecord<kShortShardRank>(const char*, ShardRecord*);
extern template bool ReadShardRecord<kMaxRank>(const char*, ShardRecord*);
// The region of a record that belongs to a tensor of this shape. kDataLoss or kInvalidArgument if
// the region is malformed or outside the tensor.
Result<Region> RegionOf(const ShardRecord& record, const Dims& shape);

// The parts of a rank's state that are encoded.
enum class LayoutPart : std::uint8_t { kAll, kTensors, kObjects };

// Three hashes of a rank's layout. One rank of those with equal `tensors` sends its tensors, and
// one of those with equal `contents` sends its objects. `tensors` and `objects` are part of the
// job's fingerprint.
struct LayoutHashes {
  Hash128 tensors;             // Hash of keys, dtypes, shapes, shards and labels.
  std::uint64_t objects = 0;   // Hash of keys and grid positions. 0: no objects.
  std::uint64_t contents = 0;  // Hash of keys, grid positions, lengths and bytes. 0: no objects.
};

// Encodes one rank's layout. Reads the state dict once, in the constructor, and takes about as much
// memory as the layout on the wire. The state must have fewer than 2^32 shards and objects.
class LayoutEncoder {
 public:
  explicit LayoutEncoder(const StateDict& state);

  LayoutHashes Hashes() const;
  // Returns one message for each owner (a rank that checks keys, OwnerOf): this rank's layout of
  // the owner's keys; empty if this rank holds none of them. Ranks with equal layouts have equal
  // messages: nothing in them depends on the rank.
  std::vector<std::string> Encode(std::uint32_t owners, LayoutPart part) const;

 private:
  // Records of one kind, each about one key. One string instead of a vector: a rank has up to
  // millions of records, and a message is cut from the string by copying ranges.
  struct Records {
    std::string bytes;
    std::vector<std::size_t> ends;        // Empty if all records have one size.
    std::vector<std::uint32_t> subjects;  // By record: the number of its tensor or object.

    std::size_t size() const { return subjects.size(); }
    std::string_view at(std::size_t i, std::size_t each) const {
      if (ends.empty()) return std::string_view(bytes).substr(i * each, each);
      const std::size_t begin = i == 0 ? 0 : ends[i - 1];
      return std::string_view(bytes).substr(begin, ends[i] - begin);
    }
  };
  struct Message;

  Records metas_;
  Records short_shards_;
  Records long_shards_;
  Records objects_;
  std::string places_;                      // Encoded keys and grid positions of objects.
  std::vector<std::uint64_t> tensor_keys_;  // By tensor: hash of its key.
  std::vector<std::uint64_t> object_keys_;
};

// A decoded layout, for callers with few layouts (specs, tests). LayoutTable::Add reads many
// layouts faster.
struct DecodedLayout {
  struct ShardItem {
    std::uint32_t tensor = 0;  // Position in `tensors`.
    std::uint32_t item = 0;    // Position in the rank's state dict.
    Replica replica = Replica::kUnlabelled;
    Region region;
  };
  struct ObjectItem {
    std::uint32_t item = 0;
    std::string key;
    Dims index;
    Dims grid;
    std::uint64_t length = 0;
    Hash128 hash;
  };
  std::vector<TensorMeta> tensors;  // In the order in which the rank added them.
  std::vector<ShardItem> shards;
  std::vector<ObjectItem> objects;
};
// Decodes a layout. Malformed bytes fail with kDataLoss "<what>: ...".
Result<DecodedLayout> DecodeLayout(std::string_view encoded, std::string_view what);

// Counts of records in the header of an encoded layout.
struct LayoutHeader {
  std::uint32_t tensors = 0;
  std::uint64_t short_shards = 0;
  std::uint64_t long_shards = 0;
  std::uint32_t objects = 0;
};
Result<LayoutHeader> ReadLayoutHeader(ByteReader& in, std::string_view what);
Result<TensorMeta> ReadMeta(ByteReader& in, std::string_view what);
Result<DecodedLayout::ObjectItem> ReadObjectItem(ByteReader& in, std::string_view what);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_WIRE_H_
