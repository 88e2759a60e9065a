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

// Memory for copies of what is being saved. It comes from the kernel in one piece a save and is
// kept for the next one: touching fresh pages costs more than copying into them. Pieces are used
// for whatever fits, and two are kept, since no more saves than that are under way. Thread-safe.
class SnapshotPool : public std::enable_shared_from_this<SnapshotPool> {
 public:
  // At most `bound` bytes are mapped at a time; 0: no bound.
  explicit SnapshotPool(std::uint64_t bound) : bound_(bound) {}
  ~SnapshotPool();

  // Goes back to the pool when destroyed.
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

  // `bytes` of page-aligned memory, contents undefined. Waits, at most `limit`, while others hold
  // what is missing to the bound; `stalled` counts that time in nanoseconds.
  //   kResourceExhausted  more than the bound, or the kernel gives none
  //   kDeadlineExceeded   others held it for longer than `limit`
  Result<std::unique_ptr<Memory>> Take(std::uint64_t bytes, std::chrono::milliseconds limit,
                                       std::atomic<std::int64_t>* stalled);

  std::uint64_t mapped() const;

 private:
  void GiveBack(std::span<std::byte> piece);
  // Unmaps idle pieces, the smallest first, until `bytes` more fit under the bound.
  void MakeRoom(std::uint64_t bytes);

  const std::uint64_t bound_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::uint64_t mapped_ = 0;
  std::size_t pieces_ = 0;                  // Mapped ones, idle or not.
  std::vector<std::span<std::byte>> idle_;  // By rising size.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_POOL_H_
