// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_ADOPT_H_
#define TENSORMOUNT_INDEX_FOREIGN_ADOPT_H_

#include <memory>
#include <string>

#include "tensormount/key_map.h"
#include "tensormount/status.h"
#include "tensormount/store.h"

#include "base/file_system.h"
#include "base/watch.h"
#include "index/read/checkpoint.h"
#include "index/store/store.h"

namespace tensormount {

struct AdoptOptions {
  // Whether to read all data once for leaf hashes and digests, so that later reads and verify
  // detect damage. If false, only lengths and mtimes of the files are recorded.
  bool hashes = true;
  IfExists if_exists = IfExists::kFail;
  int threads = 0;  // 0 means one for each core.
  // Receives the progress while data are hashed, and can cancel the adoption then. May be empty.
  Watch watch;
  // New names for keys; null keeps the names of the source. The adopted checkpoint stores only the
  // new names.
  std::shared_ptr<const KeyMap> map;
};

// Checks whether a source can be adopted. kInvalidArgument: the source is a tensormount checkpoint;
// if another store referred to its data, gc of the first store would delete data of the second.
// kUnsupported: the data are not local files.
Status CheckIsForeign(const OpenedCheckpoint& source);

// SplitCheckpointPath for the destination of an adoption. kInvalidArgument also for a bare name, as
// in a save, because it would make the current directory a store.
Result<StoreAndName> SplitAdoptPath(const std::string& path);

// Publishes a foreign checkpoint (OpenedCheckpoint::OpenForeign) as STORE/NAME. Only records are
// written; the data stay in their files (docs/format.md, "Foreign files"). Pending items are
// located first. After a failure other than kUnknown the staging directory is moved away. Errors,
// besides those of Store::Begin and Store::Publish:
//   kInvalidArgument   `foreign` has data files of its own
//   kDataLoss          a tensor is incomplete (names the box), or a file is too short
//   kStale             a file changed during the adoption
Result<Store::Published> AdoptSource(FileSystem& fs, const OpenedCheckpoint& foreign, Store& store,
                                     const std::string& name, const AdoptOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_ADOPT_H_
