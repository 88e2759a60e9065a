// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGED_REUSE_H_
#define TENSORMOUNT_FS_SAVE_STAGED_REUSE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/tensor_assembly.h"
#include "index/read/checkpoint.h"
#include "index/store/linking.h"
#include "index/store/store.h"

namespace tensormount::fs {

// Protects the base that schema.json names from retention rules until the publish, durably, if it
// can be read now. kNotFound: there is no such checkpoint. "auto" and "off" name no base.
Status HoldNamedBase(FileSystem& fs, const Staging& staging, const std::string& reuse);

// Takes data from the base in a publish: the checkpoint that schema.json names, or the parent.
// Programs write through mounts before anything can be compared, so the publish compares each
// tensor with the base and, if it is equal, links the base's files. Written files with nothing else
// are then unused, and gc removes them. Digests select candidates; hashes of equal chunks, or a
// comparison of all bytes, decide. Objects are compared by their hashes.
// Not thread-safe.
class StagedReuse {
 public:
  // All arguments must outlive this object.
  StagedReuse(const Store& store, FileSystem& fs, const Staging& staging,
              const std::vector<Journal>& journals)
      : store_(store), fs_(fs), staging_(staging), journals_(journals) {}

  // `reuse`: "auto" (or empty), "off", or the name of a checkpoint of the store. If the base cannot
  // be opened, nothing is reused, and note() tells why. Nothing is reused either, without a note,
  // if the base is not self-contained or a save without links is due (SaveOptions::full_every).
  void Open(const std::string& reuse);

  // Whether the tensor of these chunks is taken from the base. To be called once for each tensor.
  bool TryReuse(const TensorMeta& meta, const std::vector<StagedChunk>& chunks);
  bool TryReuse(const StagedObject& object, const Dims& grid);

  // Links the taken files and writes their records (the manifest's name is not yet durable). On
  // failure nothing is reused, and callers must ignore earlier results of TryReuse.
  Status Link();

  bool any() const { return base_ != nullptr && taken_.any(); }
  std::uint64_t tensors() const { return tensors_; }
  std::uint64_t bytes() const { return bytes_; }
  // The problem because of which nothing was reused; empty: none.
  const std::string& note() const { return note_; }

 private:
  Status Compare(const TensorEntry& entry, const std::vector<StagedChunk>& chunks, bool* same);
  Status CompareBytes(const TensorEntry& entry, const StagedChunk& chunk, bool* same);

  const Store& store_;
  FileSystem& fs_;
  const Staging& staging_;
  const std::vector<Journal>& journals_;
  std::shared_ptr<OpenedCheckpoint> base_;  // Null: no base.
  std::vector<ObjectRecord> objects_;       // The base's objects.
  std::uint64_t consecutive_ = 0;
  ReusedFromBase taken_;
  std::uint64_t tensors_ = 0;
  std::uint64_t bytes_ = 0;
  std::string note_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_REUSE_H_
