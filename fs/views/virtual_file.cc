// SPDX-License-Identifier: Apache-2.0
#include "fs/views/virtual_file.h"

#include <algorithm>
#include <cstring>

#include "fs/views/checkpoint_view.h"

namespace tensormount::fs {

using Segment = FileContent::Segment;

std::shared_ptr<const VirtualFile> VirtualFile::OfText(std::string label, std::string text) {
  std::shared_ptr<VirtualFile> file(new VirtualFile);
  file->label_ = std::move(label);
  file->content_.AddLiteral(std::move(text));
  return file;
}

Status VirtualFile::ForEachSegment(std::uint64_t offset, std::size_t size, const Visit& fn) const {
  const std::vector<Segment>& segments = content_.segments();
  auto segment = std::upper_bound(segments.begin(), segments.end(), offset,
                                  [](std::uint64_t at, const Segment& s) { return at < s.begin; });
  --segment;  // The first one begins at 0.
  for (std::size_t done = 0; done < size; ++segment) {
    const std::uint64_t at = offset + done - segment->begin;
    const std::size_t n =
        static_cast<std::size_t>(std::min<std::uint64_t>(size - done, segment->length - at));
    TENSORMOUNT_RETURN_IF_ERROR(fn(*segment, at, done, n));
    done += n;
  }
  return {};
}

Result<std::size_t> VirtualFile::Read(std::uint64_t offset, void* out, std::size_t size,
                                      ReadStats* stats) const {
  if (offset >= this->size() || size == 0) return std::size_t{0};
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, this->size() - offset));
  char* const to = static_cast<char*>(out);
  TENSORMOUNT_RETURN_IF_ERROR(ForEachSegment(
      offset, size, [&](const Segment& segment, std::uint64_t at, std::size_t done, std::size_t n) {
        return ReadSegment(segment, at, to + done, n, stats);
      }));
  return size;
}

Result<TensorEntry> VirtualFile::TensorOf(const Segment& segment) const {
  if (content_.tensor()) return *content_.tensor();
  return view_->opened().index().At(segment.ordinal);
}

Status VirtualFile::ReadSegment(const Segment& segment, std::uint64_t at, char* out,
                                std::size_t size, ReadStats* stats) const {
  switch (segment.kind) {
    case Segment::Kind::kLiteral:
      std::memcpy(out, content_.literal(segment.ordinal).data() + segment.skip + at, size);
      return {};
    case Segment::Kind::kText:
      return content_.text().Read(at, out, size);
    case Segment::Kind::kTensor: {
      if (content_.tensor()) {
        return view_->data().ReadTensor(*content_.tensor(), segment.skip + at, out, size, stats);
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, TensorOf(segment));
      return view_->data().ReadTensor(tensor, segment.skip + at, out, size, stats);
    }
    case Segment::Kind::kBox:
      return view_->data().ReadBox(content_.box(segment.ordinal), at, out, size, stats);
    case Segment::Kind::kObject:
      return view_->data().ReadObject(segment.ordinal, at, out, size);
  }
  return Status(Code::kInternal, "unknown kind of segment");
}

std::vector<OpenedCheckpoint::MappedPiece> VirtualFile::Map(std::uint64_t offset,
                                                            std::size_t size) const {
  std::vector<OpenedCheckpoint::MappedPiece> pieces;
  if (offset >= this->size() || size == 0 || !content_.reads_data()) return pieces;
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, this->size() - offset));
  const Status mapped = ForEachSegment(
      offset, size, [&](const Segment& segment, std::uint64_t at, std::size_t, std::size_t n) {
        return MapSegment(segment, at, n, pieces)
                   ? Status()
                   : Status(Code::kUnavailable, "these bytes must be read");
      });
  if (!mapped.ok()) pieces.clear();
  return pieces;
}

bool VirtualFile::MapSegment(const Segment& segment, std::uint64_t at, std::size_t size,
                             std::vector<OpenedCheckpoint::MappedPiece>& out) const {
  if (out.size() >= OpenedCheckpoint::kMaxMapped) return false;
  switch (segment.kind) {
    case Segment::Kind::kLiteral: {
      const std::shared_ptr<const std::string>& text = content_.shared_literal(segment.ordinal);
      out.push_back({.data = reinterpret_cast<const std::byte*>(text->data()) + segment.skip + at,
                     .size = size,
                     .keep = text});
      return true;
    }
    case Segment::Kind::kTensor: {
      const Result<TensorEntry> tensor = TensorOf(segment);
      return tensor.ok() && view_->data().MapTensor(tensor.value(), segment.skip + at, size, out);
    }
    case Segment::Kind::kBox:
      return view_->data().MapBox(content_.box(segment.ordinal), at, size, out);
    case Segment::Kind::kText:
    case Segment::Kind::kObject:
      return false;
  }
  return false;
}

Result<std::string> VirtualFile::BackingPath() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, BackingFile());
  return view_->opened().AccessPath(file);
}

Result<std::unique_ptr<File>> VirtualFile::OpenBacking() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, BackingFile());
  return view_->opened().OpenFile(file);
}

Result<std::uint32_t> VirtualFile::BackingFile() const {
  if (view_ && content_.reads_data()) return view_->BackingFileOf(node_, content_);
  return Status(Code::kNotFound, label_ + ": no one file holds it and nothing else");
}

Status VirtualFile::VerifyWhole(const std::function<bool()>& cancelled) const {
  for (const Segment& segment : content_.segments()) {
    switch (segment.kind) {
      case Segment::Kind::kLiteral:
      case Segment::Kind::kText:
        break;
      case Segment::Kind::kTensor: {
        TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, TensorOf(segment));
        TENSORMOUNT_RETURN_IF_ERROR(
            view_->data().VerifyTensor(tensor, segment.skip, segment.length, cancelled));
        break;
      }
      case Segment::Kind::kBox:
        TENSORMOUNT_RETURN_IF_ERROR(
            view_->data().VerifyBox(content_.box(segment.ordinal), cancelled));
        break;
      case Segment::Kind::kObject:
        TENSORMOUNT_RETURN_IF_ERROR(view_->data().VerifyObject(segment.ordinal, cancelled));
        break;
    }
  }
  return {};
}

}  // namespace tensormount::fs
