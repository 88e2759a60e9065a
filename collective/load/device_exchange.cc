// SPDX-License-Identifier: Apache-2.0
// One batch of an exchange between devices: a thread reads the next window into memory of the
// device and cuts it there, while the caller's thread moves the one before and places what came.
#include "collective/load/device_exchange.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "base/parallel.h"
#include "collective/comm/collective_round.h"
#include "collective/guarded.h"
#include "collective/load/exchange_windows.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// Of one area; six are needed. Enough for a bus between devices to be busy with, and for what is
// read meanwhile to be long; less where a device has no more.
constexpr std::uint64_t kAreaBytes = std::uint64_t{32} << 20;
constexpr std::uint64_t kLeastAreaBytes = std::uint64_t{1} << 20;
static_assert(kLeastAreaBytes >= kUnitBytes);
// For what is under way on a device after a failure.
constexpr std::chrono::seconds kSettlePatience{2};

// Work of one queue on memory of the caller, which nobody may forget.
class Placing {
 public:
  Placing() = default;
  ~Placing() { (void)Settle(Deadline::After(kDeviceGrace)); }
  Placing(const Placing&) = delete;
  Placing& operator=(const Placing&) = delete;

  Status Begin(DeviceQueue& queue, std::span<const DeviceCopy> copies) {
    lost_ = true;  // Until there is a mark.
    Submission submission =
        MarkSubmitted(queue, NothingThrown([&] { return queue.CopyWithin(copies); }));
    lost_ = !submission.mark.ok();
    if (submission.mark.ok()) mark_ = std::move(submission.mark).value();
    return submission.status;
  }
  // After a failure: whether nothing of it is under way any more.
  bool Settle(const Deadline& deadline) {
    if (mark_ != nullptr && !AwaitMark(*mark_, deadline).ok()) return false;
    mark_.reset();
    return !lost_;
  }
  Status Finish(const DeviceRules& rules, const OpenedDevice& device) {
    if (mark_ != nullptr) TENSORMOUNT_RETURN_IF_ERROR(rules.Await(*mark_, device));
    mark_.reset();
    return {};
  }
  Result<bool> Over() {
    if (mark_ == nullptr) return true;
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool reached, mark_->Reached());
    if (reached) mark_.reset();
    return reached;
  }

 private:
  std::shared_ptr<DeviceMark> mark_;
  bool lost_ = false;  // Something is under way that no mark stands for.
};

// From bytes that stand at `base` as `from` says to where the targets of a piece want them.
void AddPlacements(const ExchangeBox& piece, const PlacedBox& from, const std::byte* base,
                   std::vector<DeviceCopy>& copies) {
  for (const LoadTarget* target : piece.mine) {
    for (const PlacedBox& to : target->placed) {
      const Box common = Intersect(piece.bytes, to.box);
      if (!common.empty()) copies.push_back({PlanCopy(common, from, to), base, target->base});
    }
  }
}

PlacedBox PackedAt(const Box& bytes, std::uint64_t at) {
  return PlacePacked(Region(bytes), at).front();
}

class WindowStream final : public LocalWork {
 public:
  WindowStream(Collective& collective, const ExchangeUnits& units, DeviceWay& way,
               const DeviceExchangeRules& rules, LoadReport& report)
      : units_(units),
        way_(way),
        rules_(rules),
        report_(report),
        cutter_(units, collective.rank(), collective.size(), way.area_bytes()),
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
    way_.transport().Abort(status);
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
    way_.transport().Abort({Code::kCancelled, "the load has ended"});
    const Deadline deadline = Deadline::After(kSettlePatience);
    if (!way_.transport().Settle(deadline).ok()) way_.Doubt();
    bool quiet = quiet_;
    for (Half& half : halves_) quiet = (!half.placing || half.placing->Settle(deadline)) && quiet;
    if (!quiet) way_.LeaveQueues();
  }

 private:
  enum class State { kFree, kRead, kMoving, kPlacing };
  struct Half {
    State state = State::kFree;
    ExchangeWindow window;
    std::optional<Placing> placing;
  };

  // ---- The thread that reads ----

  // On the way out, nothing of what was begun may be under way unnoticed.
  Status ReadAll() {
    DeviceWriter writer(reading_);
    const Status read = ReadWindows(writer);
    if (!read.ok()) quiet_ = writer.Settle(Deadline::After(kSettlePatience)) && quiet_;
    return read;
  }

  Status ReadWindows(DeviceWriter& writer) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> queue,
                                 MakeFencedQueue(*way_.device(), reading_));
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
    std::byte* const area = way_.area(half, 0);
    struct Nothing {};
    const Status read = ForEachParallel<Nothing>(
        window.reads.size(), rules_.threads, [&](std::size_t i, Nothing&) -> Status {
          if (stop_) return {Code::kCancelled, "the load has ended"};
          const ExchangeUnit& unit = units_.units()[window.reads[i].unit];
          const Box bytes = units_.BytesOf(unit).box;
          ReadStats stats;
          // What stands on the device is proved there.
          TENSORMOUNT_RETURN_IF_ERROR(writer.Write(
              way_.device(), bytes, PackedAt(bytes, window.reads[i].at), area,
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
    std::byte* const area = way_.area(half, 0);
    std::vector<DeviceCopy> copies;
    const auto stored = [&](const ExchangeWindow::Read& read) {
      return PackedAt(units_.BytesOf(units_.units()[read.unit]).box, read.at);
    };
    for (const ExchangeWindow::Cut& cut : window.cuts) {
      copies.push_back(
          {PlanCopy(cut.bytes, stored(window.reads[cut.read]), PackedAt(cut.bytes, cut.at)), area,
           way_.area(half, 1)});
    }
    for (const ExchangeWindow::Read& read : window.reads) {
      const PlacedBox from = stored(read);
      for (const ExchangeBox& piece : read.pieces) AddPlacements(piece, from, area, copies);
    }
    Placing placing;
    Status status = placing.Begin(queue, copies);
    if (status.ok()) status = placing.Finish(reading_, *way_.device());
    if (!status.ok()) quiet_ = placing.Settle(Deadline::After(kSettlePatience)) && quiet_;
    return status;
  }

  // ---- The caller's thread ----

  Result<bool> TryStep() {
    if (!thread_.joinable() && !stop_) {
      TENSORMOUNT_ASSIGN_OR_RETURN(queue_, MakeFencedQueue(*way_.device(), rules_.devices));
      thread_ = std::thread([this] {
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
    alone = true;  // No communicator hears of devices, nor of the thread that reads.
    TENSORMOUNT_RETURN_IF_ERROR(FreePlaced());
    if (moving_) TENSORMOUNT_RETURN_IF_ERROR(AskMoving());
    if (!moving_) TENSORMOUNT_RETURN_IF_ERROR(BeginNext());
    std::lock_guard lock(mutex_);
    ended_ = read_done && halves_[0].state == State::kFree && halves_[1].state == State::kFree;
    if (ended_) {
      report_.bytes_read += bytes_read_;
      bytes_read_ = 0;
    }
    return ended_;
  }

  void Become(Half& half, State state) {
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
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool over, half.placing->Over());
      if (!over) continue;
      half.placing.reset();
      Become(half, State::kFree);
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
      blocks.push_back({send.number, way_.area(n, send.cut ? 1 : 0) + send.at, nullptr});
    }
    for (const ExchangeWindow::Receive& receive : half.window.receives) {
      blocks.push_back({receive.number, nullptr, way_.area(n, 2) + receive.at});
    }
    TENSORMOUNT_RETURN_IF_ERROR(way_.transport().Begin(half.window.plan));
    TENSORMOUNT_RETURN_IF_ERROR(way_.transport().Put(blocks));
    report_.messages_sent += half.window.sends.size();
    deadline_ = Deadline::After(rules_.patience);
    moving_ = true;
    Become(half, State::kMoving);
    return {};
  }

  Status AskMoving() {
    Half& half = halves_[next_ % 2];
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool over, way_.transport().Poll());
    if (!over) {
      // Says who is late.
      return deadline_.Passed() ? way_.transport().Wait(deadline_) : Status();
    }
    std::vector<DeviceCopy> copies;
    const std::byte* const area = way_.area(next_ % 2, 2);
    for (const ExchangeWindow::Receive& receive : half.window.receives) {
      AddPlacements(receive.piece, PackedAt(receive.piece.bytes, receive.at), area, copies);
      report_.bytes_received += receive.piece.size();
      report_.bytes_between_devices += receive.piece.size();
    }
    moving_ = false;
    ++next_;
    half.placing.emplace();
    TENSORMOUNT_RETURN_IF_ERROR(half.placing->Begin(*queue_, copies));
    Become(half, State::kPlacing);
    return {};
  }

  const ExchangeUnits& units_;
  DeviceWay& way_;
  const DeviceExchangeRules& rules_;
  LoadReport& report_;
  WindowCutter cutter_;                 // Of the thread that reads.
  DeviceRules reading_;                 // Its rules.
  std::unique_ptr<DeviceQueue> queue_;  // Of the caller's thread, as all up to the mutex.
  std::size_t next_ = 0;                // Window that moves, or moves next.
  bool moving_ = false;
  bool ended_ = false;
  bool settled_ = false;  // After a failure.
  Deadline deadline_ = Deadline::After({});

  std::mutex mutex_;
  std::condition_variable freed_;
  std::atomic<bool> stop_{false};
  std::array<Half, 2> halves_;  // A state is behind the mutex; the rest is whose state says so.
  bool quiet_ = true;           // Of the thread that reads, until it is joined.
  bool read_done_ = false;
  Status read_status_;
  std::uint64_t bytes_read_ = 0;
  std::thread thread_;  // Last: uses all others.
};

}  // namespace

Result<std::unique_ptr<DeviceWay>> DeviceWay::Open(Collective& collective, const Device& device,
                                                   std::chrono::milliseconds patience) {
  std::unique_ptr<DeviceWay> way(new DeviceWay);
  Result<std::shared_ptr<const OpenedDevice>> opened = OpenDevice(device);
  Status able = opened.status();
  if (able.ok()) way->device_ = std::move(opened).value();
  for (std::uint64_t area = kAreaBytes; able.ok() && way->memory_ == nullptr; area /= 2) {
    way->area_bytes_ = area;
    const auto memory =
        way->device_->remains->Allocate(static_cast<std::size_t>(way->memory_bytes()));
    if (memory.ok()) way->memory_ = memory.value();
    if (!memory.ok() && area == kLeastAreaBytes) able = memory.status();
  }
  const std::uint64_t allocated = way->area_bytes_;
  ByteWriter mine;
  mine.U64(allocated);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string told,
                               collective.Decide(
                                   mine.bytes(), "load: memory for an exchange",
                                   [](std::vector<std::string>& parts) -> Result<std::string> {
                                     std::uint64_t least = ~std::uint64_t{0};
                                     for (const std::string& part : parts) {
                                       ByteReader in(part, "load: memory for an exchange");
                                       least = std::min(least, in.U64());
                                       TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
                                     }
                                     ByteWriter out;
                                     out.U64(least);
                                     return std::move(out.bytes());
                                   },
                                   able));
  ByteReader in(told, "load: memory for an exchange");
  way->area_bytes_ = in.U64();
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  TENSORMOUNT_ASSIGN_OR_RETURN(way->transport_,
                               MakeDeviceTransport(collective, patience, OpenDeviceLink(device)));
  TENSORMOUNT_RETURN_IF_ERROR(
      collective.Agree(way->transport_->Register({way->memory_, 6 * allocated, device}),
                       "load: memory for an exchange"));
  return way;
}

DeviceWay::~DeviceWay() {
  transport_.reset();
  if (memory_ == nullptr) return;
  // Nobody knows when the transport of other ranks is done with it.
  if (doubtful_) return;
  if (quiet_) device_->remains->Renew(memory_);
  device_->remains->Free(memory_);
}

Status ExchangeOnDevices(Collective& collective, const ExchangeUnits& units, DeviceWay& way,
                         const DeviceExchangeRules& rules, LoadReport& report) {
  WindowStream stream(collective, units, way, rules, report);
  return collective.Run(stream, units.bytes(), "load: exchange between devices");
}

}  // namespace tensormount
