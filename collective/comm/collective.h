// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_H_
#define TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

namespace tensormount {

class CollectiveEngine;  // Defined in collective_round.h.
class LocalWork;
class FrameReceiver;  // Defined in collective_frame.h.
class FrameSender;

// Collective operations with deadlines over a Communicator; one object for one collective job (a
// save, a load). While the object lives, a heartbeat thread calls Progress(), so that the other
// ranks do not mistake a busy rank for a dead one.
//
// Every rank must make the same calls in the same order. `phase` names the call in messages
// ("validate", "publish") and is checked to be the same on all ranks. Rank 0 gathers, decides and
// distributes the verdict, so each call returns the same verdict on every rank that can still be
// reached. Failures:
//   kDeadlineExceeded  names the ranks that were silent (liveness) or late (arrival, total);
//   kUnavailable       names ranks whose process is gone, or that are in a later job;
//   kDataLoss          a message between ranks is damaged or missing;
//   kInternal          ranks are in different phases;
//   kCancelled         a call waited too long after `cancel` was set (see the constructor).
// After one of these the object is unusable: every further call returns that failure at once. After
// failures that callers pass in themselves (Agree, a failed Broadcast) the object stays usable. A
// rank that comes after the others gave up gets the same failure, if rank 0 still lives.
//
// How a failure travels: a rank that cannot go on tells rank 0 (by a contribution with a status, or
// by "gave up" while it waits for rank 0), and rank 0 ends the round with that verdict for all. A
// rank that hears nothing from rank 0 for `liveness` fails by itself. So a call ends at most a few
// seconds after the longest of its deadlines.
//
//   Collective collective(comm, timeouts);
//   TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(Prepare(), "prepare"));  // All, or nobody.
//   TENSORMOUNT_ASSIGN_OR_RETURN(const auto sizes, collective.AllGather(mine, "sizes"));
//
// `liveness` applies to a rank once this job has received something from it. Before that the rank
// may still be computing, with no heartbeat thread, and only `arrival` or its closed socket counts,
// unless the rank was lost in an earlier job and has sent nothing since.
// With Communicator::BeatsAlways ranks send heartbeats between jobs too, so `liveness` applies from
// the start.
// Not thread-safe. `comm` must outlive this.
class Collective {
 public:
  // Starts a new job of the communicator's group. All ranks of the group must create their
  // Collectives in the same order, as Save, Load and Validate do. `cancel` (may be null) is set by
  // the caller to end the job. Callers check the flag themselves and pass kCancelled to the next
  // call, where all ranks learn of it; a call that has waited for other ranks for kCancelPatience
  // (collective_round.h) since the flag was set returns kCancelled.
  Collective(Communicator& comm, const Timeouts& timeouts,
             const std::atomic<bool>* cancel = nullptr);
  ~Collective();

  // Ignores `cancel` from here on: a job that waits for the final verdict must not end before it.
  void IgnoreCancel();

  int rank() const;
  int size() const;

  // Returns the bytes of every rank, by rank, on every rank. All bytes pass through rank 0, so keep
  // them small.
  Result<std::vector<std::string>> AllGather(std::string_view mine, std::string_view phase);
  // Returns the bytes of every rank at rank 0, which keeps all of them in memory; an empty vector
  // on other ranks.
  Result<std::vector<std::string>> Gather(std::string_view mine, std::string_view phase);
  // Returns rank 0's bytes on every rank. If rank 0 passes a failure, every rank returns that
  // failure.
  Result<std::string> Broadcast(const Result<std::string>& mine, std::string_view phase);
  // Returns the same on all ranks: ok, or the failure of the lowest failing rank, with "rank N: "
  // before it and the number of other failing ranks. Codes and errno are kept. Call this before a
  // step that must happen on all ranks or on none; a rank that failed must call it with its
  // failure, because the others wait for every rank.
  Status Agree(const Status& mine, std::string_view phase);

  // The general form of the calls above, in one exchange: rank 0 passes the bytes of all ranks to
  // `decide`, whose result every rank returns. `decide` runs at rank 0 only and may move from the
  // parts. A rank that failed passes its failure as `able`, which is then the verdict of all ranks,
  // as in Agree.
  Result<std::string> Decide(
      std::string_view mine, std::string_view phase,
      const std::function<Result<std::string>(std::vector<std::string>&)>& decide,
      const Status& able = {});
  // Sends `letters` to their peers and returns the texts from the ranks in `from`, in that order.
  // Both sides must name the pair, each peer at most once; this rank itself and empty texts are
  // allowed. The receiver need not know the sizes, and a rank sees only its own messages. The cost
  // is one frame for each pair, plus what does not fit into the frame, and two rounds with rank 0.
  // Fails on all ranks with kInvalidArgument if a rank names a peer that does not exist, or names
  // one twice, and with kInternal if senders and receivers do not name the same pairs; the object
  // stays usable.
  struct Letter {
    int peer = 0;
    std::string text;
  };
  Result<std::vector<std::string>> NeighborAllToAll(std::span<const Letter> letters,
                                                    std::span<const int> from,
                                                    std::string_view phase);

  // Runs `work`, which sends and receives by itself: frames of kind kLetter by data_out() and
  // data_in(), and data that such a frame announces on comm() with data_tag(). Every rank passes
  // work. The call ends when the work of all ranks is done. If one rank's work fails, the call
  // fails on all ranks at once, and the object is unusable afterwards. `bytes` is the most that
  // this rank moves, for the time limit.
  Status Run(LocalWork& work, std::uint64_t bytes, std::string_view phase);
  Communicator& comm();
  std::uint32_t data_tag() const;
  FrameSender& data_out();
  FrameReceiver& data_in(int from);

 private:
  const std::unique_ptr<CollectiveEngine> engine_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_COLLECTIVE_H_
