// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_INDEX_CHECKPOINT_BUILDER_H_
#define TENSORMOUNT_TESTS_INDEX_CHECKPOINT_BUILDER_H_

#include <map>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "index/records/commit_record.h"
#include "index/records/inventory.h"
#include "tests/support/random_layout.h"

// Checkpoint folders with any cuts, written without store and collective, so that tests of the
// index choose every byte.

namespace tensormount {

struct BuildObject {
  std::string key;
  Dims index;
  Dims grid;
  std::string bytes;
};

struct BuildSpec {
  Uuid uuid{0x1111222233334444, 0x5555666677778888};
  int writers = 2;
  std::vector<RandomTensor> tensors;
  std::vector<Partition> partitions;  // One a tensor; of equal regions only the first is written.
  std::vector<BuildObject> objects;   // By writer 0.
  std::map<std::string, CommonValue> common;
  std::int64_t now = 1700000000;
  bool page_hashes = false;  // For every chunk and object that is longer than a leaf.
};

struct BuiltCheckpoint {
  std::string directory;
  Inventory inventory;  // Merged, as the index has it.
  CommitRecord commit;
};

// Writes `directory`, which must not exist. Data files "data/<short uuid>-r<writer>.bin": 32 bytes
// that are an extra piece, then the chunks in the order of tensors.
Result<BuiltCheckpoint> BuildCheckpoint(FileSystem& fs, const std::string& directory,
                                        const BuildSpec& spec);

// Random tensors of up to `max_bytes`, random partitions, two objects, common values of each kind.
BuildSpec RandomSpec(Random& random, int tensors, std::uint64_t max_bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_INDEX_CHECKPOINT_BUILDER_H_
