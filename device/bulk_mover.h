// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DEVICE_BULK_MOVER_H_
#define TENSORMOUNT_DEVICE_BULK_MOVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

// The seam below BulkTransport (collective/comm/bulk_transport.h): what moves the bytes. Instances
// move through memory and messages (collective/comm/) and NCCL (gpu/nccl_link.cc). Arguments,
// failures of other ranks and deadlines are BulkTransport's; a mover only moves. So a device needs
// nothing of ranks to have a way to others, and nothing of it but this passes to the module that
// has it.

namespace tensormount {

// One transfer of a plan. Its number is its position there.
struct BulkUnit {
  int from = 0;
  int to = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const BulkUnit&, const BulkUnit&) = default;
};

// Memory that units may lie in.
struct BulkRange {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  Device device;
};

// A unit that this rank sends, receives, or both (one to itself).
struct BulkMove {
  std::uint64_t unit = 0;
  int peer = 0;
  std::uint64_t bytes = 0;  // Never 0: there is nothing to move then.
  bool sends = false;
  bool receives = false;
  const std::byte* from = nullptr;  // Where it sends, once `put`.
  std::byte* to = nullptr;          // Where it receives.
  bool put = false;
  bool done = false;  // Set by the mover: nothing touches its memory any more.
};

// What is under way: one at a time. All ranks have the same number and the same plan.
struct BulkExchange {
  std::uint64_t number = 0;
  std::vector<BulkUnit> plan;
  std::vector<BulkMove> mine;  // In the order of the plan.
};

// Of one thread at a time. No call waits. A failure is the end: only Stop, Settled and the
// destructor follow.
class BulkMover {
 public:
  // Says something to the movers of all other ranks (rank 0's) in OnWord; in order.
  using Tell = std::function<void(std::string_view word)>;

  // After Close.
  virtual ~BulkMover() = default;

  // "memory", "messages", "nccl".
  virtual std::string kind() const = 0;
  // kUnsupported, kInvalidArgument: this memory cannot be moved from or to.
  virtual Status Check(const BulkRange& range) = 0;
  // True once Move can move: called until then, at the begin and where Release gave back what it
  // needs. All ranks do so at the same time.
  virtual Result<bool> Prepare(const Tell& tell) = 0;
  virtual void OnWord(std::string_view /*word*/) {}

  // `exchange` lives until it is done, or Stop was called.
  virtual void Begin(BulkExchange& exchange) = 0;
  // These transfers (positions in `mine`) were put.
  virtual void OnPut(const std::vector<std::size_t>& transfers) = 0;
  // Moves what can be moved. True once all of this rank's is done.
  virtual Result<bool> Move() = 0;

  // Where it cannot tell which of several transfers holds the others up: `late` and those, in
  // words.
  virtual std::string Suspects(const BulkMove& /*late*/) const { return {}; }

  // Gives up what is under way. Memory may still be written until Settled.
  virtual void Stop() = 0;
  // Whether nothing touches the memory of what was stopped any more.
  virtual Result<bool> Settled() = 0;
  // Gives memory back that is needed again only by the next exchange. True once done.
  virtual Result<bool> Release() = 0;
  // The last call, after Settled or where that never came: the only one that may wait, a little.
  // What goes on all the same and is left behind, in words for the log; empty: nothing.
  virtual std::string Close() { return {}; }
};

// One device's end of a way to other devices by which ranks move bytes without the host (NCCL).
// DeviceOps::OpenLink gives it; MakeDeviceTransport makes a transport of those of all ranks. Of one
// thread at a time.
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  // What must be the same on all ranks: "NCCL 2.32.3".
  virtual std::string version() const = 0;
  // The device that only one rank may be on: the same text for all that are on it (its UUID).
  // Empty: not known.
  virtual std::string device() const = 0;
  // Once. Waits for nothing.
  virtual Result<std::unique_ptr<BulkMover>> MakeMover(int rank, int ranks) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_BULK_MOVER_H_
