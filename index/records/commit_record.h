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

// Version of COMMIT and of manifests. The index has its own, because it can be rebuilt.
inline constexpr std::uint32_t kFormatVersion = 1;
// The incompatible feature bits that this version knows: none. A checkpoint with unknown
// incompatible bits is refused. Unknown compatible and read-compatible bits do not stop a reader;
// docs/format.md forbids writing into a checkpoint with unknown read-compatible bits.
inline constexpr std::uint64_t kKnownIncompatible = 0;
// Compatible bit of COMMIT: `derive` made the checkpoint, so it is not a step of a training run.
inline constexpr std::uint64_t kCommitDerived = 1;

// The file COMMIT, whose existence makes a directory a checkpoint (docs/format.md, "Commit
// record"): two copies, each with its own checksum.
struct CommitRecord {
  // The version and the feature bits have fixed offsets in every version.
  std::uint32_t version = kFormatVersion;
  std::uint64_t compatible = 0;
  std::uint64_t read_compatible = 0;
  std::uint64_t incompatible = 0;
  // Identifies this save: checkpoints of the same name have different uuids.
  Uuid uuid;
  // Number of the save in its store, claimed when the staging is made. Generations therefore order
  // saves by their begin, not by their publish. The published checkpoint with the highest
  // generation is `latest`.
  std::uint64_t generation = 0;
  // Uuid of the checkpoint against which the mtimes were decided (docs/format.md, "Mtimes"). Zero:
  // there is no such checkpoint.
  Uuid parent;
  // ContentRoot() of the inventory; a rebuilt index is compared with it.
  Hash128 content_root;
  struct Entry {
    std::string name;  // Below the checkpoint: "data/…", "manifest/…", "index/…".
    std::uint64_t length = 0;
    // The file root of a data file; the hash of the whole file of a manifest or an index.
    Hash128 hash;
    // For the index, the hash of its last min(length, 64 KiB) bytes, checked at open. Zero for
    // other files.
    Hash128 tail;
  };
  // Every data file, manifest and index of the checkpoint, except foreign files. A file that is not
  // listed does not belong to the checkpoint: publish removes it from the staging, and `verify`
  // reports it as surplus, except leftovers of a shared staging. COMMIT stays small because chunks
  // have no entries.
  std::vector<Entry> files;  // Sorted by name.
  // The entry of file `name`; null if there is none. Binary search.
  const Entry* Find(std::string_view name) const;
};

inline constexpr std::string_view kCommitName = "COMMIT";
// Upper limit of the size of COMMIT. An entry takes about 100 bytes in each of the two copies, so
// this is room for millions of files.
inline constexpr std::uint64_t kMaxCommitBytes = std::uint64_t{1} << 30;

// The content of the file COMMIT: two copies of `record`, each padded to whole pages.
std::string EncodeCommit(const CommitRecord& record);

// A decoded COMMIT, and whether both of its copies were intact.
struct DecodedCommit {
  CommitRecord record;
  // The record is usable, but one copy is damaged. An open warns; `verify` reports the damage and
  // exits 1.
  bool one_copy_damaged = false;
  // Which copy is damaged, and why. Empty: none.
  std::string damage;
};
// Decodes the content of COMMIT. kDataLoss if both copies are damaged, or if they disagree.
// kUnsupported "... newer format: ..." for another version or an unknown incompatible bit.
Result<DecodedCommit> DecodeCommit(std::string_view bytes, std::string_view name);

// Reads the content of COMMIT, for DecodeCommit. If the file cannot be read as a whole, an
// unreadable page is returned as zeros, so that only the copy in that page is lost. If no copy is
// left, the error of the read is returned. kDataLoss if the file is larger than kMaxCommitBytes.
Result<std::string> ReadCommitBytes(File& file, std::string_view name);
// Reads and decodes COMMIT. Blocks like any file read, possibly long on a network filesystem.
Result<DecodedCommit> ReadCommitFile(File& file, std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMMIT_RECORD_H_
