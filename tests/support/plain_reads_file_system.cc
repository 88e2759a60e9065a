// SPDX-License-Identifier: Apache-2.0
#include "tests/support/plain_reads_file_system.h"

#include <utility>

namespace tensormount {
namespace {

FileInfo WithoutStamps(FileInfo info) {
  info.device = info.inode = info.links = 0;
  info.ctime_seconds = info.ctime_nanoseconds = 0;
  return info;
}

class PlainFile final : public ReadOnlyFile {
 public:
  PlainFile(std::unique_ptr<File> base, std::string path, PlainReadsFileSystem::Counts& counts)
      : base_(std::move(base)), path_(std::move(path)), counts_(counts) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    ++counts_.reads;
    return base_->ReadAt(offset, out, size);
  }
  Status ReadMany(std::span<const ReadRun> runs, const ReadLimits& limits) override {
    ++counts_.reads;
    return base_->ReadMany(runs, limits);
  }
  void StartReading(std::uint64_t offset, std::uint64_t size) override {
    (void)offset;
    ++counts_.hints;
    counts_.hinted_bytes += size;
    counts_.reads_at_hint = counts_.reads.load();
  }
  Result<FileInfo> Stat() override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, base_->Stat());
    return WithoutStamps(info);
  }
  const std::string& path() const override { return path_; }

 protected:
  Status Refused(std::string_view action) override {
    ++counts_.refused;
    return ReadOnlyFile::Refused(action);
  }

 private:
  const std::unique_ptr<File> base_;
  const std::string path_;
  PlainReadsFileSystem::Counts& counts_;
};

}  // namespace

Result<std::string> PlainReadsFileSystem::OnHost(const std::string& path) {
  if (path.starts_with(scheme_)) return path.substr(scheme_.size());
  ++counts_.strays;
  return Status(Code::kNotFound, path + ": not a name of the plain file system");
}

Result<std::unique_ptr<File>> PlainReadsFileSystem::OpenRead(const std::string& path) {
  ++counts_.opens;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string on_host, OnHost(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, HostFileSystem().OpenRead(on_host));
  return std::unique_ptr<File>(std::make_unique<PlainFile>(std::move(file), path, counts_));
}

Result<std::vector<DirectoryEntry>> PlainReadsFileSystem::List(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string on_host, OnHost(path));
  return HostFileSystem().List(on_host);
}

Result<FileInfo> PlainReadsFileSystem::Stat(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string on_host, OnHost(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, HostFileSystem().Stat(on_host));
  return WithoutStamps(info);
}

Result<FileInfo> PlainReadsFileSystem::LinkStat(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string on_host, OnHost(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, HostFileSystem().LinkStat(on_host));
  return WithoutStamps(info);
}

Result<std::string> PlainReadsFileSystem::Resolve(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string on_host, OnHost(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string resolved, HostFileSystem().Resolve(on_host));
  return scheme_ + resolved;
}

Status PlainReadsFileSystem::Refused(const std::string& path) {
  ++counts_.refused;
  return ReadOnlyFileSystem::Refused(path);
}

}  // namespace tensormount
