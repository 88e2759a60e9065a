// SPDX-License-Identifier: Apache-2.0
// Index records in memory, packed into few blocks.
#include "index/records/memory_table.h"

#include <algorithm>

namespace tensormount {

void MemoryTable::Append(std::string_view key, std::string_view value) {
  constexpr std::size_t kBlock = std::size_t{256} << 10;
  const std::size_t size = key.size() + value.size();
  // The rest of the old block is wasted. That is little: blocks have 256 KiB, records some hundred
  // bytes.
  if (size > left_) {
    left_ = std::max(kBlock, size);
    blocks_.push_back(std::make_unique_for_overwrite<char[]>(left_));
    next_ = blocks_.back().get();
  }
  records_.push_back(
      {next_, static_cast<std::uint32_t>(key.size()), static_cast<std::uint32_t>(value.size())});
  next_ += key.copy(next_, key.size());
  next_ += value.copy(next_, value.size());
  left_ -= size;
}

std::vector<MemoryTable::Record>::const_iterator MemoryTable::Seek(std::string_view key) const {
  return std::ranges::lower_bound(records_, key, {}, &Record::Key);
}

Result<std::string> MemoryTable::Get(std::string_view key) const {
  const auto it = Seek(key);
  if (it == records_.end() || it->Key() != key) {
    return Status(Code::kNotFound, "index: no such record");
  }
  return std::string(it->Value());
}

Status MemoryTable::Scan(std::string_view prefix, std::string_view from,
                         const std::function<bool(std::string_view, std::string_view)>& fn) const {
  for (auto it = Seek(std::max(prefix, from)); it != records_.end(); ++it) {
    if (!it->Key().starts_with(prefix) || !fn(it->Key(), it->Value())) break;
  }
  return Status();
}

}  // namespace tensormount
