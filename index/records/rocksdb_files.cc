// SPDX-License-Identifier: Apache-2.0
// RocksDB's file interface over FileSystem. RocksDB's own file system would bypass fault injection,
// and Debian's build aborts the process where an error suffices.
#include "index/records/rocksdb_files.h"

#include <rocksdb/env.h>
#include <rocksdb/file_system.h>

#include "index/records/checkpoint_index.h"

namespace tensormount {
namespace {

// Keeps the first failure for FromRocks (sst_table.cc). RocksDB's status would turn our code and
// errno into an unspecific I/O error, which does not tell "disk full" from damage.
rocksdb::IOStatus Report(RocksFileLog& log, const Status& status) {
  if (status.ok()) return rocksdb::IOStatus::OK();
  std::lock_guard lock(log.mutex);
  if (log.first_failure.ok()) log.first_failure = status;
  return rocksdb::IOStatus::IOError(status.message());
}

// Writes a file sequentially, hashes its bytes, and keeps the last 64 KiB as the tail.
class SequentialWriter : public rocksdb::FSWritableFile {
 public:
  SequentialWriter(std::unique_ptr<File> file, RocksFileLog& log)
      : file_(std::move(file)), log_(log) {}

  using rocksdb::FSWritableFile::Append;
  rocksdb::IOStatus Append(const rocksdb::Slice& data, const rocksdb::IOOptions&,
                           rocksdb::IODebugContext*) override {
    const Status status = file_->WriteAt(log_.written, data.data(), data.size());
    if (!status.ok()) return Report(log_, status);
    log_.written += data.size();
    log_.hash.Update(data.data(), data.size());
    if (data.size() >= kIndexTailBytes) {
      log_.tail.assign(data.data() + data.size() - kIndexTailBytes, kIndexTailBytes);
    } else {
      log_.tail.append(data.data(), data.size());
      if (log_.tail.size() > kIndexTailBytes) {
        log_.tail.erase(0, log_.tail.size() - kIndexTailBytes);
      }
    }
    return rocksdb::IOStatus::OK();
  }
  rocksdb::IOStatus Flush(const rocksdb::IOOptions&, rocksdb::IODebugContext*) override {
    return rocksdb::IOStatus::OK();
  }
  rocksdb::IOStatus Sync(const rocksdb::IOOptions&, rocksdb::IODebugContext*) override {
    return Report(log_, file_->Sync());
  }
  rocksdb::IOStatus Close(const rocksdb::IOOptions&, rocksdb::IODebugContext*) override {
    return Report(log_, file_->Close());
  }
  std::uint64_t GetFileSize(const rocksdb::IOOptions&, rocksdb::IODebugContext*) override {
    return log_.written;
  }

 private:
  std::unique_ptr<File> file_;
  RocksFileLog& log_;
};

// Reads with pread, so that threads need no lock.
class RandomReader : public rocksdb::FSRandomAccessFile {
 public:
  RandomReader(std::unique_ptr<File> file, RocksFileLog& log) : file_(std::move(file)), log_(log) {}

  rocksdb::IOStatus Read(std::uint64_t offset, std::size_t n, const rocksdb::IOOptions&,
                         rocksdb::Slice* result, char* scratch,
                         rocksdb::IODebugContext*) const override {
    Result<std::size_t> got = file_->ReadAt(offset, scratch, n);
    if (!got.ok()) return Report(log_, got.status());
    *result = rocksdb::Slice(scratch, got.value());
    return rocksdb::IOStatus::OK();
  }
  // Without this function, RocksDB copies the last 512 KiB of each table that it opens, and the
  // read-ahead of scans, into its own buffers. Scans do more and smaller reads, but are not slower
  // (docs/performance.md, "Beside the tree of November 22").
  rocksdb::IOStatus Prefetch(std::uint64_t offset, std::size_t n, const rocksdb::IOOptions&,
                             rocksdb::IODebugContext*) override {
    file_->StartReading(offset, n);
    return rocksdb::IOStatus::OK();
  }

 private:
  std::unique_ptr<File> file_;
  RocksFileLog& log_;
};

// Opens, creates and measures files through our FileSystem. Calls for directories, locks and clocks
// go to RocksDB's own file system, because SstFileWriter and SstFileReader do not use them.
class EnvFileSystem : public rocksdb::FileSystemWrapper {
 public:
  EnvFileSystem(tensormount::FileSystem& fs, RocksFileLog& log)
      : rocksdb::FileSystemWrapper(rocksdb::FileSystem::Default()), fs_(fs), log_(log) {}

  const char* Name() const override { return "tensormount"; }

  rocksdb::IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions&,
                                    std::unique_ptr<rocksdb::FSWritableFile>* out,
                                    rocksdb::IODebugContext*) override {
    Result<std::unique_ptr<File>> file = fs_.CreateExclusive(path);
    if (!file.ok()) return Report(log_, file.status());
    *out = std::make_unique<SequentialWriter>(std::move(file).value(), log_);
    return rocksdb::IOStatus::OK();
  }
  rocksdb::IOStatus NewRandomAccessFile(const std::string& path, const rocksdb::FileOptions&,
                                        std::unique_ptr<rocksdb::FSRandomAccessFile>* out,
                                        rocksdb::IODebugContext*) override {
    Result<std::unique_ptr<File>> file = fs_.OpenRead(path);
    if (!file.ok()) return Report(log_, file.status());
    *out = std::make_unique<RandomReader>(std::move(file).value(), log_);
    return rocksdb::IOStatus::OK();
  }
  rocksdb::IOStatus GetFileSize(const std::string& path, const rocksdb::IOOptions&,
                                std::uint64_t* size, rocksdb::IODebugContext*) override {
    Result<FileInfo> info = fs_.LinkStat(path);
    if (!info.ok()) return Report(log_, info.status());
    *size = info.value().size;
    return rocksdb::IOStatus::OK();
  }

 private:
  tensormount::FileSystem& fs_;
  RocksFileLog& log_;
};

}  // namespace

std::unique_ptr<rocksdb::Env> MakeRocksEnv(FileSystem& fs, RocksFileLog& log) {
  return rocksdb::NewCompositeEnv(std::make_shared<EnvFileSystem>(fs, log));
}

}  // namespace tensormount
