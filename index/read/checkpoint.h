// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_CHECKPOINT_H_
#define TENSORMOUNT_INDEX_READ_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/status.h"

#include "base/byte_range.h"
#include "base/file_system.h"
#include "base/watch.h"
#include "index/read/foreign_loss.h"
#include "index/records/checkpoint_index.h"
#include "index/records/commit_record.h"
#include "index/records/extent_lookup.h"
#include "index/records/made_config.h"
#include "shard/tensor_meta.h"

namespace tensormount {

class ExtentLookup;
class NameBinding;
class ProvenRanges;
class ValueTotals;
class ProvingRead;
struct ByteHull;
struct CellTerm;
struct ForeignBase;
struct ForeignInventory;
struct MappedTensor;
struct NameRules;

// Which of the bytes that are read are compared with hashes.
enum class ReadVerify {
  kOff,
  kWholeLeaves,  // Compares only leaves that the read covers completely.
  // Reads whole leaves (or pages, if they have hashes), so that every byte is compared.
  kExtendLeaves,
  // Like kExtendLeaves, but does not compare the wanted bytes of a chunk or object part if all of
  // them were proven since the file last changed (OpenedCheckpoint::proven).
  kOnce,
};

struct ReadStats {
  std::uint64_t bytes_wanted = 0;
  std::uint64_t bytes_read = 0;     // Bytes read from storage, including extension and gaps.
  std::uint64_t bytes_by_leaf = 0;  // The part of bytes_wanted that leaf or page hashes proved.
  void Add(const ReadStats& o) {
    bytes_wanted += o.bytes_wanted;
    bytes_read += o.bytes_read;
    bytes_by_leaf += o.bytes_by_leaf;
  }
};

// An opened checkpoint, either committed or foreign. Read-only, immutable, thread-safe. The
// object of a committed checkpoint has a shared flock on COMMIT, so that gc does not delete the
// checkpoint; on filesystems without locks it has none (PinCommit). Data files are opened at the
// first read; at most `max_open_files` stay open between reads.
// Readers keep a shared_ptr to the object. Mappings and extents that it returns are shared and may
// outlive it.
class OpenedCheckpoint {
 public:
  struct Options {
    // Whether to bypass a missing or damaged index, with a warning: by the index that fsck rebuilt,
    // or by a rebuild in memory from the manifests. If false, the open or the read fails.
    bool rebuild_index = true;
    // An index of up to this many bytes is compared with its hash at open. Of a larger index only
    // the tail is compared; other damage is found when a read meets it (rebuild_index).
    std::uint64_t check_index_bytes = kMaxFullyCheckedIndexBytes;
    std::size_t max_open_files = 512;
    // Directories in which the operator allows data of adopted checkpoints, no matter who published
    // the checkpoint (index/read/foreign_file.h).
    std::vector<std::string> roots;
    // The checkpoint's directory, if the caller has pinned it (FileSystem::PinDirectory). Null:
    // Open pins `directory`, and follows a symlink as its last component.
    std::shared_ptr<const std::string> pinned;
    // Ranges that earlier opens of the same checkpoint (uuid) have proven. Null: none.
    std::shared_ptr<ProvenRanges> proven;
  };

  // Opens a checkpoint directory. kNotFound: no COMMIT. kStale: the checkpoint is being deleted, or
  // was deleted. kDataLoss: both copies of COMMIT are damaged, or the index is damaged and cannot
  // be rebuilt. kUnsupported: a newer format. kPermissionDenied: the process may not open a file,
  // or the data are outside of the directory, in a place that only the operator may allow
  // (Options::roots). Or the errno of another failed system call.
  static Result<std::shared_ptr<OpenedCheckpoint>> Open(FileSystem& fs,
                                                        const std::string& directory,
                                                        const Options& options);
  // Opens a foreign checkpoint. `inventory` is the result of the adapter for `path`, the resolved
  // path of a directory or file. The adapter's warnings become warnings().
  static Result<std::shared_ptr<OpenedCheckpoint>> OpenForeign(FileSystem& fs,
                                                               ForeignInventory inventory,
                                                               const std::string& path,
                                                               const Options& options);
  // A checkpoint as a name map shows it (docs/mapping.md): index() has the mapped tensors, and
  // reads of them read the stored tensors of `source`. Files, objects' bytes, common values,
  // warnings, proven ranges and the path are those of `source`, which may be mapped itself. Errors
  // as for NameBinding::Bind; kUnsupported: a rule uses a tensor of a mapped `source` of which
  // cells are zeros.
  static Result<std::shared_ptr<OpenedCheckpoint>> Mapped(
      std::shared_ptr<const OpenedCheckpoint> source, const NameRules& rules);
  ~OpenedCheckpoint();

  // The checkpoint as it is stored: this one, unless a name map is applied.
  const OpenedCheckpoint& stored() const { return source_ ? source_->stored() : *this; }
  const CheckpointIndex& stored_index() const { return *stored().index_; }
  // The checkpoint to which the name map is applied, which may be mapped itself; null if none is.
  const OpenedCheckpoint* source() const { return source_.get(); }
  // Whether the bytes of a tensor are stored with hashes. False for foreign formats, and for
  // tensors without bytes. Errors as for Extents.
  Result<bool> HasHashes(const TensorEntry& tensor) const;
  // Whether a name map is applied.
  bool is_mapped() const { return source_ != nullptr; }
  // The stored key of which tensor number `ordinal` is another name; empty for a tensor that is put
  // together from parts of others. Its own key if no name map is applied.
  Result<std::string> StoredKeyOf(std::uint32_t ordinal) const;
  // How the name map was applied to source(); null if none is.
  const NameBinding* binding() const { return binding_.get(); }
  // The keys of the stored tensors that have bytes of tensor number `ordinal`, at most `most`; its
  // own key if no name map is applied.
  Result<std::vector<std::string>> StoredKeysOf(std::uint32_t ordinal, std::size_t most) const;
  // The stored key of the object `key`.
  std::string StoredObjectKey(const std::string& key) const;
  // The name that the name maps give to something that is stored with a key and without cells, such
  // as an object (NameRules::NameOf). Empty: it is left out.
  std::string ShownNameOf(std::string stored_key) const;
  // Whether the name maps leave out the stored tensor, or the other thing, `stored_key`.
  bool LeavesOut(const std::string& stored_key) const;
  FileSystem& fs() const { return *fs_; }
  const std::string& directory() const { return directory_; }
  // Path for opening a checkpoint's own files. Valid while this object lives, even after a rename.
  // For a foreign checkpoint: directory().
  const std::string& pinned_directory() const { return *pinned_; }
  // Last component of directory(). For a foreign checkpoint of one file: without the extension.
  std::string name() const;
  const CheckpointIndex& index() const { return *index_; }
  // The decoded COMMIT. Null for foreign checkpoints that are read in place.
  const DecodedCommit* commit() const { return has_commit_ ? &commit_ : nullptr; }
  // Problems that were found at open or later and did not stop reading (a damaged copy, a rebuilt
  // index).
  std::vector<std::string> warnings() const;
  // Adds a warning of the caller that selected this checkpoint. Call it before the object is
  // shared.
  void AddWarning(std::string warning) { warnings_.push_back(std::move(warning)); }
  // The config.json that the name map makes of what the trainer saved; null if no map makes one.
  const MadeConfig* made_config() const { return made_config_.get(); }
  // Call it before the object is shared.
  void SetMadeConfig(MadeConfig config) {
    made_config_ = std::make_shared<const MadeConfig>(std::move(config));
  }
  // Data that a foreign checkpoint names and its files lack. warnings() repeats the losses, up to a
  // limit. Empty for checkpoints with a COMMIT.
  const std::vector<ForeignLoss>& lost() const { return lost_; }
  // Names of other data in a foreign checkpoint's directory, which are not part of the checkpoint
  // (ForeignInventory::beside).
  const std::vector<std::string>& beside() const { return beside_; }
  bool index_was_rebuilt() const { return index_rebuilt_; }
  // Ranges of data files that reads with kOnce, or mounts, have proven.
  ProvenRanges& proven() const { return *proven_; }

  // Counts of the values of a tensor, taken when it was saved (docs/format.md, "Value counts").
  // nullopt: they are not known, as for foreign checkpoints, saves without them, saves through a
  // mount, dtypes of 6 bits, and tensors that a name map puts together. kDataLoss if they are
  // damaged.
  Result<std::optional<ValueCounts>> CountsOf(const TensorEntry& tensor) const;
  // The counts of one chunk, of stored().Extents(tensor); nullopt also if a name map is applied.
  // Reads a few hashes of its manifest.
  Result<std::optional<ValueCounts>> CountsOf(const TensorEntry& tensor,
                                              const ChunkRecord& chunk) const;

  // The chunks of a tensor. Locates pending chunks, which reads a few bytes of each item that
  // contains a chunk of the tensor. Errors: kDataLoss (damaged index, missing file, ItemResolver),
  // kUnsupported (ItemResolver), kStale, or the errno of a read.
  Result<std::shared_ptr<const ExtentTable>> Extents(const TensorEntry& tensor) const;

  // Makes and caches the lookup that reads of a tensor use. Call it before starting several reads
  // at once, because each of them would make the lookup. Errors as for Extents.
  Status Prepare(const TensorEntry& tensor) const;
  // Reads `region` of a tensor into `out`, whose shape is the region's extents. `out` may be
  // strided. `digest`, if not null, receives the contribution to the tensor's digest of the bytes
  // *as they arrived in `out`* (base/hash.h). After an error the contents of `out` are undefined.
  // Errors: kInvalidArgument (region, dtype, shape); kDataLoss with tensor, box, file and byte
  // (checksum mismatch, short or missing file); kStale if a foreign file changed, unless it was
  // open already and hashes proved the bytes; kUnsupported if `out` is device memory; or the errno
  // of the read.
  Status Read(const TensorEntry& tensor, const Region& region, const BufferView& out,
              ReadVerify verify, ReadStats* stats, Crc64* digest) const;
  // Like Read, into memory that `want` describes: disjoint placed boxes of the tensor's bytes
  // (shard/tensor_meta.h), relative to `base`. The boxes must be within the tensor.
  Status ReadPlaced(const TensorEntry& tensor, std::span<const PlacedBox> want, std::byte* base,
                    ReadVerify verify, ReadStats& stats, Crc64* digest) const;
  // Reads bytes [offset, offset + size) of the tensor in row-major order, the order of its file in
  // a mount. The range must be within the tensor. Errors as for Read.
  Status ReadBytes(const TensorEntry& tensor, std::uint64_t offset, void* out, std::size_t size,
                   ReadVerify verify, ReadStats* stats) const;
  // Turns on read-ahead while the result lives: small consecutive reads of a file are served from
  // larger reads. For callers that read most of a checkpoint in file order. The result must not
  // outlive this object.
  [[nodiscard]] std::shared_ptr<const void> ReadInOrder() const;
  // The ranges of files that ReadPlaced reads, in its order. Runs with gaps of less than a page are
  // one range, and so are those whose gaps `readers` processes with equal reads fill together. Many
  // runs with larger gaps are left out. Errors as for Extents, and kDataLoss if no chunk has a
  // wanted byte.
  struct FileStretch {
    std::uint32_t file = 0;
    ByteRange bytes;
  };
  Result<std::vector<FileStretch>> StretchesOf(const TensorEntry& tensor,
                                               std::span<const PlacedBox> want, int readers) const;
  // Whether a byte of a file is in the page cache; nullopt if that is unknown.
  std::optional<bool> IsCached(std::uint32_t file, std::uint64_t offset) const;
  // Brings a unit of a file into the page cache (File::Fetch).
  bool Fetch(std::uint32_t file, ByteRange unit) const;
  // Maps the bytes that ReadBytes would copy. Returns ranges in order, at most kMaxMapped. Empty if
  // the bytes are not a few runs of mappable files, if a file is foreign (ForeignFiles), or if
  // `verify` requires comparing the bytes with hashes; the caller then reads. Pass the ranges to a
  // system call: if somebody truncates the file later, a system call fails with EFAULT, but an
  // access raises SIGBUS.
  static constexpr std::size_t kMaxMapped = 8;
  struct MappedRange {
    const std::byte* data = nullptr;
    std::size_t size = 0;
    std::shared_ptr<const void> keep;  // The mapping lives as long as this pointer.
  };
  // kMap maps foreign files too. The caller then accepts that nothing checks afterwards whether the
  // file changed.
  enum class ForeignFiles { kRead, kMap };
  Result<std::vector<MappedRange>> MapBytes(const TensorEntry& tensor, std::uint64_t offset,
                                            std::size_t size, ReadVerify verify,
                                            ForeignFiles foreign = ForeignFiles::kRead) const;
  // Like MapBytes, for the placed boxes of ReadPlaced. The boxes must fill their destination
  // without gaps.
  Result<std::vector<MappedRange>> MapPlaced(const TensorEntry& tensor,
                                             std::span<const PlacedBox> want, ReadVerify verify,
                                             ForeignFiles foreign = ForeignFiles::kRead) const;
  // Reads a part of an object. By default only the leaves that the read covers completely are
  // compared with their hashes.
  Status ReadObject(const ObjectRecord& object, std::uint64_t offset, void* out, std::size_t size,
                    ReadVerify verify = ReadVerify::kWholeLeaves) const;

  // The position of the tensor's bytes, if the whole tensor is one contiguous range of a file
  // (ExtentLookup::FileRun). Errors as for Extents.
  Result<std::optional<ExtentLookup::FileRun>> FileRunOf(const TensorEntry& tensor) const;
  // The number (for FilePath, OpenFile) of a file that has exactly the tensor's row-major bytes
  // from offset 0. For passthrough and adoption. kNotFound if there is no such file.
  Result<std::uint32_t> WholeFileOf(const TensorEntry& tensor) const;
  // Path of file number `file` on the host, for messages. `file` must be less than
  // index().files().size().
  std::string FilePath(std::uint32_t file) const;
  // Path for accessing file number `file`. For a checkpoint's own files it stays valid while this
  // object lives, even if the checkpoint is renamed.
  std::string AccessPath(std::uint32_t file) const;
  // Whether another program wrote file number `file`.
  bool IsForeignFile(std::uint32_t file) const;

  // Opens file number `file`. Symbolic links are refused (the checkpoint's own files) or must stay
  // below the root of the foreign files. kStale if a foreign file changed
  // (index/read/foreign_file.h).
  Result<std::unique_ptr<File>> OpenFile(std::uint32_t file) const;
  // Like OpenFile, but the file is opened once for all readers and cached (EvictFile). kDataLoss if
  // the file is missing.
  Result<std::shared_ptr<File>> SharedFile(std::uint32_t file) const;
  // Removes file number `file` from the cache. The next read opens the file's name again, which may
  // then be a repaired copy.
  void EvictFile(std::uint32_t file) const;
  // Checks that a foreign file still matches its record and did not change since its first use
  // through this object; kStale if not. Call this after reading foreign bytes that no hash proves.
  // Always OK for the checkpoint's own files.
  Status CheckFileUnchanged(std::uint32_t file, File& open) const;

  struct Files;  // Private to index/read/ (file_cache.h).

 private:
  OpenedCheckpoint();
  struct PlannedRead;  // The chunks that a read may touch, and the copy plan over them.
  Result<PlannedRead> PlanRead(const TensorEntry& tensor, std::span<const PlacedBox> want) const;
  // Appends to `planned` the chunks of a tensor that may hold bytes of `hull`. Returns the places
  // of their bytes.
  Result<std::vector<std::vector<PlacedBox>>> AddChunks(const TensorEntry& tensor,
                                                        const ByteHull& hull,
                                                        PlannedRead& planned) const;
  // The same functions for a mapped checkpoint (mapped_read.cc).
  Result<PlannedRead> PlanMapped(const TensorEntry& tensor, std::span<const PlacedBox> want) const;
  Result<std::vector<std::vector<PlacedBox>>> AddMappedChunks(const TensorEntry& tensor,
                                                              const ByteHull& hull,
                                                              PlannedRead& planned) const;
  // For each stored tensor that holds cells of `wanted`, boxes over the names of `term`: adds its
  // chunks to `planned`, and calls fn(tensor, parts of `wanted`, number of its first chunk, places
  // of its chunks' bytes as boxes over the names). Stops at the first error.
  template <typename Fn>
  Status AddStored(const MappedTensor& mapped, const CellTerm& term,
                   std::span<const PlacedBox> wanted, PlannedRead& planned, Fn fn) const;
  Status PrepareMapped(const TensorEntry& tensor) const;
  Result<std::optional<ExtentLookup::FileRun>> MappedFileRun(const TensorEntry& tensor) const;
  // The stored tensor of which `tensor` is another name; kNotFound if it is not whole.
  Result<TensorEntry> WholeSourceOf(const TensorEntry& tensor) const;
  std::size_t StartParts(const PlannedRead& planned, std::size_t first, ReadVerify verify) const;
  // Reads all parts of a plan once. `once` is null unless `verify` is kOnce.
  Status ReadPlan(const TensorEntry& tensor, const PlannedRead& planned,
                  std::span<const PlacedBox> want, std::byte* base, ReadVerify verify,
                  ProvingRead* once, ReadStats& stats, Crc64* digest) const;
  Result<std::shared_ptr<const ExtentLookup>> Lookup(const TensorEntry& tensor) const;
  Result<std::shared_ptr<const ExtentTable>> ResolvePending(const TensorEntry& tensor,
                                                            const ExtentTable& table) const;
  FileSystem* fs_ = nullptr;
  // Path of the checkpoint's directory, or of the file of a foreign checkpoint that is one file.
  std::string directory_;
  // Path that leads to the same directory after a rename, so that removed and replaced checkpoints
  // can be read to the end. Equal to directory_ for foreign checkpoints.
  std::shared_ptr<const std::string> pinned_;
  std::shared_ptr<const CheckpointIndex> index_;
  // ItemResolver of a foreign checkpoint's adapter (foreign_inventory.h). Empty if no chunk is
  // pending.
  std::function<Status(const TensorMeta& meta, File& file, ChunkRecord& chunk)> resolver_;
  bool is_file_ = false;  // Whether this is a foreign checkpoint of one file.
  DecodedCommit commit_;
  bool has_commit_ = false;
  std::unique_ptr<const ForeignBase> foreign_base_;
  bool index_rebuilt_ = false;
  std::vector<std::string> warnings_;
  std::vector<ForeignLoss> lost_;
  std::vector<std::string> beside_;
  std::unique_ptr<File> lock_;
  // Both null, or a name map is applied: then files are opened and read by source_.
  std::shared_ptr<const OpenedCheckpoint> source_;
  std::shared_ptr<const NameBinding> binding_;
  std::shared_ptr<const MadeConfig> made_config_;
  std::shared_ptr<ProvenRanges> proven_;
  std::unique_ptr<ValueTotals> totals_;
  std::unique_ptr<Files> files_;
};

// Rebuilds the records of the index from manifest/. Each manifest is compared with COMMIT, and the
// result is checked for completeness.
Result<Inventory> RebuildInventory(FileSystem& fs, const std::string& directory,
                                   const CommitRecord& commit);

struct VerifyOptions {
  // Whether to check only COMMIT, the listing, manifests, the index, the lengths of data files, and
  // that foreign files are unchanged. The data are then not read.
  bool quick = false;
  // Directories in which data of adopted checkpoints are allowed
  // (OpenedCheckpoint::Options::roots).
  std::vector<std::string> roots;
  int threads = 0;  // Number of threads; 0: the number of cores.
  Watch watch;      // Progress and cancellation; may be empty.
};
struct VerifyReport {
  // One entry for each damage: "tensor w [0:16, 128:256]: data/…: byte 4096: checksum mismatch".
  struct Damage {
    std::string
        object;  // "tensor w [0:16, 128:256]", "object rng", "COMMIT", "index", "manifest/…".
    std::string file;  // Path below the checkpoint.
    std::uint64_t offset = 0;
    std::string reason;
    bool surplus = false;  // Whether this is a file that belongs to no checkpoint.
    // Whether the data are missing from the files of a foreign checkpoint. Its other data may be
    // intact.
    bool lost = false;
    // Names of other checkpoints of the store whose data file is this one (a hard link).
    // VerifyCheckpoint leaves this empty, because it does not know the store; NameSharers of
    // index/store/costs.h fills it.
    std::vector<std::string> shared_with = {};
    // If `lost`: all keys of the missing data, tensors before objects. `object` has only their
    // number, or a single key.
    std::vector<std::string> keys = {};
  };
  std::vector<Damage> damages;
  // Damage for which the store has a substitute (an index that fsck rebuilt), and why something
  // could not be checked. For a foreign checkpoint also: warnings of the open that are not losses.
  std::vector<std::string> warnings;
  std::uint64_t bytes_checked = 0;
  // The part of bytes_checked that could only be read, because there are no hashes (foreign
  // formats, `adopt --quick`).
  std::uint64_t bytes_without_hash = 0;
  std::uint64_t tensors = 0;
  std::uint64_t chunks = 0;
};
// Checks everything that belongs to the checkpoint: both copies of COMMIT, every manifest and index
// file, index records against the manifests, every extent, every leaf of every data file that has
// hashes, digests of tensors whose chunks are all intact, and surplus files. Damage is in the
// report. The call fails if the checkpoint cannot be opened (a damaged COMMIT is in the report), or
// if something could not be checked and no damage was found.
Result<VerifyReport> VerifyCheckpoint(FileSystem& fs, const std::string& directory,
                                      const VerifyOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_CHECKPOINT_H_
