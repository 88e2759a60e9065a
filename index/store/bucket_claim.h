// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_BUCKET_CLAIM_H_
#define TENSORMOUNT_INDEX_STORE_BUCKET_CLAIM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/object_writer.h"
#include "index/records/commit_record.h"

// Claims: who changes what lies below a name of a store in a bucket (docs/format.md, "Stores in
// buckets"). Objects cannot be renamed, so a copy writes them at their final keys. As long as there
// is no COMMIT, the claim says whose they are. Objects below a name that has neither a COMMIT nor a
// claim are not ours, and are never touched.

namespace tensormount::bucket {

enum class Purpose {
  kCopy,     // The checkpoint `uuid` is being copied to this name.
  kRemoval,  // The checkpoint was removed; its objects are to be deleted.
};

struct Claim {
  std::string path;  // STORE/.claims/NAME
  std::string name;
  Uuid uuid;
  Purpose purpose = Purpose::kCopy;
  std::string by;                    // "HOST, process 123", for messages.
  std::string commit;                // Of a removal: the bytes of COMMIT.
  std::string etag;                  // Of the claim's object.
  std::int64_t renewed_seconds = 0;  // By the clock of the server, in seconds since 1970.
  // The server knows no conditions of puts, or must not be asked for them.
  bool unconditional = false;
  // Whether the claim is new, so that nothing of an earlier copy can be there.
  bool is_new = false;
};

// The claim of a name; nullopt: none. kDataLoss: the object is no claim.
Result<std::optional<Claim>> Read(ObjectWriter& writer, const std::string& store,
                                  const std::string& name);
// The names that have a claim, sorted.
Result<std::vector<std::string>> ClaimedNames(ObjectWriter& writer, const std::string& store);

// Claims a name for a copy, or takes over the claim of an earlier copy of the same checkpoint.
// kBusy: another checkpoint is being copied there, or a removal is not finished. kUnsupported: the
// server ignores or refuses conditions of puts, without which two copies at once could mix;
// `unconditional` accepts that.
Result<Claim> TakeForCopy(ObjectWriter& writer, const std::string& store, const std::string& name,
                          const Uuid& uuid, bool unconditional);
// Claims a name for the removal of its checkpoint. `commit`: the bytes of its COMMIT.
Result<Claim> TakeForRemoval(ObjectWriter& writer, const std::string& store,
                             const std::string& name, const Uuid& uuid, std::string commit);
// After the removal of COMMIT: puts the claim again if it is gone. (A copy that had just published
// may have deleted it, on a server without conditions of deletions.)
Status KeepRemoval(ObjectWriter& writer, const std::string& store, Claim claim);
// Turns a claim that nobody renewed any more into one for removal. kStale: somebody did renew it.
Status TakeOverForRemoval(ObjectWriter& writer, Claim& claim);
// Writes the claim again, so that gc sees that it is in use. kStale: somebody else took it over.
Status Renew(ObjectWriter& writer, Claim& claim);
// Deletes the claim, unless somebody else has taken it over.
Status Release(ObjectWriter& writer, const Claim& claim);
// Whether the claim is as it was written last.
Result<bool> IsOurs(ObjectWriter& writer, const Claim& claim);

// "last renewed 3 h ago by host, process 123".
std::string Describe(const Claim& claim, std::int64_t now);

}  // namespace tensormount::bucket

#endif  // TENSORMOUNT_INDEX_STORE_BUCKET_CLAIM_H_
