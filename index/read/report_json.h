// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_REPORT_JSON_H_
#define TENSORMOUNT_INDEX_READ_REPORT_JSON_H_

#include <nlohmann/json_fwd.hpp>

#include "index/read/checkpoint.h"
#include "index/read/compare.h"
#include "index/read/statistics.h"

// JSON of the results of verify, diff and stats --full, for the command (--json) and the C
// interface. docs/cli.md lists the fields; later versions only add fields. Callers include
// <nlohmann/json.hpp>.

namespace tensormount {

nlohmann::ordered_json DamageJson(const VerifyReport::Damage& damage);
// The counters of a report, without its damages.
nlohmann::ordered_json VerifiedJson(const VerifyReport& report, bool quick);

nlohmann::ordered_json MismatchJson(const Mismatch& mismatch);
// `stats`: with the change of all tensors (CompareOptions::stats).
nlohmann::ordered_json ComparedJson(const CompareSummary& summary, bool stats = false);

nlohmann::ordered_json StatisticsJson(const TensorEntry& tensor, const TensorStatistics& statistics,
                                      bool known);
nlohmann::ordered_json MeasuredJson(const StatisticsSummary& summary);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_REPORT_JSON_H_
