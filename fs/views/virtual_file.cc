// SPDX-License-Identifier: Apache-2.0
#include "fs/views/virtual_file.h"

#include <algorithm>
#include <cstring>

#include "fs/views/checkpoint_view.h"

namespace tensormount::fs {

std::shared_ptr<const VirtualFile> VirtualFile::OfText(std::string label, std::string text) {
  std::shared_ptr<VirtualFile> file(new VirtualFile);
  file->label_ = std::move(label);
  file->literal_ = std::make_shared<const std::string>(std::move(text));
  file->Add(Segment::Kind::kLiteral, 0, file->literal_->size());
  return file;
}

void VirtualFile::Add(Segment::Kind kind, std::uint32_t ordinal, std::uint64_t length,
                      std::uint64_t skip) {
  if (length == 0) return;
  own_.push_back(
      {.kind = kind, .ordinal = ordinal, .begin = size_, .length = length, .skip = skip});
  size_ += length;
  reads_data_ |= kind == Segment::Kind::kTensor || kind == Segment::Kind::kObject;
}

Result<std::size_t> VirtualFile::Read(std::uint64_t offset, void* out, std::size_t size,
                                      ReadStats* stats) const {
  if (offset >= size_ || size == 0) return std::size_t{0};
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, size_ - offset));
  const std::vector<Segment>& segments = shared_ ? *shared_ : own_;
  auto segment = std::upper_bound(segments.begin(), segments.end(), offset,
                                  [](std::uint64_t at, const Segment& s) { return at < s.begin; });
  --segment;  // The first one begins at 0.
  char* to = static_cast<char*>(out);
  for (std::size_t done = 0; done < size; ++segment) {
    const std::uint64_t at = offset + done - segment->begin;
    const std::size_t n =
        static_cast<std::size_t>(std::min<std::uint64_t>(size - done, segment->length - at));
    TENSORMOUNT_RETURN_IF_ERROR(ReadSegment(*segment, at, to + done, n, stats));
    done += n;
  }
  return size;
}

std::vector<OpenedCheckpoint::MappedPiece> VirtualFile::Map(std::uint64_t offset,
                                                            std::size_t size) const {
  if (offset >= size_ || !tensor_) return {};
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, size_ - offset));
  const std::vector<Segment>& segments = shared_ ? *shared_ : own_;
  for (const Segment& segment : segments) {
    if (offset < segment.begin || offset + size > segment.begin + segment.length) continue;
    if (segment.kind != Segment::Kind::kTensor) return {};
    return view_->MapTensor(*tensor_, segment.skip + offset - segment.begin, size);
  }
  return {};
}

Result<std::string> VirtualFile::BackingPath() const {
  const std::vector<Segment>& segments = shared_ ? *shared_ : own_;
  if (view_ && tensor_ && segments.size() == 1 && segments[0].kind == Segment::Kind::kTensor &&
      segments[0].skip == 0 && segments[0].length == tensor_->meta.bytes()) {
    return view_->opened().WholeFileOf(*tensor_);
  }
  return Status(Code::kNotFound, label_ + ": no one file holds it and nothing else");
}

Status VirtualFile::VerifyWhole(const std::function<bool()>& cancelled) const {
  (void)cancelled;
  return Status(Code::kUnsupported, label_ + ": not verified as a whole yet");
}

Status VirtualFile::ReadSegment(const Segment& segment, std::uint64_t at, char* out,
                                std::size_t size, ReadStats* stats) const {
  switch (segment.kind) {
    case Segment::Kind::kLiteral:
      std::memcpy(out, literal_->data() + at, size);
      return {};
    case Segment::Kind::kText:
      return text_->Read(at, out, size);
    case Segment::Kind::kTensor: {
      if (tensor_) return view_->ReadTensor(*tensor_, segment.skip + at, out, size, stats);
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry,
                                   view_->opened().index().At(segment.ordinal));
      return view_->ReadTensor(entry, at, out, size, stats);
    }
    case Segment::Kind::kObject:
      return view_->ReadObject(segment.ordinal, at, out, size);
  }
  return Status(Code::kInternal, "unknown kind of segment");
}

}  // namespace tensormount::fs
