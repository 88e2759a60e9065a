// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_ROUND_H_
#define TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_ROUND_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "collective/comm/collective_frame.h"

namespace tensormount {

// Calls Progress at regular intervals from a thread of its own, so that the others go on hearing
// of this rank while its owner is in a system call.
// The only thread of a Collective. It touches nothing but the communicator, whose Progress may be
// called beside the owner's calls; no lock is held while it does.
class Heartbeat {
 public:
  Heartbeat(Communicator& comm, std::chrono::nanoseconds interval);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread thread_;
};

// Who was silent for too long in an earlier job of these ranks, on whatever channel, and was not
// heard of since. Thread-safe.
class LostRanks {
 public:
  using Clock = std::chrono::steady_clock;
  void Add(int rank, Clock::time_point now);
  void Remove(int rank);
  // All of them, and since when.
  std::map<int, Clock::time_point> All() const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Clock::time_point> since_;
};

// Judges who is silent for too long.
//
//   heard of  ----- silent for `liveness` ----->  suspected
//   suspected ----- heard of again ------------>  heard of
//   suspected ----- still silent a heartbeat --> lost        (named in kDeadlineExceeded)
//
// The second look is for ranks that were stopped together with us (a machine that was suspended):
// their heartbeats come in the moment in which all go on.
// Used by the thread of the Collective alone; only what it shares with later jobs of the group
// (LostRanks) is locked. Rank 0 asks about everybody, a member about rank 0.
class LivenessWatch {
 public:
  using Clock = std::chrono::steady_clock;
  LivenessWatch(Communicator& comm, std::chrono::nanoseconds liveness);

  // `rank` was heard of in this job: from now on its silence counts.
  void Join(int rank) { seats_[static_cast<std::size_t>(rank)].joined = true; }
  // Begin of a wait, then every turn of its loop. A long gap between two turns means that this
  // rank itself was stopped or starved, and says nothing about the others.
  void Start(Clock::time_point now);
  void Turn(Clock::time_point now);
  // Silent for longer than liveness, and still so a heartbeat after this was first seen; or lost in
  // an earlier job and not heard of since.
  bool Lost(int rank, Clock::time_point now);

 private:
  struct Seat {
    bool joined = false;
    bool suspected = false;
    Clock::time_point since;
    std::optional<Clock::time_point> lost_since;  // In an earlier job; until it is heard of.
  };
  Communicator& comm_;
  const std::chrono::nanoseconds liveness_;
  const std::chrono::nanoseconds confirm_;
  Clock::time_point base_;
  Clock::time_point last_turn_;
  std::vector<Seat> seats_;
  const std::shared_ptr<LostRanks> lost_;
};

// Work of one rank that goes on beside a round: the transfers of an exchange.
// Runs on the thread that waits in the round, one Step a turn, so it needs no locks; a Step that
// waited would keep this rank from seeing the failure of another.
class LocalWork {
 public:
  virtual ~LocalWork() = default;
  // True once done. Never waits. Sets `moved` where something happened: then it is called again at
  // once, otherwise after a pause that grows.
  virtual Result<bool> Step() = 0;
  bool moved = false;
  // Moves without messages as well (its own reads), of which the communicator does not hear.
  bool alone = false;
  // After this nothing touches the caller's memory.
  virtual void Cancel() = 0;
};

// How long a job that is to be cancelled still waits for others. Those who come meanwhile learn of
// it from this rank's vote, and all agree; those who do not come must not keep it from ending.
inline constexpr std::chrono::seconds kCancelPatience{3};

enum class CollectiveOp : std::uint8_t {
  kAllGather = 1,
  kGather,
  kBroadcast,
  kAgree = 5,  // 4 was XOR.
  kExchange,
  kTransfer,
  kDecide,
  kNeighborAllToAll,
};

// The one pattern that every collective operation is made of:
//
//   member                                   rank 0
//   Contribute(status, payload)  ----------> Collect, for each rank: OnContribution
//   <- "waiting" --------------------------- Remind: to those who came, while others are missing
//   <- verdict ----------------------------- Judge (decide), TellAll
//
// In words: all tell rank 0 that they came,
// with a status and a payload; rank 0 decides and tells all. See Collective for the guarantees.
// A star, not a tree: each rank waits for one other only, and the rank that knows who is missing
// is the one that decides. The price is N - 1 messages each way at rank 0. What is large goes
// from rank to rank instead (Run, NeighborAllToAll).
class CollectiveEngine {
 public:
  CollectiveEngine(Communicator& comm, const Timeouts& timeouts, const std::atomic<bool>* cancel);
  ~CollectiveEngine();
  CollectiveEngine(const CollectiveEngine&) = delete;
  CollectiveEngine& operator=(const CollectiveEngine&) = delete;

  struct Round {
    CollectiveOp op = CollectiveOp::kAgree;
    std::string_view phase;
    Status mine;
    std::string_view payload;  // Of an ok contribution.
    // At rank 0, once everybody came and nobody failed: makes what all are told from the payloads,
    // by rank. The payloads may be taken.
    std::function<Status(std::vector<std::string>& parts, std::string* verdict)> decide;
    // Contributes when done. A round with work fails as a whole when one rank's work does. Not
    // owned; null: none.
    LocalWork* work = nullptr;
    std::chrono::nanoseconds allowance{0};  // For the work, on top of `arrival`.
  };
  using Told = std::shared_ptr<const std::string>;
  // The verdict's payload, the same on every rank, or its failure.
  Result<Told> Run(const Round& round);

  void IgnoreCancel() { cancel_ = nullptr; }

  Communicator& comm() { return comm_; }
  // What any rank says to any other beside the rounds: letters, and what they announce, on
  // data_tag() and in the same order on both sides.
  std::uint32_t data_tag() const { return tag_ + 2; }
  FrameSender& data_out() { return data_out_; }
  FrameReceiver& data_in(int from);
  // How long `bytes` may take at the slowest.
  static std::chrono::nanoseconds AllowanceFor(std::uint64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  struct Gathered;

  Result<Told> RunRoot(const Round& round);
  Result<Told> RunMember(const Round& round);
  // One look at everybody who is still missing.
  Status Collect(const Round& round, Gathered& g, bool* moved);
  Status OnContribution(const Round& round, Gathered& g, int from, FrameReceiver::Received in);
  Status StillThere(const Round& round, const Gathered& g);
  Status Missing(const Round& round, const Gathered& g, Clock::time_point now);
  void Remind(const Round& round, Gathered& g, Clock::time_point now);
  Status Judge(const Round& round, Gathered& g, std::string* verdict);
  Result<Told> TellAll(const Round& round, const Status& failure, bool fatal, std::string verdict);
  Frame MakeFrame(const Round& round, Frame::Kind kind) const;
  void Contribute(const Round& round, const Status& mine);
  void SendFailure(Frame frame, const Status& why);  // To rank 0.
  // Until all that was sent is out, or whoever does not take it is lost.
  void Drain(Clock::duration limit);
  Status GiveUp(const Round& round, const Status& why);
  // Why a wait ends that was to be cancelled; ok while it was not, or not long ago.
  Status CancelledWait(const Round& round, Clock::time_point now);
  Status Spend(const Status& why);

  Communicator& comm_;
  const Timeouts timeouts_;
  const Clock::time_point end_;  // Of the whole job.
  const std::atomic<bool>* cancel_;
  std::optional<Clock::time_point> cancel_seen_;
  const Communicator::Job job_;
  // The first of this job's tags: members speak on it, rank 0 on the next, letters on the third.
  const std::uint32_t tag_;
  // Counts the calls of this job; equal on all ranks where they make the same calls, which rank 0
  // checks with each contribution.
  std::uint32_t round_ = 0;
  // Once not ok, every Run returns it at once and nothing is sent any more.
  Status spent_;
  LivenessWatch watch_;
  FrameSender sender_;
  std::vector<std::unique_ptr<FrameReceiver>> from_;  // By rank; at the others only rank 0's.
  FrameSender data_out_;
  std::vector<std::unique_ptr<FrameReceiver>> data_in_;  // By rank, made when first asked for.
  std::unique_ptr<Heartbeat> heartbeat_;                 // Last: stops first.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_ROUND_H_
