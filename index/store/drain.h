// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_DRAIN_H_
#define TENSORMOUNT_INDEX_STORE_DRAIN_H_

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "tensormount/retention.h"
#include "tensormount/status.h"
#include "tensormount/store_copy.h"

namespace tensormount {

struct DrainOptions {
  // `watch` is called while waiting, too, at least once a second.
  CopyOptions copy;
  // What stays in the destination, which is pruned at the begin and after each copy; unset:
  // everything. What was just copied stays until the next copy.
  std::optional<RetentionRules> retain;
  // Called after each checkpoint that was copied, or could not be.
  std::function<void(const std::string& destination, const CopiedCheckpoint&)> copied;
  std::function<void(const PruneReport&)> pruned;
  // A checkpoint that was removed before it was copied, or cannot be read; a prune that failed.
  std::function<void(const std::string&)> warned;
  // Everything that could be copied was copied.
  std::function<void()> caught_up;
  // A checkpoint, or all, cannot be copied now; the next try is after `wait`.
  std::function<void(const Status& why, std::chrono::seconds wait)> waiting;
};

// Copies every checkpoint of a store to another one, oldest first, and then each one soon after it
// is published, until `options.copy.watch` returns an error, which is the result. A checkpoint
// that cannot be copied (damaged, its name is taken) is reported once and left out, as is what the
// rules would remove at once. Failures that may pass (no connection, no space, credentials) are
// tried again after 1 to 60 seconds. Returns earlier only with errors that no later try can mend.
// Uses one thread, and those of the copies.
Status DrainStore(const std::string& source, const std::string& destination,
                  const DrainOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_DRAIN_H_
