// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_STRICT_JSON_H_
#define TENSORMOUNT_SHARD_STRICT_JSON_H_

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/status.h"

// Untrusted JSON (RFC 8259): one text, UTF-8, no duplicate keys, bounded depth and number of
// values. Users include <nlohmann/json.hpp>.

namespace tensormount {

struct JsonLimits {
  std::size_t max_depth = 32;
  // Largest number of values in memory at a time; a value takes some 16 to 64 bytes.
  std::size_t max_values = std::size_t{1} << 20;
};

// Checks properties of a text that parsers do not check: UTF-8, no NUL (which ends the text for
// nlohmann's parser), '{' as the first character after white space. kDataLoss names the violated
// property, but not the file.
Status CheckJsonText(std::string_view text);

// Parses an object. kDataLoss: an error of CheckJsonText, invalid syntax ("byte 17: ..."), a
// duplicate key, nested too deep; kResourceExhausted: too many values.
Result<nlohmann::json> ParseStrictJson(std::string_view text, const JsonLimits& limits = {});

// Like ParseStrictJson above, but passes the members of the object under `key` to `member` one by
// one, and leaves them out of the result: a table of a million tensors is never held as a tree.
// `max_values` counts each member separately. An error of `member` ends the parse and is returned.
using JsonMember = std::function<Status(const std::string& name, nlohmann::json& value)>;
Result<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view key,
                                       const JsonMember& member, const JsonLimits& limits = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_STRICT_JSON_H_
