// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_PART_WRITER_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_PART_WRITER_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/status.h"

#include "collective/save/data_writer.h"
#include "collective/save/rank_task.h"
#include "index/records/inventory.h"

namespace tensormount {

// The part of a rank's task that one writer writes, into files of its own.
struct WriterPart {
  // Number of the part's rank shard: each has a file. 0 for parts without one.
  int shard = 0;
  std::vector<std::uint32_t> chunks;  // Positions in RankTask::chunks, ascending.
  std::vector<std::uint32_t> objects;
};

// Divides the task into at most `writers` parts with about as many bytes each; equal for an equal
// task and number. `asked`: as in WriteInput.
std::vector<WriterPart> DivideTask(const RankTask& task, const StateDict& state, int writers,
                                   bool asked);

// The records of what one writer has written. Their numbers of files and positions of leaves count
// within this part.
struct WrittenPart {
  Inventory inventory;                            // Files, extra ranges and objects.
  std::map<std::uint32_t, TensorRecord> tensors;  // By position of the tensor in the task.
  std::vector<Hash128> leaves;
  bool paged = false;
  std::uint64_t bytes = 0;
  std::vector<SaveReport::File> files;
};

// The record of tensor number `t` of the task, which is added to `tensors` if it is not there.
TensorRecord& RecordOf(std::map<std::uint32_t, TensorRecord>& tensors, const RankTask& task,
                       std::uint32_t t);

// Writes and syncs a part. Thread-safe for different parts. Fails with WriterStopped at the next
// block after `stop` is set; a wait for a device is not ended. Other errors as for WriteData.
Result<WrittenPart> WritePart(const WriteInput& input, const WriterPart& part,
                              const std::atomic<bool>& stop);
// The status of a writer that ended because another one failed.
Status WriterStopped();

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_PART_WRITER_H_
