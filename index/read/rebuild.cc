// SPDX-License-Identifier: Apache-2.0
// Builds an inventory from the manifests that COMMIT lists and checks it against COMMIT's content
// root, for `verify`, `fsck --rebuild` and readers without an index.
#include "index/read/rebuild.h"

#include <cerrno>

#include "base/errors.h"
#include "index/records/completeness.h"

namespace tensormount {

// OpenReadBelow follows no symbolic link. A checkpoint lists only regular files in its own
// directory, and whoever can write there could make us read other files through a link.
Result<std::unique_ptr<File>> OpenListedFile(FileSystem& fs, const std::string& directory,
                                             const std::string& name) {
  Result<std::unique_ptr<File>> file = fs.OpenReadBelow(directory, name);
  const Status& status = file.status();
  if (status.code() == Code::kNotFound) return DataLoss(name, "the file is missing");
  // The name is a directory, a link (also as a parent directory), a FIFO or a socket.
  if (status.code() == Code::kInvalidArgument || (!status.ok() && status.ToErrno() == ENXIO)) {
    return DataLoss(name, "not a regular file: " + status.message());
  }
  return file;
}

Result<Manifest> ReadListedManifest(FileSystem& fs, const std::string& directory,
                                    const CommitRecord::Entry& entry) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                               OpenListedFile(fs, directory, entry.name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
  if (info.size != entry.length) {
    return DataLoss(entry.name, "the file has " + std::to_string(info.size) + " bytes, " +
                                    std::to_string(entry.length) + " expected");
  }
  std::string bytes(static_cast<std::size_t>(entry.length), '\0');
  TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(0, bytes.data(), bytes.size()));
  // The hash is compared before decoding, so that the decoder only sees bytes that COMMIT vouches
  // for.
  if (Xxh3(bytes) != entry.hash) return DataLoss(entry.name, "checksum mismatch");
  return DecodeManifest(bytes, entry.name);
}

// The content root covers the logical records, the file roots cover the positions of stored ranges
// in the checkpoint's own files. If both are those of COMMIT, the rebuilt index has the records of
// the published one. Positions in foreign files are covered by the hashes of the manifests.
Result<Inventory> FinishRebuild(InventoryMerger& merger, const CommitRecord& commit) {
  TENSORMOUNT_ASSIGN_OR_RETURN(Inventory inventory, merger.Finish());
  const CheckpointInfo& info = inventory.info;
  if (info.uuid != commit.uuid || info.generation != commit.generation ||
      info.parent != commit.parent) {
    return DataLoss("manifests", "uuid, generation or parent differs from COMMIT");
  }
  for (const FileRecord& file : inventory.files) {
    if (file.placement == Placement::kForeign && info.self_contained) {
      return DataLoss(file.name, "a foreign file, but no root directory is recorded");
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckComplete(inventory));
  if (ContentRoot(inventory) != commit.content_root) {
    return DataLoss("manifests",
                    "the content root (the hash of the inventory) differs from COMMIT");
  }
  for (const FileRecord& file : inventory.files) {
    if (file.placement == Placement::kForeign) continue;
    const CommitRecord::Entry* entry = commit.Find(file.name);
    if (entry == nullptr || entry->length != file.length || entry->hash != file.root) {
      return DataLoss(file.name, "the length or the hash of the file differs from COMMIT");
    }
  }
  return inventory;
}

Result<Inventory> RebuildInventory(FileSystem& fs, const std::string& directory,
                                   const CommitRecord& commit) {
  InventoryMerger merger;
  for (const CommitRecord::Entry& entry : commit.files) {
    if (!entry.name.starts_with("manifest/")) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Manifest manifest, ReadListedManifest(fs, directory, entry));
    TENSORMOUNT_RETURN_IF_ERROR(merger.Add(manifest.inventory, entry.name));
  }
  return FinishRebuild(merger, commit);
}

}  // namespace tensormount
