// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_REPAIR_SOURCE_H_
#define TENSORMOUNT_INDEX_STORE_REPAIR_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/read/scan.h"
#include "index/records/commit_record.h"
#include "index/records/inventory.h"

namespace tensormount {

// Where a repair gets bytes from: another checkpoint that holds the same. Nothing that it gives is
// proved; the repair compares it with the recorded hashes. Of one thread.
class RepairSource {
 public:
  // `inventory` is that of the damaged checkpoint, `commit` its COMMIT; both must outlive this.
  // `writers`: uuids of checkpoints that may have written its files.
  static Result<std::unique_ptr<RepairSource>> Make(std::shared_ptr<OpenedCheckpoint> other,
                                                    const Inventory& inventory,
                                                    const CommitRecord& commit,
                                                    const std::set<Uuid>& writers);

  // Ways to the same bytes, tried in this order until the hash agrees.
  enum class Way : std::uint8_t {
    kSameFile,  // A file that the other one's COMMIT lists alike, at the same offset.
    kContent,   // The tensor's cells, the object, or a header that is made again.
  };
  // Bytes [at, at + size) of a stored range. Not ok: why they cannot be had that way.
  Status Read(Way way, const ScanRange& range, std::uint64_t at, std::byte* out, std::size_t size);

 private:
  RepairSource(std::shared_ptr<OpenedCheckpoint> other, const Inventory& inventory,
               const CommitRecord& commit, const std::set<Uuid>& writers)
      : other_(std::move(other)), inventory_(inventory), commit_(commit), writers_(writers) {}
  Status ReadSameFile(const ScanRange& range, std::uint64_t at, std::byte* out, std::size_t size);
  Status ReadTensor(const ScanRange& range, std::uint64_t at, std::byte* out, std::size_t size);
  Status ReadObject(const ObjectRecord& object, std::uint64_t at, std::byte* out,
                    std::size_t size) const;
  Status ReadHeader(const ScanRange& range, std::uint64_t at, std::byte* out, std::size_t size);
  // The header of a safetensors file as the save wrote it; empty: it cannot be made again.
  std::string MakeHeader(const ScanRange& range) const;
  std::string ShardHeader(std::uint32_t file, const Uuid& writer, bool by_row) const;
  std::string ModelHeader(std::uint32_t file) const;

  const std::shared_ptr<OpenedCheckpoint> other_;
  const Inventory& inventory_;
  const CommitRecord& commit_;
  const std::set<Uuid> writers_;
  std::vector<ObjectRecord> objects_;  // Of the other one.
  // Of the file that was read last: its number here.
  std::optional<std::uint32_t> open_number_;
  std::unique_ptr<File> open_;
  // Headers that were made again, by number of the extra range.
  std::map<std::uint32_t, std::string> headers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_REPAIR_SOURCE_H_
