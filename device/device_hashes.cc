// SPDX-License-Identifier: Apache-2.0
// Computes leaf hashes on devices. Many calls of Add share one mark, because a mark costs as much
// as hashing a small tensor.
#include "device/device_hashes.h"

namespace tensormount {
namespace {

constexpr std::size_t kHashesOfMark = 256;

}  // namespace

DeviceHashes::~DeviceHashes() {
  const Deadline deadline = Deadline::After(kDeviceGrace);
  for (Batch& batch : batches_) {
    if (batch.done) continue;
    const bool marked = Mark(batch).ok();
    if (marked && AwaitMark(*batch.mark->value(), deadline).ok()) continue;
    for (std::unique_ptr<Hash128[]>& leaves : batch.leaves) LeakToDevice(leaves.release());
  }
}

Status DeviceHashes::Mark(Batch& batch) {
  if (!batch.mark) {
    Result<DeviceQueue*> queue = queues_.Of(batch.device);
    if (!queue.ok()) return queue.status();
    Submission submission = MarkSubmitted(*queue.value(), Status());
    // Keeps an error of the submission, because a second mark would not report it again.
    batch.mark = submission.status.ok() ? std::move(submission.mark) : submission.status;
    open_.erase(batch.device);
  }
  return batch.device->Name(batch.mark->status());
}

Result<std::size_t> DeviceHashes::Add(const std::shared_ptr<const OpenedDevice>& device,
                                      std::span<const StridedCopy> gather, const std::byte* base,
                                      std::uint64_t bytes, std::uint64_t leaf_bytes) {
  const auto count = static_cast<std::size_t>((bytes + leaf_bytes - 1) / leaf_bytes);
  TENSORMOUNT_ASSIGN_OR_RETURN(DeviceQueue* const queue, queues_.Of(device));
  auto open = open_.find(device);
  if (open == open_.end()) {
    open = open_.emplace(device, batches_.size()).first;
    batches_.emplace_back().device = device;
  }
  const std::size_t number = open->second;
  Batch& batch = batches_[number];
  batch.leaves.push_back(std::make_unique<Hash128[]>(count));
  jobs_.push_back({number, batch.leaves.size() - 1, count});
  const Status submitted =
      queue->HashLeaves(gather, base, bytes, leaf_bytes, batch.leaves.back().get());
  if (!submitted.ok()) return device->Name(submitted);
  // Marks a full batch, so that its results can be read while the device works on later batches.
  if (batch.leaves.size() == kHashesOfMark) TENSORMOUNT_RETURN_IF_ERROR(Mark(batch));
  return jobs_.size() - 1;
}

Result<std::span<const Hash128>> DeviceHashes::Get(std::size_t number) {
  const Job& job = jobs_[number];
  Batch& batch = batches_[job.batch];
  if (!batch.done) {
    TENSORMOUNT_RETURN_IF_ERROR(Mark(batch));
    TENSORMOUNT_RETURN_IF_ERROR(queues_.limits().Await(*batch.mark->value(), *batch.device));
    batch.done = true;
  }
  return std::span<const Hash128>(batch.leaves[job.number].get(), job.count);
}

}  // namespace tensormount
