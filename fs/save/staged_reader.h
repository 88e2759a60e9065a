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

// Reads bytes that journals record, and verifies each against the journal's leaf hashes before it
// is compared or copied: damaged bytes must not get new hashes.
//
// index/read's StoredRangeReader is not used here: it reads chunks of a manifest and fetches their
// leaves from that manifest's file. Here the leaves are in memory, and bytes are read once or twice
// in small nearby boxes, so four windows of 4 MiB replace its plans and caches. Not thread-safe.
class StagedReader {
 public:
  // `fs` and `journals` must outlive this object.
  StagedReader(FileSystem& fs, const std::string& staging_directory,
               const std::vector<Journal>& journals);

  // Reads stored bytes [at, at + size) of the extent of `run`. kDataLoss names the file and the
  // byte.
  Status Read(const StagedRun& run, std::uint64_t at, std::size_t size, std::byte* out);
  // Reads a box within run.bytes, packed, with one read for each contiguous run of the box.
  Status ReadBox(const StagedRun& run, const Box& bytes, std::byte* out);

 private:
  // Verified bytes of some leaves. Four windows suffice: boxes of a comparison come row by row, so
  // each of the two sides uses one window and touches the next.
  struct Window {
    // Leaf hashes of the extent; their address identifies it.
    const std::vector<Hash128>* leaves = nullptr;
    std::uint64_t begin = 0;
    std::vector<std::byte> data;
    std::uint64_t used = 0;
  };
  // A data file, which stays open for later calls. Valid until the next call.
  Result<File*> Open(std::uint32_t journal, std::uint32_t file);
  // A window with verified bytes from `at` on. Valid until the next call.
  Result<Window*> Load(const StagedRun& run, std::uint64_t at, std::size_t size);

  FileSystem& fs_;
  const std::string directory_;
  const std::vector<Journal>& journals_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::unique_ptr<File>> files_;
  std::array<Window, 4> windows_;  // Two for each side of a comparison.
  // Counts uses, to replace the least recently used window.
  std::uint64_t clock_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_READER_H_
