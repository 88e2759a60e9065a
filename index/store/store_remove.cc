// SPDX-License-Identifier: Apache-2.0
// Store::Remove and RemoveUnlessHeld of store.h: what takes a checkpoint from its name
// (docs/semantics.md, "Who removes, and who holds"). One rename does it; whatever must not happen
// is looked for before and after it, since whoever holds a checkpoint looks for it after his hold
// is durable: one of the two sees the other.
#include "index/read/checkpoint.h"
#include "index/records/store_paths.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

// Whoever prunes a store of thousands of checkpoints is done by then.
constexpr double kPruneLockSeconds = 10;

}  // namespace

Status Store::Remove(std::string_view name, const RemoveOptions& options) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
  if (!options.force) return RemoveUnpinned(std::string(name));
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsThere(name).status());
  // Alone, or gc could move back what it finds pinned before the pins are gone, too.
  const auto lock = pins::Lock(*fs_, path_, kPruneLockSeconds);
  const Result<DecodedCommit> commit = store_moves::ReadCommit(*fs_, CheckpointPath(name));
  std::string entry;
  TENSORMOUNT_RETURN_IF_ERROR(MoveAway(name, nullptr, &entry));
  if (!commit.ok()) return {};
  // Its pin, else gc would keep it in .trash; but not that of a copy.
  const Uuid& uuid = commit.value().record.uuid;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> all, List());
  for (const CheckpointListing& c : all) {
    if (c.problem.ok() && c.uuid == uuid) return {};
  }
  return pins::RemovePins(*fs_, path_, uuid)
      .status()
      .WithContext("removed, but its pin could not be, which keeps its bytes in .trash");
}

Status Store::RemoveUnpinned(const std::string& name) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckWritable());
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsThere(name).status());
  TENSORMOUNT_RETURN_IF_ERROR(pins::CheckUnpinned(*fs_, path_, name));
  // Whoever pins waits for us to have done or undone it. Where there is no lock, or somebody else
  // has it for long, it is a matter of time alone.
  const auto lock = pins::Lock(*fs_, path_, kPruneLockSeconds);
  Status removed;
  for (int again = 0; again < 3; ++again) {
    TENSORMOUNT_RETURN_IF_ERROR(pins::CheckUnpinned(*fs_, path_, name));
    const Result<DecodedCommit> commit = store_moves::ReadCommit(*fs_, CheckpointPath(name));
    if (!commit.ok()) {
      // That is of this process, or another one has taken its place.
      const bool again_maybe = commit.status().code() == Code::kResourceExhausted ||
                               commit.status().code() == Code::kStale;
      if (again_maybe) return commit.status();
      // Of one without a uuid that can be read no pin can be made.
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
    // What stands at the name is to go, whichever it is.
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
  const Status back = entry.empty() ? Status(Code::kNotFound, "where it went is not known")
                                    : store_moves::PutBack(*fs_, path_, std::string(name), entry);
  const auto here = [&] {
    const auto commit = store_moves::ReadCommit(*fs_, CheckpointPath(name));
    return commit.ok() && commit.value().record.uuid == uuid;
  };
  // Gc has moved it back in our place; or it freed it: who holds it since is told that it is gone.
  if (back.code() == Code::kNotFound && !entry.empty() && !here()) {
    return {.status = moved};
  }
  if (!back.ok() && !(back.code() == Code::kNotFound && here())) {
    const std::string why = held.ok() ? *held.value() : held.status().message();
    return {.status = Status(
                Code::kUnknown,
                CheckpointPath(name) + ": " + why + ": " +
                    (here() ? "it was moved to .trash and back, but a power cut may undo that: "
                            : "it is in .trash, and could not be moved back from there: ") +
                    back.message())};
  }
  if (!held.ok()) return {.status = held.status()};
  return {.held = std::move(held).value()};
}

// What may be moved away.
Result<FileInfo> Store::CheckIsThere(std::string_view name) const {
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

// `entry`: where it went, a path in .trash; empty where that is not known.
Status Store::MoveAway(std::string_view name, const Uuid* only, std::string* entry) const {
  entry->clear();
  TENSORMOUNT_RETURN_IF_ERROR(CheckWritable());
  const std::string directory = CheckpointPath(name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, CheckIsThere(name));
  const auto replaced = [&] {
    return Status(Code::kStale, directory + ": another one has taken its place");
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
    // The truth is where the folder is: over NFS a rename that happened may be reported as failed.
    const Result<FileInfo> still = fs_->LinkStat(directory);
    if (still.ok() && still.value().device == info.device && still.value().inode == info.inode) {
      return moved;
    }
    if (!still.ok() && still.status().code() != Code::kNotFound) {
      return Status(Code::kUnknown, directory + ": removed or not: " + moved.message());
    }
    // Gone from its name. By us, or by somebody else who came first, who then says so.
    if (moved.code() == Code::kNotFound) {
      return Status(Code::kNotFound, directory + ": no such checkpoint");
    }
    const Result<std::string> found = store_moves::FindInTrash(*fs_, path_, info);
    if (found.ok()) *entry = found.value();
  }
  if (only != nullptr && went.ok()) {
    const Result<Uuid> there = store_moves::ReadFolderUuid(*fs_, *entry);
    if (there.ok() && there.value() != *only) {
      // At that very moment. What stands at the name now, if anything, is newer still.
      const Status back = store_moves::PutBack(*fs_, path_, std::string(name), *entry);
      return back.ok() ? replaced() : back;
    }
  }
  const std::string there = entry->empty() ? JoinPath(trash, "unknown") : *entry;
  const Status synced = fs_->SyncMovedFolder(there, trash, path_);
  if (!synced.ok()) {
    return Status(Code::kUnknown,
                  directory + ": removed, but a power cut may undo it or not: " + synced.message());
  }
  return Status();
}

}  // namespace tensormount
