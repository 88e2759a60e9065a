// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_PACKED_SOURCE_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_PACKED_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "device/devices.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// Brings bytes of shards that have no memory (Shard::metadata_only): bytes [offset, offset +
// out.size()) of the packed order of item `item` of the state dict, into `out`. On the thread that
// saves, each shard mostly from front to back, some bytes more than once (replicas are compared).
using ShardReader =
    std::function<Status(std::uint32_t item, std::uint64_t offset, std::span<std::byte> out)>;

// The packed row-major bytes of one shard, whatever its strides: packed memory is used in place,
// strided memory is gathered piece by piece, what has no memory is read, and memory of a device is
// described for its queue. The shard's memory, or the reader, must outlive it. Immutable.
// All sizes and offsets are bytes. One object may be used by several threads, each with its own
// scratch: Fetch changes nothing. Who takes bytes in order does it through BlockReader.
class PackedSource {
 public:
  // kInvalidArgument where buffer, shape and region do not agree; errors of CheckMemory.
  static Result<PackedSource> Make(const Shard& shard);
  // The same, but of a shard without memory by `read` (where there is one), which knows it as
  // `item`.
  static Result<PackedSource> Make(const Shard& shard, std::uint32_t item, const ShardReader& read);

  std::uint64_t bytes() const { return bytes_; }
  const Dims& byte_shape() const { return byte_shape_; }

  // The device that the memory is on; null: the host reads it.
  const std::shared_ptr<const OpenedDevice>& device() const { return device_; }
  // Whether Fetch needs no scratch.
  bool in_place() const { return packed_; }

  // What puts bytes [offset, offset + size) of the packed order side by side from 0 on, relative to
  // base().
  std::vector<StridedCopy> Gather(std::uint64_t offset, std::uint64_t size) const;
  // Of the memory, which only its device reads where it has one.
  const std::byte* base() const { return base_; }
  // Not of a device: bytes [offset, offset + size), which must lie within bytes(): where they
  // already stand, or in `scratch` (of `size` bytes). Fails only where they are read.
  Result<const std::byte*> Fetch(std::uint64_t offset, std::size_t size, std::byte* scratch) const;
  // The same bytes as a region of ByteShape.
  Region Bytes(std::uint64_t offset, std::uint64_t size) const;
  // What these bytes, which stand at `data`, contribute to the tensor's digest.
  Crc64 Digest(std::uint64_t offset, std::size_t size, const std::byte* data) const;

 private:
  PackedSource() = default;
  template <typename Fn>
  void ForEachCopy(std::uint64_t offset, std::uint64_t size, Fn fn) const;
  Region region_;  // In bytes.
  Dims byte_shape_;
  std::uint64_t bytes_ = 0;
  const std::byte* base_ = nullptr;
  bool packed_ = false;
  std::shared_ptr<const OpenedDevice> device_;
  const ShardReader* read_ = nullptr;  // Null: from memory.
  std::uint32_t item_ = 0;
  std::vector<PlacedBox> placed_;  // Of strided memory.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_PACKED_SOURCE_H_
