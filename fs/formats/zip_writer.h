// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_ZIP_WRITER_H_
#define TENSORMOUNT_FS_FORMATS_ZIP_WRITER_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_range.h"

namespace tensormount::fs {

// Bytes of a file whose CRC-32 is known only after they were copied, and the two positions of that
// CRC (4 bytes, little-endian). Offsets are in the file.
// The CRC is in the data descriptor after the entry's bytes, and in the central directory. In both
// it is zero until the ranks of an export have read the whole entry; in a mount it stays zero.
struct CrcHole {
  ByteRange covered;  // The bytes that the CRC covers; never empty.
  std::array<std::uint64_t, 2> positions = {};
};

// Lays out an archive as torch.save writes it (caffe2/serialize/inline_container.cc over miniz):
// uncompressed entries, whose bytes begin at multiples of 64 thanks to padding in the extra field
// "FB"; after them a data descriptor with sizes and CRC; zip64 where 32 bits do not suffice, and
// always zip64 end records. The writer makes only the text around the bytes of large entries.
// The alignment lets torch map an archive with aligned tensors. The descriptors (bit 3 of the
// flags) let ranks write in any order, because the CRC is known only after the data were read.
// Times are zero, so that equal checkpoints give equal archives.
class ZipWriter {
 public:
  static constexpr std::uint64_t kAlignment = 64;

  // Number of bytes laid out so far, including bytes that the caller adds. The archive begins at 0.
  std::uint64_t size() const { return size_; }

  // Appends a complete entry to `out`.
  void Add(std::string_view name, std::string_view bytes, std::string& out);
  // Begins an entry of `size` bytes: appends the local header and its padding to `out`. The caller
  // adds the entry's bytes to the file after them, and then calls End before any other function.
  void Begin(std::string_view name, std::uint64_t size, std::string& out);
  void End(std::string& out);
  // Writes the central directory. Afterwards nothing may be added, and holes() is complete.
  void Finish(std::string& out);

  // One hole for each entry made by Begin, except empty ones.
  const std::vector<CrcHole>& holes() const { return holes_; }

 private:
  // An entry's fields, which the central directory repeats.
  struct Entry {
    std::string name;
    std::uint64_t header = 0;
    std::uint64_t size = 0;
    std::uint32_t crc = 0;
    std::size_t hole = kNoHole;
  };
  static constexpr std::size_t kNoHole = ~std::size_t{0};
  static bool IsLong(const Entry& entry);
  void Header(const Entry& entry, std::string& out);
  void Descriptor(const Entry& entry, std::string& out);

  std::uint64_t size_ = 0;
  std::vector<Entry> entries_;
  std::vector<CrcHole> holes_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_ZIP_WRITER_H_
