// SPDX-License-Identifier: Apache-2.0
// Untrusted JSON: depth and number of values are bounded, and keys are unique.
#include "shard/strict_json.h"

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "shard/utf8.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

// Builds a tree from the parser's events, or stops at the first violation.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view stream, const JsonMember* member, const JsonLimits& limits)
      : stream_(stream), member_(member), limits_(limits) {}

  Json root;
  Status error;

  bool null() override { return Put(Json()); }
  bool boolean(bool value) override { return Put(Json(value)); }
  bool number_integer(number_integer_t value) override { return Put(Json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Put(Json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return Put(Json(value)); }
  bool string(string_t& value) override { return Put(Json(std::move(value))); }
  bool binary(binary_t&) override { return Fail("binary"); }

  bool start_object(std::size_t) override { return Open(Json::object()); }
  bool start_array(std::size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  // Refuses duplicate keys: nlohmann's own tree would keep the second value, other parsers the
  // first.
  bool key(string_t& name) override {
    Level& level = levels_.back();
    const bool fresh = IsStreaming() ? streamed_.insert(name).second : !level.value.contains(name);
    if (!fresh) return Fail("key '" + name.substr(0, 256) + "' occurs twice");
    level.key = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& e) override {
    return Fail("byte " + std::to_string(position) + ": " + e.what());
  }

 private:
  struct Level {
    Json value;
    std::string key;  // Key of the next member.
  };

  // Whether the innermost open container is the one whose members are passed to the caller.
  bool IsStreaming() const {
    return member_ != nullptr && levels_.size() == 2 && levels_[0].key == stream_ &&
           levels_[1].value.is_object();
  }

  bool Fail(const std::string& why) {
    if (error.ok()) error = Status(Code::kDataLoss, "JSON: " + why);
    return false;
  }

  // Counts a value against JsonLimits::max_values, which limits the values in memory. Members that
  // were passed to the caller are not in memory any more.
  bool Count() {
    if (++values_ <= limits_.max_values) return true;
    error = Status(Code::kResourceExhausted,
                   "JSON: more than " + std::to_string(limits_.max_values) + " values");
    return false;
  }

  bool Open(Json&& container) {
    if (levels_.size() == limits_.max_depth) {
      return Fail("nested deeper than " + std::to_string(limits_.max_depth) + " levels");
    }
    levels_.push_back({std::move(container), {}});
    if (!Count()) return false;
    if (IsStreaming()) values_outside_ = values_;
    return true;
  }

  bool Close() {
    Json value = std::move(levels_.back().value);
    levels_.pop_back();
    --values_;  // Put counts the closed container again.
    return Put(std::move(value));
  }

  // Adds a complete value to its container, passes it to the caller, or makes it the result.
  bool Put(Json&& value) {
    if (levels_.empty()) {
      root = std::move(value);
      return true;
    }
    if (!Count()) return false;
    Level& level = levels_.back();
    if (IsStreaming()) {
      error = (*member_)(level.key, value);
      values_ = values_outside_;
      return error.ok();
    }
    if (level.value.is_array()) {
      level.value.push_back(std::move(value));
    } else {
      level.value[std::move(level.key)] = std::move(value);
      level.key.clear();
    }
    return true;
  }

  std::string_view stream_;
  const JsonMember* member_;
  const JsonLimits& limits_;
  std::vector<Level> levels_;  // Open containers, outermost first.
  std::unordered_set<std::string> streamed_;
  std::size_t values_ = 0;
  std::size_t values_outside_ = 0;  // Those of `values_` that are not in a streamed member.
};

Result<Json> Parse(std::string_view text, std::string_view stream, const JsonMember* member,
                   const JsonLimits& limits) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckJsonText(text));
  Builder builder(stream, member, limits);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return builder.error.ok() ? Status(Code::kDataLoss, "JSON: cannot be parsed") : builder.error;
  }
  return std::move(builder.root);
}

}  // namespace

Status CheckJsonText(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos || text[first] != '{') {
    return Status(Code::kDataLoss, "does not begin with '{'");
  }
  if (!IsUtf8(text)) return Status(Code::kDataLoss, "is not UTF-8");
  if (text.find('\0') != std::string_view::npos) {
    return Status(Code::kDataLoss, "contains a NUL byte");
  }
  return Status();
}

Result<Json> ParseStrictJson(std::string_view text, const JsonLimits& limits) {
  return Parse(text, {}, nullptr, limits);
}

Result<Json> ParseStrictJson(std::string_view text, std::string_view key, const JsonMember& member,
                             const JsonLimits& limits) {
  return Parse(text, key, &member, limits);
}

}  // namespace tensormount
