// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_STAGING_STAGED_CHECKPOINT_H_
#define TENSORMOUNT_FS_STAGING_STAGED_CHECKPOINT_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/schema.h"
#include "fs/save/staging_folder.h"
#include "fs/save/staging_writer.h"
#include "fs/views/key_tree.h"
#include "index/store/store.h"

namespace tensormount::fs {

// A version of a staging's schema, with the directories that its keys form. Immutable and shared: a
// lookup keeps using its version while an edit replaces it. Not copyable, because `tree` points
// into `keys`.
struct SchemaView {
  explicit SchemaView(StagingSchema s);
  SchemaView(const SchemaView&) = delete;
  SchemaView& operator=(const SchemaView&) = delete;

  const StagingSchema schema;
  const std::string text;  // The content of schema.json.
  const ListedKeys keys;   // Keys of the tensors.
  const KeyTree tree;
  // The directory of the tree with this path ("" is the root). kNotFound: there is no such
  // directory; ENOTDIR: a part of the path is a tensor.
  Result<TreeFolder> FolderAt(std::string_view path) const;
  // The tensor with this key; null if the schema has none.
  const TensorMeta* Find(std::string_view key) const;
};

// One staging as this mount sees it: whether it still exists, its schema, what this mount wrote,
// and who has files open for writing. Lives from the first lookup until the staging was published
// or removed. Thread-safe; every call may block as long as storage does.
// Mounts get no notification of other machines' changes, so the staging's existence (one read of
// its UUID) and its schema (a listing of schema/, whose files never change) are checked again after
// kMaxAge.
//
// Locks are taken one at a time, except mutex_ within schema_mutex_ (WithdrawSchema). schema_mutex_
// and lease_mutex_ are held during storage calls, mutex_ is not.
class StagedCheckpoint {
 public:
  // Age after which cached state of the directory is refreshed.
  static constexpr std::chrono::milliseconds kMaxAge{200};
  // How long a writer waits for a publish in progress to end, and a publish for files whose last
  // bytes are being made durable.
  static constexpr std::chrono::seconds kLeasePatience{10};
  // How long a publish waits for the kernel to release closed and unmapped files.
  static constexpr std::chrono::milliseconds kReleasePatience{250};

  // `fs` must outlive this object.
  StagedCheckpoint(FileSystem& fs, Staging staging, std::string incarnation);

  const Staging& staging() const { return staging_; }
  const std::string& name() const { return staging_.name; }
  FileSystem& fs() const { return fs_; }
  StagingWriter& writer() { return writer_; }
  const std::string& incarnation() const { return incarnation_; }

  // kStale once the staging was published, removed or replaced, by anybody. Checks storage if the
  // last check is older than kMaxAge, or always (`now`).
  Status CheckInPlace(bool now = false);
  // Marks the staging as gone: later CheckInPlace and writes return kStale.
  void Retire();
  // Whether the staging is known to be gone; does not check storage.
  bool gone() const { return gone_.load(std::memory_order_acquire); }

  // The merged schema, at most kMaxAge old. `fresh`: checks storage now, for additions of other
  // mounts.
  Result<std::shared_ptr<const SchemaView>> Schema(bool fresh = false);
  Status ExtendSchema(const StagingSchema& edit);
  // Removal of schema.json: withdraws the edits of all mounts and the tensor bytes of this mount,
  // and allows removal of the staging.
  Status WithdrawSchema();

  // Registers a file that is opened for writing, or written to again after a flush. The first one
  // takes the lease that blocks publishes, for all files of this mount. kBusy: a publish in
  // progress did not end within kLeasePatience.
  Status BeginWriting();
  void EndWriting();
  // Numbers of open writers that will soon be released. `closed`: files whose descriptors are all
  // closed but which are, or were, mapped; the kernel releases them a moment after munmap(2).
  // `releasing`: files that the kernel has released and whose last bytes are being made durable.
  // A program may close its last descriptor and rename the staging at once, before the kernel sends
  // RELEASE of a mapped file; a publish that counted such files as open would fail for no visible
  // reason.
  struct Lingering {
    int closed = 0;
    int releasing = 0;
  };
  void Linger(const Lingering& more);
  int open_writers() const { return writing_.load(); }
  // Waits for lingering writers while there are no others: at most kReleasePatience for closed but
  // mapped files, and kLeasePatience for files whose last bytes are being made durable. Returns the
  // number of open writers.
  int AwaitReleases();

  // Opens a box of a tensor, and remembers it for listings and attributes.
  Result<std::shared_ptr<TargetWriter>> OpenTarget(const TensorMeta& meta, const Box& box);
  // The target of a box; null if this mount has not opened that box.
  std::shared_ptr<TargetWriter> FindTarget(const TensorMeta& meta, const Box& box);
  // Records that slices/`path` was opened for writing, or removed.
  void AddSlicePath(const std::string& path);
  void RemoveSlicePath(const std::string& path);
  std::vector<std::string> SlicePaths();
  // Whether this mount has written, and not discarded, bytes of tensors/PATH/...
  bool HasWrittenBelow(const std::string& path);

  // Directories below objects/ that programs made with mkdir, by path. The mount must remember
  // them, because only objects are stored. AddObjectFolder returns false if the path is known
  // already.
  bool AddObjectFolder(const std::string& path);
  void RemoveObjectFolder(const std::string& path);
  std::vector<std::string> ObjectFolders();

  // Makes everything that this mount wrote durable, then writes the mark done/`rank`.
  Status MarkDone(std::uint32_t rank);
  // Whether the staging may be removed with its content: its schema was withdrawn (WithdrawSchema),
  // or no mount has written anything.
  Result<bool> CanRemove();

  // Records the size of a text that is being written to schema.json (`schema`) or common.json.
  // `who` only identifies the open file; it is never dereferenced.
  void NoteEdit(bool schema, const void* who, std::uint64_t size);
  void EndEdit(bool schema, const void* who);
  // The largest size of the texts being written to that file; nullopt if there is none.
  std::optional<std::uint64_t> EditSize(bool schema);

  void Touch();  // Sets mtime() to the current time.
  std::int64_t mtime() const { return mtime_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;
  Status ReadSchema();

  FileSystem& fs_;
  const Staging staging_;
  const std::string incarnation_;
  StagingWriter writer_;
  std::atomic<std::int64_t> mtime_{0};

  // Never reset: a staging that was published or removed does not come back.
  std::atomic<bool> gone_{false};
  std::atomic<Clock::rep> checked_{0};  // When the staging was last seen under its name.

  std::mutex schema_mutex_;
  std::shared_ptr<const SchemaView> schema_;
  std::vector<std::string> schema_files_;  // The files that schema_ was read from.
  Clock::time_point schema_read_{};

  std::mutex lease_mutex_;
  std::condition_variable fewer_writers_;
  std::atomic<int> writing_{0};
  Lingering lingering_;
  // Held while writing_ is above 0.
  std::unique_ptr<StagingLease> lease_;

  std::mutex mutex_;
  struct KnownTarget {
    std::string path;  // Path below tensors/ of a whole tensor; else empty.
    std::shared_ptr<TargetWriter> target;
  };
  std::map<std::string, KnownTarget> targets_;  // By TargetName.
  std::set<std::string> slice_paths_;           // Paths below slices/.
  std::set<std::string> object_folders_;
  // Sizes of the texts being written to common.json and schema.json, by handle, so that `ls` shows
  // them before they are in the staging.
  std::map<const void*, std::uint64_t> edits_[2];
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STAGING_STAGED_CHECKPOINT_H_
