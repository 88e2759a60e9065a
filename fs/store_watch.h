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

#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/views/checkpoint_view.h"
#include "index/foreign/open_source.h"
#include "index/records/inventory.h"

namespace tensormount::fs {

// Whether a mount of this kind of source shows a directory for each of several checkpoints, which
// come and go; other sources are a single checkpoint.
constexpr bool ShowsManyCheckpoints(SourceKind kind) {
  return kind == SourceKind::kStore || kind == SourceKind::kForeignSteps;
}

// One checkpoint that a mount has seen, until it is removed. The id is unique in the mount, because
// the kernel keeps node ids that contain it. In a mount of several checkpoints, one that is
// replaced under its name (a foreign one: whose describing file is replaced), or whose ownership
// changes, gets another slot, and files that programs have open continue to read the old data.
// Thread-safe.
class Slot {
 public:
  std::uint32_t id = 0;
  std::string name;  // Name of the checkpoint's directory.
  std::string path;
  Uuid uuid;
  std::uint64_t generation = 0;
  Ownership ownership;
  // Modification time of the commit record or, for a foreign checkpoint, of the file that describes
  // it.
  std::int64_t mtime = 0;
  // Bytes of the data files. 0 for a foreign checkpoint.
  std::uint64_t data_bytes = 0;

  // NaNs and infinities in all tensors, by the counts of the save. nullopt: not known, or the
  // checkpoint has never been the latest of a local store.
  std::optional<std::uint64_t> nonfinite() const {
    const std::int64_t known = nonfinite_.load(std::memory_order_acquire);
    return known < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(known));
  }
  bool gone() const { return gone_.load(std::memory_order_acquire); }
  // Whether the checkpoint is open, so that StoreWatch::View() returns at once.
  bool opened() const { return opened_.load(std::memory_order_acquire); }
  // Nodes of slices/ that the kernel knows, from the current or an earlier view of the checkpoint.
  const std::shared_ptr<SliceItems>& slices() const { return slices_; }

 private:
  friend class StoreWatch;
  // Tells commit records apart without reading them. For a foreign checkpoint it is that of the
  // file that FormatStamp returns.
  struct Identity {
    std::uint64_t device = 0, inode = 0, size = 0;
    std::int64_t seconds = 0, nanoseconds = 0;
    friend bool operator==(const Identity&, const Identity&) = default;
  };
  Identity identity_;
  // -2: not read; -1: not known.
  std::atomic<std::int64_t> nonfinite_{-2};
  std::atomic<bool> gone_{false};
  std::atomic<bool> opened_{false};
  std::atomic<std::uint64_t> used_{0};
  // Verified ranges, kept while the checkpoint is closed.
  const std::shared_ptr<ProvenRanges> proven_ = std::make_shared<ProvenRanges>();
  const std::shared_ptr<SliceItems> slices_ = std::make_shared<SliceItems>();
  // The view that was opened last, if it still exists: open files may keep a view after
  // CloseView().
  std::shared_ptr<const CheckpointView> LastView() const {
    const std::lock_guard lock(last_mutex_);
    return last_view_.lock();
  }
  // For a slot that is gone: whether open files may still have its view. Uses a try-lock, because
  // an open in progress may wait for storage; the result is then true.
  bool MayHaveOpenFiles() {
    const std::unique_lock opens(mutex_, std::try_to_lock);
    if (!opens.owns_lock()) return true;
    view_ = nullptr;  // Still set if CloseView did not get mutex_.
    const std::lock_guard lock(last_mutex_);
    return !last_view_.expired();
  }
  // Closes the view. Open files keep the view, and with it the lock on the checkpoint that gc waits
  // for. Does nothing while another thread opens the checkpoint, because that may hang in storage;
  // the other thread then calls CloseView itself (StoreWatch::View).
  void CloseView() {
    const std::unique_lock opens(mutex_, std::try_to_lock);
    if (!opens.owns_lock()) return;
    opened_ = false;
    view_ = nullptr;
  }
  void SetLastView(const std::shared_ptr<const CheckpointView>& view) {
    const std::lock_guard lock(last_mutex_);
    last_view_ = view;
  }

  std::mutex mutex_;  // Held while the checkpoint is opened, as long as storage takes.
  std::shared_ptr<const CheckpointView> view_;
  mutable std::mutex last_mutex_;  // Never held while another lock is taken.
  // The view that was opened last. If a program still reads from it after the checkpoint was
  // closed, the next caller gets this view instead of a second one.
  std::weak_ptr<const CheckpointView> last_view_;
};

// The current checkpoints of a source. One thread finds them by checking the source's directory,
// because other machines send no notifications. The thread checks when a caller asks and the last
// check is older than kMaxAge, and when this machine's kernel reports changed names while a
// checkpoint is open (without inotify: each second), so that a removed checkpoint is closed. If the
// store does not answer, callers wait for kPatience (for the first check kFirstPatience). After one
// caller has waited in vain, further callers get the last listing at once, until a check ends.
// Thread-safe.
//
// Locks: Core::mutex guards the listing and the waiting callers; it is never held during storage
// calls. Slot::mutex_ is held while its checkpoint is opened, so only callers of that checkpoint
// wait.
//
// Cost of a check of a store: one stat of the directory. If the directory changed lately, or has
// few names (kWindow): a listing, and stats of each commit record. Otherwise: stats of the commit
// records of kWindow names in turn, of the open checkpoints, and of names that were no checkpoints.
// The commit record of a shown checkpoint is read again only if its identity (inode, size,
// modification time) or its ownership changed.
class StoreWatch {
 public:
  // Maximum age of a listing. Together with the kernel's caches (0.4 s), programs see a change
  // within 1 s.
  static constexpr std::chrono::milliseconds kMaxAge{200};
  static constexpr std::chrono::milliseconds kPatience{1000};
  // How long callers wait for the first check of a store, which reads all commit records.
  static constexpr std::chrono::milliseconds kFirstPatience{30000};
  // Number of most recently used checkpoints that stay open. All are closed when nobody has used
  // the mount for kIdleRelease. Open files keep their checkpoint open in any case.
  static constexpr std::size_t kKeptOpen = 32;
  static constexpr std::chrono::seconds kIdleRelease{60};

  // Granularity of directory timestamps (whole seconds on some filesystems): for this long after a
  // change, another change may leave the timestamp as it is.
  static constexpr std::chrono::milliseconds kStampGrain{2000};

  // `fs` must outlive this object. `path` must be resolved. `other_users`: users other than the
  // mounting one may enter. A single checkpoint is checked before Start returns, a store
  // afterwards.
  static Result<std::unique_ptr<StoreWatch>> Start(
      FileSystem& fs, SourceKind kind, const std::string& path, bool list_views, ServeVerify verify,
      const NameMap& map, const HfOptions& hf = {}, std::vector<std::string> roots = {},
      bool other_users = false, std::chrono::milliseconds grain = kStampGrain);
  ~StoreWatch();

  // A snapshot of the source. Immutable once published, so holders use it without a lock.
  struct Listing {
    std::vector<std::shared_ptr<Slot>> by_id;  // The existing checkpoints, by id.
    std::shared_ptr<Slot> latest;  // Null: no checkpoint, or latest_unknown is an error.
    // Error if a commit record is unreadable and may be that of the latest checkpoint, or if the
    // store is gone.
    Status latest_unknown;
    // Error (kStale) if the store's directory was moved, replaced or deleted, or its disk was
    // unmounted, or neither store.json nor a checkpoint is left; not the same as an empty store.
    Status store_gone;
    Ownership ownership;  // Ownership of the source.
    std::int64_t mtime = 0;
    // Which checkpoints could not be read, and why; or why the source could not.
    std::vector<std::string> problems;
    std::vector<std::uint32_t> by_name;  // Indexes in by_id, sorted by name.
    std::shared_ptr<Slot> Find(std::string_view name) const;
  };
  // Returns a listing that is at most kMaxAge old or, if the store does not answer within
  // `patience` or did not answer an earlier call, the last listing. `patience` defaults to
  // kPatience, and to kFirstPatience until the first check has ended.
  std::shared_ptr<const Listing> CurrentListing(
      std::optional<std::chrono::milliseconds> patience = {});
  // The last listing; requests a new check if it is too old.
  std::shared_ptr<const Listing> LastListing();
  // The checkpoint of this name; null if there is none. During the first check the name is checked
  // out of turn, so the caller does not wait for all other names.
  std::shared_ptr<Slot> FindName(const std::string& name);
  // Whether the first check has ended. Until then CurrentListing() and FindName() may take long.
  bool first_check_done() const;
  // Makes later calls ignore checks that began before this call. For a publish through the mount:
  // the program that renamed the staging must find the checkpoint at once, not 200 ms later.
  void Refresh();
  // The slot with this id. kStale if it is gone or never existed. Never waits for storage, because
  // every request calls Find.
  Result<std::shared_ptr<Slot>> Find(std::uint32_t id);
  // The view of the slot's checkpoint, which this call opens if it is closed; that may wait for
  // storage. kStale: the checkpoint was removed or replaced.
  Result<std::shared_ptr<const CheckpointView>> View(Slot& slot);
  // The view that open files of a removed checkpoint still hold; null if there is none.
  std::shared_ptr<const CheckpointView> KeptView(std::uint32_t id);
  // The view of an open checkpoint; null if the checkpoint is not open. For callers that must not
  // wait for storage.
  static std::shared_ptr<const CheckpointView> OpenedView(Slot& slot);
  std::size_t open_checkpoints() const;
  bool is_responding() const;

 private:
  // The state. The watching thread keeps it if storage blocks that thread longer than the
  // StoreWatch lives.
  struct Core;
  Result<std::shared_ptr<const CheckpointView>> OpenView(Slot& slot);
  explicit StoreWatch(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  std::shared_ptr<Core> core_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STORE_WATCH_H_
