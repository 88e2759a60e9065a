// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_ADOPT_H_
#define TENSORMOUNT_INDEX_FOREIGN_ADOPT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tensormount/key_map.h"
#include "tensormount/status.h"
#include "tensormount/store.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/store/store.h"

namespace tensormount {

// `progress` must be safe to be called by several threads at once.
struct AdoptOptions {
  // Read all data once, for leaf hashes and digests: reads are verified then, and verify can tell
  // damage. Without, only lengths and mtimes of files are recorded.
  bool hashes = true;
  IfExists if_exists = IfExists::kFail;
  int threads = 0;  // 0: as many as cores.
  // Called now and then with bytes done and bytes in all; may be empty. From several threads.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
  // Other names for keys; null: their own. The new names are those of the checkpoint for ever: what
  // the source calls a tensor is not kept.
  std::shared_ptr<const KeyMap> map;
  // Not null: kCancelled once it is set, looked at after each chunk until all are hashed.
  const std::atomic<bool>* cancel = nullptr;
};

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
