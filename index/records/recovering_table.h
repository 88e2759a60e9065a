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

// A table whose damage shows only where it is read: then the same records are taken from elsewhere,
// from that record on, and for good. Thread-safe.
// An index over 4 MiB is not hashed as a whole at open, so a damaged block is met by some read much
// later, perhaps by a mount that has been up for weeks. Without this class that read, and all
// others in the block, would fail until somebody remounts.
class RecoveringTable : public Table {
 public:
  using Again = std::function<Result<std::shared_ptr<const Table>>()>;
  // `again` must give the very same records.
  // A scan that breaks off goes on behind the last key that its caller saw: no record is given
  // twice or left out. That only holds for the same records in the same order.
  RecoveringTable(std::unique_ptr<Table> first, Again again)
      : first_(std::move(first)), again_(std::move(again)) {}

  Result<std::string> Get(std::string_view key) const override;
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;
  std::string recovered() const override;

 private:
  const Table* second() const;
  // The second table, made where it is not there yet; under the mutex, so that of several threads
  // that meet damage one rebuilds and the others wait for it. Not retried by time: each read that
  // meets damage tries again until one succeeds.
  Result<const Table*> Recover(const Status& damage) const;

  const std::unique_ptr<Table> first_;
  const Again again_;
  mutable std::mutex mutex_;  // For what follows.
  mutable std::shared_ptr<const Table> second_;
  mutable std::string recovered_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_RECOVERING_TABLE_H_
