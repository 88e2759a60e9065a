// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_COMMON_TREE_H_
#define TENSORMOUNT_INDEX_COMMON_TREE_H_

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
std::string FloatText(double value);

// What a key adds to the path of its dict: `lr` (first: no dot), `.lr`, `."a.b"`, `{3}`.
std::string CommonPathPart(const CommonKey& key, bool first);

// By path; null: compare everything.
using CommonExempt = std::function<bool(std::string_view path)>;

// FirstDifference of two values that stand at `path`, without the entries of dicts, at any depth,
// whose path `exempt` names.
std::optional<CommonDifference> FirstDifferenceAt(std::string path, const CommonValue& a,
                                                  const CommonValue& b, const CommonExempt& exempt);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_COMMON_TREE_H_
