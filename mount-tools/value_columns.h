// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_VALUE_COLUMNS_H_
#define TENSORMOUNT_MOUNT_TOOLS_VALUE_COLUMNS_H_

#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "index/read/statistics.h"
#include "index/records/checkpoint_index.h"
#include "mount-tools/where.h"
#include "shard/value_counts.h"

// How commands show the value counts of a tensor, and look for tensors by them.

namespace tensormount::tools {

// "zeros", "nan", "posinf", "neginf" and "absmax" (null without a finite value), as in the listing
// of a tensor; null: not known.
void AddCountsJson(const TensorMeta& meta, const std::optional<ValueCounts>& counts,
                   nlohmann::ordered_json& json);

// The largest magnitude of the finite values as text; "-" if there is none.
std::string AbsmaxText(const TensorMeta& meta, const ValueCounts& counts);

// The heading of the next columns, and those of one tensor: zeros, NaNs, infinities and largest
// magnitude; "?" if they are not known.
std::string CountsHeading();
std::string CountsColumns(const TensorMeta& meta, const std::optional<ValueCounts>& counts);

// The fields of a condition on tensors (docs/numbers.md, "Conditions").
std::optional<Condition::Kind> KindOfField(std::string_view field);
// The value of a field of a tensor. `full`: the statistics that `stats --full` kept; null: none.
std::optional<Condition::Value> FieldOf(const TensorEntry& tensor,
                                        const std::optional<ValueCounts>& counts,
                                        const TensorStatistics* full, std::string_view field);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_VALUE_COLUMNS_H_
