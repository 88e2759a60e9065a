// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_STORE_JSON_H_
#define TENSORMOUNT_INDEX_STORE_STORE_JSON_H_

#include <nlohmann/json_fwd.hpp>

#include "tensormount/derive.h"
#include "tensormount/store_copy.h"
#include "tensormount/store_repair.h"

#include "index/store/costs.h"
#include "index/store/store.h"

// JSON of listings and reports of a store, for the command (--json) and the C interface.
// docs/cli.md lists the fields; later versions only add fields. Callers include
// <nlohmann/json.hpp>.

namespace tensormount {

// The JSON of one checkpoint, with its problem if it has one.
nlohmann::ordered_json ListingJson(const CheckpointListing& item, bool is_latest);
// Adds the cost and the time of the publish to the JSON of a checkpoint.
void AddCostJson(const CheckpointCost& cost, nlohmann::ordered_json& json);
// One line of the output of `copy`. The event is "copied", "there" or "failed".
nlohmann::ordered_json CopiedJson(const CopiedCheckpoint& one);
nlohmann::ordered_json DeriveJson(const DeriveReport& report);
nlohmann::ordered_json RepairJson(const RepairReport& report);
nlohmann::ordered_json GcJson(const Store::GcReport& report, bool dry_run);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_STORE_JSON_H_
