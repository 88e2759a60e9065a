// SPDX-License-Identifier: Apache-2.0
// Which checkpoints a store holds, as a mount shows it. One thread looks, when the kernel tells of
// a change and when somebody asks for a name; a checkpoint that is found gets a slot, which is
// never used again for another one, so that inode numbers stay true. Storage may hang: whoever asks
// waits only for the look that it needs, and an opening that hangs holds up nobody else.
#include "fs/store_watch.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <numeric>
#include <set>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "base/log.h"
#include "fs/doorbell.h"
#include "fs/node.h"
#include "fs/reach.h"
#include "index/foreign/format.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"
#include "index/store/store.h"

namespace tensormount::fs {
namespace {

using Clock = std::chrono::steady_clock;

// How long the destructor waits for a look that the store does not answer.
constexpr std::chrono::seconds kWatchStopPatience{2};
// How often somebody looks when nobody asks and the kernel tells nothing of changes, while a
// checkpoint is open: those that were removed must be let go of.
constexpr std::chrono::milliseconds kIdleLook{1000};
// So many checkpoints are looked at each time even where the store's folder is as it was.
constexpr std::size_t kWindow = 64;
// Beside the looking one, for many commit records that are read for the first time.
constexpr std::size_t kReadThreads = 3;
// Of a checkpoint, for the files with its bytes (docs/format.md).
constexpr std::string_view kDataFolder = "data";
constexpr std::size_t kReadsPerThread = 32;

}  // namespace

std::shared_ptr<Slot> StoreWatch::Listing::Find(std::string_view name) const {
  const auto at = std::lower_bound(
      by_name.begin(), by_name.end(), name,
      [this](std::uint32_t i, std::string_view wanted) { return by_id[i]->name < wanted; });
  return at == by_name.end() || by_id[*at]->name != name ? nullptr : by_id[*at];
}

// Shared with the looking thread, which may be stuck when the watch goes.
struct StoreWatch::Core : std::enable_shared_from_this<StoreWatch::Core> {
  Core(FileSystem& f, SourceKind k, std::string p, std::unique_ptr<Doorbell> b)
      : fs(f), kind(k), path(std::move(p)), bell(std::move(b)) {}

  FileSystem& fs;
  const SourceKind kind;
  const std::string path;
  const std::unique_ptr<Doorbell> bell;
  bool list_views = false;
  std::shared_ptr<const KeyMap> map;
  HfOptions hf;
  std::vector<std::string> roots;
  ServeVerify verify = ServeVerify::kOff;
  bool others = false;
  std::chrono::milliseconds grain{};

  mutable std::mutex mutex;
  std::condition_variable looked;  // Those who wait for the looking thread.
  bool stop = false;
  bool ended = false;
  bool wanted = false;
  bool stuck = false;              // Somebody lost patience, and no look has ended since.
  Clock::time_point begun{};       // Of the last look that has ended.
  Clock::time_point not_before{};  // Looks that began earlier do not count.
  Clock::time_point last_asked{};
  std::uint64_t looks = 0;  // That have ended.
  std::shared_ptr<const Listing> listing;
  std::vector<std::shared_ptr<Slot>> slots;  // By id; null: gone. Slot 0 is the mount itself.
  std::map<std::uint32_t, std::shared_ptr<Slot>> left;  // Of those, what open files may keep.
  std::atomic<std::uint64_t> clock{0};
  // Of the first look: names that somebody waits for, and what was found of such.
  std::vector<std::string> asked_names;
  std::map<std::string, std::shared_ptr<Slot>> early;

  // Of the looking thread alone.
  // Between looks at the whole folder these are looked at in turn.
  std::vector<std::string> names;  // Folders of the store that may be checkpoints, sorted.
  std::set<std::string> pending;   // Of these, those that were none when they were looked at.
  std::pair<std::int64_t, std::int64_t> stamp{-1, -1};
  // Device and inode of the folder when it was first looked at.
  std::optional<std::pair<std::uint64_t, std::uint64_t>> own_folder;
  Clock::time_point stamp_seen{};
  // Moves by kWindow with each look, so every checkpoint is looked at once in names.size() /
  // kWindow looks.
  std::size_t window = 0;  // Where in `names` the next one begins.

  // A name of the store, looked at.
  struct Found {
    std::string name;
    Status status;         // kNotFound: no checkpoint.
    bool damaged = false;  // Its commit record was read, and that is what is wrong with it.
    FileInfo folder;
    FileInfo commit;
    Ownership ownership;
    std::shared_ptr<Slot> slot;  // Known already.
    Uuid uuid;                   // Otherwise.
    std::uint64_t generation = 0;
  };
  bool foreign() const { return kind == SourceKind::kForeign || kind == SourceKind::kForeignSteps; }

  static Slot::Identity IdentityOf(const FileInfo& commit) {
    return {commit.device, commit.inode, commit.size, commit.mtime_seconds,
            commit.mtime_nanoseconds};
  }

  // Looking; only by one thread at a time.
  Status Look();
  Status LookAtStore(Listing& now, const Listing& before);
  Status LookAtSingle(Listing& now, const Listing& before);
  void LookAtName(const Listing& before, Found& found) const;
  void LookAtNames(const Listing& before, std::vector<Found>& all);
  // Of what stands at `at` and is a checkpoint by its commit record or mark.
  Result<Ownership> OwnershipOf(const std::string& at, const FileInfo& folder,
                                const FileInfo& commit) const;
  // Of the source, with its write bits.
  Result<Ownership> OwnershipOfSource(const FileInfo& own) const;
  void ServeAsked(const Listing& before);
  Result<std::shared_ptr<Slot>> Keep(Found& found);
  std::shared_ptr<Slot> Known(const Listing& before, const Found& found) const;
  // Whether it stands for what was found: the same commit record, for the same users.
  static bool Shows(const std::shared_ptr<Slot>& slot, const Found& found);
  Status ReadCommit(const std::string& folder, Found& found) const;
  Status LookAtStep(const Listing& before, Found& found) const;
  Result<std::shared_ptr<const CheckpointView>> OpenForeign(
      const Slot& slot, const CheckpointView::Options& options) const;
  std::string LatestOf(const Listing& now) const;
  void Publish(std::shared_ptr<Listing> now, Clock::time_point started);
  void Loop();
  void CloseUnused(const Listing& now, std::size_t kept);

  // With the lock held.
  // An answer counts by when its look began, not by when it ended: a look that took long saw an
  // older state.
  bool Young(Clock::time_point now) const {
    return looks > 0 && begun >= not_before && now - begun <= kMaxAge;
  }
  void Ask(Clock::time_point now) {
    last_asked = now;
    if (wanted || Young(now)) return;
    wanted = true;
    bell->Ring();
  }
};

Status StoreWatch::Core::ReadCommit(const std::string& folder, Found& found) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto file, fs.OpenRead(JoinPath(folder, kCommitName)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, ReadCommitBytes(*file, kCommitName));
  const Result<DecodedCommit> read = DecodeCommit(bytes, kCommitName);
  found.damaged = read.status().code() == Code::kDataLoss;
  TENSORMOUNT_RETURN_IF_ERROR(read.status());
  found.uuid = read.value().record.uuid;
  found.generation = read.value().record.generation;
  return {};
}

// Where others may enter the mount, what a checkpoint's bytes stand on beside its commit record is
// looked at too: the folders above the source, and data/. Its files are looked at when it is opened
// (CheckpointView).
Result<Ownership> StoreWatch::Core::OwnershipOf(const std::string& at, const FileInfo& folder,
                                                const FileInfo& commit) const {
  Ownership own{.uid = folder.uid,
                .gid = folder.gid,
                .file_mode = commit.mode & 0444,
                .folder_mode = folder.mode & 0555};
  if (!others) return own;
  const bool is_file = folder.kind == FileKind::kFile;
  Reach reach(own.uid, own.gid);
  // The root of the mount stands for the source and all above it: nobody passes it who could not.
  if (HoldsMany(kind)) reach.AssumeSearched(path);
  TENSORMOUNT_RETURN_IF_ERROR(reach.NeedFoldersAbove(fs, at));
  std::uint32_t mode = folder.mode;
  if (!is_file) {
    TENSORMOUNT_ASSIGN_OR_RETURN(mode, PlainMode(fs, at, folder));
    reach.Need(folder, mode, Reach::How::kSearch);
  }
  own.folder_mode = mode & 0555 & reach.mask();
  if (!foreign()) {
    const std::string commit_path = JoinPath(at, kCommitName);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t bits, PlainMode(fs, commit_path, commit));
    reach.Need(commit, bits, Reach::How::kRead);
    const Status data = reach.Need(fs, JoinPath(at, kDataFolder), Reach::How::kSearch);
    if (!data.ok() && data.code() != Code::kNotFound) return data;
    own.file_mode = 0444 & reach.mask();
  } else {
    reach.Need(commit, commit.mode, Reach::How::kRead);
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
  if (!others) return all;
  Reach reach(own.uid, own.gid);
  TENSORMOUNT_RETURN_IF_ERROR(reach.NeedFoldersAbove(fs, path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t mode, PlainMode(fs, path, own));
  reach.Need(own, mode, Reach::How::kSearch);
  all.file_mode = mode & 0444 & reach.mask();
  all.folder_mode = mode & 0555 & reach.mask();
  all.write_mode = mode & 0222 & reach.mask();
  // In such a folder a name is its owner's alone. Who made a staging is not known below the mount,
  // where it is the daemon's: so nobody else changes anything.
  if ((own.mode & 01000) != 0) all.write_mode &= 0200;
  return all;
}

// The slot that shows this commit record already; null: none does.
std::shared_ptr<Slot> StoreWatch::Core::Known(const Listing& before, const Found& found) const {
  auto old = before.Find(found.name);
  if (!old) {
    const std::lock_guard lock(mutex);
    if (const auto at = early.find(found.name); at != early.end()) old = at->second;
  }
  return Shows(old, found) ? old : nullptr;
}

bool StoreWatch::Core::Shows(const std::shared_ptr<Slot>& slot, const Found& found) {
  return slot && slot->identity_ == IdentityOf(found.commit) && slot->ownership == found.ownership;
}

// What was found, as a slot: the one that showed it before, or a new one.
// Ids rise and are never given twice; that also bounds a mount to kMaxSlots checkpoints over its
// life.
Result<std::shared_ptr<Slot>> StoreWatch::Core::Keep(Found& found) {
  TENSORMOUNT_RETURN_IF_ERROR(found.status);
  if (found.slot) return found.slot;
  auto slot = std::make_shared<Slot>();
  slot->name = found.name;
  slot->path = HoldsMany(kind) ? JoinPath(path, found.name) : path;
  slot->ownership = found.ownership;
  slot->mtime = found.commit.mtime_seconds;
  slot->identity_ = IdentityOf(found.commit);
  slot->uuid = found.uuid;
  slot->generation = found.generation;
  const std::lock_guard lock(mutex);
  // Somebody may have been given one since we looked at this name: another would take its place,
  // and what is known of the first be stale.
  if (const auto at = early.find(found.name); at != early.end() && Shows(at->second, found)) {
    return at->second;
  }
  // A mount of one checkpoint is of that one only: what replaces it is not shown.
  if (!HoldsMany(kind) && slots.size() > 1) {
    return Status(Code::kStale, slot->path + ": another one has taken its place");
  }
  if (slots.size() >= kMaxSlots) {
    return Status(Code::kResourceExhausted, "this mount saw too many checkpoints: mount again");
  }
  slot->id = static_cast<std::uint32_t>(slots.size());
  slots.push_back(slot);
  return slot;
}

// A folder of a training directory: kNotFound where it holds no checkpoint (yet).
Status StoreWatch::Core::LookAtStep(const Listing& before, Found& found) const {
  const std::optional<std::uint64_t> iteration = IterationOf(found.name);
  if (!iteration) return Status(Code::kNotFound, "no iteration has such a name");
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder all, ForeignFolder::Open(fs, path, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, all.Below(found.name));
  TENSORMOUNT_ASSIGN_OR_RETURN(found.folder, folder.Stat(""));
  TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, MarkOf(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(found.ownership,
                               OwnershipOf(JoinPath(path, found.name), found.folder, found.commit));
  found.slot = Known(before, found);
  if (found.slot) return {};
  if (FindForeignFormat(folder) == nullptr) return Status(Code::kNotFound, "no checkpoint");
  found.generation = *iteration;
  // For inode numbers: what is put in its place gets others.
  found.uuid = {found.commit.inode, static_cast<std::uint64_t>(found.commit.mtime_seconds)};
  return {};
}

// The one that the slot stands for: not another that took its place while it was read.
Result<std::shared_ptr<const CheckpointView>> StoreWatch::Core::OpenForeign(
    const Slot& slot, const CheckpointView::Options& options) const {
  auto view = CheckpointView::OpenForeign(fs, slot.path, slot.ownership, options);
  if (!view.ok()) return view;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                               ForeignFolder::Open(fs, slot.path, roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo mark, MarkOf(folder));
  if (IdentityOf(mark) == slot.identity_) return view;
  return Status(Code::kStale, slot.path + ": another one has taken its place");
}

std::string StoreWatch::Core::LatestOf(const Listing& now) const {
  const Result<ForeignFolder> folder = ForeignFolder::Open(fs, path, roots);
  std::vector<ForeignStep> steps;
  for (const auto& slot : now.by_id) {
    steps.push_back({.name = slot->name, .generation = slot->generation});
  }
  return folder.ok() ? LatestStep(folder.value(), steps) : std::string();
}

void StoreWatch::Core::LookAtName(const Listing& before, Found& found) const {
  if (kind == SourceKind::kForeignSteps) {
    found.status = LookAtStep(before, found);
    return;
  }
  const std::string folder = JoinPath(path, found.name);
  found.status = [&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, fs.LinkStat(JoinPath(folder, kCommitName)));
    TENSORMOUNT_ASSIGN_OR_RETURN(found.folder, fs.LinkStat(folder));
    TENSORMOUNT_ASSIGN_OR_RETURN(found.ownership, OwnershipOf(folder, found.folder, found.commit));
    found.slot = Known(before, found);
    return found.slot ? Status() : ReadCommit(folder, found);
  }();
}

// The first look at a large store reads thousands of small files: with some help, and answering
// meanwhile those who wait for one of them.
void StoreWatch::Core::LookAtNames(const Listing& before, std::vector<Found>& all) {
  std::atomic<std::size_t> next{0};
  const auto work = [&](bool serve) {
    for (std::size_t i = next++; i < all.size(); i = next++) {
      if (serve) ServeAsked(before);
      if (!all[i].slot) LookAtName(before, all[i]);
    }
  };
  std::size_t unknown = 0;
  for (const Found& found : all) unknown += !found.slot && !before.Find(found.name) ? 1 : 0;
  std::vector<std::thread> helpers;
  try {
    const std::size_t wanted_threads = std::min(kReadThreads, unknown / kReadsPerThread);
    while (helpers.size() < wanted_threads) helpers.emplace_back(work, false);
  } catch (const std::system_error&) {
    // Without them it takes longer.
  }
  work(true);
  for (std::thread& helper : helpers) helper.join();
}

void StoreWatch::Core::ServeAsked(const Listing& before) {
  std::vector<std::string> asked;
  {
    const std::lock_guard lock(mutex);
    asked.swap(asked_names);
  }
  for (std::string& name : asked) {
    Found found{.name = std::move(name)};
    if (CheckCheckpointName(found.name).ok()) {
      LookAtName(before, found);
    } else {
      found.status = Status(Code::kNotFound, "no checkpoint has such a name");
    }
    auto slot = Keep(found);
    {
      const std::lock_guard lock(mutex);
      early[found.name] = slot.ok() ? slot.value() : nullptr;
    }
    looked.notify_all();
  }
}

// Whole or in part. The time stamp of a folder changes with every name that comes or goes, but on
// some filesystems only in steps of a second or two: for that long (`grain`) after a change was
// seen, it proves nothing, and the folder is listed each time. Names that were no checkpoints, and
// checkpoints that are open, are looked at always: the first may become complete, and of the second
// a removal must show.
Status StoreWatch::Core::LookAtStore(Listing& now, const Listing& before) {
  const Clock::time_point started = Clock::now();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
  const std::pair id{own.device, own.inode};
  if (!own_folder) own_folder = id;
  if (*own_folder != id) {
    stamp = {-1, -1};
    return Status(Code::kStale, path + ": another folder is in its place");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(now.ownership, OwnershipOfSource(own));
  now.mtime = own.mtime_seconds;
  ServeAsked(before);
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
  std::vector<Found> all;
  all.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    Found found{.name = names[i]};
    const bool in_turn = whole || (i >= window && i - window < kWindow);
    if (!in_turn && !pending.contains(names[i])) {
      auto slot = before.Find(names[i]);
      if (slot && !slot->opened()) found.slot = std::move(slot);
    }
    all.push_back(std::move(found));
  }
  window = window + kWindow < names.size() ? window + kWindow : 0;
  LookAtNames(before, all);
  pending.clear();
  for (Found& found : all) {
    const Result<std::shared_ptr<Slot>> slot = Keep(found);
    if (slot.ok()) {
      now.by_id.push_back(slot.value());
      continue;
    }
    pending.insert(found.name);
    // Other folders are nobody's business; or it was removed while we looked.
    if (slot.status().code() == Code::kNotFound) continue;
    now.problems.push_back(found.name + ": " + slot.status().message());
    // "latest" must not silently mean an older checkpoint because a newer one cannot be read at
    // this moment. One that is damaged is no candidate, though.
    if (!found.damaged && now.latest_unknown.ok() && kind == SourceKind::kStore) {
      now.latest_unknown = slot.status().WithContext(found.name + " may be the latest");
    }
  }
  // Deleted with all that was in it, which takes a while: the folder itself goes last.
  if (kind == SourceKind::kStore && now.by_id.empty() &&
      fs.LinkStat(JoinPath(path, store_paths::kSuperblockFile)).status().code() ==
          Code::kNotFound) {
    return Status(Code::kStale, path + ": it has no store.json any more");
  }
  return {};
}

Status StoreWatch::Core::LookAtSingle(Listing& now, const Listing& before) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
  const bool file = own.kind == FileKind::kFile;
  Found found{.name = path.substr(path.rfind('/') + 1)};
  found.folder = found.commit = own;
  if (kind == SourceKind::kForeign) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, ForeignFolder::Open(fs, path, roots));
    TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, MarkOf(folder));
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(found.commit, fs.LinkStat(JoinPath(path, kCommitName)));
  }
  // Whoever may read the file may enter the folder that shows it.
  // Read bits become read and search bits: 0444 >> 2 is 0111.
  if (file) found.folder.mode = (own.mode & 0444) | ((own.mode & 0444) >> 2);
  TENSORMOUNT_ASSIGN_OR_RETURN(found.ownership, OwnershipOf(path, found.folder, found.commit));
  now.ownership = found.ownership;
  now.mtime = found.commit.mtime_seconds;
  found.slot = Known(before, found);
  if (!found.slot && !foreign()) TENSORMOUNT_RETURN_IF_ERROR(ReadCommit(path, found));
  TENSORMOUNT_ASSIGN_OR_RETURN(auto slot, Keep(found));
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
  const Status status = HoldsMany(kind) ? LookAtStore(*now, *before) : LookAtSingle(*now, *before);
  const bool removed = status.code() == Code::kNotFound || status.code() == Code::kStale;
  if (!status.ok()) {
    // A store that cannot be read now is shown as it was; one that is gone is empty.
    if (!removed) now->by_id = before->by_id;
    if (removed && HoldsMany(kind)) {
      now->store_gone = Status(Code::kStale, "the store is gone: " + status.message());
    }
    now->problems.push_back(status.message());
  }
  Publish(std::move(now), started);
  return status;
}

// Takes the new listing into use. Slots that are in the old and not in the new one are gone: they
// are marked before anybody can see the new listing, kept in `left` as long as open files may have
// their view, and let go of so that gc can remove their files.
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
  // An older one in its place would be believed.
  if (!now->latest_unknown.ok()) now->latest = nullptr;
  if (kind == SourceKind::kForeignSteps && now->latest) now->latest = now->Find(LatestOf(*now));
  std::vector<std::shared_ptr<Slot>> gone;
  {
    const std::lock_guard lock(mutex);
    const auto drop_if_gone = [&](const std::shared_ptr<Slot>& slot) {
      const auto at = std::lower_bound(
          now->by_id.begin(), now->by_id.end(), slot->id,
          [](const std::shared_ptr<Slot>& s, std::uint32_t id) { return s->id < id; });
      if (at == now->by_id.end() || (*at)->id != slot->id) {
        slots[slot->id] = nullptr;
        slot->gone_.store(true, std::memory_order_release);  // Before anybody sees the new listing.
        left.emplace(slot->id, slot);  // In one step with it: no open file is without both.
        gone.push_back(slot);
      }
    };
    for (const auto& slot : listing->by_id) drop_if_gone(slot);
    for (const auto& [name, slot] : early) {
      if (slot) drop_if_gone(slot);
    }
    early.clear();
    asked_names.clear();  // The listing answers them.
    listing = now;
    begun = started;
    ++looks;
    stuck = false;
  }
  looked.notify_all();
  for (const auto& slot : gone) slot->LetGo();
  {
    const std::lock_guard lock(mutex);
    std::erase_if(left, [](const auto& entry) { return !entry.second->MayBeHeld(); });
  }
  CloseUnused(*now, kKeptOpen);
}

// The most recently used `kept` stay open. Open files keep their views by themselves.
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

// Sleeps until somebody asks, the folder changes, or there is something to let go of. Without
// inotify, and with a checkpoint open, it looks every kIdleLook: a checkpoint that is removed on
// this machine shall not be held open for longer.
void StoreWatch::Core::Loop() {
  std::unique_lock lock(mutex);
  while (!stop) {
    if (!wanted) {
      const std::shared_ptr<const Listing> shown = listing;
      // What is opened meanwhile rings.
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
      // Where nothing is open nothing need be let go of: those who ask later will look.
      const bool must_look = changed || (!bell->watches() && Clock::now() - begun >= kIdleLook);
      const bool now_open = std::any_of(listing->by_id.begin(), listing->by_id.end(),
                                        [](const auto& slot) { return slot->opened(); });
      if (stop || (!wanted && !(must_look && now_open))) continue;
    }
    wanted = false;
    lock.unlock();
    (void)Look();  // What went wrong stands in the listing's problems.
    lock.lock();
  }
  ended = true;
  looked.notify_all();
}

Result<std::unique_ptr<StoreWatch>> StoreWatch::Start(
    FileSystem& fs, SourceKind kind, const std::string& path, bool list_views, ServeVerify verify,
    std::shared_ptr<const KeyMap> map, const HfOptions& hf, std::vector<std::string> roots,
    bool others, std::chrono::milliseconds grain) {
  TENSORMOUNT_ASSIGN_OR_RETURN(auto bell, Doorbell::Make(path));
  auto core = std::make_shared<Core>(fs, kind, path, std::move(bell));
  core->list_views = list_views;
  core->verify = verify;
  core->map = std::move(map);
  core->hf = hf;
  core->roots = std::move(roots);
  core->others = others;
  core->grain = grain;
  core->slots.push_back(nullptr);
  auto first = std::make_shared<Listing>();
  if (HoldsMany(kind)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo own, fs.Stat(path));
    TENSORMOUNT_ASSIGN_OR_RETURN(first->ownership, core->OwnershipOfSource(own));
    first->mtime = own.mtime_seconds;
  }
  core->listing = std::move(first);
  core->wanted = HoldsMany(kind);
  core->last_asked = Clock::now();
  if (!HoldsMany(kind)) TENSORMOUNT_RETURN_IF_ERROR(core->Look());
  std::thread([core] { core->Loop(); }).detach();
  return std::unique_ptr<StoreWatch>(new StoreWatch(std::move(core)));
}

// Does not wait for ever: storage may hold the thread, which then keeps Core and ends by itself.
StoreWatch::~StoreWatch() {
  std::unique_lock lock(core_->mutex);
  core_->stop = true;
  core_->bell->Ring();
  if (!core_->looked.wait_for(lock, kWatchStopPatience, [&] { return core_->ended; })) {
    Log(LogLevel::kWarning, core_->path + " does not answer: left a thread behind");
  }
}

// After one caller has waited in vain (`stuck`) no other waits until a look has ended: a store that
// hangs costs each program one second once, not for every name.
std::shared_ptr<const StoreWatch::Listing> StoreWatch::Now(
    std::optional<std::chrono::milliseconds> patience) {
  std::unique_lock lock(core_->mutex);
  const Clock::time_point asked = Clock::now();
  core_->Ask(asked);
  if (core_->Young(asked) || core_->stuck) return core_->listing;
  if (!patience) patience = core_->looks > 0 ? kPatience : kFirstPatience;
  const bool came = core_->looked.wait_until(lock, asked + *patience, [&] {
    return core_->ended || core_->Young(Clock::now()) ||
           (core_->looks > 0 && core_->begun >= asked);
  });
  if (!came) core_->stuck = true;
  return core_->listing;
}

std::shared_ptr<const StoreWatch::Listing> StoreWatch::Last() {
  const std::lock_guard lock(core_->mutex);
  core_->Ask(Clock::now());
  return core_->listing;
}

// During the first look the name is put in front: the thread that looks serves it between two
// others.
std::shared_ptr<Slot> StoreWatch::FindName(const std::string& name) {
  std::unique_lock lock(core_->mutex);
  if (core_->looks == 0) {
    const Clock::time_point asked = Clock::now();
    core_->Ask(asked);
    const auto known = [&] { return core_->early.contains(name); };
    if (!known()) {
      core_->asked_names.push_back(name);
      core_->looked.wait_until(lock, asked + kFirstPatience,
                               [&] { return core_->ended || core_->looks > 0 || known(); });
    }
    if (known()) return core_->early[name];
  }
  lock.unlock();
  return Now()->Find(name);
}

bool StoreWatch::settled() const {
  const std::lock_guard lock(core_->mutex);
  return core_->looks > 0;
}

void StoreWatch::Refresh() {
  const std::lock_guard lock(core_->mutex);
  core_->not_before = Clock::now();
}

Result<std::shared_ptr<Slot>> StoreWatch::Find(std::uint32_t id) {
  (void)Last();  // Keeps the answer young while the mount is in use.
  const std::lock_guard lock(core_->mutex);
  if (id >= core_->slots.size() || !core_->slots[id]) {
    return Status(Code::kStale, "the checkpoint was removed or replaced");
  }
  return core_->slots[id];
}

std::shared_ptr<const CheckpointView> StoreWatch::KeptView(std::uint32_t id) {
  const std::lock_guard lock(core_->mutex);
  const auto at = core_->left.find(id);
  return at == core_->left.end() ? nullptr : at->second->LastView();
}

Result<std::shared_ptr<const CheckpointView>> StoreWatch::View(Slot& slot) {
  slot.used_.store(core_->clock.fetch_add(1) + 1, std::memory_order_relaxed);
  auto view = OpenView(slot);
  if (slot.gone()) slot.LetGo();  // While it was opened: nobody waited for us.
  return view;
}

// With the slot's own lock, so that of many who want it one opens and the others wait for that, and
// nobody else does.
Result<std::shared_ptr<const CheckpointView>> StoreWatch::OpenView(Slot& slot) {
  const std::lock_guard lock(slot.mutex_);
  if (slot.gone()) return Status(Code::kStale, slot.name + " was removed or replaced");
  if (!slot.view_) slot.view_ = slot.LastView();
  if (slot.view_) {
    // Rings where it must be let go of again some time.
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
                                        .others = core_->others};
  auto view = core_->foreign()
                  ? core_->OpenForeign(slot, options)
                  : CheckpointView::Open(core_->fs, slot.path, slot.uuid, slot.ownership, options);
  if (!view.ok()) {
    // Removed a moment ago.
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
  if (slot.gone()) slot.LetGo();
  return view;
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
