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

// How bytes are brought: SaveControl and the time-outs of a save say it.
struct BlockRules : DeviceRules {
  const ShardReader* read = nullptr;  // For shards without memory.
};

// Brings the bytes of shards, piece by piece in an order that is told beforehand, wherever their
// memory is. What the host reads is taken in place, or gathered block by block; what is on a device
// is copied ahead into its pinned ring, so that one block is on its way while the one before it is
// hashed and written. Of one thread.
//
//   reader.Plan(pieces);
//   for (piece : pieces) {
//     source = reader.Next();
//     while (done < piece.bytes) { block = reader.Take(most); ...; done += block.size(); }
//   }
class BlockReader {
 public:
  // Bytes [begin, begin + bytes) of the packed order of item `item` of the state dict.
  struct Wanted {
    std::uint32_t item = 0;
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };

  // `state` and what `rules` names must outlive it.
  BlockReader(const StateDict& state, const BlockRules& rules)
      : state_(state), rules_(rules), queues_(rules) {}
  // Waits a little for copies that nobody wants any more: they read the caller's memory.
  ~BlockReader();
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  // Where its copies are submitted.
  DeviceQueues& queues() { return queues_; }

  void Plan(std::vector<Wanted> pieces) { pieces_ = std::move(pieces); }

  // Begins the next piece; the one before must have been taken whole. The source lives until the
  // next call. Errors name the tensor.
  Result<const PackedSource*> Next();
  // The next bytes of the piece: at least one and at most `most`, valid until the next call. All of
  // `most` where the memory is the host's and `most` at most kBlockBytes, or it is packed.
  // Errors name the tensor, and for a device what befell it: kDeadlineExceeded, kCancelled.
  Result<std::span<const std::byte>> Take(std::size_t most);

  // What is gathered at once from strided memory: stays in the second-level cache.
  static constexpr std::size_t kBlockBytes = 256 * 1024;

 private:
  // A part of a piece that stands in a block. The block goes with the last of them.
  struct Part {
    std::shared_ptr<FlyingBlock> block;
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  struct Begun {
    std::size_t piece = 0;
    PackedSource source;
    std::deque<Part> parts;  // Of device memory; not taken yet.
    std::uint64_t submitted = 0;
  };

  Status Failed(std::size_t piece, const Status& why) const;
  Status BeginNext();
  // The first piece of a device that is not under way as a whole; null where none is near.
  Begun* Grounded();
  // Submits copies ahead while there are blocks to be had; waits for one only where the piece that
  // is wanted has nothing under way.
  Status Advance();
  // Fills one block with what comes next, if it is of this device, and submits it.
  Status Fly(const std::shared_ptr<const OpenedDevice>& device, PinnedRing::Block taken);
  Result<std::span<const std::byte>> TakeFlown(Begun& begun, std::size_t most);

  const StateDict& state_;
  const BlockRules rules_;
  std::vector<Wanted> pieces_;
  std::deque<Begun> begun_;   // The front is the current piece, once Next was called.
  std::size_t next_ = 0;      // Of pieces: not begun.
  bool started_ = false;      // Whether the front of begun_ is current.
  std::size_t grounded_ = 0;  // Of begun_: all before it are under way, or the host's.
  std::uint64_t taken_ = 0;   // Of the current piece.
  DeviceQueues queues_;
  std::vector<DeviceCopy> copies_;  // Of a block; kept, since there may be thousands in each.
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_BLOCK_READER_H_
