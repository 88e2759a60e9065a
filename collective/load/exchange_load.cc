// SPDX-License-Identifier: Apache-2.0
// Loads by exchange: one rank reads each byte and sends it to the ranks that want it. A thread
// reads and cuts up units ahead; the caller's thread moves messages within one collective call, so
// that a dead rank is noticed during the transfer. The bytes in flight to each rank are bounded.
#include "collective/load/exchange_load.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/cancel_scope.h"
#include "base/log.h"
#include "base/thread.h"
#include "collective/comm/collective_frame.h"
#include "collective/comm/collective_round.h"
#include "collective/guarded.h"
#include "collective/load/device_exchange.h"
#include "collective/load/exchange_reader.h"
#include "collective/load/exchange_units.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// Limits for one rank: bytes that were read and are not sent yet, and bytes that arrive and cannot
// be received in place. One unit may always pass, however large it is.
constexpr std::uint64_t kOutgoingBytes = 4u << 20;
constexpr std::uint64_t kIncomingBytes = 4u << 20;
constexpr std::size_t kMaxReceives = 64;
// Limit of units that one rank has read and not finished sending, including those sent from the
// caller's memory.
constexpr std::size_t kMaxUnits = 16;
// From a server: bytes that are asked for ahead of their read, in ranges of this size at most, in
// which gaps up to this size are asked for, too.
constexpr std::uint64_t kAheadBytes = std::uint64_t{96} << 20;
constexpr std::uint64_t kAheadRange = std::uint64_t{8} << 20;
constexpr std::uint64_t kAheadGap = 64u << 10;

// Reusable buffers, and the peak of their memory. Thread-safe.
class Pool {
 public:
  GrowingBuffer Take(std::uint64_t size) {
    std::lock_guard lock(mutex_);
    // Only a buffer of this exact size is reused: a larger one would use more memory than the
    // limits count.
    const auto fitting = std::find_if(free_.begin(), free_.end(),
                                      [&](const GrowingBuffer& b) { return b.capacity() == size; });
    GrowingBuffer bytes;
    if (fitting != free_.end()) {
      bytes = std::move(*fitting);
      free_.erase(fitting);
      return bytes;
    }
    while (!free_.empty() && total_ + size > kOutgoingBytes + kIncomingBytes) {
      total_ -= free_.front().capacity();
      free_.erase(free_.begin());
    }
    bytes.Reserve(size);
    total_ += size;
    peak_ = std::max(peak_, total_);
    return bytes;
  }
  void Return(GrowingBuffer bytes) {
    if (bytes.capacity() == 0) return;
    std::lock_guard lock(mutex_);
    free_.push_back(std::move(bytes));
  }
  std::uint64_t peak() const { return peak_; }

 private:
  std::mutex mutex_;
  std::vector<GrowingBuffer> free_;
  std::uint64_t total_ = 0;
  std::uint64_t peak_ = 0;
};

// Exchanges one batch of units: a thread reads the units, Step (on the caller's thread) sends and
// receives blocks.
class UnitStream final : public LocalWork {
 public:
  UnitStream(Collective& collective, const ExchangeUnits& units, UnitReader& reader, Pool& pool,
             DeviceWriter& writer, LoadReport& report,
             const std::function<void(std::uint64_t)>& progress)
      : collective_(collective),
        comm_(collective.comm()),
        tag_(collective.data_tag()),
        units_(units),
        reader_(reader),
        pool_(pool),
        writer_(writer),
        report_(report),
        progress_(progress) {}
  ~UnitStream() override { Cancel(); }

  Result<bool> Step() override {
    bool done = false;
    const Status status = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(done, TrySteps());
      return {};
    });
    if (!status.ok()) {
      Cancel();
      return status;
    }
    return done;
  }

  void Cancel() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    room_.notify_all();
    if (thread_.joinable()) thread_.join();
    for (const Send& send : sends_) comm_.Cancel(send.request);
    sends_.clear();
    for (const Receive& receive : receives_) comm_.Cancel(receive.request);
    receives_.clear();
    incoming_units_.clear();
  }

 private:
  struct Send {
    Communicator::Request request = 0;
    std::shared_ptr<OutgoingUnit> unit;
  };
  // The blocks that this rank gets of a unit that another rank reads.
  struct IncomingUnit {
    std::size_t unit = 0;
    int from = 0;
    std::vector<ExchangeBox> blocks;
    std::optional<UnitHeader> header;  // Set once the header arrived.
    UnitHeader arrived;
    std::size_t posted = 0;  // Number of blocks whose receive is posted.
  };
  using IncomingRef = std::list<IncomingUnit>::iterator;
  struct Receive {
    Communicator::Request request = 0;
    IncomingRef of;
    std::size_t number = 0;  // Position of the block in of->blocks.
    std::byte* to = nullptr;
    GrowingBuffer staged;
  };

  // ---- The reading thread ----

  std::uint64_t SizeOf(const ExchangeUnit& unit) const {
    return static_cast<std::uint64_t>(units_.BytesOf(unit).box.volume());
  }

  // Asks a server for the units that this rank reads from `next` on: by few large requests, several
  // at a time.
  void StartReading(std::size_t next) {
    const std::vector<ExchangeUnit>& units = units_.units();
    if (next < started_) ahead_ -= std::min(ahead_, SizeOf(units[next]));
    if (ahead_ > kAheadBytes / 2) return;
    std::uint32_t file = 0;
    ByteRange range;
    const auto announce = [&] {
      if (!range.empty()) reader_.StartReading(file, range);
      range = {};
    };
    for (started_ = std::max(started_, next); started_ < units.size(); ++started_) {
      const ExchangeUnit& unit = units[started_];
      if (unit.reader != comm_.rank()) continue;
      if (ahead_ >= kAheadBytes) break;
      const std::uint64_t size = SizeOf(unit);
      // The unit `next` is read at once.
      if (started_ != next) ahead_ += size;
      const bool near = !range.empty() && unit.file == file && unit.offset >= range.end &&
                        unit.offset - range.end <= kAheadGap &&
                        unit.offset + size - range.begin <= kAheadRange;
      if (!near) {
        announce();
        file = unit.file;
        range.begin = unit.offset;
      }
      range.end = unit.offset + size;
    }
    announce();
  }

  Status ReadAll() {
    const int me = comm_.rank();
    for (std::size_t u = 0; u < units_.units().size(); ++u) {
      const ExchangeUnit& unit = units_.units()[u];
      if (unit.reader != me) continue;
      if (reader_.is_far()) StartReading(u);
      auto out = std::make_shared<OutgoingUnit>();
      out->number = u;
      reader_.Plan(units_, unit, *out);
      {
        std::unique_lock lock(mutex_);
        room_.wait(lock, [&] {
          return stop_ || in_flight_ == 0 ||
                 (in_flight_ < kMaxUnits && outgoing_ + out->size <= kOutgoingBytes);
        });
        if (stop_) return {};
        ++in_flight_;
        outgoing_ += out->size;
      }
      out->memory = pool_.Take(out->size);
      const std::uint64_t before = reader_.bytes_read();
      TENSORMOUNT_RETURN_IF_ERROR(reader_.Read(units_, unit, *out));
      progress_(reader_.bytes_read() - before);
      for (const ExchangeBox& block : out->blocks) out->unsent += block.receivers.size();
      std::lock_guard lock(mutex_);
      if (out->unsent > 0) {
        ready_.push_back(std::move(out));
      } else {
        --in_flight_;
        outgoing_ -= out->size;
        pool_.Return(std::move(out->memory));
      }
    }
    return {};
  }

  // ---- The caller's thread ----

  void StartReading() {
    thread_ = Thread([this, cancel = CancelScope::Current()] {
      const CancelScope scope(cancel);
      const Status status = Guarded([this] { return ReadAll(); });
      std::lock_guard lock(mutex_);
      read_status_ = status;
      read_done_ = true;
    });
  }

  Result<bool> TrySteps() {
    if (!thread_.joinable()) StartReading();
    std::deque<std::shared_ptr<OutgoingUnit>> ready;
    bool read_done = false;
    {
      std::lock_guard lock(mutex_);
      ready.swap(ready_);
      read_done = read_done_;
      if (!read_status_.ok()) return read_status_;
    }
    progresses_alone = !read_done;  // The communicator does not see the reading thread's progress.
    TENSORMOUNT_RETURN_IF_ERROR(PostReceives());
    for (std::shared_ptr<OutgoingUnit>& out : ready) TENSORMOUNT_RETURN_IF_ERROR(PostSends(out));
    TENSORMOUNT_RETURN_IF_ERROR(TestSends());
    TENSORMOUNT_RETURN_IF_ERROR(TestReceives());
    TENSORMOUNT_RETURN_IF_ERROR(writer_.Push());
    const bool letters_out = collective_.data_out().Poll();
    TENSORMOUNT_RETURN_IF_ERROR(collective_.data_out().failure());
    return read_done && sends_.empty() && letters_out && next_unit_ == units_.units().size() &&
           incoming_units_.empty();
  }

  Status PostSends(const std::shared_ptr<OutgoingUnit>& out) {
    moved = true;
    for (const auto& [to, header] : out->headers) {
      static_assert(UnitHeader::kBytes <= kInlinePayload);
      Frame frame;
      frame.kind = Frame::kLetter;
      collective_.data_out().Send(to, std::move(frame), Payload(header.Encode()));
    }
    for (std::size_t p = 0; p < out->blocks.size(); ++p) {
      const ExchangeBox& block = out->blocks[p];
      for (const int to : block.receivers) {
        const BufferView view = BufferView::Host(DType::kU8, static_cast<const void*>(out->at[p]),
                                                 Dims{block.bytes.volume()});
        TENSORMOUNT_ASSIGN_OR_RETURN(const Communicator::Request request,
                                     comm_.Send(to, tag_, view));
        sends_.push_back({request, out});
        ++report_.messages_sent;
      }
    }
    return {};
  }

  Status TestSends() {
    std::size_t kept = 0;
    Status failure;
    for (std::size_t i = 0; i < sends_.size(); ++i) {
      if (failure.ok()) {
        const Result<bool> done = comm_.Test(sends_[i].request);
        if (!done.ok()) {
          failure = done.status();
          continue;
        }
        if (done.value()) {
          moved = true;
          if (--sends_[i].unit->unsent == 0) Release(*sends_[i].unit);
          continue;
        }
      }
      if (kept != i) sends_[kept] = std::move(sends_[i]);
      ++kept;
    }
    sends_.resize(kept);
    return failure;
  }

  void Release(OutgoingUnit& out) {
    {
      std::lock_guard lock(mutex_);
      --in_flight_;
      outgoing_ -= out.size;
    }
    pool_.Return(std::move(out.memory));
    room_.notify_one();
  }

  // Fills incoming_units_ with the next units for this rank, in the order in which every reader
  // sends.
  void FindIncoming() {
    const int me = comm_.rank();
    for (; unreceived_blocks_ < kMaxReceives && next_unit_ < units_.units().size(); ++next_unit_) {
      const ExchangeUnit& unit = units_.units()[next_unit_];
      if (unit.reader == me) continue;
      IncomingUnit incoming;
      incoming.unit = next_unit_;
      incoming.from = unit.reader;
      for (ExchangeBox& block : units_.BlocksOf(unit)) {
        if (!block.mine.empty()) incoming.blocks.push_back(std::move(block));
      }
      if (incoming.blocks.empty()) continue;
      unreceived_blocks_ += incoming.blocks.size();
      incoming_units_.push_back(std::move(incoming));
    }
  }

  // Posts receives in the order in which each rank sends: the header of a unit after all messages
  // before it, its blocks once the header has arrived. So no message is received in place of
  // another.
  Status PostReceives() {
    FindIncoming();
    std::set<int> busy;  // Ranks whose next message belongs to an earlier unit.
    for (auto it = incoming_units_.begin(); it != incoming_units_.end(); ++it) {
      IncomingUnit& c = *it;
      if (c.posted == c.blocks.size() || busy.contains(c.from)) continue;
      if (!c.header) TENSORMOUNT_RETURN_IF_ERROR(ReceiveHeader(c));
      while (c.header && c.posted < c.blocks.size()) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool posted, PostReceive(it));
        if (!posted) return {};
      }
      if (!c.header) busy.insert(c.from);
    }
    return {};
  }

  Status ReceiveHeader(IncomingUnit& c) {
    FrameReceiver& in = collective_.data_in(c.from);
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool came, in.Poll());
    if (!came) return {};
    moved = true;
    const FrameReceiver::Received got = in.Take();
    const bool header =
        got.frame.kind == Frame::kLetter && got.payload.size() == UnitHeader::kBytes;
    if (header) c.header = UnitHeader::Decode(got.payload);
    if (header && c.header->unit == c.unit && c.header->blocks == c.blocks.size()) return {};
    return {Code::kDataLoss, "message of rank " + std::to_string(c.from) +
                                 ": it does not announce unit " + std::to_string(c.unit) +
                                 " of the exchange, which this rank expects next"};
  }

  // Posts the receive of the next block; false if there is no room for it now.
  Result<bool> PostReceive(IncomingRef of) {
    IncomingUnit& c = *of;
    const ExchangeBox& block = c.blocks[c.posted];
    if (receives_.size() >= kMaxReceives) return false;
    Receive receive;
    receive.of = of;
    receive.number = c.posted;
    receive.to = ContiguousPlace(block.bytes, *block.mine.front());
    if (receive.to == nullptr) {
      if (incoming_ != 0 && incoming_ + block.size() > kIncomingBytes) return false;
      incoming_ += block.size();
      receive.staged = pool_.Take(block.size());
      receive.to = receive.staged.data();
    }
    const BufferView view =
        BufferView::Host(DType::kU8, static_cast<void*>(receive.to), Dims{block.bytes.volume()});
    TENSORMOUNT_ASSIGN_OR_RETURN(receive.request, comm_.Receive(c.from, tag_, view));
    receives_.push_back(std::move(receive));
    ++c.posted;
    moved = true;
    return true;
  }

  Status TestReceives() {
    std::size_t kept = 0;
    Status failure;
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      if (failure.ok()) {
        const Result<bool> done = comm_.Test(receives_[i].request);
        if (!done.ok()) {
          failure = done.status();
          continue;
        }
        if (done.value()) {
          failure = Arrived(receives_[i]);
          continue;
        }
      }
      if (kept != i) receives_[kept] = std::move(receives_[i]);
      ++kept;
    }
    receives_.resize(kept);
    return failure;
  }

  Status Arrived(Receive& receive) {
    moved = true;
    IncomingUnit& c = *receive.of;
    const ExchangeBox& block = c.blocks[receive.number];
    report_.bytes_received += block.size();
    const PlannedTensor& tensor = units_.tensor(units_.units()[c.unit]);
    if (UnitHeader::HasChecksum(tensor)) c.arrived.Add(receive.number, receive.to, block.size());
    const bool staged = receive.staged.capacity() != 0;
    const PlacedBox packed = PlacePacked(Region(block.bytes), 0).front();
    for (std::size_t m = staged ? 0 : 1; m < block.mine.size(); ++m) {
      TENSORMOUNT_RETURN_IF_ERROR(PlaceBytes(packed, receive.to, block.bytes, *block.mine[m]));
    }
    if (staged) {
      incoming_ -= block.size();
      pool_.Return(std::move(receive.staged));
    }
    --unreceived_blocks_;
    if (++c.arrived.blocks < c.blocks.size()) return {};
    if (c.arrived.sum != c.header->sum) {
      return {Code::kDataLoss, "tensor " + tensor.entry().meta.key() +
                                   ": its bytes changed in transit from rank " +
                                   std::to_string(c.from)};
    }
    incoming_units_.erase(receive.of);
    return {};
  }

  Collective& collective_;
  Communicator& comm_;
  const std::uint32_t tag_;
  const ExchangeUnits& units_;
  UnitReader& reader_;
  Pool& pool_;
  DeviceWriter& writer_;
  LoadReport& report_;
  const std::function<void(std::uint64_t)>& progress_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  std::uint64_t incoming_ = 0;  // Bytes that arrive in staging buffers.
  // Of the reading thread: the units before started_ were asked for, and so many of their bytes
  // were not read yet.
  std::size_t started_ = 0;
  std::uint64_t ahead_ = 0;
  std::size_t next_unit_ = 0;
  std::list<IncomingUnit> incoming_units_;
  std::size_t unreceived_blocks_ = 0;  // Blocks in incoming_units_ that have not arrived.

  std::mutex mutex_;
  std::condition_variable room_;
  bool stop_ = false;
  std::size_t in_flight_ = 0;   // Number of units from the begin of reading until they are sent.
  std::uint64_t outgoing_ = 0;  // Bytes of memory of these units.
  std::deque<std::shared_ptr<OutgoingUnit>> ready_;
  bool read_done_ = false;
  Status read_status_;
  Thread thread_;  // Declared last: the thread uses all other members.
};

// Time limit for connecting devices if the exchange could also go through the host.
constexpr std::chrono::seconds kConnectPatience{30};

// Whether a tensor goes between devices, once devices are connected. Data that a digest verifies at
// the destination need no check on the way. Other data are verified on the way through the host,
// and go between devices only if the caller asks for devices without verification.
bool IsExchangedOnDevices(const PlannedTensor& tensor, const ExchangeRules& rules) {
  if (tensor.proof.possible) return true;
  return rules.verify == LoadVerify::kOff && rules.via == ExchangeVia::kDevices;
}

// Opens the path between devices. Returns null, on all ranks alike, if the exchange goes through
// the host.
Result<std::unique_ptr<DeviceExchangePath>> OpenDevicePath(Collective& collective,
                                                           const LoadPlan& plan,
                                                           const ExchangeRules& rules) {
  std::unique_ptr<DeviceExchangePath> none;
  if (rules.via == ExchangeVia::kHost) return none;
  const bool asked = rules.via == ExchangeVia::kDevices;
  std::uint64_t bytes = 0;
  for (const PlannedTensor& tensor : plan.tensors) {
    if (tensor.exchange && IsExchangedOnDevices(tensor, rules)) {
      bytes += tensor.entry().meta.bytes();
    }
  }
  const bool one_group = std::all_of(plan.groups.begin(), plan.groups.end(),
                                     [&](int group) { return group == plan.groups[0]; });
  if (!rules.device || !one_group) {
    if (!asked) return none;
    return Status(
        Code::kUnsupported,
        one_group
            ? "exchange between devices: every rank must load at least one tensor, and all its "
              "tensors onto one device"
            : "exchange between devices: all ranks must be in one group");
  }
  if (bytes == 0 || (!asked && bytes < rules.min_device_exchange_bytes)) return none;
  const std::chrono::milliseconds patience =
      asked ? rules.patience
            : std::min<std::chrono::milliseconds>(rules.patience, kConnectPatience);
  Result<std::unique_ptr<DeviceExchangePath>> way =
      DeviceExchangePath::Open(collective, *rules.device, patience);
  if (way.ok() || asked || way.status().code() == Code::kCancelled) return way;
  if (collective.rank() == 0) {
    Log(LogLevel::kWarning, "load: ranks exchange data through host memory, not between devices: " +
                                way.status().message());
  }
  return none;
}

}  // namespace

Status LoadByExchange(const OpenedCheckpoint& checkpoint, Collective& collective,
                      const LoadPlan& plan, std::span<LoadTarget> targets, DeviceWriter& writer,
                      const ExchangeRules& rules, LoadReport& report,
                      const std::function<void(std::uint64_t)>& progress) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceExchangePath> way,
                               OpenDevicePath(collective, plan, rules));
  UnitReader reader(checkpoint, rules.verify);
  Pool pool;
  for (const bool between : {true, false}) {
    if (between && way == nullptr) continue;
    ExchangeUnits units(checkpoint, plan, targets, collective.rank(),
                        [&](const PlannedTensor& tensor) {
                          return (way != nullptr && IsExchangedOnDevices(tensor, rules)) == between;
                        });
    for (;;) {
      bool more = false;
      const Status planned = Guarded([&]() -> Status {
        TENSORMOUNT_ASSIGN_OR_RETURN(more, units.Next());
        // Device writes must end before the ranks agree that no batch is left.
        TENSORMOUNT_RETURN_IF_ERROR(writer.Finish());
        if (!more && !between && rules.verify != LoadVerify::kOff) {
          return CheckArrived(targets, true, rules.devices);
        }
        return {};
      });
      TENSORMOUNT_RETURN_IF_ERROR(
          collective.Agree(planned, "load: plan the exchange between ranks"));
      if (!more) break;
      if (between) {
        TENSORMOUNT_RETURN_IF_ERROR(ExchangeOnDevices(
            collective, units, *way,
            {&checkpoint, rules.devices, rules.patience, rules.threads, progress}, report));
        continue;
      }
      UnitStream stream(collective, units, reader, pool, writer, report, progress);
      TENSORMOUNT_RETURN_IF_ERROR(
          collective.Run(stream, units.bytes(), "load: exchange data between ranks"));
    }
  }
  report.bytes_read += reader.bytes_read();
  report.peak_buffer_bytes = std::max(report.peak_buffer_bytes, pool.peak());
  for (LoadTarget& target : targets) {
    if (!target.tensor->exchange || target.convert) continue;
    target.stats.bytes_wanted = target.bytes;
    const bool by_leaf = rules.verify != LoadVerify::kOff && !target.tensor->proof.possible &&
                         target.tensor->entry().has_digest;
    if (by_leaf) target.stats.bytes_by_leaf = target.bytes;
  }
  return Status();
}

}  // namespace tensormount
