// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_COPY_H_
#define TENSORMOUNT_INDEX_STORE_COPY_H_

#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/store_copy.h"

#include "base/file_system.h"
#include "index/store/copy_target.h"
#include "index/store/store.h"

namespace tensormount {

// CopyCheckpoints of tensormount/store_copy.h, for stores that are all on the file system `fs`.
Result<CopyReport> CopyCheckpoints(FileSystem& fs, const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options);

// Several copies to one store, which is read at the first one only. For one thread.
class CopyJob {
 public:
  // `options` must outlive this object.
  CopyJob(FileSystem& fs, std::string destination, const CopyOptions& options);
  // Removes work directories of finished copies.
  ~CopyJob();

  // As CopyCheckpoints. `from`: the file system of each source.
  Result<CopyReport> Run(const std::vector<std::string>& sources,
                         const std::vector<FileSystem*>& from);
  // The destination; null before the first Run.
  const Store* store() const { return store_.get(); }

 private:
  Status Open();

  FileSystem& fs_;
  const std::string destination_;
  const CopyOptions& options_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<copies::CopyTarget> target_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_COPY_H_
