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
  // Read all data once, for leaf hashes and digests: reads are verified then, and verify can tell
  // damage. Without, only lengths and mtimes of files are recorded.
  bool hashes = true;
  IfExists if_exists = IfExists::kFail;
  int threads = 0;  // 0: as many as cores.
  Watch watch;      // May be empty. Asked until all are hashed.
  // Other names for keys; null: their own. The new names are those of the checkpoint for ever: what
  // the source calls a tensor is not kept.
  std::shared_ptr<const KeyMap> map;
};

// kInvalidArgument for a checkpoint of ours, of any store: data of a store, or what it refers to,
// must not become another's by reference, or gc of the first would break the second.
Status CheckIsForeign(const OpenedCheckpoint& source);

// Publishes a foreign checkpoint (OpenedCheckpoint::OpenForeign) as STORE/NAME: records alone, the
// bytes stay where they are (docs/format.md, "Foreign files"). Everything that was pending is
// looked up. Leaves no staging behind where it fails.
//   kInvalidArgument   `foreign` has data files of its own;
//   kDataLoss          a tensor is not whole (names the box), a file ends early;
//   kStale             a file changed meanwhile;
//   and what Store::Begin and Store::Publish say.
Result<Store::Published> AdoptSource(FileSystem& fs, const OpenedCheckpoint& foreign, Store& store,
                                     const std::string& name, const AdoptOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_ADOPT_H_
