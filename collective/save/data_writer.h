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
#include "index/records/leaf_section.h"
#include "index/store/store.h"

namespace tensormount {

// The data that one rank has written, as in its manifest.
struct WrittenData {
  Inventory inventory;          // File numbers are valid for this rank alone.
  std::vector<Hash128> leaves;  // Leaf hashes of chunks, objects and headers.
  LeafExtras extras;            // What else `leaves` has.
  std::uint64_t bytes = 0;      // All bytes written, including headers.
  std::vector<SaveReport::File> files;
};

// Most writers of a rank, and most rank shards.
inline constexpr int kMostWriters = 16;

struct WriteInput {
  FileSystem& fs;
  const Staging& staging;
  const StateDict& state;
  const RankTask& task;
  int rank = 0;
  bool page_hashes = false;                        // Whether to store page hashes, too.
  bool count_values = false;                       // Whether to store value counts, too.
  std::atomic<std::uint64_t>* progress = nullptr;  // Counts bytes as they are written; may be null.
  BlockRules rules = {};
  // Threads that write, each into files of its own; from 1 to kMostWriters.
  int writers = 1;
  bool asked = false;  // The caller asked for this number: also for few bytes.
};

// Writes all chunks and objects of the task into the data/ directory of the staging. Data are
// hashed while they are in cache, leaf by leaf, and no byte is read back. On success every file is
// synced, and all but shared ones are sealed (SealShared does that once all ranks have written);
// the directory is not synced. After a failure the files stay: the caller aborts the staging. Fails
// with kCancelled once rules.cancel (may be null) is set.
Result<WrittenData> WriteData(const WriteInput& input);

// Seals and syncs the shared tensor files that this rank must seal.
Status SealShared(FileSystem& fs, const Staging& staging, const RankTask& task);

// The names of all files that only `rank` may have made in WriteData. Shared tensor files are not
// among them, because another rank may still write there.
std::vector<std::string> FilesWrittenAlone(const Staging& staging, const RankTask& task, int rank);

// Names of files, relative to the checkpoint's directory. `stem`: the tensor's
// RankTask::Tensor::file.
std::string TensorFileName(const Staging& staging, std::string_view stem);
// `shard`: a number of WriterPart.
std::string RankShardName(const Staging& staging, int rank, int shard = 0);
std::string PackName(const Staging& staging, int rank);
std::string ManifestName(int rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_DATA_WRITER_H_
