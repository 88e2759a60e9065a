// SPDX-License-Identifier: Apache-2.0
// StagingWriter: boxes and bytes of one staging, without names and handles.
#include "fs/save/staging_writer.h"

#include <algorithm>
#include <utility>

namespace tensormount::fs {
namespace {

std::vector<std::int64_t> NumbersOf(const Dims& dims) { return {dims.begin(), dims.end()}; }

Status ClosedError() {
  return Status(Code::kStale, "the staging directory was published or removed");
}

Status NoObjectError(const std::string& key, const Dims& index) {
  return Status(Code::kNotFound,
                "object " + key + index.ToString() + ": not written by this mount");
}

}  // namespace

StagingWriter::StagingWriter(FileSystem& fs, const Staging& staging, const std::string& incarnation)
    : registry_(std::make_shared<Registry>()),
      shared_(std::make_shared<StagedParts>(fs, staging, incarnation)) {}

// Both callbacks of a target refer to the registry weakly, because a target that a program has open
// may outlive the writer: on_first_write keeps the target, the deleter forgets a target that was
// never written.
Result<std::shared_ptr<TargetWriter>> StagingWriter::OpenTarget(const TensorMeta& meta,
                                                                const Box& box) {
  if (shared_->files.closed()) return ClosedError();
  TENSORMOUNT_ASSIGN_OR_RETURN(TargetGeometry geometry, TargetGeometry::Make(meta, box));
  TargetKey key(meta.key(), NumbersOf(box.begin()), NumbersOf(box.extent()),
                NumbersOf(meta.shape()), meta.bits());
  const std::lock_guard lock(registry_->mutex);
  TargetEntry& entry = registry_->targets[key];
  std::shared_ptr<TargetWriter> target = entry.open.lock();
  if (target == nullptr) {
    target = std::shared_ptr<TargetWriter>(
        new TargetWriter(shared_,
                         {meta.key(), box, meta.shape(), static_cast<std::uint8_t>(meta.bits())},
                         std::move(geometry), registry_->next_owner++,
                         [registry = std::weak_ptr(registry_), key] {
                           const auto r = registry.lock();
                           if (r == nullptr) return;
                           const std::lock_guard keep(r->mutex);
                           const auto at = r->targets.find(key);
                           if (at != r->targets.end()) at->second.kept = at->second.open.lock();
                         }),
        [registry = std::weak_ptr(registry_), key](TargetWriter* gone) {
          delete gone;
          const auto r = registry.lock();
          if (r == nullptr) return;
          const std::lock_guard forget(r->mutex);
          const auto at = r->targets.find(key);
          if (at != r->targets.end() && at->second.open.expired()) r->targets.erase(at);
        });
    entry.open = target;
  }
  return target;
}

Result<std::shared_ptr<BlobWriter>> StagingWriter::OpenObject(const std::string& key,
                                                              const Dims& index, bool create) {
  if (shared_->files.closed()) return ClosedError();
  const std::lock_guard lock(registry_->mutex);
  const auto at = registry_->objects.find({key, NumbersOf(index)});
  if (at != registry_->objects.end()) return at->second;
  if (!create) return NoObjectError(key, index);
  TENSORMOUNT_RETURN_IF_ERROR(CheckKey(key));
  auto blob = std::make_shared<BlobWriter>(shared_, key, index);
  registry_->objects.emplace(ObjectKey(key, NumbersOf(index)), blob);
  return blob;
}

Status StagingWriter::RemoveObject(const std::string& key, const Dims& index) {
  if (shared_->files.closed()) return ClosedError();
  std::shared_ptr<BlobWriter> blob;
  {
    const std::lock_guard lock(registry_->mutex);
    const auto at = registry_->objects.find({key, NumbersOf(index)});
    if (at == registry_->objects.end()) return NoObjectError(key, index);
    blob = at->second;
  }
  // The removal is recorded before the name is free, so that records of a new object under this
  // name come later.
  Status status = blob->Remove();
  // The record is synced, because a publish on another machine reads only durable records.
  if (JournalWriter* journal = shared_->files.journal(); status.ok() && journal != nullptr) {
    status = journal->Sync();
  }
  const std::lock_guard lock(registry_->mutex);
  const auto at = registry_->objects.find({key, NumbersOf(index)});
  if (at != registry_->objects.end() && at->second == blob) registry_->objects.erase(at);
  return status;
}

// The object is synced first, so that MoveTo has only to append two records: durable data under the
// new name, and the removal of the old name. Both names change in the registry only after the
// journal accepted the records.
Status StagingWriter::RenameObject(const std::string& key, const Dims& index,
                                   const std::string& to_key, const Dims& to_index) {
  if (shared_->files.closed()) return ClosedError();
  TENSORMOUNT_RETURN_IF_ERROR(CheckKey(to_key));
  const ObjectKey from(key, NumbersOf(index));
  const ObjectKey to(to_key, NumbersOf(to_index));
  if (from == to) return {};
  const std::lock_guard renames(registry_->renames);
  std::shared_ptr<BlobWriter> blob;
  std::shared_ptr<BlobWriter> replaced;
  {
    const std::lock_guard lock(registry_->mutex);
    const auto at = registry_->objects.find(from);
    if (at == registry_->objects.end()) return NoObjectError(key, index);
    blob = at->second;
    const auto there = registry_->objects.find(to);
    if (there != registry_->objects.end()) replaced = there->second;
  }
  TENSORMOUNT_RETURN_IF_ERROR(blob->Sync());
  if (replaced) TENSORMOUNT_RETURN_IF_ERROR(replaced->ReleaseName());
  if (const Status moved = blob->MoveTo(to_key, to_index); !moved.ok()) {
    if (replaced) replaced->RestoreName();
    return moved;
  }
  {
    const std::lock_guard lock(registry_->mutex);
    registry_->objects.erase(from);
    registry_->objects[to] = std::move(blob);
  }
  return shared_->files.journal()->Sync();
}

std::vector<StagingWriter::ObjectName> StagingWriter::Objects() const {
  std::vector<std::shared_ptr<BlobWriter>> blobs;
  {
    const std::lock_guard lock(registry_->mutex);
    for (const auto& [name, blob] : registry_->objects) blobs.push_back(blob);
  }
  std::vector<ObjectName> names;
  names.reserve(blobs.size());
  for (const auto& blob : blobs) names.push_back({blob->key(), blob->index(), blob->size()});
  return names;
}

// Parts are collected under the lock and kept alive by shared pointers, in the order of the maps,
// which is the same for all callers (SyncParts).
Status StagingWriter::SyncAll() {
  if (shared_->files.closed()) return ClosedError();
  std::vector<std::shared_ptr<StagedPart>> kept;
  {
    const std::lock_guard lock(registry_->mutex);
    for (const auto& [key, entry] : registry_->targets) {
      if (entry.kept != nullptr) kept.push_back(entry.kept);
    }
    for (const auto& [key, blob] : registry_->objects) kept.push_back(blob);
  }
  std::vector<StagedPart*> parts;
  parts.reserve(kept.size());
  for (const auto& part : kept) parts.push_back(part.get());
  return SyncParts(*shared_, parts);
}

std::string StagingWriter::journal_name() const {
  return shared_->files.journal() == nullptr ? "" : shared_->files.incarnation() + ".tmj";
}
std::uint64_t StagingWriter::journal_bytes() const {
  const JournalWriter* const journal = shared_->files.journal();
  return journal == nullptr ? 0 : journal->synced_bytes();
}

}  // namespace tensormount::fs
