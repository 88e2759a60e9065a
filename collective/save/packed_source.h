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

// Reads bytes of shards that have no memory (Shard::metadata_only): bytes [offset, offset +
// out.size()) of the packed order of item `item` of the state dict, into `out`. Called on the
// thread that saves, mostly from front to back; some bytes are read more than once (replicas are
// compared).
using ShardReader =
    std::function<Status(std::uint32_t item, std::uint64_t offset, std::span<std::byte> out)>;

// The packed row-major bytes of one shard, whatever its strides: packed memory is used in place,
// strided memory is gathered piece by piece, shards without memory are read by a ShardReader, and
// device memory is described as copies for a device queue (Gather). The shard's memory, or the
// reader, must outlive it. Sizes and offsets are in bytes. Immutable: threads may share one object,
// each with its own scratch. To take bytes in order, use BlockReader.
class PackedSource {
 public:
  // kInvalidArgument if buffer, shape and region disagree; or errors of CheckMemory and OpenDevice.
  static Result<PackedSource> Make(const Shard& shard);
  // Like Make(shard), but a shard without memory is read by `read` (if not null), as item `item`.
  static Result<PackedSource> Make(const Shard& shard, std::uint32_t item, const ShardReader& read);

  std::uint64_t bytes() const { return bytes_; }
  const Dims& byte_shape() const { return byte_shape_; }

  // The device that the memory is on; null: the host reads it.
  const std::shared_ptr<const OpenedDevice>& device() const { return device_; }
  // Whether Fetch needs no scratch memory.
  bool in_place() const { return packed_; }

  // Copies that gather bytes [offset, offset + size) of the packed order from base() to contiguous
  // memory from 0 on.
  std::vector<StridedCopy> Gather(std::uint64_t offset, std::uint64_t size) const;
  // Start of the memory. If device() is not null, this is a device address, which the host must not
  // dereference.
  const std::byte* base() const { return base_; }
  // For host memory only: bytes [offset, offset + size), which must lie within bytes(), in place or
  // in `scratch` (of `size` bytes). Fails only if a ShardReader fails.
  Result<const std::byte*> Fetch(std::uint64_t offset, std::size_t size, std::byte* scratch) const;
  // Bytes [offset, offset + size) as a region of the tensor's bytes (byte_shape).
  Region Bytes(std::uint64_t offset, std::uint64_t size) const;
  // Contribution of bytes [offset, offset + size), which are at `data`, to the tensor's digest.
  Crc64 Digest(std::uint64_t offset, std::size_t size, const std::byte* data) const;

 private:
  PackedSource() = default;
  template <typename Fn>
  void ForEachCopy(std::uint64_t offset, std::uint64_t size, Fn fn) const;
  Region region_;  // The shard's region, in bytes.
  Dims byte_shape_;
  std::uint64_t bytes_ = 0;
  const std::byte* base_ = nullptr;
  bool packed_ = false;
  std::shared_ptr<const OpenedDevice> device_;
  const ShardReader* read_ = nullptr;  // Null: the shard has memory.
  std::uint32_t item_ = 0;
  std::vector<PlacedBox> placed_;  // Where the bytes lie in memory.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_PACKED_SOURCE_H_
