// SPDX-License-Identifier: Apache-2.0
// One SST file, written and read without a RocksDB database. The checkpoint's identity is in the
// file's properties, so that the index of another checkpoint is detected at open.
#include "index/records/sst_table.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include <rocksdb/cache.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/sst_file_reader.h>
#include <rocksdb/sst_file_writer.h>
#include <rocksdb/table.h>
#include <rocksdb/table_properties.h>

#include "index/records/rocksdb_files.h"

namespace tensormount {
namespace {

constexpr char kUuidProperty[] = "tensormount.uuid";
constexpr char kRootProperty[] = "tensormount.content_root";
// With blocks of 16 KiB a look-up reads one block and a scan few. Smaller blocks would enlarge the
// block index, which stays in memory. The cache is small, because CheckpointIndex caches decoded
// tables.
constexpr std::size_t kSstBlockBytes = 16 * 1024;
constexpr std::size_t kBlockCacheBytes = std::size_t{2} << 20;

// A logger that writes nothing: Debian's RocksDB aborts the process when it cannot write its own
// log.
class NoLog : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char*, va_list) override {}
};

// Collectors that add the two identity strings at the end of a file. RocksDB takes user properties
// only from a collector that a factory makes for each file.
class IdentityCollector : public rocksdb::TablePropertiesCollector {
 public:
  explicit IdentityCollector(const SstIdentity* identity) : identity_(identity) {}
  rocksdb::Status AddUserKey(const rocksdb::Slice&, const rocksdb::Slice&, rocksdb::EntryType,
                             rocksdb::SequenceNumber, std::uint64_t) override {
    return rocksdb::Status::OK();
  }
  rocksdb::Status Finish(rocksdb::UserCollectedProperties* properties) override {
    *properties = GetReadableProperties();
    return rocksdb::Status::OK();
  }
  rocksdb::UserCollectedProperties GetReadableProperties() const override {
    return {{kUuidProperty, identity_->uuid}, {kRootProperty, identity_->content_root}};
  }
  const char* Name() const override { return "tensormount"; }

 private:
  const SstIdentity* identity_;
};

class IdentityCollectorFactory : public rocksdb::TablePropertiesCollectorFactory {
 public:
  explicit IdentityCollectorFactory(const SstIdentity* identity) : identity_(identity) {}
  rocksdb::TablePropertiesCollector* CreateTablePropertiesCollector(Context) override {
    return new IdentityCollector(identity_);
  }
  const char* Name() const override { return "tensormount"; }

 private:
  const SstIdentity* identity_;
};

rocksdb::Options MakeOptions(rocksdb::Env* env) {
  rocksdb::BlockBasedTableOptions table;
  table.block_size = kSstBlockBytes;
  table.checksum = rocksdb::kXXH3;
  // Part of the on-disk format. It is set because RocksDB's default differs between releases.
  table.format_version = 5;
  table.block_cache = rocksdb::NewLRUCache(kBlockCacheBytes, 0);
  rocksdb::Options options;
  options.env = env;
  options.info_log = std::make_shared<NoLog>();
  options.db_host_id = "";  // The default would store the machine's name.
  // Values are mostly hashes, which do not compress. LZ4 would cost more time than smaller reads
  // save.
  options.compression = rocksdb::kNoCompression;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

// Converts a RocksDB status. If our file layer reported no failure, the bytes themselves are
// damaged.
Status FromRocks(const rocksdb::Status& status, RocksFileLog& log, const std::string& path) {
  if (status.ok()) return Status();
  std::lock_guard lock(log.mutex);
  if (!log.first_failure.ok()) return log.first_failure;
  return Status(Code::kDataLoss, path + ": " + status.ToString());
}

std::string_view View(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }
rocksdb::Slice ToSlice(std::string_view view) { return {view.data(), view.size()}; }

}  // namespace

// The members are declared in the order of construction.
struct SstTable::Rep {
  std::string path;
  RocksFileLog log;
  std::unique_ptr<rocksdb::Env> env;
  std::unique_ptr<rocksdb::SstFileReader> reader;
  // An iterator that waits for the next Get or Scan. With sequential access an idle iterator is
  // often already at the record, or one step before it. Each iterator keeps a block of the table in
  // memory.
  struct Cursor {
    std::unique_ptr<rocksdb::Iterator> it;
    // Prefix of the last complete scan; the iterator is at the first key behind the keys with this
    // prefix. Empty: no scan was completed.
    std::string passed = {};

    // Whether the iterator is certainly at the first key that is not less than `start`.
    bool IsAt(std::string_view start) const {
      return !passed.empty() && passed < start && !start.starts_with(passed) && it->Valid() &&
             View(it->key()) >= start;
    }
  };
  std::mutex mutex;
  // Gets and scans have separate iterators, because a reader alternates between the two calls, and
  // each would move the other's iterator away.
  std::vector<Cursor> get_cursors;
  std::vector<Cursor> scan_cursors;
  static constexpr std::size_t kMostIdle = 4;

  Cursor Take(std::vector<Cursor>& idle) {
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        Cursor cursor = std::move(idle.back());
        idle.pop_back();
        return cursor;
      }
    }
    return {std::unique_ptr<rocksdb::Iterator>(reader->NewIterator(rocksdb::ReadOptions()))};
  }
  void Give(std::vector<Cursor>& idle, Cursor cursor) {
    const std::lock_guard lock(mutex);
    if (idle.size() < kMostIdle) idle.push_back(std::move(cursor));
  }
};

SstTable::SstTable() : rep_(std::make_unique<Rep>()) {}
SstTable::~SstTable() = default;

void SstTable::PrepareProcess() {
  const rocksdb::Options options = MakeOptions(rocksdb::Env::Default());
  const rocksdb::SstFileWriter writer(rocksdb::EnvOptions(), options);
  const rocksdb::SstFileReader reader(options);
}

Result<CommitRecord::Entry> SstTable::Write(
    FileSystem& fs, const std::string& path,
    const std::function<Result<SstIdentity>(const Emit&)>& produce) {
  RocksFileLog log;
  const std::unique_ptr<rocksdb::Env> env = MakeRocksEnv(fs, log);
  rocksdb::Options options = MakeOptions(env.get());
  SstIdentity identity;  // The identity is known after all records. It must outlive the writer.
  options.table_properties_collector_factories.push_back(
      std::make_shared<IdentityCollectorFactory>(&identity));
  rocksdb::SstFileWriter writer(rocksdb::EnvOptions(), options, nullptr,
                                /*invalidate_page_cache=*/false, rocksdb::Env::IO_TOTAL,
                                /*skip_filters=*/true);
  TENSORMOUNT_RETURN_IF_ERROR(FromRocks(writer.Open(path), log, path));
  const Emit put = [&](std::string_view key, std::string_view value) {
    return FromRocks(writer.Put(ToSlice(key), ToSlice(value)), log, path);
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(identity, produce(put));
  TENSORMOUNT_RETURN_IF_ERROR(FromRocks(writer.Finish(), log, path));
  CommitRecord::Entry entry;
  entry.length = log.written;
  entry.hash = log.hash.Value();
  entry.tail = Xxh3(log.tail);
  return entry;
}

Result<std::unique_ptr<SstTable>> SstTable::Open(FileSystem& fs, const std::string& path) {
  std::unique_ptr<SstTable> table(new SstTable);
  Rep& rep = *table->rep_;
  rep.path = path;
  rep.env = MakeRocksEnv(fs, rep.log);
  rep.reader = std::make_unique<rocksdb::SstFileReader>(MakeOptions(rep.env.get()));
  TENSORMOUNT_RETURN_IF_ERROR(FromRocks(rep.reader->Open(path), rep.log, path));
  return table;
}

SstIdentity SstTable::identity() const {
  SstIdentity identity;
  const auto properties = rep_->reader->GetTableProperties();
  const auto& user = properties->user_collected_properties;
  if (const auto it = user.find(kUuidProperty); it != user.end()) identity.uuid = it->second;
  if (const auto it = user.find(kRootProperty); it != user.end()) {
    identity.content_root = it->second;
  }
  return identity;
}

Result<std::string> SstTable::Get(std::string_view key) const {
  // Each iterator has one user at a time, so callers share only the block cache, which has its own
  // locks. The reader verifies block checksums by default. After a mismatch the iterator is
  // discarded.
  Rep::Cursor cursor = rep_->Take(rep_->get_cursors);
  rocksdb::Iterator* const it = cursor.it.get();
  if (it->Valid() && View(it->key()) < key) it->Next();
  if (!it->Valid() || View(it->key()) != key) it->Seek(ToSlice(key));
  TENSORMOUNT_RETURN_IF_ERROR(FromRocks(it->status(), rep_->log, rep_->path));
  if (!it->Valid() || View(it->key()) != key) {
    rep_->Give(rep_->get_cursors, std::move(cursor));
    return Status(Code::kNotFound, "index: no such record");
  }
  std::string value = it->value().ToString();
  rep_->Give(rep_->get_cursors, std::move(cursor));
  return value;
}

Status SstTable::Scan(std::string_view prefix, std::string_view from,
                      const std::function<bool(std::string_view, std::string_view)>& fn) const {
  const std::string_view start = std::max(prefix, from);
  // The iterator is not shared while `fn` runs, because `fn` may read the table.
  Rep::Cursor cursor = rep_->Take(rep_->scan_cursors);
  rocksdb::Iterator* const it = cursor.it.get();
  if (!cursor.IsAt(start)) it->Seek(ToSlice(start));
  cursor.passed.clear();
  for (; it->Valid(); it->Next()) {
    if (!View(it->key()).starts_with(prefix)) {
      if (start.starts_with(prefix)) cursor.passed = prefix;
      break;
    }
    if (!fn(View(it->key()), View(it->value()))) break;
  }
  TENSORMOUNT_RETURN_IF_ERROR(FromRocks(it->status(), rep_->log, rep_->path));
  rep_->Give(rep_->scan_cursors, std::move(cursor));
  return Status();
}

}  // namespace tensormount
