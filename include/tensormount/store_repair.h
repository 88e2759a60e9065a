// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STORE_REPAIR_H_
#define TENSORMOUNT_STORE_REPAIR_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

struct RepairOptions {
  // Whether to only read and compare everything, and change nothing.
  bool dry_run = false;
  // For `from`: trusted directories for data of adopted checkpoints and links of foreign ones.
  std::vector<std::string> roots = {};
  // Progress callback with the bytes compared so far and in all, on the caller's thread. A result
  // other than ok ends the repair with that error (for example kCancelled); files repaired before
  // stay repaired. May be empty.
  std::function<Status(std::uint64_t done, std::uint64_t total)> watch = {};
};

// A damaged file of the checkpoint.
struct RepairedFile {
  std::string file;    // Relative to the checkpoint: "COMMIT", "manifest/r0.tmm", "data/...".
  std::string damage;  // "the file is missing", "checksum mismatch in 2 of 40 stored ranges".
  std::uint64_t bytes_damaged = 0;
  std::uint64_t bytes_repaired = 0;  // Part of bytes_damaged; in a dry run the repairable part.
  bool whole = false;                // The file is whole now; in a dry run, would be.
  // Other checkpoints of the store that shared the file (a hard link) and now share the new one.
  std::vector<std::string> shared_with = {};
};

// Damage that was not repaired.
struct RepairLeft {
  std::string file;    // Relative to the checkpoint, as RepairedFile::file.
  std::string object;  // "tensor w [0:16, :]", "object rng", or the file.
  std::uint64_t offset = 0;
  std::string reason;
};

struct RepairReport {
  std::string path;  // STORE/NAME
  std::string uuid;
  std::string from;  // Resolved path.
  bool dry_run = false;
  std::uint64_t bytes_checked = 0;
  std::vector<RepairedFile> files = {};  // Empty: nothing was damaged.
  std::vector<RepairLeft> left = {};     // Empty: the checkpoint is whole; in a dry run, would be.
};

// Repairs damaged, short and missing files of a checkpoint. `path`: "STORE/NAME". `from`: another
// checkpoint with the same tensors: a copy, one with other sharding, or one of another program; for
// a STORE, its checkpoint of the same name.
//
// Stored bytes are compared with their recorded hashes, 64 KiB at a time. Differing ranges are read
// from `from` (the same file if `from` records it identically, otherwise the same cells of the
// tensor of that key, type and shape, or the object of that key), and used only if they match the
// recorded hash. So a wrong `from` repairs nothing and harms nothing. Manifests, index and COMMIT
// are taken byte for byte from a copy of the same checkpoint; a COMMIT in which one of the two
// copies of the record is intact is repaired from that copy.
//
// Nothing is written in place: a new file is built in the store's .staging/, synced, and replaces
// the damaged one in every checkpoint that shares it. After a crash each name has the old file or
// the new one (or none, on a filesystem that cannot exchange two names), and the next repair
// continues. Readers that have the old file open keep it. Only one repair at a time in a store;
// saves, reads, rm and gc may run concurrently.
//
// What could not be repaired is in `left` (ranges that `from` does not provide, refused hard links,
// a COMMIT in use), and the rest is repaired. Errors:
//   kNotFound          no such checkpoint, or `from`
//   kInvalidArgument   `from` is the checkpoint itself
//   kDataLoss          COMMIT is lost, and `from` is not a copy of this checkpoint
//   kUnsupported       an adopted checkpoint, whose data are files of another program
//   kBusy              another repair is in progress in this store
//   kResourceExhausted no space for the new file
//
//   const auto repaired = RepairCheckpoint("STORE/step-1000", "/backup/STORE/step-1000");
//   if (!repaired.ok()) return repaired.status();
TENSORMOUNT_EXPORT Result<RepairReport> RepairCheckpoint(const std::string& path,
                                                         const std::string& from,
                                                         const RepairOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_STORE_REPAIR_H_
