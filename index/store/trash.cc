// SPDX-License-Identifier: Apache-2.0
// See trash.h. What lies there counts by its COMMIT, and never by the name of its entry: whoever
// moved it may have died before he saw what it was.
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

// Whether a checkpoint of this uuid has a name in the store. One that cannot be read may be it.
Result<bool> Stands(FileSystem& fs, const std::string& store, const Uuid& uuid) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(fs, store));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, opened.List());
  for (const CheckpointListing& c : all) {
    if (c.problem.ok() && c.uuid == uuid) return true;
  }
  return false;
}

}  // namespace

Result<Kept> WhyKept(FileSystem& fs, const std::string& store, const std::string& entry,
                     std::int64_t now) {
  const std::string path = PathOf(store, entry);
  const std::optional<Uuid> named = Uuid::Parse(std::string_view(entry).substr(0, 32));
  // What is no file in the place of COMMIT says nothing, and nobody reads from it.
  const Result<FileInfo> commit = fs.LinkStat(JoinPath(path, store_paths::kCommitFile));
  const bool none = commit.ok() && commit.value().kind != FileKind::kFile;
  const Result<Uuid> lies =
      none ? Result<Uuid>(Status(Code::kNotFound, path)) : store_moves::ReadFolderUuid(fs, path);
  if (!lies.ok() && lies.status().code() != Code::kNotFound &&
      lies.status().code() != Code::kDataLoss) {
    return lies.status();
  }
  Kept kept;
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
  // A power cut may leave a BASE without its bytes: of a save that is over. Who is at work has his
  // base open, and is seen by the lock on its COMMIT.
  const auto bases = pins::ReadBases(fs, store);
  if (!bases.ok() && bases.status().code() != Code::kDataLoss) return bases.status();
  if (bases.ok()) {
    if (const auto base = bases.value().find(*uuid); base != bases.value().end()) {
      add("a save under way takes files of it: " + base->second);
    }
  }
  // Not before it matters: COMMIT is large where there are many ranks.
  const auto published = [&] { return store_moves::ReadCommit(fs, path).ok(); };
  const bool aborted = entry.find(store_paths::kAbortedSuffix) != std::string::npos;
  if (lies.ok() && named && lies.value() != *named && !aborted && published()) {
    add("it is checkpoint " + lies.value().ToString() +
        ", which an interrupted removal of another one took from its name");
    if (kept.back_to.empty()) kept.back_to = store_moves::NameInMark(fs, path);
  }
  if (kept.why.empty()) return kept;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool stands, Stands(fs, store, *uuid));
  if (stands) return Kept();  // What is held is held there.
  if (!published() || !CheckCheckpointName(kept.back_to).ok()) kept.back_to.clear();
  return kept;
}

Result<bool> MoveBack(FileSystem& fs, const std::string& store, const std::string& entry,
                      const Kept& kept) {
  if (kept.back_to.empty()) return false;
  const auto lock = pins::Lock(fs, store, 0);
  // Without locks nobody can tell whether a removal is under way.
  if (lock.status().code() == Code::kBusy || (lock.ok() && lock.value() == nullptr)) return false;
  TENSORMOUNT_RETURN_IF_ERROR(lock.status());
  const std::string trash = JoinPath(store, store_paths::kTrashFolder);
  const std::string path = JoinPath(trash, entry);
  TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit commit, store_moves::ReadCommit(fs, path));
  // Of several one may be damaged: people must choose.
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
