// SPDX-License-Identifier: Apache-2.0
#include "fs/store_watch.h"

#include <algorithm>
#include <condition_variable>
#include <thread>
#include <tuple>

#include "base/log.h"
#include "fs/node.h"
#include "index/commit_record.h"
#include "index/store.h"

namespace tensormount::fs {
namespace {

using Clock = std::chrono::steady_clock;

// How long the destructor waits for a look that the store does not answer.
constexpr std::chrono::seconds kStopPatience{2};
// How often somebody looks when nobody asks: checkpoints that were removed must be let go of.
constexpr std::chrono::milliseconds kIdleLook{1000};

Ownership OwnershipOf(const FileInfo& folder, const FileInfo& file) {
  return {.uid = folder.uid,
          .gid = folder.gid,
          .file_mode = file.mode & 0444,
          .folder_mode = folder.mode & 0555};
}

}  // namespace

const std::shared_ptr<Slot> StoreWatch::Listing::Find(std::string_view name) const {
  for (const auto& slot : by_id) {
    if (slot->name == name) return slot;
  }
  return nullptr;
}

// Shared with the looking thread, which may be stuck when the watch goes.
struct StoreWatch::Core : std::enable_shared_from_this<StoreWatch::Core> {
  Core(FileSystem& f, SourceKind k, std::string p) : fs(f), kind(k), path(std::move(p)) {}

  FileSystem& fs;
  const SourceKind kind;
  const std::string path;
  bool list_views = false;
  std::shared_ptr<const KeyMap> map;
  ServeVerify verify = ServeVerify::kOff;

  std::mutex mutex;
  std::condition_variable wake;    // The looking thread.
  std::condition_variable looked;  // Those who wait for it.
  bool stop = false;
  bool ended = false;
  bool wanted = false;
  bool stuck = false;         // Somebody lost patience, and no look has ended since.
  Clock::time_point begun{};  // Of the last look that has ended.
  std::uint64_t looks = 0;    // That have ended.
  std::shared_ptr<const Listing> listing;
  std::vector<std::shared_ptr<Slot>> slots;  // By id; null: gone. Slot 0 is the mount itself.
  std::atomic<std::uint64_t> clock{0};

  // Looking; only by one thread at a time.
  Status Look();
  Status LookAtStore(Listing& now, const Listing& before);
  Status LookAtSingle(Listing& now, const Listing& before);
  Result<std::shared_ptr<Slot>> Keep(const Listing& before, const std::string& name,
                                     const std::string& folder, const FileInfo& folder_info,
                                     const FileInfo& commit);
  void Publish(std::shared_ptr<Listing> now, Clock::time_point started);
  void Loop();
  void CloseUnused(const Listing& now);
};

// The slot that shows this commit record: the one that did before, or a new one.
Result<std::shared_ptr<Slot>> StoreWatch::Core::Keep(const Listing& before, const std::string& name,
                                                     const std::string& folder,
                                                     const FileInfo& folder_info,
                                                     const FileInfo& commit) {
  const Slot::Identity identity{commit.device, commit.inode, commit.size, commit.mtime_seconds,
                                commit.mtime_nanoseconds};
  const Ownership ownership = OwnershipOf(folder_info, commit);
  if (const auto old = before.Find(name);
      old && old->identity_ == identity && old->ownership == ownership) {
    return old;
  }
  auto slot = std::make_shared<Slot>();
  slot->name = name;
  slot->path = folder;
  slot->ownership = ownership;
  slot->mtime = commit.mtime_seconds;
  slot->identity_ = identity;
  if (kind != SourceKind::kSafetensors) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes,
                                 fs.ReadFile(JoinPath(folder, kCommitName), kMaxCommitBytes));
    TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit decoded, DecodeCommit(bytes, kCommitName));
    slot->uuid = decoded.record.uuid;
    slot->generation = decoded.record.generation;
  }
  const std::lock_guard lock(mutex);
  // A mount of one checkpoint is of that one only: what replaces it is not shown.
  if (kind != SourceKind::kStore && slots.size() > 1) {
    return Status(Code::kStale, folder + ": another one has taken its place");
  }
  if (slots.size() >= kMaxSlots) {
    return Status(Code::kResourceExhausted,
                  "this mount has seen too many checkpoints: mount again");
  }
  slot->id = static_cast<std::uint32_t>(slots.size());
  slots.push_back(slot);
  return slot;
}

Status StoreWatch::Core::LookAtStore(Listing& now, const Listing& before) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
  now.ownership = OwnershipOf(own, own);
  now.mtime = own.mtime_seconds;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(path));
  for (const DirectoryEntry& entry : entries) {
    if (entry.kind != FileKind::kDirectory || !CheckCheckpointName(entry.name).ok()) continue;
    const std::string folder = JoinPath(path, entry.name);
    const Result<FileInfo> commit = fs.LinkStat(JoinPath(folder, kCommitName));
    if (commit.status().code() == Code::kNotFound) continue;
    const Result<std::shared_ptr<Slot>> slot = [&]() -> Result<std::shared_ptr<Slot>> {
      TENSORMOUNT_RETURN_IF_ERROR(commit.status());
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.LinkStat(folder));
      return Keep(before, entry.name, folder, info, commit.value());
    }();
    if (slot.ok()) {
      now.by_id.push_back(slot.value());
    } else if (slot.status().code() != Code::kNotFound) {  // Removed while we looked.
      now.problems.push_back(entry.name + ": " + slot.status().message());
    }
  }
  return {};
}

Status StoreWatch::Core::LookAtSingle(Listing& now, const Listing& before) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
  const bool file = kind == SourceKind::kSafetensors;
  FileInfo commit = own;
  if (!file) {
    TENSORMOUNT_ASSIGN_OR_RETURN(commit, fs.LinkStat(JoinPath(path, kCommitName)));
  }
  FileInfo folder = own;
  // Whoever may read the file may enter the folder that shows it.
  if (file) folder.mode = (own.mode & 0444) | ((own.mode & 0444) >> 2);
  now.ownership = OwnershipOf(folder, commit);
  now.mtime = commit.mtime_seconds;
  std::string name = path.substr(path.rfind('/') + 1);
  TENSORMOUNT_ASSIGN_OR_RETURN(auto slot, Keep(before, name, path, folder, commit));
  now.by_id.push_back(std::move(slot));
  return {};
}

Status StoreWatch::Core::Look() {
  std::shared_ptr<const Listing> before;
  {
    const std::lock_guard lock(mutex);
    before = listing;
  }
  const Clock::time_point started = Clock::now();
  auto now = std::make_shared<Listing>();
  now->ownership = before->ownership;
  now->mtime = before->mtime;
  const Status status =
      kind == SourceKind::kStore ? LookAtStore(*now, *before) : LookAtSingle(*now, *before);
  const bool removed = status.code() == Code::kNotFound || status.code() == Code::kStale;
  if (!status.ok()) {
    // A store that cannot be read now is shown as it was; one that is gone is empty.
    if (!removed) now->by_id = before->by_id;
    now->problems.push_back(status.message());
  }
  Publish(std::move(now), started);
  return status;
}

void StoreWatch::Core::Publish(std::shared_ptr<Listing> now, Clock::time_point started) {
  std::sort(now->by_id.begin(), now->by_id.end(),
            [](const auto& a, const auto& b) { return a->id < b->id; });
  for (const auto& slot : now->by_id) {
    const auto rank = [](const Slot& s) { return std::tie(s.generation, s.uuid, s.name); };
    if (!now->latest || rank(*now->latest) < rank(*slot)) now->latest = slot;
  }
  std::vector<std::shared_ptr<Slot>> gone;
  {
    const std::lock_guard lock(mutex);
    for (const auto& slot : listing->by_id) {
      const auto at = std::lower_bound(
          now->by_id.begin(), now->by_id.end(), slot->id,
          [](const std::shared_ptr<Slot>& s, std::uint32_t id) { return s->id < id; });
      if (at == now->by_id.end() || (*at)->id != slot->id) {
        slots[slot->id] = nullptr;
        gone.push_back(slot);
      }
    }
    listing = now;
    begun = started;
    ++looks;
    stuck = false;
  }
  looked.notify_all();
  for (const auto& slot : gone) {
    slot->gone_.store(true, std::memory_order_release);
    const std::lock_guard lock(slot->mutex_);
    slot->opened_ = false;
    slot->view_ = nullptr;  // Open files keep it, and with it the lock that gc waits for.
  }
  CloseUnused(*now);
}

void StoreWatch::Core::CloseUnused(const Listing& now) {
  std::vector<std::shared_ptr<Slot>> open;
  for (const auto& slot : now.by_id) {
    if (slot->opened()) open.push_back(slot);
  }
  if (open.size() <= kKeptOpen) return;
  std::sort(open.begin(), open.end(),
            [](const auto& a, const auto& b) { return a->used_.load() > b->used_.load(); });
  for (std::size_t i = kKeptOpen; i < open.size(); ++i) {
    const std::lock_guard lock(open[i]->mutex_);
    open[i]->opened_ = false;
    open[i]->view_ = nullptr;
  }
}

void StoreWatch::Core::Loop() {
  std::unique_lock lock(mutex);
  while (!stop) {
    if (!wanted) {
      wake.wait_for(lock, kIdleLook);
      if (stop) break;
      const bool any_open = std::any_of(listing->by_id.begin(), listing->by_id.end(),
                                        [](const auto& slot) { return slot->opened(); });
      if (!wanted && !any_open) continue;
    }
    wanted = false;
    lock.unlock();
    (void)Look();  // What went wrong stands in the listing's problems.
    lock.lock();
  }
  ended = true;
  looked.notify_all();
}

Result<std::unique_ptr<StoreWatch>> StoreWatch::Start(FileSystem& fs, SourceKind kind,
                                                      const std::string& path, bool list_views,
                                                      ServeVerify verify,
                                                      std::shared_ptr<const KeyMap> map) {
  auto core = std::make_shared<Core>(fs, kind, path);
  core->list_views = list_views;
  core->verify = verify;
  core->map = std::move(map);
  core->slots.push_back(nullptr);
  core->listing = std::make_shared<const Listing>();
  TENSORMOUNT_RETURN_IF_ERROR(core->Look());
  std::thread([core] { core->Loop(); }).detach();
  return std::unique_ptr<StoreWatch>(new StoreWatch(std::move(core)));
}

StoreWatch::~StoreWatch() {
  std::unique_lock lock(core_->mutex);
  core_->stop = true;
  core_->wake.notify_all();
  if (!core_->looked.wait_for(lock, kStopPatience, [&] { return core_->ended; })) {
    Log(LogLevel::kWarning, core_->path + " does not answer: left a thread behind");
  }
}

std::shared_ptr<const StoreWatch::Listing> StoreWatch::Now() {
  std::unique_lock lock(core_->mutex);
  const Clock::time_point asked = Clock::now();
  if (asked - core_->begun <= kMaxAge) return core_->listing;
  if (!core_->wanted) {
    core_->wanted = true;
    core_->wake.notify_all();
  }
  if (core_->stuck) return core_->listing;
  const bool came = core_->looked.wait_until(lock, asked + kPatience, [&] {
    return core_->ended || Clock::now() - core_->begun <= kMaxAge || core_->begun >= asked;
  });
  if (!came) core_->stuck = true;
  return core_->listing;
}

std::shared_ptr<const StoreWatch::Listing> StoreWatch::Last() {
  const std::lock_guard lock(core_->mutex);
  if (!core_->wanted && Clock::now() - core_->begun > kMaxAge) {
    core_->wanted = true;
    core_->wake.notify_all();
  }
  return core_->listing;
}

Result<std::shared_ptr<Slot>> StoreWatch::Find(std::uint32_t id) {
  (void)Last();  // Keeps the answer young while the mount is in use.
  const std::lock_guard lock(core_->mutex);
  if (id >= core_->slots.size() || !core_->slots[id]) {
    return Status(Code::kStale, "the checkpoint was removed or replaced");
  }
  return core_->slots[id];
}

Result<std::shared_ptr<const CheckpointView>> StoreWatch::View(Slot& slot) {
  slot.used_.store(core_->clock.fetch_add(1) + 1, std::memory_order_relaxed);
  const std::lock_guard lock(slot.mutex_);
  if (slot.gone()) return Status(Code::kStale, slot.name + " was removed or replaced");
  if (slot.view_) return slot.view_;
  const CheckpointView::Options options{.slot = slot.id,
                                        .name = slot.name,
                                        .list_views = core_->list_views,
                                        .verify = core_->verify,
                                        .map = core_->map};
  Result<std::shared_ptr<const CheckpointView>> view =
      core_->kind == SourceKind::kSafetensors
          ? CheckpointView::OpenSafetensors(core_->fs, slot.path, slot.ownership, options)
          : CheckpointView::Open(core_->fs, slot.path, slot.uuid, slot.ownership, options);
  if (!view.ok()) {
    // Removed a moment ago.
    if (view.status().code() == Code::kNotFound) {
      return Status(Code::kStale, slot.name + " was removed");
    }
    return view.status().WithContext(slot.name);
  }
  slot.view_ = view.value();
  slot.opened_.store(true, std::memory_order_release);
  return view;
}

std::shared_ptr<const CheckpointView> StoreWatch::OpenedView(Slot& slot) {
  if (!slot.opened()) return nullptr;
  const std::lock_guard lock(slot.mutex_);
  return slot.view_;
}

std::size_t StoreWatch::open_checkpoints() const {
  const std::lock_guard lock(core_->mutex);
  return static_cast<std::size_t>(std::count_if(core_->listing->by_id.begin(),
                                                core_->listing->by_id.end(),
                                                [](const auto& slot) { return slot->opened(); }));
}

bool StoreWatch::answers() const {
  const std::lock_guard lock(core_->mutex);
  return !core_->stuck;
}

}  // namespace tensormount::fs
