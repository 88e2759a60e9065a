// SPDX-License-Identifier: Apache-2.0
// Position and checks of an index that fsck rebuilt.
//
// A rebuilt index is in the store's .derived/ and not in the checkpoint, because published
// checkpoints are immutable: COMMIT lists their files by hash, and copies and readers rely on that.
// The directory of a rebuilt index is named by the uuid. A renamed checkpoint therefore still finds
// its index, and a checkpoint that replaced another under the same name does not get the index of
// the old one.
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
  // The index is built under a temporary name and renamed, so that a reader never sees a
  // half-written index. Files, then directories, are synced before the rename.
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
      // An older derived index is replaced, because it may be damaged too.
      TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(target));
      moved = fs.RenameNoReplace(temporary, target);
    }
    TENSORMOUNT_RETURN_IF_ERROR(moved);
    return fs.SyncDirectory(derived);
  };
  const Status built = build();
  if (!built.ok()) (void)fs.RemoveTree(temporary);  // If this fails, gc removes the directory.
  return built.WithContext("rebuild the index of " + directory);
}

Result<std::shared_ptr<const CheckpointIndex>> OpenDerivedIndex(FileSystem& fs,
                                                                const std::string& directory,
                                                                const CommitRecord& commit) {
  const std::string derived = DerivedDirectory(directory, commit.uuid);
  const std::string path = JoinPath(derived, "RECORD");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, fs.ReadFile(path, kMaxCommitBytes));
  TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit decoded, DecodeCommit(bytes, path));
  // The uuid and the content root are compared because somebody may have copied the directory by
  // hand from another checkpoint.
  if (decoded.record.uuid != commit.uuid || decoded.record.content_root != commit.content_root) {
    return Status(Code::kDataLoss, path + ": the rebuilt index belongs to another checkpoint");
  }
  // A derived index replaces a damaged one, so all of it is checked now: damage must not show at a
  // later read.
  return CheckpointIndex::OpenSst(fs, derived, decoded.record,
                                  /*check_bytes=*/~std::uint64_t{0});
}

}  // namespace tensormount
