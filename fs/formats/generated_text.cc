// SPDX-License-Identifier: Apache-2.0
// Text that is rendered when it is read; only the block that was read last is kept.
// Make renders all blocks once to measure them. Read finds the block of an offset and renders it
// again, unless it is the kept one. If the renderer then gives another length, Read fails, because
// bytes would be at wrong offsets.
#include "fs/formats/generated_text.h"

#include <algorithm>
#include <cstring>

namespace tensormount::fs {

Result<std::shared_ptr<const GeneratedText>> GeneratedText::Make(std::string head,
                                                                 std::uint32_t items, Render render,
                                                                 std::string tail) {
  std::shared_ptr<GeneratedText> text(
      new GeneratedText(std::move(head), items, std::move(render), std::move(tail)));
  std::uint64_t at = text->head_.size();
  const std::size_t blocks = (items + kBlockItems - 1) / kBlockItems;
  // All blocks use one string, so that its memory is allocated once.
  std::string block;
  for (std::size_t i = 0; i < blocks; ++i) {
    text->begins_.push_back(at);
    block.clear();
    TENSORMOUNT_RETURN_IF_ERROR(text->RenderBlock(i, block));
    at += block.size();
  }
  text->begins_.push_back(at);
  text->size_ = at + text->tail_.size();
  return std::shared_ptr<const GeneratedText>(std::move(text));
}

Status GeneratedText::RenderBlock(std::size_t block, std::string& out) const {
  const std::uint32_t first = static_cast<std::uint32_t>(block) * kBlockItems;
  return render_(first, std::min(kBlockItems, items_ - first), out);
}

Status GeneratedText::Read(std::uint64_t offset, void* out, std::size_t size) const {
  char* to = static_cast<char*>(out);
  while (size > 0) {
    std::string_view run;  // Text from `offset` to the end of the head, block or tail.
    std::shared_ptr<const std::string> block_text;
    if (offset < head_.size()) {
      run = std::string_view(head_).substr(offset);
    } else if (offset >= begins_.back()) {
      if (offset >= size_)
        return Status(Code::kInternal, "internal error: a read past the end of a generated file");
      run = std::string_view(tail_).substr(offset - begins_.back());
    } else {
      const std::size_t block = static_cast<std::size_t>(
          std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin() - 1);
      {
        const std::lock_guard lock(mutex_);
        if (cached_block_ == block) block_text = cached_;
      }
      if (!block_text) {
        // Rendering may read the index, so the lock is not held: readers of other blocks need not
        // wait. Two readers of the same block may both render it.
        auto made = std::make_shared<std::string>();
        TENSORMOUNT_RETURN_IF_ERROR(RenderBlock(block, *made));
        if (made->size() != begins_[block + 1] - begins_[block]) {
          return Status(Code::kInternal, "internal error: a generated file changed its length");
        }
        block_text = made;
        const std::lock_guard lock(mutex_);
        cached_block_ = block;
        cached_ = block_text;
      }
      // block_text keeps the text alive while another reader replaces cached_.
      run = std::string_view(*block_text).substr(offset - begins_[block]);
    }
    const std::size_t n = std::min(size, run.size());
    std::memcpy(to, run.data(), n);
    to += n;
    offset += n;
    size -= n;
  }
  return {};
}

}  // namespace tensormount::fs
