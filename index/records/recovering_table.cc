// SPDX-License-Identifier: Apache-2.0
// After the first damaged block all reads use the second copy of the records, if it can be made.
// kNotFound is an answer, not damage.
#include "index/records/recovering_table.h"

#include <utility>

namespace tensormount {
namespace {

bool IsDamage(const Status& status) {
  return status.code() != Code::kNotFound && CheckpointIndex::IsCopyDamaged(status);
}

}  // namespace

const Table* RecoveringTable::second() const {
  std::lock_guard lock(mutex_);
  return second_.get();
}

std::string RecoveringTable::recovered() const {
  std::lock_guard lock(mutex_);
  return recovered_;
}

Result<const Table*> RecoveringTable::Recover(const Status& damage) const {
  std::lock_guard lock(mutex_);
  // The lock is kept during a rebuild, which may be long, because other threads that met damage
  // need the same result.
  if (second_ == nullptr) {
    Result<std::shared_ptr<const Table>> again = make_fallback_();
    if (!again.ok()) {
      const bool newer = again.status().code() == Code::kUnsupported;
      return Status(
          newer ? Code::kUnsupported : Code::kDataLoss,
          damage.message() + "; rebuilding the index failed: " + again.status().message());
    }
    second_ = std::move(again).value();
    recovered_ = damage.message() + "; reading a rebuilt index since then";
  }
  return second_.get();
}

Result<std::string> RecoveringTable::Get(std::string_view key) const {
  if (const Table* table = second()) return table->Get(key);
  Result<std::string> value = first_->Get(key);
  if (!IsDamage(value.status())) return value;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Table* table, Recover(value.status()));
  return table->Get(key);
}

Status RecoveringTable::Scan(
    std::string_view prefix, std::string_view from,
    const std::function<bool(std::string_view key, std::string_view value)>& fn) const {
  if (const Table* table = second()) return table->Scan(prefix, from, fn);
  std::string next(from);
  bool stopped = false;
  const Status scanned =
      first_->Scan(prefix, from, [&](std::string_view key, std::string_view value) {
        next = key;
        // The position is remembered for each record, because the scan may fail at the next record.
        next += '\0';  // The smallest key greater than `key`.
        stopped = !fn(key, value);
        return !stopped;
      });
  if (stopped || !IsDamage(scanned)) return stopped ? Status() : scanned;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Table* table, Recover(scanned));
  return table->Scan(prefix, next, fn);
}

}  // namespace tensormount
