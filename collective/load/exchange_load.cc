// SPDX-License-Identifier: Apache-2.0
// Loads by exchange: each byte is read by one rank and sent to those who want it. A thread reads
// and cuts up units ahead; the caller's thread moves messages, inside one collective call, so that
// a rank that dies is noticed while data are on their way. What is in flight to each rank is
// bounded.
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
#include <thread>
#include <utility>

#include "base/log.h"
#include "collective/comm/collective_frame.h"
#include "collective/comm/collective_round.h"
#include "collective/guarded.h"
#include "collective/load/device_exchange.h"
#include "collective/load/exchange_reader.h"
#include "collective/load/exchange_units.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// What was read and is not yet out, of one rank; and what is on its way to it and cannot be
// received in place. One unit may always pass, however large it is.
constexpr std::uint64_t kOutgoingBytes = 4u << 20;
constexpr std::uint64_t kIncomingBytes = 4u << 20;
constexpr std::size_t kMaxReceives = 64;
// Units of one rank that are on their way, also from memory that is the caller's.
constexpr std::size_t kMaxUnits = 16;

// Buffers that are used again, and how much memory they ever were. Thread-safe.
class Pool {
 public:
  GrowingBuffer Take(std::uint64_t size) {
    std::lock_guard lock(mutex_);
    // Not a larger one either: what counts as a few bytes on their way must not hold many.
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
  void Give(GrowingBuffer bytes) {
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

// One batch of units: a thread reads, whoever calls Step passes on.
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
    coming_.clear();
  }

 private:
  struct Send {
    Communicator::Request request = 0;
    std::shared_ptr<Outgoing> unit;
  };
  // What this rank gets of a unit that another one reads.
  struct Coming {
    std::size_t unit = 0;
    int from = 0;
    std::vector<ExchangeBox> pieces;
    std::optional<UnitLetter> letter;  // Once it came.
    UnitLetter arrived;
    std::size_t posted = 0;  // Pieces that are asked for.
  };
  using ComingRef = std::list<Coming>::iterator;
  struct Receive {
    Communicator::Request request = 0;
    ComingRef of;
    std::size_t number = 0;  // Of the piece.
    std::byte* to = nullptr;
    GrowingBuffer staged;
  };

  // ---- The reading thread ----

  Status ReadAll() {
    const int me = comm_.rank();
    for (std::size_t u = 0; u < units_.units().size(); ++u) {
      const ExchangeUnit& unit = units_.units()[u];
      if (unit.reader != me) continue;
      auto out = std::make_shared<Outgoing>();
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
      for (const ExchangeBox& piece : out->pieces) out->unsent += piece.receivers.size();
      std::lock_guard lock(mutex_);
      if (out->unsent > 0) {
        ready_.push_back(std::move(out));
      } else {
        --in_flight_;
        outgoing_ -= out->size;
        pool_.Give(std::move(out->memory));
      }
    }
    return {};
  }

  // ---- The caller's thread ----

  void StartReading() {
    thread_ = std::thread([this] {
      const Status status = Guarded([this] { return ReadAll(); });
      std::lock_guard lock(mutex_);
      read_status_ = status;
      read_done_ = true;
    });
  }

  Result<bool> TrySteps() {
    if (!thread_.joinable()) StartReading();
    std::deque<std::shared_ptr<Outgoing>> ready;
    bool read_done = false;
    {
      std::lock_guard lock(mutex_);
      ready.swap(ready_);
      read_done = read_done_;
      if (!read_status_.ok()) return read_status_;
    }
    alone = !read_done;  // What the reading thread has done is heard of by nobody else.
    TENSORMOUNT_RETURN_IF_ERROR(PostReceives());
    for (std::shared_ptr<Outgoing>& out : ready) TENSORMOUNT_RETURN_IF_ERROR(PostSends(out));
    TENSORMOUNT_RETURN_IF_ERROR(TestSends());
    TENSORMOUNT_RETURN_IF_ERROR(TestReceives());
    TENSORMOUNT_RETURN_IF_ERROR(writer_.Push());
    const bool letters_out = collective_.data_out().Poll();
    TENSORMOUNT_RETURN_IF_ERROR(collective_.data_out().failure());
    return read_done && sends_.empty() && letters_out && next_unit_ == units_.units().size() &&
           coming_.empty();
  }

  Status PostSends(const std::shared_ptr<Outgoing>& out) {
    moved = true;
    for (const auto& [to, letter] : out->letters) {
      static_assert(UnitLetter::kBytes <= kInlinePayload);
      Frame frame;
      frame.kind = Frame::kLetter;
      collective_.data_out().Send(to, std::move(frame), Payload(letter.Encode()));
    }
    for (std::size_t p = 0; p < out->pieces.size(); ++p) {
      const ExchangeBox& piece = out->pieces[p];
      for (const int to : piece.receivers) {
        const BufferView view = BufferView::Host(DType::kU8, static_cast<const void*>(out->at[p]),
                                                 Dims{piece.bytes.volume()});
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

  void Release(Outgoing& out) {
    {
      std::lock_guard lock(mutex_);
      --in_flight_;
      outgoing_ -= out.size;
    }
    pool_.Give(std::move(out.memory));
    room_.notify_one();
  }

  // What comes next to this rank, in the order in which every reader sends.
  void FindComing() {
    const int me = comm_.rank();
    for (; pieces_coming_ < kMaxReceives && next_unit_ < units_.units().size(); ++next_unit_) {
      const ExchangeUnit& unit = units_.units()[next_unit_];
      if (unit.reader == me) continue;
      Coming coming;
      coming.unit = next_unit_;
      coming.from = unit.reader;
      for (ExchangeBox& piece : units_.PiecesOf(unit)) {
        if (!piece.mine.empty()) coming.pieces.push_back(std::move(piece));
      }
      if (coming.pieces.empty()) continue;
      pieces_coming_ += coming.pieces.size();
      coming_.push_back(std::move(coming));
    }
  }

  // A letter is asked for once all that stands before it on its way is, and pieces once their
  // letter came: so nothing else can be taken for them.
  Status PostReceives() {
    FindComing();
    std::set<int> busy;  // Ranks whose next message belongs to an earlier unit.
    for (auto it = coming_.begin(); it != coming_.end(); ++it) {
      Coming& c = *it;
      if (c.posted == c.pieces.size() || busy.contains(c.from)) continue;
      if (!c.letter) TENSORMOUNT_RETURN_IF_ERROR(ReceiveLetter(c));
      while (c.letter && c.posted < c.pieces.size()) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool posted, PostReceive(it));
        if (!posted) return {};
      }
      if (!c.letter) busy.insert(c.from);
    }
    return {};
  }

  Status ReceiveLetter(Coming& c) {
    FrameReceiver& in = collective_.data_in(c.from);
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool came, in.Poll());
    if (!came) return {};
    moved = true;
    const FrameReceiver::Received got = in.Take();
    const bool letter =
        got.frame.kind == Frame::kLetter && got.payload.size() == UnitLetter::kBytes;
    if (letter) c.letter = UnitLetter::Decode(got.payload);
    if (letter && c.letter->unit == c.unit && c.letter->pieces == c.pieces.size()) return {};
    return {Code::kDataLoss, "message of rank " + std::to_string(c.from) +
                                 ": does not announce unit " + std::to_string(c.unit)};
  }

  // Asks for the next piece; false where there is no room for it now.
  Result<bool> PostReceive(ComingRef of) {
    Coming& c = *of;
    const ExchangeBox& piece = c.pieces[c.posted];
    if (receives_.size() >= kMaxReceives) return false;
    Receive receive;
    receive.of = of;
    receive.number = c.posted;
    receive.to = ContiguousPlace(piece.bytes, *piece.mine.front());
    if (receive.to == nullptr) {
      if (incoming_ != 0 && incoming_ + piece.size() > kIncomingBytes) return false;
      incoming_ += piece.size();
      receive.staged = pool_.Take(piece.size());
      receive.to = receive.staged.data();
    }
    const BufferView view =
        BufferView::Host(DType::kU8, static_cast<void*>(receive.to), Dims{piece.bytes.volume()});
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
    Coming& c = *receive.of;
    const ExchangeBox& piece = c.pieces[receive.number];
    report_.bytes_received += piece.size();
    const PlannedTensor& tensor = units_.tensor(units_.units()[c.unit]);
    if (UnitLetter::SumsTravel(tensor)) c.arrived.Add(receive.number, receive.to, piece.size());
    const bool staged = receive.staged.capacity() != 0;
    const PlacedBox packed = PlacePacked(Region(piece.bytes), 0).front();
    for (std::size_t m = staged ? 0 : 1; m < piece.mine.size(); ++m) {
      TENSORMOUNT_RETURN_IF_ERROR(PlaceBytes(packed, receive.to, piece.bytes, *piece.mine[m]));
    }
    if (staged) {
      incoming_ -= piece.size();
      pool_.Give(std::move(receive.staged));
    }
    --pieces_coming_;
    if (++c.arrived.pieces < c.pieces.size()) return {};
    if (c.arrived.sum != c.letter->sum) {
      return {Code::kDataLoss, "tensor " + tensor.entry().meta.key() +
                                   ": its bytes changed on the way from rank " +
                                   std::to_string(c.from)};
    }
    coming_.erase(receive.of);
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
  std::uint64_t incoming_ = 0;  // Bytes of staged receives.
  std::size_t next_unit_ = 0;
  std::list<Coming> coming_;
  std::size_t pieces_coming_ = 0;  // Of them; not arrived.

  std::mutex mutex_;
  std::condition_variable room_;
  bool stop_ = false;
  std::size_t in_flight_ = 0;   // Units that were read or are being read.
  std::uint64_t outgoing_ = 0;  // Their memory, in bytes.
  std::deque<std::shared_ptr<Outgoing>> ready_;
  bool read_done_ = false;
  Status read_status_;
  std::thread thread_;  // Last: uses all others.
};

// How long the way between devices may take to make where the host is as good.
constexpr std::chrono::seconds kConnectPatience{30};

// What is proved where it stands in the end need not be looked at on its way. What is not is
// compared on its way through the host; between devices only where somebody wants just that.
bool GoesBetweenDevices(const PlannedTensor& tensor, const ExchangeRules& rules) {
  if (tensor.proof.possible) return true;
  return rules.verify == LoadVerify::kOff && rules.via == ExchangeVia::kDevices;
}

// The way between devices, where this load takes it: all ranks or none. Null: it does not.
Result<std::unique_ptr<DeviceWay>> FindWay(Collective& collective, const LoadPlan& plan,
                                           const ExchangeRules& rules) {
  std::unique_ptr<DeviceWay> none;
  if (rules.via == ExchangeVia::kHost) return none;
  const bool asked = rules.via == ExchangeVia::kDevices;
  std::uint64_t bytes = 0;
  for (const PlannedTensor& tensor : plan.tensors) {
    if (tensor.exchange && GoesBetweenDevices(tensor, rules)) {
      bytes += tensor.entry().meta.bytes();
    }
  }
  const bool one_group = std::all_of(plan.groups.begin(), plan.groups.end(),
                                     [&](int group) { return group == plan.groups[0]; });
  if (!rules.device || !one_group) {
    if (!asked) return none;
    return Status(Code::kUnsupported,
                  one_group
                      ? "an exchange between devices: on some rank there is no tensor, or one "
                        "that is not on its one device"
                      : "an exchange between devices has one group of ranks");
  }
  if (bytes == 0 || (!asked && bytes < rules.worth_a_way)) return none;
  const std::chrono::milliseconds patience =
      asked ? rules.patience
            : std::min<std::chrono::milliseconds>(rules.patience, kConnectPatience);
  Result<std::unique_ptr<DeviceWay>> way = DeviceWay::Open(collective, *rules.device, patience);
  if (way.ok() || asked || way.status().code() == Code::kCancelled) return way;
  if (collective.rank() == 0) {
    Log(LogLevel::kWarning,
        "load: what ranks exchange goes through the host: " + way.status().message());
  }
  return none;
}

}  // namespace

Status LoadByExchange(const OpenedCheckpoint& checkpoint, Collective& collective,
                      const LoadPlan& plan, std::span<LoadTarget> targets, DeviceWriter& writer,
                      const ExchangeRules& rules, LoadReport& report,
                      const std::function<void(std::uint64_t)>& progress) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceWay> way,
                               FindWay(collective, plan, rules));
  UnitReader reader(checkpoint, rules.verify);
  Pool pool;
  // First what goes between devices, then the rest.
  for (const bool between : {true, false}) {
    if (between && way == nullptr) continue;
    ExchangeUnits units(checkpoint, plan, targets, collective.rank(),
                        [&](const PlannedTensor& tensor) {
                          return (way != nullptr && GoesBetweenDevices(tensor, rules)) == between;
                        });
    for (;;) {
      bool more = false;
      const Status planned = Guarded([&]() -> Status {
        TENSORMOUNT_ASSIGN_OR_RETURN(more, units.Next());
        // Before all agree that there is no more.
        TENSORMOUNT_RETURN_IF_ERROR(writer.Finish());
        if (!more && !between && rules.verify != LoadVerify::kOff) {
          return CheckArrived(targets, true, rules.devices);
        }
        return {};
      });
      TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(planned, "load: plan the exchange"));
      if (!more) break;
      if (between) {
        TENSORMOUNT_RETURN_IF_ERROR(ExchangeOnDevices(
            collective, units, *way,
            {&checkpoint, rules.devices, rules.patience, rules.threads, progress}, report));
        continue;
      }
      UnitStream stream(collective, units, reader, pool, writer, report, progress);
      TENSORMOUNT_RETURN_IF_ERROR(collective.Run(stream, units.bytes(), "load: exchange"));
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
