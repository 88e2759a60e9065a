// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_STORE_H_
#define TENSORMOUNT_INDEX_STORE_STORE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/store.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/records/inventory.h"

namespace tensormount {

// Checks the name of a checkpoint. kInvalidArgument for "latest", "store.json", "policy.json", a
// leading dot, '/', NUL, an empty name, or a name over 255 bytes.
Status CheckCheckpointName(std::string_view name);

struct CheckpointListing {
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  Uuid parent;
  std::uint64_t commit_bytes = 0;  // Size of the file COMMIT.
  // Made by `derive`. A derived checkpoint is the latest, or the default base, only if all usable
  // checkpoints of the store are derived.
  bool derived = false;
  // Why the checkpoint cannot be used; OK if it can. kNotFound: no directory has this name.
  Status problem;
  // Which copy of COMMIT is damaged, and why, although the checkpoint can be used. Empty: none.
  std::string commit_damage;
  // The state of the directory, as its files show. kUnread if they could not be read.
  enum class State {
    kGood,
    // COMMIT is damaged (both copies) or not a regular file, or it is missing beside manifest/ and
    // data/.
    kDamaged,
    // The directory has no COMMIT, and has no manifest/ or no data/.
    kNoCheckpoint,
    // Could not be read (I/O, permissions, newer format); may be an intact checkpoint.
    kUnread,
  };
  State state = State::kGood;
};

struct LatestCheckpoint : CheckpointListing {
  // Texts about damaged checkpoints that were skipped. Each of them may have been the latest.
  std::vector<std::string> warnings;
};

// A save in progress.
struct Staging {
  std::string store;  // Path of the store.
  // STORE/.staging/NAME.<id>; for a shared staging STORE/.staging/NAME.
  std::string directory;
  std::string name;  // Name under which the checkpoint will be published.
  Uuid uuid;
  std::uint64_t generation = 0;
  Uuid parent;
  std::string parent_name;
  // The checkpoint whose data files the save may link (index/store/linking.h). Zero: no base.
  Uuid base;
  std::string base_name;
  // Why the named base cannot be used, although it is in the store.
  Status base_problem;
  // Why the save has no base, although one was requested.
  std::string base_note;
  std::string ShortId() const { return uuid.Short(); }
};

// Which checkpoint is the base of a new save: the one whose data files the save may link.
enum class BaseChoice {
  kNone,
  // The parent of the new save, if it has one.
  kLatest,
  kNamed,
};

enum class Verdict { kCommitted, kAborted };

// A store: a directory of checkpoint directories, with a superblock. Thread-safe. Several processes
// may use a store at the same time; atomic operations on its directory decide between them.
class Store {
 public:
  // Opens a store. kNotFound: no store.json. kUnsupported: a newer format (names the feature bits
  // or the version). kDataLoss: store.json is damaged.
  static Result<Store> Open(FileSystem& fs, const std::string& path);
  // Opens a store, and creates it first if it is missing. `path` may contain symlinks. Concurrent
  // creators open the same store.
  static Result<Store> OpenOrCreate(FileSystem& fs, const std::string& path);
  // The same before a save of the checkpoint `name`. With nothing created: kInvalidArgument (the
  // name cannot be one), kAlreadyExists (`path` is not a store, and the name is taken by something
  // that is not an empty directory).
  static Result<Store> OpenOrCreate(FileSystem& fs, const std::string& path,
                                    const std::string& name);
  // Like the two functions above, on the file system that `path` names (FileSystemFor).
  static Result<Store> Open(const std::string& path);
  static Result<Store> OpenOrCreate(const std::string& path);

  FileSystem& fs() const { return *fs_; }
  const std::string& path() const { return path_; }
  const Uuid& uuid() const { return uuid_; }
  // kReadOnly if the file system is read-only, or if the store has features that this version can
  // only read safely.
  Status CheckWritable() const;
  // The same for copies into the store, removals and gc, which buckets have too.
  Status CheckChangeable() const;
  std::string CheckpointPath(std::string_view name) const;

  // The checkpoints of the store, sorted by name. A checkpoint that is damaged or cannot be read,
  // and a directory that is not a checkpoint, are listed with their problem.
  Result<std::vector<CheckpointListing>> List() const;
  // Sorted names of directories that are checkpoints or may be. List() reads these.
  Result<std::vector<std::string>> Names() const;
  // The List() entry of one name. Sets `record`, if not null, to the commit record of a good
  // checkpoint. The problem is kNotFound if the directory does not exist.
  CheckpointListing FindListing(const std::string& name, CommitRecord* record = nullptr) const;
  // The checkpoint with the highest generation; among equal generations uuid decides, then name.
  // Derived checkpoints count only if all usable checkpoints are derived. kNotFound: the store has
  // no usable checkpoint. If a COMMIT could not be read (kUnread), returns that error: the
  // checkpoint may be the latest, and resuming from an older one would silently lose steps.
  Result<LatestCheckpoint> Latest() const;
  // Latest() for a given listing.
  Result<LatestCheckpoint> LatestOf(const std::vector<CheckpointListing>& all) const;

  // Begins a save. Claims a generation and creates the staging directory with data/, manifest/ and
  // a file with its uuid. If the save has a base, a file BASE in the staging names the base, so
  // that no rule removes the base before the publish. Leftovers of crashed saves do not block a new
  // save. kAlreadyExists: `name` is taken and `if_exists` is kFail. kPermissionDenied: `if_exists`
  // is kReplace, and the checkpoint `name` is pinned. kNotFound: `base` is kNamed, and `base_name`
  // does not exist or is not a checkpoint.
  Result<Staging> Begin(const std::string& name, IfExists if_exists,
                        BaseChoice base = BaseChoice::kNone,
                        const std::string& base_name = {}) const;

  // Begins a save with a staging that several independent writers (mounts) share. Creates
  // STORE/.staging/NAME, including empty `folders`, durably and in one step. Its file staging.json
  // has the data that all writers need. kAlreadyExists: STORE/NAME exists, or the staging does; a
  // writer joins an existing staging with OpenShared.
  Result<Staging> BeginShared(const std::string& name,
                              std::span<const std::string_view> folders) const;
  // Opens a shared staging. kNotFound: there is none. kUnsupported: the staging is not shared
  // (NAME.<id> of a library save). kDataLoss: staging.json is damaged.
  Result<Staging> OpenShared(const std::string& name) const;
  // Names of shared stagings, sorted.
  Result<std::vector<std::string>> ListShared() const;

  struct PublishOptions {
    IfExists if_exists = IfExists::kFail;
    std::int64_t now = 0;  // Seconds since 1970. 0: the current time.
    // Manifests, such as "rank-0.tmm", that must exist: kDataLoss if one is missing. Other
    // manifests are merged too.
    std::vector<std::string> expected_manifests;
    // Set for a shared staging, with IfExists::kFail. Files that belong to no checkpoint (journals,
    // superseded data) then stay, so that mounts can go on writing and publish again after a failed
    // publish or a crash. Gc removes these files later. (They are not deleted before the rename: on
    // a filesystem without a journal a save could reuse their inodes before the deletion is
    // durable, and lose its files after a power failure.)
    bool shared = false;
    // Whether to check that no key is also the name of a layer of a stacked tensor;
    // kInvalidArgument if one is. The format allows such keys. The check is for callers that
    // combine keys of a base with new ones.
    bool check_layer_names = false;
    // Whether the checkpoint was derived from another one, so that it is not a step of a run.
    bool derived = false;
    // Memory in bytes for extents that are merged but not written yet (100 bytes for a chunk of a
    // matrix). More extents wait in a temporary file of the staging. A checkpoint of 4,096 ranks
    // and 10,000 tensors has 4 GiB of extents, too much for a rank that also trains. The default is
    // enough for half a million chunks.
    std::uint64_t rows_in_memory = std::uint64_t{48} << 20;
  };
  // The result of Publish.
  struct Published {
    CheckpointInfo info;
    Hash128 content_root;
    std::uint64_t tensors = 0;
    std::uint64_t chunks = 0;
    std::uint64_t bytes = 0;
    // Time before the index: reading and merging manifests, checking data files, deciding mtimes.
    double manifests_seconds = 0;
    // Time of writing and syncing the coordinator's manifest and the index.
    double index_seconds = 0;
    // Time after the index: directory syncs, COMMIT, rename.
    double publish_seconds = 0;
    // The entry of .trash (".trash/NAME") with the checkpoint that was replaced. Empty: none was
    // replaced, or it could not be moved to .trash yet.
    std::string replaced;
  };
  // Publishes a staging in which the data and manifests of all writers are durable. Reads the
  // manifests, checks completeness, decides mtimes against the parent and the replaced checkpoint,
  // writes the coordinator's manifest, the index and COMMIT, and renames (docs/format.md,
  // "Publish"). `coordinator` has only info (producer, world_size, root) and common values. Removes
  // temporary files of manifest/ and, unless `shared` is set, files of data/ that no manifest
  // names.
  //   ok                 committed and durable
  //   kAlreadyExists     the name is taken; the staging still exists
  //   kUnsupported       kReplace, and the filesystem cannot exchange two directories
  //   kPermissionDenied  kReplace, and the checkpoint is pinned
  //   kUnknown           renamed, but a directory sync failed: a crash may undo the publish; or it
  //                      is unknown whether the rename succeeded
  //   kDataLoss          incomplete (names the box), or a manifest or data file is damaged
  //   kStale             the staging was aborted meanwhile, or a foreign file changed
  // The call may be repeated after any failure except kUnknown and kStale. A partial checkpoint is
  // never visible. Only the coordinator calls this, one call at a time.
  Result<Published> Publish(const Staging& staging, const Inventory& coordinator,
                            const PublishOptions& options) const;

  // For copies, which keep the source's generation (index/store/copy.h). PrepareToWrite creates the
  // store's directories (kReadOnly as for a save). ClaimUpTo, called before the publish, claims
  // `generation` unless this or a higher number is claimed already, so that later saves get higher
  // numbers even if the copy is removed. The caller syncs .generations, because an existing claim
  // may not be durable.
  Status PrepareToWrite() const;
  Status ClaimUpTo(std::uint64_t generation) const;

  // Decides whether a timed-out save was published. If the staging was not published, this call
  // moves it to .trash, so that nobody can publish it any more. Then the directory with the uuid of
  // `staging` is searched. kCommitted or kAborted: the verdict is durable, because this call has
  // synced the parent directories. kUnknown: the verdict could not be determined or made durable.
  // Any rank may call it, any number of times.
  Result<Verdict> AbortOrDecide(const Staging& staging) const;

  // Moves a checkpoint to .trash durably; Gc deletes it later. kNotFound: there is no such
  // checkpoint. kInvalidArgument: the directory is not a checkpoint. kPermissionDenied: the
  // checkpoint is pinned (`force` removes the pin too). kUnknown: removed, but a power failure may
  // undo the removal; or it is unknown whether the checkpoint was removed; or a checkpoint that was
  // pinned meanwhile could not be moved back from .trash.
  Status Remove(std::string_view name, const RemoveOptions& options = {}) const;
  // Returns the reason why a checkpoint must stay, for messages. nullopt: it may be removed.
  using Holds = std::function<Result<std::optional<std::string>>(const Uuid&)>;
  struct Removal {
    // OK if the checkpoint was removed or must stay. kStale: another checkpoint has the name now.
    // kUnknown: the checkpoint is in .trash and could not be moved back, or a move is not durable,
    // or its result is unknown.
    Status status;
    // The reason why the checkpoint stays at its name, or was moved back to it. nullopt: it was
    // removed, or `status` has an error.
    std::optional<std::string> held;
    // Path of the removed checkpoint below the store (".trash/..."). Empty: not removed, or the
    // path is unknown.
    std::string entry;
  };
  // Removes a checkpoint only if its uuid is `uuid` and `holds` returns no reason to keep it.
  // `holds` is called before the move and again after it. A process that protects a checkpoint
  // (pins::Pin) checks that the checkpoint exists after making the pin durable, so at least one of
  // the two processes sees the other. If `holds` fails, the checkpoint stays or is moved back, and
  // `status` has the error.
  Removal RemoveUnlessHeld(std::string_view name, const Uuid& uuid, const Holds& holds) const;

  struct GcOptions {
    bool dry_run = false;
    std::chrono::seconds grace{60};  // Minimum age of entries of .trash and of leftovers.
    // The caller guarantees that no reader has been reading for longer than `grace`. Needed on
    // filesystems without locks.
    bool trust_grace = false;
    // A staging that did not change for this time is abandoned, unless a lock shows that it is in
    // use. Pins and ephemeral marks of deleted checkpoints are deleted after this time.
    std::chrono::seconds staging_age{86400};
  };
  struct GcReport {
    std::vector<std::string> removed;  // Paths below the store. Also set in a dry run.
    // Paths that were kept, with the reason: ".trash/NAME: still being read".
    std::vector<std::string> kept;
    // Paths that could not be removed, with the error.
    std::vector<std::string> failed;
    std::uint64_t bytes_freed = 0;
  };
  // Deletes garbage: entries of .trash that nobody reads (exclusive flock on COMMIT) or holds
  // (pins, running saves) after the grace period, abandoned stagings (which are moved to .trash
  // first), leftovers of writers, data in .derived, .pins and .ephemeral of deleted checkpoints,
  // and generation claims below the highest. On filesystems without locks, checkpoints in .trash
  // are deleted only with `trust_grace`. An entry of .staging or .trash with the device and inode
  // of a live checkpoint is never deleted.
  Result<GcReport> Gc(const GcOptions& options) const;
  // Deletes these entries (".trash/...") without a grace period, if locks show that nobody reads
  // them and nothing holds them. `now`: the current time in seconds since 1970, which tells whether
  // pins have expired.
  GcReport FreeTrash(const std::vector<std::string>& entries, std::int64_t now) const;

  struct FsckOptions {
    bool rebuild = false;    // Rebuild lost or damaged indexes into .derived/.
    bool read_data = false;  // Verify all data too.
    // Directories in which data of adopted checkpoints are allowed
    // (OpenedCheckpoint::Options::roots).
    std::vector<std::string> roots = {};
  };
  struct FsckFinding {
    std::string object;  // Name of a checkpoint, or a path below the store.
    std::string problem;
    std::string remedy;  // How to repair the problem, how it was repaired, or why that failed.
    bool repaired = false;
    // True also for warnings of the verification. False: a leftover or another entry that the store
    // does not need, a running save, copy or repair, an object that could not be checked, a damaged
    // policy or pin (checkpoints are intact), or a second checkpoint with the same uuid.
    bool damage = true;
    // Whether the object could not be checked, which is not damage.
    bool unread = false;
    // For damaged data files: names of other checkpoints that have the same file (inode).
    std::vector<std::string> shared_with = {};
  };
  Result<std::vector<FsckFinding>> Fsck(const FsckOptions& options) const;
  // Fsck for a directory whose store.json may be lost or damaged; that is then a finding. `rebuild`
  // recreates store.json. kNotFound: the directory is not a store.
  static Result<std::vector<FsckFinding>> FsckFolder(FileSystem& fs, const std::string& path,
                                                     const FsckOptions& options);

 private:
  Store(FileSystem& fs, std::string path, Uuid uuid, std::uint64_t unknown_read_compatible)
      : fs_(&fs),
        path_(std::move(path)),
        uuid_(uuid),
        unknown_read_compatible_(unknown_read_compatible) {}
  Status CheckFeatures() const;
  Status MoveAway(std::string_view name, const Uuid* only, std::string* entry) const;
  Status RemoveUnpinned(const std::string& name) const;
  Result<FileInfo> CheckExists(std::string_view name) const;
  Result<std::uint64_t> ClaimGeneration(std::uint64_t above) const;
  // The readable checkpoint of `all` with the highest generation, or the highest derived one if all
  // readable ones are derived; null if no checkpoint is readable.
  static const CheckpointListing* Highest(const std::vector<CheckpointListing>& all);
  // Returns the listing of the checkpoint with this position in a list of names.
  using Look = std::function<CheckpointListing(std::size_t position)>;
  // Stores the listings of all names, which it gets from `look` on several threads, in `out`. If
  // descriptors run out, it reads those COMMITs again, one by one.
  Status ReadListings(const std::vector<std::string>& names, const Look& look,
                      std::vector<CheckpointListing>& out) const;
  // The checkpoints that a new save must know of: all usable ones, with name, uuid, generation and
  // `derived` only, and some that are not usable. Reads the file of known_generations.h instead of
  // each COMMIT, and keeps it up to date; the COMMIT of the latest checkpoint is always read.
  Result<std::vector<CheckpointListing>> ListForSave() const;
  // Claims a generation, and sets generation, parent and base of a new save. Creates the store's
  // directories first.
  Status ClaimPlace(const std::string& name, IfExists if_exists, BaseChoice base,
                    const std::string& base_name, Staging& staging) const;
  Result<Published> PublishSteps(const Staging& staging, const Inventory& coordinator,
                                 const PublishOptions& options) const;
  // Returns Published::replaced.
  Result<std::string> MoveIntoPlace(const Staging& staging, IfExists if_exists) const;
  // kAlreadyExists unless a checkpoint can be published under this name. An empty directory does
  // not take the name: frameworks create the directory that they are about to save into.
  Status CheckFree(const std::string& name) const;

  FileSystem* fs_;
  std::string path_;
  Uuid uuid_;
  std::uint64_t unknown_read_compatible_;
};

// A path "STORE/NAME" in two parts.
struct StoreAndName {
  std::string store;
  std::string name;
};
// Splits "STORE/NAME" and ignores trailing slashes. The store of "step-1" is ".", the store of
// "/step-1" is "/". kInvalidArgument if the last part is not a valid name of a checkpoint.
Result<StoreAndName> SplitCheckpointPath(const std::string& path);
// The name of a checkpoint of `store`. `given` is NAME, a path, "latest" or STORE/latest.
// kInvalidArgument: the path is in another store.
Result<std::string> NameInStore(const std::string& store, const std::string& given);
// Splits "STORE/.staging/NAME" and ignores trailing slashes. kInvalidArgument for other forms. The
// name is not checked.
Result<StoreAndName> SplitStagingPath(const std::string& path);

// Resolves a user's path once: symlinks, trailing slashes, and "STORE/latest" to the latest
// checkpoint (unless an entry of the store has that name). All opens of the result then use the
// same name, whatever later checkpoint is published meanwhile. kNotFound if there is no such path.
// Appends the warnings of Latest() to `warnings`.
Result<std::string> ResolveSourcePath(FileSystem& fs, std::string_view path,
                                      std::vector<std::string>* warnings = nullptr);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_STORE_H_
