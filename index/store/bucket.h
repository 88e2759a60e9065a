// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_BUCKET_H_
#define TENSORMOUNT_INDEX_STORE_BUCKET_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/object_writer.h"
#include "index/store/store.h"

// Stores in buckets (docs/format.md, "Stores in buckets"): what creates them, removes checkpoints
// and deletes leftovers. Reads, lists and verifications go through FileSystem as everywhere.

namespace tensormount::bucket {

// kInvalidArgument for a path with empty components, "." or "..", which would be parts of keys.
Status CheckStorePath(const std::string& path);
// Creates store.json unless there is one.
Status CreateSuperblock(ObjectWriter& writer, const std::string& path, std::string text);

// Removes a checkpoint from its name: claims the name, then deletes COMMIT. Its objects stay until
// gc. Returns the claim's path. `only`: only the checkpoint with this uuid. kStale: it has another.
// kBusy: another process changes the name. kUnknown: whether COMMIT was deleted is not known.
Result<std::string> MoveAway(FileSystem& fs, const std::string& store, const std::string& name,
                             const std::optional<Uuid>& only);
// Undoes MoveAway.
Status PutBack(FileSystem& fs, const std::string& store, const std::string& name);
// Bytes of the objects below a name.
Result<std::uint64_t> BytesBelow(FileSystem& fs, const std::string& path);

// Deletes the objects of removed checkpoints after `options.grace`, and what interrupted copies
// left after `options.staging_age`. `names`: only these; empty: all that are claimed.
void Collect(FileSystem& fs, const std::string& store, const Store::GcOptions& options,
             const std::vector<std::string>& names, Store::GcReport& report);

// What fsck says of claims and of names without a checkpoint.
Result<std::vector<Store::FsckFinding>> FindLeftovers(FileSystem& fs, const Store& store);

}  // namespace tensormount::bucket

#endif  // TENSORMOUNT_INDEX_STORE_BUCKET_H_
