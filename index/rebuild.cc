// SPDX-License-Identifier: Apache-2.0
#include "index/checkpoint.h"
#include "index/manifest.h"

namespace tensormount {

Result<Content> RebuildContent(FileSystem& fs, const std::string& directory,
                               const CommitRecord& commit) {
  const auto bad = [](const std::string& object, std::string_view why) {
    return Status(Code::kDataLoss, object + ": " + std::string(why));
  };
  ContentMerger merger;
  for (const CommitRecord::Entry& entry : commit.files) {
    if (!entry.name.starts_with("manifest/")) continue;
    // One byte more than it may have tells a grown file from a whole one.
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes,
                                 fs.ReadFile(JoinPath(directory, entry.name), entry.length + 1));
    if (bytes.size() != entry.length) {
      return bad(entry.name, std::to_string(bytes.size()) + " bytes, " +
                                 std::to_string(entry.length) + " expected");
    }
    if (Xxh3(bytes) != entry.hash) return bad(entry.name, "checksum differs");
    TENSORMOUNT_ASSIGN_OR_RETURN(const Manifest manifest, DecodeManifest(bytes, entry.name));
    TENSORMOUNT_RETURN_IF_ERROR(merger.Add(manifest.content, entry.name));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(Content content, merger.Finish());
  const CheckpointInfo& info = content.info;
  if (info.uuid != commit.uuid || info.generation != commit.generation ||
      info.parent != commit.parent) {
    return bad("manifests", "they are of another checkpoint than COMMIT");
  }
  TENSORMOUNT_RETURN_IF_ERROR(ComputeFileRoots(content));
  TENSORMOUNT_RETURN_IF_ERROR(CheckComplete(content));
  if (ContentRoot(content) != commit.content_root) {
    return bad("manifests", "the content root is not what COMMIT says");
  }
  for (const FileRecord& file : content.files) {
    if (file.placement == Placement::kForeign) continue;
    const CommitRecord::Entry* entry = commit.Find(file.name);
    if (entry == nullptr || entry->length != file.length || entry->hash != file.root) {
      return bad(file.name, "length or file root is not what COMMIT says");
    }
  }
  return content;
}

}  // namespace tensormount
