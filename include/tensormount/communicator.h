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

// How long ranks wait for each other. A call that gives up names the rank it waited for. Values
// above a year mean "no limit"; values below 1 ms are raised to 1 ms.
struct Timeouts {
  // A rank that was silent for this long (no heartbeat, which a background thread sends, and no
  // message) counts as dead. The time starts when the rank was first heard of in this call, or when
  // an earlier call lost it. A rank that died between two calls is given up only after `arrival`,
  // because a live rank that has not joined the call yet is equally silent (except with
  // Communicator::BeatsAlways, as on MPI).
  std::chrono::milliseconds liveness{30'000};
  // Limit for a live rank that has not reached the same step (it may be evaluating). A save has
  // about ten such steps.
  std::chrono::milliseconds arrival{1'800'000};
  // Limit for the whole call on this rank. The wait in progress at that time fails and names its
  // ranks; the rank's own work (writing) is not interrupted. 0: no limit.
  std::chrono::milliseconds total{0};
};

// A fixed group of ranks that exchange messages; implemented for threads, processes, TCP, MPI and
// callbacks. Collective operations use only this interface (collective/comm/collective.h).
//
// Nonblocking: Send and Receive return at once, and Test reports completion. Between one pair of
// ranks, messages of one tag arrive in order. Thread-safe: a heartbeat thread calls Progress()
// while another thread waits for a request. No call of this interface blocks, except WaitForChange;
// the destructor of some implementations waits for other ranks, for a limited time.
class TENSORMOUNT_EXPORT Communicator {
 public:
  using Request = std::uint64_t;

  // Largest tag, which every MPI supports. Collective operations use the upper half of the tags.
  static constexpr std::uint32_t kMaxTag = 32767;

  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Kind of transport, for reports: "threads", "sockets", "tcp", "mpi", or the host's own text.
  virtual std::string kind() const = 0;

  // Starts to send `view`, which must be packed and stay valid until Test reports completion or
  // Cancel returns. Any size, over 2 GiB too. kUnsupported for device memory that this
  // implementation cannot access, kInvalidArgument for a rank outside [0, size), a tag over kMaxTag
  // or a view that is not packed. Test reports a dead peer. Small messages are buffered (Test
  // reports completion before the peer receives), and are delivered even if the sender has left;
  // large ones may wait for the receiver.
  virtual Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) = 0;
  // Starts to receive into `view`, which must have the size of the message; otherwise Test returns
  // kDataLoss, the message is consumed, and the next receive gets the next message.
  virtual Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) = 0;
  // True if the request is complete; then, and after a failure, the request is forgotten.
  // kUnavailable names the rank if the peer is known to be dead (socket closed).
  virtual Result<bool> Test(Request request) = 0;
  // Forgets a request; its memory may be reused when Cancel returns. The message of a cancelled
  // receive goes to the next receive of that tag, or is dropped completely. The message of a
  // cancelled send arrives completely or not at all; a receive that had matched it ends with
  // kCancelled or kDataLoss. Later messages keep their order. A communicator stays usable after a
  // failed job, because leftover messages are recognised by their job number and checksum (Job).
  virtual void Cancel(Request request) = 0;

  // Moves messages and heartbeats. Cheap if there is nothing to do.
  virtual Status Progress() = 0;
  // Time since `rank` was last heard of (its Progress ran, or a message from it arrived). Always
  // maintained between rank 0 and every other rank; between others it may count messages only.
  virtual std::chrono::nanoseconds SilentFor(int rank) const = 0;
  // With `wanted` true: requests heartbeats between this rank and `rank`, too, until KeepUp was
  // called with false as often as with true. Both ranks must request them. Does nothing by default,
  // for implementations with heartbeats between all pairs.
  virtual void KeepUp(int /*rank*/, bool /*wanted*/) {}
  // Whether heartbeats run from the creation of the communicator to its end, so that SilentFor is
  // valid between library calls, too. True requires that all ranks create the communicator
  // together.
  virtual bool BeatsAlways() const { return false; }

  // Waiting for completion without constant tests: call Changes() before the tests and, if they
  // find nothing complete, WaitForChange with that number. Changes counts completed actions on this
  // rank's requests. WaitForChange returns after a change, after `most` at the latest, and perhaps
  // earlier. HearsChanges: whether actions of other ranks (a message that arrives) are counted. The
  // defaults count nothing, and WaitForChange sleeps for `most`.
  virtual std::uint64_t Changes() const { return 0; }
  virtual bool HearsChanges() const { return false; }
  virtual void WaitForChange(std::uint64_t seen, std::chrono::nanoseconds most);

  // Identifies one collective job, uniquely for all time. Every message of a job carries it, so
  // that a leftover message of a failed job, or of other ranks on the same channel, is never taken
  // for a message of a later job.
  struct Job {
    std::uint64_t number = 0;  // Counts from 0 in each group and channel.
    std::uint64_t group = 0;   // A hash of the channel and of the ranks.
    friend bool operator==(const Job&, const Job&) = default;
  };
  // The next job of this rank. Every rank begins the same jobs in the same order, separately in
  // each channel and subgroup.
  Job BeginJob();
  // Number of this communicator among the kChannels * kChannels channels of its root: the
  // subgroup's channel times kChannels, plus the channel of MakeChannel.
  std::uint32_t channel() const { return channel_; }

  // An object that the library keeps for this group between calls (plans of earlier saves): the
  // object `name`, created by `make` if it does not exist. A re-created channel finds the objects
  // of its predecessor.
  std::shared_ptr<void> Kept(const std::string& name,
                             const std::function<std::shared_ptr<void>()>& make);
  // Like Kept, but one object for all channels of these ranks. Concurrent jobs use it, so it must
  // be thread-safe.
  std::shared_ptr<void> KeptByRanks(const std::string& name,
                                    const std::function<std::shared_ptr<void>()>& make);

  // Number of channels, this communicator included, and so the limit of concurrent jobs.
  static constexpr std::uint32_t kChannels = 8;

 protected:
  // `parent`: the communicator of which this is a channel (`group` is empty), or a subgroup with
  // the ranks in `group`. They share state that outlives each of them: kept objects, and job
  // numbers (a re-created channel must not count from zero again, because messages of its
  // predecessor may still be in flight).
  explicit Communicator(std::uint32_t channel = 0, const Communicator* parent = nullptr,
                        std::string group = {});

 private:
  struct Root;
  const std::uint32_t channel_;
  const std::string group_;
  const std::shared_ptr<Root> root_;
};

// A channel: the same group, for collective jobs that run concurrently with those of `parent` and
// of other channels (an asynchronous save during training). Jobs of different channels never mix up
// messages. (Tags of the lower half, which collective jobs do not use, are passed through
// unchanged.) Sends nothing; every rank makes the same channels. `parent` must outlive the channel,
// whose destruction cancels outstanding requests. kInvalidArgument: channel is not in [1,
// kChannels), or `parent` is a channel itself.
TENSORMOUNT_EXPORT Result<std::unique_ptr<Communicator>> MakeChannel(Communicator& parent,
                                                                     std::uint32_t channel);

// Makes a subgroup: some ranks of `parent`, rank i being ranks[i]. Only these ranks call this
// function, with equal lists; it sends nothing. Subgroups that share ranks need different channels.
// A subgroup can have channels (MakeChannel) and subgroups of its own. `parent` must outlive the
// subgroup, whose destruction cancels outstanding requests. kInvalidArgument: a rank twice or out
// of range, this rank not in the list, channel not in [1, kChannels) or equal to the channel of the
// subgroup `parent`.
TENSORMOUNT_EXPORT Result<std::unique_ptr<Communicator>> MakeSubgroup(Communicator& parent,
                                                                      const std::vector<int>& ranks,
                                                                      std::uint32_t channel);

// Runs `body` on `ranks` threads of this process, each with its own Communicator, and joins them.
// Returns the first failure by rank. An exception in a body becomes kInternal.
TENSORMOUNT_EXPORT Status RunOnThreads(int ranks, const std::function<Status(Communicator&)>& body);

// The communicators that RunOnThreads uses, for callers with their own threads. The group lives as
// long as any of its members.
TENSORMOUNT_EXPORT std::vector<std::unique_ptr<Communicator>> MakeThreadGroup(int ranks);

// A communicator with one rank, this process.
TENSORMOUNT_EXPORT std::unique_ptr<Communicator> MakeSelfCommunicator();

}  // namespace tensormount

#endif  // TENSORMOUNT_COMMUNICATOR_H_
