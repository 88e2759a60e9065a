// SPDX-License-Identifier: Apache-2.0
// Store::Remove and RemoveUnlessHeld of store.h (docs/steps.md, "Removal and holds"). One rename
// removes a checkpoint from its name. Holds (pins and, for removals by rule, running saves) are
// checked before and after the rename, unless the removal is forced. A process that pins a
// checkpoint looks for the checkpoint after its pin is durable, so at least one of the two
// processes sees the other.
#include "index/read/checkpoint.h"
#include "index/records/store_paths.h"
#include "index/store/bucket.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

// Longest wait for the removal lock, enough for a prune of thousands of checkpoints.
constexpr double kPruneLockSeconds = 10;

}  // namespace

Status Store::Remove(std::string_view name, const RemoveOptions& options) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  if (!options.force) return RemoveUnpinned(std::string(name));
  TENSORMOUNT_RETURN_IF_ERROR(CheckExists(name).status());
  // The lock keeps gc away, which could otherwise move the pinned checkpoint back before its pins
  // are removed.
  const auto lock = pins::Lock(*fs_, path_, kPruneLockSeconds);
  const Result<DecodedCommit> commit = store_moves::ReadCommit(*fs_, CheckpointPath(name));
  std::string entry;
  TENSORMOUNT_RETURN_IF_ERROR(MoveAway(name, nullptr, &entry));
  if (!commit.ok()) return {};
  // A pin would keep the data in .trash, so all pins of the checkpoint are removed. If another
  // checkpoint of the store is a copy with the same uuid, they protect the copy and stay.
  const Uuid& uuid = commit.value().record.uuid;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, List());
  for (const CheckpointListing& c : all) {
    if (c.problem.ok() && c.uuid == uuid) return {};
  }
  return pins::RemovePins(*fs_, path_, uuid)
      .status()
      .WithContext(
          "the checkpoint was removed, but its pin could not be removed and keeps the data in "
          ".trash");
}

Status Store::RemoveUnpinned(const std::string& name) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckChangeable());
  TENSORMOUNT_RETURN_IF_ERROR(CheckExists(name).status());
  TENSORMOUNT_RETURN_IF_ERROR(pins::CheckUnpinned(*fs_, path_, name));
  // A concurrent Pin waits for this lock until the checkpoint is removed or moved back. On a
  // filesystem without locks it waits for a limited time only.
  const auto lock = pins::Lock(*fs_, path_, kPruneLockSeconds);
  Status removed;
  for (int again = 0; again < 3; ++again) {
    TENSORMOUNT_RETURN_IF_ERROR(pins::CheckUnpinned(*fs_, path_, name));
    const Result<DecodedCommit> commit = store_moves::ReadCommit(*fs_, CheckpointPath(name));
    if (!commit.ok()) {
      // kResourceExhausted: this process lacks memory or descriptors. kStale: the checkpoint was
      // replaced. Neither means that COMMIT is damaged.
      const bool again_maybe = commit.status().code() == Code::kResourceExhausted ||
                               commit.status().code() == Code::kStale;
      if (again_maybe) return commit.status();
      // The uuid cannot be read, so only pins with this name could be checked (CheckUnpinned).
      std::string entry;
      return MoveAway(name, nullptr, &entry);
    }
    const auto holds = [&](const Uuid& uuid) -> Result<std::optional<std::string>> {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto pin,
                                   pins::Find(*fs_, path_, uuid, fs_->NowSeconds()));
      return pin ? std::optional(pins::Describe(*pin)) : std::nullopt;
    };
    const Removal removal = RemoveUnlessHeld(name, commit.value().record.uuid, holds);
    if (removal.held) return pins::Refusal(CheckpointPath(name), *removal.held);
    removed = removal.status;
    // kStale: another checkpoint has the name now, and the next attempt removes it.
    if (removed.code() != Code::kStale) return removed;
  }
  return removed;
}

Store::Removal Store::RemoveUnlessHeld(std::string_view name, const Uuid& uuid,
                                       const Holds& holds) const {
  const Status named = CheckCheckpointName(name);
  if (!named.ok()) return {.status = named};
  Result<std::optional<std::string>> held = holds(uuid);
  if (!held.ok()) return {.status = held.status()};
  if (held.value()) return {.held = std::move(held).value()};
  std::string entry;
  const Status moved = MoveAway(name, &uuid, &entry);
  if (!moved.ok() && moved.code() != Code::kUnknown) {
    return {.status = moved};
  }
  held = holds(uuid);
  if (held.ok() && !held.value()) {
    const std::string below = entry.empty() ? std::string() : entry.substr(path_.size() + 1);
    return {.status = moved, .entry = below};
  }
  const Status back =
      entry.empty() ? Status(Code::kNotFound, "the new name of the checkpoint in .trash is unknown")
                    : store_moves::PutBack(*fs_, path_, std::string(name), entry);
  const auto here = [&] {
    const auto commit = store_moves::ReadCommit(*fs_, CheckpointPath(name));
    return commit.ok() && commit.value().record.uuid == uuid;
  };
  // kNotFound: gc has already moved the checkpoint back, or has deleted it. If it was deleted, the
  // concurrent call of Pin returns an error.
  if (back.code() == Code::kNotFound && !entry.empty() && !here()) {
    return {.status = moved};
  }
  if (!back.ok() && !(back.code() == Code::kNotFound && here())) {
    const std::string why = held.ok() ? *held.value() : held.status().message();
    return {.status = Status(
                Code::kUnknown,
                CheckpointPath(name) + ": " + why + ": " +
                    (here() ? "it was moved to .trash and back, but a power failure may undo that: "
                            : "it is in .trash (`tensormount gc` moves it back) and could not be "
                              "moved back now: ") +
                    back.message())};
  }
  if (!held.ok()) return {.status = held.status()};
  return {.held = std::move(held).value()};
}

// Checks that there is a checkpoint to remove at this name.
Result<FileInfo> Store::CheckExists(std::string_view name) const {
  const std::string directory = CheckpointPath(name);
  Result<FileInfo> info = fs_->LinkStat(directory);
  if (info.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, directory + ": no such checkpoint");
  }
  if (!info.ok()) return info;
  const auto has = [&](std::string_view part) { return fs_->Exists(JoinPath(directory, part)); };
  if (info.value().kind != FileKind::kDirectory ||
      !(has(store_paths::kCommitFile) || (has("manifest") && has("data")))) {
    return Status(Code::kInvalidArgument, directory + ": not a checkpoint");
  }
  return info;
}

// Moves a checkpoint to .trash; if `only` is not null, only a checkpoint with this uuid. Sets
// `entry` to its path there; empty if the path is unknown.
Status Store::MoveAway(std::string_view name, const Uuid* only, std::string* entry) const {
  entry->clear();
  TENSORMOUNT_RETURN_IF_ERROR(CheckChangeable());
  const std::string directory = CheckpointPath(name);
  if (fs_->object_writer() != nullptr) {
    const std::optional<Uuid> wanted = only != nullptr ? std::optional(*only) : std::nullopt;
    TENSORMOUNT_ASSIGN_OR_RETURN(*entry, bucket::MoveAway(*fs_, path_, std::string(name), wanted));
    return {};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, CheckExists(name));
  const auto replaced = [&] {
    return Status(Code::kStale, directory + ": the checkpoint was replaced by another one");
  };
  if (only != nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit commit,
                                 store_moves::ReadCommit(*fs_, directory));
    if (commit.record.uuid != *only) return replaced();
  }
  const std::string trash = JoinPath(path_, store_paths::kTrashFolder);
  const Result<std::string> went = store_moves::MoveToTrash(*fs_, path_, directory, "", name);
  const Status moved = went.status();
  if (went.ok()) *entry = went.value();
  if (!moved.ok()) {
    // Over NFS a successful rename may be reported as failed, so the location of the directory
    // decides.
    const Result<FileInfo> still = fs_->LinkStat(directory);
    if (still.ok() && still.value().device == info.device && still.value().inode == info.inode) {
      return moved;
    }
    if (!still.ok() && still.status().code() != Code::kNotFound) {
      return Status(Code::kUnknown, "cannot tell whether " + directory + " was removed: " +
                                        moved.message() + "; run `tensormount fsck " + path_ + "`");
    }
    // The directory is no longer at its name: our rename moved it although an error was reported,
    // or another process moved it first (kNotFound). In the second case the other process reports
    // success.
    if (moved.code() == Code::kNotFound) {
      return Status(Code::kNotFound, directory + ": no such checkpoint");
    }
    const Result<std::string> found = store_moves::FindInTrash(*fs_, path_, info);
    if (found.ok()) *entry = found.value();
  }
  if (only != nullptr && went.ok()) {
    const Result<Uuid> there = store_moves::ReadFolderUuid(*fs_, *entry);
    if (there.ok() && there.value() != *only) {
      // Another checkpoint got the name just before the rename, so the wrong one was moved. It is
      // moved back, unless the name is taken again.
      const Status back = store_moves::PutBack(*fs_, path_, std::string(name), *entry);
      return back.ok() ? replaced() : back;
    }
  }
  const std::string there = entry->empty() ? JoinPath(trash, "unknown") : *entry;
  const Status synced = fs_->SyncMovedFolder(there, trash, path_);
  if (!synced.ok()) {
    return Status(Code::kUnknown,
                  directory + ": removed, but a power failure may undo it: " + synced.message());
  }
  return Status();
}

}  // namespace tensormount
