// SPDX-License-Identifier: Apache-2.0
// Zip archives as torch.save writes them: stored entries, data aligned by padding in extra fields,
// zip64 for values over 32 bits.
#include "fs/formats/zip_writer.h"

#include <algorithm>

#include "base/crc32.h"

namespace tensormount::fs {
namespace {

constexpr std::uint64_t kMax32 = 0xFFFFFFFF;
// Bit 3: sizes and CRC are in the descriptor; bit 11: names are UTF-8.
constexpr std::uint64_t kFlags = 0x0808;

// All numbers of a zip are little-endian.
void Little(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

// The zip64 extra field for values over 32 bits; empty if both values fit. The size is written
// twice (compressed and uncompressed). Values that fit 32 bits are omitted, as the format requires.
std::string Zip64(std::uint64_t size, std::uint64_t header) {
  std::string fields;
  if (size >= kMax32) {
    Little(fields, size, 8);
    Little(fields, size, 8);
  }
  if (header >= kMax32) Little(fields, header, 8);
  if (fields.empty()) return fields;
  std::string out;
  Little(out, 1, 2);
  Little(out, fields.size(), 2);
  return out + fields;
}

}  // namespace

// Whether the sizes in the descriptor have 64 bits, as they must if the header has a zip64 extra
// field.
bool ZipWriter::IsLong(const Entry& entry) {
  return entry.size >= kMax32 || entry.header >= kMax32;
}

void ZipWriter::Header(const Entry& entry, std::string& out) {
  std::string extra = Zip64(entry.size, entry.header);
  const std::uint64_t fixed = 30 + entry.name.size();
  // Offset of the entry's bytes if the padding field were empty. The field's own header has 4
  // bytes.
  const std::uint64_t start = size_ + fixed + extra.size() + 4;
  const std::uint64_t padding = (kAlignment - start % kAlignment) % kAlignment;
  extra += "FB";
  Little(extra, padding, 2);
  extra.append(static_cast<std::size_t>(padding), 'Z');

  Little(out, 0x04034b50, 4);
  Little(out, 0, 2);  // Version needed.
  Little(out, kFlags, 2);
  Little(out, 0, 2);        // Method: stored.
  Little(out, 0, 4);        // Time and date.
  out.append(4 * 3, '\0');  // CRC and sizes are in the descriptor.
  Little(out, entry.name.size(), 2);
  Little(out, extra.size(), 2);
  out += entry.name;
  out += extra;
  size_ += fixed + extra.size();
}

// The signature 'PK\7\8' before the CRC is optional in the format, but readers and torch expect it.
void ZipWriter::Descriptor(const Entry& entry, std::string& out) {
  const int width = IsLong(entry) ? 8 : 4;
  Little(out, 0x08074b50, 4);
  Little(out, entry.crc, 4);
  Little(out, entry.size, width);
  Little(out, entry.size, width);
  size_ += 8 + 2 * static_cast<std::uint64_t>(width);
}

void ZipWriter::Add(std::string_view name, std::string_view bytes, std::string& out) {
  entries_.push_back({.name = "archive/" + std::string(name),
                      .header = size_,
                      .size = bytes.size(),
                      .crc = Crc32Extend(0, bytes.data(), bytes.size())});
  Header(entries_.back(), out);
  out.append(bytes);
  size_ += bytes.size();
  Descriptor(entries_.back(), out);
}

void ZipWriter::Begin(std::string_view name, std::uint64_t size, std::string& out) {
  entries_.push_back({.name = "archive/" + std::string(name), .header = size_, .size = size});
  Entry& entry = entries_.back();
  Header(entry, out);
  if (size > 0) {
    entry.hole = holes_.size();
    holes_.push_back({.covered = {size_, size_ + size}});
  }
  size_ += size;
}

void ZipWriter::End(std::string& out) {
  const Entry& entry = entries_.back();
  // The CRC follows the descriptor's signature.
  if (entry.hole != kNoHole) holes_[entry.hole].positions[0] = size_ + 4;
  Descriptor(entry, out);
}

void ZipWriter::Finish(std::string& out) {
  const std::uint64_t directory = size_;
  for (const Entry& entry : entries_) {
    const std::string extra = Zip64(entry.size, entry.header);
    // In a header of the central directory the CRC is at offset 16.
    if (entry.hole != kNoHole) holes_[entry.hole].positions[1] = size_ + 16;
    Little(out, 0x02014b50, 4);
    Little(out, 0, 2);  // Version made by.
    Little(out, 0, 2);  // Version needed.
    Little(out, kFlags, 2);
    Little(out, 0, 2);
    Little(out, 0, 4);
    Little(out, entry.crc, 4);
    Little(out, std::min(entry.size, kMax32), 4);
    Little(out, std::min(entry.size, kMax32), 4);
    Little(out, entry.name.size(), 2);
    Little(out, extra.size(), 2);
    Little(out, 0, 2);  // Length of the comment.
    Little(out, 0, 2);  // Number of the disk.
    Little(out, 0, 2);  // Internal attributes.
    Little(out, 0, 4);
    Little(out, std::min(entry.header, kMax32), 4);
    out += entry.name;
    out += extra;
    size_ += 46 + entry.name.size() + extra.size();
  }
  // Always writes the zip64 end record and its locator, then the plain end record with capped
  // numbers.
  const std::uint64_t bytes = size_ - directory;
  const std::uint64_t end64 = size_;
  const std::uint64_t count = entries_.size();
  Little(out, 0x06064b50, 4);
  Little(out, 44, 8);
  Little(out, 0x031e, 2);
  Little(out, 0x002d, 2);
  Little(out, 0, 4 + 4);
  Little(out, count, 8);
  Little(out, count, 8);
  Little(out, bytes, 8);
  Little(out, directory, 8);
  Little(out, 0x07064b50, 4);
  Little(out, 0, 4);
  Little(out, end64, 8);
  Little(out, 1, 4);
  Little(out, 0x06054b50, 4);
  Little(out, 0, 2 + 2);
  Little(out, std::min<std::uint64_t>(count, 0xFFFF), 2);
  Little(out, std::min<std::uint64_t>(count, 0xFFFF), 2);
  Little(out, std::min(bytes, kMax32), 4);
  Little(out, std::min(directory, kMax32), 4);
  Little(out, 0, 2);
  size_ += 56 + 20 + 22;
}

}  // namespace tensormount::fs
