// SPDX-License-Identifier: Apache-2.0
// StoredRangeReader of stored_range_reader.h reads bytes of one stored range and proves their
// leaves. It knows the range and its hashes, but no plans.
//
// Blocks have 1 MiB, so that they are hashed while they are in the second-level cache. Runs that
// rise in the file are served from a window that moves forward, other runs (of a transposed chunk)
// from slabs in memory. A window or slab is read once for all its runs.
#include "index/read/stored_range_reader.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checked.h"
#include "base/mapping.h"
#include "index/read/rebuild.h"
#include "index/records/manifest.h"
#include "shard/leaf_hash.h"
#include "shard/page_hash.h"

namespace tensormount {
namespace {

// Runs shorter than this are cheaper to copy from a buffer than to read as parts of a vectored
// read.
constexpr std::uint64_t kScatterRun = 512;
constexpr std::size_t kMaxScatter = 1024;  // The kernel's limit for one call (IOV_MAX).

// Bytes that are read and then hashed while they are in the second-level cache.
constexpr std::uint64_t kPartBlockBytes = std::uint64_t{1} << 20;
static_assert(kPartBlockBytes % kLeafBytes == 0);

// The same from a server: each read costs a round trip, and a long one is several requests that are
// answered together (File::ReadAt).
constexpr std::uint64_t kFarBlockBytes = std::uint64_t{64} << 20;
// The size of a window of WindowReader there, and the number of windows that are announced.
constexpr std::uint64_t kFarWindowBytes = std::uint64_t{8} << 20;
constexpr std::uint64_t kFarWindowsAhead = 4;
// Runs with smaller gaps are one request there, and so many runs are announced at once.
constexpr std::uint64_t kFarGapBytes = std::uint64_t{1} << 20;
constexpr std::size_t kFarRunsAhead = 1024;

std::uint64_t LeafBegin(std::uint64_t leaf) { return leaf * kLeafBytes; }

// Bytes that ReadMapped copies and then hashes while they are in the second-level cache.
constexpr std::uint64_t kMappedBlockBytes = 4 * kLeafBytes;

// Whether every run begins at or behind the end of the previous run. From the innermost axis
// outwards, a step must be at least as large as the span of the axes inside it.
bool HasAscendingRuns(const StridedCopy& copy) {
  auto end = static_cast<std::int64_t>(copy.run);
  for (int a = copy.axes - 1; a >= 0; --a) {
    const StridedCopy::Axis& axis = copy.axis[static_cast<std::size_t>(a)];
    if (axis.src < end) return false;
    end += (axis.count - 1) * axis.src;
  }
  return true;
}

// Largest number of runs that are announced to storage at once.
constexpr std::size_t kRunsAhead = 64;

// Number of leaves whose page hashes are read together: about 4 KiB of hashes for 1 MiB of the
// range.
constexpr std::uint64_t kLeavesPaged = 16;

// Calls fn(part) for parts of a copy. The parts rise in the file if the steps of the axes fall.
// Each part spans at most `most` bytes of the file, or is one run. A part takes as many steps of an
// axis as fit; a larger step is split along the axes inside it.
template <typename Fn>
Status ForEachBlock(const StridedCopy& copy, std::uint64_t most, const Fn& fn) {
  const std::uint64_t span = copy.src_span();
  if (span <= most || copy.axes == 0) return fn(copy);
  const auto step = static_cast<std::uint64_t>(copy.axis[0].src);
  const auto count = static_cast<std::uint64_t>(copy.axis[0].count);
  const std::uint64_t within = span - (count - 1) * step;
  const std::uint64_t at_once = within > most ? 1 : step == 0 ? count : (most - within) / step + 1;
  for (std::uint64_t at = 0; at < count; at += at_once) {
    const std::uint64_t n = std::min(at_once, count - at);
    StridedCopy part = copy;
    part.src_offset += static_cast<std::int64_t>(at * step);
    part.dst_offset += static_cast<std::int64_t>(at) * copy.axis[0].dst;
    part.axis[0].count = static_cast<std::int64_t>(n);
    if (n == 1) {
      --part.axes;
      std::copy(copy.axis.begin() + 1, copy.axis.end(), part.axis.begin());
    }
    TENSORMOUNT_RETURN_IF_ERROR(ForEachBlock(part, most, fn));
  }
  return Status();
}

// The copy with its axes in the order of falling steps, which copies the same bytes. With the
// largest step outermost, the parts of the outermost axis are separate byte ranges of the file if
// the chunk is packed.
StridedCopy SortedByStep(const StridedCopy& copy) {
  StridedCopy sorted = copy;
  std::ranges::stable_sort(sorted.loops(), std::ranges::greater(), &StridedCopy::Axis::src);
  return sorted;
}

}  // namespace

bool TouchesEach(const StridedCopy& copy, std::uint64_t bytes) {
  std::uint64_t within = copy.run;
  for (int a = copy.axes - 1; a >= 0; --a) {
    const StridedCopy::Axis& axis = copy.axis[static_cast<std::size_t>(a)];
    const auto step = static_cast<std::uint64_t>(axis.src);
    if (axis.count > 1 && step - within >= bytes) return false;
    within += static_cast<std::uint64_t>(axis.count - 1) * step;
  }
  return true;
}

StoredRangeReader::StoredRangeReader(const OpenedCheckpoint& checkpoint,
                                     OpenedCheckpoint::Files& files, RangeRecord where,
                                     ReadVerify verify, ProvingRead* once, ReadStats& stats)
    : checkpoint_(checkpoint),
      files_(files),
      record_(std::move(where)),
      verify_(!record_.has_hash             ? ReadVerify::kOff
              : verify == ReadVerify::kOnce ? ReadVerify::kExtendLeaves
                                            : verify),
      once_(once),
      stats_(stats) {}

std::string StoredRangeReader::Name() const {
  if (record_.tensor == nullptr) return record_.object;
  return "tensor " + record_.tensor->key() + " " + record_.region->ToString();
}

Status StoredRangeReader::WithRangeName(const Status& status) const {
  ErrorFields fields{.file = checkpoint_.index().files()[record_.file].name};
  if (record_.tensor != nullptr) {
    fields.key = record_.tensor->key();
    const Box& box = record_.region->box();
    fields.box_begin.assign(box.begin().begin(), box.begin().end());
    fields.box_extent.assign(box.extent().begin(), box.extent().end());
  }
  return status.WithContext(Name()).With(fields);
}

Status StoredRangeReader::Damage(std::uint64_t at, std::string_view why) const {
  return WithRangeName(Status(Code::kDataLoss, checkpoint_.index().files()[record_.file].name +
                                                   ": byte " + std::to_string(record_.offset + at) +
                                                   ": " + std::string(why)));
}

// A missing foreign file is kDataLoss for readers, not kNotFound.
Status StoredRangeReader::OpenFile() {
  if (file_) return Status();
  Result<std::shared_ptr<OpenDataFile>> file = files_.Open(checkpoint_, record_.file);
  if (file.status().code() == Code::kNotFound) {
    return WithRangeName(Status(Code::kDataLoss, file.status().message()));
  }
  if (!file.ok()) return WithRangeName(file.status());
  file_ = std::move(file).value();
  return Status();
}

Status StoredRangeReader::ReadAt(std::uint64_t at, void* out, std::uint64_t size, bool alone) {
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  const bool ahead = !alone && size <= ReadAhead::kMostSmall && files_.ahead.on();
  Result<std::size_t> got =
      ahead ? files_.ahead.ReadAt(file_, record_.offset + at, out, size, &stats_.bytes_read)
            : file_->file().ReadAtWithin(record_.offset + at, out, size,
                                         record_.offset + record_.length);
  if (!got.ok()) return WithRangeName(got.status());
  if (!ahead) stats_.bytes_read += got.value();
  if (got.value() != size)
    return Damage(at + got.value(), "the file ends here, before the end of the data");
  return Status();
}

Result<std::shared_ptr<OpenDataFile>> StoredRangeReader::OpenManifest() {
  const std::string& name = checkpoint_.index().manifests()[record_.manifest];
  return files_.Open(JoinPath(checkpoint_.directory(), name), /*foreign=*/false, [&] {
    return OpenListedFile(files_.fs, checkpoint_.pinned_directory(), name);
  });
}

// Reads the leaf hashes of the whole range from its writer's manifest, and proves them by the
// range's root in the index. Damaged or exchanged leaf hashes (or page hashes, which are bound to
// them) therefore cannot let wrong bytes pass. The hashes are cached, because a tensor is read in
// many calls.
Status StoredRangeReader::LoadLeaves() {
  if (leaves_) return Status();
  const std::uint64_t key = CacheKey(record_.first_leaf);
  // The cached hashes may be of another range, because a damaged index may give two ranges the same
  // position. They are compared with this range.
  leaves_ = files_.leaves.Get(key);
  const std::uint64_t count = LeafCount(record_.length);
  if (leaves_ && leaves_->root == record_.hash && leaves_->length == record_.length)
    return Status();
  leaves_ = nullptr;
  const auto bad = [&](const Status& status) {
    return WithRangeName(
        Status(Code::kDataLoss, "cannot read its leaf hashes: " + status.message()));
  };
  Result<std::shared_ptr<OpenDataFile>> manifest = OpenManifest();
  if (!manifest.ok()) return bad(manifest.status());
  bool paged = false;
  Result<std::vector<Hash128>> leaves =
      ReadManifestLeaves(manifest.value()->file(), record_.first_leaf, count, &paged);
  if (!leaves.ok()) return bad(leaves.status());
  if (ChunkRoot(leaves.value(), record_.length) != record_.hash) {
    return WithRangeName(
        Status(Code::kDataLoss,
               manifest.value()->file().path() + ": the leaf hashes do not match its chunk hash"));
  }
  auto proven = std::make_shared<ProvenLeaves>();
  proven->root = record_.hash;
  proven->length = record_.length;
  proven->leaves = std::move(leaves).value();
  if (paged) {
    const Result<std::vector<Hash128>> mark =
        ReadManifestLeaves(manifest.value()->file(), record_.first_leaf + count, 1);
    proven->paged = mark.ok() && mark.value().front() == PagesMark(record_.hash);
  }
  leaves_ = proven;
  files_.leaves.Put(key, leaves_, count * sizeof(Hash128) + 64);
  return Status();
}

// A range of one leaf needs no manifest, because its root is computed from the hash of that leaf.
Status StoredRangeReader::CheckLeaf(std::uint64_t leaf, const Hash128& hash) {
  bool equal = false;
  if (record_.length <= kLeafBytes) {
    equal = ChunkRoot({&hash, 1}, record_.length) == record_.hash;
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(LoadLeaves());
    equal = leaves_->leaves[leaf] == hash;
  }
  if (!equal) return Damage(LeafBegin(leaf), "checksum mismatch");
  if (once_ != nullptr) {
    const ByteRange good = LeafRange(leaf);
    once_->AddProven({record_.offset + good.begin, record_.offset + good.end});
  }
  return Status();
}

// Leaves that are only partly in memory are skipped. The last leaf of the range may be short.
Status StoredRangeReader::CheckLeaves(std::uint64_t at, const std::byte* data, std::uint64_t size,
                                      ByteRange* checked) {
  *checked = {at, at};
  if (verify_ == ReadVerify::kOff) return Status();
  std::uint64_t leaf = at / kLeafBytes + (at % kLeafBytes != 0);
  checked->begin = checked->end = LeafBegin(leaf);
  for (; LeafBegin(leaf) < at + size; ++leaf) {
    const std::uint64_t begin = LeafBegin(leaf);
    const std::uint64_t bytes = std::min(kLeafBytes, record_.length - begin);
    if (begin + bytes > at + size) break;
    TENSORMOUNT_RETURN_IF_ERROR(CheckLeaf(leaf, Xxh3(data + (begin - at), bytes)));
    checked->end = begin + bytes;
  }
  return Status();
}

ByteRange StoredRangeReader::LeafRange(std::uint64_t leaf) const {
  return {LeafBegin(leaf), std::min(LeafBegin(leaf + 1), record_.length)};
}

// The number of a hash fits in 40 bits: a writer's leaf section has fewer than 2^40 hashes (2^56
// bytes of data).
std::uint64_t StoredRangeReader::CacheKey(std::uint64_t hash) const {
  return (std::uint64_t{record_.manifest} << 40) ^ hash;
}

Result<bool> StoredRangeReader::HasPageHashes() {
  if (verify_ == ReadVerify::kOff || record_.length <= kLeafBytes) return false;
  TENSORMOUNT_RETURN_IF_ERROR(LoadLeaves());
  return leaves_->paged;
}

// Page hashes that cannot be read or do not match their checksum are treated as missing, because
// the whole leaf proves the same bytes.
Result<std::span<const Hash128>> StoredRangeReader::PageHashes(std::uint64_t leaf) {
  using Hashes = std::span<const Hash128>;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool paged, HasPageHashes());
  if (!paged) return Hashes();
  const std::uint64_t first = leaf / kLeavesPaged * kLeavesPaged;
  if (!pages_ || first_paged_ != first) {
    const std::uint64_t at =
        record_.first_leaf + leaves_->leaves.size() + 1 + first * kPageBlockHashes;
    const std::uint64_t key = CacheKey(at);
    pages_ = files_.pages.Get(key);
    first_paged_ = first;
    if (!pages_ || pages_->root != record_.hash || pages_->length != record_.length) {
      pages_ = ReadPageBlocks(first, at);
      if (!pages_->good.empty()) {
        files_.pages.Put(key, pages_, pages_->hashes.size() * sizeof(Hash128) + 64);
      }
    }
  }
  if (leaf - first >= pages_->good.size() || !pages_->good[leaf - first]) return Hashes();
  return Hashes(pages_->hashes)
      .subspan((leaf - first) * kPageBlockHashes, PagesOfLeaf(leaf, record_.length));
}

// The result has no good page hashes if they cannot be read.
std::shared_ptr<const PageBlocks> StoredRangeReader::ReadPageBlocks(std::uint64_t first,
                                                                    std::uint64_t at) {
  auto blocks = std::make_shared<PageBlocks>();
  blocks->root = record_.hash;
  blocks->length = record_.length;
  const std::uint64_t end = std::min(first + kLeavesPaged, std::uint64_t{leaves_->leaves.size()});
  const std::uint64_t count =
      (end - first - 1) * kPageBlockHashes + PagesOfLeaf(end - 1, record_.length) + 1;
  const Result<std::shared_ptr<OpenDataFile>> manifest = OpenManifest();
  if (!manifest.ok()) return blocks;
  Result<std::vector<Hash128>> hashes = ReadManifestLeaves(manifest.value()->file(), at, count);
  if (!hashes.ok()) return blocks;
  blocks->hashes = std::move(hashes).value();
  for (std::uint64_t leaf = first; leaf < end; ++leaf) {
    const std::span block = std::span(blocks->hashes).subspan((leaf - first) * kPageBlockHashes);
    const std::uint64_t pages = PagesOfLeaf(leaf, record_.length);
    blocks->good.push_back(PageBlockCheck(leaves_->leaves[leaf], block.first(pages)) ==
                           block[pages]);
  }
  return blocks;
}

Result<ByteRange> StoredRangeReader::ProvableRange(ByteRange want) {
  const std::uint64_t leaf = want.begin / kLeafBytes;
  const ByteRange whole = LeafRange(leaf);
  const ByteRange pages{
      want.begin / kHashPageBytes * kHashPageBytes,
      std::min((want.end + kHashPageBytes - 1) / kHashPageBytes * kHashPageBytes, whole.end)};
  if (pages.size() == whole.size()) return whole;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const Hash128> hashes, PageHashes(leaf));
  return hashes.empty() ? whole : pages;
}

Status StoredRangeReader::ReadProvableRange(ByteRange range, std::byte* out) {
  const std::uint64_t leaf = range.begin / kLeafBytes;
  const ByteRange whole = LeafRange(leaf);
  if (range.begin == whole.begin && range.end == whole.end) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadAt(range.begin, out, range.size()));
    return CheckLeaf(leaf, Xxh3(out, range.size()));
  }
  TENSORMOUNT_RETURN_IF_ERROR(ReadAt(range.begin, out, range.size(), true));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const Hash128> hashes, PageHashes(leaf));
  for (std::uint64_t at = range.begin; at < range.end; at += kHashPageBytes) {
    const std::uint64_t bytes = std::min(kHashPageBytes, range.end - at);
    if (hashes[(at - whole.begin) / kHashPageBytes] == Xxh3(out + (at - range.begin), bytes))
      continue;
    // If the whole leaf matches its hash, the page hash was wrong and the bytes are right.
    std::vector<std::byte> all(whole.size());
    if (!ReadAt(whole.begin, all.data(), all.size()).ok() ||
        !CheckLeaf(leaf, Xxh3(all.data(), all.size())).ok()) {
      return Damage(at, "checksum mismatch");
    }
    std::memcpy(out, all.data() + (range.begin - whole.begin), range.size());
    return Status();
  }
  if (once_ != nullptr)
    once_->AddProven({record_.offset + range.begin, record_.offset + range.end});
  return Status();
}

Status StoredRangeReader::CheckRun(std::uint64_t at, const std::byte* data, std::uint64_t size) {
  ByteRange checked;
  TENSORMOUNT_RETURN_IF_ERROR(CheckLeaves(at, data, size, &checked));
  stats_.bytes_by_leaf += checked.size();
  return Status();
}

// With kExtendLeaves, a leaf of which only a part is wanted (at the begin or end of the run) is
// read into scratch_, as a whole or by pages. All other leaves are read to their destination and
// hashed there while in cache.
Status StoredRangeReader::ReadRun(std::uint64_t at, std::byte* out, std::uint64_t size,
                                  const BlockCallback& arrived) {
  const std::uint64_t end = at + size;
  const std::uint64_t most = IsFar() ? kFarBlockBytes : kPartBlockBytes;
  while (at < end) {
    std::uint64_t block = std::min(end, at / most * most + most) - at;
    if (verify_ == ReadVerify::kExtendLeaves) {
      const std::uint64_t leaf = at / kLeafBytes;
      const std::uint64_t leaf_end = std::min(LeafBegin(leaf + 1), record_.length);
      if (LeafBegin(leaf) != at || leaf_end > end) {  // Only part of this leaf is wanted.
        block = std::min(leaf_end, end) - at;
        TENSORMOUNT_ASSIGN_OR_RETURN(const ByteRange proof, ProvableRange({at, at + block}));
        if (scratch_.size() < kLeafBytes) scratch_.resize(kLeafBytes);
        TENSORMOUNT_RETURN_IF_ERROR(ReadProvableRange(proof, scratch_.data()));
        std::memcpy(out, scratch_.data() + (at - proof.begin), block);
        stats_.bytes_by_leaf += block;
        if (arrived) arrived(at, out, block);
        at += block;
        out += block;
        continue;
      }
      // A partial leaf at the end of the run is left to the branch above.
      if (at + block == end && end != record_.length) block -= end % kLeafBytes;
    }
    TENSORMOUNT_RETURN_IF_ERROR(ReadAt(at, out, block));
    TENSORMOUNT_RETURN_IF_ERROR(CheckRun(at, out, block));
    if (arrived) arrived(at, out, block);
    at += block;
    out += block;
  }
  return Status();
}

// Serves runs at rising offsets of a stored range from blocks of the range.
class StoredRangeReader::WindowReader {
 public:
  // No run ends behind `end`, an offset in the range. `dense`: bytes between the runs are read too.
  WindowReader(StoredRangeReader& reader, std::uint64_t end, bool dense)
      : reader_(reader),
        end_(end),
        dense_(dense),
        window_(dense && reader.IsFar() ? kFarWindowBytes : kPartBlockBytes) {}

  Status Copy(std::uint64_t at, std::byte* out, std::uint64_t size) {
    while (size > 0) {
      if (at < begin_ || at >= begin_ + bytes_) TENSORMOUNT_RETURN_IF_ERROR(Load(at, size));
      const std::uint64_t n = std::min(size, begin_ + bytes_ - at);
      std::memcpy(out, buffer_.data() + (at - begin_), n);
      reader_.stats_.bytes_by_leaf += checked_.Intersect({at, at + n}).size();
      at += n;
      out += n;
      size -= n;
    }
    return Status();
  }

 private:
  Status Load(std::uint64_t at, std::uint64_t size) {
    std::uint64_t stop = 0;
    const bool proves = reader_.verify_ == ReadVerify::kExtendLeaves;
    if (proves && !dense_) {
      const std::uint64_t leaf_end = LeafBegin(at / kLeafBytes + 1);
      TENSORMOUNT_ASSIGN_OR_RETURN(const ByteRange proof,
                                   reader_.ProvableRange({at, std::min(at + size, leaf_end)}));
      begin_ = proof.begin;
      stop = proof.end;
    } else if (proves) {
      begin_ = at / kLeafBytes * kLeafBytes;
      stop = begin_ + window_;
      stop = std::min(stop, (end_ + kLeafBytes - 1) / kLeafBytes * kLeafBytes);
      stop = std::min(stop, reader_.record_.length);
    } else {
      begin_ = at;
      stop = dense_ ? std::min(end_, at / kLeafBytes * kLeafBytes + window_)
                    : at + std::min(size, kPartBlockBytes);
    }
    bytes_ = stop - begin_;
    if (buffer_.size() < bytes_) {
      buffer_.resize(dense_ ? std::max(bytes_, std::min(end_, window_)) : bytes_);
    }
    const std::uint64_t want = bytes_;
    bytes_ = 0;  // After a failed read the window is empty.
    // One window behind another: a server would be idle while this one is hashed and copied.
    for (std::uint64_t w = 0; dense_ && window_ == kFarWindowBytes && w <= kFarWindowsAhead; ++w) {
      const std::uint64_t next = begin_ + w * window_;
      if (next >= end_) break;
      TENSORMOUNT_RETURN_IF_ERROR(reader_.OpenFile());
      reader_.file_->file().StartReading(reader_.record_.offset + next,
                                         std::min(window_, end_ - next));
    }
    if (proves && !dense_) {
      checked_ = {begin_, stop};
      TENSORMOUNT_RETURN_IF_ERROR(reader_.ReadProvableRange(checked_, buffer_.data()));
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(reader_.ReadAt(begin_, buffer_.data(), want));
      TENSORMOUNT_RETURN_IF_ERROR(reader_.CheckLeaves(begin_, buffer_.data(), want, &checked_));
    }
    bytes_ = want;
    return Status();
  }

  StoredRangeReader& reader_;
  const std::uint64_t end_;
  const bool dense_;
  const std::uint64_t window_;
  std::vector<std::byte> buffer_;
  std::uint64_t begin_ = 0;
  std::uint64_t bytes_ = 0;
  ByteRange checked_;
};

// Reads runs without gaps between them, up to 1,024 with one preadv. Nothing is checked.
bool StoredRangeReader::ReadScattered(const StridedCopy& copy, std::byte* base) {
  if (!OpenFile().ok()) return false;
  std::vector<File::Buffer> buffers;
  buffers.reserve(std::min<std::uint64_t>(copy.runs(), kMaxScatter));
  auto at = static_cast<std::uint64_t>(copy.src_offset);
  std::uint64_t bytes = 0;
  bool good = true;
  const auto flush = [&] {
    const Result<std::size_t> got = file_->file().ReadVectorAt(at, buffers);
    good = got.ok() && got.value() == bytes;
    at += bytes;
    stats_.bytes_read += bytes;
    bytes = 0;
    buffers.clear();
  };
  copy.ForEachRun([&](std::int64_t, std::int64_t dst, std::uint64_t size) {
    if (!good) return;
    buffers.push_back({base + dst, static_cast<std::size_t>(size)});
    bytes += size;
    if (buffers.size() == kMaxScatter) flush();
  });
  if (good && !buffers.empty()) flush();
  return good;
}

Result<bool> StoredRangeReader::PrefersMmap(const StridedCopy& copy) {
  if (!HasAscendingRuns(copy)) return false;
  if (!TouchesEach(copy, kLeafBytes)) return false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool by_page, CanSkipPages(copy));
  return !by_page;
}

// Uses the first of these ways that is possible: a vectored read, a window that moves forward,
// slabs.
Status StoredRangeReader::ReadStrided(const StridedCopy& copy, std::byte* base) {
  if (copy.run == 0) return Status();
  if (!HasAscendingRuns(copy)) return ReadTransposed(SortedByStep(copy), base);
  const auto first = static_cast<std::uint64_t>(copy.src_offset) - record_.offset;
  const std::uint64_t span = copy.src_span();
  // If nothing is checked and the runs are contiguous in the file, they are read directly to their
  // destination. After a failure the code below reads again, for its error message.
  if (verify_ == ReadVerify::kOff && span == copy.bytes() && copy.run >= kScatterRun &&
      ReadScattered(copy, base)) {
    return Status();
  }
  // Bytes between the runs are read too if they are few, or if leaves are read as a whole and the
  // runs touch every leaf; but not if page hashes save reads.
  bool dense = span - copy.bytes() <= copy.bytes() ||
               (verify_ == ReadVerify::kExtendLeaves && TouchesEach(copy, kLeafBytes));
  if (dense && verify_ == ReadVerify::kExtendLeaves) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool by_page, CanSkipPages(copy));
    dense = !by_page;
  }
  WindowReader window(*this, first + span, dense);
  // If not `dense`, runs are announced to storage together before the first of them is read, unless
  // the first is in memory.
  struct Run {
    std::uint64_t at;
    std::byte* out;
    std::uint64_t size;
  };
  std::vector<Run> ahead;
  const std::size_t most_ahead = IsFar() ? kFarRunsAhead : kRunsAhead;
  const auto copy_ahead = [&]() -> Status {
    if (ahead.size() > 1 && !IsCached(ahead.front().at)) {
      const std::uint64_t gap = IsFar() ? kFarGapBytes : 0;
      for (std::size_t i = 0; i < ahead.size();) {
        const std::uint64_t begin = ahead[i].at;
        std::uint64_t stop = begin + ahead[i].size;
        while (++i < ahead.size() && gap > 0 && ahead[i].at <= stop + gap &&
               ahead[i].at + ahead[i].size <= begin + kFarWindowBytes) {
          stop = ahead[i].at + ahead[i].size;
        }
        TENSORMOUNT_RETURN_IF_ERROR(StartReading(begin, stop - begin));
      }
    }
    for (const Run& run : ahead) {
      TENSORMOUNT_RETURN_IF_ERROR(window.Copy(run.at, run.out, run.size));
    }
    ahead.clear();
    return Status();
  };
  Status status;
  copy.ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
    if (!status.ok()) return;
    const auto at = static_cast<std::uint64_t>(src) - record_.offset;
    if (dense) {
      status = window.Copy(at, base + dst, size);
      return;
    }
    ahead.push_back({at, base + dst, size});
    if (ahead.size() == most_ahead) status = copy_ahead();
  });
  TENSORMOUNT_RETURN_IF_ERROR(status);
  return copy_ahead();
}

bool StoredRangeReader::IsFar() const { return !checkpoint_.fs().Can(Ability::kKernelFiles); }

bool StoredRangeReader::IsCached(std::uint64_t at) {
  std::byte byte;
  // If the file system does not know which bytes are in memory, the result is false: an unneeded
  // announcement of a read costs less than a wait for each run.
  return OpenFile().ok() && file_->file().ReadCached(record_.offset + at, &byte, 1) == 1;
}

// With kExtendLeaves, only the first leaf of a run (or its pages) is announced, because the rest is
// read immediately after it.
Status StoredRangeReader::StartReading(std::uint64_t at, std::uint64_t size) {
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  ByteRange want{at, at + size};
  const std::uint64_t leaf_end = LeafBegin(at / kLeafBytes + 1);
  if (verify_ == ReadVerify::kExtendLeaves && want.end > leaf_end && IsFar()) {
    // Runs that were joined, of which each proves its leaves.
    const std::uint64_t last = (want.end + kLeafBytes - 1) / kLeafBytes;
    want = {LeafBegin(at / kLeafBytes), std::min(LeafBegin(last), record_.length)};
  } else if (verify_ == ReadVerify::kExtendLeaves) {
    TENSORMOUNT_ASSIGN_OR_RETURN(want, ProvableRange({at, std::min(want.end, leaf_end)}));
  }
  file_->file().StartReading(record_.offset + want.begin, want.size());
  return Status();
}

Result<bool> StoredRangeReader::CanSkipPages(const StridedCopy& copy) {
  return TouchesEach(copy, kHashPageBytes) ? Result<bool>(false) : HasPageHashes();
}

// Reads the whole span of a slab once and copies the runs from memory. The span is at most a block.
Status StoredRangeReader::ReadSlab(const StridedCopy& slab, std::byte* base) {
  const std::uint64_t span = slab.src_span();
  if (slab_.size() < span) slab_.resize(span);
  const std::uint64_t by_leaf = stats_.bytes_by_leaf;
  TENSORMOUNT_RETURN_IF_ERROR(ReadRun(static_cast<std::uint64_t>(slab.src_offset) - record_.offset,
                                      slab_.data(), span, {}));
  // bytes_by_leaf counts only the bytes of the runs, and only if the whole span was proved.
  const bool all = stats_.bytes_by_leaf - by_leaf == span;
  stats_.bytes_by_leaf = by_leaf + (all ? slab.bytes() : 0);
  StridedCopy from_memory = slab;
  from_memory.src_offset = 0;
  ExecuteCopy(from_memory, slab_.data(), base);
  return Status();
}

Status StoredRangeReader::ReadTransposed(const StridedCopy& copy, std::byte* base) {
  return ForEachBlock(copy, kPartBlockBytes, [&](const StridedCopy& part) {
    if (part.src_span() <= kPartBlockBytes) return ReadSlab(part, base);
    // The part is one long run.
    return ReadRun(static_cast<std::uint64_t>(part.src_offset) - record_.offset,
                   base + part.dst_offset, part.run, {});
  });
}

ByteRange StoredRangeReader::LeavesOf(const StridedCopy& copy) const {
  const auto first = static_cast<std::uint64_t>(copy.src_offset) - record_.offset;
  const std::uint64_t last = first + copy.src_span() - 1;
  return {record_.offset + LeafBegin(first / kLeafBytes),
          record_.offset + std::min(LeafBegin(last / kLeafBytes + 1), record_.length)};
}

Status StoredRangeReader::ReadMapped(const StridedCopy& copy, const std::byte* map,
                                     std::byte* base) {
  const ByteRange leaves = LeavesOf(copy);
  const std::byte* const range = map + record_.offset;
  std::uint64_t leaf = (leaves.begin - record_.offset) / kLeafBytes;  // Next leaf to hash.
  // RunOnMapping may leave its function by a jump, so that function must not own memory. Hashes are
  // compared outside of it.
  const auto hash_until = [&](std::uint64_t end) -> Status {
    for (; LeafBegin(leaf) < end; ++leaf) {
      const std::uint64_t begin = LeafBegin(leaf);
      const std::uint64_t bytes = std::min(kLeafBytes, record_.length - begin);
      if (begin + bytes > end) break;
      Hash128 found;
      if (!RunOnMapping([&] { found = Xxh3(range + begin, bytes); })) {
        return MappingError(begin, bytes);
      }
      TENSORMOUNT_RETURN_IF_ERROR(CheckLeaf(leaf, found));
    }
    return {};
  };
  TENSORMOUNT_RETURN_IF_ERROR(ForEachBlock(copy, kMappedBlockBytes, [&](const StridedCopy& block) {
    const auto at = static_cast<std::uint64_t>(block.src_offset) - record_.offset;
    const std::uint64_t span = block.src_span();
    const std::uint64_t whole = copy.bytes();
    if (!RunOnMapping([&] { ExecuteCopy(block, map, base, whole); })) return MappingError(at, span);
    return hash_until(at + span);
  }));
  TENSORMOUNT_RETURN_IF_ERROR(hash_until(leaves.end - record_.offset));
  stats_.bytes_read += leaves.size();
  stats_.bytes_by_leaf += copy.bytes();
  return Status();
}

// Sealed files of a store are never truncated by tensormount. A foreign file may be truncated at
// any time by anybody who may write it.
Result<const std::byte*> StoredRangeReader::MappingTo(std::uint64_t end) {
  const FileRecord& record = checkpoint_.index().files()[record_.file];
  if (record.placement == Placement::kForeign && !MappingGuarded()) return nullptr;
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  return file_->MappingTo(end);
}

// Reads page by page: a read returns an error where an access to the mapping would raise SIGBUS.
Status StoredRangeReader::MappingError(std::uint64_t at, std::uint64_t size) {
  constexpr std::uint64_t kBlock = 4096;
  char block[kBlock];
  for (const std::uint64_t end = at + size; at < end;) {
    const std::uint64_t n = std::min(kBlock - (record_.offset + at) % kBlock, end - at);
    TENSORMOUNT_RETURN_IF_ERROR(ReadAt(at, block, n));
    at += n;
  }
  return Damage(at, "a page of the mapped file could not be read, but can be read now");
}

}  // namespace tensormount
