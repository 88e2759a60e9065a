// SPDX-License-Identifier: Apache-2.0
// PartReader of region_reader.h: bytes of one stored range, with the proof of the leaves that they
// lie in. Apart from region_reader.cc because it knows one chunk and its hashes, and nothing of
// plans.
//
// Blocks are a mebibyte: hashed while they are in the second-level cache. Runs that rise in the
// file are served from one window that moves forward; those that do not (a transposed chunk) by
// slabs that are copied from memory, so that the file is read once in either case.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/checked.h"
#include "base/mapping.h"
#include "index/read/rebuild.h"
#include "index/read/region_reader.h"
#include "index/records/manifest.h"
#include "shard/leaf_hash.h"
#include "shard/page_hash.h"

namespace tensormount {
namespace {

// Shorter runs cost more as parts of one read than as copies out of a buffer.
constexpr std::uint64_t kScatterRun = 512;
constexpr std::size_t kMaxScatter = 1024;  // What the kernel takes in one call.

// What stays in the second-level cache between the read and the hash.
constexpr std::uint64_t kPartBlockBytes = std::uint64_t{1} << 20;
static_assert(kPartBlockBytes % kLeafBytes == 0);

std::uint64_t LeafBegin(std::uint64_t leaf) { return leaf * kLeafBytes; }

// What ReadMapped copies before it hashes: both meet it in the second-level cache.
constexpr std::uint64_t kMappedBlockBytes = 4 * kLeafBytes;

// Whether every run begins where the one before it ends, or later.
// From the innermost axis out: a step must not be smaller than what the axes within span.
bool Rises(const StridedCopy& copy) {
  auto end = static_cast<std::int64_t>(copy.run);
  for (int a = copy.axes - 1; a >= 0; --a) {
    const StridedCopy::Axis& axis = copy.axis[static_cast<std::size_t>(a)];
    if (axis.src < end) return false;
    end += (axis.count - 1) * axis.src;
  }
  return true;
}

// Runs that storage is told of at once.
constexpr std::size_t kRunsAhead = 64;

// Page hashes are read for this many leaves at once: 4 KiB for a mebibyte of the range.
constexpr std::uint64_t kLeavesPaged = 16;

// Whether every leaf (page) from the first run to the last is touched, so that reading all of them
// reads nothing that need not be: no gap between runs, which rise, holds a whole one, of `bytes`.
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

// Calls fn(part) for parts of a copy that rise in the file as its axes do, each of which spans no
// more than `most` bytes of it, or is one run; as many steps of an axis at once as fit, or each by
// the axes within. At most as deep as there are axes.
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

// Order of axes does not change what is copied, only in which order; with the largest step
// outermost, parts of the outermost axis are stretches of the file.
StridedCopy ByFallingSteps(const StridedCopy& copy) {
  StridedCopy sorted = copy;
  std::ranges::stable_sort(sorted.loops(), std::ranges::greater(), &StridedCopy::Axis::src);
  return sorted;
}

}  // namespace

PartReader::PartReader(const OpenedCheckpoint& checkpoint, OpenedCheckpoint::Files& files,
                       Where where, ReadVerify verify, ProvingRead* once, ReadStats& stats)
    : checkpoint_(checkpoint),
      files_(files),
      where_(std::move(where)),
      verify_(!where_.has_hash              ? ReadVerify::kOff
              : verify == ReadVerify::kOnce ? ReadVerify::kExtendLeaves
                                            : verify),
      once_(once),
      stats_(stats) {}

std::string PartReader::Name() const {
  if (where_.tensor == nullptr) return where_.object;
  return "tensor " + where_.tensor->key() + " " + where_.region->ToString();
}

Status PartReader::About(const Status& status) const {
  ErrorFields fields{.file = checkpoint_.index().files()[where_.file].name};
  if (where_.tensor != nullptr) {
    fields.key = where_.tensor->key();
    const Box& box = where_.region->box();
    fields.box_begin.assign(box.begin().begin(), box.begin().end());
    fields.box_extent.assign(box.extent().begin(), box.extent().end());
  }
  return status.WithContext(Name()).With(fields);
}

Status PartReader::Damage(std::uint64_t at, std::string_view why) const {
  return About(Status(Code::kDataLoss, checkpoint_.index().files()[where_.file].name + ": byte " +
                                           std::to_string(where_.offset + at) + ": " +
                                           std::string(why)));
}

// kNotFound of a foreign file is data loss to whoever reads a tensor.
Status PartReader::OpenFile() {
  if (file_) return Status();
  Result<std::shared_ptr<OpenDataFile>> file = files_.Open(checkpoint_, where_.file);
  if (file.status().code() == Code::kNotFound) {
    return About(Status(Code::kDataLoss, file.status().message()));  // A foreign one.
  }
  if (!file.ok()) return About(file.status());
  file_ = std::move(file).value();
  return Status();
}

Status PartReader::ReadAt(std::uint64_t at, void* out, std::uint64_t size, bool alone) {
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  const bool ahead = !alone && size <= ReadAhead::kMostSmall && files_.ahead.on();
  Result<std::size_t> got =
      ahead ? files_.ahead.ReadAt(file_, where_.offset + at, out, size, &stats_.bytes_read)
            : file_->file().ReadAt(where_.offset + at, out, size);
  if (!got.ok()) return About(got.status());
  if (!ahead) stats_.bytes_read += got.value();
  if (got.value() != size) return Damage(at + got.value(), "the file ends here");
  return Status();
}

Result<std::shared_ptr<OpenDataFile>> PartReader::OpenManifest() {
  const std::string& name = checkpoint_.index().manifests()[where_.manifest];
  return files_.Open(JoinPath(checkpoint_.directory(), name), /*foreign=*/false, [&] {
    return OpenListedFile(files_.fs, checkpoint_.pinned_directory(), name);
  });
}

// Leaf hashes stand in the manifest of whoever wrote the range. They are read for the whole range
// at once and proved by its root, which the index has: so leaves that are damaged or exchanged
// cannot make bad bytes pass, nor page hashes, which are bound to them. Cached by where they stand,
// since a tensor is read in many calls.
Status PartReader::LoadLeaves() {
  if (leaves_) return Status();
  const std::uint64_t key = CacheKey(where_.first_leaf);
  // What the cache has is checked against this range all the same: two ranges of a damaged index
  // may claim one position.
  leaves_ = files_.leaves.Get(key);
  const std::uint64_t count = LeafCount(where_.length);
  if (leaves_ && leaves_->root == where_.hash && leaves_->length == where_.length) return Status();
  leaves_ = nullptr;
  const auto bad = [&](const Status& status) {
    return About(Status(Code::kDataLoss, "its leaf hashes: " + status.message()));
  };
  Result<std::shared_ptr<OpenDataFile>> manifest = OpenManifest();
  if (!manifest.ok()) return bad(manifest.status());
  bool paged = false;
  Result<std::vector<Hash128>> leaves =
      ReadManifestLeaves(manifest.value()->file(), where_.first_leaf, count, &paged);
  if (!leaves.ok()) return bad(leaves.status());
  if (ChunkRoot(leaves.value(), where_.length) != where_.hash) {
    return About(Status(Code::kDataLoss,
                        manifest.value()->file().path() + ": the leaf hashes do not belong to it"));
  }
  auto proven = std::make_shared<ProvenLeaves>();
  proven->root = where_.hash;
  proven->length = where_.length;
  proven->leaves = std::move(leaves).value();
  if (paged) {
    const Result<std::vector<Hash128>> mark =
        ReadManifestLeaves(manifest.value()->file(), where_.first_leaf + count, 1);
    proven->paged = mark.ok() && mark.value().front() == PagesMark(where_.hash);
  }
  leaves_ = proven;
  files_.leaves.Put(key, leaves_, count * sizeof(Hash128) + 64);
  return Status();
}

// A range of one leaf needs no manifest: its root is made from that leaf alone.
Status PartReader::CheckLeaf(std::uint64_t leaf, const Hash128& hash) {
  bool equal = false;
  if (where_.length <= kLeafBytes) {
    equal = ChunkRoot({&hash, 1}, where_.length) == where_.hash;
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(LoadLeaves());
    equal = leaves_->leaves[leaf] == hash;
  }
  if (!equal) return Damage(LeafBegin(leaf), "checksum differs");
  if (once_ != nullptr) {
    const ByteRange good = LeafRange(leaf);
    once_->Found({where_.offset + good.begin, where_.offset + good.end});
  }
  return Status();
}

// Leaves that are only partly in memory are left unchecked here; the last leaf of a range may be
// short.
Status PartReader::CheckLeaves(std::uint64_t at, const std::byte* data, std::uint64_t size,
                               ByteRange* checked) {
  *checked = {at, at};
  if (verify_ == ReadVerify::kOff) return Status();
  std::uint64_t leaf = at / kLeafBytes + (at % kLeafBytes != 0);
  checked->begin = checked->end = LeafBegin(leaf);
  for (; LeafBegin(leaf) < at + size; ++leaf) {
    const std::uint64_t begin = LeafBegin(leaf);
    const std::uint64_t bytes = std::min(kLeafBytes, where_.length - begin);
    if (begin + bytes > at + size) break;
    TENSORMOUNT_RETURN_IF_ERROR(CheckLeaf(leaf, Xxh3(data + (begin - at), bytes)));
    checked->end = begin + bytes;
  }
  return Status();
}

ByteRange PartReader::LeafRange(std::uint64_t leaf) const {
  return {LeafBegin(leaf), std::min(LeafBegin(leaf + 1), where_.length)};
}

// One writer's leaf sections never reach 2^40 hashes (2^56 bytes of data).
std::uint64_t PartReader::CacheKey(std::uint64_t hash) const {
  return (std::uint64_t{where_.manifest} << 40) ^ hash;
}

Result<bool> PartReader::Paged() {
  if (verify_ == ReadVerify::kOff || where_.length <= kLeafBytes) return false;
  TENSORMOUNT_RETURN_IF_ERROR(LoadLeaves());
  return leaves_->paged;
}

// What cannot be had, or is not what its check says, is as if there were none: the leaf as a whole
// proves as much.
Result<std::span<const Hash128>> PartReader::PageHashes(std::uint64_t leaf) {
  using Hashes = std::span<const Hash128>;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool paged, Paged());
  if (!paged) return Hashes();
  const std::uint64_t first = leaf / kLeavesPaged * kLeavesPaged;
  if (!pages_ || first_paged_ != first) {
    const std::uint64_t at =
        where_.first_leaf + leaves_->leaves.size() + 1 + first * kPageBlockHashes;
    const std::uint64_t key = CacheKey(at);
    pages_ = files_.pages.Get(key);
    first_paged_ = first;
    if (!pages_ || pages_->root != where_.hash || pages_->length != where_.length) {
      pages_ = ReadPageBlocks(first, at);
      if (!pages_->good.empty()) {
        files_.pages.Put(key, pages_, pages_->hashes.size() * sizeof(Hash128) + 64);
      }
    }
  }
  if (leaf - first >= pages_->good.size() || !pages_->good[leaf - first]) return Hashes();
  return Hashes(pages_->hashes)
      .subspan((leaf - first) * kPageBlockHashes, PagesOfLeaf(leaf, where_.length));
}

// Empty where they cannot be read.
std::shared_ptr<const PageBlocks> PartReader::ReadPageBlocks(std::uint64_t first,
                                                             std::uint64_t at) {
  auto blocks = std::make_shared<PageBlocks>();
  blocks->root = where_.hash;
  blocks->length = where_.length;
  const std::uint64_t end = std::min(first + kLeavesPaged, std::uint64_t{leaves_->leaves.size()});
  const std::uint64_t count =
      (end - first - 1) * kPageBlockHashes + PagesOfLeaf(end - 1, where_.length) + 1;
  const Result<std::shared_ptr<OpenDataFile>> manifest = OpenManifest();
  if (!manifest.ok()) return blocks;
  Result<std::vector<Hash128>> hashes = ReadManifestLeaves(manifest.value()->file(), at, count);
  if (!hashes.ok()) return blocks;
  blocks->hashes = std::move(hashes).value();
  for (std::uint64_t leaf = first; leaf < end; ++leaf) {
    const std::span block = std::span(blocks->hashes).subspan((leaf - first) * kPageBlockHashes);
    const std::uint64_t pages = PagesOfLeaf(leaf, where_.length);
    blocks->good.push_back(PageBlockCheck(leaves_->leaves[leaf], block.first(pages)) ==
                           block[pages]);
  }
  return blocks;
}

Result<ByteRange> PartReader::Provable(ByteRange want) {
  const std::uint64_t leaf = want.begin / kLeafBytes;
  const ByteRange whole = LeafRange(leaf);
  const ByteRange pages{
      want.begin / kHashPageBytes * kHashPageBytes,
      std::min((want.end + kHashPageBytes - 1) / kHashPageBytes * kHashPageBytes, whole.end)};
  if (pages.size() == whole.size()) return whole;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const Hash128> hashes, PageHashes(leaf));
  return hashes.empty() ? whole : pages;
}

Status PartReader::ReadProvable(ByteRange range, std::byte* out) {
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
    // Of a writer that got a page hash wrong the leaf has the last word.
    std::vector<std::byte> all(whole.size());
    if (!ReadAt(whole.begin, all.data(), all.size()).ok() ||
        !CheckLeaf(leaf, Xxh3(all.data(), all.size())).ok()) {
      return Damage(at, "checksum differs");
    }
    std::memcpy(out, all.data() + (range.begin - whole.begin), range.size());
    return Status();
  }
  if (once_ != nullptr) once_->Found({where_.offset + range.begin, where_.offset + range.end});
  return Status();
}

Status PartReader::CheckRun(std::uint64_t at, const std::byte* data, std::uint64_t size) {
  ByteRange checked;
  TENSORMOUNT_RETURN_IF_ERROR(CheckLeaves(at, data, size, &checked));
  stats_.bytes_by_leaf += checked.size();
  return Status();
}

// With kExtendLeaves a leaf of which only a part is wanted is read into scratch_, whole or by its
// pages, at the begin and at the end of the run; everything between is read to where it belongs,
// and hashed there while it is in cache.
Status PartReader::ReadRun(std::uint64_t at, std::byte* out, std::uint64_t size,
                           const Arrived& arrived) {
  const std::uint64_t end = at + size;
  while (at < end) {
    std::uint64_t block =
        std::min(end, at / kPartBlockBytes * kPartBlockBytes + kPartBlockBytes) - at;
    if (verify_ == ReadVerify::kExtendLeaves) {
      const std::uint64_t leaf = at / kLeafBytes;
      const std::uint64_t leaf_end = std::min(LeafBegin(leaf + 1), where_.length);
      if (LeafBegin(leaf) != at || leaf_end > end) {  // Only a part of this leaf is wanted.
        block = std::min(leaf_end, end) - at;
        TENSORMOUNT_ASSIGN_OR_RETURN(const ByteRange proof, Provable({at, at + block}));
        if (scratch_.size() < kLeafBytes) scratch_.resize(kLeafBytes);
        TENSORMOUNT_RETURN_IF_ERROR(ReadProvable(proof, scratch_.data()));
        std::memcpy(out, scratch_.data() + (at - proof.begin), block);
        stats_.bytes_by_leaf += block;
        if (arrived) arrived(at, out, block);
        at += block;
        out += block;
        continue;
      }
      // Leave a part of a leaf at the end to the branch above.
      if (at + block == end && end != where_.length) block -= end % kLeafBytes;
    }
    TENSORMOUNT_RETURN_IF_ERROR(ReadAt(at, out, block));
    TENSORMOUNT_RETURN_IF_ERROR(CheckRun(at, out, block));
    if (arrived) arrived(at, out, block);
    at += block;
    out += block;
  }
  return Status();
}

// Serves runs at rising positions of a stored range from blocks of it.
class PartReader::WindowReader {
 public:
  // All runs lie in [at, end) of the range; `dense`: most of what lies between is wanted too.
  WindowReader(PartReader& reader, std::uint64_t end, bool dense)
      : reader_(reader), end_(end), dense_(dense) {}

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
                                   reader_.Provable({at, std::min(at + size, leaf_end)}));
      begin_ = proof.begin;
      stop = proof.end;
    } else if (proves) {
      begin_ = at / kLeafBytes * kLeafBytes;
      stop = begin_ + kPartBlockBytes;
      stop = std::min(stop, (end_ + kLeafBytes - 1) / kLeafBytes * kLeafBytes);
      stop = std::min(stop, reader_.where_.length);
    } else {
      begin_ = at;
      stop = dense_ ? std::min(end_, at / kLeafBytes * kLeafBytes + kPartBlockBytes)
                    : at + std::min(size, kPartBlockBytes);
    }
    bytes_ = stop - begin_;
    if (buffer_.size() < bytes_) {
      buffer_.resize(dense_ ? std::max(bytes_, std::min(end_, kPartBlockBytes)) : bytes_);
    }
    const std::uint64_t want = bytes_;
    bytes_ = 0;  // Nothing is there where the read fails.
    if (proves && !dense_) {
      checked_ = {begin_, stop};
      TENSORMOUNT_RETURN_IF_ERROR(reader_.ReadProvable(checked_, buffer_.data()));
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(reader_.ReadAt(begin_, buffer_.data(), want));
      TENSORMOUNT_RETURN_IF_ERROR(reader_.CheckLeaves(begin_, buffer_.data(), want, &checked_));
    }
    bytes_ = want;
    return Status();
  }

  PartReader& reader_;
  const std::uint64_t end_;
  const bool dense_;
  std::vector<std::byte> buffer_;
  std::uint64_t begin_ = 0;
  std::uint64_t bytes_ = 0;
  ByteRange checked_;
};

// No hash and no gap: one preadv for up to 1,024 runs.
bool PartReader::ReadScattered(const StridedCopy& copy, std::byte* base) {
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

Result<bool> PartReader::MapsWell(const StridedCopy& copy) {
  if (!Rises(copy)) return false;
  if (!TouchesEach(copy, kLeafBytes)) return false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool by_page, SparesPages(copy));
  return !by_page;
}

// Choices, from best to worst: vectored read, window that moves forward, slabs.
Status PartReader::ReadStrided(const StridedCopy& copy, std::byte* base) {
  if (copy.run == 0) return Status();
  if (!Rises(copy)) return ReadTransposed(ByFallingSteps(copy), base);
  const auto first = static_cast<std::uint64_t>(copy.src_offset) - where_.offset;
  const std::uint64_t span = copy.src_span();
  // One stretch of the file and nothing to check on the way: straight to where its runs belong.
  // What fails is read again below, where it is worded.
  if (verify_ == ReadVerify::kOff && span == copy.bytes() && copy.run >= kScatterRun &&
      ReadScattered(copy, base)) {
    return Status();
  }
  // Reading what lies between is worth it only where little does, or leaves want it anyway, and no
  // page hashes prove what is wanted without it.
  bool dense = span - copy.bytes() <= copy.bytes() ||
               (verify_ == ReadVerify::kExtendLeaves && TouchesEach(copy, kLeafBytes));
  if (dense && verify_ == ReadVerify::kExtendLeaves) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool by_page, SparesPages(copy));
    dense = !by_page;
  }
  WindowReader window(*this, first + span, dense);
  // Where they are not in memory, storage is told of some runs before the first is waited for.
  struct Run {
    std::uint64_t at;
    std::byte* out;
    std::uint64_t size;
  };
  std::vector<Run> ahead;
  const auto copy_ahead = [&]() -> Status {
    if (ahead.size() > 1 && !IsCached(ahead.front().at)) {
      for (const Run& run : ahead) TENSORMOUNT_RETURN_IF_ERROR(StartReading(run.at, run.size));
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
    const auto at = static_cast<std::uint64_t>(src) - where_.offset;
    if (dense) {
      status = window.Copy(at, base + dst, size);
      return;
    }
    ahead.push_back({at, base + dst, size});
    if (ahead.size() == kRunsAhead) status = copy_ahead();
  });
  TENSORMOUNT_RETURN_IF_ERROR(status);
  return copy_ahead();
}

bool PartReader::IsCached(std::uint64_t at) {
  std::byte byte;
  // Where nobody knows, a hint too much costs less than a wait for each run.
  return OpenFile().ok() && file_->file().ReadCached(where_.offset + at, &byte, 1) == 1;
}

// Of a run that goes on over several leaves only what proves its first one: the rest follows it.
Status PartReader::StartReading(std::uint64_t at, std::uint64_t size) {
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  ByteRange want{at, at + size};
  if (verify_ == ReadVerify::kExtendLeaves) {
    const std::uint64_t leaf_end = LeafBegin(at / kLeafBytes + 1);
    TENSORMOUNT_ASSIGN_OR_RETURN(want, Provable({at, std::min(at + size, leaf_end)}));
  }
  file_->file().StartReading(where_.offset + want.begin, want.size());
  return Status();
}

Result<bool> PartReader::SparesPages(const StridedCopy& copy) {
  return TouchesEach(copy, kHashPageBytes) ? Result<bool>(false) : Paged();
}

// Reads the whole span once and copies out of it; the span is at most a block.
Status PartReader::ReadSlab(const StridedCopy& slab, std::byte* base) {
  const std::uint64_t span = slab.src_span();
  if (slab_.size() < span) slab_.resize(span);
  const std::uint64_t by_leaf = stats_.bytes_by_leaf;
  TENSORMOUNT_RETURN_IF_ERROR(
      ReadRun(static_cast<std::uint64_t>(slab.src_offset) - where_.offset, slab_.data(), span, {}));
  // Of the wanted bytes, and never more than were proved.
  const bool all = stats_.bytes_by_leaf - by_leaf == span;
  stats_.bytes_by_leaf = by_leaf + (all ? slab.bytes() : 0);
  StridedCopy from_memory = slab;
  from_memory.src_offset = 0;
  ExecuteCopy(from_memory, slab_.data(), base);
  return Status();
}

Status PartReader::ReadTransposed(const StridedCopy& copy, std::byte* base) {
  return ForEachBlock(copy, kPartBlockBytes, [&](const StridedCopy& part) {
    if (part.src_span() <= kPartBlockBytes) return ReadSlab(part, base);
    return ReadRun(static_cast<std::uint64_t>(part.src_offset) - where_.offset,  // One long run.
                   base + part.dst_offset, part.run, {});
  });
}

ByteRange PartReader::LeavesOf(const StridedCopy& copy) const {
  const auto first = static_cast<std::uint64_t>(copy.src_offset) - where_.offset;
  const std::uint64_t last = first + copy.src_span() - 1;
  return {where_.offset + LeafBegin(first / kLeafBytes),
          where_.offset + std::min(LeafBegin(last / kLeafBytes + 1), where_.length)};
}

Status PartReader::ReadMapped(const StridedCopy& copy, const std::byte* map, std::byte* base) {
  const ByteRange leaves = LeavesOf(copy);
  const std::byte* const range = map + where_.offset;
  std::uint64_t leaf = (leaves.begin - where_.offset) / kLeafBytes;  // The next to be hashed.
  // What is left by a jump owns nothing: hashes are compared outside.
  const auto hash_until = [&](std::uint64_t end) -> Status {
    for (; LeafBegin(leaf) < end; ++leaf) {
      const std::uint64_t begin = LeafBegin(leaf);
      const std::uint64_t bytes = std::min(kLeafBytes, where_.length - begin);
      if (begin + bytes > end) break;
      Hash128 found;
      if (!RunOnMapping([&] { found = Xxh3(range + begin, bytes); })) {
        return WhyNotThere(begin, bytes);
      }
      TENSORMOUNT_RETURN_IF_ERROR(CheckLeaf(leaf, found));
    }
    return {};
  };
  TENSORMOUNT_RETURN_IF_ERROR(ForEachBlock(copy, kMappedBlockBytes, [&](const StridedCopy& block) {
    const auto at = static_cast<std::uint64_t>(block.src_offset) - where_.offset;
    const std::uint64_t span = block.src_span();
    const std::uint64_t whole = copy.bytes();
    if (!RunOnMapping([&] { ExecuteCopy(block, map, base, whole); })) return WhyNotThere(at, span);
    return hash_until(at + span);
  }));
  TENSORMOUNT_RETURN_IF_ERROR(hash_until(leaves.end - where_.offset));
  stats_.bytes_read += leaves.size();
  stats_.bytes_by_leaf += copy.bytes();
  return Status();
}

// A sealed file of ours is never truncated by us; a foreign one may be, at any time, by anybody who
// may write it.
Result<const std::byte*> PartReader::MappingTo(std::uint64_t end) {
  const FileRecord& record = checkpoint_.index().files()[where_.file];
  if (record.placement == Placement::kForeign && !MappingGuarded()) return nullptr;
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  return file_->MappingTo(end);
}

// Page by page with read(), which returns an error where a load would raise SIGBUS.
Status PartReader::WhyNotThere(std::uint64_t at, std::uint64_t size) {
  constexpr std::uint64_t kBlock = 4096;
  char block[kBlock];
  for (const std::uint64_t end = at + size; at < end;) {
    const std::uint64_t n = std::min(kBlock - (where_.offset + at) % kBlock, end - at);
    TENSORMOUNT_RETURN_IF_ERROR(ReadAt(at, block, n));
    at += n;
  }
  return Damage(at, "its mapping lost a page that can be read now");
}

}  // namespace tensormount
