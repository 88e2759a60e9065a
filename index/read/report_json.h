// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_REPORT_JSON_H_
#define TENSORMOUNT_INDEX_READ_REPORT_JSON_H_

#include <nlohmann/json_fwd.hpp>

#include "index/read/checkpoint.h"
#include "index/read/compare.h"

// What verify and diff find, as the command (--json) and the C interface give it to programs.
// docs/cli.md lists the fields, which are only ever added. Include <nlohmann/json.hpp> where they
// are used.

namespace tensormount {

nlohmann::ordered_json DamageJson(const VerifyReport::Damage& damage);
// The numbers of a report; not its damages.
nlohmann::ordered_json VerifiedJson(const VerifyReport& report, bool quick);

nlohmann::ordered_json MismatchJson(const Mismatch& mismatch);
nlohmann::ordered_json ComparedJson(const CompareSummary& summary);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_REPORT_JSON_H_
