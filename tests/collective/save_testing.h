// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_SAVE_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_SAVE_TESTING_H_

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/file_system.h"
#include "collective/save_load.h"
#include "index/store/store.h"
#include "tests/support/random_layout.h"

// Saves on threads and looks at what they left, for the tests of Save.

namespace tensormount {

// What one rank saves, with its memory.
struct RankState {
  StateDict dict;
  std::vector<ShardMemory> memory;

  // Adds a region of a tensor, in memory of its own (packed, or strided at random).
  void Add(const RandomTensor& tensor, const Region& region, Random* strided = nullptr);
};

// Calls fill(rank, state) and then SaveOn on `ranks` threads, with another number of owners each
// time; results by rank. `fs_of(rank)`: the file system of a rank, the host's where empty.
std::vector<Result<SaveReport>> SaveOnThreads(const std::string& path, int ranks,
                                              const std::function<void(int, RankState&)>& fill,
                                              const SaveOptions& options = {},
                                              const std::function<FileSystem&(int)>& fs_of = {},
                                              const SaveControl& control = {});

// ok where all are; otherwise the failure, which must be the same on all ranks.
Status OneVerdict(const std::vector<Result<SaveReport>>& results);

// With bytes that depend on the key.
RandomTensor MakeTensor(const std::string& key, DType dtype, const Dims& shape);

// All bytes of each tensor as the checkpoint gives them back, verified by leaf, by key.
std::map<std::string, std::string> ReadAll(const std::string& path);

// What stands in the store but for its superblock, generation claims and the uuids of aborted
// saves, without data: "step-1", ".trash/...", ".staging/...".
std::vector<std::string> Inside(const std::string& store);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_SAVE_TESTING_H_
