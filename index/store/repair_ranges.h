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

// Finds the leaves of damaged data files that do not match their hashes, and combines the good
// leaves of the file and of the source. For one thread.
class RangeRepair {
 public:
  // Leaf hashes of each manifest, by the manifest's name.
  using Leaves = std::map<std::string, std::vector<Hash128>>;
  // Receives the number of compared bytes. A failure ends the repair.
  using Progress = std::function<Status(std::uint64_t bytes)>;
  // The arguments must outlive this object. If `leaves` does not have a manifest, the manifest is
  // lost, and only the roots of its ranges are known. `from` is the source's name for messages.
  RangeRepair(const Inventory& inventory, const Leaves& leaves, RepairSource& source,
              std::string from, Progress progress);

  // Number of bytes in leaves that do not match; 0 if the range has no hash. The whole range counts
  // if only its root is known and does not match, or if `file` is null. Fails if the bytes cannot
  // be compared.
  Result<std::uint64_t> BadBytes(File* file, const ScanRange& range, bool report_progress);

  // Writes a range to `out` (null: only counts). A leaf is taken from the old file if it matches
  // its hash there, else from the source if it matches there; if neither matches, the old bytes are
  // written. If only the root of the range is known, the whole range is treated like one leaf. Adds
  // the number of repaired bytes to `repaired`. Returns the damage that remains; nullopt if no
  // damage remains.
  Result<std::optional<RepairLeft>> RepairRange(const ScanRange& range, File* old, File* out,
                                                std::uint64_t& repaired);
  // Copies bytes [from, to) of the old file, as far as they can be read. They belong to no stored
  // range, or to a range that stays as it is.
  Status CopyUncovered(File* old, File* out, std::uint64_t from, std::uint64_t to);

 private:
  std::span<const Hash128> LeavesOf(const ScanRange& range, const RecordedHash& recorded) const;
  Status ReadOld(File* old, const ScanRange& range, std::uint64_t first, std::uint64_t count);
  Status Fetch(const ScanRange& range, std::span<const Hash128> leaves, std::uint64_t first,
               std::uint64_t count, std::uint64_t window, std::string& reason,
               std::uint64_t& repaired);
  Result<std::optional<RepairLeft>> RepairByRoot(const ScanRange& range, const Hash128& root,
                                                 File* old, File* out, std::uint64_t& repaired);
  Status CopyIfRootMatches(RepairSource::Way way, const ScanRange& range, const Hash128& root,
                           File* out);
  RepairLeft RemainingDamage(const ScanRange& range, std::uint64_t at,
                             const std::string& reason) const;

  const Inventory& inventory_;
  const Leaves& leaves_;
  RepairSource& source_;
  const std::string from_;
  const Progress progress_;
  // The leaves that were read from the old file. Fetch replaces bad leaves in this buffer.
  std::vector<std::byte> buffer_;
  // Whether buffer_ has the bytes of each leaf.
  std::vector<bool> is_present_;
  std::vector<std::byte> fetched_;  // Bytes from the source.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_REPAIR_RANGES_H_
