// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_REGION_READER_H_
#define TENSORMOUNT_INDEX_READ_REGION_READER_H_

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

// One stored range as a reader sees it: where it is, what proves it, and the ways to get bytes of
// it. OpenedCheckpoint plans which parts of which ranges are wanted, and makes a PartReader for
// each range in turn.
namespace tensormount {

// Reads byte ranges of one stored range (a chunk, a part of an object), checking leaves, or where
// less than a leaf is wanted and it has page hashes, pages.
// Lives for one call; not thread-safe.
class PartReader {
 public:
  // The members of a ChunkRecord or ObjectRecord that a read needs, and a name for messages.
  struct Where {
    // For errors: a tensor and the region of its chunk, or the name of something else.
    const TensorMeta* tensor = nullptr;
    const Region* region = nullptr;
    std::string object;
    std::uint32_t file = 0;
    std::uint64_t offset = 0;  // In the file.
    std::uint64_t length = 0;
    bool has_hash = false;
    Hash128 hash;
    std::uint32_t manifest = 0;
    std::uint64_t first_leaf = 0;
  };
  // `checkpoint`, `files` and what `where` points at must outlive this; file and manifest are in
  // the checkpoint's tables. kOnce is kExtendLeaves here; `once`, where not null, is told what was
  // found good, and must be at the file of the range.
  PartReader(const OpenedCheckpoint& checkpoint, OpenedCheckpoint::Files& files, Where where,
             ReadVerify verify, ProvingRead* once, ReadStats& stats);

  // The file of the range where the caller has it open already, and after the first read.
  void UseFile(std::shared_ptr<OpenDataFile> file) { file_ = std::move(file); }
  const std::shared_ptr<OpenDataFile>& file() const { return file_; }

  // Bytes [at, at + size\) of the range into memory of that size. `arrived`, where not empty, is
  // told of blocks while they are in cache: offset in the range, memory, size.
  using Arrived = std::function<void(std::uint64_t at, const std::byte* data, std::size_t size)>;
  Status ReadRun(std::uint64_t at, std::byte* out, std::uint64_t size, const Arrived& arrived);
  // The same for bytes that stand in `data` already.
  // Only leaves that lie whole in it are checked.
  Status CheckRun(std::uint64_t at, const std::byte* data, std::uint64_t size);
  // The runs of `copy`, whose source offsets are the file's, to `base`.
  Status ReadStrided(const StridedCopy& copy, std::byte* base);
  // The same out of `map` (MappingTo the end of LeavesOf), where it MapsWell and all leaves from
  // the first run to the last are to be checked: each block is copied and then its leaves are
  // hashed where they are mapped, so that nothing is copied beside what is wanted. In this order:
  // bytes that change meanwhile fail.
  Status ReadMapped(const StridedCopy& copy, const std::byte* map, std::byte* base);
  // Whether runs rise through each leaf, and no page between them is spared by its page hashes: to
  // map a file for some of its pages costs more than to read them. Reads leaf hashes where it
  // depends on these.
  Result<bool> MapsWell(const StridedCopy& copy);
  // The stretch of the file that ReadMapped touches: the whole leaves of a copy.
  ByteRange LeavesOf(const StridedCopy& copy) const;
  // For gathers by RunOnMapping: the file's mapping where bytes of the range up to `end` (of the
  // file) are there. Null where there is none, and for foreign files in programs that are not
  // guarded: one that is cut short would end them.
  Result<const std::byte*> MappingTo(std::uint64_t end);
  // What to say where a mapping does not give `size` bytes from `at` of the range on: the first
  // that cannot be read, and why.
  Status WhyNotThere(std::uint64_t at, std::uint64_t size);
  // False where the range has no hash as well.
  bool verifies() const { return verify_ != ReadVerify::kOff; }

 private:
  // Serves rising runs out of blocks that it reads ahead.
  class WindowReader;
  // The runs of `copy`, one stretch of the file, by vectored reads. False where that failed.
  bool ReadScattered(const StridedCopy& copy, std::byte* base);
  // The same where runs do not rise (transposed chunks, and those of which bytes are used twice):
  // by stretches of the file that are copied from memory. `copy` has its axes by falling steps.
  Status ReadTransposed(const StridedCopy& copy, std::byte* base);
  Status ReadSlab(const StridedCopy& slab, std::byte* base);
  // Through the cache of the checkpoint; once.
  Status OpenFile();
  Result<std::shared_ptr<OpenDataFile>> OpenManifest();
  std::string Name() const;
  // A failure of this part.
  Status About(const Status& status) const;
  // Damage at a byte of the range.
  Status Damage(std::uint64_t at, std::string_view why) const;
  // `alone`: what stands beside it is not wanted.
  Status ReadAt(std::uint64_t at, void* out, std::uint64_t size, bool alone = false);
  // Checks the leaves that lie whole in [at, at + size), which stand at `data`; *checked gets the
  // range of them.
  Status CheckLeaves(std::uint64_t at, const std::byte* data, std::uint64_t size,
                     ByteRange* checked);
  // `hash`: that of the bytes that were read. kDataLoss names the first byte of the leaf.
  Status CheckLeaf(std::uint64_t leaf, const Hash128& hash);
  // Only ranges of more than one leaf need it.
  Status LoadLeaves();
  // The bytes of a leaf; the last one of the range may be short.
  ByteRange LeafRange(std::uint64_t leaf) const;
  // Of caches of hashes: where number `hash` of the manifest's stands.
  std::uint64_t CacheKey(std::uint64_t hash) const;
  // Whether the range has page hashes, from the manifest.
  Result<bool> Paged();
  // The least that holds `want`, bytes of one leaf, and can be compared with a hash: pages, where
  // those of the leaf can be had, else all of it.
  Result<ByteRange> Provable(ByteRange want);
  // Reads what Provable gave, and compares it. kDataLoss names the first byte of the page or leaf.
  Status ReadProvable(ByteRange range, std::byte* out);
  // Those of a leaf, proved by its check; empty where there are none or they are damaged.
  Result<std::span<const Hash128>> PageHashes(std::uint64_t leaf);
  // Of the leaves from `first` on, which stand in the manifest from hash `at` on.
  std::shared_ptr<const PageBlocks> ReadPageBlocks(std::uint64_t first, std::uint64_t at);
  // Whether a copy whose runs rise is better proved by page: some between them hold nothing wanted.
  Result<bool> SparesPages(const StridedCopy& copy);
  // Whether a byte of the range is in memory already.
  bool IsCached(std::uint64_t at);
  // Storage may begin with what proves [at, at + size).
  Status StartReading(std::uint64_t at, std::uint64_t size);

  const OpenedCheckpoint& checkpoint_;
  OpenedCheckpoint::Files& files_;
  const Where where_;
  const ReadVerify verify_;
  ProvingRead* const once_;
  ReadStats& stats_;
  std::shared_ptr<OpenDataFile> file_;
  std::shared_ptr<const ProvenLeaves> leaves_;
  std::shared_ptr<const PageBlocks> pages_;
  std::uint64_t first_paged_ = 0;  // The first leaf of pages_.
  // One leaf; of ReadRun.
  std::vector<std::byte> scratch_;
  // Of ReadSlab.
  std::vector<std::byte> slab_;
};

// Where the bytes of a read go, as boxes of the tensor's bytes; relative to the buffer. The errors
// of OpenedCheckpoint::Read and ReadBytes for what does not fit.
Result<std::vector<PlacedBox>> PlaceRead(const TensorEntry& tensor, const Region& region,
                                         const BufferView& out);
Result<std::vector<PlacedBox>> PlaceBytes(const TensorEntry& tensor, std::uint64_t offset,
                                          std::size_t size);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_REGION_READER_H_
