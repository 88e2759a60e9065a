// SPDX-License-Identifier: Apache-2.0
// Files that stay open between reads, and their mappings.
//
// Opening a file costs several system calls (each component of the path is checked), so files of a
// checkpoint stay open, up to max_open_files; the least recently used one is closed when its last
// reader lets go of it.
#include "index/read/file_cache.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace tensormount {

OpenDataFile::~OpenDataFile() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

// The size is asked for each time, without the lock: a file that ends before `end` now would raise
// SIGBUS when it is touched. That it is cut later cannot be excluded; see RunOnMapping. A mapping
// is made once, of the whole file, and a failure is remembered: it would fail again.
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
      // Linux tells the truth about pages only to the owner of a file or who may write it; to
      // others every page looks resident.
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

// A read that does not follow the one before it in the file is a read of its own: whoever jumps
// about gets nothing read ahead.
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
    if (!has()) return plain();  // Fails by itself, or ends where the file does.
    *read += window.bytes.size();
  }
  std::memcpy(out, window.bytes.data() + (offset - window.begin), size);
  return size;
}

// Two threads may open one file at the same time; the first stays in the cache, and both use it.
Result<std::shared_ptr<OpenDataFile>> OpenedCheckpoint::Files::Open(
    const std::string& path, bool foreign,
    const std::function<Result<std::unique_ptr<File>>()>& opener) {
  if (std::shared_ptr<OpenDataFile> known = open.Get(path)) return known;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, opener());
  return open.Put(path, std::make_shared<OpenDataFile>(std::move(file), foreign), 1);
}

}  // namespace tensormount
