// SPDX-License-Identifier: Apache-2.0
// SyncParts: makes many parts durable with one fsync of each data file and one of the journal,
// instead of two fsyncs for each part.
#include "fs/save/staged_part.h"

#include <map>
#include <utility>

namespace tensormount::fs {

// `status[i]` is the result for part i; each step continues with the parts that have no error.
Status SyncParts(StagedParts& shared, std::span<StagedPart* const> parts) {
  std::vector<PendingPart> pending(parts.size());
  std::vector<Status> status(parts.size());
  std::map<std::uint32_t, std::shared_ptr<DataFile>> files;
  // A part that cannot be prepared is skipped, but Finish still releases its lock.
  for (std::size_t i = 0; i < parts.size(); ++i) {
    status[i] = parts[i]->Prepare(pending[i]);
    if (!status[i].ok()) continue;
    for (const auto& file : pending[i].files) files.emplace(file->number(), file);
  }
  // Many small targets share one pack, which is synced once for all.
  std::map<std::uint32_t, Status> outcome;
  for (const auto& [number, file] : files) outcome[number] = file->Sync();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (const auto& file : pending[i].files) {
      if (status[i].ok()) status[i] = outcome[file->number()];
    }
    if (status[i].ok() && !pending[i].records.empty()) {
      status[i] = shared.files.journal()->Append(pending[i].records);
    }
    // Frees the records, which are in the file now; those of a large target take megabytes.
    pending[i].records = {};
  }
  // This sync also covers records that were appended before without a sync: discarded bytes and
  // removed objects.
  const Status journal =
      shared.files.journal() != nullptr ? shared.files.journal()->Sync() : Status();
  Status first;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (status[i].ok()) status[i] = journal;
    parts[i]->Finish(pending[i], status[i]);
    if (first.ok()) first = status[i];
  }
  // Closes the files that have no unsynced bytes, if this mount has many files.
  for (const auto& [number, file] : files) shared.files.CloseIdle(*file);
  shared.syncs.fetch_add(1, std::memory_order_relaxed);
  return first;
}

}  // namespace tensormount::fs
