// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_RECOVERING_TABLE_H_
#define TENSORMOUNT_INDEX_RECORDS_RECOVERING_TABLE_H_

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"

namespace tensormount {

// A table that switches permanently to another copy of its records when a read first fails with
// damage (CheckpointIndex::IsCopyDamaged). An index over 4 MiB is not hashed at open, so damage may
// show much later, perhaps in a mount that has been up for weeks. Without this class all reads of
// the block would fail until a remount. Thread-safe.
class RecoveringTable : public Table {
 public:
  using MakeFallback = std::function<Result<std::shared_ptr<const Table>>()>;
  // `again` makes the other copy. The copy must have the same records in the same order: a scan
  // that fails continues behind the last key that its caller received, so that no record is
  // repeated or omitted.
  RecoveringTable(std::unique_ptr<Table> first, MakeFallback again)
      : first_(std::move(first)), make_fallback_(std::move(again)) {}

  Result<std::string> Get(std::string_view key) const override;
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;
  std::string recovered() const override;

 private:
  const Table* second() const;
  // Makes the second table if there is none yet. The mutex is locked meanwhile, so that one thread
  // rebuilds and the others wait. After a failure, the next read that meets damage tries again.
  Result<const Table*> Recover(const Status& damage) const;

  const std::unique_ptr<Table> first_;
  const MakeFallback make_fallback_;
  mutable std::mutex mutex_;  // Guards the members below.
  mutable std::shared_ptr<const Table> second_;
  mutable std::string recovered_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_RECOVERING_TABLE_H_
