// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_STATUS_JSON_H_
#define TENSORMOUNT_BASE_STATUS_JSON_H_

#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/status.h"

namespace tensormount {

// A failure as the command (--json) and the C interface give it to programs: {"code", "status",
// "errno", "message"} and the fields that are known. Include <nlohmann/json.hpp> where it is used;
// names in it come from outside and may be no UTF-8 (dump with error_handler_t::replace).
nlohmann::ordered_json StatusJson(const Status& failure);

// The other way, from what programs say: "status" and "message" must be there, all else may be.
// Members that it does not know are ignored. kInvalidArgument: `json` is no object, or lacks these.
Status StatusFromJson(std::string_view json, Status& failure);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_STATUS_JSON_H_
