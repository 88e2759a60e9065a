// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_BLOCK_READER_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_BLOCK_READER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "collective/save/packed_source.h"
#include "device/device_queues.h"

namespace tensormount {

// How bytes are read; set from SaveControl and the timeouts of a save.
struct BlockRules : DeviceLimits {
  const ShardReader* read = nullptr;  // Reads shards without memory; may be null.
};

// Reads the bytes of shards in host or device memory, range by range, in an order that is planned
// beforehand. Host memory is used in place or gathered by block. Device memory is copied ahead into
// the device's pinned ring, so that one block is copied while the previous one is hashed and
// written. Not thread-safe.
//
//   reader.Plan(ranges);
//   for (range : ranges) {
//     source = reader.Next();
//     while (done < range.bytes) { block = reader.Take(most); ...; done += block.size(); }
//   }
class BlockReader {
 public:
  // Bytes [begin, begin + bytes) of the packed order of item `item` of the state dict.
  struct PlannedRange {
    std::uint32_t item = 0;
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };

  // `state` and the objects that `rules` points to must outlive this object.
  BlockReader(const StateDict& state, const BlockRules& rules)
      : state_(state), rules_(rules), queues_(rules) {}
  // Waits briefly for copies that are still in progress, because they read the caller's memory.
  ~BlockReader();
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  // The device queues to which copies are submitted.
  DeviceQueues& queues() { return queues_; }

  void Plan(std::vector<PlannedRange> ranges) { ranges_ = std::move(ranges); }

  // Begins the next range, after all bytes of the previous range were taken. The source is valid
  // until the next call. Errors name the tensor.
  Result<const PackedSource*> Next();
  // The next bytes of the range, valid until the next call: from 1 to `most`. Exactly `most` (or
  // what is left of the range) if the memory is the host's and either packed or `most` is at most
  // kBlockBytes. Errors name the tensor; device errors include kDeadlineExceeded and kCancelled.
  Result<std::span<const std::byte>> Take(std::size_t most);

  // Bytes gathered at once from strided memory: a block stays in the second-level cache.
  static constexpr std::size_t kBlockBytes = 256 * 1024;

 private:
  // A part of a range within a block. The block is freed with its last part.
  struct Part {
    std::shared_ptr<BlockInTransit> block;
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  struct StartedRange {
    std::size_t range = 0;
    PackedSource source;
    std::deque<Part> parts;  // Parts of device memory that are not taken yet.
    std::uint64_t submitted = 0;
  };

  Status FailureOf(std::size_t range, const Status& why) const;
  Status BeginNext();
  // The first device range whose copies are not all submitted; null if none of the next ranges is
  // one.
  StartedRange* FirstUnsubmitted();
  // Submits copies ahead while blocks are free; waits for a block only if the current range has no
  // copy in progress.
  Status Advance();
  // Fills one block with the next bytes of this device and submits the copy.
  Status SubmitCopy(const std::shared_ptr<const OpenedDevice>& device, PinnedRing::Block taken);
  Result<std::span<const std::byte>> TakeFromDevice(StartedRange& begun, std::size_t most);

  const StateDict& state_;
  const BlockRules rules_;
  std::vector<PlannedRange> ranges_;
  std::deque<StartedRange> begun_;  // The front is the current range, once Next was called.
  std::size_t next_ = 0;            // Index in ranges_ of the next range to begin.
  bool started_ = false;            // The front of begun_ is current.
  // Index in begun_: all earlier ranges are submitted, or in host memory.
  std::size_t first_unsubmitted_ = 0;
  std::uint64_t taken_ = 0;  // Bytes of the current range that were taken.
  DeviceQueues queues_;
  // Copies into one block; reused, because there may be thousands.
  std::vector<DeviceCopy> copies_;
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_BLOCK_READER_H_
