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

// What a virtual file is made of: segments side by side from 0 on. The one mechanism of all views;
// made by a view, read by VirtualFile. A value; what it shares is immutable.
//
// Example, npy/w.npy of a tensor of 96 bytes:
//   kLiteral  begin 0    length 128  the NumPy header
//   kTensor   begin 128  length 96   skip 0
// Why segments and not a function that reads: the same description serves reads (by any offset),
// mappings for splice, the search for a stored file that has these bytes already, proofs by hash,
// and exports that cut a file among ranks.
// Finding the segment of an offset is a binary search. A file of 100,000 tensors costs 32 bytes a
// segment, which all open files of it share (Shared).
class FileSegments {
 public:
  struct Segment {
    enum class Kind : std::uint8_t {
      kLiteral,  // `skip` bytes into literal number `ordinal`.
      kText,     // The generated text.
      kTensor,   // Row-major bytes of tensor `ordinal` (of the index) from `skip` on.
      kBox,      // Box number `ordinal`, row-major within its container.
      kObject,   // Object part number `ordinal`.
    } kind = Kind::kLiteral;
    // What it counts depends on the kind, as above.
    std::uint32_t ordinal = 0;
    std::uint64_t begin = 0;  // In the file.
    std::uint64_t length = 0;
    std::uint64_t skip = 0;
  };
  // A box of a tensor as a packed row-major array of `container` elements, which has the box at its
  // origin and zeros elsewhere (edge chunks of zarr). container == box.extent(): a plain slice.
  // Worked out when the file is opened, so that a read only has to cut a byte range out of it.
  struct BoxSource {
    TensorEntry tensor;
    Box box;
    Dims container;
    std::uint64_t bytes = 0;  // Of the container.
    // The same as bytes (shard/tensor_meta.h): the box within ByteShape of the tensor, and the
    // container in axes of that shape.
    Box byte_box;
    Dims byte_container;
  };

  // These append. What is empty adds nothing.
  void AddLiteral(std::string text);
  void AddLiteral(std::shared_ptr<const std::string> text);
  // A file has at most one; views that need another put literals around it.
  void AddText(std::shared_ptr<const GeneratedText> text);  // Once.
  // `length` bytes of the tensor's row-major bytes from `skip` on.
  void AddTensor(const TensorEntry& tensor, std::uint64_t skip, std::uint64_t length);
  void AddTensor(const TensorEntry& tensor) { AddTensor(tensor, 0, tensor.meta.bytes()); }
  // kInvalidArgument where the box is not within the tensor, not within the container, or does not
  // begin and end on bytes.
  Status AddBox(const TensorEntry& tensor, const Box& box, const Dims& container);
  void AddObject(std::uint32_t part, std::uint64_t length);
  // Instead of the above: very many segments that several files share, the first of them literal
  // number 0. They must lie side by side from 0 on.
  // Counts as reading data, whatever the segments are, because all callers have tensors in them.
  static FileSegments Shared(std::shared_ptr<const std::vector<Segment>> segments,
                             std::shared_ptr<const std::string> head);

  std::uint64_t size() const { return size_; }
  const std::vector<Segment>& segments() const { return shared_ ? *shared_ : own_; }
  const std::string& literal(std::uint32_t n) const { return *literals_[n]; }
  const std::shared_ptr<const std::string>& shared_literal(std::uint32_t n) const {
    return literals_[n];
  }
  const GeneratedText& text() const { return *text_; }
  const BoxSource& box(std::uint32_t n) const { return boxes_[n]; }
  // The entry where all kTensor segments are of one tensor; others are looked up when read.
  // Kept, because reading the index again for each read of a plain tensor file would cost more than
  // many of these reads. Files of many tensors look up the one that a read touches.
  const std::optional<TensorEntry>& tensor() const { return tensor_; }
  bool is_shared() const { return shared_ != nullptr; }  // Made by Shared.
  // Whether reads go to data files, and so may block for as long as these do.
  // Generated text does not count: it is made of the index, which answers look-ups and listings on
  // the same thread too (Vfs::MayBlock). What depends on it: whether a read is queued for another
  // thread, whether a large file may bypass the page cache, and whether a stored file is looked for
  // at all. Text has none of these needs; where chunks of extents/ have to be looked up in files of
  // others, that is done when the text is made, by Stat and Open.
  bool reads_data() const { return reads_data_; }

 private:
  void Add(Segment::Kind kind, std::uint32_t ordinal, std::uint64_t length, std::uint64_t skip);

  std::uint64_t size_ = 0;
  bool reads_data_ = false;
  std::vector<Segment> own_;
  std::shared_ptr<const std::vector<Segment>> shared_;  // Instead of own_, where not null.
  std::vector<std::shared_ptr<const std::string>> literals_;
  std::shared_ptr<const GeneratedText> text_;
  std::vector<BoxSource> boxes_;
  std::optional<TensorEntry> tensor_;
  bool several_tensors_ = false;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_FILE_SEGMENTS_H_
