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

// What the ranks of a BulkTransport tell each other beside the bytes: small messages of one size
// over the communicator, between rank 0 and every other one.
//
//   member                                rank 0
//   kBegin (number, hash of plan) ----->  compares it with its own
//   kFailed (status) ------------------>  tells all others
//   <----------------------- kFailed, kWord
//   kLeft ----------------------------->  its silence is no failure from here on
//
// A star, as in Collective: N - 1 messages wait at rank 0 and one at each other rank, whatever the
// plan, and no connection is made for it that is not there.

namespace tensormount {

struct BulkNote {
  enum Kind : std::uint8_t { kBegin = 1, kFailed = 2, kLeft = 3, kWord = 4 };
  Kind kind = kBegin;
  int from = 0;
  std::uint64_t exchange = 0;  // Number of the last one that the sender began.
  std::uint64_t plan = 0;      // Its hash.
  Status status;               // Of kFailed.
  std::string word;            // Of kWord: a mover's, up to kMaxWord bytes.
  static constexpr std::size_t kMaxWord = 256;
};

// Tell may be called from any thread, Poll from one at a time.
class BulkNotes {
 public:
  // `group` tells these notes from those of an earlier transport on the same channel, which may
  // still be on their way. `comm` must outlive this.
  BulkNotes(Communicator& comm, std::uint64_t group);
  ~BulkNotes();
  BulkNotes(const BulkNotes&) = delete;
  BulkNotes& operator=(const BulkNotes&) = delete;

  // A tag of the lower half, which collective jobs do not use: of the notes, and the one after it
  // of the bytes. Another one for each channel.
  static std::uint32_t TagOf(const Communicator& comm);

  // To all others at rank 0, else to rank 0. A failure to send shows as a rank that is gone.
  void Tell(BulkNote note);
  void TellAllBut(int rank, BulkNote note);
  // The next note that came. kUnavailable, with the rank: its end is closed.
  Result<std::optional<BulkNote>> Poll();

 private:
  // Taken over at once by every communicator.
  using Bytes = std::array<char, 1024>;
  struct Seat {
    int rank = 0;
    Bytes bytes{};
    std::optional<Communicator::Request> request;
    bool gone = false;  // And said so.
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
  std::vector<Seat> seats_;  // Whom this rank hears.
  std::mutex mutex_;
  std::list<Outgoing> sent_;  // Not taken over yet. Its memory must not move.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_BULK_NOTES_H_
