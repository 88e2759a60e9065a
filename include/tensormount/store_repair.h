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
  // Reads and compares everything, and changes nothing.
  bool dry_run = false;
  // Folders in which data of adopted checkpoints and links of foreign ones may lie, of `from`.
  std::vector<std::string> roots = {};
  // Told now and then how many bytes of data files are compared, and of how many; on the caller's
  // thread. What it returns other than ok ends the repair, which fails with it (kCancelled, say);
  // files that were repaired before stay so. May be empty.
  std::function<Status(std::uint64_t done, std::uint64_t total)> watch = {};
};

// A damaged file of the checkpoint.
struct RepairedFile {
  std::string file;    // Below the checkpoint: "COMMIT", "manifest/r0.tmm", "data/...".
  std::string damage;  // "the file is missing", "checksums differ in 2 of 40 stored ranges".
  std::uint64_t bytes_damaged = 0;
  std::uint64_t bytes_repaired = 0;  // Of these; in a dry run those that could be.
  bool whole = false;                // It is now, or would be.
  // Other checkpoints of the store that had the same file (a hard link) and have the new one now.
  std::vector<std::string> shared_with = {};
};

// What is damaged still.
struct RepairLeft {
  std::string file;    // As in RepairedFile.
  std::string object;  // "tensor w [0:16, :]", "object rng", or the file.
  std::uint64_t offset = 0;
  std::string reason;
};

struct RepairReport {
  std::string path;  // STORE/NAME
  std::string uuid;
  std::string from;  // As it was opened.
  bool dry_run = false;
  std::uint64_t bytes_checked = 0;
  std::vector<RepairedFile> files = {};  // None: nothing was damaged.
  std::vector<RepairLeft> left = {};     // None: the checkpoint is whole, or would be.
};

// Makes damaged, short and missing files of a checkpoint whole again. `path`: "STORE/NAME". `from`:
// another checkpoint that holds the same tensors: a copy, a checkpoint of ours that was cut
// otherwise, or one of another program; of a STORE that of the same name.
//
// Stored bytes are compared with their recorded hashes, 64 KiB at a time. What differs is read from
// `from` (the same file where that lists it alike, else the same cells of the tensor of that key,
// type and shape, or the object of that key), and taken only where its hash is the recorded one. So
// a wrong `from` repairs nothing and harms nothing. Manifests, index and COMMIT are taken byte for
// byte, of a copy of the same checkpoint; of a COMMIT of which one copy is good that is enough.
//
// Nothing is written in place: a new file is built in the store's .staging/, synced, and gets the
// name of the damaged one in one step, with the same name in every checkpoint that shares it. After
// a crash each name has the old file or the new one, and the next repair goes on. Readers that have
// the old file open go on with it. One repair at a time in a store; savers, readers, rm and gc may
// be at work meanwhile.
//
// What `from` does not give is in `left`, and the rest is repaired. Fails where nothing can be
// said:
//   kNotFound          no such checkpoint, or `from`
//   kInvalidArgument   `from` is the checkpoint itself
//   kDataLoss          COMMIT is lost, and `from` is no copy of this checkpoint
//   kUnsupported       an adopted checkpoint, whose data are files of another program
//   kBusy              another repair is under way in this store
//   kResourceExhausted no room for the new file
//
//   const auto repaired = RepairCheckpoint("STORE/step-1000", "/backup/STORE/step-1000");
//   if (!repaired.ok()) return repaired.status();
TENSORMOUNT_EXPORT Result<RepairReport> RepairCheckpoint(const std::string& path,
                                                         const std::string& from,
                                                         const RepairOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_STORE_REPAIR_H_
