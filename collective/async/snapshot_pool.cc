// SPDX-License-Identifier: Apache-2.0
// Memory for snapshots is kept from one save to the next: allocating and zeroing gigabytes in the
// kernel costs as much as the copy itself. The total can be bounded; then a save that can never fit
// fails before it waits.
#include "collective/async/snapshot_pool.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <sys/mman.h>
#include <utility>

#include "base/deadline.h"

namespace tensormount {
namespace {

// Block sizes are rounded up to a multiple of this number of bytes (but not over the bound), so
// that a state that grows a little can reuse its block.
constexpr std::uint64_t kRound = 2u << 20;
// Fewer idle blocks than this number remain when a new block is mapped: the number of concurrent
// saves.
constexpr std::size_t kMaxIdle = 2;

}  // namespace

SnapshotPool::~SnapshotPool() {
  for (const std::span<std::byte> piece : idle_) ::munmap(piece.data(), piece.size());
}

SnapshotPool::Memory::~Memory() {
  if (data_ != nullptr) pool_->GiveBack({data_, size_});
}

Result<std::unique_ptr<SnapshotPool::Memory>> SnapshotPool::Take(
    std::uint64_t bytes, std::chrono::milliseconds limit, std::atomic<std::int64_t>* stalled) {
  if (bytes > (std::uint64_t{1} << 62) || (bound_ != 0 && bytes > bound_)) {
    return Status(Code::kResourceExhausted,
                  "copying the tensors needs " + std::to_string(bytes) +
                      " bytes of staging memory; the option staging_bytes allows " +
                      std::to_string(bound_));
  }
  std::uint64_t size = std::max(kRound, (bytes + kRound - 1) / kRound * kRound);
  if (bound_ != 0) size = std::min(size, std::max(bound_, bytes));
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = start + std::min(limit, kLongestWait);
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto fits = std::find_if(idle_.begin(), idle_.end(),
                                   [&](const auto& piece) { return piece.size() >= bytes; });
    if (fits != idle_.end()) {
      const std::span<std::byte> piece = *fits;
      auto memory =
          std::unique_ptr<Memory>(new Memory(shared_from_this(), piece.data(), piece.size()));
      idle_.erase(fits);
      return memory;
    }
    MakeRoom(size);
    if (bound_ == 0 || mapped_ + size <= bound_) break;
    const auto before = std::chrono::steady_clock::now();
    if (before < deadline) returned_.wait_until(lock, deadline);
    if (stalled != nullptr) {
      stalled->fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::steady_clock::now() - before)
                             .count(),
                         std::memory_order_relaxed);
    }
    // The loop looks once more after the deadline, so that memory returned at the last moment is
    // used.
    if (before >= deadline) {
      return Status(Code::kDeadlineExceeded,
                    "copying the tensors needs " + std::to_string(bytes) +
                        " bytes of staging memory, but earlier saves did not free enough of the " +
                        std::to_string(bound_) + " bytes that staging_bytes allows in time");
    }
  }
  // GiveBack runs in a destructor and must not allocate, so its room in idle_ is reserved here.
  idle_.reserve(mapped_blocks_ + 1);
  auto memory = std::unique_ptr<Memory>(new Memory(shared_from_this(), nullptr, 0));
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Status::FromErrno(errno, "map", std::to_string(size) + " bytes of staging memory");
  }
  ::madvise(data, size, MADV_HUGEPAGE);  // A hint that may be refused.
  mapped_ += size;
  ++mapped_blocks_;
  memory->data_ = static_cast<std::byte*>(data);
  memory->size_ = size;
  return memory;
}

void SnapshotPool::MakeRoom(std::uint64_t bytes) {
  while (!idle_.empty() &&
         (idle_.size() >= kMaxIdle || (bound_ != 0 && mapped_ + bytes > bound_))) {
    const std::span<std::byte> piece = idle_.front();
    idle_.erase(idle_.begin());
    ::munmap(piece.data(), piece.size());
    mapped_ -= piece.size();
    --mapped_blocks_;
  }
}

void SnapshotPool::GiveBack(std::span<std::byte> piece) {
  {
    std::lock_guard lock(mutex_);
    idle_.insert(std::upper_bound(idle_.begin(), idle_.end(), piece,
                                  [](const auto& a, const auto& b) { return a.size() < b.size(); }),
                 piece);
  }
  returned_.notify_all();
}

std::uint64_t SnapshotPool::mapped() const {
  std::lock_guard lock(mutex_);
  return mapped_;
}

}  // namespace tensormount
