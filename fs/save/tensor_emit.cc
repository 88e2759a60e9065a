// SPDX-License-Identifier: Apache-2.0
// TensorAssembly::Emitter of tensor_assembly.h: makes chunks of assembled boxes. A box that is
// contiguous in a data file becomes a chunk there; other boxes (cut by later writes), and split
// elements, are copied to the patch file. Separate from the assembly, which decides which bytes are
// valid and copies none.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked.h"
#include "fs/save/tensor_assembly.h"
#include "shard/box_access.h"
#include "shard/chunk_accumulator.h"
#include "shard/copy_plan.h"
#include "shard/strided_digest.h"

namespace tensormount::fs {
namespace {

constexpr std::uint64_t kBandBytes = std::uint64_t{4} << 20;

// Contribution of `region` (in bytes), whose packed bytes are given, to the tensor's digest.
Crc64 ContributionOf(const Region& region, const std::byte* packed, const Dims& byte_shape) {
  Crc64 crc = 0;
  for (const PlacedBox& placed : PlacePacked(region, 0)) {
    crc ^= DigestOfPlaced(placed, packed, byte_shape);
  }
  return crc;
}

}  // namespace

// Removes the file unless Finish has kept it: the next attempt to publish makes its own file.
PatchFile::~PatchFile() {
  if (!kept_) Discard();
}

Status PatchFile::Open() {
  if (file_ != nullptr) return Status();
  name_ = "data/" + staging_.ShortId() + "-patch-" + Uuid::Random().Short() + ".bin";
  TENSORMOUNT_ASSIGN_OR_RETURN(file_, fs_.CreateExclusive(JoinPath(staging_.directory, name_)));
  return Status();
}

Status PatchFile::Append(const std::byte* data, std::size_t size) {
  TENSORMOUNT_RETURN_IF_ERROR(Open());
  TENSORMOUNT_RETURN_IF_ERROR(file_->WriteAt(size_, data, size));
  size_ += size;
  return Status();
}

Status PatchFile::TruncateTo(std::uint64_t size) {
  if (file_ == nullptr) return Status();
  if (size == 0) {
    Discard();
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(file_->Truncate(size));
  }
  size_ = size;
  return Status();
}

Status PatchFile::Finish() {
  if (file_ == nullptr) return Status();
  TENSORMOUNT_RETURN_IF_ERROR(file_->Seal());
  TENSORMOUNT_RETURN_IF_ERROR(file_->Sync());
  TENSORMOUNT_RETURN_IF_ERROR(file_->Close());
  kept_ = true;
  return Status();
}

void PatchFile::Discard() {
  if (name_.empty()) return;
  file_.reset();
  // If the removal fails, the file remains without being in a manifest.
  (void)fs_.RemoveFile(JoinPath(staging_.directory, name_));
  name_.clear();
}

// Makes the chunks of one tensor. A unit is the smallest run of elements that is whole bytes: one
// element, two of 4 bits, four of 6. Chunks begin and end on units.
class TensorAssembly::Emitter {
 public:
  Emitter(TensorAssembly& assembly, const TensorMeta& meta)
      : assembly_(assembly),
        meta_(meta),
        byte_shape_(ByteShape(meta.dtype(), meta.shape())),
        unit_bytes_(std::lcm(std::int64_t{meta.bits()}, std::int64_t{8}) / 8),
        unit_elements_(unit_bytes_ * 8 / std::int64_t{meta.bits()}) {}

  Status Add(const StagedRun& run) {
    if (!run.remaining.has_value() && run.is_range) return AddRange(run);
    for (const Box& box : run.remaining.has_value() ? *run.remaining : run.bytes.Boxes()) {
      TENSORMOUNT_RETURN_IF_ERROR(AddBox(run, box));
    }
    return Status();
  }

  // To be called once, after all runs were added.
  Result<std::vector<StagedChunk>> Finish() {
    TENSORMOUNT_RETURN_IF_ERROR(AddUnits());
    JoinRanges();
    return std::move(chunks_);
  }

 private:
  // Some bytes of one unit.
  struct Part {
    std::int64_t unit = 0;  // Number in row-major order.
    std::int64_t from = 0;  // First byte within the unit.
    const StagedRun* run = nullptr;
    Box bytes;
  };

  StagedChunk ChunkOf(const StagedRun& run, std::uint64_t at, std::uint64_t length) const {
    StagedChunk chunk;
    chunk.journal = run.journal;
    chunk.file = run.extent().file;
    chunk.offset = run.extent().offset + at;
    chunk.length = length;
    return chunk;
  }

  // Hashes stored bytes [at, at + length) of the extent, which are the packed bytes of `bytes`. If
  // the run is a complete record, its hashes are kept and nothing is read; if not, leaves begin at
  // another position and are recomputed.
  Status Hash(const StagedRun& run, std::uint64_t at, const Region& bytes, StagedChunk& chunk) {
    if (run.whole() && at == run.at && chunk.length == run.size) {
      chunk.leaves = run.extent().leaves;
      chunk.contribution = run.extent().contribution;
      return Status();
    }
    return Stream(bytes, chunk, [&](std::uint64_t done, const Region& part, std::byte* out) {
      return assembly_.reader_.Read(run, at + done, static_cast<std::size_t>(part.volume()), out);
    });
  }

  // Calls read(done, part, out) for each band of `bytes` and hashes the bytes. Memory is bounded by
  // kBandBytes.
  template <typename Read>
  Status Stream(const Region& bytes, StagedChunk& chunk, Read read) {
    const auto all = static_cast<std::uint64_t>(bytes.volume());
    buffer_.resize(static_cast<std::size_t>(std::min(all, kBandBytes)));
    Region part;
    const auto fill = [&](std::uint64_t at, std::span<std::byte> block) -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          part, Region::Flat(bytes.box(), bytes.flat_first() + Signed(at), Signed(block.size())));
      return read(at, part, block.data());
    };
    const auto digest = [&](std::uint64_t, std::span<const std::byte> block) {
      chunk.contribution ^= ContributionOf(part, block.data(), byte_shape_);
      return Status();
    };
    TENSORMOUNT_ASSIGN_OR_RETURN(ChunkHashes hashes, PassChunk(all, buffer_, fill, digest));
    chunk.leaves = std::move(hashes.leaves);
    return Status();
  }

  // Adds a run that is one range of its target: its whole units become a chunk in place, and the
  // partial units at its ends become parts.
  Status AddRange(const StagedRun& run) {
    const std::int64_t begin = Signed(run.begin);
    const std::int64_t end = begin + Signed(run.size);
    const std::int64_t low = (begin + unit_bytes_ - 1) / unit_bytes_ * unit_bytes_;
    const std::int64_t high = end / unit_bytes_ * unit_bytes_;
    const auto part = [&](std::int64_t from, std::int64_t to) -> Status {
      if (from >= to) return Status();
      TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes, Region::Flat(run.of_bytes, from, to - from));
      for (const Box& box : bytes.Boxes()) AddParts(run, box);
      return Status();
    };
    if (low >= high) {
      // The range touches one or two units and contains no whole unit.
      TENSORMOUNT_RETURN_IF_ERROR(part(begin, std::min(low, end)));
      return part(std::min(low, end), end);
    }
    TENSORMOUNT_RETURN_IF_ERROR(part(begin, low));
    TENSORMOUNT_RETURN_IF_ERROR(part(high, end));
    const auto length = static_cast<std::uint64_t>(high - low);
    const std::uint64_t at = run.at + static_cast<std::uint64_t>(low - begin);
    StagedChunk chunk = ChunkOf(run, at, length);
    chunk.is_range = true;
    chunk.target_box = run.target_box;
    chunk.first = low / unit_bytes_ * unit_elements_;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        chunk.region,
        Region::Flat(run.target_box, chunk.first, (high - low) / unit_bytes_ * unit_elements_));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes, Region::Flat(run.of_bytes, low, high - low));
    TENSORMOUNT_RETURN_IF_ERROR(Hash(run, at, bytes, chunk));
    chunks_.push_back(std::move(chunk));
    return Status();
  }

  // Adds a box of bytes of a run: its whole units become chunks, and the partial units on both
  // sides become parts.
  Status AddBox(const StagedRun& run, const Box& box) {
    const int last = box.rank() - 1;
    const std::int64_t low = (box.begin(last) + unit_bytes_ - 1) / unit_bytes_ * unit_bytes_;
    const std::int64_t high = box.end(last) / unit_bytes_ * unit_bytes_;
    const auto part = [&](std::int64_t from, std::int64_t to) {
      if (from < to) AddParts(run, BoxAccess::WithAxis(box, last, from, to - from));
    };
    part(box.begin(last), std::min(low, box.end(last)));
    part(std::max(high, std::min(low, box.end(last))), box.end(last));
    if (low >= high) return Status();
    const Box units = BoxAccess::WithAxis(box, last, low, high - low);
    return units.volume() == 0 ? Status() : AddUnitsBox(run, units);
  }

  Status AddUnitsBox(const StagedRun& run, const Box& bytes) {
    const Box elements = ElementBox(meta_.dtype(), meta_.shape(), bytes);
    const Result<Region> back = ByteRegion(meta_.dtype(), meta_.shape(), elements);
    if (back.ok() && back.value() == Region(bytes)) {
      return AddChunk(run, bytes, Region(elements));
    }
    // If axes were merged to get whole bytes, a box of bytes may not be a box of elements, but each
    // of its rows is a range of elements.
    const int last = bytes.rank() - 1;
    Box row = bytes;
    for (int a = 0; a < last; ++a) {
      if (row.extent(a) == 1) continue;
      const std::int64_t n = row.extent(a);
      for (std::int64_t i = 0; i < n; ++i) {
        TENSORMOUNT_RETURN_IF_ERROR(
            AddUnitsBox(run, BoxAccess::WithAxis(bytes, a, bytes.begin(a) + i, 1)));
      }
      return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const Region region, Region::Flat(Box::Whole(meta_.shape()), UnitOf(bytes) * unit_elements_,
                                          bytes.extent(last) / unit_bytes_ * unit_elements_));
    return AddChunk(run, bytes, region);
  }

  // Adds a chunk. If its bytes are contiguous in the data file they stay there; otherwise they are
  // copied to the patch file.
  Status AddChunk(const StagedRun& run, const Box& bytes, const Region& region) {
    const PlacedBox to{bytes, 0, PackedStrides(bytes.extent())};
    int runs = 0;
    std::uint64_t at = 0;
    for (const PlacedBox& from : PlacePacked(run.bytes, run.at)) {
      const Box part = Intersect(from.box, bytes);
      if (part.empty()) continue;
      const StridedCopy copy = PlanCopy(part, from, to);
      runs += copy.runs() == 1 ? 1 : 2;
      at = static_cast<std::uint64_t>(copy.src_offset);
    }
    if (runs == 1) {
      StagedChunk chunk = ChunkOf(run, at, static_cast<std::uint64_t>(bytes.volume()));
      chunk.region = region;
      TENSORMOUNT_RETURN_IF_ERROR(Hash(run, at, Region(bytes), chunk));
      chunks_.push_back(std::move(chunk));
      return Status();
    }
    StagedChunk chunk = ChunkOf(run, 0, static_cast<std::uint64_t>(bytes.volume()));
    chunk.journal = kPublisher;
    chunk.file = 0;
    chunk.offset = assembly_.patches_.size();
    chunk.region = region;
    const auto copy = [&](std::uint64_t, const Region& part, std::byte* out) -> Status {
      std::byte* next = out;
      for (const Box& box : part.Boxes()) {
        TENSORMOUNT_RETURN_IF_ERROR(assembly_.reader_.ReadBox(run, box, next));
        next += box.volume();
      }
      return assembly_.patches_.Append(out, static_cast<std::size_t>(next - out));
    };
    TENSORMOUNT_RETURN_IF_ERROR(Stream(Region(bytes), chunk, copy));
    chunks_.push_back(std::move(chunk));
    return Status();
  }

  // Number of the unit in which a box begins, in the tensor's row-major order.
  std::int64_t UnitOf(const Box& bytes) const {
    std::int64_t linear = 0;
    for (int a = 0; a < bytes.rank(); ++a) linear = linear * byte_shape_[a] + bytes.begin(a);
    return linear / unit_bytes_;
  }

  // Adds rows of a box that each lie within one unit.
  void AddParts(const StagedRun& run, const Box& box) {
    const int last = box.rank() - 1;
    Dims at = Dims::Filled(box.rank(), 0);
    for (;;) {
      Box row = box;
      for (int a = 0; a < last; ++a) row = BoxAccess::WithAxis(row, a, box.begin(a) + at[a], 1);
      parts_.push_back({UnitOf(row), box.begin(last) % unit_bytes_, &run, row});
      int a = last - 1;
      for (; a >= 0; --a) {
        if (++at[a] < box.extent(a)) break;
        at[a] = 0;
      }
      if (a < 0) return;
    }
  }

  // Assembles the units (smallest groups of elements that fill whole bytes) of which several writes
  // supplied parts. Adjacent units become one chunk.
  Status AddUnits() {
    std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
      return std::tie(a.unit, a.from) < std::tie(b.unit, b.from);
    });
    for (std::size_t i = 0; i < parts_.size();) {
      const std::int64_t first = parts_[i].unit;
      std::vector<std::byte> bytes;
      std::int64_t next = first;
      while (i < parts_.size() && parts_[i].unit == next && bytes.size() < kBandBytes) {
        const std::size_t base = bytes.size();
        bytes.resize(base + static_cast<std::size_t>(unit_bytes_));
        std::int64_t filled = 0;
        for (; i < parts_.size() && parts_[i].unit == next; ++i) {
          const Part& part = parts_[i];
          if (part.from != filled || part.bytes.volume() > unit_bytes_ - filled) {
            return Status(Code::kInternal,
                          "tensor " + meta_.key() +
                              ": internal error: the written parts of an element have gaps");
          }
          TENSORMOUNT_RETURN_IF_ERROR(assembly_.reader_.ReadBox(
              *part.run, part.bytes, bytes.data() + base + static_cast<std::size_t>(filled)));
          filled += part.bytes.volume();
        }
        if (filled != unit_bytes_) {
          return Status(Code::kInternal,
                        "tensor " + meta_.key() + ": internal error: an element is incomplete");
        }
        ++next;
      }
      StagedChunk chunk;
      chunk.journal = kPublisher;
      chunk.offset = assembly_.patches_.size();
      chunk.length = bytes.size();
      TENSORMOUNT_ASSIGN_OR_RETURN(chunk.region,
                                   Region::Flat(Box::Whole(meta_.shape()), first * unit_elements_,
                                                (next - first) * unit_elements_));
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const Region region,
          Region::Flat(Box::Whole(byte_shape_), first * unit_bytes_, Signed(bytes.size())));
      chunk.leaves = HashChunk(bytes.data(), bytes.size()).leaves;
      chunk.contribution = ContributionOf(region, bytes.data(), byte_shape_);
      TENSORMOUNT_RETURN_IF_ERROR(assembly_.patches_.Append(bytes.data(), bytes.size()));
      chunks_.push_back(std::move(chunk));
    }
    return Status();
  }

  // Merges ranges that are adjacent in the target and in the file if the first ends with a whole
  // leaf: a tensor written by the megabyte then needs one chunk.
  void JoinRanges() {
    std::stable_sort(
        chunks_.begin(), chunks_.end(), [](const StagedChunk& a, const StagedChunk& b) {
          return std::tie(a.journal, a.file, a.offset) < std::tie(b.journal, b.file, b.offset);
        });
    std::vector<StagedChunk> joined;
    for (StagedChunk& chunk : chunks_) {
      StagedChunk* before = joined.empty() ? nullptr : &joined.back();
      if (before != nullptr && before->is_range && chunk.is_range &&
          before->journal == chunk.journal && before->file == chunk.file &&
          before->offset + before->length == chunk.offset && before->length % kLeafBytes == 0 &&
          before->target_box == chunk.target_box &&
          before->first + before->region.volume() == chunk.first) {
        const Result<Region> both = Region::Flat(chunk.target_box, before->first,
                                                 before->region.volume() + chunk.region.volume());
        if (both.ok()) {
          before->region = both.value();
          before->length += chunk.length;
          before->leaves.insert(before->leaves.end(), chunk.leaves.begin(), chunk.leaves.end());
          before->contribution ^= chunk.contribution;
          continue;
        }
      }
      joined.push_back(std::move(chunk));
    }
    chunks_ = std::move(joined);
  }

  TensorAssembly& assembly_;
  const TensorMeta& meta_;
  const Dims byte_shape_;
  const std::int64_t unit_bytes_;
  const std::int64_t unit_elements_;
  // Parts of units that no single run contains completely; usually none.
  std::vector<Part> parts_;
  std::vector<StagedChunk> chunks_;
  std::vector<std::byte> buffer_;
};

Result<std::vector<StagedChunk>> TensorAssembly::Emit(const TensorMeta& meta,
                                                      const std::vector<StagedRun>& runs) {
  Emitter emitter(*this, meta);
  for (const StagedRun& run : runs) TENSORMOUNT_RETURN_IF_ERROR(emitter.Add(run));
  return emitter.Finish();
}

}  // namespace tensormount::fs
