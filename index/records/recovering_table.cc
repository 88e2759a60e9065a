// SPDX-License-Identifier: Apache-2.0
// From the first damaged block on, the same records from the manifests. That a record is not there
// is an answer and not damage.
#include "index/records/recovering_table.h"

#include <utility>

namespace tensormount {
namespace {

// A record that is not there is an answer, not damage.
bool IsDamage(const Status& status) {
  return status.code() != Code::kNotFound && CheckpointIndex::IsLost(status);
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
  // Under the lock, which may be long (a rebuild reads all manifests): whoever else met damage
  // needs the same result, and would only do the same work.
  if (second_ == nullptr) {
    Result<std::shared_ptr<const Table>> again = again_();
    if (!again.ok()) {
      const bool newer = again.status().code() == Code::kUnsupported;
      return Status(newer ? Code::kUnsupported : Code::kDataLoss,
                    damage.message() + "; rebuilding it failed: " + again.status().message());
    }
    second_ = std::move(again).value();
    recovered_ = damage.message() + "; read from elsewhere since";
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
        // Kept for each record, also while all is well: where the scan breaks is only known
        // afterwards.
        next += '\0';  // The first key behind it.
        stopped = !fn(key, value);
        return !stopped;
      });
  if (stopped || !IsDamage(scanned)) return stopped ? Status() : scanned;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Table* table, Recover(scanned));
  return table->Scan(prefix, next, fn);
}

}  // namespace tensormount
