// SPDX-License-Identifier: Apache-2.0
// Store::Publish of store.h (docs/format.md, "Publish"). The staging may be taken away by
// AbortOrDecide of any rank between any two steps: everything below works by path, so from then on
// every step fails with "not found", and the rename, which is the last, can only move what is still
// there.
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
// Manifests that are read ahead, as they are and decoded.
constexpr std::uint64_t kManifestsAhead = std::uint64_t{32} << 20;
// Rows that are proved and hashed at a time. Where there are fewer a second thread does not pay.
constexpr std::uint64_t kBatchBytes = std::uint64_t{2} << 20;
// Of the staging, while a publish runs.
constexpr std::string_view kSpoolFile = "rows.spool";

class Stopwatch {
 public:
  // Since the last call, or since it was made.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    const double s = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return s;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Checks that the staging is whose it should be, and takes away what an earlier try left in it. At
// every moment its uuid can be read, from UUID or from COMMIT.
Status PrepareStaging(FileSystem& fs, const Staging& staging, bool shared) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Uuid uuid, store_moves::ReadFolderUuid(fs, staging.directory));
  if (uuid != staging.uuid) {
    return Status(Code::kInvalidArgument, staging.directory + ": belongs to " + uuid.ToString() +
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

// Reads manifests and hands them to `use` in order, in this thread. Large ones are read, hashed and
// decoded by several threads, a few ahead of what was used, so that memory stays bounded.
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
      running.push_back(std::async(
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

// Reads all manifests into `merger`, whose tables are returned; appends what COMMIT says of them.
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
    // An earlier try of ours, or what a writer left under a temporary name.
    if (name == kCoordinatorManifest || !entry.name.ends_with(store_paths::kManifestSuffix)) {
      TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveTree(JoinPath(folder, entry.name)));
      continue;
    }
    missing.erase(name);
    names.push_back(name);
  }
  if (!missing.empty()) {
    return DataLoss(*missing.begin() + ": missing" +
                    (missing.size() == 1
                         ? std::string()
                         : " (and " + std::to_string(missing.size() - 1) + " manifests more)"));
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

// The one pass over the rows of a publish, in which each tensor is proved to be whole, hashed into
// the content root, and handed to whoever writes the index. What is proved and what is hashed and
// written are two threads' work, a batch of tensors at a time.
class RowPass {
 public:
  RowPass(Inventory& inventory, const TensorUse& use)
      : inventory_(inventory), use_(use), root_(inventory) {}

  Status Add(TensorRecord& tensor) {
    batch_bytes_ += tensor.extents.packed().size();
    batch_.push_back(&tensor);
    return batch_bytes_ < kBatchBytes ? Status() : DoBatch();
  }
  // The content root.
  Result<Hash128> Finish() {
    TENSORMOUNT_RETURN_IF_ERROR(DoBatch());
    TENSORMOUNT_RETURN_IF_ERROR(CheckObjects(inventory_));
    return root_.Finish();
  }

 private:
  Status DoBatch() {
    // `written` is waited for by its destructor on every way out.
    std::future<Status> written =
        std::async(batch_bytes_ < kBatchBytes ? std::launch::deferred
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

// "data/a/b": what may be joined to the staging's path.
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

// Every data file is there with its length, and nothing else is. `folders` gets those that hold
// data files, "data" among them.
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
    if (!IsPlainDataName(file.name)) return DataLoss(file.name + ": not a name below data/");
    named.insert(file.name);
    for (std::size_t at = file.name.rfind('/'); at != std::string::npos && at > 0;
         at = file.name.rfind('/', at - 1)) {
      folders.insert(file.name.substr(0, at));
    }
    const std::string path = JoinPath(staging.directory, file.name);
    const Result<FileInfo> info = fs.LinkStat(path);
    if (!info.ok()) return info.status().WithContext("a data file that a manifest names");
    if (info.value().kind != FileKind::kFile) return DataLoss(path + ": not a regular file");
    if (info.value().size != file.length) {
      return DataLoss(path + ": " + std::to_string(info.value().size) +
                      " bytes, its manifest says " + std::to_string(file.length));
    }
  }
  if (keep_others) return Status();
  // What a writer gave up (a failed fsync condemns a file) must not become part of a checkpoint.
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

// What the mtimes are decided against: the parent, and what is about to be replaced. One that is
// damaged or gone does not stop a save.
std::vector<std::shared_ptr<OpenedCheckpoint>> OpenPriors(FileSystem& fs, const Store& store,
                                                          const Staging& staging,
                                                          IfExists if_exists) {
  std::vector<std::shared_ptr<OpenedCheckpoint>> priors;
  const auto open = [&](const std::string& directory, const Uuid* wanted) {
    // Without comparing all of its index: what of it is read is enough, and says what it can even
    // where it cannot be made again.
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
    // Renamed or gone: then the highest one older than this save.
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
    if (best != nullptr) (void)open(store.CheckpointPath(best->name), nullptr);  // As said above.
  };
  open_parent();
  if (if_exists == IfExists::kReplace) {
    (void)open(store.CheckpointPath(staging.name), nullptr);  // As said above.
  }
  return priors;
}

// The index of a prior is only checked as far as it is read: one that turns out damaged is made
// again from its manifests, and where these are damaged too, its files count as changed.
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

// Failures because the staging went away under us are told as what they mean: some rank gave up and
// had it aborted.
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
      status = Status(Code::kStale, "the staging " + staging.directory +
                                        " is gone: aborted by a rank at its deadline");
    } else if (still.ok() && status.code() == Code::kNotFound) {
      // Something that a manifest or the layout promises.
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
  if (options.if_exists == IfExists::kFail && fs.Exists(destination)) {
    return Status(Code::kAlreadyExists, destination + ": exists already");
  }

  // The writers have sealed and fsynced their data files and manifests.
  CommitRecord commit;
  std::optional<InventoryMerger> merger;
  merger.emplace(fs, JoinPath(staging.directory, kSpoolFile), options.rows_in_memory);
  TENSORMOUNT_ASSIGN_OR_RETURN(
      Inventory inventory,
      GatherManifests(fs, staging, coordinator, options.expected_manifests, *merger, commit.files));
  if (options.layers_apart) TENSORMOUNT_RETURN_IF_ERROR(CheckLayersApart(inventory));
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

  // Small files, each fsynced as it is written.
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string coordinator_manifest,
                               EncodeManifest(CoordinatorInventory(inventory), {}));
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
  merger.reset();  // Closes its file: over NFS one without a name has one until then.
  published.index_seconds = watch.Lap();

  // Their names: folders after their files, inner ones first.
  for (auto it = data_folders.rbegin(); it != data_folders.rend(); ++it) {
    TENSORMOUNT_RETURN_IF_ERROR(SyncBelow(fs, staging, *it));
  }
  TENSORMOUNT_RETURN_IF_ERROR(SyncBelow(fs, staging, "manifest"));
  TENSORMOUNT_RETURN_IF_ERROR(SyncBelow(fs, staging, "index"));

  // COMMIT vouches for all of it.
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
  // From here on the arbiter reads the uuid in COMMIT. (A shared staging keeps the other one too:
  // after a crash it must still be one.)
  if (!options.shared) {
    TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveFile(JoinPath(staging.directory, store_paths::kUuidFile)));
  }
  TENSORMOUNT_RETURN_IF_ERROR(fs.SyncDirectory(staging.directory));

  TENSORMOUNT_RETURN_IF_ERROR(MoveIntoPlace(staging, options.if_exists));
  published.publish_seconds = watch.Lap();
  published.info = info;
  published.tensors = inventory.tensors.size();
  return published;
}

Status Store::MoveIntoPlace(const Staging& staging, IfExists if_exists) const {
  FileSystem& fs = *fs_;
  const std::string to = CheckpointPath(staging.name);
  bool exchanged = false;
  for (int attempt = 0;; ++attempt) {
    exchanged = if_exists == IfExists::kReplace && fs.Exists(to);
    if (exchanged && !fs.Exists(JoinPath(to, store_paths::kCommitFile)) && fs.Exists(to)) {
      return Status(Code::kAlreadyExists, to + ": not a checkpoint, so it is not replaced");
    }
    if (exchanged) {
      // Pinned since the save began.
      TENSORMOUNT_RETURN_IF_ERROR(pins::CheckUnpinned(fs, path_, staging.name));
    }
    const Status moved =
        exchanged ? fs.Exchange(staging.directory, to) : fs.RenameNoReplace(staging.directory, to);
    if (moved.ok()) break;
    // The truth is where our uuid is: over NFS a rename that happened may be reported as failed.
    const store_moves::UuidLocation location = store_moves::Locate(fs, staging);
    if (location == store_moves::UuidLocation::kPublished) break;
    if (location == store_moves::UuidLocation::kAborted)
      return Status(Code::kStale, moved.message());
    if (location != store_moves::UuidLocation::kStaging) {
      return Status(Code::kUnknown, "renamed or not: " + moved.message());
    }
    // A name that came or went between the look and the rename, when we may replace it.
    const bool again = if_exists == IfExists::kReplace && attempt < 16 &&
                       (moved.code() == Code::kAlreadyExists || moved.code() == Code::kNotFound);
    if (!again) return moved;
  }
  Status synced = fs.SyncMovedFolder(to, path_, JoinPath(path_, store_paths::kStagingFolder));
  // The claim of its generation, too: it outlives the checkpoint.
  if (synced.ok()) synced = fs.SyncDirectory(JoinPath(path_, store_paths::kGenerationsFolder));
  if (!synced.ok()) {
    return Status(Code::kUnknown,
                  "visible, but a power cut may undo it or not: " + synced.message());
  }
  if (exchanged) {
    // The replaced one, at our old path. Committed is committed: gc does it where this fails.
    (void)store_moves::MoveToTrash(fs, path_, staging.directory, "");
  }
  return Status();
}

}  // namespace tensormount
