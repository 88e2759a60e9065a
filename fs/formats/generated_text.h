// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_GENERATED_TEXT_H_
#define TENSORMOUNT_FS_FORMATS_GENERATED_TEXT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"

namespace tensormount::fs {

// A file whose text is rendered when it is read: a head, some text for each of many items, a tail.
// Thread-safe.
//
// stat(2) must tell the size before anything is read, so Make renders the text once, only to
// measure it: checkpoint.json of a million tensors has about 150 MB, too much to keep for each
// mounted checkpoint. Of the items only the offset of each block, and the text of the block that
// was read last, are kept. The same items must always give the same text.
// Cost: Make renders all items, O(items). A read finds a block by binary search and renders it;
// reading front to back renders each block once. Readers at different offsets replace each other's
// kept block, so they render more often.
class GeneratedText {
 public:
  // Appends the text of items [first, first + count).
  using Render = std::function<Status(std::uint32_t first, std::uint32_t count, std::string& out)>;
  // Renders the whole text once, to measure it.
  static Result<std::shared_ptr<const GeneratedText>> Make(std::string head, std::uint32_t items,
                                                           Render render, std::string tail);

  std::uint64_t size() const { return size_; }
  // Reads exactly `size` bytes; the range must lie within the text.
  // kInternal if a block's length differs from the measured length, which means that the text
  // depends on more than the checkpoint.
  Status Read(std::uint64_t offset, void* out, std::size_t size) const;

 private:
  // Number of items in a block, which is rendered as a whole: tens of KiB of text, and 8 bytes of
  // memory for its offset. Larger blocks would make small reads slow; smaller blocks would make
  // begins_ large.
  static constexpr std::uint32_t kBlockItems = 256;
  GeneratedText(std::string head, std::uint32_t items, Render render, std::string tail)
      : head_(std::move(head)), items_(items), render_(std::move(render)), tail_(std::move(tail)) {}
  Status RenderBlock(std::size_t block, std::string& out) const;

  const std::string head_;
  const std::uint32_t items_;
  const Render render_;
  const std::string tail_;
  std::vector<std::uint64_t> begins_;  // Offset of each block, then of the tail.
  std::uint64_t size_ = 0;
  mutable std::mutex mutex_;
  // The block that was read last, guarded by mutex_. Its text is immutable and read outside the
  // lock.
  mutable std::size_t cached_block_ = static_cast<std::size_t>(-1);
  mutable std::shared_ptr<const std::string> cached_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_GENERATED_TEXT_H_
