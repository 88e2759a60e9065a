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
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "base/thread.h"
#include "collective/comm/collective_frame.h"

namespace tensormount {

// Calls Progress at regular intervals from a thread of its own, so that the other ranks still hear
// from this rank while the owner's thread is in a system call. It is the only thread of a
// Collective. The thread uses only the communicator, whose Progress may run beside the owner's
// calls, and has no lock during Progress.
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
  Thread thread_;
};

// Ranks that were silent for too long in an earlier job of this group, on any channel, and have
// sent nothing since. Thread-safe.
class LostRanks {
 public:
  using Clock = std::chrono::steady_clock;
  void Add(int rank, Clock::time_point now);
  void Remove(int rank);
  std::map<int, Clock::time_point> All() const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Clock::time_point> since_;
};

// Decides which ranks are silent for too long and so count as lost.
//
//   heard of  ----- silent for `liveness` ----->  suspected
//   suspected ----- heard of again ------------>  heard of
//   suspected ----- still silent a heartbeat --> lost        (named in kDeadlineExceeded)
//
// The second look covers ranks that were stopped together with this one (a suspended machine):
// their heartbeats arrive at the moment in which all continue. Used only by the thread of the
// Collective; only LostRanks, shared with later jobs of the group, is locked. Rank 0 asks about
// every rank, a member about rank 0.
class LivenessWatch {
 public:
  using Clock = std::chrono::steady_clock;
  LivenessWatch(Communicator& comm, std::chrono::nanoseconds liveness);

  // `rank` sent something in this job: from now on its silence counts.
  void Join(int rank) { seats_[static_cast<std::size_t>(rank)].joined = true; }
  // Call Start at the begin of a wait and DetectPause in every iteration of its loop. A long gap
  // between two iterations means that this rank was stopped or starved, so silence during the gap
  // is not counted.
  void Start(Clock::time_point now);
  void DetectPause(Clock::time_point now);
  // Whether a rank is lost: it was silent for longer than `liveness` and is still silent one
  // heartbeat interval later, or it was lost in an earlier job and has sent nothing since.
  bool IsLost(int rank, Clock::time_point now);

 private:
  struct Seat {
    bool joined = false;
    bool suspected = false;
    Clock::time_point since;
    std::optional<Clock::time_point> lost_since;  // Set if lost in an earlier job and silent since.
  };
  Communicator& comm_;
  const std::chrono::nanoseconds liveness_;
  const std::chrono::nanoseconds confirm_;
  Clock::time_point base_;
  Clock::time_point last_iteration_;
  std::vector<Seat> seats_;
  const std::shared_ptr<LostRanks> lost_;
};

// Work of one rank that runs beside a round: the transfers of an exchange. Each Step runs on the
// thread that waits in the round, so it needs no locks. A Step must not wait, or this rank would
// not see the failure of another rank.
class LocalWork {
 public:
  virtual ~LocalWork() = default;
  // Does a part of the work, without waiting. Returns true once all work is done. Sets `moved` if
  // the work made progress: then Step is called again soon; if not, after a growing pause.
  virtual Result<bool> Step() = 0;
  bool moved = false;
  // Set if the work also makes progress without messages (by its own reads), which Changes() of the
  // communicator does not count.
  bool progresses_alone = false;
  // Ends the work. Afterwards nothing accesses the caller's memory.
  virtual void Cancel() = 0;
};

// How long a cancelled job still waits for other ranks. Ranks that come within this time learn of
// the cancellation from this rank's vote, and all agree; ranks that do not come cannot keep the job
// from ending.
inline constexpr std::chrono::seconds kCancelPatience{3};

enum class CollectiveOp : std::uint8_t {
  kAllGather = 1,
  kGather,
  kBroadcast,
  kAgree = 5,  // The number 4 is retired.
  kExchange,
  kTransfer,
  kDecide,
  kNeighborAllToAll,
};

// The one pattern that every collective operation uses:
//
//   member                                   rank 0
//   Contribute(status, payload)  ----------> Collect, for each rank: OnContribution
//   <- "waiting" --------------------------- Remind: to ranks that came or have work, while others
//                                            are missing
//   <- verdict ----------------------------- MakeVerdict (decide), SendVerdict
//
// See Collective for the guarantees. The topology is a star, not a tree: each rank waits for one
// other rank only, and the rank that knows who is missing decides. The price is N - 1 messages each
// way at rank 0. Large data goes from rank to rank instead (Run, NeighborAllToAll).
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
    std::string_view payload;  // Sent if `mine` is ok.
    // Runs at rank 0 once every rank came and none failed: makes the verdict from the payloads,
    // which are ordered by rank and may be moved from.
    std::function<Status(std::vector<std::string>& parts, std::string* verdict)> decide;
    // Optional, not owned. This rank contributes when its work is done. A round with work fails on
    // all ranks if the work of one rank fails.
    LocalWork* work = nullptr;
    std::chrono::nanoseconds allowance{0};  // Added to `arrival` for the work.
  };
  using VerdictPayload = std::shared_ptr<const std::string>;
  // Runs one round. Returns the verdict's payload, the same on every rank, or the verdict's
  // failure.
  Result<VerdictPayload> Run(const Round& round);

  void IgnoreCancel() { cancel_ = nullptr; }

  Communicator& comm() { return comm_; }
  // Messages between any two ranks beside the rounds: frames of kind kLetter, and the data that
  // they announce, on data_tag() and in the same order on both sides.
  std::uint32_t data_tag() const { return tag_ + 2; }
  FrameSender& data_out() { return data_out_; }
  FrameReceiver& data_in(int from);
  // The time limit for moving `bytes` at the slowest supported rate, 8 MB/s.
  static std::chrono::nanoseconds AllowanceFor(std::uint64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  struct Gathered;

  Result<VerdictPayload> RunRoot(const Round& round);
  Result<VerdictPayload> RunMember(const Round& round);
  Status Collect(const Round& round, Gathered& g, bool* moved);
  Status OnContribution(const Round& round, Gathered& g, int from, FrameReceiver::Received in);
  Status CheckRanksAlive(const Round& round, const Gathered& g);
  Status CheckArrivals(const Round& round, const Gathered& g, Clock::time_point now);
  void Remind(const Round& round, Gathered& g, Clock::time_point now);
  Status MakeVerdict(const Round& round, Gathered& g, std::string* verdict);
  Result<VerdictPayload> SendVerdict(const Round& round, const Status& failure, bool fatal,
                                     std::string verdict);
  Frame MakeFrame(const Round& round, Frame::Kind kind) const;
  void Contribute(const Round& round, const Status& mine);
  void SendFailure(Frame frame, const Status& why);  // Sends `why` to rank 0.
  // Waits until all frames are sent. Cancels the frames to lost receivers, and after `limit` all
  // frames that are still unsent.
  void Drain(Clock::duration limit);
  Status GiveUp(const Round& round, const Status& why);
  // The failure that ends a wait kCancelPatience after `cancel` was set; ok before that.
  Status CancelledWait(const Round& round, Clock::time_point now);
  Status Spend(const Status& why);

  Communicator& comm_;
  const Timeouts timeouts_;
  const Clock::time_point end_;  // Deadline of the whole job.
  const std::atomic<bool>* cancel_;
  std::optional<Clock::time_point> cancel_seen_;
  const Communicator::Job job_;
  // The first of this job's tags: members send on it, rank 0 on the next one, and frames of kind
  // kLetter use the third.
  const std::uint32_t tag_;
  // Counts the calls of this job. Rank 0 checks with each contribution that all ranks have the same
  // count.
  std::uint32_t round_ = 0;
  // The failure after which the object is unusable: every Run returns it at once and sends nothing.
  Status spent_;
  LivenessWatch watch_;
  FrameSender sender_;
  // Receivers by rank; a member has only the one for rank 0.
  std::vector<std::unique_ptr<FrameReceiver>> from_;
  FrameSender data_out_;
  std::vector<std::unique_ptr<FrameReceiver>> data_in_;  // By rank, made on first use.
  std::unique_ptr<Heartbeat> heartbeat_;                 // Declared last, so that it stops first.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_ROUND_H_
