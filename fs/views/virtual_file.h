// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
#define TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/generated_text.h"
#include "index/checkpoint.h"

namespace tensormount::fs {

class CheckpointView;

// A stretch of a virtual file. Stretches lie side by side from 0 on.
struct Segment {
  enum class Kind : std::uint8_t { kLiteral, kText, kTensor, kObject } kind = Kind::kLiteral;
  std::uint32_t ordinal = 0;  // Of the tensor or object part.
  std::uint64_t begin = 0;    // In the file.
  std::uint64_t length = 0;
  std::uint64_t skip = 0;  // Bytes of the tensor before it.
};

// An open file of a mount: every view is a list of segments. Keeps its checkpoint open, so that it
// can be read to the end whatever happens to the checkpoint's name. Immutable, thread-safe.
class VirtualFile {
 public:
  // Of text that no checkpoint stands behind (.tensormount/).
  static std::shared_ptr<const VirtualFile> OfText(std::string label, std::string text);

  std::uint64_t size() const { return size_; }
  // Names the file in errors.
  const std::string& label() const { return label_; }
  // Whether reads go to data files, and so may block for as long as these do.
  bool reads_data() const { return reads_data_; }
  // Whether the bytes behind this open never change and may be cached.
  bool immutable() const { return view_ != nullptr; }

  // Up to `size` bytes from `offset`; fewer only at the end of the file.
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size,
                           ReadStats* stats) const;
  // The same bytes where they are stored, for a system call to take; empty where they must be read
  // (views of several segments, short runs, verification).
  std::vector<OpenedCheckpoint::MappedPiece> Map(std::uint64_t offset, std::size_t size) const;

  // Path of the one file of storage that is byte for byte this file from offset 0, and nothing
  // more: what kernel passthrough wants. kNotFound where there is none. May read its header.
  Result<std::string> BackingPath() const;
  // Reads everything once, every byte checked against its leaf hash (where there are any), in steps
  // of kVerifyStep, so that `cancelled` (may be empty) is asked often: then kCancelled. Success is
  // remembered by the checkpoint: later calls for the same file cost nothing. kDataLoss names what
  // is damaged.
  static constexpr std::size_t kVerifyStep = std::size_t{1} << 20;
  Status VerifyWhole(const std::function<bool()>& cancelled) const;

 private:
  friend class CheckpointView;
  VirtualFile() = default;
  void Add(Segment::Kind kind, std::uint32_t ordinal, std::uint64_t length, std::uint64_t skip = 0);
  Status ReadSegment(const Segment& segment, std::uint64_t at, char* out, std::size_t size,
                     ReadStats* stats) const;

  std::shared_ptr<const CheckpointView> view_;  // Null: literal only.
  std::string label_;
  std::uint64_t size_ = 0;
  bool reads_data_ = false;
  std::vector<Segment> own_;
  std::shared_ptr<const std::vector<Segment>> shared_;  // Instead of own_, where not null.
  std::shared_ptr<const std::string> literal_;
  std::shared_ptr<const GeneratedText> text_;
  std::optional<TensorEntry> tensor_;  // Of files of one tensor.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_VIRTUAL_FILE_H_
