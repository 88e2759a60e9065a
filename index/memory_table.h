// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_MEMORY_TABLE_H_
#define TENSORMOUNT_INDEX_MEMORY_TABLE_H_

#include <string>
#include <utility>
#include <vector>

#include "index/checkpoint_index.h"

namespace tensormount {

// Records in memory: indexes of foreign files and rebuilt ones.
class MemoryTable : public Table {
 public:
  std::size_t size() const { return records_.size(); }
  // Keys must rise from call to call.
  void Append(std::string_view key, std::string_view value) { records_.emplace_back(key, value); }

  Result<std::string> Get(std::string_view key) const override;
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;

 private:
  using Record = std::pair<std::string, std::string>;
  std::vector<Record>::const_iterator Seek(std::string_view key) const;
  std::vector<Record> records_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_MEMORY_TABLE_H_
