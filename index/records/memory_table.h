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

// Records in memory: indexes of foreign files and rebuilt ones. Packed, because a checkpoint of a
// million tensors has three million of them.
// Needed because foreign checkpoints have no SST file and writing one would need a folder that we
// may write to; sharing the records' form with SstTable means that there is one decoder for both.
class MemoryTable : public Table {
 public:
  std::size_t size() const { return records_.size(); }
  // Keys must rise from call to call; each of both is less than 4 GiB.
  // Not while others read: a table is filled first and shared afterwards, never changed then. That
  // is why reads need no lock. Get is a binary search, O(log n); Scan finds its start in the same
  // way.
  void Append(std::string_view key, std::string_view value);

  Result<std::string> Get(std::string_view key) const override;
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;

 private:
  // 16 bytes a record beside its own: a node of a map would take several times that.
  struct Record {
    const char* key = nullptr;  // The value follows it.
    std::uint32_t key_size = 0;
    std::uint32_t value_size = 0;
    std::string_view Key() const { return {key, key_size}; }
    std::string_view Value() const { return {key + key_size, value_size}; }
  };
  // The first record whose key is not below this one.
  std::vector<Record>::const_iterator Seek(std::string_view key) const;

  std::vector<std::unique_ptr<char[]>> blocks_;  // Of what is appended, never moved.
  std::size_t left_ = 0;                         // Bytes at the end of the last one.
  char* next_ = nullptr;
  std::vector<Record> records_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_MEMORY_TABLE_H_
