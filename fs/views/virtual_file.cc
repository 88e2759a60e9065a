// SPDX-License-Identifier: Apache-2.0
// Reads of FileSegments: each segment by its kind, or from a mapping if all bytes of a request are
// in memory.
#include "fs/views/virtual_file.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/deadline.h"
#include "fs/views/checkpoint_view.h"

namespace tensormount::fs {

using Segment = FileSegments::Segment;

// The file is one literal. view_ stays null, so the file is not immutable and has no backing file.
std::shared_ptr<const VirtualFile> VirtualFile::OfText(std::string label, std::string text) {
  std::shared_ptr<VirtualFile> file(new VirtualFile);
  file->label_ = std::move(label);
  file->segments_.AddLiteral(std::move(text));
  return file;
}

Status VirtualFile::ForEachSegment(std::uint64_t offset, std::size_t size, const Visit& fn) const {
  const std::vector<Segment>& segments = segments_.segments();
  // Finds the first segment in O(log segments); the others follow it.
  auto segment = std::upper_bound(segments.begin(), segments.end(), offset,
                                  [](std::uint64_t at, const Segment& s) { return at < s.begin; });
  --segment;  // Valid, because the first segment begins at 0.
  for (std::size_t done = 0; done < size; ++segment) {
    const std::uint64_t at = offset + done - segment->begin;
    const std::size_t n =
        static_cast<std::size_t>(std::min<std::uint64_t>(size - done, segment->length - at));
    TENSORMOUNT_RETURN_IF_ERROR(fn(*segment, at, done, n));
    done += n;
  }
  return {};
}

// A read may span many segments (adjacent small tensors), and each is verified separately; the
// first failure fails the whole read, as on a disk.
Result<std::size_t> VirtualFile::Read(std::uint64_t offset, void* out, std::size_t size,
                                      ReadStats* stats) const {
  if (offset >= this->size() || size == 0) return std::size_t{0};
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, this->size() - offset));
  char* const to = static_cast<char*>(out);
  TENSORMOUNT_RETURN_IF_ERROR(ForEachSegment(
      offset, size, [&](const Segment& segment, std::uint64_t at, std::size_t done, std::size_t n) {
        return ReadSegment(segment, at, to + done, n, stats);
      }));
  return size;
}

// In a file of many tensors, looks the tensor up in the index by the ordinal of the segment.
Result<TensorEntry> VirtualFile::TensorOf(const Segment& segment) const {
  if (segments_.tensor()) return *segments_.tensor();
  return view_->opened().index().At(segment.ordinal);
}

Status VirtualFile::ReadSegment(const Segment& segment, std::uint64_t at, char* out,
                                std::size_t size, ReadStats* stats) const {
  switch (segment.kind) {
    case Segment::Kind::kLiteral:
      std::memcpy(out, segments_.literal(segment.ordinal).data() + segment.skip + at, size);
      return {};
    case Segment::Kind::kText:
      return segments_.text().Read(at, out, size);
    case Segment::Kind::kTensor: {
      if (segments_.tensor()) {
        return view_->data().ReadTensor(*segments_.tensor(), segment.skip + at, out, size, stats);
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, TensorOf(segment));
      return view_->data().ReadTensor(tensor, segment.skip + at, out, size, stats);
    }
    case Segment::Kind::kBox:
      return view_->data().ReadBox(segments_.box(segment.ordinal), at, out, size, stats);
    case Segment::Kind::kObject:
      return view_->data().ReadObject(segment.ordinal, at, out, size);
  }
  return Status(Code::kInternal, "internal error: a file segment of unknown kind");
}

std::vector<OpenedCheckpoint::MappedRange> VirtualFile::Map(std::uint64_t offset,
                                                            std::size_t size) const {
  std::vector<OpenedCheckpoint::MappedRange> ranges;
  if (offset >= this->size() || size == 0 || !segments_.reads_data()) return ranges;
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, this->size() - offset));
  const Status mapped = ForEachSegment(
      offset, size, [&](const Segment& segment, std::uint64_t at, std::size_t, std::size_t n) {
        return MapSegment(segment, at, n, ranges)
                   ? Status()
                   : Status(Code::kUnavailable,
                            "the requested bytes of this file cannot be mapped into memory");
      });
  // Releases the mappings of ranges that were collected before the failure.
  if (!mapped.ok()) ranges.clear();
  return ranges;
}

// Generated text and objects are never mapped, so the caller reads them: no complete text is in
// memory, and OpenedCheckpoint maps only tensors.
bool VirtualFile::MapSegment(const Segment& segment, std::uint64_t at, std::size_t size,
                             std::vector<OpenedCheckpoint::MappedRange>& out) const {
  if (out.size() >= OpenedCheckpoint::kMaxMapped) return false;
  switch (segment.kind) {
    case Segment::Kind::kLiteral: {
      const std::shared_ptr<const std::string>& text = segments_.shared_literal(segment.ordinal);
      out.push_back({.data = reinterpret_cast<const std::byte*>(text->data()) + segment.skip + at,
                     .size = size,
                     .keep = text});
      return true;
    }
    case Segment::Kind::kTensor: {
      const Result<TensorEntry> tensor = TensorOf(segment);
      return tensor.ok() && view_->data().MapTensor(tensor.value(), segment.skip + at, size, out);
    }
    case Segment::Kind::kBox:
      return view_->data().MapBox(segments_.box(segment.ordinal), at, size, out);
    case Segment::Kind::kText:
    case Segment::Kind::kObject:
      return false;
  }
  return false;
}

Result<std::string> VirtualFile::BackingPath() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, BackingFile());
  return view_->opened().AccessPath(file);
}

Result<VirtualFile::Backing> VirtualFile::OpenBacking() const {
  Backing backing;
  TENSORMOUNT_ASSIGN_OR_RETURN(backing.number, BackingFile());
  TENSORMOUNT_ASSIGN_OR_RETURN(backing.file, view_->opened().OpenFile(backing.number));
  TENSORMOUNT_ASSIGN_OR_RETURN(backing.info, backing.file->Stat());
  return backing;
}

FileStamp VirtualFile::StampOf(const Backing& backing, const FileInfo& info) const {
  return view_->opened().IsForeignFile(backing.number) ? FileStamp::OfForeignFile(info)
                                                       : FileStamp::OfStoreFile(info);
}

// Text has no backing file, and files without a view (control files) are not stored.
Result<std::uint32_t> VirtualFile::BackingFile() const {
  if (view_ && segments_.reads_data()) return view_->BackingFileOf(node_, segments_);
  return Status(Code::kNotFound,
                label_ + ": no single data file contains exactly the bytes of this file");
}

Result<bool> VirtualFile::HasHashes() const {
  const OpenedCheckpoint& opened = view_->opened();
  for (const Segment& segment : segments_.segments()) {
    if (segment.length == 0) continue;
    if (segment.kind == Segment::Kind::kObject) {
      return view_->shown().objects.parts()[segment.ordinal].has_hash();
    }
    if (segment.kind != Segment::Kind::kTensor) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, TensorOf(segment));
    if (tensor.meta.bytes() > 0) return opened.HasHashes(tensor);
  }
  return false;
}

Result<VirtualFile::Proof> VirtualFile::ProofOf(const Backing& backing) const {
  const ProvenRanges& proven = view_->opened().proven();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, backing.file->Stat());
  Proof proof{.stamp = StampOf(backing, info)};
  TENSORMOUNT_ASSIGN_OR_RETURN(proof.hashed, HasHashes());
  proof.whole = proven.AreProven(backing.number, proof.stamp, {0, size()});
  proof.unverified_bytes = size() - std::min(size(), proven.Bytes(backing.number, proof.stamp));
  return proof;
}

Status VirtualFile::ProveSegment(const Backing& backing, const FileStamp& stamp,
                                 const Segment& segment, std::uint64_t at, char* out,
                                 std::size_t size) const {
  const OpenedCheckpoint& opened = view_->opened();
  switch (segment.kind) {
    case Segment::Kind::kTensor: {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, TensorOf(segment));
      return opened.ReadBytes(tensor, segment.skip + at, out, size, ReadVerify::kOnce, nullptr);
    }
    case Segment::Kind::kObject:
      return opened.ReadObject(view_->shown().objects.parts()[segment.ordinal], at, out, size,
                               ReadVerify::kOnce);
    case Segment::Kind::kLiteral:
    case Segment::Kind::kText:
    case Segment::Kind::kBox:
      break;
  }
  // The view makes the bytes of this segment, so the index has no hash of them. They are made again
  // and compared with the bytes of the file.
  TENSORMOUNT_RETURN_IF_ERROR(ReadSegment(segment, at, out, size, nullptr));
  std::vector<char> found(size);
  const std::uint64_t begin = segment.begin + at;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n,
                               backing.file->ReadAt(begin, found.data(), size));
  // Not kDataLoss: no tensor is damaged; the file only differs from what the view shows.
  if (n != size || std::memcmp(found.data(), out, size) != 0) {
    return Status(Code::kUnavailable, label_ + ": its data file changed since it was opened");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, backing.file->Stat());
  const FileStamp now = StampOf(backing, info);
  if (now.IsUnwrittenSince(stamp)) opened.proven().Add(backing.number, now, {begin, begin + size});
  return Status();
}

Status VirtualFile::Prove(const Backing& backing, const Proceed& proceed) const {
  // Bytes verified between two calls of `proceed`; small, so that a cancelled verification ends
  // within some milliseconds.
  constexpr std::uint64_t kStep = std::uint64_t{1} << 20;
  const ProvenRanges& proven = view_->opened().proven();
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, backing.file->Stat());
  FileStamp stamp = StampOf(backing, info);
  if (proven.AreProven(backing.number, stamp, {0, size()})) return Status();
  const auto go_on = [&](std::uint64_t done) {
    if (!proceed || proceed(done)) return Status();
    return Status(Code::kCancelled, label_ + ": its verification was cancelled");
  };
  // A file that was just written may be written again within the same timestamp tick, unnoticed. So
  // its stamp is valid only after kSettleTime.
  const auto settle = [&](std::uint64_t done) -> Status {
    const Deadline settles = Deadline::After(FileStamp::kSettleTime);
    while (!stamp.IsSettled()) {
      TENSORMOUNT_RETURN_IF_ERROR(go_on(done));
      if (settles.Passed()) {
        return Status(Code::kUnavailable, label_ + ": its data file keeps changing");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return Status();
  };
  TENSORMOUNT_RETURN_IF_ERROR(settle(0));
  // Makes the reads below open the file by its name again, because another file may have got the
  // name since.
  view_->opened().EvictFile(backing.number);
  std::vector<char> scratch(static_cast<std::size_t>(std::min(size(), kStep)));
  for (std::uint64_t at = 0; at < size();) {
    TENSORMOUNT_RETURN_IF_ERROR(go_on(at));
    const auto n = static_cast<std::size_t>(std::min(kStep, size() - at));
    if (!proven.AreProven(backing.number, stamp, {at, at + n})) {
      TENSORMOUNT_RETURN_IF_ERROR(ForEachSegment(
          at, n,
          [&](const Segment& segment, std::uint64_t within, std::size_t done, std::size_t bytes) {
            return ProveSegment(backing, stamp, segment, within, scratch.data() + done, bytes);
          }));
      // Bytes that are still not proven have no hashes, or the file changed while they were read.
      if (!proven.AreProven(backing.number, stamp, {at, at + n})) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo after, backing.file->Stat());
        const FileStamp now = StampOf(backing, after);
        if (!now.IsUnwrittenSince(stamp) || now == stamp) {
          return Status(Code::kUnavailable,
                        label_ + ": its data file changed while it was verified");
        }
        // The stamp changed without a write: a save has just hard-linked the file, which changes
        // its ctime. Bytes read before the stamp has settled are not remembered, so they are read
        // again.
        stamp = now;
        TENSORMOUNT_RETURN_IF_ERROR(settle(at));
        continue;
      }
    }
    at += n;
  }
  return Status();
}

}  // namespace tensormount::fs
