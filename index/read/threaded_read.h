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

// OpenedCheckpoint::Read and ReadBytes by several threads, for who reads alone on a machine: the
// ranks of a load are threads enough. One thread for each 4 MiB, or 1,024 runs under a page, at
// most `threads` (0: as many as cores, at most 8), of which the caller's is one; smaller reads take
// no other. All have ended when this returns; where several fail, the failure of one of them.
Status ReadByThreads(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                     const Region& region, const BufferView& out, ReadVerify verify, int threads);
Status ReadBytesByThreads(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                          std::uint64_t offset, void* out, std::size_t size, ReadVerify verify,
                          int threads);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_THREADED_READ_H_
