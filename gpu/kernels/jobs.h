// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_JOBS_H_
#define TENSORMOUNT_GPU_KERNELS_JOBS_H_

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/crc64.h"
#include "gpu/kernels/runs.h"
#include "gpu/kernels/strided.h"
#include "gpu/kernels/tiles.h"
#include "gpu/kernels/xxh3.h"

// The parameters of each kernel (a job, passed by value), and a function that does the work of one
// thread, warp or block. kernels.cu makes kernels of these functions, and tests call them on the
// host.

namespace tensormount::kernels {

// Number of strided copies, or regions of digests, per launch. Batching makes many small tensors
// cheap; the parameters travel with the launch.
inline constexpr int kBatch = 32;
// Largest size of launch parameters from compute capability 7.0 and CUDA 12.1 on.
// Source: CUDA C++ Programming Guide, kernel parameters.
inline constexpr std::size_t kMostParameters = 32'764;
inline constexpr unsigned kBlockThreads = 256;
// One warp per block: then even a few leaves are spread over the whole device, and the compiler
// knows that values that are uniform in the block are uniform in the warp.
inline constexpr unsigned kHashThreads = kLanes;

// The index of the copy, region or leaf group that contains piece `number`, found by binary search:
// `begin` has the first number of each of the `count` members, ascending.
template <typename Number>
TENSORMOUNT_HOST_DEVICE int MemberAt(const Number* begin, int count, Number number) {
  int low = 0;
  int high = count;  // The result is in [low, high).
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (number < begin[middle] ? high : low) = middle;
  }
  return low;
}

// Pieces of several copies, or of several regions of digests, numbered one copy after the other,
// for the threads of one launch.
struct Batch {
  int count = 0;
  std::uint64_t begin[kBatch + 1] = {};  // First piece of each copy, and the end.
  Strided strided[kBatch];
  std::uint64_t first[kBatch] = {};  // Number within each copy of its first piece in the batch.
  const std::uint8_t* from[kBatch] = {};
  std::uint64_t pieces() const { return begin[count]; }
};
// Strided copies in pieces of WordOf bytes or less (AddCopy), a thread per piece.
struct CopyJob {
  Batch batch;
  std::uint8_t* to[kBatch] = {};
};
TENSORMOUNT_HOST_DEVICE inline void CopyThread(const CopyJob& job, std::uint64_t thread,
                                               std::uint64_t threads) {
  const std::uint64_t all = job.batch.begin[job.batch.count];
  for (std::uint64_t n = thread; n < all; n += threads) {
    const int m = MemberAt(job.batch.begin, job.batch.count, n);
    const Strided& s = job.batch.strided[m];
    const std::uint64_t number = n - job.batch.begin[m] + job.batch.first[m];
    if (s.pieces >> 32 == 0) {
      CopyPiece<std::uint32_t>(s, number, job.batch.from[m], job.to[m]);
    } else {
      CopyPiece<std::uint64_t>(s, number, job.batch.from[m], job.to[m]);
    }
  }
}

// Transposing copies of words by tiles, a block of threads per tile.
struct TileJob {
  int count = 0;
  std::uint64_t begin[kBatch + 1] = {};  // First tile of each copy, and the end.
  Tiled tiled[kBatch];
  const std::uint8_t* from[kBatch] = {};
  std::uint8_t* to[kBatch] = {};
  std::uint64_t tiles() const { return begin[count]; }
};
template <typename Block>
TENSORMOUNT_HOST_DEVICE void TileBlock(const TileJob& job, const Block& block, TileMemory& memory,
                                       std::uint64_t number, std::uint64_t blocks) {
  for (; number < job.begin[job.count]; number += blocks) {
    const int m = MemberAt(job.begin, job.count, number);
    MoveTile(job.tiled[m], static_cast<std::uint32_t>(number - job.begin[m]), job.from[m],
             job.to[m], block, memory);
  }
}

// Contiguous copies in parts of kRunPart bytes, a warp per part.
inline constexpr int kRunBatch = 1024;
struct RunJob {
  int count = 0;
  std::uint32_t begin[kRunBatch + 1] = {};  // First part of each copy, and the end.
  const std::uint8_t* from[kRunBatch] = {};
  std::uint8_t* to[kRunBatch] = {};
  std::uint64_t bytes[kRunBatch] = {};
  std::uint64_t parts() const { return begin[count]; }
};
template <typename Warp>
TENSORMOUNT_HOST_DEVICE void RunWarp(const RunJob& job, const Warp& warp, std::uint32_t number,
                                     std::uint32_t warps) {
  const std::uint32_t all = job.begin[job.count];
  for (; number < all; number += warps) {
    const int m = MemberAt(job.begin, job.count, number);
    const std::uint64_t at = std::uint64_t{number - job.begin[m]} * kRunPart;
    const std::uint64_t left = job.bytes[m] - at;
    const auto bytes = static_cast<unsigned>(left < kRunPart ? left : kRunPart);
    (void)warp.Map([&](int lane) {
      CopyRun(job.from[m] + at, job.to[m] + at, bytes, static_cast<unsigned>(lane));
      return 0;
    });
    if (all - number <= warps) break;  // Before number + warps can exceed 32 bits.
  }
}

// Hashes of the leaves of several contiguous parts of memory, a warp per leaf.
inline constexpr int kHashBatch = 128;
struct HashJob {
  int count = 0;
  std::uint64_t begin[kHashBatch + 1] = {};  // First leaf of each part, and the end.
  const std::uint8_t* data[kHashBatch] = {};
  std::uint64_t bytes[kHashBatch] = {};
  std::uint64_t leaf_bytes = 0;
  Hash* out = nullptr;
  std::uint64_t leaves() const { return begin[count]; }
};
template <typename Warp>
TENSORMOUNT_HOST_DEVICE void HashWarp(const HashJob& job, const Warp& warp, std::uint64_t number,
                                      std::uint64_t warps) {
  for (; number < job.begin[job.count]; number += warps) {
    const int m = MemberAt(job.begin, job.count, number);
    const std::uint64_t from = (number - job.begin[m]) * job.leaf_bytes;
    const std::uint64_t left = job.bytes[m] - from;
    const Hash hash =
        HashOfLeaf(warp, job.data[m] + from, left < job.leaf_bytes ? left : job.leaf_bytes);
    (void)warp.Map([&](int lane) {
      if (lane == 0) job.out[number] = hash;
      return 0;
    });
  }
}

// Contributions to digests in pieces of kCrcPieceBytes, a thread per piece. sum[m] is the digest to
// which region m contributes, in device memory; several regions may share one.
struct CrcJob {
  Batch batch;
  std::uint64_t tensor_bytes[kBatch] = {};
  std::uint64_t* sum[kBatch] = {};
};
// `bytes`: tables.bytes, or a copy of it in shared memory. `add(sum, value)` must be an atomic
// exclusive or, because other threads may change the same sum.
template <typename Add>
TENSORMOUNT_HOST_DEVICE void CrcThread(const CrcJob& job, const ByteTables& bytes,
                                       const CrcTables& tables, std::uint64_t thread,
                                       std::uint64_t threads, Add add) {
  const std::uint64_t all = job.batch.begin[job.batch.count];
  for (std::uint64_t n = thread; n < all; n += threads) {
    const int m = MemberAt(job.batch.begin, job.batch.count, n);
    const Strided& s = job.batch.strided[m];
    add(job.sum[m],
        CrcOfPiece<std::uint64_t>(bytes, tables, s, n - job.batch.begin[m] + job.batch.first[m],
                                  job.batch.from[m], job.tensor_bytes[m]));
  }
}

static_assert(sizeof(CopyJob) <= kMostParameters && sizeof(TileJob) <= kMostParameters &&
              sizeof(RunJob) <= kMostParameters && sizeof(HashJob) <= kMostParameters &&
              sizeof(CrcJob) <= kMostParameters);

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_JOBS_H_
