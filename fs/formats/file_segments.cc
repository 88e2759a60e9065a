// SPDX-License-Identifier: Apache-2.0
// Files as segments side by side (file_segments.h).
#include "fs/formats/file_segments.h"

#include "shard/tensor_meta.h"

namespace tensormount::fs {

void FileSegments::Add(Segment::Kind kind, std::uint32_t ordinal, std::uint64_t length,
                       std::uint64_t skip) {
  if (length == 0) return;
  own_.push_back(
      {.kind = kind, .ordinal = ordinal, .begin = size_, .length = length, .skip = skip});
  size_ += length;
  reads_data_ |= kind != Segment::Kind::kLiteral && kind != Segment::Kind::kText;
}

void FileSegments::AddLiteral(std::string text) {
  AddLiteral(std::make_shared<const std::string>(std::move(text)));
}

void FileSegments::AddLiteral(std::shared_ptr<const std::string> text) {
  // Empty segments would break the search for the segment of an offset: it looks for the last one
  // that begins at or before it, and two would begin at the same byte.
  if (text->empty()) return;
  const std::uint64_t length = text->size();
  literals_.push_back(std::move(text));
  Add(Segment::Kind::kLiteral, static_cast<std::uint32_t>(literals_.size() - 1), length, 0);
}

void FileSegments::AddText(std::shared_ptr<const GeneratedText> text) {
  text_ = std::move(text);
  Add(Segment::Kind::kText, 0, text_->size(), 0);
}

void FileSegments::AddTensor(const TensorEntry& tensor, std::uint64_t skip, std::uint64_t length) {
  if (length == 0) return;
  // Segments of one tensor (a header and its data) keep the entry; at the second tensor it is given
  // up for good, or reads of the first one would find the wrong entry.
  if (!tensor_ && !several_tensors_) {
    tensor_ = tensor;
  } else if (tensor_ && tensor_->ordinal != tensor.ordinal) {
    tensor_.reset();
    several_tensors_ = true;
  }
  Add(Segment::Kind::kTensor, tensor.ordinal, length, skip);
}

Status FileSegments::AddBox(const TensorEntry& tensor, const Box& box, const Dims& container) {
  const TensorMeta& meta = tensor.meta;
  const auto bad = [&](const char* why) {
    return Status(Code::kInvalidArgument,
                  "tensor " + meta.key() + " " + box.ToString() + ": " + why);
  };
  if (box.rank() != meta.shape().rank() || container.rank() != box.rank() ||
      !box.Within(meta.shape())) {
    return bad("not within the tensor");
  }
  for (int a = 0; a < box.rank(); ++a) {
    if (container[a] < box.extent(a)) return bad("not within its container");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                               ByteRegion(meta.dtype(), meta.shape(), Region(box)));
  // Checks overflow too, which a container larger than the tensor could reach.
  // Its bytes are the size of the file.
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorMeta packed,
                               TensorMeta::Make(meta.key(), meta.dtype(), container));
  if (packed.bytes() == 0) return Status();
  BoxSource source{.tensor = tensor, .box = box, .container = container, .bytes = packed.bytes()};
  // Both in bytes of the tensor, so that reads need no element sizes. ByteShape merges the last
  // axes of types under a byte into one, until a row ends on a byte: of 4-bit elements [8, 6]
  // becomes bytes [8, 3], of [8, 3] it becomes [12].
  source.byte_box = bytes.box();
  // Axes of elements that are one axis of bytes of the tensor are one of the container, too.
  const int axes = ByteShape(meta.dtype(), meta.shape()).rank() - 1;
  std::uint64_t bits = meta.bits();
  // Behind the merged axes a box that is narrower than its container would have rows that begin
  // inside a byte. Allowed is only what stays one run there.
  bool whole = true;  // The box spans the container behind this axis.
  for (int a = container.rank() - 1; a >= axes; --a) {
    if (!whole && box.extent(a) > 1) return bad("does not begin and end on bytes of its container");
    whole = whole && box.extent(a) == container[a];
    bits *= static_cast<std::uint64_t>(container[a]);
  }
  if (bits % 8 != 0) return bad("its container has rows that do not end on a byte");
  for (int a = 0; a < axes; ++a) source.byte_container.push_back(container[a]);
  source.byte_container.push_back(static_cast<std::int64_t>(bits / 8));
  boxes_.push_back(std::move(source));
  Add(Segment::Kind::kBox, static_cast<std::uint32_t>(boxes_.size() - 1), packed.bytes(), 0);
  return Status();
}

void FileSegments::AddObject(std::uint32_t part, std::uint64_t length) {
  Add(Segment::Kind::kObject, part, length, 0);
}

FileSegments FileSegments::Shared(std::shared_ptr<const std::vector<Segment>> segments,
                                  std::shared_ptr<const std::string> head) {
  FileSegments shared;
  if (!segments->empty()) shared.size_ = segments->back().begin + segments->back().length;
  shared.reads_data_ = true;
  shared.shared_ = std::move(segments);
  shared.literals_.push_back(std::move(head));
  return shared;
}

}  // namespace tensormount::fs
