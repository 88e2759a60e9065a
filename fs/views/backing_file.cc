// SPDX-License-Identifier: Apache-2.0
// Finds the stored file that equals a shown file, for passthrough and for exports that link or
// clone.
#include "fs/views/backing_file.h"

#include <algorithm>
#include <optional>

#include "index/read/foreign_file.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

using Segment = FileSegments::Segment;

// The usual result of a search, because most files of a mount do not equal one stored file.
Status NoBackingFileError() {
  return Status(Code::kNotFound, "no single data file contains exactly the bytes of this file");
}

// Returns `file` if it has `size` bytes in the index (else kNotFound) and on disk (else kDataLoss).
Result<std::uint32_t> FileOfSize(const OpenedCheckpoint& opened, std::uint32_t file,
                                 std::uint64_t size) {
  const CheckpointIndex& index = opened.index();
  if (file >= index.files().size() || index.files()[file].length != size)
    return NoBackingFileError();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, opened.fs().LinkStat(opened.AccessPath(file)));
  // Foreign files can be symlinks, which only OpenFile checks.
  if (info.kind == FileKind::kSymlink) return NoBackingFileError();
  TENSORMOUNT_RETURN_IF_ERROR(
      CheckUnchanged(index.files()[file], info, opened.commit() != nullptr));
  if (info.kind != FileKind::kFile || info.size != size) {
    return Status(Code::kDataLoss, index.files()[file].name + ": " + std::to_string(info.size) +
                                       " bytes, " + std::to_string(size) + " expected");
  }
  return file;
}

// Whether the file has `bytes` at offset `at`. The bytes are a header, which is small, so they are
// read in one call.
Result<bool> HasBytes(const OpenedCheckpoint& opened, std::uint32_t number, std::uint64_t at,
                      const std::string& bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, opened.OpenFile(number));
  std::string found(bytes.size(), '\0');
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n, file->ReadAt(at, found.data(), found.size()));
  return n == bytes.size() && found == bytes;
}

}  // namespace

Result<std::uint32_t> FindBackingFile(const ShownCheckpoint& shown, const FileSegments& segments) {
  const OpenedCheckpoint& opened = shown.opened;
  const std::vector<Segment>& all = segments.segments();
  if (all.size() == 1 && all[0].kind == Segment::Kind::kObject) {
    const ObjectRecord& part = shown.objects.parts()[all[0].ordinal];
    if (part.offset != 0 || part.length != segments.size()) return NoBackingFileError();
    return FileOfSize(opened, part.file, part.length);
  }
  if (all.size() == 1 && all[0].kind == Segment::Kind::kTensor && segments.tensor()) {
    const TensorEntry& tensor = *segments.tensor();
    if (all[0].skip != 0 || all[0].length != tensor.meta.bytes()) return NoBackingFileError();
    return opened.WholeFileOf(tensor);
  }
  // The file may consist of literals and whole tensors. First the index is checked: all tensors
  // must be in one stored file, each at its position. Then the length of that file is checked, and
  // only then its bytes are read.
  std::optional<std::uint32_t> file;
  for (const Segment& segment : all) {
    if (segment.kind == Segment::Kind::kLiteral) continue;
    // Files with a part of a tensor, a box, an object or generated text are not searched.
    if (segment.kind != Segment::Kind::kTensor || segment.skip != 0) return NoBackingFileError();
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, opened.index().At(segment.ordinal));
    if (segment.length != tensor.meta.bytes()) return NoBackingFileError();
    if (segment.length == 0) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto run, opened.FileRunOf(tensor));
    if (!run || run->offset != segment.begin || run->file != file.value_or(run->file)) {
      return NoBackingFileError();
    }
    // The comparison of lengths excludes most files without a read.
    if (!file && (run->file >= opened.index().files().size() ||
                  opened.index().files()[run->file].length != segments.size())) {
      return NoBackingFileError();
    }
    file = run->file;
  }
  if (!file) return NoBackingFileError();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t found,
                               FileOfSize(opened, *file, segments.size()));
  for (const Segment& segment : all) {
    if (segment.kind != Segment::Kind::kLiteral) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool same,
                                 HasBytes(opened, found, segment.begin,
                                          segments.literal(segment.ordinal)
                                              .substr(static_cast<std::size_t>(segment.skip),
                                                      static_cast<std::size_t>(segment.length))));
    if (!same) return NoBackingFileError();
  }
  return found;
}

}  // namespace tensormount::fs
