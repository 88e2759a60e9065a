// SPDX-License-Identifier: Apache-2.0
// Failures as JSON, in one form for all who give it to programs.
#include "base/status_json.h"

#include <string>

#include <nlohmann/json.hpp>

namespace tensormount {

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

}  // namespace tensormount
