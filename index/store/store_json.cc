// SPDX-License-Identifier: Apache-2.0
// Listings and reports of a store as JSON.
#include "index/store/store_json.h"

#include <nlohmann/json.hpp>

namespace tensormount {

nlohmann::ordered_json ListingJson(const CheckpointListing& item, bool is_latest) {
  nlohmann::ordered_json json = {{"checkpoint", item.name},
                                 {"uuid", item.uuid.ToString()},
                                 {"generation", item.generation},
                                 {"latest", is_latest}};
  if (!item.problem.ok()) json["problem"] = item.problem.ToString();
  return json;
}

nlohmann::ordered_json GcJson(const Store::GcReport& report, bool dry_run) {
  return {{"removed", report.removed},
          {"kept", report.kept},
          {"failed", report.failed},
          {"bytes_freed", report.bytes_freed},
          {"dry_run", dry_run}};
}

}  // namespace tensormount
