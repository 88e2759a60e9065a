// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_BULK_TRANSPORT_H_
#define TENSORMOUNT_COLLECTIVE_COMM_BULK_TRANSPORT_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "base/deadline.h"
#include "collective/comm/bulk_notes.h"
#include "device/bulk_mover.h"

namespace tensormount {

// Makes the mover of one rank. `group` is the same on all ranks, and different in each call.
using MakeBulkMover = std::function<Result<std::unique_ptr<BulkMover>>(std::uint64_t group)>;

class Collective;  // Defined in collective.h.

struct BulkBlock {
  std::uint64_t unit = 0;           // Position in the plan.
  const std::byte* from = nullptr;  // The bytes to send; set on the sending rank.
  // Where to receive; set on the receiving rank. A unit from a rank to itself sets both pointers.
  std::byte* to = nullptr;
};

// Moves large blocks between the ranks of a group: the data plane of a load, beside the
// Communicator, which is the control plane. There are no tags. Every rank knows the whole plan,
// because a mover such as NCCL needs the same order on both sides.
//
//   transport->Register({memory, size, device});
//   transport->Begin(plan);                 // The same on all ranks, in the same order.
//   transport->Put(blocks);                 // In any order, as they are ready, in many calls.
//   Status s = transport->Wait(deadline);   // Until this rank's units are moved.
//
// After a failure the transport is unusable: every further call but Unregister and Settle returns
// the failure at once, and rank 0 tells all other ranks over the control plane; their next Poll or
// Wait returns it. So no rank waits longer than its own deadline. Codes:
//   kDeadlineExceeded  if units are late, names one of them, and the rank on its other side or the
//                      ranks that the mover suspects;
//   kUnavailable       a rank closed its end, or destroyed its transport in an exchange or before
//                      one that has units of it. (MPI does not report that a process is gone; there
//                      it is kDeadlineExceeded.)
//   kInternal          ranks have different plans;
//   any other          from the mover, the control plane or the caller of Abort.
// kInvalidArgument of Register, Unregister, Begin, Put and Wait reports an invalid call, which has
// no effect. A rank whose units are moved does not wait for those of other ranks. For one verdict
// on all ranks, call Collective::Agree afterwards, or Poll from a LocalWork.
//
// Memory stays the caller's. After Put, do not free or change a block until Done is true for its
// unit, Wait returned ok or, after a failure, Settle returned ok: a device transfer cannot be
// called back and may write until then. The bytes to send must be there at Put: the device work
// that makes them has ended, or is ordered before the mover's stream.
//
// Not thread-safe, except Abort, which any thread may call. At most one transport at a time on each
// channel of a communicator (MakeChannel).
class BulkTransport {
 public:
  // Collective over all ranks of `control`, with the same verdict on all of them. `control` must
  // outlive the transport. `make` makes this rank's mover. Each of its steps waits at most
  // Timeouts::arrival, and all of them together at most `total`.
  static Result<std::unique_ptr<BulkTransport>> Make(Communicator& control,
                                                     const Timeouts& timeouts,
                                                     const MakeBulkMover& make);
  // Like Make above, but within a job, under the job's deadlines and cancellation and over its
  // communicator. Movers that are not connected after `patience` fail with kDeadlineExceeded; after
  // a failure of movers the job can continue.
  static Result<std::unique_ptr<BulkTransport>> Make(Collective& collective,
                                                     std::chrono::milliseconds patience,
                                                     const MakeBulkMover& make);
  // Ends an exchange in progress with kUnavailable on all other ranks. A transfer that Settle did
  // not see end may still access the caller's memory; a log line reports it.
  ~BulkTransport();
  BulkTransport(const BulkTransport&) = delete;
  BulkTransport& operator=(const BulkTransport&) = delete;

  int rank() const { return control_.rank(); }
  int size() const { return control_.size(); }
  std::string kind() const { return mover_->kind(); }

  // Registers memory in which blocks may lie, until Unregister(data). Fails with kAlreadyExists if
  // the range overlaps a registered one, with kUnsupported if this kind of transport cannot move
  // the memory.
  Status Register(const BulkRange& range);
  // Ends the registration of the range that begins at `data`. Fails with kBusy during an exchange.
  Status Unregister(const std::byte* data);

  // Begins an exchange, without waiting. Units of 0 bytes need no Put. Fails with kBusy if the
  // previous exchange has not ended.
  Status Begin(std::vector<BulkUnit> plan);
  // Accepts all blocks or none: fails with kInvalidArgument for a unit that is not this rank's, was
  // put before, or lies outside the registered ranges. Does not wait; Put, Poll and Wait move the
  // blocks.
  Status Put(std::span<const BulkBlock> blocks);
  // Whether this rank has sent or received the unit. False for a unit of other ranks.
  bool Done(std::uint64_t unit) const;
  // Moves blocks without waiting. Returns true once all units of this rank are moved.
  Result<bool> Poll();
  // Waits until all units of this rank are moved. Fails with kInvalidArgument if this rank has not
  // put all of its units. The transport is unusable if the deadline passes.
  Status Wait(const Deadline& deadline);

  // Ends the transport on all ranks with the failure `why`, which must not be ok. Thread-safe. If
  // called more than once, the first failure is kept.
  void Abort(const Status& why);
  // After a failure: returns ok once nothing accesses the caller's memory any more. After
  // kDeadlineExceeded, Settle may be called again.
  Status Settle(const Deadline& deadline);
  // Frees memory that only exchanges need, until the next Begin. Collective, between two exchanges
  // (kBusy during one).
  Status Release(const Deadline& deadline);

 private:
  BulkTransport(Communicator& control, std::uint64_t group, std::unique_ptr<BulkMover> mover);

  class Connecting;
  Result<bool> Prepared();
  // Reads the notes of other ranks and applies them to this rank.
  Status ReadNotes();
  Status OnNote(const BulkNote& note);
  Status CheckSamePlans();
  // Keeps the first failure and reports it: rank 0 to all other ranks, another rank to rank 0,
  // unless it came from there. Returns the failure that is kept.
  Status Fail(const Status& why);
  Status Failure() const;
  Status LateStatus() const;
  Status CheckBlock(const BulkBlock& block, const BulkMove& transfer) const;
  Status CheckRegistered(std::uint64_t unit, const std::byte* data, std::uint64_t bytes) const;
  // Position of the unit in exchange_.mine; exchange_.mine.size() if it is not there.
  std::size_t FindOwnUnit(std::uint64_t unit) const;
  bool AllPut() const { return put_ == exchange_.mine.size(); }
  template <typename Step>
  Status RepeatUntil(const Deadline& deadline, Step step, const char* what);

  Communicator& control_;
  BulkNotes notes_;
  const std::unique_ptr<BulkMover> mover_;
  // Registered ranges, by the address of the first byte.
  std::map<const std::byte*, BulkRange> ranges_;

  BulkExchange exchange_;
  std::uint64_t plan_hash_ = 0;
  std::vector<bool> takes_part_;  // Ranks that have units in the exchange.
  std::size_t put_ = 0;           // Number of this rank's units that were put.
  bool prepared_ = false;
  bool idle_ = true;  // No exchange is in progress.
  bool stopped_ = false;
  std::atomic<bool> failure_received_ = false;  // Another rank reported a failure.

  // The contents of the last notes of a rank. Rank 0 has an entry for each rank; other ranks use
  // only that of rank 0.
  struct Seat {
    std::uint64_t begun = 0;
    std::uint64_t plan = 0;
    bool said_goodbye = false;
  };
  std::vector<Seat> seats_;

  mutable std::mutex mutex_;
  Status failure_;
};

// Time limit for ranks to connect, for callers that set none.
std::chrono::milliseconds DefaultConnectTimeout(const Timeouts& timeouts);

// Transport between devices by their own link (NCCL), for device memory. Collective over all ranks,
// including those without a device or a link: `link` is the result of OpenDeviceLink
// (device/devices.h) for this rank's device, and if it failed on one rank, all ranks fail with that
// status. So no rank waits longer than `timeouts` for one that cannot take part. The transport
// keeps the parts of the device that it needs. kUnsupported also if versions differ, or if two
// ranks share a device.
Result<std::unique_ptr<BulkTransport>> MakeDeviceTransport(
    Communicator& control, const Timeouts& timeouts, Result<std::unique_ptr<DeviceLink>> link);
// Like MakeDeviceTransport above, but within a job, as BulkTransport::Make.
Result<std::unique_ptr<BulkTransport>> MakeDeviceTransport(
    Collective& collective, std::chrono::milliseconds patience,
    Result<std::unique_ptr<DeviceLink>> link);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_BULK_TRANSPORT_H_
