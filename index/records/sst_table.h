// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_SST_TABLE_H_
#define TENSORMOUNT_INDEX_RECORDS_SST_TABLE_H_

#include <functional>
#include <memory>
#include <string>

#include "base/file_system.h"
#include "index/records/checkpoint_index.h"
#include "index/records/commit_record.h"
#include "index/records/inventory.h"

namespace tensormount {

// Identity of the checkpoint in the properties of an SST file. An open compares it with COMMIT.
struct SstIdentity {
  std::string uuid;          // Hex.
  std::string content_root;  // Hex.
  friend bool operator==(const SstIdentity&, const SstIdentity&) = default;
};

// An immutable RocksDB SST file as a Table, without a database, threads or other files.
// Thread-safe. A block checksum mismatch is kDataLoss with the file's name.
// The format is RocksDB's block-based table: sorted 16 KiB blocks with checksums, and a block index
// at the end. A look-up is two binary searches and usually at most one block read. Each table
// caches 2 MiB of blocks. RocksDB's types appear only in sst_table.cc and rocksdb_files.cc.
class SstTable : public Table {
 public:
  using Emit = std::function<Status(std::string_view key, std::string_view value)>;
  // Writes and syncs a new file. `produce` calls Emit for every record in key order and returns the
  // identity. The caller sets the name of the returned entry.
  static Result<CommitRecord::Entry> Write(
      FileSystem& fs, const std::string& path,
      const std::function<Result<SstIdentity>(const Emit&)>& produce);
  // Reads the footer, the properties and the block index, but no data block. `fs` must outlive the
  // table.
  static Result<std::unique_ptr<SstTable>> Open(FileSystem& fs, const std::string& path);
  ~SstTable() override;
  // Creates RocksDB's process-wide state. Exit handlers that use tables must be registered after
  // this call, because handlers run in reverse order.
  static void PrepareProcess();

  // The identity in the file's properties. A string is empty if its property is missing.
  SstIdentity identity() const;
  Result<std::string> Get(std::string_view key) const override;
  Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const override;

 private:
  SstTable();
  // Keeps RocksDB's types out of this header (see tests/layering).
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_SST_TABLE_H_
