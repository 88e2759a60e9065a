// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_MEETING_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_MEETING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/load.h"

#include "base/hash.h"
#include "collective/comm/collective.h"
#include "collective/load/load_plan.h"
#include "collective/load/request.h"
#include "collective/load/resolve.h"

// How the ranks of a load learn what they need to know of each other.
//
//   PrepareMeeting   local: encodes and hashes the request, resolves it against the index, and
//                    finds the plan that this rank has kept of an equal load
//   Meet             collective: rank 0 compares 64 bytes of each rank and says what else to send
//
// Two loads are "the same" if these are equal: the request (keys, shapes, regions, but not memory
// addresses), path and options, the checkpoint's identity, and the number and machines of ranks.

namespace tensormount {

// A plan that all ranks agreed on, kept for the next equal load. Immutable.
struct AgreedPlan {
  Hash128 mine;  // Hash of this rank's request, call, checkpoint, machine and exchange group.
  Hash128 job;   // Hash of the inputs of all ranks.
  std::shared_ptr<const ResolvedRequest> resolved;  // This rank's request.
  LoadNeeds needs;                                  // This rank's needs.
  int ranks_here = 1;                               // The most ranks on any one machine.
  LoadPlan plan;
  // Keys that some rank requests and that are not stored; sorted.
  std::vector<std::string> not_stored;
  std::vector<std::string> not_requested;  // Stored keys that no rank requests; sorted.
};

// One rank's part of the meeting, made locally.
struct MeetingPart {
  std::string request;  // The encoded request.
  Hash128 request_hash;
  Hash128 call;           // Hash of path, options and checkpoint identity.
  std::string call_text;  // EncodeCall.
  Hash128 mine;
  std::uint64_t machine = 0;
  int group = 0;
  bool on_device = false;                       // All tensors are on one device.
  std::shared_ptr<const AgreedPlan> kept_plan;  // Plan of an earlier equal load; null: none.
  std::shared_ptr<const ResolvedRequest> resolved;
  LoadNeeds needs;
};

// `identity`: hash that identifies the opened checkpoint; `far`: it is behind a server. Fails if
// the request can never be served (ResolvedRequest::refusal).
Result<MeetingPart> PrepareMeeting(Communicator& comm, const CheckpointIndex& index,
                                   const StateDict& request, std::string_view path,
                                   const Hash128& identity, bool far, const LoadOptions& options);

// Results of a meeting that are not part of the plan.
struct MeetingResult {
  bool plan_reused = false;
  bool on_devices = false;  // Every rank's tensors are all on one device.
};

// Collective; the verdict is the same on every rank. A rank whose PrepareMeeting failed passes the
// failure as `prepared`; only then may `index` be null.
//   1. 64 bytes from each rank: fingerprints of its request, of the call, and of the job whose plan
//      it has kept; machine, group and needs. If all have kept the plan of this job, the meeting
//      ends here.
//      If the calls differ, the ranks send them as text, and the error names the option.
//   2. The keys that are not stored, and a bit for each requested tensor; skipped if the options
//      ignore both.
//   3. Only if some rank needs the requests of the others (a proof by digest, an exchange): one
//      rank of each set of ranks with equal requests sends its request to all.
// `validate` is called between 1 and 2 if the plan is new and the options ask for validation.
Result<std::shared_ptr<const AgreedPlan>> Meet(Communicator& comm, Collective& collective,
                                               const CheckpointIndex* index,
                                               Result<MeetingPart> prepared,
                                               const LoadOptions& options,
                                               const std::function<Status()>& validate,
                                               MeetingResult& met);

// The device that all tensors of a request are on; nothing if there is none, or no tensor.
std::optional<Device> CommonDevice(const StateDict& request);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_MEETING_H_
