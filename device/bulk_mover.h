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

// BulkMover moves the bytes of a BulkTransport (collective/comm/bulk_transport.h) between ranks.
// gpu/nccl_link.cc implements it over NCCL, tests/collective over shared memory and over messages.
// BulkTransport, not the mover, checks plans and handles deadlines of exchanges and failures of
// other ranks.

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

// One exchange: transfers that all ranks make together. A mover has one exchange at a time.
// `number` and `plan` are equal on all ranks.
struct BulkExchange {
  std::uint64_t number = 0;
  std::vector<BulkUnit> plan;
  std::vector<BulkMove> mine;  // This rank's transfers, in the order of the plan.
};

// Moves the bytes of exchanges between ranks. Not thread-safe. No call but Close blocks. After a
// call other than Check has failed, only Stop, Settled, Close and the destructor may be called.
class BulkMover {
 public:
  // Sends a message from rank 0's mover to OnBroadcast of all other ranks' movers, which receive
  // several messages in the order of sending.
  using Broadcast = std::function<void(std::string_view word)>;

  // The owner must have called Close.
  virtual ~BulkMover() = default;

  // Kind of mover, for reports: "memory", "messages", "nccl".
  virtual std::string kind() const = 0;
  // Checks that the mover can read and write this memory; kUnsupported if not.
  virtual Status Check(const BulkRange& range) = 0;
  // Prepares for exchanges: every rank calls Prepare before its first exchange, and again before
  // the first exchange after Release. Each rank repeats the call until it returns true, which may
  // depend on the other ranks; then Move may be called.
  virtual Result<bool> Prepare(const Broadcast& broadcast) = 0;
  virtual void OnBroadcast(std::string_view /*word*/) {}

  // Begins an exchange. `exchange` must live until it is done or Stop was called.
  virtual void Begin(BulkExchange& exchange) = 0;
  // Notes that the sources of these transfers (positions in `mine`) are ready.
  virtual void OnPut(const std::vector<std::size_t>& transfers) = 0;
  // Makes progress. True once all transfers of this rank are done.
  virtual Result<bool> Move() = 0;

  // For the error that says that transfer `late` did not end in time: text that names the other
  // transfers that may be the cause, if the mover cannot tell which one is. Otherwise empty.
  virtual std::string Suspects(const BulkMove& /*late*/) const { return {}; }

  // Aborts the exchange. Memory may still be written until Settled returns true.
  virtual void Stop() = 0;
  // Whether nothing accesses the memory of the aborted exchange any more.
  virtual Result<bool> Settled() = 0;
  // Frees memory that is needed only during exchanges. Called repeatedly until it returns true.
  virtual Result<bool> Release() = 0;
  // The last call before the destructor, and the only one that may block, briefly. Returns a log
  // message about work that is left running; empty if there is none.
  virtual std::string Close() { return {}; }
};

// One device's end of direct transfers between devices (NCCL). DeviceOps::OpenLink makes a link;
// MakeDeviceTransport combines the links of all ranks. Not thread-safe.
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  // Version of the link, which must be equal on all ranks: "NCCL 2.32.3".
  virtual std::string version() const = 0;
  // The UUID of the device, which must differ between ranks; empty: unknown.
  virtual std::string device() const = 0;
  // Makes the mover of rank `rank` of `ranks`. Called once. Does not block.
  virtual Result<std::unique_ptr<BulkMover>> MakeMover(int rank, int ranks) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_DEVICE_BULK_MOVER_H_
