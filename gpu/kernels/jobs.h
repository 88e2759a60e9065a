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

// The kernels: what each is handed, by value, and what one thread (or warp) of it does. kernels.cu
// makes them of these, the tests run them on the host.

namespace tensormount::kernels {

// How many copies, or regions of digests, go into one launch: what makes many small tensors cheap.
// What they need is handed over with the launch.
inline constexpr int kBatch = 32;
// As much as a launch takes from compute capability 7.0 and CUDA 12.1 on.
// Source: CUDA C++ Programming Guide, kernel parameters.
inline constexpr std::size_t kMostParameters = 32'764;
// Threads of a block.
inline constexpr unsigned kBlockThreads = 256;
// A warp: a few leaves are spread over all of a device, and what is the same for all threads of a
// block is so for all lanes, as a compiler sees it.
inline constexpr unsigned kHashThreads = kLanes;

// Of `count` members, `begin` of which rise, the one that has `number`.
template <typename Number>
TENSORMOUNT_HOST_DEVICE int MemberAt(const Number* begin, int count, Number number) {
  int low = 0;
  int high = count;  // It is in [low, high).
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (number < begin[middle] ? high : low) = middle;
  }
  return low;
}

// Runs the threads of one launch over pieces of several copies, one after the other.
struct Batch {
  int count = 0;
  std::uint64_t begin[kBatch + 1] = {};  // Of each one's pieces, and behind the last.
  Strided strided[kBatch];
  std::uint64_t first[kBatch] = {};  // The piece of each that is its first here.
  const std::uint8_t* from[kBatch] = {};
  std::uint64_t pieces() const { return begin[count]; }
};
// Strided copies, in pieces of WordOf bytes.
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

// Copies of words by tiles, a block of threads each.
struct TileJob {
  int count = 0;
  std::uint64_t begin[kBatch + 1] = {};  // Of each one's tiles, and behind the last.
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

// Copies of bytes that lie side by side, of which there may be many: in parts of kRunPart, a warp
// each.
inline constexpr int kRunBatch = 1024;
struct RunJob {
  int count = 0;
  std::uint32_t begin[kRunBatch + 1] = {};  // Of each one's parts, and behind the last.
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
    if (all - number <= warps) break;  // Before the sum passes what it can hold.
  }
}

// Hashes of the leaves of packed bytes, of one piece of memory after the other, a warp each.
inline constexpr int kHashBatch = 128;
struct HashJob {
  int count = 0;
  std::uint64_t begin[kHashBatch + 1] = {};  // Of each one's leaves, and behind the last.
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

// Contributions to digests, in pieces of kCrcPieceBytes: each is added to its region's sum.
struct CrcJob {
  Batch batch;
  std::uint64_t tensor_bytes[kBatch] = {};
  std::uint64_t* sum[kBatch] = {};
};
// `bytes`: tables.bytes, or a nearer copy of it. `add(sum, value)`: by exclusive or, which other
// threads may do to the same sum meanwhile.
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
