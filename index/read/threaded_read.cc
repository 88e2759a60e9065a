// SPDX-License-Identifier: Apache-2.0
// Splits a read between threads. Each placed box is cut along one axis, and every thread plans and
// reads its part of each box by itself.
#include "index/read/threaded_read.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/parallel.h"
#include "index/read/stored_range_reader.h"
#include "shard/box_access.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

// Number of bytes for which a thread pays off. Starting a thread takes some tens of microseconds,
// reading this many bytes a millisecond.
constexpr std::uint64_t kBytesOfAThread = std::uint64_t{4} << 20;
// A shorter run costs as much as this many bytes, because each run needs a page of its own.
constexpr std::uint64_t kRunBytes = 4096;
// Largest number of threads if the caller gives none. More gain nothing on one machine's storage
// and memory.
constexpr std::size_t kMostThreads = 8;

// At least so many from a server: while some hash what has come, others wait for answers.
constexpr std::size_t kFewestFarThreads = 4;

std::size_t SharesFor(std::uint64_t bytes, int threads, bool far) {
  const std::size_t cores = std::min<std::size_t>(HostCores(), kMostThreads);
  const std::size_t most = threads > 0 ? static_cast<std::size_t>(threads)
                                       : std::max(cores, far ? kFewestFarThreads : 1);
  return static_cast<std::size_t>(std::clamp<std::uint64_t>(bytes / kBytesOfAThread, 1, most));
}

// The axis along which a box is cut. Of the first `axes` axes, the outermost whose extent gives
// every thread a part, so that runs stay long; if no axis does, the longest.
int AxisToCut(const Box& box, int axes, std::size_t shares) {
  int best = 0;
  for (int a = 0; a < axes; ++a) {
    if (static_cast<std::uint64_t>(box.extent(a)) >= shares) return a;
    if (box.extent(a) > box.extent(best)) best = a;
  }
  return best;
}

std::vector<std::vector<PlacedBox>> SplitIntoShares(std::span<const PlacedBox> want, int axes,
                                                    std::size_t shares) {
  std::vector<std::vector<PlacedBox>> shared(shares);
  for (const PlacedBox& placed : want) {
    const int axis = AxisToCut(placed.box, axes, shares);
    const std::int64_t extent = placed.box.extent(axis);
    const auto n = static_cast<std::int64_t>(shares);
    std::int64_t at = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t here = extent / n + (i < extent % n ? 1 : 0);
      if (here == 0) break;
      PlacedBox part = placed;
      part.box = BoxAccess::WithAxis(placed.box, axis, placed.box.begin(axis) + at, here);
      part.offset += at * placed.strides[axis];
      shared[static_cast<std::size_t>(i)].push_back(part);
      at += here;
    }
  }
  return shared;
}

// Estimated cost of reading the boxes, in bytes. Inner axes that the boxes cover completely make
// the runs longer.
std::uint64_t CostOf(std::span<const PlacedBox> want, const Dims& byte_shape) {
  std::uint64_t cost = 0;
  for (const PlacedBox& placed : want) {
    int a = byte_shape.rank() - 1;
    auto run = static_cast<std::uint64_t>(placed.box.extent(a));
    for (; a > 0 && placed.box.extent(a) == byte_shape[a]; --a) {
      run *= static_cast<std::uint64_t>(placed.box.extent(a - 1));
    }
    const auto bytes = static_cast<std::uint64_t>(placed.box.volume());
    if (run > 0) cost += run < kRunBytes ? bytes / run * kRunBytes : bytes;
  }
  return cost;
}

Status ReadPlacedByThreads(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                           std::span<const PlacedBox> want, std::byte* base, ReadVerify verify,
                           int threads) {
  const Dims byte_shape = ByteShape(tensor.meta.dtype(), tensor.meta.shape());
  const std::size_t shares =
      SharesFor(CostOf(want, byte_shape), threads, !checkpoint.fs().Can(Ability::kKernelFiles));
  ReadStats stats;
  if (shares == 1) return checkpoint.ReadPlaced(tensor, want, base, verify, stats, nullptr);
  // If elements are whole bytes, the last axis counts the bytes of an element. It is not cut, so
  // that elements stay together.
  const int axes = tensor.meta.bits() % 8 == 0 ? byte_shape.rank() - 1 : byte_shape.rank();
  const std::vector<std::vector<PlacedBox>> shared =
      SplitIntoShares(want, std::max(axes, 1), shares);
  TENSORMOUNT_RETURN_IF_ERROR(checkpoint.Prepare(tensor));
  struct Nothing {};
  return ForEachParallel<Nothing>(
      shares, static_cast<int>(shares), [&](std::size_t i, Nothing&) -> Status {
        ReadStats of_share;
        return checkpoint.ReadPlaced(tensor, shared[i], base, verify, of_share, nullptr);
      });
}

}  // namespace

Status ReadByThreads(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                     const Region& region, const BufferView& out, ReadVerify verify, int threads) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<PlacedBox> want, PlaceRead(tensor, region, out));
  return ReadPlacedByThreads(checkpoint, tensor, want, static_cast<std::byte*>(out.data), verify,
                             threads);
}

Status ReadBytesByThreads(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                          std::uint64_t offset, void* out, std::size_t size, ReadVerify verify,
                          int threads) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<PlacedBox> want, PlaceBytes(tensor, offset, size));
  return ReadPlacedByThreads(checkpoint, tensor, want, static_cast<std::byte*>(out), verify,
                             threads);
}

}  // namespace tensormount
