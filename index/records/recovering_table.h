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
class RecoveringTable : public Table {
 public:
  using Again = std::function<Result<std::shared_ptr<const Table>>()>;
  // `again` must give the very same records.
  RecoveringTable(std::unique_ptr<Table> first, Again again)
      : first_(std::move(first)), again_(std::move(again)) {}

  Result<std::string> Get(std::string_view key) const override;
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;
  std::string recovered() const override;

 private:
  const Table* second() const;
  Result<const Table*> Recover(const Status& damage) const;

  const std::unique_ptr<Table> first_;
  const Again again_;
  mutable std::mutex mutex_;  // For what follows.
  mutable std::shared_ptr<const Table> second_;
  mutable std::string recovered_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_RECOVERING_TABLE_H_
