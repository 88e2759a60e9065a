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

// The planned content of a checkpoint that is being written (docs/mounting.md, "Saving through the
// mount"):
//   {"tensors": {"w": {"dtype": "bf16", "shape": [4096, 4096]}},
//    "objects": {"rng": {"grid": [4]}}, "writers": 4, "placement": "auto",
//    "reuse": "auto", "producer": "my trainer 1.2", "content": {...}}
// All fields are optional; unknown fields are refused by name.
// Mounts of several machines edit the schema at once without locks. So each edit is a file that
// never changes, and the schema is the merge of all edits: adding is idempotent and commutative,
// and contradictions are refused.
class StagingSchema {
 public:
  // An object. Its parts are the files objects/KEY/0.1, one for each index of the grid.
  struct ObjectSpec {
    Dims grid;  // Without axes: one part, objects/KEY.
    friend bool operator==(const ObjectSpec&, const ObjectSpec&) = default;
  };
  // kInvalidArgument names the problem and its position ("tensors.w.shape[1]: ...").
  static Result<StagingSchema> Parse(std::string_view json);
  // Canonical text with sorted keys; the content of schema.json.
  std::string ToJson() const;

  // Adds the fields of `other`. kAlreadyExists ("tensor w: bf16 [4, 4] in one schema.json, ...") if
  // both define a name or field differently; nothing is changed then.
  Status Merge(const StagingSchema& other);

  const std::map<std::string, TensorMeta>& tensors() const { return tensors_; }
  const std::map<std::string, ObjectSpec>& objects() const { return objects_; }
  std::optional<std::uint32_t> writers() const { return writers_; }
  const std::string& placement() const { return placement_; }
  // "off", or the name of the base checkpoint; empty: auto.
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

// Merges the schemas of all mounts of a staging: one immutable file for each edit
// (schema/<incarnation>-<n>.json). Retries a few times on a conflict, because a writer may be about
// to withdraw its edit.
Result<StagingSchema> ReadSchemas(FileSystem& fs, const std::string& staging_directory);
// Adds an edit durably. kAlreadyExists: the edit conflicts with another one and was not kept.
// Each writer first adds its file and then reads all, so of two concurrent conflicting edits at
// most one succeeds; both may fail.
Status AddSchema(FileSystem& fs, const std::string& staging_directory,
                 const std::string& incarnation, const StagingSchema& edit);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_SCHEMA_H_
