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

// Makes the mover of one rank. `group` is the same on all of them, and another one each time.
using MakeBulkMover = std::function<Result<std::unique_ptr<BulkMover>>(std::uint64_t group)>;

class Collective;  // collective.h

// Memory of one rank for one unit.
struct BulkBlock {
  std::uint64_t unit = 0;           // Its position in the plan.
  const std::byte* from = nullptr;  // On the rank that sends it.
  std::byte* to = nullptr;          // On the rank that receives it. Both, of a unit to itself.
};

// Moves large blocks between the ranks of a group: the data plane of a load, beside a Communicator,
// which is the control plane. There are no tags. All ranks know the whole plan, so that a kind that
// needs the same order on both sides (NCCL) finds it there.
//
//   transport->Register({memory, size, device});
//   transport->Begin(plan);                 // The same on all ranks, in the same order.
//   transport->Put(blocks);                 // In any order, as they are ready, in many calls.
//   Status s = transport->Wait(deadline);   // Until this rank's units are moved.
//
// What a failure does: the transport is spent. Every further call returns the failure at once, and
// all other ranks are told, by rank 0 over the control plane, with their next Poll or Wait. So
// nobody waits longer than its own deadline, and mostly far less. Codes:
//   kDeadlineExceeded  names the unit and the rank that it did not come from or go to;
//   kUnavailable       a rank is gone: its end is closed, or it was destroyed in an exchange. (Over
//                      MPI, which does not say that a process is gone, it is kDeadlineExceeded.);
//   kInternal          ranks have different plans;
//   any other          as the kind or the caller of Abort gave it.
// kInvalidArgument of Register, Begin, Put and Wait says that the call asks for what cannot be; it
// does nothing and spends nothing. Whoever must have one verdict for all, agrees on it afterwards
// (Collective::Agree), or calls Poll from a LocalWork: a rank whose units are moved does not wait
// for those of others.
//
// Memory is the caller's. What was put must stay, and be left alone, until Done says so of its
// unit, Wait was ok, or after a failure Settle was ok: a device cannot be called back, and may
// write until then. What is sent must be there when it is put: work of a device that makes it has
// ended, or is ordered before the mover's stream.
//
// One thread at a time, but that Abort may be called from any. One transport at a time on each
// channel of a communicator (MakeChannel).
class BulkTransport {
 public:
  // All ranks of `control` together, which must outlive the transport; fails on all of them alike.
  // `make` makes this rank's mover. Takes as long as Timeouts::arrival at most, and `total`.
  static Result<std::unique_ptr<BulkTransport>> Make(Communicator& control,
                                                     const Timeouts& timeouts,
                                                     const MakeBulkMover& make);
  // The same as a part of a job, whose deadlines and cancellation hold, over its communicator.
  // Movers that are not connected after `patience` fail with kDeadlineExceeded; a failure of movers
  // does not spend the job.
  static Result<std::unique_ptr<BulkTransport>> Make(Collective& collective,
                                                     std::chrono::milliseconds patience,
                                                     const MakeBulkMover& make);
  // In the middle of an exchange, which it ends for all others with kUnavailable. What Settle did
  // not see end goes on touching memory; the log says so where it is left behind.
  ~BulkTransport();
  BulkTransport(const BulkTransport&) = delete;
  BulkTransport& operator=(const BulkTransport&) = delete;

  int rank() const { return control_.rank(); }
  int size() const { return control_.size(); }
  std::string kind() const { return mover_->kind(); }

  // Memory that blocks may lie in, until Unregister(data). kAlreadyExists where it overlaps with
  // what is registered, kUnsupported for memory that this kind cannot move.
  Status Register(const BulkRange& range);
  // kBusy in the middle of an exchange.
  Status Unregister(const std::byte* data);

  // Units of 0 bytes are done when this returns, also on ranks that do not put them. Does not wait.
  // kBusy before the exchange before was waited for.
  Status Begin(std::vector<BulkUnit> plan);
  // All of them or none: kInvalidArgument for a unit that is not this rank's, was put before, or
  // lies in no range that was registered. A unit of 0 bytes needs no block. Does not wait; what is
  // put moves on in Put, Poll and Wait.
  Status Put(std::span<const BulkBlock> blocks);
  // Whether this rank's part of a unit is over. False for one that is not its own.
  bool Done(std::uint64_t unit) const;
  // True once all units of this rank are moved. Never waits.
  Result<bool> Poll();
  // kInvalidArgument where this rank has not put all of its units. At the deadline the transport is
  // spent.
  Status Wait(const Deadline& deadline);

  // From any thread, more than once: the first failure is kept. `why` must not be ok.
  void Abort(const Status& why);
  // After a failure: ok once nothing touches the caller's memory any more. kDeadlineExceeded may
  // be asked again.
  Status Settle(const Deadline& deadline);
  // Gives back memory that only exchanges need, until the next Begin. All ranks together, between
  // two exchanges (kBusy).
  Status Release(const Deadline& deadline);

 private:
  BulkTransport(Communicator& control, std::uint64_t group, std::unique_ptr<BulkMover> mover);

  class Connecting;
  Result<bool> Prepared();
  // What came from the others, and what it means for this rank.
  Status HearNotes();
  Status OnNote(const BulkNote& note);
  Status CompareBegun();
  // The first failure: keeps it and tells all others. Returns what is kept.
  Status Fail(const Status& why);
  Status Failure() const;
  // Of a wait that came to its deadline.
  Status LateStatus() const;
  Status CheckBlock(const BulkBlock& block, const BulkMove& transfer) const;
  Status CheckRegistered(std::uint64_t unit, const std::byte* data, std::uint64_t bytes) const;
  std::size_t FindMine(std::uint64_t unit) const;  // mine.size(): none.
  bool AllPut() const { return put_ == exchange_.mine.size(); }
  template <typename Step>
  Status RepeatUntil(const Deadline& deadline, Step step, const char* what);

  Communicator& control_;
  BulkNotes notes_;
  const std::unique_ptr<BulkMover> mover_;
  std::map<const std::byte*, BulkRange> ranges_;  // By where they begin.

  BulkExchange exchange_;
  std::uint64_t plan_hash_ = 0;
  std::vector<bool> takes_part_;  // Ranks that have units in the exchange.
  std::size_t put_ = 0;           // Transfers of this rank that were put.
  bool prepared_ = false;
  bool idle_ = true;  // Nothing is under way.
  bool stopped_ = false;
  std::atomic<bool> heard_failure_ = false;  // Of another rank.

  // What other ranks said last (rank 0's view; at the others only rank 0's seat is used).
  struct Seat {
    std::uint64_t begun = 0;
    std::uint64_t plan = 0;
    bool left = false;
  };
  std::vector<Seat> seats_;

  mutable std::mutex mutex_;
  Status failure_;
};

// How long ranks are given to connect where nothing else says it.
std::chrono::milliseconds PatienceToConnect(const Timeouts& timeouts);

// Ranks that are threads of one process: one copy, by whoever comes second. kUnsupported where one
// is in another process. Host memory.
Result<std::unique_ptr<BulkTransport>> MakeMemoryTransport(Communicator& control,
                                                           const Timeouts& timeouts);
// By messages of `control` itself, of whatever kind. Host memory.
Result<std::unique_ptr<BulkTransport>> MakeMessageTransport(Communicator& control,
                                                            const Timeouts& timeouts);
// From device to device, by the way that they have for it (NCCL): memory of devices. All ranks
// together, also those that have no device or no way: `link` is OpenDeviceLink (device/devices.h)
// of this rank's device, or why there is none, which then is what all fail with. So no rank waits
// for one that cannot, longer than `timeouts`. The transport keeps what it needs of the device.
// kUnsupported also where versions differ, and where two ranks are on one device.
Result<std::unique_ptr<BulkTransport>> MakeDeviceTransport(
    Communicator& control, const Timeouts& timeouts, Result<std::unique_ptr<DeviceLink>> link);
// The same as a part of a job, as BulkTransport::Make.
Result<std::unique_ptr<BulkTransport>> MakeDeviceTransport(
    Collective& collective, std::chrono::milliseconds patience,
    Result<std::unique_ptr<DeviceLink>> link);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_BULK_TRANSPORT_H_
