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

// What an SST file says about itself in its user properties.
// Compared at open with what COMMIT says.
struct SstIdentity {
  std::string uuid;          // Hex.
  std::string content_root;  // Hex.
  friend bool operator==(const SstIdentity&, const SstIdentity&) = default;
};

// An immutable RocksDB SST file as a Table: no database around it, no threads, no other files.
// Thread-safe. Damage that a block's checksum shows is kDataLoss with the file's name.
// The file format is RocksDB's (block-based): a sorted run of 16 KiB blocks, each with a checksum,
// and an index of blocks at its end, so that a look-up is two binary searches and at most one block
// read. Its blocks go through a cache of 2 MiB a table. Nothing of RocksDB is seen outside of these
// files.
class SstTable : public Table {
 public:
  using Emit = std::function<Status(std::string_view key, std::string_view value)>;
  // Writes and fsyncs a new file. `produce` calls the Emit it is given for every record in key
  // order, and then knows whose they are. The entry has no name yet.
  static Result<CommitRecord::Entry> Write(
      FileSystem& fs, const std::string& path,
      const std::function<Result<SstIdentity>(const Emit&)>& produce);
  // Reads the footer, the properties and the index of blocks; no data block. `fs` must outlive the
  // table.
  static Result<std::unique_ptr<SstTable>> Open(FileSystem& fs, const std::string& path);
  ~SstTable() override;
  // Makes what RocksDB makes of the process when it is first used: what is to run at the end of the
  // process and needs tables must be registered after this, as that is destroyed before otherwise.
  static void PrepareProcess();

  // What the properties say; empty strings where a property is missing.
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
