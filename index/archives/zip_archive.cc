// SPDX-License-Identifier: Apache-2.0
// The zip reader of zip_archive.h. It compares each entry of the central directory with the local
// header, because two readers that trust different headers would see different files. Entries that
// overlap, have two sizes or lie outside of the archive are refused. Nothing is decompressed.
//
//   [local header, name, extra][bytes][descriptor]   once for each entry
//   central directory: a record for each entry, with the offset of its local header
//   zip64 end record, zip64 locator                  where counts or sizes need 64 bits
//   end record, comment
//
// The archive is read from its end: the end record locates the central directory, which locates the
// local headers. Offsets in these records count from the start of the archive, which may be in the
// middle of a file (.distcp). Local headers are fetched together, so that a remote file usually
// costs three round trips: the end, the central directory, the local headers.
#include "index/archives/zip_archive.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/byte_range.h"
#include "base/checked.h"
#include "base/coding.h"
#include "base/crc32.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

constexpr std::uint32_t kLocalSignature = 0x04034b50;
constexpr std::uint32_t kCentralSignature = 0x02014b50;
constexpr std::uint32_t kDescriptorSignature = 0x08074b50;
constexpr std::uint32_t kEndSignature = 0x06054b50;
constexpr std::uint32_t kEnd64Signature = 0x06064b50;
constexpr std::uint32_t kLocator64Signature = 0x07064b50;
constexpr std::size_t kLocalBytes = 30;
constexpr std::size_t kCentralBytes = 46;
constexpr std::size_t kEndBytes = 22;
constexpr std::size_t kEnd64Bytes = 56;
constexpr std::size_t kLocator64Bytes = 20;
constexpr std::size_t kMostDescriptor = 24;
constexpr std::uint32_t kIn64 = 0xffffffff;  // Means that the value is in the zip64 field.
constexpr std::uint16_t kIn64Short = 0xffff;
// Limit of the central directory: room for several hundred thousand entries. torch writes one for
// each storage.
constexpr std::uint64_t kMaxDirectory = std::uint64_t{64} << 20;

constexpr std::uint16_t kEncrypted = 1 << 0;
constexpr std::uint16_t kHasDescriptor = 1 << 3;
constexpr std::uint16_t kStrongEncryption = 1 << 6;
constexpr std::uint16_t kMasked = 1 << 13;
constexpr std::uint16_t kStored = 0;  // The method without compression.

std::string ShownEntry(std::string_view name) {
  std::string out = "entry '";
  for (const char c : name.substr(0, 100)) {
    const auto u = static_cast<unsigned char>(c);
    out += u < 0x20 || u >= 0x7f ? '?' : c;
  }
  return out + (name.size() > 100 ? "...'" : "'");
}

// The reason why a name is refused; empty if it is accepted.
std::string_view NameFault(std::string_view name) {
  if (name.empty()) return "has no name";
  if (name.front() == '/') return "has an absolute name";
  if (!IsUtf8(name)) return "has a name that is not valid UTF-8";
  for (const char c : name) {
    if (c == '\0') return "has a NUL in its name";
    if (c == '\\') return "has a backslash in its name";
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      return "has control characters in its name";
  }
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('/', at), name.size());
    const std::string_view part = name.substr(at, end - at);
    if (part == ".." || part == ".") return "has a name with '.' or '..'";
    at = end + 1;
  }
  return {};
}

// Reads small records with few reads. The first Get reads an archive of up to 4 KiB as a whole. In
// a larger archive Get reads at least 4 KiB from the requested offset, so that neighbouring headers
// come together, unless Fetch has read the requested bytes already.
class Window {
 public:
  Window(File& file, std::uint64_t begin, std::uint64_t length)
      : file_(file), begin_(begin), length_(length) {}

  // Bytes [offset, offset + n) of the archive. Valid until the next call. kDataLoss if they reach
  // past the end of the archive.
  Result<const char*> Get(std::uint64_t offset, std::size_t n) {
    if (!RangeWithin(offset, n, length_)) {
      return Status(Code::kDataLoss, "reaches past the end of the archive");
    }
    if (const char* const known = Fetched(offset, n); known != nullptr) return known;
    if (offset < at_ || offset + n > at_ + size_) {
      at_ = length_ <= kSmall ? 0 : offset;
      size_ = 0;
      buffer_.resize(
          static_cast<std::size_t>(std::min(length_ - at_, std::max<std::uint64_t>(n, kSmall))));
      TENSORMOUNT_RETURN_IF_ERROR(file_.ReadExactAt(begin_ + at_, buffer_.data(), buffer_.size()));
      size_ = buffer_.size();
    }
    return buffer_.data() + (offset - at_);
  }

  // Reads sorted ranges of the archive together, and forgets the ranges of the previous Fetch.
  // Ranges with small gaps are read as one. Errors are ignored: Get reads a range that Fetch could
  // not read, and returns its error.
  void Fetch(std::span<const ByteRange> ranges) {
    fetched_.clear();
    if (length_ <= kSmall) return;
    std::uint64_t bytes = 0;
    for (const ByteRange& range : ranges) {
      if (fetched_.empty() || range.begin > fetched_.back().range.end + kMaxGap) {
        fetched_.push_back({range, bytes});
      }
      ByteRange& last = fetched_.back().range;
      last.end = std::max(last.end, range.end);
      bytes = fetched_.back().at + last.size();
    }
    fetched_bytes_.resize(static_cast<std::size_t>(bytes));
    const std::span<std::byte> out = std::as_writable_bytes(std::span(fetched_bytes_));
    std::vector<ReadRun> runs;
    for (const FetchedRange& piece : fetched_) {
      runs.push_back({begin_ + piece.range.begin, out.subspan(piece.at, piece.range.size())});
    }
    if (!file_.ReadMany(runs).ok()) fetched_.clear();
  }

 private:
  static constexpr std::uint64_t kSmall = 4096;
  static constexpr std::uint64_t kMaxGap = 1024;

  struct FetchedRange {
    ByteRange range;
    std::uint64_t at = 0;  // Position in fetched_bytes_.
  };

  const char* Fetched(std::uint64_t offset, std::size_t n) const {
    const auto after = std::upper_bound(
        fetched_.begin(), fetched_.end(), offset,
        [](std::uint64_t wanted, const FetchedRange& piece) { return wanted < piece.range.begin; });
    if (after == fetched_.begin()) return nullptr;
    const FetchedRange& piece = *std::prev(after);
    if (!piece.range.Contains({offset, offset + n})) return nullptr;
    return fetched_bytes_.data() + piece.at + (offset - piece.range.begin);
  }

  File& file_;
  const std::uint64_t begin_;
  const std::uint64_t length_;
  std::string buffer_;
  std::uint64_t at_ = 0;
  std::uint64_t size_ = 0;
  std::vector<FetchedRange> fetched_;
  std::string fetched_bytes_;
};

// The zip64 field among extra fields. Empty if there is none; nullopt if the fields are damaged. A
// second zip64 field is damage, because readers differ in which one they use.
std::optional<std::string_view> Zip64Field(std::string_view extra) {
  std::string_view found;
  while (!extra.empty()) {
    // Some writers pad the extra fields with fewer than four bytes.
    if (extra.size() < 4) return found;
    const auto id = LoadLittle<std::uint16_t>(extra.data());
    const std::size_t size = LoadLittle<std::uint16_t>(extra.data() + 2);
    if (size > extra.size() - 4) return std::nullopt;
    if (id == 1) {
      if (!found.empty()) return std::nullopt;
      found = extra.substr(4, size);
    }
    extra.remove_prefix(4 + size);
  }
  return found;
}

// Takes the next 8 bytes of a zip64 field. The field has only those numbers that are 0xffffffff in
// the record, in the order size, packed size, header offset.
bool Take64(std::string_view& field, std::uint64_t& out) {
  if (field.size() < 8) return false;
  out = LoadLittle<std::uint64_t>(field.data());
  field.remove_prefix(8);
  return true;
}

// The length of the data descriptor at the start of `bytes`: 16, or 24 with 64-bit sizes. 0 if
// there is no descriptor with this CRC and size. The signature, optional in the standard, is
// required: torch writes it, and without a signature a descriptor cannot be distinguished from the
// next header. Writers may use 64-bit sizes for small entries as well.
std::size_t DescriptorBytes(std::string_view bytes, std::uint32_t crc, std::uint64_t size) {
  if (bytes.size() < 16 || LoadLittle<std::uint32_t>(bytes.data()) != kDescriptorSignature ||
      LoadLittle<std::uint32_t>(bytes.data() + 4) != crc) {
    return 0;
  }
  const char* p = bytes.data() + 8;
  if (size < kIn64 && LoadLittle<std::uint32_t>(p) == size &&
      LoadLittle<std::uint32_t>(p + 4) == size) {
    return 16;
  }
  if (bytes.size() >= 24 && LoadLittle<std::uint64_t>(p) == size &&
      LoadLittle<std::uint64_t>(p + 8) == size) {
    return 24;
  }
  return 0;
}

class ZipReader {
 public:
  ZipReader(File& file, std::uint64_t begin, std::uint64_t length)
      : file_(file), begin_(begin), length_(length), window_(file, begin, length) {}

  Result<std::vector<ZipEntry>> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(ReadEnd());
    TENSORMOUNT_RETURN_IF_ERROR(ReadDirectory());
    TENSORMOUNT_RETURN_IF_ERROR(ReadLocals());
    return std::move(entries_);
  }

 private:
  Status Damaged(std::string_view what) const {
    return Status(Code::kDataLoss, file_.path() + ": zip archive at byte " +
                                       std::to_string(begin_) + ": " + std::string(what));
  }
  Status Unsupported(std::string_view what) const {
    return Status(Code::kUnsupported, file_.path() + ": zip archive at byte " +
                                          std::to_string(begin_) + ": " + std::string(what));
  }

  Status ReadEnd();
  Status ReadEnd64(std::uint64_t end, bool needed);
  Status ReadDirectory();
  Status ReadCentral(std::string_view& left);
  Status ReadLocals();
  std::size_t FetchLocals(std::span<const std::uint32_t> order, std::size_t from);
  Status ReadLocal(std::size_t i, std::uint64_t& end);

  File& file_;
  const std::uint64_t begin_;
  const std::uint64_t length_;
  Window window_;
  std::uint64_t directory_ = 0;
  std::uint64_t directory_bytes_ = 0;
  std::uint64_t count_ = 0;
  std::vector<ZipEntry> entries_;
  // The flags of each entry in the central directory. Local headers must have the same flags.
  std::vector<std::uint16_t> flags_;
};

// Finds and reads the end record. The comment behind it may have 65,535 bytes, so the search covers
// about the last 64 KiB. The last KiB is searched first, which usually also holds the zip64 records
// and a small central directory.
Status ZipReader::ReadEnd() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file_.Stat());
  if (!RangeWithin(begin_, length_, info.size)) {
    return Damaged("the " + std::to_string(length_) + " bytes reach past the end of the file");
  }
  if (length_ < kEndBytes) {
    return Damaged(std::to_string(length_) + " bytes are too few for a zip archive");
  }
  for (const std::uint64_t tail : {std::uint64_t{1024}, std::uint64_t{kEndBytes} + 0xffff}) {
    const auto size = static_cast<std::size_t>(std::min(tail, length_));
    const std::uint64_t first = length_ - size;
    TENSORMOUNT_ASSIGN_OR_RETURN(const char* const bytes, window_.Get(first, size));
    for (std::size_t at = size - kEndBytes + 1; at-- > 0;) {
      const char* p = bytes + at;
      if (LoadLittle<std::uint32_t>(p) != kEndSignature) continue;
      // Other readers use the last signature, even if its record is invalid. A record further up
      // would describe another archive.
      const std::string_view comment(p + kEndBytes, size - at - kEndBytes);
      if (LoadLittle<std::uint16_t>(p + 20) != comment.size()) {
        return Damaged("the end record does not give the length of the comment");
      }
      if (comment.find("PK\5\6") != std::string_view::npos) {
        return Damaged("the comment looks like an end record");
      }
      const auto disk = LoadLittle<std::uint16_t>(p + 4);
      const auto directory_disk = LoadLittle<std::uint16_t>(p + 6);
      const auto here = LoadLittle<std::uint16_t>(p + 8);
      count_ = LoadLittle<std::uint16_t>(p + 10);
      directory_bytes_ = LoadLittle<std::uint32_t>(p + 12);
      directory_ = LoadLittle<std::uint32_t>(p + 16);
      if ((disk != 0 && disk != kIn64Short) ||
          (directory_disk != 0 && directory_disk != kIn64Short)) {
        return Unsupported("the archive is spread over several disks");
      }
      if (here != count_) return Damaged("the end record has two different entry counts");
      const bool needed = count_ == kIn64Short || directory_bytes_ == kIn64 ||
                          directory_ == kIn64 || disk == kIn64Short;
      return ReadEnd64(first + at, needed);
    }
    if (size == length_) break;
  }
  return Damaged("the archive has no end record");
}

// The zip64 locator is directly before the end record. If there is a locator, the zip64 record
// applies, and numbers in the end record that are not 0xffffffff must agree with it, because
// readers differ in which of the two they use.
Status ZipReader::ReadEnd64(std::uint64_t end, bool needed) {
  std::uint64_t directory_end = end;
  const char* p = nullptr;
  if (end >= kLocator64Bytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(p, window_.Get(end - kLocator64Bytes, kLocator64Bytes));
  }
  if (p != nullptr && LoadLittle<std::uint32_t>(p) == kLocator64Signature) {
    const auto offset = LoadLittle<std::uint64_t>(p + 8);
    if (LoadLittle<std::uint32_t>(p + 4) != 0 || LoadLittle<std::uint32_t>(p + 16) > 1) {
      return Unsupported("the archive is spread over several disks");
    }
    const std::uint64_t locator = end - kLocator64Bytes;
    if (!RangeWithin(offset, kEnd64Bytes, locator)) {
      return Damaged("the zip64 locator points outside of the archive");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(p, window_.Get(offset, kEnd64Bytes));
    // The size field of the zip64 record does not count its first twelve bytes.
    const auto size = LoadLittle<std::uint64_t>(p + 4);
    if (LoadLittle<std::uint32_t>(p) != kEnd64Signature || size != locator - offset - 12) {
      return Damaged("the zip64 end record is not where the locator points");
    }
    const auto here = LoadLittle<std::uint64_t>(p + 24);
    const auto count = LoadLittle<std::uint64_t>(p + 32);
    const auto bytes = LoadLittle<std::uint64_t>(p + 40);
    const auto directory = LoadLittle<std::uint64_t>(p + 48);
    if (LoadLittle<std::uint32_t>(p + 16) != 0 || LoadLittle<std::uint32_t>(p + 20) != 0) {
      return Unsupported("the archive is spread over several disks");
    }
    if (here != count || (count_ != kIn64Short && count_ != count) ||
        (directory_bytes_ != kIn64 && directory_bytes_ != bytes) ||
        (directory_ != kIn64 && directory_ != directory)) {
      return Damaged("the end record and the zip64 end record disagree");
    }
    count_ = count;
    directory_bytes_ = bytes;
    directory_ = directory;
    directory_end = offset;
  } else if (needed) {
    return Damaged("the archive has no zip64 end record, although the end record requires one");
  }
  if (!RangeWithin(directory_, directory_bytes_, directory_end) ||
      directory_ + directory_bytes_ != directory_end) {
    return Damaged("the central directory does not end where its end record begins");
  }
  if (directory_bytes_ > kMaxDirectory) {
    return Damaged("the central directory takes " + std::to_string(directory_bytes_) +
                   " bytes, over the limit of " + std::to_string(kMaxDirectory));
  }
  if (count_ > directory_bytes_ / kCentralBytes) {
    return Damaged("the central directory is too short for " + std::to_string(count_) + " entries");
  }
  return Status();
}

Status ZipReader::ReadDirectory() {
  const auto size = static_cast<std::size_t>(directory_bytes_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const char* const bytes, window_.Get(directory_, size));
  entries_.reserve(static_cast<std::size_t>(count_));
  flags_.reserve(static_cast<std::size_t>(count_));
  std::string_view left(bytes, size);
  for (std::uint64_t i = 0; i < count_; ++i) TENSORMOUNT_RETURN_IF_ERROR(ReadCentral(left));
  if (!left.empty()) return Damaged("the central directory has data after its last entry");
  return Status();
}

// Reads the record of one entry from the front of `left`, and removes it.
Status ZipReader::ReadCentral(std::string_view& left) {
  const char* p = left.data();
  if (left.size() < kCentralBytes || LoadLittle<std::uint32_t>(p) != kCentralSignature) {
    return Damaged("entry " + std::to_string(entries_.size()) +
                   " of the central directory is invalid");
  }
  const std::size_t name_bytes = LoadLittle<std::uint16_t>(p + 28);
  const std::size_t extra_bytes = LoadLittle<std::uint16_t>(p + 30);
  const std::size_t comment_bytes = LoadLittle<std::uint16_t>(p + 32);
  if (name_bytes + extra_bytes + comment_bytes > left.size() - kCentralBytes) {
    return Damaged("the central directory is truncated");
  }
  const std::string_view name = left.substr(kCentralBytes, name_bytes);
  const std::string_view extra = left.substr(kCentralBytes + name_bytes, extra_bytes);
  left.remove_prefix(kCentralBytes + name_bytes + extra_bytes + comment_bytes);

  ZipEntry entry;
  entry.name = std::string(name);
  const auto damaged = [&](std::string_view what) {
    return Damaged(ShownEntry(name) + ' ' + std::string(what));
  };
  if (const std::string_view fault = NameFault(name); !fault.empty()) return damaged(fault);
  const auto flags = LoadLittle<std::uint16_t>(p + 8);
  const auto method = LoadLittle<std::uint16_t>(p + 10);
  if ((flags & (kEncrypted | kStrongEncryption | kMasked)) != 0) {
    return Unsupported(ShownEntry(name) + " is encrypted");
  }
  if (method != kStored) {
    return Unsupported(ShownEntry(name) + " is compressed (method " + std::to_string(method) +
                       "), so its bytes cannot be read in place");
  }
  entry.crc = LoadLittle<std::uint32_t>(p + 16);
  std::uint64_t packed = LoadLittle<std::uint32_t>(p + 20);
  entry.size = LoadLittle<std::uint32_t>(p + 24);
  entry.header = LoadLittle<std::uint32_t>(p + 42);
  const std::optional<std::string_view> field = Zip64Field(extra);
  if (!field) return damaged("has damaged extra fields");
  std::string_view big = *field;
  if ((entry.size == kIn64 && !Take64(big, entry.size)) ||
      (packed == kIn64 && !Take64(big, packed)) ||
      (entry.header == kIn64 && !Take64(big, entry.header))) {
    return damaged("lacks its zip64 sizes");
  }
  if (const auto disk = LoadLittle<std::uint16_t>(p + 34); disk != 0 && disk != kIn64Short) {
    return Unsupported(ShownEntry(name) + " is on another disk");
  }
  // The two sizes of an uncompressed entry are equal.
  if (packed != entry.size) return damaged("is stored uncompressed, but has two different sizes");
  if (!RangeWithin(entry.header, entry.size, directory_)) {
    return damaged("is outside of the archive");
  }
  entries_.push_back(std::move(entry));
  flags_.push_back(flags);
  return Status();
}

// Reads the local headers in the order of the file, so that the window moves forward and each entry
// is compared with the end of the previous entry.
Status ZipReader::ReadLocals() {
  std::vector<std::uint32_t> order(entries_.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  std::sort(order.begin(), order.end(), [this](std::uint32_t a, std::uint32_t b) {
    return entries_[a].header < entries_[b].header;
  });
  std::uint64_t end = 0;
  std::size_t fetched = 0;
  for (std::size_t n = 0; n < order.size(); ++n) {
    const std::uint32_t i = order[n];
    if (entries_[i].header < end) {
      return Damaged(ShownEntry(entries_[i].name) + " overlaps another entry");
    }
    if (n == fetched) fetched = FetchLocals(order, n);
    TENSORMOUNT_RETURN_IF_ERROR(ReadLocal(i, end));
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const ZipEntry& a, const ZipEntry& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(entries_.begin(), entries_.end(),
                         [](const ZipEntry& a, const ZipEntry& b) { return a.name == b.name; });
  if (twice != entries_.end()) return Damaged(ShownEntry(twice->name) + " occurs twice");
  return Status();
}

// Fetches local headers from order[from] on, up to a limit. Each is fetched with the data
// descriptor that may precede it. Returns the position in `order` after the last entry fetched.
std::size_t ZipReader::FetchLocals(std::span<const std::uint32_t> order, std::size_t from) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;
  // torch pads extra fields so that contents begin at multiples of 64 bytes.
  constexpr std::uint64_t kExtraBytes = 128;
  std::vector<ByteRange> ranges;
  std::uint64_t bytes = 0;
  const auto add = [&](std::uint64_t header, std::uint64_t size) {
    ranges.push_back({header - std::min<std::uint64_t>(header, kMostDescriptor),
                      std::min(directory_, header + size)});
    bytes += ranges.back().size();
  };
  std::size_t n = from;
  for (; n < order.size() && bytes < kMostBytes; ++n) {
    const ZipEntry& entry = entries_[order[n]];
    add(entry.header, kLocalBytes + entry.name.size() + kExtraBytes);
  }
  // Also fetch the data descriptor of the last entry.
  if (n == order.size()) add(directory_, 0);
  window_.Fetch(ranges);
  return n;
}

// Reads the local header of entry i. Only the local header gives the offset of the entry's bytes:
// its extra field may be longer than in the central directory (torch pads it to align payloads).
Status ZipReader::ReadLocal(std::size_t i, std::uint64_t& end) {
  ZipEntry& entry = entries_[i];
  const std::uint16_t flags = flags_[i];
  const auto damaged = [&](std::string_view what) {
    return Damaged(ShownEntry(entry.name) + ' ' + std::string(what));
  };
  const auto outside = [&](const Status& status) {
    return status.code() == Code::kDataLoss ? damaged(status.message()) : status;
  };
  Result<const char*> got = window_.Get(entry.header, kLocalBytes);
  if (!got.ok()) return outside(got.status());
  if (LoadLittle<std::uint32_t>(got.value()) != kLocalSignature) {
    return damaged("has no local header");
  }
  const std::size_t name_bytes = LoadLittle<std::uint16_t>(got.value() + 26);
  const std::size_t extra_bytes = LoadLittle<std::uint16_t>(got.value() + 28);
  got = window_.Get(entry.header, kLocalBytes + name_bytes + extra_bytes);
  if (!got.ok()) return outside(got.status());
  const char* p = got.value();
  if (LoadLittle<std::uint16_t>(p + 6) != flags || LoadLittle<std::uint16_t>(p + 8) != kStored ||
      std::string_view(p + kLocalBytes, name_bytes) != entry.name) {
    return damaged("has a local header with another name, method or flags");
  }
  const bool described = (flags & kHasDescriptor) != 0;
  const auto crc = LoadLittle<std::uint32_t>(p + 14);
  std::uint64_t packed = LoadLittle<std::uint32_t>(p + 18);
  std::uint64_t size = LoadLittle<std::uint32_t>(p + 22);
  const std::optional<std::string_view> field =
      Zip64Field({p + kLocalBytes + name_bytes, extra_bytes});
  if (!field) return damaged("has damaged extra fields in its local header");
  std::string_view big = *field;
  if ((size == kIn64 && !Take64(big, size)) || (packed == kIn64 && !Take64(big, packed))) {
    return damaged("lacks its zip64 sizes in its local header");
  }
  // If there is a descriptor, the fields of the local header may be zero.
  const bool unknown = described && crc == 0 && packed == 0 && size == 0;
  if (!unknown && (crc != entry.crc || packed != entry.size || size != entry.size)) {
    return damaged("has a local header with another size or CRC");
  }
  entry.offset = entry.header + kLocalBytes + name_bytes + extra_bytes;
  if (!RangeWithin(entry.offset, entry.size, directory_)) {
    return damaged("is outside of the archive");
  }
  end = entry.offset + entry.size;
  // Flag bit 3: the sizes and the CRC follow the bytes, because they were not known when the writer
  // wrote the header.
  if (described) {
    const auto left =
        static_cast<std::size_t>(std::min<std::uint64_t>(kMostDescriptor, directory_ - end));
    got = window_.Get(end, left);
    if (!got.ok()) return outside(got.status());
    const std::size_t bytes = DescriptorBytes({got.value(), left}, entry.crc, entry.size);
    if (bytes == 0) return damaged("has a data descriptor that does not match");
    end += bytes;
  }
  entry.header += begin_;
  entry.offset += begin_;
  return Status();
}

}  // namespace

Result<ZipArchive> ZipArchive::Read(File& file, std::uint64_t begin, std::uint64_t length) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ZipEntry> entries, ZipReader(file, begin, length).Run());
  ZipArchive out;
  out.entries_ = std::move(entries);
  return out;
}

const ZipEntry* ZipArchive::Find(std::string_view name) const {
  const auto at =
      std::lower_bound(entries_.begin(), entries_.end(), name,
                       [](const ZipEntry& e, std::string_view wanted) { return e.name < wanted; });
  return at != entries_.end() && at->name == name ? &*at : nullptr;
}

// Blocks of 1 MiB are read, because an entry may be as large as a tensor.
Status CheckZipCrc(File& file, const ZipEntry& entry,
                   const std::function<Status(std::uint64_t bytes)>& read) {
  if (entry.crc == 0) return Status();
  std::string buffer(static_cast<std::size_t>(std::min<std::uint64_t>(entry.size, 1 << 20)), '\0');
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < entry.size;) {
    const auto n =
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), entry.size - done));
    TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(entry.offset + done, buffer.data(), n));
    crc = Crc32Extend(crc, buffer.data(), n);
    done += n;
    if (read) TENSORMOUNT_RETURN_IF_ERROR(read(n));
  }
  if (crc == entry.crc) return Status();
  return Status(Code::kDataLoss,
                file.path() + ": " + ShownEntry(entry.name) + " has a checksum mismatch (CRC-32)");
}

}  // namespace tensormount
