// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_FILE_BUILDER_H_
#define TENSORMOUNT_FS_FORMATS_FILE_BUILDER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_range.h"
#include "fs/formats/file_segments.h"

namespace tensormount::fs {

// Builds a file of text and stored bytes, in the order of its bytes. A text that the file contains
// several times can be kept once (StoreText), because a file may have a million similar headers.
// Finish returns FileSegments::FromSharedSegments: one literal with all kept text, and segments
// that refer to ranges of it. Texts that are adjacent both in the file and in that literal become
// one segment.
// Not thread-safe.
class FileBuilder {
 public:
  std::uint64_t size() const { return size_; }
  // Keeps `text` and returns its range in the kept text. The range can be passed to Add any number
  // of times.
  ByteRange StoreText(std::string_view text);
  void Add(ByteRange kept);
  void Add(std::string_view text) { Add(StoreText(text)); }
  // Adds bytes [skip, skip + length) of the tensor with this ordinal in the index.
  void AddTensor(std::uint32_t ordinal, std::uint64_t skip, std::uint64_t length);
  void AddObject(std::uint32_t part, std::uint64_t length);
  // Returns the built file. Call it once: it moves the segments and the text out.
  FileSegments Finish();

 private:
  void Append(FileSegments::Segment::Kind kind, std::uint32_t ordinal, std::uint64_t length,
              std::uint64_t skip);
  std::uint64_t size_ = 0;
  std::string text_;
  std::vector<FileSegments::Segment> segments_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_FILE_BUILDER_H_
