// SPDX-License-Identifier: Apache-2.0
// Store::Publish of store.h (docs/format.md, "Publish"). AbortOrDecide of any rank may move the
// staging away between any two steps. All steps work by path, so they then fail with "not found",
// and the rename at the end can only move a staging that still exists.
#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <tuple>

#include "base/errors.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/thread.h"
#include "index/read/foreign_file.h"
#include "index/records/completeness.h"
#include "index/records/layer_names.h"
#include "index/records/manifest.h"
#include "index/records/store_paths.h"
#include "index/store/mtime.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 40;
// Limit for the memory of manifests that are read ahead: their encoded and decoded bytes.
constexpr std::uint64_t kManifestsAhead = std::uint64_t{32} << 20;
// Size of a batch of extents, in bytes. For fewer bytes a second thread does not pay off.
constexpr std::uint64_t kBatchBytes = std::uint64_t{2} << 20;
// Name of a temporary file in the staging during a publish, for extents that do not fit in memory.
constexpr std::string_view kSpoolFile = "rows.spool";

class Stopwatch {
 public:
  // Seconds since the last call, or since the construction.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    const double s = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return s;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Checks the uuid of the staging, and removes BASE and leftovers of an earlier attempt. At every
// moment of a publish the file UUID or COMMIT has the uuid.
Status PrepareStaging(FileSystem& fs, const Staging& staging, bool shared) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Uuid uuid, store_moves::ReadFolderUuid(fs, staging.directory));
  if (uuid != staging.uuid) {
    return Status(Code::kInvalidArgument,
                  staging.directory + ": the staging directory belongs to " + uuid.ToString() +
                      ", not to " + staging.uuid.ToString());
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                               fs.List(staging.directory));
  const auto there = [&](std::string_view name) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](const DirectoryEntry& e) { return e.name == name; });
  };
  if (!there(store_paths::kUuidFile)) {
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.WriteFileDurably(JoinPath(staging.directory, store_paths::kUuidFile), uuid.ToString()));
  }
  for (const DirectoryEntry& entry : entries) {
    if (entry.name == "data" || entry.name == "manifest" || entry.name == store_paths::kUuidFile)
      continue;
    if (shared && store_paths::IsSharedLeftover(entry.name)) continue;
    TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(JoinPath(staging.directory, entry.name)));
  }
  return Status();
}

struct ReadManifest {
  Inventory inventory;
  CommitRecord::Entry entry;
};
Result<ReadManifest> ReadOneManifest(FileSystem& fs, const Staging& staging,
                                     const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes,
                               fs.ReadFile(JoinPath(staging.directory, name), kMaxManifestBytes));
  TENSORMOUNT_ASSIGN_OR_RETURN(Manifest manifest, DecodeManifest(bytes, name));
  ReadManifest read;
  read.inventory = std::move(manifest.inventory);
  read.entry.name = name;
  read.entry.length = bytes.size();
  read.entry.hash = Xxh3(bytes);
  return read;
}

// Reads manifests and passes them to `use` in order, on this thread. If they are large, several
// threads read, hash and decode the next ones ahead, up to a limit of memory.
Status ForEachManifest(FileSystem& fs, const Staging& staging,
                       const std::vector<std::string>& names,
                       const std::function<Status(ReadManifest)>& use) {
  constexpr std::uint64_t kLarge = 1 << 20;
  std::size_t at = 0;
  std::uint64_t largest = 0;
  for (; at < names.size() && largest < kLarge; ++at) {
    TENSORMOUNT_ASSIGN_OR_RETURN(ReadManifest read, ReadOneManifest(fs, staging, names[at]));
    largest = read.entry.length;
    TENSORMOUNT_RETURN_IF_ERROR(use(std::move(read)));
  }
  const std::size_t threads = std::clamp(HostCores(), 1u, 16u);
  std::deque<std::future<Result<ReadManifest>>> running;
  for (std::size_t next = at; at < names.size(); ++at) {
    const std::size_t ahead =
        std::clamp<std::size_t>(kManifestsAhead / (2 * largest), std::size_t{1}, threads);
    for (; next < names.size() && running.size() < ahead; ++next) {
      running.push_back(StartAsync(
          std::launch::async | std::launch::deferred,
          [&fs, &staging, &name = names[next]] { return ReadOneManifest(fs, staging, name); }));
    }
    Result<ReadManifest> read = running.front().get();
    running.pop_front();
    TENSORMOUNT_RETURN_IF_ERROR(read.status());
    largest = std::max(largest, read.value().entry.length);
    TENSORMOUNT_RETURN_IF_ERROR(use(std::move(read).value()));
  }
  return Status();
}

// Merges all manifests into `merger` and returns the inventory without extents. Appends an entry of
// COMMIT for each manifest that it reads to `commit_entries`.
Result<Inventory> GatherManifests(FileSystem& fs, const Staging& staging,
                                  const Inventory& coordinator,
                                  const std::vector<std::string>& expected, InventoryMerger& merger,
                                  std::vector<CommitRecord::Entry>& commit_entries) {
  const std::string folder = JoinPath(staging.directory, "manifest");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(folder));
  std::set<std::string> missing;
  for (const std::string& name : expected) {
    missing.insert(name.starts_with("manifest/") ? name : "manifest/" + name);
  }
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : entries) {
    const std::string name = "manifest/" + entry.name;
    // The file is left from an earlier attempt to publish, or is a writer's temporary file.
    if (name == kCoordinatorManifest || !entry.name.ends_with(store_paths::kManifestSuffix)) {
      TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(JoinPath(folder, entry.name)));
      continue;
    }
    missing.erase(name);
    names.push_back(name);
  }
  if (!missing.empty()) {
    return DataLoss(*missing.begin() + ": the manifest is missing" +
                    (missing.size() == 1
                         ? std::string()
                         : " (and " + std::to_string(missing.size() - 1) + " more manifests)"));
  }
  Inventory ours;
  ours.info = coordinator.info;
  ours.info.uuid = staging.uuid;
  ours.common = coordinator.common;
  TENSORMOUNT_RETURN_IF_ERROR(merger.Add(ours, std::string(kCoordinatorManifest)));
  const auto merge = [&](ReadManifest read) {
    TENSORMOUNT_RETURN_IF_ERROR(merger.Add(read.inventory, read.entry.name));
    commit_entries.push_back(std::move(read.entry));
    return Status();
  };
  TENSORMOUNT_RETURN_IF_ERROR(ForEachManifest(fs, staging, names, merge));
  return merger.FinishTables();
}

// The single pass over the extents: each tensor is checked for completeness, added to the content
// root, and passed to the index writer. Two threads share each full batch of tensors: one checks,
// the other hashes and writes.
class RowPass {
 public:
  RowPass(Inventory& inventory, const TensorUse& use)
      : inventory_(inventory), use_(use), root_(inventory) {}

  Status Add(TensorRecord& tensor) {
    batch_bytes_ += tensor.extents.packed().size();
    batch_.push_back(&tensor);
    return batch_bytes_ < kBatchBytes ? Status() : DoBatch();
  }
  // Finishes the last batch and returns the content root.
  Result<Hash128> Finish() {
    TENSORMOUNT_RETURN_IF_ERROR(DoBatch());
    TENSORMOUNT_RETURN_IF_ERROR(CheckObjects(inventory_));
    return root_.Finish();
  }

 private:
  Status DoBatch() {
    // The destructor of the future waits for the other thread on every exit.
    std::future<Status> written =
        StartAsync(batch_bytes_ < kBatchBytes ? std::launch::deferred
                                              : std::launch::async | std::launch::deferred,
                   [&]() -> Status {
                     for (const TensorRecord* tensor : batch_) {
                       root_.Add(*tensor);
                       TENSORMOUNT_RETURN_IF_ERROR(use_(*tensor));
                     }
                     return Status();
                   });
    for (const TensorRecord* tensor : batch_) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckTensor(check_, inventory_, *tensor));
    }
    TENSORMOUNT_RETURN_IF_ERROR(written.get());
    for (TensorRecord* tensor : batch_) tensor->extents.Release();
    batch_.clear();
    batch_bytes_ = 0;
    return Status();
  }

  Inventory& inventory_;
  const TensorUse& use_;
  RootHasher root_;
  CompletenessCheck check_;
  std::vector<TensorRecord*> batch_;
  std::uint64_t batch_bytes_ = 0;
};

// Whether a name has the form "data/a/b" of a data file, so that it cannot leave the staging.
bool IsPlainDataName(std::string_view name) {
  if (!name.starts_with("data/") || name.find('\0') != std::string_view::npos) return false;
  name.remove_prefix(5);
  for (;;) {
    const std::size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

// Checks that every data file exists and has its length. Unless `keep_others` is set, removes all
// other files of data/. `folders` receives the directories with data files, including "data".
Status CheckDataFiles(FileSystem& fs, const Staging& staging, const Inventory& inventory,
                      bool keep_others, std::set<std::string>& folders) {
  std::set<std::string_view> named;
  folders.insert("data");
  for (const FileRecord& file : inventory.files) {
    if (file.placement == Placement::kForeign) {
      TENSORMOUNT_RETURN_IF_ERROR(
          OpenForeignFile(fs, {inventory.info.root, ""}, file, true).status());
      continue;
    }
    if (!IsPlainDataName(file.name)) return DataLoss(file.name + ": the file is not below data/");
    named.insert(file.name);
    for (std::size_t at = file.name.rfind('/'); at != std::string::npos && at > 0;
         at = file.name.rfind('/', at - 1)) {
      folders.insert(file.name.substr(0, at));
    }
    const std::string path = JoinPath(staging.directory, file.name);
    const Result<FileInfo> info = fs.LinkStat(path);
    if (!info.ok()) return info.status().WithContext("data file listed in a manifest");
    if (info.value().kind != FileKind::kFile) return DataLoss(path + ": not a regular file");
    if (info.value().size != file.length) {
      return DataLoss(path + ": " + std::to_string(info.value().size) +
                      " bytes, its manifest says " + std::to_string(file.length));
    }
  }
  if (keep_others) return Status();
  // A writer leaves a file behind after a failed fsync. Such files must not become part of the
  // checkpoint.
  for (const std::string& folder : folders) {
    const std::string directory = JoinPath(staging.directory, folder);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(directory));
    for (const DirectoryEntry& entry : entries) {
      const std::string name = folder + "/" + entry.name;
      if (named.contains(name) || folders.contains(name)) continue;
      TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(JoinPath(staging.directory, name)));
    }
  }
  return Status();
}

// Opens the checkpoints with which mtimes are compared: the parent, and the checkpoint that is
// replaced. A damaged or missing checkpoint does not stop the save.
std::vector<std::shared_ptr<OpenedCheckpoint>> OpenPriors(FileSystem& fs, const Store& store,
                                                          const Staging& staging,
                                                          IfExists if_exists) {
  std::vector<std::shared_ptr<OpenedCheckpoint>> priors;
  const auto open = [&](const std::string& directory, const Uuid* wanted) {
    // The index is not compared with its hash at open. Reads check the records that they use, so a
    // damaged index that cannot be rebuilt still serves as far as it can be read.
    OpenedCheckpoint::Options how;
    how.check_index_bytes = 0;
    auto opened = OpenedCheckpoint::Open(fs, directory, how);
    if (!opened.ok()) return false;
    const Uuid uuid = opened.value()->index().info().uuid;
    if (wanted != nullptr && uuid != *wanted) return false;
    const bool known = std::any_of(priors.begin(), priors.end(),
                                   [&](const auto& p) { return p->index().info().uuid == uuid; });
    if (!known) priors.push_back(std::move(opened).value());
    return true;
  };
  const auto open_parent = [&] {
    if (staging.parent.IsZero()) return;
    const bool named = CheckCheckpointName(staging.parent_name).ok();
    if (named && open(store.CheckpointPath(staging.parent_name), &staging.parent)) return;
    const std::string trash = JoinPath(staging.store, store_paths::kTrashFolder);
    if (open(JoinPath(trash, staging.parent.ToString()), &staging.parent)) return;
    // The parent was renamed or deleted, or cannot be opened. The checkpoint with the parent's uuid
    // is searched; if there is none, the one with the highest generation below that of the save is
    // used.
    const auto all = store.List();
    if (!all.ok()) return;
    const CheckpointListing* best = nullptr;
    for (const CheckpointListing& c : all.value()) {
      if (!c.problem.ok() || c.generation >= staging.generation) continue;
      const auto rank = [&](const CheckpointListing& x) {
        return std::tuple(x.uuid == staging.parent, x.generation, x.uuid);
      };
      if (best == nullptr || rank(*best) < rank(c)) best = &c;
    }
    // A failure is ignored, because priors only serve mtimes.
    if (best != nullptr) (void)open(store.CheckpointPath(best->name), nullptr);
  };
  open_parent();
  if (if_exists == IfExists::kReplace) {
    (void)open(store.CheckpointPath(staging.name), nullptr);  // A failure is ignored.
  }
  return priors;
}

// Decides the mtimes. If the index of a prior is damaged, the records of all priors are taken from
// their manifests. A prior whose manifests are damaged too counts as empty.
Status DecideAgainst(FileSystem& fs, std::span<const std::shared_ptr<OpenedCheckpoint>> priors,
                     std::int64_t now, Inventory& inventory) {
  std::vector<const CheckpointIndex*> indexes;
  for (const auto& p : priors) indexes.push_back(&p->index());
  const Status decided = DecideMtimes(indexes, now, inventory);
  if (decided.ok()) return decided;
  Log(LogLevel::kWarning, decided.message() + "; its manifests are used instead");
  std::vector<std::shared_ptr<const CheckpointIndex>> again;
  indexes.clear();
  for (const auto& p : priors) {
    Inventory known;
    if (p->commit() != nullptr) {
      Result<Inventory> rebuilt = RebuildInventory(fs, p->pinned_directory(), p->commit()->record);
      if (rebuilt.ok()) known = std::move(rebuilt).value();
    }
    if (known.info.uuid.IsZero()) known.info = p->index().info();
    TENSORMOUNT_ASSIGN_OR_RETURN(again.emplace_back(), CheckpointIndex::FromInventory(known));
    indexes.push_back(again.back().get());
  }
  return DecideMtimes(indexes, now, inventory);
}

Status SyncBelow(FileSystem& fs, const Staging& staging, std::string_view folder) {
  return fs.SyncDirectory(JoinPath(staging.directory, folder));
}

}  // namespace

// If the staging has disappeared, that is the cause of a failure, and the error says that a rank
// aborted the save.
Result<Store::Published> Store::Publish(const Staging& staging, const Inventory& coordinator,
                                        const PublishOptions& options) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(staging.name));
  TENSORMOUNT_RETURN_IF_ERROR(CheckWritable());
  Result<Published> published = PublishSteps(staging, coordinator, options);
  if (published.ok()) return published;
  Status status = published.status();
  if (status.code() == Code::kNotFound || (status.code() == Code::kStale)) {
    const Status still = fs_->LinkStat(staging.directory).status();
    if (still.code() == Code::kNotFound) {
      status = Status(Code::kStale, "the staging directory " + staging.directory +
                                        " was removed: a rank aborted the save at its deadline");
    } else if (still.ok() && status.code() == Code::kNotFound) {
      // kNotFound means that a manifest, or a file that a manifest names, is missing.
      status = DataLoss(status.message());
    }
  }
  return status.WithContext("publish " + staging.name);
}

Result<Store::Published> Store::PublishSteps(const Staging& staging, const Inventory& coordinator,
                                             const PublishOptions& options) const {
  FileSystem& fs = *fs_;
  const std::string destination = CheckpointPath(staging.name);
  Stopwatch watch;
  TENSORMOUNT_RETURN_IF_ERROR(PrepareStaging(fs, staging, options.shared));
  if (options.if_exists == IfExists::kFail) TENSORMOUNT_RETURN_IF_ERROR(CheckFree(staging.name));

  // The writers have already sealed and synced their data files, and synced their manifests.
  CommitRecord commit;
  std::optional<InventoryMerger> merger;
  merger.emplace(fs, JoinPath(staging.directory, kSpoolFile), options.rows_in_memory);
  TENSORMOUNT_ASSIGN_OR_RETURN(
      Inventory inventory,
      GatherManifests(fs, staging, coordinator, options.expected_manifests, *merger, commit.files));
  if (options.check_layer_names) TENSORMOUNT_RETURN_IF_ERROR(CheckLayerNamesUnique(inventory));
  Published published;
  std::set<std::string> data_folders;
  TENSORMOUNT_RETURN_IF_ERROR(CheckDataFiles(fs, staging, inventory, options.shared, data_folders));

  CheckpointInfo& info = inventory.info;
  info.uuid = staging.uuid;
  info.generation = staging.generation;
  info.parent = staging.parent;
  info.parent_name = staging.parent_name;
  info.created = options.now != 0 ? options.now : fs.NowSeconds();
  info.self_contained =
      std::none_of(inventory.files.begin(), inventory.files.end(),
                   [](const FileRecord& f) { return f.placement == Placement::kForeign; });
  if (info.self_contained) info.root.clear();
  {
    const auto priors = OpenPriors(fs, *this, staging, options.if_exists);
    TENSORMOUNT_RETURN_IF_ERROR(DecideAgainst(fs, priors, info.created, inventory));
  }
  published.manifests_seconds = watch.Lap();

  // The publish itself writes the remaining files, and each is synced when it is written.
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string coordinator_manifest,
                               EncodeCoordinatorManifest(inventory));
  TENSORMOUNT_RETURN_IF_ERROR(
      fs.WriteFileDurably(JoinPath(staging.directory, kCoordinatorManifest), coordinator_manifest));
  TENSORMOUNT_RETURN_IF_ERROR(fs.CreateDirectory(JoinPath(staging.directory, "index")));
  const auto pass = [&](const TensorUse& use) -> Status {
    RowPass rows(inventory, use);
    TENSORMOUNT_RETURN_IF_ERROR(merger->TakeRows(inventory, [&](TensorRecord& tensor) {
      published.chunks += tensor.extents.size();
      published.bytes += tensor.meta.bytes();
      return rows.Add(tensor);
    }));
    TENSORMOUNT_ASSIGN_OR_RETURN(published.content_root, rows.Finish());
    return Status();
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(
      CommitRecord::Entry index_entry,
      CheckpointIndex::WriteSst(fs, inventory, pass, published.content_root, staging.directory,
                                std::string(kIndexName)));
  // Closes the temporary file before directories are synced: NFS keeps an unlinked file under
  // another name while it is open.
  merger.reset();
  published.index_seconds = watch.Lap();

  // Directories are synced after the files in them, inner directories first.
  for (auto it = data_folders.rbegin(); it != data_folders.rend(); ++it) {
    TENSORMOUNT_RETURN_IF_ERROR(SyncBelow(fs, staging, *it));
  }
  TENSORMOUNT_RETURN_IF_ERROR(SyncBelow(fs, staging, "manifest"));
  TENSORMOUNT_RETURN_IF_ERROR(SyncBelow(fs, staging, "index"));

  // COMMIT is written after everything that it lists.
  commit.uuid = info.uuid;
  commit.generation = info.generation;
  commit.parent = info.parent;
  commit.content_root = published.content_root;
  if (options.derived) commit.compatible |= kCommitDerived;
  commit.files.push_back({std::string(kCoordinatorManifest), coordinator_manifest.size(),
                          Xxh3(coordinator_manifest), Hash128{}});
  commit.files.push_back(std::move(index_entry));
  for (const FileRecord& file : inventory.files) {
    if (file.placement == Placement::kForeign) continue;
    commit.files.push_back({file.name, file.length, file.root, Hash128{}});
  }
  std::sort(commit.files.begin(), commit.files.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  TENSORMOUNT_RETURN_IF_ERROR(fs.WriteFileDurably(
      JoinPath(staging.directory, store_paths::kCommitFile), EncodeCommit(commit)));
  // From here on, AbortOrDecide reads the uuid from COMMIT. A shared staging keeps its file UUID,
  // so that after a crash it is still a shared staging.
  if (!options.shared) {
    TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveFile(JoinPath(staging.directory, store_paths::kUuidFile)));
  }
  TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(staging.directory));

  TENSORMOUNT_ASSIGN_OR_RETURN(published.replaced, MoveIntoPlace(staging, options.if_exists));
  published.publish_seconds = watch.Lap();
  published.info = info;
  published.tensors = inventory.tensors.size();
  return published;
}

Result<std::string> Store::MoveIntoPlace(const Staging& staging, IfExists if_exists) const {
  FileSystem& fs = *fs_;
  const std::string to = CheckpointPath(staging.name);
  bool exchanged = false;
  for (int attempt = 0;; ++attempt) {
    // RemoveDirectory removes only an empty directory, which does not take the name (CheckFree).
    if (store_moves::IsEmptyDirectory(fs, to)) (void)fs.RemoveDirectory(to);
    exchanged = if_exists == IfExists::kReplace && fs.Exists(to);
    if (exchanged && !fs.Exists(JoinPath(to, store_paths::kCommitFile)) && fs.Exists(to)) {
      return Status(Code::kAlreadyExists, to + ": not a checkpoint, so it is not replaced");
    }
    if (exchanged) {
      // The replaced checkpoint may have been pinned since the save began.
      TENSORMOUNT_RETURN_IF_ERROR(pins::CheckUnpinned(fs, path_, staging.name));
    }
    const Status moved =
        exchanged ? fs.Exchange(staging.directory, to) : fs.RenameNoReplace(staging.directory, to);
    if (moved.ok()) break;
    // Over NFS a successful rename may be reported as failed, so the location of the directory with
    // this uuid decides.
    const store_moves::UuidLocation location = store_moves::Locate(fs, staging);
    if (location == store_moves::UuidLocation::kPublished) break;
    if (location == store_moves::UuidLocation::kAborted)
      return Status(Code::kStale, moved.message());
    if (location != store_moves::UuidLocation::kStaging) {
      return Status(Code::kUnknown, "cannot tell whether the checkpoint was published: " +
                                        moved.message() + "; run `tensormount fsck " + path_ + "`");
    }
    // The name appeared or disappeared between the check and the rename.
    const bool changed = moved.code() == Code::kAlreadyExists || moved.code() == Code::kNotFound;
    const bool again = changed && attempt < 16 &&
                       (if_exists == IfExists::kReplace || store_moves::IsEmptyDirectory(fs, to));
    if (!again) return moved;
  }
  Status synced = fs.SyncMovedFolder(to, path_, JoinPath(path_, store_paths::kStagingFolder));
  // The claim of the generation must be durable, too, because it outlives the checkpoint.
  if (synced.ok()) synced = store_moves::SyncClaim(fs, path_, staging.generation);
  if (!synced.ok()) {
    return Status(Code::kUnknown,
                  "published, but a power failure may undo it: " + synced.message());
  }
  if (exchanged) {
    // The replaced checkpoint is now at the staging's path. If it cannot be moved to .trash, that
    // is not an error, because the save is committed; gc moves it later.
    const Result<std::string> entry = store_moves::MoveToTrash(fs, path_, staging.directory, "");
    if (entry.ok()) {
      return JoinPath(store_paths::kTrashFolder,
                      std::string_view(entry.value()).substr(entry.value().rfind('/') + 1));
    }
  }
  return std::string();
}

}  // namespace tensormount
