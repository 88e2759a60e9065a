// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_MAPPED_TABLE_H_
#define TENSORMOUNT_INDEX_RECORDS_MAPPED_TABLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"
#include "index/records/memory_table.h"
#include "index/records/name_binding.h"

namespace tensormount {

// Index records of a checkpoint as a name map shows it. Records of tensors are made on demand from
// the index of the stored checkpoint. A tensor that is only another name of a stored tensor has
// that tensor's digest and extents. Other mapped tensors have neither, and no chunks; their mtime
// is the newest of their sources. Objects have their new names; files, manifests and common values
// are those of the stored checkpoint, with the same numbers.
class MappedTable : public Table {
 public:
  // Reads all records but extents once. Common records for which `leave_out` returns true are left
  // out: those that hold keys would name stored tensors.
  static Result<std::unique_ptr<MappedTable>> Make(
      std::shared_ptr<const CheckpointIndex> source, std::shared_ptr<const NameBinding> binding,
      const std::function<bool(std::string_view name)>& leave_out);

  Result<std::string> Get(std::string_view key) const override;
  // `prefix` must begin with the letter of a kind of record.
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;
  std::string recovered() const override { return source_->recovered(); }

 private:
  MappedTable(std::shared_ptr<const CheckpointIndex> source,
              std::shared_ptr<const NameBinding> binding)
      : source_(std::move(source)), binding_(std::move(binding)) {}
  Status MakeRecords(const std::function<bool(std::string_view name)>& leave_out);
  Result<TensorEntry> EntryOf(std::uint32_t ordinal) const;
  Result<std::string> TensorRecordOf(std::uint32_t ordinal) const;

  std::shared_ptr<const CheckpointIndex> source_;
  std::shared_ptr<const NameBinding> binding_;
  std::vector<std::int64_t> mtimes_;  // Newest mtime of the sources, by application.
  MemoryTable records_;               // All records but those of tensors.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_MAPPED_TABLE_H_
