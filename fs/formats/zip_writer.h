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

// Bytes of a file whose CRC-32 is known when they were copied, and where it then goes (4 bytes,
// little-endian). Offsets are the file's.
// The header of an entry comes before its bytes and must not wait for them: the CRC stands behind
// them in a data descriptor and in the central directory, and both stay zero until ranks
// have read all of the entry.
struct CrcHole {
  ByteRange covered;  // Never empty.
  std::array<std::uint64_t, 2> positions = {};
};

// Why 64: torch can map an archive, and tensors in it are then aligned. Why descriptors (bit 3 of
// the flags): the CRC is not known before the data were read, and ranks write in any order. Times
// are zero, so that equal checkpoints make equal archives.
// Sizes are exact from the begin: entries are laid out by arithmetic, and nothing is written before
// all is planned.
// Lays out an archive as torch.save writes it (caffe2/serialize/inline_container.cc over miniz):
// entries stored, their bytes at multiples of 64 by padding in the extra field "FB", sizes and CRC
// in a data descriptor behind them, zip64 where 32 bits do not do, and zip64 end records always.
// Makes the text around the entries; their bytes may come from elsewhere.
class ZipWriter {
 public:
  static constexpr std::uint64_t kAlignment = 64;

  // Bytes laid out so far, holes included. The archive begins at 0.
  std::uint64_t size() const { return size_; }

  // A whole entry.
  void Add(std::string_view name, std::string_view bytes, std::string& out);
  // An entry whose `size` bytes follow what is in `out` now; End() then continues behind them.
  // `out` gets the local header and its padding; the caller puts the entry's bytes there and then
  // calls End, before anything else.
  void Begin(std::string_view name, std::uint64_t size, std::string& out);
  void End(std::string& out);
  // The central directory. After it nothing may be added, and `holes` is complete.
  void Finish(std::string& out);

  // Of entries made by Begin that have any bytes.
  const std::vector<CrcHole>& holes() const { return holes_; }

 private:
  // What the central directory repeats at the end.
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
