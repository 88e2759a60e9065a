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

// The messages of a save's ranks besides layouts and plans. Little-endian, never on disk. Decoders
// return kDataLoss for bytes that break a rule.

namespace tensormount {

// A rank's message before a step that all ranks must agree to.
struct Vote {
  Status status;
  bool cancel = false;  // The rank was asked to end the save.
};
std::string EncodeVote(const Vote& vote);
// The verdict over votes by rank: the failure of the lowest failing rank, with the number of other
// failures; if none failed, kCancelled naming the lowest rank that was asked to cancel; otherwise
// ok.
Status VerdictOf(std::span<const Vote> votes);
Status VerdictOf(std::span<const std::string> encoded);

// A rank's vote before the staging is made, with its MachineHash.
std::string EncodeBegin(const Vote& vote, std::uint64_t machine);
// The verdict over these votes. Sets `ranks_here` to the most ranks on any one machine.
Status VerdictOfBegin(std::span<const std::string> encoded, int& ranks_here);

// Rank 0's staging, or the failure to make it: the resolved store path and the names in it, so that
// ranks on other machines use the same directory, or notice that it is missing there. `ranks_here`:
// of VerdictOfBegin.
std::string EncodeStaging(const Status& status, const Staging& staging, int ranks_here);
Result<Staging> DecodeStaging(std::string_view bytes, int& ranks_here);

// A rank's report to rank 0, sent only when its data and its manifest are durable: rank 0 publishes
// once it has an ok report of every rank, and published data must survive a power failure.
struct WriterReport {
  Vote vote;
  std::uint64_t bytes = 0;
  std::uint64_t manifest_bytes = 0;
  std::uint64_t linked_manifest_bytes = 0;  // Size of the manifest of linked data; 0: none.
  LinkCounts linked;
  ReplicaFindings replicas;                // Findings about the keys that the rank checks.
  std::optional<CommonValue> rank_common;  // Common values of this rank alone.
  std::string nonfinite;                   // NonfiniteFindings::ToText, with Nonfinite::kWarn.
};
std::string EncodeReport(const WriterReport& report);
Result<WriterReport> DecodeReport(std::string_view bytes);

struct SaveVerdict {
  Status status;
  std::uint64_t bytes_written = 0;
  std::uint64_t replica_bytes_compared = 0;
  LinkCounts linked = {};                  // Sum over all ranks.
  std::vector<std::string> warnings = {};  // As in SaveReport.
};
std::string EncodeVerdict(const SaveVerdict& verdict);
Result<SaveVerdict> DecodeVerdict(std::string_view bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_SAVE_MESSAGES_H_
