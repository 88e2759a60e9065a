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

// From the runs of bytes of one tensor that mounts wrote to chunks that cover it exactly.

namespace tensormount::fs {

// Instead of a journal's number: the publisher's own file.
inline constexpr std::uint32_t kPublisher = 0xFFFFFFFF;

// The publish otherwise copies nothing. What can force a copy: a program wrote single bytes of an
// element in several calls, or two mounts wrote overlapping boxes of which odd shapes are left.
// Then the bytes are read back (and proven, StagedReader), and go here side by side.
// What the publisher itself has to write: elements whose bytes came in several writes, boxes
// that later writes left of earlier ones too scattered to be chunks, and what is live of files of
// which the base holds most. Made when the first byte comes; removed by the destructor unless
// Finish was ok. One thread.
class PatchFile {
 public:
  PatchFile(FileSystem& fs, const Staging& staging) : fs_(fs), staging_(staging) {}
  ~PatchFile();
  // Makes the file, where it is not there yet.
  Status Open();
  // Appends; the offset of the first byte is size() before.
  Status Append(const std::byte* data, std::size_t size);
  // Ends the file at `size` again, after an Append that failed, too. Without bytes there is no
  // file.
  Status CutTo(std::uint64_t size);
  std::uint64_t size() const { return size_; }
  bool used() const { return file_ != nullptr; }
  const std::string& name() const { return name_; }  // "data/…"
  // Synced and sealed. Kept from now on unless Discard is called.
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

// A chunk of the checkpoint before its files have numbers there: StagedManifests turns it into a
// ChunkRecord of the manifest of that journal.
struct StagedChunk {
  std::uint32_t journal = 0;  // Or kPublisher.
  std::uint32_t file = 0;     // Of that journal.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Region region;  // In elements.
  std::vector<Hash128> leaves;
  Crc64 contribution = 0;
  // Where the region is elements [first, first + count) of a target, so that neighbours can become
  // one chunk.
  bool is_range = false;
  Box of;
  std::int64_t first = 0;
};

// All references must outlive it. Not thread-safe.
// Resolve works on bytes, because that is what was written; Emit works on elements, because that is
// what chunks are of. In the common case, one writer for each byte, Resolve proves by IsPartition
// that the runs cover the tensor exactly once and returns them as they are; no byte is read. Only
// where runs overlap are boxes cut, by pairs that a search finds; two mounts' bytes are compared
// only where their leaf hashes do not already say that they are equal.
class TensorAssembly {
 public:
  TensorAssembly(const std::vector<Journal>& journals, StagedReader& reader, PatchFile& patches,
                 StagingReport& report)
      : journals_(journals), reader_(reader), patches_(patches), report_(report) {}

  // What holds of the runs of one tensor: later records of a journal over earlier ones; equal bytes
  // of several mounts once. Unequal ones, and cells that nobody wrote, become problems of the
  // report. The result is disjoint: `left` of a run says what is left where it is not whole any
  // more; runs of which nothing is left, and those that forget, are gone.
  Result<std::vector<StagedRun>> Resolve(const TensorMeta& meta, std::vector<StagedRun> runs);
  // Chunks of what Resolve gave, where it found no problem.
  Result<std::vector<StagedChunk>> Emit(const TensorMeta& meta, const std::vector<StagedRun>& runs);

 private:
  class Emitter;
  // Reads both and compares; unequal bytes become "conflict" problems with the boxes of elements.
  Status Compare(const TensorMeta& meta, const StagedRun& a, const StagedRun& b, const Box& bytes);
  Status ResolveOverlaps(const TensorMeta& meta, std::vector<StagedRun>& runs);
  // Also proves that the cut runs are disjoint.
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
