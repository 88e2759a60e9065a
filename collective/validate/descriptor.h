// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_VALIDATE_DESCRIPTOR_H_
#define TENSORMOUNT_COLLECTIVE_VALIDATE_DESCRIPTOR_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "collective/validate/wire.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// What one rank tells all others before a save: what it holds, not the bytes. Little-endian, never
// on disk; ranks of another version are recognised by magic and version and refused by name.
//
//   header    "TMSAVED" NUL, u32 version, u32 rank, u32 world
//   status    u8 code, u32 errno, string message: why this rank cannot take part (code 0: it can);
//             of a rank that cannot nothing else follows
//   options   string path, u8 placement, u8 replicas, u8 replace, string producer, i64 now
//   tensors   u32 count; each: u8 dtype, u8 rank, i64 shape[rank], string key. Interned: a key
//             appears once, however many shards of it follow.
//   shards    u32 short, u32 long: counts; then records as in wire.h
//   objects   u32 count; each: string key, dims index, dims grid, u64 length, hash of the bytes;
//             dims: u8 rank, i64[rank]
//   common    u32 count; each: string name, hash of the encoded value
// string: u32 length, bytes.
inline constexpr std::uint32_t kDescriptorVersion = 1;

struct ShardDescriptor {
  std::uint32_t tensor = 0;
  std::uint32_t item = 0;
  Region region;
};
struct ObjectDescriptor {
  std::string key;
  Dims index;
  Dims grid;
  std::uint64_t length = 0;
  Hash128 hash;
};
struct CommonDescriptor {
  std::string name;
  Hash128 hash;
};
struct RankDescriptor {
  Status status;
  std::string path;
  PlacementRule placement = PlacementRule::kAuto;
  ReplicaCheck replicas = ReplicaCheck::kRotating;
  IfExists if_exists = IfExists::kFail;
  std::string producer;
  std::int64_t now = 0;
  std::vector<TensorMeta> tensors;
  std::vector<ShardDescriptor> shards;
  std::vector<ObjectDescriptor> objects;
  std::vector<CommonDescriptor> common;
};

// A state dict with a failure gives the descriptor of a rank that cannot take part.
std::string EncodeDescriptor(const StateDict& state, std::string_view path,
                             const SaveOptions& options, int rank, int world);
// kDataLoss "descriptor of rank N: ..." where a rule is broken; kInvalidArgument where that rank
// runs another version or counts another number of ranks.
Result<RankDescriptor> DecodeDescriptor(std::string_view bytes, int rank, int world);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_VALIDATE_DESCRIPTOR_H_
