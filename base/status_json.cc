// SPDX-License-Identifier: Apache-2.0
// Failures as JSON, in one form for all interfaces.
#include "base/status_json.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tensormount {
namespace {

constexpr int kLargestErrno = 4095;  // The largest error number that Linux returns.

// The number `name`, or `none` if it is missing or outside [0, largest].
int NumberIn(const nlohmann::json& object, const char* name, int largest, int none) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_number_integer()) return none;
  const auto number = found->get<std::int64_t>();
  return number < 0 || number > largest ? none : static_cast<int>(number);
}

std::string TextIn(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || !found->is_string() ? std::string() : found->get<std::string>();
}

std::vector<std::int64_t> NumbersIn(const nlohmann::json& object, const char* name) {
  std::vector<std::int64_t> numbers;
  const auto found = object.find(name);
  if (found == object.end() || !found->is_array()) return numbers;
  for (const nlohmann::json& number : *found) {
    if (!number.is_number_integer()) return {};
    numbers.push_back(number.get<std::int64_t>());
  }
  return numbers;
}

}  // namespace

nlohmann::ordered_json StatusJson(const Status& failure) {
  const ErrorFields& fields = failure.fields();
  nlohmann::ordered_json json = {{"code", std::string(CodeName(failure.code()))},
                                 {"status", static_cast<int>(failure.code())},
                                 {"errno", failure.ToErrno()},
                                 {"message", failure.message()}};
  if (fields.rank >= 0) json["rank"] = fields.rank;
  if (!fields.key.empty()) json["key"] = fields.key;
  if (!fields.box_begin.empty()) {
    json["box"] = {{"begin", fields.box_begin}, {"extent", fields.box_extent}};
  }
  if (!fields.file.empty()) json["file"] = fields.file;
  if (!fields.cause.empty()) json["cause"] = fields.cause;
  if (fields.memory_in_use) json["memory_in_use"] = true;
  if (!fields.device.empty()) json["device"] = fields.device;
  return json;
}

Status StatusFromJson(std::string_view json, Status& failure) {
  const auto said = nlohmann::json::parse(json, nullptr, false);
  if (!said.is_object())
    return {Code::kInvalidArgument, "read an error from JSON: not a JSON object in UTF-8"};
  const int code = NumberIn(said, "status", static_cast<int>(Code::kInternal), 0);
  if (code == 0)
    return {Code::kInvalidArgument, "read an error from JSON: \"status\" is not an error code"};
  const auto message = said.find("message");
  if (message == said.end() || !message->is_string()) {
    return {Code::kInvalidArgument, "read an error from JSON: \"message\" is missing"};
  }
  ErrorFields fields;
  fields.rank = NumberIn(said, "rank", std::numeric_limits<int>::max() - 1, -1);
  fields.key = TextIn(said, "key");
  fields.file = TextIn(said, "file");
  fields.cause = TextIn(said, "cause");
  fields.device = TextIn(said, "device");
  const auto in_use = said.find("memory_in_use");
  fields.memory_in_use = in_use != said.end() && *in_use == true;
  if (const auto box = said.find("box"); box != said.end() && box->is_object()) {
    fields.box_begin = NumbersIn(*box, "begin");
    fields.box_extent = NumbersIn(*box, "extent");
    if (fields.box_begin.size() != fields.box_extent.size()) {
      fields.box_begin.clear();
      fields.box_extent.clear();
    }
  }
  failure = Status::FromParts(static_cast<Code>(code), NumberIn(said, "errno", kLargestErrno, 0),
                              message->get<std::string>())
                .With(fields);
  return {};
}

}  // namespace tensormount
