// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_NAMED_VALUES_H_
#define TENSORMOUNT_INDEX_RECORDS_NAMED_VALUES_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

namespace tensormount {

class CheckpointIndex;

// Places in which a name map looks for what shapes do not tell: "config.PATH" is a member of the
// model's config.json, "common.PATH" a common value of the checkpoint. Parts of a path are
// separated by dots. Not thread-safe; the arguments of the constructor must outlive the object.
class NamedValues {
 public:
  static bool IsPlace(std::string_view text);

  // `config`: the parsed config.json; null: there is none. `more`: common values that the
  // checkpoint itself does not have; null: none.
  NamedValues(const CheckpointIndex& index, const nlohmann::json* config, const CommonDict* more)
      : index_(index), config_(config), more_(more) {}

  // The value of a place, if it is a boolean, a number or a text; JSON's null if it is None or does
  // not exist; an empty object if it is something else, such as a list. Errors as for
  // CheckpointIndex::Common.
  Result<nlohmann::json> At(std::string_view place);
  // An integer, or a boolean as 0 or 1; nullopt: the place has neither.
  Result<std::optional<std::int64_t>> NumberAt(std::string_view place);

 private:
  const CheckpointIndex& index_;
  const nlohmann::json* config_;
  const CommonDict* more_;
  std::optional<CommonDict> common_;  // Read when it is needed.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_NAMED_VALUES_H_
