// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a source, as a mount shows them. One thread checks the store when a caller
// asks or the kernel reports a change. Each checkpoint gets a slot that is never reused, so that
// node ids stay valid. Storage may hang: callers wait for a limited time, and an open that hangs
// delays only callers of the same checkpoint.
#include "fs/store_watch.h"

#include <algorithm>
#include <condition_variable>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/doorbell.h"
#include "base/log.h"
#include "base/thread.h"
#include "fs/node.h"
#include "fs/reach.h"
#include "index/foreign/format.h"
#include "index/read/value_totals.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"
#include "index/store/store.h"

namespace tensormount::fs {
namespace {

using Clock = std::chrono::steady_clock;

// How long the destructor waits for a check that hangs in storage.
constexpr std::chrono::seconds kWatchStopPatience{2};
// Interval of checks without requests, while a checkpoint is open and inotify is not available.
// They find removed checkpoints, which must be closed.
constexpr std::chrono::milliseconds kIdleLook{1000};
// Number of checkpoints checked each time even if the store's directory is unchanged.
constexpr std::size_t kWindow = 64;
// Largest number of helper threads that read commit records for the first time: one for each
// kReadsPerThread new names.
constexpr std::size_t kReadThreads = 3;
// Directory of a checkpoint's data files (docs/format.md).
constexpr std::string_view kDataFolder = "data";
constexpr std::size_t kReadsPerThread = 32;

}  // namespace

std::shared_ptr<Slot> StoreWatch::Listing::Find(std::string_view name) const {
  const auto at = std::lower_bound(
      by_name.begin(), by_name.end(), name,
      [this](std::uint32_t i, std::string_view wanted) { return by_id[i]->name < wanted; });
  return at == by_name.end() || by_id[*at]->name != name ? nullptr : by_id[*at];
}

// State of a StoreWatch, shared with the watching thread, which may be stuck when the StoreWatch is
// destroyed.
struct StoreWatch::Core : std::enable_shared_from_this<StoreWatch::Core> {
  Core(FileSystem& f, SourceKind k, std::string p, std::unique_ptr<Doorbell> b)
      : fs(f), kind(k), path(std::move(p)), bell(std::move(b)) {}

  FileSystem& fs;
  const SourceKind kind;
  const std::string path;
  const std::unique_ptr<Doorbell> bell;
  bool list_views = false;
  NameMap map;
  HfOptions hf;
  std::vector<std::string> roots;
  ServeVerify verify = ServeVerify::kOff;
  bool other_users = false;
  std::chrono::milliseconds grain{};

  mutable std::mutex mutex;
  std::condition_variable scanned;  // For callers that wait for the watching thread.
  bool stop = false;
  bool ended = false;
  bool scan_requested = false;
  bool stuck = false;              // A caller timed out, and no check has ended since.
  Clock::time_point begun{};       // Start of the last completed check.
  Clock::time_point not_before{};  // A listing whose check began earlier is too old.
  Clock::time_point last_asked{};
  std::uint64_t looks = 0;  // Completed checks.
  std::shared_ptr<const Listing> listing;
  std::vector<std::shared_ptr<Slot>> slots;  // By id; null: gone, or slot 0, the mount itself.
  // Slots that are gone but may still have open files.
  std::map<std::uint32_t, std::shared_ptr<Slot>> removed_slots;
  std::atomic<std::uint64_t> clock{0};
  // During the first check: names that callers wait for, and the slots found for them.
  std::vector<std::string> asked_names;
  std::map<std::string, std::shared_ptr<Slot>> early;

  // The members from here to `window` are used by the watching thread only.
  // Directories of the store that may be checkpoints, kWindow of which are checked each time, in
  // turn, unless the whole directory is listed.
  std::vector<std::string> names;
  std::set<std::string> pending;  // Names in `names` that were no checkpoints at the last check.
  std::pair<std::int64_t, std::int64_t> stamp{-1, -1};
  // Device and inode of the directory at the first check.
  std::optional<std::pair<std::uint64_t, std::uint64_t>> own_folder;
  Clock::time_point stamp_seen{};
  // Index in `names` of the first name to check next time. Moves by kWindow with each check, so
  // that all names are checked once in names.size() / kWindow checks.
  std::size_t window = 0;

  // Result of checking one name of the store.
  struct ScannedName {
    std::string name;
    Status status;         // kNotFound: no checkpoint.
    bool damaged = false;  // The commit record was read and is damaged.
    FileInfo folder;
    FileInfo commit;
    Ownership ownership;
    std::shared_ptr<Slot> slot;  // The existing slot; null: a new one is needed.
    Uuid uuid;                   // For a new slot, like `generation`.
    std::uint64_t generation = 0;
    std::uint64_t data_bytes = 0;
  };
  bool foreign() const { return kind == SourceKind::kForeign || kind == SourceKind::kForeignSteps; }

  static Slot::Identity IdentityOf(const FileInfo& commit) {
    return {commit.device, commit.inode, commit.size, commit.mtime_seconds,
            commit.mtime_nanoseconds};
  }

  // Checks the store; only one thread at a time.
  Status Scan();
  Status ScanStore(Listing& now, const Listing& before);
  Status ScanSingle(Listing& now, const Listing& before);
  void ScanName(const Listing& before, ScannedName& found) const;
  void ScanNames(const Listing& before, std::vector<ScannedName>& all);
  // Ownership of the checkpoint at `at`, which has a commit record or mark.
  Result<Ownership> OwnershipOf(const std::string& at, const FileInfo& folder,
                                const FileInfo& commit) const;
  // Ownership of the source, including its write bits.
  Result<Ownership> OwnershipOfSource(const FileInfo& own) const;
  void ServeWaitingNames(const Listing& before);
  Result<std::shared_ptr<Slot>> AssignSlot(ScannedName& found);
  std::shared_ptr<Slot> KnownSlot(const Listing& before, const ScannedName& found) const;
  // Whether the slot is that of the found checkpoint: the same commit record with the same
  // ownership.
  static bool Matches(const std::shared_ptr<Slot>& slot, const ScannedName& found);
  Status ReadCommit(const std::string& folder, ScannedName& found) const;
  Status ScanStep(const Listing& before, ScannedName& found) const;
  Result<std::shared_ptr<const CheckpointView>> OpenForeign(
      const Slot& slot, const CheckpointView::Options& options) const;
  std::string LatestOf(const Listing& now) const;
  void ReadNonfinite(const Listing& now);
  void Publish(std::shared_ptr<Listing> now, Clock::time_point started);
  void Loop();
  void CloseUnused(const Listing& now, std::size_t kept);

  // Whether the last check is recent enough. Its age counts from its start, because a slow check
  // saw an older state. Requires `mutex`.
  bool IsFresh(Clock::time_point now) const {
    return looks > 0 && begun >= not_before && now - begun <= kMaxAge;
  }
  void RequestScan(Clock::time_point now) {
    last_asked = now;
    if (scan_requested || IsFresh(now)) return;
    scan_requested = true;
    bell->Ring();
  }
};

Status StoreWatch::Core::ReadCommit(const std::string& folder, ScannedName& found) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto file, fs.OpenRead(JoinPath(folder, kCommitName)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, ReadCommitBytes(*file, kCommitName));
  const Result<DecodedCommit> read = DecodeCommit(bytes, kCommitName);
  found.damaged = read.status().code() == Code::kDataLoss;
  TENSORMOUNT_RETURN_IF_ERROR(read.status());
  found.uuid = read.value().record.uuid;
  found.generation = read.value().record.generation;
  for (const CommitRecord::Entry& entry : read.value().record.files) {
    if (entry.name.starts_with("data/")) found.data_bytes += entry.length;
  }
  return {};
}

// If other users may enter the mount, the permissions of the directories above the checkpoint and
// of data/ count, too, besides those of the checkpoint and its commit record. Data files are
// checked when the checkpoint is opened (CheckpointView).
Result<Ownership> StoreWatch::Core::OwnershipOf(const std::string& at, const FileInfo& folder,
                                                const FileInfo& commit) const {
  Ownership own{.uid = folder.uid,
                .gid = folder.gid,
                .file_mode = commit.mode & 0444,
                .folder_mode = folder.mode & 0555};
  if (!other_users) return own;
  const bool is_file = folder.kind == FileKind::kFile;
  AccessMask reach(own.uid, own.gid);
  // OwnershipOfSource gives the root of the mount the permissions of the source and of all
  // directories above, and the kernel checks the root on every path.
  if (ShowsManyCheckpoints(kind)) reach.AssumeSearchable(path);
  TENSORMOUNT_RETURN_IF_ERROR(reach.RequireFoldersAbove(fs, at));
  std::uint32_t mode = folder.mode;
  if (!is_file) {
    TENSORMOUNT_ASSIGN_OR_RETURN(mode, ModeWithoutAcl(fs, at, folder));
    reach.Require(folder, mode, AccessMask::Access::kSearch);
  }
  own.folder_mode = mode & 0555 & reach.mask();
  if (!foreign()) {
    const std::string commit_path = JoinPath(at, kCommitName);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t bits, ModeWithoutAcl(fs, commit_path, commit));
    reach.Require(commit, bits, AccessMask::Access::kRead);
    const Status data = reach.Require(fs, JoinPath(at, kDataFolder), AccessMask::Access::kSearch);
    if (!data.ok() && data.code() != Code::kNotFound) return data;
    own.file_mode = 0444 & reach.mask();
  } else {
    reach.Require(commit, commit.mode, AccessMask::Access::kRead);
    own.file_mode = 0444 & reach.mask();
  }
  return own;
}

Result<Ownership> StoreWatch::Core::OwnershipOfSource(const FileInfo& own) const {
  Ownership all{.uid = own.uid,
                .gid = own.gid,
                .file_mode = own.mode & 0444,
                .folder_mode = own.mode & 0555,
                .write_mode = own.mode & 0222};
  if (!other_users) return all;
  AccessMask reach(own.uid, own.gid);
  TENSORMOUNT_RETURN_IF_ERROR(reach.RequireFoldersAbove(fs, path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t mode, ModeWithoutAcl(fs, path, own));
  reach.Require(own, mode, AccessMask::Access::kSearch);
  all.file_mode = mode & 0444 & reach.mask();
  all.folder_mode = mode & 0555 & reach.mask();
  all.write_mode = mode & 0222 & reach.mask();
  // In a directory with the sticky bit only the owner of an entry may rename or remove it. All
  // stagings belong to the daemon's user, so other users may change nothing.
  if ((own.mode & 01000) != 0) all.write_mode &= 0200;
  return all;
}

// The existing slot for this commit record; null if there is none.
std::shared_ptr<Slot> StoreWatch::Core::KnownSlot(const Listing& before,
                                                  const ScannedName& found) const {
  auto old = before.Find(found.name);
  if (!old) {
    const std::lock_guard lock(mutex);
    if (const auto at = early.find(found.name); at != early.end()) old = at->second;
  }
  return Matches(old, found) ? old : nullptr;
}

bool StoreWatch::Core::Matches(const std::shared_ptr<Slot>& slot, const ScannedName& found) {
  return slot && slot->identity_ == IdentityOf(found.commit) && slot->ownership == found.ownership;
}

// Returns the slot of a found checkpoint: the existing one, or a new one. Ids rise and are never
// reused, which limits a mount to kMaxSlots checkpoints over its life.
Result<std::shared_ptr<Slot>> StoreWatch::Core::AssignSlot(ScannedName& found) {
  TENSORMOUNT_RETURN_IF_ERROR(found.status);
  if (found.slot) return found.slot;
  auto slot = std::make_shared<Slot>();
  slot->name = found.name;
  slot->path = ShowsManyCheckpoints(kind) ? JoinPath(path, found.name) : path;
  slot->ownership = found.ownership;
  slot->mtime = found.commit.mtime_seconds;
  slot->identity_ = IdentityOf(found.commit);
  slot->uuid = found.uuid;
  slot->generation = found.generation;
  slot->data_bytes = found.data_bytes;
  const std::lock_guard lock(mutex);
  // A caller may have got a slot for this name during the check. A second slot would replace the
  // first one, whose nodes the kernel knows already.
  if (const auto at = early.find(found.name); at != early.end() && Matches(at->second, found)) {
    return at->second;
  }
  // A mount of one checkpoint shows only that one, not its replacement.
  if (!ShowsManyCheckpoints(kind) && slots.size() > 1) {
    return Status(Code::kStale, slot->path + ": the checkpoint was replaced by another one");
  }
  if (slots.size() >= kMaxSlots) {
    return Status(
        Code::kResourceExhausted,
        "this mount has shown more checkpoints than it can: unmount it and mount it again");
  }
  slot->id = static_cast<std::uint32_t>(slots.size());
  slots.push_back(slot);
  return slot;
}

// Checks a directory of a training directory; kNotFound if it holds no checkpoint (yet).
Status StoreWatch::Core::ScanStep(const Listing& before, ScannedName& found) const {
  const std::optional<std::uint64_t> iteration = IterationOf(found.name);
  if (!iteration) return Status(Code::kNotFound, "the name is not that of an iteration");
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder all, ForeignFolder::Open(fs, path, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, all.Subfolder(found.name));
  TENSORMOUNT_ASSIGN_OR_RETURN(found.folder, folder.Stat(""));
  TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, FormatStamp(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(found.ownership,
                               OwnershipOf(JoinPath(path, found.name), found.folder, found.commit));
  found.slot = KnownSlot(before, found);
  if (found.slot) return {};
  if (FindForeignFormat(folder) == nullptr)
    return Status(Code::kNotFound, "the directory is not a checkpoint");
  found.generation = *iteration;
  // Foreign checkpoints have no UUID. This one differs for a replacement, which so gets other inode
  // numbers.
  found.uuid = {found.commit.inode, static_cast<std::uint64_t>(found.commit.mtime_seconds)};
  return {};
}

// Opens the checkpoint of the slot. kStale if another checkpoint took its place while it was read.
Result<std::shared_ptr<const CheckpointView>> StoreWatch::Core::OpenForeign(
    const Slot& slot, const CheckpointView::Options& options) const {
  auto view = CheckpointView::OpenForeign(fs, slot.path, slot.ownership, options);
  if (!view.ok()) return view;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                               ForeignFolder::Open(fs, slot.path, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo mark, FormatStamp(folder));
  if (IdentityOf(mark) == slot.identity_) return view;
  return Status(Code::kStale, slot.path + ": the checkpoint was replaced by another one");
}

std::string StoreWatch::Core::LatestOf(const Listing& now) const {
  const Result<ForeignFolder> folder = ForeignFolder::Open(fs, path, roots);
  std::vector<ForeignStep> steps;
  for (const auto& slot : now.by_id) {
    steps.push_back({.name = slot->name, .generation = slot->generation});
  }
  return folder.ok() ? LatestStep(folder.value(), steps) : std::string();
}

void StoreWatch::Core::ScanName(const Listing& before, ScannedName& found) const {
  if (kind == SourceKind::kForeignSteps) {
    found.status = ScanStep(before, found);
    return;
  }
  const std::string folder = JoinPath(path, found.name);
  found.status = [&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, fs.LinkStat(JoinPath(folder, kCommitName)));
    TENSORMOUNT_ASSIGN_OR_RETURN(found.folder, fs.LinkStat(folder));
    TENSORMOUNT_ASSIGN_OR_RETURN(found.ownership, OwnershipOf(folder, found.folder, found.commit));
    found.slot = KnownSlot(before, found);
    return found.slot ? Status() : ReadCommit(folder, found);
  }();
}

// The first check of a large store reads thousands of small files: it uses helper threads, and
// answers callers that wait for one name meanwhile.
void StoreWatch::Core::ScanNames(const Listing& before, std::vector<ScannedName>& all) {
  std::atomic<std::size_t> next{0};
  const auto work = [&](bool serve) {
    for (std::size_t i = next++; i < all.size(); i = next++) {
      if (serve) ServeWaitingNames(before);
      if (!all[i].slot) ScanName(before, all[i]);
    }
  };
  std::size_t unknown = 0;
  for (const ScannedName& found : all) unknown += !found.slot && !before.Find(found.name) ? 1 : 0;
  std::vector<Thread> helpers;
  try {
    const std::size_t wanted_threads = std::min(kReadThreads, unknown / kReadsPerThread);
    while (helpers.size() < wanted_threads) helpers.emplace_back(work, false);
  } catch (const std::system_error&) {
    // The check works without helper threads, only slower.
  }
  work(true);
  for (Thread& helper : helpers) helper.join();
}

void StoreWatch::Core::ServeWaitingNames(const Listing& before) {
  std::vector<std::string> asked;
  {
    const std::lock_guard lock(mutex);
    asked.swap(asked_names);
  }
  for (std::string& name : asked) {
    ScannedName found{.name = std::move(name)};
    if (CheckCheckpointName(found.name).ok()) {
      ScanName(before, found);
    } else {
      found.status = Status(Code::kNotFound, "the name is not valid for a checkpoint");
    }
    auto slot = AssignSlot(found);
    {
      const std::lock_guard lock(mutex);
      early[found.name] = slot.ok() ? slot.value() : nullptr;
    }
    scanned.notify_all();
  }
}

// Checks the whole directory or a part of its names. A directory's timestamp changes with every
// added or removed name, but on some filesystems only in steps of a second or two. For that long
// (`grain`) after a change an equal timestamp proves nothing, so the directory is listed each time.
// Names that were no checkpoints are always checked, because they may become complete, and so are
// open checkpoints, which may be removed.
Status StoreWatch::Core::ScanStore(Listing& now, const Listing& before) {
  const Clock::time_point started = Clock::now();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
  const std::pair id{own.device, own.inode};
  if (!own_folder) own_folder = id;
  if (*own_folder != id) {
    stamp = {-1, -1};
    return Status(Code::kStale, path + ": the directory was replaced by another one");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(now.ownership, OwnershipOfSource(own));
  now.mtime = own.mtime_seconds;
  ServeWaitingNames(before);
  const std::pair own_stamp{own.mtime_seconds, own.mtime_nanoseconds};
  if (own_stamp != stamp) {
    stamp = own_stamp;
    stamp_seen = started;
  }
  const bool whole = names.size() <= kWindow || started - stamp_seen <= grain;
  if (whole) {
    auto entries = fs.List(path);
    if (!entries.ok()) {
      stamp = {-1, -1};
      return entries.status();
    }
    names.clear();
    for (DirectoryEntry& entry : entries.value()) {
      const bool folder = entry.kind == FileKind::kDirectory ||
                          (kind == SourceKind::kForeignSteps && entry.kind == FileKind::kSymlink);
      if (folder && CheckCheckpointName(entry.name).ok()) {
        names.push_back(std::move(entry.name));
      }
    }
    window = 0;
  }
  std::vector<ScannedName> all;
  all.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    ScannedName found{.name = names[i]};
    const bool in_turn = whole || (i >= window && i - window < kWindow);
    if (!in_turn && !pending.contains(names[i])) {
      auto slot = before.Find(names[i]);
      if (slot && !slot->opened()) found.slot = std::move(slot);
    }
    all.push_back(std::move(found));
  }
  window = window + kWindow < names.size() ? window + kWindow : 0;
  ScanNames(before, all);
  pending.clear();
  for (ScannedName& found : all) {
    const Result<std::shared_ptr<Slot>> slot = AssignSlot(found);
    if (slot.ok()) {
      now.by_id.push_back(slot.value());
      continue;
    }
    pending.insert(found.name);
    // The directory is not a checkpoint, or was removed during the check.
    if (slot.status().code() == Code::kNotFound) continue;
    now.problems.push_back(found.name + ": " + slot.status().message());
    // "latest" must not silently mean an older checkpoint because a newer one is unreadable at the
    // moment. A checkpoint whose commit record is damaged is never the latest.
    if (!found.damaged && now.latest_unknown.ok() && kind == SourceKind::kStore) {
      now.latest_unknown = slot.status().WithContext(found.name + " may be the latest checkpoint");
    }
  }
  // A store without store.json is being deleted: its directory is removed last.
  if (kind == SourceKind::kStore && now.by_id.empty() &&
      fs.LinkStat(JoinPath(path, store_paths::kSuperblockFile)).status().code() ==
          Code::kNotFound) {
    return Status(Code::kStale, path + ": the store.json of the store was removed");
  }
  return {};
}

Status StoreWatch::Core::ScanSingle(Listing& now, const Listing& before) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
  const bool file = own.kind == FileKind::kFile;
  ScannedName found{.name = path.substr(path.rfind('/') + 1)};
  found.folder = found.commit = own;
  if (kind == SourceKind::kForeign) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, ForeignFolder::Open(fs, path, roots));
    TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, FormatStamp(folder));
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, fs.LinkStat(JoinPath(path, kCommitName)));
  }
  // Users that may read the file may enter the directory that shows it: read bits become read and
  // search bits (0444 >> 2 is 0111).
  if (file) found.folder.mode = (own.mode & 0444) | ((own.mode & 0444) >> 2);
  TENSORMOUNT_ASSIGN_OR_RETURN(found.ownership, OwnershipOf(path, found.folder, found.commit));
  now.ownership = found.ownership;
  now.mtime = found.commit.mtime_seconds;
  found.slot = KnownSlot(before, found);
  if (!found.slot && !foreign()) TENSORMOUNT_RETURN_IF_ERROR(ReadCommit(path, found));
  TENSORMOUNT_ASSIGN_OR_RETURN(auto slot, AssignSlot(found));
  now.by_id.push_back(std::move(slot));
  return {};
}

Status StoreWatch::Core::Scan() {
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
      ShowsManyCheckpoints(kind) ? ScanStore(*now, *before) : ScanSingle(*now, *before);
  const bool removed = status.code() == Code::kNotFound || status.code() == Code::kStale;
  if (!status.ok()) {
    // An unreadable store is shown as before; a removed store is empty.
    if (!removed) now->by_id = before->by_id;
    if (removed && ShowsManyCheckpoints(kind)) {
      now->store_gone = Status(Code::kStale, "the store was removed: " + status.message());
    }
    now->problems.push_back(status.message());
  }
  Publish(std::move(now), started);
  return status;
}

// Reads the value counts of the latest checkpoint once, for the metrics. Not over a network, where
// each open of a file is a request.
void StoreWatch::Core::ReadNonfinite(const Listing& now) {
  if (!now.latest || foreign() || !fs.Can(Ability::kKernelFiles)) return;
  if (now.latest->nonfinite_.load(std::memory_order_relaxed) != -2) return;
  const Result<std::optional<std::uint64_t>> counted = CountNonfinite(fs, now.latest->path);
  // Damaged counts are not known; `verify` reports them.
  const std::uint64_t most = std::numeric_limits<std::int64_t>::max();
  const bool known = counted.ok() && counted.value();
  now.latest->nonfinite_ =
      known ? static_cast<std::int64_t>(std::min(*counted.value(), most)) : std::int64_t{-1};
}

// Replaces the listing. Slots missing in the new one are gone: they are marked before the new
// listing is visible, kept in `removed_slots` while open files may have their view, and closed so
// that gc can remove their files.
void StoreWatch::Core::Publish(std::shared_ptr<Listing> now, Clock::time_point started) {
  std::sort(now->by_id.begin(), now->by_id.end(),
            [](const auto& a, const auto& b) { return a->id < b->id; });
  now->by_name.resize(now->by_id.size());
  std::iota(now->by_name.begin(), now->by_name.end(), 0u);
  const auto name_of = [&](auto i) -> auto& { return now->by_id[i]->name; };
  std::ranges::sort(now->by_name, {}, name_of);
  for (const auto& slot : now->by_id) {
    const auto rank = [](const Slot& s) { return std::tie(s.generation, s.uuid, s.name); };
    if (!now->latest || rank(*now->latest) < rank(*slot)) now->latest = slot;
  }
  if (now->latest_unknown.ok()) now->latest_unknown = now->store_gone;
  // While the latest checkpoint is unknown, an older one must not be shown as the latest.
  if (!now->latest_unknown.ok()) now->latest = nullptr;
  if (kind == SourceKind::kForeignSteps && now->latest) now->latest = now->Find(LatestOf(*now));
  ReadNonfinite(*now);
  std::vector<std::shared_ptr<Slot>> gone;
  {
    const std::lock_guard lock(mutex);
    const auto drop_if_gone = [&](const std::shared_ptr<Slot>& slot) {
      const auto at = std::lower_bound(
          now->by_id.begin(), now->by_id.end(), slot->id,
          [](const std::shared_ptr<Slot>& s, std::uint32_t id) { return s->id < id; });
      if (at == now->by_id.end() || (*at)->id != slot->id) {
        slots[slot->id] = nullptr;
        slot->gone_.store(true, std::memory_order_release);
        // removed_slots changes in one step with the listing, so that open files always find their
        // slot.
        removed_slots.emplace(slot->id, slot);
        gone.push_back(slot);
      }
    };
    for (const auto& slot : listing->by_id) drop_if_gone(slot);
    for (const auto& [name, slot] : early) {
      if (slot) drop_if_gone(slot);
    }
    early.clear();
    asked_names.clear();  // Their callers find the names in the new listing.
    listing = now;
    begun = started;
    ++looks;
    stuck = false;
  }
  scanned.notify_all();
  for (const auto& slot : gone) slot->CloseView();
  {
    const std::lock_guard lock(mutex);
    std::erase_if(removed_slots,
                  [](const auto& entry) { return !entry.second->MayHaveOpenFiles(); });
  }
  CloseUnused(*now, kKeptOpen);
}

// Closes all checkpoints except the `kept` most recently used ones. Open files keep their own
// views.
void StoreWatch::Core::CloseUnused(const Listing& now, std::size_t kept) {
  std::vector<std::shared_ptr<Slot>> open;
  for (const auto& slot : now.by_id) {
    if (slot->opened()) open.push_back(slot);
  }
  if (open.size() <= kept) return;
  std::sort(open.begin(), open.end(),
            [](const auto& a, const auto& b) { return a->used_.load() > b->used_.load(); });
  for (std::size_t i = kept; i < open.size(); ++i) {
    const std::lock_guard lock(open[i]->mutex_);
    open[i]->opened_ = false;
    open[i]->view_ = nullptr;
  }
}

// Sleeps until somebody asks, the directory changes, or a checkpoint must be closed. Without
// inotify, and with a checkpoint open, it checks every kIdleLook, so that a removed checkpoint is
// closed soon.
void StoreWatch::Core::Loop() {
  std::unique_lock lock(mutex);
  while (!stop) {
    if (!scan_requested) {
      const std::shared_ptr<const Listing> shown = listing;
      // Opening a checkpoint rings the bell, so `any_open` does not become outdated during the
      // wait.
      const bool any_open = std::any_of(shown->by_id.begin(), shown->by_id.end(),
                                        [](const auto& slot) { return slot->opened(); });
      const auto idle = Clock::now() - last_asked;
      if (any_open && idle >= kIdleRelease) {
        lock.unlock();
        CloseUnused(*shown, 0);
        lock.lock();
        continue;
      }
      std::optional<std::chrono::milliseconds> patience;
      if (any_open) {
        patience = std::chrono::duration_cast<std::chrono::milliseconds>(kIdleRelease - idle) +
                   std::chrono::milliseconds(1);
        if (!bell->watches()) patience = std::min(*patience, kIdleLook);
      }
      lock.unlock();
      const bool changed = bell->Wait(patience);
      lock.lock();
      if (changed) not_before = Clock::now();
      // Checks without a request only to close removed checkpoints, so only while one is open.
      const bool must_look = changed || (!bell->watches() && Clock::now() - begun >= kIdleLook);
      const bool now_open = std::any_of(listing->by_id.begin(), listing->by_id.end(),
                                        [](const auto& slot) { return slot->opened(); });
      if (stop || (!scan_requested && !(must_look && now_open))) continue;
    }
    scan_requested = false;
    lock.unlock();
    (void)Scan();  // Errors are in the problems of the listing.
    lock.lock();
  }
  ended = true;
  scanned.notify_all();
}

Result<std::unique_ptr<StoreWatch>> StoreWatch::Start(
    FileSystem& fs, SourceKind kind, const std::string& path, bool list_views, ServeVerify verify,
    const NameMap& map, const HfOptions& hf, std::vector<std::string> roots, bool other_users,
    std::chrono::milliseconds grain) {
  TENSORMOUNT_ASSIGN_OR_RETURN(auto bell, Doorbell::Make(path));
  auto core = std::make_shared<Core>(fs, kind, path, std::move(bell));
  core->list_views = list_views;
  core->verify = verify;
  core->map = map;
  core->hf = hf;
  core->roots = std::move(roots);
  core->other_users = other_users;
  core->grain = grain;
  core->slots.push_back(nullptr);
  auto first = std::make_shared<Listing>();
  if (ShowsManyCheckpoints(kind)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
    TENSORMOUNT_ASSIGN_OR_RETURN(first->ownership, core->OwnershipOfSource(own));
    first->mtime = own.mtime_seconds;
  }
  core->listing = std::move(first);
  core->scan_requested = ShowsManyCheckpoints(kind);
  core->last_asked = Clock::now();
  if (!ShowsManyCheckpoints(kind)) TENSORMOUNT_RETURN_IF_ERROR(core->Scan());
  Thread([core] { core->Loop(); }).detach();
  return std::unique_ptr<StoreWatch>(new StoreWatch(std::move(core)));
}

// Waits only for a limited time, because storage may block the watching thread. The thread then
// keeps Core, and ends by itself later.
StoreWatch::~StoreWatch() {
  std::unique_lock lock(core_->mutex);
  core_->stop = true;
  core_->bell->Ring();
  if (!core_->scanned.wait_for(lock, kWatchStopPatience, [&] { return core_->ended; })) {
    Log(LogLevel::kWarning,
        core_->path + " does not answer: a thread of the daemon still waits for it");
  }
}

// After one caller has timed out (`stuck`), no other caller waits until a check has ended. So a
// hanging store costs a program one second, not one second for every name.
std::shared_ptr<const StoreWatch::Listing> StoreWatch::CurrentListing(
    std::optional<std::chrono::milliseconds> patience) {
  std::unique_lock lock(core_->mutex);
  const Clock::time_point asked = Clock::now();
  core_->RequestScan(asked);
  if (core_->IsFresh(asked) || core_->stuck) return core_->listing;
  if (!patience) patience = core_->looks > 0 ? kPatience : kFirstPatience;
  const bool came = core_->scanned.wait_until(lock, asked + *patience, [&] {
    return core_->ended || core_->IsFresh(Clock::now()) ||
           (core_->looks > 0 && core_->begun >= asked);
  });
  if (!came) core_->stuck = true;
  return core_->listing;
}

std::shared_ptr<const StoreWatch::Listing> StoreWatch::LastListing() {
  const std::lock_guard lock(core_->mutex);
  core_->RequestScan(Clock::now());
  return core_->listing;
}

// During the first check the name is queued, and the watching thread checks it before its next
// name.
std::shared_ptr<Slot> StoreWatch::FindName(const std::string& name) {
  std::unique_lock lock(core_->mutex);
  if (core_->looks == 0) {
    const Clock::time_point asked = Clock::now();
    core_->RequestScan(asked);
    const auto known = [&] { return core_->early.contains(name); };
    if (!known()) {
      core_->asked_names.push_back(name);
      core_->scanned.wait_until(lock, asked + kFirstPatience,
                                [&] { return core_->ended || core_->looks > 0 || known(); });
    }
    if (known()) return core_->early[name];
  }
  lock.unlock();
  return CurrentListing()->Find(name);
}

bool StoreWatch::first_check_done() const {
  const std::lock_guard lock(core_->mutex);
  return core_->looks > 0;
}

void StoreWatch::Refresh() {
  const std::lock_guard lock(core_->mutex);
  core_->not_before = Clock::now();
}

Result<std::shared_ptr<Slot>> StoreWatch::Find(std::uint32_t id) {
  (void)LastListing();  // Keeps the listing fresh while the mount is in use.
  const std::lock_guard lock(core_->mutex);
  if (id >= core_->slots.size() || !core_->slots[id]) {
    return Status(Code::kStale, "the checkpoint was removed or replaced");
  }
  return core_->slots[id];
}

std::shared_ptr<const CheckpointView> StoreWatch::KeptView(std::uint32_t id) {
  const std::lock_guard lock(core_->mutex);
  const auto at = core_->removed_slots.find(id);
  return at == core_->removed_slots.end() ? nullptr : at->second->LastView();
}

Result<std::shared_ptr<const CheckpointView>> StoreWatch::View(Slot& slot) {
  slot.used_.store(core_->clock.fetch_add(1) + 1, std::memory_order_relaxed);
  auto view = OpenView(slot);
  if (slot.gone()) slot.CloseView();  // The checkpoint was removed while it was being opened.
  return view;
}

// Holds the slot's own lock: one of several callers opens the checkpoint while the others wait, and
// callers of other slots are not delayed.
Result<std::shared_ptr<const CheckpointView>> StoreWatch::OpenView(Slot& slot) {
  const std::lock_guard lock(slot.mutex_);
  if (slot.gone()) return Status(Code::kStale, slot.name + " was removed or replaced");
  if (!slot.view_) slot.view_ = slot.LastView();
  if (slot.view_) {
    // Wakes the watching thread, which closes the checkpoint again when it is unused or removed.
    if (!slot.opened_.exchange(true)) core_->bell->Ring();
    return slot.view_;
  }
  const CheckpointView::Options options{.slot = slot.id,
                                        .name = slot.name,
                                        .list_views = core_->list_views,
                                        .verify = core_->verify,
                                        .map = core_->map,
                                        .hf = core_->hf,
                                        .roots = core_->roots,
                                        .proven = slot.proven_,
                                        .slices = slot.slices(),
                                        .other_users = core_->other_users};
  auto view = core_->foreign()
                  ? core_->OpenForeign(slot, options)
                  : CheckpointView::Open(core_->fs, slot.path, slot.uuid, slot.ownership, options);
  if (!view.ok()) {
    // A file of the checkpoint is missing, because the checkpoint was removed a moment ago.
    if (view.status().code() == Code::kNotFound) {
      return Status(Code::kStale, slot.name + " was removed");
    }
    return view.status().WithContext(slot.name);
  }
  slot.view_ = view.value();
  slot.SetLastView(slot.view_);
  slot.opened_.store(true);
  core_->bell->Ring();
  return view;
}

std::shared_ptr<const CheckpointView> StoreWatch::OpenedView(Slot& slot) {
  if (!slot.opened()) return nullptr;
  std::shared_ptr<const CheckpointView> view;
  {
    const std::lock_guard lock(slot.mutex_);
    view = slot.view_;
  }
  if (slot.gone()) slot.CloseView();
  return view;
}

std::size_t StoreWatch::open_checkpoints() const {
  const std::lock_guard lock(core_->mutex);
  return static_cast<std::size_t>(std::count_if(core_->listing->by_id.begin(),
                                                core_->listing->by_id.end(),
                                                [](const auto& slot) { return slot->opened(); }));
}

bool StoreWatch::is_responding() const {
  const std::lock_guard lock(core_->mutex);
  return !core_->stuck;
}

}  // namespace tensormount::fs
