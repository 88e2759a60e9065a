// SPDX-License-Identifier: Apache-2.0
// Derive of tensormount/derive.h: one process takes the kept tensors and objects from a base, and
// publishes the new checkpoint like a save.
#include "tensormount/derive.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/file_system_for.h"
#include "base/glob.h"
#include "index/read/checkpoint.h"
#include "index/records/key_renames.h"
#include "index/records/layer_names.h"
#include "index/store/derive.h"
#include "index/store/linking.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

// Selects the keys to keep, and records which globs and rules matched a key.
class KeyFilter {
 public:
  explicit KeyFilter(const DeriveOptions& options)
      : options_(options),
        keep_used_(options.keep.size(), false),
        drop_used_(options.drop.size(), false),
        renames_used_(options.renames_must_match ? options.rename.rules().size() : 0, false) {}

  bool Keeps(const std::string& key) {
    const bool kept = Matches(options_.keep, keep_used_, key) || options_.keep.empty();
    const bool stays = !Matches(options_.drop, drop_used_, key) && kept;
    if (stays) NoteRenames(key);
    return stays;
  }

  // kNotFound for a glob or rule that matches nothing, because it is probably a typing error.
  Status CheckUsed(const LayerNames& layers) {
    for (const auto& [key, pattern] : layers.patterns()) NoteRenames(pattern);
    TENSORMOUNT_RETURN_IF_ERROR(CheckUsed(options_.keep, keep_used_, "keep"));
    TENSORMOUNT_RETURN_IF_ERROR(CheckUsed(options_.drop, drop_used_, "drop"));
    std::vector<std::string> from;
    for (const KeyMap::Rule& rule : options_.rename.rules()) from.push_back(rule.from);
    return CheckUsed(from, renames_used_, "rename");
  }

 private:
  void NoteRenames(const std::string& key) {
    for (std::size_t i = 0; i < renames_used_.size(); ++i) {
      renames_used_[i] = renames_used_[i] || KeyMap::Matches(options_.rename.rules()[i], key);
    }
  }
  static bool Matches(const std::vector<std::string>& globs, std::vector<bool>& used,
                      const std::string& key) {
    bool any = false;
    for (std::size_t i = 0; i < globs.size(); ++i) {
      if (!GlobMatches(globs[i], key)) continue;
      used[i] = any = true;
    }
    return any;
  }
  static Status CheckUsed(const std::vector<std::string>& globs, const std::vector<bool>& used,
                          const char* what) {
    const auto unused = std::find(used.begin(), used.end(), false);
    if (unused == used.end()) return Status();
    return Status(Code::kNotFound, std::string(what) + " " +
                                       globs[static_cast<std::size_t>(unused - used.begin())] +
                                       ": matches no tensor and no object");
  }

  const DeriveOptions& options_;
  std::vector<bool> keep_used_;
  std::vector<bool> drop_used_;
  std::vector<bool> renames_used_;
};

// Selects the tensors and objects that are taken, with their new keys.
Result<ReusedFromBase> Choose(const CheckpointIndex& index, const KeyRenames& names,
                              DeriveReport& report) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> objects, index.Objects());
  ReusedFromBase taken = ReusedFromBase::Nothing(index.tensor_count(), objects.size());
  taken.tensor_keys = names.tensors();
  taken.object_keys.resize(objects.size());
  for (std::size_t i = 0; i < taken.tensors.size(); ++i) {
    taken.tensors[i] = !names.tensors()[i].empty();
    ++(taken.tensors[i] ? report.tensors : report.dropped);
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    taken.object_keys[i] = names.Object(objects[i].key);
    taken.objects[i] = !taken.object_keys[i].empty();
    ++(taken.objects[i] ? report.objects : report.dropped);
  }
  return taken;
}

Result<Inventory> Coordinator(const CheckpointIndex& index, const KeyRenames& names) {
  Inventory coordinator;
  coordinator.info.producer = index.info().producer;
  coordinator.info.world_size = index.info().world_size;
  coordinator.info.root = index.info().root;
  TENSORMOUNT_ASSIGN_OR_RETURN(coordinator.common, index.CommonRecords());
  std::erase_if(coordinator.common,
                [](const auto& record) { return record.first.starts_with(kLayersRecordPrefix); });
  for (const auto& [ordinal, pattern] : names.layers()) {
    coordinator.common.emplace(std::string(kLayersRecordPrefix) + names.tensors()[ordinal],
                               pattern);
  }
  return coordinator;
}

Status FillStaging(FileSystem& fs, const OpenedCheckpoint& base, const Staging& staging,
                   const ReusedFromBase& taken, DeriveReport& report) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const LinkPlan plan, PlanLinks(base, staging, taken));
  BaseLinker linker(fs, base, staging, taken, plan);
  LinkCounts counts;
  TENSORMOUNT_RETURN_IF_ERROR(linker.LinkAll(ConsecutiveLinkedSaves(base.index()) + 1, counts));
  report.files_linked = counts.files_linked;
  report.bytes_linked = counts.bytes_linked;
  report.files_copied = counts.files_copied;
  report.bytes_copied = counts.bytes_copied;
  report.refused = counts.refused;
  return Status();
}

}  // namespace

Result<DeriveReport> DeriveOn(FileSystem& fs, std::string_view path, std::string_view from,
                              const DeriveOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName target, SplitCheckpointPath(std::string(path)));
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(from));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, target.store));
  DeriveReport report;
  report.path = JoinPath(target.store, target.name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto base,
                               OpenedCheckpoint::Open(fs, store.CheckpointPath(from), {}));
  const CheckpointIndex& index = base->index();
  KeyFilter filter(options);
  TENSORMOUNT_ASSIGN_OR_RETURN(const KeyRenames names,
                               KeyRenames::Make(index, options.rename, [&](const std::string& key) {
                                 return filter.Keeps(key);
                               }));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const LayerNames> layers, index.Layers());
  TENSORMOUNT_RETURN_IF_ERROR(filter.CheckUsed(*layers));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ReusedFromBase taken, Choose(index, names, report));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Inventory coordinator, Coordinator(index, names));

  TENSORMOUNT_ASSIGN_OR_RETURN(Staging staging, store.Begin(target.name, options.if_exists,
                                                            BaseChoice::kNamed, std::string(from)));
  const auto publish = [&]() -> Result<Store::Published> {
    TENSORMOUNT_RETURN_IF_ERROR(staging.base_problem);
    if (staging.base != index.info().uuid) {
      return Status(Code::kStale, store.CheckpointPath(from) + ": replaced by another checkpoint");
    }
    staging.parent = staging.base;
    staging.parent_name = staging.base_name;
    TENSORMOUNT_RETURN_IF_ERROR(FillStaging(fs, *base, staging, taken, report));
    Store::PublishOptions how;
    how.if_exists = options.if_exists;
    how.check_layer_names = !options.rename.empty();
    how.derived = true;
    return store.Publish(staging, coordinator, how);
  };
  const Result<Store::Published> published = publish();
  if (!published.ok()) {
    // After kUnknown the checkpoint may be published, so nothing is aborted. If AbortOrDecide
    // fails, gc removes the staging after a day.
    if (published.status().code() != Code::kUnknown) (void)store.AbortOrDecide(staging);
    return published.status();
  }
  report.uuid = staging.uuid.ToString();
  report.generation = staging.generation;
  return report;
}

Result<DeriveReport> Derive(std::string_view path, std::string_view from,
                            const DeriveOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName target, SplitCheckpointPath(std::string(path)));
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(target.store));
  return DeriveOn(*fs, path, from, options);
}

}  // namespace tensormount
