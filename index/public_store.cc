// SPDX-License-Identifier: Apache-2.0
// Public interface of tensormount/store.h, retention.h and store_repair.h over Store. The caller's
// path selects the file system.
#include <chrono>

#include "tensormount/retention.h"
#include "tensormount/store.h"
#include "tensormount/store_repair.h"

#include "base/file_system_for.h"
#include "index/foreign/open_source.h"
#include "index/store/costs.h"
#include "index/store/pins.h"
#include "index/store/repair.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

struct StoreWithName {
  Store store;
  std::string name;
};
Result<StoreWithName> OpenStoreOf(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(StoreAndName parts, SplitCheckpointPath(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::Open(parts.store));
  return StoreWithName{std::move(store), std::move(parts.name)};
}

}  // namespace

Result<std::vector<StoredCheckpoint>> ListCheckpoints(const std::string& store) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
  FileSystem& fs = opened.fs();
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreCosts costs, StoreCosts::Of(fs, opened));
  // If the latest checkpoint cannot be determined, no entry is marked as the latest.
  const Result<LatestCheckpoint> latest = opened.LatestOf(costs.Listings());
  const auto pinned = pins::ReadAll(fs, opened.path(), fs.NowSeconds());
  std::vector<StoredCheckpoint> out;
  for (const CheckpointCost& cost : costs.checkpoints()) {
    const CheckpointListing& item = cost.listing;
    StoredCheckpoint& one = out.emplace_back();
    one.name = item.name;
    one.uuid = item.uuid.ToString();
    one.generation = item.generation;
    one.latest =
        latest.ok() && latest.value().name == item.name && latest.value().uuid == item.uuid;
    one.problem = item.problem;
    one.pins_read = pinned.status();
    if (pinned.ok() && item.problem.ok()) {
      const auto pin = pinned.value().find(item.uuid);
      one.pinned = pin != pinned.value().end() && !pin->second.expired;
    }
    one.created = cost.created;
    one.file_bytes = cost.data_bytes;
    one.stored_bytes = cost.bytes;
    one.own_bytes = cost.own_bytes;
  }
  return out;
}

Status RemoveCheckpoint(const std::string& path, const RemoveOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreWithName at, OpenStoreOf(path));
  return at.store.Remove(at.name, options);
}

Result<GarbageReport> CollectGarbage(const std::string& store, const GarbageOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
  Store::GcOptions how;
  how.dry_run = options.dry_run;
  if (options.grace_seconds >= 0) {
    how.grace = std::chrono::seconds(options.grace_seconds);
    how.trust_grace = true;
  }
  how.staging_age = std::chrono::seconds(options.staging_age_seconds);
  TENSORMOUNT_ASSIGN_OR_RETURN(Store::GcReport report, opened.Gc(how));
  return GarbageReport{.removed = std::move(report.removed),
                       .kept = std::move(report.kept),
                       .failed = std::move(report.failed),
                       .bytes_freed = report.bytes_freed};
}

Result<RepairReport> RepairCheckpoint(const std::string& path, const std::string& from,
                                      const RepairOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FoundSource found, FindSource(from, options.roots));
  if (found.kind == SourceKind::kStore) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName parts, SplitCheckpointPath(path));
    found.kind = SourceKind::kCheckpoint;
    found.path = JoinPath(found.path, parts.name);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(auto other, OpenFound(found, options.roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName parts, SplitCheckpointPath(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(parts.store));
  return RepairOn(*fs, path, std::move(other), options);
}

Result<PinnedCheckpoint> PinCheckpoint(const std::string& path, const PinOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreWithName at, OpenStoreOf(path));
  return pins::Pin(at.store.fs(), at.store, at.name, options);
}

Status UnpinCheckpoint(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreWithName at, OpenStoreOf(path));
  return pins::Unpin(at.store.fs(), at.store, at.name);
}

Result<std::vector<PinnedCheckpoint>> ListPins(const std::string& store) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
  TENSORMOUNT_ASSIGN_OR_RETURN(const pins::PinMap all,
                               pins::ReadAll(opened.fs(), opened.path(), opened.fs().NowSeconds()));
  std::vector<PinnedCheckpoint> out;
  for (const auto& [uuid, pin] : all) out.push_back(pin);
  return out;
}

Result<PruneReport> PruneCheckpoints(const std::string& store, const PruneOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
  return retention::Prune(opened.fs(), opened, options);
}

Result<std::optional<RetentionRules>> RetentionPolicy(const std::string& store) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
  return pins::ReadPolicy(opened.fs(), opened.path());
}

Status SetRetentionPolicy(const std::string& store, const std::optional<RetentionRules>& rules) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
  TENSORMOUNT_RETURN_IF_ERROR(opened.CheckWritable());
  return rules ? pins::WritePolicy(opened.fs(), opened.path(), *rules)
               : pins::RemovePolicy(opened.fs(), opened.path());
}

}  // namespace tensormount
