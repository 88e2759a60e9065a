// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STORE_COPY_H_
#define TENSORMOUNT_STORE_COPY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

struct CopyOptions {
  // Bytes a second, of those that are read; 0: as fast as it goes.
  std::uint64_t limit_rate = 0;
  // Told now and then how many bytes are done, and in all; on the caller's thread. What it returns
  // other than ok ends the copy, which fails with it (kCancelled, say) and can be gone on with. May
  // be empty.
  std::function<Status(std::uint64_t done, std::uint64_t total)> watch;
};

// What became of one checkpoint. Numbers of bytes are lengths of files.
struct CopiedCheckpoint {
  std::string name;
  std::string uuid;  // 32 hex digits, as in the source.
  std::uint64_t generation = 0;
  Status status;            // Ok: it is in the destination, whole and durable.
  bool was_there = false;   // Before this copy came to it.
  std::uint64_t bytes = 0;  // Of all of it.
  std::uint64_t files = 0;
  std::uint64_t bytes_copied = 0;  // Read from the source.
  std::uint64_t files_copied = 0;
  std::uint64_t bytes_linked = 0;  // Shared with other checkpoints of the destination.
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_kept = 0;  // Of an earlier copy that was interrupted.
  std::uint64_t files_kept = 0;
  // Files that were copied though another checkpoint of the destination has them, and why the first
  // of them was not linked.
  std::uint64_t links_refused = 0;
  std::string refusal;
  // What was out of order and is no failure: a damaged file in the destination that was not linked.
  std::vector<std::string> warnings;
};

struct CopyReport {
  std::string destination;                    // The store, resolved.
  std::vector<CopiedCheckpoint> checkpoints;  // In the order in which they were copied.
};

// Copies checkpoints to another store, under the same names and as the same checkpoints (uuid,
// generation, every byte), the lowest generation first. `sources`: "STORE/NAME", "STORE/latest", or
// "STORE" for all that it has. `destination`: a store, made where there is none.
//
// A data file that a checkpoint of the destination has already is linked (a hard link) and not
// copied. Every byte is compared with its hashes on the way, also of files that are linked or kept.
// Each checkpoint gets its name when it is whole and durable, and is not there before; what an
// interrupted copy wrote waits in the destination's .staging/ for the next one, a day. The latest
// of the destination is the highest generation, as ever: a copy of an older one does not become it.
//
// Fails, with nothing of the one that failed to be seen:
//   kNotFound           no such source, or (kStale) it was deleted meanwhile
//   kInvalidArgument    the destination is the source, or no place for a store
//   kAlreadyExists      the name is another checkpoint's there, or the checkpoint has another name
//   kDataLoss           the source is damaged: names the file
//   kUnsupported        an adopted checkpoint, whose data lie outside of the store
//   kBusy               another copy of it is under way
//   kResourceExhausted  no room
//   kUnknown            it is there, and a power cut may undo that
// Of several sources those that can be copied are, and the others have their status in the report;
// what stops all (no room, a failing destination, the watch) fails the call. Those that were copied
// before stay. One thread; any process may copy, save and remove in both stores meanwhile.
//
//   const auto copied = CopyCheckpoints({"STORE/step-1000"}, "/backup/STORE");
//   if (!copied.ok()) return copied.status();
TENSORMOUNT_EXPORT Result<CopyReport> CopyCheckpoints(const std::vector<std::string>& sources,
                                                      const std::string& destination,
                                                      const CopyOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_STORE_COPY_H_
