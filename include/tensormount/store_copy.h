// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STORE_COPY_H_
#define TENSORMOUNT_STORE_COPY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

struct CopyOptions {
  // Bytes read per second, at most; 0: no limit.
  std::uint64_t limit_rate = 0;
  // For buckets whose server ignores conditional puts: copy nevertheless. If two processes write to
  // one name at once, one may then replace objects that the other has published.
  bool unconditional = false;
  // Set by another thread or a signal handler: the copy ends with kCancelled, also while it waits
  // for a server. May be null.
  const std::atomic<bool>* cancel = nullptr;
  // Progress callback with the bytes done and in all, on the caller's thread. A result other than
  // ok ends the copy with that error (for example kCancelled); the next copy continues it. May be
  // empty.
  std::function<Status(std::uint64_t done, std::uint64_t total)> watch;
};

// The result for one checkpoint. Byte counts are lengths of files.
struct CopiedCheckpoint {
  std::string name;
  std::string uuid;  // 32 hex digits, as in the source.
  std::uint64_t generation = 0;
  Status status;            // Ok: the destination has it, complete and durable.
  bool was_there = false;   // The destination already had it.
  std::uint64_t bytes = 0;  // Size of the whole checkpoint.
  std::uint64_t files = 0;
  std::uint64_t bytes_copied = 0;  // Read from the source.
  std::uint64_t files_copied = 0;
  std::uint64_t bytes_linked = 0;  // Shared with other checkpoints of the destination.
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_kept = 0;  // Kept from an interrupted copy.
  std::uint64_t files_kept = 0;
  // Files that were copied although another checkpoint of the destination has them, and why the
  // first of them was not linked.
  std::uint64_t links_refused = 0;
  std::string refusal;
  // Problems that are not failures: a damaged file in the destination that was not linked.
  std::vector<std::string> warnings;
};

struct CopyReport {
  std::string destination;                    // Resolved path of the store.
  std::vector<CopiedCheckpoint> checkpoints;  // In the order in which they were copied.
};

// Copies checkpoints to another store, under the same names and as the same checkpoints (uuid,
// generation, every byte), lowest generation first. `sources`: "STORE/NAME", "STORE/latest", or
// "STORE" for all. `destination`: a store, created if it does not exist.
//
// A data file that another checkpoint of the destination already has is hard-linked instead of
// copied; in a bucket (s3://) the server copies it. Every byte is verified, also of linked and kept
// files. A checkpoint appears under its name only when it is complete and durable; an interrupted
// copy leaves its files in the destination's .staging/ for one day, for the next copy. Generations
// decide which checkpoint of the destination is the latest, not the order of copying.
//
// Errors; except with kUnknown nothing of the failed checkpoint is visible:
//   kNotFound           no such source, or (kStale) it was deleted meanwhile
//   kInvalidArgument    the destination is the source, or cannot be a store; no source was given
//   kAlreadyExists      the destination has another checkpoint of this name, or this checkpoint
//                       under another name
//   kDataLoss           the source is damaged: names the file
//   kUnsupported        an adopted checkpoint, whose data lie outside the store
//   kReadOnly           the destination is a URL that cannot be written to (https://, hf://)
//   kBusy               another copy of the checkpoint is in progress
//   kResourceExhausted  no space
//   kUnknown            cannot tell whether the checkpoint is published; or it is, but a power
//                       cut may undo that
// If one of several sources fails, the others are still copied, and each error is in the report; an
// error that affects all (no space, a failing destination, the watch) fails the call. Checkpoints
// copied before stay. Uses one thread; any process may copy, save and remove in both stores
// meanwhile.
//
//   const auto copied = CopyCheckpoints({"STORE/step-1000"}, "/backup/STORE");
//   if (!copied.ok()) return copied.status();
TENSORMOUNT_EXPORT Result<CopyReport> CopyCheckpoints(const std::vector<std::string>& sources,
                                                      const std::string& destination,
                                                      const CopyOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_STORE_COPY_H_
