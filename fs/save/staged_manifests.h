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

// Makes the manifests of a publish: one for each mount whose bytes are used, and one for the
// publisher, with the ranges of its own file and the tensors and objects without bytes, if there
// are any. Not thread-safe.
// The store's publish is thus the same as for the library's ranks: it reads manifests from disk,
// merges them and proves that they are complete. Reading them back in the same call is intended: a
// manifest that cannot be decoded must fail the publish, not a restart weeks later. It costs one
// read from the page cache.
class StagedManifests {
 public:
  // `staging` and `journals` must outlive this object.
  StagedManifests(const Staging& staging, const std::vector<Journal>& journals);
  ~StagedManifests();

  // Adds the chunks of one tensor; tensors come in rising order of their keys.
  void AddTensor(const TensorMeta& meta, const std::vector<StagedChunk>& chunks);
  // Adds an object part of a journal. `grid`: the grid that the part belongs to. `journal` is
  // kPublisher for an object without bytes, or one in the publisher's file.
  void AddObject(std::uint32_t journal, const StagedObject& object, const Dims& grid);
  // Whether a manifest names the publisher's file, which must then exist, maybe without bytes:
  // objects without bytes are recorded in it.
  bool needs_patch_file() const;

  // Seals the used data files and learns their lengths, then writes the manifests (their names are
  // not yet durable). kDataLoss: a file is missing or shorter than its journal says.
  Status Write(FileSystem& fs, const PatchFile& patches);

 private:
  // The content of one manifest.
  struct Writer;
  Writer& WriterOf(std::uint32_t journal);
  // Opens, checks and seals each data file of a mount that a chunk or object names: it must reach
  // as far as these. Sealing marks it read-only, because COMMIT will cover its bytes.
  Status SealFiles(FileSystem& fs, const PatchFile& patches, std::uint32_t journal, Writer& writer);

  const Staging& staging_;
  const std::vector<Journal>& journals_;
  std::vector<Writer> writers_;  // The last one is the publisher's.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_MANIFESTS_H_
