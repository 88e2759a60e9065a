// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_DERIVE_H_
#define TENSORMOUNT_DERIVE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/key_map.h"
#include "tensormount/status.h"
#include "tensormount/store.h"
#include "tensormount/visibility.h"

namespace tensormount {

struct DeriveOptions {
  // Globs over the old checkpoint's keys of tensors and objects; '*' matches any bytes, also '/'. A
  // key is kept if `keep` is empty or one of its globs matches, and no glob of `drop` matches. Each
  // glob must match something.
  std::vector<std::string> keep = {};
  std::vector<std::string> drop = {};
  // Renames the remaining keys.
  KeyMap rename = {};
  // Whether each rule of `rename` must match a key. Useful for rules typed by hand; a file of rules
  // may be shared by checkpoints with different keys.
  bool renames_must_match = false;
  IfExists if_exists = IfExists::kFail;
};

struct DeriveReport {
  std::string path;  // STORE/NAME
  std::string uuid;
  std::uint64_t generation = 0;
  std::uint64_t tensors = 0;
  std::uint64_t objects = 0;  // Number of object parts.
  std::uint64_t dropped = 0;  // Tensors and object parts of the old checkpoint that were left out.
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_linked = 0;
  // Files copied because a link was refused; bytes_copied also counts data copied out of files of
  // which less than half is kept.
  std::uint64_t files_copied = 0;
  std::uint64_t bytes_copied = 0;
  std::string refused;  // Why a link was refused; empty: none.
};

// Makes a new checkpoint from an old one of the same store, by hard links: tensors and objects are
// dropped or renamed. Data are read, verified and copied only if less than half of their file is
// kept, or if the file cannot be linked. Common values are those of the old checkpoint, which
// becomes the parent of the new one. The new checkpoint has its own generation, but it is not the
// latest while a checkpoint that is not derived exists. `path`: "STORE/NEW"; `from`: a name in that
// store.
//   kNotFound         no such checkpoint, or a glob that matches nothing (named); a rename, too,
//                     with `renames_must_match`
//   kInvalidArgument  two keys become equal, a key is invalid, or is the name of a layer
//   kAlreadyExists    the name is taken
//   kDataLoss         needed data of the old checkpoint are damaged
//   kStale            the old checkpoint was replaced meanwhile
// Nothing is visible before it is complete and durable; gc deletes the files of a failed call.
TENSORMOUNT_EXPORT Result<DeriveReport> Derive(std::string_view path, std::string_view from,
                                               const DeriveOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_DERIVE_H_
