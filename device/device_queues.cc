// SPDX-License-Identifier: Apache-2.0
// Device work for saves and loads. Data that are copied to or from the host move through blocks of
// the pinned ring, each of which is in transit in one direction until its mark is reached.
#include "device/device_queues.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/at_exit.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// A packed box at `offset`. A box without axes is one byte.
PlacedBox Packed(const Box& box, std::uint64_t offset) {
  return PlacePacked(Region(box), offset).front();
}

}  // namespace

Status DeviceLimits::Await(DeviceMark& mark, const OpenedDevice& device) const {
  return device.Name(AwaitMark(mark, Deadline::After(patience), cancel));
}

Result<PinnedRing::Block> DeviceLimits::TakeBlock(const OpenedDevice& device) const {
  return device.ring->Take(Deadline::After(patience), cancel);
}

namespace {

// The constructor of FencedQueue calls NoMemory and Unmarked once, so that their statuses exist
// before memory runs out.
const Status& NoMemory() {
  static const Status status(Code::kResourceExhausted, "out of memory");
  return status;
}
const Status& Unmarked() {
  static const Status status(Code::kInternal,
                             "internal error: no completion mark was recorded for device work");
  return status;
}

Result<std::shared_ptr<DeviceMark>> TryMark(DeviceQueue& queue) noexcept {
  Result<std::shared_ptr<DeviceMark>> mark = Unmarked();
  const Status thrown = CatchExceptions([&] {
    mark = queue.Mark();
    return Status();
  });
  if (!thrown.ok()) mark = thrown;
  return mark;
}

}  // namespace

Status CatchExceptions(const std::function<Status()>& work) noexcept {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return NoMemory();
  } catch (const std::exception& e) {
    try {
      return {Code::kInternal, e.what()};
    } catch (const std::exception&) {
      return NoMemory();
    }
  }
}

Submission MarkSubmitted(DeviceQueue& queue, const Status& submitted) {
  Submission s{submitted, TryMark(queue)};
  if (s.status.ok()) s.status = s.mark.status();
  // Tries again, because the memory of work without a mark can never be reused: the next Mark
  // covers the work that the device did get.
  if (!s.mark.ok()) s.mark = TryMark(queue);
  if (!s.mark.ok()) {
    (void)CatchExceptions([&] {
      if (auto later = queue.MarkLater(); later != nullptr) s.mark = std::move(later);
      return Status();
    });
  }
  return s;
}

void BlockInTransit::Settle(const Deadline& deadline) {
  if (transfer_done_) return;
  if (!mark_.ok() || !AwaitMark(*mark_.value(), deadline).ok()) block_.ReturnAfter(mark_);
  transfer_done_ = true;
}

Status BlockInTransit::Launch(DeviceQueue& queue, const std::function<Status()>& work) {
  // Even if `work` fails or throws, part of the transfer may have been submitted.
  mark_ = Unmarked();
  transfer_done_ = false;
  Submission submission = MarkSubmitted(queue, CatchExceptions(work));
  mark_ = std::move(submission.mark);
  return device_->Name(submission.status);
}

Status BlockInTransit::AwaitTransfer(const DeviceLimits& limits) {
  if (transfer_done_) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceMark> mark, mark_);
  TENSORMOUNT_RETURN_IF_ERROR(limits.Await(*mark, *device_));
  transfer_done_ = true;
  return {};
}

namespace {

// A mark for work for which Mark failed. Until Resolve is called, the mark is not reached.
class LateMark final : public DeviceMark {
 public:
  Result<bool> Reached() override {
    std::shared_ptr<DeviceMark> mark;
    {
      std::lock_guard lock(mutex_);
      TENSORMOUNT_RETURN_IF_ERROR(known_.status());
      mark = known_.value();
    }
    return mark == nullptr ? Result<bool>(false) : mark->Reached();
  }
  // Sets the queue's next successful mark, or an error if no mark follows.
  void Resolve(const Result<std::shared_ptr<DeviceMark>>& mark) noexcept {
    std::lock_guard lock(mutex_);
    known_ = mark;
  }

 private:
  std::mutex mutex_;
  Result<std::shared_ptr<DeviceMark>> known_ = std::shared_ptr<DeviceMark>();
};

// A queue that registers its pending work when it is destroyed, so that frees and streams wait for
// that work.
class FencedQueue final : public DeviceQueue {
 public:
  // `fences` may be null.
  FencedQueue(const OpenedDevice& device, std::unique_ptr<DeviceQueue> queue,
              const DeviceFences* fences)
      : device_(device), queue_(std::move(queue)), fences_(fences) {
    (void)NoMemory();
    (void)Unmarked();
  }
  ~FencedQueue() override {
    for (int tries = 0; has_unmarked_work_ && tries < 2; ++tries) {
      last_ = TryMark(*this);  // Covers the work since the last mark.
    }
    for (const auto& late : late_) late->Resolve(last_);
    if (IsOver()) return;
    device_.pending_work->Add(std::move(slot_), last_);
    if (fences_ == nullptr) return;
    const Status held = CatchExceptions([&] {
      fences_->Hold(device_, last_);
      return Status();
    });
    if (!held.ok()) fences_->NoteLostWork();
  }

  Status WaitFor(const std::shared_ptr<DeviceMark>& mark) override { return queue_->WaitFor(mark); }
  Status CopyOut(std::span<const DeviceCopy> copies) override {
    has_unmarked_work_ = true;
    return queue_->CopyOut(copies);
  }
  Status CopyIn(std::span<const DeviceCopy> copies) override {
    has_unmarked_work_ = true;
    return queue_->CopyIn(copies);
  }
  Status CopyWithin(std::span<const DeviceCopy> copies) override {
    has_unmarked_work_ = true;
    return queue_->CopyWithin(copies);
  }
  Status HashLeaves(std::span<const StridedCopy> gather, const std::byte* base, std::uint64_t bytes,
                    std::uint64_t leaf_bytes, Hash128* out) override {
    has_unmarked_work_ = true;
    return queue_->HashLeaves(gather, base, bytes, leaf_bytes, out);
  }
  Status Digest(std::span<const PlacedBox> placed, const std::byte* base, const Dims& byte_shape,
                Crc64* out) override {
    has_unmarked_work_ = true;
    return queue_->Digest(placed, base, byte_shape, out);
  }
  Result<std::shared_ptr<DeviceMark>> Mark() override {
    Result<std::shared_ptr<DeviceMark>> mark = queue_->Mark();
    if (mark.ok()) {
      last_ = mark;
      has_unmarked_work_ = false;
      for (const auto& late : late_) late->Resolve(mark);
      late_.clear();
    }
    return mark;
  }
  std::shared_ptr<DeviceMark> MarkLater() override {
    has_unmarked_work_ = true;
    late_.push_back(std::make_shared<LateMark>());
    return late_.back();
  }
  void SetLimits(const QueueLimits& limits) override { queue_->SetLimits(limits); }

 private:
  bool IsOver() const noexcept {
    if (last_.ok() && last_.value() == nullptr) return true;
    bool over = false;
    (void)CatchExceptions([&] {
      // An error counts as not over: work behind the failed work may still be running.
      const Result<bool> reached = last_.ok() ? last_.value()->Reached() : Result<bool>(false);
      over = reached.ok() && reached.value();
      return Status();
    });
    return over;
  }

  const OpenedDevice& device_;
  const std::unique_ptr<DeviceQueue> queue_;
  const DeviceFences* const fences_;
  bool has_unmarked_work_ = false;  // Work since the last mark.
  Result<std::shared_ptr<DeviceMark>> last_ = std::shared_ptr<DeviceMark>();
  std::vector<std::shared_ptr<LateMark>> late_;
  PendingDeviceWork::Slot slot_ = PendingDeviceWork::Slot(1);
};

}  // namespace

Result<std::unique_ptr<DeviceQueue>> MakeFencedQueue(const OpenedDevice& device,
                                                     const DeviceLimits& limits) {
  (void)device.pending_work->IsIdle();  // Frees memory that waited for work that has ended.
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<DeviceQueue> queue,
                               device.ops->MakeQueue({limits.patience, limits.cancel}));
  if (limits.fences != nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR(limits.fences->MakeQueueWait(*queue, device));
  }
  return std::unique_ptr<DeviceQueue>(
      std::make_unique<FencedQueue>(device, std::move(queue), limits.fences));
}

Result<DeviceQueue*> DeviceQueues::Of(const std::shared_ptr<const OpenedDevice>& device) {
  std::unique_ptr<DeviceQueue>& queue = queues_[device];
  if (queue == nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(queue, MakeFencedQueue(*device, limits_));
  }
  return queue.get();
}

DeviceWriter::~DeviceWriter() { (void)Settle(Deadline::After(kDeviceGrace)); }

bool DeviceWriter::Settle(const Deadline& deadline) {
  std::lock_guard lock(mutex_);
  bool all = true;
  for (const std::unique_ptr<Line>& line : lines_) {
    const bool reached = line->last == nullptr || AwaitMark(*line->last, deadline).ok();
    if (reached && !line->lost) {
      line->last.reset();
      continue;
    }
    all = false;
    // Leaks the digests, because a mark of the queue that is found reached later still writes them.
    LeakToDevice(new std::shared_ptr<std::deque<Line::SubmittedDigest>>(line->taken));
  }
  return all;
}

// Submits the computation of the digests of a block's copies, after these copies.
Status DeviceWriter::TakeDigests(Line& line) {
  Status status;
  for (const Line::Landing& landing : line.landings) {
    Line::SubmittedDigest& taken = line.taken->emplace_back();
    taken.arrived = landing.arrived;
    if (status.ok()) {
      status = line.queue->Digest({&landing.placed, 1}, landing.base, landing.arrived->byte_shape,
                                  &taken.digest);
    }
    // Atomic, because several threads may set `unknown` of one WriteDigest. It is read after
    // Finish.
    if (status.code() == Code::kResourceExhausted) {
      std::atomic_ref(landing.arrived->unknown).store(true, std::memory_order_relaxed);
    }
  }
  line.landings.clear();
  return status.code() == Code::kResourceExhausted ? Status() : status;
}

// Sends the line's block. Even if sending fails or throws, the block returns to the ring only once
// its transfer has ended.
Status DeviceWriter::Launch(Line& line) {
  PinnedRing::Block block = std::move(*line.block);
  line.block.reset();
  line.used = 0;
  if (line.copies.empty()) return {};
  Submission submission{{}, Unmarked()};
  {
    const AtExit give_up([&] {
      block.ReturnAfter(submission.mark);
      if (submission.mark.ok()) line.last = submission.mark.value();
      line.lost = line.lost || !submission.mark.ok();
      line.copies.clear();  // Keeps the capacity: a block may have thousands of copies.
      line.landings.clear();
    });
    const Status submitted = CatchExceptions([&] {
      const Status copied = line.queue->CopyIn(line.copies);
      return copied.ok() ? TakeDigests(line) : copied;
    });
    submission = MarkSubmitted(*line.queue, submitted);
  }
  return line.device->Name(submission.status);
}

Status DeviceWriter::PushLocked() {
  for (const std::unique_ptr<Line>& line : lines_) {
    if (line->block) TENSORMOUNT_RETURN_IF_ERROR(Launch(*line));
  }
  return {};
}

// Takes the idle line of `device` that was used last, so that small boxes share a block; makes a
// new line if none is idle.
Result<std::unique_ptr<DeviceWriter::Line>> DeviceWriter::TakeLine(
    const std::shared_ptr<const OpenedDevice>& device) {
  {
    std::lock_guard lock(mutex_);
    for (auto at = lines_.rbegin(); at != lines_.rend(); ++at) {
      if ((*at)->device != device) continue;
      std::unique_ptr<Line> line = std::move(*at);
      lines_.erase(std::next(at).base());
      return line;
    }
  }
  auto line = std::make_unique<Line>();
  line->device = device;
  TENSORMOUNT_ASSIGN_OR_RETURN(line->queue, MakeFencedQueue(*device, limits_));
  std::lock_guard lock(mutex_);
  lines_.reserve(++made_);
  return line;
}

// Returns a line to the idle lines. Sends its block first if a thread waits for a block, or if the
// block is at least half full, because the next writer may take another line.
void DeviceWriter::ReturnLine(std::unique_ptr<Line> line, Status& status) {
  const auto launch = [&] {
    Status launched;
    try {
      launched = Launch(*line);
    } catch (const std::exception& e) {  // The AtExit in Write that calls this must not throw.
      launched = Status(Code::kResourceExhausted, e.what());
    }
    if (status.ok()) status = launched;
  };
  const auto worth = [&] {
    return line->block &&
           (line->used >= line->block->size() / 2 || line->device->ring->IsWaitedFor());
  };
  if (worth()) launch();
  std::lock_guard lock(mutex_);
  if (waiting_ > 0 && line->block) launch();
  lines_.push_back(std::move(line));  // Does not allocate: TakeLine has reserved room.
}

// Provides a block with room for `bytes`, which must fit into one block.
Status DeviceWriter::EnsureRoom(Line& line, std::uint64_t bytes) {
  if (line.block && line.used + bytes <= line.block->size()) return {};
  if (line.block) TENSORMOUNT_RETURN_IF_ERROR(Launch(line));
  line.block = line.device->ring->TryTake();
  if (line.block) return {};
  // Sends the blocks of idle lines before waiting for a block. Otherwise threads of several saves
  // and loads could wait for each other's blocks forever.
  {
    std::lock_guard lock(mutex_);
    TENSORMOUNT_RETURN_IF_ERROR(PushLocked());
    ++waiting_;
  }
  Result<PinnedRing::Block> block = limits_.TakeBlock(*line.device);
  {
    std::lock_guard lock(mutex_);
    --waiting_;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(line.block, std::move(block));
  return {};
}

Status DeviceWriter::WriteBy(Line& line, const Box& box, const PlacedBox& to, std::byte* base,
                             const Fill& fill, WriteDigest* arrived) {
  Status status;
  SplitBox(box, 1, line.device->ring->block_bytes(), [&](const Box& part) {
    if (!status.ok()) return;
    const auto bytes = static_cast<std::uint64_t>(part.volume());
    status = EnsureRoom(line, bytes);
    if (!status.ok()) return;
    const PlacedBox packed = Packed(part, line.used);
    status = fill(packed, line.block->data());
    if (!status.ok()) return;
    line.copies.push_back({PlanCopy(part, packed, to), line.block->data(), base});
    if (arrived != nullptr) line.landings.push_back({PartOfPlaced(to, part), base, arrived});
    line.used = AlignedInBlock(line.used + static_cast<std::size_t>(bytes));
  });
  return status;
}

Status DeviceWriter::Write(const std::shared_ptr<const OpenedDevice>& device, const Box& box,
                           const PlacedBox& to, std::byte* base, const Fill& fill,
                           WriteDigest* arrived) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<Line> line, TakeLine(device));
  Status status;
  {
    // Returns the line even if `fill` throws, because its sent blocks must still be waited for.
    const AtExit back([&] { ReturnLine(std::move(line), status); });
    status = WriteBy(*line, box, to, base, fill, arrived);
  }
  return status;
}

Status DeviceWriter::WriteZeros(const std::shared_ptr<const OpenedDevice>& device, const Box& box,
                                const PlacedBox& to, std::byte* base) {
  return Write(device, box, to, base, [](const PlacedBox& packed, std::byte* block) {
    std::memset(block + packed.offset, 0, static_cast<std::size_t>(packed.box.volume()));
    return Status();
  });
}

Status DeviceWriter::Push() {
  // Does nothing if another thread has the mutex, because that thread may be pushing, and waiting
  // for the device.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock.owns_lock() ? PushLocked() : Status();
}

void DeviceWriter::Drop() {
  std::lock_guard lock(mutex_);
  for (const std::unique_ptr<Line>& line : lines_) {
    line->block.reset();
    line->copies.clear();
    line->landings.clear();
    line->used = 0;
  }
}

void DeviceWriter::IgnoreCancellation(std::chrono::milliseconds patience) {
  std::lock_guard lock(mutex_);
  limits_.cancel = nullptr;
  limits_.patience = patience;
  for (const std::unique_ptr<Line>& line : lines_) line->queue->SetLimits({patience, nullptr});
}

Status DeviceWriter::Finish() {
  std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(PushLocked());
  for (const std::unique_ptr<Line>& line : lines_) {
    if (line->last == nullptr) continue;
    TENSORMOUNT_RETURN_IF_ERROR(limits_.Await(*line->last, *line->device));
    line->last.reset();
    for (const Line::SubmittedDigest& taken : *line->taken) taken.arrived->digest ^= taken.digest;
    line->taken->clear();
  }
  return {};
}

// Computes a digest on the host, for a device without memory to compute it.
Status DigestOnHost(const DigestRequest& wanted, const DeviceLimits& limits) {
  const DeviceBoxes& boxes = wanted.boxes;
  Crc64 digest = 0;
  Status status;
  std::vector<std::byte> bytes;
  for (const PlacedBox& placed : boxes.placed) {
    SplitBox(placed.box, 1, boxes.device->ring->block_bytes(), [&](const Box& part) {
      if (!status.ok()) return;
      const StridedCopy all = PlanCopy(part, placed, Packed(part, 0));
      const PlacedBox in_memory{part, all.src_offset, placed.strides};
      const auto there = ReadBack({boxes.device, {&in_memory, 1}, boxes.base}, limits, bytes);
      status = there.status();
      if (!status.ok()) return;
      digest ^= DigestOfPlaced(there.value().front(), bytes.data(), wanted.byte_shape);
    });
    TENSORMOUNT_RETURN_IF_ERROR(status);
  }
  *wanted.out = digest;
  return {};
}

// Computes digests, at most as many as fit into one block. Returns false if the device has no
// memory to compute them. By then this function has given up its block, because DigestOnHost takes
// a block itself.
Result<bool> DigestOnDevice(const std::shared_ptr<const OpenedDevice>& device, DeviceQueue& queue,
                            std::span<const DigestRequest* const> wanted,
                            const DeviceLimits& limits) {
  TENSORMOUNT_ASSIGN_OR_RETURN(PinnedRing::Block taken, limits.TakeBlock(*device));
  BlockInTransit block(std::move(taken), device);
  auto* const results = reinterpret_cast<Crc64*>(block.data());
  const Status launched = block.Launch(queue, [&]() -> Status {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const DeviceBoxes& boxes = wanted[i]->boxes;
      TENSORMOUNT_RETURN_IF_ERROR(
          queue.Digest(boxes.placed, boxes.base, wanted[i]->byte_shape, results + i));
    }
    return {};
  });
  if (launched.code() == Code::kResourceExhausted) {
    block.Settle(Deadline::After(limits.patience));
    return false;
  }
  TENSORMOUNT_RETURN_IF_ERROR(launched);
  TENSORMOUNT_RETURN_IF_ERROR(block.AwaitTransfer(limits));
  for (std::size_t i = 0; i < wanted.size(); ++i) *wanted[i]->out = results[i];
  return true;
}

Status DigestsOnDevices(std::span<const DigestRequest> wanted, const DeviceLimits& limits) {
  DeviceQueues queues(limits);
  std::map<std::shared_ptr<const OpenedDevice>, std::vector<const DigestRequest*>> by_device;
  for (const DigestRequest& w : wanted) by_device[w.boxes.device].push_back(&w);
  for (const auto& [device, all] : by_device) {
    TENSORMOUNT_ASSIGN_OR_RETURN(DeviceQueue* const queue, queues.Of(device));
    const std::size_t at_once = device->ring->block_bytes() / sizeof(Crc64);
    for (std::size_t from = 0; from < all.size(); from += at_once) {
      const auto some = std::span(all).subspan(from, std::min(at_once, all.size() - from));
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool digested,
                                   DigestOnDevice(device, *queue, some, limits));
      if (digested) continue;
      for (const DigestRequest* one : some) TENSORMOUNT_RETURN_IF_ERROR(DigestOnHost(*one, limits));
    }
  }
  return {};
}

Result<std::vector<PlacedBox>> ReadBack(const DeviceBoxes& boxes, const DeviceLimits& limits,
                                        std::vector<std::byte>& out) {
  std::uint64_t bytes = 0;
  std::vector<PlacedBox> packed;
  for (const PlacedBox& from : boxes.placed) {
    packed.push_back(Packed(from.box, bytes));
    bytes += static_cast<std::uint64_t>(from.box.volume());
  }
  out.resize(static_cast<std::size_t>(bytes));
  DeviceQueues queues(limits);
  TENSORMOUNT_ASSIGN_OR_RETURN(DeviceQueue* const queue, queues.Of(boxes.device));
  TENSORMOUNT_ASSIGN_OR_RETURN(PinnedRing::Block taken, limits.TakeBlock(*boxes.device));
  BlockInTransit block(std::move(taken), boxes.device);
  for (std::size_t i = 0; i < packed.size(); ++i) {
    Status status;
    SplitBox(packed[i].box, 1, block.size(), [&](const Box& part) {
      if (!status.ok()) return;
      const PlacedBox in_block = Packed(part, 0);
      const DeviceCopy copy{PlanCopy(part, boxes.placed[i], in_block), boxes.base, block.data()};
      status = block.Launch(*queue, [&] { return queue->CopyOut({&copy, 1}); });
      if (status.ok()) status = block.AwaitTransfer(limits);
      if (status.ok()) ExecuteCopy(PlanCopy(part, in_block, packed[i]), block.data(), out.data());
    });
    TENSORMOUNT_RETURN_IF_ERROR(status);
  }
  return packed;
}

}  // namespace tensormount
