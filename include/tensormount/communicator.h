// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COMMUNICATOR_H_
#define TENSORMOUNT_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// How long ranks wait for each other. A call that gives up names the rank it waited for. More than
// a year is no limit; less than a millisecond is one.
struct Timeouts {
  // A rank of which nothing was heard (its heartbeat, which runs beside the caller's thread, or a
  // message) for this long is taken for dead. Counts from when it was heard of in this call, or
  // where an earlier call lost it; a rank that died between two calls is given up after `arrival`,
  // because one that lives is as silent until it comes (but where BeatsAlways, as on MPI).
  std::chrono::milliseconds liveness{30'000};
  // A rank that lives but has not come to the same step after this long (it may be evaluating). A
  // save has about ten of them.
  std::chrono::milliseconds arrival{1'800'000};
  // The whole call, on this rank, from when it began: what it waits for then is given up, and
  // named. What a rank does itself meanwhile (writing) is not cut short. 0: no limit.
  std::chrono::milliseconds total{0};
};

// A fixed group of ranks that pass messages: the part that differs between threads, processes,
// MPI and NCCL. Collective operations are written once on top (collective/collective.h).
//
// Nonblocking: Send and Receive return at once, Test says whether the memory is free again or
// filled. Between one pair of ranks, messages of one tag arrive in order. Thread-safe: a heartbeat
// thread calls Progress() while the owner's thread waits. No call of this interface blocks.
class TENSORMOUNT_EXPORT Communicator {
 public:
  using Request = std::uint64_t;

  // Tags are at most this: what every MPI has. Collective uses the upper half.
  static constexpr std::uint32_t kMaxTag = 32767;

  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "threads", "sockets", "mpi": for reports.
  virtual std::string kind() const = 0;

  // `view` must be packed and stay valid until Test says done or Cancel returned. Any size, over
  // 2 GiB too. kUnsupported for device memory that this kind cannot reach, kInvalidArgument for a
  // rank outside [0, size), a tag over kMaxTag or a view that is not packed. A peer that is gone is
  // reported by Test. Small messages are taken over at once (Test says done before the peer
  // receives), and reach a peer that asks later even if the sender has left meanwhile; large ones
  // may wait for the receiver.
  virtual Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) = 0;
  // The sender's size must be equal: kDataLoss from Test where it is not (the message is consumed,
  // and the next receive gets the next one).
  virtual Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) = 0;
  // True once done; then, and after a failure, the request is forgotten. kUnavailable naming the
  // rank where the peer is known to be gone (socket closed).
  virtual Result<bool> Test(Request request) = 0;
  // Forgets a request; its memory may be reused when this returns. The message of a cancelled
  // receive stays for the next receive of that tag, or is dropped whole. That of a cancelled send
  // comes whole or not at all; a receive that had met it ends with kCancelled or kDataLoss. Those
  // behind it keep their order. What a failed job leaves in a communicator is told from what
  // the next ones say by their number and checksum (Job): the communicator stays good.
  virtual void Cancel(Request request) = 0;

  // Moves messages and heartbeats. Cheap where there is nothing to do.
  virtual Status Progress() = 0;
  // Time since `rank` was last heard of (its Progress ran, or a message of it came). Kept up
  // between rank 0 and every other; between others it may only count messages.
  virtual std::chrono::nanoseconds SilentFor(int rank) const = 0;
  // Asks that SilentFor be kept up between this rank and `rank` too, until it is called as often
  // with false. Both ranks ask. The default is for kinds that keep it up between all pairs.
  virtual void KeepUp(int /*rank*/, bool /*wanted*/) {}
  // Whether SilentFor counts between the calls of this library too, because ranks beat from when
  // the communicator is made until it goes, and all make it together.
  virtual bool BeatsAlways() const { return false; }

  // For callers that tested what they wait for and found nothing: Changes() before they test,
  // WaitForChange with what it said after. Changes counts each time something was done for a
  // request of this rank, by others or by its own calls; a kind may not count at all.
  // WaitForChange returns once there was one, after `most` at the latest, and perhaps earlier. The
  // default is for kinds that do not hear what others do (HearsChanges): it sleeps for `most`.
  virtual std::uint64_t Changes() const { return 0; }
  virtual bool HearsChanges() const { return false; }
  virtual void WaitForChange(std::uint64_t seen, std::chrono::nanoseconds most);

  // Names one collective job among all of its ranks, for ever: every message of a job carries it,
  // so that one left over from a failed job, or of other ranks on the same channel, is never taken
  // for one of the next.
  struct Job {
    std::uint64_t number = 0;  // From 0, one more each time, in each group and channel for itself.
    std::uint64_t group = 0;   // A hash of the channel and of the ranks.
    friend bool operator==(const Job&, const Job&) = default;
  };
  // The next job of this rank. Every rank begins the same jobs in the same order, on each channel
  // and in each subgroup for itself.
  Job BeginJob();
  // Which of the kChannels * kChannels channels of its root it is: that of its subgroup times
  // kChannels, plus that of MakeChannel.
  std::uint32_t channel() const { return channel_; }

  // What the library keeps for this group from one call to the next (plans of earlier saves): the
  // object of that name, made by `make` where there is none yet. A channel that is made anew finds
  // what was kept for it before.
  std::shared_ptr<void> Kept(const std::string& name,
                             const std::function<std::shared_ptr<void>()>& make);
  // The same, of these ranks whatever the channel: what is kept is used by jobs that run beside
  // each other, so it must be thread-safe.
  std::shared_ptr<void> KeptByRanks(const std::string& name,
                                    const std::function<std::shared_ptr<void>()>& make);

  // How many jobs can be under way at a time, each on a channel of its own.
  static constexpr std::uint32_t kChannels = 8;

 protected:
  // `parent`: of which this is a channel (`group` is empty), or a subgroup of the ranks that
  // `group` names. They share what outlives each of them: the numbers of jobs (a channel that is
  // made anew must not count from zero again: messages of its first life may still be under way)
  // and what is kept.
  explicit Communicator(std::uint32_t channel = 0, const Communicator* parent = nullptr,
                        std::string group = {});

 private:
  struct Root;
  const std::uint32_t channel_;
  const std::string group_;
  const std::shared_ptr<Root> root_;
};

// The same group once more, for collective jobs that run beside those of `parent` and of other
// channels (an asynchronous save beside the training): messages of one job are never taken for
// those of another. (Tags of the lower half, which collective jobs do not use, are handed on as
// they are.) Nothing is sent; every rank makes the same channels. `parent` must outlive it; what is
// outstanding when it is destroyed is cancelled.
// kInvalidArgument: channel is not in [1, kChannels), or `parent` is a channel itself.
TENSORMOUNT_EXPORT Result<std::unique_ptr<Communicator>> MakeChannel(Communicator& parent,
                                                                     std::uint32_t channel);

// Some ranks of `parent` as a group of their own, rank i being ranks[i] of it. Made by these ranks
// alone, all with the same list; nothing is sent. Groups that share ranks need different channels;
// each can have channels of its own (MakeChannel), and subgroups. `parent` must outlive it; what is
// outstanding when it is destroyed is cancelled.
// kInvalidArgument: a rank twice or out of range, this rank not among them, channel not in
// [1, kChannels) or that of the subgroup which `parent` is.
TENSORMOUNT_EXPORT Result<std::unique_ptr<Communicator>> MakeSubgroup(Communicator& parent,
                                                                      const std::vector<int>& ranks,
                                                                      std::uint32_t channel);

// Runs `body` on `ranks` threads of this process, each with its own Communicator, and joins them.
// Returns the first failure by rank. An exception in a body becomes kInternal.
TENSORMOUNT_EXPORT Status RunOnThreads(int ranks, const std::function<Status(Communicator&)>& body);

// The communicators that RunOnThreads hands out, for those who have threads of their own. The
// group lives as long as any of its members.
TENSORMOUNT_EXPORT std::vector<std::unique_ptr<Communicator>> MakeThreadGroup(int ranks);

// A group of one.
TENSORMOUNT_EXPORT std::unique_ptr<Communicator> MakeSelfCommunicator();

}  // namespace tensormount

#endif  // TENSORMOUNT_COMMUNICATOR_H_
