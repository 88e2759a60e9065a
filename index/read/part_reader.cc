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

namespace tensormount {
namespace {

// Shorter runs cost more as pieces of one read than as copies out of a buffer.
constexpr std::uint64_t kScatterRun = 512;
constexpr std::size_t kMaxScatter = 1024;  // What the kernel takes in one call.

// What stays in the second-level cache between the read and the hash.
constexpr std::uint64_t kPieceBlockBytes = std::uint64_t{1} << 20;
static_assert(kPieceBlockBytes % kLeafBytes == 0);

std::uint64_t LeafBegin(std::uint64_t leaf) { return leaf * kLeafBytes; }

// Whether every run begins where the one before it ends, or later.
bool Rises(const StridedCopy& copy) {
  auto end = static_cast<std::int64_t>(copy.run);
  for (int a = copy.axes - 1; a >= 0; --a) {
    const auto u = static_cast<std::size_t>(a);
    if (copy.src_step[u] < end) return false;
    end += (copy.count[u] - 1) * copy.src_step[u];
  }
  return true;
}

StridedCopy ByFallingSteps(const StridedCopy& copy) {
  std::array<std::size_t, kMaxAxes> order{};
  const auto axes = static_cast<std::size_t>(copy.axes);
  for (std::size_t a = 0; a < axes; ++a) order[a] = a;
  std::stable_sort(order.begin(), order.begin() + copy.axes, [&](std::size_t a, std::size_t b) {
    return copy.src_step[a] > copy.src_step[b];
  });
  StridedCopy sorted = copy;
  for (std::size_t a = 0; a < axes; ++a) {
    sorted.count[a] = copy.count[order[a]];
    sorted.src_step[a] = copy.src_step[order[a]];
    sorted.dst_step[a] = copy.dst_step[order[a]];
  }
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

Status PartReader::Damage(std::uint64_t at, std::string_view why) const {
  return Status(Code::kDataLoss, Name() + ": " + checkpoint_.index().files()[where_.file].name +
                                     ": byte " + std::to_string(where_.offset + at) + ": " +
                                     std::string(why));
}

Status PartReader::OpenFile() {
  if (file_) return Status();
  Result<std::shared_ptr<OpenDataFile>> file = files_.Open(checkpoint_, where_.file);
  if (file.status().code() == Code::kNotFound) {
    return Status(Code::kDataLoss, Name() + ": " + file.status().message());  // A foreign one.
  }
  if (!file.ok()) return file.status().WithContext(Name());
  file_ = std::move(file).value();
  return Status();
}

Status PartReader::ReadAt(std::uint64_t at, void* out, std::uint64_t size) {
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  Result<std::size_t> got = file_->file().ReadAt(where_.offset + at, out, size);
  if (!got.ok()) return got.status().WithContext(Name());
  stats_.bytes_read += got.value();
  if (got.value() != size) return Damage(at + got.value(), "the file ends here");
  return Status();
}

Status PartReader::LoadLeaves() {
  if (leaves_) return Status();
  // One writer's leaf sections never reach 2^40 leaves (2^56 bytes of data).
  const std::uint64_t key = (std::uint64_t{where_.manifest} << 40) ^ where_.first_leaf;
  leaves_ = files_.leaves.Get(key);
  const std::uint64_t count = LeafCount(where_.length);
  if (leaves_ && leaves_->root == where_.hash && leaves_->leaves.size() == count) return Status();
  leaves_ = nullptr;
  const auto bad = [&](const Status& status) {
    return Status(Code::kDataLoss, Name() + ": its leaf hashes: " + status.message());
  };
  const std::string& name = checkpoint_.index().manifests()[where_.manifest];
  const std::string path = JoinPath(checkpoint_.directory(), name);
  Result<std::shared_ptr<OpenDataFile>> manifest = files_.Open(
      path, [&] { return OpenListedFile(files_.fs, checkpoint_.pinned_directory(), name); });
  if (!manifest.ok()) return bad(manifest.status());
  Result<std::vector<Hash128>> leaves =
      ReadManifestLeaves(manifest.value()->file(), where_.first_leaf, count);
  if (!leaves.ok()) return bad(leaves.status());
  if (ChunkRoot(leaves.value(), where_.length) != where_.hash) {
    return Status(Code::kDataLoss, Name() + ": " + path + ": the leaf hashes do not belong to it");
  }
  auto proven = std::make_shared<ProvenLeaves>();
  proven->root = where_.hash;
  proven->leaves = std::move(leaves).value();
  leaves_ = proven;
  files_.leaves.Put(key, leaves_, count * sizeof(Hash128) + 64);
  return Status();
}

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
    once_->Found(where_.offset + LeafBegin(leaf),
                 where_.offset + std::min(LeafBegin(leaf + 1), where_.length));
  }
  return Status();
}

Status PartReader::CheckLeaves(std::uint64_t at, const std::byte* data, std::uint64_t size,
                               Range* checked) {
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

Status PartReader::ReadWholeLeaf(std::uint64_t leaf) {
  const std::uint64_t begin = LeafBegin(leaf);
  const std::uint64_t bytes = std::min(kLeafBytes, where_.length - begin);
  if (scratch_.size() < kLeafBytes) scratch_.resize(kLeafBytes);
  TENSORMOUNT_RETURN_IF_ERROR(ReadAt(begin, scratch_.data(), bytes));
  return CheckLeaf(leaf, Xxh3(scratch_.data(), bytes));
}

Status PartReader::CheckRun(std::uint64_t at, const std::byte* data, std::uint64_t size) {
  Range checked;
  TENSORMOUNT_RETURN_IF_ERROR(CheckLeaves(at, data, size, &checked));
  stats_.bytes_by_leaf += checked.end - checked.begin;
  return Status();
}

Status PartReader::ReadRun(std::uint64_t at, std::byte* out, std::uint64_t size,
                           const Arrived& arrived) {
  const std::uint64_t end = at + size;
  while (at < end) {
    std::uint64_t block =
        std::min(end, at / kPieceBlockBytes * kPieceBlockBytes + kPieceBlockBytes) - at;
    if (verify_ == ReadVerify::kExtendLeaves) {
      const std::uint64_t leaf = at / kLeafBytes;
      const std::uint64_t leaf_end = std::min(LeafBegin(leaf + 1), where_.length);
      if (LeafBegin(leaf) != at || leaf_end > end) {  // Only a part of this leaf is wanted.
        TENSORMOUNT_RETURN_IF_ERROR(ReadWholeLeaf(leaf));
        block = std::min(leaf_end, end) - at;
        std::memcpy(out, scratch_.data() + (at - LeafBegin(leaf)), block);
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

// Serves runs at rising places of a piece from blocks of it.
class PartReader::WindowReader {
 public:
  // All runs lie in [at, end) of the piece; `dense`: most of what lies between is wanted too.
  WindowReader(PartReader& piece, std::uint64_t end, bool dense)
      : piece_(piece), end_(end), dense_(dense) {}

  Status Copy(std::uint64_t at, std::byte* out, std::uint64_t size) {
    while (size > 0) {
      if (at < begin_ || at >= begin_ + bytes_) TENSORMOUNT_RETURN_IF_ERROR(Load(at, size));
      const std::uint64_t n = std::min(size, begin_ + bytes_ - at);
      std::memcpy(out, buffer_.data() + (at - begin_), n);
      const std::uint64_t from = std::max(at, checked_.begin);
      const std::uint64_t to = std::min(at + n, checked_.end);
      if (from < to) piece_.stats_.bytes_by_leaf += to - from;
      at += n;
      out += n;
      size -= n;
    }
    return Status();
  }

 private:
  Status Load(std::uint64_t at, std::uint64_t size) {
    std::uint64_t stop = 0;
    if (piece_.verify_ == ReadVerify::kExtendLeaves) {
      begin_ = at / kLeafBytes * kLeafBytes;
      stop = begin_ + (dense_ ? kPieceBlockBytes : kLeafBytes);
      stop = std::min(stop, (end_ + kLeafBytes - 1) / kLeafBytes * kLeafBytes);
      stop = std::min(stop, piece_.where_.length);
    } else {
      begin_ = at;
      stop = dense_ ? std::min(end_, at / kLeafBytes * kLeafBytes + kPieceBlockBytes)
                    : at + std::min(size, kPieceBlockBytes);
    }
    bytes_ = stop - begin_;
    if (buffer_.size() < bytes_) buffer_.resize(std::max(bytes_, std::min(end_, kPieceBlockBytes)));
    const std::uint64_t want = bytes_;
    bytes_ = 0;  // Nothing is there where the read fails.
    TENSORMOUNT_RETURN_IF_ERROR(piece_.ReadAt(begin_, buffer_.data(), want));
    TENSORMOUNT_RETURN_IF_ERROR(piece_.CheckLeaves(begin_, buffer_.data(), want, &checked_));
    bytes_ = want;
    return Status();
  }

  PartReader& piece_;
  const std::uint64_t end_;
  const bool dense_;
  std::vector<std::byte> buffer_;
  std::uint64_t begin_ = 0;
  std::uint64_t bytes_ = 0;
  Range checked_;
};

bool PartReader::ReadScattered(const StridedCopy& copy, std::byte* base) {
  if (!OpenFile().ok()) return false;
  std::vector<File::Buffer> pieces;
  pieces.reserve(std::min<std::uint64_t>(copy.runs(), kMaxScatter));
  auto at = static_cast<std::uint64_t>(copy.src_offset);
  std::uint64_t bytes = 0;
  bool good = true;
  const auto flush = [&] {
    const Result<std::size_t> got = file_->file().ReadVectorAt(at, pieces);
    good = got.ok() && got.value() == bytes;
    at += bytes;
    stats_.bytes_read += bytes;
    bytes = 0;
    pieces.clear();
  };
  copy.ForEachRun([&](std::int64_t, std::int64_t dst, std::uint64_t size) {
    if (!good) return;
    pieces.push_back({base + dst, static_cast<std::size_t>(size)});
    bytes += size;
    if (pieces.size() == kMaxScatter) flush();
  });
  if (good && !pieces.empty()) flush();
  return good;
}

Status PartReader::ReadStrided(const StridedCopy& copy, std::byte* base) {
  if (copy.run == 0) return Status();
  if (!Rises(copy)) return ReadTransposed(ByFallingSteps(copy), base);
  const auto first = static_cast<std::uint64_t>(copy.src_offset) - where_.offset;
  const std::uint64_t span = SourceSpan(copy);
  // One stretch of the file and nothing to check on the way: straight to where its runs belong.
  // What fails is read again below, where it is worded.
  if (verify_ == ReadVerify::kOff && span == copy.bytes() && copy.run >= kScatterRun &&
      ReadScattered(copy, base)) {
    return Status();
  }
  // Reading what lies between is worth it only where little does.
  WindowReader window(*this, first + span, span - copy.bytes() <= copy.bytes());
  Status status;
  copy.ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
    if (!status.ok()) return;
    status = window.Copy(static_cast<std::uint64_t>(src) - where_.offset, base + dst, size);
  });
  return status;
}

Status PartReader::ReadSlab(const StridedCopy& slab, std::byte* base) {
  const std::uint64_t span = SourceSpan(slab);
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
  const std::uint64_t span = SourceSpan(copy);
  if (span <= kPieceBlockBytes) return ReadSlab(copy, base);
  if (copy.axes == 0) {  // One long run.
    return ReadRun(static_cast<std::uint64_t>(copy.src_offset) - where_.offset,
                   base + copy.dst_offset, copy.run, {});
  }
  // As many steps of the outermost axis at once as a slab holds, or each by the axes within.
  const auto step = static_cast<std::uint64_t>(copy.src_step[0]);
  const auto count = static_cast<std::uint64_t>(copy.count[0]);
  const std::uint64_t within = span - (count - 1) * step;
  const std::uint64_t most = within > kPieceBlockBytes ? 1
                             : step == 0               ? count
                                                       : (kPieceBlockBytes - within) / step + 1;
  for (std::uint64_t at = 0; at < count; at += most) {
    const std::uint64_t n = std::min(most, count - at);
    StridedCopy part = copy;
    part.src_offset += static_cast<std::int64_t>(at * step);
    part.dst_offset += static_cast<std::int64_t>(at) * copy.dst_step[0];
    part.count[0] = static_cast<std::int64_t>(n);
    if (n == 1) {
      --part.axes;
      std::copy(copy.count.begin() + 1, copy.count.end(), part.count.begin());
      std::copy(copy.src_step.begin() + 1, copy.src_step.end(), part.src_step.begin());
      std::copy(copy.dst_step.begin() + 1, copy.dst_step.end(), part.dst_step.begin());
    }
    TENSORMOUNT_RETURN_IF_ERROR(ReadTransposed(part, base));
  }
  return Status();
}

Result<const std::byte*> PartReader::MappingTo(std::uint64_t end) {
  const FileRecord& record = checkpoint_.index().files()[where_.file];
  if (record.placement == Placement::kForeign && !MappingGuarded()) return nullptr;
  TENSORMOUNT_RETURN_IF_ERROR(OpenFile());
  return file_->MappingTo(end);
}

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
