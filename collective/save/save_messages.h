// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_SAVE_MESSAGES_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_SAVE_MESSAGES_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

#include "collective/save/replica_check.h"
#include "index/store/linking.h"
#include "index/store/store.h"

// What the ranks of a save say to each other besides layouts and plans. Little-endian, never on
// disk. Decoders give kDataLoss for bytes that break a rule.

namespace tensormount {

// A rank's say before a step that all must agree to.
struct Vote {
  Status status;
  bool cancel = false;  // It was asked to end the save.
};
std::string EncodeVote(const Vote& vote);
// The verdict over the votes by rank: the failure of the lowest failing rank, with how many others
// failed; else kCancelled naming the lowest rank that asked; else ok.
Status VerdictOf(std::span<const Vote> votes);
Status VerdictOf(std::span<const std::string> encoded);

// What rank 0 tells of the staging that it made, or why there is none: the store as it was resolved
// and the names in it, so that ranks on other machines look at the same folder, or notice that they
// do not.
std::string EncodeStaging(const Status& status, const Staging& staging);
Result<Staging> DecodeStaging(std::string_view bytes);

// What a rank tells rank 0 when its data and its manifest are durable.
// Not sooner: rank 0 publishes once it has an ok report of every rank, and what it publishes must
// survive a power failure.
struct WriterReport {
  Vote vote;
  std::uint64_t bytes = 0;
  std::uint64_t manifest_bytes = 0;
  std::uint64_t linked_manifest_bytes = 0;  // 0: it has none.
  LinkCounts linked;
  ReplicaFindings replicas;                // Of the keys that it owns.
  std::optional<CommonValue> rank_common;  // What it set for itself.
};
std::string EncodeReport(const WriterReport& report);
Result<WriterReport> DecodeReport(std::string_view bytes);

// How it ended, as rank 0 tells it.
struct SaveVerdict {
  Status status;
  std::uint64_t bytes_written = 0;
  std::uint64_t replica_bytes_compared = 0;
  LinkCounts linked = {};  // Of all ranks.
};
std::string EncodeVerdict(const SaveVerdict& verdict);
Result<SaveVerdict> DecodeVerdict(std::string_view bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_SAVE_MESSAGES_H_
