// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_STORE_WATCH_H_
#define TENSORMOUNT_FS_STORE_WATCH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/views/checkpoint_view.h"
#include "index/foreign/open_source.h"
#include "index/records/inventory.h"

namespace tensormount::fs {

// Whether a mount shows a folder for each of its checkpoints, which come and go.
constexpr bool HoldsMany(SourceKind kind) {
  return kind == SourceKind::kStore || kind == SourceKind::kForeignSteps;
}

// One checkpoint that a mount has seen, from when it appeared until it went. One in a foreign
// format goes when somebody replaces what describes it, and another one comes. Thread-safe.
// Slots have an id that no other slot of the mount ever gets, because the kernel keeps node ids
// that contain it. When a checkpoint is replaced under its name, the new one is another slot, and
// what programs have open of the old one goes on to read the old files.
class Slot {
 public:
  std::uint32_t id = 0;
  std::string name;  // Of its folder.
  std::string path;
  Uuid uuid;
  std::uint64_t generation = 0;
  Ownership ownership;
  std::int64_t mtime = 0;  // Of its commit record, or of what describes it.

  bool gone() const { return gone_.load(std::memory_order_acquire); }
  // Whether View() need not open anything.
  bool opened() const { return opened_.load(std::memory_order_acquire); }
  // What the kernel knows below slices/, of this view of the checkpoint or one before.
  const std::shared_ptr<SliceItems>& slices() const { return slices_; }

 private:
  friend class StoreWatch;
  // What tells one commit record (of a foreign format: MarkOf) from another without reading it.
  struct Identity {
    std::uint64_t device = 0, inode = 0, size = 0;
    std::int64_t seconds = 0, nanoseconds = 0;
    friend bool operator==(const Identity&, const Identity&) = default;
  };
  Identity identity_;
  std::atomic<bool> gone_{false};
  std::atomic<bool> opened_{false};
  std::atomic<std::uint64_t> used_{0};
  // What was found good of it, also while it was not open.
  const std::shared_ptr<ProvenRanges> proven_ = std::make_shared<ProvenRanges>();
  const std::shared_ptr<SliceItems> slices_ = std::make_shared<SliceItems>();
  // Open files may keep what was let go of.
  std::shared_ptr<const CheckpointView> LastView() const {
    const std::lock_guard lock(last_mutex_);
    return last_view_.lock();
  }
  // Of one that is gone: false once no open file can have its view any more.
  // Try-locks, because whoever is opening it may wait for storage; "may be" is then the answer.
  bool MayBeHeld() {
    const std::unique_lock opens(mutex_, std::try_to_lock);
    if (!opens.owns_lock()) return true;
    view_ = nullptr;  // Where LetGo met one of those who look.
    const std::lock_guard lock(last_mutex_);
    return !last_view_.expired();
  }
  // Open files keep the view, and with it the lock that gc waits for. Who opens it at this moment
  // is not waited for (storage may hang), and lets go of it himself.
  void LetGo() {
    const std::unique_lock opens(mutex_, std::try_to_lock);
    if (!opens.owns_lock()) return;
    opened_ = false;
    view_ = nullptr;
  }
  void SetLastView(const std::shared_ptr<const CheckpointView>& view) {
    const std::lock_guard lock(last_mutex_);
    last_view_ = view;
  }

  std::mutex mutex_;  // Held while it is opened, which may take as long as storage likes.
  std::shared_ptr<const CheckpointView> view_;
  mutable std::mutex last_mutex_;  // Never held while another one is taken.
  // A checkpoint that was closed while a program still reads of it is not opened a second time when
  // somebody else comes.
  std::weak_ptr<const CheckpointView> last_view_;
};

// Which checkpoints there are now, seen by looking at the source's folder: nobody tells a mount of
// what other machines publish or remove. It looks when somebody asks and the last look is too old,
// and when this machine's kernel says that names came or went while a checkpoint is open (so that
// it is let go of); otherwise it sleeps. A thread of its own looks, so that a store that does not
// answer blocks nobody for more than kPatience, once. Each commit record is read once. Thread-safe.
//
// A look at a large store is cheap: where the folder is as it was, a part of its checkpoints is
// looked at in turn, beside those that are open or were not complete.
// Locks: Core::mutex guards the listing and who waits; it is never held over storage. Slot::mutex_
// is held while its checkpoint is opened, which may take as long as storage likes, so nobody but
// those who want that checkpoint waits for it.
//
// Cost of a look at a store of n checkpoints: one stat of the folder; where it changed lately a
// listing and a stat of each commit record; otherwise stats of a window of them. A commit record is
// read again only where its inode, size or times changed.
class StoreWatch {
 public:
  // How old an answer may be; together with the kernel's caches of 0.4 s changes show within 1 s.
  static constexpr std::chrono::milliseconds kMaxAge{200};
  static constexpr std::chrono::milliseconds kPatience{1000};
  // For the first look at a store, which reads all commit records.
  static constexpr std::chrono::milliseconds kFirstPatience{30000};
  // Checkpoints kept open beyond those in use, until nobody asked for kIdleRelease.
  static constexpr std::size_t kKeptOpen = 32;
  static constexpr std::chrono::seconds kIdleRelease{60};

  // How long a change of the folder may leave its time stamp as it is (whole seconds on some
  // filesystems).
  static constexpr std::chrono::milliseconds kStampGrain{2000};

  // `fs` must outlive this. `path` is resolved. `others`: VfsOptions::others. Returns before a
  // store has been looked at.
  static Result<std::unique_ptr<StoreWatch>> Start(
      FileSystem& fs, SourceKind kind, const std::string& path, bool list_views, ServeVerify verify,
      std::shared_ptr<const KeyMap> map, const HfOptions& hf = {},
      std::vector<std::string> roots = {}, bool others = false,
      std::chrono::milliseconds grain = kStampGrain);
  ~StoreWatch();

  // Immutable once it was published, so those who hold one may use it without a lock for as long as
  // they like.
  struct Listing {
    std::vector<std::shared_ptr<Slot>> by_id;  // Those that are there, in the order of their ids.
    std::shared_ptr<Slot> latest;              // Null: there is none, or it is not known.
    // Not ok: some commit record could not be read, and may be the latest one's.
    Status latest_unknown;
    // Not ok (kStale): the store itself went: its folder was moved or deleted, or its disk is not
    // mounted any more. That is no empty store.
    Status store_gone;
    Ownership ownership;  // Of the store's folder.
    std::int64_t mtime = 0;
    std::vector<std::string> problems;   // Folders whose commit record cannot be read, and why.
    std::vector<std::uint32_t> by_name;  // Positions in by_id.
    std::shared_ptr<Slot> Find(std::string_view name) const;
  };
  // At most kMaxAge old, where the store answers within `patience` (by default kPatience, of the
  // first look kFirstPatience).
  std::shared_ptr<const Listing> Now(std::optional<std::chrono::milliseconds> patience = {});
  // As it was seen last; asks for a new look where that is too old.
  std::shared_ptr<const Listing> Last();
  // The checkpoint of this name, null where there is none. During the first look, does not wait
  // for the end of it.
  std::shared_ptr<Slot> FindName(const std::string& name);
  // Whether the first look has ended: before, Now() and FindName() may take long.
  bool settled() const;
  // What is seen from now on is younger than this call: for those who changed the store themselves.
  // After a publish through the mount itself: the program that renamed the staging must find the
  // checkpoint at once, not 200 ms later.
  void Refresh();
  // kStale for slots that are gone or never were.
  // By array index: this is on the path of every request.
  Result<std::shared_ptr<Slot>> Find(std::uint32_t id);
  // Opens the checkpoint where it is not open. kStale where it is gone or was replaced.
  Result<std::shared_ptr<const CheckpointView>> View(Slot& slot);
  // Of a checkpoint that is gone: what files that are open of it still hold. Null where none are.
  std::shared_ptr<const CheckpointView> KeptView(std::uint32_t id);
  // Null where it is not open; opens nothing.
  // For Forget and status, which must not wait for storage.
  static std::shared_ptr<const CheckpointView> OpenedView(Slot& slot);
  std::size_t open_checkpoints() const;
  bool answers() const;

 private:
  // Outlives the watch where storage holds the looking thread.
  struct Core;
  Result<std::shared_ptr<const CheckpointView>> OpenView(Slot& slot);
  explicit StoreWatch(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  std::shared_ptr<Core> core_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STORE_WATCH_H_
