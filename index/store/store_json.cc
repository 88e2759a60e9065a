// SPDX-License-Identifier: Apache-2.0
// JSON of listings and reports of a store.
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

void AddCostJson(const CheckpointCost& cost, nlohmann::ordered_json& json) {
  json["created"] = cost.created;
  json["stored_bytes"] = cost.bytes;
  json["own_bytes"] = cost.own_bytes;
  json["shared_bytes"] = cost.shared_bytes();
}

nlohmann::ordered_json CopiedJson(const CopiedCheckpoint& one) {
  nlohmann::ordered_json json = {{"event", !one.status.ok() ? "failed"
                                           : one.was_there  ? "there"
                                                            : "copied"},
                                 {"checkpoint", one.name},
                                 {"uuid", one.uuid},
                                 {"generation", one.generation},
                                 {"bytes", one.bytes},
                                 {"files", one.files},
                                 {"bytes_copied", one.bytes_copied},
                                 {"files_copied", one.files_copied},
                                 {"bytes_linked", one.bytes_linked},
                                 {"files_linked", one.files_linked},
                                 {"bytes_kept", one.bytes_kept},
                                 {"files_kept", one.files_kept},
                                 {"links_refused", one.links_refused}};
  if (one.links_refused > 0) json["refusal"] = one.refusal;
  if (!one.status.ok()) {
    json["code"] = CodeName(one.status.code());
    json["message"] = one.status.message();
  }
  json["warnings"] = one.warnings;
  return json;
}

nlohmann::ordered_json DeriveJson(const DeriveReport& report) {
  return {{"path", report.path},
          {"uuid", report.uuid},
          {"generation", report.generation},
          {"tensors", report.tensors},
          {"objects", report.objects},
          {"dropped", report.dropped},
          {"files_linked", report.files_linked},
          {"bytes_linked", report.bytes_linked},
          {"files_copied", report.files_copied},
          {"bytes_copied", report.bytes_copied},
          {"refused", report.refused}};
}

nlohmann::ordered_json RepairJson(const RepairReport& report) {
  nlohmann::ordered_json json = {{"path", report.path},
                                 {"uuid", report.uuid},
                                 {"from", report.from},
                                 {"dry_run", report.dry_run},
                                 {"whole", report.left.empty()},
                                 {"bytes_checked", report.bytes_checked},
                                 {"files", nlohmann::json::array()},
                                 {"left", nlohmann::json::array()}};
  for (const RepairedFile& file : report.files) {
    json["files"].push_back(nlohmann::ordered_json{{"file", file.file},
                                                   {"damage", file.damage},
                                                   {"bytes_damaged", file.bytes_damaged},
                                                   {"bytes_repaired", file.bytes_repaired},
                                                   {"whole", file.whole},
                                                   {"shared_with", file.shared_with}});
  }
  for (const RepairLeft& left : report.left) {
    json["left"].push_back(nlohmann::ordered_json{{"file", left.file},
                                                  {"object", left.object},
                                                  {"offset", left.offset},
                                                  {"reason", left.reason}});
  }
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
