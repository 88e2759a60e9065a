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

// A layout as it travels between ranks. Little-endian, never on disk. Ranks that run different
// versions of this software do not get this far (layout_round.h has a version of its own).
// Records have fixed sizes, because owners of large jobs read millions of them: 96 bytes for what
// nearly all tensors are (four axes or fewer), 288 for the rest.
//
//   header    "TMLY", u32 version, u32 tensors, u32 short shards, u32 long shards, u32 objects
//   tensors   each: string key, u8 dtype, dims shape. Interned: a key appears once, however many
//             shards of it follow.
//   shards    96 bytes each for tensors of rank <= 4, then 288 bytes each for others (below)
//   objects   each: u32 position in the rank's state dict, string key, dims index, dims grid,
//             u64 length, hash of the bytes
// string: u32 length, bytes. dims: u8 rank, i64[rank].
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
//   i64 begin[4 or 16], i64 extent[4 or 16]    (zero beyond the tensor's rank)
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
// Reads the record of `Slots` axes at `p`. False where flags or what must be zero are broken;
// tensor numbers and regions are for the caller to check.
template <int Slots>
bool ReadShardRecord(const char* p, ShardRecord* record);
extern template bool ReadShardRecord<kShortShardRank>(const char*, ShardRecord*);
extern template bool ReadShardRecord<kMaxRank>(const char*, ShardRecord*);
// The region of a record that belongs to a tensor of this shape. kDataLoss, kInvalidArgument where
// it is none or does not lie within.
Result<Region> RegionOf(const ShardRecord& record, const Dims& shape);

// Which of a rank's things are encoded.
enum class LayoutPart : std::uint8_t { kAll, kTensors, kObjects };

// Three hashes of a rank's layout, by what they are for: ranks with equal `tensors` or `objects`
// send one layout for all of them; `contents` decides whether bytes of objects need comparing.
struct LayoutHashes {
  Hash128 tensors;             // Keys, dtypes, shapes, shards, labels.
  std::uint64_t objects = 0;   // Keys and places. 0: has none, as below.
  std::uint64_t contents = 0;  // Keys, places, lengths and bytes of the objects.
};

// Writes one rank's layout. Goes through the state dict once, when made, and does not need it after
// that; takes about as much memory as the layout on the wire. The state must have fewer than 2^32
// shards and objects.
class LayoutEncoder {
 public:
  explicit LayoutEncoder(const StateDict& state);

  LayoutHashes Hashes() const;
  // By owner: what the rank holds of the keys of each; empty where that is nothing. Ranks with
  // equal layouts have equal bytes: nothing in them depends on the rank.
  std::vector<std::string> Encode(std::uint32_t owners, LayoutPart part) const;

 private:
  // Records of one kind, one after the other, each about one key. One string instead of a vector of
  // them: a rank has up to millions, and a message is cut from it by copying ranges.
  struct Records {
    std::string bytes;
    std::vector<std::size_t> ends;        // Empty where all are of one size.
    std::vector<std::uint32_t> subjects;  // Of each: a tensor, or the object itself.

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
  std::string places_;                      // Of objects: what of them is the same in every save.
  std::vector<std::uint64_t> tensor_keys_;  // Hashes, by tensor.
  std::vector<std::uint64_t> object_keys_;
};

// An encoded layout taken apart, for those who have few of them (specs, tests). Tables of many
// layouts read faster (LayoutTable::Add).
struct DecodedLayout {
  struct ShardItem {
    std::uint32_t tensor = 0;  // In `tensors`.
    std::uint32_t item = 0;    // In the rank's state dict.
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
// kDataLoss "<what>: ..." where the bytes break a rule.
Result<DecodedLayout> DecodeLayout(std::string_view encoded, std::string_view what);

// Fields of the encoding, shared by its readers.
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
