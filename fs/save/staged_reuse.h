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

// What schema.json names as the base: held from now on, so that no rule removes it before the
// publish. Durable when this returns. kNotFound where there is no such checkpoint. "auto" and "off"
// hold nothing.
Status HoldNamedBase(FileSystem& fs, const Staging& staging, const std::string& reuse);

// What programs wrote through mounts is on disk before anybody can compare it. So a publish looks
// at what the parent holds, and takes its files where a tensor is the same, instead of those that
// were just written; these belong to no checkpoint then, and gc removes them with the rest of the
// staging. Digests propose, hashes of equal chunks or a comparison of all bytes decide.
// Not thread-safe.
class StagedReuse {
 public:
  // All must outlive this.
  StagedReuse(const Store& store, FileSystem& fs, const Staging& staging,
              const std::vector<Journal>& journals)
      : store_(store), fs_(fs), staging_(staging), journals_(journals) {}

  // `reuse`: "auto" (also empty), "off", or the name of a checkpoint of the store. Whatever is
  // wrong with a base, nothing is taken, and note() says why.
  void Open(const std::string& reuse);

  // Whether the tensor of these chunks is taken from the base. Each once.
  bool Takes(const TensorMeta& meta, const std::vector<StagedChunk>& chunks);
  bool Takes(const StagedObject& object, const Dims& grid);

  // Links what was taken, and writes its records, durable but for its name. Where that fails
  // nothing is taken, which whoever relied on Takes must know.
  Status Link();

  bool any() const { return base_ != nullptr && taken_.any(); }
  std::uint64_t tensors() const { return tensors_; }
  std::uint64_t bytes() const { return bytes_; }
  // Why nothing was taken although a base was meant; empty: nothing went wrong.
  const std::string& note() const { return note_; }

 private:
  Status Compare(const TensorEntry& entry, const std::vector<StagedChunk>& chunks, bool* same);
  Status CompareBytes(const TensorEntry& entry, const StagedChunk& chunk, bool* same);

  const Store& store_;
  FileSystem& fs_;
  const Staging& staging_;
  const std::vector<Journal>& journals_;
  std::shared_ptr<OpenedCheckpoint> base_;  // Null: none.
  std::vector<ObjectRecord> objects_;       // Of the base.
  std::uint64_t in_a_row_ = 0;
  TakenFromBase taken_;
  std::uint64_t tensors_ = 0;
  std::uint64_t bytes_ = 0;
  std::string note_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_REUSE_H_
