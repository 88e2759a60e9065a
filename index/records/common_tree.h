// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_COMMON_TREE_H_
#define TENSORMOUNT_INDEX_RECORDS_COMMON_TREE_H_

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

// Functions for common values that the public API does not have.

namespace tensormount {

// `text` as a JSON string with quotes. Invalid UTF-8 becomes U+FFFD.
std::string QuoteJson(std::string_view text);
// Inverse of QuoteJson. kInvalidArgument if `text` is not a JSON string.
Result<std::string> UnquoteJson(std::string_view text);

// The shortest text that reads back as this finite number. It always contains '.' or 'e', so that
// 1.0 and 1 differ in JSON and in messages.
std::string FloatText(double value);

// The part that a key adds to a path: `lr` (first part: no dot), `.lr`, `."a.b"`, `{3}`.
std::string CommonPathPart(const CommonKey& key, bool first);

// Decides whether a comparison skips the dict entry at `path`. A null function skips nothing.
// Called for each entry before its value is compared, so the function must be cheap.
using CommonExempt = std::function<bool(std::string_view path)>;

// A difference between two common values: its path, and both sides as text. `diff` names the sides
// "in the first" and "in the second"; the check before a save names the ranks of each side.
struct CommonSides {
  enum class Kind { kValues, kOnlyFirst, kOnlySecond };
  std::string path;
  Kind kind = Kind::kValues;
  std::string first;  // The first value as text, for kValues: "0.1", "int 1", "has 2 items".
  std::string second;

  // Both sides for a message: "0.1 on rank 0 and 0.2 on rank 3", or "only on rank 3".
  std::string SidesText(std::string_view where_first, std::string_view where_second) const;
};

// Finds the first difference between two values at `path`. Dict entries that `exempt` selects, at
// any depth, are not compared. Linear in the trees' size, and fast for equal trees, which nearly
// every save has.
std::optional<CommonSides> CompareAt(std::string path, const CommonValue& a, const CommonValue& b,
                                     const CommonExempt& exempt);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMMON_TREE_H_
