// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_ADOPT_FOREIGN_SUPPORT_H_
#define TENSORMOUNT_TESTS_ADOPT_FOREIGN_SUPPORT_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "index/foreign/foreign.h"
#include "index/read/checkpoint.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"
#include "tests/support/temp_dir.h"

namespace tensormount {

// Opens without descriptors: what is not on this machine's disk. Reads then never map.
class UnmappedFileSystem : public ObservedFileSystem {
 public:
  UnmappedFileSystem() : ObservedFileSystem(HostFileSystem(), {}) {}
  Result<std::unique_ptr<File>> OpenReadBeneath(const std::string& directory,
                                                const std::string& name) override;
};

// Files of others, each of which is cut to nothing once somebody who can map it has asked how long
// it is.
class CutFileSystem : public ObservedFileSystem {
 public:
  CutFileSystem() : ObservedFileSystem(HostFileSystem(), {}) {}
  Result<std::unique_ptr<File>> OpenReadBeneath(const std::string& directory,
                                                const std::string& name) override;
};

// A foreign checkpoint made by hand: tensors are windows of files of random bytes. Knows what each
// tensor is by an oracle that shares nothing with the code under test.
class HandMade {
 public:
  // Pending chunks name an item by its number instead of an offset; each use is counted.
  struct Resolver {
    Status Resolve(const TensorMeta& meta, File& file, ChunkRecord& chunk) const;
    std::map<std::uint64_t, ChunkRecord> items;
    Status failure;
    mutable std::atomic<int> calls{0};
  };

  // The files get this many random bytes each.
  HandMade(const std::string& root, Random& random, std::vector<std::uint64_t> sizes);

  // Strides in bytes; empty: packed.
  struct Window {
    Region region;
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    Dims strides;
    bool pending = false;
  };
  void Add(const std::string& key, DType dtype, const Dims& shape, std::vector<Window> windows);
  void AddObject(const std::string& key, std::uint32_t file, std::uint64_t offset,
                 std::uint64_t length);

  // Sorted, with an identity.
  ForeignInventory Found() const;
  Result<std::shared_ptr<OpenedCheckpoint>> Open(FileSystem& fs) const;
  // Row-major bytes; what no window holds is '\0'.
  const std::string& Bytes(const std::string& key) const { return bytes_.at(key); }
  const std::map<std::string, std::string>& all_bytes() const { return bytes_; }
  const std::string& root() const { return root_; }
  std::string FilePath(std::uint32_t file) const;
  Resolver& resolver() { return *resolver_; }

 private:
  std::string root_;
  Inventory inventory_;
  std::vector<std::string> files_;
  std::map<std::string, std::string> bytes_;
  std::shared_ptr<Resolver> resolver_ = std::make_shared<Resolver>();
};

// Many ways to store: transposed, permuted, padded, expanded, windows of one storage, small and
// past the size of a block.
void AddManyKinds(HandMade& made);
inline const std::vector<std::uint64_t> kManyKindsSizes = {6u << 20, 300000};

// Reads everything whole and in random boxes and byte ranges, in every mode.
void CompareWithHandMade(Random& random, const OpenedCheckpoint& opened, const HandMade& made,
                         int reads);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_ADOPT_FOREIGN_SUPPORT_H_
