// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_WHERE_H_
#define TENSORMOUNT_MOUNT_TOOLS_WHERE_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "tensormount/status.h"

namespace tensormount::tools {

// A condition on tensors, `ls --where` (docs/numbers.md, "Conditions"):
//
//   condition  = all { "or" all }
//   all        = one { "and" one }
//   one        = "not" one | "(" condition ")" | FIELD OPERATOR VALUE
//   OPERATOR   = "=" | "==" | "!=" | "<" | "<=" | ">" | ">="     numbers and texts
//              | "~" | "!~"                                      a text and a glob
//   VALUE      = a number, a text in quotes, or a field of the same kind
//
// The value of a field may not be known; then a comparison with it is neither true nor false, and a
// tensor is listed only if the condition is true.
class Condition {
 public:
  // The value of a field of one tensor. nullopt: not known.
  using Value = std::variant<double, std::string>;
  using Lookup = std::function<std::optional<Value>(std::string_view field)>;
  enum class Kind { kNumber, kText };
  // The kind of a field; nullopt: there is no such field.
  using Fields = std::function<std::optional<Kind>(std::string_view field)>;

  // kInvalidArgument with the position and what was expected there.
  static Result<Condition> Parse(std::string_view text, const Fields& fields);

  // nullopt: neither true nor false, because values are not known.
  std::optional<bool> Holds(const Lookup& lookup) const;

  struct Node;

 private:
  std::shared_ptr<const Node> root_;
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_WHERE_H_
