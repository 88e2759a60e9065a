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

// The interface below BulkTransport (collective/comm/bulk_transport.h) that moves the bytes.
// Implementations: memory and messages (collective/comm/), and NCCL (gpu/nccl_link.cc).
// BulkTransport checks arguments and handles deadlines and failures of other ranks, so the device
// module needs no other rank code.

namespace tensormount {

// One transfer of a plan; its number is its position in the plan.
struct BulkUnit {
  int from = 0;
  int to = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const BulkUnit&, const BulkUnit&) = default;
};

// Memory that transfers may read or write.
struct BulkRange {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  Device device;
};

// A unit that this rank sends, receives, or both (a transfer to itself).
struct BulkMove {
  std::uint64_t unit = 0;
  int peer = 0;
  std::uint64_t bytes = 0;  // Size of the unit; never 0.
  bool sends = false;
  bool receives = false;
  const std::byte* from = nullptr;  // Source; its bytes are valid once `put` is true.
  std::byte* to = nullptr;          // Destination.
  bool put = false;
  bool done = false;  // Set by the mover when nothing accesses the move's memory any more.
};

// The current exchange, one at a time. All ranks have the same number and plan.
struct BulkExchange {
  std::uint64_t number = 0;
  std::vector<BulkUnit> plan;
  std::vector<BulkMove> mine;  // In the order of the plan.
};

// Moves the bytes of exchanges between ranks. Not thread-safe. No call blocks. A failure is final:
// only Stop, Settled and the destructor may follow.
class BulkMover {
 public:
  // Sends a message from rank 0's mover to the movers of all other ranks (OnBroadcast), in order.
  using Broadcast = std::function<void(std::string_view word)>;

  // Close has been called before.
  virtual ~BulkMover() = default;

  // Kind of mover, for reports: "memory", "messages", "nccl".
  virtual std::string kind() const = 0;
  // Whether this memory can be moved from or to; if not, kUnsupported or kInvalidArgument.
  virtual Status Check(const BulkRange& range) = 0;
  // Prepares for an exchange. Called repeatedly, on all ranks at the same time, until it returns
  // true; then Move may be called. Needed at the start, and after Release.
  virtual Result<bool> Prepare(const Broadcast& broadcast) = 0;
  virtual void OnBroadcast(std::string_view /*word*/) {}

  // Begins an exchange. `exchange` must live until it is done or Stop was called.
  virtual void Begin(BulkExchange& exchange) = 0;
  // Notes that the sources of these transfers (positions in `mine`) are ready.
  virtual void OnPut(const std::vector<std::size_t>& transfers) = 0;
  // Makes progress. True once all transfers of this rank are done.
  virtual Result<bool> Move() = 0;

  // If the mover cannot tell which of several transfers blocks the others: text for the error about
  // `late` that names the other transfers. Empty if it can tell.
  virtual std::string Suspects(const BulkMove& /*late*/) const { return {}; }

  // Aborts the exchange. Memory may still be written until Settled.
  virtual void Stop() = 0;
  // Whether nothing accesses the memory of the aborted exchange any more.
  virtual Result<bool> Settled() = 0;
  // Frees memory that only the next exchange needs. True once done.
  virtual Result<bool> Release() = 0;
  // The last call, after Settled or after waiting for Settled in vain; the only call that may
  // block, briefly. Returns a log message about work that is left running; empty if there is none.
  virtual std::string Close() { return {}; }
};

// One device's end of direct transfers between devices (NCCL). DeviceOps::OpenLink makes it;
// MakeDeviceTransport combines those of all ranks. Not thread-safe.
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  // Version of the link, which must be equal on all ranks: "NCCL 2.32.3".
  virtual std::string version() const = 0;
  // Identifies the device, of which only one rank may be a user (its UUID); empty: unknown.
  virtual std::string device() const = 0;
  // Makes the mover of rank `rank`. Called once. Does not block.
  virtual Result<std::unique_ptr<BulkMover>> MakeMover(int rank, int ranks) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_BULK_MOVER_H_
