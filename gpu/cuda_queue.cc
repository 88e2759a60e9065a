// SPDX-License-Identifier: Apache-2.0
// DeviceQueue as launches and copies in one CUDA stream. Between host and device a copy that is one
// run is transferred directly if it is long, or alone in its call. All other copies between host
// and device go through scratch memory of the device, where a kernel packs or unpacks many small
// copies in one launch, so that transfers over the bus are long. If there is no scratch memory,
// each run is transferred by itself.
#include "gpu/cuda_queue.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "device/pinned_ring.h"

namespace tensormount::gpu {
namespace {

using kernels::kBatch;
using kernels::kBlockThreads;

// Contiguous copies of at least this many bytes are transferred directly, one submission each.
constexpr std::uint64_t kLong = std::uint64_t{64} << 10;
// The offset of bytes in scratch memory and their host address are equal modulo kAlike, so that
// words aligned on one side are aligned on the other.
constexpr std::uint64_t kAlike = 256;
// Bytes of a host cache line. A transfer may include the gap between two copies of one submission
// that lies within one line.
constexpr std::uintptr_t kLine = 64;
// Largest number of thread blocks of one launch. If there is more work, each thread loops.
constexpr std::uint64_t kMostBlocks = 65'536;
// Largest numbers of digests, and of hash leaves, that wait for one launch.
constexpr std::size_t kMostDigests = 4096;
constexpr std::uint64_t kMostLeaves = ScratchPool::kResultBytes / sizeof(Hash128);
static_assert(kMostDigests * sizeof(Crc64) <= ScratchPool::kResultBytes);
static_assert(ScratchPool::kResultBytes <= ResultSlabs::kSlabBytes);
// A mark is recorded after each kOfOneMark launches and copies, and the queue waits for the oldest
// mark when kMarksUnderWay are pending, because beyond about a thousand queued launches and
// copies the driver would block the caller.
constexpr int kOfOneMark = 128;
constexpr std::size_t kMarksUnderWay = 4;

cuda::Address AddressOf(const void* data) { return reinterpret_cast<cuda::Address>(data); }

// One side of a plan: its offset, and whether it is contiguous in the order of its runs.
struct Side {
  std::int64_t offset = 0;
  bool dense = true;
};
Side SideOf(const StridedCopy& plan, bool destination) {
  Side side{destination ? plan.dst_offset : plan.src_offset};
  auto expected = static_cast<std::int64_t>(plan.run);
  for (int a = plan.axes - 1; a >= 0; --a) {
    const StridedCopy::Axis& axis = plan.axis[static_cast<std::size_t>(a)];
    side.dense = side.dense && (destination ? axis.dst : axis.src) == expected;
    expected *= axis.count;
  }
  return side;
}

// Adds bytes [first, first + bytes) of a copy, counted along its dense side, to a batch. `word`
// must divide `first` and `bytes`.
void AddMember(kernels::Batch& batch, const StridedCopy& plan, const std::byte* from,
               std::uint64_t word, std::uint64_t first, std::uint64_t bytes) {
  const auto m = static_cast<std::size_t>(batch.count++);
  batch.strided[m] = kernels::CutIntoPieces(plan, word);
  batch.first[m] = first / word;
  batch.from[m] = reinterpret_cast<const std::uint8_t*>(from);
  batch.begin[m + 1] = batch.begin[m] + bytes / word;
}

// The largest box of a copy that begins at byte `first`, counted along its dense side, and has at
// most `bytes` bytes. The box is smaller if either end lies within a row. If there is no box of
// runs, the result has all bytes and no axes.
struct BoxOfPlan {
  StridedCopy plan;
  std::uint64_t bytes = 0;
};
BoxOfPlan BoxAt(const StridedCopy& plan, std::uint64_t first, std::uint64_t bytes) {
  BoxOfPlan box{plan, bytes};
  box.plan.axes = 0;
  if (first % plan.run != 0 || bytes < plan.run) return box;
  std::uint64_t each = plan.bytes();  // Bytes of one step along the axis.
  for (const StridedCopy::Axis& axis : plan.loops()) {
    each /= static_cast<std::uint64_t>(axis.count);
    const auto at = static_cast<std::int64_t>(first / each) % axis.count;
    box.plan.src_offset += at * axis.src;
    box.plan.dst_offset += at * axis.dst;
    StridedCopy::Axis& own = box.plan.axis[static_cast<std::size_t>(box.plan.axes)];
    if (box.plan.axes > 0) {
      own = axis;
      ++box.plan.axes;
    } else if (first % each == 0 && each <= bytes) {
      const auto steps = std::min(static_cast<std::int64_t>(bytes / each), axis.count - at);
      own = {steps, axis.src, axis.dst};
      ++box.plan.axes;
      box.bytes = static_cast<std::uint64_t>(steps) * each;
    }
  }
  return box;
}

std::uint64_t CommonWordSize(std::uint64_t word, std::uint64_t a, std::uint64_t b) {
  const std::uint64_t all = word | a | b;
  return all & (~all + 1);
}

}  // namespace

// Results in transit: the device writes them to slabs (ResultSlabs), and the host copies them to
// the caller's memory when a later mark is found reached. So the device never writes to memory that
// the caller has freed. Thread-safe.
class CudaQueue::Results {
 public:
  explicit Results(std::shared_ptr<CudaContext> context) : context_(std::move(context)) {}
  ~Results() {
    // Leaks the slabs, because the device may still write to them.
    for (Expected& expected : expected_) {
      LeakToDevice(new std::shared_ptr<ResultSlabs::Slab>(std::move(expected.slab)));
    }
    context_->under_way -= static_cast<std::int64_t>(submitted_ - over_);
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  // Notes that the last submission writes `wanted`, one after the other, to `at` in `slab`.
  void Expect(const std::shared_ptr<ResultSlabs::Slab>& slab, const std::byte* at,
              std::span<const PendingResult> wanted) {
    std::lock_guard lock(mutex_);
    for (const PendingResult& one : wanted) {
      expected_.push_back({slab, at, one.bytes, one.out, submitted_});
      at += one.bytes;
    }
  }
  void Submitted() {
    std::lock_guard lock(mutex_);
    ++submitted_;
    ++context_->under_way;
  }
  std::uint64_t last() {
    std::lock_guard lock(mutex_);
    return submitted_;
  }
  // Notes that all submissions up to `number` have completed, and delivers their results.
  void CompleteUpTo(std::uint64_t number) {
    std::lock_guard lock(mutex_);
    while (!expected_.empty() && expected_.front().number <= number) {
      const Expected& first = expected_.front();
      std::memcpy(first.out, first.at, first.bytes);
      expected_.pop_front();
    }
    if (number > over_) {
      context_->under_way -= static_cast<std::int64_t>(number - over_);
      over_ = number;
    }
  }

  // Slab being filled; used by the queue's thread only.
  std::shared_ptr<ResultSlabs::Slab> current;

 private:
  struct Expected {
    std::shared_ptr<ResultSlabs::Slab> slab;
    const std::byte* at = nullptr;
    std::size_t bytes = 0;
    void* out = nullptr;
    std::uint64_t number = 0;  // Number of the submission that writes the result, from 1 on.
  };
  const std::shared_ptr<CudaContext> context_;
  std::mutex mutex_;
  std::deque<Expected> expected_;
  std::uint64_t submitted_ = 0;
  std::uint64_t over_ = 0;
};

CudaQueue::CudaQueue(std::shared_ptr<CudaDevice> device, cuda::Stream stream,
                     const QueueLimits& limits)
    : device_(std::move(device)),
      context_(device_->context()),
      pool_(device_->scratch()),
      stream_(stream),
      limits_(limits),
      results_(std::make_shared<Results>(context_)),
      copies_(std::make_unique<Copies>()) {}

// Does not wait: the driver keeps a destroyed stream until its work is done.
CudaQueue::~CudaQueue() {
  const CudaScope scope(*context_);
  if (!scope.status().ok()) return;
  if (scratch_) pool_->Give(*scratch_, stream_);
  (void)context_->driver().cuStreamDestroy(stream_);
}

// Converts kResourceExhausted to kUnavailable: the batch belongs to earlier calls that succeeded,
// and a caller that gets kResourceExhausted would use its fallback for its present work only.
Status CudaQueue::Flush() {
  Status status;
  if (!hashes_.empty()) status = FlushHashes();
  if (!digests_.empty()) {
    const Status digests = FlushDigests();
    if (status.ok()) status = digests;
  }
  if (status.code() != Code::kResourceExhausted) return status;
  return {Code::kUnavailable, status.message()};
}

Status CudaQueue::EnsureScratch() {
  if (!scratch_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(scratch_, pool_->Take());
  }
  if (!scratch_->fresh) return {};
  TENSORMOUNT_RETURN_IF_ERROR(context_->Check(
      context_->driver().cuMemsetD8Async(scratch_->data, 0,
                                         scratch_->data_bytes + ScratchPool::kResultBytes, stream_),
      "clear a device buffer"));
  scratch_->fresh = false;
  return Submitted();
}

Result<std::shared_ptr<CudaMark>> CudaQueue::Record() {
  return CudaMark::Record(context_, stream_, [results = results_, last = results_->last()] {
    results->CompleteUpTo(last);
  });
}

Status CudaQueue::Await(CudaMark& mark) const {
  return AwaitMark(mark, Deadline::After(limits_.patience), limits_.cancel)
      .WithContext(device_->name());
}

Status CudaQueue::Submitted() {
  results_->Submitted();
  if (++since_mark_ < kOfOneMark) return {};
  since_mark_ = 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<CudaMark> mark, Record());
  under_way_.push_back(std::move(mark));
  if (under_way_.size() < kMarksUnderWay) return {};
  const std::shared_ptr<CudaMark> oldest = std::move(under_way_.front());
  under_way_.pop_front();
  return Await(*oldest);
}

Status CudaQueue::AwaitAll() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<CudaMark> mark, Record());
  return Await(*mark);
}

Status CudaQueue::WaitFor(const std::shared_ptr<DeviceMark>& mark) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  TENSORMOUNT_RETURN_IF_ERROR(Flush());
  return static_cast<CudaMark&>(*mark).Precede(*context_, stream_);
}

Result<std::shared_ptr<DeviceMark>> CudaQueue::Mark() {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  TENSORMOUNT_RETURN_IF_ERROR(Flush());
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<CudaMark> mark, Record());
  return std::shared_ptr<DeviceMark>(std::move(mark));
}

Status CudaQueue::Launch(cuda::Function function, std::uint64_t blocks, unsigned threads, void* job,
                         std::string_view name) {
  const auto grid = static_cast<unsigned>(std::min(blocks, kMostBlocks));
  void* parameters[] = {job};
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(context_->driver().cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0,
                                                        stream_, parameters, nullptr),
                      name));
  return Submitted();
}

// ---- Copies ----------------------------------------------------------------------------------

bool CudaQueue::CopiesAreFull() const {
  const kernels::RunJob& runs = copies_->runs;
  return runs.count == kernels::kRunBatch || runs.begin[runs.count] >> 31 != 0 ||
         copies_->strided.batch.count == kBatch || copies_->tiles.count == kBatch;
}

std::uint64_t CudaQueue::AddCopy(const StridedCopy& plan, const std::byte* from, std::byte* to,
                                 std::uint64_t first, std::uint64_t bytes) {
  const auto* const source = reinterpret_cast<const std::uint8_t*>(from);
  auto* const target = reinterpret_cast<std::uint8_t*>(to);
  if (plan.axes == 0) {
    // Part numbers have 32 bits; CopiesAreFull keeps their sum below that.
    bytes = std::min(bytes, std::uint64_t{1} << 40);
    kernels::RunJob& job = copies_->runs;
    const auto parts =
        static_cast<std::uint32_t>((bytes + kernels::kRunPart - 1) / kernels::kRunPart);
    const auto m = static_cast<std::size_t>(job.count++);
    job.from[m] = source + plan.src_offset + first;
    job.to[m] = target + plan.dst_offset + first;
    job.bytes[m] = bytes;
    job.begin[m + 1] = job.begin[m] + parts;
    return bytes;
  }
  // Tiles need a whole box of the copy, so this part may become smaller.
  if (kernels::CutIntoTiles(plan, from, to).tiles != 0) {
    const BoxOfPlan box = BoxAt(plan, first, bytes);
    bytes = box.bytes;
    const kernels::Tiled tiled = kernels::CutIntoTiles(box.plan, from, to);
    if (tiled.tiles != 0) {
      kernels::TileJob& job = copies_->tiles;
      const auto m = static_cast<std::size_t>(job.count++);
      job.tiled[m] = tiled;
      job.from[m] = source;
      job.to[m] = target;
      job.begin[m + 1] = job.begin[m] + tiled.tiles;
      return bytes;
    }
  }
  const std::uint64_t word = CommonWordSize(kernels::WordOf(plan, from, to), first, bytes);
  kernels::CopyJob& job = copies_->strided;
  job.to[job.batch.count] = target;
  AddMember(job.batch, plan, from, word, first, bytes);
  return bytes;
}

Status CudaQueue::LaunchCopies() {
  kernels::RunJob& runs = copies_->runs;
  kernels::CopyJob& strided = copies_->strided;
  kernels::TileJob& tiles = copies_->tiles;
  Status status;
  constexpr unsigned kWarps = kBlockThreads / kernels::kLanes;
  if (runs.count > 0) {
    status = Launch(device_->kernels().runs, (runs.parts() + kWarps - 1) / kWarps, kBlockThreads,
                    &runs, "copy");
  }
  if (status.ok() && strided.batch.count > 0) {
    status = Launch(device_->kernels().copy,
                    (strided.batch.pieces() + kBlockThreads - 1) / kBlockThreads, kBlockThreads,
                    &strided, "copy");
  }
  if (status.ok() && tiles.count > 0) {
    status = Launch(device_->kernels().tiles, tiles.tiles(), kBlockThreads, &tiles, "copy");
  }
  copies_->Clear();
  return status;
}

Status CudaQueue::TransferBytes(std::byte* host, const std::byte* device, std::uint64_t bytes,
                                Way way) {
  const cuda::Driver& driver = context_->driver();
  const auto size = static_cast<std::size_t>(bytes);
  // The driver blocks without a deadline for pageable memory, so this waits for the stream first.
  if (!device_->pinned_memory().Has(host, size)) TENSORMOUNT_RETURN_IF_ERROR(AwaitAll());
  const cuda::Result result =
      way == Way::kOut ? driver.cuMemcpyDtoHAsync(host, AddressOf(device), size, stream_)
                       : driver.cuMemcpyHtoDAsync(AddressOf(device), host, size, stream_);
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(result, (way == Way::kOut ? "copy from the device " : "copy to the device ") +
                                  std::to_string(bytes) + " bytes"));
  return Submitted();
}

namespace {

// Host and device addresses of a transfer, with the offsets of the plan added.
struct Ends {
  std::byte* host = nullptr;
  const std::byte* device = nullptr;
};
Ends EndsOf(const DeviceCopy& copy, bool out) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): only read on the way in.
  auto* const from = const_cast<std::byte*>(copy.from) + copy.plan.src_offset;
  std::byte* const to = copy.to + copy.plan.dst_offset;
  return out ? Ends{to, from} : Ends{from, to};
}

// Whether a copy gets its own submission: one run of at least `least` bytes.
bool IsSubmittedAlone(const StridedCopy& plan, std::uint64_t least) {
  return plan.axes == 0 && plan.run >= least;
}

}  // namespace

// Transfers each run by itself; used if there is no scratch memory.
Status CudaQueue::TransferByRuns(const DeviceCopy& copy, Way way) {
  Status status;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): only read on the way in.
  auto* const source = const_cast<std::byte*>(copy.from);
  copy.plan.ForEachRun([&](std::int64_t from, std::int64_t to, std::uint64_t bytes) {
    if (!status.ok()) return;
    status = way == Way::kOut ? TransferBytes(copy.to + to, source + from, bytes, way)
                              : TransferBytes(source + from, copy.to + to, bytes, way);
  });
  return status;
}

Status CudaQueue::CopyOut(std::span<const DeviceCopy> copies) {
  return Transfer(copies, Way::kOut);
}
Status CudaQueue::CopyIn(std::span<const DeviceCopy> copies) { return Transfer(copies, Way::kIn); }

Status CudaQueue::Transfer(std::span<const DeviceCopy> copies, Way way) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  TENSORMOUNT_RETURN_IF_ERROR(Flush());
  for (const DeviceCopy& copy : copies) {
    if (!SideOf(copy.plan, way == Way::kOut).dense) {
      return {Code::kInternal, "internal error: a copy is not contiguous on the host"};
    }
  }
  const std::uint64_t alone = copies.size() == 1 ? 1 : kLong;
  bool others = false;
  for (const DeviceCopy& copy : copies) {
    if (!IsSubmittedAlone(copy.plan, alone)) {
      others = others || copy.plan.run != 0;
      continue;
    }
    const Ends ends = EndsOf(copy, way == Way::kOut);
    TENSORMOUNT_RETURN_IF_ERROR(TransferBytes(ends.host, ends.device, copy.plan.run, way));
  }
  return others ? TransferThroughScratch(copies, alone, way) : Status();
}

// Transfers the spans between host and scratch memory: to scratch memory before kernels unpack the
// bytes, or to the host after kernels have packed them. Afterwards scratch memory can be reused,
// because the stream executes work in order.
Status CudaQueue::TransferSpans(std::vector<Span>& spans, Way way) {
  const auto* const scratch = reinterpret_cast<const std::byte*>(scratch_->data);
  if (way == Way::kOut) TENSORMOUNT_RETURN_IF_ERROR(LaunchCopies());
  for (const Span& span : spans) {
    TENSORMOUNT_RETURN_IF_ERROR(TransferBytes(span.host, scratch + span.at, span.bytes, way));
  }
  spans.clear();
  return way == Way::kIn ? LaunchCopies() : Status();
}

// Adds one copy, or the part that fits into scratch memory, at a time; bytes adjacent on the host
// and in scratch memory are transferred together. Without scratch memory: TransferByRuns.
Status CudaQueue::TransferThroughScratch(std::span<const DeviceCopy> copies, std::uint64_t alone,
                                         Way way) {
  const Status enough = EnsureScratch();
  if (enough.code() == Code::kResourceExhausted) {
    for (const DeviceCopy& copy : copies) {
      if (!IsSubmittedAlone(copy.plan, alone))
        TENSORMOUNT_RETURN_IF_ERROR(TransferByRuns(copy, way));
    }
    return {};
  }
  TENSORMOUNT_RETURN_IF_ERROR(enough);
  copies_->Clear();  // An earlier call that failed may have left copies.
  std::vector<Span> spans;
  std::uint64_t used = 0;
  for (const DeviceCopy& copy : copies) {
    if (IsSubmittedAlone(copy.plan, alone)) continue;
    const Side dense = SideOf(copy.plan, way == Way::kOut);
    std::byte* const host = EndsOf(copy, way == Way::kOut).host;
    const std::uint64_t all = copy.plan.bytes();
    for (std::uint64_t done = 0; done < all;) {
      // The gap after the last span, if this part of the copy begins within that span's last cache
      // line.
      std::uint64_t gap = kLine;
      if (!spans.empty()) {
        const auto end = reinterpret_cast<std::uintptr_t>(spans.back().host) + spans.back().bytes;
        const auto next = reinterpret_cast<std::uintptr_t>(host + done);
        if (next == end || next == (end + kLine - 1) / kLine * kLine) gap = next - end;
      }
      const bool follows = gap < kLine;
      const std::uint64_t at =
          follows ? used + gap
                  : (used + kAlike - 1) / kAlike * kAlike + AddressOf(host + done) % kAlike;
      const std::uint64_t room = at < scratch_->data_bytes ? scratch_->data_bytes - at : 0;
      std::uint64_t bytes = all - done;
      if (bytes > room) bytes = room / kAlike * kAlike;
      if (bytes == 0) {
        TENSORMOUNT_RETURN_IF_ERROR(TransferSpans(spans, way));
        used = 0;
        continue;
      }
      // The batch of copies is full, but scratch memory is not: on the way out, the launch packs
      // what there is, and later copies fill the rest of scratch memory.
      if (CopiesAreFull()) {
        TENSORMOUNT_RETURN_IF_ERROR(way == Way::kOut ? LaunchCopies() : TransferSpans(spans, way));
        continue;
      }
      // The base pointer for the dense side of the plan: with it byte `done` of the copy is at `at`
      // in scratch memory. The pointer itself may lie before scratch memory.
      auto* const moved = reinterpret_cast<std::byte*>(scratch_->data + at - done -
                                                       static_cast<std::uint64_t>(dense.offset));
      const std::byte* const from = way == Way::kOut ? copy.from : moved;
      std::byte* const to = way == Way::kOut ? moved : copy.to;
      bytes = AddCopy(copy.plan, from, to, done, bytes);
      if (follows) {
        spans.back().bytes += gap + bytes;
      } else {
        spans.push_back({host + done, at, bytes});
      }
      used = at + bytes;
      done += bytes;
    }
  }
  return TransferSpans(spans, way);
}

Status CudaQueue::CopyWithin(std::span<const DeviceCopy> copies) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  TENSORMOUNT_RETURN_IF_ERROR(Flush());
  copies_->Clear();
  for (const DeviceCopy& copy : copies) {
    TENSORMOUNT_RETURN_IF_ERROR(CopyPart(copy.plan, copy.from, copy.to, 0, copy.plan.bytes()));
  }
  return LaunchCopies();
}

// Adds part of a copy to the batch. The batch is launched when it is full, or by the caller.
Status CudaQueue::CopyPart(const StridedCopy& plan, const std::byte* from, std::byte* to,
                           std::uint64_t first, std::uint64_t bytes) {
  while (bytes > 0) {
    if (CopiesAreFull()) TENSORMOUNT_RETURN_IF_ERROR(LaunchCopies());
    const std::uint64_t added = AddCopy(plan, from, to, first, bytes);
    first += added;
    bytes -= added;
  }
  return {};
}

// ---- Hashes ----------------------------------------------------------------------------------

Status CudaQueue::Deliver(cuda::Address from, std::span<const PendingResult> wanted) {
  std::size_t bytes = 0;
  for (const PendingResult& one : wanted) bytes += one.bytes;
  std::shared_ptr<ResultSlabs::Slab>& slab = results_->current;
  if (slab == nullptr || slab->used + bytes > ResultSlabs::kSlabBytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(slab, device_->results()->Take());
  }
  if (!slab->pinned) TENSORMOUNT_RETURN_IF_ERROR(AwaitAll());
  std::byte* const at = slab->data + slab->used;
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(context_->driver().cuMemcpyDtoHAsync(at, from, bytes, stream_),
                      "copy the hashes from the device"));
  slab->used += bytes;
  const std::shared_ptr<ResultSlabs::Slab> of = slab;
  const Status submitted = Submitted();
  results_->Expect(of, at, wanted);
  return submitted;
}

Status CudaQueue::HashLeaves(std::span<const StridedCopy> gather, const std::byte* base,
                             std::uint64_t bytes, std::uint64_t leaf_bytes, Hash128* out) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  if (bytes == 0) return {};
  // Scratch memory is used only when the batch is launched, but allocated here, so that this call
  // reports a lack of memory.
  TENSORMOUNT_RETURN_IF_ERROR(EnsureScratch());
  const std::uint64_t room = scratch_->data_bytes;
  const bool in_place = gather.size() == 1 && gather.front().run == bytes;
  if (!in_place && std::min(leaf_bytes, bytes) > room) {
    return {Code::kResourceExhausted, device_->name() +
                                          ": not enough device memory to hash leaves of " +
                                          std::to_string(leaf_bytes) + " bytes"};
  }
  // Adds one window at a time: as much as one launch hashes, and as scratch memory holds if used.
  std::uint64_t window = leaf_bytes > bytes / kMostLeaves ? bytes : kMostLeaves * leaf_bytes;
  if (!in_place && leaf_bytes <= room) window = std::min(window, room / leaf_bytes * leaf_bytes);
  for (std::uint64_t begin = 0; begin < bytes; begin += window) {
    PendingHashes wanted;
    wanted.base = base;
    wanted.begin = begin;
    wanted.end = std::min(bytes, begin + window);
    wanted.leaf_bytes = leaf_bytes;
    wanted.out = out + begin / leaf_bytes;
    if (in_place) {
      wanted.in_place = base + gather.front().src_offset + begin;
    } else {
      wanted.gather.assign(gather.begin(), gather.end());
    }
    TENSORMOUNT_RETURN_IF_ERROR(AddHashes(std::move(wanted)));
  }
  return {};
}

// Adds hashes to the batch, which waits until there are enough for a launch.
Status CudaQueue::AddHashes(PendingHashes wanted) {
  const std::uint64_t leaves = wanted.leaves();
  const std::uint64_t gathered = wanted.in_place != nullptr ? 0 : wanted.end - wanted.begin;
  const bool fits = hashes_leaves_ + leaves <= kMostLeaves &&
                    hashes_.size() < kernels::kHashBatch &&
                    hashes_gathered_ + gathered <= scratch_->data_bytes;
  if (!hashes_.empty() && (!fits || hashes_.front().leaf_bytes != wanted.leaf_bytes)) {
    TENSORMOUNT_RETURN_IF_ERROR(Flush());
  }
  hashes_leaves_ += leaves;
  hashes_gathered_ += (gathered + kAlike - 1) / kAlike * kAlike;
  hashes_.push_back(std::move(wanted));
  return {};
}

Status CudaQueue::FlushHashes() {
  const std::vector<PendingHashes> hashes = std::exchange(hashes_, {});
  hashes_leaves_ = 0;
  hashes_gathered_ = 0;
  copies_->Clear();
  kernels::HashJob job;
  job.leaf_bytes = hashes.front().leaf_bytes;
  job.out = reinterpret_cast<kernels::Hash*>(scratch_->results());
  static_assert(sizeof(kernels::Hash) == sizeof(Hash128));
  std::vector<PendingResult> wanted;
  std::uint64_t used = 0;
  for (const PendingHashes& one : hashes) {
    const std::byte* data = one.in_place;
    if (data == nullptr) {
      const std::uint64_t bytes = one.end - one.begin;
      if (used + bytes > scratch_->data_bytes) {
        return {Code::kInternal, "internal error: more bytes to hash than scratch memory holds"};
      }
      const cuda::Address at = scratch_->data + used;
      used += (bytes + kAlike - 1) / kAlike * kAlike;
      TENSORMOUNT_RETURN_IF_ERROR(Gather(one, at));
      data = reinterpret_cast<const std::byte*>(at);
    }
    const auto m = static_cast<std::size_t>(job.count++);
    job.data[m] = reinterpret_cast<const std::uint8_t*>(data);
    job.bytes[m] = one.end - one.begin;
    job.begin[m + 1] = job.begin[m] + one.leaves();
    wanted.push_back({one.out, static_cast<std::size_t>(one.leaves()) * sizeof(Hash128)});
  }
  TENSORMOUNT_RETURN_IF_ERROR(LaunchCopies());
  TENSORMOUNT_RETURN_IF_ERROR(
      Launch(device_->kernels().hash, job.leaves(), kernels::kHashThreads, &job, "hash"));
  return Deliver(scratch_->results(), wanted);
}

Status CudaQueue::Gather(const PendingHashes& wanted, cuda::Address at) {
  auto* const to = reinterpret_cast<std::byte*>(at - wanted.begin);
  for (const StridedCopy& plan : wanted.gather) {
    const Side side = SideOf(plan, true);
    if (!side.dense) {
      return {Code::kInternal, "internal error: the bytes to hash are not contiguous"};
    }
    const auto first = static_cast<std::uint64_t>(side.offset);
    const std::uint64_t from = std::max(wanted.begin, first);
    const std::uint64_t until = std::min(wanted.end, first + plan.bytes());
    if (from >= until) continue;
    TENSORMOUNT_RETURN_IF_ERROR(CopyPart(plan, wanted.base, to, from - first, until - from));
  }
  return {};
}

Status CudaQueue::Digest(std::span<const PlacedBox> placed, const std::byte* base,
                         const Dims& byte_shape, Crc64* out) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  TENSORMOUNT_RETURN_IF_ERROR(EnsureScratch());
  if (digests_.size() == kMostDigests) TENSORMOUNT_RETURN_IF_ERROR(Flush());
  const Box whole = Box::Whole(byte_shape);
  const PlacedBox tensor = PlacePacked(tensormount::Region(whole), 0).front();
  PendingDigest wanted{regions_.size(), 0, out};
  for (const PlacedBox& box : placed) {
    const StridedCopy plan = PlanCopy(box.box, box, tensor);
    if (plan.bytes() == 0) continue;
    regions_.push_back({plan, base, static_cast<std::uint64_t>(whole.volume())});
    ++wanted.count;
  }
  digests_.push_back(wanted);
  return {};
}

Status CudaQueue::FlushDigests() {
  const std::vector<PendingDigest> digests = std::exchange(digests_, {});
  const std::vector<Region> regions = std::exchange(regions_, {});
  static_assert(sizeof(Crc64) == sizeof(std::uint64_t));
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(context_->driver().cuMemsetD8Async(scratch_->results(), 0,
                                                         digests.size() * sizeof(Crc64), stream_),
                      "clear the digests on the device"));
  TENSORMOUNT_RETURN_IF_ERROR(Submitted());
  auto* const sums = reinterpret_cast<std::uint64_t*>(scratch_->results());
  kernels::CrcJob job;
  const auto launch = [&]() -> Status {
    if (job.batch.count == 0) return {};
    TENSORMOUNT_RETURN_IF_ERROR(Launch(device_->kernels().crc,
                                       (job.batch.pieces() + kBlockThreads - 1) / kBlockThreads,
                                       kBlockThreads, &job, "digest"));
    job.batch.count = 0;
    return {};
  };
  for (std::size_t d = 0; d < digests.size(); ++d) {
    for (std::size_t r = digests[d].first; r < digests[d].first + digests[d].count; ++r) {
      const Region& region = regions[r];
      const auto m = static_cast<std::size_t>(job.batch.count++);
      job.batch.strided[m] = kernels::CutIntoPieces(region.plan, kernels::kCrcPieceBytes);
      job.batch.first[m] = 0;
      job.batch.from[m] = reinterpret_cast<const std::uint8_t*>(region.base);
      job.batch.begin[m + 1] = job.batch.begin[m] + job.batch.strided[m].pieces;
      job.tensor_bytes[m] = region.tensor_bytes;
      job.sum[m] = sums + d;
      if (job.batch.count == kBatch) TENSORMOUNT_RETURN_IF_ERROR(launch());
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(launch());
  std::vector<PendingResult> wanted;
  for (const PendingDigest& digest : digests) wanted.push_back({digest.out, sizeof(Crc64)});
  return Deliver(scratch_->results(), wanted);
}

}  // namespace tensormount::gpu
