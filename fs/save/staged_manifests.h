// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGED_MANIFESTS_H_
#define TENSORMOUNT_FS_SAVE_STAGED_MANIFESTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/tensor_assembly.h"
#include "index/store/store.h"

namespace tensormount::fs {

// One manifest for each mount, as the library writes one for each rank, so that the store's publish
// is the same for both: it reads manifests from disk, merges them and proves that they are
// complete. They are written and read back within one call on purpose. The proof is of what a
// rebuild or a verify will read later, not of what the publisher had in memory, and a manifest that
// cannot be decoded must fail the publish, not a restart weeks later. The cost is one read of data
// that is in the page cache.
// The manifests that journals become: one for each mount that wrote anything that counts, one for
// the publisher, with its patches and the tensors that have no bytes. Not thread-safe.
class StagedManifests {
 public:
  // Both must outlive this.
  StagedManifests(const Staging& staging, const std::vector<Journal>& journals);
  ~StagedManifests();

  // Chunks of one tensor; tensors in rising order of their keys.
  void AddTensor(const TensorMeta& meta, const std::vector<StagedChunk>& chunks);
  // `object` as a part of `grid`, of that journal; kPublisher for one without bytes, and for one
  // that stands in the publisher's file.
  void AddObject(std::uint32_t journal, const StagedObject& object, const Dims& grid);
  // Whether the publisher's file must be there though it has no bytes: objects without bytes
  // must be in some file.
  bool needs_patch_file() const;

  // Seals the data files that count and learns their lengths; then writes the manifests, durably
  // but for their names. kDataLoss where a file is not there or ends before its journal says.
  Status Write(FileSystem& fs, const PatchFile& patches);

 private:
  // What one manifest will say.
  struct Writer;
  Writer& Of(std::uint32_t journal);
  // Opens each data file that a chunk names: it must be there and reach as far as its chunks do.
  // Sealing marks it read-only, so that nothing can change what COMMIT vouches for.
  Status SealFiles(FileSystem& fs, const PatchFile& patches, std::uint32_t journal, Writer& writer);

  const Staging& staging_;
  const std::vector<Journal>& journals_;
  std::vector<Writer> writers_;  // The publisher's is the last.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_MANIFESTS_H_
