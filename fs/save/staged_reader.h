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
// is compared or copied: what was damaged since must not get a hash of its own.
//
// Not index/read's PartReader, although both check leaves: that one reads chunks of a manifest,
// whose leaves it fetches from that manifest's file and whose proof it may remember
// (ProvenRanges). There is no manifest yet here; leaves are in memory, in the journal, and every
// byte is read once or twice in small boxes that lie close together, so a few windows of 4 MiB do
// what plans and caches do there. Not thread-safe.
class StagedReader {
 public:
  // Both must outlive this.
  StagedReader(FileSystem& fs, const std::string& staging_directory,
               const std::vector<Journal>& journals);

  // Stored bytes [at, at + size) of the extent of `run`. kDataLoss names the file and the byte.
  Status Read(const StagedRun& run, std::uint64_t at, std::size_t size, std::byte* out);
  // The bytes of a box, which must lie within run.bytes, packed.
  // One read for each run of the box that is stored side by side.
  Status ReadBox(const StagedRun& run, const Box& bytes, std::byte* out);

 private:
  // The bytes of some leaves, proven. Four windows: boxes of a comparison come row by row, so each
  // of the two sides works in one window and touches the next.
  struct Window {
    const std::vector<Hash128>* leaves = nullptr;  // Whose.
    std::uint64_t begin = 0;
    std::vector<std::byte> data;
    std::uint64_t used = 0;
  };
  // Opened once and kept; good until the next call.
  Result<File*> Open(std::uint32_t journal, std::uint32_t file);
  // Good until the next call.
  Result<Window*> Load(const StagedRun& run, std::uint64_t at, std::size_t size);

  FileSystem& fs_;
  const std::string directory_;
  const std::vector<Journal>& journals_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::unique_ptr<File>> files_;
  std::array<Window, 4> windows_;  // Two of each side of a comparison.
  // Of uses: the window that was used longest ago is loaded anew.
  std::uint64_t clock_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_READER_H_
