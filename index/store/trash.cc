// SPDX-License-Identifier: Apache-2.0
// Finds the reasons to keep entries of .trash. The uuid of an entry comes from its file UUID or
// from its COMMIT. The name of the entry is used only if neither has one, because the name may be
// wrong: a process that moved the wrong directory may have died before it corrected the name.
#include "index/store/trash.h"

#include <optional>

#include "index/records/store_paths.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount::trash {
namespace {

std::string PathOf(const std::string& store, const std::string& entry) {
  return JoinPath(JoinPath(store, store_paths::kTrashFolder), entry);
}

// Whether a readable checkpoint of the store has this uuid.
Result<bool> HasCheckpoint(FileSystem& fs, const std::string& store, const Uuid& uuid) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(fs, store));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, opened.List());
  for (const CheckpointListing& c : all) {
    if (c.problem.ok() && c.uuid == uuid) return true;
  }
  return false;
}

}  // namespace

Result<Hold> FindHold(FileSystem& fs, const std::string& store, const std::string& entry,
                      std::int64_t now) {
  const std::string path = PathOf(store, entry);
  const std::optional<Uuid> named = Uuid::Parse(std::string_view(entry).substr(0, 32));
  // A COMMIT that is not a regular file is ignored, because nobody can read it.
  const Result<FileInfo> commit = fs.LinkStat(JoinPath(path, store_paths::kCommitFile));
  const bool none = commit.ok() && commit.value().kind != FileKind::kFile;
  const Result<Uuid> lies =
      none ? Result<Uuid>(Status(Code::kNotFound, path)) : store_moves::ReadFolderUuid(fs, path);
  if (!lies.ok() && lies.status().code() != Code::kNotFound &&
      lies.status().code() != Code::kDataLoss) {
    return lies.status();
  }
  Hold kept;
  const std::optional<Uuid> uuid = lies.ok() ? std::optional(lies.value()) : named;
  if (!uuid) return kept;
  const auto add = [&](const std::string& why) {
    kept.why += (kept.why.empty() ? "" : "; ") + why;
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto pin, pins::Find(fs, store, *uuid, now));
  if (pin) {
    add("it is " + pins::Describe(*pin));
    kept.back_to = pin->name;
  }
  // A damaged BASE is ignored: after a power failure the BASE of a finished save may be empty. This
  // is safe, because a running save has its base open, and gc then cannot lock the base's COMMIT.
  const auto bases = pins::ReadBases(fs, store);
  if (!bases.ok() && bases.status().code() != Code::kDataLoss) return bases.status();
  if (bases.ok()) {
    if (const auto base = bases.value().find(*uuid); base != bases.value().end()) {
      add("a running save reuses its files: " + base->second);
    }
  }
  // Reads COMMIT, which is large in checkpoints of many ranks, so it is called only if needed.
  const auto published = [&] { return store_moves::ReadCommit(fs, path).ok(); };
  const bool aborted = entry.find(store_paths::kAbortedSuffix) != std::string::npos;
  if (lies.ok() && named && lies.value() != *named && !aborted && published()) {
    add("it is checkpoint " + lies.value().ToString() +
        ", moved here by the interrupted removal of another one");
    if (kept.back_to.empty()) kept.back_to = store_moves::NameInMark(fs, path);
  }
  if (kept.why.empty()) return kept;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool stands, HasCheckpoint(fs, store, *uuid));
  // The pin or save needs the checkpoint in the store, not this second copy.
  if (stands) return Hold();
  if (!published() || !CheckCheckpointName(kept.back_to).ok()) kept.back_to.clear();
  return kept;
}

Result<bool> MoveBack(FileSystem& fs, const std::string& store, const std::string& entry,
                      const Hold& kept) {
  if (kept.back_to.empty()) return false;
  const auto lock = pins::Lock(fs, store, 0);
  // Without the lock (no locks, full disk) a running removal cannot be detected, so nothing is
  // moved.
  if (lock.status().code() == Code::kBusy || (lock.ok() && lock.value() == nullptr)) return false;
  TENSORMOUNT_RETURN_IF_ERROR(lock.status());
  const std::string trash = JoinPath(store, store_paths::kTrashFolder);
  const std::string path = JoinPath(trash, entry);
  TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit commit, store_moves::ReadCommit(fs, path));
  // If several entries have this uuid, one may be damaged, so the user must choose one.
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(trash));
  for (const DirectoryEntry& e : entries) {
    if (e.name == entry || e.kind != FileKind::kDirectory) continue;
    const auto other = store_moves::ReadCommit(fs, JoinPath(trash, e.name));
    if (other.ok() && other.value().record.uuid == commit.record.uuid) return false;
  }
  const Status back = store_moves::PutBack(fs, store, kept.back_to, path);
  if (back.code() == Code::kAlreadyExists || back.code() == Code::kNotFound) return false;
  TENSORMOUNT_RETURN_IF_ERROR(back);
  return true;
}

}  // namespace tensormount::trash
