// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_REQUEST_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_REQUEST_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/load.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// What one rank asks of a checkpoint, without where it goes: what other ranks need to know of it.
// Nothing in it depends on the rank, so that ranks that ask for the same have equal bytes, and one
// of them can speak for all.
//
//   "TMLOADR" NUL, u32 version
//   tensors   u32 count; each: u8 dtype, u8 rank, i64 shape[rank], string key
//   shards    u32 count; each: u32 tensor, u32 item, u8 1 where flat, i64 begin[rank],
//             i64 extent[rank], and where flat i64 first, i64 count
//   objects   u32 count; each: string key, dims index, dims grid
// Little-endian, never on disk. dims: u8 rank, i64[rank]; string: u32 length, bytes.
// Where memory is, its strides, and whether elements are converted on the way into it, are not in
// it: those are this rank's alone (load/target.h).
struct LoadRequest {
  std::vector<TensorMeta> tensors;  // As asked for; a key stands here once.
  struct Item {
    std::uint32_t tensor = 0;
    std::uint32_t item = 0;  // Position in StateDict::tensors().
    Region region;           // Of the tensor as asked for; may be empty.
  };
  std::vector<Item> items;
  struct Object {
    std::string key;
    Dims index;
    Dims grid;
  };
  std::vector<Object> objects;
};

// The state dict's own failure, or kInvalidArgument naming a shard without memory.
Result<std::string> EncodeRequest(const StateDict& request);
// kDataLoss where a rule is broken.
Result<LoadRequest> DecodeRequest(std::string_view bytes);

// Of everything that must be the same on all ranks of a load: path and options.
Hash128 CallFingerprint(std::string_view path, const LoadOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_REQUEST_H_
