// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_DATA_WRITER_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_DATA_WRITER_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "collective/save/block_reader.h"
#include "collective/save/rank_task.h"
#include "index/records/inventory.h"
#include "index/store/store.h"

namespace tensormount {

// What one rank has written, as its manifest says it.
struct WrittenData {
  Inventory inventory;          // Numbered by itself.
  std::vector<Hash128> leaves;  // Of all chunks, objects and headers; page hashes among them.
  bool paged = false;           // Whether there are any.
  std::uint64_t bytes = 0;      // Headers included.
  std::vector<SaveReport::File> files;
};

// Writes everything that is in `task` into the data/ folder of `staging`. Data are hashed while
// they are in cache, leaf by leaf, and no byte is read back. On success every file is synced, and
// sealed but for shared ones (SealShared does that once all ranks have written); the folder is not
// synced. Files that it failed to write are left as they are: the caller aborts the staging.
// `page_hashes`: SaveOptions. `progress`, where not null, counts bytes as they are written.
// kCancelled once rules.cancel, where not null, is set.
Result<WrittenData> WriteData(FileSystem& fs, const Staging& staging, const StateDict& state,
                              const RankTask& task, int rank, bool page_hashes = false,
                              std::atomic<std::uint64_t>* progress = nullptr,
                              const BlockRules& rules = {});

// Seals and syncs the shared tensor files that this rank is to seal.
Status SealShared(FileSystem& fs, const Staging& staging, const RankTask& task);

// The names of all files that `rank`, and nobody else, may have made in WriteData.
// Shared tensor files are not among them: another rank may still write there.
std::vector<std::string> FilesWrittenAlone(const Staging& staging, const RankTask& task, int rank);

// Names below the checkpoint. `stem`: RankTask::Tensor::file.
std::string TensorFileName(const Staging& staging, std::string_view stem);
std::string RankShardName(const Staging& staging, int rank);
std::string PackName(const Staging& staging, int rank);
std::string ManifestName(int rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_DATA_WRITER_H_
