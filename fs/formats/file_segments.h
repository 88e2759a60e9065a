// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_FILE_SEGMENTS_H_
#define TENSORMOUNT_FS_FORMATS_FILE_SEGMENTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/box.h"

#include "fs/formats/generated_text.h"
#include "index/records/checkpoint_index.h"

namespace tensormount::fs {

// The content of a virtual file: adjacent segments from offset 0. A view makes the segments,
// VirtualFile reads them. Copies share literals, generated text and shared segments.
//
// Example, npy/w.npy of a tensor of 96 bytes:
//   kLiteral  begin 0    length 128  the NumPy header
//   kTensor   begin 128  length 96   skip 0
// A view describes its file instead of reading it, because the description serves reads at any
// offset, mappings for splice, the search for a stored file with the same bytes, proofs by hash,
// and exports that split a file among ranks.
// A segment takes 32 bytes and is found by binary search. All open files of one node can share
// their segments (FromSharedSegments).
class FileSegments {
 public:
  struct Segment {
    enum class Kind : std::uint8_t {
      kLiteral,  // Literal number `ordinal`, from byte `skip` on.
      kText,     // The generated text.
      kTensor,   // Row-major bytes of tensor `ordinal` (in the index), from `skip` on.
      kBox,      // Box number `ordinal`, row-major within its container.
      kObject,   // Object part number `ordinal`.
    } kind = Kind::kLiteral;
    // Number of the literal, tensor, box or object part, as described at Kind; 0 for kText.
    std::uint32_t ordinal = 0;
    std::uint64_t begin = 0;  // Offset in the file.
    std::uint64_t length = 0;
    std::uint64_t skip = 0;
  };
  // A box of a tensor, shown as a packed row-major array of shape `container`: the box is at the
  // origin, and zeros are elsewhere, as edge chunks of Zarr need. If container == box.extent(), the
  // array is a plain slice. Computed when the file is opened, so that reads only find byte ranges.
  struct BoxSource {
    TensorEntry tensor;
    Box box;
    Dims container;
    std::uint64_t bytes = 0;  // Size of the container.
    // The box and the container in bytes instead of elements, along the axes of the tensor's
    // ByteShape (shard/tensor_meta.h).
    Box byte_box;
    Dims byte_container;
  };

  // The Add functions append a segment; a segment of 0 bytes is not added.
  void AddLiteral(std::string text);
  void AddLiteral(std::shared_ptr<const std::string> text);
  // Call it at most once for a file; more text can be added as literals around the generated text.
  void AddText(std::shared_ptr<const GeneratedText> text);
  // Appends `length` of the tensor's row-major bytes, from byte `skip` on.
  void AddTensor(const TensorEntry& tensor, std::uint64_t skip, std::uint64_t length);
  void AddTensor(const TensorEntry& tensor) { AddTensor(tensor, 0, tensor.meta.bytes()); }
  // Appends a BoxSource. kInvalidArgument if the box is not within the tensor or the container, or
  // does not begin and end on whole bytes.
  Status AddBox(const TensorEntry& tensor, const Box& box, const Dims& container);
  void AddObject(std::uint32_t part, std::uint64_t length);
  // Used instead of the Add functions for very many segments that several files share; `head` is
  // literal number 0. The segments must be adjacent, from offset 0.
  // reads_data() is always true for the result, because nearly all files of the callers have stored
  // bytes.
  static FileSegments FromSharedSegments(std::shared_ptr<const std::vector<Segment>> segments,
                                         std::shared_ptr<const std::string> head);

  std::uint64_t size() const { return size_; }
  const std::vector<Segment>& segments() const { return shared_ ? *shared_ : own_; }
  const std::string& literal(std::uint32_t n) const { return *literals_[n]; }
  const std::shared_ptr<const std::string>& shared_literal(std::uint32_t n) const {
    return literals_[n];
  }
  const GeneratedText& text() const { return *text_; }
  const BoxSource& box(std::uint32_t n) const { return boxes_[n]; }
  // The tensor's entry, if all kTensor segments added by AddTensor are of one tensor. It is kept,
  // because looking it up for each read would cost more than the read. In a file of several tensors
  // each read looks up the tensors that it touches.
  const std::optional<TensorEntry>& tensor() const { return tensor_; }
  bool is_shared() const { return shared_ != nullptr; }  // Whether FromSharedSegments made it.
  // Whether reads access data files, and so may block as long as storage does. False for files of
  // literals and generated text, which is rendered from the index, if the Add functions made them.
  // The mount uses this to decide whether a read is queued for another thread, whether a large file
  // may bypass the page cache, and whether it searches for a stored file with the same bytes.
  bool reads_data() const { return reads_data_; }

 private:
  void Add(Segment::Kind kind, std::uint32_t ordinal, std::uint64_t length, std::uint64_t skip);

  std::uint64_t size_ = 0;
  bool reads_data_ = false;
  std::vector<Segment> own_;
  std::shared_ptr<const std::vector<Segment>> shared_;  // Used instead of own_ if not null.
  std::vector<std::shared_ptr<const std::string>> literals_;
  std::shared_ptr<const GeneratedText> text_;
  std::vector<BoxSource> boxes_;
  std::optional<TensorEntry> tensor_;
  bool several_tensors_ = false;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_FILE_SEGMENTS_H_
