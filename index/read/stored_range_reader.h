// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_STORED_RANGE_READER_H_
#define TENSORMOUNT_INDEX_READ_STORED_RANGE_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/byte_range.h"
#include "index/read/checkpoint.h"
#include "index/read/file_cache.h"
#include "index/read/proven_ranges.h"
#include "shard/copy_plan.h"
#include "shard/tensor_meta.h"

// Reads of one stored range: its position, its hashes, and the ways to get its bytes.
// OpenedCheckpoint plans which parts of which ranges to read, and makes a StoredRangeReader for
// each range in turn.
namespace tensormount {

// Reads bytes of one stored range (a chunk, an object part) and compares their leaves with the
// hashes, or their pages if less than a leaf is read and there are page hashes. Lives for one call;
// not thread-safe.
class StoredRangeReader {
 public:
  // The fields of a ChunkRecord or ObjectRecord that a read needs, and a name for messages.
  struct RangeRecord {
    // Name for messages: the tensor and its chunk's region, or `object`.
    const TensorMeta* tensor = nullptr;
    const Region* region = nullptr;
    std::string object;
    std::uint32_t file = 0;
    std::uint64_t offset = 0;  // Offset in the file.
    std::uint64_t length = 0;
    bool has_hash = false;
    Hash128 hash;
    std::uint32_t manifest = 0;
    std::uint64_t first_leaf = 0;
  };
  // The arguments must outlive this object. File and manifest numbers must be in the checkpoint's
  // tables. kOnce is treated like kExtendLeaves. `once`, if not null, must have begun the range's
  // file (BeginFile); proven bytes are added to it.
  StoredRangeReader(const OpenedCheckpoint& checkpoint, OpenedCheckpoint::Files& files,
                    RangeRecord where, ReadVerify verify, ProvingRead* once, ReadStats& stats);

  // The range's file. The caller sets it if the file is open already; if not, the first read opens
  // it.
  void UseFile(std::shared_ptr<OpenDataFile> file) { file_ = std::move(file); }
  const std::shared_ptr<OpenDataFile>& file() const { return file_; }

  // Called by ReadRun for each block while it is in the processor's cache: offset in the range,
  // memory, size.
  using BlockCallback =
      std::function<void(std::uint64_t at, const std::byte* data, std::size_t size)>;
  // Reads bytes [at, at + size) of the range into `out`. `arrived` may be empty.
  Status ReadRun(std::uint64_t at, std::byte* out, std::uint64_t size,
                 const BlockCallback& arrived);
  // Checks bytes that the caller has already read into `data`. Only leaves that are completely in
  // `data` are checked.
  Status CheckRun(std::uint64_t at, const std::byte* data, std::uint64_t size);
  // Reads the runs of `copy` to `base`. The source offsets of `copy` are file offsets.
  Status ReadStrided(const StridedCopy& copy, std::byte* base);
  // Copies the runs of `copy` to `base` from `map`, which is the result of MappingTo for the end of
  // LeavesOf. Use it only if PrefersMmap and all leaves from the first run to the last are to be
  // checked. Each block is copied first, and its leaves are hashed in the mapping afterwards. Bytes
  // that change in between therefore fail the check, and only bytes of the runs are copied.
  Status ReadMapped(const StridedCopy& copy, const std::byte* map, std::byte* base);
  // Whether ReadMapped is faster than ReadStrided: the runs rise and touch every leaf, and no page
  // between them could be skipped with page hashes. Mapping a file for some of its pages costs more
  // than reading them. May read leaf hashes.
  Result<bool> PrefersMmap(const StridedCopy& copy);
  // The byte range of the file that ReadMapped reads: all leaves from the first run of `copy` to
  // the last.
  ByteRange LeavesOf(const StridedCopy& copy) const;
  // The file's mapping for RunOnMapping, if the file has bytes up to `end` (a file offset). Null if
  // the file is shorter or cannot be mapped. Also null for a foreign file if the program has no
  // mapping guard, because a truncation of the file would end the program.
  Result<const std::byte*> MappingTo(std::uint64_t end);
  // The error for a mapping that does not deliver `size` bytes at offset `at` of the range: the
  // first unreadable byte, and the reason.
  Status MappingError(std::uint64_t at, std::uint64_t size);
  // Whether leaves are checked. Also false if the range has no hash.
  bool verifies() const { return verify_ != ReadVerify::kOff; }

 private:
  // Serves runs at rising offsets from blocks of the range.
  class WindowReader;
  // Reads the runs of `copy`, which have no gaps between them in the file, by vectored reads.
  // Returns false after a failure.
  bool ReadScattered(const StridedCopy& copy, std::byte* base);
  // ReadStrided for runs that do not rise (transposed chunks, bytes that are used twice). Reads
  // byte ranges of the file into memory and copies the runs from there. The axes of `copy` must
  // have falling steps.
  Status ReadTransposed(const StridedCopy& copy, std::byte* base);
  Status ReadSlab(const StridedCopy& slab, std::byte* base);
  // Opens the range's file through the checkpoint's cache, if it is not open yet.
  Status OpenFile();
  Result<std::shared_ptr<OpenDataFile>> OpenManifest();
  std::string Name() const;
  // Adds the name of the range to a failure.
  Status WithRangeName(const Status& status) const;
  // The error for damage at byte `at` of the range: kDataLoss.
  Status Damage(std::uint64_t at, std::string_view why) const;
  // Reads bytes of the range from the file. `alone`: without read-ahead.
  Status ReadAt(std::uint64_t at, void* out, std::uint64_t size, bool alone = false);
  // Checks the leaves that are completely in [at, at + size), whose bytes are at `data`. Sets
  // *checked to the range of these leaves.
  Status CheckLeaves(std::uint64_t at, const std::byte* data, std::uint64_t size,
                     ByteRange* checked);
  // Compares `hash`, of the bytes that were read, with the hash of leaf number `leaf`. kDataLoss
  // names the first byte of the leaf.
  Status CheckLeaf(std::uint64_t leaf, const Hash128& hash);
  // Reads and proves the range's leaf hashes. Needed only for ranges of more than one leaf.
  Status LoadLeaves();
  // The byte range of a leaf. The last leaf of the range may be short.
  ByteRange LeafRange(std::uint64_t leaf) const;
  // Key in the hash caches for hash number `hash` of the range's manifest.
  std::uint64_t CacheKey(std::uint64_t hash) const;
  // Whether the manifest has page hashes of the range.
  Result<bool> HasPageHashes();
  // The smallest byte range that contains `want` and can be proved. `want` is within one leaf. The
  // result is whole pages, or the whole leaf if the page hashes of the leaf are not available.
  Result<ByteRange> ProvableRange(ByteRange want);
  // Reads a result of ProvableRange and compares it with the hashes. kDataLoss names the first byte
  // of the page or leaf.
  Status ReadProvableRange(ByteRange range, std::byte* out);
  // Page hashes of a leaf, verified by their checksum. Empty if they are missing or damaged.
  Result<std::span<const Hash128>> PageHashes(std::uint64_t leaf);
  // Reads the page hashes of some leaves from leaf number `first` on. They begin at hash number
  // `at` of the manifest.
  std::shared_ptr<const PageBlocks> ReadPageBlocks(std::uint64_t first, std::uint64_t at);
  // Whether page hashes save reads for a copy with rising runs, because no run touches some of the
  // pages between the first and the last.
  Result<bool> CanSkipPages(const StridedCopy& copy);
  // Whether the file is not one of this machine's kernel: a read costs a round trip to a server.
  bool IsFar() const;
  // Whether a byte of the range is in memory already.
  bool IsCached(std::uint64_t at);
  // Announces to storage a read of [at, at + size) or, with kExtendLeaves, of its first leaf.
  Status StartReading(std::uint64_t at, std::uint64_t size);

  const OpenedCheckpoint& checkpoint_;
  OpenedCheckpoint::Files& files_;
  const RangeRecord record_;
  const ReadVerify verify_;
  ProvingRead* const once_;
  ReadStats& stats_;
  std::shared_ptr<OpenDataFile> file_;
  std::shared_ptr<const ProvenLeaves> leaves_;
  std::shared_ptr<const PageBlocks> pages_;
  std::uint64_t first_paged_ = 0;  // First leaf of pages_.
  // Memory of one leaf, for ReadRun.
  std::vector<std::byte> scratch_;
  // Memory for ReadSlab.
  std::vector<std::byte> slab_;
};

// Whether no gap between the runs, which rise, is as long as a unit (leaf or page) of `bytes`
// bytes. The runs then touch every unit from the first run to the last, and none is read in vain.
bool TouchesEach(const StridedCopy& copy, std::uint64_t bytes);

// The destination of a read as boxes of the tensor's bytes, relative to the buffer. If the
// arguments are invalid, returns the errors of OpenedCheckpoint::Read and ReadBytes.
Result<std::vector<PlacedBox>> PlaceRead(const TensorEntry& tensor, const Region& region,
                                         const BufferView& out);
Result<std::vector<PlacedBox>> PlaceBytes(const TensorEntry& tensor, std::uint64_t offset,
                                          std::size_t size);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_STORED_RANGE_READER_H_
