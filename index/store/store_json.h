// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_STORE_JSON_H_
#define TENSORMOUNT_INDEX_STORE_STORE_JSON_H_

#include <nlohmann/json_fwd.hpp>

#include "tensormount/derive.h"
#include "tensormount/store_copy.h"
#include "tensormount/store_repair.h"

#include "index/store/costs.h"
#include "index/store/store.h"

// What a store says of itself, as the command (--json) and the C interface give it to programs.
// docs/cli.md lists the fields, which are only ever added. Include <nlohmann/json.hpp> where they
// are used.

namespace tensormount {

// One checkpoint; with its problem, if it has one.
nlohmann::ordered_json ListingJson(const CheckpointListing& item, bool is_latest);
// Adds what it costs, and since when it is there.
void AddCostJson(const CheckpointCost& cost, nlohmann::ordered_json& json);
// A line of `copy`: its event is copied, there or failed.
nlohmann::ordered_json CopiedJson(const CopiedCheckpoint& one);
nlohmann::ordered_json DeriveJson(const DeriveReport& report);
nlohmann::ordered_json RepairJson(const RepairReport& report);
nlohmann::ordered_json GcJson(const Store::GcReport& report, bool dry_run);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_STORE_JSON_H_
