// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_THREADED_READ_H_
#define TENSORMOUNT_INDEX_READ_THREADED_READ_H_

#include <cstddef>
#include <cstdint>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "index/read/checkpoint.h"

namespace tensormount {

// OpenedCheckpoint::Read and ReadBytes on several threads, for a single reader on a machine. (The
// ranks of a load are enough threads.) Uses one thread for each 4 MiB or 1,024 runs shorter than 4
// KiB, at most `threads` (0: the number of cores, at most 8), including the caller's. All threads
// have ended at return. If several fail, one of their errors is returned.
Status ReadByThreads(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                     const Region& region, const BufferView& out, ReadVerify verify, int threads);
Status ReadBytesByThreads(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                          std::uint64_t offset, void* out, std::size_t size, ReadVerify verify,
                          int threads);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_THREADED_READ_H_
