// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_GENERATED_TEXT_H_
#define TENSORMOUNT_FS_VIEWS_GENERATED_TEXT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tensormount/status.h"

namespace tensormount::fs {

// A file whose text is made when it is read: a head, some text for each of many items, a tail.
// Only where each block of items begins is kept, so that checkpoint.json of a million tensors costs
// no memory; the block that was read last is kept too, because a reader comes for the next bytes of
// it. The same items must always give the same text: sizes are told before anything is read.
// Thread-safe.
class GeneratedText {
 public:
  struct Parts {
    std::string head;
    std::string tail;
    std::uint32_t items = 0;
    // Appends the text of items [first, first + count).
    std::function<Status(std::uint32_t first, std::uint32_t count, std::string& out)> render;
  };
  // Renders everything once, to know how long it is.
  static Result<std::shared_ptr<const GeneratedText>> Make(Parts parts);

  std::uint64_t size() const { return size_; }
  // Exactly `size` bytes; the range must lie within the text.
  Status Read(std::uint64_t offset, void* out, std::size_t size) const;

 private:
  // Rendered at once: some ten KiB of text, and 8 bytes of memory for it.
  static constexpr std::uint32_t kBlockItems = 256;
  GeneratedText() = default;
  Status RenderBlock(std::size_t block, std::string& out) const;

  Parts parts_;
  std::vector<std::uint64_t> begins_;  // Of each block; the last one is the tail's.
  std::uint64_t size_ = 0;
  mutable std::mutex mutex_;
  mutable std::size_t cached_block_ = static_cast<std::size_t>(-1);
  mutable std::shared_ptr<const std::string> cached_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_GENERATED_TEXT_H_
