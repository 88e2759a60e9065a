// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_STATUS_JSON_H_
#define TENSORMOUNT_BASE_STATUS_JSON_H_

#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/status.h"

namespace tensormount {

// The JSON form of a failure for the command (--json) and the C interface: {"code", "status",
// "errno", "message"} and the known ErrorFields. Callers include <nlohmann/json.hpp>, and dump with
// error_handler_t::replace, because names from outside may not be UTF-8.
nlohmann::ordered_json StatusJson(const Status& failure);

// Parses a failure that a program wrote in this form: "status" and "message" are required, unknown
// members are ignored. kInvalidArgument: `json` is not an object, or a required member is missing
// or invalid.
Status StatusFromJson(std::string_view json, Status& failure);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_STATUS_JSON_H_
