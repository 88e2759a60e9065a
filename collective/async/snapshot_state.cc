// SPDX-License-Identifier: Apache-2.0
// Makes a StateDict of the same shards in snapshot memory. Several threads copy, because one thread
// uses a fifth of the bus to a device. Large copies bypass the caches, which would not hold them
// until the save reads them.
#include "collective/async/snapshot_state.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/parallel.h"
#include "base/stream_copy.h"
#include "collective/guarded.h"
#include "collective/save/block_reader.h"
#include "collective/save/packed_source.h"
#include "collective/save_load.h"
#include "state/state_copy.h"

namespace tensormount {
namespace {

// Alignment of shards in staging memory: a cache line, which also suits vector loads.
constexpr std::uint64_t kAlign = 64;
// Size in bytes from which copies bypass the caches: larger ones do not stay in a cache until the
// save reads them.
constexpr std::size_t kStreamBytes = 256 * 1024;

Status CopyBytes(const PackedSource& source, std::uint64_t begin, std::uint64_t bytes,
                 std::byte* to) {
  const auto size = static_cast<std::size_t>(bytes);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* from, source.Fetch(begin, size, to));
  if (from == to) return {};
  // memcpy bypasses the caches only for copies much larger than most tensors.
  if (size >= kStreamBytes) {
    StreamBytes(from, to, size);
  } else {
    std::memcpy(to, from, size);
  }
  return {};
}

// Least number of bytes for each of several copying threads: a few milliseconds of copying.
constexpr std::uint64_t kBytesOfAStager = std::uint64_t{16} << 20;
constexpr std::uint64_t kMostStagers = 8;

// Where the copies of a state's shards lie: each at an offset from a base.
struct Copies {
  std::vector<PackedSource> sources;
  std::vector<std::uint64_t> offsets;
  std::vector<std::byte*> bases;  // By shard; null: the shard has no bytes.
  std::vector<bool> on_device;    // By shard: whether its copy is on its device.
};

Status AddTo(std::uint64_t& total, std::uint64_t bytes, std::uint64_t& offset) {
  offset = total;
  const auto end = CheckedAdd(total, bytes);
  if (!end || *end > ~std::uint64_t{0} - kAlign) {
    return {Code::kInvalidArgument, "the shards have more than 2^64 bytes in all"};
  }
  total = (*end + kAlign - 1) / kAlign * kAlign;
  return {};
}

// Copies within device memory, which read the caller's memory and so must be waited for.
class CopiesWithin {
 public:
  explicit CopiesWithin(const DeviceLimits& rules) : queues_(rules) {}
  ~CopiesWithin() {
    const Deadline deadline = Deadline::After(kDeviceGrace);
    for (const PendingCopy& way : marks_) {
      if (way.mark.ok() && AwaitMark(*way.mark.value(), deadline).ok())
        way.memory->ClearPendingWrites();
    }
  }
  CopiesWithin(const CopiesWithin&) = delete;
  CopiesWithin& operator=(const CopiesWithin&) = delete;

  // Begins copies to `memory`, which must outlive this object.
  Status Begin(const std::shared_ptr<const OpenedDevice>& device,
               std::span<const DeviceCopy> copies, DeviceSnapshots::Memory& memory) {
    TENSORMOUNT_ASSIGN_OR_RETURN(DeviceQueue* const queue, queues_.Of(device));
    marks_.reserve(marks_.size() + 1);
    // Until there is a mark, the end of the writes is unknown; it stays unknown if an exception is
    // thrown before.
    memory.SetPendingWrites(Status(
        Code::kInternal, "internal error: the copies to staging memory have no completion mark"));
    Submission submission =
        MarkSubmitted(*queue, CatchExceptions([&] { return queue->CopyWithin(copies); }));
    memory.SetPendingWrites(submission.mark);
    marks_.push_back({device, std::move(submission.mark), &memory});
    return device->Name(submission.status);
  }
  Status Finish() {
    for (const PendingCopy& way : marks_) {
      TENSORMOUNT_RETURN_IF_ERROR(queues_.limits().Await(*way.mark.value(), *way.device));
      way.memory->ClearPendingWrites();
    }
    marks_.clear();
    return {};
  }

 private:
  struct PendingCopy {
    std::shared_ptr<const OpenedDevice> device;
    Result<std::shared_ptr<DeviceMark>> mark;
    DeviceSnapshots::Memory* memory;
  };
  DeviceQueues queues_;
  std::vector<PendingCopy> marks_;
};

// Begins the copies on each device that has room for all of its shards, and records where the
// copies lie.
Status CopyWithinDevices(DeviceSnapshots& devices, Copies& copies, CopiesWithin& within,
                         SnapshotState& out) {
  std::map<std::shared_ptr<const OpenedDevice>, std::vector<std::size_t>> by_device;
  for (std::size_t i = 0; i < copies.sources.size(); ++i) {
    const PackedSource& source = copies.sources[i];
    if (source.device() != nullptr && source.bytes() > 0) by_device[source.device()].push_back(i);
  }
  for (const auto& [device, all] : by_device) {
    std::uint64_t total = 0;
    for (const std::size_t i : all) {
      TENSORMOUNT_RETURN_IF_ERROR(AddTo(total, copies.sources[i].bytes(), copies.offsets[i]));
    }
    std::unique_ptr<DeviceSnapshots::Memory> memory = devices.Take(device, total);
    if (memory == nullptr) continue;
    std::vector<DeviceCopy> wanted;
    for (const std::size_t i : all) {
      const PackedSource& source = copies.sources[i];
      copies.on_device[i] = true;
      copies.bases[i] = memory->data();
      for (const StridedCopy& plan : source.Gather(0, source.bytes())) {
        wanted.push_back({plan, source.base(), memory->data() + copies.offsets[i]});
      }
    }
    out.on_devices.push_back(std::move(memory));
    TENSORMOUNT_RETURN_IF_ERROR(within.Begin(device, wanted, *out.on_devices.back()));
  }
  return {};
}

// Copies the remaining bytes to host memory, in parts of about equal size, one for each thread.
Status CopyToHost(const StateDict& state, const DeviceLimits& rules, const Copies& copies,
                  std::uint64_t total, std::atomic<std::uint64_t>* staged) {
  const std::uint64_t threads = std::clamp<std::uint64_t>(
      total / kBytesOfAStager, 1, std::min<std::uint64_t>(HostCores(), kMostStagers));
  const std::uint64_t even = total / threads + kAlign;
  std::vector<std::vector<BlockReader::PlannedRange>> parts(1);
  std::uint64_t room = even;
  for (std::size_t i = 0; i < copies.sources.size(); ++i) {
    if (copies.on_device[i]) continue;
    const std::uint64_t bytes = copies.sources[i].bytes();
    for (std::uint64_t begin = 0; begin < bytes;) {
      if (room < kAlign) {
        parts.emplace_back();
        room = even;
      }
      // Strided host memory is not split, because one call gathers it (PackedSource::Fetch).
      const bool whole = copies.sources[i].device() == nullptr && !copies.sources[i].in_place();
      // Cuts at multiples of kAlign, because devices copy whole words.
      const std::uint64_t cut = std::min(room / kAlign * kAlign, bytes - begin);
      const std::uint64_t n = whole ? bytes : cut;
      parts.back().push_back({static_cast<std::uint32_t>(i), begin, n});
      begin += n;
      room -= std::min(room, n);
    }
  }
  struct Nothing {};
  return ForEachParallel<Nothing>(
      parts.size(), static_cast<int>(threads), [&](std::size_t p, Nothing&) -> Status {
        // The ranges of device tensors are planned together, so that their transfers run while this
        // thread copies host tensors.
        std::vector<BlockReader::PlannedRange> flown;
        for (const BlockReader::PlannedRange& part : parts[p]) {
          if (copies.sources[part.item].device() != nullptr) flown.push_back(part);
        }
        BlockReader blocks(state, BlockRules{rules});
        blocks.Plan(std::move(flown));
        for (const BlockReader::PlannedRange& part : parts[p]) {
          const PackedSource& source = copies.sources[part.item];
          std::byte* const to = copies.bases[part.item] + copies.offsets[part.item] + part.begin;
          if (source.device() == nullptr) {
            TENSORMOUNT_RETURN_IF_ERROR(CopyBytes(source, part.begin, part.bytes, to));
          } else {
            TENSORMOUNT_RETURN_IF_ERROR(blocks.Next().status());
            for (std::uint64_t done = 0; done < part.bytes;) {
              TENSORMOUNT_ASSIGN_OR_RETURN(
                  const std::span<const std::byte> block,
                  blocks.Take(static_cast<std::size_t>(part.bytes - done)));
              StreamBytes(block.data(), to + done, block.size());
              done += block.size();
            }
          }
          if (staged != nullptr) staged->fetch_add(part.bytes, std::memory_order_relaxed);
        }
        EndStream();
        return {};
      });
}

Status Stage(const StateDict& state, SnapshotPool& pool, DeviceSnapshots& devices,
             const DeviceLimits& rules, std::atomic<std::uint64_t>* staged,
             std::atomic<std::int64_t>* stalled, SnapshotState& out) {
  TENSORMOUNT_RETURN_IF_ERROR(state.status());
  TENSORMOUNT_RETURN_IF_ERROR(CheckHasData(state));
  const std::size_t count = state.tensors().size();
  Copies copies;
  copies.sources.reserve(count);
  for (const StateDict::TensorItem& item : state.tensors()) {
    Result<PackedSource> made = PackedSource::Make(item.shard);
    if (!made.ok()) return made.status().WithContext("tensor " + item.key);
    copies.sources.push_back(std::move(made).value());
  }
  copies.offsets.resize(count);
  copies.bases.resize(count);
  copies.on_device.resize(count);
  // Device copies begin first, so that they run while the host copies.
  CopiesWithin within(rules);
  TENSORMOUNT_RETURN_IF_ERROR(CopyWithinDevices(devices, copies, within, out));
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (copies.on_device[i]) continue;
    TENSORMOUNT_RETURN_IF_ERROR(AddTo(total, copies.sources[i].bytes(), copies.offsets[i]));
  }
  if (total > 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out.memory, pool.Take(total, rules.patience, stalled));
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (!copies.on_device[i] && copies.sources[i].bytes() > 0) copies.bases[i] = out.memory->data();
  }
  TENSORMOUNT_RETURN_IF_ERROR(CopyToHost(state, rules, copies, total, staged));
  TENSORMOUNT_RETURN_IF_ERROR(within.Finish());
  out.dict = WithShards(state, [&](std::size_t i) {
    Shard shard = state.tensors()[i].shard;
    const Dims shape =
        shard.region.is_flat() ? Dims{shard.region.volume()} : shard.region.box().extent();
    void* data = copies.bases[i] == nullptr ? nullptr : copies.bases[i] + copies.offsets[i];
    BufferView view = BufferView::Host(shard.data.dtype, data, shape);
    if (copies.on_device[i]) {
      view.device = shard.data.device;
      view.memory = MemoryKind::kDevice;
    }
    shard.data = view;
    return shard;
  });
  if (staged != nullptr) {
    for (std::size_t i = 0; i < count; ++i) {
      if (copies.on_device[i])
        staged->fetch_add(copies.sources[i].bytes(), std::memory_order_relaxed);
    }
    for (const StateDict::ObjectItem& object : state.objects()) {
      staged->fetch_add(object.bytes.size(), std::memory_order_relaxed);
    }
  }
  return out.dict.status();
}

}  // namespace

std::uint64_t BytesOf(const StateDict& state) {
  std::uint64_t total = 0;
  for (const StateDict::TensorItem& item : state.tensors()) {
    const Result<std::uint64_t> bytes =
        RegionBytes(item.shard.data.dtype, item.shard.global_shape, item.shard.region);
    if (bytes.ok()) total += bytes.value();
  }
  for (const StateDict::ObjectItem& object : state.objects()) total += object.bytes.size();
  return total;
}

StateDict ShareState(const StateDict& state) {
  return WithShards(state, [&](std::size_t i) { return state.tensors()[i].shard; });
}

SnapshotState StageState(const StateDict& state, SnapshotPool& pool, DeviceSnapshots& devices,
                         const DeviceLimits& rules, std::atomic<std::uint64_t>* staged,
                         std::atomic<std::int64_t>* stalled) {
  SnapshotState out;
  out.status = Guarded([&] { return Stage(state, pool, devices, rules, staged, stalled, out); });
  if (!out.status.ok()) {
    out.status = AfterDevices(out.status, rules.fences);
    out.dict = StateDict();
    (void)out.dict.Fail(out.status);
    out.memory.reset();
    for (const auto& memory : out.on_devices) memory->MarkStillAccessed();
    out.on_devices.clear();
  }
  return out;
}

}  // namespace tensormount
