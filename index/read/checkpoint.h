// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_CHECKPOINT_H_
#define TENSORMOUNT_INDEX_READ_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/watch.h"
#include "index/read/foreign_loss.h"
#include "index/records/checkpoint_index.h"
#include "index/records/commit_record.h"
#include "shard/tensor_meta.h"

namespace tensormount {

class ExtentLookup;
class ProvenRanges;
class ProvingRead;
struct ForeignBase;
struct ForeignInventory;

// How much a read checks.
enum class ReadVerify {
  kOff,
  kWholeLeaves,   // Leaves that are read whole anyway.
  kExtendLeaves,  // Reads are widened to whole leaves, or pages that have hashes, so that every
                  // byte is checked.
  // The same, but not again for what is known to be good since its file last changed
  // (OpenedCheckpoint::proven).
  kOnce,
};

struct ReadStats {
  std::uint64_t bytes_wanted = 0;
  std::uint64_t bytes_read = 0;     // From storage, widening and gaps included.
  std::uint64_t bytes_by_leaf = 0;  // Of the wanted ones, proved by leaf or page hashes.
  void Add(const ReadStats& o) {
    bytes_wanted += o.bytes_wanted;
    bytes_read += o.bytes_read;
    bytes_by_leaf += o.bytes_by_leaf;
  }
};

// An opened committed checkpoint (or a foreign one in the same clothes). Read-only, immutable,
// thread-safe. Holds a shared flock on COMMIT, so that gc waits for it. Data files are opened
// when first read, at most `max_open_files` at a time.
// Lifetime: readers hold it by shared_ptr; what it hands out (lookups, mappings, extents) is shared
// and outlives it.
class OpenedCheckpoint {
 public:
  struct Options {
    // Where index/ is missing or damaged, rebuild it in memory from the manifests (with a
    // warning); false: fail.
    bool rebuild_index = true;
    // An index of up to this size is compared with its hash now; of a larger one only the tail, and
    // damage elsewhere shows, and is made good, when it is read.
    std::uint64_t check_index_bytes = kIndexCheckedWhole;
    std::size_t max_open_files = 512;
    // Folders of which the operator said that data of adopted checkpoints may lie below them,
    // whoever published these (index/read/foreign_file.h).
    std::vector<std::string> roots;
    // The folder, pinned by the caller (FileSystem::PinDirectory). Null: done here, where a symlink
    // as last component is followed.
    std::shared_ptr<const std::string> pinned;
    // What is known of this very checkpoint from before. Null: nothing yet.
    std::shared_ptr<ProvenRanges> proven;
  };

  // A checkpoint folder. kNotFound: no COMMIT here. kStale: it is being deleted, or was. kDataLoss:
  // both copies of COMMIT, or the index and what it could be rebuilt from, are damaged.
  // kUnsupported: written in a newer format. kPermissionDenied: its data lie elsewhere, where only
  // the operator may send us (Options::roots).
  static Result<std::shared_ptr<OpenedCheckpoint>> Open(FileSystem& fs,
                                                        const std::string& directory,
                                                        const Options& options);
  // What an adapter found of a foreign checkpoint at `path`, a folder or a file, as resolved. Its
  // warnings become warnings().
  static Result<std::shared_ptr<OpenedCheckpoint>> OpenForeign(FileSystem& fs,
                                                               ForeignInventory inventory,
                                                               const std::string& path,
                                                               const Options& options);
  ~OpenedCheckpoint();

  const std::string& directory() const { return directory_; }
  // For opening what is in it: leads there as long as this lives.
  const std::string& pinned_directory() const { return *pinned_; }
  std::string name() const;  // Last component.
  const CheckpointIndex& index() const { return *index_; }
  // Null for foreign checkpoints that are read in place.
  const DecodedCommit* commit() const { return has_commit_ ? &commit_ : nullptr; }
  // What was out of order, at open or since, but could be mended (damaged copy, rebuilt index);
  // empty: nothing.
  std::vector<std::string> warnings() const;
  // What whoever chose this one has to say. Before it is shared.
  void AddWarning(std::string warning) { warnings_.push_back(std::move(warning)); }
  // What a foreign checkpoint names and its files lack; its warnings tell of it too. Those of ours
  // have none: what they lack fails the open or the read.
  const std::vector<ForeignLoss>& lost() const { return lost_; }
  // What else holds data in the folder of a foreign checkpoint and is no part of it
  // (ForeignInventory::beside).
  const std::vector<std::string>& beside() const { return beside_; }
  bool index_was_rebuilt() const { return index_rebuilt_; }
  // Which bytes of data files were found good by reads with kOnce.
  ProvenRanges& proven() const { return *proven_; }

  // Where the chunks of a tensor are. Those that were pending are looked up now, which reads a
  // little of each of their items: kDataLoss, kUnsupported (ItemResolver), kStale, the errno of a
  // read. The bytes of no tensor but this one are concerned.
  Result<std::shared_ptr<const ExtentTable>> Extents(const TensorEntry& tensor) const;

  // What reads of a tensor need, made and kept: for who starts several at a time, each of which
  // would make it. Errors as of Extents.
  Status Prepare(const TensorEntry& tensor) const;
  // Reads `region` of a tensor into `out` (whose shape is the region's extents; may be strided).
  // `digest`, where not null, receives the contribution of the bytes *as they arrived in `out`*
  // to the tensor's digest (base/hash.h). Errors: kInvalidArgument (region, dtype, shape);
  // kDataLoss naming tensor, box, file and byte (checksum differs, short file, missing file);
  // kStale where a foreign file changed before its bytes were here and no hash proved them;
  // or the errno of the read. On error the contents of `out` are undefined.
  Status Read(const TensorEntry& tensor, const Region& region, const BufferView& out,
              ReadVerify verify, ReadStats* stats, Crc64* digest) const;
  // The same into memory that is described as placed boxes of bytes of the tensor (disjoint,
  // shard/tensor_meta.h), relative to `base`. They must lie within the tensor.
  Status ReadPlaced(const TensorEntry& tensor, std::span<const PlacedBox> want, std::byte* base,
                    ReadVerify verify, ReadStats& stats, Crc64* digest) const;
  // Bytes [offset, offset + size) of the row-major byte string: what the mount serves. The range
  // must lie within the tensor. Same errors.
  Status ReadBytes(const TensorEntry& tensor, std::uint64_t offset, void* out, std::size_t size,
                   ReadVerify verify, ReadStats* stats) const;
  // While the result lives, small reads that follow each other in a file are parts of larger ones:
  // for who reads much of a checkpoint in the order of its files. Not to outlive this.
  [[nodiscard]] std::shared_ptr<const void> ReadInOrder() const;
  // The same bytes where they are stored, without a copy: ranges in order, at most kMaxMapped of
  // them. Empty where they are not long runs of files that can be mapped, or would have to
  // be compared with their hashes as `verify` wants it; then read. A file that somebody truncates
  // later raises SIGBUS where a program touches the bytes; a system call that takes them fails with
  // EFAULT, so hand them to one.
  static constexpr std::size_t kMaxMapped = 8;
  struct MappedRange {
    const std::byte* data = nullptr;
    std::size_t size = 0;
    std::shared_ptr<const void> keep;  // The mapping lives as long as this.
  };
  // A foreign file is mapped only for who takes it as it will be: nobody looks afterwards whether
  // it still was what the checkpoint says.
  enum class ForeignFiles { kRead, kMap };
  Result<std::vector<MappedRange>> MapBytes(const TensorEntry& tensor, std::uint64_t offset,
                                            std::size_t size, ReadVerify verify,
                                            ForeignFiles foreign = ForeignFiles::kRead) const;
  // The same for placed boxes as ReadPlaced takes them; they must fill their destination without
  // gaps.
  Result<std::vector<MappedRange>> MapPlaced(const TensorEntry& tensor,
                                             std::span<const PlacedBox> want, ReadVerify verify,
                                             ForeignFiles foreign = ForeignFiles::kRead) const;
  // A part of an object. By default verified where all of it is read and it has a hash.
  Status ReadObject(const ObjectRecord& object, std::uint64_t offset, void* out, std::size_t size,
                    ReadVerify verify = ReadVerify::kWholeLeaves) const;

  // The only file that is the tensor's row-major bytes from offset 0, if there is one: what
  // passthrough and adoption want. Its number (FilePath, OpenFile), or kNotFound.
  Result<std::uint32_t> WholeFileOf(const TensorEntry& tensor) const;
  // Path of file number n on the host, for people; it must be below index().files().size().
  std::string FilePath(std::uint32_t file) const;
  // A path that leads there as long as this lives, whatever the checkpoint is called meanwhile.
  std::string AccessPath(std::uint32_t file) const;
  // Whether another program wrote it.
  bool IsForeignFile(std::uint32_t file) const;

  // Opens that file; of a checkpoint's own files nothing outside of its folder, of foreign ones
  // nothing outside of info().root, whatever links somebody put there. kStale where a foreign one
  // is not what it was (index/read/foreign_file.h).
  Result<std::unique_ptr<File>> OpenFile(std::uint32_t file) const;
  // Keeps file number n open no longer: the next read opens what has its name then, say a good copy
  // that somebody put instead of a damaged one.
  void LetGo(std::uint32_t file) const;
  // To be called after bytes of a foreign file were read which no hash proves: whether it still is
  // what it was. kStale. Ok for a checkpoint's own files.
  Status CheckStill(std::uint32_t file, File& open) const;

  struct Files;  // index/read/file_cache.h; not for users.

 private:
  OpenedCheckpoint();
  struct PlannedRead;  // The chunks that a read touches, and the plan over them.
  Result<PlannedRead> PlanRead(const TensorEntry& tensor, std::span<const PlacedBox> want) const;
  // ReadPlaced, where `once` is null, or verify is kOnce.
  Status ReadPlan(const TensorEntry& tensor, const PlannedRead& planned,
                  std::span<const PlacedBox> want, std::byte* base, ReadVerify verify,
                  ProvingRead* once, ReadStats& stats, Crc64* digest) const;
  Result<std::shared_ptr<const ExtentLookup>> Lookup(const TensorEntry& tensor) const;
  Result<std::shared_ptr<const ExtentTable>> ResolvePending(const TensorEntry& tensor,
                                                            const ExtentTable& table) const;
  FileSystem* fs_ = nullptr;
  std::string directory_;  // Of a foreign file: its own path.
  // Leads to the same folder, whatever it is called since it was opened: removed and replaced ones
  // are read to the end. For a foreign checkpoint: directory_.
  std::shared_ptr<const std::string> pinned_;
  std::shared_ptr<const CheckpointIndex> index_;
  // Of the adapter that read a foreign checkpoint (ItemResolver of foreign_inventory.h). Empty:
  // nothing is pending.
  std::function<Status(const TensorMeta& meta, File& file, ChunkRecord& chunk)> resolver_;
  bool is_file_ = false;  // A foreign checkpoint of one file.
  DecodedCommit commit_;
  bool has_commit_ = false;
  std::unique_ptr<const ForeignBase> foreign_base_;
  bool index_rebuilt_ = false;
  std::vector<std::string> warnings_;
  std::vector<ForeignLoss> lost_;
  std::vector<std::string> beside_;
  std::unique_ptr<File> lock_;
  std::shared_ptr<ProvenRanges> proven_;
  std::unique_ptr<Files> files_;
};

// The index again from manifest/ (merged, completeness checked): same answers. Every manifest is
// checked against COMMIT first.
Result<Inventory> RebuildInventory(FileSystem& fs, const std::string& directory,
                                   const CommitRecord& commit);

struct VerifyOptions {
  bool quick = false;              // Commit record, lengths and index only.
  std::vector<std::string> roots;  // OpenedCheckpoint::Options::roots.
  int threads = 0;                 // 0: as many as cores.
  Watch watch;                     // May be empty.
};
struct VerifyReport {
  // One a damage: "tensor w [0:16, 128:256]: data/…: byte 4096: checksum differs". Empty: whole.
  struct Damage {
    std::string
        object;  // "tensor w [0:16, 128:256]", "object rng", "COMMIT", "index", "manifest/…".
    std::string file;  // Below the checkpoint.
    std::uint64_t offset = 0;
    std::string reason;
    bool surplus = false;  // It stands there and belongs to no checkpoint.
    // The files of a foreign checkpoint lack it: what is left may be whole.
    bool lost = false;
    // Other checkpoints of the store that have this very file, by name. Not filled in by
    // VerifyCheckpoint, which knows of no store (NameSharers of index/store/costs.h).
    std::vector<std::string> shared_with = {};
    // Of what is lost: keys of tensors, then of objects, all of them. `object` counts them.
    std::vector<std::string> keys = {};
  };
  std::vector<Damage> damages;
  // What is damaged, and of which something else in the store serves whole (an index that fsck
  // rebuilt). Of a foreign one: what else the open told.
  std::vector<std::string> warnings;
  std::uint64_t bytes_checked = 0;
  // Of them, of tensors and objects that have no hash: they could only be read. Foreign formats
  // hold none, and `adopt --quick` makes none.
  std::uint64_t bytes_without_hash = 0;
  std::uint64_t tensors = 0;
  std::uint64_t chunks = 0;
};
// Everything that belongs to the checkpoint against COMMIT: both copies, every manifest and index
// file whole, index records against the manifests', every extent, every leaf of every data file,
// digests of tensors whose chunks were read in full, files that do not belong there. Fails only
// where it could not check at all; damage is in the report.
Result<VerifyReport> VerifyCheckpoint(FileSystem& fs, const std::string& directory,
                                      const VerifyOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_CHECKPOINT_H_
