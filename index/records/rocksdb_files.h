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

// What RocksDB did to the one file that it was given: its own Status has no room for our codes.
// The hash and the tail are taken while the file is written, so that COMMIT's entry needs no second
// pass over it; they are right because an SST file is only ever appended to.
struct RocksFileLog {
  // Of the failure only: reads come from several threads; one thread writes.
  std::mutex mutex;
  Status first_failure;  // Of our file layer.
  std::uint64_t written = 0;
  Xxh3Stream hash;   // Over everything appended.
  std::string tail;  // The last bytes appended, at most 64 KiB.
};

// An Env whose SST files go through `fs`, so that fault injection and crash tests see them. Only
// what SstFileWriter and SstFileReader call; the rest is the machine's and not used. `fs` and `log`
// must outlive it.
// One Env and one log for one file: `log` would mix the bytes of two.
std::unique_ptr<rocksdb::Env> MakeRocksEnv(FileSystem& fs, RocksFileLog& log);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_ROCKSDB_FILES_H_
