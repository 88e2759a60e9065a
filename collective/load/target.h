// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_TARGET_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tensormount/state_dict.h"

#include "collective/load/load_plan.h"
#include "device/device_queues.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// One region of a stored tensor that this rank wants, and its destination. Made for one load: it
// points into the caller's buffers and into the plan, which must outlive it. A flat range has
// several boxes; strides of the buffer only make runs shorter.
struct LoadTarget {
  const PlannedTensor* tensor = nullptr;
  std::uint32_t want = 0;     // Position in tensor->wants.
  std::byte* base = nullptr;  // Start of the caller's buffer.
  // The device of the buffer, and the writer for it; null: the host writes.
  std::shared_ptr<const OpenedDevice> device;
  DeviceWriter* writer = nullptr;
  // Digest of the bytes that were given to the writer, compared by CheckArrived.
  Crc64 given = 0;
  // Whether the digest is computed as bytes arrive (`arrived`), for verification by digest.
  bool digested = false;
  DeviceWriter::WriteDigest arrived;
  std::vector<PlacedBox> placed;  // Bytes of the stored tensor, relative to `base`.
  std::uint64_t bytes = 0;        // Size in the stored dtype.
  ReadVerify verify = ReadVerify::kOff;
  ReadStats stats;
  // The following fields are for converted elements; then `placed` is empty.
  bool convert = false;
  DType to = DType::kU8;
  std::vector<PlacedBox> elements;  // Boxes of elements; strides and offset in bytes.

  const RequestedRegion& wanted() const { return tensor->wants[want]; }
  DeviceBoxes boxes() const { return {device, placed, base}; }
};

// This rank's targets, in the order of the plan and, within a tensor, of its wants. `writer` must
// outlive them.
Result<std::vector<LoadTarget>> MakeTargets(const LoadPlan& plan, const ResolvedRequest& mine,
                                            const StateDict& request, int rank,
                                            DeviceWriter& writer);

// Sets cells to zero that the stored tensors do not have, if a rule says so.
Status ZeroUncovered(const ResolvedRequest& mine, const StateDict& request, DeviceWriter& writer);

// Copies the bytes of `part` from `bytes`, laid out as in `from`, to their place in a target. Bytes
// for device memory have arrived only after the writer's Finish; `bytes` may be freed on return.
Status PlaceBytes(const PlacedBox& from, const std::byte* bytes, const Box& part,
                  LoadTarget& target);

// Reads a target without conversion, or only its `part` if not null, straight into its buffer or
// through the writer's blocks, verified by its `verify`. Several threads may read parts of one
// target.
Status ReadTarget(const OpenedCheckpoint& checkpoint, LoadTarget& target, const PlacedBox* part,
                  ReadStats& stats);

// Fails with kDataLoss if the bytes on devices differ from the bytes given to their writer, which
// must have finished. Checks the targets whose `exchange` equals `exchanged`, except converted
// ones, those that a digest proves later, and those read without verification.
Status CheckArrived(std::span<const LoadTarget> targets, bool exchanged, const DeviceLimits& rules);

inline constexpr std::uint64_t kConvertBlockBytes = 4u << 20;
// Reads a target with conversion, block by block: verifies the stored bytes by the target's
// `verify`, then converts them into place. Fails with kInvalidArgument, naming the element, if a
// value cannot be represented in the requested type. `staging` is scratch memory, reused between
// calls. `read` is called with the bytes read for each block.
Status ReadConverted(const OpenedCheckpoint& checkpoint, LoadTarget& target,
                     std::vector<std::byte>& staging, ReadStats& stats,
                     const std::function<void(std::uint64_t)>& read);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_TARGET_H_
