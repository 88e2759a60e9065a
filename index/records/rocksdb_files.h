// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_ROCKSDB_FILES_H_
#define TENSORMOUNT_INDEX_RECORDS_ROCKSDB_FILES_H_

#include <memory>
#include <mutex>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/hash.h"

namespace rocksdb {
class Env;
}  // namespace rocksdb

namespace tensormount {

// State of the one file that an Env serves. RocksDB's Status cannot carry our error codes, so the
// first failure is kept here. Hash and tail are computed during writing, because an SST file is
// only appended to; COMMIT's entry then needs no second pass.
struct RocksFileLog {
  // Guards first_failure, because several threads read.
  std::mutex mutex;
  Status first_failure;  // Failure of the FileSystem.
  std::uint64_t written = 0;
  Xxh3Stream hash;   // Hash of all appended bytes.
  std::string tail;  // The last bytes appended, at most 64 KiB.
};

// An Env whose SST files go through `fs`, so that fault injection and crash tests see them.
// Supports only the calls of SstFileWriter and SstFileReader. Use one Env and one log for each
// file; `fs` and `log` must outlive it.
std::unique_ptr<rocksdb::Env> MakeRocksEnv(FileSystem& fs, RocksFileLog& log);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_ROCKSDB_FILES_H_
