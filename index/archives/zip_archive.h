// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_ZIP_ARCHIVE_H_
#define TENSORMOUNT_INDEX_ARCHIVES_ZIP_ARCHIVE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"

// Zip archives of stored (uncompressed) entries (APPNOTE.TXT 6.3.10), as torch.save and numpy.savez
// write them. An archive may be a part of a larger file. All offsets in this header count from the
// start of the file.

namespace tensormount {

// An uncompressed entry: its content is [offset, offset + size) of the file.
struct ZipEntry {
  std::string name;
  std::uint64_t header = 0;  // Offset of the local header.
  std::uint64_t offset = 0;  // Offset of the content.
  std::uint64_t size = 0;
  std::uint32_t crc = 0;
};

class ZipArchive {
 public:
  // Reads the archive in bytes [begin, begin + length) of the file, beginning at its end: end
  // record, zip64 locator and record if present, central directory, then every local header.
  // kUnsupported for compressed or encrypted entries, which the message names, and for archives on
  // several disks.
  // kDataLoss for contradictions: between the two end records; between the local and the central
  // header of an entry (name, method, flags; also sizes and CRC, or, with flag bit 3, those of
  // the data descriptor). Also kDataLoss for entries that overlap or lie outside of the archive,
  // for duplicate or unsafe names (absolute, "." or "..", control characters, backslash, not
  // UTF-8), and for a central directory over 64 MiB or with a wrong number of entries.
  static Result<ZipArchive> Read(File& file, std::uint64_t begin, std::uint64_t length);

  // All entries, sorted by name.
  const std::vector<ZipEntry>& entries() const { return entries_; }
  // The entry of this name; null if there is none. O(log entries).
  const ZipEntry* Find(std::string_view name) const;

 private:
  std::vector<ZipEntry> entries_;
};

// Compares the CRC-32 of an entry's bytes with the CRC in the archive. Calls `read` after each
// block that was read, with its size. kDataLoss names entry and file. OK if the CRC in the archive
// is zero, because torch may write archives without CRCs.
Status CheckZipCrc(File& file, const ZipEntry& entry,
                   const std::function<Status(std::uint64_t bytes)>& read = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_ARCHIVES_ZIP_ARCHIVE_H_
