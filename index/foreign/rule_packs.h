// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_RULE_PACKS_H_
#define TENSORMOUNT_INDEX_FOREIGN_RULE_PACKS_H_

#include <memory>
#include <span>
#include <string_view>

#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "index/read/checkpoint.h"
#include "index/records/name_rules.h"

// Rule packs: name maps that are part of the library, from the tensors of a trainer to the names of
// Hugging Face files, and back (index/foreign/packs/).

namespace tensormount {

// The text of a pack.
struct RulePack {
  std::string_view file;  // "qwen3.megatron.json"
  std::string_view json;
};
// All packs, in the order of their names.
std::span<const RulePack> RulePacks();

// The checkpoint as a name map shows it: by NameMap::rules, and then by the packs that NameMap::as
// names and the checkpoint's keys fit, lost ones included; `source` itself if `map` is empty. From
// one trainer's layout to another's there are two packs, through the names of Hugging Face.
// kInvalidArgument: an unknown name, no pack fits, or several do (the message names them).
// kDataLoss: the keys that choose a pack may be lost. Also the errors of OpenedCheckpoint::Mapped.
Result<std::shared_ptr<const OpenedCheckpoint>> ApplyNames(
    std::shared_ptr<const OpenedCheckpoint> source, const NameMap& map);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_RULE_PACKS_H_
