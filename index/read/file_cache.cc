// SPDX-License-Identifier: Apache-2.0
// Files that stay open between reads, and their mappings.
#include "index/read/file_cache.h"

#include <sys/mman.h>
#include <unistd.h>

namespace tensormount {

OpenDataFile::~OpenDataFile() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

const std::byte* OpenDataFile::MappingTo(std::uint64_t end) {
  const int fd = file_->descriptor();
  if (fd < 0) return nullptr;
  Result<FileInfo> info = file_->Stat();
  if (!info.ok() || info.value().size < end) return nullptr;
  std::lock_guard lock(mutex_);
  if (map_ == nullptr && !map_failed_) {
    void* map = mmap(nullptr, info.value().size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
      map_failed_ = true;
    } else {
      map_ = map;
      map_bytes_ = info.value().size;
      mincore_is_true_ = info.value().uid == geteuid();
    }
  }
  return end <= map_bytes_ ? static_cast<const std::byte*>(map_) : nullptr;
}

Result<std::shared_ptr<OpenDataFile>> OpenedCheckpoint::Files::Open(
    const std::string& path, const std::function<Result<std::unique_ptr<File>>()>& opener) {
  if (std::shared_ptr<OpenDataFile> known = open.Get(path)) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, opener());
  return open.Put(path, std::make_shared<OpenDataFile>(std::move(file)), 1);
}

}  // namespace tensormount
