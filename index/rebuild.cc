// SPDX-License-Identifier: Apache-2.0
#include "index/rebuild.h"

#include "base/errors.h"

namespace tensormount {

Result<Manifest> ReadListedManifest(FileSystem& fs, const std::string& directory,
                                    const CommitRecord::Entry& entry) {
  // One byte more than it may have tells a grown file from a whole one.
  Result<std::string> bytes = fs.ReadFile(JoinPath(directory, entry.name), entry.length + 1);
  if (bytes.status().code() == Code::kNotFound) return DataLoss(entry.name, "the file is missing");
  TENSORMOUNT_RETURN_IF_ERROR(bytes.status());
  if (bytes.value().size() != entry.length) {
    return DataLoss(entry.name, std::to_string(bytes.value().size()) + " bytes, " +
                                    std::to_string(entry.length) + " expected");
  }
  if (Xxh3(bytes.value()) != entry.hash) return DataLoss(entry.name, "checksum differs");
  return DecodeManifest(bytes.value(), entry.name);
}

Result<Content> FinishRebuild(ContentMerger& merger, const CommitRecord& commit) {
  TENSORMOUNT_ASSIGN_OR_RETURN(Content content, merger.Finish());
  const CheckpointInfo& info = content.info;
  if (info.uuid != commit.uuid || info.generation != commit.generation ||
      info.parent != commit.parent) {
    return DataLoss("manifests", "they are of another checkpoint than COMMIT");
  }
  for (const FileRecord& file : content.files) {
    if (file.placement == Placement::kForeign && info.self_contained) {
      return DataLoss(file.name, "a foreign file without a root");
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(ComputeFileRoots(content));
  TENSORMOUNT_RETURN_IF_ERROR(CheckComplete(content));
  if (ContentRoot(content) != commit.content_root) {
    return DataLoss("manifests", "the content root is not what COMMIT says");
  }
  for (const FileRecord& file : content.files) {
    if (file.placement == Placement::kForeign) continue;
    const CommitRecord::Entry* entry = commit.Find(file.name);
    if (entry == nullptr || entry->length != file.length || entry->hash != file.root) {
      return DataLoss(file.name, "length or file root is not what COMMIT says");
    }
  }
  return content;
}

Result<Content> RebuildContent(FileSystem& fs, const std::string& directory,
                               const CommitRecord& commit) {
  ContentMerger merger;
  for (const CommitRecord::Entry& entry : commit.files) {
    if (!entry.name.starts_with("manifest/")) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Manifest manifest, ReadListedManifest(fs, directory, entry));
    TENSORMOUNT_RETURN_IF_ERROR(merger.Add(manifest.content, entry.name));
  }
  return FinishRebuild(merger, commit);
}

}  // namespace tensormount
