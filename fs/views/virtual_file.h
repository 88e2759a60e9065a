// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
#define TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "fs/node.h"
#include "fs/views/file_content.h"
#include "index/checkpoint.h"

namespace tensormount::fs {

class CheckpointView;

// An open file of a mount: the content that a view gave, read as the mount verifies. Keeps its
// checkpoint open, so that it can be read to the end whatever happens to the checkpoint's name.
// Immutable, thread-safe.
class VirtualFile {
 public:
  // Of text that no checkpoint stands behind (.tensormount/).
  static std::shared_ptr<const VirtualFile> OfText(std::string label, std::string text);

  std::uint64_t size() const { return content_.size(); }
  // Names the file in errors.
  const std::string& label() const { return label_; }
  // Whether reads go to data files, and so may block for as long as these do.
  bool reads_data() const { return content_.reads_data(); }
  // Whether the bytes behind this open never change and may be cached.
  bool immutable() const { return view_ != nullptr; }

  // Up to `size` bytes from `offset`; fewer only at the end of the file.
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size,
                           ReadStats* stats) const;
  // The same bytes where they are stored, in order, for a system call to take (at most
  // OpenedCheckpoint::kMaxMapped pieces); empty where they must be read (generated text, objects,
  // short runs, zeros, what is not in memory now, mounts that verify).
  std::vector<OpenedCheckpoint::MappedPiece> Map(std::uint64_t offset, std::size_t size) const;

  // Path of the one file of storage that is byte for byte this file from offset 0, and nothing
  // more: what kernel passthrough wants. kNotFound where there is none. May read its header.
  Result<std::string> BackingPath() const;
  // That file, opened as OpenedCheckpoint::OpenFile does.
  Result<std::unique_ptr<File>> OpenBacking() const;
  // Reads everything once, every byte checked against its leaf hash (where there are any), in steps
  // of kVerifyStep, so that `cancelled` (may be empty) is asked often: then kCancelled. Success is
  // remembered by the checkpoint: later calls for the same file cost nothing. kDataLoss names what
  // is damaged.
  static constexpr std::size_t kVerifyStep = std::size_t{1} << 20;
  Status VerifyWhole(const std::function<bool()>& cancelled) const;

 private:
  friend class CheckpointView;
  VirtualFile() = default;
  // The segments that bytes [offset, offset + size) are in: until fn(segment, at, done, n) does not
  // return ok. `at` is in the segment, `done` in the range.
  using Visit = std::function<Status(const FileContent::Segment& segment, std::uint64_t at,
                                     std::size_t done, std::size_t n)>;
  Status ForEachSegment(std::uint64_t offset, std::size_t size, const Visit& fn) const;
  Status ReadSegment(const FileContent::Segment& segment, std::uint64_t at, char* out,
                     std::size_t size, ReadStats* stats) const;
  bool MapSegment(const FileContent::Segment& segment, std::uint64_t at, std::size_t size,
                  std::vector<OpenedCheckpoint::MappedPiece>& out) const;
  Result<std::uint32_t> BackingFile() const;
  // The tensor of a kTensor segment.
  Result<TensorEntry> TensorOf(const FileContent::Segment& segment) const;

  std::shared_ptr<const CheckpointView> view_;  // Null: literal only.
  Node node_;
  std::string label_;
  FileContent content_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
