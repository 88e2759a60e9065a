// SPDX-License-Identifier: Apache-2.0
// Files that stay open between reads, and their mappings.
//
// An open costs several system calls (each path component is checked), so up to max_open_files
// files of a checkpoint stay open. The least recently used file leaves the cache, and is closed
// when its last reader releases it.
#include "index/read/file_cache.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace tensormount {

OpenDataFile::~OpenDataFile() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

// The size is read anew in each call, because touching a page behind the file's end raises SIGBUS;
// this needs no lock. A later truncation cannot be excluded; see RunOnMapping. The whole file is
// mapped once. A failure is remembered, because it would repeat.
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
      // mincore is accurate only for the file's owner and for users who may write the file; for
      // other users every page looks resident.
      mincore_is_true_ = info.value().uid == geteuid();
    }
  }
  return end <= map_bytes_ ? static_cast<const std::byte*>(map_) : nullptr;
}

void ReadAhead::End() {
  if (users_.fetch_sub(1, std::memory_order_relaxed) != 1) return;
  const std::lock_guard lock(mutex_);
  windows_.clear();
}

// A read that is not within the window, and does not start at the end of the file's previous read
// or shortly behind it, is passed through, so that random access causes no read-ahead.
Result<std::size_t> ReadAhead::ReadAt(const std::shared_ptr<OpenDataFile>& file,
                                      std::uint64_t offset, void* out, std::size_t size,
                                      std::uint64_t* read) {
  const auto plain = [&]() -> Result<std::size_t> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got, file->file().ReadAt(offset, out, size));
    *read += got;
    return got;
  };
  const std::lock_guard lock(mutex_);
  auto at = std::find_if(windows_.begin(), windows_.end(),
                         [&](const Window& window) { return window.file.lock() == file; });
  if (at == windows_.end()) {
    if (windows_.size() == kMostFiles) windows_.pop_back();
    windows_.insert(windows_.begin(),
                    {.file = file, .next = offset + size, .begin = 0, .bytes = {}});
    return plain();
  }
  std::rotate(windows_.begin(), at, at + 1);
  Window& window = windows_.front();
  const bool follows = offset >= window.next && offset - window.next <= kMostSmall;
  window.next = offset + size;
  const auto has = [&] {
    return offset >= window.begin && offset - window.begin <= window.bytes.size() &&
           window.bytes.size() - (offset - window.begin) >= size;
  };
  if (!has()) {
    if (!follows) return plain();
    window.begin = offset;
    window.bytes.resize(kWindowBytes);
    Result<std::size_t> got = file->file().ReadAt(offset, window.bytes.data(), kWindowBytes);
    window.bytes.resize(got.ok() ? got.value() : 0);
    // If the window does not have the bytes, a plain read returns the error or the end of the file.
    if (!has()) return plain();
    *read += window.bytes.size();
  }
  std::memcpy(out, window.bytes.data() + (offset - window.begin), size);
  return size;
}

// Two threads may open the same file at the same time. The file of the first stays in the cache,
// and both threads use it.
Result<std::shared_ptr<OpenDataFile>> OpenedCheckpoint::Files::Open(
    const std::string& path, bool foreign,
    const std::function<Result<std::unique_ptr<File>>()>& opener) {
  if (std::shared_ptr<OpenDataFile> known = open.Get(path)) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, opener());
  return open.Put(path, std::make_shared<OpenDataFile>(std::move(file), foreign), 1);
}

}  // namespace tensormount
