// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FUZZ_MEMORY_FILE_H_
#define TENSORMOUNT_FUZZ_MEMORY_FILE_H_

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/read_only.h"

namespace tensormount {

// Bytes that look like a file that was opened for reading.
class MemoryFile : public ReadOnlyFile {
 public:
  explicit MemoryFile(std::string_view bytes) : bytes_(bytes) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    if (offset >= bytes_.size()) return std::size_t{0};
    const std::size_t n = std::min(size, bytes_.size() - static_cast<std::size_t>(offset));
    std::memcpy(out, bytes_.data() + offset, n);
    return n;
  }
  Result<FileInfo> Stat() override {
    FileInfo info;
    info.kind = FileKind::kFile;
    info.size = bytes_.size();
    return info;
  }
  const std::string& path() const override { return path_; }

 private:
  std::string_view bytes_;
  std::string path_ = "memory";
};

}  // namespace tensormount

#endif  // TENSORMOUNT_FUZZ_MEMORY_FILE_H_
