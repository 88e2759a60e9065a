// SPDX-License-Identifier: Apache-2.0
// Reads a stored range, hashes its leaves and computes the digest of its boxes. Leaf hashes need
// the bytes in file order, the digest needs them in tensor order. A window holds the bytes of one
// step of the largest stride. If steps are too interleaved for that, bytes are read a second time.
#include "index/read/stored_range_scanner.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "shard/box_access.h"
#include "shard/chunk_accumulator.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// Block size of reads. A block stays in the processor's cache until it is hashed.
constexpr std::uint64_t kStretchBlockBytes = std::uint64_t{1} << 20;
static_assert(kStretchBlockBytes % kLeafBytes == 0);
// Largest slab of interleaved boxes. If a step of the largest stride does not fit, bytes are read
// twice.
constexpr std::uint64_t kSlabBytes = std::uint64_t{4} << 20;

// Number of bytes from the first byte to the last of a non-empty placed box.
std::uint64_t SpanOf(const PlacedBox& placed) {
  std::uint64_t span = 1;
  for (int a = 0; a < placed.box.rank(); ++a) {
    span += static_cast<std::uint64_t>((placed.box.extent(a) - 1) * placed.strides[a]);
  }
  return span;
}

// Calls fn(part) for parts of a box that span at most `limit` bytes, in the order of their offsets
// as far as the strides allow. The box is cut along the axis of the largest stride. A part has as
// many steps of it as fit; a larger step is cut along the next axis.
template <typename Fn>
Status ForEachSlab(const PlacedBox& placed, std::uint64_t limit, const Fn& fn) {
  const std::uint64_t span = SpanOf(placed);
  if (span <= limit) return fn(placed, span);
  int axis = 0;
  std::int64_t largest = -1;
  for (int a = 0; a < placed.box.rank(); ++a) {
    if (placed.box.extent(a) > 1 && placed.strides[a] > largest) {
      axis = a;
      largest = placed.strides[a];
    }
  }
  // The step is not 0, because the span is more than one byte.
  const auto step = static_cast<std::uint64_t>(largest);
  const std::uint64_t within =
      span - static_cast<std::uint64_t>(placed.box.extent(axis) - 1) * step;
  const std::uint64_t fit = within > limit ? 1 : (limit - within) / step + 1;
  const auto most =
      static_cast<std::int64_t>(std::min(fit, static_cast<std::uint64_t>(placed.box.extent(axis))));
  for (std::int64_t at = 0; at < placed.box.extent(axis); at += most) {
    Dims begin = placed.box.begin();
    Dims extent = placed.box.extent();
    begin[axis] += at;
    extent[axis] = std::min(most, placed.box.extent(axis) - at);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
    const PlacedBox part{box, placed.offset + at * largest, placed.strides};
    TENSORMOUNT_RETURN_IF_ERROR(ForEachSlab(part, limit, fn));
  }
  return Status();
}

}  // namespace

// The part of the range that is in memory. Each byte that passes through the window is hashed once.
class StoredRangeScanner::Window {
 public:
  Window(std::vector<std::byte>& buffer, File& file, std::uint64_t offset, std::uint64_t length,
         const Progress& progress, Findings& findings)
      : buffer_(buffer),
        file_(file),
        offset_(offset),
        length_(length),
        progress_(progress),
        findings_(findings) {}

  // Memory of bytes [begin, end) of the range. Valid until the next call. The window only moves
  // forward; if strides cross each other, bytes before it are read again into reread_.
  Result<const std::byte*> BytesAt(std::uint64_t begin, std::uint64_t end) {
    if (begin >= begin_ && end <= hashed_) return buffer_.data() + (begin - begin_);
    if (begin < begin_) {  // The window has passed these bytes.
      reread_.resize(std::max<std::size_t>(reread_.size(), end - begin));
      TENSORMOUNT_RETURN_IF_ERROR(ReadAt(begin, reread_.data(), end - begin));
      return reread_.data();
    }
    TENSORMOUNT_RETURN_IF_ERROR(AdvanceTo(begin));
    // Keeps the tail of the window, and loads at least a block behind it.
    const std::uint64_t kept = hashed_ - begin;
    if (begin > begin_ && kept > 0) {
      std::memmove(buffer_.data(), buffer_.data() + (begin - begin_), kept);
    }
    begin_ = begin;
    const std::uint64_t until = std::min(length_, std::max(end, hashed_ + kStretchBlockBytes));
    TENSORMOUNT_RETURN_IF_ERROR(Load(until));
    return buffer_.data();
  }

  Status Finish() {
    TENSORMOUNT_RETURN_IF_ERROR(AdvanceTo(length_));
    findings_.leaves = accumulator_.Finish().leaves;
    return Status();
  }

 private:
  // Reads on until all bytes before `at` are hashed.
  Status AdvanceTo(std::uint64_t at) {
    while (hashed_ < at) {
      begin_ = hashed_;
      TENSORMOUNT_RETURN_IF_ERROR(Load(std::min(length_, hashed_ + kStretchBlockBytes)));
    }
    return Status();
  }

  // Reads bytes of the file into the window, up to `until`.
  Status Load(std::uint64_t until) {
    const std::uint64_t size = until - begin_;
    if (buffer_.size() < size) buffer_.resize(size);
    while (hashed_ < until) {
      const std::uint64_t n = std::min(until - hashed_, kStretchBlockBytes);
      std::byte* const to = buffer_.data() + (hashed_ - begin_);
      TENSORMOUNT_RETURN_IF_ERROR(ReadAt(hashed_, to, n));
      accumulator_.Update(to, n);
      hashed_ += n;
      findings_.bytes = hashed_;
      if (progress_) TENSORMOUNT_RETURN_IF_ERROR(progress_(n));
    }
    return Status();
  }

  Status ReadAt(std::uint64_t at, std::byte* out, std::uint64_t size) {
    const Result<std::size_t> got = file_.ReadAtWithin(offset_ + at, out, size, offset_ + length_);
    if (got.ok() && got.value() == size) return Status();
    const std::uint64_t there = got.ok() ? got.value() : ReadablePart(at, out, size);
    findings_.bytes = std::max(findings_.bytes, at + there);
    return got.ok() ? Status(Code::kDataLoss, "the file ends here, before the end of the data")
                    : got.status();
  }

  // Number of readable bytes before the first unreadable one, found page by page for the message.
  std::uint64_t ReadablePart(std::uint64_t at, std::byte* out, std::uint64_t size) {
    constexpr std::uint64_t kPage = 4096;
    for (std::uint64_t done = 0; done < size;) {
      const std::uint64_t end = std::min(size, done + kPage - (offset_ + at + done) % kPage);
      const Result<std::size_t> got = file_.ReadAt(offset_ + at + done, out + done, end - done);
      if (!got.ok() || got.value() != end - done) return done;
      done = end;
    }
    return 0;  // Everything is readable now, so the position is unknown.
  }

  std::vector<std::byte>& buffer_;
  std::vector<std::byte> reread_;
  File& file_;
  const std::uint64_t offset_;
  const std::uint64_t length_;
  const Progress& progress_;
  Findings& findings_;
  ChunkAccumulator accumulator_;
  // The buffer holds bytes [begin_, hashed_) of the range.
  std::uint64_t begin_ = 0;
  std::uint64_t hashed_ = 0;
};

// Computes the digest of each box slab by slab, while the window holds the slab's bytes.
Status StoredRangeScanner::Read(File& file, std::uint64_t offset, std::uint64_t length,
                                std::span<const PlacedBox> boxes, const Dims& byte_shape,
                                const Progress& progress, Findings& findings) {
  Window window(buffer_, file, offset, length, progress, findings);
  for (const PlacedBox& box : boxes) {
    if (box.box.empty()) continue;
    // Nothing has checked the box against the range if verify has the range only from the index of
    // a damaged checkpoint.
    if (box.offset < 0 ||
        !RangeWithin(static_cast<std::uint64_t>(box.offset), SpanOf(box), length)) {
      return Status(Code::kDataLoss, "a box of the tensor reaches past the end of the chunk");
    }
    // Packed runs stay in the processor's cache. Only interleaved boxes need a larger window.
    const std::uint64_t limit = SpanOf(box) == static_cast<std::uint64_t>(box.box.volume()) &&
                                        box.strides == PackedStrides(box.box.extent())
                                    ? kStretchBlockBytes
                                    : kSlabBytes;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachSlab(box, limit, [&](const PlacedBox& part, std::uint64_t span) {
          const auto begin = static_cast<std::uint64_t>(part.offset);
          TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* const data,
                                       window.BytesAt(begin, begin + span));
          findings.contribution ^= DigestOfPlaced({part.box, 0, part.strides}, data, byte_shape);
          return Status();
        }));
  }
  return window.Finish();
}

}  // namespace tensormount
