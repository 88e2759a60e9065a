// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_KNOWN_GENERATIONS_H_
#define TENSORMOUNT_INDEX_STORE_KNOWN_GENERATIONS_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_system.h"
#include "index/records/inventory.h"

namespace tensormount {

// Which generation each checkpoint of a store has, as a save found it. A save of a store with
// thousands of checkpoints reads this file and looks at each directory instead of reading each
// COMMIT, which takes three times as long (docs/format.md, "Known generations"). The file may be
// lost, old or damaged: what it does not say is read from COMMIT.
struct KnownGeneration {
  std::string name;
  // The directory when its COMMIT was read. Publishing, renaming and repairing a checkpoint change
  // at least one of them.
  std::uint64_t inode = 0;
  std::int64_t ctime_seconds = 0;
  std::int64_t ctime_nanoseconds = 0;
  Uuid uuid;
  std::uint64_t generation = 0;
  bool derived = false;

  bool IsOf(std::string_view path_name, const FileInfo& directory) const {
    return name == path_name && directory.kind == FileKind::kDirectory &&
           directory.inode == inode && directory.ctime_seconds == ctime_seconds &&
           directory.ctime_nanoseconds == ctime_nanoseconds;
  }
};

// Stores with fewer checkpoints have no such file.
inline constexpr std::size_t kFewestKnownGenerations = 256;

// The entries of the file, sorted by name; none if it is missing, damaged, or cannot be read.
std::vector<KnownGeneration> ReadKnownGenerations(FileSystem& fs, const std::string& store);
// Replaces the file. `known` is sorted by name. Not durable; a failure leaves the old file or none.
void WriteKnownGenerations(FileSystem& fs, const std::string& store,
                           std::span<const KnownGeneration> known);

// For tests and fuzzing. Decode returns no entries if any byte is wrong.
std::string EncodeKnownGenerations(std::span<const KnownGeneration> known);
std::vector<KnownGeneration> DecodeKnownGenerations(std::string_view bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_KNOWN_GENERATIONS_H_
