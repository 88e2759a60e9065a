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

// Source of a repair: another checkpoint with the same data. The bytes of the source are not
// trusted; the repair compares them with the recorded hashes. For one thread.
class RepairSource {
 public:
  // `inventory` and `commit` belong to the damaged checkpoint and must outlive this object.
  // `writers` are uuids of checkpoints that may have written the files of the damaged checkpoint.
  static Result<std::unique_ptr<RepairSource>> Make(std::shared_ptr<OpenedCheckpoint> other,
                                                    const Inventory& inventory,
                                                    const CommitRecord& commit,
                                                    const std::set<Uuid>& writers);

  // Ways to get the bytes of a range. They are tried in this order until the hash matches.
  enum class Way : std::uint8_t {
    // From the same offset of a file with the same name, length and hash in the other COMMIT.
    kSameFile,
    // From the tensor's cells or the object, or by rebuilding a header.
    kContent,
  };
  // Reads bytes [at, at + size) of a stored range. An error says why the source cannot give the
  // bytes in this way.
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
  // Rebuilds the safetensors header that the save wrote; empty if that is not possible.
  std::string MakeHeader(const ScanRange& range) const;
  std::string ShardHeader(std::uint32_t file, const Uuid& writer, bool by_row) const;
  std::string ModelHeader(std::uint32_t file) const;

  const std::shared_ptr<OpenedCheckpoint> other_;
  const Inventory& inventory_;
  const CommitRecord& commit_;
  const std::set<Uuid> writers_;
  std::vector<ObjectRecord> objects_;  // Object parts of the other checkpoint.
  // The file that `open_` reads: its number in `inventory_`.
  std::optional<std::uint32_t> open_number_;
  std::unique_ptr<File> open_;
  // Rebuilt headers, by the number of the extra range.
  std::map<std::uint32_t, std::string> headers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_REPAIR_SOURCE_H_
