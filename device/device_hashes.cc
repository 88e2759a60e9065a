// SPDX-License-Identifier: Apache-2.0
// Leaf hashes by devices, each job with a mark of its own.
#include "device/device_hashes.h"

namespace tensormount {

DeviceHashes::~DeviceHashes() {
  const Deadline deadline = Deadline::After(kDeviceGrace);
  for (Job& job : jobs_) {
    if (job.done) continue;
    const bool over = job.mark.ok() && AwaitMark(*job.mark.value(), deadline).ok();
    if (!over) LeaveToDevice(job.leaves.release());
  }
}

Result<std::size_t> DeviceHashes::Add(const std::shared_ptr<const OpenedDevice>& device,
                                      std::span<const StridedCopy> gather, const std::byte* base,
                                      std::uint64_t bytes, std::uint64_t leaf_bytes) {
  const auto count = static_cast<std::size_t>((bytes + leaf_bytes - 1) / leaf_bytes);
  TENSORMOUNT_ASSIGN_OR_RETURN(DeviceQueue* const queue, queues_.Of(device));
  Job& job = jobs_.emplace_back();
  job.device = device;
  job.leaves = std::make_unique<Hash128[]>(count);
  job.count = count;
  const Status submitted = queue->HashLeaves(gather, base, bytes, leaf_bytes, job.leaves.get());
  // Also where it failed: a part of it may be under way.
  job.mark = queue->Mark();
  const Status failure = submitted.ok() ? job.mark.status() : submitted;
  if (!failure.ok()) return failure.WithContext(device->ops->name());
  return jobs_.size() - 1;
}

Result<std::span<const Hash128>> DeviceHashes::Get(std::size_t number) {
  Job& job = jobs_[number];
  if (!job.done) {
    TENSORMOUNT_RETURN_IF_ERROR(queues_.rules().Await(*job.mark.value(), *job.device));
    job.done = true;
  }
  return std::span<const Hash128>(job.leaves.get(), job.count);
}

}  // namespace tensormount
