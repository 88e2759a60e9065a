// SPDX-License-Identifier: Apache-2.0
// The one stored file that a tensor's file is, if there is one: for passthrough, and for exports
// that link or copy ranges.
#include "fs/views/backing_file.h"

#include <algorithm>
#include <optional>

#include "index/read/foreign_file.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

using Segment = FileSegments::Segment;

// The usual answer, which callers expect: most files of a mount are no stored file.
Status None() { return Status(Code::kNotFound, "no one file holds this and nothing else"); }

// Where the run begins in the row-major order of `shape` that the box is; nothing where it is
// several.
// A box is one run where all axes behind the first one that it cuts are whole: of shape [8, 4, 2]
// the box [2:4, :, :] is a run from element 16 on, and [2, 1:3, :] one from 18 on, but [2:4, 1:3,
// :] is two.
std::optional<std::uint64_t> RunBegin(const Box& box, const Dims& shape) {
  std::uint64_t begin = 0;
  bool inside = false;  // Past an axis of which the box has more than one index.
  for (int a = 0; a < box.rank(); ++a) {
    begin = begin * static_cast<std::uint64_t>(shape[a]) + static_cast<std::uint64_t>(box.begin(a));
    if (inside && box.extent(a) != shape[a]) return std::nullopt;
    inside = inside || box.extent(a) != 1;
  }
  return begin;
}

// Whether byte n of the tensor stands at `at` + n of file `file`, which may be chosen by the first
// chunk.
// In bytes and not in elements, so that types under a byte need no case of their own (ByteRegion).
// Chunks that are stored with strides never qualify. All chunks must follow each other in the file
// exactly as their bytes do in the tensor: then the tensor is one run of the file, however it was
// cut.
Result<bool> StandsAt(const OpenedCheckpoint& opened, const TensorEntry& tensor, std::uint64_t at,
                      std::optional<std::uint32_t>& file) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> table,
                               opened.Extents(tensor));
  const TensorMeta& meta = tensor.meta;
  const Dims shape = ByteShape(meta.dtype(), meta.shape());
  for (std::size_t i = 0; i < table->size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, table->At(i));
    if (chunk.region.empty()) continue;
    if (!file) file = chunk.file;
    if (chunk.file != *file || chunk.strides.rank() > 0) return false;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                 ByteRegion(meta.dtype(), meta.shape(), chunk.region));
    std::uint64_t stored = chunk.offset;
    for (const Box& box : bytes.Boxes()) {
      const std::optional<std::uint64_t> begin = RunBegin(box, shape);
      if (!begin || at + *begin != stored) return false;
      stored += static_cast<std::uint64_t>(box.volume());
    }
  }
  return true;
}

// The file, where it is as long as it must be.
Result<std::uint32_t> FileOfSize(FileSystem& fs, const OpenedCheckpoint& opened, std::uint32_t file,
                                 std::uint64_t size) {
  const CheckpointIndex& index = opened.index();
  if (file >= index.files().size() || index.files()[file].length != size) return None();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(opened.AccessPath(file)));
  // Sources may be named through a link; what lies in a checkpoint is never one.
  if (info.kind == FileKind::kSymlink) return None();
  TENSORMOUNT_RETURN_IF_ERROR(
      CheckUnchanged(index.files()[file], info, opened.commit() != nullptr));
  if (info.kind != FileKind::kFile || info.size != size) {
    return Status(Code::kDataLoss, index.files()[file].name + ": " + std::to_string(info.size) +
                                       " bytes, " + std::to_string(size) + " expected");
  }
  return file;
}

// A literal is at most a header of some MB, so it is read in one go.
Result<bool> HasBytes(const OpenedCheckpoint& opened, std::uint32_t number, std::uint64_t at,
                      const std::string& bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, opened.OpenFile(number));
  std::string found(bytes.size(), '\0');
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n, file->ReadAt(at, found.data(), found.size()));
  return n == bytes.size() && found == bytes;
}

}  // namespace

Result<std::uint32_t> FindBackingFile(FileSystem& fs, const ShownCheckpoint& shown,
                                      const FileSegments& segments) {
  const OpenedCheckpoint& opened = shown.opened;
  const std::vector<Segment>& all = segments.segments();
  if (all.size() == 1 && all[0].kind == Segment::Kind::kObject) {
    const ObjectRecord& part = shown.objects.parts()[all[0].ordinal];
    if (part.offset != 0 || part.length != segments.size()) return None();
    return FileOfSize(fs, opened, part.file, part.length);
  }
  if (all.size() == 1 && all[0].kind == Segment::Kind::kTensor && segments.tensor()) {
    const TensorEntry& tensor = *segments.tensor();
    if (all[0].skip != 0 || all[0].length != tensor.meta.bytes()) return None();
    return opened.WholeFileOf(tensor);
  }
  // Literal bytes and whole tensors.
  // First by the index alone: all tensors in one file, each where the shown file has it.
  // Then the file's length, and only then bytes of it are read.
  std::optional<std::uint32_t> file;
  for (const Segment& segment : all) {
    if (segment.kind == Segment::Kind::kLiteral) continue;
    // Part of a tensor, a box, text: no program stores that as such a file.
    if (segment.kind != Segment::Kind::kTensor || segment.skip != 0) return None();
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, opened.index().At(segment.ordinal));
    if (segment.length != tensor.meta.bytes()) return None();
    const bool first = !file;
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool stands, StandsAt(opened, tensor, segment.begin, file));
    if (!stands) return None();
    // Most are told apart here.
    if (first && (!file || *file >= opened.index().files().size() ||
                  opened.index().files()[*file].length != segments.size())) {
      return None();
    }
  }
  if (!file) return None();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t found,
                               FileOfSize(fs, opened, *file, segments.size()));
  for (const Segment& segment : all) {
    if (segment.kind != Segment::Kind::kLiteral) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool same,
                                 HasBytes(opened, found, segment.begin,
                                          segments.literal(segment.ordinal)
                                              .substr(static_cast<std::size_t>(segment.skip),
                                                      static_cast<std::size_t>(segment.length))));
    if (!same) return None();
  }
  return found;
}

}  // namespace tensormount::fs
