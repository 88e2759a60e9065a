// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_FS_FILE_OPS_H_
#define TENSORMOUNT_TESTS_FS_FILE_OPS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "tests/support/tiny_checkpoint.h"

// What a program does with the files of a mount, behind one interface: without a kernel on Vfs, and
// by system calls on a real mount. The bodies below hold for both.

namespace tensormount {

struct FileStat {
  FileKind kind = FileKind::kOther;
  std::uint64_t size = 0;
  std::uint64_t inode = 0;
  std::uint64_t links = 0;
  std::uint32_t mode = 0;
  std::int64_t mtime = 0;
};

// Paths are below the mount point; "" is its root. Errors keep their errno.
class FileOps {
 public:
  // Destroying it closes.
  class Handle {
   public:
    virtual ~Handle() = default;
    virtual Result<std::string> Read(std::uint64_t offset, std::size_t size) = 0;
  };
  virtual ~FileOps() = default;
  virtual Result<FileStat> Stat(const std::string& path) = 0;
  // Sorted, without the dots.
  virtual Result<std::vector<std::string>> List(const std::string& path) = 0;
  virtual Result<std::string> ReadLink(const std::string& path) = 0;
  virtual Result<std::unique_ptr<Handle>> Open(const std::string& path) = 0;
  virtual Result<std::string> Xattr(const std::string& path, const std::string& name) = 0;
  virtual Result<std::vector<std::string>> Xattrs(const std::string& path) = 0;

  // The whole file, in reads of odd sizes.
  Result<std::string> ReadAll(const std::string& path);
};

// By system calls below `root`.
std::unique_ptr<FileOps> MakeHostFileOps(const std::string& root);

// DefaultTinySpec and tensors whose keys no file system could hold as they are.
TinySpec StrangeTinySpec(std::uint64_t seed = 1);

// `checkpoint` is the path of a checkpoint's tree in the mount ("" or "step-1"); `folder` is where
// it lies on the host.
void CheckTensorFiles(FileOps& ops, const std::string& checkpoint, const TinySpec& spec);
void CheckNpyFiles(FileOps& ops, const std::string& checkpoint, const TinySpec& spec);
void CheckSafetensors(FileOps& ops, const std::string& checkpoint, const TinySpec& spec);
void CheckObjects(FileOps& ops, const std::string& checkpoint, const TinySpec& spec);
void CheckJson(FileOps& ops, const std::string& checkpoint, const TinySpec& spec);
void CheckExtents(FileOps& ops, const std::string& checkpoint, const std::string& folder,
                  const TinySpec& spec);
void CheckXattrs(FileOps& ops, const std::string& checkpoint, const TinySpec& spec);
// Every file that is listed can be looked up and read, has the size that it says and an inode of
// its own; each key of the spec is there once.
void CheckListing(FileOps& ops, const std::string& checkpoint, const TinySpec& spec, bool views);
void CheckErrors(FileOps& ops, const std::string& checkpoint);
void CheckControlFiles(FileOps& ops);
// A value of .tensormount/metrics, by its name without "tensormount_". All of the text is parsed,
// and checked against the format.
double MetricOf(FileOps& ops, const std::string& name,
                const std::map<std::string, std::string>& labels = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_FS_FILE_OPS_H_
