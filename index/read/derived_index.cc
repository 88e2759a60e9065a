// SPDX-License-Identifier: Apache-2.0
// Where an index that fsck rebuilt lies (.derived/ of the store, by uuid) and whether it is the one
// that belongs to a COMMIT. A checkpoint itself is never changed.
//
// It is not put into the checkpoint, because that is immutable once published: COMMIT lists its
// files by hash, and copies and readers rely on that. .derived/ is keyed by uuid, so a checkpoint
// that is renamed finds it, and one that was replaced does not find that of another.
#include "index/read/derived_index.h"

#include <utility>

#include "index/read/checkpoint.h"
#include "index/records/store_paths.h"

namespace tensormount {

std::string DerivedDirectory(const std::string& directory, const Uuid& uuid) {
  return JoinPath(JoinPath(JoinPath(directory, ".."), store_paths::kDerivedFolder),
                  uuid.ToString());
}

Status WriteDerivedIndex(FileSystem& fs, const std::string& directory, const CommitRecord& commit) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Inventory inventory, RebuildInventory(fs, directory, commit));
  const std::string derived = JoinPath(JoinPath(directory, ".."), store_paths::kDerivedFolder);
  TENSORMOUNT_RETURN_IF_ERROR(fs.EnsureDirectory(derived));
  const std::string target = JoinPath(derived, commit.uuid.ToString());
  // Built aside and renamed: a reader sees a whole one or none. Files, then folders, are durable
  // before the rename.
  const std::string temporary = target + ".tmp-" + Uuid::Random().Short();
  const auto build = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(temporary));
    TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(JoinPath(temporary, "index")));
    CommitRecord record = commit;
    record.files.clear();
    TENSORMOUNT_ASSIGN_OR_RETURN(CommitRecord::Entry entry,
                                 CheckpointIndex::WriteSst(fs, inventory, commit.content_root,
                                                           temporary, std::string(kIndexName)));
    record.files.push_back(std::move(entry));
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.WriteFileDurably(JoinPath(temporary, "RECORD"), EncodeCommit(record)));
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(JoinPath(temporary, "index")));
    TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(temporary));
    Status moved = fs.RenameNoReplace(temporary, target);
    if (moved.code() == Code::kAlreadyExists) {
      // A derived copy is never the truth: an older one, perhaps damaged too, gives way.
      TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(target));
      moved = fs.RenameNoReplace(temporary, target);
    }
    TENSORMOUNT_RETURN_IF_ERROR(moved);
    return fs.SyncDirectory(derived);
  };
  const Status built = build();
  if (!built.ok()) (void)fs.RemoveTree(temporary);  // Gc takes what stays.
  return built.WithContext("rebuild the index of " + directory);
}

Result<std::shared_ptr<const CheckpointIndex>> OpenDerivedIndex(FileSystem& fs,
                                                                const std::string& directory,
                                                                const CommitRecord& commit) {
  const std::string derived = DerivedDirectory(directory, commit.uuid);
  const std::string path = JoinPath(derived, "RECORD");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, fs.ReadFile(path, kMaxCommitBytes));
  TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit decoded, DecodeCommit(bytes, path));
  // Anybody may have copied folders around in a store.
  if (decoded.record.uuid != commit.uuid || decoded.record.content_root != commit.content_root) {
    return Status(Code::kDataLoss, path + ": belongs to another checkpoint");
  }
  // It stands in for one that is damaged: a second damage must show now, not at some later read.
  return CheckpointIndex::OpenSst(fs, derived, decoded.record,
                                  /*check_bytes=*/~std::uint64_t{0});
}

}  // namespace tensormount
