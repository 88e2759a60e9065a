// SPDX-License-Identifier: Apache-2.0
// One batch of an exchange between devices: a thread reads the next window into device memory and
// cuts it there, while the caller's thread moves the previous window and places what arrived.
#include "collective/load/device_exchange.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cancel_scope.h"
#include "base/coding.h"
#include "base/parallel.h"
#include "base/thread.h"
#include "collective/comm/collective_round.h"
#include "collective/guarded.h"
#include "collective/load/exchange_windows.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// Size of each of the six areas of device memory: enough to keep the bus between devices busy and
// reads long. Halved until the areas fit if a device has too little memory.
constexpr std::uint64_t kAreaBytes = std::uint64_t{32} << 20;
constexpr std::uint64_t kLeastAreaBytes = std::uint64_t{1} << 20;
static_assert(kLeastAreaBytes >= kUnitBytes);
// Time limit for operations that are in progress on a device after a failure.
constexpr std::chrono::seconds kSettlePatience{2};

// Copies in progress on one device queue, which must end before their memory is freed or reused.
class PendingPlacement {
 public:
  PendingPlacement() = default;
  ~PendingPlacement() { (void)Settle(Deadline::After(kDeviceGrace)); }
  PendingPlacement(const PendingPlacement&) = delete;
  PendingPlacement& operator=(const PendingPlacement&) = delete;

  Status Begin(DeviceQueue& queue, std::span<const DeviceCopy> copies) {
    lost_ = true;  // True until there is a mark to wait for.
    Submission submission =
        MarkSubmitted(queue, CatchExceptions([&] { return queue.CopyWithin(copies); }));
    lost_ = !submission.mark.ok();
    if (submission.mark.ok()) mark_ = std::move(submission.mark).value();
    return submission.status;
  }
  // After a failure: waits until `deadline`, and returns whether all operations have ended.
  bool Settle(const Deadline& deadline) {
    if (mark_ != nullptr && !AwaitMark(*mark_, deadline).ok()) return false;
    mark_.reset();
    return !lost_;
  }
  Status Finish(const DeviceLimits& rules, const OpenedDevice& device) {
    if (mark_ != nullptr) TENSORMOUNT_RETURN_IF_ERROR(rules.Await(*mark_, device));
    mark_.reset();
    return {};
  }
  Result<bool> IsDone() {
    if (mark_ == nullptr) return true;
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool reached, mark_->Reached());
    if (reached) mark_.reset();
    return reached;
  }

 private:
  std::shared_ptr<DeviceMark> mark_;
  bool lost_ = false;  // An operation without a mark may be in progress.
};

// Adds the copies that bring a block from `base`, laid out as in `from`, into this rank's targets.
void AddPlacements(const ExchangeBox& block, const PlacedBox& from, const std::byte* base,
                   std::vector<DeviceCopy>& copies) {
  for (const LoadTarget* target : block.mine) {
    for (const PlacedBox& to : target->placed) {
      const Box common = Intersect(block.bytes, to.box);
      if (!common.empty()) copies.push_back({PlanCopy(common, from, to), base, target->base});
    }
  }
}

PlacedBox PackedAt(const Box& bytes, std::uint64_t at) {
  return PlacePacked(Region(bytes), at).front();
}

class WindowStream final : public LocalWork {
 public:
  WindowStream(Collective& collective, const ExchangeUnits& units, DeviceExchangePath& path,
               const DeviceExchangeRules& rules, LoadReport& report)
      : units_(units),
        path_(path),
        rules_(rules),
        report_(report),
        cutter_(units, collective.rank(), collective.size(), path.area_bytes()),
        reading_(rules.devices) {
    reading_.cancel = &stop_;
    reading_.patience = rules.patience;
  }
  ~WindowStream() override { Cancel(); }

  Result<bool> Step() override {
    bool done = false;
    const Status status = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(done, TryStep());
      return {};
    });
    if (status.ok()) return done;
    path_.transport().Abort(status);
    Cancel();
    return status;
  }

  void Cancel() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    freed_.notify_all();
    if (thread_.joinable()) thread_.join();
    if (ended_ || settled_) return;
    settled_ = true;
    path_.transport().Abort({Code::kCancelled, "the load has ended"});
    const Deadline deadline = Deadline::After(kSettlePatience);
    if (!path_.transport().Settle(deadline).ok()) path_.MarkStillAccessed();
    bool quiet = queues_idle_;
    for (Half& half : halves_) quiet = (!half.placing || half.placing->Settle(deadline)) && quiet;
    if (!quiet) path_.MarkQueuesRunning();
  }

 private:
  enum class State { kFree, kRead, kMoving, kPlacing };
  struct Half {
    State state = State::kFree;
    ExchangeWindow window;
    std::optional<PendingPlacement> placing;
  };

  // ---- The thread that reads ----

  // Reads all windows. After a failure it waits for the operations that it began, or records that
  // they may continue.
  Status ReadAll() {
    DeviceWriter writer(reading_);
    const Status read = ReadWindows(writer);
    if (!read.ok()) queues_idle_ = writer.Settle(Deadline::After(kSettlePatience)) && queues_idle_;
    return read;
  }

  Status ReadWindows(DeviceWriter& writer) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> queue,
                                 MakeFencedQueue(*path_.device(), reading_));
    for (std::size_t number = 0;; ++number) {
      Half& half = halves_[number % 2];
      {
        std::unique_lock lock(mutex_);
        freed_.wait(lock, [&] { return stop_ || half.state == State::kFree; });
        if (stop_) return {};
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool more, cutter_.Next(half.window));
      if (!more) return {};
      TENSORMOUNT_RETURN_IF_ERROR(ReadWindow(half.window, number % 2, writer));
      TENSORMOUNT_RETURN_IF_ERROR(CutWindow(half.window, number % 2, *queue));
      std::lock_guard lock(mutex_);
      half.state = State::kRead;
    }
  }

  Status ReadWindow(const ExchangeWindow& window, std::size_t half, DeviceWriter& writer) {
    std::byte* const area = path_.area(half, 0);
    struct Nothing {};
    const Status read = ForEachParallel<Nothing>(
        window.reads.size(), rules_.threads, [&](std::size_t i, Nothing&) -> Status {
          if (stop_) return {Code::kCancelled, "the load has ended"};
          const ExchangeUnit& unit = units_.units()[window.reads[i].unit];
          const Box bytes = units_.BytesOf(unit).box;
          ReadStats stats;
          // The bytes are not verified here: the digest verifies them on the device, unless the
          // caller asked for no verification.
          TENSORMOUNT_RETURN_IF_ERROR(writer.Write(
              path_.device(), bytes, PackedAt(bytes, window.reads[i].at), area,
              [&](const PlacedBox& packed, std::byte* base) {
                return rules_.checkpoint->ReadPlaced(units_.tensor(unit).entry(), {&packed, 1},
                                                     base, ReadVerify::kOff, stats, nullptr);
              }));
          rules_.read(stats.bytes_read);
          std::lock_guard lock(mutex_);
          bytes_read_ += stats.bytes_read;
          return {};
        });
    return read.ok() ? writer.Finish() : read;
  }

  Status CutWindow(const ExchangeWindow& window, std::size_t half, DeviceQueue& queue) {
    std::byte* const area = path_.area(half, 0);
    std::vector<DeviceCopy> copies;
    const auto stored = [&](const ExchangeWindow::Read& read) {
      return PackedAt(units_.BytesOf(units_.units()[read.unit]).box, read.at);
    };
    for (const ExchangeWindow::Cut& cut : window.cuts) {
      copies.push_back(
          {PlanCopy(cut.bytes, stored(window.reads[cut.read]), PackedAt(cut.bytes, cut.at)), area,
           path_.area(half, 1)});
    }
    for (const ExchangeWindow::Read& read : window.reads) {
      const PlacedBox from = stored(read);
      for (const ExchangeBox& block : read.blocks) AddPlacements(block, from, area, copies);
    }
    PendingPlacement placing;
    Status status = placing.Begin(queue, copies);
    if (status.ok()) status = placing.Finish(reading_, *path_.device());
    if (!status.ok())
      queues_idle_ = placing.Settle(Deadline::After(kSettlePatience)) && queues_idle_;
    return status;
  }

  // ---- The caller's thread ----

  Result<bool> TryStep() {
    if (!thread_.joinable() && !stop_) {
      TENSORMOUNT_ASSIGN_OR_RETURN(queue_, MakeFencedQueue(*path_.device(), rules_.devices));
      thread_ = Thread([this, cancel = CancelScope::Current()] {
        const CancelScope scope(cancel);
        const Status status = Guarded([this] { return ReadAll(); });
        std::lock_guard lock(mutex_);
        read_status_ = status;
        read_done_ = true;
      });
    }
    bool read_done = false;
    {
      std::lock_guard lock(mutex_);
      TENSORMOUNT_RETURN_IF_ERROR(read_status_);
      read_done = read_done_;
    }
    // The communicator does not see the progress of devices and of the reading thread.
    progresses_alone = true;
    TENSORMOUNT_RETURN_IF_ERROR(FreePlaced());
    if (moving_) TENSORMOUNT_RETURN_IF_ERROR(PollMoving());
    if (!moving_) TENSORMOUNT_RETURN_IF_ERROR(BeginNext());
    std::lock_guard lock(mutex_);
    ended_ = read_done && halves_[0].state == State::kFree && halves_[1].state == State::kFree;
    if (ended_) {
      report_.bytes_read += bytes_read_;
      bytes_read_ = 0;
    }
    return ended_;
  }

  void SetState(Half& half, State state) {
    {
      std::lock_guard lock(mutex_);
      half.state = state;
    }
    moved = true;
    freed_.notify_all();
  }

  Status FreePlaced() {
    for (Half& half : halves_) {
      if (!half.placing) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool over, half.placing->IsDone());
      if (!over) continue;
      half.placing.reset();
      SetState(half, State::kFree);
    }
    return {};
  }

  Status BeginNext() {
    Half& half = halves_[next_ % 2];
    {
      std::lock_guard lock(mutex_);
      if (half.state != State::kRead) return {};
    }
    std::vector<BulkBlock> blocks;
    const std::size_t n = next_ % 2;
    for (const ExchangeWindow::Send& send : half.window.sends) {
      blocks.push_back({send.number, path_.area(n, send.cut ? 1 : 0) + send.at, nullptr});
    }
    for (const ExchangeWindow::Receive& receive : half.window.receives) {
      blocks.push_back({receive.number, nullptr, path_.area(n, 2) + receive.at});
    }
    TENSORMOUNT_RETURN_IF_ERROR(path_.transport().Begin(half.window.plan));
    TENSORMOUNT_RETURN_IF_ERROR(path_.transport().Put(blocks));
    report_.messages_sent += half.window.sends.size();
    deadline_ = Deadline::After(rules_.patience);
    moving_ = true;
    SetState(half, State::kMoving);
    return {};
  }

  Status PollMoving() {
    Half& half = halves_[next_ % 2];
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool over, path_.transport().Poll());
    if (!over) {
      // Past the deadline, Wait fails and names the late rank.
      return deadline_.Passed() ? path_.transport().Wait(deadline_) : Status();
    }
    std::vector<DeviceCopy> copies;
    const std::byte* const area = path_.area(next_ % 2, 2);
    for (const ExchangeWindow::Receive& receive : half.window.receives) {
      AddPlacements(receive.block, PackedAt(receive.block.bytes, receive.at), area, copies);
      report_.bytes_received += receive.block.size();
      report_.bytes_between_devices += receive.block.size();
    }
    moving_ = false;
    ++next_;
    half.placing.emplace();
    TENSORMOUNT_RETURN_IF_ERROR(half.placing->Begin(*queue_, copies));
    SetState(half, State::kPlacing);
    return {};
  }

  const ExchangeUnits& units_;
  DeviceExchangePath& path_;
  const DeviceExchangeRules& rules_;
  LoadReport& report_;
  WindowCutter cutter_;   // Used by the reading thread.
  DeviceLimits reading_;  // Used by the reading thread.
  // The members from here to mutex_ are used by the caller's thread.
  std::unique_ptr<DeviceQueue> queue_;
  std::size_t next_ = 0;  // Number of the window that moves now or next.
  bool moving_ = false;
  bool ended_ = false;
  bool settled_ = false;  // Cancel has already waited for the operations.
  Deadline deadline_ = Deadline::After({});

  std::mutex mutex_;
  std::condition_variable freed_;
  std::atomic<bool> stop_{false};
  // mutex_ guards the states. The state of a half decides which thread uses its other fields.
  std::array<Half, 2> halves_;
  bool queues_idle_ = true;  // Used by the reading thread until it is joined.
  bool read_done_ = false;
  Status read_status_;
  std::uint64_t bytes_read_ = 0;
  Thread thread_;  // Declared last: the thread uses all other members.
};

}  // namespace

Result<std::unique_ptr<DeviceExchangePath>> DeviceExchangePath::Open(
    Collective& collective, const Device& device, std::chrono::milliseconds patience) {
  std::unique_ptr<DeviceExchangePath> path(new DeviceExchangePath);
  Result<std::shared_ptr<const OpenedDevice>> opened = OpenDevice(device);
  Status able = opened.status();
  if (able.ok()) path->device_ = std::move(opened).value();
  for (std::uint64_t area = kAreaBytes; able.ok() && path->memory_ == nullptr; area /= 2) {
    path->area_bytes_ = area;
    const auto memory =
        path->device_->pending_work->Allocate(static_cast<std::size_t>(path->memory_bytes()));
    if (memory.ok()) path->memory_ = memory.value();
    if (!memory.ok() && area == kLeastAreaBytes) able = memory.status();
  }
  const std::uint64_t allocated = path->area_bytes_;
  ByteWriter mine;
  mine.U64(allocated);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string told,
                               collective.Decide(
                                   mine.bytes(), "load: agree on memory for the exchange",
                                   [](std::vector<std::string>& parts) -> Result<std::string> {
                                     std::uint64_t least = ~std::uint64_t{0};
                                     for (const std::string& part : parts) {
                                       ByteReader in(part, "load: memory size of a rank");
                                       least = std::min(least, in.U64());
                                       TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
                                     }
                                     ByteWriter out;
                                     out.U64(least);
                                     return std::move(out.bytes());
                                   },
                                   able));
  ByteReader in(told, "load: memory size that rank 0 chose");
  path->area_bytes_ = in.U64();
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  TENSORMOUNT_ASSIGN_OR_RETURN(path->transport_,
                               MakeDeviceTransport(collective, patience, OpenDeviceLink(device)));
  TENSORMOUNT_RETURN_IF_ERROR(
      collective.Agree(path->transport_->Register({path->memory_, 6 * allocated, device}),
                       "load: register memory for the exchange"));
  return path;
}

DeviceExchangePath::~DeviceExchangePath() {
  transport_.reset();
  if (memory_ == nullptr) return;
  // The transports of other ranks may access the memory for an unknown time: leak it.
  if (still_accessed_) return;
  if (queues_idle_) device_->pending_work->ResetPendingWork(memory_);
  device_->pending_work->Free(memory_);
}

Status ExchangeOnDevices(Collective& collective, const ExchangeUnits& units,
                         DeviceExchangePath& path, const DeviceExchangeRules& rules,
                         LoadReport& report) {
  WindowStream stream(collective, units, path, rules, report);
  return collective.Run(stream, units.bytes(), "load: exchange data between devices");
}

}  // namespace tensormount
