// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_MADE_CONFIG_H_
#define TENSORMOUNT_INDEX_RECORDS_MADE_CONFIG_H_

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/status.h"

#include "shard/axis_names.h"

namespace tensormount {

class CheckpointIndex;
class NamedValues;

// The config.json of a model, made from what its trainer saved by the "config" of a name map
// (docs/mapping.md).
struct MadeConfig {
  std::string text;  // Empty: it cannot be made.
  std::string why;   // Why not: the place that has no value, or another one than the rules are for.

  // Sentence about a file that cannot be made.
  std::string Missing() const {
    return "there is no config.json, which transformers needs, because " + why +
           ": give the model's directory by --with";
  }

  // Whether `rules` is a valid "config". kInvalidArgument names the member.
  static Status Check(const nlohmann::json& rules);
  // `rules`: a valid "config". `numbers`: those of the name map. `index`: the mapped checkpoint,
  // for the types of its tensors. Errors as for NamedValues::At and CheckpointIndex::Find.
  static Result<MadeConfig> Make(const nlohmann::json& rules, NamedValues& places,
                                 const AxisSizes& numbers, const CheckpointIndex& index);
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_MADE_CONFIG_H_
