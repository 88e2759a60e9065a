// SPDX-License-Identifier: Apache-2.0
// One pass over a stored range that hashes leaves and takes the digest of what stands in it. Both
// want each byte once, but in orders of their own: leaves as the file has them, the digest as the
// tensor has them. The window holds what one step of the largest stride spans; where steps are so
// interleaved that even this is too much, bytes are read a second time.
#include "index/read/stretch_read.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "shard/box_access.h"
#include "shard/leaf_hash.h"
#include "shard/strided_digest.h"

namespace tensormount {
namespace {

// What is read at once: stays in cache until it is hashed.
constexpr std::uint64_t kStretchBlockBytes = std::uint64_t{1} << 20;
static_assert(kStretchBlockBytes % kLeafBytes == 0);
// Of boxes that are interleaved, a step along the axis of the largest stride must fit.
constexpr std::uint64_t kSlabBytes = std::uint64_t{4} << 20;

// Bytes from the first to the last of a placed box that is not empty.
std::uint64_t SpanOf(const PlacedBox& placed) {
  std::uint64_t span = 1;
  for (int a = 0; a < placed.box.rank(); ++a) {
    span += static_cast<std::uint64_t>((placed.box.extent(a) - 1) * placed.strides[a]);
  }
  return span;
}

// Calls fn(part) for parts of a box, by rising offsets as far as its strides allow, each of which
// spans no more than `limit`.
// Cuts along the axis of the largest stride, as many steps at once as fit, and within one step by
// the next axis.
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
  const auto step = static_cast<std::uint64_t>(largest);  // Not 0: the span is over one byte.
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

// The part of the range that is in memory; what passes through it is hashed once.
class StretchReader::Window {
 public:
  Window(std::vector<std::byte>& buffer, File& file, std::uint64_t offset, std::uint64_t length,
         const Progress& progress, Findings& findings)
      : buffer_(buffer),
        file_(file),
        offset_(offset),
        length_(length),
        progress_(progress),
        findings_(findings) {}

  // Memory of bytes [begin, end) of the range, valid until the next call.
  // The window only moves forward; what it has passed is hashed and gone, and is read again where
  // strides cross each other (again_).
  Result<const std::byte*> Hold(std::uint64_t begin, std::uint64_t end) {
    if (begin >= begin_ && end <= hashed_) return buffer_.data() + (begin - begin_);
    if (begin < begin_) {  // Passed already: strides that cross each other.
      again_.resize(std::max<std::size_t>(again_.size(), end - begin));
      TENSORMOUNT_RETURN_IF_ERROR(ReadAt(begin, again_.data(), end - begin));
      return again_.data();
    }
    TENSORMOUNT_RETURN_IF_ERROR(PassTo(begin));
    // What is kept of the bytes so far, then new ones, a block at least.
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
    TENSORMOUNT_RETURN_IF_ERROR(PassTo(length_));
    hasher_.Finish();
    findings_.leaves = hasher_.leaves();
    return Status();
  }

 private:
  // Reads on until bytes before `at` have been hashed.
  Status PassTo(std::uint64_t at) {
    while (hashed_ < at) {
      begin_ = hashed_;
      TENSORMOUNT_RETURN_IF_ERROR(Load(std::min(length_, hashed_ + kStretchBlockBytes)));
    }
    return Status();
  }

  // Appends bytes up to `until` to the window.
  Status Load(std::uint64_t until) {
    const std::uint64_t size = until - begin_;
    if (buffer_.size() < size) buffer_.resize(size);
    while (hashed_ < until) {
      const std::uint64_t n = std::min(until - hashed_, kStretchBlockBytes);
      std::byte* const to = buffer_.data() + (hashed_ - begin_);
      TENSORMOUNT_RETURN_IF_ERROR(ReadAt(hashed_, to, n));
      hasher_.Update(to, n);
      hashed_ += n;
      findings_.bytes = hashed_;
      if (progress_) TENSORMOUNT_RETURN_IF_ERROR(progress_(n));
    }
    return Status();
  }

  Status ReadAt(std::uint64_t at, std::byte* out, std::uint64_t size) {
    const Result<std::size_t> got = file_.ReadAt(offset_ + at, out, size);
    if (got.ok() && got.value() == size) return Status();
    const std::uint64_t there = got.ok() ? got.value() : ReadablePart(at, out, size);
    findings_.bytes = std::max(findings_.bytes, at + there);
    return got.ok() ? Status(Code::kDataLoss, "the file ends here") : got.status();
  }

  // How much stands before what cannot be read, page by page.
  // For the message: which byte cannot be read.
  std::uint64_t ReadablePart(std::uint64_t at, std::byte* out, std::uint64_t size) {
    constexpr std::uint64_t kPage = 4096;
    for (std::uint64_t done = 0; done < size;) {
      const std::uint64_t end = std::min(size, done + kPage - (offset_ + at + done) % kPage);
      const Result<std::size_t> got = file_.ReadAt(offset_ + at + done, out + done, end - done);
      if (!got.ok() || got.value() != end - done) return done;
      done = end;
    }
    return 0;  // It can all be read now: nothing is known.
  }

  std::vector<std::byte>& buffer_;
  std::vector<std::byte> again_;
  File& file_;
  const std::uint64_t offset_;
  const std::uint64_t length_;
  const Progress& progress_;
  Findings& findings_;
  LeafHasher hasher_;
  // The buffer holds [begin_, hashed_) of the range.
  std::uint64_t begin_ = 0;
  std::uint64_t hashed_ = 0;
};

// Each box is walked in slabs whose bytes the window holds while their digest is taken.
Status StretchReader::Read(File& file, std::uint64_t offset, std::uint64_t length,
                           std::span<const PlacedBox> boxes, const Dims& byte_shape,
                           const Progress& progress, Findings& findings) {
  Window window(buffer_, file, offset, length, progress, findings);
  for (const PlacedBox& box : boxes) {
    if (box.box.empty()) continue;
    // Where verify knows a range from a damaged checkpoint's index alone, nobody compared the two.
    if (box.offset < 0 ||
        !RangeWithin(static_cast<std::uint64_t>(box.offset), SpanOf(box), length)) {
      return Status(Code::kDataLoss, "what is to stand in it reaches past its end");
    }
    // Runs of the file stay in cache; only what is interleaved needs more at once.
    const std::uint64_t limit = SpanOf(box) == static_cast<std::uint64_t>(box.box.volume()) &&
                                        box.strides == PackedStrides(box.box.extent())
                                    ? kStretchBlockBytes
                                    : kSlabBytes;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachSlab(box, limit, [&](const PlacedBox& part, std::uint64_t span) {
          const auto begin = static_cast<std::uint64_t>(part.offset);
          TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* const data,
                                       window.Hold(begin, begin + span));
          findings.contribution ^= DigestOfPlaced({part.box, 0, part.strides}, data, byte_shape);
          return Status();
        }));
  }
  return window.Finish();
}

}  // namespace tensormount
