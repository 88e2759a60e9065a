// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_STAGING_STAGING_MODEL_H_
#define TENSORMOUNT_TESTS_STAGING_STAGING_MODEL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file_system.h"
#include "fs/save/journal.h"
#include "fs/save/staging_writer.h"
#include "index/store/store.h"
#include "shard/tensor_meta.h"

// What a staging should hold, in memory, and what its journal says, read in the plainest way.

namespace tensormount::fs {

inline constexpr char kTestIncarnation[] = "0123456789abcdef";

// Makes `directory` with what a staging of mounts has.
Staging MakeTestStaging(FileSystem& fs, const std::string& directory);
std::string JournalPath(const Staging& staging);

// Bytes of a target; those that nobody wrote are unknown.
struct KnownBytes {
  std::string bytes;
  std::string known;  // 1 or 0, for each.
  explicit KnownBytes(std::size_t size = 0) : bytes(size, '\0'), known(size, '\0') {}
  void Write(std::uint64_t at, std::string_view data);
  void Forget(std::uint64_t begin, std::uint64_t end);
  std::uint64_t count() const;
  std::vector<ByteRange> Ranges() const;
  friend bool operator==(const KnownBytes& a, const KnownBytes& b) {
    return a.known == b.known && a.bytes == b.bytes;  // Unknown ones are zeros.
  }
};

// By TargetName or ObjectName.
struct StagedInventory {
  std::map<std::string, KnownBytes> targets;
  std::map<std::string, std::string> objects;
  std::vector<std::string> condemned;
  std::uint64_t extents = 0;
};
std::string TargetName(const std::string& key, const Box& box);
std::string ObjectName(const std::string& key, const Dims& index);

// Applies the records in order. Every byte is read, and hashes and contributions made anew from a
// list of where each byte stands in the tensor; what does not agree fails the test.
StagedInventory Resolve(FileSystem& fs, const std::string& directory, const Journal& journal,
                        const std::vector<TensorMeta>& tensors);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_TESTS_STAGING_STAGING_MODEL_H_
