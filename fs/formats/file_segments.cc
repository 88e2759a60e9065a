// SPDX-License-Identifier: Apache-2.0
// Builds the list of segments that describes a virtual file.
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
  // An empty segment would begin at the same byte as the next one, and a search by offset might
  // find the wrong one of the two.
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
  // tensor_ is set while all segments are of one tensor. Once a second tensor is added it stays
  // empty, so that reads do not use the wrong entry.
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
    if (container[a] < box.extent(a)) return bad("larger than the array that is to contain it");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                               ByteRegion(meta.dtype(), meta.shape(), Region(box)));
  // TensorMeta::Make checks for overflow, which a container larger than the tensor could cause. The
  // segment has as many bytes as the container.
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorMeta packed,
                               TensorMeta::Make(meta.key(), meta.dtype(), container));
  if (packed.bytes() == 0) return Status();
  BoxSource source{.tensor = tensor, .box = box, .container = container, .bytes = packed.bytes()};
  // Box and container are converted to bytes, so that reads need no element sizes. For types under
  // a byte ByteShape merges the last axes until a row ends on a byte: 4-bit elements of shape [8,
  // 6] become bytes [8, 3], and [8, 3] becomes [12].
  source.byte_box = bytes.box();
  // Axes that are merged in the tensor's byte shape are merged in the container's too.
  const int axes = ByteShape(meta.dtype(), meta.shape()).rank() - 1;
  std::uint64_t bits = meta.bits();
  // On merged axes, rows of a box that is narrower than its container could begin inside a byte. So
  // only boxes that are one run on those axes are allowed.
  bool whole = true;  // The box spans the container on the later axes.
  for (int a = container.rank() - 1; a >= axes; --a) {
    if (!whole && box.extent(a) > 1)
      return bad("does not begin and end at a whole byte (its elements are smaller than a byte)");
    whole = whole && box.extent(a) == container[a];
    bits *= static_cast<std::uint64_t>(container[a]);
  }
  if (bits % 8 != 0)
    return bad("the rows do not end at a whole byte (the elements are smaller than a byte)");
  for (int a = 0; a < axes; ++a) source.byte_container.push_back(container[a]);
  source.byte_container.push_back(static_cast<std::int64_t>(bits / 8));
  boxes_.push_back(std::move(source));
  Add(Segment::Kind::kBox, static_cast<std::uint32_t>(boxes_.size() - 1), packed.bytes(), 0);
  return Status();
}

void FileSegments::AddObject(std::uint32_t part, std::uint64_t length) {
  Add(Segment::Kind::kObject, part, length, 0);
}

FileSegments FileSegments::FromSharedSegments(std::shared_ptr<const std::vector<Segment>> segments,
                                              std::shared_ptr<const std::string> head) {
  FileSegments shared;
  if (!segments->empty()) shared.size_ = segments->back().begin + segments->back().length;
  shared.reads_data_ = true;
  shared.shared_ = std::move(segments);
  shared.literals_.push_back(std::move(head));
  return shared;
}

}  // namespace tensormount::fs
