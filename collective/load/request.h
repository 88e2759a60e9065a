// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_REQUEST_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_REQUEST_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/load.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// One rank's request without its memory: what other ranks need to know of it. Nothing in it depends
// on the rank, so that ranks with equal requests have equal bytes, and one of them can send for
// all.
//
//   "TMLOADR" NUL, u32 version
//   tensors   u32 count; each: string key, u8 dtype, dims shape
//   shards    u32 count; each: u32 tensor, u32 item, u8 1 if flat, i64 begin[rank],
//             i64 extent[rank], and if flat i64 first, i64 count
//   objects   u32 count; each: string key, dims index, dims grid
// Little-endian, never on disk. dims: u8 rank, i64[rank]; string: u32 length, bytes. Memory
// addresses, strides and conversion of elements are not part of the request, because they concern
// only this rank (load/target.h).
struct LoadRequest {
  std::vector<TensorMeta> tensors;  // Keys, dtypes and shapes as requested; keys are unique.
  struct Item {
    std::uint32_t tensor = 0;
    std::uint32_t item = 0;  // Position in StateDict::tensors().
    Region region;           // Region of the requested tensor; may be empty.
  };
  std::vector<Item> items;
  struct Object {
    std::string key;
    Dims index;
    Dims grid;
  };
  std::vector<Object> objects;
};

// Fails with the state dict's own failure, or with kInvalidArgument naming a shard without memory
// or with cells that share memory.
Result<std::string> EncodeRequest(const StateDict& request);
// Fails with kDataLoss if the bytes are malformed, with kInvalidArgument if their version differs.
Result<LoadRequest> DecodeRequest(std::string_view bytes);

// Everything that must be equal on all ranks of a load: path and options, as names and texts for
// messages. Ranks compare the hash of them, and send them only if the hashes differ.
std::string EncodeCall(std::string_view path, const LoadOptions& options);
Hash128 CallFingerprint(std::string_view path, const LoadOptions& options);
// Given EncodeCall of every rank, of which some differ: kInvalidArgument, naming the first rank
// that differs from rank 0 and its option.
Status NameDifferentCall(const std::vector<std::string>& calls);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_REQUEST_H_
