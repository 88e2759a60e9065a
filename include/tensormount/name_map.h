// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_NAME_MAP_H_
#define TENSORMOUNT_NAME_MAP_H_

#include <cstdint>
#include <map>
#include <string>

namespace tensormount {

// A name map: rules that give the tensors of a checkpoint other names, and put tensors together
// from parts of stored ones (docs/mapping.md). Nothing is copied; reads of a mapped tensor read the
// stored tensors. A value type.
struct NameMap {
  // JSON: a list of rules, or an object {"version": 1, "rules": [...]}.
  std::string rules = {};
  // The library's own rules to apply after `rules`, by the names that the result has. "hf": the
  // names of Hugging Face files; "hf:qwen3": of this family. "megatron:qwen3": those of this
  // trainer, from Hugging Face names or from those of another trainer.
  std::string as = {};
  // With `as`: the layout of the checkpoint, "megatron"; empty: it is found by its keys.
  std::string from = {};
  // Sizes that the rules use and shapes do not give, such as {"heads", 32}. They come before those
  // of the file, of `config` and of the checkpoint.
  std::map<std::string, std::int64_t> numbers = {};
  // The text of a model's config.json, in which "numbers" of the rules may look. May be empty.
  std::string config = {};

  // Whether there is no map.
  bool empty() const { return rules.empty() && as.empty(); }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_NAME_MAP_H_
