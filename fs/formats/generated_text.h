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

// A file whose text is made when it is read: a head, some text for each of many items, a tail.
// Only where each block of items begins is kept, so that checkpoint.json of a million tensors costs
// no memory; the block that was read last is kept too, because a reader comes for the next bytes of
// it. The same items must always give the same text: sizes are told before anything is read.
// Thread-safe.
//
// Why: stat(2) must tell the size before anything is read, so the text is rendered once to be
// measured and thrown away, and then rendered again where it is read. checkpoint.json of a million
// tensors is some 150 MB; kept for each mounted checkpoint that would be more than all else of the
// mount.
// Cost: making it renders all items once, O(items). A read at any offset renders one block, after a
// binary search for it; a reader from front to back renders each block once, because the last one
// is kept. Two readers at different offsets take the kept block from each other and still get right
// bytes.
class GeneratedText {
 public:
  // Appends the text of items [first, first + count).
  using Render = std::function<Status(std::uint32_t first, std::uint32_t count, std::string& out)>;
  // Renders everything once, to know how long it is.
  static Result<std::shared_ptr<const GeneratedText>> Make(std::string head, std::uint32_t items,
                                                           Render render, std::string tail);

  std::uint64_t size() const { return size_; }
  // Exactly `size` bytes; the range must lie within the text.
  // kInternal where a block does not come out as long as it did when it was measured: the maker's
  // text depends on something else than the checkpoint.
  Status Read(std::uint64_t offset, void* out, std::size_t size) const;

 private:
  // Rendered at once: some ten KiB of text, and 8 bytes of memory for it.
  // More would make small reads slow, fewer would make the table of begins large.
  static constexpr std::uint32_t kBlockItems = 256;
  GeneratedText(std::string head, std::uint32_t items, Render render, std::string tail)
      : head_(std::move(head)), items_(items), render_(std::move(render)), tail_(std::move(tail)) {}
  Status RenderBlock(std::size_t block, std::string& out) const;

  const std::string head_;
  const std::uint32_t items_;
  const Render render_;
  const std::string tail_;
  std::vector<std::uint64_t> begins_;  // Of each block; the last one is the tail's.
  std::uint64_t size_ = 0;
  mutable std::mutex mutex_;
  // Under mutex_; the text itself is immutable and read outside of it.
  mutable std::size_t cached_block_ = static_cast<std::size_t>(-1);
  mutable std::shared_ptr<const std::string> cached_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_GENERATED_TEXT_H_
