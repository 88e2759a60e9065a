// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_UNMAPPED_FILE_H_
#define TENSORMOUNT_TESTS_SUPPORT_UNMAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/file_system.h"

namespace tensormount {

// A file without a descriptor, as a storage that is not the kernel's has: it can be read, not
// mapped.
class UnmappedFile : public File {
 public:
  explicit UnmappedFile(std::unique_ptr<File> base) : base_(std::move(base)) {}
  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    return base_->ReadAt(offset, out, size);
  }
  Status WriteAt(std::uint64_t offset, const void* data, std::size_t size) override {
    return base_->WriteAt(offset, data, size);
  }
  Status Truncate(std::uint64_t size) override { return base_->Truncate(size); }
  Status Sync() override { return base_->Sync(); }
  Status Seal() override { return base_->Seal(); }
  Result<FileInfo> Stat() override { return base_->Stat(); }
  Status TryLockShared() override { return base_->TryLockShared(); }
  Status TryLockExclusive() override { return base_->TryLockExclusive(); }
  Status Close() override { return base_->Close(); }
  const std::string& path() const override { return base_->path(); }

 protected:
  std::unique_ptr<File> base_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_UNMAPPED_FILE_H_
