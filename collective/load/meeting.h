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

// How the ranks of a load find out what they have to know of each other, and no more.
//
//   PrepareMeeting   alone: the request encoded and hashed, resolved against the index, and the
//   plan
//                    that this rank has kept of an earlier load of the same
//   Meet             together: rank 0 compares 64 bytes of each rank and says what is to be told
//
// What is hashed decides what makes two loads "the same": the request (keys, shapes, regions, not
// the memory they go to), path and options, the checkpoint's identity, number and machines of
// ranks.

namespace tensormount {

// A plan that all ranks agreed on, as it is kept for the next load of the same kind. Immutable.
struct AgreedPlan {
  Hash128 mine;  // This rank's part: its request, the call, the checkpoint.
  Hash128 job;   // Everybody's.
  std::shared_ptr<const Resolved> resolved;  // What this rank asks for.
  LoadNeeds needs;                           // Of this rank.
  int ranks_here = 1;  // On the machine that has most: on this one so many or fewer.
  LoadPlan plan;
  std::vector<std::string> not_stored;     // Of all ranks; sorted.
  std::vector<std::string> not_requested;  // Likewise.
};

// What one rank brings. Made without the others.
struct MeetingPart {
  std::string request;  // Encoded.
  Hash128 request_hash;
  Hash128 call;  // Path, options, and the identity of the checkpoint.
  Hash128 mine;
  std::uint64_t machine = 0;
  int group = 0;
  bool on_device = false;                     // TheDevice.
  std::shared_ptr<const AgreedPlan> at_hand;  // Null: none.
  std::shared_ptr<const Resolved> resolved;
  LoadNeeds needs;
};

// `identity`: of the checkpoint, as rank 0 opened it. Fails where the request can never be served
// (Resolved::refusal).
Result<MeetingPart> PrepareMeeting(Communicator& comm, const CheckpointIndex& index,
                                   const StateDict& request, std::string_view path,
                                   const Hash128& identity, const LoadOptions& options);

// What ranks tell each other and no plan keeps.
struct Met {
  bool plan_reused = false;
  bool on_devices = false;  // Every rank has a device that all its tensors are on.
};

// Collective; the verdict is the same on every rank, also where one could make no part of its own:
// `prepared` is then why. `index` is null only there.
//   1. 64 bytes from each rank: fingerprints of its request, of the call, and of the job whose plan
//      it has at hand; machine, group, what it needs. Where all have the plan of this very job,
//      that is all.
//   2. The keys that are not stored, and a bit for each tensor that is asked for; unless both sets
//      are ignored.
//   3. Only where some rank needs to know what the others want (a proof by digest, an exchange):
//      one rank of each set of equal requests sends its request to all.
// `validate` is called between 1 and 2 where the plan is a new one and the options ask for it.
Result<std::shared_ptr<const AgreedPlan>> Meet(Communicator& comm, Collective& collective,
                                               const CheckpointIndex* index,
                                               Result<MeetingPart> prepared,
                                               const LoadOptions& options,
                                               const std::function<Status()>& validate, Met& met);

// The one that all tensors of a request are on; nothing where there is none, or no tensor.
std::optional<Device> TheDevice(const StateDict& request);

// A number for this machine since it was started.
std::uint64_t ThisMachine();

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_MEETING_H_
