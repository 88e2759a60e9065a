// SPDX-License-Identifier: Apache-2.0
// Assembles the segments of a file: text beside stored bytes.
#include "fs/formats/file_builder.h"

#include <memory>
#include <utility>

namespace tensormount::fs {

// Returns offsets instead of a string_view, because text_ moves in memory when it grows.
ByteRange FileBuilder::StoreText(std::string_view text) {
  const std::uint64_t begin = text_.size();
  text_.append(text);
  return {begin, text_.size()};
}

void FileBuilder::Append(FileSegments::Segment::Kind kind, std::uint32_t ordinal,
                         std::uint64_t length, std::uint64_t skip) {
  if (length == 0) return;
  if (!segments_.empty()) {
    FileSegments::Segment& last = segments_.back();
    // Extends the last segment if this text follows that segment's text in text_. A text that is
    // added a second time does not follow it, so it begins a new segment.
    if (kind == FileSegments::Segment::Kind::kLiteral && last.kind == kind &&
        last.skip + last.length == skip) {
      last.length += length;
      size_ += length;
      return;
    }
  }
  segments_.push_back(
      {.kind = kind, .ordinal = ordinal, .begin = size_, .length = length, .skip = skip});
  size_ += length;
}

void FileBuilder::Add(ByteRange kept) {
  Append(FileSegments::Segment::Kind::kLiteral, 0, kept.size(), kept.begin);
}

void FileBuilder::AddTensor(std::uint32_t ordinal, std::uint64_t skip, std::uint64_t length) {
  Append(FileSegments::Segment::Kind::kTensor, ordinal, length, skip);
}

void FileBuilder::AddObject(std::uint32_t part, std::uint64_t length) {
  Append(FileSegments::Segment::Kind::kObject, part, length, 0);
}

FileSegments FileBuilder::Finish() {
  return FileSegments::FromSharedSegments(
      std::make_shared<const std::vector<FileSegments::Segment>>(std::move(segments_)),
      std::make_shared<const std::string>(std::move(text_)));
}

}  // namespace tensormount::fs
