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

class CollectiveEngine;  // collective_round.h
class LocalWork;
class FrameReceiver;  // collective_frame.h
class FrameSender;

// Collective operations with deadlines over a Communicator; one object for one collective job
// (a save, a load). While it lives a heartbeat thread calls Progress(), so that a rank that is
// busy elsewhere is not taken for dead.
//
// Every rank must make the same calls in the same order; `phase` says in words what is being
// waited for and is checked to be the same on all ranks ("validate", "publish").
// Each call returns the same verdict on every rank that can still be reached: rank 0 gathers,
// decides and tells. Failures:
//   kDeadlineExceeded  names the ranks that were not heard of (liveness) or did not come (arrival);
//   kUnavailable       names ranks whose process is gone;
//   kInternal          ranks are in different phases.
// After one of these the object is spent: every further call returns that failure at once. What
// callers put in themselves (Agree, a failed Broadcast, lengths that differ) does not spend it.
// A rank that comes late, after the others gave up, gets the same failure where rank 0 lives.
//
// How a failure travels: who finds that it cannot go on tells rank 0 (a contribution with a status,
// or "gave up" outside of a round), rank 0 ends the round with that verdict for all, and whoever
// hears nothing of rank 0 for `liveness` fails by itself. So no call takes longer than the longest
// of its deadlines, and all who are told are told the same.
//
//   Collective collective(comm, timeouts);
//   TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(Prepare(), "prepare"));  // All, or nobody.
//   TENSORMOUNT_ASSIGN_OR_RETURN(const auto sizes, collective.AllGather(mine, "sizes"));
//
// Liveness counts once a rank was heard of in this job: before that it may be evaluating, with no
// heartbeat running, and only `arrival` (or its closed socket) speaks against it. Where ranks beat
// between jobs too (Communicator::BeatsAlways), it counts from the beginning.
// One thread at a time. `comm` must outlive this.
class Collective {
 public:
  // Numbers a new job of the communicator's group: all its ranks must make as many of them, in the
  // same order, which is what Save, Load and Validate do. `cancel`: where not null, set to end the
  // job. Callers look at it themselves, and bring it to the next call, where all ranks come to it
  // together; a call that has waited for others for kCancelPatience (collective_round.h) since then
  // ends with kCancelled, as at a deadline.
  Collective(Communicator& comm, const Timeouts& timeouts,
             const std::atomic<bool>* cancel = nullptr);
  ~Collective();

  // From here on the job is not cancelled any more: what it waits for is the verdict.
  void IgnoreCancel();

  int rank() const;
  int size() const;

  // Everybody's bytes, by rank, on every rank. They pass through rank 0: for what is small.
  Result<std::vector<std::string>> AllGather(std::string_view mine, std::string_view phase);
  // Everybody's bytes at rank 0; nothing elsewhere.
  // As much memory at rank 0 as all ranks give together.
  Result<std::vector<std::string>> Gather(std::string_view mine, std::string_view phase);
  // Rank 0's bytes on every rank. Where rank 0 calls it with a failure, that is what all return.
  Result<std::string> Broadcast(const Result<std::string>& mine, std::string_view phase);
  // Failures as data: ok on all ranks or the same failure on all: that of the lowest failing
  // rank, with "rank N: " before it and how many others failed. Codes and errno are kept.
  // The step before anything that must happen everywhere or nowhere: a rank that failed alone must
  // come here with its failure, since one that returned instead would leave the others waiting.
  Status Agree(const Status& mine, std::string_view phase);

  // The general form of the above: everybody's bytes go to rank 0, `decide` turns them into what
  // all are told, or into a failure that all return. One exchange. `decide` runs at rank 0 only and
  // may take the parts. A rank that has nothing to say because it failed comes with that, `able`,
  // which then is the verdict of all, as in Agree.
  Result<std::string> Decide(
      std::string_view mine, std::string_view phase,
      const std::function<Result<std::string>(std::vector<std::string>&)>& decide,
      const Status& able = {});
  // A message between every two ranks that both know of it: `letters` of this rank, and `from`, the
  // ranks that have one for it. Each names a rank once; to oneself is fine, and so is an empty
  // text. Returns the texts in the order of `from`. Sizes need not be known beforehand, and no rank
  // sees more than its own messages. A pair costs one frame, and what does not fit into it; ranks
  // that are no pair nothing, so that what few ranks own costs as many messages as there are ranks.
  // Ends with an Agree. On all ranks, without spending the object:
  // kInvalidArgument where one names a rank that is not there, or one twice; kInternal where
  // senders and receivers do not name the same pairs.
  struct Letter {
    int peer = 0;
    std::string text;
  };
  Result<std::vector<std::string>> NeighborAllToAll(std::span<const Letter> letters,
                                                    std::span<const int> from,
                                                    std::string_view phase);

  // Work of this rank that sends and receives by itself, piece by piece: letters by data_out() and
  // data_in(), and behind each, on comm() with data_tag(), what it announces with its checksum.
  // Every rank comes with some; the call ends when the work of all is done, and fails on all as
  // soon as that of one does (which spends this object). `bytes`: how many this rank moves at most,
  // for the time limit.
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
