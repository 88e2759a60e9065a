// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_POOL_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_POOL_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tensormount/status.h"

namespace tensormount {

// A pool of host memory for snapshots. Each save takes one block. The block is kept for later
// saves, because touching fresh pages costs more than copying into them. Any block that is large
// enough is reused. If none is, the pool maps a new block, and first unmaps idle blocks until at
// most one is left. Thread-safe.
class SnapshotPool : public std::enable_shared_from_this<SnapshotPool> {
 public:
  // At most `bound` bytes are mapped at a time; 0: no bound.
  explicit SnapshotPool(std::uint64_t bound) : bound_(bound) {}
  ~SnapshotPool();

  // Memory taken from the pool, which goes back when this object is destroyed.
  class Memory {
   public:
    ~Memory();
    std::byte* data() const { return data_; }

   private:
    friend class SnapshotPool;
    Memory(std::shared_ptr<SnapshotPool> pool, std::byte* data, std::size_t size)
        : pool_(std::move(pool)), data_(data), size_(size) {}
    std::shared_ptr<SnapshotPool> pool_;
    std::byte* data_;
    std::size_t size_;
  };

  // Returns `bytes` of page-aligned memory with undefined contents. If other saves use so much
  // memory that the bound would be exceeded, waits up to `limit`; `stalled` counts that time in
  // nanoseconds.
  //   kResourceExhausted  more than the bound, or the kernel has none
  //   kDeadlineExceeded   other saves used the memory for longer than `limit`
  Result<std::unique_ptr<Memory>> Take(std::uint64_t bytes, std::chrono::milliseconds limit,
                                       std::atomic<std::int64_t>* stalled);

  std::uint64_t mapped() const;

 private:
  void GiveBack(std::span<std::byte> piece);
  // Unmaps idle blocks, the smallest first, until fewer than kMaxIdle remain and `bytes` more fit
  // under the bound.
  void MakeRoom(std::uint64_t bytes);

  const std::uint64_t bound_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::uint64_t mapped_ = 0;
  std::size_t mapped_blocks_ = 0;
  std::vector<std::span<std::byte>> idle_;  // Idle blocks, by rising size.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_POOL_H_
