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

// kInvalidArgument for "latest", "store.json", "policy.json", leading dots, '/', NUL, empty, over
// 255 bytes.
Status CheckCheckpointName(std::string_view name);

struct CheckpointListing {
  std::string name;
  Uuid uuid;
  std::uint64_t generation = 0;
  Uuid parent;
  std::uint64_t commit_bytes = 0;  // Of the file COMMIT.
  bool derived = false;            // By `derive`: neither latest nor a base where there is another.
  Status problem;                  // Not ok: the folder is there but its COMMIT cannot be read.
  // What is known of one with a problem. Anything but kUnread was proven by reading.
  enum class State {
    kGood,
    kDamaged,       // COMMIT was read and both copies are damaged, or it is gone from a checkpoint.
    kNoCheckpoint,  // A folder that has nothing of a checkpoint.
    kUnread,        // Not read, now or by this program or user: may be a whole checkpoint.
  };
  State state = State::kGood;
};

struct LatestCheckpoint : CheckpointListing {
  // Damaged checkpoints that were passed over: any of them may have been a later one.
  std::vector<std::string> warnings;
};

// What a save that is being written may know of itself.
struct Staging {
  std::string store;      // Path of the store.
  std::string directory;  // STORE/.staging/NAME.<id>
  std::string name;       // The name it will be published under.
  Uuid uuid;
  std::uint64_t generation = 0;
  Uuid parent;
  std::string parent_name;
  // The checkpoint whose data files it may link (index/store/linking.h); zero: none.
  Uuid base;
  std::string base_name;
  Status base_problem;    // Of one that was named, and is there.
  std::string base_note;  // Why it has none although one was asked for.
  std::string ShortId() const { return uuid.Short(); }
};

// The checkpoint of which a save that begins may link data files.
enum class BaseChoice {
  kNone,
  kLatest,  // The parent, where there is one.
  kNamed,
};

enum class Verdict { kCommitted, kAborted };

// A directory of checkpoint directories with a superblock. Thread-safe; several processes may use
// one store at once, the folder is the arbiter.
class Store {
 public:
  // kNotFound: no store.json; kUnsupported: a newer format (names the bits); kDataLoss.
  static Result<Store> Open(FileSystem& fs, const std::string& path);
  // Made on first write. `path` may be reached through symlinks. Concurrent creators agree.
  static Result<Store> OpenOrCreate(FileSystem& fs, const std::string& path);

  const std::string& path() const { return path_; }
  const Uuid& uuid() const { return uuid_; }
  // kReadOnly where the store has features of which we only know that reading is safe.
  Status CheckWritable() const;
  std::string CheckpointPath(std::string_view name) const;

  // Published checkpoints by name. Broken ones are listed with their problem.
  Result<std::vector<CheckpointListing>> List() const;
  // Names of folders that are, or may be, checkpoints, sorted: what List() looks at.
  Result<std::vector<std::string>> Names() const;
  // What List() says of one; its commit record, too, where `record` is not null and the problem is
  // ok. A problem of kNotFound: it is gone.
  CheckpointListing Look(const std::string& name, CommitRecord* record = nullptr) const;
  // Highest generation, ties by uuid, then name. kNotFound in an empty store. Where some COMMIT
  // could not be read (kUnread) its error: that one may be the latest, and an older one in its
  // place would lose steps unnoticed.
  Result<LatestCheckpoint> Latest() const;
  // The latest of what was listed.
  Result<LatestCheckpoint> LatestOf(const std::vector<CheckpointListing>& all) const;

  // Claims a generation and makes the staging folder with data/ and manifest/ in it and a file
  // that holds its uuid. kAlreadyExists where NAME is taken and `if_exists` is kFail. Leftovers of
  // crashed saves never block it. With a base the staging names it, in its file BASE, so that
  // nobody prunes it meanwhile; kNotFound where there is no `base_name` of kNamed.
  Result<Staging> Begin(const std::string& name, IfExists if_exists,
                        BaseChoice base = BaseChoice::kNone,
                        const std::string& base_name = {}) const;

  // The same for one that several writers share who do not know each other (mounts): makes
  // STORE/.staging/NAME, with empty `folders` besides, in one step and durably. What a writer needs
  // to know of it stands in its file staging.json. kAlreadyExists where that name is taken (then
  // OpenShared joins it), or STORE/NAME.
  Result<Staging> BeginShared(const std::string& name,
                              std::span<const std::string_view> folders) const;
  // kNotFound; kUnsupported for what is no shared staging (a library save's NAME.<id>);
  // kDataLoss where its staging.json is damaged.
  Result<Staging> OpenShared(const std::string& name) const;
  // Names of shared stagings, sorted.
  Result<std::vector<std::string>> ListShared() const;

  struct PublishOptions {
    IfExists if_exists = IfExists::kFail;
    std::int64_t now = 0;  // Seconds since 1970; 0: the clock's.
    // "rank-0.tmm": writers' manifests without which it is kDataLoss. Others are merged too.
    std::vector<std::string> expected_manifests;
    // A shared staging, with IfExists::kFail: what belongs to no checkpoint (journals, data that
    // were superseded) stays until the rename is durable, so that a publish that fails or crashes
    // leaves a staging that can still be written and published. Gc removes it: where a filesystem
    // has no journal, what is deleted here could be given to the next save before it is durable
    // that we no longer have it.
    bool shared = false;
    // kInvalidArgument where a key is the name of a layer of another one, which the format allows:
    // where keys of a base come together with others nobody has looked at that.
    bool layers_apart = false;
    bool derived = false;  // Made of another checkpoint of the store, and no step of a run.
    // Rows of chunks (100 bytes for one of a matrix) wait for their tensor in up to so much memory,
    // what is more in a file of the staging, as large as the manifests' records together. A
    // checkpoint of 4,096 ranks and 10,000 tensors has 4 GiB of them, more than a rank that also
    // trains has to spare; the default holds half a million.
    std::uint64_t rows_in_memory = std::uint64_t{48} << 20;
  };
  // Publishes a staging in which all writers' data and manifests are durable: reads the manifests,
  // checks completeness, decides mtimes against the parent, writes the coordinator's manifest,
  // the index and COMMIT, renames. `coordinator` brings info (producer, world_size), common values
  // (and nothing else). docs/format.md, "Publish", has the order; one fsync a file, folders after
  // their files. Files of data/ and manifest/ that no manifest names are removed.
  //   ok                 committed and durable;
  //   kAlreadyExists     somebody else has that name; staging as it was;
  //   kUnsupported       kReplace where the filesystem cannot exchange two folders;
  //   kUnknown           renamed, but a folder could not be synced: committed or not after a crash;
  //   kDataLoss          incomplete (names the box), or a manifest is damaged;
  //   kStale             the staging was aborted meanwhile.
  // After any failure but kUnknown and kStale it may be called again with the same staging.
  // Never leaves a half-made checkpoint visible. One caller a staging (the coordinator).
  struct Published {
    CheckpointInfo info;
    Hash128 content_root;
    std::uint64_t tensors = 0;
    std::uint64_t chunks = 0;
    std::uint64_t bytes = 0;
    double manifests_seconds = 0;  // Reading and merging.
    double index_seconds = 0;      // Building and syncing the index.
    double publish_seconds = 0;    // After the index is built: COMMIT, rename, folder syncs.
  };
  Result<Published> Publish(const Staging& staging, const Inventory& coordinator,
                            const PublishOptions& options) const;

  // What a copy of a checkpoint of another store needs (index/store/copy.h), which keeps its
  // generation: the folders of a store that is written to, kReadOnly as for every save; and, before
  // it is published, a claim as high as its generation, so that no save gets a lower one from then
  // on, whatever becomes of the copy. Durable with `.generations`, which the caller syncs.
  Status PrepareToWrite() const;
  Status ClaimUpTo(std::uint64_t generation) const;

  // The store as the arbiter of time-outs: moves the staging to .trash unless it was published,
  // then says where *that uuid* is. kAborted / kCommitted (parent folders synced by this call
  // before it says so), kUnknown where neither could be read. Any rank may call it, any number
  // of times.
  Result<Verdict> AbortOrDecide(const Staging& staging) const;

  // Moves a checkpoint to .trash (then Gc deletes it), durably. kNotFound; kInvalidArgument for a
  // folder that has nothing of a checkpoint; kPermissionDenied where it is pinned, but with force,
  // which takes the pin with it; kUnknown where it is gone from its name but a power cut may bring
  // it back.
  Status Remove(std::string_view name, const RemoveOptions& options = {}) const;
  // Why a checkpoint must stay, in words; nothing: nothing holds it.
  using Holds = std::function<Result<std::optional<std::string>>(const Uuid&)>;
  struct Removal {
    // kStale where another one has the name by now; kUnknown where it could not be moved back, and
    // is in .trash, or not durably. Ok where it is held.
    Status status;
    std::optional<std::string> held;  // Why it is where it was (moved back).
    // Where it is, below the store (".trash/..."); empty where it is not removed, or that is not
    // known.
    std::string entry;
  };
  // As Remove, for whoever knows which one is meant.
  // `holds` is asked before it is moved, and again when it has moved: whoever holds it looks for it
  // after his hold is durable (pins::Pin), so one of the two sees the other. Where that cannot be
  // told it is where it was, and the status says why.
  Removal RemoveUnlessHeld(std::string_view name, const Uuid& uuid, const Holds& holds) const;

  struct GcOptions {
    bool dry_run = false;
    std::chrono::seconds grace{60};  // For what lies in .trash.
    // The caller says that no reader is older than `grace`: enough where there are no locks.
    bool trust_grace = false;
    std::chrono::seconds staging_age{86400};  // Stagings untouched for so long were abandoned.
  };
  struct GcReport {
    std::vector<std::string> removed;  // Paths below the store, also in a dry run.
    std::vector<std::string> kept;     // With the reason: "….: still read", "...: too young".
    std::vector<std::string> failed;   // With the error: could not be looked at or deleted.
    std::uint64_t bytes_freed = 0;
  };
  // Deletes from .trash what nobody reads (exclusive flock on its COMMIT) after the grace period
  // (where the filesystem has no locks, only with `trust_grace`),
  // abandoned stagings, .derived of checkpoints that are gone, and generation claims below the
  // highest. Never a folder whose device and inode a live checkpoint has.
  Result<GcReport> Gc(const GcOptions& options) const;
  // Of these entries alone, without a grace, and only where locks tell that nobody reads them.
  // `entries`: below the store (".trash/..."). `now`: seconds since 1970, for the expiry of pins.
  GcReport FreeTrash(const std::vector<std::string>& entries, std::int64_t now) const;

  struct FsckOptions {
    bool rebuild = false;    // Repair: rebuild lost or damaged indexes into .derived/.
    bool read_data = false;  // Verify all data too.
    // As OpenedCheckpoint::Options::roots, of adopted checkpoints.
    std::vector<std::string> roots = {};
  };
  struct FsckFinding {
    std::string object;  // Checkpoint or path below the store.
    std::string problem;
    std::string remedy;  // What would repair it, or what did.
    bool repaired = false;
    bool damage = true;   // False: mere leftovers.
    bool unread = false;  // Could not be looked at, so nothing is known of it; no damage.
    // Of a damaged data file: other checkpoints that have this very file, by name.
    std::vector<std::string> shared_with = {};
  };
  Result<std::vector<FsckFinding>> Fsck(const FsckOptions& options) const;
  // The same for a folder whose store.json may be lost or damaged, which is then a finding too;
  // with `rebuild` it is made anew. kNotFound: nothing of a store is there.
  static Result<std::vector<FsckFinding>> FsckFolder(FileSystem& fs, const std::string& path,
                                                     const FsckOptions& options);

 private:
  Store(FileSystem& fs, std::string path, Uuid uuid, std::uint64_t unknown_read_compatible)
      : fs_(&fs),
        path_(std::move(path)),
        uuid_(uuid),
        unknown_read_compatible_(unknown_read_compatible) {}
  Status MoveAway(std::string_view name, const Uuid* only, std::string* entry) const;
  Status RemoveUnpinned(const std::string& name) const;
  Result<FileInfo> CheckIsThere(std::string_view name) const;
  Result<std::uint64_t> ClaimGeneration(std::uint64_t above) const;
  // The highest of `all` that could be read; null: none.
  static const CheckpointListing* Highest(const std::vector<CheckpointListing>& all);
  // A generation and the parent of a save that begins now, after the folders for it were made.
  Status ClaimPlace(const std::string& name, IfExists if_exists, BaseChoice base,
                    const std::string& base_name, Staging& staging) const;
  Result<Published> PublishSteps(const Staging& staging, const Inventory& coordinator,
                                 const PublishOptions& options) const;
  Status MoveIntoPlace(const Staging& staging, IfExists if_exists) const;

  FileSystem* fs_;
  std::string path_;
  Uuid uuid_;
  std::uint64_t unknown_read_compatible_;
};

// "STORE/NAME" in its two parts; trailing slashes are ignored. Of "step-1" the store is ".", of
// "/step-1" it is "/". kInvalidArgument: no name that a checkpoint may have.
struct StoreAndName {
  std::string store;
  std::string name;
};
Result<StoreAndName> SplitCheckpointPath(const std::string& path);
// The name of a checkpoint of `store` that a user gave: NAME, or a path of it, which may be
// STORE/latest. kInvalidArgument: it is in another store.
Result<std::string> NameInStore(FileSystem& fs, const std::string& store, const std::string& given);
// "STORE/.staging/NAME" likewise.
Result<StoreAndName> SplitStagingPath(const std::string& path);

// What a user named, to be opened: "STORE/latest" becomes its latest checkpoint (where no such name
// exists in the folder itself), symlinks are taken once and trailing slashes dropped, so that all
// who open it read one checkpoint whatever is published meanwhile. kNotFound.
// Warnings of Latest() are appended to `warnings`.
Result<std::string> ResolveSourcePath(FileSystem& fs, std::string_view path,
                                      std::vector<std::string>* warnings = nullptr);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_STORE_H_
