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

// Zip archives of stored entries (APPNOTE.TXT 6.3.10), as torch.save and numpy.savez write them.
// They may stand inside of a larger file; all offsets below are the file's.

namespace tensormount {

// Stored bytes, so [offset, offset + size) of the file is what the entry holds.
struct ZipEntry {
  std::string name;
  std::uint64_t header = 0;  // Of its local header.
  std::uint64_t offset = 0;  // Of its bytes.
  std::uint64_t size = 0;
  std::uint32_t crc = 0;
};

class ZipArchive {
 public:
  // The archive in bytes [begin, begin + length) of the file. Read from its end: end record, zip64
  // locator and record where they are, central directory, then every local header.
  //   kUnsupported  compressed or encrypted entries, several disks (named)
  //   kDataLoss     anything that does not agree: end records (the last signature counts), counts,
  //   an entry's local and central
  //                 header (name, method, flags; sizes and CRC where flag bit 3 is clear, the data
  //                 descriptor where it is set), entries that overlap or reach outside, duplicate
  //                 or unsafe names (absolute, "..", NUL, backslash), a central directory of over
  //                 64 MiB or with more entries than fit it
  static Result<ZipArchive> Read(File& file, std::uint64_t begin, std::uint64_t length);

  const std::vector<ZipEntry>& entries() const { return entries_; }  // By name.
  // O(log entries). Null where there is none.
  const ZipEntry* Find(std::string_view name) const;

 private:
  std::vector<ZipEntry> entries_;
};

// CRC-32 of an entry's bytes against its record; kDataLoss names entry and file. torch may write
// archives without CRCs (zero): then ok.
Status CheckZipCrc(File& file, const ZipEntry& entry,
                   const std::function<Status(std::uint64_t bytes)>& read = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_ARCHIVES_ZIP_ARCHIVE_H_
