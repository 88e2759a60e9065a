// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_FS_VFS_OPS_H_
#define TENSORMOUNT_TESTS_FS_VFS_OPS_H_

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "fs/vfs.h"
#include "tests/fs/file_ops.h"

namespace tensormount::fs {

// FileOps on a Vfs: walks paths as the kernel would.
class VfsOps : public FileOps {
 public:
  explicit VfsOps(Vfs& vfs) : vfs_(vfs) {}

  class VfsHandle : public Handle {
   public:
    explicit VfsHandle(std::shared_ptr<const VirtualFile> file) : file_(std::move(file)) {}
    Result<std::string> Read(std::uint64_t offset, std::size_t size) override {
      std::string out(size, '\0');
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t n,
                                   file_->Read(offset, out.data(), size, nullptr));
      out.resize(n);
      // Where the bytes can be had where they lie, they are the same.
      const auto mapped = file_->Map(offset, size);
      if (!mapped.empty()) {
        std::string joined;
        for (const auto& piece : mapped) {
          joined.append(reinterpret_cast<const char*>(piece.data), piece.size);
        }
        EXPECT_EQ(joined, out) << file_->label() << " at " << offset;
      }
      return out;
    }

   private:
    std::shared_ptr<const VirtualFile> file_;
  };

  Result<Vfs::Entry> Walk(const std::string& path) {
    TENSORMOUNT_ASSIGN_OR_RETURN(Vfs::Entry at, vfs_.Stat(kRootId));
    std::size_t begin = 0;
    while (begin < path.size()) {
      const std::size_t slash = std::min(path.find('/', begin), path.size());
      TENSORMOUNT_ASSIGN_OR_RETURN(at, vfs_.Lookup(at.id, path.substr(begin, slash - begin)));
      begin = slash + 1;
    }
    return at;
  }
  Result<FileStat> Stat(const std::string& path) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry walked, Walk(path));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, vfs_.Stat(walked.id));
    // What lookup said and what stat says are one.
    EXPECT_EQ(entry.attributes.inode, walked.attributes.inode) << path;
    EXPECT_EQ(entry.attributes.size, walked.attributes.size) << path;
    EXPECT_EQ(entry.attributes.mtime, walked.attributes.mtime) << path;
    const Attributes& a = entry.attributes;
    return FileStat{a.kind, a.size, a.inode, 1, a.mode, a.mtime};
  }
  Result<std::vector<std::string>> List(const std::string& path) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry folder, Walk(path));
    std::vector<std::string> names;
    std::uint64_t cookie = 0;
    // A few at a time, as a kernel with small buffers would.
    for (bool more = true; more;) {
      more = false;
      int taken = 0;
      TENSORMOUNT_RETURN_IF_ERROR(vfs_.List(folder.id, cookie, [&](const Vfs::Listed& listed) {
        if (taken == 3) {
          more = true;
          return false;
        }
        ++taken;
        cookie = listed.next;
        EXPECT_NE(cookie, 0u);
        if (listed.name != "." && listed.name != "..") {
          names.push_back(listed.name);
          const auto found = vfs_.Lookup(folder.id, listed.name);
          EXPECT_TRUE(found.ok() && found.value().id == listed.entry.id) << listed.name;
        }
        return true;
      }));
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  Result<std::string> ReadLink(const std::string& path) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, Walk(path));
    return vfs_.ReadLink(entry.id);
  }
  Result<std::unique_ptr<Handle>> Open(const std::string& path) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, Walk(path));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto file, vfs_.OpenFile(entry.id));
    return std::unique_ptr<Handle>(std::make_unique<VfsHandle>(std::move(file)));
  }
  Result<std::string> Xattr(const std::string& path, const std::string& name) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, Walk(path));
    return vfs_.GetXattr(entry.id, name);
  }
  Result<std::vector<std::string>> Xattrs(const std::string& path) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Vfs::Entry entry, Walk(path));
    return vfs_.ListXattrs(entry.id);
  }

 private:
  Vfs& vfs_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_TESTS_FS_VFS_OPS_H_
