// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_REPAIR_RANGES_H_
#define TENSORMOUNT_INDEX_STORE_REPAIR_RANGES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/store_repair.h"

#include "base/file_system.h"
#include "index/read/scan.h"
#include "index/records/inventory.h"
#include "index/store/repair_source.h"

namespace tensormount {

struct RecordedHash;

// Stored ranges of damaged data files: which of their leaves differ from what is recorded, and the
// good ones of two sources put together. Of one thread.
class RangeRepair {
 public:
  using Leaves = std::map<std::string, std::vector<Hash128>>;  // By name of manifest.
  // Told how many bytes were compared. Not ok ends the repair.
  using Tell = std::function<Status(std::uint64_t bytes)>;
  // All must outlive this. A manifest that is not in `leaves` is lost: of its ranges only the roots
  // are known. `from`: what the source is called.
  RangeRepair(const Inventory& inventory, const Leaves& leaves, RepairSource& source,
              std::string from, Tell tell);

  // How many bytes of leaves differ; all of a range where only its root is known, and differs. Of a
  // file that is null all do. Not ok where that cannot be told.
  Result<std::uint64_t> BadBytes(File* file, const ScanRange& range, bool tell);

  // Writes a range to `out`: what is good of the old file, and the rest out of the source as far as
  // its hashes agree; where neither is good, the old bytes. `out` null: only counts. Adds to
  // `repaired`. What is left; none: the range is whole.
  Result<std::optional<RepairLeft>> Mend(const ScanRange& range, File* old, File* out,
                                         std::uint64_t& repaired);
  // Bytes [from, to) that no record vouches for, as far as they can be read.
  Status CopyAsItIs(File* old, File* out, std::uint64_t from, std::uint64_t to);

 private:
  std::span<const Hash128> LeavesOf(const ScanRange& range, const RecordedHash& recorded) const;
  Status ReadOld(File* old, const ScanRange& range, std::uint64_t first, std::uint64_t count);
  Status Fetch(const ScanRange& range, std::span<const Hash128> leaves, std::uint64_t first,
               std::uint64_t count, std::uint64_t window, std::string& reason,
               std::uint64_t& repaired);
  Result<std::optional<RepairLeft>> MendByRoot(const ScanRange& range, const Hash128& root,
                                               File* old, File* out, std::uint64_t& repaired);
  Status PassByRoot(RepairSource::Way way, const ScanRange& range, const Hash128& root, File* out);
  RepairLeft Left(const ScanRange& range, std::uint64_t at, const std::string& reason) const;

  const Inventory& inventory_;
  const Leaves& leaves_;
  RepairSource& source_;
  const std::string from_;
  const Tell tell_;
  std::vector<std::byte> buffer_;   // Leaves of the old file, repaired in place.
  std::vector<bool> there_;         // Which of them hold bytes.
  std::vector<std::byte> fetched_;  // Of the source.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_REPAIR_RANGES_H_
