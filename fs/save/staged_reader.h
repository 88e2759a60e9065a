// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGED_READER_H_
#define TENSORMOUNT_FS_SAVE_STAGED_READER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/resolve_journals.h"

namespace tensormount::fs {

// Reads what journals say is on disk, and proves every byte by the journal's leaf hashes before it
// is compared or copied: what was damaged since must not get a hash of its own. Not thread-safe.
class StagedReader {
 public:
  // Both must outlive this.
  StagedReader(FileSystem& fs, const std::string& staging_directory,
               const std::vector<LoadedJournal>& journals);

  // Stored bytes [at, at + size) of something with leaf hashes from `offset` of a file on.
  // kDataLoss names file and place.
  struct Stored {
    std::uint32_t journal = 0;
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
    const std::vector<Hash128>* leaves = nullptr;
  };
  Status Read(const Stored& stored, std::uint64_t at, std::size_t size, std::byte* out);
  Status Read(const StagedRun& piece, std::uint64_t at, std::size_t size, std::byte* out);
  // The bytes of a box, which must lie within piece.bytes, packed.
  Status ReadBox(const StagedRun& piece, const Box& bytes, std::byte* out);

 private:
  struct Window {
    const std::vector<Hash128>* leaves = nullptr;  // Whose.
    std::uint64_t begin = 0;
    std::vector<std::byte> data;
    std::uint64_t used = 0;
  };
  Result<File*> Open(std::uint32_t journal, std::uint32_t file);
  Result<Window*> Load(const Stored& stored, std::uint64_t at, std::size_t size);

  FileSystem& fs_;
  const std::string directory_;
  const std::vector<LoadedJournal>& journals_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::unique_ptr<File>> files_;
  std::array<Window, 4> windows_;  // Two of each side of a comparison.
  std::uint64_t clock_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_READER_H_
