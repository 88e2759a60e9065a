// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_DATA_WRITER_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_DATA_WRITER_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "collective/save/save_plan.h"
#include "collective/validate/layout_check.h"
#include "index/content.h"
#include "index/store.h"

namespace tensormount {

// What one rank has written, as its manifest says it.
struct WrittenData {
  Content content;              // Numbered by itself.
  std::vector<Hash128> leaves;  // Of all chunks, objects and headers.
  std::uint64_t bytes = 0;      // Headers included.
};

// Writes everything that `plan` gives to `rank` into the data/ folder of `staging`. Data are hashed
// while they are in cache, leaf by leaf, and no byte is read back. On success every file is
// synced, and sealed but for those of plan.shared (their owners seal them with SealShared once all
// ranks have written); the folder is not synced. Files that it failed to write are left as they
// are: the caller aborts the staging. `progress`, where not
// null, counts bytes as they are written.
Result<WrittenData> WriteData(FileSystem& fs, const Staging& staging, const StateDict& state,
                              const GlobalLayout& layout, const SavePlan& plan, int rank,
                              std::atomic<std::uint64_t>* progress = nullptr);

// Seals and syncs the shared tensor files that `rank` owns.
Status SealShared(FileSystem& fs, const Staging& staging, const SavePlan& plan, int rank);

// Names below the checkpoint.
std::string TensorFileName(const Staging& staging, std::uint32_t tensor);
std::string RankShardName(const Staging& staging, int rank);
std::string PackName(const Staging& staging, int rank);
std::string ManifestName(int rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_DATA_WRITER_H_
