// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_COMMON_TREE_H_
#define TENSORMOUNT_INDEX_RECORDS_COMMON_TREE_H_

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

// What the code of common values shares beyond the public header.

namespace tensormount {

// A JSON string with its quotes; bytes that are no UTF-8 become U+FFFD.
std::string QuoteJson(std::string_view text);
// Of a JSON string with its quotes. kInvalidArgument.
Result<std::string> UnquoteJson(std::string_view text);

// The shortest text that reads back as this finite number, always with '.' or 'e'.
// So 1.0 and 1 stay apart in JSON and in messages.
std::string FloatText(double value);

// What a key adds to the path of its dict: `lr` (first: no dot), `.lr`, `."a.b"`, `{3}`.
std::string CommonPathPart(const CommonKey& key, bool first);

// By path; null: compare everything.
// Says which entries of dicts are not compared. Called with the path of each, before its value is
// looked at, so that it must be cheap.
using CommonExempt = std::function<bool(std::string_view path)>;

// A difference in its two sides, for callers that know more of them than first and second.
// Two users, two wordings: FirstDifference says "in the second", the check before a save names the
// ranks that hold each side.
struct CommonSides {
  enum class Kind { kValues, kOnlyFirst, kOnlySecond };
  std::string path;
  Kind kind = Kind::kValues;
  std::string first;  // Of kValues, as people read it: "0.1", "int 1", "has 2 items".
  std::string second;

  // "0.1 on rank 0 and 0.2 on rank 3", "only on rank 3".
  std::string What(std::string_view where_first, std::string_view where_second) const;
};

// The first difference of two values that stand at `path`, without the entries of dicts, at any
// depth, whose path `exempt` names.
// Stops at the first one: linear in the size of the trees, and cheap where they are equal, as they
// are in nearly every save.
std::optional<CommonSides> CompareAt(std::string path, const CommonValue& a, const CommonValue& b,
                                     const CommonExempt& exempt);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMMON_TREE_H_
