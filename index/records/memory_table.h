// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_MEMORY_TABLE_H_
#define TENSORMOUNT_INDEX_RECORDS_MEMORY_TABLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "index/records/checkpoint_index.h"

namespace tensormount {

// Index records in memory: for rebuilt indexes, and for foreign checkpoints, which have no SST file
// and may be in a directory that tensormount cannot write. The records have the same form as in
// SstTable, so that one decoder serves both. They are packed, because a million tensors have three
// million records.
class MemoryTable : public Table {
 public:
  std::size_t size() const { return records_.size(); }
  // Adds a record. Keys must rise from call to call; key and value must be smaller than 4 GiB each.
  // Append only before the table is shared, because reads take no lock. Get and the start of a Scan
  // are binary searches.
  void Append(std::string_view key, std::string_view value);

  Result<std::string> Get(std::string_view key) const override;
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;

 private:
  // A record takes 16 bytes of overhead, a few times less than a node of std::map.
  struct Record {
    const char* key = nullptr;  // The value follows the key.
    std::uint32_t key_size = 0;
    std::uint32_t value_size = 0;
    std::string_view Key() const { return {key, key_size}; }
    std::string_view Value() const { return {key + key_size, value_size}; }
  };
  // The first record whose key is not less than `key`.
  std::vector<Record>::const_iterator Seek(std::string_view key) const;

  // Memory of the records, which never move.
  std::vector<std::unique_ptr<char[]>> blocks_;
  std::size_t left_ = 0;  // Free bytes in the last block.
  char* next_ = nullptr;
  std::vector<Record> records_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_MEMORY_TABLE_H_
