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

// The schema of a staging as it is now, with the folders that its keys make.
// Immutable and shared: lookups work on the view that they began with while an edit replaces it.
// `tree` points into `keys`, which is why it cannot be copied.
struct SchemaView {
  explicit SchemaView(StagingSchema s);
  SchemaView(const SchemaView&) = delete;
  SchemaView& operator=(const SchemaView&) = delete;

  const StagingSchema schema;
  const std::string text;  // What reading schema.json gives.
  const ListedKeys keys;   // Of tensors.
  const KeyTree tree;
  // The folder of the tree with this path ("" is its root). kNotFound; ENOTDIR.
  Result<TreeFolder> FolderAt(std::string_view path) const;
  // Null where there is no such tensor.
  const TensorMeta* Find(std::string_view key) const;
};

// One staging as this mount sees it: whether it still stands, its schema, what this mount wrote and
// who has files open for writing. Lives from when somebody looks the staging up until it was
// published or removed. Thread-safe; every call may block for as long as storage does.
// Nobody tells a mount what other machines do, so everything that others can change is looked at
// again when it is older than kMaxAge: whether the staging still stands (one read of its UUID), and
// its schema (a listing of schema/, whose files never change).
//
// Locks are taken one at a time, but for mutex_ within schema_mutex_ (WithdrawSchema).
// schema_mutex_ and lease_mutex_ are held over storage; mutex_ is not.
class StagedCheckpoint {
 public:
  // How old what is known of the folder may be.
  static constexpr std::chrono::milliseconds kMaxAge{200};
  // How long a writer waits for a publish that is under way to fail or to succeed.
  static constexpr std::chrono::seconds kLeasePatience{10};
  // How long a publish waits for the kernel to let go of what was closed and unmapped.
  static constexpr std::chrono::milliseconds kReleasePatience{250};

  // `fs` must outlive it.
  StagedCheckpoint(FileSystem& fs, Staging staging, std::string incarnation);

  const Staging& staging() const { return staging_; }
  const std::string& name() const { return staging_.name; }
  FileSystem& fs() const { return fs_; }
  StagingWriter& writer() { return writer_; }
  const std::string& incarnation() const { return incarnation_; }

  // kStale once it was published, removed or replaced, by anybody. Looks again where the last look
  // is older than kMaxAge, or always (`now`).
  Status CheckInPlace(bool now = false);
  // It has left its name: everything answers kStale from here on.
  void Retire();
  // Whether it is known to have left its name. Looks at nothing.
  bool gone() const { return gone_.load(std::memory_order_acquire); }

  // `fresh`: looks whether another mount has added to it.
  Result<std::shared_ptr<const SchemaView>> Schema(bool fresh = false);
  Status ExtendSchema(const StagingSchema& edit);
  // rm of schema.json: takes back what all mounts said and what this one wrote to tensors, and
  // allows that the staging is removed.
  Status WithdrawSchema();

  // A file is open for writing (or writes again after it was flushed): takes the lease that keeps
  // others from publishing, once for all files of this mount. kBusy: a publish is under way and
  // did not end in kLeasePatience.
  Status BeginWriting();
  void EndWriting();
  // Of those that are writing one was closed by all, but is mapped, or written to through its
  // mapping: it ends when the kernel lets go of it, which it does a moment after munmap(2).
  // `releasing`: it did, and what came last is made durable now.
  // A program closes its last descriptor and then renames the staging, at once. The kernel sends
  // RELEASE of a mapped file a moment later, so a publish that counted it as open would fail for no
  // reason that the program could see.
  struct Lingering {
    int closed = 0;
    int releasing = 0;
  };
  void Linger(const Lingering& more);
  int open_writers() const { return writing_.load(); }
  // Waits for those that linger, if there are no others, a moment, and for those that are releasing
  // as long as a writer would wait for a publish. How many are open then.
  // Waits kReleasePatience for files that are closed but mapped, and kLeasePatience for those whose
  // last bytes are being made durable.
  int AwaitReleases();

  // A box that this mount has open or has written, for lists and attributes.
  Result<std::shared_ptr<TargetWriter>> OpenTarget(const TensorMeta& meta, const Box& box);
  // Null where this mount has not opened it.
  std::shared_ptr<TargetWriter> FindTarget(const TensorMeta& meta, const Box& box);
  // slices/`path` was opened for writing, or removed.
  void AddSlicePath(const std::string& path);
  void RemoveSlicePath(const std::string& path);
  std::vector<std::string> SlicePaths();
  // Whether this mount wrote, and did not forget, bytes of tensors/PATH/... itself.
  bool HasWrittenBelow(const std::string& path);

  // Folders below objects/ that somebody made and no object has named yet, as paths.
  bool AddObjectFolder(const std::string& path);  // False: there already.
  void RemoveObjectFolder(const std::string& path);
  std::vector<std::string> ObjectFolders();

  // Everything that this mount wrote, durable; then the mark of a writer.
  Status MarkDone(std::uint32_t rank);
  // Whether it may be removed with all that is in it: withdrawn, or nothing was ever written.
  Result<bool> Removable();

  // Texts that are being written to schema.json and common.json, by how long they are.
  // `who` is only an identity, never followed.
  void NoteEdit(bool schema, const void* who, std::uint64_t size);
  void EndEdit(bool schema, const void* who);
  // The length of the longest; nothing where nobody edits.
  std::optional<std::uint64_t> EditSize(bool schema);

  void Touch();  // Something changed now.
  std::int64_t mtime() const { return mtime_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;
  Status ReadSchema();

  FileSystem& fs_;
  const Staging staging_;
  const std::string incarnation_;
  StagingWriter writer_;
  std::atomic<std::int64_t> mtime_{0};

  // Never false again: a staging that left its name does not come back.
  std::atomic<bool> gone_{false};
  std::atomic<Clock::rep> checked_{0};  // When it was last seen in place.

  std::mutex schema_mutex_;
  std::shared_ptr<const SchemaView> schema_;
  std::vector<std::string> schema_files_;  // That schema_ was read from.
  Clock::time_point schema_read_{};

  std::mutex lease_mutex_;
  std::condition_variable fewer_writers_;
  std::atomic<int> writing_{0};
  Lingering lingering_;
  // Held while writing_ is above 0.
  std::unique_ptr<StagingLease> lease_;

  std::mutex mutex_;
  struct Known {
    std::string path;  // Below tensors/, where it is a whole tensor.
    std::shared_ptr<TargetWriter> target;
  };
  std::map<std::string, Known> targets_;  // By tensor and box.
  std::set<std::string> slice_paths_;     // Below slices/.
  std::set<std::string> object_folders_;
  // Of common.json and schema.json, by handle. A text that is being written is not in the staging
  // yet, but `ls` shall show how long it is.
  std::map<const void*, std::uint64_t> edits_[2];
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STAGING_STAGED_CHECKPOINT_H_
