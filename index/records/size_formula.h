// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_SIZE_FORMULA_H_
#define TENSORMOUNT_INDEX_RECORDS_SIZE_FORMULA_H_

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "shard/axis_names.h"

namespace tensormount {

// A size computed from numbers of a model, such as "heads / groups": integers, names, + - * / and
// parentheses. A value type; immutable.
class SizeFormula {
 public:
  // kInvalidArgument: a syntax error, with its byte.
  static Result<SizeFormula> Parse(std::string_view text);
  // kInvalidArgument: a division with a remainder ("heads / groups: 30 is not a multiple of 8") or
  // by zero, a negative result, or more than 63 bits. kNotFound: a name in it has no value; the
  // message is only the name.
  Result<std::int64_t> Evaluate(const AxisSizes& numbers) const;
  const std::string& text() const { return text_; }
  // The names in it.
  const std::set<std::string>& names() const { return names_; }

 private:
  std::string text_;
  std::set<std::string> names_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_SIZE_FORMULA_H_
