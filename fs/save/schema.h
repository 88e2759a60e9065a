// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_SCHEMA_H_
#define TENSORMOUNT_FS_SAVE_SCHEMA_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/common_value.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {

// Mounts of several machines edit it at once, and there are no locks between them. So an edit is a
// file of its own that never changes, and the schema is what merging all of them gives: adding is
// idempotent and commutes, and what contradicts is refused.
// What a checkpoint that is being written shall hold (docs/semantics.md, "schema.json"):
//   {"tensors": {"w": {"dtype": "bf16", "shape": [4096, 4096]}},
//    "objects": {"rng": {"grid": [4]}}, "writers": 4, "placement": "auto",
//    "reuse": "auto", "producer": "my trainer 1.2", "content": {...}}
// All fields but "tensors" are optional; unknown ones are refused by name.
class StagingSchema {
 public:
  // Parts of an object are files objects/KEY/0.1, one for each index of the grid.
  struct ObjectSpec {
    Dims grid;  // Rank 0: one part.
    friend bool operator==(const ObjectSpec&, const ObjectSpec&) = default;
  };
  // kInvalidArgument names what is wrong and where ("tensors.w.shape[1]: ...").
  static Result<StagingSchema> Parse(std::string_view json);
  // The same text for the same schema, keys sorted; what reading schema.json gives.
  std::string ToJson() const;

  // Adds what `other` says. kAlreadyExists "tensor w: bf16 [4, 4] here, f32 [4, 4] there" where
  // both say different things of one name; nothing is changed then.
  // All is compared before anything is added.
  Status Merge(const StagingSchema& other);

  const std::map<std::string, TensorMeta>& tensors() const { return tensors_; }
  const std::map<std::string, ObjectSpec>& objects() const { return objects_; }
  std::optional<std::uint32_t> writers() const { return writers_; }
  const std::string& placement() const { return placement_; }
  // "off", or the name of the checkpoint that is compared with; empty: auto.
  const std::string& reuse() const { return reuse_; }
  const std::string& producer() const { return producer_; }
  const CommonDict& content() const { return content_; }
  bool empty() const { return tensors_.empty() && objects_.empty() && !writers_; }

 private:
  std::map<std::string, TensorMeta> tensors_;
  std::map<std::string, ObjectSpec> objects_;
  std::optional<std::uint32_t> writers_;
  std::string placement_;  // Empty: auto.
  std::string reuse_;
  std::string producer_;
  CommonDict content_;
};

// The schemas of all mounts of a staging: one file for each edit, never changed
// (schema/<incarnation>-<n>.json), merged.
// Tries a few times where files conflict: a writer may be about to take its file back.
Result<StagingSchema> ReadSchemas(FileSystem& fs, const std::string& staging_directory);
// Adds an edit durably: writes its file, reads all again; a conflict removes it and is
// kAlreadyExists. Of two that conflict and come at once at most one succeeds.
// Each writer first adds its file and then reads all: of two that conflict at least one sees the
// other and takes its own back. Both may; then both are told.
Status AddSchema(FileSystem& fs, const std::string& staging_directory,
                 const std::string& incarnation, const StagingSchema& edit);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_SCHEMA_H_
