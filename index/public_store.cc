// SPDX-License-Identifier: Apache-2.0
// tensormount/store.h and retention.h over Store, on the host's files.
#include <chrono>

#include "tensormount/retention.h"
#include "tensormount/store.h"

#include "base/file_system.h"
#include "base/parallel.h"
#include "index/read/checkpoint.h"
#include "index/store/pins.h"
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
  TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::Open(HostFileSystem(), parts.store));
  return StoreWithName{std::move(store), std::move(parts.name)};
}

Status ReadDateAndSize(const std::string& directory, StoredCheckpoint& out) {
  OpenedCheckpoint::Options how;
  how.check_index_bytes = 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened,
                               OpenedCheckpoint::Open(HostFileSystem(), directory, how));
  out.created = opened->index().info().created;
  for (const FileRecord& file : opened->index().files()) out.file_bytes += file.length;
  return {};
}

}  // namespace

Result<std::vector<StoredCheckpoint>> ListCheckpoints(const std::string& store,
                                                      const ListOptions& options) {
  FileSystem& fs = HostFileSystem();
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(fs, store));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> list, opened.List());
  const Result<LatestCheckpoint> latest = opened.Latest();
  TENSORMOUNT_ASSIGN_OR_RETURN(const pins::PinMap pinned,
                               pins::ReadAll(fs, opened.path(), store_moves::NowSeconds()));
  std::vector<StoredCheckpoint> out;
  for (const CheckpointListing& item : list) {
    StoredCheckpoint& one = out.emplace_back();
    one.name = item.name;
    one.uuid = item.uuid.ToString();
    one.generation = item.generation;
    one.latest =
        latest.ok() && latest.value().name == item.name && latest.value().uuid == item.uuid;
    one.problem = item.problem;
    const auto pin = pinned.find(item.uuid);
    one.pinned = item.problem.ok() && pin != pinned.end() && !pin->second.expired;
  }
  if (!options.details) return out;
  struct Nothing {};
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachParallel<Nothing>(out.size(), 0, [&](std::size_t i, Nothing&) -> Status {
        if (!out[i].problem.ok()) return {};
        out[i].problem = ReadDateAndSize(opened.CheckpointPath(out[i].name), out[i]);
        return {};
      }));
  // Removed since it was listed.
  std::erase_if(out, [](const StoredCheckpoint& c) { return c.problem.code() == Code::kNotFound; });
  return out;
}

Status RemoveCheckpoint(const std::string& path, const RemoveOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreWithName at, OpenStoreOf(path));
  return at.store.Remove(at.name, options);
}

Result<GarbageReport> CollectGarbage(const std::string& store, const GarbageOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(HostFileSystem(), store));
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

Result<PinnedCheckpoint> PinCheckpoint(const std::string& path, const PinOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreWithName at, OpenStoreOf(path));
  return pins::Pin(HostFileSystem(), at.store, at.name, options);
}

Status UnpinCheckpoint(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreWithName at, OpenStoreOf(path));
  return pins::Unpin(HostFileSystem(), at.store, at.name);
}

Result<std::vector<PinnedCheckpoint>> ListPins(const std::string& store) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(HostFileSystem(), store));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const pins::PinMap all,
      pins::ReadAll(HostFileSystem(), opened.path(), store_moves::NowSeconds()));
  std::vector<PinnedCheckpoint> out;
  for (const auto& [uuid, pin] : all) out.push_back(pin);
  return out;
}

Result<PruneReport> PruneCheckpoints(const std::string& store, const PruneOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(HostFileSystem(), store));
  return retention::Prune(HostFileSystem(), opened, options);
}

Result<std::optional<RetentionRules>> RetentionPolicy(const std::string& store) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(HostFileSystem(), store));
  return pins::ReadPolicy(HostFileSystem(), opened.path());
}

Status SetRetentionPolicy(const std::string& store, const std::optional<RetentionRules>& rules) {
  FileSystem& fs = HostFileSystem();
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(fs, store));
  TENSORMOUNT_RETURN_IF_ERROR(opened.CheckWritable());
  return rules ? pins::WritePolicy(fs, opened.path(), *rules)
               : pins::RemovePolicy(fs, opened.path());
}

}  // namespace tensormount
