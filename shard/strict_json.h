// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_STRICT_JSON_H_
#define TENSORMOUNT_SHARD_STRICT_JSON_H_

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/status.h"

// JSON from outside (RFC 8259): one text, UTF-8, no key twice in an object, bounded depth and
// number of values. Include <nlohmann/json.hpp> where the results are used.

namespace tensormount {

struct JsonLimits {
  std::size_t max_depth = 32;
  // In memory at a time: a value takes some 16 to 64 bytes.
  std::size_t max_values = std::size_t{1} << 20;
};

// What no parser asks: UTF-8, no NUL (nlohmann's takes one for the end), begins with '{' after
// white space. kDataLoss says which; messages have no context.
Status CheckJsonText(std::string_view text);

// An object. kDataLoss: the above, syntax ("byte 17: ..."), a key that occurs twice, too deep;
// kResourceExhausted: too many values.
Result<nlohmann::json> ParseStrictJson(std::string_view text, const JsonLimits& limits = {});

// The same, but the members of the object under `key` are handed over one by one, each with limits
// of its own, and are not in the result: a table of a million tensors is never held as a tree. An
// error of `member` ends the parse and is returned.
using JsonMember = std::function<Status(const std::string& name, nlohmann::json& value)>;
Result<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view key,
                                       const JsonMember& member, const JsonLimits& limits = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_STRICT_JSON_H_
