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

// One region of a stored tensor that this rank wants, and where it goes. Made for one call: it
// points into the caller's buffers and into the plan, and both must outlive it. A region that is a
// flat range is several boxes; a buffer with strides makes runs shorter, nothing else.
struct LoadTarget {
  const PlannedTensor* tensor = nullptr;
  std::uint32_t want = 0;     // Position in tensor->wants.
  std::byte* base = nullptr;  // Of the caller's buffer.
  // The device that the buffer is on, and who writes there; null: the host does.
  std::shared_ptr<const OpenedDevice> device;
  DeviceWriter* writer = nullptr;
  // What was given to the writer contributes so much to the tensor's digest: for CheckArrived.
  Crc64 given = 0;
  // Its digest is taken as it arrives: for the proof.
  bool digested = false;
  DeviceWriter::Arrived arrived;
  std::vector<PlacedBox> placed;  // Bytes of the stored tensor, relative to `base`.
  std::uint64_t bytes = 0;        // As stored.
  ReadVerify verify = ReadVerify::kOff;
  ReadStats stats;
  // Where elements are converted `placed` is empty, and instead:
  bool convert = false;
  DType to = DType::kU8;
  std::vector<PlacedBox> elements;  // Boxes of elements; strides and offset in bytes.

  const LoadWant& wanted() const { return tensor->wants[want]; }
  DeviceBoxes boxes() const { return {device, placed, base}; }
};

// This rank's targets, in the order of the plan; in each tensor in the order of its wants. `writer`
// must outlive them.
Result<std::vector<LoadTarget>> MakeTargets(const LoadPlan& plan, const Resolved& mine,
                                            const StateDict& request, int rank,
                                            DeviceWriter& writer);

// Sets to zero what the stored tensors lack, where a rule says so.
Status ZeroUncovered(const Resolved& mine, const StateDict& request, DeviceWriter& writer);

// Copies the bytes of a box, which stand as `from` says, to where a target wants them. On a device
// they are once its writer has finished; `bytes` may go when this returns.
Status PlaceBytes(const PlacedBox& from, const std::byte* bytes, const Box& part,
                  LoadTarget& target);

// Reads a target that is not converted, or where `part` is not null that of it, straight into its
// buffer or through the writer's blocks, with its `verify`. Several threads may read parts of one.
Status ReadTarget(const OpenedCheckpoint& checkpoint, LoadTarget& target, const PlacedBox* part,
                  ReadStats& stats);

// Whether what stands on devices is what was given to their writer, which has finished: leaves were
// compared before that. Of those targets of `exchanged` kind that no digest proves later, and not
// of converted ones. kDataLoss.
Status CheckArrived(std::span<const LoadTarget> targets, bool exchanged, const DeviceRules& rules);

// What is read at once where elements are converted.
inline constexpr std::uint64_t kConvertBlockBytes = 4u << 20;
// Reads a target that converts, block by block: bytes are verified as they are stored (`verify` of
// the target), then converted into place. kInvalidArgument "tensor w [3, 5]: 300 is no value of
// i8". `staging` is memory that is kept between calls. `read` is called with what each block read.
Status ReadConverted(const OpenedCheckpoint& checkpoint, LoadTarget& target,
                     std::vector<std::byte>& staging, ReadStats& stats,
                     const std::function<void(std::uint64_t)>& read);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_TARGET_H_
