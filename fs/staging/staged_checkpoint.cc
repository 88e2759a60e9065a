// SPDX-License-Identifier: Apache-2.0
// One staging as a mount sees it: whether it still exists under its name, its schema, and the lease
// that blocks publishes while a file is open for writing.
#include "fs/staging/staged_checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "fs/save/staged_reuse.h"
#include "fs/views/slice_name.h"
#include "index/records/store_paths.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kSchemaFolder = "schema";
// Name of an empty file. It exists if schema.json was removed, and allows the removal of the
// staging.
constexpr std::string_view kWithdrawnName = "withdrawn";
constexpr std::chrono::milliseconds kLeasePause{10};

std::vector<std::string> KeysOf(const StagingSchema& schema) {
  std::vector<std::string> keys;
  keys.reserve(schema.tensors().size());
  for (const auto& [key, meta] : schema.tensors()) keys.push_back(key);
  return keys;
}

// The key of a target in targets_. Contains shape and element size besides key and box, because a
// new schema may define the same box differently.
std::string TargetName(const TensorMeta& meta, const Box& box) {
  return meta.key() + '\0' + SliceText(box) + ' ' + meta.shape().ToString() + ' ' +
         std::to_string(meta.bits());  // Keys have no NUL.
}

Result<std::vector<std::string>> NamesIn(FileSystem& fs, const std::string& folder) {
  std::vector<std::string> names;
  const auto entries = fs.List(folder);
  if (entries.status().code() == Code::kNotFound) return names;
  TENSORMOUNT_RETURN_IF_ERROR(entries.status());
  for (const DirectoryEntry& entry : entries.value()) names.push_back(entry.name);
  return names;
}

}  // namespace

SchemaView::SchemaView(StagingSchema s)
    : schema(std::move(s)), text(schema.ToJson()), keys(KeysOf(schema)), tree(keys) {}

Result<TreeFolder> SchemaView::FolderAt(std::string_view path) const {
  TreeFolder folder;
  while (!path.empty()) {
    const std::size_t slash = std::min(path.find('/'), path.size());
    TENSORMOUNT_ASSIGN_OR_RETURN(const TreeChild child, tree.Lookup(folder, path.substr(0, slash)));
    if (!child.is_folder) return Status::FromErrno(ENOTDIR, "look up", path);
    folder = {.first = child.ordinal, .depth = child.depth};
    path.remove_prefix(std::min(slash + 1, path.size()));
  }
  return folder;
}

const TensorMeta* SchemaView::Find(std::string_view key) const {
  const auto it = schema.tensors().find(std::string(key));
  return it == schema.tensors().end() ? nullptr : &it->second;
}

StagedCheckpoint::StagedCheckpoint(FileSystem& fs, Staging staging, std::string incarnation)
    : fs_(fs),
      staging_(std::move(staging)),
      incarnation_(std::move(incarnation)),
      writer_(fs_, staging_, incarnation_) {
  Touch();
}

void StagedCheckpoint::Touch() {
  mtime_.store(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count(),
               std::memory_order_relaxed);
}

// Called before every write; without `now` most calls need no storage access.
Status StagedCheckpoint::CheckInPlace(bool now) {
  const auto stale = [this] {
    return Status(Code::kStale,
                  ".staging/" + name() + ": the staging directory was published or removed");
  };
  if (gone_.load(std::memory_order_acquire)) return stale();
  const Clock::rep at = Clock::now().time_since_epoch().count();
  if (!now && at - checked_.load(std::memory_order_relaxed) < Clock::duration(kMaxAge).count()) {
    return {};
  }
  if (!IsStagingInPlace(fs_, staging_)) {
    Retire();
    return stale();
  }
  checked_.store(at, std::memory_order_relaxed);
  return {};
}

// The first call makes the writer close its files; open handles then return kStale.
void StagedCheckpoint::Retire() {
  if (gone_.exchange(true, std::memory_order_acq_rel)) return;
  writer_.CloseForGood();
}

// Reads the schema again if its files changed. Requires schema_mutex_.
Status StagedCheckpoint::ReadSchema() {
  // Files of edits never change, so equal names mean an equal schema.
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<std::string> files,
                               NamesIn(fs_, JoinPath(staging_.directory, kSchemaFolder)));
  if (!schema_ || files != schema_files_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(StagingSchema schema, ReadSchemas(fs_, staging_.directory));
    schema_ = std::make_shared<const SchemaView>(std::move(schema));
    schema_files_ = std::move(files);
  }
  schema_read_ = Clock::now();
  return {};
}

// If reading fails because the staging was renamed or removed a moment ago, returns kStale instead
// of the read's error.
Result<std::shared_ptr<const SchemaView>> StagedCheckpoint::Schema(bool fresh) {
  const std::lock_guard lock(schema_mutex_);
  if (fresh || !schema_ || Clock::now() - schema_read_ > kMaxAge) {
    const Status status = ReadSchema();
    if (!status.ok()) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckInPlace(true));
      return status;
    }
  }
  return schema_;
}

// Reverts a withdrawal: an addition means that the staging is in use.
Status StagedCheckpoint::ExtendSchema(const StagingSchema& edit) {
  const std::lock_guard lock(schema_mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(CheckInPlace(true));
  TENSORMOUNT_RETURN_IF_ERROR(HoldNamedBase(fs_, staging_, edit.reuse()));
  TENSORMOUNT_RETURN_IF_ERROR(AddSchema(fs_, staging_.directory, incarnation_, edit));
  const Status status = fs_.RemoveFile(JoinPath(staging_.directory, kWithdrawnName));
  if (!status.ok() && status.code() != Code::kNotFound) return status;
  Touch();
  return ReadSchema();
}

// The order of the steps (the mark that allows removal, the files of edits, the written bytes)
// makes sure that `rm -r` can be run again after a crash at any point.
Status StagedCheckpoint::WithdrawSchema() {
  const std::lock_guard lock(schema_mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(CheckInPlace(true));
  const Status marked =
      fs_.WriteFileDurably(JoinPath(staging_.directory, kWithdrawnName), std::string_view());
  if (!marked.ok() && marked.code() != Code::kAlreadyExists) return marked;
  const std::string folder = JoinPath(staging_.directory, kSchemaFolder);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto files, NamesIn(fs_, folder));
  for (const std::string& file : files) {
    const Status removed = fs_.RemoveFile(JoinPath(folder, file));
    if (!removed.ok() && removed.code() != Code::kNotFound) return removed;
  }
  const Status released = fs_.RemoveFile(JoinPath(staging_.directory, store_paths::kBaseFile));
  if (!released.ok() && released.code() != Code::kNotFound) return released;
  TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(folder));
  TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(staging_.directory));
  // Bytes that this mount wrote to tensors are removed with their names.
  std::vector<std::shared_ptr<TargetWriter>> targets;
  {
    const std::lock_guard paths(mutex_);
    for (const auto& [name, known] : targets_) targets.push_back(known.target);
    slice_paths_.clear();
  }
  for (const auto& target : targets) {
    if (target->written_bytes() == 0) continue;
    TENSORMOUNT_RETURN_IF_ERROR(target->Forget({0, target->size()}));
  }
  Touch();
  return ReadSchema();
}

// The first writer takes the lease for all writers of this mount. Concurrent ones wait for
// lease_mutex_, and then find the lease taken.
Status StagedCheckpoint::BeginWriting() {
  // The deadline includes the wait for the mutex.
  const Deadline deadline = Deadline::After(kLeasePatience);
  const std::lock_guard lock(lease_mutex_);
  if (writing_.load() == 0) {
    for (;;) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckInPlace(true));
      Result<std::unique_ptr<StagingLease>> lease = StagingLease::ForWriting(fs_, staging_);
      if (lease.ok()) {
        lease_ = std::move(lease).value();
        break;
      }
      if (lease.status().code() == Code::kStale) Retire();
      if (lease.status().code() != Code::kBusy || deadline.Passed()) return lease.status();
      std::this_thread::sleep_for(kLeasePause);
    }
  }
  ++writing_;
  return {};
}

void StagedCheckpoint::EndWriting() {
  const std::lock_guard lock(lease_mutex_);
  if (--writing_ == 0) lease_ = nullptr;
  fewer_writers_.notify_all();
}

void StagedCheckpoint::Linger(const Lingering& more) {
  const std::lock_guard lock(lease_mutex_);
  lingering_.closed += more.closed;
  lingering_.releasing += more.releasing;
  fewer_writers_.notify_all();
}

// `settled`: waiting cannot help, because no file is open for writing, or because some open files
// are not lingering.
int StagedCheckpoint::AwaitReleases() {
  const auto begun = Clock::now();
  std::unique_lock lock(lease_mutex_);
  const auto settled = [this] {
    return writing_.load() == 0 || writing_.load() > lingering_.closed;
  };
  fewer_writers_.wait_until(lock, begun + kReleasePatience, settled);
  fewer_writers_.wait_until(lock, begun + kLeasePatience,
                            [&] { return settled() || lingering_.releasing == 0; });
  return writing_.load();
}

// Concurrent opens of one box get the same target from the writer, and the first entry stays in the
// map.
Result<std::shared_ptr<TargetWriter>> StagedCheckpoint::OpenTarget(const TensorMeta& meta,
                                                                   const Box& box) {
  const std::string name = TargetName(meta, box);
  {
    const std::lock_guard lock(mutex_);
    const auto it = targets_.find(name);
    if (it != targets_.end()) return it->second.target;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(auto target, writer_.OpenTarget(meta, box));
  const std::lock_guard lock(mutex_);
  const bool whole = box == Box::Whole(meta.shape());
  return targets_
      .emplace(name, KnownTarget{.path = whole ? PathOfKey(meta.key(), false) : "",
                                 .target = std::move(target)})
      .first->second.target;
}

std::shared_ptr<TargetWriter> StagedCheckpoint::FindTarget(const TensorMeta& meta, const Box& box) {
  const std::lock_guard lock(mutex_);
  const auto it = targets_.find(TargetName(meta, box));
  return it == targets_.end() ? nullptr : it->second.target;
}

void StagedCheckpoint::AddSlicePath(const std::string& path) {
  const std::lock_guard lock(mutex_);
  slice_paths_.insert(path);
}

void StagedCheckpoint::RemoveSlicePath(const std::string& path) {
  const std::lock_guard lock(mutex_);
  slice_paths_.erase(path);
}

std::vector<std::string> StagedCheckpoint::SlicePaths() {
  const std::lock_guard lock(mutex_);
  return {slice_paths_.begin(), slice_paths_.end()};
}

// For rmdir(2): see StagingTree::CheckEmpty.
bool StagedCheckpoint::HasWrittenBelow(const std::string& path) {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, known] : targets_) {
    const bool below = path.empty() ? !known.path.empty() : known.path.starts_with(path + '/');
    if (below && known.target->written_bytes() > 0) return true;
  }
  return false;
}

bool StagedCheckpoint::AddObjectFolder(const std::string& path) {
  const std::lock_guard lock(mutex_);
  return object_folders_.insert(path).second;
}

void StagedCheckpoint::RemoveObjectFolder(const std::string& path) {
  const std::lock_guard lock(mutex_);
  object_folders_.erase(path);
}

std::vector<std::string> StagedCheckpoint::ObjectFolders() {
  const std::lock_guard lock(mutex_);
  return {object_folders_.begin(), object_folders_.end()};
}

// Everything is synced first, so that the journal size in the mark covers all that the writer
// relies on.
Status StagedCheckpoint::MarkDone(std::uint32_t rank) {
  TENSORMOUNT_RETURN_IF_ERROR(writer_.SyncAll());
  TENSORMOUNT_RETURN_IF_ERROR(CheckInPlace(true));
  Touch();
  const Status made = MakeDoneMark(
      fs_, staging_,
      {.rank = rank, .journal = writer_.journal_name(), .journal_bytes = writer_.journal_bytes()});
  // Returns kStale instead of `made` if the staging was published or removed meanwhile, which then
  // is the cause of the failure.
  if (!made.ok()) TENSORMOUNT_RETURN_IF_ERROR(CheckInPlace(true));
  return made;
}

// Checks the files of all mounts: a journal, an edit of schema.json, a done mark or a common.json
// means that something was written.
Result<bool> StagedCheckpoint::CanRemove() {
  if (fs_.Exists(JoinPath(staging_.directory, kWithdrawnName))) return true;
  for (const std::string_view folder : {"journal", "schema", "done", "common"}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto names,
                                 NamesIn(fs_, JoinPath(staging_.directory, folder)));
    if (!names.empty()) return false;
  }
  return true;
}

void StagedCheckpoint::NoteEdit(bool schema, const void* who, std::uint64_t size) {
  const std::lock_guard lock(mutex_);
  edits_[schema ? 1 : 0][who] = size;
}

void StagedCheckpoint::EndEdit(bool schema, const void* who) {
  const std::lock_guard lock(mutex_);
  edits_[schema ? 1 : 0].erase(who);
}

std::optional<std::uint64_t> StagedCheckpoint::EditSize(bool schema) {
  const std::lock_guard lock(mutex_);
  std::optional<std::uint64_t> longest;
  for (const auto& [who, size] : edits_[schema ? 1 : 0])
    longest = std::max(longest.value_or(0), size);
  return longest;
}

}  // namespace tensormount::fs
