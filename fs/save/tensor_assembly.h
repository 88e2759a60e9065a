// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_TENSOR_ASSEMBLY_H_
#define TENSORMOUNT_FS_SAVE_TENSOR_ASSEMBLY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/publish.h"
#include "fs/save/resolve_journals.h"
#include "fs/save/staged_reader.h"
#include "index/store/store.h"
#include "shard/tensor_meta.h"

// Turns the runs of bytes of one tensor that mounts wrote into chunks that cover it exactly.

namespace tensormount::fs {

// Used instead of a journal's number for the publisher's own file.
inline constexpr std::uint32_t kPublisher = 0xFFFFFFFF;

// The file of bytes that the publisher itself must write: elements whose bytes came in several
// writes, remains of overwritten boxes that are too scattered to be chunks, and the few live bytes
// of files whose other bytes are taken from the base. The publish copies nothing else. Created at
// the first byte or by Open; the destructor removes it unless Finish succeeded. Not thread-safe.
class PatchFile {
 public:
  PatchFile(FileSystem& fs, const Staging& staging) : fs_(fs), staging_(staging) {}
  ~PatchFile();
  // Creates the file if it does not exist yet.
  Status Open();
  // Appends; the bytes begin at the previous size().
  Status Append(const std::byte* data, std::size_t size);
  // Truncates the file to `size`, also after a failed Append. A file without bytes is removed.
  Status TruncateTo(std::uint64_t size);
  std::uint64_t size() const { return size_; }
  bool used() const { return file_ != nullptr; }
  const std::string& name() const { return name_; }  // Path below the staging: "data/…".
  // Syncs and seals the file. The file is kept from then on unless Discard is called.
  Status Finish();
  void Discard();

 private:
  FileSystem& fs_;
  const Staging& staging_;
  std::string name_;
  std::unique_ptr<File> file_;
  std::uint64_t size_ = 0;
  bool kept_ = false;
};

// A chunk before the checkpoint's files have numbers; StagedManifests turns it into a ChunkRecord
// of the manifest of `journal`.
struct StagedChunk {
  std::uint32_t journal = 0;  // Number of a journal, or kPublisher.
  std::uint32_t file = 0;     // Number of a file in that journal.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Region region;  // Region in elements.
  std::vector<Hash128> leaves;
  Crc64 contribution = 0;
  // Whether the region is a range of `target_box` in row-major order, from element `first` on;
  // adjacent ranges of one box can be merged into one chunk.
  bool is_range = false;
  Box target_box;
  std::int64_t first = 0;
};

// Assembles tensors. All references must outlive this object. Not thread-safe.
// Resolve works on bytes, because programs write bytes; Emit works on elements, because chunks
// consist of elements. In the common case, one writer for each byte, Resolve proves with
// IsPartition that the runs cover the tensor exactly once and returns them without reading a byte.
// Only overlapping runs are cut; bytes of two mounts are compared only if their leaf hashes do not
// prove them equal.
class TensorAssembly {
 public:
  TensorAssembly(const std::vector<Journal>& journals, StagedReader& reader, PatchFile& patches,
                 StagingReport& report)
      : journals_(journals), reader_(reader), patches_(patches), report_(report) {}

  // Resolves the runs of one tensor: later records of a journal override earlier ones; equal bytes
  // of several mounts are kept once. Unequal bytes and unwritten cells become problems of the
  // report. The result is disjoint: if a part of a run was removed, its `remaining` has
  // the boxes that are left; runs without remaining bytes, and those of kForget, are dropped.
  Result<std::vector<StagedRun>> Resolve(const TensorMeta& meta, std::vector<StagedRun> runs);
  // Makes chunks of the result of Resolve, which must have found no problem.
  Result<std::vector<StagedChunk>> Emit(const TensorMeta& meta, const std::vector<StagedRun>& runs);

 private:
  class Emitter;
  // Reads `bytes` of both runs and compares them; unequal bytes become "conflict" problems with
  // boxes of elements.
  Status Compare(const TensorMeta& meta, const StagedRun& a, const StagedRun& b, const Box& bytes);
  Status ResolveOverlaps(const TensorMeta& meta, std::vector<StagedRun>& runs);
  // Reports cells that no run has, and checks that the cut runs are disjoint.
  void FindMissing(const TensorMeta& meta, const std::vector<StagedRun>& runs);
  const std::string& MountOf(const StagedRun& run) const {
    return journals_[run.journal].incarnation;
  }

  const std::vector<Journal>& journals_;
  StagedReader& reader_;
  PatchFile& patches_;
  StagingReport& report_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_TENSOR_ASSEMBLY_H_
