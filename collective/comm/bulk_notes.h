// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_BULK_NOTES_H_
#define TENSORMOUNT_COLLECTIVE_COMM_BULK_NOTES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

// Notes that the ranks of a BulkTransport send beside the data: small messages of one size over the
// communicator, between rank 0 and every other rank.
//
//   member                                rank 0
//   kBegin (number, hash of plan) ----->  compares it with its own
//   kFailed (status) ------------------>  tells all others
//   <----------------- kFailed, kMoverMessage, kGoodbye
//   kGoodbye -------------------------->  its closed end alone is no failure from here on
//
// The topology is a star, as in Collective: N - 1 receives wait at rank 0 and one at each other
// rank, whatever the plan, and no new connections are needed.

namespace tensormount {

struct BulkNote {
  enum Kind : std::uint8_t { kBegin = 1, kFailed = 2, kGoodbye = 3, kMoverMessage = 4 };
  Kind kind = kBegin;
  int from = 0;
  std::uint64_t exchange = 0;  // For kBegin, kGoodbye: number of the sender's last exchange.
  std::uint64_t plan = 0;      // For kBegin: hash of the plan of that exchange.
  Status status;               // For kFailed: the failure, with the rank that it began on.
  std::string mover_message;   // For kMoverMessage: a mover's bytes, up to kMaxMoverMessage.
  static constexpr std::size_t kMaxMoverMessage = 256;
};

// SendToAll is thread-safe; Poll is for one thread at a time.
class BulkNotes {
 public:
  // `group` tells these notes from those of an earlier transport on the same channel, which may
  // still be in flight. `comm` must outlive this.
  BulkNotes(Communicator& comm, std::uint64_t group);
  ~BulkNotes();
  BulkNotes(const BulkNotes&) = delete;
  BulkNotes& operator=(const BulkNotes&) = delete;

  // The tag of the notes for this channel; the next tag is for the data. Both are in the lower
  // half, which collective jobs do not use.
  static std::uint32_t TagOf(const Communicator& comm);

  // Sends a note: from rank 0 to all other ranks, from every other rank to rank 0. Failures to send
  // are not reported; a rank that is gone is found by Poll.
  void SendToAll(BulkNote note);
  void SendToAllExcept(int rank, BulkNote note);
  // Returns the next note that arrived, if any. Fails with kUnavailable, naming the rank, if a rank
  // has closed its end.
  Result<std::optional<BulkNote>> Poll();

 private:
  // Every communicator buffers a message of 1 KiB, so a note is sent without waiting for its
  // receiver.
  using Bytes = std::array<char, 1024>;
  struct Seat {
    int rank = 0;
    Bytes bytes{};
    std::optional<Communicator::Request> request;
    bool gone = false;  // The rank has left, and Poll has reported this.
  };
  struct Outgoing {
    Bytes bytes{};
    Communicator::Request request = 0;
  };

  Bytes Encode(const BulkNote& note) const;
  std::optional<BulkNote> Decode(const Bytes& bytes, int from) const;
  void SendTo(int rank, const Bytes& bytes);
  void DropSent();

  Communicator& comm_;
  const std::uint64_t group_;
  const std::uint32_t tag_;
  std::vector<Seat> seats_;  // The ranks with which this rank exchanges notes.
  std::mutex mutex_;
  std::list<Outgoing> sent_;  // Sends in progress; their memory must not move.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_BULK_NOTES_H_
