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
  // Globs over keys of tensors and objects as the old checkpoint has them; '*' stands for any
  // bytes, slashes too. Where `keep` is not empty only what matches one of it is kept; what matches
  // one of `drop` is not. Each must match something.
  std::vector<std::string> keep = {};
  std::vector<std::string> drop = {};
  // New keys for what is left.
  KeyMap rename = {};
  // Each rule of `rename` must match something, too: for rules that somebody typed. A file of rules
  // may speak of more than one checkpoint has.
  bool renames_must_match = false;
  IfExists if_exists = IfExists::kFail;
};

struct DeriveReport {
  std::string path;  // STORE/NAME
  std::string uuid;
  std::uint64_t generation = 0;
  std::uint64_t tensors = 0;
  std::uint64_t objects = 0;  // Parts.
  std::uint64_t dropped = 0;  // Tensors and object parts of the old one that are not here.
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_linked = 0;
  // Where links were refused, and live parts of files of which less than half is kept.
  std::uint64_t files_copied = 0;
  std::uint64_t bytes_copied = 0;
  std::string refused;  // Why a link was; empty: none.
};

// A new checkpoint of a store out of an old one of the same store, by hard links: tensors and
// objects are dropped or get other keys, no data are read but what is copied out of files that are
// mostly dropped, and that is compared with its hashes. Common values are those of the old one. It
// is a checkpoint like any other, with a generation of its own: the latest, until another is saved.
// Its parent is the old one. `path`: "STORE/NEW"; `from`: a name in that store.
//   kNotFound         no such checkpoint, or a glob or rename that matches nothing (named)
//   kInvalidArgument  two keys become one, a key that cannot be, or one that is the name of a layer
//   kAlreadyExists    that name is taken
//   kDataLoss         the old one is damaged in what is needed
// Nothing is visible before it is whole and durable; a failure leaves nothing.
TENSORMOUNT_EXPORT Result<DeriveReport> Derive(std::string_view path, std::string_view from,
                                               const DeriveOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_DERIVE_H_
