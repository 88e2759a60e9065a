// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_COMMIT_RECORD_H_
#define TENSORMOUNT_INDEX_RECORDS_COMMIT_RECORD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/hash.h"
#include "index/records/inventory.h"

namespace tensormount {

// Of COMMIT and of manifests; the index has a version of its own, since it can always be made
// again.
inline constexpr std::uint32_t kFormatVersion = 1;
// Feature bits that this version knows. Unknown incompatible: refused; unknown read-compatible:
// opened, never written below; unknown compatible: ignored.
inline constexpr std::uint64_t kKnownIncompatible = 0;
// Compatible bits of COMMIT: made of another checkpoint by `derive`, so it is no step of a run.
inline constexpr std::uint64_t kCommitDerived = 1;

// The file COMMIT, which makes a checkpoint exist (docs/format.md, "Commit record"): two copies,
// each with its own checksum.
struct CommitRecord {
  // The version and the three sets of feature bits have fixed places at the begin of every version.
  std::uint32_t version = kFormatVersion;
  std::uint64_t compatible = 0;
  std::uint64_t read_compatible = 0;
  std::uint64_t incompatible = 0;
  // Of this save: tells a checkpoint from another that was published under the same name.
  Uuid uuid;
  // Numbers the saves of a store: claimed when the staging is made, so that it orders saves by
  // their begin and not by their publish. The highest published one is `latest`.
  std::uint64_t generation = 0;
  // Which checkpoint the mtimes were decided against (docs/format.md, "Mtimes"); zero: none.
  Uuid parent;
  // ContentRoot() of the inventory: a rebuilt index is compared with it.
  Hash128 content_root;
  struct Entry {
    std::string name;  // Below the checkpoint: "data/…", "manifest/…", "index/…".
    std::uint64_t length = 0;
    Hash128 hash;  // File root for data, hash of the whole file otherwise.
    Hash128 tail;  // index/ only: of the last min(length, 64 KiB), checked at open.
  };
  // Every data file, manifest and index of the checkpoint, but no foreign file. What is not in this
  // list belongs to nobody: publish removes it from the staging, `verify` reports it as surplus.
  // A million files are found by binary search; an entry a file and nothing a chunk, so that COMMIT
  // stays small.
  std::vector<Entry> files;                        // Sorted by name.
  const Entry* Find(std::string_view name) const;  // Null: no such file.
};

inline constexpr std::string_view kCommitName = "COMMIT";
// Two copies, about 100 bytes a file each: room for millions of files.
inline constexpr std::uint64_t kMaxCommitBytes = std::uint64_t{1} << 30;

// Both copies, each padded to whole pages: what is written to the file.
std::string EncodeCommit(const CommitRecord& record);

// A record, and whether both of its copies were whole.
struct DecodedCommit {
  CommitRecord record;
  bool one_copy_damaged = false;  // Opened with a warning; `verify` says so and exits 1.
  std::string damage;             // Which copy and why, in words.
};
// kDataLoss where both copies are damaged or disagree; kUnsupported "... newer format: incompatible
// feature bits 0x…" where a bit is unknown.
Result<DecodedCommit> DecodeCommit(std::string_view bytes, std::string_view name);

// The bytes of it, to be decoded. A page that cannot be read comes as zeros, and so costs the copy
// in which it lies; where no copy is left that failure is the answer. kDataLoss for a size that
// cannot be.
Result<std::string> ReadCommitBytes(File& file, std::string_view name);
// Both: bytes, then the record. Blocks as file reads do; on a network filesystem that may be long.
Result<DecodedCommit> ReadCommitFile(File& file, std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMMIT_RECORD_H_
