// SPDX-License-Identifier: Apache-2.0
// The part of a transport that does not depend on its mover: arguments, deadlines, and how a
// failure of one rank reaches the others.
#include "collective/comm/bulk_transport.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/coding.h"
#include "base/hash.h"
#include "base/keyed_hash.h"
#include "base/log.h"
#include "collective/comm/collective.h"
#include "collective/comm/collective_round.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"

namespace tensormount {
namespace {

constexpr std::chrono::nanoseconds kShortPause = std::chrono::microseconds(20);
// Longest pause between polls. Some movers make progress without messages, which Changes() does not
// count, so a wait for a change alone could miss it.
constexpr std::chrono::nanoseconds kLongPause = std::chrono::milliseconds(1);
// Notes for each rank that are read at a time: no exchange has more.
constexpr std::size_t kNotesPerRank = 16;

std::string UnitText(std::uint64_t unit, std::uint64_t bytes) {
  return "unit " + std::to_string(unit) + " (" + std::to_string(bytes) + " bytes)";
}

std::uint64_t HashOfPlan(const std::vector<BulkUnit>& plan) {
  Xxh3Stream hash;
  for (const BulkUnit& unit : plan) {
    const std::uint64_t fields[3] = {static_cast<std::uint64_t>(unit.from),
                                     static_cast<std::uint64_t>(unit.to), unit.bytes};
    hash.Update(fields, sizeof(fields));
  }
  return hash.Value().low;
}

Result<std::string> RandomGroup() {
  std::array<std::uint8_t, 8> bytes{};
  TENSORMOUNT_RETURN_IF_ERROR(FillRandom(bytes));
  return std::string(bytes.begin(), bytes.end());
}

}  // namespace

std::chrono::milliseconds DefaultConnectTimeout(const Timeouts& timeouts) {
  const std::chrono::milliseconds most = std::min(timeouts.arrival, kLongestWait);
  // Less than `most`, so that a rank that does not connect is reported before it is missing in the
  // next collective call.
  return (timeouts.total.count() > 0 ? std::min(most, timeouts.total) : most) * 3 / 4;
}

// Waits until the mover can move. A mover's failure is kept in status(), so that it does not fail
// the collective call that runs this work.
class BulkTransport::Connecting final : public LocalWork {
 public:
  Connecting(BulkTransport& transport, std::chrono::milliseconds patience)
      : transport_(transport), deadline_(Deadline::After(patience)) {
    progresses_alone = true;  // Changes() of the communicator does not count the mover's progress.
  }
  Result<bool> Step() override {
    if (over_) return true;
    const Status asked = Guarded([&]() -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(transport_.Failure());
      TENSORMOUNT_RETURN_IF_ERROR(transport_.ReadNotes());
      TENSORMOUNT_ASSIGN_OR_RETURN(over_, transport_.Prepared());
      if (over_ || !deadline_.Passed()) return {};
      return {Code::kDeadlineExceeded, "device transport: the ranks did not connect in time"};
    });
    if (!asked.ok()) Fail(asked);
    moved = over_;
    return over_;
  }
  void Cancel() override {
    if (!over_) Fail({Code::kCancelled, "device transport: connecting was cancelled"});
  }
  const Status& status() const { return status_; }

 private:
  void Fail(const Status& why) {
    over_ = true;
    status_ = transport_.Fail(why.WithContext(transport_.kind()));
    transport_.mover_->Stop();
    transport_.stopped_ = true;
  }
  BulkTransport& transport_;
  const Deadline deadline_;
  bool over_ = false;
  Status status_;
};

Result<std::unique_ptr<BulkTransport>> BulkTransport::Make(Communicator& control,
                                                           const Timeouts& timeouts,
                                                           const MakeBulkMover& make) {
  Collective collective(control, timeouts);
  return Make(collective, DefaultConnectTimeout(timeouts), make);
}

Result<std::unique_ptr<BulkTransport>> BulkTransport::Make(Collective& collective,
                                                           std::chrono::milliseconds patience,
                                                           const MakeBulkMover& make) {
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string word,
      collective.Broadcast(collective.rank() == 0 ? RandomGroup() : Result<std::string>(""),
                           "make a device transport"));
  if (word.size() != sizeof(std::uint64_t)) {
    return Status(Code::kInternal,
                  "internal error: the identifier of a device transport is not 8 bytes long");
  }
  const auto group = LoadLittle<std::uint64_t>(word.data());
  std::unique_ptr<BulkTransport> transport;
  const Status made = Guarded([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<BulkMover> mover, make(group));
    transport.reset(new BulkTransport(collective.comm(), group, std::move(mover)));
    return {};
  });
  TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(made, "start a device transport"));
  Connecting connecting(*transport, patience);
  TENSORMOUNT_RETURN_IF_ERROR(collective.Run(connecting, 0, "connect a device transport"));
  TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(connecting.status(), "connect a device transport"));
  return transport;
}

BulkTransport::BulkTransport(Communicator& control, std::uint64_t group,
                             std::unique_ptr<BulkMover> mover)
    : control_(control),
      notes_(control, group),
      mover_(std::move(mover)),
      seats_(static_cast<std::size_t>(control.size())) {}

BulkTransport::~BulkTransport() {
  if (!Failure().ok()) {
    if (!stopped_) mover_->Stop();
  } else if (idle_) {
    notes_.SendToAll({.kind = BulkNote::kGoodbye, .exchange = exchange_.number});
  } else {
    (void)Fail(Status(Code::kUnavailable, "rank " + std::to_string(rank()) +
                                              " is gone: it left in the middle of an exchange")
                   .With({.rank = rank()}));  // The field makes other ranks name this rank.
    mover_->Stop();
  }
  const std::string left = mover_->Close();
  if (!left.empty()) Log(LogLevel::kWarning, left);
}

Status BulkTransport::Register(const BulkRange& range) {
  TENSORMOUNT_RETURN_IF_ERROR(Failure());
  if (range.bytes == 0) return {};
  const auto begin = reinterpret_cast<std::uintptr_t>(range.data);
  if (range.data == nullptr || begin + range.bytes < begin) {
    return {Code::kInvalidArgument,
            "register " + std::to_string(range.bytes) +
                " bytes for the device transport: the address is null or too large"};
  }
  const auto after = ranges_.upper_bound(range.data);
  const bool over_next = after != ranges_.end() &&
                         reinterpret_cast<std::uintptr_t>(after->first) < begin + range.bytes;
  bool over_last = false;
  if (after != ranges_.begin()) {
    const BulkRange& last = std::prev(after)->second;
    over_last = reinterpret_cast<std::uintptr_t>(last.data) + last.bytes > begin;
  }
  if (over_next || over_last) {
    return {Code::kAlreadyExists,
            "register " + std::to_string(range.bytes) +
                " bytes for the device transport: the memory overlaps registered memory"};
  }
  TENSORMOUNT_RETURN_IF_ERROR(mover_->Check(range));
  ranges_.emplace(range.data, range);
  return {};
}

Status BulkTransport::Unregister(const std::byte* data) {
  if (!idle_ && Failure().ok()) {
    return {Code::kBusy, "unregister memory: an exchange between ranks is under way"};
  }
  if (data != nullptr && ranges_.erase(data) == 0) {
    return {Code::kInvalidArgument, "unregister memory: the memory is not registered"};
  }
  return {};
}

Status BulkTransport::Begin(std::vector<BulkUnit> plan) {
  TENSORMOUNT_RETURN_IF_ERROR(Failure());
  if (!idle_) return {Code::kBusy, "begin an exchange: another exchange is under way"};
  std::vector<bool> takes_part(static_cast<std::size_t>(size()));
  std::vector<BulkMove> mine;
  for (std::size_t u = 0; u < plan.size(); ++u) {
    const BulkUnit& unit = plan[u];
    if (unit.from < 0 || unit.from >= size() || unit.to < 0 || unit.to >= size()) {
      return {Code::kInvalidArgument,
              UnitText(u, unit.bytes) + ": the plan sends the unit from rank " +
                  std::to_string(unit.from) + " to rank " + std::to_string(unit.to) +
                  ", but there are only " + std::to_string(size()) + " ranks"};
    }
    if (unit.bytes == 0) continue;
    takes_part[static_cast<std::size_t>(unit.from)] = true;
    takes_part[static_cast<std::size_t>(unit.to)] = true;
    if (unit.from != rank() && unit.to != rank()) continue;
    mine.push_back({.unit = u,
                    .peer = unit.from == rank() ? unit.to : unit.from,
                    .bytes = unit.bytes,
                    .sends = unit.from == rank(),
                    .receives = unit.to == rank()});
  }
  plan_hash_ = HashOfPlan(plan);
  exchange_ = {exchange_.number + 1, std::move(plan), std::move(mine)};
  takes_part_ = std::move(takes_part);
  put_ = 0;
  idle_ = false;
  if (rank() != 0) {
    notes_.SendToAll({.kind = BulkNote::kBegin, .exchange = exchange_.number, .plan = plan_hash_});
  }
  mover_->Begin(exchange_);
  return {};
}

Status BulkTransport::Put(std::span<const BulkBlock> blocks) {
  TENSORMOUNT_RETURN_IF_ERROR(Failure());
  std::vector<BulkMove>& mine = exchange_.mine;
  std::vector<std::size_t> at;
  at.reserve(blocks.size());
  Status wrong;
  for (const BulkBlock& block : blocks) {
    if (block.unit < exchange_.plan.size() && exchange_.plan[block.unit].bytes == 0) continue;
    const std::size_t found = FindOwnUnit(block.unit);
    if (found == mine.size()) {
      wrong = Status(Code::kInvalidArgument, "put unit " + std::to_string(block.unit) +
                                                 ": this rank neither sends nor receives it");
      break;
    }
    wrong = CheckBlock(block, mine[found]);
    if (!wrong.ok()) break;
    mine[found].put = true;
    mine[found].from = block.from;
    mine[found].to = block.to;
    at.push_back(found);
  }
  if (!wrong.ok()) {
    for (const std::size_t i : at) mine[i].put = false;
    return wrong;
  }
  put_ += at.size();
  mover_->OnPut(at);
  return Poll().status();
}

Status BulkTransport::CheckBlock(const BulkBlock& block, const BulkMove& transfer) const {
  if (transfer.put) {
    return {Code::kInvalidArgument,
            "put " + UnitText(block.unit, transfer.bytes) + ": this rank has put it already"};
  }
  if (transfer.sends) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckRegistered(block.unit, block.from, transfer.bytes));
  }
  if (transfer.receives) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckRegistered(block.unit, block.to, transfer.bytes));
  }
  return {};
}

Status BulkTransport::CheckRegistered(std::uint64_t unit, const std::byte* data,
                                      std::uint64_t bytes) const {
  const auto after = ranges_.upper_bound(data);
  if (data != nullptr && after != ranges_.begin()) {
    const BulkRange& range = std::prev(after)->second;
    const auto skip = static_cast<std::uint64_t>(data - range.data);
    // Compared in this way because the sum of offset and size could overflow 64 bits.
    if (skip <= range.bytes && bytes <= range.bytes - skip) return {};
  }
  return {Code::kInvalidArgument,
          "put " + UnitText(unit, bytes) + ": the memory of this unit is not registered"};
}

std::size_t BulkTransport::FindOwnUnit(std::uint64_t unit) const {
  const auto& mine = exchange_.mine;
  const auto at =
      std::lower_bound(mine.begin(), mine.end(), unit,
                       [](const BulkMove& transfer, std::uint64_t u) { return transfer.unit < u; });
  if (at == mine.end() || at->unit != unit) return mine.size();
  return static_cast<std::size_t>(at - mine.begin());
}

bool BulkTransport::Done(std::uint64_t unit) const {
  const std::size_t at = FindOwnUnit(unit);
  if (at != exchange_.mine.size()) return exchange_.mine[at].done;
  if (unit >= exchange_.plan.size()) return false;
  const BulkUnit& u = exchange_.plan[unit];
  return u.bytes == 0 && (u.from == rank() || u.to == rank());
}

Result<bool> BulkTransport::Prepared() {
  if (prepared_) return true;
  TENSORMOUNT_ASSIGN_OR_RETURN(prepared_, mover_->Prepare([&](std::string_view mover_message) {
    notes_.SendToAll(
        {.kind = BulkNote::kMoverMessage, .mover_message = std::string(mover_message)});
  }));
  return prepared_;
}

Result<bool> BulkTransport::Poll() {
  Status failed = Failure();
  if (failed.ok()) failed = ReadNotes();
  bool done = idle_;
  if (failed.ok() && !idle_) {
    failed = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool prepared, Prepared());
      if (!prepared) return {};
      TENSORMOUNT_ASSIGN_OR_RETURN(done, mover_->Move());
      return {};
    });
    done = done && AllPut();
    if (failed.ok()) idle_ = done;
    // If a rank left because another one failed, its absence may be seen before the cause, so the
    // notes are read once more.
    if (failed.code() == Code::kUnavailable) {
      const Status heard = ReadNotes();
      if (!heard.ok()) failed = heard;
    }
  }
  if (failed.ok()) return done;
  failed = Fail(failed);
  if (!stopped_) mover_->Stop();
  stopped_ = true;
  return failed;
}

template <typename Step>
Status BulkTransport::RepeatUntil(const Deadline& deadline, Step step, const char* what) {
  std::chrono::nanoseconds pause = kShortPause;
  while (true) {
    const std::uint64_t seen = control_.Changes();
    (void)control_.Progress();  // If this fails, ReadNotes reports it.
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool done, step());
    if (done) return {};
    if (deadline.Passed()) return {Code::kDeadlineExceeded, what};
    control_.WaitForChange(seen, std::min(pause, deadline.Left()));
    pause = std::min(pause * 2, kLongPause);
  }
}

Status BulkTransport::Wait(const Deadline& deadline) {
  TENSORMOUNT_RETURN_IF_ERROR(Failure());
  if (!idle_ && !AllPut()) {
    const auto missing = std::find_if(exchange_.mine.begin(), exchange_.mine.end(),
                                      [](const BulkMove& transfer) { return !transfer.put; });
    return {Code::kInvalidArgument,
            "wait: this rank has not put " + UnitText(missing->unit, missing->bytes)};
  }
  if (RepeatUntil(
          deadline, [&] { return Poll(); }, "")
          .ok())
    return {};
  const Status why = Fail(LateStatus());  // If Poll has failed, Fail keeps its failure.
  (void)Poll();                           // After a failure Poll stops the mover.
  return why;
}

Status BulkTransport::LateStatus() const {
  const auto late = std::find_if(exchange_.mine.begin(), exchange_.mine.end(),
                                 [](const BulkMove& transfer) { return !transfer.done; });
  if (late == exchange_.mine.end()) {
    return {Code::kDeadlineExceeded, "an exchange between ranks did not end by its deadline"};
  }
  const std::string peer = " rank " + std::to_string(late->peer);
  const std::string words =
      kind() + ": " + UnitText(late->unit, late->bytes) +
      (late->receives ? " from" + peer + " did not arrive" : " to" + peer + " was not received") +
      " by the deadline";
  const std::string suspects = mover_->Suspects(*late);
  if (!suspects.empty()) return {Code::kDeadlineExceeded, words + suspects};
  return Status(Code::kDeadlineExceeded, words).With({.rank = late->peer});
}

Status BulkTransport::ReadNotes() {
  // Bounded, because a rank that sends more and more notes would keep this one here past its
  // deadline. The next Poll reads the rest.
  const std::size_t most = kNotesPerRank * seats_.size();
  for (std::size_t read = 0; read < most; ++read) {
    Result<std::optional<BulkNote>> heard = notes_.Poll();
    if (!heard.ok()) {
      const int gone = heard.status().fields().rank;
      if (seats_[static_cast<std::size_t>(gone)].said_goodbye) continue;
      return heard.status();
    }
    const std::optional<BulkNote> note = std::move(heard).value();
    if (!note) break;
    TENSORMOUNT_RETURN_IF_ERROR(OnNote(*note));
  }
  return idle_ ? Status() : CheckSamePlans();
}

Status BulkTransport::OnNote(const BulkNote& note) {
  Seat& seat = seats_[static_cast<std::size_t>(note.from)];
  switch (note.kind) {
    case BulkNote::kBegin:
      seat.begun = note.exchange;
      seat.plan = note.plan;
      return CheckSamePlans();
    case BulkNote::kFailed:
      if (note.status.ok()) break;
      failure_received_ = true;
      return note.status;
    case BulkNote::kGoodbye:
      seat.said_goodbye = true;
      seat.begun = note.exchange;
      return {};
    case BulkNote::kMoverMessage:
      mover_->OnBroadcast(note.mover_message);
      return {};
  }
  return FromRank(note.from, Status(Code::kDataLoss, "sent a malformed control message"));
}

Status BulkTransport::CheckSamePlans() {
  for (std::size_t r = 0; r < seats_.size(); ++r) {
    const Seat& seat = seats_[r];
    if (seat.said_goodbye && seat.begun < exchange_.number && takes_part_[r]) {
      return Status(Code::kUnavailable, "rank " + std::to_string(r) +
                                            " is gone: it left before exchange " +
                                            std::to_string(exchange_.number))
          .With({.rank = static_cast<int>(r)});
    }
    // A seat has only the last note of its rank. If the rank is two exchanges ahead, its earlier plan
    // is not compared.
    if (rank() == 0 && !seat.said_goodbye && seat.begun == exchange_.number &&
        seat.plan != plan_hash_) {
      return Status(Code::kInternal, "rank " + std::to_string(r) +
                                         " has a different plan for exchange " +
                                         std::to_string(exchange_.number) + " than rank 0")
          .With({.rank = static_cast<int>(r)});
    }
  }
  return {};
}

Status BulkTransport::Failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

Status BulkTransport::Fail(const Status& why) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    failure_ = why;
  }
  if (!failure_received_) {
    notes_.SendToAll({.kind = BulkNote::kFailed, .status = FromRank(rank(), why)});
  } else if (rank() == 0) {
    notes_.SendToAll({.kind = BulkNote::kFailed, .status = why});
  }
  return why;
}

void BulkTransport::Abort(const Status& why) {
  (void)Fail(why.ok() ? Status(Code::kCancelled, "aborted") : why);
}

Status BulkTransport::Settle(const Deadline& deadline) {
  if (Failure().ok()) return {};
  if (!stopped_) mover_->Stop();
  stopped_ = true;
  return RepeatUntil(
      deadline, [&] { return mover_->Settled(); },
      "an exchange failed, and its device did not stop: it may still write to the memory");
}

Status BulkTransport::Release(const Deadline& deadline) {
  TENSORMOUNT_RETURN_IF_ERROR(Failure());
  if (!idle_)
    return {Code::kBusy, "release transport memory: an exchange between ranks is under way"};
  const Status released = RepeatUntil(
      deadline,
      [&]() -> Result<bool> {
        TENSORMOUNT_RETURN_IF_ERROR(ReadNotes());
        prepared_ = false;
        return mover_->Release();
      },
      "transport memory was not released by the deadline");
  if (released.ok()) return {};
  const Status kept = Fail(released.WithContext(kind()));
  if (!stopped_) mover_->Stop();
  stopped_ = true;
  return kept;
}

}  // namespace tensormount
