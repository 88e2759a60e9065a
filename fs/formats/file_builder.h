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

// A file of text and stored bytes, put together in the order of its bytes. Text is kept once,
// however often it is used: a million zip headers differ in few bytes.
// What FileSegments::Shared wants: one literal with all text, and segments that refer into it.
// Literals that follow each other in the kept text become one segment. Not thread-safe.
class FileBuilder {
 public:
  std::uint64_t size() const { return size_; }
  // Where in the kept text it stands, to be added as often as it is needed.
  ByteRange Keep(std::string_view text);
  void Add(ByteRange kept);
  void Add(std::string_view text) { Add(Keep(text)); }
  // Bytes [skip, skip + length) of the tensor of that ordinal in the index.
  void AddTensor(std::uint32_t ordinal, std::uint64_t skip, std::uint64_t length);
  void AddObject(std::uint32_t part, std::uint64_t length);
  // Once.
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
