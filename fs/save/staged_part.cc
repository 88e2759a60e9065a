// SPDX-License-Identifier: Apache-2.0
// SyncParts: many parts become durable with one fsync of each data file and one of the journal,
// where a sync of each part by itself would cost two fsyncs a part.
#include "fs/save/staged_part.h"

#include <map>
#include <utility>

namespace tensormount::fs {

// `status[i]` is what part i will hear; each step only goes on with parts that are still well.
Status SyncParts(StagedParts& shared, std::span<StagedPart* const> parts) {
  std::vector<PendingPart> pending(parts.size());
  std::vector<Status> status(parts.size());
  std::map<std::uint32_t, std::shared_ptr<DataFile>> files;
  // A part that cannot be prepared is left out; the others go on. Its turn is given back by Finish
  // all the same.
  for (std::size_t i = 0; i < parts.size(); ++i) {
    status[i] = parts[i]->Prepare(pending[i]);
    if (!status[i].ok()) continue;
    for (const auto& file : pending[i].files) files.emplace(file->number(), file);
  }
  // Many small targets share one pack: it is synced once for all of them.
  std::map<std::uint32_t, Status> outcome;
  for (const auto& [number, file] : files) outcome[number] = file->Sync();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (const auto& file : pending[i].files) {
      if (status[i].ok()) status[i] = outcome[file->number()];
    }
    if (status[i].ok() && !pending[i].records.empty()) {
      status[i] = shared.files.journal()->Append(pending[i].records);
    }
    // Records of a large target take megabytes; they are in the file now.
    pending[i].records = {};
  }
  // Also what was appended without a sync before: what was forgotten or removed.
  const Status journal =
      shared.files.journal() != nullptr ? shared.files.journal()->Sync() : Status();
  Status first;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (status[i].ok()) status[i] = journal;
    parts[i]->Finish(pending[i], status[i]);
    if (first.ok()) first = status[i];
  }
  // Everything that was prepared in these files is durable, so their descriptors are not needed.
  for (const auto& [number, file] : files) shared.files.CloseIdle(*file);
  shared.syncs.fetch_add(1, std::memory_order_relaxed);
  return first;
}

}  // namespace tensormount::fs
