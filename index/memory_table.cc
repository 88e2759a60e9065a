// SPDX-License-Identifier: Apache-2.0
#include "index/memory_table.h"

#include <algorithm>

namespace tensormount {

std::vector<MemoryTable::Record>::const_iterator MemoryTable::Seek(std::string_view key) const {
  return std::lower_bound(
      records_.begin(), records_.end(), key,
      [](const Record& record, std::string_view wanted) { return record.first < wanted; });
}

Result<std::string> MemoryTable::Get(std::string_view key) const {
  const auto it = Seek(key);
  if (it == records_.end() || it->first != key) {
    return Status(Code::kNotFound, "index: no such record");
  }
  return it->second;
}

Status MemoryTable::Scan(std::string_view prefix, std::string_view from,
                         const std::function<bool(std::string_view, std::string_view)>& fn) const {
  for (auto it = Seek(std::max(prefix, from)); it != records_.end(); ++it) {
    if (!std::string_view(it->first).starts_with(prefix)) break;
    if (!fn(it->first, it->second)) break;
  }
  return Status();
}

}  // namespace tensormount
